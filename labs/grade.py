"""Grade a lab: run each task of an answer on 2 and on 3 ranks, and name what is wrong.

    python labs/grade.py 2                          your file in runs/labs/2-ddp
    python labs/grade.py 2 --file mine.py --task pack
    python labs/grade.py 2 --all FOLDER --csv points.csv    a class: NAME.py or NAME/mine.py

The first call puts the lab's starter there. Each task is graded by itself: in all other holes stand
the lesson's own lines, so one mistake costs one task. Look for: the sentence beside a task. --hint
gives the next hint for the first task that is not right. Exit code 1 as long as one is not.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from lab_parts import submissions
from lab_parts.holes import REPO, TOGETHER, Answer, Lesson
from lab_parts.judging import judge_number, read_predictions
from lab_parts.running import Setting, Task, judge, run
from legacy_common import cli

LABS = Path(__file__).parent
HINT = re.compile(r"<summary>Hint \d+ for `(\w+)`</summary>\n\n(.*?)\n*</details>", re.S)


@dataclass
class Lab:
    """A lab's folder, its tasks.py, and the lessons that it is cut from."""

    folder: Path
    tasks: ModuleType
    lessons: list[Lesson] = field(default_factory=list)
    measured: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def together(self) -> Task | None:
        """Return what the whole answer has to do, without the lesson's lines in any hole."""
        return getattr(self.tasks, "WHOLE", None)

    @property
    def exam(self) -> Any:
        """Return what draws a case and grades it, where a lab has that instead of holes."""
        return getattr(self.tasks, "exam", None)

    @property
    def starter(self) -> Path:
        return self.folder / "starter.py"

    def hints(self, task: str) -> list[str]:
        """Return a task's hints, which stand folded on the lab's page, in their order."""
        text = (self.folder / "README.md").read_text()
        return [" ".join(hint.split()) for name, hint in HINT.findall(text) if name == task]


@dataclass
class Verdict:
    """How a task was graded: `wrong` says what is, and is None where nothing is."""

    task: str
    wrong: str | None
    printed: str = ""


def load(name: str) -> Lab:
    """Find a lab by its number or name. Raises: UsageError with the list, where there is none."""
    folders = sorted(path.parent for path in LABS.glob("*/tasks.py"))
    for folder in folders:
        if name in (folder.name, *folder.name.split("-", 1)):
            spec = importlib.util.spec_from_file_location("tasks", folder / "tasks.py")
            tasks = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(tasks)
            return Lab(folder, tasks, [Lesson(path, tasks.TASKS) for path in tasks.LESSONS])
    known = ", ".join(folder.name for folder in folders)
    raise cli.UsageError(f"there is no lab {name}: choose from {known}")


def grade_task(
    lab: Lab, answer: Answer, task: str, seed: int, sizes: list[int], settle=lambda: None
) -> Verdict:
    """Grade one hole on each number of ranks, up to the first that goes wrong.

    settle() ends what the answer has left running, before it is judged.
    """
    if empty := answer.missing(task):
        return Verdict(task, empty)
    for ranks in sizes:
        setting, asked = Setting(0, ranks, seed), lab.tasks.TASKS.get(task, lab.together)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            seen, wrong, printed = run(asked.see, answer, task, setting, Path(folder))
            settle()
        if seen is not None:
            wrong = judge(asked, seen, setting)
        if wrong:
            return Verdict(task, f"on {ranks} ranks: {wrong}", printed)
    return Verdict(task, None, printed)


def grade_question(lab: Lab, name: str, said) -> Verdict:
    """Measure what was to be predicted, with the lesson's own code, and compare."""
    question = lab.tasks.QUESTIONS[name]
    if said == "":
        return Verdict(name, "not answered")
    if not isinstance(said, int | float) or isinstance(said, bool):
        return Verdict(name, f"answers.toml has {said!r}: a number is needed, in {question.unit}")
    return Verdict(name, judge_number(question, said, measured(lab, name)))


