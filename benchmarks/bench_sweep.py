"""`sweep`: run all points, one after the other, recording each; resume where a sweep was killed."""

import argparse
import contextlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import bench_machine
import bench_points
import bench_report
import bench_runner
import bench_settings
from bench_analysis import analyse
from bench_points import Point
from bench_settings import Settings
from bench_store import FAILED, OK, TIMEOUT, Store
from bench_strategies import Strategy
from dist_common import cli


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `sweep`."""
    bench_settings.add_arguments(parser)
    add = parser.add_argument
    add("--retry-failed", action="store_true", help="run points that failed before once more")
    add("--dry-run", action="store_true", help="print the commands of all points, start nothing")


def run(args: argparse.Namespace) -> int:
    """Run the points of a sweep that have no record yet, and print the report.

    Return 1 if a point failed, or if the loss of a strategy that must be exact is wrong.
    """
    settings, strategies = bench_settings.settle(args)
    points = bench_points.plan(settings, strategies, here=not args.dry_run)
    if args.dry_run:
        show_commands(points, settings)
        return 0
    with contextlib.closing(open_store(settings, strategies, points)) as store:
        starts = f"{settings.launcher} starts the ranks"
        print(f"{count_of(points)}; {starts}; results in {store.folder}")
        if not store.sweep.records:
            print(f"interrupted? The same command with --output-dir {store.folder} resumes it")
        run_points(points, settings, store, args.retry_failed)
    analysis = analyse([store.sweep])
    print(f"\n{bench_report.text(analysis, None)}")
    written = [path.name for path in bench_report.write(store.folder, analysis, None)]
    print(f"\nresults in {store.folder}: {', '.join(written)}")
    failed = [r for r in store.sweep.records if r["status"] in (FAILED, TIMEOUT)]
    if failed:
        again = "--retry-failed runs them once more"
        print(f"FAILED: {len(failed)} points, their logs are in {store.folder}/points; {again}")
    return cli.FAILED if failed or bench_report.is_wrong(analysis) else 0


def show_commands(points: Sequence[Point], settings: Settings) -> None:
    """Print what each point would start, in order."""
    folder = Path(settings.output_dir)
    for point in points:
        command = point.reason and f"skipped: {point.reason}"
        print(f"{point.identity}: {command or bench_runner.command_of(point, settings, folder)}")
    print(f"{count_of(points)}, {settings.launcher} starts the ranks; nothing was started")


def open_store(settings: Settings, strategies: list[Strategy], points: Sequence[Point]) -> Store:
    """Make or continue the sweep's folder, and keep in it what was asked for."""
    planned = {"points": [point.identity for point in points]}
    machine = bench_machine.describe(settings.launcher)
    return Store(settings.output_dir, settings.compared(strategies) | planned, machine)


def run_points(
    points: Sequence[Point], settings: Settings, store: Store, retry_failed: bool
) -> None:
    """Run the points that have no record yet, and print a line for each."""

    def run(point: Point) -> dict:
        return bench_runner.run_point(point, settings, store)

    bench_runner.run_points(points, store, settings.launcher, retry_failed, run, line_of)


def line_of(record: dict) -> str:
    """Return what came out of a point, in a few words."""
    if record["status"] != OK:
        return bench_runner.not_ok(record)
    metrics = record["results"]["metrics"]
    ms = metrics.get("step_time_ms")
    step = f", step {ms:,.1f} ms" if isinstance(ms, (int, float)) else ""
    return f"loss {metrics['final_loss']:.4f}{step}, {record['seconds']:.1f} s in all"


def count_of(points: Sequence[Point]) -> str:
    """Return how many points there are, and how many of them cannot run."""
    skipped = Counter(point.reason is not None for point in points)[True]
    return f"{len(points)} points" + (f", {skipped} of them cannot run" if skipped else "")
