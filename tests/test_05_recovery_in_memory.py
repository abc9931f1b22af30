"""Ranks that are killed get their state back from a neighbour's memory, or from disk."""

import os
import random
import signal
import time

import psutil
import pytest
import torch
from conftest import REPO, assert_one_line, results_of, run_command

from advanced_parts import recovery_in_memory as part

SCRIPT = "05-advanced/recovery_in_memory.py"
SMALL = ("--num-layers", 1, "--max-steps", 10, "--fail-at", 9)
FULL = pytest.mark.full


def few(script, sabotage=lambda script: None):
    """Leave two runs: one that loses nothing, one that loses rank 1."""
    jobs_of = part.jobs_of
    part.jobs_of = lambda *args: jobs_of(*args)[:2]
    sabotage(script)


def run(run_script, tmp_path, *flags, world_size=4, before=None):
    folder = tmp_path / "run"
    argv = (*SMALL, *flags, "--timeout", 60, "--output-dir", folder)
    ended = run_script(SCRIPT, *argv, world_size=world_size, before=before)
    return ended, results_of(folder)


def failing(content):
    return {check["name"].split(": ")[-1] for check in content["checks"] if not check["ok"]}


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=FULL)])
def test_a_lost_state_comes_back(run_script, tmp_path, world_size):
    ended, content = run(run_script, tmp_path, world_size=world_size)
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    assert not failing(content)
    metrics = content["metrics"]
    assert metrics["rank 1, copies"]["source"] == "memory"
    assert metrics["rank 1, no copies"]["source"] == "disk"
    together = metrics["ranks 0 and 1, copies"]
    assert together["source"] == "disk" and together["steps_lost"] == 8 - 5
    assert ("ranks 1 and 3, copies" in metrics) == (world_size == 4)
    assert "a state and its copy are lost together: back to the disk" in ended.stdout
    # 12 bytes for each weight of a rank's part; own and held copies of two steps.
    length = -(-metrics["sent_bytes"] // 12)
    weights = 256 * 128 * 2 + 128 + 2 * 128 + 128 * (2 * 128 + 2 * 64) + 3 * 128 * 352  # one block
    assert length == -(-weights // world_size)
    assert metrics["copies_bytes"] == 4 * 12 * length


@FULL
def test_copies_less_often_lose_more_steps(run_script, tmp_path):
    """Step 8 was the last before the loss, step 6 the last that was copied."""
    ended, content = run(run_script, tmp_path, "--copy-every", 3, before=few)
    assert ended.codes == [0] * 4, ended.stdout + ended.stderr
    assert content["metrics"]["rank 1, copies"]["steps_lost"] == 2


# sabotage, one per kind of check


def forget_the_moments(script):
    restore = script.Copies.restore

    def weights_only(copies, state):
        step = restore(copies, state)
        state[1:] = 0
        return step

    script.Copies.restore = weights_only


def send_it_twice(script):
    start = script.Copies.start

    def twice(copies, step, state):
        start(copies, step, state)
        copies.finish()
        start(copies, step, state)

    script.Copies.start = twice


def never_finish_a_copy(script):
    finish = script.Copies.finish

    def wait_only(copies):
        finish(copies)
        copies.own.clear()
        copies.held.clear()

    script.Copies.finish = wait_only


@pytest.mark.parametrize(
    ("sabotage", "check"),
    [
        (forget_the_moments, {"losses differ by"}),
        (never_finish_a_copy, {"back from memory", "steps lost", "bytes of copies on a rank"}),
        pytest.param(
            send_it_twice, {"bytes that a copy sends", "bytes of copies on a rank"}, marks=FULL
        ),
    ],
)
def test_sabotage_fails_a_check(run_script, tmp_path, sabotage, check):
    ended, content = run(
        run_script, tmp_path, world_size=2, before=lambda script: few(script, sabotage)
    )
    assert 1 in ended.codes, ended.stdout + ended.stderr
    assert failing(content) == check


# processes


@FULL
def test_a_worker_is_killed_at_any_moment(run_script, tmp_path):
    """From outside, while copies travel: the run that should lose nothing loses a worker too."""

    folder = tmp_path / "run"

    def kill(pids):
        deadline = time.monotonic() + 200
        saved = folder / "checkpoints/nothing-lost/step-00000005"
        while not saved.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        (worker,) = psutil.Process(pids[2]).children()
        time.sleep(random.uniform(0, 0.5))
        worker.kill()

    flags = ("--num-layers", 1, "--max-steps", 100, "--fail-at", 99, "--timeout", 60)
    argv = (*flags, "--output-dir", folder)
    ended = run_script(SCRIPT, *argv, world_size=4, before=few, during=kill)
    assert ended.codes == [0] * 4, ended.stdout + ended.stderr
    assert not failing(results_of(folder))


def fail_in_a_worker(script):
    def save(folder, step, state):
        if torch.distributed.get_rank() == 1:
            raise ValueError("no such thing")

    script.save = save


@pytest.mark.full
def test_an_error_of_a_worker_ends_the_run(run_script, tmp_path):
    """Its own line stands there, and no worker takes its place."""
    argv = (*SMALL, "--timeout", 60, "--output-dir", tmp_path / "run")
    ended = run_script(SCRIPT, *argv, world_size=4, before=fail_in_a_worker)
    assert 1 in ended.codes and "rank 1: ValueError: no such thing" in ended.stderr


@FULL
def test_nothing_outlives_a_run_that_is_killed(tmp_path):
    """`python X.py` starts four ranks; killed, it takes workers and the store's process along."""
    family = []

    def kill(pid):
        deadline = time.monotonic() + 200
        while len(family) < 5 and time.monotonic() < deadline:
            family[:] = psutil.Process(pid).children(recursive=True)
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)

    command = ["python", SCRIPT, "--max-steps", "100000", "--output-dir", str(tmp_path / "killed")]
    assert run_command(command, REPO, 300, during=kill).codes == [-signal.SIGKILL]
    assert len(family) == 5  # four workers, and the store
    _, alive = psutil.wait_procs(family, timeout=100)
    assert not alive


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ((), "1 rank has no neighbour: start at least 2"),
        (("--device", "cuda"), "--device cuda: this lesson is about host memory"),
        (("--fail-at", 17), "--fail-at 17: must be above --save-every 5, at most --max-steps 16"),
        (("--fail-at", 5), "--fail-at 5: must be above --save-every 5"),
        (("--copy-every", 0), "--copy-every: must be a whole number of at least 1"),
    ],
)
def test_bad_input_gets_one_line(run_script, flags, says):
    assert_one_line(run_script(SCRIPT, *flags), says, "recovery_in_memory.py")
