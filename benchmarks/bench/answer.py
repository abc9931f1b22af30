"""Which strategy to take, as far as what a sweep measured tells. Nothing is printed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench import strategies
from bench.analysis import Analysis, Row
from bench.records import UNCOMPARED
from bench.store import OK
from bench.strategies import REFERENCE

CLEARLY_LESS = 0.9  # of the memory of the strategy to take
AS_LITTLE = 1.05  # of the least memory: of those the simplest is named
STATE = ("weights", "gradients", "optimizer")


@dataclass
class Answer:
    """The strategy to take in one group, or what is missing to name one."""

    group: list[Row]
    row: Row | None = None
    tied: list[Row] = field(default_factory=list)  # not told apart from the fastest; with `row`
    lean: Row | None = None  # takes clearly less memory than `row`
    missing: str = ""


def answers(analysis: Analysis) -> list[Answer]:
    """Return an answer for each group that has more than the reference."""
    order = list(strategies.load())
    groups = [rows for rows in analysis.groups if any(row.label != REFERENCE for row in rows)]
    return [answer_of(rows, analysis.comparable, order) for rows in groups]


def answer_of(rows: list[Row], comparable: bool, order: Sequence[str]) -> Answer:
    """Return the fastest of a group, or the simplest of those not told apart from it.

    `order` is that of strategies.toml, from simple to complicated; others come after it.
    """

    def simplicity(row: Row) -> tuple[int, int, float]:
        name = row.label.partition(" ")[0]  # a search adds its choices
        place = order.index(name) if name in order else len(order)
        return place, len(row.label.split()), row.step_time_ms or 0.0

    right = [row for row in rows if row.verdict.ranked]
    timed = [row for row in right if row.timed_repeats > 1]
    tied = [row for row in timed if row.place.partition("-")[0] == "1"] or timed
    if missing := missing_of(rows, right, timed, comparable):
        return Answer(rows, missing=missing)
    tied.sort(key=simplicity)
    return Answer(rows, tied[0], tied, leaner(tied[0], sorted(right, key=simplicity)))


def missing_of(rows, right, timed, comparable: bool) -> str:
    """Say in words what keeps a group from having an answer; nothing if it has one."""
    if not comparable:
        return "points of several machines or versions do not compare: measure in a new folder"
    if not right and any(row.verdict.kind == UNCOMPARED for row in rows):
        return "no loss to compare with: run single too, or three exact strategies"
    if not right:
        kinds = {row.verdict.kind for row in rows}
        return f"no exact strategy has the right loss: {', '.join(sorted(kinds - {OK}))}"
    if not timed:
        return "nothing ran twice, so noise is not known: use --repeats 3"
    return f"{rows[0].label} is alone: name another one to compare" if len(rows) == 1 else ""


def leaner(row: Row, simplest_first: Sequence[Row]) -> Row | None:
    """Return the simplest of those that take the least memory, if that is clearly less."""
    memory = memory_of(row)
    known = [(other, size) for other in simplest_first if (size := memory(other)) is not None]
    if memory(row) is None:
        return None
    least = min(size for _, size in known)
    if least >= CLEARLY_LESS * memory(row):
        return None
    return next(other for other, size in known if size <= AS_LITTLE * least)


def is_on_gpu(row: Row) -> bool:
    return row.median("gpu_memory_gib") is not None


def memory_of(row: Row) -> Callable[[Row], float | None]:
    """Return how memory is compared with a row's, in GiB on the rank with most.

    On a GPU by the peak; on the CPU by weights, gradients and optimizer state, since what a process
    holds there is mostly its libraries.
    """
    if is_on_gpu(row):
        return lambda other: other.median("peak_memory_gib")
    return lambda other: other.memory(*STATE)
