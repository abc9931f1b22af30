"""launch_nccl.sh: the lines and the job file that it prints, and what it refuses."""

import os
import subprocess

import pytest
from conftest import REPO, run_command
from helpers_04 import first_is_quick

LAUNCH = ["bash", "04-nccl-operations/launch_nccl.sh"]


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (
            "local --nproc-per-node 4 -e 1G",
            "torchrun --standalone --nproc-per-node=4 04-nccl-operations/bandwidth_test.py -e 1G",
        ),
        (
            "multi-node collective_ops.py --nnodes 2 --nproc-per-node=8 --rdzv-endpoint n0:29500 "
            "--ifname eth0",
            "NCCL_SOCKET_IFNAME==eth0 GLOO_SOCKET_IFNAME=eth0 torchrun --nnodes=2 "
            "--nproc-per-node=8 --rdzv-id=nccl --rdzv-backend=c10d --rdzv-endpoint=n0:29500 "
            "04-nccl-operations/collective_ops.py",
        ),
        (
            "slurm --nnodes 2 --nproc-per-node 8 --nccl-debug",
            "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP,NET,ENV "
            "NCCL_DEBUG_FILE=nccl-%h-%p.log srun --nodes=2 --ntasks-per-node=8 "
            "--gpus-per-node=8 --kill-on-bad-exit=1 python 04-nccl-operations/bandwidth_test.py",
        ),
        (
            "slurm collective_ops.py --nnodes 1 --nproc-per-node 2 --device cpu",
            "srun --nodes=1 --ntasks-per-node=2 --kill-on-bad-exit=1 "
            "python 04-nccl-operations/collective_ops.py --device cpu",
        ),
    ],
)
def test_it_prints_what_it_would_run(argv, line):
    ended = run_command([*LAUNCH, *argv.split(), "--dry-run"], REPO, 60)
    assert (ended.codes, ended.stdout) == (
        [0],
        f"OMP_NUM_THREADS=1 PYTORCH_ALLOC_CONF=expandable_segments:True {line}\n",
    ), ended.stderr


def job_file(*argv):
    ended = run_command([*LAUNCH, "sbatch", *argv], REPO, 60)
    assert (ended.codes, ended.stderr) == ([0], "")
    return ended.stdout


def started_by(job, tmp_path):
    """Run a job file with an srun that prints its arguments, one line each."""
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/bash\nprintf "%s|" "$@"\necho "OMP=$OMP_NUM_THREADS"\n')
    srun.chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}",
               "SLURM_SUBMIT_DIR": "/shared/a guide", "SLURM_CPUS_PER_TASK": "12"}  # fmt: skip
    ended = subprocess.run(["bash"], input=job, env=environ, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return [line.split("|") for line in ended.stdout.splitlines()]


def test_the_job_file_runs_the_script(tmp_path):
    job = job_file("--nnodes", "4", "-e", "8G")
    for option in ("nodes=4", "ntasks-per-node=8", "gpus-per-node=8", "cpus-per-task=12"):
        assert f"\n#SBATCH --{option}\n" in job
    assert job.rindex("#SBATCH") < job.index(
        "set -euo pipefail"
    )  # SLURM stops at the first command
    (test,) = started_by(job, tmp_path)
    binding = ["--cpus-per-task=12", "--cpu-bind=cores", "--kill-on-bad-exit=1", "python"]
    assert test == [*binding, "04-nccl-operations/bandwidth_test.py", "-e", "8G", "OMP=1"]


def test_the_job_file_of_a_container(tmp_path):
    job = job_file("collective_ops.py", "--container-image", "/images/guide 1.sqsh", "--op", "a b")
    for line in started_by(job, tmp_path):
        assert "--container-image=/images/guide 1.sqsh" in line
        assert "--container-workdir=/shared/a guide" in line
        (mounts,) = [word for word in line if word.startswith("--container-mounts=")]
        assert mounts.startswith("--container-mounts=/shared/a guide:/shared/a guide")
    assert line[-4:] == ["04-nccl-operations/collective_ops.py", "--op", "a b", "OMP=1"]


@pytest.mark.parametrize(
    ("argv", "says"),
    first_is_quick([
        ("local nope.py", "nope.py is none of bandwidth_test.py, collective_ops.py"),
        ("", "the first argument must be local, multi-node, slurm or sbatch, not ''"),
        ("local --nproc-per-node 0", "must be a whole number of at least 1, not '0'"),
        ("local --ifname", "--ifname needs a value"),
        ("local --nnodes 2", "--nnodes and --rdzv-endpoint go with the other modes"),
        ("multi-node --nproc-per-node 2", "multi-node needs --nnodes"),
        ("multi-node --nnodes 2 --rdzv-endpoint n0", "multi-node needs --rdzv-endpoint HOST:PORT"),
        ("slurm --nnodes 2", "slurm needs --nproc-per-node"),
        ("slurm --nnodes 2 --nproc-per-node 2 --rdzv-endpoint n0:1", "slurm needs no"),
        ("sbatch --nnodes two", "needs --nnodes, a whole number of at least 1, not 'two'"),
        ("slurm --nnodes 2 --nproc-per-node 2 --container-image a", "goes with sbatch"),
    ]),
)  # fmt: skip
def test_it_refuses_what_it_cannot_start(argv, says):
    ended = run_command([*LAUNCH, *argv.split()], REPO, 60)
    assert (ended.codes, ended.stdout) == ([2], "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("launch_nccl.sh: error: ") and says in line
