"""virtual_cluster.py: a node's resources, its verbs, and that nothing is left."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from conftest import REPO, assert_one_line, find_leftovers, load_script, run_command
from helpers_nodes import why_no_nodes

SCRIPT = "cluster/virtual_cluster.py"
script = load_script(SCRIPT)
linux = script.linux
why_not = why_no_nodes()
needs_nodes = pytest.mark.skipif(why_not is not None, reason=str(why_not))
HANG_S = 200


def ask(folder, verb, *words):
    """Run a verb as a reader would, on the cluster of a folder."""
    command = [sys.executable, SCRIPT, verb, "--at", str(folder), *map(str, words)]
    return run_command(command, REPO, HANG_S)


@pytest.fixture
def cluster(tmp_path):
    """Call verbs on a cluster of this test, which is down afterwards."""
    folder = tmp_path / "cluster"

    def verb(name, *words):
        ended = ask(folder, name, *words)
        assert ended.codes == [0], ended.stderr
        return ended.stdout

    verb.folder = folder
    yield verb
    ask(folder, "down")


def lines_of(printed, node):
    """Return the lines of one node."""
    start = f"[node{node}] "
    lines = printed.splitlines()
    return [line.removeprefix(start) for line in lines if line.startswith(start)]


@contextlib.contextmanager
def in_background(cluster, *words):
    """Start `run`, end it afterwards; its output is in a file."""
    command = [sys.executable, SCRIPT, "run", "--at", str(cluster.folder), *words]
    with (cluster.folder / "printed").open("w") as printed:
        process = subprocess.Popen(command, cwd=REPO, stdout=printed, stderr=printed)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def wait_until(is_true):
    deadline = time.monotonic() + HANG_S
    while not is_true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


# Wrong usage, and machines that lack something


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("up --link fast", "argument --link: must be like 100mbit or 1gbit, not"),
        ("up --link 1gbit,soon", "argument --link: must be like 100mbit,1ms"),
        ("up --shm 8", "argument --shm: must be like 64m or 2g, not '8'"),
        ("up --nodes 33", "argument --nodes: must be 1 to 32, not '33'"),
        ("run", "run takes a command after --"),
        ("status", "no cluster is up at"),
        ("run -- true", "no cluster is up at"),
        ("down", "no cluster is up at"),
    ],
)
def test_wrong_usage_is_exit_code_2(tmp_path, words, says):
    verb, *rest = words.split()
    ended = ask(tmp_path / "cluster", verb, *rest)
    assert ended.codes == [2]
    assert says in ended.stderr.splitlines()[-1]
    assert not find_leftovers()


def test_a_machine_without_a_program_is_told_its_package(monkeypatch):
    monkeypatch.setattr(linux.shutil, "which", lambda *_, **__: None)
    with pytest.raises(linux.ClusterError, match="no program ip: install .* iproute2"):
        linux.check_machine()


def test_another_system_is_told_what_works_there(monkeypatch):
    monkeypatch.setattr(linux.sys, "platform", "darwin")
    with pytest.raises(linux.ClusterError, match="only Linux has namespaces. Without"):
        linux.check_machine()


@needs_nodes
def test_a_kernel_without_a_feature_is_named(tmp_path, monkeypatch, capsys):
    lines = "tc", ["qdisc replace dev lo root no_such_queue"]
    monkeypatch.setitem(linux.FEATURES, "tbf", lines)
    words = ["up", "--at", str(tmp_path / "cluster"), "--link", "1gbit"]
    monkeypatch.setattr(sys, "argv", [SCRIPT, *words])
    assert script.main() == 2
    says = "error: this kernel has no tbf (tc: Error: Specified qdisc kind is unknown.)"
    assert says in capsys.readouterr().err
    wait_until(lambda: not find_leftovers())


@needs_nodes
def test_delay_works_or_the_kernel_has_no_netem(cluster):
    ended = ask(cluster.folder, "up", "--link", "1gbit,1ms")
    if ended.codes == [0]:
        assert "1 ms by netem" in ended.stdout
    else:
        assert_one_line(ended, "this kernel has no netem (tc: ", "virtual_cluster.py")


# Nodes


DESCRIBE_NODE = """
import json, os, shutil, socket
print(json.dumps({
    "name": socket.gethostname(),
    "addresses": [socket.gethostbyname(n) for n in ("node0", "node1", "node1-link1")],
    "cards": sorted(os.listdir("/sys/class/net")),
    "processes": len([name for name in os.listdir("/proc") if name.isdecimal()]),
    "shm": shutil.disk_usage("/dev/shm").total,
}))
"""


@needs_nodes
def test_a_node_has_its_own_network_name_processes_and_memory(cluster):
    cluster("up", "--nodes", "2", "--cards", "2", "--shm", "8m")
    printed = cluster("run", "--", "python", "-c", DESCRIBE_NODE)
    for node in range(2):
        (line,) = lines_of(printed, node)
        assert json.loads(line) == {
            "name": f"node{node}",
            "addresses": ["10.77.0.1", "10.77.0.2", "10.77.1.2"],
            "cards": ["link0", "link1", "lo"],
            "processes": 2,  # the first one, and this one
            "shm": 8 << 20,
        }
    words = "echo {node} of {nodes} {name} {master} {x}"
    printed = cluster("run", "--on", "node1", "--", "sh", "-c", words)
    assert printed == "[node1] 0 of 1 node1 10.77.0.2 {x}\n"
    assert cluster("down") == "down\n"
    assert not find_leftovers()
    assert list(cluster.folder.iterdir()) == []


TRAFFIC = """
import socket, sys
if sys.argv[1] == "serve":
    listener = socket.create_server(("", 5000))
    print("ready", flush=True)
    while True:
        with listener.accept()[0] as peer:
            peer.sendall(b"hello")
