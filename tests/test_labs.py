"""Labs: starters are cut from lessons, which pass; a wrong answer is named as its row
says.
"""

import contextlib
import copy
import functools
import json
import re
import sys
from pathlib import Path

import pytest
from conftest import REPO, assert_one_line, load_script, run_command

sys.path.insert(0, str(REPO / "labs"))
import grade
from dist_common import ranks
from dist_common.cli import UsageError
from lab_parts import running
from lab_parts.holes import Answer
from lab_parts.judging import distinct, judge_number, tomllib
from lab_parts.running import MISREAD, Setting, compare_calls, run

LABS = [
    path.parent.name for path in sorted((REPO / "labs").glob("*/answers.toml"))
]  # no exam
full = pytest.mark.full


def rows(kind):
    """Yield the rows of tests/labs: the first of each lab for make test."""
    for lab in LABS:
        table = tomllib.loads((REPO / f"tests/labs/{lab}.toml").read_text())
        for number, row in enumerate(table.get(kind, [])):
            marks = full if number or kind == "right" else ()
            yield pytest.param(lab, row, id=f"{lab}: {row['name']}", marks=marks)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(running, "CPU_S", 4.0)


def judge(path: Path, lab: grade.Lab, task: str, *sizes: int) -> list[str]:
    answer = Answer(path, lab.lessons)
    return grade.grade_task(lab, answer, task, 0, [*sizes] or [2]).faults


def judge_row(name, row, tmp_path) -> list[str]:
    """Grade the lesson with a row's lines in place of the lesson's lines."""
    lab = grade.load(name)
    lesson = next(one for one in lab.lessons if row["task"] in one.holes)
    source = lesson.source
    for lines, instead in row.get("changes", [(row.get("lines"), row.get("instead"))]):
        assert source.count(lines) == 1, "not in the lesson, or twice"
        source = source.replace(lines, instead)
    mine = tmp_path / "mine.py"
    mine.write_text(source)
    return judge(mine, lab, row["task"], row.get("ranks", 2))


@pytest.mark.parametrize("name", LABS)
def test_a_lab_has_tasks_hints_and_questions_for_its_holes(name):
    lab = grade.load(name)
    assert {*lab.tasks.TASKS} == {
        hole for lesson in lab.lessons for hole in lesson.holes
    }
    for task in lab.tasks.TASKS:
        assert len(lab.hints(task)) >= 2, f"{name}: {task} needs two hints on its page"
    page, front = (
        (lab.folder / "README.md").read_text(),
        (REPO / "labs/README.md").read_text(),
    )
    taken = sum(map(int, re.findall(r"^\| .* \| (\d+) \|$", page, re.M)))
    assert re.search(r"^(\d+) minutes\.", page, re.M)[1] == str(taken)
    assert re.search(rf"\]\({name}/README.md\).*\| {taken} \|", front)
    said = tomllib.loads((lab.folder / "answers.toml").read_text())
    assert list(said) == list(lab.tasks.QUESTIONS)


@pytest.mark.parametrize("name", LABS)
def test_a_starter_fails_at_its_first_task_with_the_first_hint(name, tmp_path, capsys):
    lab = grade.load(name)
    first = next(iter(lab.tasks.TASKS))
    mine = tmp_path / "mine.py"
    mine.write_text(lab.starter())
    assert "is still empty" in judge(mine, lab, first)[0]
    assert lab.starter().count("NotImplementedError") == sum(
        len(names) for one in lab.lessons for names in one.holes.values()
    )
    assert lab.hints(first)[0] in grade.next_hint(lab, first, tmp_path)
    assert lab.hints(first)[1] in grade.next_hint(lab, first, tmp_path)


@full
def test_holes_that_do_not_fit_together_are_seen(tmp_path):
    """The hook notes a fourth value for each bucket; its own wait expects three."""
    lab = grade.load("ddp")
    loop = "not self.missing[len(self.started)]\n        ):\n            self.start()\n"
    assert loop in lab.lessons[0].source
    more = f"{loop}            self.started[-1] += (index,)\n"
    mine = tmp_path / "mine.py"
    mine.write_text(lab.lessons[0].source.replace(loop, more))
    verdicts = list(grade.grade(lab, Answer(mine, lab.lessons), None, None, 0, [2]))
    assert [verdict.task for verdict in verdicts if verdict.faults] == ["together"]
    assert "too many values to unpack" in verdicts[-1].faults[0]


