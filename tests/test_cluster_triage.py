"""triage.py: who failed first in logs, who is to blame in a job that hangs."""

import argparse
import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import psutil
import pytest
from conftest import MARK, REPO, assert_one_line, load_script
from helpers_01 import wait_for
from helpers_triage import BLANK

from cluster_parts import cause, live, logs, notes
from dist_common import cli

SCRIPT = "cluster/triage.py"
CASES = tomllib.loads((REPO / "tests/logs/expected.toml").read_text())
triage = load_script(SCRIPT)
full = pytest.mark.full


# Logs


@pytest.mark.parametrize("name", CASES)
def test_the_first_cause_of_a_case(run_script, name):
    expected = CASES[name]
    ended = run_script(SCRIPT, REPO / "tests/logs" / name, environ={})
    assert ended.codes == [1], ended.stdout + ended.stderr
    first = ended.stdout.splitlines()[0]
    assert first.startswith("first cause: ")
    assert expected["cause"] in first, ended.stdout
    assert expected.get("words", "").lower() in first.lower()
    for innocent in expected.get("not", ()):
        assert innocent not in first


LOST = """Traceback (most recent call last):
  File "train.py", line 7, in step
    dist.all_reduce(t)
  File "/usr/site-packages/torch/distributed/distributed_c10d.py", line 9, in all_reduce
    work.wait()
RuntimeError: [/pytorch/gloo/pair.cc:561] Connection closed by peer [10.0.0.2]:9482
"""
BAD_BATCH = """Traceback (most recent call last):
  File "train.py", line 12, in load
    raise KeyError("image")
KeyError: 'image'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "train.py", line 20, in step
    batch = load()
RuntimeError: batch 7 cannot be read
"""
RESET = """Traceback (most recent call last):
  File "train.py", line 12, in load
    socket.recv(4)
ConnectionResetError: [Errno 104] Connection reset by peer
"""
DIED = (
    "E1126 12:00:03.0 9 torch/distributed/elastic/multiprocessing/api.py:1002] failed "
    "(exitcode: -9) local_rank: 1 (pid: 12) of binary: python\n"
    "  rank      : 3 (local_rank: 1)\n"
)
RECORDED = json.dumps({"message": {"message": "KeyError: 'image'", "extraInfo": {}}})
AT = "[rank{}]:[E1126 12:00:0{}.0 ProcessGroupNCCL.cpp:688] [Rank {}] "
TIMEOUT = "Watchdog caught collective operation timeout: x"


def torchrun(node, local_rank, file="stderr.log"):
    return f"{node}/job/attempt_0/{local_rank}/{file}"


@pytest.mark.parametrize(
    ("files", "who", "says"),
    [
        # The one that lost another wrote first.
        (
            {torchrun("a", 0): LOST, torchrun("b", 1): f"[rank3]: {BAD_BATCH}"},
            "rank 3 on b",
            "KeyError: 'image'",
        ),
        ({"slurm-9-0.out": LOST, "slurm-9-4.out": RESET}, "rank 4", "Connection reset"),
        # Killed ranks write nothing: a launcher says it.
        (
            {torchrun("a", 1): "step 2\n", "a/torchrun.err": DIED},
            "rank 3 on a",
            "SIGKILL",
        ),
        ({"job.out": "srun: error: gpu7: task 3: Killed"}, "task 3 on gpu7", "Killed"),
        ({torchrun("a", 0, "error.json"): RECORDED}, "local rank 0 on a", "KeyError"),
        (
            {"x.log": "train.py: rank 2: ValueError: no (train.py:3)"},
            "x.log",
            "ValueError",
        ),
        # srun --label, a host name, a time before PyTorch's own prefix.
        ({"x.out": f"0: {TIMEOUT}\n1: ValueError: no\n"}, "rank 1", "ValueError"),
        ({"x.log": f"n1: {AT.format(5, 1, 5)}CUDA error: bad"}, "rank 5 on n1", "CUDA"),
        ({"x.log": "2026-11-26T12:00:01Z [rank5]: KeyError: 1"}, "rank 5", "KeyError"),
        (
            {"x.log": "[E ProcessGroupNCCL.cpp:9] [Rank 2] CUDA error: x"},
            "rank 2",
            "CUDA",
        ),
        # Nobody: the same failure on all ranks, or all lost somebody.
        (
            {"x.log": "".join(f"[rank{r}]: OSError: no disk\n" for r in (0, 1))},
            "nobody",
            "alike",
        ),
        ({"a.log": LOST, "b.log": LOST}, "nobody", "lost another rank"),
        # Of two errors the earlier one.
        (
            {
                "x.log": AT.format(1, 5, 1)
                + "CUDA error: a\n"
                + AT.format(2, 3, 2)
                + "CUDA error: b"
            },
            "rank 2",
            "CUDA error: b",
        ),
    ],
)
def test_who_failed_first(tmp_path, files, who, says):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    first_cause = cause.name_cause(logs.read_logs([tmp_path]))
    assert first_cause.who.startswith(who), first_cause
    assert says in first_cause.reason, first_cause


