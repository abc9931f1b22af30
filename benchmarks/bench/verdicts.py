"""Whether a strategy trained what one process trains: its losses and gradient, compared."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from bench.points import CHECK, EARLY_STEPS
from bench.records import (
    FLOAT32,
    IN_16_BITS,
    LOSSY,
    UNCOMPARED,
    WRONG,
    Group,
    Run,
    Tolerance,
    Verdict,
    finite,
    median,
)
from bench.store import OK
from bench.strategies import FLOAT, REFERENCE

ONE_PROCESS = "one process"
WITNESSES = 3  # exact strategies whose median loss can stand for one process
TIMES_ROUNDING = 3  # that 16 bits move one process: another strategy rounds at other places


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
