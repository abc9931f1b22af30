"""Module 01: the same answer on any number of ranks, and a clear word when something is wrong."""

import argparse
import ast
import functools
import gzip
import json
import os
import random
import re
import resource
import shlex
import signal
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import GPUS, REPO, assert_one_line, free_port, load_script, results_of, run_command
from torch.nn.parallel import DistributedDataParallel

MNIST = "01-ddp-basics/ddp_mnist.py"
LAUNCH = "01-ddp-basics/launch_ddp.sh"
TRAINING = "01-ddp-basics/ddp_training.py"


def losses_of(folder: Path) -> torch.Tensor:
    return torch.tensor(newest_state(folder)["history"]["losses"])


def newest_state(folder: Path) -> dict:
    newest = sorted((folder / "checkpoints").iterdir())[-1]
    return torch.load(newest / "state.pt", weights_only=True)


# the same answer


def test_same_loss_on_1_2_3_and_4_ranks(run_script, tmp_path):
    """Every step's loss, for the same global batch of 48 samples in the same order.

    Tolerance: summing 48 fp32 terms in another order changes a loss near 2 by about 5e-7 at the
    first step. The model is smooth (no ReLU, no max-pool, so no input near a kink where a last
    bit flips a gradient), and over these steps the difference grows by less than a factor of 10.
    """
    curves = {}
    for world_size in (1, 2, 3, 4):
        folder = tmp_path / f"{world_size}-ranks"
        ended = run_script(
            MNIST, "--epochs", 3, "--micro-batch-size", 48 // world_size, "--output-dir", folder,
            world_size=world_size,
        )  # fmt: skip
        assert ended.codes == [0] * world_size, ended.stderr
        curves[world_size] = losses_of(folder)
        assert len(curves[world_size]) == 3 * (1437 // 48)
    assert curves[1][-1] < 0.5 * curves[1][0], "a loss that does not fall would prove little"
    for world_size in (2, 3, 4):
        difference = (curves[world_size] - curves[1]).abs()
        assert difference[0] < 1e-6 and difference.max() < 1e-5, f"{world_size} ranks"


def test_torchrun_trains_to_96_percent_and_writes_what_it_says(torchrun, tmp_path):
    ended = torchrun(MNIST, "--output-dir", tmp_path / "run")
    assert ended.codes == [0], ended.stderr
    assert re.search(r"^OK: 4 checks passed, test accuracy \d\d\.\d%$", ended.stdout, re.M)
    content = results_of(tmp_path / "run")
    assert content["metrics"]["test_accuracy"] >= 0.96
    assert (content["world_size"], content["launcher"]) == (2, "torchrun")
    assert content["args"]["micro_batch_size"] == 32
    assert [check["ok"] for check in content["checks"]] == [True] * 4
    assert (tmp_path / "run" / "training.png").read_bytes().startswith(b"\x89PNG")
    assert ended.stdout.count("epoch  1 |") == 1, "one rank speaks for all"


def test_bf16_stays_within_its_tolerance(run_script, tmp_path):
    ended = run_script(
        MNIST, "--epochs", 1, "--precision", "bf16-mixed", "--output-dir", tmp_path / "run",
        world_size=2,
    )  # fmt: skip
    assert ended.codes == [0, 0], ended.stderr
    error = results_of(tmp_path / "run")["checks"][0]
    assert 1e-5 < error["measured"] <= error["tolerance"], "bf16 cannot be as exact as fp32"


@pytest.mark.parametrize(
    ("launcher", "names"),
    [
        ("srun", ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_JOB_ID")),
        (
            "mpirun",
            ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE",
             "OMPI_MCA_ess_base_jobid"),
        ),
    ],
)  # fmt: skip
def test_other_launchers_need_no_other_script(run_script, tmp_path, launcher, names):
    folder = tmp_path / "run"
    job = str(os.getpid())  # picks the port
    ended = run_script(
        MNIST, "--epochs", 1, "--output-dir", folder, world_size=2,
        environ=lambda rank: dict(zip(names, (rank, rank, 2, job), strict=True)),
    )  # fmt: skip
    assert ended.codes == [0, 0], ended.stderr
    assert results_of(folder)["launcher"] == launcher


# checks that can fail


def skip_all_reduce(script):
    class Unreduced(DistributedDataParallel):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.register_comm_hook(None, _leave_bucket_alone)

    script.DDP = Unreduced


def _leave_bucket_alone(
    state, bucket: torch.distributed.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def deal_all_ranks_the_same(script):
    sampler = script.data.ShardedSampler
    original = sampler.__init__

    def as_rank_0(self, num_samples, rank, world_size, seed):
        original(self, num_samples, 0, world_size, seed)

    sampler.__init__ = as_rank_0


def repeat_test_samples(script):
    from torch.utils.data import DistributedSampler

    def padded(num_samples, rank, world_size):
        padded = DistributedSampler(range(num_samples), world_size, rank, shuffle=False)
        return torch.tensor(list(padded))

    script.data.evaluation_indices = padded


@pytest.mark.parametrize(
    ("sabotage", "failing"),
    [
        (
            skip_all_reduce,
            ["gradient: relative error against one process", "bytes all-reduced per step",
             "distinct sets of weights over all ranks"],
        ),
        (deal_all_ranks_the_same, ["gradient: relative error against one process"]),
        (repeat_test_samples, ["test samples counted exactly once"]),
    ],
)  # fmt: skip
def test_sabotage_fails_a_check(run_script, tmp_path, sabotage, failing):
    world_size = 7 if sabotage is repeat_test_samples else 2  # 360 is not a multiple of 7
    ended = run_script(
        MNIST, "--epochs", 1, "--output-dir", tmp_path / "run",
        world_size=world_size, before=sabotage,
    )  # fmt: skip
    assert 1 in ended.codes and not set(ended.codes) - {1, -signal.SIGTERM}, ended.stderr
    assert ended.stdout.splitlines()[-1] == "FAILED: " + "; ".join(failing)
    bad = [check["name"] for check in results_of(tmp_path / "run")["checks"] if not check["ok"]]
    assert bad == failing


# resume


def test_a_resumed_run_gives_bitwise_the_same_losses(run_script, tmp_path):
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    run_script(MNIST, "--epochs", 3, "--output-dir", straight, world_size=2)
    run_script(MNIST, "--epochs", 1, "--output-dir", resumed, world_size=2)
    ended = run_script(MNIST, "--epochs", 3, "--output-dir", resumed, "--resume", world_size=2)
    assert "resuming from" in ended.stdout
    assert torch.equal(losses_of(straight), losses_of(resumed))
    random_states = [newest_state(folder)["rng"][1]["torch"] for folder in (straight, resumed)]
    assert torch.equal(*random_states), "dropout would differ from here on"
    assert (
        results_of(straight)["metrics"]["final_loss"]
        == (results_of(resumed)["metrics"]["final_loss"])
    )
    again = run_script(MNIST, "--epochs", 3, "--output-dir", resumed, "--resume", world_size=2)
    assert_one_line(again, "has 3 epochs: ask for more by --epochs")


def test_resume_passes_over_a_damaged_checkpoint(run_script, tmp_path):
    run_script(MNIST, "--epochs", 2, "--output-dir", tmp_path / "run", world_size=2)
    newest = tmp_path / "run" / "checkpoints" / "step-00000044" / "state.pt"
    newest.write_bytes(newest.read_bytes()[:-100])
    arguments = (MNIST, "--epochs", 2, "--output-dir", tmp_path / "run", "--resume")
    ended = run_script(*arguments, world_size=2)
    assert ended.codes == [0, 0], ended.stderr
    assert re.search(r"warning: skipped .*step-00000044: truncated or altered", ended.stderr)
    assert re.search(r"resuming from .*step-00000022", ended.stdout)

    for state in (tmp_path / "run" / "checkpoints").glob("*/state.pt"):
        state.write_bytes(b"")
    assert_one_line(run_script(*arguments, world_size=2), "no checkpoint can be used: ")


# bad input


def fake_gpus(count):
    def patch(script):
        torch.cuda.is_available = lambda: count > 0
        torch.cuda.device_count = lambda: count

    return patch


def one_training_sample(script):
    images = script.data.load_digits()
    first = torch.utils.data.TensorDataset(*(tensor[:1] for tensor in images.train.tensors))
    script.data.load_digits = lambda: script.data.Images("digits", first, images.test)


@pytest.mark.parametrize(
    ("argv", "says", "before"),
    [
        (["--device", "cuda"], "2 ranks on this machine but 1 GPU(s): start at", fake_gpus(1)),
        (["--device", "cuda"], "--device cuda: PyTorch finds no GPU", fake_gpus(0)),
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu' (choose from", None),
        (["--seed", "-1"], "--seed: must be a whole number of at least 0, not '-1'", None),
        (["--timeout", "1e300"], "--timeout: must be a number above 0", None),
        (["--precision", "fp8"], "argument --precision: invalid choice: 'fp8'", None),
        (["--micro-batch-size", "0"], "--micro-batch-size: must be a whole number of", None),
        (["--micro-batch-size", "1000"], "1000 x 2 ranks is more than the 1437 samples", None),
        (["--lr", "nan"], "--lr: must be a number above 0, not 'nan'", None),
        (["--data-dir", "{tmp}/file"], "/file is not a folder", None),
        (["--data-dir", "{tmp}/none"], "/none does not exist; --download", None),
        (["--data-dir", "{tmp}"], "holds no MNIST: add --download", None),
        (["--download"], "--download needs --data-dir", None),
        (["--resume"], "--resume needs --output-dir", None),
        (["--output-dir", "{tmp}/file/run"], "cannot be written: Not a directory", None),
        (["--output-dir", "{tmp}"], "is not empty: name another folder", None),
        (["--output-dir", "{tmp}", "--resume"], "is not empty: name another folder", None),
        (["--output-dir", "{tmp}/new", "--micro-batch-size", "999"], "999 x 2 ranks is", None),
        ([], "1 samples cannot be dealt to 2 ranks: start fewer ranks", one_training_sample),
    ],
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


def test_mnist_is_read_from_its_folder_and_never_fetched_silently(run_script, tmp_path):
    write_mnist(tmp_path / "data")
    ended = run_script(
        MNIST, "--data-dir", tmp_path / "data", "--micro-batch-size", 8, "--epochs", 2, world_size=2
    )
    assert ended.codes == [0, 0], ended.stderr
    assert "MNIST: 64 to train on, 20 to test on" in ended.stdout

    def nobody_answers(script):
        from torchvision.datasets import MNIST as dataset

        dataset.mirrors = ["http://127.0.0.1:9/"]

    ended = run_script(
        MNIST, "--data-dir", tmp_path / "new", "--download", world_size=2, before=nobody_answers
    )
    assert ended.codes[0] == 2
    assert "--download: MNIST cannot be fetched" in ended.stderr.splitlines()[-1]


# the launch script

SBATCH = "01-ddp-basics/ddp_training.sbatch"


@pytest.mark.parametrize(
    ("argv", "prints"),
    [
        (
            "local --nproc-per-node=3 --max-steps 2",
            "OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=3 {script} --max-steps 2",
        ),
        (
            "multi-node --nnodes 2 --nproc-per-node 8 --rdzv-endpoint n0:29500 --resume",
            "OMP_NUM_THREADS=1 torchrun --nnodes=2 --nproc-per-node=8 --rdzv-id=ddp_training "
            "--rdzv-backend=c10d --rdzv-endpoint=n0:29500 {script} --resume",
        ),
        (
            "elastic --nproc-per-node 2 --output-dir run",
            "OMP_NUM_THREADS=1 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes=1 "
            "--nproc-per-node=2 --max-restarts=3 --standalone {script} --resume --output-dir run",
        ),
        (
            "elastic --nnodes 1:4 --nproc-per-node 2 --rdzv-endpoint n0:1 --output-dir=run",
            "OMP_NUM_THREADS=1 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes=1:4 "
            "--nproc-per-node=2 --max-restarts=3 --rdzv-id=ddp_training --rdzv-backend=c10d "
            "--rdzv-endpoint=n0:1 {script} --resume --output-dir=run",
        ),
        (
            "slurm --nnodes 2 --nproc-per-node 8 --output-dir 'runs/a b'",
            "OMP_NUM_THREADS=1 sbatch --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 {sbatch} "
            "--output-dir 'runs/a b'",
        ),
        (
            "slurm --nnodes 1 --nproc-per-node 2 --device=cpu --output-dir run",
            "OMP_NUM_THREADS=1 sbatch --nodes=1 --ntasks-per-node=2 {sbatch} --device=cpu "
            "--output-dir run",
        ),
    ],
)
def test_launcher_prints_its_command_and_passes_arguments_on(argv, prints):
    ended = run_command(["bash", LAUNCH, *shlex.split(argv), "--dry-run"], REPO, 20)
    assert (ended.codes, ended.stderr) == ([0], "")
    assert ended.stdout == prints.format(script=TRAINING, sbatch=SBATCH) + "\n"


def test_two_nodes_meet_on_loopback(tmp_path, small):
    """The line of two machines, run twice on one: each is a node, with a torchrun of its own."""
    shared = ["--nnodes", "2", "--nproc-per-node", "1"]
    shared += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", *map(str, small), "--max-steps", "3"]
    command = ["bash", str(REPO / LAUNCH), "multi-node", *shared, "--output-dir", "run"]
    with ThreadPoolExecutor() as pool:  # the same folder, as on a disk that both machines have
        nodes = [pool.submit(run_command, command, tmp_path, 90) for _ in range(2)]
    ended = [node.result() for node in nodes]
    assert [node.codes for node in ended] == [[0], [0]], ended[0].stderr + ended[1].stderr
    assert sum("OK: 5 checks passed" in node.stdout for node in ended) == 1, "rank 0's node speaks"
    assert results_of(tmp_path / "run")["world_size"] == 2


def test_elastic_restarts_a_killed_job_which_goes_on_bitwise(tmp_path, small, straight):
    folder = tmp_path / "restarted"
    command = ["bash", LAUNCH, "elastic", "--nproc-per-node", "2", *map(str, small)]

    def kill_a_worker(agent):
        children = Path(f"/proc/{agent}/task/{agent}/children")

        def act(_):
            os.kill(int(children.read_text().split()[-1]), signal.SIGKILL)

        at_random_step(folder, act)(None)

    ended = run_command([*command, "--output-dir", str(folder)], REPO, 90, during=kill_a_worker)
    assert ended.codes == [0], ended.stdout + ended.stderr
    assert re.search("resuming from|no checkpoint in .* yet.*no checkpoint", ended.stdout, re.S)
    assert largest_difference(straight, folder) == 0.0, "bitwise"


def test_slurm_job_saves_and_queues_again_when_time_is_up(tmp_path):
    """The batch script with stand-ins for SLURM's commands: srun runs the script until USR1."""
    stand_ins = {
        "srun": 'echo "srun $*"; trap "echo saved; exit 0" USR1; kill -USR1 $PPID; '
        "while true; do sleep 0.1; done",
        "scancel": 'echo "scancel $*"; kill -USR1 $(pgrep -P $PPID -f /srun)',
        "scontrol": 'echo "scontrol $*"',
    }
    for name, body in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    ended = run_command(
        ["bash", "-c", f'PATH="{tmp_path}:$PATH" SLURM_JOB_ID=7 bash {SBATCH} --output-dir run'],
        REPO, 20,
    )  # fmt: skip
    assert (ended.codes, ended.stderr) == ([0], "")
    assert ended.stdout.splitlines() == [
        f"srun --kill-on-bad-exit=1 python {TRAINING} --resume --output-dir run",
        "scancel --signal=USR1 7",
        "saved",
        "scontrol requeue 7",
    ]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("", "the first argument must be local, multi-node, elastic or slurm, not ''"),
        ("cluster", "not 'cluster'"),
        ("local --nproc-per-node 0", "must be a whole number of at least 1, not '0'"),
        ("local --nproc-per-node", "--nproc-per-node needs a value"),
        ("local --nnodes 2", "--nnodes and --rdzv-endpoint go with the other modes"),
        ("multi-node --nproc-per-node 2", "multi-node needs --nnodes"),
        ("multi-node --nnodes 2 --rdzv-endpoint n0", "multi-node needs --rdzv-endpoint HOST:PORT"),
        ("elastic --nnodes 2:x", "--nnodes must be like 2 or 1:4, not '2:x'"),
        ("elastic --nnodes 1:2 --output-dir x", "elastic needs --rdzv-endpoint HOST:PORT"),
        ("elastic", "elastic needs --output-dir"),
        ("slurm --nnodes 2", "slurm needs --nproc-per-node"),
        ("slurm --nnodes 2 --nproc-per-node 2", "slurm needs --output-dir"),
    ],
)
def test_launcher_refuses_what_it_cannot_start(argv, says):
    ended = run_command(["bash", LAUNCH, *argv.split()], REPO, 20)
    assert (ended.codes, ended.stdout) == ([2], "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("launch_ddp.sh: error: ") and says in line


# launchers

LAUNCHERS = "01-ddp-basics/launchers.py"


def test_one_job_on_three_ranks_however_it_is_started(run_script, tmp_path):
    def two_of_the_ways(script):  # the guide runs all of them, on two ranks
        script.WAYS = ("mp.spawn", "as mpirun does")

    ended = run_script(
        LAUNCHERS, "--nproc-per-node", 3, "--output-dir", tmp_path / "run",
        environ={}, before=two_of_the_ways,
    )  # fmt: skip
    assert ended.codes == [0], ended.stdout + ended.stderr
    assert [check["measured"] for check in results_of(tmp_path / "run")["checks"]] == [3, 3]
    assert re.search(r"^mp.spawn +3 +3 +set by hand: .* RANK=2 WORLD_SIZE=3$", ended.stdout, re.M)
    assert re.search(r"^as mpirun does +3 +3 .* OMPI_COMM_WORLD_RANK=2 ", ended.stdout, re.M)


def test_a_launch_that_forms_no_group_fails_a_check(run_script):
    def each_alone(script):
        script.WAYS = ("as srun does",)
        original = script.commands_of
        script.commands_of = lambda way, world_size: [
            (command, {**variables, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"})
            for command, variables in original(way, world_size)
        ]

    ended = run_script(LAUNCHERS, before=each_alone, environ={})
    assert ended.codes == [1]
    assert ended.stdout.splitlines()[-1] == "FAILED: as srun does: sum of the ranks"


# a rank that is lost


def wait_for(condition, timeout_s=30):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ended_or_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_others_at_once(run_script, tmp_path, victim):
    def kill(pids):
        wait_for((tmp_path / "run" / "checkpoints" / "step-00000044").exists)
        os.kill(pids[victim], signal.SIGKILL)

    ended = run_script(
        MNIST, "--epochs", 1000, "--output-dir", tmp_path / "run",
        world_size=2, during=kill, end_job_on_failure=False, timeout_s=60,
    )  # fmt: skip
    survivor = 1 - victim
    assert ended.codes[victim] == -signal.SIGKILL and ended.codes[survivor] == 1
    (line,) = ended.stderr.splitlines()
    assert f"rank {survivor}: lost contact with another rank (Connection" in line


def test_a_rank_that_stops_answering_ends_the_others_within_the_timeout(run_script, tmp_path):
    def stop(pids):
        wait_for((tmp_path / "run" / "checkpoints" / "step-00000022").exists)
        os.kill(pids[1], signal.SIGSTOP)
        stopped = time.monotonic()
        wait_for(lambda: ended_or_zombie(pids[0]))
        assert time.monotonic() - stopped < 15
        os.kill(pids[1], signal.SIGKILL)

    ended = run_script(
        MNIST, "--epochs", 1000, "--timeout", 4, "--output-dir", tmp_path / "run",
        world_size=2, during=stop, end_job_on_failure=False,
    )  # fmt: skip
    assert ended.codes == [1, -signal.SIGKILL]
    (line,) = ended.stderr.splitlines()
    assert "rank 0: lost contact with another rank (Timed out)" in line


# DDP from scratch

SCRATCH = "01-ddp-basics/ddp_from_scratch.py"
SMALL = ("--micro-batch-size", 2, "--seq-len", 32, "--max-steps", 1)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_each_step_towards_ddp_gives_the_gradient_of_one_process(run_script, tmp_path, world_size):
    ended = run_script(SCRATCH, *SMALL, "--output-dir", tmp_path / "run", world_size=world_size)
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    content = results_of(tmp_path / "run")
    assert len(content["checks"]) == 13 and all(check["ok"] for check in content["checks"])
    # 39 weights: an embedding, 9 in each of 4 blocks, a norm and a head.
    assert content["metrics"]["collectives_1"] == 39
    assert content["metrics"]["collectives_2"] == content["metrics"]["collectives_3"] < 10


def forget_a_bucket(script):
    cut = script.buckets_of
    script.buckets_of = lambda model, size: cut(model, size)[1:]


def forget_to_divide(script):
    script.unpack = lambda flat, bucket: [
        parameter.grad.copy_(part.view_as(parameter))
        for parameter, part in zip(
            bucket, flat.split([parameter.numel() for parameter in bucket]), strict=True
        )
    ]


def start_after_backward(script):
    """Give the right gradient, but by all-reduces that no longer overlap with backward."""
    count, wait = script.Overlapped.count, script.Overlapped.wait
    late = []

    def wait_then_start(self):
        wait(self)  # notes how many backward has started: none
        for index in late:
            count(self, index)
        for handle, flat, bucket in self.pending:
            handle.wait()
            script.unpack(flat, bucket)
        self.pending.clear()
        self.missing = [len(bucket) for bucket in self.buckets]
        late.clear()

    script.Overlapped.count = lambda self, index: late.append(index)
    script.Overlapped.wait = wait_then_start


def send_twice(script):
    once = script.Link.all_reduce

    def twice(self, tensor):
        once(self, tensor.clone()).wait()
        return once(self, tensor)

    script.Link.all_reduce = twice


@pytest.mark.parametrize(
    ("sabotage", "failing"),
    [
        (forget_a_bucket, {"2 buckets: gradient error", "3 buckets, overlapped: bytes sent"}),
        (forget_to_divide, {"2 buckets: gradient error", "3 buckets, overlapped: gradient error"}),
        (start_after_backward, {"3 buckets, overlapped: all-reduces started during backward"}),
        (send_twice, {"1 each gradient: bytes handed over", "2 buckets: bytes sent"}),
    ],
)
def test_sabotage_of_a_step_towards_ddp_fails_a_check(run_script, tmp_path, sabotage, failing):
    folder = tmp_path / "run"
    ended = run_script(SCRATCH, *SMALL, "--output-dir", folder, world_size=2, before=sabotage)
    assert 1 in ended.codes, ended.stdout + ended.stderr
    bad = {check["name"] for check in results_of(folder)["checks"] if not check["ok"]}
    assert failing <= bad and not any(name.startswith("4 ") for name in bad)
    if sabotage is start_after_backward:
        assert bad == failing, "its gradient and its bytes are right"


def test_an_emulated_link_delays_but_does_not_change(run_script, tmp_path):
    folder = tmp_path / "run"
    ended = run_script(SCRATCH, *SMALL, "--link", "200mbit", "--output-dir", folder, world_size=2)
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    metrics = results_of(folder)["metrics"]
    assert metrics["sending_ms"] == pytest.approx(803_968 * 4 * 8 / 200e6 * 1e3)
    # A step cannot end before the link has sent everything: no timing, a lower bound.
    assert all(metrics[f"step_time_ms_{way}"] > metrics["sending_ms"] for way in (1, 2, 3, 4))


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--link", "fast"), "--link: must be like 100mbit or 1gbit, not 'fast'"),
        (("--link", "0mbit"), "must be like 100mbit"),
        (("--seq-len", 257), "--seq-len must be at most 256"),
        (("--bucket-cap-mb", 0), "--bucket-cap-mb: must be a number above 0"),
        (("--micro-batch-size", 10**6), "fewer than one sequence"),
    ],
)
def test_from_scratch_refuses_bad_input(run_script, argv, says):
    ended = run_script(SCRATCH, *argv, world_size=2)
    (line,) = ended.stderr.splitlines()
    assert line.startswith("ddp_from_scratch.py: error: ") and says in line and 2 in ended.codes


# the production template


@pytest.fixture
def small(tmp_path):
    """Arguments for steps of some 20 ms, on 12 kB of text whose sequences differ in length."""
    text = (Path(os.__file__).parent / "argparse.py").read_bytes()[:12_000]
    (tmp_path / "text").write_bytes(text)
    fixed = ("--text-file", tmp_path / "text", "--seq-len", 32, "--whole-lines")
    return (*fixed, "--max-steps", 24, "--warmup-steps", 4, "--save-every", 5)


def steps_in(folder: Path, name: str = "loss") -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [(line["step"], line[name]) for line in lines if name in line]
    assert len(found) == len(dict(found)), "a step is there twice"
    return dict(found)


def largest_difference(one: Path, other: Path) -> float:
    a, b = steps_in(one), steps_in(other)
    assert list(a) == list(b) == list(range(1, len(a) + 1)), "a step is missing"
    return max(abs(a[step] - b[step]) for step in a)


def test_training_gives_the_losses_of_one_process_in_unequal_micro_batches(
    run_script, tmp_path, small
):
    """24 sequences a step in micro-batches of unequal token counts, over the end of an epoch.

    Tolerance: as for ddp_mnist.py, a few last bits of a loss near 5, over 24 smooth steps.
    """
    for ranks, micro in ((1, 8), (2, 4), (3, 8), (4, 3)):
        ended = run_script(
            TRAINING, *small, "--global-batch-size", 24, "--micro-batch-size", micro,
            "--output-dir", tmp_path / f"{ranks}", world_size=ranks,
        )  # fmt: skip
        assert ended.codes == [0] * ranks, ended.stdout + ended.stderr
    losses = steps_in(tmp_path / "1")
    assert losses[24] < 0.7 * losses[1], "a loss that does not fall would prove little"
    assert newest_state(tmp_path / "1")["sampler"]["epoch"] == 1, "the end of an epoch is in it"
    for ranks in (2, 3, 4):
        assert largest_difference(tmp_path / "1", tmp_path / f"{ranks}") < 2e-5, f"{ranks} ranks"
        ends = [newest_state(tmp_path / str(run))["trained_tokens"] for run in (1, ranks)]
        assert ends[0] == ends[1]


def average_the_averages(script):
    """Do what most loops do: mean over each micro-batch, then over micro-batches and ranks."""
    summed = script.summed_loss

    def scaled(model, inputs, targets, precision):
        loss = summed(model, inputs, targets, precision)
        if not isinstance(model, DistributedDataParallel):
            return loss
        counted = (targets != -100).sum()
        everywhere = counted.clone()
        torch.distributed.all_reduce(everywhere)
        return loss / counted * everywhere / torch.distributed.get_world_size()

    script.summed_loss = scaled


def reduce_every_micro_batch(script):
    import contextlib

    script.DDP = type(
        "Eager", (DistributedDataParallel,), {"no_sync": lambda self: contextlib.nullcontext()}
    )


def drop_a_micro_batch(script):
    deal = script.MicroBatches.__iter__

    def short(self):
        for number, indices in enumerate(deal(self)):
            yield [] if number == 3 else indices

    script.MicroBatches.__iter__ = short


def evaluate_only_full_batches(script):
    every = script.data.evaluation_indices
    script.data.evaluation_indices = lambda *args: every(*args)[:-3]


def train_rank_1_further(script):
    original = script.check_equal_weights

    def drifted(results, model):
        with torch.no_grad():
            next(model.parameters()).add_(1e-7 * torch.distributed.get_rank())
        original(results, model)

    script.check_equal_weights = drifted


GRADIENT, BYTES, WEIGHTS, TRAINED, TESTED = (
    "gradient: relative error against one process",
    "bytes all-reduced per step",
    "distinct sets of weights over all ranks",
    "tokens trained on, from step 1",
    "test tokens counted",
)


@pytest.mark.parametrize(
    ("sabotage", "failing"),
    [
        (skip_all_reduce, [GRADIENT, BYTES]),
        (average_the_averages, [GRADIENT, BYTES]),
        (reduce_every_micro_batch, [BYTES]),
        (train_rank_1_further, [WEIGHTS]),
        (deal_all_ranks_the_same, [GRADIENT]),
        (drop_a_micro_batch, [TRAINED]),
        (evaluate_only_full_batches, [TESTED]),
    ],
)
def test_sabotage_of_the_template_fails_a_check(run_script, tmp_path, small, sabotage, failing):
    ended = run_script(
        TRAINING, *small, "--max-steps", 3, "--grad-accum-steps", 2, "--output-dir",
        tmp_path / "run", world_size=2, before=sabotage,
    )  # fmt: skip
    assert 1 in ended.codes and not set(ended.codes) - {1, -signal.SIGTERM}, ended.stderr
    assert ended.stdout.splitlines()[-1] == "FAILED: " + "; ".join(failing)


@pytest.fixture
def straight(run_script, tmp_path, small):
    """A run that is never stopped, as the others are to be."""
    ended = run_script(TRAINING, *small, "--output-dir", tmp_path / "straight", world_size=2)
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    return tmp_path / "straight"


def at_random_step(folder, act):
    """Return what to do `during` a run: act(pids) once it has taken a random number of steps."""
    wanted = random.randint(1, 20)
    print(f"to be stopped after step {wanted}")  # which pytest shows where the test fails

    def wait_and_act(pids):
        metrics = folder / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= wanted)
        act(pids)

    return wait_and_act


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1])
def test_a_stopped_run_goes_on_bitwise_as_if_it_never_was(
    run_script, tmp_path, small, straight, stop
):
    """SIGKILL takes all ranks; the others come to one rank alone, as a scheduler may do it."""
    folder = tmp_path / "stopped"
    arguments = (TRAINING, *small, "--num-workers", 1, "--output-dir", folder, "--resume")

    def act(pids):
        for pid in pids if stop == signal.SIGKILL else pids[1:]:
            os.kill(pid, stop)

    ended = run_script(*arguments, world_size=2, during=at_random_step(folder, act))
    if stop == signal.SIGKILL:
        assert ended.codes == [-signal.SIGKILL] * 2
        assert "no checkpoint in" in ended.stdout, "--resume in a new folder starts at the start"
    else:
        assert ended.codes == [0, 0], ended.stderr
        (step,) = re.findall(r"^OK: 4 .* after step (\d+), asked to stop", ended.stdout, re.M)
        assert newest_state(folder)["step"] == int(step) == max(steps_in(folder)) < 24
    again = run_script(*arguments, world_size=2)
    assert again.codes == [0, 0], again.stdout + again.stderr
    assert largest_difference(straight, folder) == 0.0, "bitwise"
    assert steps_in(straight, "test_loss") == steps_in(folder, "test_loss")
    finished = run_script(*arguments, world_size=2)
    assert finished.codes == [0, 0] and "has all 24 steps: nothing to do" in finished.stdout


