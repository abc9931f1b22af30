"""What each record of a sweep says, and whether it trained what one process trains."""

import math
import statistics
from collections import defaultdict, namedtuple
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from bench.points import CHECK, EARLY_STEPS
from bench.store import FAILED, OK, OUT_OF_MEMORY, SKIPPED, TIMEOUT, Sweep
from bench.strategies import FLOAT, REFERENCE

WRONG, LOSSY, UNCOMPARED = "wrong", "lossy", "no reference"  # beside store's
SEVERITY = (OK, LOSSY, UNCOMPARED, SKIPPED, OUT_OF_MEMORY, TIMEOUT, FAILED, WRONG)
UNTIMED_STEPS = 3  # where a sweep's settings do not say
PARTS = ("before", "weights", "gradients", "optimizer", "rest")  # of memory at its peak
ONE_PROCESS = "one process"
WITNESSES = 3  # exact strategies whose median loss can stand for one process
SHARED = "preset precision seq_len global_batch_size max_steps seed lr warmup_steps world_size link"


class Group(namedtuple("Group", SHARED)):
    """What strategies must have in common to be compared; all but the last two decide the loss."""

    @property
    def job(self) -> tuple:
        return self[:-2]

    def sort_key(self) -> list[tuple[bool, str, float]]:
        """Return a key by which None, texts and numbers can be sorted together."""
        return [(True, "", value) if finite(value) else (False, str(value or ""), 0.0)
                for value in self]  # fmt: skip


@dataclass
class Verdict:
    """Whether a measurement may be compared: how a point ended, or what its loss says."""

    kind: str
    words: str = ""
    difference: float | None = None  # of the loss that decided it

    @property
    def ranked(self) -> bool:
        return self.kind == OK

    @property
    def severity(self) -> int:
        return SEVERITY.index(self.kind)


class Tolerance(NamedTuple):
    """By how much two right runs may differ, since sums are in another order; each step adds to it.

    benchmark_method.md has what was measured: rounding, and what wrong gradients do.
    """

    early: float  # in each of the first EARLY_STEPS
    final: float  # after the last step
    norm: float  # relative, of the first step's gradient: clipping and AdamW hide its scale


FLOAT32 = Tolerance(2e-4, 5e-3, 1e-4)
IN_16_BITS = Tolerance(9e-3, 0.3, 1e-2)  # at least
TIMES_ROUNDING = 3  # that 16 bits move one process: another strategy rounds at other places


@dataclass
class Run:
    """One record. None is what it does not say; units are in the names."""

    group: Group
    record: dict[str, Any]
    times_ms: list[float] = field(default_factory=list)  # of the timed steps
    step_time_ms: float | None = None
    p10_ms: float | None = None
    p90_ms: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    cpu_time_per_step_ms: float | None = None
    peak_memory_gib: float | None = None
    memory_gib: dict[str, float] = field(default_factory=dict)  # by PARTS
    bytes_sent_per_step: float | None = None
    calls_per_step: float | None = None
    losses: list[float] = field(default_factory=list)  # of the first EARLY_STEPS, if it wrote them
    norm: float | None = None  # of the first step's gradient, before clipping
    final_loss: float | None = None
    loss_difference: float | None = None  # of the last step
    early_loss_difference: float | None = None  # the largest of the first EARLY_STEPS
    allowed: Tolerance = FLOAT32
    verdict: Verdict = field(default_factory=lambda: Verdict(UNCOMPARED))

    @property
    def strategy(self) -> str:
        return str(self.record["point"].get("strategy"))

    @property
    def metrics(self) -> dict[str, Any]:
        return (self.record.get("results") or {}).get("metrics") or {}


