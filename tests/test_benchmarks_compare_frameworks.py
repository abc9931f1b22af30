"""The ports of benchmarks/frameworks train one job; the comparison says so when one does not."""

import argparse
import contextlib
import json
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import types
from pathlib import Path

import psutil
import pytest
import torch
from conftest import REPO, assert_one_line, load_script, results_of, run_command, started_here

sys.path += [str(REPO / "benchmarks"), str(REPO / "benchmarks" / "frameworks")]

import framework_job
from bench import ports as bench_ports
from bench.ports import PORTS, Port, Run
from bench.strategies import tomllib
from dist_common import job, models

full = pytest.mark.full
TOOL = "benchmarks/compare_frameworks.py"
FOLDER = REPO / "benchmarks" / "frameworks"
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
        ([1.1, 1.3, 1.05], "same"),  # three rounds do not tell
        ([0.7, 0.8, 0.8], "less"),
        ([1.04, 1.05, 1.03] * 3 + [0.5], "more"),  # one odd round of ten
        ([1.5], "?"),  # noise is unknown
    ],
)
def test_no_cost_is_claimed_inside_the_noise(ratios, cost):
    assert tool.Row("x", "1", 1, ratios=ratios).cost == cost


def test_one_run_of_each_claims_no_cost(capsys):
    shown = show(rows_of(bare_ddp=[run_of()], fabric_ddp=[run_of(cpu_ms=300)]))
    assert "one run of each: how wide the noise is cannot be known" in capsys.readouterr().out
    assert not shown.failed