def ask_to_stop_in(step):
    """Send SIGTERM from within that step: to test what follows, not when it comes."""

    def before(script):
        lr_at = script.lr_at

        def asked(current, args):
            if current == step:
                os.kill(os.getpid(), signal.SIGTERM)
            return lr_at(current, args)

        script.lr_at = asked

    return before


def test_sigterm_to_a_rank_and_its_data_workers_saves_too(run_script, tmp_path, small):
    """torchrun and SLURM signal a rank's whole process group, or all of its processes."""
    folder = tmp_path / "run"

    def act(pids):
        for pid in pids:
            workers = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            for process in (*workers, pid):
                os.kill(int(process), signal.SIGTERM)

    ended = run_script(
        TRAINING, *small, "--num-workers", 2, "--output-dir", folder, world_size=2,
        during=at_random_step(folder, act),
    )  # fmt: skip
    assert ended.codes == [0, 0], ended.stderr
    assert newest_state(folder)["step"] == max(steps_in(folder)) < 24


def test_sigterm_without_a_folder_says_that_nothing_is_saved(run_script, small):
    ended = run_script(TRAINING, *small, before=ask_to_stop_in(2))
    assert ended.codes == [0]
    assert ended.stdout.splitlines()[-1].endswith("asked to stop, not saved")


