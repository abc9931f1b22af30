"""Module 01, launchers: one job however it is started, the launch lines, and what ends a launch."""

from __future__ import annotations

import os
import random
import re
import shlex
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from conftest import REPO, free_port, results_of, run_command
from helpers_01 import (
    TRAINING,
    largest_difference,
    small_job,
    steps_in,
    wait_for,
)

LAUNCHERS = "01-ddp-basics/launchers.py"
LAUNCH = "01-ddp-basics/launch_ddp.sh"
SBATCH = "launch.sbatch"
SET = "OMP_NUM_THREADS=1 PYTORCH_ALLOC_CONF=expandable_segments:True"
OTHERS = (
    "02-fsdp/launch_fsdp.sh",
    "03-deepspeed/launch_deepspeed.sh",
    "04-nccl-operations/launch_nccl.sh",
    "05-advanced/launch_advanced.sh",
)
full = pytest.mark.full


@pytest.fixture
def small(tmp_path):
    return [str(word) for word in small_job(tmp_path)]


def stand_in(folder: Path, name: str, body: str) -> None:
    """Put a command of that name into a folder for PATH."""
    (folder / name).write_text(f"#!/bin/bash\n{body}\n")
    (folder / name).chmod(0o755)


def wait_for_steps(folder: Path, steps: int) -> None:
    metrics = folder / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= steps, 200)


# launchers.py


def only(*ways):
    def before(script):
        script.WAYS = ways

    return before


def test_one_job_on_three_ranks_however_it_is_started(run_script, tmp_path):
    """The page runs the launchers that are installed, on two ranks."""
    ended = run_script(
        LAUNCHERS, "--nproc-per-node", 3, "--output-dir", tmp_path / "run",
        environ={}, before=only("python", "as srun does", "as mpirun does"),
    )  # fmt: skip
    assert ended.codes == [0], ended.stdout + ended.stderr
    assert [check["measured"] for check in results_of(tmp_path / "run")["checks"]] == [0, 3, 3]
    assert re.search(r"^python +1 +0 +nothing$", ended.stdout, re.M)
    assert re.search(r"^as srun does +3 +3 .* SLURM_NTASKS=3 SLURM_PROCID=2$", ended.stdout, re.M)
    assert re.search(r"^as mpirun does +3 +3 .* OMPI_COMM_WORLD_RANK=2 ", ended.stdout, re.M)


