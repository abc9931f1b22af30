"""Lab 8: a case is drawn by a seed, its evidence tells, and an answer is judged by
running it.
"""

import ast
import itertools
import json
import re
import sys
from collections import Counter

import pytest
from conftest import REPO

sys.path.insert(0, str(REPO / "labs"))
import grade
from dist_common.cli import UsageError
from lab_parts import cases, evidence, exam, recorder, running
from lab_parts.holes import Answer
from lab_parts.judging import tomllib

lab = grade.load("exam")
SEEDS = {
    case.failure.name: seed for seed, case in enumerate(lab.exam.cases)
}  # one for each case
TABLE = tomllib.loads((REPO / "tests/labs/8-exam.toml").read_text())
full = pytest.mark.full
QUICK = {"nan-on-one-rank"}  # the others take seconds
needs_py_spy = pytest.mark.skipif(
    recorder.py_spy() is None, reason="needs py-spy: pip install py-spy"
)


def script_of(row: dict) -> str:
    source = lab.exam.cases[SEEDS[row["case"]]].script(row.get("from", "broken.py"))
    assert source.count(row["lines"]) == 1, (
        "these lines are not in the script, or twice"
    )
    return source.replace(row["lines"], row["instead"])


def judge_cure(tmp_path, case: str, script: str, *sizes: int, seed: int | None = None):
    mine = tmp_path / "mine.py"
    mine.write_text(script)
    seed = SEEDS[case] if seed is None else seed
    return lab.exam.judge_cure(Answer(mine, []), seed, sizes or [2, 3])[0]


# The draw, and what is handed out.


def test_every_case_of_the_gallery_is_drawn_or_left_out_for_a_reason():
    drawn = Counter(case.failure.name for case in lab.exam.cases)
    assert drawn + Counter([*lab.exam.left_out]) == Counter([*cases.gallery.CASES])
    for case in lab.exam.cases:
        assert case.near.keys() < {*cases.gallery.CASES} - {case.failure.name}


def test_a_script_says_nothing_of_the_rank_and_has_a_title_of_its_own():
    titles = Counter()
    for case in lab.exam.cases:
        text = case.script()
        assert (
            "#" not in text
            and text.count('ODD_RANK = int(os.environ["ODD_RANK"])') == 1
        )
        assert text.count("ODD_RANK") > 2, "nothing is at fault"
        titles[ast.get_docstring(ast.parse(text))] += 1
    assert set(titles.values()) == {1}


TELLS = {  # a file of the evidence and a pattern that names the rank at fault, {odd}
    "batch-skipped": ("calls.txt", r"rank {odd}: 3 calls"),
    "exception-on-one-rank": ("rank-{odd}.log", r"ValueError: sample 7"),
    "gather-on-rank-0": ("stacks.txt", r"rank {odd}:\n  all_gather"),
    "leaves-early": ("calls.txt", r"rank {odd}: 3 calls"),
    "nan-on-one-rank": ("calls.txt", r"rank {odd}: .*\n.*\n  summand 1 has 1 numbers"),
    "shapes-differ": ("calls.txt", r"rank {odd}: (1 calls.*\n  1 all_reduce \[8\])"),
    "unused-parameters": ("rank-{odd}.log", r"Expected to have finished reduction"),
}


@needs_py_spy
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n == "exception-on-one-rank" else full)
        for n in SEEDS
    ],
)
def test_the_evidence_tells_which_rank_is_at_fault(name, tmp_path, monkeypatch):
    monkeypatch.setattr(evidence, "DEADLINE_S", 3.5)  # gloo's timeout is 2 s
    case, odd = lab.exam.draw(SEEDS[name])
    lab.exam.hand_out(tmp_path, SEEDS[name])
    file, pattern = TELLS[name]
    for rank in range(cases.RANKS):
        text = (tmp_path / "evidence" / file.format(odd=rank)).read_text()
        match = re.search(pattern.format(odd=rank), text, re.M)
        assert bool(match) == (rank == odd), f"rank {rank} of {odd}: {text}"
    assert (tmp_path / "mine.py").read_text() == case.script()
    for text in [path.read_text() for path in tmp_path.rglob("*.*")]:
        assert str(REPO) not in text and "failure_gallery.py" not in text
        assert case.failure.name not in text


# Right and wrong answers.


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else full) for name in SEEDS]
)
def test_the_cure_of_the_gallery_passes_on_2_and_3_ranks(name, tmp_path):
    case, odd = lab.exam.draw(SEEDS[name])
    assert judge_cure(tmp_path, name, case.script("cured.py")) == []
    assert not list(exam.judge_rank(case, odd, odd))
    assert not list(exam.judge_cause(case, name))


@full
@pytest.mark.parametrize("row", TABLE["right"], ids=lambda row: row["case"])
def test_another_right_cure_passes(row, tmp_path):
    assert judge_cure(tmp_path, row["case"], script_of(row), 3) == []


def rows():
    for row in TABLE["wrong"]:
        marks = full if row["task"] == "cure" else ()
        yield pytest.param(row, id=row["name"], marks=marks)


