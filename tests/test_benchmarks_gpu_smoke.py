"""gpu_smoke.py runs each lesson's own line, and no failure looks like success."""

import json
import shlex
import sys

import pytest
from conftest import REPO, load_script

SMOKE = "benchmarks/gpu_smoke.py"
# A lesson that ends as its flag says.
LESSON = '''"""Do what the line says.

    CPU   python 01-x/{name}.py {flags}
    GPU   python 01-x/{name}.py {flags}
"""
import sys, time
print("some words", flush=True)
if "--sleep" in sys.argv:
    time.sleep(600)
if "--refuse" in sys.argv:
    print("x.py: error: needs two ranks", file=sys.stderr)
print("a warning of somebody's", file=sys.stderr)
print("FAILED: the loss" if "1" in sys.argv else "OK: 3 checks passed")
sys.exit(int(sys.argv[1]) if sys.argv[1:] else 0)
'''
ENDS = {
    "well": ("", "OK", "OK: 3 checks passed"),
    "wrong": ("1", "FAILED", "FAILED: the loss"),
    "crashes": ("3", "FAILED", "a warning of somebody's"),
    "refuses": ("2 --refuse", "refused", "x.py: error: needs two ranks"),
    "slow": ("0 --sleep", "too late", "some words"),
    "theirs": ("my_config.json", "left out", "reads a file of yours"),
}


def test_every_line_has_its_result_and_a_failure_the_exit_code(tmp_path, monkeypatch):
    script = load_script(SMOKE)
    monkeypatch.setattr(script, "REPO", tmp_path)
    (tmp_path / "01-x").mkdir()
    for name, (flags, _, _) in ENDS.items():
        path = tmp_path / f"01-x/{name}.py"
        path.write_text(LESSON.format(name=name, flags=flags))
    output = tmp_path / "found.json"

    def tour(*flags):
        words = [SMOKE, "--device", "cpu", "--output", str(output), *flags]
        monkeypatch.setattr(sys, "argv", words)
        code = script.main()
        records = json.loads(output.read_text())["lessons"]
        return code, {
            record["lesson"][5:-3]: (record["result"], record["said"])
            for record in records
        }

    code, results = tour("--deadline", "15", "--jobs", "2")
    assert code == 1
    assert results == {name: (result, said) for name, (_, result, said) in ENDS.items()}
    assert tour("--only", "well")[0] == tour("--only", "refuses")[0] == 0


@pytest.mark.parametrize(
    ("line", "gpus", "reason"),
    [
        ("torchrun --standalone --nproc-per-node=gpu x.py", 1, None),
        ("torchrun --standalone --nproc-per-node=8 x.py", 4, "needs 8 GPUs"),
        ("deepspeed --num_gpus=8 x.py", 1, None),
        ("srun x.py", 8, "started by srun"),
    ],
)
def test_a_line_that_cannot_run_has_its_reason(line, gpus, reason):
    assert load_script(SMOKE).reason_to_leave_out(line, gpus) == reason


def test_the_lines_are_commands_of_scripts_that_exist():
    script = load_script(SMOKE)
    lines = script.read_commands("GPU")
    started = [
        path for path, line in lines.items() if not script.reason_to_leave_out(line, 8)
    ]
    assert len(started) > 30
    for path in started:
        line = script.build_commands(path, lines[path], "/tmp/x", 2)[-1]
        words = shlex.split(line)
        assert any(word.endswith(".py") and (REPO / word).exists() for word in words)
        assert not {"--num_gpus=8", "DIR", "chats.jsonl"} & set(words)
        on_cpu = script.build_commands(path, lines[path], "/tmp/x", None)[-1]
        assert on_cpu.count("--preset") == lines[path].count("--preset")
    assert {*script.ADDED, *script.BEFORE} <= set(started)
