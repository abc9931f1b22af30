"""Module 04: each failure breaks as its case.toml says, is found from outside, and is cured.

`python tests/test_04_failure_gallery.py` writes the rows of all case.toml into failures/README.md.
"""

import argparse
import ast
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import psutil
import pytest
import torch
from conftest import REPO, assert_one_line, load_script, results_of, run_command
from helpers_01 import wait_for
from helpers_04 import clock, first_is_quick, full
from torch.distributed.flight_recorder import fr_trace

from dist_common.lab import links
from dist_common.lab.ranks import Rank
from nccl_parts import failure_gallery as part
from nccl_parts import recorder, verdicts, waits

GALLERY = "04-nccl-operations/failure_gallery.py"
FAILURES = REPO / "04-nccl-operations/failures"
PAGE = FAILURES / "README.md"
gallery = load_script(GALLERY)
load, NAMES = gallery.load, gallery.NAMES
# One for each tool that needs no timeout: with all their runs they take a second or two.
QUICK = {
    "different-order", "exception-on-one-rank", "leaves-early", "nan-on-one-rank",
    "read-before-wait", "set-epoch-forgotten",
}  # fmt: skip
CLOCKED = {"rank-slow", "timeout-too-short"}  # what finds them compares times
needs_py_spy = pytest.mark.skipif(part.py_spy() is None, reason="needs py-spy: pip install py-spy")
needs_namespaces = pytest.mark.skipif(
    not part.may_enter(), reason="needs root on Linux, for namespaces of its own"
)


def marked(name, *values, quick=True):
    """Return a parameter with the marks of its failure."""
    marks = [] if quick and name in QUICK else [full]
    marks += [clock] * (name in CLOCKED)
    marks += [needs_namespaces] * bool({"shm_mib", "host"} & set(load(name).limits))
    marks += [needs_py_spy] * (load(name).tool == "stacks")
    return pytest.param(name, *values, marks=marks)


def play(run_script, tmp_path, *argv, before=None):
    folder = tmp_path / "run"
    ended = run_script(GALLERY, *argv, "--output-dir", folder, environ={}, before=before)
    return ended, results_of(folder) if folder.exists() else None


# Each failure, on two ranks and, broken on another one, on three.


@pytest.mark.parametrize("name", [marked(name) for name in NAMES])
def test_a_failure_breaks_is_found_and_cured(run_script, tmp_path, name):
    ended, results = play(run_script, tmp_path, name)
    assert ended.codes == [0], ended.stdout + ended.stderr
    assert ended.stderr == ""
    assert len(results["checks"]) == (9 if load(name).message else 7)
    if name == "different-order":  # of two ranks that differ none is named
        assert "compare them" in ended.stdout


def moved():
    """Return each failure on three ranks, broken on another one than broken.py says."""
    for name in NAMES:
        failure = load(name)
        culprit = failure.culprit()
        if failure.fixed is not None or culprit is None:
            yield marked(name, None, quick=False)
        else:
            another = 2 if failure.lowest or not culprit else 0
            yield marked(name, another, quick=name == "exception-on-one-rank")


@pytest.mark.parametrize(("name", "culprit"), list(moved()))
def test_a_failure_is_found_on_another_rank_too(run_script, tmp_path, name, culprit):
    where = ("--ranks", 4 if name == "world-size-mismatch" else 3)
    where += () if culprit is None else ("--culprit", culprit)
    ended, results = play(run_script, tmp_path, name, *where)
    assert ended.codes == [0], ended.stdout + ended.stderr
    sure = [c for c in results["checks"] if c["name"] == "found: ranks named rightly"]
    wanted = {"the rank": 1, "the odd one": 1, "the others": 2, "all": 3, "none": 0}[
        load(name).names
    ]
    assert sure[0]["expected"] == wanted


@full
@pytest.mark.parametrize(
    ("name", "tool", "says"),
    [
        ("different-order", "recorder", "2 calls, the same on all ranks"),
        ("different-order", "detail", "DETAIL says nothing"),
        ("rank-hangs", "logs", "rank 1: says nothing, still runs"),
        ("rank-hangs", "recorder", "rank 0 made call 1; rank 1 ended with call 0"),
        ("validation-on-rank-0", "stacks", "_broadcast_coalesced; rank 1: <module>"),
        pytest.param(
            "hostname-loopback", "stacks", "in init_process_group", marks=needs_namespaces
        ),
        pytest.param(
            "hostname-loopback", "heartbeat", "no new line and no CPU time", marks=needs_namespaces
        ),
    ],
)
def test_another_tool_says_what_the_page_says(run_script, tmp_path, name, tool, says):
    ended, _ = play(run_script, tmp_path, name, "--tool", tool)
    assert says in ended.stdout, ended.stdout


ALL = ["exception-on-one-rank", "leaves-early", "nan-on-one-rank", "read-before-wait",
       "rank-hangs", "different-collectives"]  # fmt: skip


