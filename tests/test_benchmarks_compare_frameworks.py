"""The ports of benchmarks/frameworks train one job; the comparison says so when one does not."""

import argparse
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from conftest import REPO, assert_one_line, load_script, results_of, run_command, started_here
from helpers_benchmarks import gone

sys.path += [str(REPO / "benchmarks"), str(REPO / "benchmarks" / "frameworks")]

from bench import ports as bench_ports
from bench.ports import PORTS, Port, Run

full = pytest.mark.full
TOOL = "benchmarks/compare_frameworks.py"
BARE = "benchmarks/frameworks/bare_ddp.py"
SMALL = ("--seq-len", 16, "--micro-batch-size", 2)
LIMIT_S = 1200  # of the whole comparison, ten times what it takes on two quiet cores
PYTHON = next((p for p in (Path(sys.prefix).parent / bench_ports.ENVIRONMENT,
                           REPO / bench_ports.ENVIRONMENT) if p.exists()), None)  # fmt: skip
with_frameworks = pytest.mark.skipif(
    PYTHON is None, reason="no .venv-frameworks: `make frameworks` makes it"
)

tool = load_script(TOOL)


# what is computed


LOSSES = [5.5, 5.0, 4.5]


def args_for(**changes) -> argparse.Namespace:
    return argparse.Namespace(**{"world_size": 2, "max_steps": 3} | changes)


def rows_of(**runs: list[Run]) -> dict:
    """Compare runs that were made up; what is not named is missing from the environment."""
    versions = {PORTS[name].package: "1.0" for name in runs}
    found = tool.compare(list(PORTS.values()), runs, versions, args_for())
    return {row.name: row for row in found}


def run_of(losses=LOSSES, world_size=2, cpu_ms=100.0, failure=None) -> Run:
    return Run(losses, world_size, cpu_ms, 8.0, failure)


BARE_RUNS = [run_of(cpu_ms=100), run_of(cpu_ms=110), run_of(cpu_ms=100)]


def test_a_right_framework_is_compared_run_by_run():
    again = [run_of(cpu_ms=120), run_of(cpu_ms=121), run_of(cpu_ms=130)]
    row = rows_of(bare_ddp=BARE_RUNS, fabric_ddp=again)["fabric_ddp"]
    assert (row.fault, row.world_size, row.steps) == (None, 2, 3)
    assert row.loss_difference == 0 and row.outside_s == 8.0
    assert row.ratios == pytest.approx([1.2, 1.1, 1.3])


@pytest.mark.parametrize(
    ("ratios", "cost"),
    [
        ([1.03, 1.05, 1.04], "more"),  # however noisy another framework is
        ([1.2, 0.99, 1.3], "same"),  # one run was cheaper than the bare loop
        ([0.7, 0.8, 0.8], "less"),
        ([1.5], "?"),  # noise is unknown
    ],
)
def test_no_cost_is_claimed_inside_the_noise(ratios, cost):
    assert tool.Row("x", "1", 1, ratios=ratios).cost == cost


@pytest.mark.parametrize(
    ("run", "fault", "check"),
    [
        (run_of([5.5, 5.0, 4.5001]), "WRONG: other losses", "loss difference, first 10"),
        (run_of(world_size=1), "WRONG: world size 1, not 2", "world size"),
        (run_of([*LOSSES, 4.0]), "WRONG: 4 steps, not 3", "steps"),
        (Run(failure="FAILED: exit code 1: boom"), "FAILED: exit code 1: boom", "runs that failed"),
    ],
)
def test_a_wrong_run_is_marked_and_fails(run, fault, check, capsys):
    """The run before it was right: one wrong run in any repeat is enough."""
    rows = rows_of(bare_ddp=[run_of(), run_of()], fabric_ddp=[run_of(), run])
    assert rows["fabric_ddp"].fault == fault and rows["bare_ddp"].fault is None
    failed = show(rows).failed
    assert failed[0].name == f"fabric_ddp: {check}"
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("fabric_ddp"))
    assert line.endswith(fault)


@pytest.mark.parametrize(
    ("step", "apart", "fault"),
    [(9, 9e-5, "WRONG: other losses"), (10, 9e-5, None), (10, 2e-3, "WRONG: other losses")],
)
def test_rounding_may_grow_after_the_first_steps(step, apart, fault):
    losses = [5.0] * 11
    other = [*losses[:step], 5.0 + apart, *losses[step + 1 :]]
    runs = {"bare_ddp": [run_of(losses)], "ray_train": [run_of(other)]}
    versions = {"torch": "1", "ray": "1"}
    found = tool.compare(list(PORTS.values()), runs, versions, args_for(max_steps=11))
    assert {row.name: row.fault for row in found}["ray_train"] == fault


def test_a_framework_that_is_not_installed_has_a_row_and_no_check(capsys):
    rows = rows_of(bare_ddp=[run_of()])
    assert rows["ray_train"].fault == "not installed"
    report = show(rows)
    assert not report.failed and {c.name.split(":")[0] for c in report.checks} == {"bare_ddp"}
    assert re.search(r"ray_train +- +-.*not installed", capsys.readouterr().out)