def read_run(record: dict[str, Any], sweep: Sweep) -> Run:
    """Read a record of results.jsonl; what a script did not write stays None."""
    asked = sweep.settings | record["point"]
    run = Run(Group(*(asked.get(name) for name in Group._fields)), record)
    metrics = run.metrics
    if record["status"] != OK or not metrics:
        return run
    untimed = sweep.settings.get("untimed_steps", UNTIMED_STEPS)
    steps = metrics.get("step_times_ms")
    every = steps[untimed:] if isinstance(steps, list) else [metrics.get("step_time_ms")]
    run.times_ms = [ms for ms in map(number, every) if ms]
    if run.times_ms:
        run.step_time_ms = statistics.median(run.times_ms)
        run.p10_ms, run.p90_ms = map(float, np.percentile(run.times_ms, (10, 90)))
        tokens = number(metrics.get("tokens_per_step"))
        run.tokens_per_second = tokens and tokens / run.step_time_ms * 1e3
    for name in ("mfu", "cpu_time_per_step_ms", "bytes_sent_per_step", "peak_memory_gib"):
        setattr(run, name, number(metrics.get(name)))
    counted = metrics.get("collectives_per_step")
    if isinstance(counted, dict):
        run.calls_per_step = sum(kind.get("calls", 0) for kind in counted.values())
    run.memory_gib = memory_parts(metrics)
    run.losses = (record.get("losses") or [])[:EARLY_STEPS]
    run.norm = number((record.get("norms") or [None])[0])
    loss = metrics.get("final_loss")
    run.final_loss = loss if isinstance(loss, (int, float)) else None  # NaN stays: it is wrong
    return run


def memory_parts(metrics: dict[str, Any]) -> dict[str, float]:
    """Return GiB by PARTS; the rest is what the peak has beyond the tensors that were counted."""
    named = metrics.get("memory_gib") or {}
    parts = {part: number(named.get(part)) or 0.0 for part in PARTS[:-1]}
    peak = number(metrics.get("peak_memory_gib"))
    if peak is None or not named:
        return {}
    return parts | {"rest": max(0.0, peak - sum(parts.values()))}


def conditions(sweep: Sweep) -> dict[str, list[str]]:
    """Return what a sweep's times depend on beside its flags: by name all values, sorted."""
    said = [{"untimed steps": sweep.settings.get("untimed_steps", UNTIMED_STEPS)}]
    for record in sweep.records:
        results = record.get("results") or {}
        where = {name: results.get(name) for name in ("device", "backend")}
        where |= (results.get("versions") or {}) | (results.get("machine") or {})
        said.append({"launcher": record.get("launcher")} | where)
    found: dict[str, set[str]] = defaultdict(set)
    for values in said + sweep.machines:  # one of these for each start
        for name, value in values.items():
            found[name] |= set() if value is None else {str(value)}
    return {name: sorted(values) for name, values in found.items() if values}


class Reference(NamedTuple):
    """What the exact strategies of a job must have, and in words whose that is."""

    norm: float | None
    losses: list[float]
    final_loss: float
    whose: str


def judge(runs: Sequence[Run]) -> None:
    """Set the verdict of each run: its loss against one process, or most strategies, on its job.

    What is wrong in float32, in the check of its strategy, is wrong in 16 bits too.
    """
    found = references(runs)
    for run in runs:
        run.allowed = tolerance_of(run.group, found)
        run.verdict = verdict_of(run, found.get(run.group.job))
    wrong = {(run.strategy, run.group): run.verdict for run in runs
             if run.record["point"].get("kind") == CHECK and run.verdict.kind == WRONG}  # fmt: skip
    for run in runs:
        said = wrong.get((run.strategy, check_of(run.group, FLOAT)))
        if said and run.record["status"] == OK and run.group.precision != FLOAT:
            run.verdict = Verdict(WRONG, f"in float32: {said.words}", said.difference)


def check_of(group: Group, precision: str) -> Group:
    """Return the group of the first steps of a job, as `plan` has them."""
    return group._replace(max_steps=EARLY_STEPS, precision=precision, link=None)


