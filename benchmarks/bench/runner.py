"""Run points, each in processes of its own, and say in records how they went."""

import argparse
import contextlib
import re
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench import launch, report
from bench.analysis import analyse, decided
from bench.machine import describe_machine
from bench.points import Point
from bench.search import NO_MEMORY, known_end
from bench.store import FAILED, OK, OUT_OF_MEMORY, SKIPPED, TIMEOUT, Store, now
from bench.strategies import REPOSITORY, from_repository
from legacy_common import cli

LEAST_ROUNDS = 3  # before --until-decided ends a sweep
LAUNCH = ".launch"  # beside a point's folder, which the script wants to make itself
# Of what faulthandler writes when a rank is ended: where it was, not why.
STACK = re.compile(r"(Current thread|Thread) 0x|File \"|Extension modules: ")
# Whether these differ or not, a point has the same results: a sweep may be continued with others.
NOT_COMPARED = ("timeout", "preset", "output_dir", "strategies_file", "config", "retry_failed",
                "dry_run", "trace", "command", "run")  # fmt: skip
Record = dict[str, Any]


def run(points: Sequence[Point], args: argparse.Namespace) -> int:
    """Run the points that have no record yet, and print the report; with --dry-run, commands only.

    Return 1 if a point failed, or if what one trained or sent is wrong.
    """
    skipped = sum(point.reason is not None for point in points)
    count = f"{len(points)} points" + (f", {skipped} of them cannot run" if skipped else "")
    starts = f"{args.launcher} starts the ranks"
    if args.dry_run:
        for point in points:
            said = f"skipped: {point.reason}" if point.reason else command_of(point, args)
            print(f"{point.identity}: {said}")
        print(f"{count}, {starts}; nothing was started")
        return 0
    with contextlib.closing(open_store(points, args)) as store:
        print(f"{count}; {starts}; results in {store.folder}")
        if not store.sweep.records:
            print(f"interrupted? The same command with --output-dir {store.folder} resumes it")
        run_points(points, args, store)
    return conclude(store)


def open_store(points: Sequence[Point], args: argparse.Namespace) -> Store:
    """Make or continue the sweep's folder; keep in it what was asked for, but what is no matter."""
    asked = {name: value for name, value in vars(args).items() if name not in NOT_COMPARED}
    planned = [point.identity for point in points]
    return Store(args.output_dir, asked | {"points": planned}, describe_machine(args.launcher))


def run_points(points: Sequence[Point], args: argparse.Namespace, store: Store) -> None:
    """Run the points that have no record; print a line for each as it ends, and the time left."""
    for warning in store.sweep.warnings:
        say(f"warning: {warning}")
    ended = {record["id"]: record["status"] for record in store.sweep.records}
    done = {name for name, s in ended.items() if not (args.retry_failed and s in (FAILED, TIMEOUT))}
    remaining = [point for point in points if point.identity not in done]
    if len(remaining) < len(points):
        say(f"{len(points) - len(remaining)} points have a record already, {len(remaining)} to go")
    launch.prepare(args.launcher)
    started = time.monotonic()
    hidden, looked_at = not sys.stderr.isatty(), LEAST_ROUNDS
    for number, point in enumerate(tqdm(remaining, "points", disable=hidden, leave=False), 1):
        if vars(args).get("until_decided") and point.repeat > looked_at:
            looked_at = point.repeat
            if decided(analyse(store.sweep)):
                said = f"no order is open after {point.repeat - 1} rounds"
                say(f"{said}: the other {len(remaining) - number + 1} points are left out")
                break
        record = launched(point, args, store, known_end(point.described, store.sweep.records))
        store.append(record)
        if record["status"] == OK:
            said = f"{summary(record)}, {record['seconds']:.1f} s in all"
        else:
            log = f" (points/{point.identity}/log.txt)" * bool(record["command"])
            said = f"{record['status']}: {record['reason']}{log}"
        left_s = round((time.monotonic() - started) / number * (len(remaining) - number))
        left = f"; {str(timedelta(seconds=left_s)).zfill(8)} left" * (number < len(remaining))
        say(f"[{number}/{len(remaining)}] {point.identity}: {said}{left}")


def summary(record: Record) -> str:
    """Return what came out of a point, in a few words: the numbers of `comm` are in its tables."""
    metrics = record["results"]["metrics"]
    if "final_loss" not in metrics:
        return record["status"]
    ms = metrics.get("step_time_ms")
    step = f", step {ms:,.1f} ms" if isinstance(ms, (int, float)) else ""
    return f"loss {metrics['final_loss']:.4f}{step}"


