"""Module 01: one job in several ways, launch commands, SLURM jobs, launch files."""

import os
import random
import re
import shlex
import signal
from pathlib import Path

import psutil
import pytest
import yaml
from conftest import REPO, results_of, run_command
from helpers_01 import TRAINING, small_job, wait_for
from helpers_templates import rows_of

LAUNCHERS = "01-ddp-basics/launchers.py"
LAUNCH = "01-ddp-basics/launch_ddp.sh"
FILES = REPO / "01-ddp-basics" / "launch_files"
SET = "OMP_NUM_THREADS=1 PYTORCH_ALLOC_CONF=expandable_segments:True"
full = pytest.mark.full


def write_stand_in(folder: Path, name: str, body: str) -> None:
    """Put a command of that name into a folder for PATH."""
    (folder / name).write_text(f"#!/bin/bash\n{body}\n")
    (folder / name).chmod(0o755)


# launchers.py


def forget_the_world_size(script):
    find = script.find_variables
    alone = {"SLURM_PROCID": 0, "SLURM_NTASKS": 1, "SLURM_STEP_TASKS_PER_NODE": 1}
    script.find_variables = lambda *args: find(*args) | alone


@pytest.mark.parametrize(
    ("change", "sums", "code"),
    [(lambda script: None, [0, 3, 3], 0), (forget_the_world_size, [0, 0, 3], 1)],
)
def test_one_job_on_three_ranks(run_script, tmp_path, change, sums, code):
    """The page's command adds the ways of torchrun, on two ranks."""

    def before(script):
        script.WAYS = ("python", "as srun", "as mpirun")
        change(script)

    words = ("--nproc-per-node", 3, "--output-dir", tmp_path / "run")
    ended = run_script(LAUNCHERS, *words, environ={}, before=before)
    assert ended.codes == [code], ended.stdout + ended.stderr
    checks = results_of(tmp_path / "run")["checks"]
    assert [check["measured"] for check in checks] == sums


# launch_ddp.sh and launch.sh, which the launchers of all modules share