@pytest.mark.parametrize("name", [marked(name, quick=name == ALL[0]) for name in ALL])
def test_a_run_that_tries_all_tools_names_the_same_rank(run_script, tmp_path, name):
    """Without case.toml's word on which tool to use."""
    ended, results = play(run_script, tmp_path, name, "--tool", "all")
    assert ended.codes == [0], ended.stdout + ended.stderr
    named = [c for c in results["checks"] if c["name"].startswith("found: ranks named")]
    assert len(named) == 2 and all(check["ok"] for check in named)
    assert re.search(r"found: .*\n  logs: .*\n  recorder: .*\n  stacks: ", ended.stdout)


# Tools are judged on outputs of their own, without a run.


def ranks_that_say(*texts, codes=None):
    codes = codes or [1] * len(texts)
    return [Rank(code, 0.1, "", text, None) for code, text in zip(codes, texts, strict=True)]


LOST = "RuntimeError: Connection closed by peer [127.0.0.1]:1234"


@pytest.mark.parametrize(
    ("texts", "codes", "named"),
    [
        ((LOST, "ValueError: bad", LOST), None, {1}),
        ((LOST, "", LOST), (1, -9, 1), {1}),
        ((LOST, "", LOST), (1, -15, 1), {1}),
        ((LOST, "", LOST), (1, 0, 1), {1}),
        ((LOST, LOST), None, set()),
        # Another library's connection, in the words of one that was lost to a rank.
        ((LOST, "ConnectionResetError: [Errno 104] Connection reset by peer", LOST), None, {1}),
        ((LOST, "botocore.exceptions.ReadTimeoutError: timed out waiting for s3", LOST), None, {1}),
        ((LOST, "torch.distributed.DistNetworkError: Connection reset by peer"), None, set()),
        (("ValueError: bad", "ValueError: bad"), None, set()),
        (("2/4 clients joined", "RuntimeError: 2/4 clients joined"), None, {2, 3}),
    ],
)
def test_logs_name_the_rank_that_did_not_only_lose_another_one(texts, codes, named):
    verdict = verdicts.judge_logs(ranks_that_say(*texts, codes=codes))
    assert verdict.named == named, verdict


def test_the_recorder_names_who_is_missing_who_differs_and_who_is_late():
    def judge(*calls, codes=None, groups=None):
        made = zip(calls, groups or [[]] * len(calls), strict=True)
        notes = [recorder.Notes(*pair) for pair in made]
        ranks = ranks_that_say(*[""] * len(calls), codes=codes)
        return gallery.judge_recorder(notes, ranks).named

    call, other = ("all_reduce [1] Float", 0.0), ("broadcast [1] Float", 0.0)
    late, early = ("all_reduce [1] Float", 2.0), ("all_reduce [1] Float", 0.01)
    assert judge([call] * 4, [call] * 3, [call] * 4) == {1}
    assert judge([call] * 4, [call] * 5, [call] * 4) == {1}
    assert judge([call] * 4, [call] * 3) == set()  # which of the two is right?
    assert judge([call], [call], [other]) == {2}
    assert judge([call], [other]) == set()
    assert judge([late] * 2, [call] * 2) == {0}
    assert judge([early] * 2, [call] * 2) == set()
    assert judge([call] * 4, [call] * 3, codes=[1, -6]) == set()  # its last notes may be lost
    assert judge([], [], [], groups=[["a"], ["b"], ["a"]]) == {1}


@pytest.mark.parametrize(("slower", "named"), [(1.66, {1}), (1.1, set())])
def test_a_rank_that_is_slower_in_every_step_is_late(slower, named):
    """Ten steps of 20 ms, with noise: the sum of what it is behind is below 0.3 s."""
    random = Random(0)
    step = [0.02 * slower if rank == 1 else 0.02 for rank in range(4)]
    at = torch.zeros(4, 11)
    for call in range(1, 11):
        begun = at[:, call - 1].max()  # all leave a call when the last one has come to it
        for rank in range(4):
            at[rank, call] = begun + step[rank] * random.uniform(0.9, 1.0)
    verdict = verdicts.latest(at[:, 1:])
    assert (verdict.named if verdict else set()) == named, verdict


def test_detail_is_told_by_ranks_of_the_job_not_of_a_group():
    def says(own, other):
        prints = "Rank {} is running collective: CollectiveFingerPrint(OpType={}, TensorShape=[1])"
        return f"{prints.format(0, own)}, but {prints.format(1, other)}."

    ranks = ranks_that_say("", "", says("ALLREDUCE", "BROADCAST"), says("BROADCAST", "ALLREDUCE"))
    assert verdicts.calls_in_detail(ranks) == {2: "ALLREDUCE [1]", 3: "BROADCAST [1]"}


def test_the_recorder_compares_what_it_still_has_of_all_ranks():
    Notes, judge = recorder.Notes, gallery.judge_recorder
    one, two, three = [(name, 0.0) for name in ("one", "two", "three")]
    alike = [Notes([one, two, three]), Notes([two, three], first=1), Notes([one, two, three])]
    assert judge(alike).text.startswith("3 calls, the same on all ranks")
    behind = [Notes([two, three], first=2000), Notes([one, two], first=1999)]
    assert judge(behind).text.startswith("rank 0 made call 2002; rank 1 ended with call 2001")
    differs = [Notes([two, one], first=1), Notes([one, two, three])]
    assert judge(differs).text.startswith("call 3 differs: rank 0: one; rank 1: three")
    assert judge([Notes([]), Notes([one], first=7), Notes([one], first=7)]).named == {0}