@full
@pytest.mark.parametrize("name", LABS)
def test_the_lesson_is_right_and_accused_of_nothing(name, tmp_path):
    """As one file, with the numbers of ranks and the seed of another day."""
    lab = grade.load(name)
    mine = tmp_path / "mine.py"
    mine.write_text(lab.solution(0))
    answer = Answer(mine, lab.lessons)
    verdicts = list(grade.grade(lab, answer, None, None, 4, [3]))
    assert [verdict.task for verdict in verdicts] == lab.graded
    assert not [verdict.faults for verdict in verdicts if verdict.faults]


@pytest.mark.parametrize(("name", "row"), list(rows("wrong")))
def test_a_wrong_answer_is_named(name, row, tmp_path):
    """A mistake is one fault, although it shows in several cases and ranks."""
    faults = judge_row(name, row, tmp_path)
    assert faults, "it passes"
    assert len(faults) == row.get("faults", 1) and row["says"] in faults[0], faults


@pytest.mark.parametrize(("name", "row"), list(rows("both")))
def test_two_mistakes_are_both_listed(name, row, tmp_path):
    faults = judge_row(name, row, tmp_path)
    assert len(faults) == len(row["says"]), faults
    for fault, says in zip(faults, row["says"], strict=True):
        assert says in fault, faults


@pytest.mark.parametrize(("name", "row"), list(rows("right")))
def test_another_right_answer_passes(name, row, tmp_path):
    assert judge_row(name, row, tmp_path) == []


def test_ranks_with_different_calls_are_named():
    calls = [{"all_reduce": 2}, {"all_reduce": 1, "broadcast": 1}]
    faults = list(compare_calls(calls))
    assert "rank 0 calls all_reduce 2 times, rank 1 1 time:" in faults[0]
    assert "rank 0 calls broadcast 0 times, rank 1 1 time:" in faults[1]
    assert not list(compare_calls([calls[0], calls[0]]))


def test_the_screen_shows_five_faults_and_how_many_more():
    verdict = grade.Verdict("task", distinct(f"fault {n} {n * 'x'}" for n in range(8)))
    assert verdict.lines[-2:] == ["fault 4 xxxx", "and 3 more"]
    assert grade.Verdict("task").lines == ["right"]
    assert distinct(["rank 0: 1.5 came", "rank 1: -2e-05 came"]) == ["rank 0: 1.5 came"]