@pytest.mark.parametrize(
    ("argv", "prints"),
    [
        (
            "local --nproc-per-node=3 --max-steps 2",
            "torchrun --standalone --nproc-per-node=3 {script} --max-steps 2",
        ),
        (
            "multi-node --nnodes 2 --nproc-per-node 8 --rdzv-endpoint n0:29500",
            "torchrun --nnodes=2 --nproc-per-node=8 --rdzv-id=ddp_training "
            "--rdzv-backend=c10d --rdzv-endpoint=n0:29500 {script}",
        ),
        (
            "elastic --nnodes 1:4 --nproc-per-node 2 --rdzv-endpoint n0:1 "
            "--output-dir=run",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes=1:4 "
            "--nproc-per-node=2 --max-restarts=3 --rdzv-id=ddp_training "
            "--rdzv-backend=c10d --rdzv-endpoint=n0:1 {script} --resume "
            "--output-dir=run",
        ),
        (
            "slurm --nnodes 2 --nproc-per-node 8 --cpus-per-task 12 "
            "--output-dir 'runs/a b'",
            "sbatch --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=12 "
            "--job-name=ddp_training launch.sbatch {script} --resume "
            "--output-dir 'runs/a b'",
        ),
    ],
)
def test_a_launcher_prints_its_command(argv, prints):
    ended = run_command(["bash", LAUNCH, *shlex.split(argv), "--dry-run"], REPO, 60)
    assert (ended.codes, ended.stderr) == ([0], "")
    assert ended.stdout == f"{SET} {prints.format(script=TRAINING)}\n"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("", "the first argument must be local, multi-node, elastic or slurm, not ''"),
        ("local --nproc-per-node 0", "--nproc-per-node, a whole number of at least 1"),
        ("local --nnodes 2", "--nnodes and --rdzv-endpoint go with the other modes"),
        ("multi-node --nnodes 2 --rdzv-endpoint n0", "needs --rdzv-endpoint HOST:PORT"),
        ("elastic", "elastic needs --output-dir"),
        ("slurm --nnodes 2 --nproc-per-node 2", "slurm needs --output-dir"),
    ],
)
def test_a_launcher_refuses_a_wrong_command(argv, says):
    ended = run_command(["bash", LAUNCH, *argv.split()], REPO, 60)
    assert (ended.codes, ended.stdout) == ([2], "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("launch_ddp.sh: error: ") and says in line


LAUNCH_SCRIPTS = sorted(
    str(path.relative_to(REPO)) for path in REPO.glob("0*/launch_*.sh")
)


@pytest.mark.parametrize("launcher", LAUNCH_SCRIPTS)
def test_a_launcher_explains_itself_and_gives_slurm_tasks_their_cores(launcher):
    helped = run_command(["bash", launcher, "--help"], REPO, 60)
    assert (helped.codes, helped.stderr) == ([0], "") and "--dry-run " in helped.stdout
    argv = shlex.split("slurm --nnodes 2 --nproc-per-node 8 --output-dir run --dry-run")
    given = run_command(["bash", launcher, *argv, "--cpus-per-task", "12"], REPO, 60)
    cores = {"SLURM_CPUS_PER_TASK": "12"}
    allocated = run_command(["bash", launcher, *argv], REPO, 60, **cores)
    assert given.stdout == allocated.stdout and given.codes == allocated.codes == [0]
    assert given.stdout.count("--cpus-per-task=12") == 1


@full
def test_elastic_restarts_a_killed_job_which_resumes_bitwise(run_script, tmp_path):
    small = list(map(str, small_job(tmp_path)))
    whole, restarted = tmp_path / "whole", tmp_path / "restarted"
    ended = run_script(TRAINING, *small, "--output-dir", whole, world_size=2)
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    last_step = random.randint(1, 20)

    def kill_a_rank(agent):
        metrics = restarted / "metrics.jsonl"
        wait_for(
            lambda: metrics.exists() and metrics.read_text().count("\n") >= last_step
        )
        psutil.Process(agent).children()[-1].kill()

    command = ["bash", LAUNCH, "elastic", "--nproc-per-node", "2", *small]
    command += ["--output-dir", str(restarted)]
    ended = run_command(command, REPO, 400, kill_a_rank)
    said = f"killed after step {last_step}: {ended.stdout}{ended.stderr}"
    assert ended.codes == [0], said
    assert rows_of(whole) == rows_of(restarted), said


# launch.sbatch, with stand-ins for SLURM's commands


UNTIL_TIME_IS_UP = (
    'trap "echo saved; exit 0" USR1; kill -USR1 $PPID; while true; do sleep 0.1; done'
)
UNTIL_TERMINATED = (
    'trap "echo saved; exit 0" TERM; kill $PPID; (sleep 0.3; kill $$) & '
    "while true; do sleep 0.1; done"
)
ABORTED = 'echo "srun: error: gpu7: task 3: Aborted" >&2; exit 143'
PREEMPTED = {"PREEMPTED": "2026-01-01T00:00:00"}


@pytest.mark.parametrize(
    ("srun", "environ", "code", "reason"),
    [
        (UNTIL_TIME_IS_UP, {}, 0, "its time is up"),
        (UNTIL_TERMINATED, PREEMPTED, 0, "preempted"),
        (UNTIL_TERMINATED, PREEMPTED | {"STATE": "CANCELLED"}, 0, None),
        (ABORTED, {"SLURM_RESTART_COUNT": "9"}, 0, "gpu7: task 3: Aborted"),
        (ABORTED, {"SLURM_RESTART_COUNT": "10"}, 143, None),
        ("exit 3", {}, 3, None),
    ],
)
def test_a_slurm_job_is_queued_again(tmp_path, srun, environ, code, reason):
    run_file = 'while [[ $1 == --* ]]; do shift; done; bash "$@"'
    write_stand_in(tmp_path, "sbatch", run_file)
    write_stand_in(tmp_path, "srun", f'echo "srun $*"; {srun}')
    send = "kill -${1#--signal=} $(pgrep -P $PPID -f /srun)"
    write_stand_in(tmp_path, "scancel", send)
    facts = "JobState=${STATE:-RUNNING} PreemptTime=${PREEMPTED:-None}"
    show = f'if [[ $1 == show ]]; then echo "{facts}"; date -d +2min +EndTime=%FT%T; fi'
    write_stand_in(tmp_path, "scontrol", show)
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_TASKS_PER_NODE": "8(x2)",
        "SLURM_CPUS_ON_NODE": "96",
    }
    line = f"{LAUNCH} slurm --nnodes 2 --nproc-per-node 8 --output-dir run"
    command = ["bash", "-c", f'PATH="{tmp_path}:$PATH" bash {line} 2>&1']
    ended = run_command(command, REPO, 60, **slurm | environ)
    assert ended.codes == [code], ended.stdout
    step = f"srun --cpus-per-task=12 --kill-on-bad-exit=1 python {TRAINING} --resume"
    assert step in ended.stdout  # each of 8 tasks gets an eighth of the node's 96 cores
    queued = re.findall(r"launch\.sbatch: queued again: (.*)", ended.stdout)
    assert queued == ([reason] if reason else [])


