"""Grade a lab: run each task of an answer on 2 and on 3 ranks, and name what is wrong.

    python labs/grade.py 2                          your file in runs/labs/2-ddp
    python labs/grade.py 2 --file mine.py --task pack

The first call puts the lab's starter there. Each task is graded by itself: in all other holes stand
the lesson's own lines, so one mistake costs one task. Look for: the sentence beside a task. --hint
gives the next hint for the first task that is not right. Exit code 1 as long as one is not.
"""

import argparse
import importlib.util
import json
import re
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from dist_common import cli
from lab_parts.holes import REPO, TOGETHER, Answer, Lesson
from lab_parts.judging import judge_number, read_predictions
from lab_parts.running import Setting, Task, judge, run

LABS = Path(__file__).parent
HINT = re.compile(r"<summary>Hint \d+ for `(\w+)`</summary>\n\n(.*?)\n*</details>", re.S)


@dataclass
class Lab:
    """A lab's folder, its tasks.py, and the lessons that it is cut from."""

    folder: Path
    tasks: ModuleType
    lessons: list[Lesson] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def together(self) -> Task | None:
        """Return what the whole answer has to do, without the lesson's lines in any hole."""
        return getattr(self.tasks, "WHOLE", None)

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


def grade_task(lab: Lab, answer: Answer, task: str, seed: int, sizes: list[int]) -> Verdict:
    """Grade one hole on each number of ranks, up to the first that goes wrong."""
    if empty := answer.missing(task):
        return Verdict(task, empty)
    for ranks in sizes:
        setting, asked = Setting(0, ranks, seed), lab.tasks.TASKS.get(task, lab.together)
        with tempfile.TemporaryDirectory() as folder:
            seen, wrong, printed = run(asked.see, answer, task, setting, Path(folder))
            if seen is not None:
                wrong = judge(asked, seen, setting, Path(folder))
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
    """Run the lesson, and return the number that question `name` asks for."""
    question, lesson = lab.tasks.QUESTIONS[name], Answer(lab.starter, lab.lessons)
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(0, question.ranks, 0)
        seen, why, _ = run(question.measure, lesson, None, setting, Path(folder))
    if seen is None:
        raise RuntimeError(f"{name} cannot be measured: {why}")
    return seen[0]


def grade(lab: Lab, answer: Answer, predictions: Path | None, chosen, seed, sizes):
    """Yield the verdict on each task, then on each prediction, or on the chosen one alone."""
    known = [*lab.tasks.TASKS, *lab.tasks.QUESTIONS] + [TOGETHER] * bool(lab.together)
    if chosen and chosen not in known:
        raise cli.UsageError(f"--task {chosen}: lab {lab.name} has {', '.join(known)}")
    answer.tree  # noqa: B018  a file that is no Python is said before anything runs
    said = read_predictions(predictions, lab.tasks.QUESTIONS) if predictions else {}
    whole = True
    for task in lab.tasks.TASKS:
        if chosen in (None, task):
            yield (verdict := grade_task(lab, answer, task, seed, sizes))
            whole = whole and not verdict.wrong
    if lab.together and chosen in (None, TOGETHER):
        if whole:
            yield grade_task(lab, answer, TOGETHER, seed, sizes)
        else:
            yield Verdict(TOGETHER, "graded once all tasks are right")
    for name in said:
        if chosen in (None, name):
            yield grade_question(lab, name, said[name])


def work_folder(lab: Lab) -> Path:
    """Return the folder for a student's files; the starter and the questions are put there once."""
    folder = REPO / "runs" / "labs" / lab.name
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
    return parser.parse_args()


def main():
    args = parse_args()
    if args.json and not args.json.resolve().parent.is_dir():
        raise cli.UsageError(f"--json {args.json}: there is no such folder")
    lab = load(args.lab)
    folder = args.file.resolve().parent if args.file else work_folder(lab)
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
