"""gpu_smoke.py: each lesson's own line is run, and nothing that failed looks like success."""

import json
import shlex
import sys

import pytest
from conftest import REPO, load_script

SMOKE = "benchmarks/gpu_smoke.py"
# A lesson that ends as its flag says.
LESSON = '''"""Do what the line says.

    CPU   python 01-x/{name}.py {flags}
    GPU   {launcher} 01-x/{name}.py {flags}
"""
import sys, time
print("some words")
if "--sleep" in sys.argv:
    time.sleep(600)
if "--refuse" in sys.argv:
    print("x.py: error: needs two ranks", file=sys.stderr)
print("a warning of somebody's", file=sys.stderr)
print("FAILED: the loss" if "1" in sys.argv else "OK: 3 checks passed")
sys.exit(int(sys.argv[1]) if sys.argv[1:] else 0)
'''


@pytest.fixture
def smoke(tmp_path, monkeypatch):
    """Return the script with a repository of its own, and what runs its main there."""
    script = load_script(SMOKE)
    (tmp_path / "01-x").mkdir()
    monkeypatch.setattr(script, "REPO", tmp_path)

    def lesson(name, flags="", launcher="python"):
        text = LESSON.format(name=name, flags=flags, launcher=launcher)
        (tmp_path / f"01-x/{name}.py").write_text(text)

    def run(*flags):
        found = tmp_path / "found.json"
        words = [SMOKE, "--device", "cpu", "--output", str(found), *map(str, flags)]
        monkeypatch.setattr(sys, "argv", words)
        code = script.main()
        records = json.loads(found.read_text())["lessons"]
        return code, {r["lesson"][5:-3]: (r["result"], r["said"]) for r in records}

    script.lesson, script.tour = lesson, run
    return script


@pytest.mark.parametrize(
    ("name", "flags", "launcher", "code", "found"),
    [
        ("well", "", "python", 0, ("OK", "OK: 3 checks passed")),
        ("wrong", "1", "python", 1, ("FAILED", "FAILED: the loss")),
        ("crashes", "3", "python", 1, ("FAILED", "a warning of somebody's")),
        ("refuses", "2 --refuse", "python", 0, ("refused", "x.py: error: needs two ranks")),
        ("slow", "0 --sleep", "python", 1, ("too late", "some words")),
        ("theirs", "my_config.json", "python", 0, ("left out", "reads a file of yours")),
    ],
)
def test_what_becomes_of_a_line(smoke, monkeypatch, name, flags, launcher, code, found):
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    smoke.lesson(name, flags, launcher)
    deadline_s = 6 if name == "slow" else 60
    assert smoke.tour("--deadline", deadline_s) == (code, {name: found})


def test_one_failure_among_others_is_not_lost(smoke):
    for name, flags in (("a", ""), ("b", "1"), ("c", "")):
        smoke.lesson(name, flags)
    code, found = smoke.tour()
    assert code == 1 and [found[name][0] for name in "abc"] == ["OK", "FAILED", "OK"]
    assert smoke.tour("--jobs", 3) == (code, found)
    assert smoke.tour("--only", "01-x/a")[0] == 0


@pytest.mark.parametrize(
    ("line", "gpus", "reason"),
    [
        ("torchrun --standalone --nproc-per-node=gpu x.py", 1, None),
        ("torchrun --standalone --nproc-per-node=8 x.py", 4, "needs 8 GPUs"),
        ("deepspeed --num_gpus=8 x.py", 1, None),
    ],
)
def test_what_is_left_out_says_why(line, gpus, reason):
    assert load_script(SMOKE).why_not(line, gpus) == reason


def test_the_lines_are_the_lessons_own():
    """Each is a command of a file that exists; what the tour adds belongs to one of them."""
    script = load_script(SMOKE)
    lines = script.lines_of("GPU")
    started = [path for path, line in lines.items() if not script.why_not(line, 8)]
    assert len(started) > 30
    for path in started:
        words = shlex.split(script.commands_of(path, lines[path], "/tmp/x", 2)[-1])
        assert any(word.endswith(".py") and (REPO / word).exists() for word in words), words
        assert not {"--num_gpus=8", "DIR", "chats.jsonl"} & set(words)
        on_cpu = script.commands_of(path, lines[path], "/tmp/x", None)[-1]
        assert on_cpu.count("--preset") == lines[path].count("--preset")
    assert {*script.ADDED, *script.BEFORE} <= set(started)
