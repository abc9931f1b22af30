"""Judge the records of a sweep: whose loss is right, and who is fastest."""

import itertools
import math
import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from scipy.special import stdtrit

from bench import strategies
from bench.points import CHECK, EARLY_STEPS, FLOAT32, TRAIN
from bench.store import FAILED, OK, OUT_OF_MEMORY, REFUSED, TIMEOUT
from bench.strategies import REFERENCE

LOSSY, UNKNOWN, WRONG = "lossy", "not compared", "WRONG"  # store.py has the others
SEVERITY = (OK, LOSSY, UNKNOWN, REFUSED, OUT_OF_MEMORY, TIMEOUT, FAILED, WRONG)
WITNESSES = 3  # exact strategies whose median loss can replace one process
CONFIDENCE = 0.95
BUSY_CORES = 0.25  # cores that other work takes from the ranks
MUCH_LESS = 0.9  # times the memory of the recommended strategy


class Tolerance(NamedTuple):
    """The largest difference of two correct runs; method.md has the measurements."""

    early: float  # of the loss in each of the first steps
    final: float  # of the loss after the last step
    # Relative, of the first gradient's norm. Clipping and AdamW hide a wrong scale.
    norm: float


FLOAT32_TOLERANCE = Tolerance(2e-4, 5e-3, 1e-4)
TOLERANCE_IN_16_BITS = Tolerance(5e-2, 0.3, 1e-2)  # float32 checks more closely


class Interval(NamedTuple):
    """A ratio with its 95% interval, in logarithms: log - half to log + half."""

    log: float
    half: float  # infinite with one round

    @property
    def differs(self):
        return abs(self.log) > self.half

    def __str__(self):
        ratio = f"{math.exp(self.log):.2f}x"
        if self.half in (0.0, math.inf):  # a row over itself, or one round
            return ratio
        return f"{ratio} ±{format_percent(self.half)}"


def compute_interval(ratios):
    """Return the mean ratio of rounds with Student's interval of its logarithm."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.mean(logs)
    if len(logs) < 2:
        return Interval(mean, math.inf)
    quantile = stdtrit(len(logs) - 1, (1 + CONFIDENCE) / 2)
    return Interval(mean, quantile * statistics.stdev(logs) / math.sqrt(len(logs)))


def format_percent(half):
    """Format half the width of an interval; ">100%" stands for all larger ones."""
    return f"{math.expm1(half):.0%}" if half <= math.log(2) else ">100%"


@dataclass
class Row:
    """The rounds of one strategy in one table."""

    strategy: str
    records: list
    verdict: str
    reason: str
    place: str = ""  # "1", or "2-4" where noise leaves it open
    behind: Interval | None = None  # step time / step time of the row before
    slower: Interval | None = None  # step time / step time of the first row

    @property
    def step_time_ms(self):
        return self.median("step_time_ms")

    @property
    def tokens_per_second(self):
        tokens = self.median("tokens_per_step")
        return tokens / self.step_time_ms * 1e3 if tokens else None

    def times_by_round(self):
        """Return the step times in ms, by round."""
        measured = [record for record in self.records if record["status"] == OK]
        return {record["repeat"]: record["step_time_ms"] for record in measured}

    def median(self, name):
        values = [record.get(name) for record in self.records]
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    def ratio_to(self, other):
        """Return the ratio of this row's step time to another's, paired by round."""
        times, other_times = self.times_by_round(), other.times_by_round()
        return compute_interval(
            [times[n] / other_times[n] for n in times if n in other_times] or [1.0]
        )


@dataclass
class Table:
    """The strategies that trained the same job on the same number of ranks."""

    title: str
    world_size: int
    rows: list
    reference: Row | None
    answer: str = ""


@dataclass
class Analysis:
    """The content of a report."""

    sweep: object
    tables: list
    where: dict  # machine or version -> all its values in the records
    busy: bool
    condition: str = ""
    warnings: list = field(default_factory=list)

    @property
    def rows(self):
        return [row for table in self.tables for row in table.rows]


def job_of(record):
    """Return the settings that change the loss and differ within a sweep."""
    names = ("preset", "precision", "global_batch_size", "max_steps")
    return tuple(record[name] for name in names)


def analyse(sweep):
    """Judge all records, and sort the strategies of each table."""
    records = sorted(sweep.records, key=lambda one: (one["repeat"], one["id"]))
    judge_all(records)
    where = collect_where(records)
    analysis = Analysis(sweep, [], where, is_busy(records))
    mixed = [name for name, values in where.items() if len(values) > 1]
    if mixed:
        analysis.warnings.append(
            f"points ran under several values of {', '.join(mixed)}: nothing has a "
            "place; measure again in a new folder"
        )
    analysis.tables = make_tables(records, sweep.settings["seq_len"])
    for table in analysis.tables:
        if not mixed:
            give_places(table.rows)
        table.answer = recommend(table, bool(mixed))
    analysis.condition = describe_condition(analysis, records)
    return analysis


def judge_all(records):
    """Add a verdict to each record. A wrong check in float32 makes its strategy wrong.

    A check judges the strategy's training on as many ranks with the same preset.
    """
    references = find_references(records)
    for record in records:
        record["verdict"] = judge(record, references.get(job_of(record)))
    wrong_checks = {
        key_of_check(record): record["verdict"][1]
        for record in records
        if record["kind"] == CHECK and record["verdict"][0] == WRONG
    }
    for record in records:
        reason = wrong_checks.get(key_of_check(record))
        passed = record["verdict"][0] in (OK, UNKNOWN)
        if record["kind"] == TRAIN and passed and reason:
            record["verdict"] = (WRONG, f"in float32: {reason}")


def key_of_check(record):
    return record["strategy"], record["world_size"], record["preset"]


def collect_where(records):
    """Return the machines and versions that the records name: name -> sorted values."""
    where = defaultdict(set)
    for record in records:
        if record["status"] != REFUSED:
            for name, value in record["where"].items():
                where[name].add(str(value))
    return {name: sorted(values) for name, values in where.items()}


def make_tables(records, seq_len):
    """Return a table for each job and number of ranks, its rows not sorted yet."""
    trained = defaultdict(list)
    for record in records:
        if record["kind"] == TRAIN:
            key = (job_of(record), record["world_size"], record["strategy"])
            trained[key].append(record)
    tables = []
    for job, world_size in sorted({(job, ranks) for job, ranks, _ in trained}, key=str):
        rows = [
            make_row(strategy, rounds)
            for (other, ranks, strategy), rounds in trained.items()
            if other == job and ranks == world_size and strategy != REFERENCE
        ]
        alone = trained.get((job, 1, REFERENCE))
        reference = make_row(REFERENCE, alone) if alone else None
        # One process has a table of its own only if nothing else ran.
        if rows or len(trained) == 1:
            preset, precision, batch, _ = job
            title = (
                f"{preset}, {precision}, {world_size} ranks, {batch} x {seq_len} tokens"
            )
            tables.append(Table(title, world_size, rows, reference))
    return tables


def make_row(strategy, records):
    """Return a strategy's row, with the worst verdict of its rounds."""
    worst = max(records, key=lambda record: SEVERITY.index(record["verdict"][0]))
    return Row(strategy, records, *worst["verdict"])