def test_stacks_name_who_is_elsewhere():
    judge, wait = verdicts.judge_stacks, ("x/distributed_c10d.py", "all_reduce", 9)
    main, stuck = ("broken.py", "<module>", 7), ("broken.py", "next_batch", 3)
    assert judge([[wait, main], [stuck, main], [wait, main]], "broken.py").named == {1}
    assert judge([[wait, main], [wait, stuck, main]], "broken.py").named == set()
    assert judge([[wait, main], [wait, stuck, main], [wait, main]], "broken.py").named == {1}
    assert judge([None, [stuck, main]], "broken.py").named == {1}
    assert judge([[stuck, main], [stuck, main]], "broken.py").named == set()
    assert "; ask the recorder, or look at the net" in judge([[wait, main]] * 2, "broken.py").text
    assert judge([[stuck, main]] * 2, "broken.py").text.endswith("; ask the recorder")
    assert judge([[wait, main], [], [wait, main]], "broken.py").named == {1}  # stopped


@pytest.mark.parametrize(
    "innermost",
    [
        ("lib/torch/autograd/graph.py", "_engine_run_backward", 5),
        ("lib/torch/nn/parallel/distributed.py", "_sync_buffers", 5),
        ("lib/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py", "unshard", 5),
        None,
    ],
)
def test_a_rank_that_waits_below_python_is_not_the_odd_one(tmp_path, innermost):
    (tmp_path / "train.py").write_text("work = dist.all_reduce(x, async_op=True)\nwork.wait()\n")
    innermost = innermost or (str(tmp_path / "train.py"), "<module>", 2)
    main, stuck = ("broken.py", "<module>", 7), ("broken.py", "next_batch", 3)
    judge, waits = verdicts.judge_stacks, [innermost, main]
    assert judge([waits, [stuck, main], waits], "broken.py").named == {1}
    assert judge([waits, [stuck, *waits], waits], "broken.py").named == {1}  # called by PyTorch


def test_tools_that_saw_nothing_name_nobody():
    assert verdicts.judge_stacks([], "broken.py").named == set()


# Sabotage: what is broken is not, what finds it does not, what cures it does not.


def test_a_rank_that_waits_for_its_turn_or_for_the_disk_is_not_stuck(monkeypatch, tmp_path):
    """At a load of 20 a rank that computes gets no CPU time for a second."""
    states = iter(["running", "running", "running", "disk-sleep", "sleeping", "left"])
    rank = argparse.Namespace(
        status=lambda: next(states), cpu_times=lambda: (1.0, 0.0), terminate=lambda: None
    )
    monkeypatch.setattr(part.psutil, "Process", lambda pid: rank)
    monkeypatch.setattr(part, "runs", lambda pid: True)
    monkeypatch.setattr(part, "STUCK_S", 0.0)
    (tmp_path / "log").touch()
    assert part.wait_until_stuck([1], [tmp_path / "log"]) == [0]
    assert next(states) == "left"


def test_stacks_are_read_once_every_rank_has_begun(monkeypatch):
    """At a load of 10 a rank was named that had not come to the script after a second."""
    wait, main = ("x/distributed_c10d.py", "all_reduce", 9), ("x/broken.py", "<module>", 7)
    early, stuck = [("x/subprocess.py", "run", 9)], [("x/broken.py", "next_batch", 3), main]
    joins = [("x/distributed_c10d.py", "init_process_group", 9), main]
    looks = iter([[wait, main], early, [wait, main], [], early, stuck,
                  [wait, main], joins, [], [wait, main], stuck, []])  # fmt: skip
    monkeypatch.setattr(part, "stack_of", lambda pid: next(looks))
    monkeypatch.setattr(part, "STUCK_S", 0.0)
    job = argparse.Namespace(run=lambda script, during: during([1, 2, 3]))
    _, verdict = gallery.by_stacks(job)
    assert verdict.named == {1, 2} and next(looks, None) is None, verdict