@pytest.mark.parametrize(
    ("run", "fault", "check"),
    [
        (run_of([5.5, 5.0, 4.5001]), "WRONG: other losses", "loss difference, first 10"),
        (run_of([5.5, 5.0, float("nan")]), "WRONG: other losses", "loss difference, first 10"),
        (run_of(world_size=1), "WRONG: world size 1, not 2", "world size"),
        (run_of([*LOSSES, 4.0]), "WRONG: 4 steps, not 3", "steps"),
        (Run(failure="FAILED: exit code 1: boom"), "FAILED: exit code 1: boom", "runs that failed"),
        (run_of(failure="FAILED: exit code -11"), "FAILED: exit code -11", "runs that failed"),
        # The port's own check of it ends the port with an error.
        (run_of(world_size=1, failure="FAILED: 1"), "WRONG: world size 1, not 2", "world size"),
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


def test_what_starts_a_port_is_what_its_file_says():
    python = {name for name, port in PORTS.items() if port.starts_ranks}
    assert python == {
        "fabric_ddp", "lightning_ddp", "ray_train", "fabric_fsdp2",
        "lightning_fsdp2", "litgpt_fabric",
    }  # fmt: skip
    assert {port.path.stem for port in PORTS.values()} - {"ddp_training"} == {
        path.stem for path in FOLDER.glob("*.py") if path.stem != "framework_job"
    }


# the ports that have environments of their own, without what is in them


OWN = {name: port for name, port in PORTS.items() if port.extra != "frameworks"}


@pytest.mark.parametrize("name", OWN)
def test_how_to_make_a_ports_environment_is_said_where_it_is_needed(name):
    port, project = OWN[name], tomllib.loads((REPO / "pyproject.toml").read_text())
    pins = project["project"]["optional-dependencies"][port.extra]
    assert {"torch", port.package} <= {pin.partition("==")[0] for pin in pins if "==" in pin}
    command = f".venv-{port.extra}/bin/python -m pip install --editable '.[{port.extra}]'"
    for path in (port.path, REPO / "benchmarks" / "frameworks.md"):
        assert command in path.read_text(), path
    record = json.loads((REPO / f"benchmarks/recorded/{port.extra}.json").read_text())
    assert {f"{package}=={version}" for package, version in record["versions"].items()} >= {
        pin for pin in pins if "==" in pin
    }


def load_port(monkeypatch, name: str, **packages: dict):
    """Load a port whose packages are not here: stand-ins have the names that it imports."""
    for package, names in packages.items():
        module = types.ModuleType(package)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, package.replace("_of_", "."), module)
    return load_script(f"benchmarks/frameworks/{name}.py")


def test_thunders_port_attends_as_the_model_does(monkeypatch):
    thunder, distributed = {"jit": None}, {"ddp": None}
    packages = {"thunder": thunder, "thunder_of_distributed": distributed}
    port = load_port(monkeypatch, "thunder_ddp", **packages)
    q, k, v = (torch.randn(2, heads, 6, 8) for heads in (4, 2, 2))
    expected = models.causal_attention(q, k, v)
    torch.testing.assert_close(port.attend(q, k, v), expected)
    other = port.attend(q, *(x.flip(1) for x in (k, v)))
    assert not torch.allclose(other, expected), "heads are told apart"


class Described(torch.nn.Module):
    """Keeps what LitGPT's model would be given."""

    def __init__(self, config):
        super().__init__()
        self.config = config

    def load_state_dict(self, weights):
        self.weights = weights


@pytest.mark.parametrize("preset", ["tiny", "llama-like"])
def test_litgpts_port_gives_it_the_whole_model(monkeypatch, preset):
    """Each weight once, and the shape; whether LitGPT computes the same is compared where it is."""
    shape = models.TransformerConfig(96, 32, 2, 4, 1, 40, 64, rope_theta=5e5, norm_eps=1e-6)
    monkeypatch.setitem(models.PRESETS, "llama-like", shape)
    packages = {"litgpt": {"GPT": Described, "Config": dict}, "lightning": {}}
    packages["lightning_of_fabric"] = {"Fabric": None}
    port = load_port(monkeypatch, "litgpt_fabric", **packages)
    args = argparse.Namespace(preset=preset, seq_len=16, seed=0)
    model, ours = port.build_model(args), framework_job.build_model(args)
    given = [weight.detach().flatten() for weight in model.weights.values()]
    expected = [weight.detach().flatten() for weight in ours.parameters()]
    torch.testing.assert_close(*(torch.cat(each).sort().values for each in (given, expected)))
    first = ours.blocks[0].attention
    qkv = torch.cat([first.wq.weight, first.wk.weight, first.wv.weight])
    assert torch.equal(model.weights["transformer.h.0.attn.qkv.weight"], qkv)
    told, shape = model.config, ours.config
    assert (told["n_layer"], told["n_embd"], told["n_head"], told["n_query_groups"]) == (
        shape.num_layers, shape.dim, shape.num_heads, shape.num_kv_heads,
    )  # fmt: skip
    assert told["vocab_size"] == told["padded_vocab_size"] == shape.vocab_size
    assert (told["intermediate_size"], told["block_size"]) == (shape.ffn_dim, shape.max_seq_len)
    assert (told["rope_base"], told["norm_eps"]) == (shape.rope_theta, shape.norm_eps)


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
        (["--frameworks", "nowhere.py"], "no such port or file"),
        (["--frameworks", "horovod_ddp"], "horovod is not installed"),
        (["--frameworks", "thunder_ddp"], "frameworks.md makes .venv-thunder with it"),
        (["--python", "/nowhere/python"], "does not run"),
        (["--repeats", 0], "must be a whole number of at least 1"),
    ],
)
def test_bad_input_is_one_line(run_script, argv, says):
    ended = run_script(TOOL, *argv, environ={})
    assert_one_line(ended, says, "compare_frameworks.py")