@pytest.mark.parametrize("row", list(rows()))
def test_a_wrong_answer_is_named(row, tmp_path, monkeypatch):
    monkeypatch.setattr(
        exam, "DEADLINE_S", 7.0
    )  # of what waits, and polls while it does
    case, odd = lab.exam.draw(SEEDS[row["case"]])
    if row["task"] == "rank":
        faults = list(exam.judge_rank(case, odd, (odd + 1) % cases.RANKS))
    elif row["task"] == "cause":
        faults = list(exam.judge_cause(case, row["said"]))
    else:
        faults = judge_cure(tmp_path, row["case"], script_of(row))
    assert len(faults) == row.get("faults", 1) and row["says"] in faults[0], faults


ABUSE = {
    # After a second, in which the other ranks have come too: they would say that it is
    # gone.
    "leaves without a word": (
        "import time; time.sleep(1); os._exit(0)",
        "calls all_reduce 0 times",
    ),
    "waits for ever": ("import time; time.sleep(600)", "hangs: rank 0 is at line"),
    "overwrites": (
        "open('calls-0.json', 'w').write('{'); os._exit(0)",
        "the cure overwrote a file of the grader",
    ),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=full) for n in ABUSE])
def test_a_cure_that_does_not_come_is_named(name, tmp_path, monkeypatch):
    monkeypatch.setattr(exam, "STUCK_S", 1.5)
    monkeypatch.setattr(running, "CPU_S", 2.0)
    line, says = ABUSE[name]
    script = lab.exam.cases[SEEDS["nan-on-one-rank"]].script("cured.py")
    faults = judge_cure(
        tmp_path,
        "nan-on-one-rank",
        script.replace("weights = ", f"{line}\nweights = "),
        2,
    )
    assert faults and says in faults[0], faults


# The command line.


@full
def test_grade_draws_by_the_seed_and_writes_json(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evidence, "gather", lambda case, odd: {"job.txt": "as it was"})
    monkeypatch.setattr(grade, "REPO", tmp_path)
    seed, file = SEEDS["nan-on-one-rank"], tmp_path / "results.json"
    words = [
        "grade.py",
        "8",
        "--seed",
        str(seed),
        "--ranks",
        "2",
        "--json",
        str(file),
        "--hint",
    ]
    monkeypatch.setattr(sys, "argv", words)
    assert grade.main() == 1
    first = capsys.readouterr().out
    assert first.count("not answered") == 2 and "nothing is changed yet" in first
    assert f"hint 1 of {len(lab.hints('rank'))} for rank" in first
    folder = tmp_path / f"runs/labs/8-exam/seed-{seed}"
    case, odd = lab.exam.draw(seed)
    (folder / "mine.py").write_text(case.script("cured.py"))
    (folder / "answers.toml").write_text(f'rank = {odd}\ncause = "nan-on-one-rank"\n')
    assert grade.main() == 0
    assert [test["name"] for test in json.loads(file.read_text())["tests"]] == [
        "rank",
        "cause",
        "cure",
    ]
    assert "rank 1: loss 3.2" in file.read_text()
    words.extend(["--task", "cause"])
    grade.main()
    assert [test["name"] for test in json.loads(file.read_text())["tests"]] == ["cause"]


@pytest.mark.parametrize(
    ("name", "said", "says"),
    [
        ("rank", "", "not answered"),
        ("rank", "two", "answers.toml has 'two': write a number"),
        ("rank", 3, "there is no rank 3: the job has ranks 0 to 2"),
        ("cause", 3, "answers.toml has 3: write a name"),
        ("cause", "deadlock", "there is no cause deadlock: take a name of"),
    ],
)
def test_an_answer_of_a_wrong_form_is_said(name, said, says, tmp_path):
    answer = Answer(tmp_path / "mine.py", [])
    verdicts = list(
        itertools.islice(lab.exam.grade(answer, {name: said}, name, 0, [2, 3]), 1)
    )
    assert verdicts[0][0] == name and says in verdicts[0][1][0]


def test_one_rank_is_refused(tmp_path):
    with pytest.raises(UsageError, match="--ranks 1: the exam's jobs need 2 or more"):
        next(lab.exam.grade(Answer(tmp_path / "mine.py", []), {}, None, 0, [1, 2]))


def test_the_page_has_hints_and_minutes():
    page, front = (
        (lab.folder / "README.md").read_text(),
        (REPO / "labs/README.md").read_text(),
    )
    for task in ("rank", "cause", "cure"):
        assert len(lab.hints(task)) >= 2, f"{task} needs two hints on its page"
    taken = sum(map(int, re.findall(r"^\| .* \| (\d+) \|$", page, re.M)))
    assert re.search(r"^(\d+) minutes\.", page, re.M)[1] == str(taken)
    assert re.search(rf"\]\(8-exam/README.md\).*\| {taken} \|", front)
    assert f"{len(lab.exam.cases)} of the {len(cases.gallery.CASES)} failures" in page
