"""The sweep: plan, points that fail or hang, resume, launchers, strategies, its folder."""

import json
import os
import re
import shlex
import signal
import sys
import time
from collections import Counter
from dataclasses import replace

import pytest
from conftest import REPO, load_script, run_command
from helpers_benchmarks import TOOL, asked_for, bench, fakes, gone, runs_of  # noqa: F401

from bench import launch as bench_launch
from bench import points as bench_points
from bench import search as bench_search
from bench import store as bench_store
from bench import strategies as bench_strategies
from bench.store import Store, load
from legacy_common import cli

full = pytest.mark.full
# pytest passes fixtures by name.
# ruff: noqa: F811


def plan_of(names, **settings):
    asked = asked_for(**settings)
    table = bench_strategies.load()
    return bench_points.plan(asked, bench_strategies.choose(["single", *names], table))


def records_of(folder):
    return {record["id"]: record for record in load(folder).records}


# planning


def test_strategies_alternate_and_every_second_repeat_runs_backwards():
    points = plan_of(("ddp", "tp"), repeats=3)
    once = ["single.w1", "ddp.w2", "tp.w2"]
    turns = [once, once[::-1], once]
    ids = [f"{name}#{repeat}" for repeat, names in enumerate(turns, 1) for name in names]
    assert [point.identity for point in points] == ids


def test_what_cannot_run_is_recorded_once_and_single_runs_once_for_all_world_sizes():
    points = plan_of(("ddp", "tp"), world_sizes=[2, 3, 4], repeats=2)
    ids = [point.identity for point in points]
    assert len(set(ids)) == len(ids)
    assert [name for name in ids if name.startswith("single")] == ["single.w1#1", "single.w1#2"]
    reasons = {point.identity: point.reason for point in points if point.reason}
    assert set(reasons) == {"ddp.w3#1", "tp.w3#1", "tp.w4#1"}
    assert reasons["ddp.w3#1"].startswith("a global batch of 16 sequences cannot be dealt to 3")


def test_ids_name_what_differs_and_nothing_else():
    points = plan_of(("ddp",), presets=["tiny", "124m"], precisions=["32-true", "bf16-mixed"],
                     links=["none", "100mbit"], repeats=1)  # fmt: skip
    ids = {point.identity for point in points}
    assert "ddp.w2.124m.bf16-mixed.100mbit#1" in ids and len(ids) == len(points)
    assert len([name for name in ids if "check" not in name]) == 12
    alone = [point for point in points if point.name.startswith("single")]
    assert {point.described["link"] for point in alone} == {None}


def test_before_16_bits_each_exact_strategy_is_checked_once_in_float32():
    asked = asked_for(precisions=["bf16-mixed"], repeats=2, links=["none", "1gbit"], max_steps=40)
    lossy = replace(STRATEGIES["ddp"], name="lossy", exact=False)
    points = bench_points.plan(asked, [STRATEGIES["single"], STRATEGIES["ddp"], lossy])
    alike = ["single.w1#1", "ddp.w2#1", "lossy.w2#1", "ddp.w2.1gbit#1", "lossy.w2.1gbit#1"]
    checks = ["single.w1.32-true.check#1", "single.w1.bf16-mixed.check#1", "ddp.w2.32-true.check#1"]
    ids = [point.identity for point in points]
    again = [name.replace("#1", "#2") for name in alike[::-1]]
    assert ids == [*checks[:2], alike[0], checks[2], *alike[1:], *again]
    steps = [point.described["max_steps"] for point in points]
    assert [name for name, own in zip(ids, steps, strict=True) if own == 5] == checks


def test_weak_scaling_has_a_reference_for_each_global_batch():
    points = plan_of(("ddp",), world_sizes=[2, 4], scaling="weak", repeats=1, micro_batch_size=8)
    names = ("global_batch_size", "micro_batch_size", "grad_accum_steps")
    batches = {point.identity: tuple(map(point.described.get, names)) for point in points}
    assert batches == {
        "single.w1.b16#1": (16, 8, 2),
        "single.w1.b32#1": (32, 8, 4), "ddp.w2.b32#1": (32, 8, 2),
        "single.w1.b64#1": (64, 8, 8), "ddp.w4.b64#1": (64, 8, 2),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["quick", "one_node", "slurm"])