# launch_files/: no cluster is needed


def read_documents(name: str) -> dict[str, dict]:
    """Return the documents of a file by their kind."""
    return {one["kind"]: one for one in yaml.safe_load_all((FILES / name).read_text())}


def test_names_and_numbers_of_the_job_agree():
    _, service, job = read_documents("job.yaml").values()
    pod = job["spec"]["template"]["spec"]
    words = " ".join(pod["containers"][0]["args"])
    name, nodes = job["metadata"]["name"], job["spec"]["completions"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert f"--master-addr={name}-0.{service['metadata']['name']} " in words
    assert pod["subdomain"] == service["metadata"]["name"]
    gpus = pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert f"--nnodes={nodes} --nproc-per-node={gpus} " in words
    grace_s = int(re.search(r"--shutdown-timeout=(\d+)", words)[1])
    assert grace_s < pod["terminationGracePeriodSeconds"]


def test_the_trainjob_starts_the_command_of_the_job():
    """Whoever changes one file has to change the other."""
    trainer = read_documents("trainjob.yaml")["TrainJob"]["spec"]["trainer"]
    pod = read_documents("job.yaml")["Job"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    by_kubeflow = ("--nnodes", "--nproc-per-node", "--node-rank", "--master")
    words = [word for word in container["args"] if not word.startswith(by_kubeflow)]
    assert trainer["args"] == words


@pytest.mark.parametrize(
    ("torchrun", "evicted", "code"),
    [
        ("save 24; exit 0", False, 0),
        ("save 20; exit 0", False, 75),  # another pod was evicted
        ("save 24; exit 3", False, 3),  # a check failed
        ("trap 'save 20; exit 1' TERM; wait_here", True, 75),
    ],
)
def test_a_pod_s_exit_code_says_whether_to_start_it_again(
    tmp_path, torchrun, evicted, code
):
    save = f'mkdir -p "{tmp_path}/out/checkpoints/step-000000$1"'
    wait = f'touch "{tmp_path}/ready"; while true; do sleep 0.05; done'
    body = f"save() {{ {save}; }}; wait_here() {{ {wait}; }}; {torchrun}"
    write_stand_in(tmp_path, "torchrun", body)

    def evict(pid: int) -> None:
        if evicted:
            wait_for((tmp_path / "ready").exists)
            os.kill(pid, signal.SIGTERM)

    script = FILES / "until_trained.sh"
    command = ["bash", "-c", f'PATH="{tmp_path}:$PATH" exec bash {script} x.py']
    variables = {"OUTPUT_DIR": str(tmp_path / "out"), "MAX_STEPS": "24"}
    ended = run_command(command, REPO, 60, evict, **variables)
    assert ended.codes == [code], ended.stderr