def test_a_text_with_too_little_to_test_on_says_which_part(run_script, tmp_path):
    (tmp_path / "tiny").write_text("a line of text\n" * 21)
    ended = run_script(TRAINING, "--text-file", tmp_path / "tiny", world_size=2)
    assert_one_line(ended, "the test text's 15 bytes are fewer than one", "ddp_training.py")


def test_a_gradient_that_is_no_number_stops_too(run_script, small):
    def explode(script):
        clip, calls = torch.nn.utils.clip_grad_norm_, []

        def infinite(*args):
            calls.append(1)
            return clip(*args) * (float("inf") if len(calls) == 3 else 1.0)

        torch.nn.utils.clip_grad_norm_ = infinite

    ended = run_script(TRAINING, *small, world_size=2, before=explode)
    (line,) = ended.stderr.splitlines()
    assert re.search(r"in step 3 the loss is [\d.]+ over all ranks, gradient norm inf", line)


def test_resuming_on_other_ranks_keeps_the_data_order_and_says_what_changed(
    run_script, tmp_path, small, straight
):
    folder = tmp_path / "moved"
    arguments = (TRAINING, *small, "--output-dir", folder, "--global-batch-size", 16, "--resume")
    run_script(*arguments, world_size=2, before=ask_to_stop_in(7))
    one = run_script(*arguments, "--micro-batch-size", 4, before=ask_to_stop_in(12))
    assert "at step 7, sample 112 of epoch 1; changed since then: " in one.stdout
    assert "micro_batch_size 8 -> 4" in one.stdout and "ranks 2 -> 1" in one.stdout
    assert "global_batch" not in one.stdout, "what has not changed"
    four = run_script(*arguments, "--micro-batch-size", 2, world_size=4)
    assert four.codes == [0] * 4, four.stdout + four.stderr
    assert "at step 12, sample 192 of epoch 1; changed since then: " in four.stdout
    assert "ranks 1 -> 4" in four.stdout
    assert largest_difference(straight, folder) < 2e-5
    assert results_of(folder)["checks"][3]["ok"], "no token twice, none left out"


