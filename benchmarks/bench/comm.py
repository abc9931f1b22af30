"""`comm`: collectives by themselves, timed by module 04's bandwidth_test.py."""

import argparse
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import launch, points, runner, settings
from bench.comm_tables import COLLECTIVES
from bench.settings import NO_LINK
from dist_common import cli

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


@dataclass(frozen=True)
class Timing(points.Point):
    """One run of the script: one collective at all sizes."""

    collective: str

    @property
    def script(self) -> str:
        return SCRIPT

    def arguments(self, args: argparse.Namespace) -> list[Any]:
        """Return the words after the script's name, all but --output-dir."""
        values = {
            "--collective": self.collective, "-b": args.minbytes, "-e": args.maxbytes,
            "-f": args.stepfactor, "-n": args.iters, "--device": args.device,
            "--timeout": points.patience(args.timeout),
        }  # fmt: skip
        values |= {"--link": self.link} if self.link else {}  # the script compares with it
        return list(itertools.chain.from_iterable(values.items()))

    def described(self, args: argparse.Namespace) -> dict[str, Any]:
        """Return what a record of results.jsonl says of the point."""
        which = {"kind": "comm", "script": SCRIPT, "collective": self.collective,
                 "world_size": self.world_size, "link": self.link}  # fmt: skip
        return which | {name: getattr(args, name) for name in SIZES}

    def read(self, folder: Path) -> points.Results:
        """Return what the script wrote, and what is wrong with it."""
        try:
            results = json.loads((folder / "results.json").read_text())
            if isinstance(results["metrics"]["sweeps"], dict):
                return {"results": results}, None
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return {}, "it wrote no results.json with sweeps"

    def summary(self, record: dict[str, Any]) -> str:
        """Return what came out of it, in a word: its numbers are in the tables."""
        return record["status"]


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
    for link, ranks, name in itertools.product(args.links, args.world_sizes, args.collectives):
        reason = None if args.dry_run else launch.why_not(args.launcher, args.device, ranks)
        speed = None if link == NO_LINK else link
        identity = ".".join(filter(None, ("comm", name, f"w{ranks}", speed)))
        once.append(Timing(identity, ranks, speed, reason, 0, name))
    return runner.run(points.in_turns(once, args.repeats), args)
