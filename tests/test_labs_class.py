"""A class is graded: in isolation, and only if the lesson's own lines pass."""

import csv
import json
import os
import re
import sys
from pathlib import Path

import pytest
from conftest import REPO

sys.path.insert(0, str(REPO / "labs"))
import grade
from dist_common.cli import UsageError
from lab_parts import isolation

LESSON = (REPO / "04-nccl-operations/point_to_point.py").read_text()
HOLE = "    # lab: hole reduce_scatter\n"
TASK = ["3", "--task", "reduce_scatter", "--ranks", "2"]
VICTIM = REPO / "tests/__pycache__/isolation-victim"  # ignored by git
bubblewrap = pytest.mark.skipif(
    isolation.choose() != "bubblewrap", reason="needs bubblewrap"
)


def answer(line: str) -> str:
    """Return the lesson, with a line before its own in the hole."""
    assert LESSON.count(HOLE) == 1
    return f"import os, socket, time\n{LESSON.replace(HOLE, f'    {line}' + chr(10))}"


# A line of an answer, and what the note says; None if the answer is right all the same.
TRIED = {
    "internet": ("socket.create_connection(('192.0.2.1', 80), 2)", "unreachable"),
    "reads": ("open('CLASS/honest.py').read()", "No such file or directory"),
    "writes": ("open('VICTIM', 'w').write('-')", "Read-only file system"),
    "environment": ("raise KeyError(os.environ.get('A_TOKEN'))", "KeyError: None"),
    "lingers": ("if os.fork() == 0: time.sleep(600)", None),
    "exits": ("os._exit(0)", "ended before the task did: exit code 0"),
    "memory": ("bytearray(8 * 2**30)", "MemoryError"),
    "a large file": ("open('x', 'wb').truncate(2**30)", "File too large"),
    "honest": ("pass", None),
}


def grade_class(folder: Path, *words: str) -> dict[str, dict]:
    """Grade a folder of answers; return the rows of the CSV by name."""
    points = folder.parent / "points.csv"
    with pytest.MonkeyPatch.context() as patch:
        command = ["grade.py", *TASK, "--all", str(folder), "--csv", str(points)]
        patch.setattr(sys, "argv", [*command, "--jobs", "2", *words])
        assert grade.main() == 0
    with points.open() as file:
        return {row["name"]: row for row in csv.DictReader(file)}


@bubblewrap
@pytest.mark.full
def test_what_an_answer_tries_is_contained(tmp_path, monkeypatch):
    folder = tmp_path / "class"
    folder.mkdir()
    VICTIM.parent.mkdir(exist_ok=True)
    VICTIM.write_text("three years")
    for name, (line, _) in TRIED.items():
        line = line.replace("VICTIM", str(VICTIM)).replace("CLASS", str(folder))
        (folder / f"{name}.py").write_text(answer(line))
    (folder / "linked.py").symlink_to(folder / "honest.py")
    (folder / "empty").mkdir()
    monkeypatch.setenv("A_TOKEN", "secret")
    rows = grade_class(folder)
    for name, (_, says) in TRIED.items():
        assert rows[name]["total"] == ("0" if says else "1"), rows[name]
        assert (says or "") in rows[name]["note"], rows[name]["note"]
    assert "linked.py is a link" in rows["linked"]["note"]
    assert rows["empty"]["note"] == "there is no mine.py"
    assert VICTIM.read_text() == "three years"


@pytest.mark.full
def test_a_class_without_isolation_gets_a_warning_and_feedback(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(isolation, "choose", lambda: "none")
    folder, feedback = tmp_path / "class", tmp_path / "feedback"
    (folder / "bob").mkdir(parents=True)
    (folder / "alice.py").write_text(LESSON)
    (folder / "bob" / "mine.py").write_text("def ring_reduce_scatter(parts, move): x")
    (folder / "bob" / "answers.toml").write_text("steps = 6\nsent = 1")
    (folder / "carol.py").write_text("def f(:\n")
    words = ["grade.py", "3", "--ranks", "2", "--all", str(folder)]
    words += ["--json", str(feedback)]
    monkeypatch.setattr(sys, "argv", words)
    assert grade.main() == 0
    shown = capsys.readouterr().out
    assert "warning: there is neither bubblewrap nor a Docker image" in shown
    assert re.search(r"^seed [1-9]\d*, isolation: none$", shown, re.M)
    assert re.search(r"^alice +3 of 5$", shown, re.M)
    notes = r"reduce_scatter: .*; all_gather: .*; together: .*; sent: 1 numbers is not"
    assert re.search(rf"^bob +1 of 5  {notes}", shown, re.M)
    assert re.search(r"^carol +0 of 5  mine.py, line 1: invalid syntax", shown, re.M)
    bob, carol = (
        json.loads((feedback / f"{name}.json").read_text()) for name in ("bob", "carol")
    )
    assert (bob["score"], bob["max_score"]) == (1, 5)
    assert "invalid syntax" in carol["output"]


@pytest.mark.full
def test_nothing_is_graded_if_the_lesson_fails(tmp_path, monkeypatch):
    (tmp_path / "alice.py").write_text(LESSON)
    monkeypatch.setattr(grade.Lab, "solution", lambda lab, seed: "import nothing_here")
    with pytest.raises(UsageError, match="the lesson's own lines fail: reduce_scatter"):
        grade_class(tmp_path)


def test_docker_and_bubblewrap_get_the_answer_only(tmp_path):
    hidden = tmp_path / "class"
    hidden.mkdir()
    docker = isolation.wrap("docker", tmp_path, hidden, ["3", "--json", "-"])
    assert {"--network=none", "--read-only", "--cap-drop=ALL"} < {*docker}
    assert docker[-5:] == ["python", "/guide/labs/grade.py", "3", "--json", "-"]
    box = isolation.wrap("bubblewrap", tmp_path, hidden, ["3"])
    assert box.index("--bind") > max(n for n, s in enumerate(box) if s == "--tmpfs")
    assert str(hidden) in box and str(os.environ["PATH"]) in box
    assert box.index("prlimit") > box.index("--"), "limits are set outside of the box"
    plain = isolation.wrap("none", tmp_path, hidden, ["3"])
    assert plain == [sys.executable, str(REPO / "labs/grade.py"), "3"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--all", "nowhere"], "--all nowhere: there is no such folder"),
        (["--all", "twice"], "both alice.py and alice/: which one?"),
        (["--all", ".", "--hint"], "leave out --file and --hint"),
        (["--csv", "points.csv"], "--csv needs --all FOLDER"),
    ],
)
def test_bad_input_is_one_line(words, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("twice/alice").mkdir(parents=True)
    Path("twice/alice.py").write_text("")
    monkeypatch.setattr(sys, "argv", ["grade.py", "3", *words])
    with pytest.raises(UsageError, match=re.escape(says)):
        grade.main()