# the template's other ways to stop


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_a_loss_that_is_no_number_stops_the_run_and_names_step_and_rank(
    run_script, tmp_path, small, precision
):
    def poison(script):
        summed, calls = script.summed_loss, []

        def poisoned(*args):
            calls.append(args)
            # Two calls check the gradient, one more alone; then there is one in each step.
            bad = torch.distributed.get_rank() == 1 and len(calls) == 3 + 4
            return summed(*args) * (float("nan") if bad else 1.0)

        script.summed_loss = poisoned

    ended = run_script(
        TRAINING, *small, "--precision", precision, "--save-every", 3,
        "--output-dir", tmp_path / "run", world_size=2, before=poison,
    )  # fmt: skip
    assert 1 in ended.codes
    (line,) = ended.stderr.splitlines()
    assert line.startswith(
        "ddp_training.py: stopped: in step 4 the loss is nan on rank 1 of 2, gradient norm"
    )
    assert newest_state(tmp_path / "run")["step"] == 3, "no checkpoint of what is lost"


def test_a_disk_that_fills_up_is_named_and_the_last_good_checkpoint_stays(
    run_script, tmp_path, small
):
    def fill_after_first(script):
        save = script.checkpoint.save

        def limited(*args):
            folder = save(*args)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))
            return folder

        script.checkpoint.save = limited

    arguments = (TRAINING, *small, "--output-dir", tmp_path / "run")
    ended = run_script(*arguments, world_size=2, before=fill_after_first)
    assert ended.codes[0] == 2
    assert_one_line(ended, "step-00000010: File too large", "ddp_training.py")
    again = run_script(*arguments, "--resume", world_size=2)
    assert again.codes == [0, 0] and "step-00000005" in again.stdout


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precisions_learn_and_resume_bitwise(run_script, tmp_path, small, precision):
    arguments = (TRAINING, *small, "--max-steps", 8, "--precision", precision, "--resume")
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    run_script(*arguments, "--output-dir", straight, world_size=2)
    stop = ask_to_stop_in(4)
    run_script(*arguments, "--output-dir", stopped, world_size=2, before=stop)
    ended = run_script(*arguments, "--output-dir", stopped, world_size=2)
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    losses = steps_in(straight)
    assert losses[8] < 0.9 * losses[1]
    assert largest_difference(straight, stopped) == 0.0
    assert results_of(stopped)["checks"][0]["measured"] > 1e-5, "fp32 would be more exact"
    if precision == "16-mixed":
        assert newest_state(stopped)["scaler"] == newest_state(straight)["scaler"]