@needs_py_spy
def test_a_process_that_stops_while_py_spy_reads_it_is_stopped(monkeypatch):
    """Seen once in five: py-spy fails, and the tool ended without a verdict."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    def stops(command, **_):
        process.send_signal(signal.SIGSTOP)
        wait_for(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
        return subprocess.CompletedProcess(command, 1, b"", b"unexpected waitpid result")

    monkeypatch.setattr(part.subprocess, "run", stops)
    try:
        assert part.stack_of(process.pid) == []
    finally:
        process.kill()
        process.wait()


FROZEN = """
import os, signal, time, torch, torch.distributed as dist
from datetime import timedelta
STUCK = 1  # the rank that is frozen
dist.init_process_group("gloo", timeout=timedelta(seconds=12))
for step in range(3):
    if step == 2 and dist.get_rank() == STUCK:
        time.sleep(1.5)  # so that the recorder has written its notes
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(1))
"""


@full
@pytest.mark.parametrize(
    ("tool", "says"),
    [
        pytest.param("stacks", "rank 2: is stopped (SIGSTOP, or a debugger)", marks=needs_py_spy),
        ("recorder", "ranks 0, 1 made call 3; rank 2 ended with call 2: look at rank 2"),
    ],
)
def test_a_rank_that_is_frozen_is_named(run_script, tmp_path, tool, says):
    def before(module):
        read_text, broken = Path.read_text, FAILURES / "rank-hangs/broken.py"
        Path.read_text = lambda path, *a, **k: FROZEN if path == broken else read_text(path)
        module.part.STUCK_S = 6  # by then it is frozen

    where = ("--ranks", 3, "--culprit", 2, "--tool", tool, "--output-dir", tmp_path / "run")
    ended = run_script(GALLERY, "rank-hangs", *where, environ={}, before=before)
    assert says in ended.stdout, ended.stdout + ended.stderr


CUT_OFF = """
import subprocess, time, torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("gloo", timeout=timedelta(seconds=40))
rank = dist.get_rank()
for step in range(4):
    if step == 3:
        dist.barrier()
        if rank == {cut}:
            subprocess.run(["ip", "link", "set", "link0", "down"], check=True)
        elif {others_wait}:  # else they may have sent, and got the answer
            time.sleep(3)
        open(f"cut-{{rank}}", "w").close()
    dist.all_reduce(torch.ones(100_000))
"""


@full
@pytest.mark.skipif(links.why_not() is not None, reason=str(links.why_not()))
@pytest.mark.parametrize(("cut", "others_wait"), [(1, True), (2, False)])
def test_a_node_that_the_network_has_cut_off_is_found_as_the_page_says(
    run_script, tmp_path, monkeypatch, cut, others_wait
):
    """The recorder sends to the network; there ss names who gets no answer, and from whom."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(CUT_OFF.format(cut=cut, others_wait=others_wait))
    unacknowledged = []  # by node: peers

    def watch(pids):
        wait_for(lambda: len(list(tmp_path.glob("cut-*"))) == 3)
        time.sleep(2)
        for pid in pids:
            user = [] if network.user is None else ["-U", "--preserve-credentials"]
            asked = ["nsenter", "-t", str(pid), *user, "-n", "ss", "-tn", "state", "established"]
            shown = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
            rows = [line.split() for line in shown.splitlines()[1:]]
            peers = " ".join(peer for _, sent, _, peer in rows if int(sent))
            unacknowledged.append(set(re.findall(r"10\.77\.0\.\d+", peers)))  # [::ffff:...] too
        for pid in pids:  # what they did is on the disk
            os.kill(pid, signal.SIGTERM)

    record = ("--record", tmp_path / "notes")
    with links.hosts([1e9] * 3) as network:
        run_script(
            GALLERY, *record, tmp_path / "train.py", world_size=3, during=watch,
            before=lambda _: network.enter(int(os.environ["RANK"])), end_job_on_failure=False,
            environ=lambda rank: {"RANK": rank, "WORLD_SIZE": 3, "LOCAL_RANK": 0},
        )  # fmt: skip
    others = [unacknowledged[rank] for rank in {0, 1, 2} - {cut}]
    named = set().union(*others)
    assert named == {f"10.77.0.{cut + 1}"} or not (named or others_wait), unacknowledged
    assert len(unacknowledged[cut]) == 2, unacknowledged  # no peer answers the node itself
    judged = run_script(GALLERY, *record, environ={})
    assert "look at the network: ss -tn shows" in judged.stdout, judged.stdout


def swap(script, other):
    """Return a sabotage that plays one script in place of another."""

    def sabotage(module):
        run = module.Job.run

        def swapped(self, name, *args, **kwargs):
            return run(self, other if name == script else name, *args, **kwargs)

        module.Job.run = swapped

    return sabotage


def without(statement):
    """Return a sabotage that leaves a statement out of cured.py."""

    def sabotage(module):
        read_text = Path.read_text
        Path.read_text = lambda *a, **k: read_text(*a, **k).replace(statement, "pass")

    return sabotage


def blind(module):
    """Remove the tool: its verdict says nothing and names nobody."""
    for name, (look, title) in module.TOOLS.items():

        def looks_away(job, look=look):
            return look(job)[0], verdicts.Verdict("nothing to see")

        module.TOOLS[name] = (looks_away, title)


def allow_no_time(module):
    module.CASE_S = 0


def accuse_another(module):
    for name, (look, title) in module.TOOLS.items():

        def wrong(job, look=look):
            ended, verdict = look(job)
            return ended, verdicts.Verdict(verdict.text, frozenset([0]))

        module.TOOLS[name] = (wrong, title)


MESSAGE, ENDS = "broken: the message is there", "broken: ranks that end as described"
SAYS, RIGHTLY = "found: the tool says what it should", "found: ranks named rightly"
WRONGLY = "found: ranks named wrongly"
STILL, WELL = "cured: the message is there", "cured: ranks that end by exit code 0"
RESULT = "cured: ranks with the right result"
IN_TIME = "all jobs end within the deadline of a case"


