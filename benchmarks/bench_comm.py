"""`comm`: collectives by themselves, timed by module 04's bandwidth_test.py."""

import argparse
import contextlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench_launch
import bench_link
import bench_machine
import bench_points
import bench_report
import bench_runner
import bench_tables
import bench_toml
from bench_analysis import analyse
from bench_comm_tables import COLLECTIVES, wrong_elements
from bench_settings import NO_LINK
from bench_store import FAILED, OK, TIMEOUT, Store
from dist_common import cli

SCRIPT = "04-nccl-operations/bandwidth_test.py"
Record = dict[str, Any]


@dataclass(frozen=True)
class CommPoint:
    """One run of the script: one collective at all sizes. `reason` says why it cannot run."""

    collective: str
    world_size: int
    link: str | None
    repeat: int  # from 1
    reason: str | None

    @property
    def identity(self) -> str:
        parts = ("comm", self.collective, f"w{self.world_size}", self.link)
        return f"{'.'.join(filter(None, parts))}#{self.repeat}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `comm`; sizes and iterations have the names that nccl-tests gives them."""
    add, positive = parser.add_argument, cli.positive_int
    add("--collectives", nargs="+", default=["all_reduce", "all_gather", "reduce_scatter"],
        metavar="NAME", help=f"{', '.join(COLLECTIVES)} (the first three)")  # fmt: skip
    add("--world-sizes", nargs="+", type=positive, default=[2], metavar="N",
        help="numbers of ranks (2)")  # fmt: skip
    add("-b", "--minbytes", type=byte_size, default="8", metavar="SIZE", help="first size (8)")
    add("-e", "--maxbytes", type=byte_size, default="4M", metavar="SIZE", help="last size (4M)")
    add("-f", "--stepfactor", type=step_factor, default=8, metavar="N",
        help="from one size to the next (8)")  # fmt: skip
    add("-n", "--iters", type=positive, default=20, help="timed iterations of each size (20)")
    add("--links", nargs="+", type=link_or_none, default=[NO_LINK], metavar="RATE",
        help="speed of every rank's link, such as 100mbit, or none: as it is (none)")  # fmt: skip
    add("--repeats", type=positive, default=3,
        help="times that each collective runs, in turn with the others (3)")  # fmt: skip
    add("--timeout", type=cli.positive_float, default=600.0, metavar="SECONDS",
        help="of each run (600)")  # fmt: skip
    add("--launcher", choices=bench_launch.LAUNCHERS, default=bench_launch.AUTO,
        help="auto: srun in a SLURM job, torchrun with GPUs, else fork (auto)")  # fmt: skip
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(auto)")
    add("--output-dir", default="runs/comm", metavar="DIR",
        help="folder of results; what it has already does not run again (runs/comm)")  # fmt: skip
    add("--retry-failed", action="store_true", help="run what failed before once more")
    add("--dry-run", action="store_true", help="print the commands, start nothing")


def byte_size(text: str) -> int:
    """Parse 8, 4K, 128M or 1G: powers of 1024, as nccl-tests does."""
    match = re.fullmatch(r"(\d+)([KMG]?)", text, re.IGNORECASE)
    if not match or not int(match[1]):
        raise argparse.ArgumentTypeError(f"must be a size like 8, 4K, 128M or 1G, not {text!r}")
    return int(match[1]) * 1024 ** " KMG".index(match[2].upper() or " ")


def step_factor(text: str) -> int:
    """Parse a whole number from 2: with 1 the sizes would not grow."""
    return cli.whole_number(text, 2)


def link_or_none(text: str) -> str:
    """Check the speed of a link, and return it as it is."""
    if text != NO_LINK:
        cli.link_rate(text)
    return text


def run(args: argparse.Namespace) -> int:
    """Time all collectives, record each run, print the tables; return 1 if one went wrong."""
    check(args)
    points = plan(args)
    if args.dry_run:
        folder = Path(args.output_dir)
        for point in points:
            link = f" (behind {point.link})" if point.link else ""
            command = point.reason or start_of(point, args, folder).command
            print(f"{point.identity}{link}: {command}")
        print(f"{len(points)} runs, {args.launcher} starts the ranks; nothing was started")
        return 0
    names = ("collectives", "world_sizes", "minbytes", "maxbytes", "stepfactor", "iters", "links",
             "repeats", "launcher", "device")  # fmt: skip
    asked = {"kind": "comm"} | {name: getattr(args, name) for name in names}
    asked["points"] = [point.identity for point in points]
    store = Store(args.output_dir, asked, bench_machine.describe(args.launcher))
    with contextlib.closing(store):

        def run_it(point: CommPoint) -> Record:
            return run_point(point, args, store)

        bench_runner.run_points(points, store, args.launcher, args.retry_failed, run_it, line_of)
    records, analysis = store.sweep.records, analyse([store.sweep])
    print(f"\n{bench_tables.text(analysis)}")
    written = [path.name for path in bench_report.write(store.folder, analysis, None)]
    print(f"\nresults in {store.folder}: {', '.join(written)}")
    failed = [record for record in records if record["status"] in (FAILED, TIMEOUT)]
    if failed:
        again = "--retry-failed runs them once more"
        print(f"FAILED: {len(failed)} runs, their logs are in {store.folder}/points; {again}")
    return cli.FAILED if failed or wrong_elements(records) else 0


