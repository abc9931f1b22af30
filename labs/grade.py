"""Grade a lab: run each task of an answer on 2 and on 3 ranks, and name each mistake.

    python labs/grade.py 2                          your file in runs/labs/2-ddp
    python labs/grade.py 2 --file mine.py --task pack
    python labs/grade.py 2 --all FOLDER --csv points.csv    a class

The first call writes the lab's starter there. The grader puts the lesson's lines into
all holes except the one that it grades, so one mistake costs one task. Look for: the
sentences next to each task. --hint gives the next hint for the first wrong task.
The exit code is 1 until every task is right.
"""

import argparse
import importlib.util
import json
import os
import random
import re
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any

from dist_common import cli
from lab_parts import isolation, running, submissions
from lab_parts.holes import REPO, TOGETHER, Answer, Lesson, make_starter
from lab_parts.judging import distinct, judge_number, read_predictions
from lab_parts.running import Setting, Task

LABS = Path(__file__).parent
SHOWN = 5  # faults of a task on the screen; --json writes all of them
HINT = re.compile(
    r"<summary>Hint \d+ for `(\w+)`</summary>\n\n(.*?)\n*</details>", re.S
)


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
        """Return the task of the whole answer, without the lesson's lines."""
        return getattr(self.tasks, "WHOLE", None)

    @property
    def exam(self) -> Any:
        """Return what draws and grades cases, in a lab without holes."""
        return getattr(self.tasks, "exam", None)

    @property
    def graded(self) -> list[str]:
        """Return the names of the tasks, without the predictions."""
        return [*self.tasks.TASKS, TOGETHER] if self.together else [*self.tasks.TASKS]

    def hints(self, task: str) -> list[str]:
        """Return a task's hints from the lab's page, in their order."""
        text = (self.folder / "README.md").read_text()
        hints = HINT.findall(text)
        return [" ".join(hint.split()) for name, hint in hints if name == task]

    def starter(self, solved: bool = False) -> str:
        """Return the file that a student fills; solved, with the lesson's own lines."""
        title = f"Lab {self.name[0]}: fill the holes, until every task is right."
        return make_starter(title, self.lessons, self.tasks.LESSONS, solved)

    def solution(self, seed: int) -> str:
        """Return an answer made of the lesson's own lines."""
        if self.exam:
            return self.exam.draw(seed)[0].script("cured.py")
        return self.starter(solved=True)


@dataclass
class Verdict:
    """How a task was graded: its distinct faults, and the ranks' output."""

    task: str
    faults: list[str] = field(default_factory=list)
    printed: str = ""

    @property
    def lines(self) -> list[str]:
        """Return what the screen shows of the task."""
        lines = self.faults[:SHOWN] or ["right"]
        if len(self.faults) > SHOWN:
            lines.append(f"and {len(self.faults) - SHOWN} more")
        return lines


def load(name: str) -> Lab:
    """Find a lab by its number or name. Raises: UsageError with the list of labs."""
    folders = sorted(path.parent for path in LABS.glob("*/tasks.py"))
    for folder in folders:
        if name in (folder.name, *folder.name.split("-", 1)):
            spec = importlib.util.spec_from_file_location("tasks", folder / "tasks.py")
            tasks = importlib.util.module_from_spec(spec)
            sys.path.append(str(folder))  # tasks.py imports files of its folder
            spec.loader.exec_module(tasks)
            lessons = [Lesson(path, tasks.TASKS) for path in tasks.LESSONS]
            return Lab(folder, tasks, lessons)
    known = ", ".join(folder.name for folder in folders)
    raise cli.UsageError(f"there is no lab {name}: choose from {known}")


def grade_task(
    lab: Lab, answer: Answer, task: str, seed: int, sizes: list[int]
) -> Verdict:
    """Grade a hole on each number of ranks, up to an error or a hang."""
    if empty := answer.missing(task):
        return Verdict(task, [empty])
    faults, printed = [], ""
    for ranks in sizes:
        asked = lab.tasks.TASKS.get(task, lab.together)
        more, results = running.grade(asked, answer, task, Setting(0, ranks, seed))
        printed = printed if faults else results.printed  # of the first fault
        faults += [f"on {ranks} ranks: {fault}" for fault in more]
        if results.seen is None:
            break
    return Verdict(task, distinct(faults), printed)


