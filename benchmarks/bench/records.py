"""What each record of a sweep says."""

import math
import statistics
from collections import defaultdict, namedtuple
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from bench.points import EARLY_STEPS
from bench.store import FAILED, OK, OUT_OF_MEMORY, SKIPPED, TIMEOUT, Sweep

WRONG, LOSSY, UNCOMPARED = "wrong", "lossy", "no reference"  # beside store's
SEVERITY = (OK, LOSSY, UNCOMPARED, SKIPPED, OUT_OF_MEMORY, TIMEOUT, FAILED, WRONG)
UNTIMED_STEPS = 3  # where a sweep's settings do not say
PARTS = ("before", "weights", "gradients", "optimizer", "rest")  # of memory at its peak
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
    gpu_memory_gib: float | None = None  # that it has
    fullest_rank: int | None = None  # the one that holds most
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


def group_of(record: dict[str, Any], sweep: Sweep) -> Group:
    asked = sweep.settings | record["point"]
    return Group(*(asked.get(name) for name in Group._fields))


def traces(sweep: Sweep) -> dict[tuple[str, Group], dict[str, float]]:
    """Return where the time of a step went, by strategy and group; max_steps are None there."""
    found = {}
    for record in sweep.records:
        if record.get("trace"):
            group = group_of(record, sweep)._replace(max_steps=None)
            found[str(record["point"].get("strategy")), group] = record["trace"]
    return found


def read_run(record: dict[str, Any], sweep: Sweep) -> Run:
    """Read a record of results.jsonl; what a script did not write stays None."""
    run = Run(group_of(record, sweep), record)
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
    run.gpu_memory_gib = number((record["results"].get("machine") or {}).get("gpu_memory_gib"))
    peaks = metrics.get("peak_memory_gib_per_rank") or []
    run.fullest_rank = peaks.index(max(peaks)) if peaks else None
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