try:
    with socket.create_connection((sys.argv[1], 5000), timeout=2) as peer:
        print(peer.recv(5).decode())
except OSError as error:
    print(error)
"""


@needs_nodes
def test_verbs_change_a_node(cluster):
    cluster("up", "--nodes", "2", "--cards", "2", "--link", "100mbit")

    def greet():
        return cluster("run", "--on", "0", "--", "python", "-c", TRAFFIC, "node1")

    with in_background(cluster, "--on", "1", "--", "python", "-c", TRAFFIC, "serve"):
        wait_until(lambda: "ready" in (cluster.folder / "printed").read_text())
        cluster("slow", "node1", "--card", "0", "--rate", "4mbit")
        assert "up  link0 4 Mbit/s, link1 100 Mbit/s" in cluster("status")
        shown = cluster("run", "--on", "1", "--", "tc", "qdisc", "show", "dev", "link0")
        assert "tbf" in shown and "rate 4Mbit" in shown
        assert greet() == "[node0] hello\n"
        assert cluster("cut", "1") == "node1: cables unplugged\n"
        assert "node1  10.77.0.2  cut" in cluster("status")
        assert greet() == "[node0] timed out\n"
        cluster("restore", "1")
        assert greet() == "[node0] hello\n"
    for words, says in (
        ("up", "a cluster is up already at"),
        ("cut node2", "no node 'node2': the nodes are node0 to node1"),
        ("slow 0 --card 2 --rate 1mbit", "--card 2: the cards are 0 to 1"),
        ("start node1", "node1 is up already"),
    ):
        verb, *rest = words.split()
        assert_one_line(ask(cluster.folder, verb, *rest), says, "virtual_cluster.py")
    ended = ask(cluster.folder, "run", "--", "bash", "-c", "exit {node}")
    assert ended.codes == [1]


# It leaves a process of its own behind, which is in no tree of the command any more.
SLEEPERS = "sleep 1000 & (setsid sleep 1000 &); echo up; sleep 1000; :"


def asleep():
    """Count the sleeping processes that this test has started."""
    count = 0
    for process in find_leftovers():
        with contextlib.suppress(psutil.NoSuchProcess):
            count += process.name() == "sleep"
    return count


@needs_nodes
def test_a_killed_node_loses_all_processes_and_comes_back_empty(cluster):
    cluster("up", "--nodes", "2")
    cluster("run", "--", "touch", "/dev/shm/a")
    with in_background(cluster, "--", "bash", "-c", SLEEPERS):
        wait_until(lambda: asleep() == 6)
        cluster("kill", "node1")
        assert asleep() == 3
        assert "node1  10.77.0.2  off" in cluster("status")
        refused = ask(cluster.folder, "cut", "1")
        assert_one_line(refused, "node1 is off: `start` boots", "virtual_cluster.py")
        cluster("start", "node1")
        printed = cluster("run", "--", "ls", "/dev/shm")
        assert [lines_of(printed, node) for node in range(2)] == [["a"], []]
    wait_until(lambda: not asleep())  # `run` was killed


@needs_nodes
@pytest.mark.parametrize("killed", ["switch", "run, gently"])
def test_nothing_outlives_what_was_killed(cluster, killed):
    cluster("up", "--nodes", "2", "--link", "100mbit")
    state = json.loads((cluster.folder / "cluster.json").read_text())
    saves = "trap 'echo saved; exit 3' TERM; " + SLEEPERS.replace(
        "sleep 1000; :", "wait"
    )
    with in_background(cluster, "--", "bash", "-c", saves) as run:
        wait_until(lambda: asleep() == 4)
        printed = cluster.folder / "printed"
        wait_until(lambda: printed.read_text().count("up") == 2)
        if killed == "switch":
            os.kill(state["pid"], signal.SIGKILL)
            assert run.wait(HANG_S) == 137
            wait_until(lambda: not find_leftovers())
            assert "no cluster is up" in ask(cluster.folder, "status").stderr
            cluster("up", "--nodes", "1")
        else:
            run.send_signal(signal.SIGTERM)
            assert run.wait(HANG_S) == 3
            wait_until(lambda: not asleep())
            assert printed.read_text().count("saved") == 2


@needs_nodes
@pytest.mark.skipif(os.geteuid() != 0, reason="other tests run without root already")
def test_it_needs_no_root(tmp_path):
    """Root that may not administer the system is a user like any other."""

    def verb(name, *words):
        powerless = ["setpriv", "--bounding-set", "-sys_admin", sys.executable, SCRIPT]
        return run_command([*powerless, name, "--at", str(tmp_path), *words], REPO, 200)

    up = verb("up")
    if "permits no nodes" in up.stderr:
        pytest.skip(up.stderr)
    try:
        state = json.loads((tmp_path / "cluster.json").read_text())
        assert state["in_user_namespace"]
        assert lines_of(verb("run", "--", "hostname").stdout, 1) == ["node1"]
        assert verb("kill", "node1").codes == [0]
    finally:
        assert verb("down").codes == [0]