def conclude(store: Store) -> int:
    """Print and write the report; return 1 if a point failed, or what it did is wrong."""
    analysis = analyse(store.sweep)
    print(f"\n{report.text(analysis)}")
    written = [path.name for path in report.write(store.folder, analysis, None)]
    print(f"\nresults in {store.folder}: {', '.join(written)}")
    failed = [r for r in store.sweep.records if r["status"] in (FAILED, TIMEOUT)]
    if failed:
        again = "--retry-failed runs them once more"
        print(f"FAILED: {len(failed)} points, their logs are in {store.folder}/points; {again}")
    ran = any(record["status"] != SKIPPED for record in store.sweep.records)
    if not ran:
        print("FAILED: no point can run here: the report says why")
    return cli.FAILED if failed or not ran or report.is_wrong(analysis) else 0


def say(line: str) -> None:
    """Print a line, above the progress bar if there is one."""
    tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()


def words_of(point: Point, args: argparse.Namespace) -> tuple[str, list[str]]:
    """Return a point's script and all its arguments, from the top of the repository."""
    output = from_repository(Path(args.output_dir, "points", point.identity))
    words = [*point.flags, "--output-dir", output]
    return from_repository(Path(REPOSITORY, point.script)), list(map(str, words))


def command_of(point: Point, args: argparse.Namespace) -> str:
    """Return the line that a reader would type at the top of the repository."""
    ranks = point.described["world_size"]
    words = launch.command(args.launcher, *words_of(point, args), ranks)
    return f"OMP_NUM_THREADS={launch.threads(args.launcher, ranks)} {shlex.join(words)}"


def launched(
    point: Point, args: argparse.Namespace, store: Store, ended: Record | None = None
) -> Record:
    """Start a point's script, and return the record: how it ended, what it wrote.

    Unless it cannot run, or it is known how it would have `ended`.
    """
    which = {"id": point.identity, "point": point.described, "repeat": point.repeat}
    record = which | {"started": now(), "launcher": args.launcher, "results": None}
    if point.reason:
        ended = {"status": SKIPPED, "reason": point.reason}
    if ended:
        return record | ended | {"seconds": 0.0, "command": None}
    folder = store.folder / "points" / point.identity
    here = folder.with_name(folder.name + LAUNCH)
    for path in (folder, here):  # left by a sweep that was killed, or by a run that failed
        shutil.rmtree(path, ignore_errors=True)
    ranks, link = point.described["world_size"], point.described["link"]
    outcome = launch.start(args.launcher, *words_of(point, args), ranks, here, args.timeout, link)
    folder.mkdir(exist_ok=True)
    (folder / "log.txt").write_text(f"{outcome.out}\n--- stderr ---\n{outcome.err}")
    shutil.rmtree(here)
    left, damage = point.read(folder)
    status, reason = judge(outcome, damage, point.script.name, args.timeout)
    ended = {"status": status, "reason": reason, "seconds": round(outcome.seconds, 2)}
    return record | ended | {"command": command_of(point, args)} | left


def judge(
    outcome: launch.Outcome, damage: str | None, script: str, timeout_s: float
) -> tuple[str, str | None]:
    """Return a point's status, and the reason in one line where it is not OK."""
    lines = [line for line in outcome.err.splitlines() if NO_MEMORY.search(line)]
    if outcome.code != 0 and lines:  # other ranks may have hung for it
        return OUT_OF_MEMORY, shortened(lines[-1], script)
    if outcome.code is None:
        return TIMEOUT, f"timeout after {timeout_s:g} s"
    if outcome.code:
        said = said_by(script, outcome)
        return (TIMEOUT if re.search(r"\btimed? ?out\b", said, re.IGNORECASE) else FAILED), said
    return (FAILED, f"exit code 0, but {damage}") if damage else (OK, None)


def said_by(script: str, outcome: launch.Outcome) -> str:
    """Return the line in which a script said why it failed; else its last one."""
    errors = [line.strip() for line in outcome.err.splitlines() if line.strip()]
    errors = [line for line in errors if not STACK.match(line)] or errors
    hung = [line for line in errors if "Watchdog caught collective operation timeout" in line]
    own = [line for line in errors if line.startswith(f"{script}: ")]
    checks = [line for line in outcome.out.splitlines() if line.startswith("FAILED: ")]
    if checks and not own:
        return f"its own check failed: {checks[-1].removeprefix('FAILED: ')}"
    line = (hung[:1] or own[-1:] or errors[-1:] or [""])[0]
    return shortened(line, script) or f"exit code {outcome.code}, without a word"


def shortened(line: str, script: str) -> str:
    """Return a script's line without the words before its error."""
    return line.strip().removeprefix(f"{script}: ").removeprefix("error: ")[:300]