def test_tensorboard_and_compile_do_not_change_the_training(run_script, tmp_path, small):
    def without_cpp(script):  # the default back end works too, and takes half a minute
        torch.compile = functools.partial(torch.compile, backend="aot_eager")

    plain, folder = tmp_path / "plain", tmp_path / "run"
    arguments = (TRAINING, *small, "--max-steps", 8, "--grad-accum-steps", 2, "--output-dir")
    run_script(*arguments, plain, world_size=2)
    ended = run_script(
        *arguments, folder, "--tensorboard", "--compile", world_size=2, before=without_cpp
    )
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    assert largest_difference(plain, folder) < 2e-5
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    written = EventAccumulator(str(folder / "tensorboard")).Reload()
    shown = {event.step: event.value for event in written.Scalars("loss")}
    assert shown == pytest.approx(steps_in(folder), rel=1e-6)


def test_learning_rates_scale_warm_up_and_decay(run_script):
    script = load_script(TRAINING)
    args = argparse.Namespace(
        lr=1.0, lr_scaling="none", global_batch_size=128, base_batch_size=32,
        warmup_steps=4, max_steps=12,
    )  # fmt: skip
    rates = [script.lr_at(step, args) for step in range(1, 13)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[7] == pytest.approx(0.55) and rates[11] == pytest.approx(0.1)
    for scaling, factor in (("linear", 4.0), ("sqrt", 2.0)):
        args.lr_scaling = scaling
        assert script.lr_at(4, args) == factor
    args.warmup_steps, args.max_steps = 0, 1
    assert script.lr_at(1, args) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--preset", "13b"], "llama3-70b"),  # the list of what there is
        (["--global-batch-size", 24], "24 must be --micro-batch-size 8 x 2 ranks x --grad-accum"),
        (["--global-batch-size", 32, "--grad-accum-steps", 3], "32 must be --micro-batch-size 8"),
        (["--text-file", "{tmp}/none"], "--text-file {tmp}/none: No such file"),
        (["--text-file", "{tmp}/empty"], "--text-file {tmp}/empty is empty"),
        (["--text-file", "{tmp}/short"], "are fewer than one sequence of 128 tokens for each of 2"),
        (["--seq-len", 300], "--seq-len must be at most 256"),
        (["--output-dir", "{tmp}/short/x"], "short/x cannot be written: Not a directory"),
        (["--output-dir", "{tmp}/other", "--resume"], "of another model (blocks.0.attention.wk"),
        (["--output-dir", "{tmp}/data", "--resume"], "--seq-len is 128 here and 64 in the checkpo"),
        (["--output-dir", "{tmp}/data"], "is not empty: name another folder, or add --resume"),
    ],
)
def test_the_template_refuses_bad_input(run_script, tmp_path, argv, says):
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_text("x" * 2000)
    (tmp_path / "text").write_text("some words " * 1000)
    folder = str(argv[1]).format(tmp=tmp_path)
    if "--text-file" not in argv:
        argv = [*argv, "--text-file", tmp_path / "text"]
    if folder.endswith("other"):
        run_script(MNIST, "--epochs", 1, "--output-dir", folder)
    elif folder.endswith("data"):
        filled = [str(a).format(tmp=tmp_path) for a in argv]
        run_script(TRAINING, *filled, "--max-steps", 1, "--seq-len", 64)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("data/*")}
    ended = run_script(TRAINING, *(str(a).format(tmp=tmp_path) for a in argv), world_size=2)
    assert_one_line(ended, says.format(tmp=tmp_path), "ddp_training.py")
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("data/*")}