def test_shipped_sweeps_can_be_planned_and_a_dry_run_starts_nothing(bench, capsys, name):
    shipped = f"benchmarks/{name}.toml"
    folder = next(iter(REPO.glob("benchmarks"))) / f"{name}-not-made"
    assert bench("sweep", "--config", REPO / shipped, "--dry-run", "--output-dir", folder) == 0
    *commands, last = capsys.readouterr().out.splitlines()
    assert re.match(rf"{len(commands)} points.*; nothing was started$", last)
    assert all(
        re.match(r"\S+: (OMP_NUM_THREADS=1 (torchrun|python)|skipped:) ", line) for line in commands
    )
    assert not folder.exists()


# running


def test_whatever_becomes_of_a_point_the_sweep_goes_on(bench, fakes, tmp_path, capsys):
    names = ("train", "lossy", "fail", "die", "one-dies", "check", "half", "nothing", "hang",
             "times-out")  # fmt: skip
    code = bench("sweep", "--strategies", *names, "--repeats", 1, "--timeout", 8,
                 "--output-dir", tmp_path / "out")  # fmt: skip
    assert code == 1
    records = records_of(tmp_path / "out")
    ended = {name.split(".")[0]: (r["status"], r["reason"]) for name, r in records.items()}
    assert ended == {
        "single": ("ok", None),
        "train": ("ok", None),
        "lossy": ("ok", None),
        "fail": ("failed", "no such luck"),
        "die": ("failed", "exit code -9, without a word"),
        "one-dies": ("failed", "rank 1: broken"),
        "check": ("failed", "its own check failed: equal weights on all ranks"),
        "half": ("failed", "exit code 0, but its results.json has no metrics.final_loss "
                           "(JSONDecodeError)"),
        "nothing": ("failed", "exit code 0, but it wrote no results.json"),
        "hang": ("timeout", "timeout after 8 s"),
        "times-out": ("timeout", "rank 0: lost contact with another rank (Timed out): it stopped "
                                 "answering"),
    }  # fmt: skip
    printed = capsys.readouterr().out
    assert "fail.w2#1: failed: no such luck (points/fail.w2#1/log.txt)" in printed
    assert "FAILED: 8 points" in printed
    assert f"interrupted? The same command with --output-dir {tmp_path}/out resumes it" in printed
    log = tmp_path / "out/points/fail.w2#1/log.txt"
    assert "noise of a library" in log.read_text()
    assert gone([pid for _, _, pid in runs_of(fakes)])
    assert sorted(path.name for path in log.parent.parent.iterdir()) == sorted(records)
    assert records["train.w2#1"]["results"]["world_size"] == 2
    typed = records["train.w2#1"]["command"]
    assert typed.startswith("OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=2")
    assert " --timeout 6.4 " in typed, "a collective gives up before the sweep does, and says why"
    assert records["train.w2#1"]["losses"] == pytest.approx([4.9, 4.8, 4.7, 4.6, 4.5])
    stack = (tmp_path / "out/points/one-dies.w2#1/log.txt").read_text()
    assert 'File "' in stack, "where the other rank was when it was ended"


def test_a_wrong_loss_is_the_sweep_s_exit_code(bench, fakes, tmp_path, capsys):
    words = ("sweep", "--repeats", 1, "--strategies")
    assert bench(*words, "train", "wrong", "--output-dir", tmp_path / "wrong") == 1
    assert re.search(r"^wrong .* WRONG \+0\.5$", capsys.readouterr().out, re.M)
    assert bench(*words, "train", "early", "--output-dir", tmp_path / "early") == 1
    said = r"^early: WRONG: loss \+0\.01 from one process in the first 5 steps, 0.0002 allowed$"
    assert re.search(said, capsys.readouterr().out, re.M)


def test_a_sweep_ends_when_its_order_is_decided(bench, fakes, tmp_path, capsys):
    folder = tmp_path / "out"
    words = ("sweep", "--strategies", "train", "slow", "--repeats", 5, "--output-dir", folder)
    bench(*words, "--until-decided")
    assert {record["repeat"] for record in load(folder).records} == {1, 2, 3}
    said = "no order is open after 3 rounds: the other 6 points are left out"
    printed = capsys.readouterr().out
    assert said in printed and "is the 99% interval of a ratio" in printed