def measured(lab: Lab, name: str) -> float:
    """Run the lesson, once, and return the number that question `name` asks for."""
    if name in lab.measured:
        return lab.measured[name]
    question, lesson = lab.tasks.QUESTIONS[name], Answer(lab.starter, lab.lessons)
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(0, question.ranks, 0)
        seen, why, _ = run(question.measure, lesson, None, setting, Path(folder))
    if seen is None:
        raise RuntimeError(f"{name} cannot be measured: {why}")
    lab.measured[name] = seen[0]
    return seen[0]


def check_chosen(lab: Lab, chosen: str | None) -> None:
    """Raise UsageError where there is no such task."""
    known = [*lab.tasks.TASKS, *lab.tasks.QUESTIONS] + [TOGETHER] * bool(lab.together)
    if chosen and chosen not in known:
        raise cli.UsageError(f"--task {chosen}: lab {lab.name} has {', '.join(known)}")


def grade(lab: Lab, answer: Answer, predictions: Path | None, chosen, seed, sizes, **settle):
    """Yield the verdict on each task, then on each prediction, or on the chosen one alone."""
    check_chosen(lab, chosen)
    answer.tree  # noqa: B018  a file that is no Python is said before anything runs
    said = read_predictions(predictions, lab.tasks.QUESTIONS) if predictions else {}
    if lab.exam:
        graded = lab.exam.grade(answer, said, chosen, seed, sizes, **settle)
        yield from (Verdict(*told) for told in graded)
        return
    whole = True
    for task in lab.tasks.TASKS:
        if chosen in (None, task):
            yield (verdict := grade_task(lab, answer, task, seed, sizes, **settle))
            whole = whole and not verdict.wrong
    if lab.together and chosen in (None, TOGETHER):
        if whole:
            yield grade_task(lab, answer, TOGETHER, seed, sizes, **settle)
        else:
            yield Verdict(TOGETHER, "graded once all tasks are right")
    for name in said:
        if chosen in (None, name):
            yield grade_question(lab, name, said[name])


def work_folder(lab: Lab, seed: int) -> Path:
    """Return the folder for a student's files; the starter and the questions are put there once."""
    folder = REPO / "runs" / "labs" / lab.name
    if lab.exam:
        return lab.exam.hand_out(folder / f"seed-{seed}", seed)
    folder.mkdir(parents=True, exist_ok=True)
    for source, target in (("starter.py", "mine.py"), ("answers.toml", "answers.toml")):
        if not (folder / target).exists():
            shutil.copy(lab.folder / source, folder / target)
            print(f"{(folder / target).relative_to(REPO)} is yours to fill", flush=True)
    return folder


def next_hint(lab: Lab, task: str, folder: Path) -> str:
    """Return the hint after the one that was given last, and note that it was."""
    hints, note = lab.hints(task), folder / "hints.json"
    if not hints:
        return f"{task}: the page has no hint: read what the lesson says of it"
    given = json.loads(note.read_text()) if note.exists() else {}
    number = min(given.get(task, 0), len(hints) - 1)
    note.write_text(json.dumps(given | {task: number + 1}))
    return f"hint {number + 1} of {len(hints)} for {task}: {hints[number]}"


def results(lab: Lab, file: Path, seed: int, verdicts: list[Verdict]) -> dict:
    """Return our JSON, in which Gradescope finds its own fields: score and tests."""
    tests = [
        {"name": v.task, "score": int(not v.wrong), "max_score": 1, "output": v.wrong or "right",
         "status": "failed" if v.wrong else "passed", "printed": v.printed}
        for v in verdicts
    ]  # fmt: skip
    total = {"score": sum(test["score"] for test in tests), "max_score": len(tests)}
    return {"lab": lab.name, "file": file.name, "seed": seed, **total, "tests": tests}


