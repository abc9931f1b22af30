"""A class is graded in sandboxes: what an answer tries is contained, or named."""

import csv
import os
import re
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import REPO

sys.path.insert(0, str(REPO / "labs"))
import grade
from lab_parts import sandbox
from lab_parts.sandbox import Limits
from legacy_common.cli import UsageError

LESSON = (REPO / "04-nccl-operations/point_to_point.py").read_text()
HOLE = "    # lab: hole reduce_scatter\n"
VICTIM = REPO / "tests/__pycache__/sandbox-victim"  # in the repository, and ignored by git
TASK = ["3", "--task", "reduce_scatter", "--ranks", "2"]
full = pytest.mark.full
pytestmark = pytest.mark.xdist_group("sandbox")  # one worker grades the class of TRIED


@pytest.fixture(autouse=True, scope="module")
def needed(tmp_path_factory):
    if why := sandbox.why_not(tmp_path_factory.mktemp("top")):
        pytest.skip(f"no sandbox here: {why}")


def children() -> set[psutil.Process]:
    """Return what this process has started: a browser of other tests, perhaps."""
    return set(psutil.Process().children())


def answer(line: str) -> str:
    """Return the lesson, with a line before its own in the hole."""
    assert LESSON.count(HOLE) == 1
    return f"import os, sys, time, socket, shutil, subprocess\n{LESSON.replace(HOLE, line)}"


# A line, and what the note says; None where the lesson's own lines then do what was asked. What a
# hole in the sandbox would let through does no harm: forks and bytes are bounded, names reserved.


# A line, and what the note says; None where the lesson's own lines then do what was asked. What a
# hole in the sandbox would let through does no harm: forks are bounded, names reserved.
TRIED = {
    "fork_bomb": (
        "for _ in range(9): os.fork()\n    time.sleep(3)",
        "ended: more than 64 processes at once",
    ),
    "memory": ("torch.empty(5_000_000_000)", "you tried to allocate 20000000000 bytes"),
    "rm_rf": ("subprocess.run(['rm', '-rf', 'VICTIM'])", None),
    "kills": ("os.kill(os.getppid(), 9); os.kill(-1, 9)", "ended before the task did: SIGKILL"),
    "patched": (
        "import lab_parts.judging, lab_parts.running, lab_parts.holes\n"
        "    for module in list(sys.modules.values()):\n"
        "        for name in ('same', 'judge', 'judge_moves', 'judge_sum', 'judge_parts'):\n"
        "            if hasattr(module, name): setattr(module, name, lambda *_: None)\n"
        "    return",
        "rank 0 sends nothing",
    ),
    "false_verdict": (
        "if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        from pathlib import Path\n"
        "        until = time.monotonic() + 4\n"
        "        while time.monotonic() < until:\n"
        "            for path in Path.cwd().glob('tmp*/rank-0.out'):\n"
        "                if not path.with_name('rank-1.out').exists():\n"
        "                    path.with_name('rank-0.value').write_text('null')\n"
        "        os._exit(0)\n"
        "    return",
        "rank 0 sends nothing",
    ),
    "internet": ("socket.create_connection(('192.0.2.1', 80), 2)", "Network is unreachable"),
    "reads": ("open('CLASS/honest.py').read()", "No such file or directory: 'CLASS/honest.py'"),
    "environment": ("raise KeyError(os.environ.get('A_TOKEN'))", "KeyError: None"),
}  # fmt: skip


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """Grade all of these at once; return their rows by name, and what was on the screen."""
    folder, told = tmp_path_factory.mktemp("class"), tmp_path_factory.mktemp("told") / "points.csv"
    VICTIM.mkdir(parents=True, exist_ok=True)
    (VICTIM / "thesis").write_text("three years")
    before, others = Path("/proc/self/mounts").read_text(), children()
    with pytest.MonkeyPatch.context() as patch:
        names = {"VICTIM": VICTIM, "CLASS": folder}
        for name, (line, _) in TRIED.items():
            for word, value in names.items():
                line = line.replace(word, str(value))
            (folder / f"{name}.py").write_text(answer(f"    {line}\n"))
        (folder / "honest.py").write_text(LESSON)
        (folder / "linked.py").symlink_to(folder / "honest.py")
        (folder / "empty").mkdir()
        patch.setenv("A_TOKEN", "secret")
        words = ["grade.py", *TASK, "--all", str(folder), "--csv", str(told), "--jobs", "2"]
        patch.setattr(sys, "argv", words)
        assert grade.main() == 0
    assert Path("/proc/self/mounts").read_text() == before
    assert children() <= others
    with told.open() as file:
        return {row["name"]: row for row in csv.DictReader(file)}, names


@full
@pytest.mark.parametrize("name", TRIED)
def test_what_an_answer_tries_is_contained_or_named(name, graded):
    rows, names = graded
    says = TRIED[name][1]
    if says is None:
        assert rows[name]["total"] == "1", rows[name]
        return
    for word, value in names.items():
        says = says.replace(word, str(value))
    assert rows[name]["total"] == "0"
    assert re.search(says, rows[name]["note"]), rows[name]["note"]


@full
def test_others_are_graded_all_the_same_and_nothing_is_lost(graded):
    rows, _ = graded
    assert [rows["honest"][column] for column in ("reduce_scatter", "total", "of", "note")] == [
        "1", "1", "1", "",
    ]  # fmt: skip
    assert "linked.py is a link" in rows["linked"]["note"]
    assert rows["empty"]["note"] == "there is no mine.py"
    assert (VICTIM / "thesis").read_text() == "three years"


def test_a_sandbox_ends_with_a_grader_that_is_killed(tmp_path):
    grader = os.fork()
    if grader == 0:
        sandbox.start(lambda say: time.sleep(60), True, [], [], tmp_path, Limits())
        time.sleep(60)
        os._exit(0)
    try:
        until, family = time.monotonic() + 30, []
        while len(family) < 2 and time.monotonic() < until:
            family = psutil.Process(grader).children(recursive=True)
        assert len(family) == 2
    finally:
        os.kill(grader, signal.SIGKILL)
        os.waitpid(grader, 0)
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive


def test_without_a_sandbox_a_class_is_graded_too(tmp_path, monkeypatch, capsys):
    (tmp_path / "alice.py").write_text(LESSON)
    (tmp_path / "bob").mkdir()
    (tmp_path / "bob" / "mine.py").write_text(answer("    os._exit(0)\n"))
    (tmp_path / "bob" / "answers.toml").write_text("steps = 6\nsent = 1")
    words = ["grade.py", "3", "--ranks", "2", "--all", str(tmp_path), "--no-sandbox", "--jobs", "2"]
    monkeypatch.setattr(sys, "argv", words)
    assert grade.main() == 0
    shown = capsys.readouterr().out
    assert re.search(r"^alice +3 of 5$", shown, re.M)
    assert re.search(r"^bob +2 of 5  reduce_scatter: .* exit code 0$", shown, re.M)
    assert "2 graded in" in shown


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--all", "nowhere"], "--all nowhere: there is no such folder"),
        (["--all", "twice"], "alice.py and alice/ are there: which one?"),
        (["--all", ".", "--hint"], "without --file, --json and --hint"),
        (["--no-sandbox"], "--csv and --no-sandbox belong to --all"),
    ],
)
def test_bad_input_is_one_line(words, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("twice/alice").mkdir(parents=True)
    Path("twice/alice.py").write_text("")
    monkeypatch.setattr(sys, "argv", ["grade.py", "3", *words])
    with pytest.raises(UsageError, match=re.escape(says)):
        grade.main()