def show(rows: dict) -> tool.Report:
    args = args_for(output_dir=None)
    world = tool.runtime.World(0, 0, 1, 1, "python")
    report = tool.Report(TOOL, args, world, tool.torch.device("cpu"))
    tool.show(report, list(rows.values()))
    return report


def test_no_port_is_always_first():
    ports = [PORTS[name] for name in ("bare_ddp", "template", "ray_train")]
    turns = tool.turns_of(ports, 3)
    assert [port for _, port in turns] == [*ports, *ports[::-1], *ports]
    assert [repeat for repeat, _ in turns] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_lines_of_code_are_neither_comments_nor_docstrings_nor_imports():
    source = '''"""Two
lines."""
import os
from sys import (
    argv,
)

# a comment
def f(x):  # counts
    """Not counted."""

    return [
        x,
        """a text that is a value""",
    ]
'''
    assert bench_ports.count_code_lines(source) == 5


# what is asked for


def choose(*names: str, **versions: str) -> list[str]:
    args = argparse.Namespace(frameworks=list(names) or None, python="python")
    return [port.name for port in tool.choose(args, versions)]


def test_the_bare_loops_are_always_there(tmp_path):
    own = tmp_path / "mine.py"
    own.write_text('"""Mine.\n\n    CPU   python mine.py\n"""\n')
    assert choose("fabric_ddp", torch="1", lightning="1") == ["bare_ddp", "fabric_ddp"]
    assert choose("fabric_fsdp2", torch="1", lightning="1")[:2] == ["bare_ddp", "bare_fsdp2"]
    assert choose(str(own), torch="1") == ["bare_ddp", "mine"]
    assert choose(torch="1") == list(PORTS), "a port that is not installed has a row"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--frameworks", "fabric_dp"], "no such port or file; did you mean fabric_ddp?"),
        (["--frameworks", "horovod_ddp"], "horovod is not installed"),
        (["--python", "/nowhere/python"], "does not run"),
    ],
)
def test_bad_input_is_one_line(run_script, argv, says):
    ended = run_script(TOOL, *argv, environ={})
    assert_one_line(ended, says, "compare_frameworks.py")


@pytest.mark.parametrize(
    ("script", "argv", "says"),
    [
        ("bare_ddp", ["--max-steps", 100_000], "more than the"),
        ("bare_ddp", ["--grad-accum-steps", 2], "one micro-batch per step"),
    ],
)
def test_bad_input_of_a_port_is_one_line(run_script, script, argv, says):
    ended = run_script(f"benchmarks/frameworks/{script}.py", *argv)
    assert_one_line(ended, says, f"{script}.py")


# what runs


def test_a_comparison_without_a_terminal_says_how_far_it_is(monkeypatch, capsys):
    runs = iter([run_of(), Run(failure="FAILED: no luck")] * 2)
    monkeypatch.setattr(tool, "run_port", lambda *_: next(runs))
    words = ["--frameworks", "template", "--repeats", 2, "--max-steps", 3, "--python"]
    monkeypatch.setattr(sys, "argv", [TOOL, *map(str, words), sys.executable])
    monkeypatch.setattr(tool.signal, "signal", lambda *_: None)  # of this process, for good
    tool.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
    assert lines == ["[1/4] bare_ddp: 3 steps", "[2/4] template: FAILED: no luck",
                     "[3/4] template: 3 steps", "[4/4] bare_ddp: FAILED: no luck"]  # fmt: skip


def test_the_bare_loops_train_as_the_template_does(run_script, tmp_path):
    """The ports that all others are compared with, and the template: three spellings, one job."""
    flags = (*SMALL, "--max-steps", 3)
    template = "01-ddp-basics/ddp_training.py"
    own = bench_ports.TEMPLATE_FLAGS
    run_script(template, *flags, *own, "--output-dir", tmp_path / "template", world_size=2)
    expected = bench_ports.losses_of_template(tmp_path / "template")
    assert len(expected) == 3
    for name in ("bare_ddp", "bare_fsdp2"):
        script, folder = f"benchmarks/frameworks/{name}.py", tmp_path / name
        ended = run_script(script, *flags, "--output-dir", folder, world_size=2)
        assert ended.codes == [0, 0], ended.stderr
        metrics = results_of(folder)["metrics"]
        assert metrics["losses"] == pytest.approx(expected, abs=1e-5)
        assert metrics["cpu_time_per_step_ms"] > 0 and len(metrics["step_times_ms"]) == 3


def test_a_port_says_when_it_found_another_world(run_script):
    ended = run_script(BARE, *SMALL, "--max-steps", 1, world_size=1)
    assert ended.codes == [1]
    assert ended.stdout.splitlines()[-1] == "FAILED: world size; steps", "it took all batches"


SLEEPER = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"