def grade_class(lab: Lab, args) -> int:
    """Grade a folder of answers, each in a sandbox."""
    check_chosen(lab, args.task)
    found = submissions.submissions_in(args.all)
    asked = lab.tasks.QUESTIONS if any(len(one.files) > 1 for one in found) else ()
    names = [*lab.tasks.TASKS, *[TOGETHER] * bool(lab.together), *asked]
    names = [args.task] if args.task else names
    for name in set(asked) & set(names) if not lab.exam else ():
        measured(lab, name)

    def grade_file(name: str, file: Path, predictions: Path | None, settle):
        answer, own_seed = Answer(file, lab.lessons), re.search(r"seed-(\d+)$", name)
        seed = int(own_seed[1]) if lab.exam and own_seed else args.seed
        return grade(lab, answer, predictions, args.task, seed, args.ranks, settle=settle)

    graded, began, width = [], time.monotonic(), max(len(one.name) for one in found)
    for one in submissions.grade_all(args.all, names, grade_file, args.jobs, not args.no_sandbox):
        graded.append(one)
        print(f"{one.name:<{width}} {one.total:>2} of {len(names)}  {one.problem or ''}".rstrip(),
              flush=True)  # fmt: skip
        if args.csv:
            submissions.write_csv(args.csv, names, graded)
    whole = sum(one.total == len(names) for one in graded)
    print(f"{len(graded)} graded in {time.monotonic() - began:.0f} s, {whole} of them all right")
    return 0


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise cli.UsageError(message)


def parse_args():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("lab", help="its number or name: 2, ddp or 2-ddp")
    add("--file", type=Path, help="the answer (runs/labs/LAB/mine.py, made from the starter)")
    add("--task", help="grade this one alone (all)")
    add("--seed", type=int, default=0, help="what values are drawn from (0)")
    add("--ranks", type=cli.positive_int, nargs="+", default=[2, 3], help="numbers of ranks (2 3)")
    add("--hint", action="store_true", help="give the next hint for the first task not right")
    add("--json", type=Path, help="write the verdicts there, as Gradescope reads them")
    add("--all", type=Path, metavar="FOLDER", help="grade a class: NAME.py or NAME/mine.py there")
    add("--csv", type=Path, help="with --all: write a row per student there")
    add("--jobs", type=cli.positive_int, default=max(1, (os.cpu_count() or 2) // 2),
        help="with --all: how many at a time (half of the cores)")  # fmt: skip
    add("--no-sandbox", action="store_true", help="with --all: answers get your account's rights")
    args = parser.parse_args()
    for name in ("json", "csv"):
        path = getattr(args, name)
        if path and not path.resolve().parent.is_dir():
            raise cli.UsageError(f"--{name} {path}: there is no such folder")
    if args.all and (args.file or args.json or args.hint):
        raise cli.UsageError("--all grades a folder: without --file, --json and --hint")
    if not args.all and (args.csv or args.no_sandbox):
        raise cli.UsageError("--csv and --no-sandbox belong to --all FOLDER")
    return args


def main():
    args = parse_args()
    lab = load(args.lab)
    if args.all:
        return grade_class(lab, args)
    folder = args.file.resolve().parent if args.file else work_folder(lab, args.seed)
    answer = Answer((args.file or folder / "mine.py").resolve(), lab.lessons)
    predictions = folder / "answers.toml"
    predictions = predictions if predictions.exists() else None
    verdicts = []
    for verdict in grade(lab, answer, predictions, args.task, args.seed, args.ranks):
        verdicts.append(verdict)
        print(f"{verdict.task:<12} {verdict.wrong or 'right'}", flush=True)
    wrong = [verdict for verdict in verdicts if verdict.wrong]
    if args.json:
        args.json.write_text(json.dumps(results(lab, answer.path, args.seed, verdicts), indent=1))
    if args.hint and wrong:
        print(next_hint(lab, wrong[0].task, folder))
    print(f"{len(verdicts) - len(wrong)} of {len(verdicts)} right")
    return cli.FAILED if wrong else 0


if __name__ == "__main__":
    cli.run(main)
