"""Run one point in processes of its own, and say in a record how it went."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import bench_launch
from bench_launch import Outcome
from bench_points import Point
from bench_settings import Settings
from bench_store import FAILED, OK, SKIPPED, TIMEOUT, Store, now
from bench_strategies import REPOSITORY

LAUNCH = ".launch"  # beside a point's folder, which the script wants to make itself


def run_point(point: Point, settings: Settings, store: Store) -> dict[str, Any]:
    """Run a point, if it can run, and return its record."""
    record = {"id": point.identity, "point": point.described(settings), "repeat": point.repeat}
    started = now()
    if point.reason:
        ended = {"status": SKIPPED, "reason": point.reason, "seconds": 0.0, "results": None}
        return record | ended | {"started": started, "launcher": settings.launcher, "command": None}
    folder = store.point_folder(point.identity)
    output, launch = folder, folder.with_name(folder.name + LAUNCH)
    for path in (output, launch):  # left by a sweep that was killed, or by a run that failed
        shutil.rmtree(path, ignore_errors=True)
    script, arguments = words_of(point, settings, store.folder)
    outcome = bench_launch.start(
        settings.launcher, script, arguments, point.world_size, launch, settings.timeout, point.link
    )
    output.mkdir(exist_ok=True)
    (output / "log.txt").write_text(f"{outcome.out}\n--- stderr ---\n{outcome.err}")
    shutil.rmtree(launch)
    results, damage = read_results(output / "results.json")
    status, reason = judge(outcome, damage, Path(script).name, settings.timeout)
    ended = {"status": status, "reason": reason, "seconds": round(outcome.seconds, 2)}
    return (
        record
        | ended
        | {
            "started": started,
            "launcher": settings.launcher,
            "command": command_of(point, settings, store.folder),
            "results": results,
        }
    )


def words_of(point: Point, settings: Settings, folder: Path) -> tuple[str, list[str]]:
    """Return script and arguments of a point, as they are started from the repository."""
    output = from_repository(folder / "points" / point.identity)
    return from_repository(point.strategy.path), point.arguments(settings, output)


def command_of(point: Point, settings: Settings, folder: Path) -> str:
    """Return the line that a reader would type at the top of the repository."""
    script, arguments = words_of(point, settings, folder)
    words = bench_launch.command(settings.launcher, script, arguments, point.world_size)
    return bench_launch.quoted(words)


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


def judge(
    outcome: Outcome, damage: str | None, script: str, timeout_s: float
) -> tuple[str, str | None]:
    """Return a point's status, and the reason in one line where it is not OK."""
    if outcome.code is None:
        return TIMEOUT, f"timeout after {timeout_s:g} s"
    if outcome.code:
        return FAILED, said_by(script, outcome)
    return (FAILED, f"exit code 0, but {damage}") if damage else (OK, None)


def said_by(script: str, outcome: Outcome) -> str:
    """Return the line in which a script said why it failed; else its last one."""
    errors = [line.strip() for line in outcome.err.splitlines() if line.strip()]
    own = [line for line in errors if line.startswith(f"{script}: ")]
    checks = [line for line in outcome.out.splitlines() if line.startswith("FAILED: ")]
    if checks and not own:
        return f"its own check failed: {checks[-1].removeprefix('FAILED: ')}"
    line = (own[-1:] or errors[-1:] or [""])[0]
    said = line.removeprefix(f"{script}: ").removeprefix("error: ")
    return said[:300] or f"exit code {outcome.code}, without a word"