@pytest.mark.parametrize(
    ("name", "sabotage", "red"),
    [
        ("exception-on-one-rank", swap("broken.py", "cured.py"), {MESSAGE, ENDS, SAYS, RIGHTLY}),
        ("exception-on-one-rank", accuse_another, {RIGHTLY, WRONGLY}),
        ("exception-on-one-rank", swap("cured.py", "broken.py"), {STILL, WELL, RESULT}),
        *(pytest.param(*row, marks=full) for row in [
            ("exception-on-one-rank", blind, {SAYS, RIGHTLY}),
            ("exception-on-one-rank", allow_no_time, {IN_TIME}),
            ("rank-dies", without("checkpoint.write_text(str(step + 1))"), {RESULT}),
            ("nan-on-one-rank", swap("cured.py", "broken.py"), {STILL, RESULT}),
        ]),
    ],
)  # fmt: skip
def test_sabotage_turns_its_checks_red(run_script, tmp_path, name, sabotage, red):
    ended, results = play(run_script, tmp_path, name, before=sabotage)
    assert ended.codes == [1] and "FAILED" in ended.stdout, ended.stdout + ended.stderr
    assert {check["name"] for check in results["checks"] if not check["ok"]} == red


# The scripts as a reader would start them.


@full
def test_under_torchrun_the_broken_script_breaks_and_the_cured_one_does_not(torchrun):
    folder = "04-nccl-operations/failures/exception-on-one-rank"
    says = "ValueError: sample 7 cannot be decoded"
    broken = torchrun(f"{folder}/broken.py")
    assert broken.codes == [1] and says in broken.stderr
    cured = torchrun(f"{folder}/cured.py")
    assert cured.codes == [0] and says not in cured.stderr, cured.stderr


# A few, to save time: one that sets where ranks meet, one that restarts and writes, one that wraps.
CURED = ("port-in-use", "rank-dies", "unused-under-fsdp")


@full
@pytest.mark.parametrize("name", CURED)
def test_under_torchrun_a_cured_script_ends_with_the_right_result(tmp_path, name):
    launch = ["torchrun", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    # Else ranks that start again may find the addresses of those before: launchers.md.
    environ = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    cured = run_command([*launch, str(FAILURES / name / "cured.py")], tmp_path, 90, **environ)
    assert cured.codes == [0], cured.stderr
    assert cured.stdout.count(load(name).right.format(n=2, others=1)) == 2, cured.stdout
    assert not any(tmp_path.iterdir())  # where the reader started it


TRAIN = "import beside\n" + (FAILURES / "leaves-early/broken.py").read_text()
SAYS = "rank 0 made call 4; rank 1 ended with call 3: one calls too often, or one too seldom"


@pytest.fixture
def train(tmp_path):
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path / "train.py"


def test_the_recorder_runs_a_script_and_judges_its_notes(run_script, tmp_path, train):
    notes = tmp_path / "notes"
    ran = run_script(GALLERY, "--record", notes, train, world_size=2)
    assert sorted(ran.codes) == [0, 1] and "Traceback" in ran.stderr, ran.stderr
    judged = run_script(GALLERY, "--record", notes, environ={})
    assert judged.codes == [0] and judged.stdout.splitlines() == [
        "rank 0: 4 calls, the last one all_reduce [1] Float",
        "rank 1: 3 calls, the last one all_reduce [1] Float",
        SAYS,
    ]
    again = run_script(GALLERY, "--record", notes, train, environ={})
    assert_one_line(again, "rank-0.trace is of an earlier job", "failure_gallery.py")
    (notes / "rank-0.trace").unlink()
    judged = run_script(GALLERY, "--record", notes, environ={})
    assert judged.stdout.startswith("rank 0: no file\nrank 1: 3 calls"), judged.stdout


def test_the_notes_leave_out_what_was_called_before_the_recorder(on_ranks, tmp_path):
    def count(rank, world_size):
        torch.distributed.all_reduce(torch.ones(1))
        finish = recorder.record(tmp_path / "rank-0.trace")
        torch.distributed.all_reduce(torch.ones(1))
        finish()
        return recorder.notes_of(tmp_path / "rank-0.trace").count

    assert on_ranks(count, 1) == [1]


CIRCLE = """
import torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("gloo", timeout=timedelta(seconds=30))
rank = dist.get_rank()
groups = [dist.new_group(pair, timeout=timedelta(seconds=4)) for pair in ([0, 1], [1, 2], [0, 2])]
dist.all_reduce(torch.ones(1), group=groups[rank])  # each calls another group first
"""
PIPELINE = """
import time, torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("gloo", timeout=timedelta(seconds=5))
rank, message = dist.get_rank(), torch.ones(1)
dist.barrier()
for batch in range(3 if rank else 2):  # stage 0 sends one micro-batch less
    works = [dist.P2POp(dist.irecv, message, rank - 1)] if rank else []
    for work in dist.batch_isend_irecv(works) if works else []:
        work.wait()
    if rank < 2:
        dist.send(message, rank + 1)
time.sleep(8 if rank == 0 else 0)  # as long as the others wait for it
"""
NOTHING = """
import torch.distributed as dist
dist.init_process_group("gloo")
"""


@pytest.mark.parametrize(
    ("source", "says"),
    first_is_quick([
        (CIRCLE, "wait in a circle: rank 0 waits for rank 1 in call 1"),
        (PIPELINE, "rank 0 waits for nobody: look at rank 0"),
        (NOTHING, "no rank called torch.distributed, or none was recorded: look at the stacks"),
    ]),
)  # fmt: skip
def test_the_recorder_knows_groups_and_messages(run_script, tmp_path, source, says):
    (tmp_path / "train.py").write_text(source)
    ran = run_script(
        GALLERY, "--record", tmp_path / "notes", tmp_path / "train.py", world_size=3,
        end_job_on_failure=False,
    )  # fmt: skip
    judged = run_script(GALLERY, "--record", tmp_path / "notes", environ={})
    assert judged.codes == [0] and says in judged.stdout, judged.stdout + ran.stderr


def dump(folder, rank, world_size, entries):
    """Write a rank's entries as PyTorch does on NCCL: what they do not say is of an all-reduce."""
    same = {
        "profiling_name": "nccl:all_reduce", "process_group": ("0", "default_pg"), "is_p2p": False,
        "input_sizes": [[4]], "output_sizes": [[4]], "input_dtypes": ["Float"],
        "output_dtypes": ["Float"], "time_created_ns": 0, "record_id": 0, "p2p_seq_id": 1,
        "collective_seq_id": 1, "retired": True, "state": "scheduled",
    }  # fmt: skip
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": str([*range(world_size)])}}
    told = {"version": "2.10", "pg_config": config, "entries": [same | one for one in entries]}
    (folder / f"trace_{rank}").write_bytes(pickle.dumps(told))


@pytest.mark.parametrize("lost", [2, 3])
def test_dumps_of_pytorch_are_read_where_one_is_missing(run_script, tmp_path, lost):
    """As ranks write them on NCCL; the node of one rank died and left none."""
    for rank, calls in ((0, 3), (1, 3), (5 - lost, 2)):
        dump(tmp_path, rank, 4, [{"collective_seq_id": n + 1, "retired": n < 2}
                                 for n in range(calls)])  # fmt: skip
    judged = run_script(GALLERY, "--record", tmp_path, environ={})
    assert judged.codes == [0], judged.stderr
    assert {
        "rank 0: 3 calls, the last one all_reduce [4] Float",
        "rank 1: 3 calls, the last one all_reduce [4] Float",
        f"rank {lost}: no file",
    } < set(judged.stdout.splitlines())
    assert judged.stdout.splitlines()[-1] == (
        f"no file of rank {lost}, which died or wrote it elsewhere; "
        f"of the others rank {5 - lost} made the fewest calls"
    )


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        (
            "different-collectives",
            "call 1 differs: rank 0: all_reduce [1] Float; rank 1: broadcast",
        ),
        (
            "gather-on-rank-0",
            "call 1 differs: rank 0: all_gather [1] Float; rank 1: all_reduce_barrier",
        ),
        ("leaves-early", "no file of rank 1, which died or wrote it elsewhere"),
    ],
)
def test_dumps_that_two_ranks_wrote_on_nccl(run_script, tmp_path, failure, says):
    """NCCL 2.30.7, torch 2.11.0: what the watchdog had each rank write, without its stacks."""
    dumps = json.loads((REPO / "tests/nccl_dumps.json").read_text())[failure]
    for rank, told in dumps.items():
        (tmp_path / f"trace_{rank}").write_bytes(pickle.dumps(told))
    judged = run_script(GALLERY, "--record", tmp_path, environ={})
    assert judged.stdout.splitlines()[-1].startswith(says), judged.stdout + judged.stderr