@full
def test_a_comparison_that_is_killed_leaves_no_process(tmp_path):
    file = tmp_path / "pid"
    rank = f"import os, sys; sys.stdout = open({str(file)!r}, 'w'); {SLEEPER}"
    program = f"""
import sys
sys.path[:0] = {[str(REPO), str(REPO / "benchmarks")]!r}
from bench import ports as bench_ports
bench_ports.run_group([sys.executable, "-c", {rank!r}], 600)
"""

    def kill_when_it_trains(pid: int) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if file.exists() and file.read_text().endswith("\n"):
                break
            time.sleep(0.1)
        os.kill(pid, signal.SIGKILL)

    ended = run_command([sys.executable, "-c", program], tmp_path, 180, kill_when_it_trains)
    assert ended.codes == [-signal.SIGKILL] and gone([int(file.read_text())])


def test_a_run_that_fails_says_why(tmp_path):
    """A rank that dies after rank 0 has written results is a failure, too."""
    metrics = {"losses": LOSSES, "cpu_time_per_step_ms": 1.0, "step_times_ms": [1.0] * 3}
    results = {"world_size": 2, "metrics": metrics}
    script = tmp_path / "mine.py"
    script.write_text(f'''"""Mine.\n\n    CPU   python mine.py\n"""
import json, pathlib, sys
folder = pathlib.Path(sys.argv[sys.argv.index("--output-dir") + 1])
folder.mkdir()
(folder / "results.json").write_text(json.dumps({results}))
raise SystemExit("no luck")
''')
    args = args_for(python=sys.executable, limit=60, preset="tiny", seq_len=16,
                    micro_batch_size=2, seed=0, device="cpu")  # fmt: skip
    run = bench_ports.run_port(Port("mine", "torch", script=script), args, tmp_path / "out")
    assert run.failure == "FAILED: exit code 1, results written: no luck" and run.losses == LOSSES
    assert rows_of(bare_ddp=[run_of()], fabric_ddp=[run])["fabric_ddp"].fault == run.failure


def compare(folder: Path, *argv, **environ: str) -> tuple:
    """Run the comparison as a reader does; return how it ended, and its rows by name."""
    words = [*SMALL, "--repeats", 1, "--python", PYTHON, "--limit", 400, "--output-dir", folder]
    command = ["python", REPO / TOOL, *words, *argv]
    ended = run_command(list(map(str, command)), REPO, LIMIT_S, **environ)
    rows = results_of(folder)["metrics"]["rows"]
    return ended, {row["name"]: row for row in rows}


@full
@with_frameworks
@pytest.mark.xdist_group("ray")  # what it leaves is looked for on the whole machine
def test_frameworks_train_the_same_job(tmp_path):
    """Ray starts its ranks itself; the page runs frameworks under torchrun."""
    before, scratch = set(Path("/tmp").glob("ray-*")), Path(tempfile.mkdtemp(dir="/tmp"))
    names = ("ray_train",)
    argv = ("--max-steps", 6, "--frameworks", *names)
    ended, rows = compare(tmp_path / "out", *argv, TMPDIR=str(scratch))
    assert ended.codes == [0], ended.stdout + ended.stderr
    assert rows.keys() == {"bare_ddp", *names} and not any(row["fault"] for row in rows.values())
    assert {row["world_size"] for row in rows.values()} == {2}
    own = {process.pid for process in started_here()}  # other tests may have a Ray of theirs
    running = [(process.pid, " ".join(process.info["cmdline"] or ()))
               for process in psutil.process_iter(["cmdline"])]  # fmt: skip
    assert not [line for pid, line in running
                if str(scratch) in line or (pid in own and "raylet" in line)]  # fmt: skip
    assert set(Path("/tmp").glob("ray-*")) == before, "files that Ray left"
    shutil.rmtree(scratch)


# Megatron-LM does not run here: its command on the page is held against a record of its arguments


def megatron_command() -> tuple[list[str], dict[str, list[str]]]:
    """Return what starts Megatron-LM on the page, and the words that follow each of its flags."""
    page = (REPO / "benchmarks" / "frameworks.md").read_text()
    block = re.search(r"```text\n(torchrun [^`]*pretrain_gpt\.py[^`]*)```", page)[1]
    launcher, _, rest = block.replace("\\\n", " ").partition(" pretrain_gpt.py ")
    flags = {}
    for word in rest.split():
        if word.startswith("--"):
            assert word not in flags, f"{word} twice"
            flags[word] = []
        else:
            flags[[*flags][-1]].append(word)
    return launcher.split(), flags


def test_megatron_knows_each_flag_and_takes_its_value():
    known = json.loads((REPO / "benchmarks/recorded/megatron_arguments.json").read_text())
    for flag, words in megatron_command()[1].items():
        fact = known["arguments"].get(flag)
        assert fact, f"{flag}: not among the recorded arguments of Megatron-LM"
        assert len(words) == fact["takes"], f"{flag} takes {fact['takes']}, not {words}"
        for word in words:
            {"int": int, "float": float, "str": str}[fact["type"]](word)
            assert word in fact.get("choices", [word]), f"{flag} {word}: none of its choices"
