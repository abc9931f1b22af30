"""Whether each run trained what one process trains: its losses, compared step by step."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from bench_records import (
    EARLY_STEPS,
    LOSSY,
    REFERENCE,
    UNCOMPARED,
    WRONG,
    Group,
    Run,
    Verdict,
    finite,
)
from bench_store import FAILED, OK, SKIPPED, TIMEOUT

ONE_PROCESS = "one process"
WITNESSES = 3  # exact strategies whose median loss can stand for one process


@dataclass(frozen=True)
class Tolerance:
    """By how much losses may differ, since sums are in another order; each step adds to that.

    benchmark_method.md has what was measured: rounding, and gradients that are not averaged.
    """

    early: float  # in each of the first EARLY_STEPS
    final: float  # after the last step


FLOAT32 = Tolerance(2e-5, 5e-3)
IN_16_BITS = Tolerance(6e-3, 0.3)


def judge(runs: Sequence[Run]) -> None:
    """Set the verdict of each run: its loss against one process, or most strategies, on its job."""
    found = references(runs)
    for run in runs:
        run.verdict = verdict_of(run, found.get(run.group.job))


@dataclass
class Reference:
    """The losses that the exact strategies of a job must have, and in words whose they are."""

    losses: list[float]
    final_loss: float
    whose: str


def references(runs: Sequence[Run]) -> dict[tuple, Reference]:
    """Return by job the losses that exact strategies must have.

    Where one process did not train the job, as when no device holds the model, the median of
    WITNESSES strategies or more stands for it.
    """
    alone, others = defaultdict(list), defaultdict(dict)
    for run in runs:
        whole = all(map(finite, [*run.losses, run.final_loss]))
        if not (whole and run.record["point"].get("exact", True)):
            continue
        if run.strategy == REFERENCE and run.group.world_size == 1:
            alone[run.group.job].append(run)
        else:
            others[run.group.job][run.strategy] = run
    found = {
        job: reference(list(own.values()), f"the median of {len(own)} strategies")
        for job, own in others.items() if len(own) >= WITNESSES
    }  # fmt: skip
    return found | {job: reference(own, ONE_PROCESS) for job, own in alone.items()}


def reference(runs: Sequence[Run], whose: str) -> Reference:
    """Return the median of the losses of runs, step by step."""
    early = zip(*(run.losses for run in runs if run.losses), strict=False)
    final = statistics.median(run.final_loss for run in runs)
    return Reference([statistics.median(step) for step in early], final, whose)


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
    if not all(map(finite, [*run.losses, run.final_loss])):
        return Verdict(WRONG, "the loss is not a finite number")
    if expected is None:
        few = f"and fewer than {WITNESSES} strategies can stand for it"
        return Verdict(UNCOMPARED, f"loss not compared: one process did not train this job, {few}")
    run.loss_difference = last = run.final_loss - expected.final_loss
    if not run.record["point"].get("exact", True):
        return Verdict(LOSSY, f"loss {last:+.2g} from {expected.whose}", last)
    steps = zip(run.losses, expected.losses, strict=False)
    run.early_difference = early = max((own - one for own, one in steps), key=abs, default=None)
    allowed = tolerance_of(run.group)
    for difference, limit, when in (
        (early, allowed.early, f" in the first {EARLY_STEPS} steps"),
        (last, allowed.final, ""),
    ):
        if difference is not None and abs(difference) > limit:
            said = f"loss {difference:+.2g} from {expected.whose}{when}, {limit:g} allowed"
            return Verdict(WRONG, said, difference)
    return Verdict(OK, "" if expected.whose == ONE_PROCESS else expected.whose)


def tolerance_of(group: Group) -> Tolerance:
    """Return by how much losses of an exact strategy may differ from those of one process."""
    return FLOAT32 if group.precision == "32-true" else IN_16_BITS


SEVERITY = (OK, LOSSY, UNCOMPARED, SKIPPED, TIMEOUT, FAILED, WRONG)


def severity(verdict: Verdict) -> int:
    """Return the place of a verdict in SEVERITY; one that is not known comes last."""
    return SEVERITY.index(verdict.kind) if verdict.kind in SEVERITY else len(SEVERITY)