def test_equal_lines_are_folded_and_a_silent_rank_is_shown(tmp_path, capsys):
    lines = [f"{AT.format(rank, 1, rank)}{TIMEOUT}\n" for rank in range(63)]
    (tmp_path / "job.log").write_text("".join(lines) + "[rank63]: step 4\n")
    job_logs = logs.read_logs([tmp_path])
    cause.show(cause.name_cause(job_logs), job_logs)
    out = capsys.readouterr().out
    assert out.count("Watchdog") == 1 and "(63 lines)" in out
    assert "no error from rank 63; its last line: step 4" in out


@pytest.mark.parametrize(
    ("text", "clock", "about"),
    [
        ("[E304 17:40:34.25 x.cpp:1] CUDA error", "04 Mar 17:40:34", "at"),
        (
            "[2026-11-26 12:00:01] h:1:2 [0] NCCL WARN Call to bind failed",
            "26 Nov 12:00:01",
            "at",
        ),
        ("2026-11-26 12:00:01,5 ok\nKeyError: 1", "26 Nov 12:00:01", "after"),
        ("KeyError: 1", "27 Nov 09:00:00", "by"),  # the file's last change
        ("W1226 12:00:01.0 9 x.py:1] KeyError: 1", "26 Dec 12:00:01", "at"),
    ],
)
def test_when_an_error_was_written(tmp_path, text, clock, about):
    file = tmp_path / "x.log"
    file.write_text(text)
    changed = time.mktime((2026, 11, 27, 9, 0, 0, 0, 0, -1))
    os.utime(file, (changed, changed))
    (event,) = logs.read_logs([file]).events
    assert cause.describe_time(event) == f"{about} {clock}"
    assert event.line.time <= changed


# Jobs that run