def grade_question(lab: Lab, name: str, said) -> Verdict:
    """Compare a prediction with a measurement of the lesson."""
    unit = lab.tasks.QUESTIONS[name].unit
    if said == "":
        return Verdict(name, ["not answered"])
    if not isinstance(said, int | float) or isinstance(said, bool):
        return Verdict(name, [f"answers.toml has {said!r}: write a number, in {unit}"])
    fault = judge_number(lab.tasks.QUESTIONS[name], said, measured(lab, name))
    return Verdict(name, [fault] if fault else [])


def measured(lab: Lab, name: str) -> float:
    """Run the lesson, once, and return the number that a question asks for."""
    if name not in lab.measured:
        question = lab.tasks.QUESTIONS[name]
        setting = Setting(0, question.ranks, 0)
        with tempfile.TemporaryDirectory() as folder:
            lesson = Answer(Path(folder) / "lesson.py", lab.lessons)
            lesson.path.write_text(lab.solution(0))
            results = running.run(question.measure, lesson, TOGETHER, setting)
        if results.seen is None:
            raise RuntimeError(f"{name} cannot be measured: {results.problem}")
        lab.measured[name] = results.seen[0]
    return lab.measured[name]


def check_chosen(lab: Lab, chosen: str | None) -> None:
    """Raise UsageError if there is no such task."""
    known = [*lab.graded, *lab.tasks.QUESTIONS]
    if chosen and chosen not in known:
        raise cli.UsageError(f"--task {chosen}: lab {lab.name} has {', '.join(known)}")


def grade(lab: Lab, answer: Answer, predictions: Path | None, chosen, seed, sizes):
    """Yield a verdict for each task and each prediction, or for the chosen one."""
    check_chosen(lab, chosen)
    answer.tree  # noqa: B018  report a file that is not Python before anything runs
    said = read_predictions(predictions, lab.tasks.QUESTIONS) if predictions else {}
    if lab.exam:
        for verdict in lab.exam.grade(answer, said, chosen, seed, sizes):
            yield Verdict(*verdict)
        return
    whole = True
    for task in lab.tasks.TASKS:
        if chosen in (None, task):
            verdict = grade_task(lab, answer, task, seed, sizes)
            whole = whole and not verdict.faults
            yield verdict
    if lab.together and chosen in (None, TOGETHER):
        if whole:
            yield grade_task(lab, answer, TOGETHER, seed, sizes)
        else:
            yield Verdict(TOGETHER, ["graded when all tasks are right"])
    for name in said:
        if chosen in (None, name):
            yield grade_question(lab, name, said[name])


def work_folder(lab: Lab, seed: int) -> Path:
    """Return the folder of a student's files; write the starter there once."""
    folder = REPO / "runs" / "labs" / lab.name
    if lab.exam:
        return lab.exam.hand_out(folder / f"seed-{seed}", seed)
    folder.mkdir(parents=True, exist_ok=True)
    questions = (lab.folder / "answers.toml").read_text()
    for name, text in (("mine.py", lab.starter()), ("answers.toml", questions)):
        if not (folder / name).exists():
            (folder / name).write_text(text)
            print(f"{(folder / name).relative_to(REPO)} is yours to fill", flush=True)
    return folder


def next_hint(lab: Lab, task: str, folder: Path) -> str:
    """Return the next hint for a task, and note that it was given."""
    hints, note = lab.hints(task), folder / "hints.json"
    if not hints:
        return f"{task}: the page has no hint: read the lesson"
    given = json.loads(note.read_text()) if note.exists() else {}
    number = min(given.get(task, 0), len(hints) - 1)
    note.write_text(json.dumps(given | {task: number + 1}))
    return f"hint {number + 1} of {len(hints)} for {task}: {hints[number]}"


def results(lab: Lab, file: Path, seed: int, verdicts: list[Verdict]) -> dict:
    """Return the results as JSON with Gradescope's fields: score, max_score, tests."""
    tests = [
        {
            "name": verdict.task,
            "score": 0 if verdict.faults else 1,
            "max_score": 1,
            "output": "\n".join(verdict.faults) or "right",
            "faults": verdict.faults,
            "status": "failed" if verdict.faults else "passed",
            "printed": verdict.printed,
        }
        for verdict in verdicts
    ]
    score = sum(test["score"] for test in tests)
    total = {"score": score, "max_score": len(tests)}
    return {"lab": lab.name, "file": file.name, "seed": seed, **total, "tests": tests}


