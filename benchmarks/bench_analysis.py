"""What the records of sweeps say: times, noise, places, losses, memory, bytes. Nothing is printed.

The order of records in a file never matters: everything is sorted by what was measured.
"""

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from bench_records import (
    COMMIT,
    LOSSY,
    PARTS,
    REFERENCE,
    UNCOMPARED,
    Group,
    Run,
    Verdict,
    conditions,
    differences,
    merged,
    mixed,
    number,
    read_run,
)
from bench_store import OK, Sweep
from bench_verdicts import judge, severity

STATE = PARTS[1:4]
COMMON = "ddp"  # what other strategies are set beside


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
        return _median(getattr(run, name) for run in self.runs)

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

    def memory(self, part: str) -> float | None:
        """Return GiB of one of PARTS, median over repeats."""
        return _median(run.memory_gib.get(part) for run in self.runs)

    @property
    def state_gib(self) -> float | None:
        """Return the GiB of weights, gradients and optimizer state on the rank with most."""
        parts = [self.memory(part) for part in STATE]
        return None if None in parts else sum(parts)

    def spread(self, name: str) -> float | None:
        """Return max/min - 1 over repeats of a number of Run; None with fewer than two."""
        values = [value for run in self.runs if (value := getattr(run, name)) is not None]
        return max(values) / min(values) - 1 if len(values) > 1 and min(values) > 0 else None


@dataclass
class Noise:
    """The largest spread between repeats of one strategy; None where nothing was repeated."""

    width: float | None
    row: Row | None
    repeats: int  # the most that a strategy has


@dataclass
class Scaling:
    """Step times in ms and efficiencies (1 is ideal) of a strategy, by world size."""

    row: Row
    times_ms: dict[int, float]
    efficiency: dict[int, float]


@dataclass
class Analysis:
    sweeps: list[Sweep]
    groups: list[list[Row]]  # the rows of a group in the order of the tables
    noise: Noise  # the widest
    noises: dict[tuple, Noise]  # by what noisy_by returns
    memory_noise: float | None
    scaling: list[list[Scaling]]  # by job and link
    conditions: dict[str, str]  # machine, versions, device: of all sweeps
    warnings: list[str]  # damaged lines, folders with points of several machines or versions

    @property
    def rows(self) -> list[Row]:
        return [row for rows in self.groups for row in rows]

    @property
    def runs(self) -> list[Run]:
        return [run for row in self.rows for run in row.runs]


def analyse(sweeps: Sequence[Sweep]) -> Analysis:
    """Compute all that a report shows of the training points of one or more sweeps."""
    found = {str(sweep.folder): conditions(sweep) for sweep in sweeps}
    first, *others = found.values()
    alike = not any(differences(first, other, COMMIT) for other in others)
    runs = []
    for sweep in sweeps:
        scope = "" if alike else str(sweep.folder)
        for record in sweep.records:
            if record["point"].get("kind", "train") == "train":
                runs.append(read_run(record, sweep, scope))
    runs.sort(key=lambda run: (run.group.sort_key(), *_place(run)))
    judge(runs)
    groups = [rows_of(list(own)) for _, own in itertools.groupby(runs, lambda run: run.group)]
    every = [row for rows in groups for row in rows]
    noises = {
        key: noise_of([row for row in every if noisy_by(row.group) == key])
        for key in dict.fromkeys(noisy_by(row.group) for row in every)
    }
    mixtures = {str(sweep.folder): mixed(sweep) for sweep in sweeps}
    for rows in groups:
        apart = any(mixtures[run.folder] for row in rows for run in row.runs)
        give_places(rows, None if apart else noises[noisy_by(rows[0].group)].width)
    spreads = [row.spread("peak_memory_gib") for row in every]
    memory_noise = max((spread for spread in spreads if spread is not None), default=None)
    weak = any(sweep.settings.get("scaling") == "weak" for sweep in sweeps)
    scaling = scaling_of(groups, weak)
    return Analysis(
        list(sweeps), groups, noise_of(every), noises, memory_noise, scaling,
        merged(found.values()), [
            *(line for sweep in sweeps for line in sweep.warnings),
            *(f"{folder} holds points of several machines or versions, so nothing has a place: "
              f"{'; '.join(said)}" for folder, said in mixtures.items() if said),
        ],
    )  # fmt: skip


def worst(runs: Sequence[Run]) -> Verdict:
    """Return the worst verdict of a strategy's repeats; say how many there are, if not all."""
    found = max(runs, key=lambda run: (severity(run.verdict), abs(run.loss_difference or 0)))
    alike = sum(run.verdict.kind == found.verdict.kind for run in runs)
    if alike == len(runs) or found.verdict.ranked:
        return found.verdict
    words = f"{found.verdict.words} ({alike} of {len(runs)} repeats)"
    return Verdict(found.verdict.kind, words, found.verdict.difference)