@pytest.mark.parametrize(
    ("options", "lost", "says"),
    [
        ((), 2, "AssertionError: Missing dump files from ranks {2}"),
        (("--allow-incomplete-ranks",), 2, "We cannot decide what's wrong"),
        (("--allow-incomplete-ranks",), 0, "KeyError: 0"),
    ],
)
def test_torchfrtrace_says_of_a_missing_dump_what_the_page_says(
    tmp_path, caplog, options, lost, says
):
    """Ranks 1 and 2 send to rank 0 in a batch; ranks 0 and 1 all-reduce."""
    raised = ""
    for rank in {0, 1, 2} - {lost}:
        batch = [{"profiling_name": f"nccl:{name}", "is_p2p": True}
                 for name in (f"send {rank}->0", "coalesced")]  # fmt: skip
        dump(tmp_path, rank, 3, [{}] if lost else batch)
    try:
        fr_trace.main([*options, "-p", "trace_", str(tmp_path)])
    except (AssertionError, KeyError) as error:
        raised = f"{type(error).__name__}: {error}"
    assert says in caplog.text + raised
    page = (FAILURES.parent / "nccl_debugging.md").read_text()
    assert any(f"`{words}`" in page for words in (says, *says.split(": "))), says


def test_messages_in_dumps_of_pytorch_are_paired(run_script, tmp_path):
    """Rank 1 waits for the second message of rank 0, which sent one."""
    names = [["nccl:send 0->1"], ["nccl:recv 1<-0"] * 2]
    for rank, own in enumerate(names):
        entries = [{"profiling_name": name, "is_p2p": True} for name in own]
        entries[-1]["retired"] = rank == 0
        dump(tmp_path, rank, 2, entries)
    judged = run_script(GALLERY, "--record", tmp_path, environ={})
    says = "rank 1 waits for rank 0 in receive 2 from it; rank 0 waits for nobody: look at rank 0"
    assert judged.stdout.splitlines()[-1] == says, judged.stdout + judged.stderr


