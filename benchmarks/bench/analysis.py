"""What the records of a sweep say: noise, places, scaling. Nothing is printed.

The order of records in a file never matters: everything is sorted by what was measured.
"""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench import records
from bench.records import LOSSY, UNCOMPARED, Group, Run, Verdict, median
from bench.store import OK, Sweep
from bench.strategies import REFERENCE

COMMON = "ddp"  # what other strategies are set beside
MAY_VARY = ("backend",)  # within a sweep: offload adds one for the CPU


@dataclass
class Row:
    """The repeats of one strategy in one group."""

    label: str
    group: Group
    runs: list[Run]
    verdict: Verdict
    place: str = ""  # by step time: "1", or "2-4" where the noise leaves it open
    against_ddp: float | None = None  # tokens/s over those of COMMON

    def median(self, name: str) -> float | None:
        """Return the median over repeats of a number of Run."""
        return median(getattr(run, name) for run in self.runs)

    @property
    def step_time_ms(self) -> float | None:
        return self.median("step_time_ms")

    @property
    def timed_repeats(self) -> int:
        return sum(run.step_time_ms is not None for run in self.runs)

    def percentile_ms(self, percent: int) -> float | None:
        """Return a percentile of the timed steps of all repeats."""
        times = [ms for run in self.runs for ms in run.times_ms]
        return float(np.percentile(times, percent)) if times else None

    def memory(self, *parts: str) -> float | None:
        """Return GiB of some of PARTS, each the median over repeats; None if one is not known."""
        found = [median(run.memory_gib.get(part) for run in self.runs) for part in parts]
        return None if None in found else sum(found)

    def spread(self, name: str) -> float | None:
        """Return max/min - 1 over repeats of a number of Run; None with fewer than two."""
        values = [value for run in self.runs if (value := getattr(run, name)) is not None]
        return max(values) / min(values) - 1 if len(values) > 1 and min(values) > 0 else None


@dataclass
class Noise:
    """The largest spread between repeats of one strategy; None where nothing was repeated."""

    width: float | None
    row: Row | None


@dataclass
class Scaling:
    """Step times in ms and efficiencies (1 is ideal) of a strategy, by world size."""

    row: Row
    times_ms: dict[int, float]
    efficiency: dict[int, float]


@dataclass
class Analysis:
    sweep: Sweep
    groups: list[list[Row]]  # the rows of a group in the order of the tables
    noise: Noise  # the widest
    noises: dict[tuple, Noise]  # by what noisy_by returns
    memory_noise: float | None
    scaling: list[list[Scaling]]  # by job and link
    conditions: dict[str, str]  # machine, versions, device
    warnings: list[str]  # damaged lines; points of several machines or versions

    @property
    def rows(self) -> list[Row]:
        return [row for rows in self.groups for row in rows]

    @property
    def runs(self) -> list[Run]:
        return [run for row in self.rows for run in row.runs]


def analyse(sweep: Sweep) -> Analysis:
    """Compute all that a report shows of the training points of a sweep."""
    found = records.conditions(sweep)
    runs = [records.read_run(record, sweep) for record in sweep.records
            if record["point"].get("kind", "train") == "train"]  # fmt: skip
    runs.sort(key=lambda run: (run.group.sort_key(), run.strategy,
                               run.record.get("repeat", 0), run.record["id"]))  # fmt: skip
    records.judge(runs)
    groups = [rows_of(list(own)) for _, own in itertools.groupby(runs, lambda run: run.group)]
    every = [row for rows in groups for row in rows]
    noises = {key: noise_of([row for row in every if noisy_by(row.group) == key])
              for key in dict.fromkeys(noisy_by(row.group) for row in every)}  # fmt: skip
    mixed = [f"{name} {' and '.join(values)}" for name, values in found.items()
             if len(values) > 1 and name not in MAY_VARY]  # fmt: skip
    warnings = list(sweep.warnings)
    if mixed:  # as when it resumed after an upgrade
        said = "holds points of several machines or versions, so nothing has a place"
        warnings.append(f"{sweep.folder} {said}: {'; '.join(mixed)}")
    for rows in groups:
        give_places(rows, None if mixed else noises[noisy_by(rows[0].group)].width)
    spreads = (row.spread("peak_memory_gib") for row in every)
    memory_noise = max((spread for spread in spreads if spread is not None), default=None)
    scaling = scaling_of(every, sweep.settings.get("scaling") == "weak")
    known = {name: ", ".join(values) for name, values in found.items()}
    return Analysis(sweep, groups, noise_of(every), noises, memory_noise, scaling, known, warnings)


