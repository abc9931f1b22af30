"""The points of a sweep: each strategy with its flags, in the order of the runs."""

import itertools
from dataclasses import dataclass, replace
from pathlib import Path

from bench import launch
from bench.strategies import REFERENCE

FLOAT32 = "32-true"
EARLY_STEPS = 5  # their losses are compared one by one
# A check trains the first steps in float32, to compare their losses.
TRAIN, CHECK = "train", "check"
# A collective may take this share of a point's time limit. A script that hangs then has
# time to name the collective.
PATIENCE = 0.8
# Log each loss, because the sweep compares losses. Do not save, evaluate or self-check.
FIXED_FLAGS = (
    *("--log-every", "1", "--save-every", "0", "--eval-every", "0"),
    "--no-self-check",
)
# Peak learning rates: larger ones amplify rounding. Sources: GPT-3, table 2.1; Llama 2,
# section 2.2; Llama 3, table 3.
LR = {
    "tiny": 2e-3,
    "124m": 6e-4,
    "1b": 2e-4,
    "llama2-7b": 3e-4,
    "llama3-8b": 3e-4,
    "llama3-70b": 1.5e-4,
}


@dataclass(frozen=True)
class Point:
    """One run of one strategy."""

    name: str
    script: Path
    flags: list
    described: dict  # the settings, for the record
    reason: str | None  # why it cannot run
    repeat: int = 1

    @property
    def identity(self):
        return f"{self.name}#{self.repeat}"


def plan(args, strategies):
    """Return all points in order.

    Repeats are the outermost loop, and every second one runs backwards. So noise that
    lasts for minutes and a machine that warms up affect all strategies equally.
    """
    once = []
    axes = (args.presets, args.precisions, args.world_sizes, strategies)
    for preset, precision, world_size, strategy in itertools.product(*axes):
        kinds = [TRAIN]
        if precision != FLOAT32 and strategy.exact:
            kinds = [CHECK, TRAIN]  # rounding in 16 bits can hide an error
        for kind in kinds:
            point = make_point(args, strategy, kind, preset, precision, world_size)
            if point not in once:  # single is the same for all numbers of ranks
                once.append(point)
    points = []
    for repeat in range(1, args.repeats + 1):
        one_round = [
            replace(point, repeat=repeat)
            for point in once
            if repeat == 1 or (not point.reason and point.described["kind"] == TRAIN)
        ]
        points += one_round if repeat % 2 else one_round[::-1]
    return points


def make_point(args, strategy, kind, preset, precision, world_size):
    """Return a strategy's point, with its batch sizes or the reason not to run."""
    batch = args.global_batch_size
    if args.scaling == "weak":
        batch *= world_size
    ranks = 1 if strategy.name == REFERENCE else world_size
    reason = strategy.reason_not_to_run(ranks)
    if not reason and not args.dry_run:
        reason = launch.reason_not_to_start(args.launcher, args.device, ranks)
    micro = None
    try:
        if not reason:
            micro = strategy.micro_batch_size(ranks, batch, args.micro_batch_size)
    except ValueError as error:
        reason = str(error)
    job = {
        "preset": preset,
        "precision": FLOAT32 if kind == CHECK else precision,
        "seq_len": args.seq_len,
        "micro_batch_size": micro,
        "global_batch_size": batch,
        "max_steps": EARLY_STEPS if kind == CHECK else args.max_steps,
        "lr": args.lr or LR[preset],
        "warmup_steps": args.warmup_steps,
        "seed": args.seed,
        "device": args.device,
        "timeout": f"{PATIENCE * args.timeout:g}",
    }
    flags = strategy.flags_for(ranks)
    for name, value in job.items():
        flags += [f"--{name.replace('_', '-')}", value]
    name = ".".join([strategy.name, f"w{ranks}", preset, precision])
    if args.scaling == "weak":
        name += f".b{batch}"
    if kind == CHECK:
        name += ".check"
    described = {
        "strategy": strategy.name,
        "kind": kind,
        "exact": strategy.exact,
        "world_size": ranks,
        **job,
        "planner": planner_flags(strategy, ranks, job) if not reason else None,
    }
    return Point(name, strategy.script, [*flags, *FIXED_FLAGS], described, reason)


def planner_flags(strategy, world_size, job):
    """Return the flags of planner/plan.py predict for a point; None if it has none.

    The planner counts the bytes of bfloat16 weights and float32 gradients.
    """
    if not strategy.planner or job["precision"] != "bf16-mixed":
        return None
    tp = strategy.axis("tp", world_size)
    pp = strategy.axis("pp", world_size)
    sizes = f"--tp {tp} --pp {pp} --dp {world_size // (tp * pp)}"
    batch = (
        f"--global-batch-size {job['global_batch_size']} "
        f"--micro-batch-size {job['micro_batch_size']} --seq-len {job['seq_len']}"
    )
    return (
        f"--model {job['preset']} --gpus {world_size} {sizes} {batch} "
        f"{strategy.planner}"
    )
