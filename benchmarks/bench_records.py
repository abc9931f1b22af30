"""What each record of a sweep says, and under which conditions it was measured."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench_store import OK, Sweep

WRONG, LOSSY, UNCOMPARED = "wrong", "lossy", "no reference"  # verdicts beside those of bench_store
EARLY_STEPS = 5  # whose losses are compared, each with that of the same step
UNTIMED_STEPS = 3  # where a sweep's settings do not say
PARTS = ("before", "weights", "gradients", "optimizer", "rest")  # of memory at its peak
REFERENCE = "single"
COMMIT = "commit"  # of the code that ran: a condition, but comparing two of them is fair
MAY_VARY = ("backend",)  # within a sweep: offload adds one for the CPU


@dataclass(frozen=True)
class Group:
    """What strategies must have in common to be compared; `scope` is "" or a sweep's folder."""

    scope: str
    preset: Any
    precision: Any
    seq_len: Any
    global_batch_size: Any
    max_steps: Any
    seed: Any
    world_size: Any
    link: Any

    @property
    def job(self) -> tuple:
        """Return all that decides the loss: not the ranks, not the link between them."""
        return tuple(vars(self).values())[:-2]

    def sort_key(self) -> list[tuple[bool, str, float]]:
        return [sortable(value) for value in vars(self).values()]


@dataclass
class Verdict:
    """Whether a measurement may be compared: how a point ended, or what its loss says."""

    kind: str
    words: str = ""
    difference: float | None = None  # of the loss that decided it

    @property
    def ranked(self) -> bool:
        return self.kind == OK


@dataclass
class Run:
    """One record. None is what it does not say; units are in the names."""

    folder: str
    group: Group
    record: dict[str, Any]
    times_ms: list[float]  # of the timed steps
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
    final_loss: float | None = None
    loss_difference: float | None = None  # of the last step
    early_difference: float | None = None  # the largest of the first EARLY_STEPS
    verdict: Verdict = field(default_factory=lambda: Verdict(UNCOMPARED))

    @property
    def strategy(self) -> str:
        return str(self.record["point"].get("strategy"))

    @property
    def metrics(self) -> dict[str, Any]:
        return (self.record.get("results") or {}).get("metrics") or {}


def read_run(record: dict[str, Any], sweep: Sweep, scope: str) -> Run:
    """Read a record of results.jsonl; what a script did not write stays None."""
    point = record["point"]
    names = [name for name in Group.__dataclass_fields__ if name != "scope"]
    group = Group(scope, *(point.get(name) for name in names))
    run = Run(str(sweep.folder), group, record, [])
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


def conditions(sweep: Sweep) -> dict[str, str]:
    """Return what a sweep's times depend on beside its flags, by name."""
    return {name: ", ".join(values) for name, values in values_of_conditions(sweep).items()}


def values_of_conditions(sweep: Sweep) -> dict[str, list[str]]:
    """Return all values that a sweep's conditions had, sorted, by name."""
    found: dict[str, set[str]] = defaultdict(set)
    for record in sweep.records:
        results = record.get("results") or {}
        machine = results.get("machine") or {}
        found["launcher"].add(record.get("launcher"))
        for name in ("device", "backend"):
            found[name].add(results.get(name))
        for name, value in ((results.get("versions") or {}) | machine).items():
            found[name].add(value)
    for machine in sweep.machines:  # one for each start
        for name, value in machine.items():
            found[name].add(value)
    found["untimed steps"] = {sweep.settings.get("untimed_steps", UNTIMED_STEPS)}
    said = {name: sorted(str(v) for v in values - {None}) for name, values in found.items()}
    return {name: values for name, values in said.items() if values}


def mixed(sweep: Sweep) -> list[str]:
    """Say what was not the same for all points of a sweep, as when it resumed after an upgrade."""
    return [f"{name} {' and '.join(values)}" for name, values in values_of_conditions(sweep).items()
            if len(values) > 1 and name not in MAY_VARY]  # fmt: skip


def differences(
    one: dict[str, str], two: dict[str, str], *ignored: str
) -> list[tuple[str, str, str]]:
    """Return (name, value, other value) of conditions that both have and that differ."""
    return [(name, one[name], two[name]) for name in one
            if name not in ignored and two.get(name, one[name]) != one[name]]  # fmt: skip


def merged(found: Iterable[dict[str, str]]) -> dict[str, str]:
    """Return the conditions of all sweeps, those that differ with all their values."""
    values: dict[str, dict[str, None]] = defaultdict(dict)
    for own in found:
        for name, value in own.items():
            values[name][value] = None
    return {name: " | ".join(several) for name, several in values.items()}


# numbers


def number(value: Any) -> float | None:
    """Return a finite number as it is, and None for anything else."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if known and math.isfinite(value) else None


def finite(value: Any) -> bool:
    """Say whether a value is a finite number."""
    return number(value) is not None


def sortable(value: Any) -> tuple[bool, str, float]:
    """Return a key by which None, texts and numbers can be sorted together."""
    return (True, "", value) if finite(value) else (False, str(value or ""), 0.0)
