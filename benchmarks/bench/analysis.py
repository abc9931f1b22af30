"""What the records of a sweep say: ratios, places, scaling. Nothing is printed.

The order of records in a file never matters: everything is sorted by what was measured.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from bench import records, verdicts
from bench.points import CHECK
from bench.records import LOSSY, UNCOMPARED, Group, Run, Verdict, median
from bench.store import OK, Sweep
from bench.strategies import REFERENCE

COMMON = "ddp"  # what other strategies are set beside
MAY_VARY = ("backend",)  # within a sweep: offload adds one for the CPU
CONFIDENCE = 0.95  # of an interval
# Whoever looks after each round is wrong more often: eight looks at 99% are wrong in 5% of cases.
CONFIDENCE_OF_LOOKS = 0.99


class Ratio(NamedTuple):
    """A ratio and its interval, as logarithms: the interval is `log` - `half` to `log` + `half`."""

    log: float
    half: float  # infinite with one round

    @property
    def differs(self) -> bool:
        """Say whether the interval leaves 1 out."""
        return abs(self.log) > self.half


def ratio_of(ratios: Iterable[float], confidence: float = CONFIDENCE) -> Ratio | None:
    """Return the mean ratio of rounds with Student's interval, of logarithms.

    From eight rounds on it is the trimmed mean, without the smallest and the largest of eight, so
    that one odd round undoes nothing. Source: Tukey and McLaughlin, Sankhya A 25 (1963).
    """
    logs = np.sort(np.log(list(ratios)))
    count, cut = len(logs), len(logs) // 8
    kept = logs[cut : count - cut]
    if count < 2:
        return Ratio(float(kept[0]), math.inf) if count else None
    error = np.clip(logs, kept[0], kept[-1]).std(ddof=1) * math.sqrt(count) / len(kept)
    quantile = stdtrit(len(kept) - 1, (1 + confidence) / 2)
    return Ratio(float(kept.mean()), float(quantile * error))


@dataclass
class Row:
    """The repeats of one strategy in one group."""

    label: str
    group: Group
    runs: list[Run]
    verdict: Verdict
    place: str = ""  # by step time: "1", or "2-4" where the noise leaves it open
    against_ddp: Ratio | None = None  # tokens/s over those of COMMON
    behind: Ratio | None = None  # step time over that of the place before
    trace: dict[str, float] = field(default_factory=dict)  # ms of a traced step, by traces.split_of

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

    def share(self, part: str) -> float | None:
        """Return how much of a traced step's time a part of it takes."""
        return self.trace[part] / self.trace["step"] if self.trace else None

    def memory(self, *parts: str) -> float | None:
        """Return GiB of some of PARTS, each the median over repeats; None if one is not known."""
        found = [median(run.memory_gib.get(part) for run in self.runs) for part in parts]
        return None if None in found else sum(found)

    def by_round(self, name: str) -> dict[int, float]:
        """Return a number of Run by repeat, where it is known."""
        found = {run.record.get("repeat", 0): getattr(run, name) for run in self.runs}
        return {repeat: value for repeat, value in found.items() if value}

    def over(self, other: "Row", name: str, confidence: float) -> Ratio | None:
        """Return the ratio of a number of Run to another row's in the same round."""
        own, others = self.by_round(name), other.by_round(name)
        return ratio_of([own[n] / others[n] for n in own if n in others], confidence)


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
    confidence: float  # of the intervals of ratios
    scaling: list[list[Scaling]]  # by job and link
    conditions: dict[str, str]  # machine, versions, device
    warnings: list[str]  # damaged lines; points of several machines or versions
    comparable: bool = True  # False where there are several

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
            if record["point"].get("kind", "train") in ("train", CHECK)]  # fmt: skip
    runs.sort(key=lambda run: (run.group.sort_key(), run.strategy,
                               run.record.get("repeat", 0), run.record["id"]))  # fmt: skip
    verdicts.judge(runs)
    runs = [run for run in runs if run.record["point"].get("kind") != CHECK]
    confidence = CONFIDENCE_OF_LOOKS if sweep.settings.get("until_decided") else CONFIDENCE
    groups = [rows_of(list(own), confidence)
              for _, own in itertools.groupby(runs, lambda run: run.group)]  # fmt: skip
    every = [row for rows in groups for row in rows]
    traced = records.traces(sweep)
    for row in every:
        row.trace = traced.get((row.label, row.group._replace(max_steps=None)), {})
    mixed = [f"{name} {' and '.join(values)}" for name, values in found.items()
             if len(values) > 1 and name not in MAY_VARY]  # fmt: skip
    warnings = list(sweep.warnings)
    if mixed:  # as when it resumed after an upgrade
        said = "holds points of several machines or versions, so nothing has a place"
        warnings.append(f"{sweep.folder} {said}: {'; '.join(mixed)}")
    for rows in groups:
        give_places(rows, confidence, not mixed)
    scaling = scaling_of(every, sweep.settings.get("scaling") == "weak")
    known = {name: ", ".join(values) for name, values in found.items()}
    return Analysis(sweep, groups, confidence, scaling, known, warnings, not mixed)


def rows_of(runs: Sequence[Run], confidence: float) -> list[Row]:
    """Gather the runs of a group, sorted by strategy, in a row for each."""
    rows = []
    for strategy, repeats in itertools.groupby(runs, lambda run: run.strategy):
        own = list(repeats)
        rows.append(Row(strategy, own[0].group, own, worst(own)))
    common = next((row for row in rows if row.label == COMMON), None)
    for row in rows if common else ():
        row.against_ddp = row.over(common, "tokens_per_second", confidence)
    return rows


def worst(runs: Sequence[Run]) -> Verdict:
    """Return the worst verdict of a strategy's repeats; say how many there are, if not all."""
    found = max(runs, key=lambda run: (run.verdict.severity, abs(run.loss_difference or 0))).verdict
    alike = sum(run.verdict.kind == found.kind for run in runs)
    if alike == len(runs) or found.ranked:
        return found
    return Verdict(found.kind, f"{found.words} ({alike} of {len(runs)} repeats)", found.difference)


def give_places(rows: list[Row], confidence: float, comparable: bool) -> None:
    """Give exact strategies that ran more than once a place by step time; sort the rows.

    A place is open as far as the rounds leave it: "2-4" if one strategy is faster beyond the noise,
    and all but four are slower beyond it. Places that share no number differ beyond the noise.
    """
    timed = [row for row in rows if comparable and row.verdict.ranked and row.timed_repeats > 1]
    timed.sort(key=lambda row: row.step_time_ms)
    for row in timed if len(timed) > 1 else ():
        ratios = [row.over(other, "step_time_ms", confidence) for other in timed]
        apart = [ratio.log for ratio in ratios if ratio and ratio.differs]
        first = 1 + sum(log > 0 for log in apart)
        last = len(timed) - sum(log < 0 for log in apart)
        row.place = str(first) if first == last else f"{first}-{last}"
    for before, row in itertools.pairwise(timed):
        row.behind = row.over(before, "step_time_ms", confidence)
    order = {id(row): number for number, row in enumerate(timed)}
    rows.sort(key=lambda row: (order.get(id(row), len(order)), row.verdict.severity, row.label))


def decided(analysis: Analysis) -> bool:
    """Say whether every strategy that can have a place has one of its own."""
    places = [row.place for row in analysis.rows if row.place]
    return bool(places) and not any("-" in place for place in places)


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