def line_of(record: Record) -> str:
    """Return what became of a run, in a few words."""
    ok = record["status"] == OK
    return f"ok, {record['seconds']:.1f} s in all" if ok else bench_runner.not_ok(record)


def check(args: argparse.Namespace) -> None:
    """Refuse in one line what cannot run; decide launcher and device."""
    for name in args.collectives:
        if name not in COLLECTIVES:
            hint = bench_toml.nearest(name, COLLECTIVES)
            known = f"There are {', '.join(COLLECTIVES)}"
            raise cli.UsageError(f"--collectives: there is no {name}{hint} {known}")
    if min(args.world_sizes) < 2:
        raise cli.UsageError("--world-sizes: one rank has nobody to talk to: 2 or more")
    if args.minbytes < 4:
        raise cli.UsageError(f"-b {args.minbytes} is less than a float32 number: 4 or more")
    if args.minbytes > args.maxbytes:
        raise cli.UsageError(f"-b {args.minbytes} is above -e {args.maxbytes}, the last size")
    for name in ("collectives", "world_sizes", "links"):
        setattr(args, name, list(dict.fromkeys(getattr(args, name))))
    args.launcher, args.device = bench_launch.resolve(args.launcher, args.device)
    if args.links != [NO_LINK]:
        if args.launcher != bench_launch.FORK:
            raise cli.UsageError(f"--links need --launcher {bench_launch.FORK}, and so the CPU")
        if not args.dry_run and (reason := bench_link.why_not()):
            raise cli.UsageError(f"--links: {reason}")


def plan(args: argparse.Namespace) -> list[CommPoint]:
    """Return all runs in order: repeats outermost, every second one backwards, as `sweep` does."""
    points = []
    for repeat in range(1, args.repeats + 1):
        once = [
            CommPoint(name, ranks, None if link == NO_LINK else link, repeat,
                      bench_launch.why_not(args.launcher, args.device, ranks))
            for link in args.links for ranks in args.world_sizes for name in args.collectives
        ]  # fmt: skip
        points += once if repeat % 2 else once[::-1]
    return points


def start_of(point: CommPoint, args: argparse.Namespace, folder: Path) -> bench_runner.Start:
    """Return what starts the script."""
    words = arguments(point, args, folder)
    return bench_runner.Start(args.launcher, SCRIPT, words, point.world_size, point.link)


def arguments(point: CommPoint, args: argparse.Namespace, folder: Path) -> list[str]:
    """Return the words after the script's name."""
    values = {
        "--collective": point.collective, "-b": args.minbytes, "-e": args.maxbytes,
        "-f": args.stepfactor, "-n": args.iters, "--device": args.device,
        "--timeout": bench_points.patience(args.timeout),
        "--output-dir": bench_runner.from_repository(folder / "points" / point.identity),
    }  # fmt: skip
    values |= {"--link": point.link} if point.link else {}  # the script compares with it
    return [str(word) for pair in values.items() for word in pair]


def run_point(point: CommPoint, args: argparse.Namespace, store: Store) -> Record:
    """Run the script once, and return its record."""
    which = {"kind": "comm", "script": SCRIPT, "collective": point.collective}
    which |= {"world_size": point.world_size, "link": point.link}
    names = ("minbytes", "maxbytes", "stepfactor", "iters")
    which |= {name: getattr(args, name) for name in names}
    start = start_of(point, args, store.folder)
    return bench_runner.launched(point, which, start, args.timeout, store, read_results)


def read_results(path: Path) -> tuple[dict[str, Any] | None, str | None]:
    """Return what the script wrote, and what is wrong with it."""
    try:
        results = json.loads(path.read_text())
        if isinstance(results["metrics"]["sweeps"], dict):
            return results, None
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None, "it wrote no results.json with sweeps"
