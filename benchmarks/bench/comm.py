"""`comm`: collectives by themselves, timed by module 04's bandwidth_test.py."""

import argparse
import contextlib
import itertools
import json
from pathlib import Path

from bench import launch, points, runner, settings
from bench.comm_tables import COLLECTIVES
from bench.settings import NO_LINK
from legacy_common import cli

SCRIPT = "04-nccl-operations/bandwidth_test.py"
SIZES = ("minbytes", "maxbytes", "stepfactor", "iters")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `comm`; sizes and iterations have the names that nccl-tests gives them."""
    add = parser.add_argument
    add("--collectives", nargs="+", choices=COLLECTIVES, default=list(COLLECTIVES[:3]),
        metavar="NAME", help=f"{', '.join(COLLECTIVES)} (the first three)")  # fmt: skip
    add("-b", "--minbytes", type=cli.byte_size, default="8", metavar="SIZE", help="first size (8)")
    add("-e", "--maxbytes", type=cli.byte_size, default="4M", metavar="SIZE", help="last size (4M)")
    add("-f", "--stepfactor", type=lambda text: cli.whole_number(text, 2), default=8, metavar="N",
        help="from one size to the next (8)")  # fmt: skip
    add("-n", "--iters", type=cli.positive_int, default=20,
        help="timed iterations of each size (20)")  # fmt: skip
    settings.add_point_arguments(parser)
    settings.add_launch_arguments(parser, "runs/comm")


def read(folder: Path) -> points.Results:
    """Return what the script wrote, and what is wrong with it."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        results = json.loads((folder / "results.json").read_text())
        if isinstance(results["metrics"]["sweeps"], dict):
            return {"results": results}, None
    return {}, "it wrote no results.json with sweeps"


def run(args: argparse.Namespace) -> int:
    """Time all collectives, record each run, print the tables; return 1 if one went wrong."""
    if min(args.world_sizes) < 2:
        raise cli.UsageError("--world-sizes: one rank has nobody to talk to: 2 or more")
    if args.minbytes < 4:
        raise cli.UsageError(f"-b {args.minbytes} is less than a float32 number: 4 or more")
    if args.minbytes > args.maxbytes:
        raise cli.UsageError(f"-b {args.minbytes} is above -e {args.maxbytes}, the last size")
    settings.settle_launch(args)
    args.kind = "comm"
    once = []
    for link, ranks in itertools.product(args.links, args.world_sizes):
        reason = None if args.dry_run else launch.why_not(args.launcher, args.device, ranks)
        speed = None if link == NO_LINK else link
        flags = ["--collective", *args.collectives, "-b", args.minbytes, "-e", args.maxbytes]
        flags += ["-f", args.stepfactor, "-n", args.iters, "--device", args.device]
        flags += ["--timeout", points.patience(args.timeout)]
        described = {"kind": "comm", "script": SCRIPT, "collectives": args.collectives}
        described |= {"world_size": ranks, "link": speed}
        described |= {size: getattr(args, size) for size in SIZES}
        identity = ".".join(filter(None, ("comm", f"w{ranks}", speed)))
        once.append(points.Point(identity, Path(SCRIPT), flags, described, reason, read))
    return runner.run(points.in_turns(once, args.repeats), args)
