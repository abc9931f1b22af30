"""triage.py: faults that a seed draws are found from outside; what it cannot tell it says."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from conftest import MARK, REPO, assert_one_line, load_script
from helpers_01 import wait_for
from helpers_04 import full
from helpers_triage import BLANK
from test_04_nccl_debugging import missing_in

from cluster_parts import processes, recorder
from cluster_parts import triage as part
from legacy_common import cli
from legacy_common.lab import namespaces

SCRIPT = "cluster/triage.py"
FAILURES = REPO / "04-nccl-operations/failures"
triage = load_script(SCRIPT)
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, which Linux has"),
    pytest.mark.skipif(processes.py_spy() is None, reason="needs py-spy"),
]
KINDS = ["loader", "order", "send", "stopped", "node"]
CALLS = {"loader": "wait_for_storage", "order": "all_reduce in reduce_layer",
         "send": "all_reduce in reduce_layer", "stopped": "", "node": "all_reduce"}  # fmt: skip
SECONDS = 0.7  # between two looks


@pytest.fixture(scope="module")
def starter():
    """A process that has imported torch, and starts jobs."""
    command = [sys.executable, str(REPO / "tests/helpers_triage.py")]
    environ = {name: value for name, value in os.environ.items() if name != MARK} | BLANK
    environ["MASTER_PORT"] = str(os.getpid())  # names this worker's jobs: another has its own
    process = subprocess.Popen(
        command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def running(starter, folder: Path, seed):
    """Start a job; wait until it has broken, or trains; yield its launcher. End it afterwards."""
    folder.mkdir()
    starter.stdin.write(f"{seed} {folder}\n")
    starter.stdin.flush()
    launcher = psutil.Process(int(starter.stdout.readline()))
    try:
        yield launcher
    finally:
        for one in [*launcher.children(recursive=True), launcher]:
            with contextlib.suppress(psutil.Error):
                one.kill()


def wait_until_it_has_spread(folder):
    wait_for((folder / "fault.json").exists, 300)
    part.wait_until_all_wait(folder / "notes")


def looked_at(launcher, folder, **flags):
    """Return what triage.py finds, and the drawn fault, once it has spread."""
    wait_until_it_has_spread(folder)
    return verdict(launcher, notes=str(folder / "notes"), **flags), json.loads(
        (folder / "fault.json").read_text()
    )


def verdict(launcher, **flags):
    given = {"pid": launcher.pid, "job": None, "notes": None, "seconds": SECONDS} | flags
    args = argparse.Namespace(**given)
    nodes = [part.read_node(part.select(processes.find_processes(), args), args)]
    return triage.judge(part.job_of(nodes))


def test_what_a_seed_draws_is_found(starter, tmp_path):
    seeds = [n for n, kind in enumerate(KINDS) if kind != "node" or namespaces.why_not() is None]
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(5) as pool:
        folders = [tmp_path / f"job-{seed}" for seed in seeds]
        jobs = [stack.enter_context(running(starter, folder, seed))
                for folder, seed in zip(folders, seeds, strict=True)]  # fmt: skip
        for found, fault in pool.map(looked_at, jobs, folders):
            assert (found.kind, set(found.ranks)) == (fault["kind"], {fault["rank"]}), (
                found, fault
            )  # fmt: skip
            assert CALLS[fault["kind"]] in found.call, (found, fault)
            if fault["kind"] in ("order", "node"):
                place = f"(step={fault['step']}, layer={fault['layer']})"
                assert place in found.call, (found, fault)
            if fault["kind"] == "order":  # train.py's PAIRS
                pair = re.search(r"of group \[(\d), (\d)\]", found.reason)
                apart = abs(int(pair[1]) - int(pair[2]))
                assert apart == 1 + fault["layer"] % 2, (found, fault)
    if len(seeds) < 5:
        pytest.skip(f"a node could not be unplugged: {namespaces.why_not()}")


def test_nothing_is_wrong_with_a_job_that_trains(starter, tmp_path):
    folder = tmp_path / "job"
    with running(starter, folder, "none") as launcher:
        wait_for(lambda: part.calls_in(str(folder / "notes")) > 40)
        found = verdict(launcher)
        assert (found.kind, found.ranks) == ("training", frozenset())
        rank = argparse.Namespace(pid=launcher.children()[0].pid)
        chosen = part.select(processes.find_processes(), rank)
        assert [one.rank for one in chosen if one.role == "rank"] == [0, 1, 2, 3]
        first, last = map(int, found.reason.removeprefix("step ").split(" to "))
        assert last > first, found


# The command line.


@full
def test_it_finds_the_job_of_a_folder_and_saves_and_loads_what_a_node_knows(
    starter, tmp_path, run_script
):
    folder, shared = tmp_path / "job", tmp_path / "shared"
    with running(starter, folder, 3) as launcher:  # a rank stops
        wait_until_it_has_spread(folder)
        fault = json.loads((folder / "fault.json").read_text())
        where = ("--job", folder, "--notes", folder / "notes", "--seconds", "0.5")
        ended = run_script(SCRIPT, *where, environ={})
        assert ended.codes == [1] and ended.stderr == "", ended.stdout + ended.stderr
        assert f"verdict: stopped: rank {fault['rank']}\n" in ended.stdout
        assert "why: rank" in ended.stdout and "kill -CONT" in ended.stdout
        saved = run_script(SCRIPT, *where, "--save", shared, environ={})
        assert saved.codes == [0] and saved.stdout == ""
    loaded = run_script(SCRIPT, "--load", shared, environ={})
    assert f"verdict: stopped: rank {fault['rank']}\n" in loaded.stdout, loaded.stdout
    wait_for(lambda: not processes.runs(launcher.pid))


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--pid", "4194305"), "no rank of such a job runs here"),  # above all that Linux gives
        (("--job", "nowhere"), "no rank of such a job runs here"),
        (("--load", "nowhere"), "no node has written to nowhere"),
    ],
)
def test_bad_input_is_one_line(run_script, argv, says):
    assert_one_line(run_script(SCRIPT, *argv, environ={}), says, "triage.py")


def test_of_two_jobs_one_has_to_be_named():
    jobs = [a_process(0), a_process(0, pid=9, job=["another"])]
    none = argparse.Namespace(pid=None, job=None)
    with pytest.raises(cli.UsageError, match="several jobs run here: name one by --pid, of 1, 1"):
        part.select(jobs, none)
    inside = [a_process(0, pid=os.getpid()), a_process(0, pid=os.getpid(), job=["another"])]
    with pytest.raises(cli.UsageError, match="several jobs run here"):
        part.select(inside, argparse.Namespace(pid=os.getpid(), job=None))


def test_a_rehearsal_that_does_not_start_says_what_its_job_said(run_script, tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("raise SystemExit('no such model')")
    monkeypatch.setattr(part, "TRIAGE", tmp_path / "train.py")
    says = "the rehearsal's job did not start: no such model"
    assert_one_line(run_script(SCRIPT, "--rehearse", "3", environ={}), says, "triage.py")


# What no machine here has: made-up processes, a made-up RAS.


def a_process(rank, role="rank", **other):
    known = {"pid": 100 + rank, "parent": 1, "world_size": 4, "local_size": 2, "job": ["one"],
             "node": f"node{rank // 2}", "command": [], "state": "sleeping"}  # fmt: skip
    return processes.Process(role=role, rank=rank, **known | other)


def a_job(changes=None, **other):
    ranks = [a_process(rank, **(changes or {}).get(rank, {})) for rank in range(4)]
    return part.Job([one for one in ranks if one.state != "gone"], **other)


XID = "[42.1] NVRM: Xid (PCI:0000:3b:00): {}, pid={}, name=python, the rest"
DEAD = {"rank": 3, "pid": 7, "host": "node1", "considered_dead": True}
COUNTED = [{"rank": rank, "collective_counts": {"AllReduce": 9 - (rank == 2)}} for rank in range(4)]
WAITS = [("x/distributed_c10d.py", "all_reduce", 9, {}), ("train.py", "train", 3, {"step": "7"})]
READS = [("train.py", "read", 5, {"path": '"a.jpg"'}), ("train.py", "train", 3, {})]
HOMES = {rank: {"addresses": [f"10.0.0.{rank // 2}"]} for rank in range(4)}
FETCHES = [("train.py", "read", 5, {}), ("torch/utils/data/_utils/fetch.py", "fetch", 1, {})]
IN_LOADER = [("torch/utils/data/dataloader.py", "_get_data", 1, {})]


@pytest.mark.parametrize(
    ("job", "kind", "ranks", "says"),
    [
        (a_job(xids={"node1": [XID.format(79, 1)]}), "gpu", {2, 3}, "Xid (PCI"),
        (a_job(xids={"node1": [XID.format(31, 5)]}), "cannot tell", set(), ""),  # another job's
        (a_job({1: {"state": "disk-sleep", "waits_in": "nfs_wait"}}), "disk", {1}, "kernel's nfs_"),
        (a_job({2: {"state": "gone"}}), "ended", {2}, "started 2 ranks, and 1 are there"),
        (a_job(ras=[{"communicators": [{"missing_ranks": [DEAD]}]}]), "ras", {3}, "pid 7 on node1"),
        (a_job(ras=[{"communicators": [{"ranks": COUNTED}]}]), "ras", {2}, "launched 8 AllReduce"),
        (a_job(HOMES | {0: {"stuck": {"10.0.0.1": 9}, "addresses": ["10.0.0.0"]}}), "node",
         {0, 1, 2, 3}, "one of them, or the link"),
        (a_job({0: {"stuck": {"10.0.0.8": 9, "10.0.0.9": 9}}}), "node", {0, 1}, "no answer from"),
        (a_job({0: {"stack": WAITS}, 1: {"stack": READS}}), "elsewhere", {1}, "path=\"a.jpg\""),
        (a_job({0: {"stack": WAITS, "on_gpu": True}, 1: {"stack": READS}}), "cannot tell", set(),
         "on NCCL a stack does not tell"),
        (a_job({0: {"stack": WAITS, "steps": [4, 6]}}), "training", set(), "step 4 to 6"),
        (a_job(), "cannot tell", set(), "it may train: no counter of steps was found"),
        (a_job({0: {"unread": "py-spy is not installed"}}), "cannot tell", set(), "pip install"),
    ],
)  # fmt: skip
def test_each_kind_of_evidence(job, kind, ranks, says):
    found = triage.judge(job)
    assert (found.kind, set(found.ranks)) == (kind, ranks), found
    assert says in found.reason, found


def test_a_loader_is_to_blame_only_where_its_rank_waits_for_it():
    worker = a_process(1, "loader worker", pid=50, stack=FETCHES)
    job = a_job({1: {"stack": IN_LOADER}})
    job.processes.append(worker)
    assert triage.judge(job).ranks == {1}
    job.ranks[1].stack = WAITS  # it reads ahead, and its rank waits for the others
    assert triage.judge(job).kind == "cannot tell"


def test_a_rank_that_came_late_to_a_call_is_not_why_it_hangs():
    notes = [part.recorder.Notes([("all_reduce", at), ("all_reduce", at + 1)]) for at in (0, 0, 9)]
    assert triage.judge_recorder(notes).named == {2}
    assert triage.judge(a_job(notes=notes)).kind == "cannot tell"


def test_what_is_missing_on_other_nodes_is_said():
    job = a_job({2: {"state": "gone"}, 3: {"state": "gone"}})
    assert "ranks 2, 3 run elsewhere or have ended: --save on each node" in triage.judge(job).reason


@pytest.mark.parametrize(
    ("answers", "told", "why"),
    [
        (("OK\n", '{"communicators": []}'), {"communicators": []}, ""),
        (("ERROR: unknown command\n", ""), {}, "knows no JSON: ERROR: unknown command"),
        (("OK\n", "text"), {}, "no RAS of NCCL at 127.0.0.1"),
    ],
)
def test_ras_is_asked_as_nccl_wants_it(answers, told, why):
    def serve():
        peer, _ = server.accept()
        with peer, peer.makefile("rw") as stream:
            for answer in answers:
                heard.append(stream.readline())
                stream.write(answer)
                stream.flush()

    heard = []
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        served = pool.submit(serve)
        found, reason = part.ask_ras(f"127.0.0.1:{server.getsockname()[1]}")
        served.result()
    assert found == told and why in reason, reason
    assert heard[0] == "set format json\n" and heard[1] in ("verbose status\n", "")


def test_the_words_of_ras_json_are_in_nccl():
    files = [*Path(torch.__file__).parents[1].glob("nvidia/nccl/lib/libnccl.so*")]
    if not files or torch.cuda.nccl.version() < (2, 30):
        pytest.skip("this PyTorch comes without NCCL, or with an older one")
    names = ("communicators", "missing_ranks", "collective_counts", "considered_dead", "rank")
    words = [f'"{name}":' for name in names] + ["set format ", "verbose status"]
    assert not missing_in(files, words)


def test_gpus_are_read_as_nvidia_smi_prints_them(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, 00000000:3B:00.0, 100, 97.31'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (gpu,), why = part.read_gpus()
    assert gpu["utilization.gpu"] == "100" and gpu["power.draw"] == "97.31" and not why
    tool.write_text("#!/bin/sh\necho 'No devices were found'; exit 6\n")
    assert part.read_gpus() == ([], "No devices were found")


def test_an_address_is_read_as_the_kernel_writes_it():
    assert processes.address("0100007F:1F90") == "127.0.0.1"
    assert processes.address("0000000000000000FFFF000002004D0A:8D18") == "10.77.0.2"


# The recorder, and its notes


TRAIN = "import beside\n" + (FAILURES / "leaves-early/broken.py").read_text()


SAYS = "rank 0 made call 4; rank 1 ended with call 3: one calls too often, or one too seldom"


@pytest.fixture
def train(tmp_path):
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path / "train.py"


def test_the_recorder_names_who_is_missing_who_differs_and_who_is_late():
    def judge(*calls, groups=None):
        made = zip(calls, groups or [[]] * len(calls), strict=True)
        return triage.judge_recorder([recorder.Notes(*pair) for pair in made]).named

    call, other = ("all_reduce [1] Float", 0.0), ("broadcast [1] Float", 0.0)
    late, early = ("all_reduce [1] Float", 2.0), ("all_reduce [1] Float", 0.01)
    assert judge([call] * 4, [call] * 3, [call] * 4) == {1}
    assert judge([call] * 4, [call] * 5, [call] * 4) == {1}
    assert judge([call] * 4, [call] * 3) == set()  # which of the two is right?
    assert judge([call], [call], [other]) == {2}
    assert judge([call], [other]) == set()
    assert judge([late] * 2, [call] * 2) == {0}
    assert judge([early] * 2, [call] * 2) == set()
    assert judge([], [], [], groups=[["a"], ["b"], ["a"]]) == {1}


def test_the_recorder_runs_a_script_and_judges_its_notes(run_script, tmp_path, train):
    notes = tmp_path / "notes"
    ran = run_script(SCRIPT, "--record", notes, train, world_size=2)
    assert sorted(ran.codes) == [0, 1] and "Traceback" in ran.stderr, ran.stderr
    judged = run_script(SCRIPT, "--record", notes, environ={})
    assert judged.codes == [0] and judged.stdout.splitlines() == [
        "rank 0: 4 calls, the last one all_reduce [1] Float",
        "rank 1: 3 calls, the last one all_reduce [1] Float",
        SAYS,
    ]
    again = run_script(SCRIPT, "--record", notes, train, environ={})
    assert_one_line(again, "rank-0.trace is of an earlier job", "triage.py")
    (notes / "rank-0.trace").unlink()
    judged = run_script(SCRIPT, "--record", notes, environ={})
    assert judged.stdout.startswith("rank 0: no file\nrank 1: 3 calls"), judged.stdout


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
    judged = run_script(SCRIPT, "--record", tmp_path, environ={})
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
    judged = run_script(SCRIPT, "--record", tmp_path, environ={})
    assert judged.stdout.splitlines()[-1].startswith(says), judged.stdout + judged.stderr


def test_messages_in_dumps_of_pytorch_are_paired(run_script, tmp_path):
    """Rank 1 waits for the second message of rank 0, which sent one."""
    names = [["nccl:send 0->1"], ["nccl:recv 1<-0"] * 2]
    for rank, own in enumerate(names):
        entries = [{"profiling_name": name, "is_p2p": True} for name in own]
        entries[-1]["retired"] = rank == 0
        dump(tmp_path, rank, 2, entries)
    judged = run_script(SCRIPT, "--record", tmp_path, environ={})
    says = "rank 1 waits for rank 0 in receive 2 from it; rank 0 waits for nobody: look at rank 0"
    assert judged.stdout.splitlines()[-1] == says, judged.stdout + judged.stderr


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
        shown = run_script(SCRIPT, "--stacks", path, environ={})
    finally:
        os.killpg(started.pid, 9)
        started.wait()
    heads = [line for line in shown.stdout.splitlines() if line.startswith("node ")]
    assert [re.findall(r"rank \d, [a-z ]+", head)[0] for head in heads] == [
        "rank 0, rank", "rank 1, rank", "rank 1, worker of its loader",
    ], shown.stdout + shown.stderr  # fmt: skip
    assert shown.stdout.count("late, train.py:9") == 2
    assert_one_line(
        run_script(SCRIPT, "--stacks", "none.py", environ={}),
        "--stacks: no rank on this node runs none.py", "triage.py",
    )  # fmt: skip
