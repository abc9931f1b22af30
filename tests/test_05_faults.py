"""Module 05, faults: a real elastic job is broken in each way, and loses nothing that was saved."""

from __future__ import annotations

import functools
import json
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import REPO, assert_one_line, load_script, results_of, run_command

LESSON = "05-advanced/faults.py"
RECORD = REPO / "05-advanced/recorded/faults.json"
faults = load_script(LESSON)
full = pytest.mark.full

# What must be printed, after the fault and before the job trains again. NODE1 is its name.
SAYS = {
    "worker-killed": r"no word from rank 1 \(node1\); lost contact with another rank"
                     r"|node1 torchrun: failed \(exitcode: -9\)",
    "out-of-memory": r"rank 1 \(node1\): RuntimeError: .*can't allocate memory",
    "nan": r"stopped: in step \d+ the loss is nan on rank 1 \(node1\) of 2",
    "disk-full": r"error: cannot write the checkpoint .*\(node0\): No space left on device",
    "checkpoint-flipped": r"skipped .*step-\d+: truncated or altered \(state.pt does not match",
    "checkpoint-cut": r"skipped .*step-\d+: truncated or altered \(state.pt does not match",
    "worker-stopped": r"no word from rank 1 \(node1\); lost contact .* \(Timed out\)",
    "sigterm": r"torchrun: Received 15 death signal",
    "sigusr1": r"torchrun: Received 10 death signal",
    "agent-killed": r"^$",  # nothing at all: the rank trains on, and holds its launcher's output
    "rendezvous-killed": r"node1 .*RendezvousConnectionError",
    "node-killed": r"no word from rank 1 \(node1\); lost contact with another rank",
    # Of rank 0 on either node: whichever came first.
    "other-version": r"error: torch (2.9.0, \S+ \S+ on node1, but torch .* on node0|"
                     r".* on node0, but torch 2.9.0, \S+ \S+ on node1), rank 0's: "
                     r"install the same on all machines",
    "node-back": r"node0 torchrun: Sending closing signal SIGTERM",
    "clock-wrong": r"node1 torchrun: failed \(exitcode: -9\)",
    "weight-flipped": r"stopped: after step \d+ rank 3 \(node1\) of 4 holds other weights than the",
}  # fmt: skip
LOST = {"sigterm": 0, "sigusr1": 0, "agent-killed": 0, "node-back": 0, "other-version": 0}
MOST_LOST = {"checkpoint-flipped": 2, "checkpoint-cut": 2}  # checkpoints back, where it is not one


@functools.cache
def undisturbed():
    with tempfile.TemporaryDirectory() as folder:
        return faults.undisturbed(Path(folder))


@functools.cache
def ended(job):
    """Break a job by all of its faults, once for all tests of them."""
    with tempfile.TemporaryDirectory() as folder:
        rows, losses, left = faults.run_job(job, faults.part.Loopback, Path(folder))
    return {row.name: row for row in rows}, losses, left


def on_one_worker(job):
    return [full, pytest.mark.xdist_group(f"faults-{job}")]


HERE = {name: job for name, job in faults.JOBS.items() if not job.needs_virtual}
ROWS = [
    pytest.param(name, fault.name, marks=on_one_worker(name), id=fault.name)
    for name, job in HERE.items()
    for fault in job.faults
]


@pytest.mark.parametrize(("job", "fault"), ROWS)
def test_a_job_survives_a_fault_and_says_who_broke(job, fault):
    rows, losses, _ = ended(job)
    row = rows[fault]
    said = "\n".join(f"{node} {text}" for node, _, text in row.lines)
    assert re.search(SAYS[fault], said), said
    assert row.saved_and_lost == 0
    # On a busy machine it may come while the next checkpoint is being written.
    most = faults.SAVE_EVERY * MOST_LOST.get(fault, 1)
    assert 0 <= row.lost_steps <= LOST.get(fault, most), row
    limit = 0 if faults.JOBS[job].same_ranks else faults.ROUNDING
    assert faults.difference(losses, undisturbed()) <= limit


