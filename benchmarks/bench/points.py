"""The points of a sweep: which strategy, on how many ranks, with which batch, in which order."""

import argparse
import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import launch, traces
from bench.settings import LR, NO_LINK
from bench.strategies import FLOAT, REFERENCE, Strategy

EARLY_STEPS = 5  # whose losses are compared, each with that of the same step
CHECK = "check"  # a kind of point: the first steps, for their losses alone
TRACE = "trace"  # another: a few steps with the profiler, for where their time goes
PATIENCE = 0.8  # of a point's seconds, for a collective: its script can say which one hangs
# A sweep neither saves nor evaluates, and reads each loss.
# A sweep compares losses itself.
ALWAYS = ("--log-every", "1", "--save-every", "0", "--eval-every", "0", "--no-self-check")
# The flags of the one job, in their order.
JOB = ("preset", "precision", "seq_len", "micro_batch_size", "global_batch_size", "max_steps", "lr",
       "warmup_steps", "seed", "timeout", "device")  # fmt: skip
Results = tuple[dict[str, Any], str | None]  # what a script left, and what is wrong with it


@dataclass(frozen=True)
class Point:
    """One run of one script."""

    name: str  # without the repeat
    script: Path  # from the top of the repository
    flags: list[Any]  # all but --output-dir
    described: dict[str, Any]  # what a record of results.jsonl says of it
    reason: str | None  # why it cannot run, if so
    read: Callable[[Path], Results]  # what it left in a folder
    repeat: int = 0  # from 1

    @property
    def repeats(self) -> bool:
        return self.reason is None and self.described["kind"] not in (CHECK, TRACE)

    @property
    def identity(self) -> str:
        return f"{self.name}#{self.repeat}"


def in_turns(once: Sequence[Point], repeats: int) -> list[Point]:
    """Return all points in the order in which they run.

    Repeats are the outermost loop, and every second one runs backwards: noise that lasts for
    minutes, and a machine that slowly warms up, fall on all alike.
    """
    points = []
    for repeat in range(1, repeats + 1):
        again = [replace(point, repeat=repeat) for point in once if repeat == 1 or point.repeats]
        points += again if repeat % 2 else again[::-1]
    return points


def plan(args: argparse.Namespace, strategies: list[Strategy]) -> list[Point]:
    """Return all points in order; where they run here, what needs more GPUs has a reason.

    Before what trains in 16 bits come its first steps in float32, where rounding hides nothing; and
    those of the reference in 16 bits too, which say how much rounding there is.
    """
    once: list[Point] = []
    jobs = args.presets, args.precisions, args.links, args.world_sizes
    for preset, precision, link, ranks, strategy in itertools.product(*jobs, strategies):
        alone, batches = strategy.name == REFERENCE, [args.global_batch_size]
        if args.scaling == "weak":  # the reference of the efficiency has a rank's own batch
            batches = [*batches * alone, args.global_batch_size * ranks]
        speed = None if alone or link == NO_LINK else link
        for batch in batches:
            own = 1 if alone else ranks
            point = training(args, strategy, own, preset, precision, speed, batch)
            wanted = [FLOAT, precision] if alone or not args.reference else [FLOAT]
            if precision == FLOAT or point.reason or not strategy.exact:
                wanted = []
            checks = [training(args, strategy, own, preset, each, None, batch, CHECK)
                      for each in wanted]  # fmt: skip
            if vars(args).get("trace") and not point.reason:
                checks.append(training(args, strategy, own, preset, precision, speed, batch, TRACE))
            once += [each for each in [*checks, point] if each not in once]  # as of `single`
    return in_turns(once, args.repeats)