def tolerance_of(group: Group, found: dict[tuple, "Reference"]) -> Tolerance:
    """Return by how much losses may differ: in 16 bits by what these move the reference itself."""
    if group.precision == FLOAT:
        return FLOAT32
    checks = [found.get(check_of(group, each).job) for each in (FLOAT, group.precision)]
    if None in checks:
        return IN_16_BITS
    steps = zip(*(check.losses for check in checks), strict=False)
    moved = max((abs(a - b) for a, b in steps), default=0.0)
    return IN_16_BITS._replace(early=max(IN_16_BITS.early, TIMES_ROUNDING * moved))


def references(runs: Sequence[Run]) -> dict[tuple, Reference]:
    """Return by job the losses that exact strategies must have.

    Where one process did not train the job, as when no device holds the model, the median of
    WITNESSES strategies or more stands for it.
    """
    trained = defaultdict(lambda: defaultdict(list))
    for run in runs:
        if run.record["point"].get("exact", True) and losses_are_finite(run):
            trained[run.group.job][run.strategy].append(run)
    found = {}
    for job, by_strategy in trained.items():
        own, whose = by_strategy.get(REFERENCE), ONE_PROCESS
        if own is None:
            own = [repeats[-1] for repeats in by_strategy.values()]
            whose = f"the median of {len(own)} strategies"
        if whose == ONE_PROCESS or len(own) >= WITNESSES:
            early = zip(*(run.losses for run in own if run.losses), strict=False)
            final = statistics.median(run.final_loss for run in own)
            norm = median(run.norm for run in own)
            found[job] = Reference(norm, [statistics.median(step) for step in early], final, whose)
    return found


def losses_are_finite(run: Run) -> bool:
    return all(map(finite, [*run.losses, run.final_loss]))


def verdict_of(run: Run, expected: Reference | None) -> Verdict:
    """Judge a run by how it ended, on how many ranks, and its losses; set their differences."""
    status = run.record["status"]
    if status != OK:
        return Verdict(status, run.record.get("reason") or "no reason recorded")
    ranks = (run.record.get("results") or {}).get("world_size")
    if ranks not in (None, run.group.world_size):
        return Verdict(WRONG, f"its world size was {ranks} instead of {run.group.world_size}")
    if "final_loss" not in run.metrics:
        return Verdict(UNCOMPARED, "no loss recorded")
    if not losses_are_finite(run):
        return Verdict(WRONG, "the loss is not a finite number")
    if expected is None:
        few = f"and fewer than {WITNESSES} strategies can stand for it"
        return Verdict(UNCOMPARED, f"loss not compared: one process did not train this job, {few}")
    run.loss_difference = last = run.final_loss - expected.final_loss
    if not run.record["point"].get("exact", True):
        return Verdict(LOSSY, f"loss {last:+.2g} from {expected.whose}", last)
    steps = zip(run.losses, expected.losses, strict=False)
    run.early_loss_difference = early = max((a - b for a, b in steps), key=abs, default=None)
    allowed = run.allowed
    apart = norms_apart(run.norm, expected.norm)
    first_steps = f" in the first {EARLY_STEPS} steps"
    scale = f"gradient norm {1 + (apart or 0):.3g} times that of"
    for difference, limit, when, what in (
        (early, allowed.early, first_steps, f"loss {early or 0:+.2g} from"),
        (apart, allowed.norm, " in the first step", scale),
        (last, allowed.final, "", f"loss {last:+.2g} from"),
    ):
        if difference is not None and abs(difference) > limit:
            said = f"{what} {expected.whose}{when}, {limit:.2g} allowed"
            return Verdict(WRONG, said, difference)
    return Verdict(OK, "" if expected.whose == ONE_PROCESS else expected.whose)


def norms_apart(own: float | None, expected: float | None) -> float | None:
    """Return the relative difference of two norms; None where one is not known.

    In 16-mixed a first step may overflow: its norm is no number, or 0, and the step is left out.
    """
    return own / expected - 1 if own and expected and min(own, expected) > 0 else None


def number(value: Any) -> float | None:
    """Return a finite number as it is, and None for anything else."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if known and math.isfinite(value) else None


def finite(value: Any) -> bool:
    return number(value) is not None


def median(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are known; None without one."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
