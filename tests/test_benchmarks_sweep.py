"""distributed_benchmarks.py sweep and comm: points run, fail, are killed and resume."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from conftest import REPO, load_script, run_command
from helpers_benchmarks import FLAGS, TOOL, bench, fakes, runs_of  # noqa: F401

SMALL = ("--launcher", "fork", "--global-batch-size", "4", "--max-steps", "20")


def test_rounds_alternate_and_a_second_call_runs_nothing_again(
    bench,  # noqa: F811
    fakes,  # noqa: F811
    tmp_path,
    capsys,
):
    words = ["sweep", "--strategies", "train", "slow", "--output-dir", tmp_path / "a"]
    words += [*SMALL, "--repeats", "2"]
    assert bench(*words) == 0
    order = [point.split(".")[0] for point, _ in runs_of(fakes)]
    ranks = [name for name in order if name != "single"]
    assert ranks == ["train"] * 2 + ["slow"] * 4 + ["train"] * 2  # two ranks each
    printed = capsys.readouterr().out
    assert "take train: the fastest beyond the noise" in printed
    assert bench(*words) == 0
    assert len(runs_of(fakes)) == len(order)
    assert "6 points have ended before, 0 are left" in capsys.readouterr().out
    assert "seed 0, not 1" in bench(*words, "--seed", "1")


def test_however_a_point_ends_the_sweep_continues(bench, fakes, tmp_path, capsys):  # noqa: F811
    names = [name for name in FLAGS if name != "slow"]
    words = ["sweep", "--strategies", *names, "--output-dir", tmp_path / "a", *SMALL]
    assert bench(*words, "--repeats", "1", "--timeout", "5") == 1
    printed = capsys.readouterr().out
    for line in (
        "lossy: lossy: loss +0.1000",
        "hang: timeout: did not end within 5 s",
        "memory: out of memory: fake.py: rank 0: OutOfMemoryError",
        "fail: failed: no such luck",
        "refuse: refused: --tp must divide 4 heads",
        "check: failed: equal weights on all ranks",
        "half: failed: its results cannot be read",
        "no answer yet: nothing ran twice",
    ):
        assert line in printed
    (fakes / "go").touch()
    before = len(runs_of(fakes))
    bench(*words, "--repeats", "1", "--retry-failed")
    again = {point.split(".")[0] for point, _ in runs_of(fakes)[before:]}
    assert again == {"hang", "fail", "check", "half"}


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["fork", "torchrun"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_sweep_that_is_stopped_leaves_no_rank_and_resumes(
    fakes,  # noqa: F811
    tmp_path,
    launcher,
    number,
):
    rows = (fakes / "strategies.toml").read_text().replace("[single]", "[one]")
    table = fakes / "own.toml"
    table.write_text(rows)
    words = [sys.executable, str(REPO / TOOL), "sweep", "--strategies", "train", "hang"]
    words += ["--strategies-file", str(table), "--no-reference"]
    words += ["--repeats", "1", *SMALL, "--output-dir", str(tmp_path / "a")]
    words[words.index("fork")] = launcher
    with (tmp_path / "out").open("w") as out:
        sweep = subprocess.Popen(words, cwd=REPO, stdout=out, start_new_session=True)
        wait_for(lambda: sum("hang" in point for point, _ in runs_of(fakes)) == 2)
        os.kill(sweep.pid, number)
        code = sweep.wait(60)
    pids = [pid for _, pid in runs_of(fakes)]
    wait_for(lambda: not any(is_running(pid) for pid in pids))
    if number == signal.SIGINT:
        printed = (tmp_path / "out").read_text()
        assert code == 130
        assert "interrupted: 1 of 2 points have ended; resume:\n  python " in printed
    (fakes / "go").touch()
    ended = run_command(words, REPO, 120)
    assert ended.codes == [0], ended.stderr
    assert "1 points have ended before, 1 are left" in ended.stdout


def wait_for(happens):
    deadline = time.monotonic() + 120
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def is_running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--strategies", "fsdp-ful"], "did you mean fsdp-full?"),
        (["--untimed-steps", "20"], "--untimed-steps must be below --max-steps"),
        (["--max-steps", "5"], "--max-steps must be above 5"),
        (["--launcher", "fork", "--device", "cuda"], "fork is for the CPU"),
        (["--launcher", "srun"], "there is no program srun"),
        (["--launcher", "true -n 2"], "a line has to contain {command}"),
        (["--config", "nowhere.toml"], "nowhere.toml: No such file"),
    ],
)
def test_wrong_usage_is_one_line(bench, tmp_path, monkeypatch, words, says):  # noqa: F811
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert says in bench("sweep", *words, "--output-dir", tmp_path / "a")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ('[ddp]\ndoes = "x"\nscript = "01-ddp-basics/ddp_training.py"', "already"),
        ('[mine]\ndoes = "x"', "needs the keys does and script"),
        ('[mine]\ndoes = "x"\nscript = "no.py"', "there is no script no.py"),
        ('[mine]\ndoes = "x"\nscript = "mine.toml"\nrank = 2', "unknown key rank"),
        ('[mine]\ndoes = "x"\nscript = "mine.toml"\nflags = "{n}"', "flags may hold"),
        ("[mine", "is not valid TOML"),
    ],
)
def test_a_wrong_strategies_file_is_one_line(bench, tmp_path, row, says):  # noqa: F811
    path = tmp_path / "mine.toml"
    path.write_text(row)
    assert says in bench("list", "--strategies-file", path)


def test_a_folder_of_other_files_is_left_alone(bench, fakes, tmp_path):  # noqa: F811
    (tmp_path / "a").mkdir()
    (tmp_path / "a/notes.txt").touch()
    words = ("sweep", "--strategies", "train", "--output-dir", tmp_path / "a", *SMALL)
    assert "holds other files" in bench(*words)


@pytest.mark.parametrize("name", ["quick", "one_node", "two_nodes"])
def test_scripts_accept_the_flags_of_every_point(bench, capsys, monkeypatch, name):  # noqa: F811
    """The commands of a dry run are parsed by the scripts that they start."""
    config = REPO / f"benchmarks/{name}.toml"
    assert bench("sweep", "--config", config, "--dry-run", "--repeats", "1") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 7
    for line in lines:
        script, _, flags = line.partition(".py ")
        if flags:
            path = script.split()[-1] + ".py"
            monkeypatch.setattr(sys, "argv", [path, *flags.split()])
            load_script(path).parse_args()


def test_every_shipped_strategy_divides_its_batch(bench, capsys):  # noqa: F811
    table = load_script(TOOL).strategies.load()
    for strategy in table.values():
        micro = strategy.micro_batch_size(8, 64, 4)
        data_ranks = 8 // (strategy.axis("tp", 8) * strategy.axis("pp", 8))
        micro_batches, rest = divmod(64 // data_ranks, micro)
        least = strategy.micro_batches * strategy.axis("pp", 8)
        assert not rest and micro_batches % least == 0 and micro <= 4, strategy.name
    assert bench("list") is None
    assert "tp-pp-dp" in capsys.readouterr().out


def test_a_line_and_srun_start_the_ranks_they_are_asked_for(monkeypatch):
    launch = load_script(TOOL).launch
    line = "mpirun -np {ranks} sh -c 'cd x && {command}'"
    assert launch.build_command(line, "a.py", ["--b", "c d"], 16) == [
        *("mpirun", "-np", "16", "sh", "-c"),
        "cd x && python a.py --b 'c d'",
    ]
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "8(x2)")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "12")
    words = " ".join(launch.build_command("srun", "a.py", [], 16))
    assert words == (
        "srun --nodes=2 --ntasks=16 --cpus-per-task=12 --kill-on-bad-exit=1 python a.py"
    )


# A strategy that trains ddp with a fault.
SABOTAGE = """
import runpy, sys
from torch.nn import utils
from torch.nn.parallel import DistributedDataParallel as DDP
import torch
fault = sys.argv.pop(1)
clip, init = utils.clip_grad_norm_, DDP.__init__
def halve(weights, *rest):
    weights = list(weights)
    for weight in weights:
        weight.grad.mul_(0.5)
    return clip(weights, *rest)