def training(
    args, strategy: Strategy, ranks: int, preset: str, precision: str, link: str | None, batch: int,
    kind: str = "train",
) -> Point:  # fmt: skip
    """Return a strategy's point with its batch sizes, or with the reason why it cannot run."""
    reason, sizes = strategy.why_not(ranks, preset, precision), (0, 0)
    if reason is None and not args.dry_run:
        reason = launch.why_not(args.launcher, args.device, ranks)
    try:
        if reason is None:
            sizes = batch_sizes(strategy, ranks, batch, args.micro_batch_size)
    except ValueError as error:
        reason = str(error)
    job = {
        "world_size": ranks, "preset": preset, "precision": precision, "link": link,
        "global_batch_size": batch, "micro_batch_size": sizes[0], "grad_accum_steps": sizes[1],
        "seq_len": args.seq_len, "seed": args.seed, "lr": args.lr or LR[preset],
        "max_steps": {CHECK: EARLY_STEPS, TRACE: traces.STEP}.get(kind, args.max_steps),
    }  # fmt: skip
    own = strategy.script_flags(ranks)
    values = vars(args) | job | {"timeout": patience(args.timeout)}
    words = itertools.chain.from_iterable((f"--{n.replace('_', '-')}", values[n]) for n in JOB)
    which = {"kind": kind, "strategy": strategy.name, "exact": strategy.exact}
    described = which | {"script": strategy.script} | job | {"flags": own}
    # Strategy and ranks, and whatever else differs.
    parts = [strategy.name.replace(" ", "-"), f"w{ranks}"]
    parts += [job["preset"]] if len(args.presets) > 1 else []
    parts += [precision] if len(args.precisions) > 1 or kind == CHECK else []
    parts += [kind] if kind in (CHECK, TRACE) else []
    parts += [f"b{batch}"] if args.scaling == "weak" else []
    name = ".".join(parts + ([link] if link else []))
    words = [*own, *words, *ALWAYS]
    if kind == TRACE:
        words += ["--profile", str(traces.STEP)]
    return Point(
        name, strategy.path, words, described, reason, read_trace if kind == TRACE else read
    )


def read(folder: Path) -> Results:
    """Return results.json and what first steps have logged, and what is wrong with them."""
    path = folder / "results.json"
    if not path.exists():
        return {}, "it wrote no results.json"
    try:
        results = json.loads(path.read_text())
        loss = results["metrics"]["final_loss"]
    except (ValueError, KeyError, TypeError) as error:
        return {}, f"its results.json has no metrics.final_loss ({type(error).__name__})"
    whole = isinstance(loss, float) and math.isfinite(loss)
    left = {"results": results} | early_steps(folder / "metrics.jsonl")
    return left, None if whole else f"its final loss is {loss}"


def read_trace(folder: Path) -> Results:
    """Return results.json and where the time of the traced steps went."""
    left, wrong = read(folder)
    try:
        return left | {"trace": traces.split_of(folder / "profile")}, wrong
    except (OSError, ValueError, KeyError) as error:
        return left, wrong or str(error)


def early_steps(path: Path) -> dict[str, list[float]]:
    """Return losses and gradient norms of the first steps, from metrics.jsonl; {} if it lacks one.

    Norms are those before clipping, and only there if each step has one.
    """
    losses: list[float] = []
    norms: list[float | None] = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            values = json.loads(line)
            if "loss" in values and values["step"] == len(losses) + 1 <= EARLY_STEPS:
                losses.append(values["loss"])
                norms.append(values.get("grad_norm"))
        except (ValueError, KeyError, TypeError):
            return {}
    known = {"norms": norms} if norms and all(isinstance(norm, float) for norm in norms) else {}
    return {"losses": losses, **known} if losses else {}


def patience(timeout_s: float) -> str:
    """Return --timeout of a script that is ended after so many seconds."""
    return f"{PATIENCE * timeout_s:.3f}".rstrip("0").rstrip(".")


def batch_sizes(
    strategy: Strategy, world_size: int, global_batch: int, largest: int | None
) -> tuple[int, int]:
    """Return micro-batch size and accumulation steps: global = micro x steps x data ranks.

    A micro-batch is as large as the strategy's micro-batches and `largest` allow, unless the
    strategy has its size.
    Raises: ValueError saying what the global batch cannot be divided by.
    """
    ranks = strategy.data_parallel_ranks(world_size)
    least = strategy.micro_batches * strategy.ranks_of("pp", world_size)
    own, rest = divmod(global_batch, ranks)
    if rest or own % least:
        parts = f"{ranks} data-parallel ranks x {least} micro-batches"
        raise ValueError(f"a global batch of {global_batch} sequences cannot be dealt to {parts}")
    if exact := strategy.micro_batch_size:
        if own % exact or own // exact % least:
            multiple = f", in multiples of {least}" * (least > 1)
            raise ValueError(f"micro-batches of {exact} do not make up a rank's {own}{multiple}")
        return exact, own // exact
    fitting = (steps for steps in range(least, own + 1, least)
               if own % steps == 0 and own // steps <= (largest or own))  # fmt: skip
    steps = next(fitting)  # a micro-batch of one sequence is always small enough
    return own // steps, steps