@full
@pytest.mark.xdist_group("faults-cut")
def test_a_node_that_is_cut_off_is_named_and_left_out(tmp_path):
    """On virtual_cluster.py: the kernel of no node says anything, only its silence does."""
    argv = ["--nodes", "virtual", "--only", "link-cut", "--output-dir", str(tmp_path / "run")]
    ended = run_command(["python", str(REPO / LESSON), *argv], tmp_path, 300)
    if ended.codes == [2] and "virtual_cluster.py up" in ended.stderr:
        pytest.skip(ended.stderr)
    assert ended.codes == [0], ended.stdout + ended.stderr
    (row,) = results_of(tmp_path / "run")["metrics"]["rows"]
    assert re.search(r"no word from rank 1 \(node1\); .*Timed out", row["named"])
    assert 0 <= row["lost_steps"] <= faults.SAVE_EVERY, row  # less where the cut is not late


@full
@pytest.mark.xdist_group("faults-agent")
def test_a_launcher_waits_long_for_one_that_was_killed():
    assert ended("agent")[2] == ["node0"]


@full
@pytest.mark.xdist_group("faults-agent")
def test_a_master_that_does_not_answer_is_named_with_the_time(tmp_path):
    row = faults.unreachable(faults.part.Loopback, tmp_path)
    said = row.lines[0][2]
    assert re.search(r"not all 2 ranks met at 127.0.0.1:\d+ within 4 s: was each of them", said)


# the table


def test_each_fault_of_the_table_has_a_name_and_is_recorded():
    assert len(set(faults.NAMES)) == len(faults.NAMES)
    assert set(SAYS) == {param.values[1] for param in ROWS}
    record = json.loads(RECORD.read_text())
    rows = [faults.Row(**row) for row in record["rows"]]
    assert [row.name for row in rows] == faults.NAMES
    assert faults.table(rows) == record["output"], "the table is made of the rows"
    assert not any(row.saved_and_lost for row in rows)
    page = (REPO / "05-advanced/faults.md").read_text()
    for row in rows:
        assert f"`{row.name}`" in page, f"the page explains {row.name}"


LOST_CONTACT = "ddp_training.py: rank 0 (node0): no word from rank 1 (node1); lost contact"


@pytest.mark.parametrize(
    ("lines", "names"),
    [
        ([("node0", 1.0, LOST_CONTACT)], LOST_CONTACT),
        ([("node1", 0.1, "torchrun: failed (exitcode: -9)")], "node1: torchrun: failed (exitcode"),
        ([("node0", 0.1, "torchrun: failed (exitcode: 1)")], ""),
        ([("node0", 0.1, "ddp_training.py: rank 0 (node0): lost contact")], ""),
        ([("node0", 0.1, "lost contact with another rank at 10.77.0.2 (C")], "lost contact with"),
        ([("node0", 0.1, "lost contact with another rank at 10.77.0.20 (C")], ""),
    ],
)
def test_a_line_names_a_node_only_if_it_does(lines, names):
    nodes = SimpleNamespace(address=lambda name: "10.77.0.2")
    named = faults.naming(lines, "node1", SimpleNamespace(nodes=nodes))
    assert named.startswith(names) and bool(named) == bool(names)


def test_a_step_that_is_missing_is_a_difference():
    assert faults.difference({1: 2.0, 2: 1.5}, {1: 2.0}) == float("inf")
    assert faults.difference({1: 2.0, 2: 1.5}, {1: 2.0, 2: 1.75}) == 0.25


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--only", "meteor"], "--only: invalid choice: 'meteor'"),
        (["--only", "link-cut"], "--only link-cut needs --nodes virtual"),
        (["--nodes", "real"], "--nodes: invalid choice: 'real'"),
    ],
)
def test_bad_input_is_one_line(run_script, argv, says):
    assert_one_line(run_script(LESSON, *argv, environ={}), says, "faults.py")