def keep(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
def skip(self, *args, **kwargs):
    init(self, *args, **kwargs)
    self.register_comm_hook(None, keep)
if fault == "halved-gradient":
    utils.clip_grad_norm_ = torch.nn.utils.clip_grad_norm_ = halve
if fault == "skipped-all-reduce":
    DDP.__init__ = skip
if fault == "doubled-rate":
    sys.argv += ["--lr", "0.004"]
runpy.run_path("01-ddp-basics/ddp_training.py", run_name="__main__")
"""


@pytest.mark.full
def test_a_strategy_that_trains_something_else_loses_its_place(bench, tmp_path, capsys):  # noqa: F811
    faults = ("halved-gradient", "skipped-all-reduce", "doubled-rate")
    (tmp_path / "broken.py").write_text(SABOTAGE)
    (tmp_path / "own.toml").write_text(
        "\n".join(
            f'[{name}]\ndoes = "x"\nscript = "broken.py"\nflags = "{name}"\n'
            for name in (*faults, "no-fault")
        )
    )
    words = ["--strategies", *faults, "no-fault", "ddp", "--max-steps", "8"]
    words += ["--strategies-file", tmp_path / "own.toml", "--seq-len", "32"]
    words += ["--output-dir", tmp_path / "a", "--repeats", "2", "--launcher", "fork"]
    assert bench("sweep", *words, "--global-batch-size", "8") == 1
    printed = capsys.readouterr().out
    assert "\nhalved-gradient: WRONG: the first gradient's norm is 0.5" in printed
    assert "\ndoubled-rate: WRONG: loss" in printed
    # The template itself notices that its ranks have different weights.
    assert "\nskipped-all-reduce: failed: distinct sets of weights" in printed
    assert "\nno-fault: " not in printed
    assert "; not " in printed.split("take ", 1)[1].splitlines()[0]


@pytest.mark.full
def test_collectives_are_timed_and_not_run_again(bench, tmp_path, capsys):  # noqa: F811
    words = ["comm", "-b", "1K", "-e", "64K", "-f", "64", "-n", "2", "--repeats", "2"]
    words += ["--launcher", "fork", "--output-dir", tmp_path / "a"]
    assert bench(*words) == 0
    first = capsys.readouterr().out
    results = list((tmp_path / "a").glob("w2-*/results.json"))
    assert len(results) == 2
    assert bench(*words) == 0 and capsys.readouterr().out == first
    content = json.loads(results[0].read_text())
    content["metrics"]["sweeps"]["all_reduce"][0]["wrong"] = 7
    results[0].write_text(json.dumps(content))
    bench(*words)
    assert "7 WRONG" in capsys.readouterr().out
    assert "2 or more" in bench("comm", "--world-sizes", "1")