def find_references(records):
    """Return job -> (norm, losses, final loss) of one process.

    If one process did not train the job, the median of at least WITNESSES exact
    strategies replaces it.
    """
    trained = defaultdict(dict)
    for record in records:
        if record["status"] == OK and record["exact"]:
            trained[job_of(record)][record["strategy"]] = record
    references = {}
    for job, by_strategy in trained.items():
        witnesses = list(by_strategy.values())
        if REFERENCE in by_strategy:
            witnesses = [by_strategy[REFERENCE]]
        elif len(witnesses) < WITNESSES:
            continue
        early = zip(*(record["losses"] for record in witnesses), strict=False)
        norms = [one["first_norm"] for one in witnesses if one["first_norm"]]
        references[job] = (
            statistics.median(norms) if norms else None,
            [statistics.median(step) for step in early],
            statistics.median(record["final_loss"] for record in witnesses),
        )
    return references


def judge(record, reference):
    """Return (verdict, reason) of a record, from its status and its losses."""
    if record["status"] != OK:
        return record["status"], record["reason"]
    if record["ranks_started"] != record["world_size"]:
        return WRONG, f"{record['ranks_started']} ranks, not {record['world_size']}"
    if reference is None:
        return UNKNOWN, "neither single nor three exact strategies trained this job"
    norm, losses, final_loss = reference
    difference = record["final_loss"] - final_loss
    if not record["exact"]:
        return LOSSY, f"loss {difference:+.4f}"
    allowed = TOLERANCE_IN_16_BITS
    if record["precision"] == FLOAT32:
        allowed = FLOAT32_TOLERANCE
    if norm and record["first_norm"]:
        ratio = record["first_norm"] / norm
        if not abs(ratio - 1) <= allowed.norm:
            return (
                WRONG,
                f"the first gradient's norm is {ratio:.3g} times the right one",
            )
    steps = zip(record["losses"], losses, strict=False)
    early = max((loss - expected for loss, expected in steps), key=abs, default=0.0)
    if not abs(early) <= allowed.early:
        return WRONG, f"loss {early:+.2g} in the first {EARLY_STEPS} steps"
    if not abs(difference) <= allowed.final:
        return WRONG, f"loss {difference:+.2g} after the last step"
    return OK, ""


