"""zero_offload.py: wherever the bytes go, the same losses, and the bytes that the papers say."""

import copy
import importlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import GPUS, REPO, assert_one_line, fork_ranks, results_of, run_command
from helpers_03 import deepspeed_in_the_parent, first_is_quick

from deepspeed_parts import setup

OFFLOAD = "03-deepspeed/zero_offload.py"
SMALL = ("--dim", 64, "--seq-len", 32, "--micro-batch-size", 2, "--max-steps", 4)
TORCH = (*SMALL, "--torch-adam")
# The narrowest model of which 2 ranks have shards of at least 1 MiB; smaller are never swapped.
DISK = ("--dim", 768, "--seq-len", 32, "--micro-batch-size", 2, "--max-steps", 3,
        "--torch-adam")  # fmt: skip
KINDS = ("weights", "optimizer state", "gradients and buffers")
FILES = ("files", "read per step", "written per step")


@pytest.fixture(scope="module", autouse=True)
def imported():
    with deepspeed_in_the_parent():
        yield


def use_compiled(op: str, builder: str, tmp_path_factory):
    """Load one of DeepSpeed's ops for all forks, or skip: compiling it would take minutes."""

    def find(_rank: int) -> dict[str, str] | None:
        setup.prepare(torch.device("cpu"))  # in a fork: it changes the environment
        if setup.op_library(op).exists():
            return {name: os.environ[name] for name in ("PATH", "TORCH_EXTENSIONS_DIR")}
        return None

    (found,) = fork_ranks(find, 1, tmp_path_factory.mktemp("op"), 60, True).returned
    if found is None:
        pytest.skip(f"DeepSpeed's {op} is not in the cache: run zero_offload.py with it once")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in found.items():
            patch.setenv(name, value)
        builders = importlib.import_module("deepspeed.ops.op_builder.cpu")
        getattr(builders, builder)().load(verbose=False)


@pytest.fixture(scope="module")
def op(tmp_path_factory):
    use_compiled("async_io", "AsyncIOBuilder", tmp_path_factory)


@pytest.fixture(scope="module")
def cpu_adam(tmp_path_factory):
    use_compiled("cpu_adam", "CPUAdamBuilder", tmp_path_factory)


@pytest.fixture
def disk(op, tmp_path):
    """Return a folder for swap files; afterwards nothing may be left in it, or in shared memory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    shared = sorted(os.listdir("/dev/shm"))
    yield folder
    deadline = time.monotonic() + 5  # a killed rank's folder goes just after it
    while any(folder.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not list(folder.rglob("*"))
    assert sorted(os.listdir("/dev/shm")) == shared


def checks_of(folder: Path) -> dict[str, dict]:
    """Return the checks of a run by name, without the unit behind it."""
    return {c["name"].removesuffix(", bytes per weight"): c for c in results_of(folder)["checks"]}


def failed_checks(folder: Path) -> list[str]:
    return [name for name, check in checks_of(folder).items() if not check["ok"]]


# To the CPU


@pytest.mark.parametrize(
    ("world_size", "precision", "width"),
    [
        (2, "bf16-mixed", 2),
        pytest.param(2, "32-true", 4, marks=pytest.mark.full),
    ],
)
def test_offload_to_the_cpu_trains_alike(run_script, tmp_path, world_size, precision, width):
    """And the bytes are those of the papers, but for buffers as large as a weight."""
    ended = run_script(
        OFFLOAD, *TORCH, "--precision", precision, "--output-dir", tmp_path / "run",
        world_size=world_size,
    )  # fmt: skip
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    assert not ended.stderr, "third parties' noise"
    checks = checks_of(tmp_path / "run")
    assert len(checks) == 2 * 4
    held = {name: check["measured"] for name, check in checks.items()}
    assert held["optimizer-cpu: weights"] == pytest.approx(width, rel=0.01)
    assert held["all-cpu: weights"] == pytest.approx(width / world_size, rel=0.01)
    for name in ("optimizer-cpu", "all-cpu"):
        assert held[f"{name}: optimizer state"] == pytest.approx(12 / world_size, rel=0.01)
        buffers = held[f"{name}: gradients and buffers"] - (4 + width) / world_size
        assert 0 < buffers < 0.4 * width, "the widest weight is 0.07 of this small model"


def test_deepspeed_s_own_adam_trains_alike(run_script, tmp_path, cpu_adam):
    """Without offload PyTorch's Adam takes the steps: so this compares the two."""
    ended = run_script(OFFLOAD, *SMALL, "--output-dir", tmp_path / "run", world_size=2)
    assert ended.codes == [0, 0] and not ended.stderr, ended.stdout + ended.stderr
    assert len(checks_of(tmp_path / "run")) == 2 * 4


