"""`sweep`: run all points, one after the other, recording each; resume where a sweep was killed."""

import argparse
import contextlib
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

import bench_launch
import bench_points
import bench_report
import bench_runner
import bench_settings
from bench_analysis import analyse
from bench_points import Point
from bench_settings import Settings
from bench_store import FAILED, OK, SKIPPED, TIMEOUT, Store
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
        say(f"{count_of(points)}; {settings.launcher} starts the ranks; results in {store.folder}")
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
    return Store(settings.output_dir, settings.compared(strategies) | planned)


def run_points(
    points: Sequence[Point], settings: Settings, store: Store, retry_failed: bool
) -> None:
    """Run the points that have no record; print a line for each as it ends, and the time left."""
    ended = {record["id"]: record["status"] for record in store.sweep.records}
    done = {name for name, s in ended.items() if not (retry_failed and s in (FAILED, TIMEOUT))}
    remaining = [point for point in points if point.identity not in done]
    if len(remaining) < len(points):
        say(f"{len(points) - len(remaining)} points have a record already, {len(remaining)} to go")
    bench_launch.prepare(settings.launcher)
    started = time.monotonic()
    hidden = not sys.stderr.isatty()
    for number, point in enumerate(tqdm(remaining, "points", disable=hidden, leave=False), 1):
        record = bench_runner.run_point(point, settings, store)
        store.append(record)
        per_point = (time.monotonic() - started) / number
        left_s = round(per_point * (len(remaining) - number))
        place = f"[{number}/{len(remaining)}] {point.identity}"
        left = f"; {clock(left_s)} left" if number < len(remaining) else ""
        say(f"{place}: {line_of(record)}{left}")


def line_of(record: dict) -> str:
    """Return what came out of a point, in a few words."""
    if record["status"] != OK:
        log = "" if record["status"] == SKIPPED else f" (points/{record['id']}/log.txt)"
        return f"{record['status']}: {record['reason']}{log}"
    metrics = record["results"]["metrics"]
    ms = metrics.get("step_time_ms")
    step = f", step {ms:,.1f} ms" if isinstance(ms, (int, float)) else ""
    return f"loss {metrics['final_loss']:.4f}{step}, {record['seconds']:.1f} s in all"


def clock(seconds: int) -> str:
    """Return seconds as hours, minutes and seconds."""
    minutes, seconds = divmod(seconds, 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{seconds:02}"


def count_of(points: Sequence[Point]) -> str:
    """Return how many points there are, and how many of them cannot run."""
    skipped = Counter(point.reason is not None for point in points)[True]
    return f"{len(points)} points" + (f", {skipped} of them cannot run" if skipped else "")


def say(line: str) -> None:
    """Print a line, above the progress bar if there is one."""
    tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()
