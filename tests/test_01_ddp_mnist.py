"""Module 01, ddp_mnist.py: the same answer on any number of ranks, and resume."""

import gzip
import os
import signal
import socket
import struct
from pathlib import Path

import pytest
import torch
from conftest import GPUS, REPO, assert_one_line, load_script, results_of, run_command
from helpers_01 import newest_state, skip_all_reduce, wait_for
from helpers_04 import first_is_quick
from torch.utils.data import DistributedSampler

MNIST = "01-ddp-basics/ddp_mnist.py"
full = pytest.mark.full


def losses_of(folder: Path) -> torch.Tensor:
    return torch.tensor(newest_state(folder)["history"]["losses"])


# the same answer


def test_the_losses_are_those_of_one_process(run_script, tmp_path):
    """Every step's loss, for the same global batch of 48 samples in the same order.

    Tolerance: summing 48 fp32 terms in another order changes a loss near 2 by about 5e-7 at the
    first step. The model is smooth (no ReLU, no max-pool, so no input near a kink where a last
    bit flips a gradient), and over these steps the difference grows by less than a factor of 10.
    """
    curves = []
    for world_size in (1, 2):
        folder = tmp_path / f"{world_size}-ranks"
        ended = run_script(
            MNIST, "--epochs", 1, "--micro-batch-size", 48 // world_size,
            "--output-dir", folder, world_size=world_size,
        )  # fmt: skip
        assert ended.codes == [0] * world_size, ended.stderr
        curves.append(losses_of(folder))
    alone, together = curves
    assert len(alone) == 1437 // 48
    assert alone[-1] < 0.5 * alone[0], "a loss that does not fall would prove little"
    difference = (together - alone).abs()
    assert difference[0] < 1e-6 and difference.max() < 1e-5


# checks that can fail


def repeat_test_samples(script):
    """Deal the test set as DistributedSampler does, which repeats samples to fill all ranks.

    The last sample is left out: 359 are not a multiple of 2.
    """
    evaluate, load_images = script.evaluate, script.digits.load_images

    def odd(*args):
        images = load_images(*args)
        images.test.tensors = tuple(tensor[:-1] for tensor in images.test.tensors)
        return images

    def padded(model, test_set, device):
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        indices = list(DistributedSampler(range(len(test_set)), ranks, rank, shuffle=False))
        arange = torch.arange
        torch.arange = lambda count: Dealt(torch.tensor(indices))
        try:
            return evaluate(model, test_set, device)
        finally:
            torch.arange = arange

    script.evaluate, script.digits.load_images = padded, odd


class Dealt:
    def __init__(self, indices):
        self.indices = indices

    def __getitem__(self, part):
        return self.indices


@pytest.mark.parametrize(
    ("sabotage", "failing"),
    [
        (
            skip_all_reduce,
            ["gradient: relative error against one process", "bytes all-reduced per step",
             "distinct sets of weights over all ranks"],
        ),
        (repeat_test_samples, ["test samples counted exactly once"]),
    ],
)  # fmt: skip
def test_sabotage_fails_a_check(run_script, tmp_path, sabotage, failing):
    argv = ("--epochs", 1, "--output-dir", tmp_path / "run")
    ended = run_script(MNIST, *argv, world_size=2, before=sabotage)
    assert 1 in ended.codes and not set(ended.codes) - {1, -signal.SIGTERM}, ended.stderr
    assert ended.stdout.splitlines()[-1] == "FAILED: " + "; ".join(failing)
    bad = [check["name"] for check in results_of(tmp_path / "run")["checks"] if not check["ok"]]
    assert bad == failing


# resume


@full
def test_a_resumed_run_gives_bitwise_the_same_losses(run_script, tmp_path):
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    run_script(MNIST, "--epochs", 2, "--output-dir", straight, world_size=2)
    run_script(MNIST, "--epochs", 1, "--output-dir", resumed, world_size=2)
    ended = run_script(MNIST, "--epochs", 2, "--output-dir", resumed, "--resume", world_size=2)
    assert "resuming from" in ended.stdout
    assert torch.equal(losses_of(straight), losses_of(resumed))
    random_states = [newest_state(folder)["rng"][1]["torch"] for folder in (straight, resumed)]
    assert torch.equal(*random_states), "dropout would differ from here on"
    assert (
        results_of(straight)["metrics"]["final_loss"]
        == (results_of(resumed)["metrics"]["final_loss"])
    )
    again = run_script(MNIST, "--epochs", 2, "--output-dir", resumed, "--resume", world_size=2)
    assert_one_line(again, "has 2 epochs: ask for more by --epochs")


# bad input


def fake_gpus(count):
    def patch(script):
        torch.cuda.is_available = lambda: count > 0
        torch.cuda.device_count = lambda: count

    return patch


def one_training_sample(script):
    images = script.digits.load_digits()
    first = torch.utils.data.TensorDataset(*(tensor[:1] for tensor in images.train.tensors))
    script.digits.load_digits = lambda: script.digits.Images("digits", first, images.test)