@pytest.mark.full
def test_a_search_ends_where_memory_does_and_says_so(bench, fakes, tmp_path, capsys):
    """An answer, no error: what is larger is left out, recomputation has its own limit."""
    words = ("sweep", "--strategies", "large", "train", "--micro-batch-sizes", 8, 2, 4,
             "--recompute", "none", "full", "--repeats", 1,
             "--output-dir", tmp_path / "out")  # fmt: skip
    assert bench(*words) == 0
    ends = {name: (record["status"], record["reason"])
            for name, record in records_of(tmp_path / "out").items()}  # fmt: skip
    said = "rank 0: OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    found = {name.partition(".")[0]: end for name, end in ends.items() if "large" in name}
    assert found == {
        "large-mb2": ("ok", None), "large-mb2-full": ("ok", None),
        "large-mb4": ("out of memory", said), "large-mb4-full": ("ok", None),
        "large-mb8": ("skipped", "a micro-batch of 4 ran out of memory"),
        "large-mb8-full": ("out of memory", said),
    }  # fmt: skip
    printed = capsys.readouterr().out
    assert "train: no --recompute full, run without" in printed
    assert f"large mb8 full: out of memory: {said}" in printed and "FAILED" not in printed
    assert "large mb8: skipped: a micro-batch of 4 ran out of memory" in printed


def test_a_search_tries_what_each_script_supports():
    names = ("ddp", "fsdp-full", "zero-2", "pp-zero-bubble", "pp-1f1b")
    asked = asked_for(micro_batch_sizes=[4, 1], recompute=["none", "full"],
                      compile=["off", "on"], micro_batch_size=None)  # fmt: skip
    rows = bench_search.variants([STRATEGIES[name] for name in ("single", *names)], asked)
    count = Counter(row.name.partition(" ")[0] for row in rows)
    assert count == dict(zip(("single", *names), (1, 4, 8, 4, 2, 8), strict=True))
    table = {row.name: row for row in rows}
    most = table["fsdp-full mb4 full compile"]
    assert most.flags == "--sharding full --activation-checkpointing full --compile"
    with pytest.raises(ValueError, match="micro-batches of 3 do not make up a rank's 8$"):
        bench_points.batch_sizes(replace(most, micro_batch_size=3), 2, 16, None)


SWEEP = """
import sys
sys.path[:0] = {paths!r}
import distributed_benchmarks, pathlib
from bench import strategies
strategies.TABLE = pathlib.Path({table!r})
sys.argv = ["distributed_benchmarks.py", *sys.argv[1:]]
distributed_benchmarks.cli.run(distributed_benchmarks.main)
"""


@full
def test_a_killed_sweep_s_ranks_end_and_it_resumes(fakes, tmp_path):
    paths = [str(REPO / "benchmarks"), str(REPO)]
    program = SWEEP.format(paths=paths, table=str(fakes / "strategies.toml"))
    command = [sys.executable, "-c", program, "sweep", "--strategies", "train", "hang-once",
               "--launcher", "fork", "--device", "cpu", "--repeats", "1",
               "--output-dir", str(tmp_path / "out")]  # fmt: skip

    def kill_while_it_hangs(pid):
        deadline = time.monotonic() + 120
        while len(runs_of(fakes)) < 5 and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(pid, signal.SIGKILL)

    ended = run_command(command, tmp_path, 180, kill_while_it_hangs)
    assert ended.codes == [-signal.SIGKILL], ended.stdout + ended.stderr
    assert len(runs_of(fakes)) == 5 and gone([pid for _, _, pid in runs_of(fakes)])
    assert set(records_of(tmp_path / "out")) == {"single.w1#1", "train.w2#1"}
    before = (tmp_path / "out" / "results.jsonl").read_text()
    (fakes / "go").touch()
    ended = run_command(command, tmp_path, 180)
    assert ended.codes == [0], ended.stdout + ended.stderr
    assert "2 points have a record already, 1 to go" in ended.stdout
    assert [name for name, _, _ in runs_of(fakes)][5:] == ["hang-once.w2#1"] * 2
    assert len(records_of(tmp_path / "out")) == 3
    after = (tmp_path / "out" / "results.jsonl").read_text()
    assert after.startswith(before) and len(after.splitlines()) == 3


# launchers