@pytest.fixture(scope="module")
def starter():
    """A process that has imported torch, and starts jobs."""
    if (
        live.shutil.which("py-spy", path=f"{Path(sys.executable).parent}:{os.defpath}")
        is None
    ):
        pytest.skip("needs py-spy")
    process = subprocess.Popen(
        [sys.executable, str(REPO / "tests/helpers_triage.py")],
        env={name: value for name, value in os.environ.items() if name != MARK} | BLANK,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def running(starter, folder, kind, ranks, record=False):
    """Start a job, wait for its ranks; yield its launcher. End it afterwards."""
    folder.mkdir()
    if record:
        (folder / "record").touch()
    starter.stdin.write(f"{kind} {ranks} {folder}\n")
    starter.stdin.flush()
    launcher = psutil.Process(int(starter.stdout.readline()))
    try:
        wait_for(lambda: len([*folder.glob("ready-*")]) == ranks, 300)
        yield launcher
    finally:
        for one in [*launcher.children(recursive=True), launcher]:
            with contextlib.suppress(psutil.Error):
                one.kill()


def verdict(launcher, folder, seconds=1.0):
    recorded = folder / "notes"
    args = argparse.Namespace(
        pid=launcher.pid,
        notes=str(recorded) if recorded.exists() else None,
        seconds=seconds,
    )
    return triage.judge(triage.job_of([triage.read_node(args)]))


HEALTHY = ("counts_iterations", "waits_for_a_slow_rank", "counts_nothing")


@full
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", HEALTHY)
def test_a_healthy_job_is_never_accused(starter, tmp_path, kind, ranks):
    with running(starter, tmp_path / "job", kind, ranks) as launcher:
        for _ in range(3):
            diagnosis = verdict(launcher, tmp_path / "job")
            assert (
                diagnosis.kind in ("training", "cannot tell") and not diagnosis.ranks
            ), diagnosis


@full
def test_a_job_that_was_stopped_and_continues_is_healthy(starter, tmp_path):
    with running(starter, tmp_path / "job", HEALTHY[0], 2) as launcher:
        rank = launcher.children()[1]
        rank.send_signal(signal.SIGSTOP)
        diagnosis = verdict(launcher, tmp_path / "job")
        assert (diagnosis.kind, diagnosis.ranks) == ("stopped", {1})
        rank.send_signal(signal.SIGCONT)
        diagnosis = verdict(launcher, tmp_path / "job")
        assert (diagnosis.kind, diagnosis.ranks) == ("training", set())


@full
@pytest.mark.parametrize(
    ("kind", "record", "verdict_kind", "named"),
    [
        ("a_rank_sleeps", False, "elsewhere", {1}),
        ("a_rank_computes", False, "cannot tell", set()),
        ("a_rank_skips_a_barrier", False, "calls", set()),
        ("a_rank_skips_a_barrier", True, "calls", {1}),
        ("groups_are_made_in_another_order", True, "calls", {0}),
        ("a_group_is_called_in_another_order", True, "calls", set()),
        ("a_message_is_missing", True, "calls", {1}),
        ("a_worker_reads_for_ever", False, "loader", {2}),
    ],
)
def test_who_is_to_blame(starter, tmp_path, kind, record, verdict_kind, named):
    folder = tmp_path / "job"
    with running(starter, folder, kind, 3, record) as launcher:
        deadline = time.monotonic() + 60
        diagnosis = None
        while time.monotonic() < deadline:  # until the fault has spread
            diagnosis = verdict(launcher, folder)
            if diagnosis.kind == verdict_kind:
                break
        assert (diagnosis.kind, diagnosis.ranks) == (verdict_kind, named), diagnosis


@full
def test_what_a_node_knows_is_saved_and_loaded(starter, tmp_path, run_script):
    shared = tmp_path / "shared"
    with running(starter, tmp_path / "job", "a_rank_sleeps", 3) as launcher:
        words = ("--pid", launcher.pid, "--seconds", 1, "--save", shared)
        saved = run_script(SCRIPT, *words, environ={})
        assert saved.codes == [0] and not saved.stdout, saved.stderr
    loaded = run_script(SCRIPT, "--load", shared, "--stacks", environ={})
    assert loaded.codes == [1], loaded.stdout + loaded.stderr
    assert "verdict: elsewhere: rank 1\n" in loaded.stdout
    assert "  a_rank_sleeps, helpers_triage.py:" in loaded.stdout


# Made-up processes: no machine of the tests has these


def a_process(rank, role="rank", snapshots=({}, {}), **other):
    known = {
        "pid": 100 + rank,
        "parent": 1,
        "world_size": 4,
        "local_size": 2,
        "node": f"node{rank // 2}",
        "job": ["one"],
        "rendezvous": "node0:29500",
    }
    snapshots = [
        live.Snapshot(**{"state": "sleeping"} | values) for values in snapshots
    ]
    return live.Process(role=role, rank=rank, snapshots=snapshots, **known | other)


def a_job(changes=None, **other):
    ranks = [a_process(rank, **changes.get(rank, {})) for rank in range(4)]
    return triage.ObservedJob([one for one in ranks if one.pid], 2.0, **other)


WAITS = {
    "stack": [["x/distributed_c10d.py", "all_reduce", 9]],
    "call": "all_reduce",
}
COUNTS = ({"values": {"f: i": 1}}, {"values": {"f: i": 2}})
WRITES = ({"written": {"a.log": 1}}, {"written": {"a.log": 2}})
STUCK = ({"unsent": {"10.0.0.1": 9}}, {"unsent": {"10.0.0.1": 9}})
HOMES = {rank: {"addresses": [f"10.0.0.{rank // 2}"]} for rank in range(4)}
PORT = {"rendezvous": "node0:29501"}


@pytest.mark.parametrize(
    ("job", "kind", "ranks", "says"),
    [
        (a_job({3: PORT}), "port", {3}, "rank 3: node0:29501"),
        (a_job({2: PORT, 3: PORT}), "port", set(), "differ"),
        (
            a_job({}, kernel={"node1": ["NVRM: Xid 79"]}),
            "hardware",
            {2, 3},
            "node1: NVRM",
        ),
        (
            a_job({1: {"snapshots": [{"state": "disk-sleep"}] * 2}}),
            "disk",
            {1},
            "disk-sleep",
        ),
        (a_job({2: {"pid": 0}}), "ended", {2}, "started 2 ranks, 1 are there"),
        (
            a_job(HOMES | {0: {"snapshots": STUCK}}),
            "network",
            set(),
            "or the link between",
        ),
        (
            a_job({0: {"snapshots": [WAITS] * 2, "on_gpu": True}}),
            "cannot tell",
            set(),
            "on NCCL",
        ),
        (
            a_job({0: {"snapshots": COUNTS}}),
            "training",
            set(),
            "f: i grew from 1 to 2",
        ),
        (
            a_job({0: {"snapshots": WRITES}}),
            "training",
            set(),
            "a.log grew",
        ),
        (
            a_job({0: {"snapshots": [{"unread": "denied"}] * 2}}),
            "cannot tell",
            set(),
            "denied",
        ),
    ],
)
def test_each_kind_of_evidence(job, kind, ranks, says):
    diagnosis = triage.judge(job)
    assert (diagnosis.kind, diagnosis.ranks) == (kind, ranks), diagnosis
    assert says in diagnosis.reason, diagnosis


def test_an_address_is_read_as_the_kernel_writes_it():
    assert live.read_address("0100007F:1F90") == "127.0.0.1"
    assert live.read_address("0000000000000000FFFF000002004D0A:8D18") == "10.77.0.2"


def test_of_two_jobs_one_has_to_be_named():
    other = a_process(0, job=["another"], parent=2)
    with pytest.raises(cli.UsageError, match="name one by --pid, of 1, 2"):
        live.select([a_process(0), other], None)


# Notes


def run_of(*calls, **other):
    return [notes.Notes([*made], **other) for made in calls]


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (run_of("aaaa", "aaa", "aaaa"), {1}),
        (run_of("aaaa", "aaa"), set()),  # which of the two is right?
        (run_of("a", "a", "b"), {2}),
        (run_of("a", "b"), set()),
    ],
)
def test_notes_tell_who_differs(made, named):
    assert notes.judge(made).ranks == named


