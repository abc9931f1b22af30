"""A job under a real SLURM, on two nodes: it stops when its time is up, queues itself,
resumes.
"""

import re

import pytest
from helpers_01 import TRAINING, small_job, steps_in
from helpers_slurm import Slurm

# One worker, which starts SLURM once.
pytestmark = [pytest.mark.full, pytest.mark.xdist_group("slurm")]


@pytest.fixture
def slurm(tmp_path):
    (tmp_path / "slurm").mkdir()
    running = Slurm(tmp_path / "slurm", 2)
    yield running
    running.stop()


def test_a_job_whose_time_is_up_saves_and_queues_itself_and_resumes(slurm, tmp_path):
    words = [
        TRAINING,
        *small_job(tmp_path),
        "--device",
        "cpu",
        "--resume",
        "--output-dir",
    ]
    flags = "--nodes=2 --ntasks-per-node=1 launch.sbatch"
    job = slurm.submit(flags, *words, tmp_path / "run")
    slurm.wait_for(f"cat {slurm.folder}/job-{job}.out", "^step 2 ")
    slurm.run(f"scancel --batch --signal=USR1 {job}")  # as SLURM does when time is up
    slurm.start_again(job)
    assert slurm.end_of(job) == "COMPLETED", slurm.output(job)
    said = slurm.output(job)
    assert said.count("2 ranks started by srun") == 2, said
    assert re.search(
        r"stopped by a signal.*queued again: its time is up.*resuming from", said, re.S
    )
    assert list(steps_in(tmp_path / "run")) == list(range(1, 25))