@full
def test_torchrun_starts_ranks_and_leaves_none(fakes, tmp_path):
    words = ["--do", "one dies", "--output-dir", str(tmp_path / "out")]
    script = str(fakes / "fake.py")
    ended = bench_launch.start("torchrun", script, words, 2, tmp_path / "launch", 100)
    assert ended.code == 1, ended.err
    assert {rank for _, rank, _ in runs_of(fakes)} == {"0", "1"}
    assert gone([pid for _, _, pid in runs_of(fakes)])


SRUN = """#!/bin/bash
echo "$@" >> {log}
while [[ $1 == -* ]]; do [[ $1 == --ntasks=* ]] && tasks="${{1#*=}}"; shift; done
for ((task = 0; task < tasks; task++)); do SLURM_PROCID=$task "$@" & done
wait -n; code=$?; wait; exit $code
"""


def test_ranks_share_the_cores_unless_the_environment_says_otherwise(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(bench_launch.measure, "core_count", lambda: 24)
    assert [bench_launch.threads("torchrun", n) for n in (1, 2, 48)] == ["24", "12", "1"]
    assert bench_launch.threads("fork", 2) == "1"
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "5")
    assert bench_launch.threads("srun", 8) == "5"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert bench_launch.threads("torchrun", 8) == "7"


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Be a job of two nodes with two tasks each, in which srun runs all tasks here."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "srun").write_text(SRUN.format(log=tmp_path / "srun.log"))
    (folder / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    job = {"JOB_ID": "7", "NTASKS": "4", "TASKS_PER_NODE": "2(x2)", "CPUS_PER_TASK": "3"}
    for name, value in job.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    return tmp_path / "srun.log"


def test_inside_a_slurm_job_srun_starts_the_ranks(bench, fakes, slurm, tmp_path):
    words = ("sweep", "--strategies", "train", "fail", "--repeats", 1, "--timeout", 30,
             "--world-sizes", 2, 4, 8, "--output-dir", tmp_path / "out")  # fmt: skip
    assert bench(*words) == 1
    records = records_of(tmp_path / "out")
    ended = {name: (r["status"], r["reason"]) for name, r in records.items()}
    assert ended["train.w4#1"] == ("ok", None) and ended["single.w1#1"] == ("ok", None)
    assert ended["fail.w2#1"] == ("failed", "no such luck")
    assert ended["train.w8#1"][1] == "8 ranks need as many tasks, and this SLURM job has 4"
    line = next(line for line in slurm.read_text().splitlines() if "train.w4#1" in line)
    flags = "--nodes=2 --ntasks=4 --ntasks-per-node=2 --kill-on-bad-exit=1 --cpus-per-task=3"
    assert line.startswith(flags)
    threads = "OMP_NUM_THREADS=3"  # as many as a task has CPUs
    assert records["train.w4#1"]["command"].startswith(f"{threads} srun {flags} python ")
    assert load(tmp_path / "out").machines[0]["CPU"]
    assert {rank for name, rank, _ in runs_of(fakes) if name == "train.w4#1"} == set("0123")


# A launcher of one's own, of which one word is a line for another shell.
LINE = ("sh -c 'echo {nodes} nodes of {ranks_per_node} >> LOG; for n in $(seq {ranks}); do "
        "RANK=$((n - 1)) WORLD_SIZE={ranks} {python} {command} & done; wait'")  # fmt: skip


def test_a_line_of_one_s_own_starts_the_ranks(bench, fakes, tmp_path):
    line = LINE.replace("LOG", str(tmp_path / "log"))
    words = ("sweep", "--strategies", "train", "--repeats", 1, "--timeout", 30,
             "--world-sizes", 2, 4, "--launcher", line, "--ranks-per-node", 2,
             "--output-dir", tmp_path / "with space")  # fmt: skip
    assert bench(*words) == 0
    assert {rank for name, rank, _ in runs_of(fakes) if name == "train.w4#1"} == set("0123")
    said = (tmp_path / "log").read_text().splitlines()
    assert said == ["1 nodes of 1", "1 nodes of 2", "2 nodes of 2"]
    assert records_of(tmp_path / "with space")["train.w4#1"]["launcher"] == line


def test_what_a_line_starts_is_quoted_where_a_shell_reads_it(bench, fakes, tmp_path, capsys):
    words = ("sweep", "--strategies", "train", "--world-sizes", 4, "--repeats", 1, "--dry-run",
             "--ranks-per-node", 2, "--output-dir", tmp_path / "a b", "--launcher")  # fmt: skip
    assert bench(*words, "mpirun -np {ranks} -N {ranks_per_node} {python} {command}") == 0
    point = f"OMP_NUM_THREADS=1 mpirun -np 4 -N 2 python {fakes}/fake.py "
    output = f"--output-dir '{tmp_path}/a b/points/train.w4#1'"
    line = next(line for line in capsys.readouterr().out.splitlines() if "train.w4" in line)
    assert line.startswith(f"train.w4#1: {point}") and line.endswith(output)
    assert bench(*words, "ssh node1 'cd ${{HOME}}/guide && {command}'") == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "train.w4" in line)
    *ssh, remote = shlex.split(line)[2:]
    assert ssh == ["ssh", "node1"] and remote.startswith("cd ${HOME}/guide && ")
    assert shlex.split(remote)[-1] == f"{tmp_path}/a b/points/train.w4#1"


