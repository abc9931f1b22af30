"""launch_advanced.sh: the lines it prints, and what it refuses."""

import pytest
from conftest import REPO, run_command

LAUNCH = ["bash", "05-advanced/launch_advanced.sh"]


def launch(*arguments):
    return run_command([*LAUNCH, *arguments], REPO, 200, CUDA_VISIBLE_DEVICES="")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (
            "local --nproc-per-node 8 --tp 2 --pp 2",
            ["torchrun --standalone --nproc-per-node=8", "hybrid_parallelism.py --tp 2 --pp 2"],
        ),
        (
            "multi-node ulysses.py --nnodes 2 --rdzv-endpoint node0:29500 --nproc-per-node 8",
            ["--nnodes=2", "--rdzv-id=ulysses", "--rdzv-endpoint=node0:29500", "ulysses.py"],
        ),
        (
            "slurm --nnodes 2 --nproc-per-node 8 --cpus-per-task 12 --tp 8 --output-dir run",
            [
                "sbatch --nodes=2 --ntasks-per-node=8",
                "--gpus-per-node=8",
                " launch.sbatch ",
                "--tp 8",
            ],
        ),
    ],
)
def test_it_prints_the_command(arguments, parts):
    ended = launch(*arguments.split(), "--dry-run")
    assert ended.codes == [0], ended.stderr
    assert len(ended.stdout.splitlines()) == 1
    for part in parts:
        assert part in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("somewhere", "the first argument must be local, multi-node or slurm"),
        ("local other.py", "other.py is none of across_nodes.py"),
        ("multi-node --nnodes 2", "multi-node needs --rdzv-endpoint HOST:PORT"),
        ("slurm --nnodes 2", "slurm needs --nproc-per-node"),
    ],
)
def test_what_it_cannot_start_gets_one_line(arguments, says):
    ended = launch(*arguments.split())
    assert ended.codes == [2]
    (line,) = ended.stderr.splitlines()
    assert line.startswith("launch_advanced.sh: error: ") and says in line
