"""launch_fsdp.sh: the command that each mode runs, and the modes that it refuses."""

import pytest
from conftest import REPO, run_command

LAUNCH = ["bash", "02-fsdp/launch_fsdp.sh"]


@pytest.mark.parametrize(
    ("argv", "prints"),
    [
        (
            "slurm --nnodes 2 --nproc-per-node 4 --preset 1b --output-dir run",
            "sbatch --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 "
            "--job-name=fsdp_transformer "
            "launch.sbatch 02-fsdp/fsdp_transformer.py --resume --preset 1b "
            "--output-dir run",
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


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (
            "local fsdp_basics.py",
            "fsdp_basics.py is none of fsdp_finetune.py, fsdp_transformer.py",
        ),
        ("predict --nproc-per-node 2", "predict needs --nnodes"),
    ],
)
def test_launcher_refuses_what_it_cannot_start(argv, says):
    ended = run_command([*LAUNCH, *argv.split()], REPO, 20)
    assert ended.codes == [2] and ended.stderr.startswith("launch_fsdp.sh: error: "), (
        ended.stderr
    )
    assert says in ended.stderr and len(ended.stderr.splitlines()) == 1