ABUSE = {
    "exits": ("os._exit(0)", "rank 0 ended before the task did: exit code 0"),
    "raises SystemExit": ("raise SystemExit", "SystemExit"),
    "kills itself": ("os.kill(os.getpid(), 9)", "ended before the task did: SIGKILL"),
    "never ends": ("while True: pass", "hangs: rank 0 is at line"),
    "waits for input": ("input()", "EOFError"),
    "another form": ("return 5", "another form than the docstring asks for"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=full if n != "another form" else ()) for n in ABUSE]
)
def test_an_answer_that_does_not_come_is_named(name, tmp_path):
    lab, (line, says) = grade.load("ddp"), ABUSE[name]
    source = lab.lessons[0].source.replace(
        "    # lab: hole buckets\n", f"    {line}\n", 1
    )
    mine = tmp_path / "mine.py"
    mine.write_text(f"import os\n{source}".replace("# lab: end\n", "", 1))
    (fault,) = judge(mine, lab, "buckets", 2, 3)
    assert says in fault, fault
    if "form" not in name:
        assert fault.endswith("; the task ended there")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["9"], "error: there is no lab 9: choose from 1-same-model, 2-ddp"),
        (["2", "--task", "x"], "error: --task x: lab 2-ddp has start, buckets,"),
        (["2", "--file", "nowhere.py"], "nowhere.py: No such file"),
        (
            ["2", "--json", "nowhere/results.json"],
            "error: --json nowhere/results.json: there is no such",
        ),
        (["2", "--file", "broken.py"], "broken.py, line 2: invalid syntax"),
        (
            ["2", "--file", "ok.py"],
            "error: answers.toml: there is no question cals: choose from",
        ),
    ],
)
def test_bad_input_is_one_line(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text("def start_equal(model):\n    = 3\n")
    Path("ok.py").write_text("")
    Path("answers.toml").write_text("cals = 3\n")
    monkeypatch.setattr(sys, "argv", ["grade.py", *words])
    with pytest.raises(UsageError, match=re.escape(says.removeprefix("error: "))):
        grade.main()


@full
def test_a_missing_hole_costs_its_own_task_alone(tmp_path, monkeypatch, capsys):
    lab = grade.load("ddp")
    mine = tmp_path / "mine.py"
    mine.write_text(lab.lessons[0].source.replace("def buckets_of", "def baskets_of"))
    (tmp_path / "answers.toml").write_text('calls = "many"\nbytes = 1\n')
    results = tmp_path / "results.json"
    words = [
        "grade.py",
        "2",
        "--file",
        str(mine),
        "--ranks",
        "2",
        "--json",
        str(results),
        "--hint",
    ]
    monkeypatch.setattr(sys, "argv", words)
    assert grade.main() == 1
    tests = {test["name"]: test for test in json.loads(results.read_text())["tests"]}
    assert tests["buckets"]["output"] == "there is no buckets_of in mine.py"
    assert (
        tests["calls"]["output"]
        == "answers.toml has 'many': write a number, in all-reduces"
    )
    assert "is not what was measured" in tests["bytes"]["output"]
    passed = [name for name, test in tests.items() if test["status"] == "passed"]
    assert passed == ["start", "pack", "hook", "wait"]
    assert (
        f"hint 1 of {len(lab.hints('buckets'))} for buckets" in capsys.readouterr().out
    )


@full
@pytest.mark.parametrize("name", LABS)
def test_a_prediction_is_right_or_its_misconception_is_named(name):
    lab = grade.load(name)
    for question in lab.tasks.QUESTIONS:
        asked, measured = lab.tasks.QUESTIONS[question], grade.measured(lab, question)
        assert judge_number(asked, measured, measured) is None
        said = judge_number(asked, 1.3 * measured, measured)
        assert said.endswith("is not what was measured"), "it gives the answer away"
        for words, wrong in asked.mistakes(measured).items():
            assert words in judge_number(asked, wrong, measured)


def test_the_command_of_a_copy_starts_the_lesson():
    """Also of one whose docstring has no command for the CPU."""
    pages = [
        path
        for path in REPO.glob("[0b]*/*.md")
        if "\n## Change it\n" in path.read_text()
    ]
    assert pages
    for script in [
        page.with_suffix(".py") for page in pages if page.with_suffix(".py").exists()
    ]:
        name = str(script.relative_to(REPO))
        assert name in load_script("labs/try.py").command_of(script).split(), name


def test_what_is_no_lesson_cannot_be_tried():
    ended = run_command(
        [sys.executable, "labs/try.py", "05-advanced/nothing.py"], REPO, 60
    )
    assert_one_line(
        ended, "05-advanced/nothing.py: no script of this repository", "try.py"
    )


EMPTY = ([], {}, None, 0, "")


def containers(value, path=()):
    """Yield the place of each list and dict in a value of JSON that is not empty."""
    if isinstance(value, dict | list) and value:
        yield path
        for key, inside in (
            value.items() if isinstance(value, dict) else enumerate(value)
        ):
            yield from containers(inside, (*path, key))


def emptied(value, path, empty):
    """Return a copy with something empty at a place."""
    if not path:
        return empty
    value = copy.copy(value)
    value[path[0]] = emptied(value[path[0]], path[1:], empty)
    return value


def judge_emptied(task, seen, setting, _) -> list:
    """Return what a judge takes for right although something in it is empty."""
    taken = []
    paths = list(containers(seen[0]))
    for path in paths[:: max(1, len(paths) // 15)]:  # about 15 of them
        for empty in EMPTY:
            with contextlib.suppress(*MISREAD):  # reported as another form
                changed = [emptied(value, path, empty) for value in seen]
                if not list(task.judge(changed, setting)):
                    taken.append(f"{empty!r} at {path}")
    return taken


@pytest.mark.parametrize("name", [pytest.param(name, marks=full) for name in LABS])
def test_no_judge_takes_something_empty_for_right(name, tmp_path):
    """Whatever part of what the ranks saw is missing on all of them: a judge of nothing
    says so.
    """
    lab, setting = grade.load(name), Setting(0, 2, 0)
    tasks = lab.tasks.TASKS | ({"together": lab.together} if lab.together else {})

    for task, asked in tasks.items():
        lesson = Answer(tmp_path / "lesson.py", lab.lessons)
        lesson.path.write_text(lab.solution(0))
        results = run(asked.see, lesson, task, setting)
        assert results.seen, results.problem
        body = functools.partial(judge_emptied, asked, results.seen, setting)
        (ended,) = ranks.fork(body, 1, tmp_path / task, 60)
        assert ended.value == [], f"{name}, {task}: {ended.value}{ended.err}"