def test_a_launch_that_forms_no_group_fails_a_check(run_script):
    def each_alone(script):
        only("as srun does")(script)
        original = script.processes_of
        script.processes_of = lambda way, world_size: [
            (arguments, {**variables, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"})
            for arguments, variables in original(way, world_size)
        ]

    ended = run_script(LAUNCHERS, before=each_alone, environ={})
    assert ended.codes == [1]
    assert ended.stdout.splitlines()[-1] == "FAILED: as srun does: sum of the ranks"


# launch_ddp.sh and launch.sh, which the launchers of all modules share


@pytest.mark.parametrize(
    ("argv", "prints"),
    [
        (
            "local --nproc-per-node=3 --max-steps 2",
            "torchrun --standalone --nproc-per-node=3 {script} --max-steps 2",
        ),
        (
            "multi-node --nnodes 2 --nproc-per-node 8 --rdzv-endpoint n0:29500 --resume",
            "torchrun --nnodes=2 --nproc-per-node=8 --rdzv-id=ddp_training "
            "--rdzv-backend=c10d --rdzv-endpoint=n0:29500 {script} --resume",
        ),
        (
            "elastic --nnodes 1:4 --nproc-per-node 2 --rdzv-endpoint n0:1 --output-dir=run",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes=1:4 "
            "--nproc-per-node=2 --max-restarts=3 --rdzv-id=ddp_training --rdzv-backend=c10d "
            "--rdzv-endpoint=n0:1 {script} --resume --output-dir=run",
        ),
        (
            "slurm --nnodes 2 --nproc-per-node 8 --cpus-per-task 12 --output-dir 'runs/a b'",
            "sbatch --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=12 "
            "--job-name=ddp_training {sbatch} {script} --resume --output-dir 'runs/a b'",
        ),
    ],
)
def test_launcher_prints_its_command_and_passes_arguments_on(argv, prints):
    ended = run_command(["bash", LAUNCH, *shlex.split(argv), "--dry-run"], REPO, 60)
    assert (ended.codes, ended.stderr) == ([0], "")
    assert ended.stdout == f"{SET} {prints.format(script=TRAINING, sbatch=SBATCH)}\n"


def test_a_launcher_leaves_memory_settings_of_the_user_alone():
    own = {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}
    ended = run_command(["bash", LAUNCH, "local", "--dry-run"], REPO, 60, **own)
    assert ended.codes == [0] and "ALLOC_CONF" not in ended.stdout


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("", "the first argument must be local, multi-node, elastic or slurm, not ''"),
        ("local --nproc-per-node 0", "local needs --nproc-per-node, a whole number of at least 1, "
         "not '0'"),
        ("local --nnodes 2", "--nnodes and --rdzv-endpoint go with the other modes"),
        ("multi-node --nnodes 2 --rdzv-endpoint n0", "multi-node needs --rdzv-endpoint HOST:PORT"),
        ("elastic", "elastic needs --output-dir"),
        ("slurm --nnodes 2 --nproc-per-node 2", "slurm needs --output-dir"),
    ],
)  # fmt: skip
def test_launcher_refuses_what_it_cannot_start(argv, says):
    ended = run_command(["bash", LAUNCH, *argv.split()], REPO, 60)
    assert (ended.codes, ended.stdout) == ([2], "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("launch_ddp.sh: error: ") and says in line


@pytest.mark.parametrize("launcher", [LAUNCH, *OTHERS])
def test_every_launcher_explains_itself_and_gives_slurm_processes_their_cores(launcher):
    helped = run_command(["bash", launcher, "--help"], REPO, 60)
    assert (helped.codes, helped.stderr) == ([0], "") and "--dry-run " in helped.stdout
    for mode in ("local", "slurm"):
        assert f"  {Path(launcher).name} {mode} " in helped.stdout

    argv = shlex.split("slurm --nnodes 2 --nproc-per-node 8 --output-dir run --dry-run")
    given = run_command(["bash", launcher, *argv, "--cpus-per-task", "12"], REPO, 60)
    allocated = run_command(["bash", launcher, *argv], REPO, 60, SLURM_CPUS_PER_TASK="12")
    assert given.stdout == allocated.stdout and given.codes == allocated.codes == [0]
    assert given.stdout.count("--cpus-per-task=12") == 1, "launch.sbatch itself tells srun"


def test_a_launcher_runs_what_it_prints(tmp_path):
    """Pasted into a shell, the printed line starts the same with the same arguments."""
    for tool in ("torchrun", "deepspeed", "sbatch", "srun"):
        stand_in(tmp_path, tool, f'printf "%s\\n" {tool} "$@"')
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    for mode, more in (("local", ""), ("slurm", "--nnodes 1 --cpus-per-task 2 --output-dir run")):
        argv = ["bash", LAUNCH, mode, "--nproc-per-node", "2", *more.split()]
        argv += ["--text-file", "it's in a b", "--output-dir", "$HOME/x;y"]
        ended = run_command(["env", f"PATH={environ['PATH']}", *argv], REPO, 60)
        assert (ended.codes, ended.stderr) == ([0], "")
        line, _, started = ended.stdout.partition("\n")
        pasted = run_command(["env", f"PATH={environ['PATH']}", "bash", "-c", line], REPO, 60)
        assert pasted.stdout == started and "$HOME/x;y" in started


def test_a_launcher_says_what_is_missing(tmp_path):
    path = "PATH=/usr/bin:/bin"
    ended = run_command(["env", path, "bash", LAUNCH, "local"], REPO, 60)
    assert ended.codes == [2] and "there is no " in ended.stderr
    assert "source .venv/bin/activate" in ended.stderr

    for tool in ("sbatch", "srun"):
        stand_in(tmp_path, tool, "true")
    argv = shlex.split("slurm --nnodes 1 --nproc-per-node 1 --output-dir run")
    ended = run_command(["env", f"{path}:{tmp_path}", "bash", LAUNCH, *argv], REPO, 60)
    assert ended.codes == [0]
    assert ended.stderr.startswith("warning: without --cpus-per-task SLURM may give each process")


@full
def test_two_nodes_meet_on_loopback(tmp_path, small):
    """The line of two machines, run twice on one: each is a node, with a torchrun of its own."""
    shared = ["--nnodes", "2", "--nproc-per-node", "1"]
    shared += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", *small, "--max-steps", "3"]
    command = ["bash", str(REPO / LAUNCH), "multi-node", *shared, "--output-dir", "run"]
    with ThreadPoolExecutor() as pool:  # the same folder, as on a disk that both machines have
        nodes = [pool.submit(run_command, command, tmp_path, 400) for _ in range(2)]
    ended = [node.result() for node in nodes]
    assert [node.codes for node in ended] == [[0], [0]], ended[0].stderr + ended[1].stderr
    assert sum("\nOK: " in node.stdout for node in ended) == 1, "rank 0's node speaks"
    assert results_of(tmp_path / "run")["world_size"] == 2


@full
def test_elastic_restarts_a_killed_job_which_resumes_bitwise(run_script, tmp_path, small):
    straight = run_script(
        TRAINING, *small, "--output-dir", tmp_path / "straight", world_size=2, timeout_s=300
    )
    assert straight.codes == [0, 0], straight.stdout + straight.stderr
    folder, killed_after = tmp_path / "restarted", random.randint(1, 20)

    def kill_a_worker(agent):
        wait_for_steps(folder, killed_after)
        psutil.Process(agent).children()[-1].kill()

    command = ["bash", LAUNCH, "elastic", "--nproc-per-node", "2", *small]
    ended = run_command([*command, "--output-dir", str(folder)], REPO, 400, kill_a_worker)
    said = f"killed after step {killed_after}: {ended.stdout}{ended.stderr}"
    assert ended.codes == [0], said
    assert re.search("resuming from|no checkpoint in .* yet.*no checkpoint", ended.stdout, re.S)
    assert largest_difference(tmp_path / "straight", folder) == 0.0, said


# the end of a launch: asked to stop, or killed


def queued(tmp_path: Path, srun: str, **environ: str):
    """Submit a job with stand-ins for SLURM's commands; sbatch's says what its file asks for."""
    run_file = """while [[ $1 == --* ]]; do shift; done; sed -n 's/^#SBATCH //p' "$1"; bash "$@\""""
    stand_in(tmp_path, "sbatch", run_file)
    stand_in(tmp_path, "srun", f'echo "srun $*"; {srun}')
    tell = 'echo "scancel $*"; kill -${1#--signal=} $(pgrep -P $PPID -f /srun)'
    stand_in(tmp_path, "scancel", tell)
    facts = "JobState=${STATE:-RUNNING} PreemptTime=${PREEMPTED:-None}"
    show = f'if [[ $1 == show ]]; then echo "{facts}"; date -d +2min +EndTime=%FT%T; '
    stand_in(tmp_path, "scontrol", show + 'else echo "scontrol $*"; fi')
    slurm = {"SLURM_JOB_ID": "7", "SLURM_TASKS_PER_NODE": "8(x2)", "SLURM_CPUS_ON_NODE": "96"}
    line = shlex.split(f"{LAUNCH} slurm --nnodes 2 --nproc-per-node 8 --output-dir run")
    command = ["bash", "-c", f'PATH="{tmp_path}:$PATH" bash {shlex.join(line)} 2>&1']
    ended = run_command(command, REPO, 60, **slurm | environ)
    return ended.codes, ended.stdout.split(f"{DIRECTIVES}\n")[-1].splitlines()


DIRECTIVES = """--time=24:00:00
--signal=B:USR1@120
--requeue
--open-mode=append
--output=slurm-%j.out"""
ARGUMENTS = "--resume --output-dir run"


def test_slurm_job_saves_and_queues_again_when_time_is_up(tmp_path):
    """srun's stand-in tells the batch shell that time is up, and runs until it is told itself."""
    until_signal = (
        'trap "echo saved; exit 0" USR1; kill -USR1 $PPID; while true; do sleep 0.1; done'
    )
    codes, said = queued(tmp_path, until_signal, SLURM_CPUS_PER_TASK="4")
    assert (codes, said) == (
        [0],
        [
            f"srun --cpus-per-task=4 --kill-on-bad-exit=1 python {TRAINING} {ARGUMENTS}",
            "scancel --signal=USR1 7",
            "saved",
            "launch.sbatch: queued again: its time is up",
            "scontrol requeue 7",
        ],
    )


@pytest.mark.parametrize("state", ["RUNNING", "CANCELLED"])
def test_slurm_job_that_is_preempted_is_queued_again_and_a_cancelled_one_is_not(tmp_path, state):
    """Either gets SIGTERM, the tasks as well as this shell; SLURM itself knows the difference."""
    goes_on = "while true; do sleep 0.1; done"
    until_signal = f'trap "echo saved; exit 0" TERM; kill $PPID; (sleep 0.3; kill $$) & {goes_on}'
    when = "2026-01-01T00:00:00"
    codes, said = queued(tmp_path, until_signal, STATE=state, PREEMPTED=when)
    again = ["launch.sbatch: queued again: preempted", "scontrol requeue 7"]
    assert (codes, said[1:]) == ([0], ["saved"] + again * (state == "RUNNING"))


def test_slurm_job_that_ends_by_itself_is_not_queued_again(tmp_path):
    """Without --cpus-per-task, each of 8 processes gets an eighth of the node's 96 cores."""
    codes, said = queued(tmp_path, "exit 3")
    step = f"srun --cpus-per-task=12 --kill-on-bad-exit=1 python {TRAINING} {ARGUMENTS}"
    assert (codes, said) == ([3], [step])


@pytest.mark.parametrize("restarts, again", [(9, True), (10, False)])
def test_slurm_job_that_a_signal_ended_is_queued_again_ten_times(tmp_path, restarts, again):
    aborted = 'echo "srun: error: gpu7: task 3: Aborted" >&2; exit 143'
    codes, said = queued(tmp_path, aborted, SLURM_RESTART_COUNT=str(restarts))
    line = "launch.sbatch: queued again: gpu7: task 3: Aborted"
    assert codes == [0 if again else 143] and (line in said) == again, said


def command_of(folder: Path, small: list[str], *options: str) -> list[str]:
    """Return a run under torchrun that does not end by itself."""
    torchrun = ["torchrun", "--standalone", "--nproc-per-node=2", *options]
    job = [str(REPO / TRAINING), *small, "--max-steps", "1000000", "--output-dir", str(folder)]
    return [*torchrun, *job]


@full
def test_torchrun_passes_a_signal_on_that_it_is_told_to(tmp_path, small):
    folder = tmp_path / "run"

    def stop_torchrun(agent):
        wait_for_steps(folder, 3)
        os.kill(agent, signal.SIGUSR1)

    handled = "--signals-to-handle=SIGTERM,SIGUSR1"
    ended = run_command(command_of(folder, small, handled), tmp_path, 400, stop_torchrun)
    assert re.search(r"^stopped by a signal after step \d+$", ended.stdout, re.M), ended.stderr
    assert ended.codes == [1], "torchrun itself does not end with 0"
    newest = max((folder / "checkpoints").iterdir()).name
    assert int(newest.removeprefix("step-")) == max(steps_in(folder))
