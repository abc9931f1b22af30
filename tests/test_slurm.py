"""Jobs under a real SLURM, of seven nodes: job files, requeue, preemption, failures."""

import re
import subprocess
import sys

import pytest
from conftest import REPO, run_command
from helpers_01 import TRAINING, largest_difference, small_job
from helpers_slurm import Slurm

BENCH = "benchmarks/distributed_benchmarks.py"

# One worker, which starts SLURM once.
pytestmark = [pytest.mark.full, pytest.mark.xdist_group("slurm")]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    running = Slurm(tmp_path_factory.mktemp("slurm"), 7)
    yield running
    running.stop()


# what queues a job again: with a script of steps that cost nothing

COUNTER = '''
"""Count steps, and save their number when told to stop; --fault says what goes wrong on rank 1."""
import argparse, os, signal, sys, time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--resume", action="store_true")
parser.add_argument("--output-dir", type=Path)
parser.add_argument("--fault", default="")
args = parser.parse_args()
told = []
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda number, _: told.append(signal.Signals(number).name))
rank, starts = int(os.environ["SLURM_PROCID"]), int(os.environ.get("SLURM_RESTART_COUNT", 0))
saved, beat = args.output_dir / "saved", args.output_dir / "beat"
step = first = int(saved.read_text()) if args.resume and saved.exists() else 0
print(f"rank {rank}: start {starts} from step {first}", flush=True)
last = first + 10 if starts else 10**6
fault = "" if starts else args.fault
while step < last and not told:
    time.sleep(0.1)
    step += 1
    if rank == 1 and fault == "lost":
        beat.touch()
    if rank == 0 and fault == "lost" and step > 20 and time.time() - beat.stat().st_mtime > 1:
        raise SystemExit("lost another rank")
    if rank == 1 and step == 20 and fault == "error":
        raise SystemExit("an error of its own")
    if rank == 1 and step == 20 and fault == "abort":
        os.abort()
if told:
    print(f"rank {rank}: {told[0]} after step {step}", flush=True)
    if fault == "hang":
        time.sleep(1000)
    if rank == 0:
        time.sleep(1)
        saved.write_text(str(step))
'''


@pytest.fixture(scope="module")
def count(slurm, tmp_path_factory):
    """Return a function that submits a job of two tasks, on two nodes, that resumes."""
    script = tmp_path_factory.mktemp("counter") / "counter.py"
    script.write_text(COUNTER)

    def submit(*argv, flags="", resume="--resume"):
        folder = tmp_path_factory.mktemp("job")
        line = f"--nodes=2 --ntasks-per-node=1 {flags} launch.sbatch {script} {resume}"
        return slurm.submit(line, "--output-dir", folder, *argv)

    return submit


@pytest.fixture(scope="module", autouse=True)
def jobs(slurm, count):
    """Submit first what waits for most of a minute, on nodes that no other test takes."""
    here, there = "--nodelist=node0,node1", "--exclude=node[0-3]"
    short = " --time=1 --signal=B:USR1@45"  # SLURM may send it up to half a minute earlier
    one_node = "--nodes=1 --ntasks-per-node=2 --nodelist=node0"
    found = {
        "noticed": count("--fault", "lost", flags=there),
        "missed": count(flags=there),
        "limit": count(flags=here + short),
        "hang": count("--fault", "hang", flags=here + short),
        "lesson": count(flags=one_node + short, resume=""),
        "error": count("--fault", "error", flags=here),
        "abort": count("--fault", "abort", flags=here),
    }
    for name in ("noticed", "missed"):
        slurm.wait_for(f"cat {slurm.folder}/job-{found[name]}.out", "rank 1: start")
        assert slurm.fact(found[name], "NodeList") == "node[4-5]"
    subprocess.run(slurm.verb("kill", "node5"), check=True, cwd=REPO)
    return found


@pytest.fixture(scope="module")
def straight(slurm, tmp_path_factory):
    """Run two tasks on each of two nodes; return the words of that job, and its folder."""
    folder = tmp_path_factory.mktemp("straight")
    words = [TRAINING, *small_job(folder), "--device", "cpu", "--output-dir"]
    job = slurm.submit("--nodes=2 --ntasks-per-node=2 launch.sbatch", *words, folder / "run")
    assert slurm.end_of(job) == "COMPLETED", slurm.output(job)
    assert "4 ranks started by srun" in slurm.output(job)
    return words, folder / "run"