@pytest.mark.parametrize(
    ("script", "argv", "says"),
    [
        ("bare_ddp", ["--max-steps", 100_000], "more than the"),
        ("bare_ddp", ["--precision", "bf16-mixed"], "--precision must be 32-true"),
        ("bare_ddp", ["--grad-accum-steps", 2], "one micro-batch per step"),
        ("horovod_ddp", [], "Horovod is not installed"),
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


def test_bare_ddp_trains_as_the_template_does(run_script, tmp_path):
    """The port that all others are compared with, and the template: two spellings, one job."""
    flags = (*SMALL, "--max-steps", 4)
    ended = run_script(BARE, *flags, "--output-dir", tmp_path / "bare", world_size=2)
    assert ended.codes == [0, 0], ended.stderr
    template = "01-ddp-basics/ddp_training.py"
    own = bench_ports.TEMPLATE_FLAGS
    run_script(template, *flags, *own, "--output-dir", tmp_path / "template", world_size=2)
    expected = bench_ports.losses_of_template(tmp_path / "template")
    assert len(expected) == 4
    metrics = results_of(tmp_path / "bare")["metrics"]
    assert metrics["losses"] == pytest.approx(expected, abs=1e-5)
    assert metrics["cpu_time_per_step_ms"] > 0 and len(metrics["step_times_ms"]) == 4


@full
def test_fsdp2_trains_as_ddp_does(run_script, tmp_path):
    losses = []
    for name in ("bare_ddp", "bare_fsdp2"):
        script, folder = f"benchmarks/frameworks/{name}.py", tmp_path / name
        flags = (*SMALL, "--max-steps", 3, "--output-dir", folder)
        ended = run_script(script, *flags, world_size=2)
        assert ended.codes == [0, 0], ended.stderr
        losses.append(results_of(folder)["metrics"]["losses"])
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


def test_a_port_says_when_it_found_another_world(run_script):
    ended = run_script(BARE, *SMALL, "--max-steps", 1, world_size=1)
    assert ended.codes == [1]
    assert ended.stdout.splitlines()[-1] == "FAILED: world size; steps", "it took all batches"


def gone(pid: int) -> bool:
    """Wait until a process has ended. An orphan's end is a zombie where nobody waits for it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        deadline = time.monotonic() + 20
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
    return True


SLEEPER = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"


@pytest.mark.parametrize(
    ("start", "code"),
    [
        # Its ranks are in process groups of their own, as Ray's are.
        ("subprocess.run([sys.executable, '-c', {sleeper!r}], start_new_session=True)", None),
        # Fabric's are in its own, and nobody's children when it has died.
        (
            "rank = subprocess.Popen([sys.executable, '-c', {sleeper!r}], stdout=-1)\n"
            "sys.exit(rank.stdout.readline().decode())",
            1,
        ),
    ],
)
@pytest.mark.full
def test_a_run_leaves_no_process(start, code):
    outer = "import subprocess, sys\n" + start.format(sleeper=SLEEPER)
    ended = bench_ports.run_group([sys.executable, "-c", outer], limit_s=5 if code is None else 60)
    assert ended[0] == code and gone(int(ended[1]))


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
    assert ended.codes == [-signal.SIGKILL] and gone(int(file.read_text()))


@pytest.mark.parametrize(
    ("written", "says"), [(False, "exit code 1"), (True, "exit code 1, results written")]
)
def test_a_run_that_fails_says_why(tmp_path, written, says):
    """A rank that dies after rank 0 has written results is a failure, too."""
    metrics = {"losses": LOSSES, "cpu_time_per_step_ms": 1.0, "step_times_ms": [1.0] * 3}
    results = {"world_size": 2, "metrics": metrics}
    script = tmp_path / "mine.py"
    script.write_text(f'''"""Mine.\n\n    CPU   python mine.py\n"""
import json, pathlib, sys
folder = pathlib.Path(sys.argv[sys.argv.index("--output-dir") + 1])
folder.mkdir()
if {written}:
    (folder / "results.json").write_text(json.dumps({results}))
raise SystemExit("no luck")
''')
    args = args_for(python=sys.executable, limit=60, preset="tiny", seq_len=16,
                    micro_batch_size=2, seed=0, device="cpu")  # fmt: skip
    run = bench_ports.run_port(Port("mine", "torch", script=script), args, tmp_path / "out")
    assert run.failure == f"FAILED: {says}: no luck" and run.losses == (LOSSES if written else [])
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
def test_every_framework_trains_the_same_job(tmp_path):
    """Those that the page does not run itself."""
    before, scratch = set(Path("/tmp").glob("ray-*")), Path(tempfile.mkdtemp(dir="/tmp"))
    names = sorted(PORTS.keys() - {"fabric_ddp", "accelerate_ddp", "horovod_ddp", *OWN})
    argv = ("--max-steps", 12, "--frameworks", *names)
    ended, rows = compare(tmp_path / "out", *argv, TMPDIR=str(scratch))
    assert ended.codes == [0], ended.stdout + ended.stderr
    assert rows.keys() == set(names) and not any(row["fault"] for row in rows.values())
    assert {row["world_size"] for row in rows.values()} == {2}
    own = {process.pid for process in started_here()}  # other tests may have a Ray of theirs
    running = [(process.pid, " ".join(process.info["cmdline"] or ()))
               for process in psutil.process_iter(["cmdline"])]  # fmt: skip
    assert not [line for pid, line in running
                if str(scratch) in line or (pid in own and "raylet" in line)]  # fmt: skip
    assert set(Path("/tmp").glob("ray-*")) == before, "files that Ray left"
    shutil.rmtree(scratch)


@full
@pytest.mark.parametrize("name", OWN)
def test_a_port_in_an_environment_of_its_own_trains_the_same_job(tmp_path, name):
    places = [folder / f".venv-{OWN[name].extra}" for folder in (Path(sys.prefix).parent, REPO)]
    python = next((p / "bin" / "python" for p in places if p.exists()), None)
    if python is None:
        pytest.skip(f"no .venv-{OWN[name].extra}: benchmarks/frameworks.md has how to make it")
    argv = ("--max-steps", 12, "--frameworks", name, "--python", python)
    ended, rows = compare(tmp_path / "out", *argv)
    assert ended.codes == [0], ended.stdout + ended.stderr
    assert (rows[name]["fault"], rows[name]["world_size"]) == (None, 2)


# traps: a port that lacks one thing trains another job, and its exit code says nothing; the page
# itself runs one more, whose sampler shuffles

TRAPS = {
    "lightning_schedule_per_epoch": ("lightning_ddp", (', "interval": "step"', "")),
    "accelerate_schedule_twice": (
        "accelerate_ddp",
        ("loader = accelerator.prepare(model, optimizer, loader)",
         "loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)"),
    ),
    "ddp_left_out": ("bare_ddp", ("    model = DDP(model)\n", "")),
}  # fmt: skip


def write_trap(folder: Path, name: str) -> Path:
    port, *edits = TRAPS[name]
    source = (FOLDER / f"{port}.py").read_text()
    for old, new in edits:
        assert old in source, f"{port}.py no longer has {old}"
        source = source.replace(old, new)
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(source)
    return folder / f"{name}.py"


@full
@with_frameworks
def test_each_trap_changes_the_losses_and_nothing_else_says_so(tmp_path):
    files = [write_trap(tmp_path / "traps", name) for name in TRAPS]
    ended, rows = compare(tmp_path / "out", "--max-steps", 6, "--frameworks", *files)
    assert ended.codes == [1], ended.stdout + ended.stderr
    assert {name: rows[name]["fault"] for name in TRAPS} == dict.fromkeys(
        TRAPS, "WRONG: other losses"
    )


def run_accelerate(source: Path, *command: str):
    words = [*command, source, "--max-steps", 3, *SMALL]
    path = os.pathsep.join((str(REPO), str(FOLDER)))
    return run_command(list(map(str, words)), REPO, 300, PYTHONPATH=path, OMP_NUM_THREADS="1")


@full
@with_frameworks
def test_accelerate_without_cpu_trains_replicas_that_never_meet(tmp_path):
    source = (FOLDER / "accelerate_ddp.py").read_text()
    lone = source.replace('Accelerator(cpu=args.device == "cpu")', "Accelerator()")
    assert lone != source
    (tmp_path / "alone.py").write_text(lone)
    launch = (PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    ended = run_accelerate(tmp_path / "alone.py", *launch)
    # Each of the two; torchrun ends the other one when the first has failed.
    assert "1 rank started by torchrun" in ended.stdout and ended.codes == [1]
    assert "FAILED: world size; steps" in ended.stdout


@full
@with_frameworks
def test_what_the_pages_say_of_defaults_and_refusals():
    asked = """
import deepspeed.runtime.constants, lightning, lightning.fabric
print(deepspeed.runtime.constants.GRADIENT_CLIPPING_DEFAULT)
for start in (lightning.Trainer, lightning.Fabric):
    try:
        start(accelerator="cpu", devices=2, strategy="fsdp")
        print("starts")
    except Exception as error:
        print("GPU" in str(error))
"""
    ended = run_command([str(PYTHON), "-c", asked], REPO, 200)
    lines = ended.stdout.splitlines()
    assert lines[-3:] == ["1.0", "True", "True"], ended.stdout + ended.stderr


@full
@with_frameworks
@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_fork"])
def test_lightning_starts_ranks_from_within_python(tmp_path, strategy):
    (tmp_path / "sums.py").write_text(f"""
import lightning, torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel

def add_up(of_ranks):
    total = torch.tensor(of_ranks.global_rank + 1)
    dist.all_reduce(total)
    print(f"the sum is {{total}}\\n", end="", flush=True)

class Job(BoringModel):
    def on_train_end(self):
        add_up(self.trainer)

if __name__ == "__main__":
    flags = dict(accelerator="cpu", devices=2, strategy={strategy!r})
    lightning.Fabric(**flags).launch(add_up)
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    lightning.Trainer(**flags, **quiet, max_steps=2).fit(Job())
""")
    ended = run_command([str(PYTHON), str(tmp_path / "sums.py")], REPO, 300, OMP_NUM_THREADS="1")
    assert ended.stdout.count("the sum is 3") == 4, ended.stdout + ended.stderr


@full
@with_frameworks
def test_accelerates_fsdp_is_ddp_on_cpus(tmp_path):
    (tmp_path / "kind.py").write_text("""
import os, torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin as Plugin
accelerator = Accelerator(cpu=True, fsdp_plugin=Plugin(fsdp_version=2))
wrapped = type(accelerator.prepare(torch.nn.Linear(2, 2))).__name__
os.write(1, f"wrapped in {wrapped}\\n".encode())  # one write: lines of two ranks do not mix
""")
    launch = (PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    ended = run_command([*map(str, launch), str(tmp_path / "kind.py")], REPO, 200)
    assert ended.stdout.count("wrapped in DistributedDataParallel") == 2, ended.stderr


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


def test_megatron_is_told_this_job():
    launcher, flags = megatron_command()
    told = {flag: words[0] for flag, words in flags.items() if words}
    given = {flag: float(word) for flag, word in told.items() if re.match(r"\d", word)}
    args = job_args()
    shape = models.preset("tiny", args.seq_len)
    optimizer, _ = framework_job.build_optimizer(torch.nn.Linear(1, 1), args)
    group = optimizer.param_groups[0]
    ranks = int(launcher[1].removeprefix("--nproc-per-node="))
    assert given == pytest.approx({
        "--num-layers": shape.num_layers, "--hidden-size": shape.dim,
        "--num-attention-heads": shape.num_heads, "--num-query-groups": shape.num_kv_heads,
        "--ffn-hidden-size": shape.ffn_dim, "--vocab-size": shape.vocab_size,
        "--norm-epsilon": shape.norm_eps, "--rotary-base": shape.rope_theta,
        "--max-position-embeddings": shape.max_seq_len, "--seq-length": args.seq_len,
        "--attention-dropout": 0, "--hidden-dropout": 0,
        "--micro-batch-size": args.micro_batch_size,
        "--global-batch-size": ranks * args.micro_batch_size, "--train-iters": args.max_steps,
        "--adam-beta1": group["betas"][0], "--adam-beta2": group["betas"][1],
        "--adam-eps": group["eps"], "--weight-decay": group["weight_decay"],
        "--clip-grad": framework_job.MAX_NORM,
        "--lr": args.lr, "--min-lr": job.lr_at(args.max_steps, args),
        "--lr-warmup-init": job.lr_at(1, args), "--lr-warmup-iters": args.warmup_steps - 1,
        "--lr-decay-iters": args.max_steps - 1,
        "--eval-interval": args.max_steps, "--eval-iters": 0,
    })  # fmt: skip
    assert type(optimizer) is torch.optim.AdamW and told["--optimizer"] == "adam"
    norms = {type(module).__name__ for module in models.Transformer(shape).modules()}
    assert told["--normalization"] in norms and told["--position-embedding-type"] == "rope"
    tied = "--untie-embeddings-and-output-weights" not in flags
    assert tied == shape.tied_embeddings
    assert {"--swiglu", "--group-query-attention", "--disable-bias-linear"} <= flags.keys()


def test_megatrons_schedule_is_this_guides():
    """Its optimizer_param_scheduler.py, in one line each: it counts steps from 0."""
    given = {flag: words[0] for flag, words in megatron_command()[1].items() if words}
    first, top, last = (float(given[f"--{name}"]) for name in ("lr-warmup-init", "lr", "min-lr"))
    warmup, end = (int(given[f"--lr-{name}-iters"]) for name in ("warmup", "decay"))
    args = job_args()
    for done in range(args.max_steps):
        rate = first + (top - first) * done / warmup
        if done > warmup:
            turned = math.cos(math.pi * (done - warmup) / (end - warmup))
            rate = last + (top - last) * (turned + 1) / 2
        assert rate == pytest.approx(job.lr_at(done + 1, args)), f"step {done + 1}"


def job_args() -> argparse.Namespace:
    """Return the one job's flags as they are by default."""
    parser = argparse.ArgumentParser()
    job.add_task_flags(parser, models.PRESETS)
    return parser.parse_args([])
