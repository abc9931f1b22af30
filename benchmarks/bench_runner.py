"""Run points, each in processes of its own, and say in records how they went."""

import json
import math
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

import bench_launch
from bench_launch import Outcome
from bench_points import Point
from bench_records import EARLY_STEPS
from bench_settings import Settings
from bench_store import FAILED, OK, SKIPPED, TIMEOUT, Store, now
from bench_strategies import REPOSITORY

LAUNCH = ".launch"  # beside a point's folder, which the script wants to make itself
# Of what faulthandler writes when a rank is ended: where it was, not why.
STACK = re.compile(r"(Current thread|Thread) 0x|File \"|Extension modules: ")
Record = dict[str, Any]


def run_points(
    points: Sequence[Any], store: Store, launcher: str, retry_failed: bool,
    run: Callable[[Any], Record], line_of: Callable[[Record], str],
) -> None:  # fmt: skip
    """Run the points that have no record; print a line for each as it ends, and the time left."""
    for warning in store.sweep.warnings:
        say(f"warning: {warning}")
    ended = {record["id"]: record["status"] for record in store.sweep.records}
    done = {name for name, s in ended.items() if not (retry_failed and s in (FAILED, TIMEOUT))}
    remaining = [point for point in points if point.identity not in done]
    if len(remaining) < len(points):
        say(f"{len(points) - len(remaining)} points have a record already, {len(remaining)} to go")
    bench_launch.prepare(launcher)
    started = time.monotonic()
    hidden = not sys.stderr.isatty()
    for number, point in enumerate(tqdm(remaining, "points", disable=hidden, leave=False), 1):
        record = run(point)
        store.append(record)
        per_point = (time.monotonic() - started) / number
        left_s = round(per_point * (len(remaining) - number))
        place = f"[{number}/{len(remaining)}] {point.identity}"
        left = f"; {clock(left_s)} left" if number < len(remaining) else ""
        say(f"{place}: {line_of(record)}{left}")


def not_ok(record: Record) -> str:
    """Return why a point has no results, and where its log is."""
    log = "" if record["status"] == SKIPPED else f" (points/{record['id']}/log.txt)"
    return f"{record['status']}: {record['reason']}{log}"


