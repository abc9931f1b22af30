"""Collectives without training, timed by module 04's bandwidth_test.py."""

import json
import statistics
from collections import defaultdict
from pathlib import Path

from tabulate import tabulate

from bench import launch, runner
from bench.points import PATIENCE
from bench.strategies import REPO
from dist_common import cli
from dist_common.cli import UsageError

SCRIPT = REPO / "04-nccl-operations" / "bandwidth_test.py"
SIZE_FLAGS = ("minbytes", "maxbytes", "stepfactor", "iters")
HEADERS = ("collective", "ranks", "bytes", "time", "spread", "algbw", "busbw", "#wrong")


def run(args):
    """Time collectives on each number of ranks, in turns; return 1 if a run failed.

    A run whose results.json exists does not run again.
    """
    args.launcher, args.device = launch.resolve(args.launcher, args.device)
    launch.preload(args.launcher)
    flags = ["--collective", *args.collectives, "--device", args.device]
    flags += ["--timeout", f"{PATIENCE * args.timeout:g}"]
    for name in SIZE_FLAGS:
        if getattr(args, name) is not None:
            flags += [f"--{name}", getattr(args, name)]
    measurements, failed = defaultdict(list), []
    for repeat in range(1, args.repeats + 1):
        for ranks in args.world_sizes:
            folder = args.output_dir / f"w{ranks}-{repeat}"
            if not (folder / "results.json").exists():
                words = [*flags, "--output-dir", folder.resolve()]
                log = args.output_dir / "logs" / f"w{ranks}-{repeat}-{runner.now()}"
                outcome = launch.start(
                    args.launcher, SCRIPT, words, ranks, log, args.timeout
                )
                status, reason = runner.judge(outcome, SCRIPT.name, args.timeout)
                if status != runner.OK:
                    failed.append(f"{ranks} ranks: {status}: {reason}")
            if (folder / "results.json").exists():
                read(folder, ranks, measurements)
    print(tabulate(make_rows(measurements), HEADERS, disable_numparse=True))
    for line in dict.fromkeys(failed):
        print(f"FAILED: {line}")
    return cli.FAILED if failed else 0


def read(folder: Path, ranks, measurements):
    """Add the numbers of a run by (collective, ranks, bytes)."""
    metrics = json.loads((folder / "results.json").read_text())["metrics"]
    for name, sizes in metrics["sweeps"].items():
        for row in sizes:
            measurements[name, ranks, row["size"]].append(row)


def make_rows(measurements):
    """Return the medians of the repeats; the spread is the slowest over the fastest."""
    rows = []
    for (name, ranks, size), repeats in sorted(measurements.items()):
        times = [row["time_us"] for row in repeats]
        medians = {
            key: statistics.median(row[key] for row in repeats)
            for key in ("time_us", "algbw_gb_s", "busbw_gb_s")
        }
        wrong = sum(row["wrong"] for row in repeats)
        rows.append(
            (
                name,
                ranks,
                f"{size:,}",
                f"{medians['time_us']:.1f} us",
                f"{max(times) / min(times) - 1:.0%}" if len(times) > 1 else "-",
                f"{medians['algbw_gb_s']:.4f} GB/s",
                f"{medians['busbw_gb_s']:.4f} GB/s",
                f"{wrong:,} WRONG" if wrong else "0",
            )
        )
    return rows


def check_flags(args):
    if min(args.world_sizes) < 2:
        raise UsageError("--world-sizes: one rank has nobody to send to: 2 or more")