def test_one_file_starts_ranks_by_torchrun_too_and_a_preempted_job_resumes_bitwise(
    slurm, straight, tmp_path
):
    """The losses are those of tasks that srun started, and nothing took the nodes from."""
    words, folder = straight
    there = "--nodelist=node2,node3"
    job = slurm.submit(f"{there} --nodes=2 --ntasks-per-node=2 launch.sbatch --torchrun",
                       *words, tmp_path / "run", "--resume")  # fmt: skip
    slurm.wait_for(f"cat {slurm.folder}/job-{job}.out", "^step 2 ")
    urgent = slurm.submit(f"{there} --nodes=2 --exclusive --partition=urgent --wrap", "hostname")
    slurm.start_again(job)
    assert slurm.end_of(urgent) == slurm.end_of(job) == "COMPLETED", slurm.output(job)
    said = slurm.output(job)
    assert said.count("4 ranks started by torchrun") == 2
    assert re.search(r"asked to stop, saved.*queued again: preempted.*resuming from", said, re.S)
    assert largest_difference(folder, tmp_path / "run") == 0.0


def test_array_sweeps_one_strategy_with_each_of_its_tasks(slurm, tmp_path):
    """The third has none, and says so."""
    sweep = ["--world-sizes", 2, "--max-steps", 4, "--repeats", 1, "--no-reference"]
    flags = "--array=0-2 --nodes=2 --ntasks-per-node=1"
    job = slurm.submit(f"{flags} --output={tmp_path}/%a.out benchmarks/array.sbatch",
                       tmp_path / "array", "single ddp", *sweep)  # fmt: skip
    slurm.wait_for(f"squeue --noheader --jobs={job} | wc -l", "^0$")
    states = slurm.run(f"scontrol show job {job}")
    assert sorted(re.findall(r"JobState=(\w+)", states)) == ["COMPLETED", "COMPLETED", "FAILED"]
    assert "task 2, and 2 strategies: submit with --array=0-1" in (tmp_path / "2.out").read_text()
    command = [BENCH, "report", str(tmp_path / "array"), "--output-dir", str(tmp_path / "report")]
    report = run_command([sys.executable, *command], REPO, 60)
    assert re.search(r"^single .*^ddp .* ok$", report.stdout, re.M | re.S), report.stdout


def test_cancelled_while_it_saves_a_job_is_over(slurm, count):
    job = count("--fault", "hang", flags="--time=10")
    slurm.wait_for(f"cat {slurm.folder}/job-{job}.out", "rank 0: start")
    slurm.run(f"scancel --batch --signal=USR1 {job}")  # as SLURM does when time is up
    slurm.wait_for(f"cat {slurm.folder}/job-{job}.out", "rank 0: SIGUSR1 after")
    slurm.run(f"scancel {job}")
    assert slurm.end_of(job) == "CANCELLED", slurm.output(job)


def test_what_ends_a_job_and_what_queues_it_again(slurm, jobs):
    for name in ("limit", "abort", "hang"):
        slurm.start_again(jobs[name])
    on_nodes_that_live = {name: jobs[name] for name in list(jobs)[2:]}
    ended = {name: slurm.end_of(job) for name, job in on_nodes_that_live.items()}
    said = {name: slurm.output(job) for name, job in on_nodes_that_live.items()}
    assert ended == {"limit": "COMPLETED", "hang": "COMPLETED", "lesson": "COMPLETED",
                     "error": "FAILED", "abort": "COMPLETED"}, said  # fmt: skip
    saved = re.search(r"rank 0: SIGUSR1 after step (\d+)", said["limit"])[1]
    assert "queued again: its time is up\n" in said["limit"]
    assert f"rank 0: start 1 from step {saved}\n" in said["limit"]
    assert "queued again: its time is up, and it has not saved" in said["hang"]
    assert "queued again: node1: task 1: Aborted" in said["abort"]
    assert "rank 0: start 1" in said["hang"] and "rank 0: start 1" in said["abort"]
    assert "queued again" not in said["error"] + said["lesson"]
    assert "an error of its own" in said["error"]


def test_job_of_a_node_that_is_gone_goes_on_elsewhere(slurm, jobs):
    """SLURM misses it within 30 s, and until then an error of another rank ends nothing."""
    for name in ("noticed", "missed"):
        slurm.start_again(jobs[name])
        assert slurm.end_of(jobs[name]) == "COMPLETED", slurm.output(jobs[name])
        assert slurm.fact(jobs[name], "NodeList") == "node[4,6]"
        said = slurm.output(jobs[name])
        assert re.search(
            "rank 1: start 0.*(a node is gone|NODE FAILURE).*rank 1: start 1", said, re.S
        )
    assert "lost another rank" in slurm.output(jobs["noticed"])
