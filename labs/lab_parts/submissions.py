"""Grade the answers of a class: a sandbox for each, a line on the screen, a row of CSV."""

import csv
import functools
import importlib
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab_parts import sandbox
from legacy_common.cli import UsageError

LARGEST = 2**20  # bytes of a file: an answer has some thousand
LONGEST = 300  # letters of a note


@dataclass
class Submission:
    """A student's files, and how they were graded: a point for each task that is right."""

    name: str
    files: list[Path]
    problem: str | None = None
    points: dict[str, int] = field(default_factory=dict)

    def add(self, said: dict[str, Any]) -> None:
        """Take a verdict; the first thing that is wrong is the note."""
        if "task" in said:
            self.points[said["task"]] = int(not said["wrong"])
            self._note(said["wrong"] and f"{said['task']}: {said['wrong']}")
        self._note(said.get("problem"))

    def _note(self, text: str | None) -> None:
        if text and not self.problem:
            letters = (c if c.isprintable() else " " for c in text[:LONGEST])
            self.problem = " ".join("".join(letters).split())

    @property
    def total(self) -> int:
        return sum(self.points.values())


def submissions_in(folder: Path) -> list[Submission]:
    """Return what is in a folder: NAME.py, or NAME/mine.py with an answers.toml beside it.

    Raises: UsageError where there is nothing to grade, or a name twice.
    """
    if not folder.is_dir():
        raise UsageError(f"--all {folder}: there is no such folder")
    if needed := [path for path in sandbox.shown() if path.is_relative_to(folder)]:
        raise UsageError(f"--all {folder}: {needed[-1]} is in it: take a folder of answers alone")
    found: dict[str, Submission] = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith((".", "__")) or not (path.is_dir() or path.suffix == ".py"):
            continue
        files = [path / "mine.py", path / "answers.toml"] if path.is_dir() else [path]
        name = path.name.removesuffix(".py")
        if name in found:
            raise UsageError(f"--all {folder}: {name}.py and {name}/ are there: which one?")
        there = [file for file in files if file.is_file() or file == files[0]]
        found[name] = Submission(name, there, fault_of(path, there))
    if not found:
        raise UsageError(f"--all {folder}: no NAME.py and no NAME/mine.py is there")
    return list(found.values())


def fault_of(path: Path, files: list[Path]) -> str | None:
    """Say why files are not even opened; None where they are."""
    for file in files:
        if not file.is_file():
            return f"there is no {file.name}"
        if path.is_symlink() or file.is_symlink():
            return f"{file.name} is a link: its own file is graded, no other one"
        if file.stat().st_size > LARGEST:
            return f"{file.name} has {file.stat().st_size:,} bytes: {LARGEST:,} at most"
    return None


def grade_all(
    folder: Path, names: list[str], grade: Callable[..., Iterator], jobs: int, isolated: bool,
    limits: sandbox.Limits = sandbox.Limits(),  # noqa: B008  it cannot change
) -> Iterator[Submission]:  # fmt: skip
    """Yield each submission once it is graded. `names` are the tasks in their order.

    grade(name, file, predictions, settle) yields verdicts; it runs in the sandbox.
    """
    importlib.import_module("torch._dynamo")  # once here: ranks that need it take seconds for it
    waiting, running = submissions_in(folder)[::-1], []
    with ExitStack() as all_folders:
        top = Path(all_folders.enter_context(tempfile.TemporaryDirectory()))
        if isolated and (why := sandbox.why_not(top)):
            raise UsageError(
                f"no sandbox on this machine ({why}); --no-sandbox grades without one: answers "
                "then have your account's files and network"
            )
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    one = waiting.pop()
                    if one.problem:
                        yield one
                        continue
                    place = Path(all_folders.enter_context(tempfile.TemporaryDirectory()))
                    body = box_body(one, grade, isolated)
                    hidden = [folder.resolve(), sandbox.REPO / "runs"]
                    box = sandbox.start(body, isolated, one.files, hidden, place, limits)
                    running.append((one, box))
                for one, box in [(one, box) for one, box in running if box.over()]:
                    running.remove((one, box))
                    for said in box.lines():
                        one.add(said)
                    one.problem = box.ended or one.problem
                    one.points = {name: one.points.get(name, 0) for name in names}
                    yield one
                time.sleep(sandbox.POLL_S)
        finally:
            for _, box in running:
                box.end("interrupted")


def box_body(one: Submission, grade: Callable[..., Iterator], isolated: bool):
    """Return what grades a submission in its box, where its files are in the working folder."""

    def body(say: Callable[[Any], None]) -> None:
        own = [Path(file.name).resolve() for file in one.files]
        predictions = own[1] if len(own) > 1 else None
        try:
            settle = functools.partial(sandbox.kill_others, isolated)
            for verdict in grade(one.name, own[0], predictions, settle):
                say({"task": verdict.task, "wrong": verdict.wrong and verdict.wrong[:LONGEST]})
        except UsageError as error:
            say({"problem": str(error).removeprefix("--file ").replace(f"{own[0].parent}/", "")})
        except Exception as error:  # whatever an answer has done to its folder
            say({"problem": f"the grader failed: {type(error).__name__}: {error}"[:LONGEST]})

    return body


def write_csv(path: Path, names: list[str], graded: list[Submission]) -> None:
    """Write a row per student: points per task, their sum, of how many, and what is wrong first."""
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["name", *names, "total", "of", "note"])
        for one in sorted(graded, key=lambda one: one.name):
            # Spreadsheets compute what begins so.
            name = f"'{one.name}" if one.name[0] in "=+-@" else one.name
            points = [one.points.get(task, 0) for task in names]
            table.writerow([name, *points, one.total, len(names), one.problem or ""])