def without_a_compiler(script):
    os.environ["CXX"] = "missing-compiler"


@pytest.mark.full
def test_without_a_compiler_pytorch_s_adam_takes_the_steps(run_script):
    argv = ("--offload", "optimizer-cpu", *SMALL, "--max-steps", 3)
    ended = run_script(OFFLOAD, *argv, before=without_a_compiler)
    assert ended.codes == [0] and not ended.stderr, ended.stdout + ended.stderr
    assert "install g++ (Debian, Ubuntu)" in ended.stdout
    assert "until then PyTorch's Adam takes the steps" in ended.stdout


def given_to_deepspeed(change):
    """Return a sabotage that hands DeepSpeed another config than the one that was checked."""

    def sabotage(script):
        start = script.start_engine

        def broken(config, build):
            other = copy.deepcopy(config)
            if "offload_optimizer" in config["zero_optimization"]:
                change(other, other["zero_optimization"])
            return start(other, build)

        script.start_engine = broken

    return sabotage


def leave_the_weights_whole(config, zero):
    zero.pop("offload_param", None)
    zero["stage"] = 2


def keep_a_third_moment(config, zero):
    config["optimizer"]["params"]["amsgrad"] = True


def take_longer_strides(config, zero):
    config["optimizer"]["params"]["lr"] *= 30


@pytest.mark.full
@pytest.mark.parametrize(
    ("sabotage", "mode", "failing"),
    [
        (given_to_deepspeed(leave_the_weights_whole), "all-cpu", (KINDS[0], KINDS[2])),
        (given_to_deepspeed(take_longer_strides), "optimizer-cpu", ("largest error of a loss",)),
    ]
    + [
        pytest.param(*case, marks=pytest.mark.full)
        for case in ((given_to_deepspeed(keep_a_third_moment), "all-cpu", KINDS[1:2]),)
    ],
)
def test_sabotage_of_offload_fails_a_check(run_script, tmp_path, sabotage, mode, failing):
    ended = run_script(
        OFFLOAD, "--offload", mode, *TORCH, "--output-dir", tmp_path / "run", world_size=2,
        before=sabotage,
    )  # fmt: skip
    assert 1 in ended.codes, ended.stdout + ended.stderr  # the first to end ends the other
    assert failed_checks(tmp_path / "run") == [f"{mode}: {name}" for name in failing]


# To a disk


@pytest.mark.parametrize(
    ("world_size", "options", "width"),
    [(2, (), 2), (1, ("--precision", "32-true", "--dim", 512), 4)],
)
@pytest.mark.full
def test_offload_to_a_disk_trains_alike(run_script, tmp_path, disk, world_size, options, width):
    """Bytes in files, read and written, from the shapes of the weights."""
    ended = run_script(
        OFFLOAD, "--offload", "all-nvme", "optimizer-nvme", "--nvme-path", disk, *DISK, *options,
        "--output-dir", tmp_path / "run", world_size=world_size,
    )  # fmt: skip
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    assert not ended.stderr, "third parties' noise"
    checks = checks_of(tmp_path / "run")
    assert len(checks) == 2 * 7
    held = {name: check["measured"] for name, check in checks.items()}
    dim = options[-1] if options else 768
    feed_forward, attention, rest = 3 * 2 * 2 * dim**2, 4 * 2 * dim**2, (2 * 256 + 5) * dim
    weights = feed_forward + attention + rest
    # Two ranks' shards of attention have 1 MiB in float32, as gradients, and half in bfloat16.
    swapped = feed_forward if world_size == 2 else feed_forward + attention
    parameters = width * swapped / weights / world_size
    optimizer = 12 / world_size - held["all-nvme: optimizer state"]
    gradients = 4 * (feed_forward + attention) / weights / world_size
    assert held["all-nvme: files"] == pytest.approx(optimizer + gradients + parameters, rel=0.01)
    assert held["all-nvme: weights"] == pytest.approx(width / world_size - parameters, abs=0.01)
    assert held["all-nvme: optimizer state"] < 0.1 * 12 / world_size
    for way, times in (("read", 2), ("written", 1)):
        more = held[f"all-nvme: {way} per step"] - held[f"optimizer-nvme: {way} per step"]
        assert more == pytest.approx(times * parameters, rel=0.01)


def keep_weights_in_memory(config, zero):
    zero["offload_param"]["max_in_cpu"] = 10**9  # DeepSpeed's default; the files stay, unread


