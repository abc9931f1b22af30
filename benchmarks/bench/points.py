"""The points of a sweep: each strategy with its flags, in the order of the runs."""

import itertools
from dataclasses import dataclass, replace
from pathlib import Path

from bench import launch
from bench.strategies import REFERENCE

FLOAT32 = "32-true"
EARLY_STEPS = 5  # whose losses are compared one by one
TRAIN, CHECK = "train", "check"  # a check: the first steps in float32, for their losses
# Of a point's time limit, for a collective: a script can then say which one hangs.
PATIENCE = 0.8
# A sweep neither saves nor evaluates, reads each loss and compares losses itself.
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
    described: dict  # the job, for its record
    reason: str | None  # why it cannot run
    repeat: int = 1

    @property
    def identity(self):
        return f"{self.name}#{self.repeat}"


def plan(args, strategies):
    """Return all points in order.

    Repeats are the outermost loop, and every second one runs backwards: noise that
    lasts for minutes, and a machine that warms up, affect all strategies equally.
    """
    once = []
    axes = (args.presets, args.precisions, args.world_sizes, strategies)
    for preset, precision, world_size, strategy in itertools.product(*axes):
        kinds = [TRAIN]
        if precision != FLOAT32 and strategy.exact:
            kinds = [CHECK, TRAIN]  # float32 has little rounding to hide a fault behind
        for kind in kinds:
            point = make_point(args, strategy, kind, preset, precision, world_size)
            if point not in once:  # single is the same for all numbers of ranks
                once.append(point)
    points = []
    for repeat in range(1, args.repeats + 1):
        turn = [
            replace(point, repeat=repeat)
            for point in once
            if repeat == 1 or (not point.reason and point.described["kind"] == TRAIN)
        ]
        points += turn if repeat % 2 else turn[::-1]
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
    """Return what planner/plan.py predict is asked for this point; None if it cannot.

    It counts bytes of bfloat16 weights and float32 gradients.
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