PAIR, ALL_OF, CALL = [0, 1], "0", "all_reduce [1] Float"
BEFORE = ["1", "0"] * 2  # the pair's group is called "1"


@pytest.mark.parametrize(
    ("order", "named", "kind"),
    [
        ([[*BEFORE, "1"], [*BEFORE, "0"]], {1}, "order"),  # rank 1 leaves out its pair
        ([["1"], ["0"]], {0, 1}, "calls"),  # in the first step there is no rule yet
    ],
)
def test_of_two_groups_in_inverted_order_the_one_that_breaks_its_rule_is_named(order, named, kind):
    def notes(rank):
        groups = order[rank]
        started, last = {group: groups.count(group) for group in groups}, groups[-1]
        return recorder.Notes([], members={"1": PAIR}, started=started, world_size=2, order=groups,
                              open=[(last, started[last], CALL)])  # fmt: skip

    verdict = waits.judge_waits([notes(0), notes(1)])
    assert (verdict.named, verdict.kind) == (named, kind), verdict


def test_who_owes_a_message_and_waits_in_a_collective_is_named():
    """Rank 0 sent 2 times and went on; ranks 1 and 2 wait for the third message, one by one."""
    first = recorder.Notes([], started={"0": 3}, open=[("0", 3, CALL)], sends={("send", 1): 2})
    rest = [recorder.Notes([], started={"0": 2}, waits=[("receive", rank - 1, 3)],
                           sends={("receive", rank - 1): 3, ("send", rank + 1): 2})
            for rank in (1, 2)]  # fmt: skip
    verdict = waits.judge_waits([first, *rest])
    assert (verdict.named, verdict.kind) == ({0}, "send"), verdict
    assert verdict.text.endswith("rank 0 has no send 3 for rank 1, only 2")


@needs_py_spy
def test_stacks_have_a_rank_and_no_launcher(run_script, tmp_path):
    """Two ranks, one with a loader's worker, and a shell that has the script in its command."""
    (tmp_path / "train.py").write_text(
        "import os, time\nrank = os.environ['RANK']\n"
        "if rank == '1' and os.fork() == 0:  # a DataLoader's worker has another name\n"
        "    open('/proc/self/comm', 'w').write('pt_data_worker')\n"
        "    open('runs-w', 'w').close()\n    time.sleep(60)\n"
        "def late():\n    open(f'runs-{rank}', 'w').close()\n    time.sleep(60)\nlate()\n"
    )
    path = str(tmp_path / "train.py")
    shell = ["sh", "-c", f"for RANK in 0 1; do RANK=$RANK {sys.executable} {path} & done; wait"]
    started = subprocess.Popen(shell, start_new_session=True, cwd=tmp_path)
    try:
        wait_for(lambda: len(list(tmp_path.glob("runs-*"))) == 3)
        shown = run_script(GALLERY, "--stacks", path, environ={})
    finally:
        os.killpg(started.pid, 9)
        started.wait()
    heads = [line for line in shown.stdout.splitlines() if line.startswith("node ")]
    assert [re.findall(r"rank \d, [a-z ]+", head)[0] for head in heads] == [
        "rank 0, rank", "rank 1, rank", "rank 1, worker of its loader",
    ], shown.stdout + shown.stderr  # fmt: skip
    assert shown.stdout.count("late, train.py:9") == 2
    assert_one_line(
        run_script(GALLERY, "--stacks", "none.py", environ={}),
        "--stacks: no rank on this node runs none.py", "failure_gallery.py",
    )  # fmt: skip


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_nan_below_ddp_is_named_and_nothing_seen_is_said(run_script, tmp_path, culprit):
    """DDP reduces in C++, where nothing watches dist.all_reduce."""

    def before(module):
        broken = FAILURES / "nan-on-one-rank/broken.py"
        source = DDP_NAN.format(culprit) if culprit else "import torch\n"
        read_text = Path.read_text
        Path.read_text = lambda path, *a, **k: (
            source if path == broken else read_text(path, *a, **k)
        )

    ended, _ = play(run_script, tmp_path, "nan-on-one-rank", before=before)
    says = (
        "rank 1: the input of call" if culprit else "no all_reduce and no gradient of DDP was seen"
    )
    assert says in ended.stdout, ended.stdout + ended.stderr


DDP_NAN = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(2, 1))
for step in range(2):
    data = torch.ones(1, 2) * (float("nan") if step and dist.get_rank() == {} else 1)
    model(data).sum().backward()