def noisy_by(group: Group) -> tuple:
    """Return what points have in common whose noise is alike: a small model's is no large one's."""
    return group.preset, group.precision, group.link


def rows_of(runs: Sequence[Run]) -> list[Row]:
    """Gather the runs of a group, sorted by strategy, in a row for each."""
    rows = []
    for strategy, repeats in itertools.groupby(runs, lambda run: run.strategy):
        own = list(repeats)
        rows.append(Row(strategy, own[0].group, own, worst(own)))
    speeds = {row.label: row.median("tokens_per_second") for row in rows}
    for row in rows:
        if speeds[row.label] and speeds.get(COMMON):
            row.against_ddp = speeds[row.label] / speeds[COMMON]
    return rows


def worst(runs: Sequence[Run]) -> Verdict:
    """Return the worst verdict of a strategy's repeats; say how many there are, if not all."""
    found = max(runs, key=lambda run: (run.verdict.severity, abs(run.loss_difference or 0))).verdict
    alike = sum(run.verdict.kind == found.kind for run in runs)
    if alike == len(runs) or found.ranked:
        return found
    return Verdict(found.kind, f"{found.words} ({alike} of {len(runs)} repeats)", found.difference)


def noise_of(rows: Sequence[Row]) -> Noise:
    """Return the width of the noise, from all strategies whose points ran more than once."""
    known = [(spread, row) for row in rows if (spread := row.spread("step_time_ms")) is not None]
    return Noise(*max(known, key=lambda found: found[0], default=(None, None)))


def give_places(rows: list[Row], width: float | None) -> None:
    """Give exact strategies that ran more than once a place by step time; sort the rows.

    A place is open as far as the noise leaves it: "2-4" if one strategy is faster beyond the noise,
    and all but four are slower beyond it. Places that share no number differ beyond the noise.
    """
    timed = []
    if width is not None:
        timed = [row for row in rows if row.verdict.ranked and row.timed_repeats > 1]
        timed.sort(key=lambda row: row.step_time_ms)
    for row in timed if len(timed) > 1 else ():
        first = 1 + sum(beyond(other, row, width) for other in timed)
        last = len(timed) - sum(beyond(row, other, width) for other in timed)
        row.place = str(first) if first == last else f"{first}-{last}"
    order = {id(row): number for number, row in enumerate(timed)}
    rows.sort(key=lambda row: (order.get(id(row), len(order)), row.verdict.severity, row.label))


def beyond(fast: Row, slow: Row, width: float) -> bool:
    """Say whether `fast` takes less time than `slow`, by more than the noise."""
    return fast.step_time_ms * (1 + width) < slow.step_time_ms


def scaling_of(rows: Sequence[Row], weak: bool) -> list[list[Scaling]]:
    """Return how each job's strategies scale, where there are several world sizes.

    Efficiency is tokens/s per rank over those of `single`; over those of a strategy's own fewest
    ranks where `single` did not run. Strong scaling keeps the global batch, weak scaling the
    batch of a rank. Rows that are wrong or failed have no efficiency.
    """
    jobs: dict[tuple, dict[str, dict[int, Row]]] = defaultdict(lambda: defaultdict(dict))
    alone: dict[tuple, Row] = {}
    for row in rows:
        group = row.group
        batch = group.global_batch_size / (group.world_size if weak else 1)
        job = group._replace(global_batch_size=batch).job  # the same while the ranks grow
        counted = row.verdict.kind in (OK, LOSSY, UNCOMPARED) and row.median("tokens_per_second")
        if counted and row.label == REFERENCE:
            alone[job] = row
        elif counted:
            jobs[job, group.link][row.label][group.world_size] = row
    found = []
    for (job, _), by_label in jobs.items():
        lines = [scale(own, alone.get(job)) for _, own in sorted(by_label.items())]
        if len({ranks for line in lines for ranks in line.times_ms}) > 1:
            found.append(lines)
    return found


def scale(own: dict[int, Row], reference: Row | None) -> Scaling:
    """Return how a strategy scales from `reference`, one process, or from its own fewest ranks."""
    by_ranks = {1: reference} | own if reference else own
    speeds = {ranks: row.median("tokens_per_second") / ranks for ranks, row in by_ranks.items()}
    ideal = reference.median("tokens_per_second") if reference else speeds[min(speeds)]
    efficiency = {ranks: speed / ideal for ranks, speed in speeds.items()}
    times_ms = {ranks: row.step_time_ms for ranks, row in by_ranks.items()}
    return Scaling(next(iter(own.values())), times_ms, efficiency)
