"""Grade the answers of a class: a process each, a line on the screen, a row of CSV."""

import csv
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from dist_common.cli import UsageError
from lab_parts import isolation

LARGEST = 2**20  # bytes of a file; an answer has some thousand
LONGEST = 300  # characters of the sentences about one task


@dataclass
class Submission:
    """A student's files and their grades. The note lists everything that is wrong."""

    name: str
    files: list[Path]
    problem: str = ""
    results: dict = field(default_factory=lambda: {"tests": []})

    @property
    def points(self) -> dict[str, int]:
        return {test["name"]: test["score"] for test in self.results["tests"]}

    @property
    def total(self) -> int:
        return sum(self.points.values())

    @property
    def note(self) -> str:
        tests = [test for test in self.results["tests"] if not test["score"]]
        wrong = [f"{t['name']}: {'; '.join(t['faults'])}"[:LONGEST] for t in tests]
        text = "; ".join([self.problem[:LONGEST], *wrong] if self.problem else wrong)
        printable = "".join(c if c.isprintable() else " " for c in text)
        return " ".join(printable.split())


def submissions_in(folder: Path) -> list[Submission]:
    """Return the answers of a folder: NAME.py, or NAME/mine.py and NAME/answers.toml.

    Raises: UsageError if there is nothing to grade, or a name twice.
    """
    if not folder.is_dir():
        raise UsageError(f"--all {folder}: there is no such folder")
    if isolation.REPO.is_relative_to(folder.resolve()):
        raise UsageError(f"--all {folder}: this guide is in it: use a separate folder")
    answers: dict[str, Submission] = {}
    for path in sorted(folder.iterdir()):
        ignored = path.name.startswith((".", "__"))
        if ignored or not (path.is_dir() or path.suffix == ".py"):
            continue
        files = [path]
        if path.is_dir():
            files = [path / "mine.py", path / "answers.toml"]
        name = path.name.removesuffix(".py")
        if name in answers:
            raise UsageError(f"--all {folder}: both {name}.py and {name}/: which one?")
        files = [file for file in files if file.is_file() or file == files[0]]
        answers[name] = Submission(name, files, find_fault(path, files))
    if not answers:
        raise UsageError(f"--all {folder}: no NAME.py and no NAME/mine.py is there")
    return list(answers.values())


def find_fault(path: Path, files: list[Path]) -> str:
    """Say why files are not even opened, or return ""."""
    for file in files:
        if path.is_symlink() or file.is_symlink():
            return f"{file.name} is a link: hand in the file itself"
        if not file.is_file():
            return f"there is no {file.name}"
        if file.stat().st_size > LARGEST:
            return f"{file.name} is too large: at most {LARGEST:,} bytes"
    return ""


def grade_all(
    folder: Path, answers: list[Submission], arguments, jobs: int, kind: str
) -> Iterator[Submission]:
    """Yield the submissions in their order, once each is graded.

    `arguments(submission)` returns grade.py's arguments besides --file and --json.
    """
    runner = isolation.Runner()

    def grade_one(one: Submission) -> Submission:
        if one.problem:
            return one
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
            place = Path(name).resolve()
            names = ["mine.py", "answers.toml"]
            for file, target in zip(one.files, names, strict=False):
                shutil.copy(file, place / target)
            words = [*arguments(one), "--file", str(place / "mine.py"), "--json", "-"]
            read_results(
                one, *runner.run(isolation.wrap(kind, place, folder.resolve(), words))
            )
        return one

    pool = ThreadPoolExecutor(jobs)
    try:
        yield from pool.map(grade_one, answers)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        runner.end_all()


def read_results(one: Submission, code: int | None, out: str, err: str) -> None:
    """Take the results from the last line that grade.py printed, or its error."""
    lines = out.splitlines()
    if code is None:
        one.problem = f"ended after {isolation.SECONDS} s"
    elif code in (0, 1) and lines and lines[-1].startswith("{"):
        one.results = json.loads(lines[-1])
    else:
        last = (err.splitlines() or [f"the grader ended with exit code {code}"])[-1]
        last = last.removeprefix("grade.py: error: ")
        one.problem = re.sub(r"--file \S*/", "", last)


def write_csv(path: Path, names: list[str], graded: list[Submission]) -> None:
    """Write a row per student: points by task, total, of how many, what is wrong."""
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["name", *names, "total", "of", "note"])
        for one in sorted(graded, key=lambda one: one.name):
            # A spreadsheet would compute a cell that begins with one of these.
            name = f"'{one.name}" if one.name[0] in "=+-@" else one.name
            points = [one.points.get(task, 0) for task in names]
            table.writerow([name, *points, one.total, len(names), one.note])


def write_feedback(folder: Path, one: Submission) -> None:
    """Write a student's results, as Gradescope reads them."""
    results = {**one.results, "output": one.problem} if one.problem else one.results
    (folder / f"{one.name}.json").write_text(json.dumps(results, indent=1))