def test_a_script_is_recorded_and_its_notes_compared(run_script, tmp_path):
    recorded = tmp_path / "notes"
    script = REPO / "04-nccl-operations/failures/leaves-early/broken.py"
    ran = run_script(SCRIPT, "--record", recorded, script, world_size=2)
    assert sorted(ran.codes) == [0, 1], ran.stderr
    compared = run_script(SCRIPT, "--notes", recorded, environ={})
    assert compared.codes == [1], compared.stderr
    assert compared.stdout.splitlines() == [
        "rank 0: 4 calls, the last one all_reduce [1] Float",
        "rank 1: 3 calls, the last one all_reduce [1] Float",
        "one calls too often, or too seldom: rank 0: 4 calls; rank 1: 3 calls",
    ]
    again = run_script(SCRIPT, "--record", recorded, script, environ={})
    assert_one_line(again, "rank-0.trace is of an earlier job", "triage.py")
    (recorded / "rank-0.trace").unlink()
    compared = run_script(SCRIPT, "--notes", recorded, environ={})
    assert "no file of rank 0, which died or wrote it elsewhere" in compared.stdout


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        (
            "different-collectives",
            "call 1 differs: rank 0: all_reduce [1] Float; rank 1: broadcast",
        ),
        ("leaves-early", "no file of rank 1, which died or wrote it elsewhere"),
    ],
)
def test_dumps_that_two_ranks_wrote_on_nccl(run_script, tmp_path, failure, says):
    """NCCL 2.30.7, torch 2.11.0: each rank wrote its dump when the watchdog asked."""
    dumps = json.loads((REPO / "tests/nccl_dumps.json").read_text())[failure]
    for rank, dump in dumps.items():
        (tmp_path / f"trace_{rank}").write_bytes(pickle.dumps(dump))
    compared = run_script(SCRIPT, "--notes", tmp_path, environ={})
    verdict_line = compared.stdout.splitlines()[-1]
    assert verdict_line.startswith(says), compared.stdout + compared.stderr


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--pid", "4194305"), "no rank runs here"),  # above all that Linux gives
        (("--load", "nowhere"), "no node has written to nowhere"),
        (("nowhere.log",), "there is no nowhere.log"),
        (("--notes", "nowhere"), "there is no rank-N.trace in nowhere"),
        (("--record", "notes"), "--record needs a folder for the notes, then a script"),
    ],
)
def test_wrong_usage_is_one_line(run_script, argv, says):
    assert_one_line(run_script(SCRIPT, *argv, environ={}), says, "triage.py")
