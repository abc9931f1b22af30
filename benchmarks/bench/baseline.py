"""What has changed since another sweep, beyond the noise of both. Nothing is printed."""

import statistics
from dataclasses import dataclass

from bench.analysis import Analysis, Row, noisy_by
from bench.records import finite, tolerance_of

# The numbers of Run that are compared.
COMPARED = {"step_time_ms": "step time", "peak_memory_gib": "memory", "bytes_sent_per_step": "sent"}


@dataclass
class Change:
    """One number of a strategy, new over old; `beyond` None where no noise is known for it."""

    name: str
    ratio: float
    beyond: bool | None


@dataclass
class Pair:
    """A strategy that both sweeps have: its numbers; flags and verdict where they changed."""

    row: Row
    changes: list[Change | None]  # of COMPARED, and of the loss; None for what one of both lacks
    other: dict[str, tuple[str, str]]  # (old, new) by "flags" and "verdict"


@dataclass
class Comparison:
    folder: str  # of the older sweep
    pairs: list[Pair]
    only_new: list[Row]
    only_old: list[Row]
    conditions: list[tuple[str, str, str]]  # name, old, new, of those that both have

    @property
    def beyond_noise(self) -> list[tuple[str, str]]:
        """Return what changed beyond the noise, a strategy and the name of a number each."""
        return [(pair.row.label, change.name) for pair in self.pairs for change in pair.changes
                if change and change.beyond]  # fmt: skip


def compare(new: Analysis, old: Analysis) -> Comparison:
    """Set each strategy beside itself in an older sweep: same job, ranks and link."""
    before = {(row.group, row.label): row for row in old.rows}
    after = {(row.group, row.label): row for row in new.rows}
    memory = wider(new.memory_noise, old.memory_noise)
    pairs = []
    for key, row in after.items():
        if key in before:
            time = wider(*(found.noises[noisy_by(row.group)].width for found in (new, old)))
            pairs.append(pair_of(row, before[key], (time, memory, 0.0)))
    return Comparison(
        str(old.sweep.folder),
        pairs,
        [row for key, row in after.items() if key not in before],
        [row for key, row in before.items() if key not in after],
        [(name, value, new.conditions[name]) for name, value in old.conditions.items()
         if new.conditions.get(name, value) != value],
    )  # fmt: skip


def wider(*widths: float | None) -> float | None:
    """Return the larger width; None where one of them is not known."""
    return None if None in widths else max(widths)


def pair_of(new: Row, old: Row, widths: tuple[float | None, ...]) -> Pair:
    """Compare two rows, with the noise of each of COMPARED; bytes have none, they are counted."""
    changes: list[Change | None] = []
    for (name, words), width in zip(COMPARED.items(), widths, strict=True):
        was, now = old.median(name), new.median(name)
        if was is None or now is None:
            changes.append(None)
            continue
        beyond = None if width is None else max(was, now) > min(was, now) * (1 + width)
        changes.append(Change(words, ratio(now, was), beyond))
    changes.append(change_of_loss(new, old))
    both = {
        "flags": (flags_of(old), flags_of(new)),
        "verdict": (old.verdict.kind, new.verdict.kind),
    }
    return Pair(new, changes, {name: said for name, said in both.items() if len(set(said)) > 1})


def change_of_loss(new: Row, old: Row) -> Change | None:
    """Compare the losses after the last step, and those of the first ones; None without."""
    finals = [[run.final_loss for run in row.runs if finite(run.final_loss)] for row in (old, new)]
    if not all(finals):
        return None
    before, now = map(statistics.median, finals)
    allowed = tolerance_of(new.group)
    apart = [abs(a - b) for a, b in zip(new.runs[0].losses, old.runs[0].losses, strict=False)]
    early = max(filter(finite, apart), default=0.0)
    beyond = abs(now - before) > allowed.final or early > allowed.early
    return Change("loss", ratio(now, before), beyond)


def ratio(new: float, old: float) -> float:
    return new / old if old else (1.0 if new == old else float("inf"))


def flags_of(row: Row) -> str:
    """Return the script and its flags, as the sweep started it."""
    point = row.runs[0].record["point"]
    return " ".join(map(str, (point.get("script", ""), *(point.get("flags") or ()))))
