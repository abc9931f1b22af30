"""`train`: one strategy on one number of ranks, all that was measured on one screen."""

import argparse
import contextlib
import tempfile

from tabulate import tabulate

import bench_points
import bench_records
import bench_settings
import bench_sweep
import bench_verdicts
import bench_words as words
from bench_analysis import analyse
from bench_records import PARTS, Run
from bench_store import OK
from dist_common import cli
from dist_common.measure import GIB

RANKS_SHOWN = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `train`."""
    add = parser.add_argument
    add("strategy", help="its name, see `list`")
    add("--world-size", type=cli.positive_int, default=2, metavar="N", help="ranks (2)")
    add("--preset", default="tiny", metavar="NAME", help="model (tiny)")
    add("--precision", default="32-true", metavar="NAME",
        help="32-true, bf16-mixed, 16-mixed (32-true)")  # fmt: skip
    add("--link", default=bench_settings.NO_LINK, metavar="RATE",
        help="speed of every rank's link, such as 100mbit (as it is)")  # fmt: skip
    bench_settings.add_run_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run a strategy and `single`, print what a step costs; return 1 if a point or a loss fails."""
    with tempfile.TemporaryDirectory() as temporary:
        args.output_dir = args.output_dir or f"{temporary}/sweep"
        return train(args)


def train(args: argparse.Namespace) -> int:
    """Do what `run` says, in --output-dir."""
    for name in ("world_size", "preset", "precision", "link"):  # a sweep has lists of these
        setattr(args, f"{name}s", [getattr(args, name)])
    args.strategies, args.repeats = [args.strategy], 1
    settings, strategies = bench_settings.settle(args)
    if reason := strategies[-1].why_not(args.world_size, args.preset, args.precision):
        raise cli.UsageError(reason)
    points = bench_points.plan(settings, strategies)
    if points[-1].reason:
        raise cli.UsageError(points[-1].reason)
    print(f"{args.strategy}: {strategies[-1].does}")
    with contextlib.closing(bench_sweep.open_store(settings, strategies, points)) as store:
        bench_sweep.run_points(points, settings, store, retry_failed=True)
    found = {run.record["id"]: run for run in analyse([store.sweep]).runs}
    measured = found[points[-1].identity]
    if measured.record["status"] != OK:
        print((store.point_folder(points[-1].identity) / "log.txt").read_text().strip())
        print(f"FAILED: {measured.record['reason']}")
        return cli.FAILED
    show_step(measured)
    return show_loss(measured, found.get(points[0].identity))


def show_step(run: Run) -> None:
    """Print what a step costs in time, communication and memory."""
    steps = len(run.times_ms)
    times = [words.ms(value) for value in (run.step_time_ms, run.p10_ms, run.p90_ms)]
    mfu = "n/a" if run.mfu is None else f"{run.mfu:.1%}"
    rows = [
        ("step", f"{times[0]}, p10 {times[1]}, p90 {times[2]}, of {steps} steps"),
        ("speed", f"{words.speed(run.tokens_per_second)}, MFU {mfu}"),
        ("sent per rank and step", words.size(run.bytes_sent_per_step)),
    ]
    for kind, counted in (run.metrics.get("collectives_per_step") or {}).items():
        calls = f"{counted['calls']} call{'s' * (counted['calls'] != 1)}"
        rows.append((f"  {kind}", f"{calls}, {words.size(counted['bytes_sent'])}"))
    print(tabulate(rows, tablefmt="plain", disable_numparse=True, preserve_whitespace=True))
    if lines := memory_rows(run):
        print(tabulate(lines, ("memory", "peak", *PARTS), disable_numparse=True))


def memory_rows(run: Run) -> list[tuple[str, ...]]:
    """Return the peak of each rank and its parts: of RANKS_SHOWN at most, those with the most."""
    peaks = run.metrics.get("peak_memory_gib_per_rank") or [run.peak_memory_gib]
    held = run.metrics.get("memory_gib_per_rank") or []
    fullest = sorted(range(len(held)), key=lambda rank: -peaks[rank])[:RANKS_SHOWN]
    rows = []
    for rank in sorted(fullest):
        metrics = {"peak_memory_gib": peaks[rank], "memory_gib": held[rank]}
        parts = bench_records.memory_parts(metrics)
        sizes = [size_of(part, size) for part, size in parts.items()]
        rows.append((f"rank {rank}", words.gib(peaks[rank]), *sizes))
    return rows


def size_of(part: str, gib: float) -> str:
    """Return a part of the memory in words: tensors to the KiB, the process as a whole roughly."""
    return words.gib(gib) if part in ("before", "rest") else words.size(gib * GIB)


def show_loss(run: Run, reference: Run | None) -> int:
    """Print the loss beside that of one process, and the verdict; return the exit code."""
    after = f"loss {run.final_loss:.4f} after {run.group.max_steps} steps"
    if reference is None or run is reference:
        print(f"OK: {after}, compared with no other")
        return 0
    if reference.final_loss is None:
        print(f"FAILED: {after}, but one process failed: {reference.record['reason']}")
        return cli.FAILED
    exact = run.record["point"]["exact"]
    allowed = bench_verdicts.tolerance_of(run.group)
    last = f"{run.final_loss:.6g}", f"{reference.final_loss:.6g}"
    rows = [("loss after the last step", *last, run.loss_difference, allowed.final)]
    if run.losses and reference.losses:
        pairs = zip(run.losses, reference.losses, strict=False)
        own, one = max(pairs, key=lambda pair: abs(pair[0] - pair[1]))
        steps = f"furthest of the first {len(run.losses)} steps"
        rows.insert(0, (steps, f"{own:.6g}", f"{one:.6g}", own - one, allowed.early))
    body = [(*cells, f"{limit:g}" if exact else "lossy",
             "NO" if exact and not abs(difference) <= limit else "yes")
            for *cells, difference, limit in rows]  # fmt: skip
    headers = ("check", "measured", "one process", "tolerance", "ok")
    print(tabulate(body, headers, disable_numparse=True))
    wrong = run.verdict.kind == bench_records.WRONG
    print(f"FAILED: {run.verdict.words}" if wrong else f"OK: {after}")
    return cli.FAILED if wrong else 0