def test_a_line_that_starts_another_number_of_ranks_is_wrong(bench, fakes, tmp_path, capsys):
    line = f"env WORLD_SIZE=1 RANK=0 {sys.executable} {{command}}"
    words = ("--launcher", line, "--repeats", 1, "--output-dir", tmp_path / "out")
    assert bench("sweep", "--strategies", "train", *words) == 1
    assert "WRONG: its world size was 1 instead of 2" in capsys.readouterr().out


def test_auto_takes_srun_then_torchrun_then_forks(monkeypatch):
    monkeypatch.setattr(bench_launch, "visible_gpus", lambda: 8)
    assert bench_launch.resolve("auto", "auto") == ("torchrun", "cuda")
    assert bench_launch.resolve("auto", "cpu") == ("fork", "cpu")
    assert "16 ranks need as many GPUs" in bench_launch.why_not("torchrun", "cuda", 16)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert bench_launch.resolve("auto", "auto") == ("srun", "auto")
    monkeypatch.delenv("SLURM_JOB_ID")
    monkeypatch.setattr(bench_launch, "visible_gpus", lambda: 0)
    assert bench_launch.resolve("auto", "auto") == ("fork", "cpu")


# train


def test_train_prints_what_a_step_costs_beside_the_loss_of_one_process(bench, fakes, capsys):
    assert bench("train", "train") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "OK: loss 3.0000 after 20 steps" and lines[-2].split()[-1] == "yes"
    assert any(line.startswith("step ") and "of 17 steps" in line for line in lines)
    assert bench("train", "wrong") == 1
    wrong = capsys.readouterr().out.splitlines()[-1]
    assert wrong == "FAILED: loss +0.5 from one process, 0.005 allowed"
    assert bench("train", "fail") == 1
    assert capsys.readouterr().out.splitlines()[-1] == "FAILED: no such luck"


# bad input


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train", "ddd"], "unknown strategy ddd: did you mean ddp? There are single, ddp, "),
        (["train", "ddp", "--world-size", 1], "ddp cannot use 1 rank, it needs 2 or more: one"),
        (["sweep", "--links", "fast"], "--links: must be like 100mbit or 1gbit, not 'fast'"),
        (["sweep", "--links", "1gbit", "--launcher", "torchrun"], "--links need --launcher fork"),
        (["sweep", "--max-steps", 3], "--untimed-steps 3 of --max-steps 3 leave none to time"),
        (["sweep", "--launcher", "srun"], "--launcher srun works inside a SLURM job"),
        (["sweep", "--device", "cuda"], "nvidia-smi lists no GPU here: use --device cpu"),
        (["sweep", "--launcher", "mpi"], "must be auto, fork, torchrun, srun, or a line with {"),
        (["sweep", "--launcher", "mpirun -n {n} {command}"], "unknown {n}: there are {ranks}, {no"),
        (["sweep", "--launcher", "sh -c '{command}"], "No closing quotation in \"sh -c '{command}"),
        (["sweep", "--ranks-per-node", 2], "--ranks-per-node needs a line as the --launcher"),
        (
            ["sweep", "--micro-batch-sizes", 2, "--micro-batch-size", 2],
            "is not allowed with --micro",
        ),
    ],
)
def test_bad_input_is_refused_before_anything_starts(bench, tmp_path, capsys, words, says):
    folder = ["--output-dir", tmp_path / "new"] if words[0] in ("sweep", "train") else []
    assert says in bench(*words, *folder)
    assert not capsys.readouterr().out and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("repeat = 3", "sweep.toml: unknown key repeat: did you mean repeats?"),
        ('repeats = "3"', "sweep.toml: repeats must be a whole number, not '3'"),
        ("world_sizes = 2", "sweep.toml: world_sizes must be a list, each a whole number, not 2"),
        ("repeats = = 3", "sweep.toml is not valid TOML: "),
    ],
)
def test_a_wrong_file_is_refused(bench, tmp_path, text, says):
    (tmp_path / "sweep.toml").write_text(text)
    refused = bench("sweep", "--config", tmp_path / "sweep.toml", "--output-dir", tmp_path / "new")
    assert says in refused and not (tmp_path / "new").exists()