@pytest.mark.parametrize(
    ("argv", "says", "before"),
    first_is_quick([
        (["--device", "cuda"], "2 ranks on this machine but 1 GPU(s): start at", fake_gpus(1)),
        (["--device", "cuda"], "--device cuda: PyTorch finds no GPU", fake_gpus(0)),
        (["--micro-batch-size", "1000"], "1000 x 2 ranks is more than the 1437 samples", None),
        (["--data-dir", "{tmp}/file"], "/file is not a folder", None),
        (["--data-dir", "{tmp}"], "holds no MNIST: add --download", None),
        (["--download"], "--download needs --data-dir", None),
        (["--resume"], "--resume needs --output-dir", None),
        (["--output-dir", "{tmp}/file/run"], "cannot be written: Not a directory", None),
        (["--output-dir", "{tmp}"], "is not empty: name another folder", None),
        ([], "1 samples cannot be dealt to 2 ranks: start fewer ranks", one_training_sample),
    ]),
)  # fmt: skip
def test_bad_input_gets_one_line(run_script, tmp_path, argv, says, before):
    folder = tmp_path / "given"
    folder.mkdir()
    (folder / "file").write_text("kept")
    filled = [text.format(tmp=folder) for text in argv]
    ended = run_script(MNIST, *filled, world_size=2, before=before)
    assert_one_line(ended, says)
    assert [path.name for path in folder.rglob("*")] == ["file"], "nothing written"
    assert (folder / "file").read_text() == "kept", "nothing lost"


@full
def test_world_size_without_rank_and_a_taken_port(run_script):
    ended = run_script(MNIST, environ={"WORLD_SIZE": "2"})
    assert_one_line(ended, "WORLD_SIZE is set but RANK is not")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        own = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        assert_one_line(run_script(MNIST, environ=own), f"MASTER_PORT={port} is already taken")


def write_mnist(folder: Path) -> None:
    """Write files in MNIST's own format: 64 and 20 images of stripes, as many as the label."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, count in (("train", 64), ("t10k", 20)):
        labels = torch.arange(count) % 10
        images = torch.zeros(count, 28, 28, dtype=torch.uint8)
        for image, label in zip(images, labels, strict=True):
            image[: 2 * int(label) : 2] = 255
        header = struct.pack(">iiii", 0x803, count, 28, 28)
        with gzip.open(raw / f"{part}-images-idx3-ubyte.gz", "wb") as file:
            file.write(header + images.numpy().tobytes())
        (raw / f"{part}-images-idx3-ubyte").write_bytes(header + images.numpy().tobytes())
        content = struct.pack(">ii", 0x801, count) + labels.to(torch.uint8).numpy().tobytes()
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(content)


@full
def test_mnist_is_read_from_its_folder(run_script, tmp_path):
    write_mnist(tmp_path / "data")
    ended = run_script(
        MNIST, "--data-dir", tmp_path / "data", "--micro-batch-size", 8, "--epochs", 2, world_size=2
    )
    assert ended.codes == [0, 0], ended.stderr
    assert "MNIST: 64 to train on, 20 to test on" in ended.stdout


# a rank that is lost


def ended_or_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"


@full
def test_a_killed_rank_ends_the_others_at_once(run_script, tmp_path):
    def kill(pids):
        wait_for((tmp_path / "run" / "checkpoints" / "step-00000044").exists)
        os.kill(pids[1], signal.SIGKILL)

    ended = run_script(
        MNIST, "--epochs", 1000, "--output-dir", tmp_path / "run",
        world_size=2, during=kill, end_job_on_failure=False,
    )  # fmt: skip
    assert ended.codes == [1, -signal.SIGKILL]
    (line,) = ended.stderr.splitlines()
    assert "rank 0: lost contact with another rank (Connection" in line


@full
def test_a_rank_that_stops_answering_ends_the_others_within_the_timeout(run_script, tmp_path):
    def stop(pids):
        wait_for((tmp_path / "run" / "checkpoints" / "step-00000022").exists)
        os.kill(pids[1], signal.SIGSTOP)
        wait_for(lambda: ended_or_zombie(pids[0]))  # before the 600 s that are the default
        os.kill(pids[1], signal.SIGKILL)

    ended = run_script(
        MNIST, "--epochs", 1000, "--timeout", 4, "--output-dir", tmp_path / "run",
        world_size=2, during=stop, end_job_on_failure=False,
    )  # fmt: skip
    assert ended.codes == [1, -signal.SIGKILL]
    (line,) = ended.stderr.splitlines()
    assert "rank 0: lost contact with another rank (Timed out)" in line


# data and model


def test_digits_split_is_fixed_and_disjoint():
    digits = load_script("01-ddp-basics/ddp_parts/digits.py")
    images = digits.load_digits()
    assert (len(images.train), len(images.test)) == (1437, 360)
    assert images.train.tensors[0].shape == (1437, 1, 8, 8)
    pixels = images.train.tensors[0]
    assert abs(pixels.mean()) < 0.02 and abs(pixels.std() - 1) < 0.02
    before = torch.get_rng_state()
    again = digits.load_digits()
    assert torch.equal(images.test.tensors[0], again.test.tensors[0])
    assert torch.equal(before, torch.get_rng_state()), "loading data must not use up randomness"


@full
@pytest.mark.skipif(not GPUS, reason="needs a GPU")
def test_ddp_mnist_runs_on_a_gpu():
    command = ["python", MNIST, "--epochs", "1", "--device", "cuda"]
    ended = run_command(command, REPO, 300, CUDA_VISIBLE_DEVICES=GPUS)
    assert ended.codes == [0] and " cuda with nccl" in ended.stdout, ended.stdout + ended.stderr
