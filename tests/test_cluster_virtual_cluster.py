"""virtual_cluster.py: nodes with their own everything, what happens to them, and what is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from conftest import (
    REPO,
    Ended,
    assert_one_line,
    load_script,
    run_command,
    started_here,
)

from legacy_common import cli
from legacy_common.lab import namespaces

SCRIPT = "cluster/virtual_cluster.py"
needs_nodes = pytest.mark.skipif(namespaces.why_not() is not None, reason=str(namespaces.why_not()))

Verb = Callable[..., Ended]


def ask(folder: Path, verb: str, *argv: str, timeout_s: float = 200) -> Ended:
    """Run a verb as a reader would, on the cluster of a folder."""
    command = [sys.executable, SCRIPT, verb, "--at", str(folder), *map(str, argv)]
    return run_command(command, REPO, timeout_s)


@pytest.fixture
def cluster(tmp_path):
    """Call verbs on a cluster of this test, which is down afterwards; `cluster.folder` is its."""
    folder = tmp_path / "cluster"

    def verb(name: str, *argv: str, **options) -> Ended:
        ended = ask(folder, name, *argv, **options)
        assert ended.codes == [0], ended.stderr
        return ended

    verb.folder = folder
    yield verb
    ask(folder, "down")


def state(cluster: Verb) -> dict:
    return json.loads((cluster.folder / "cluster.json").read_text())


def events(cluster: Verb) -> list[dict]:
    return [json.loads(line) for line in (cluster.folder / "events.jsonl").open()]


def lines_of(ended: Ended, node: int) -> list[str]:
    """Return what one node printed."""
    start = f"[node{node}] "
    return [
        line.removeprefix(start) for line in ended.stdout.splitlines() if line.startswith(start)
    ]


@contextlib.contextmanager
def in_background(cluster: Verb, *argv: str):
    """Start `run`, end it afterwards; what it prints is in a file."""
    command = [sys.executable, SCRIPT, "run", "--at", str(cluster.folder), *argv]
    with (cluster.folder / "printed").open("w") as printed:
        process = subprocess.Popen(command, cwd=REPO, stdout=printed, stderr=printed)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def wait_until(true: Callable[[], object], seconds: float = 200):
    deadline = time.monotonic() + seconds
    while not (value := true()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
    return value


# quick


@needs_nodes
def test_two_nodes_start_run_a_command_and_leave_nothing(cluster):
    cluster("up", "--nodes", "2")
    ended = cluster("run", "--", "bash", "-c", "hostname; echo {node} of {nodes} {name} {{}} {x}")
    assert [lines_of(ended, node) for node in range(2)] == [
        ["node0", "0 of 2 node0 {} {x}"],
        ["node1", "1 of 2 node1 {} {x}"],
    ]
    assert cluster("down").stdout == "down\n"
    assert not started_here()
    assert {path.name for path in cluster.folder.iterdir()} <= {"events.jsonl", "supervisor.log"}


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("up --link fast", "argument --link: must be like 100mbit or 1gbit, not 'fast'"),
        ("up --link 1gbit,soon", "argument --link: must be like 1gbit or 100mbit,1ms"),
        ("up --clock node1=late", "argument --clock: must be like node1=+1h"),
        ("up --clock node2=+1h", "--clock: there is no node2 of 2 nodes"),
        ("up --nodes 33", "at most 32 nodes with 4 cards each"),
        ("lose node0 120%", "must be from 0% to 100%, not '120%'"),
        ("run", "run takes a command behind --"),
        ("signal node0 agent SIGNOT", "must be a signal such as SIGTERM"),
        ("status", "no cluster is up at"),
        ("down", "no cluster is up at"),
    ],
)
def test_bad_input_gets_one_line(tmp_path, argv, says):
    verb, *rest = argv.split()
    assert_one_line(ask(tmp_path / "cluster", verb, *rest), says, "virtual_cluster.py")
    assert not started_here()


def test_a_folder_with_other_files_stays_as_it_is(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk/mine").write_text("precious")
    says = "disk in it is no cluster's"
    assert_one_line(ask(tmp_path, "up"), says, "virtual_cluster.py")
    assert [path.name for path in tmp_path.rglob("*")] == ["disk", "mine"]
    assert_one_line(ask(tmp_path / "disk/mine", "up"), "File exists", "virtual_cluster.py")


def test_a_machine_without_a_program_is_told_its_package(monkeypatch, tmp_path):
    part = load_script("cluster/cluster_parts/virtual_cluster.py")
    monkeypatch.setattr(part.shutil, "which", lambda *_, **__: None)
    with pytest.raises(cli.UsageError, match="no program ip .the package iproute2 has it"):
        part.up(tmp_path / "cluster")


def test_another_system_is_told_what_works_there(monkeypatch):
    main = load_script(SCRIPT).main
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(sys, "argv", [SCRIPT, "status"])
    with pytest.raises(cli.UsageError, match="namespaces, which Linux has. What works without: "):
        main()


# what a node has


OWN = """
import json, os, pathlib, shutil, socket, time
def fill(folder):
    try:
        pathlib.Path(folder, "big").write_bytes(bytes(9 << 20))
    except OSError as error:
        return error.strerror