# the template cut down


class Without(ast.NodeTransformer):
    """Delete what a person deletes: a name's definition, arguments, and statements that use it."""

    def __init__(self, word):
        self.word, self.gone = word, {word}

    def uses(self, *nodes):
        found = (n for node in nodes if node for n in ast.walk(node))
        return any(
            (isinstance(n, ast.Name) and n.id in self.gone)
            or (isinstance(n, ast.Attribute) and n.attr in self.gone)
            or (isinstance(n, ast.Constant) and n.value in {f"--{name}" for name in self.gone})
            for n in found
        )

    def visit_arguments(self, node):
        if node.args and node.args[-1].arg == self.word:
            node.defaults = node.defaults[:-1]
        node.args = [argument for argument in node.args if argument.arg != self.word]
        return node

    def visit_ImportFrom(self, node):
        node.names = [alias for alias in node.names if alias.name not in self.gone]
        return node if node.names else None

    def visit_Call(self, node):
        self.generic_visit(node)
        if isinstance(node.func, ast.Name):  # a function of the script
            node.args = [a for a in node.args if not self.uses(a) or not isinstance(a, ast.Name)]
        return node

    def visit_FunctionDef(self, node):
        return None if node.name in self.gone else self.generic_visit(node)

    def visit_compound(self, node):
        header = getattr(node, "test", None) or getattr(node, "iter", None)
        if self.uses(header):
            return [kept for s in node.orelse if (kept := self.visit(s))]
        self.generic_visit(node)
        return node if node.body else None

    visit_If = visit_For = visit_While = visit_compound

    def visit_simple(self, node):
        self.generic_visit(node)
        if not self.uses(node):
            return node
        for target in getattr(node, "targets", []):  # what it would have set is gone too
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            self.gone |= {n.id for n in names if isinstance(n, ast.Name)}
        return None

    def visit_Dict(self, node):
        kept = [(k, v) for k, v in zip(node.keys, node.values, strict=True) if not self.uses(v)]
        node.keys, node.values = map(list, zip(*kept, strict=True)) if kept else ([], [])
        return self.generic_visit(node)

    visit_Assign = visit_AugAssign = visit_Expr = visit_simple


