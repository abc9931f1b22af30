"""Module 01: the same answer on any number of ranks, and a clear word when something is wrong."""

import gzip
import json
import os
import re
import shlex
import signal
import socket
import struct
import time
from pathlib import Path

import pytest
import torch
from conftest import REPO, run_command
from torch.nn.parallel import DistributedDataParallel

MNIST = "01-ddp-basics/ddp_mnist.py"
LAUNCH = "01-ddp-basics/launch_ddp.sh"


def results_of(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


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


def assert_one_line(ended, says: str) -> None:
    """One line on stderr, from one rank, whose exit code is 2."""
    lines = ended.stderr.splitlines()
    assert len(lines) == 1, ended.stderr
    assert lines[0].startswith("ddp_mnist.py: error: ") and says in lines[0]
    assert 2 in ended.codes


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


@pytest.mark.parametrize(
    ("argv", "prints"),
    [
        (
            "local --nproc-per-node=3 --epochs 2",
            "OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=3 {script} --epochs 2",
        ),
        (
            "multi-node --nnodes 2 --nproc-per-node 8 --rdzv-endpoint n0:29500 --resume",
            "OMP_NUM_THREADS=1 torchrun --nnodes=2 --nproc-per-node=8 --rdzv-id=ddp_mnist "
            "--rdzv-backend=c10d --rdzv-endpoint=n0:29500 {script} --resume",
        ),
        (
            "slurm --nnodes 2 --nproc-per-node 8 --output-dir 'runs/a b'",
            "OMP_NUM_THREADS=1 sbatch --job-name=ddp_mnist --nodes=2 --ntasks-per-node=8 "
            "--gpus-per-node=8 --wrap 'srun --kill-on-bad-exit=1 python {script} "
            "--output-dir runs/a\\ b'",
        ),
        (
            "slurm --nnodes 1 --nproc-per-node 2 --device=cpu",
            "OMP_NUM_THREADS=1 sbatch --job-name=ddp_mnist --nodes=1 --ntasks-per-node=2 "
            "--wrap 'srun --kill-on-bad-exit=1 python {script} --device=cpu'",
        ),
    ],
)
def test_launcher_prints_its_command_and_passes_arguments_on(tmp_path, argv, prints):
    ended = run_command(["bash", LAUNCH, *shlex.split(argv), "--dry-run"], REPO, 20)
    assert (ended.codes, ended.stderr) == ([0], "")
    assert ended.stdout == prints.format(script=MNIST) + "\n"


def test_launcher_runs_what_it_prints(tmp_path):
    ended = run_command(["bash", str(REPO / LAUNCH), "local", "--epochs", "1"], tmp_path, 60)
    assert ended.codes == [0], ended.stderr
    assert ended.stdout.startswith("OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=")
    assert "OK: 4 checks passed" in ended.stdout


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("", "the first argument must be local, multi-node or slurm, not ''"),
        ("cluster", "not 'cluster'"),
        ("local --nproc-per-node 0", "must be a whole number of at least 1, not '0'"),
        ("local --nproc-per-node", "--nproc-per-node needs a value"),
        ("local --nnodes 2", "--nnodes and --rdzv-endpoint go with multi-node"),
        ("multi-node --nproc-per-node 2", "multi-node needs --nnodes"),
        ("multi-node --nnodes 2 --rdzv-endpoint n0", "multi-node needs --rdzv-endpoint HOST:PORT"),
        ("slurm --nnodes 2", "slurm needs --nproc-per-node"),
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
    assert re.search(r"^mp.spawn +set by hand: .* RANK=2 WORLD_SIZE=3 ", ended.stdout, re.M)
    assert re.search(r"^as mpirun does .* OMPI_COMM_WORLD_RANK=2 ", ended.stdout, re.M)


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