def test_flags_win_over_the_file(bench, fakes, tmp_path):
    (tmp_path / "sweep.toml").write_text('strategies = ["fail"]\nrepeats = 5\nmax_steps = 30\n')
    words = ("--strategies", "train", "--repeats", 1, "--output-dir", tmp_path / "out")
    assert bench("sweep", "--config", tmp_path / "sweep.toml", *words) == 0
    settings = load(tmp_path / "out").settings
    assert (settings["strategies"], settings["repeats"]) == (["single", "train"], 1)
    assert settings["max_steps"] == 30
    assert settings["points"] == ["single.w1#1", "train.w2#1"]


# strategies.toml


STRATEGIES = bench_strategies.load()
# Of world size 2, but these:
SMALLEST = {"single": 1, "fsdp-hybrid": 4, "tp-pp-dp": 8}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[full] * n.startswith("zero")) for n in STRATEGIES]
)
def test_every_script_accepts_the_flags_of_its_rows(name, monkeypatch):
    asked = asked_for(world_sizes=[SMALLEST.get(name, 2)])
    (point,) = bench_points.plan(asked, [STRATEGIES[name]])[:1]
    assert point.reason is None and point.described["world_size"] == SMALLEST.get(name, 2)
    words = list(map(str, point.flags))
    monkeypatch.setattr(sys, "argv", [STRATEGIES[name].script, *words])
    monkeypatch.chdir(REPO)
    parsed = load_script(STRATEGIES[name].script).parse_args()
    args = parsed[0] if isinstance(parsed, tuple) else parsed
    assert not (args.self_check if "self_check" in args else args.parity_steps)
    assert (args.log_every, args.save_every) == (1, 0)
    assert getattr(args, "eval_every", 0) == 0, "the test set's time is no step's"


@pytest.mark.parametrize("name", ["ddp-accumulate", "tp-pp-dp"])
@pytest.mark.parametrize("largest", [None, 3])
def test_micro_batch_x_accumulation_x_data_ranks_is_the_global_batch(name, largest):
    strategy = STRATEGIES[name]
    found = 0
    for world_size in range(1, 17):
        if strategy.why_not(world_size, "tiny", "32-true"):
            continue
        ranks = strategy.data_parallel_ranks(world_size)
        batch = 16 * ranks
        micro, steps = bench_points.batch_sizes(strategy, world_size, batch, largest)
        assert micro * steps * ranks == batch
        assert micro <= (largest or batch)
        assert steps % (strategy.micro_batches * strategy.ranks_of("pp", world_size)) == 0
        found += 1
    assert found


def test_a_batch_that_cannot_be_dealt_is_said_so():
    with pytest.raises(ValueError, match="16 sequences cannot be dealt to 3 data-parallel ranks"):
        bench_points.batch_sizes(STRATEGIES["ddp"], 3, 16, None)
    with pytest.raises(ValueError, match="1 data-parallel ranks x 8 micro-batches"):
        bench_points.batch_sizes(STRATEGIES["pp-1f1b"], 4, 12, None)


# strategies of one's own