# noise and places


def noisy_by(group: Group) -> tuple:
    """Return what points have in common whose noise is alike: a small model's is no large one's."""
    return group.scope, group.preset, group.precision, group.link


def rows_of(runs: Sequence[Run]) -> list[Row]:
    """Gather the runs of a group by strategy, and by folder where several have it."""
    by_origin: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        by_origin[run.strategy, run.folder].append(run)
    strategies = [strategy for strategy, _ in by_origin]
    rows = []
    for (strategy, folder), own in by_origin.items():
        twice = strategies.count(strategy) > 1
        label = f"{strategy} ({folder})" if twice else strategy
        rows.append(Row(label, own[0].group, own, worst(own)))
    speeds = {row.label: row.median("tokens_per_second") for row in rows}
    common = speeds.get(COMMON)
    for row in rows:
        own_speed = speeds[row.label]
        row.against_ddp = own_speed / common if own_speed and common else None
    return rows


def noise_of(rows: Sequence[Row]) -> Noise:
    """Return the width of the noise, from all strategies whose points ran more than once."""
    spreads = [(row.spread("step_time_ms"), row) for row in rows]
    known = [(spread, row) for spread, row in spreads if spread is not None]
    width, row = max(known, key=lambda found: found[0], default=(None, None))
    return Noise(width, row, max((row.timed_repeats for row in rows), default=0))


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
    rows.sort(key=lambda row: (order.get(id(row), len(order)), severity(row.verdict), row.label))


def beyond(fast: Row, slow: Row, width: float) -> bool:
    """Say whether `fast` takes less time than `slow`, by more than the noise."""
    return fast.step_time_ms * (1 + width) < slow.step_time_ms


def leaders(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that no other one is faster than, beyond the noise: place 1, or 1 to some."""
    return [row for row in rows if row.place.partition("-")[0] == "1"]


# scaling


def scaling_of(groups: Sequence[Sequence[Row]], weak: bool) -> list[list[Scaling]]:
    """Return how each job's strategies scale, where there are several world sizes.

    Efficiency is tokens/s per rank over those of `single`; over those of a strategy's own fewest
    ranks where `single` did not run. Strong scaling keeps the global batch, weak scaling the
    batch of a rank. Rows that are wrong or failed have no efficiency.
    """
    jobs: dict[tuple, list[Row]] = defaultdict(list)
    alone: dict[tuple, Row] = {}
    for row in itertools.chain(*groups):
        job = scaled_job(row.group, weak)
        counted = row.verdict.kind in (OK, LOSSY, UNCOMPARED) and row.median("tokens_per_second")
        if counted and row.runs[0].strategy == REFERENCE:
            alone[job] = row
        elif counted:
            jobs[(*job, row.group.link)].append(row)
    found = []
    for (*job, _), rows in jobs.items():
        reference = alone.get(tuple(job))
        by_label: dict[str, list[Row]] = defaultdict(list)
        for row in rows:
            by_label[row.label].append(row)
        lines = [scale(own, reference) for _, own in sorted(by_label.items())]
        if len({ranks for line in lines for ranks in line.times_ms}) > 1:
            found.append(lines)
    return found


def scaled_job(group: Group, weak: bool) -> tuple:
    """Return what stays the same while the number of ranks grows."""
    ranks = group.world_size if weak else 1
    batch = group.global_batch_size / ranks
    return tuple({**vars(group), "global_batch_size": batch, "world_size": 0, "link": 0}.values())


def scale(rows: Sequence[Row], reference: Row | None) -> Scaling:
    """Return how a strategy scales from `reference`, one process, or from its own fewest ranks."""
    by_ranks = {row.group.world_size: row for row in rows}
    if reference:
        by_ranks = {1: reference} | by_ranks
    speeds = {ranks: row.median("tokens_per_second") / ranks for ranks, row in by_ranks.items()}
    ideal = reference.median("tokens_per_second") if reference else speeds[min(speeds)]
    efficiency = {ranks: speed / ideal for ranks, speed in speeds.items()}
    return Scaling(rows[0], {n: row.step_time_ms for n, row in by_ranks.items()}, efficiency)


# numbers


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _place(run: Run) -> tuple[str, str, str, str]:
    repeat = f"{number(run.record.get('repeat')) or 0:09}"
    return run.strategy, run.folder, repeat, str(run.record.get("id"))
