"""Jobs under a real SLURM, of two nodes: job files, requeue, preemption, failures."""

import pytest
from conftest import results_of
from helpers_01 import TRAINING, largest_difference, small_job
from helpers_slurm import Slurm

# One worker, which starts SLURM once.
pytestmark = [pytest.mark.full, pytest.mark.xdist_group("slurm")]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    running = Slurm(tmp_path_factory.mktemp("slurm"), 2)
    yield running
    running.stop()


@pytest.fixture
def small(tmp_path):
    return [str(word) for word in small_job(tmp_path)]


def test_one_file_starts_the_ranks_itself_and_by_torchrun(slurm, tmp_path, small):
    """Two tasks on each of two nodes, and a torchrun on each: the same losses, bit by bit."""
    for way, flag in (("srun", ""), ("torchrun", "--torchrun")):
        job = slurm.submit(
            f"--nodes=2 --ntasks-per-node=2 launch.sbatch {flag} {TRAINING}",
            *small, "--max-steps", 6, "--output-dir", tmp_path / way,
        )  # fmt: skip
        assert slurm.end_of(job) == "COMPLETED", slurm.output(job)
        assert results_of(tmp_path / way)["world_size"] == 4
        assert f"4 ranks started by {way}" in slurm.output(job)
    assert largest_difference(tmp_path / "srun", tmp_path / "torchrun") == 0.0