def grade_class(lab: Lab, args) -> int:
    """Grade a folder of answers, after an answer made of the lesson's own lines."""
    check_chosen(lab, args.task)
    answers = submissions.submissions_in(args.all)
    asked = lab.tasks.QUESTIONS if any(len(one.files) > 1 for one in answers) else ()
    names = [args.task] if args.task else [*lab.graded, *asked]
    kind = isolation.choose()
    if kind == "none":
        print(
            "warning: there is neither bubblewrap nor a Docker image `labs` here: "
            "answers can read your files and use your network"
        )
    print(f"seed {args.seed}, isolation: {kind}", flush=True)

    def arguments(one: submissions.Submission) -> list[str]:
        named = re.search(r"seed-(\d+)$", one.name)
        seed = named[1] if lab.exam and named else args.seed
        words = [lab.name, "--seed", str(seed), "--ranks", *map(str, args.ranks)]
        return [*words, "--task", args.task] if args.task else words

    def grade_all(those):
        return submissions.grade_all(args.all, those, arguments, args.jobs, kind)

    check_lesson(lab, args, grade_all)
    graded, began = [], time.monotonic()
    width = max(len(one.name) for one in answers)
    for one in grade_all(answers):
        graded.append(one)
        line = f"{one.name:<{width}} {one.total:>2} of {len(names)}  {one.note}"
        print(line.rstrip(), flush=True)
        if args.json:
            submissions.write_feedback(args.json, one)
        if args.csv:
            submissions.write_csv(args.csv, names, graded)
    whole = sum(one.total == len(names) for one in graded)
    seconds = time.monotonic() - began
    print(f"{len(graded)} graded in {seconds:.0f} s, {whole} of them all right")
    return 0


def check_lesson(lab: Lab, args, grade_all) -> None:
    """Grade the lesson's own lines. Raises: UsageError if the grader finds fault."""
    task = args.task or ("cure" if lab.exam else None)
    if task in lab.tasks.QUESTIONS:
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "lesson.py"
        file.write_text(lab.solution(args.seed))
        (lesson,) = grade_all([submissions.Submission("lesson", [file])])
    tests = lesson.results["tests"]
    wrong = [f"{test['name']}: {test['output']}" for test in tests if not test["score"]]
    if lab.exam:
        wrong = [text for text in wrong if text.startswith("cure")]
    if lesson.problem or wrong or not tests:
        reason = lesson.problem or "; ".join(wrong) or "it was not graded"
        raise cli.UsageError(
            f"nothing is graded: on this machine the lesson's own lines fail: {reason}"
        )


class LabParser(argparse.ArgumentParser):
    def error(self, message):
        raise cli.UsageError(message)


def parse_args():
    parser = LabParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("lab", help="its number or name: 2, ddp or 2-ddp")
    add("--file", type=Path, help="the answer (runs/labs/LAB/mine.py)")
    add("--task", help="grade only this one (all)")
    add("--seed", type=int, help="of the drawn values (0; with --all a new one)")
    add(
        "--ranks",
        type=cli.positive_int,
        nargs="+",
        default=[2, 3],
        help="numbers of ranks (2 3)",
    )
    add("--hint", action="store_true", help="give the next hint for the first mistake")
    add("--json", type=Path, help="write results there (with --all: NAME.json each)")
    add("--all", type=Path, metavar="FOLDER", help="a class: NAME.py or NAME/mine.py")
    add("--csv", type=Path, help="with --all: write a row per student there")
    add(
        "--jobs",
        type=cli.positive_int,
        default=max(1, (os.cpu_count() or 2) // 2),
        help="with --all: answers at a time (half of the cores)",
    )
    args = parser.parse_args()
    if args.seed is None:
        args.seed = random.SystemRandom().randrange(1, 10**6) if args.all else 0
    if args.all and args.json:
        args.json.mkdir(parents=True, exist_ok=True)
    for name in ("json", "csv"):
        path = getattr(args, name)
        if path and not path.resolve().parent.is_dir():
            raise cli.UsageError(f"--{name} {path}: there is no such folder")
    if args.all and (args.file or args.hint):
        raise cli.UsageError("--all grades a folder: leave out --file and --hint")
    if not args.all and args.csv:
        raise cli.UsageError("--csv needs --all FOLDER")
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
        for name, line in zip_longest([verdict.task], verdict.lines, fillvalue=""):
            print(f"{name:<12} {line}", flush=True)
    wrong = [verdict for verdict in verdicts if verdict.faults]
    if args.hint and wrong:
        print(next_hint(lab, wrong[0].task, folder))
    print(f"{len(verdicts) - len(wrong)} of {len(verdicts)} right")
    content = results(lab, answer.path, args.seed, verdicts)
    if args.json == Path("-"):
        print(json.dumps(content))
    elif args.json:
        args.json.write_text(json.dumps(content, indent=1))
    return cli.FAILED if wrong else 0


if __name__ == "__main__":
    cli.run(main)