def clock(seconds: int) -> str:
    """Return seconds as hours, minutes and seconds."""
    minutes, seconds = divmod(seconds, 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{seconds:02}"


def say(line: str) -> None:
    """Print a line, above the progress bar if there is one."""
    tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()


def run_point(point: Point, settings: Settings, store: Store) -> Record:
    """Run a training point, if it can run, and return its record."""
    script, arguments = words_of(point, settings, store.folder)
    start = Start(settings.launcher, script, arguments, point.world_size, point.link)
    which = point.described(settings)
    record = launched(point, which, start, settings.timeout, store, read_results)
    early = losses(store.point_folder(point.identity) / "metrics.jsonl", EARLY_STEPS)
    return record | ({"losses": early} if early and record["status"] == OK else {})


@dataclass(frozen=True)
class Start:
    """A script, its arguments, and what starts it."""

    launcher: str
    script: str
    arguments: Sequence[str]
    world_size: int
    link: str | None

    @property
    def command(self) -> str:
        """Return the line that a reader would type at the top of the repository."""
        words = bench_launch.command(self.launcher, self.script, self.arguments, self.world_size)
        threads = bench_launch.threads(self.launcher, self.world_size)
        return f"OMP_NUM_THREADS={threads} {bench_launch.quoted(words)}"


def launched(
    point: Any, which: dict[str, Any], start: Start, timeout_s: float, store: Store,
    read: Callable[[Path], tuple[dict[str, Any] | None, str | None]],
) -> Record:  # fmt: skip
    """Start a point's script, if it can run, and return the record: how it ended, what it wrote.

    `read` returns the results in a file, and what is wrong with them.
    """
    record = {"id": point.identity, "point": which, "repeat": point.repeat, "started": now()}
    record |= {"launcher": start.launcher, "results": None}
    if point.reason:
        ended = {"status": SKIPPED, "reason": point.reason, "seconds": 0.0}
        return record | ended | {"command": None}
    folder = store.point_folder(point.identity)
    launch = folder.with_name(folder.name + LAUNCH)
    for path in (folder, launch):  # left by a sweep that was killed, or by a run that failed
        shutil.rmtree(path, ignore_errors=True)
    words = start.launcher, start.script, start.arguments, start.world_size
    outcome = bench_launch.start(*words, launch, timeout_s, start.link)
    folder.mkdir(exist_ok=True)
    (folder / "log.txt").write_text(f"{outcome.out}\n--- stderr ---\n{outcome.err}")
    shutil.rmtree(launch)
    results, damage = read(folder / "results.json")
    status, reason = judge(outcome, damage, Path(start.script).name, timeout_s)
    ended = {"status": status, "reason": reason, "seconds": round(outcome.seconds, 2)}
    return record | ended | {"command": start.command, "results": results}


def words_of(point: Point, settings: Settings, folder: Path) -> tuple[str, list[str]]:
    """Return script and arguments of a point, as they are started from the repository."""
    output = from_repository(folder / "points" / point.identity)
    return from_repository(point.strategy.path), point.arguments(settings, output)


def command_of(point: Point, settings: Settings, folder: Path) -> str:
    """Return the line that a reader would type for a training point."""
    script, arguments = words_of(point, settings, folder)
    return Start(settings.launcher, script, arguments, point.world_size, point.link).command


def from_repository(path: Path) -> str:
    """Return a path relative to the repository if it is inside, as whole otherwise."""
    path = path.resolve()
    return str(path.relative_to(REPOSITORY) if path.is_relative_to(REPOSITORY) else path)


def read_results(path: Path) -> tuple[dict[str, Any] | None, str | None]:
    """Return what a script wrote, and what is wrong with it."""
    if not path.exists():
        return None, "it wrote no results.json"
    try:
        results = json.loads(path.read_text())
        loss = results["metrics"]["final_loss"]
    except (ValueError, KeyError, TypeError) as error:
        return None, f"its results.json has no metrics.final_loss ({type(error).__name__})"
    whole = isinstance(loss, float) and math.isfinite(loss)
    return results, None if whole else f"its final loss is {loss}"


def losses(path: Path, most: int) -> list[float]:
    """Return the losses of the first steps, as metrics.jsonl has them; none where it lacks one."""
    found: list[float] = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            values = json.loads(line)
            if "loss" in values and values["step"] == len(found) + 1 and len(found) < most:
                found.append(values["loss"])
        except (ValueError, KeyError, TypeError):
            return []
    return found


def judge(
    outcome: Outcome, damage: str | None, script: str, timeout_s: float
) -> tuple[str, str | None]:
    """Return a point's status, and the reason in one line where it is not OK."""
    if outcome.code is None:
        return TIMEOUT, f"timeout after {timeout_s:g} s"
    if outcome.code:
        said = said_by(script, outcome)
        return (TIMEOUT if re.search(r"\btimed? ?out\b", said, re.IGNORECASE) else FAILED), said
    return (FAILED, f"exit code 0, but {damage}") if damage else (OK, None)


def said_by(script: str, outcome: Outcome) -> str:
    """Return the line in which a script said why it failed; else its last one."""
    errors = [line.strip() for line in outcome.err.splitlines() if line.strip()]
    errors = [line for line in errors if not STACK.match(line)] or errors
    hung = [line for line in errors if "Watchdog caught collective operation timeout" in line]
    own = [line for line in errors if line.startswith(f"{script}: ")]
    checks = [line for line in outcome.out.splitlines() if line.startswith("FAILED: ")]
    if checks and not own:
        return f"its own check failed: {checks[-1].removeprefix('FAILED: ')}"
    line = (hung[:1] or own[-1:] or errors[-1:] or [""])[0]
    said = line.removeprefix(f"{script}: ").removeprefix("error: ")
    return said[:300] or f"exit code {outcome.code}, without a word"