OWN = '[mine]\ndoes = "mine"\nscript = "mine.py"\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (OWN + "flag = 1", r"own.toml \[mine\]: unknown key flag: did you mean flags\?"),
        (OWN + 'least_ranks = "two"', "least_ranks must be a whole number, not 'two'"),
        (OWN + 'flags = "--ranks {ranks}"', r"flags can have \{world_size\} and \{half\}"),
        (OWN.replace("mine.py", "gone.py"), "there is no script gone.py"),
        (OWN.replace("[mine]", "[ddp]"), "the name ddp is taken"),
    ],
)
def test_a_wrong_file_of_strategies_is_refused(tmp_path, text, says):
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "own.toml").write_text(text)
    with pytest.raises(cli.UsageError, match=says):
        bench_strategies.load(tmp_path / "own.toml")


def test_a_script_of_one_s_own_is_beside_its_file(tmp_path):
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "own.toml").write_text(OWN)
    found = bench_strategies.load(tmp_path / "own.toml")
    assert found["mine"].path == tmp_path / "mine.py"
    assert list(found) == [*STRATEGIES, "mine"]


# the same loss


# the folder of a sweep


def record(identity, **more):
    return {"id": identity, "point": {"strategy": "ddp"}, "status": "ok", **more}


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "sweep", {"repeats": 3, "points": ["a#1", "b#1"]})
    yield store
    store.close()


def lines_of(store):
    return (store.folder / "results.jsonl").read_text().splitlines()


def test_records_come_back_in_order_and_the_later_of_two_counts(store):
    for identity, seconds in (("a#1", 1), ("b#1", 2), ("a#1", 3)):
        store.append(record(identity, seconds=seconds))
    sweep = load(store.folder)
    assert [(r["id"], r["seconds"]) for r in sweep.records] == [("a#1", 3), ("b#1", 2)]
    assert sweep.settings == {"repeats": 3, "points": ["a#1", "b#1"]} and not sweep.warnings
    assert len(lines_of(store)) == 3


@pytest.mark.parametrize(
    ("last", "line", "damage"),
    [
        ('{"id": "c#1", "poi', 2, "truncated"),
        ("null\n" + json.dumps(record("c#1")) + "\n", 2, "damaged"),
    ],
)
def test_a_damaged_line_is_named_and_left_out(store, last, line, damage):
    store.append(record("a#1"))
    with (store.folder / "results.jsonl").open("a", encoding="latin-1") as file:
        file.write(last)
    sweep = load(store.folder)
    assert [r["id"] for r in sweep.records] == ["a#1", "c#1"][: 1 + (damage == "damaged")]
    path = store.folder / "results.jsonl"
    assert sweep.warnings == [f"{path} line {line} is {damage}: left out"]


def test_a_killed_sweep_s_half_line_is_cut_before_the_next_one(store):
    store.append(record("a#1"))
    store.close()
    with (store.folder / "results.jsonl").open("a") as file:
        file.write('{"id": "b#1", "poi')
    again = Store(store.folder, store.settings)
    path = store.folder / "results.jsonl"
    cut = f"{path} line 2 was truncated: cut, its point runs again"
    assert again.sweep.warnings == [cut] and [r["id"] for r in again.sweep.records] == ["a#1"]
    again.append(record("b#1"))
    again.close()
    sweep = load(store.folder)
    assert [r["id"] for r in sweep.records] == ["a#1", "b#1"] and not sweep.warnings


def test_another_sweep_s_folder_is_refused_naming_what_differs(store):
    store.append(record("a#1"))
    store.close()
    with pytest.raises(cli.UsageError, match=r"repeats \(3 there, 5 here\), lr \(null there, 0.1"):
        Store(store.folder, {"repeats": 5, "points": ["a#1"], "lr": 0.1})
    assert [r["id"] for r in load(store.folder).records] == ["a#1"]


def test_a_folder_in_which_a_sweep_runs_is_refused(store, monkeypatch):
    monkeypatch.setattr(bench_store, "LOCK_PATIENCE_S", 0.1)
    with pytest.raises(cli.UsageError, match="another sweep is running in"):
        Store(store.folder, store.settings)
    store.close()
    Store(store.folder, store.settings).close()


def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("\\chapter")
    with pytest.raises(cli.UsageError, match="holds other files than a sweep's"):
        Store(tmp_path, {})
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_damaged_settings_are_refused(tmp_path):
    (tmp_path / "sweep.json").write_text('{"settings"')
    for read in (load, lambda folder: Store(folder, {})):
        with pytest.raises(cli.UsageError, match=r"sweep.json is damaged"):
            read(tmp_path)
