"""`train`: one strategy on one number of ranks, all that was measured on one screen."""

import argparse
import contextlib
import tempfile

from tabulate import tabulate

from bench import runner, settings, words
from bench.analysis import analyse
from bench.points import CHECK, plan
from bench.records import WRONG, Run
from bench.store import OK
from bench.strategies import PRECISIONS
from bench.verdicts import norms_apart
from dist_common.model import PRESETS
from legacy_common import cli

RANKS_SHOWN = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `train`."""
    add = parser.add_argument
    add("strategy", help="its name, see `list`")
    add("--world-size", type=cli.positive_int, default=2, metavar="N", help="ranks (2)")
    add("--preset", choices=PRESETS, default="tiny", help="(tiny)")
    add("--precision", choices=PRECISIONS, default="32-true", help="(32-true)")
    add("--link", type=settings.link, default=settings.NO_LINK, metavar="RATE",
        help="speed of every rank's link, such as 100mbit (as it is)")  # fmt: skip
    settings.add_job_arguments(parser)
    settings.add_launch_arguments(parser, None)


def run(args: argparse.Namespace) -> int:
    """Run a strategy and `single`, print what a step costs; return 1 if a point or a loss fails."""
    for name in ("world_size", "preset", "precision", "link"):  # a sweep has lists of these
        setattr(args, f"{name}s", [getattr(args, name)])
    one = {"strategies": [args.strategy], "repeats": 1, "scaling": "strong"}
    vars(args).update(one, dry_run=False, retry_failed=True)
    with tempfile.TemporaryDirectory() as temporary:
        args.output_dir = args.output_dir or f"{temporary}/sweep"
        return train(args)


def train(args: argparse.Namespace) -> int:
    """Do what `run` says, in --output-dir."""
    *_, strategy = chosen = settings.settle(args)
    points = plan(args, chosen)
    first = next(point for point in points if point.described["kind"] != CHECK)
    last = points[-1]
    # `single` is planned on one rank, whatever was asked for.
    reason = strategy.why_not(args.world_size, args.preset, args.precision) or last.reason
    if reason:
        raise cli.UsageError(reason)
    print(f"{strategy.name}: {strategy.does}")
    with contextlib.closing(runner.open_store(points, args)) as store:
        runner.run_points(points, args, store)
    found = {run.record["id"]: run for run in analyse(store.sweep).runs}
    measured = found[last.identity]
    if measured.record["status"] != OK:
        print((store.folder / "points" / last.identity / "log.txt").read_text().strip())
        print(f"FAILED: {measured.record['reason']}")
        return cli.FAILED
    show_step(measured)
    return show_loss(measured, found.get(first.identity))


def show_step(run: Run) -> None:
    """Print what a step costs in time, communication and memory: RANKS_SHOWN ranks at most."""
    times = [words.ms(value) for value in (run.step_time_ms, run.p10_ms, run.p90_ms)]
    mfu = "n/a" if run.mfu is None else f"{run.mfu:.1%}"
    rows = [
        ("step", f"{times[0]}, p10 {times[1]}, p90 {times[2]}, of {len(run.times_ms)} steps"),
        ("speed", f"{words.speed(run.tokens_per_second)}, MFU {mfu}"),
        ("sent per rank and step", words.size(run.bytes_sent_per_step)),
    ]
    for kind, counted in (run.metrics.get("collectives_per_step") or {}).items():
        calls = f"{counted['calls']} call{'s' * (counted['calls'] != 1)}"
        sent = words.size(counted["bytes_sent"])
        rows.append((f"  {kind.replace('_', '-')}", f"{calls}, {sent}"))
    peaks = run.metrics.get("peak_memory_gib_per_rank") or []
    fullest = sorted(range(len(peaks)), key=lambda rank: -peaks[rank])[:RANKS_SHOWN]
    for rank in sorted(fullest):
        rows.append((f"peak memory of rank {rank}", words.gib(peaks[rank])))
    print(tabulate(rows, tablefmt="plain", disable_numparse=True, preserve_whitespace=True))


def show_loss(run: Run, reference: Run | None) -> int:
    """Print the loss beside that of one process, and the verdict; return the exit code."""
    after = f"loss {run.final_loss:.4f} after {run.group.max_steps} steps"
    if reference is None or run is reference:
        print(f"OK: {after}, compared with no other")
        return 0
    if reference.final_loss is None:
        print(f"FAILED: {after}, but one process failed: {reference.record['reason']}")
        return cli.FAILED
    exact, allowed = run.record["point"]["exact"], run.allowed
    compared = [("loss after the last step", run.final_loss, reference.final_loss, allowed.final)]
    if pairs := list(zip(run.losses, reference.losses, strict=False)):
        furthest = max(pairs, key=lambda pair: abs(pair[0] - pair[1]))
        name = f"furthest of the first {len(run.losses)} steps"
        compared.insert(0, (name, *furthest, allowed.early))
    if norms_apart(run.norm, reference.norm) is not None:
        limit = allowed.norm * reference.norm
        compared.insert(0, ("gradient norm of the first step", run.norm, reference.norm, limit))
    rows = []
    for name, own, one, limit in compared:
        right = "yes" if not exact or abs(own - one) <= limit else "NO"
        rows.append((name, f"{own:.6g}", f"{one:.6g}", f"{limit:g}" if exact else "lossy", right))
    headers = ("check", "measured", "one process", "tolerance", "ok")
    print(tabulate(rows, headers, disable_numparse=True))
    wrong = run.verdict.kind == WRONG
    print(f"FAILED: {run.verdict.words}" if wrong else f"OK: {after}")
    return cli.FAILED if wrong else 0