def lose_a_file(script):
    counted = script.part.measured_bytes

    def broken(run, device):
        folder = Path(run.zero.get("offload_optimizer", {}).get("nvme_path", "/none"))
        for path in folder.rglob("*exp_avg*"):
            path.unlink(missing_ok=True)
        return counted(run, device)

    script.part.measured_bytes = broken


@pytest.mark.full
@pytest.mark.parametrize(
    ("sabotage", "failing"),
    [
        (given_to_deepspeed(keep_weights_in_memory), ["weights", *KINDS[2:], *FILES[1:]]),
        (lose_a_file, ["files"]),
    ],
)
def test_sabotage_of_swapping_fails_a_check(run_script, tmp_path, disk, sabotage, failing):
    ended = run_script(
        OFFLOAD, "--offload", "all-nvme", "--nvme-path", disk, *DISK, "--output-dir",
        tmp_path / "run", world_size=2, before=sabotage,
    )  # fmt: skip
    assert 1 in ended.codes, ended.stdout + ended.stderr  # the first to end ends the other
    assert failed_checks(tmp_path / "run") == [f"all-nvme: {name}" for name in failing]


@pytest.mark.full
def test_swap_files_go_with_a_rank_that_is_killed(run_script, disk):
    def end_rank_1(pids):
        deadline = time.monotonic() + 60
        while len(list(disk.rglob("*gradient*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert list(disk.rglob("*gradient*")), "it never came to a step"
        os.kill(pids[1], signal.SIGKILL)

    ended = run_script(
        OFFLOAD, "--offload", "all-nvme", "--nvme-path", disk, *DISK, "--max-steps", 500,
        world_size=2, during=end_rank_1, timeout_s=200,
    )  # fmt: skip
    assert ended.codes[1] == -signal.SIGKILL


# What cannot be done


def no_compiler(folder):
    def before(script):
        os.environ |= {"TORCH_EXTENSIONS_DIR": str(folder), "CXX": "missing-compiler"}

    return before


def no_libaio(folder):
    def before(script):
        from deepspeed.ops.op_builder.cpu import AsyncIOBuilder

        os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
        AsyncIOBuilder.is_compatible = lambda *_, **__: False

    return before


@pytest.mark.full
@pytest.mark.parametrize(
    ("lack", "cached"),
    [
        (no_compiler, True),
        (no_libaio, False),
    ],
)
def test_an_op_that_cannot_be_compiled_or_loaded(run_script, tmp_path, lack, cached):
    """DeepSpeed asks for compiler and library again for an op that was compiled long ago."""
    if cached:
        (tmp_path / "ops/async_io").mkdir(parents=True)
        (tmp_path / "ops/async_io/async_io.so").touch()
    ended = run_script(
        OFFLOAD, "--offload", "all-nvme", "--nvme-path", tmp_path, *DISK,
        before=lack(tmp_path / "ops"), world_size=2,
    )  # fmt: skip
    says = "install g++" if lack is no_compiler else "install libaio-dev"
    assert_one_line(ended, says, "zero_offload.py")


def fill_the_disk(script):
    script.part.shutil.disk_usage = lambda path: shutil._ntuple_diskusage(1, 1, 100 * 2**20)


@pytest.mark.parametrize(
    ("argv", "says", "before"),
    first_is_quick(
        (("all-nvme",), "offload_optimizer to nvme needs --nvme-path", None),
        (("all-nvme", "--nvme-path", "/nowhere"), "nvme_path /nowhere is not a folder", None),
        (("all-nvme", "--nvme-path", "/dev/shm"), "/dev/shm is a tmpfs, which is memory", None),
        (("all-nvme", "--nvme-path", REPO, "--dim", "448"), "swaps nothing below 1,048,576", None),
        (("all-nvme", "--nvme-path", REPO), "the files take 0.4 GiB, and 0.1", fill_the_disk),
        (("all-cpu", "--dim", "100"), "--dim must be a multiple of 64", None),
    ),
)
def test_offload_refuses_bad_input(run_script, argv, says, before):
    ended = run_script(OFFLOAD, "--offload", *argv, before=before)
    assert_one_line(ended, says, "zero_offload.py")


@pytest.mark.skipif(not GPUS, reason="needs a GPU, whose memory offload is to free")
def test_offload_frees_a_gpu(tmp_path):
    command = [sys.executable, str(REPO / OFFLOAD), "--device", "cuda", "--output-dir", "run"]
    ended = run_command(command, tmp_path, 300, CUDA_VISIBLE_DEVICES=GPUS)
    assert ended.codes == [0], ended.stdout + ended.stderr
    rows = [line.split() for line in ended.stdout.splitlines()]
    row = next(row for row in rows if row[:1] == ["all-cpu"])
    assert row[1:5] == ["2.00", "cpu", "12.00", "cpu"]