print(json.dumps({
    "name": socket.gethostname(),
    "addresses": [socket.gethostbyname(n) for n in ("node0", "node1", "node1-link1", "localhost")],
    "cards": sorted(os.listdir("/sys/class/net")),
    "processes": len([p for p in os.listdir("/proc") if p.isdecimal()]),
    "shm_bytes": shutil.disk_usage("/dev/shm").total,
    "shm_full": fill("/dev/shm"),
    "disk_full": fill("{disk}"),
    "seconds": time.time(),
    "ns": time.time_ns(),
}))
"""


@pytest.mark.full
@needs_nodes
def test_a_node_has_its_own_network_name_processes_memory_disk_and_clock(cluster):
    cluster("up", "--nodes", "2", "--cards", "2", "--shm", "8M", "--disk", "8M",
            "--clock", "node1=-1h")  # fmt: skip
    ended = cluster("run", "--", "python", "-c", OWN)
    for node in range(2):
        (line,) = lines_of(ended, node)
        found = json.loads(line)
        assert found["name"] == f"node{node}"
        assert found["addresses"] == ["10.77.0.1", "10.77.0.2", "10.77.1.2", "127.0.0.1"]
        assert found["cards"] == ["link0", "link1", "lo"]
        assert found["processes"] == 2  # the first one, and this
        assert found["shm_bytes"] == 8 << 20
        assert found["shm_full"] == found["disk_full"] == "No space left on device"
        offset = time.time() - found["seconds"]
        assert abs(offset - 3600 * node) < 60
        assert abs(found["ns"] / 1e9 - found["seconds"]) < 60
    assert (
        cluster("run", "--on", "1", "--", "ls", cluster.folder / "disk").stdout == "[node1] big\n"
    )
    assert list((cluster.folder / "disk").iterdir()) == []


# what happens to it


TRAFFIC = """
import json, socket, sys, threading
def answer(peer):
    received = 0
    while data := peer.recv(1 << 20):
        received += len(data)
    peer.sendall(str(received).encode())
    peer.close()
def serve():
    with socket.create_server(("", 5000)) as listener:
        while True:
            threading.Thread(target=answer, args=listener.accept()[:1], daemon=True).start()
def send(to, count, patience_s):
    try:
        peer = socket.create_connection((to, 5000), timeout=patience_s)
    except OSError as error:
        return {"error": str(error)}
    peer.settimeout(60)
    peer.sendall(bytes(count))
    peer.shutdown(socket.SHUT_WR)
    return {"received": int(peer.recv(100))}
if sys.argv[1] == "serve":
    print("ready", flush=True)
    serve()