"""


@full
def test_the_recorder_runs_a_script_under_torchrun(tmp_path, train):
    record = [str(REPO / GALLERY), "--record", "notes"]
    launch = ["torchrun", "--standalone", "--nproc-per-node=2"]
    ran = run_command([*launch, *record, "train.py", "--lr", "0.1"], tmp_path, 90)
    assert ran.codes == [1] and ran.stdout.count("3 steps") == 1, ran.stdout + ran.stderr
    judged = run_command(["python", *record], tmp_path, 90)
    assert judged.codes == [0] and judged.stdout.endswith(f"{SAYS}\n")


# All of their ranks are broken, or the broken one is never started, or no other one can be broken.
NO_CULPRIT = {"hostname-loopback", "port-in-use", "set-epoch-forgotten", "world-size-mismatch"}
ON_ITS_GPU = """
on_gpu = torch.cuda.is_available()
if on_gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.set_default_device("cuda")
"""


def test_each_script_is_short_plain_takes_its_gpu_and_names_its_broken_rank_once():
    for name in NAMES:
        for script in ("broken.py", "cured.py"):
            source = (FAILURES / name / script).read_text()
            lines = [line for line in source.splitlines() if line.strip()]
            assert len(lines) <= 30, f"{name}/{script}: {len(lines)} lines"
            assert "dist_common" not in source and ast.get_docstring(ast.parse(source))
            assert ON_ITS_GPU in source.split("dist.init_process_group(")[0], f"{name}/{script}"
        broken = (FAILURES / name / "broken.py").read_text()
        assert len(part.CULPRIT.findall(broken)) == (name not in NO_CULPRIT), name


# Bad input, the list, the page.


def test_without_a_name_they_are_listed(run_script):
    ended = run_script(GALLERY, environ={})
    assert ended.codes == [0]
    assert [line.split()[0] for line in ended.stdout.splitlines()[2:]] == NAMES


@pytest.mark.parametrize(
    ("environ", "argv", "says"),
    first_is_quick([
        ({}, ("rank-dies", "--culprit", "2"), "--culprit must be from 0 to 1"),
        ({}, ("shapes",), "argument NAME: invalid choice: 'shapes'"),
        ({}, ("rank-dies", "--device", "cuda"), "start broken.py with torchrun"),
        (None, ("rank-dies",), "start this with python; torchrun can start failures/rank-dies/"),
        ({}, ("rank-dies", "--ranks", "1"), "--ranks must be at least 2, not 1"),
        ({}, ("firewall-drops", "--culprit", "0"), "must be from 1 to 1"),
        ({}, ("port-in-use", "--culprit", "1"), "cannot be moved to another rank"),
        ({}, ("set-epoch-forgotten", "--culprit", "1"), "cannot be moved to another rank"),
        ({}, ("--record", "nowhere"), "there is no rank-N.trace in nowhere"),
        ({}, ("--record", "nowhere", "nope.py"), "there is no nope.py"),
        ({}, ("--record",), "--record needs a FOLDER"),
    ]),
)  # fmt: skip
def test_the_gallery_refuses_bad_input(run_script, environ, argv, says):
    ended = run_script(GALLERY, *argv, environ=environ)
    assert_one_line(ended, says, "failure_gallery.py")


@full
def test_a_machine_without_py_spy_or_namespaces_is_told_what_is_missing(run_script):
    def none(module):
        part.shutil.which = lambda *args, **kwargs: None
        module.may_enter = lambda: False

    ended = run_script(GALLERY, "rank-hangs", environ={}, before=none)
    assert_one_line(ended, "needs py-spy: pip install py-spy", "failure_gallery.py")
    ended = run_script(GALLERY, "shm-full", environ={}, before=none)
    assert_one_line(ended, "needs Linux and root", "failure_gallery.py")


ROWS = re.compile(r"(?<=\|---\|---\|---\|---\|\n)(?:\|.*\|\n)+")
GROUPS = {
    "calls": "ranks do not call the same thing",
    "one": "one rank fails, or keeps the others waiting",
    "silent": "nothing fails, and the numbers are wrong",
    "start": "the ranks never meet",
}


def rows(group):
    """Return the page's rows of the failures of a group."""
    lines = []
    for name in NAMES:
        failure = load(name)
        if failure.group != group:
            continue
        found = gallery.TOOLS[failure.tool][1]
        more = f". {failure.page[0].upper()}{failure.page[1:]}" if failure.page else ""
        named = {"the odd one": " (from 3 ranks on it names the rank)", "none": " (names no rank)"}
        found = f"{found}{named.get(failure.names, '')}{more}.<br>**Cure:** {failure.cure}"
        seen = f"{failure.symptom}.<br>**On NCCL:** {failure.nccl}"
        lines.append(f"| {seen} | {failure.cause} | {found} | `{name}` |\n")
    return "".join(lines)


def test_the_page_has_the_rows_of_every_case():
    tables = ROWS.findall(PAGE.read_text())
    assert tables == [rows(group) for group in GROUPS], (
        "run python tests/test_04_failure_gallery.py"
    )
    assert sum(table.count("\n") for table in tables) == len(NAMES)
    sources = set(re.findall(r"^- ([A-Z]): ", PAGE.read_text(), re.M))
    for name in NAMES:
        named = re.search(r"\(([A-Z](?:, [A-Z])*)\)$", load(name).nccl)
        assert named and set(named[1].split(", ")) <= sources, f"{name}: says who of NCCL?"


def main():
    tables = iter(GROUPS)
    PAGE.write_text(ROWS.sub(lambda _: rows(next(tables)), PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