def test_the_mechanical_deletion_deletes():
    source = (
        "def f(a, x):\n  g(a, x)\n  if x:\n    h()\n  else:\n    k()\n  y = {1: x, 2: a}\n  z(y)"
    )
    cut = ast.unparse(Without("x").visit(ast.parse(source)))
    assert cut == "def f(a):\n    g(a)\n    k()\n    y = {2: a}\n    z(y)"


def test_what_a_user_does_not_need_can_be_deleted(run_script, tmp_path, small):
    """Without any one of these, and without all, the rest trains on to the same loss."""
    optional = ["evaluate", "scaler", "catch_preemption", "checkpoint", "log", "compile",
                "check_gradient", "check_equal_weights", "stop_unless_finite"]  # fmt: skip
    ends = {}
    for words in [[], *([word] for word in optional), optional]:
        tree = ast.parse((REPO / TRAINING).read_text())
        for word in words:
            tree = Without(word).visit(tree)
            assert word not in {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        cut = tmp_path / f"without_{'_'.join(words)}.py"
        cut.write_text(ast.unparse(tree))
        ended = run_script(
            str(cut), *small, "--max-steps", 4, "--output-dir", tmp_path / cut.stem, world_size=2
        )
        assert ended.codes == [0, 0], f"{words}: {ended.stdout}{ended.stderr}"
        ends["_".join(words)] = re.search(r"loss [\d.]+ after step 4", ended.stdout)[0]
    assert set(ends.values()) == {ends[""]}


# the benchmark

BENCHMARK = "01-ddp-basics/ddp_benchmark.py"


def test_a_step_is_the_sum_of_ideal_and_what_is_lost(run_script, tmp_path, capsys):
    """Times in which every loss is known: of 100 ms on one rank, 50 are ideal on two."""
    script = load_script(BENCHMARK)
    one = {"full": 101, "slowest": 100, "mean": 100, "alone": 100, "ideal": 100}
    two = {"full": 80, "slowest": 70, "mean": 65, "alone": 52, "ideal": 50}
    found = {
        ranks: {f"{kind}_{name}_ms": value for name, value in times.items()
                for kind in ("strong", "weak")} | {"gradient_norm": norm}
        for ranks, times, norm in ((1, one, 1.0), (2, two, 1.1))
    }  # fmt: skip
    args = argparse.Namespace(model="transformer", global_batch_size=8)
    world = script.runtime.World(0, 0, 1, 1, "python")
    results = script.measure.Results(BENCHMARK, args, world, torch.device("cpu"))
    script.show_scaling(args, found, script.Console(True), results, tmp_path)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    numbers = [words[::2] for words in lines if words[:2] == ["strong", "2"]]
    assert numbers == [["strong", "80.0", "50.0", "2.0", "13.0", "5.0", "10.0", "62%"]]
    assert results.metrics["strong_efficiency_2"] == 50 / 80
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
    assert [check.ok for check in results.checks] == [False], "another gradient on two ranks"


@pytest.mark.parametrize("model", ["transformer", "resnet50"])
def test_benchmark_measures_the_same_training_on_any_number_of_ranks(run_script, tmp_path, model):
    norms = []
    arguments = (BENCHMARK, "--model", model, "--global-batch-size", 2, "--rounds", 1)
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        ended = run_script(*arguments, "--output-dir", folder, world_size=ranks)
        assert ended.codes == [0] * ranks, ended.stdout + ended.stderr
        metrics = results_of(folder)["metrics"]
        assert metrics["strong_slowest_ms"] >= metrics["strong_mean_ms"] > 0
        norms.append(metrics["gradient_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


def test_benchmark_refuses_a_step_that_does_not_send_the_gradient(run_script):
    ended = run_script(
        BENCHMARK, "--global-batch-size", 2, "--rounds", 1, world_size=2, before=skip_all_reduce
    )
    assert ended.stdout.splitlines()[-1] == "FAILED: step: bytes all-reduced"


def test_bucket_sizes_change_the_number_of_all_reduces_only(run_script):
    ended = run_script(
        BENCHMARK, "--buckets", 0.1, 1, 25, "--global-batch-size", 2, "--rounds", 1, world_size=2
    )
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    calls = [int(n) for n in re.findall(r"^[\d.]+ +(\d+) +[\d.]+ ms$", ended.stdout, re.M)]
    assert calls[0] > calls[1] > calls[2] == 1


@pytest.mark.parametrize("sabotaged", [False, True])
def test_overhead_compares_loops_that_train_alike(run_script, tmp_path, sabotaged):
    def other_losses(script):
        step = script.BareLoop.step
        script.BareLoop.step = lambda self: step(self) + 1e-4

    ended = run_script(
        BENCHMARK, "--overhead", "--rounds", 10, "--output-dir", tmp_path / "run", world_size=2,
        before=other_losses if sabotaged else None,
    )  # fmt: skip
    content = results_of(tmp_path / "run")
    assert [check["ok"] for check in content["checks"]] == [not sabotaged]
    assert ended.codes[0] == sabotaged
    ratios = ("overhead_ratio", "overhead_ratio_wall", "bare_ratio", "bare_ratio_wall")
    assert set(content["metrics"]) == set(ratios)


def test_benchmark_says_when_cores_are_shared_and_what_it_cannot_deal(run_script):
    def one_core(script):
        script.measure.core_count = lambda: 1
        times = dict.fromkeys(("full", "slowest", "mean", "alone", "ideal"), 1.0)
        metrics = {f"{kind}_{k}_ms": v for k, v in times.items() for kind in ("strong", "weak")}
        found = {ranks: {**metrics, "gradient_norm": 1.0} for ranks in (1, 2)}
        script.measure_all = lambda args, console: found

    ended = run_script(BENCHMARK, before=one_core, environ={})
    assert ended.codes == [0], ended.stderr
    assert "more ranks than cores: this shows them share, and not how DDP" in ended.stdout
    ended = run_script(BENCHMARK, "--max-ranks", 3, environ={})
    assert_one_line(ended, "--global-batch-size 8 cannot be dealt to 3 ranks", "ddp_benchmark.py")
    ended = run_script(BENCHMARK, "--overhead", "--rounds", 9, environ={})
    assert_one_line(ended, "--overhead needs --rounds of at least 10", "ddp_benchmark.py")


# nn.DataParallel

DATA_PARALLEL = "01-ddp-basics/data_parallel_vs_ddp.py"


def test_data_parallel_needs_two_gpus_and_says_so(run_script):
    ended = run_script(DATA_PARALLEL, environ={})
    assert_one_line(ended, "and this machine has 0: run this where", "data_parallel_vs_ddp.py")


@pytest.mark.parametrize("broken", [False, True])
def test_data_parallel_and_ddp_train_alike(run_script, tmp_path, broken):
    """On the CPU, where DataParallel is the model itself: all but the copying between GPUs."""

    def without_gpus(script):
        script.need_two_gpus = lambda: None
        if broken:
            skip_all_reduce(script)

    ended = run_script(
        DATA_PARALLEL, "--preset", "tiny", "--seq-len", 32, "--global-batch-size", 4,
        "--max-steps", 6, "--output-dir", tmp_path / "run", world_size=2, before=without_gpus,
    )  # fmt: skip
    assert [check["ok"] for check in results_of(tmp_path / "run")["checks"]] == [not broken]
    assert ended.codes[0] == broken, ended.stdout + ended.stderr


@pytest.mark.skipif("," not in GPUS, reason="needs two GPUs")
def test_data_parallel_runs_on_two_gpus():
    ended = run_command(["python", DATA_PARALLEL], REPO, 300, CUDA_VISIBLE_DEVICES=GPUS)
    assert ended.codes == [0], ended.stdout + ended.stderr


@pytest.mark.skipif(not GPUS, reason="needs a GPU")
@pytest.mark.parametrize(
    "command",
    [
        [MNIST, "--epochs", "1"],
        [SCRATCH],
        [TRAINING, "--precision", "bf16-mixed"],
        [TRAINING, "--precision", "16-mixed", "--compile"],
        [BENCHMARK, "--max-ranks", "1"],
    ],
)
def test_scripts_run_on_a_gpu(command):
    ended = run_command(
        ["python", *command, "--device", "cuda"], REPO, 300, CUDA_VISIBLE_DEVICES=GPUS
    )
    assert ended.codes == [0], ended.stdout + ended.stderr
    assert " cuda with nccl" in ended.stdout or BENCHMARK in command


# the timeline

TIMELINE = "01-ddp-basics/ddp_timeline.py"


def test_timeline_is_drawn_from_a_trace_that_has_every_all_reduce(run_script, tmp_path):
    folder = tmp_path / "run"
    small = ("--seq-len", 32, "--micro-batch-size", 2, "--output-dir", folder)
    ended = run_script(TIMELINE, *small, world_size=2)
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    assert [check["measured"] for check in results_of(folder)["checks"]][1::2] == [1, 6]
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((folder / "trace-0.5.json").read_text())["traceEvents"]
    assert sum(event["name"] == "gloo:all_reduce" for event in events) == 6


def test_timeline_without_all_reduces_fails_a_check(run_script):
    ended = run_script(TIMELINE, "--seq-len", 32, world_size=2, before=skip_all_reduce)
    failed = "FAILED: one bucket: numbers all-reduced; 0.5 MiB: numbers all-reduced"
    assert ended.stdout.splitlines()[-1] == failed


def test_what_is_hidden_is_what_lies_within_backward():
    script = load_script(TIMELINE)
    spans = {"backward": [(10.0, 20.0)], "all-reduce": [(5.0, 6.0), (15.0, 5.0), (29.0, 4.0)]}
    assert script.hidden_ms(spans) == 1.0 + 5.0 + 1.0


# pitfalls

PITFALLS = "01-ddp-basics/ddp_pitfalls.py"
SYMPTOMS = {
    "hang-at-a-step": "rank 0: lost contact with another rank (Timed out)",
    "unused-parameters": "Expected to have finished reduction in the prior iteration",
    "losses-differ": "FAILED: distinct losses",
    "forgotten-set-epoch": "FAILED: distinct orders in 3 epochs",
    "batch-norm": "FAILED: gradient: relative error against one process",
    "out-of-memory": "rank 1: RuntimeError: ",
    "slow-input": "FAILED: share of the time",
}


@pytest.mark.parametrize("pitfall", SYMPTOMS)
def test_a_pitfall_has_its_symptom_and_the_cure_cures(run_script, pitfall):
    ended = run_script(PITFALLS, pitfall, "--timeout", 2, world_size=2)
    assert 1 in ended.codes and SYMPTOMS[pitfall] in ended.stdout + ended.stderr
    cured = run_script(PITFALLS, pitfall, "--cured", "--timeout", 10, world_size=2)
    assert cured.codes == [0, 0], cured.stdout + cured.stderr