print(json.dumps(send(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
"""


def send(cluster: Verb, count: int, to: str = "node1", patience_s: int = 60) -> dict:
    """Send `count` bytes from node0 to a node that serves; return how many arrived."""
    ended = cluster("run", "--on", "node0", "--", "python", "-c", TRAFFIC, to, count, patience_s)
    return json.loads(lines_of(ended, 0)[0])


@pytest.mark.full
@needs_nodes
def test_each_verb_changes_the_traffic(cluster):
    cluster("up", "--nodes", "2", "--cards", "2", "--link", "100mbit")
    with in_background(cluster, "--on", "1", "--", "python", "-c", TRAFFIC, "serve"):
        wait_until(lambda: "ready" in (cluster.folder / "printed").read_text())
        cluster("slow", "node1", "--card", "0", "--rate", "4mbit")
        assert "link0 4 Mbit/s, link1 100 Mbit/s" in cluster("status").stdout
        assert send(cluster, 50_000) == {"received": 50_000}
        cluster("cut", "1")
        assert send(cluster, 1, patience_s=2) == {"error": "timed out"}
        cluster("restore", "1")
        assert send(cluster, 50_000) == {"received": 50_000}
    log = [(event["event"], event.get("node")) for event in events(cluster)]
    assert [line for line in log if line[0] not in ("run", "ended")] == [
        ("up", None), ("slow", "node1"), ("cut", "node1"), ("restore", "node1"),
    ]  # fmt: skip


@pytest.mark.full
@needs_nodes
def test_packets_are_lost_or_the_kernel_cannot(cluster):
    cluster("up", "--nodes", "2")
    ended = ask(cluster.folder, "lose", "node1", "2%")
    if ended.codes == [0]:
        assert "2% lost" in cluster("status").stdout
    else:
        says = "this kernel has no netem, which delays and loses packets (tc: "
        assert_one_line(ended, says, "virtual_cluster.py")


SLEEPERS = "sleep 1000 & (setsid sleep 1000 &); echo up; sleep 1000; :"


def asleep() -> int:
    """Count the sleeping processes that this test has started."""
    found = 0
    for process in started_here():
        with contextlib.suppress(psutil.NoSuchProcess):
            found += process.name() == "sleep"
    return found


@pytest.mark.full
@needs_nodes
def test_a_killed_node_loses_all_processes_and_comes_back_empty(cluster):
    cluster("up", "--nodes", "2")
    cluster("run", "--", "bash", "-c", "touch /dev/shm/a {disk}/b")
    with in_background(cluster, "--", "bash", "-c", SLEEPERS) as run:
        wait_until(lambda: asleep() == 6)
        cluster("kill", "node1")
        assert asleep() == 3
        assert "node1  10.77.0.2  off" in cluster("status").stdout
        assert_one_line(ask(cluster.folder, "cut", "1"), "node1 is off", "virtual_cluster.py")
        cluster("start", "node1")
        ended = cluster("run", "--", "bash", "-c", "ls /dev/shm {disk} | grep '^[ab]$'; :")
        assert [lines_of(ended, node) for node in range(2)] == [["a", "b"], []]
        cluster("signal", "node0", "agent", "SIGKILL")
        assert run.wait(200) == 137
    assert not asleep()


# It starts processes of its own, as a rank with loader workers does: they are not signalled.
WORKER = """
for name in USR1 USR2; do trap "echo $LOCAL_RANK got $name" $name; done
trap "echo $LOCAL_RANK got TERM; exit" TERM
echo waits; while :; do sleep 0.1; done
"""


@pytest.mark.full
@needs_nodes
def test_signals_reach_the_agent_or_one_worker(cluster):
    cluster("up", "--nodes", "1")
    command = ["torchrun", "--nproc-per-node", "2", "--no-python", "bash", "-c", WORKER]
    printed = cluster.folder / "printed"
    with in_background(cluster, "--", *command) as run:
        wait_until(lambda: printed.read_text().count("waits") == 2)
        for target, name, count, line in (
            ("worker:1", "USR1", 1, "1 got USR1"),
            ("worker", "SIGUSR2", 2, "0 got USR2"),
            ("agent", "15", 1, "0 got TERM"),
        ):
            assert f"to {count} process" in cluster("signal", "0", target, name).stdout
            wait_until(lambda line=line: f"[node0] {line}\n" in printed.read_text())
        assert printed.read_text().count("got USR1") == 1
        assert run.wait(200) == 1  # as torchrun ends after SIGTERM
    refused = ask(cluster.folder, "signal", "0", "worker:7", "USR1")
    assert_one_line(refused, "no worker:7 runs there", "virtual_cluster.py")


# what is left


def older_than(moment: float) -> list[int]:
    """Return the processes that started before: later ones may get a namespace's number anew."""
    return [process.pid for process in psutil.process_iter() if process.create_time() < moment]


def namespaces_of(pids: list[int]) -> set[int]:
    found = set()
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:  # nobody has reaped it yet
                continue
        for kind in ("net", "pid", "mnt", "uts"):
            with contextlib.suppress(OSError):
                found.add(os.stat(f"/proc/{pid}/ns/{kind}").st_ino)
    return found


@pytest.mark.full
@needs_nodes
@pytest.mark.parametrize("killed", ["supervisor", "run", "run, gently"])
def test_nothing_outlives_a_killed(cluster, killed):
    cluster("up", "--nodes", "2", "--link", "100mbit")
    pids = [state(cluster)["pid"], *(node["pid"] for node in state(cluster)["nodes"])]
    spaces = namespaces_of(pids) - namespaces_of([os.getpid()])
    assert len(spaces) >= 2 * 4
    saves = "trap 'echo saved; exit 3' TERM; " + SLEEPERS.replace("sleep 1000; :", "wait")
    with in_background(cluster, "--", "bash", "-c", saves) as run:
        wait_until(lambda: asleep() == 4)
        wait_until(lambda: (cluster.folder / "printed").read_text().count("up") == 2)
        if killed == "supervisor":
            killed_at = time.time()
            os.kill(pids[0], signal.SIGKILL)
            assert run.wait(200) == 137
            wait_until(lambda: not started_here())
            wait_until(lambda: not spaces & namespaces_of(older_than(killed_at)))
            assert "killed before" in cluster("down").stdout
            cluster("up", "--nodes", "1")
        else:
            run.send_signal(signal.SIGKILL if killed == "run" else signal.SIGTERM)
            assert run.wait(200) == (-9 if killed == "run" else 3)
            wait_until(lambda: not asleep())
            saved = (cluster.folder / "printed").read_text().count("saved")
            assert saved == (0 if killed == "run" else 2)
    assert cluster("run", "--on", "0", "--", "true").codes == [0]


@pytest.mark.full
@needs_nodes
def test_what_a_cluster_refuses(cluster):
    cluster("up", "--nodes", "2")
    for argv, says in (
        ("up", "a cluster is up already at"),
        ("cut node2", "no node 'node2': the nodes are node0 to node1"),
        ("slow 0 --card 1 --rate 1mbit", "--card 1: the cards are 0 to 0"),
        ("run --on node9 -- true", "no node 'node9'"),
        ("start node1", "node1 is up already"),
    ):
        verb, *rest = argv.split()
        assert_one_line(ask(cluster.folder, verb, *rest), says, "virtual_cluster.py")
    ended = ask(cluster.folder, "run", "--", "no-such-program")
    assert ended.codes == [127] and "no-such-program: not found" in ended.stderr
    assert ask(cluster.folder, "run", "--", "bash", "-c", "exit {node}").codes == [1]


@pytest.mark.full
@needs_nodes
@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run without root already")
def test_it_needs_no_root(tmp_path):
    """Root that may not administer the system is a user like any other."""

    def verb(name, *argv):
        powerless = ["setpriv", "--bounding-set", "-sys_admin", sys.executable, SCRIPT, name]
        return run_command([*powerless, "--at", str(tmp_path / "cluster"), *argv], REPO, 200)

    up = verb("up")
    if "permits no nodes" in up.stderr:
        pytest.skip(up.stderr)
    try:
        assert '"user_namespace": true' in (tmp_path / "cluster/events.jsonl").read_text()
        assert lines_of(verb("run", "--", "hostname"), 1) == ["node1"]
    finally:
        assert verb("down").codes == [0]
