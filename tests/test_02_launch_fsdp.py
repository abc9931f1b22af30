"""launch_fsdp.sh: the command that each mode prints and becomes, and what it refuses."""

import pytest
from conftest import REPO, run_command

LAUNCH = ["bash", "02-fsdp/launch_fsdp.sh"]


@pytest.mark.parametrize(
    ("argv", "prints"),
    [
        (
            "multi-node --nnodes=2 --nproc-per-node 8 --rdzv-endpoint node0:29500",
            "torchrun --nnodes=2 --nproc-per-node=8 --rdzv-id=fsdp_transformer --rdzv-backend=c10d "
            "--rdzv-endpoint=node0:29500 02-fsdp/fsdp_transformer.py",
        ),
        (
            "slurm --nnodes 2 --nproc-per-node 4 --preset 1b --output-dir run",
            "sbatch --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 --job-name=fsdp_transformer "
            "launch.sbatch 02-fsdp/fsdp_transformer.py --resume --preset 1b --output-dir run",
        ),
        (
            "predict --nnodes 2 --nproc-per-node 8 --preset 1b",
            "python 02-fsdp/fsdp_memory.py --world-size=16 --preset 1b",
        ),
    ],
)
def test_launcher_prints_its_command(argv, prints):
    ended = run_command([*LAUNCH, *argv.split(), "--dry-run"], REPO, 20)
    line = f"OMP_NUM_THREADS=1 PYTORCH_ALLOC_CONF=expandable_segments:True {prints}\n"
    assert (ended.codes, ended.stdout) == ([0], line), ended.stderr


def test_launcher_starts_what_it_prints(tmp_path):
    """In the other modes too, with tools that only say how they were called."""
    for tool in ("torchrun", "python", "sbatch"):
        (tmp_path / tool).write_text(f'#!/bin/sh\necho "{tool} called with $#: $*"\n')
        (tmp_path / tool).chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    for argv, tool, count in (
        ("local --max-steps 3", "torchrun", 5),
        ("predict --nnodes 1 --nproc-per-node 2", "python", 2),
        ("slurm --nnodes 1 --nproc-per-node 1 --output-dir run", "sbatch", 9),
    ):
        ended = run_command(["env", f"PATH={path}", *LAUNCH, *argv.split()], REPO, 20)
        assert f"{tool} called with {count}: " in ended.stdout, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("", "the first argument must be local, multi-node, slurm or predict, not ''"),
        ("local --nnodes 2", "local is one machine"),
        ("local --nproc-per-node", "--nproc-per-node needs a value"),
        ("local --nproc-per-node two", "needs --nproc-per-node, a whole number"),
        ("multi-node --nnodes 2", "multi-node needs --rdzv-endpoint HOST:PORT"),
        ("slurm --nnodes 2", "slurm needs --nproc-per-node"),
        ("slurm --nnodes 2 --nproc-per-node 2", "slurm needs --output-dir"),
        ("local fsdp_basics.py", "fsdp_basics.py is none of fsdp_finetune.py, fsdp_transformer.py"),
        ("predict --nproc-per-node 2", "predict needs --nnodes"),
    ],
)
def test_launcher_refuses_what_it_cannot_start(argv, says):
    ended = run_command([*LAUNCH, *argv.split()], REPO, 20)
    assert ended.codes == [2] and ended.stderr.startswith("launch_fsdp.sh: error: "), ended.stderr
    assert says in ended.stderr and len(ended.stderr.splitlines()) == 1