def give_places(rows):
    """Sort rows by step time; give places to correct rows with two rounds or more.

    Noise can leave several places open. A strategy has "2-4" if one strategy is faster
    beyond the noise, and all but four are slower beyond the noise.
    """
    rows.sort(
        key=lambda row: (
            SEVERITY.index(row.verdict),
            row.step_time_ms or math.inf,
        )
    )
    timed = [row for row in rows if row.verdict == OK and len(row.times_by_round()) > 1]
    for row in timed:
        apart = [row.ratio_to(other) for other in timed if row is not other]
        first = 1 + sum(ratio.differs and ratio.log > 0 for ratio in apart)
        last = len(timed) - sum(ratio.differs and ratio.log < 0 for ratio in apart)
        row.place = str(first) if first == last else f"{first}-{last}"
        row.slower = (
            row.ratio_to(timed[0]) if row is not timed[0] else Interval(0.0, 0.0)
        )
    for before, row in itertools.pairwise(timed):
        row.behind = row.ratio_to(before)


def recommend(table, mixed):
    """Recommend a strategy, or say which measurement is missing."""
    timed = [row for row in table.rows if row.place]
    wrong = [row.strategy for row in table.rows if row.verdict == WRONG]
    end = f"; not {' and '.join(wrong)}: the loss is wrong" if wrong else ""
    if mixed:
        return "no answer yet: points of several machines or versions do not compare"
    if len(table.rows) < 2:
        return f"no answer yet: name another strategy to compare with{end}"
    if not any(row.verdict == OK for row in table.rows):
        return (
            f"no answer yet: no strategy has the right loss: see the last column{end}"
        )
    if not timed:
        return (
            f"no answer yet: nothing ran twice, so noise is unknown: --repeats 3{end}"
        )
    tied = [row for row in timed if row.place.partition("-")[0] == "1"]
    order = list(strategies.load())  # from simple to complicated
    tied.sort(key=lambda row: (*order, row.strategy).index(row.strategy))
    best = tied[0]
    names = ", ".join(row.strategy for row in tied)
    if len(timed) == 1:
        text = f"take {best.strategy}, the only one with the right loss"
    elif len(tied) == 1:
        text = f"take {best.strategy}: the fastest beyond the noise"
    else:
        text = f"take {best.strategy}: the simplest of {names}; none is faster"
    return f"{text}{advise_on_memory(best, timed)}{end}"


def advise_on_memory(best, timed):
    """Say how much GPU memory the answer needs, and which strategy needs much less."""
    if not best.median("gpu_memory_gib"):
        return ""  # on the CPU libraries use most of it
    peak, whole = best.median("peak_memory_gib"), best.median("gpu_memory_gib")
    text = f"; it allocates {peak:.1f} of {whole:.0f} GiB"
    lean = min(timed, key=lambda row: row.median("peak_memory_gib"))
    least = lean.median("peak_memory_gib")
    if least < MUCH_LESS * peak:
        text += f", {lean.strategy} {least:.1f} GiB"
    return text


def is_busy(records):
    """Say whether other work took cores that the ranks needed."""
    lacking = []
    for record in records:
        others = record.get("cores_of_others")
        if others is not None:
            cores = record["where"]["cores"]
            lacking.append(max(0.0, others + record["world_size"] - cores))
    return bool(lacking) and statistics.mean(lacking) > BUSY_CORES


def describe_condition(analysis, records):
    """Return one line with the machine, the version, the load and the noise."""
    where, settings = analysis.where, analysis.sweep.settings
    ended = len({record["id"] for record in records})
    parts = []
    if where:
        machine = where.get("gpu") or [
            f"{'/'.join(where['cores'])} cores of {'/'.join(where['cpu'])}"
        ]
        parts = ["/".join(machine), f"torch {'/'.join(where['torch'])}"]
    parts.append(f"{ended} of {settings['points']} points")
    behind = [row.behind for row in analysis.rows if row.behind]
    if behind:
        noise = format_percent(statistics.median(ratio.half for ratio in behind))
        parts.append(f"noise ±{noise} of a step time")
    others = [one["cores_of_others"] for one in records if "cores_of_others" in one]
    if others:
        used = f"other work used {statistics.mean(others):.1f} cores"
        parts.append(f"BUSY: {used}: repeat" if analysis.busy else used)
    return ", ".join(parts)
