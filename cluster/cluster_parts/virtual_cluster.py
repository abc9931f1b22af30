"""The supervisor of a virtual cluster, the socket on which it is asked, and commands on its nodes.

The supervisor is process 1 of a PID namespace in which all nodes are: however it ends, the kernel
ends all of them with it. Only files in the cluster's folder are left then.
"""

import argparse
import contextlib
import fcntl
import json
import os
import re
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from legacy_common import cli

CARD = "link0"  # a node's first network card
# What a bucket lets through at once: few KB, so that short messages are slowed too, but a
# millisecond's bytes, so that a timer that fires late costs no speed.
BURST_BYTES, BURST_S = 32_768, 1e-3
PACKAGES = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
# In the supervisor's environment: the pipe on which `up` waits; set in a user namespace.
READY, USER = "VIRTUAL_CLUSTER_READY", "VIRTUAL_CLUSTER_USER"
# torchrun leaves its workers 30 seconds to save after a SIGTERM.
GRACE_S = 40
ANSWER_S = 60
MESSAGE = 65_536
INSTEAD = (
    ". What works without: two torchruns on one machine (--nnodes 2, --master-addr 127.0.0.1), "
    "and --link of the scripts that have it"
)


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are one line."""

    def error(self, message: str) -> None:
        raise cli.UsageError(message)


@dataclass(frozen=True)
class Link:
    """What a cable does: bytes/s (0: no limit) and seconds of delay in each direction."""

    rate: float = 0.0
    delay: float = 0.0


def link(text: str) -> Link:
    """Parse 1gbit or 1gbit,1ms."""
    rate, comma, delay = text.partition(",")
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms)", delay)
    if comma and not match:
        raise argparse.ArgumentTypeError(f"must be like 1gbit or 100mbit,1ms, not {text!r}")
    scale = {"us": 1e-6, "ms": 1e-3}
    return Link(cli.link_rate(rate), float(match[1]) * scale[match[2]] if match else 0.0)


def share(text: str) -> float:
    """Parse 2%."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)%", text)
    if not match or float(match[1]) > 100:
        raise argparse.ArgumentTypeError(f"must be from 0% to 100%, not {text!r}")
    return float(match[1]) / 100


def clock(text: str) -> tuple[str, float]:
    """Parse node1=+1h; return the node and seconds."""
    match = re.fullmatch(r"(?:node)?(\d+)=([+-]?\d+(?:\.\d+)?)(s|m|h|d)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"must be like node1=+1h or node0=-20s, not {text!r}")
    return f"node{match[1]}", float(match[2]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[3]]


def signal_of(text: str) -> int:
    """Parse SIGTERM, TERM or 15."""
    name = text.upper() if text.upper().startswith("SIG") else f"SIG{text.upper()}"
    with contextlib.suppress(KeyError, ValueError):
        return int(signal.Signals(int(text)) if text.isdecimal() else signal.Signals[name])
    raise argparse.ArgumentTypeError(f"must be a signal such as SIGTERM, not {text!r}")


def mbit(rate: float) -> str:
    return f"{rate * 8 / 1e6:g} Mbit/s" if rate else "no limit"


def address(node: int, card: int = 0) -> str:
    """Return the address of a node's card: nodes count from 0, addresses from 1."""
    return f"10.77.{card}.{node + 1}"


# Commands of Linux


def program(name: str) -> str:
    """Return a program's path. Raises: UsageError with the package that has it."""
    path = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"  # a user's may lack them
    found = shutil.which(name, path=path)
    if found is None:
        raise cli.UsageError(f"no program {name} (the package {PACKAGES[name]} has it)")
    return found


def run(name: str, *lines: str, pid: int | None = None) -> None:
    """Hand lines to ip or tc, in the network of a process if one is given.

    Raises: OSError with the program's first line of complaint.
    """
    inside = [program("nsenter"), f"--net=/proc/{pid}/ns/net"] if pid else []
    command = [*inside, program(name), "-batch", "-"]
    ended = subprocess.run(
        command, input="\n".join(lines) + "\n", capture_output=True, text=True, timeout=60
    )
    if ended.returncode:
        raise OSError(f"{name}: {ended.stderr.strip().partition(chr(10))[0]}")


def queues(device: str, rate: float, delay: float, loss: float) -> list[str]:
    """Return tc's lines for what leaves through a card: late or lost, then a token bucket."""
    place, lines = "root", []
    if delay or loss:
        netem = f"netem delay {round(delay * 1e6)}us loss {100 * loss:g}% limit 100000"
        lines.append(f"qdisc replace dev {device} root handle 1: {netem}")
        place = "parent 1:1"
    if rate:
        burst = max(BURST_BYTES, round(rate * BURST_S))
        bucket = f"tbf rate {round(rate * 8)}bit burst {burst}b latency 200ms"
        lines.append(f"qdisc replace dev {device} {place} {bucket}")
    return lines or [f"qdisc replace dev {device} root pfifo"]


def need_netem() -> None:
    """Refuse a delay or a loss where the kernel has no netem. To be called on the switch."""
    try:
        run("tc", "qdisc replace dev lo root netem delay 1us", "qdisc del dev lo root")
    except OSError as error:
        why = f"this kernel has no netem, which delays and loses packets ({error})"
        raise cli.UsageError(why) from None


def host_id(pid: int | str) -> dict:
    """Return what tells a process from a later one with its number."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return {"pid": int(pid), "started": int(fields[19])}


def pid_in(host_pid: int) -> int:
    """Return a node's process as its supervisor counts: in the namespace above its own."""
    status = Path(f"/proc/{host_pid}/status").read_text()
    return int(re.search(r"^NSpid:.*?(\d+)\t\d+$", status, re.M)[1])


# A node's first process: prints its number for the machine, then only reaps orphans.
FURNISH = """
set -e
hostname "$1"
read -r pid _ </proc/self/stat
[ ! -d /sys/fs/cgroup ] || exec 3</sys/fs/cgroup
mount -t tmpfs -o "size=$3,mode=1777" tmpfs /dev/shm
mount -t tmpfs -o "size=$4,mode=1777" tmpfs "$2/disk"
mount --bind "$2/hosts" /etc/hosts
mount -t proc proc /proc      # its own processes
mount -t sysfs sysfs /sys     # its own cards
[ ! -d /sys/fs/cgroup ] || mount --rbind /proc/self/fd/3 /sys/fs/cgroup
echo "$pid"
exec env --ignore-signal=CHLD tail -f /dev/null >/dev/null 2>&1 3>&-
"""
OWN = ("--pid", "--mount", "--net", "--uts", "--ipc")  # namespaces of a node


def boot(name: str, folder: Path, shm: int, disk: int) -> tuple[subprocess.Popen, int]:
    """Start a node's first process; return unshare's process, and the number of the first one.

    Raises: OSError with what it could not do.
    """
    command = [program("unshare"), *OWN, "--fork", "--kill-child", "bash", "-c", FURNISH]
    started = subprocess.Popen(
        [*command, "bash", name, str(folder), str(shm), str(disk)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    said = started.stdout.readline().strip()
    if not said.isdecimal():
        raise OSError(started.communicate()[1].strip() or "a node's first process was killed")
    return started, int(said)


# The supervisor


def up(folder: Path) -> str:
    """Start this script again as a supervisor; return what it says once it is ready."""
    claim(folder)
    for name in PACKAGES:
        program(name)
    ours, theirs = os.pipe()
    unshare, environ = [program("unshare")], os.environ | {READY: str(theirs)}
    if subprocess.run([*unshare, "--net", "true"], capture_output=True).returncode:
        unshare += ["--user", "--map-root-user"]
        environ[USER] = "yes"
    command = [*unshare, "--pid", "--mount", "--net", "--fork", "--kill-child", sys.executable]
    with (folder / "supervisor.log").open("w") as log:
        process = subprocess.Popen(
            [*command, *sys.argv], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            pass_fds=[theirs], env=environ, start_new_session=True,
        )  # fmt: skip
    os.close(theirs)
    said = os.read(ours, MESSAGE).decode()  # once: unshare keeps the pipe open
    os.close(ours)
    if said.startswith("ready: "):
        return said.removeprefix("ready: ")
    process.wait()
    problem = (folder / "supervisor.log").read_text().strip().splitlines() or ["it was killed"]
    raise cli.UsageError(said or f"this machine permits no nodes: {problem[-1]}{INSTEAD}")


def claim(folder: Path) -> None:
    """Make the cluster's folder. Raises: UsageError where files are that `down` would remove."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        ours = any((folder / name).exists() for name in ("lock", "supervisor.log"))
        taken = [name for name in ("disk", "hosts", "clock") if (folder / name).exists()]
        if taken and not ours:
            raise cli.UsageError(f"--at {folder}: {taken[0]} in it is no cluster's: another folder")
        with (folder / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folder / "disk").mkdir(exist_ok=True)
    except BlockingIOError:
        raise cli.UsageError(f"a cluster is up already at {folder}: `down` ends it") from None
    except OSError as error:
        raise cli.UsageError(f"--at {folder}: {error.strerror}") from None


def refuse_other_systems() -> None:
    if not sys.platform.startswith("linux"):
        raise cli.UsageError("a virtual cluster needs namespaces, which Linux has" + INSTEAD)


def supervise(folder: Path, build) -> None:
    """Build the cluster, say so, and answer until told to end. Process 1 of its namespace."""
    with os.fdopen(int(os.environ.pop(READY)), "w") as ready, (folder / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for name in ("socket", "cluster.json", "events.jsonl"):
                (folder / name).unlink(missing_ok=True)
            supervisor = Supervisor(folder, build())
        except cli.UsageError as error:
            ready.write(str(error))
            return
        except OSError as error:
            ready.write(f"this machine permits no nodes: {error}{INSTEAD}")
            return
        ready.write(f"ready: {supervisor.status()}")
        ready.close()
        supervisor.serve()


class Supervisor:
    """Answers on a socket, and notes what happens in events.jsonl."""

    def __init__(self, folder: Path, cluster) -> None:
        self.folder, self.cluster = folder, cluster
        self.wake, wake = os.pipe2(os.O_NONBLOCK)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # Its path may be longer than a socket's may be.
        inside = os.open(folder, os.O_PATH)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.bind(f"/proc/self/fd/{inside}/socket")
        self.socket.listen(64)
        os.close(inside)
        self.runs: dict[socket.socket, str] = {}  # connections that `run` keeps open: its name
        self.ended = False
        self.user_namespace = USER in os.environ  # root here is another user outside
        self.note("up", user_namespace=self.user_namespace)
        self.write_state()

    def serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self.wake, selectors.EVENT_READ)
            selector.register(self.socket, selectors.EVENT_READ)
            while not self.ended:
                for key, _ in selector.select():
                    if key.fileobj is self.socket:
                        connection, _ = self.socket.accept()
                        connection.settimeout(5)
                        with contextlib.suppress(OSError):
                            self.answer(connection)
                        if connection in self.runs:
                            selector.register(connection, selectors.EVENT_READ)
                        else:
                            connection.close()
                    elif key.fileobj in self.runs:  # `run` has ended, or was killed
                        selector.unregister(key.fileobj)
                        self.kill_run(self.runs.pop(key.fileobj))
                        key.fileobj.close()
                    else:
                        with contextlib.suppress(BlockingIOError):
                            os.read(self.wake, MESSAGE)
                self.reap()

    def answer(self, connection: socket.socket) -> None:
        try:
            reply = {"text": self.do(json.loads(connection.recv(MESSAGE)), connection)}
        except Exception as error:  # a verb that fails must not end the cluster
            reply = {"error": getattr(error, "strerror", None) or str(error) or repr(error)}
        connection.send(json.dumps(reply).encode())

    def do(self, asked: dict, connection: socket.socket) -> str:
        """Do what a verb says; return what to print. `run` gets the nodes to enter."""
        verb = asked.pop("verb")
        if verb == "status":
            return self.status()
        if verb == "down":
            self.ended = True
            self.note("down")
            return os.readlink("/proc/self")
        if verb == "run":
            return self.start_run(connection, **asked)
        if verb == "ended":
            self.note("ended", self.find(asked["node"]), code=asked["code"])
            return ""
        node = self.find(asked.pop("node"), alive=verb != "start")
        if verb == "start" and node.pid:
            raise cli.UsageError(f"{node.name} is up already")
        if asked.get("card") is not None and asked["card"] not in self.cluster.cards:
            last = len(self.cluster.cards) - 1
            raise cli.UsageError(f"--card {asked['card']}: the cards are 0 to {last}")
        note = {name: value for name, value in asked.items() if value is not None}
        do = self.signal if verb == "signal" else getattr(self.cluster, verb)
        text = do(node, **asked)
        self.note(verb, node, **note)
        if verb == "kill":
            self.wait_for(node)
        self.write_state()
        return text

    def find(self, name: str, alive: bool = False):
        """Return a node by its name or number."""
        nodes = self.cluster.nodes
        for node in nodes:
            if name in (node.name, str(node.number)):
                if alive and not node.pid:
                    raise cli.UsageError(f"{node.name} is off: `start {node.name}` boots it")
                return node
        raise cli.UsageError(f"no node {name!r}: the nodes are node0 to {nodes[-1].name}")

    def start_run(self, connection: socket.socket, on: str | None, command: list[str]) -> str:
        """Note a run, which lives as long as its connection; return where its nodes are."""
        names = [name for name in (on or "").split(",") if name]
        nodes = [self.find(name, alive=True) for name in names]
        nodes = nodes or [node for node in self.cluster.nodes if node.pid]
        if not nodes:
            raise cli.UsageError("no node is up: start one")
        for node in nodes:
            self.note("run", node, command=command)
        clocks = dict(self.cluster.args.clock)
        self.runs[connection] = f"{time.monotonic_ns()}"
        places = [(node.number, node.host_pid, clocks.get(node.name)) for node in nodes]
        told = {"run": self.runs[connection], "user": self.user_namespace, "nodes": places}
        return json.dumps(told)

    def kill_run(self, name: str) -> None:
        """Kill what a run has started and left behind, until nothing is there."""
        left = True
        while left:
            left = [pid for node in self.cluster.nodes if node.pid
                    for pid, _, environment in self.processes(node).values()
                    if environment.get("VIRTUAL_RUN") == name]  # fmt: skip
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.reap()

    def wait_for(self, node) -> None:
        """Wait until a killed node is gone: the kernel ends its other processes first."""
        deadline = time.monotonic() + 5
        while node.pid and time.monotonic() < deadline:
            self.reap()
            time.sleep(0.005)
        self.died(node)

    def reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                for node in self.cluster.nodes:
                    if node.pid == pid:
                        self.died(node)

    def died(self, node) -> None:
        if node.pid:
            node.process = node.host_pid = None
            self.cluster.unplug(node)
            self.note("died", node)
            self.write_state()

    def processes(self, node) -> dict[int, tuple[int, int, dict]]:
        """Return what runs on a node by {pid: (pid for us, parent, environment)}.

        The environment is what a command is started with, not what it sets.
        """
        found = {}
        space = os.stat(f"/proc/{node.host_pid}/ns/pid").st_ino
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, TypeError):  # it has ended
                if os.stat(folder / "ns/pid").st_ino != space:
                    continue
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                state, parent = fields[0], int(fields[1])
                pairs = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
                environment = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
                if environment.get("VIRTUAL_NODE") == node.name and state != "Z":
                    pid = int(folder.name)
                    found[pid] = pid_in(pid), parent, environment
        return found

    def signal(self, node, target: str, signal: int) -> str:
        """Send a signal to the agents (what `run` started) or to workers, of one local rank."""
        kind, _, rank = target.partition(":")
        if kind not in ("agent", "worker") or (rank and (kind == "agent" or not rank.isdecimal())):
            raise cli.UsageError(f"{target!r}: must be agent, worker or worker:LOCAL_RANK")
        found = self.processes(node)
        name = {"agent": "VIRTUAL_NODE", "worker": "LOCAL_RANK"}[kind]
        pids = []
        for pid, parent, environment in found.values():
            above = found.get(parent, (0, 0, {}))[2]  # a worker's own children have its variables
            if name in environment and name not in above and rank in ("", environment[name]):
                pids.append(pid)
        if not pids:
            raise cli.UsageError(f"{node.name}: no {target} runs there")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal)
        return f"{node.name}: signal {signal} to {len(pids)} process{'es' * (len(pids) > 1)}"

    def status(self) -> str:
        rows = [self.cluster.says()]
        for node in self.cluster.nodes:
            state = "off" if not node.pid else "cut" if node.cut else "up"
            usual = self.cluster.args.link.rate
            rates = ", ".join(
                f"link{card} {mbit(node.rates.get(card, usual))}" for card in self.cluster.cards
            )
            loss = f", {100 * node.loss:g}% lost" if node.loss else ""
            running = len(self.processes(node)) if node.pid else 0
            where = address(node.number)
            rows.append(f"{node.name}  {where}  {state}  {rates}{loss}  processes: {running}")
        return "\n".join(rows)

    def note(self, event: str, node=None, **more) -> None:
        """Add a line to the event log."""
        line = {"time": time.time(), "event": event} | ({"node": node.name} if node else {}) | more
        with (self.folder / "events.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")

    def write_state(self) -> None:
        nodes = [{"name": node.name, "cut": node.cut,
                  "addresses": [address(node.number, card) for card in self.cluster.cards],
                  **(host_id(node.host_pid) if node.pid else {"pid": None})}
                 for node in self.cluster.nodes]  # fmt: skip
        state = {**host_id(os.readlink("/proc/self")), "nodes": nodes}
        (self.folder / "cluster.new").write_text(json.dumps(state, indent=1))
        (self.folder / "cluster.new").replace(self.folder / "cluster.json")


# Asking it


def connect(folder: Path, verb: str, **arguments) -> tuple[socket.socket, str]:
    """Ask the supervisor to do something; return the connection and what it says."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(ANSWER_S)
    try:
        inside = os.open(folder, os.O_PATH)
        connection.connect(f"/proc/self/fd/{inside}/socket")
        os.close(inside)
        connection.send(json.dumps({"verb": verb, **arguments}).encode())
        message = connection.recv(MESSAGE)
    except (FileNotFoundError, NotADirectoryError, ConnectionError):
        raise cli.UsageError(f"no cluster is up at {folder}: `up` starts one") from None
    reply = json.loads(message or '{"error": "the supervisor was killed"}')
    if "error" in reply:
        raise cli.UsageError(reply["error"])
    return connection, reply["text"]


def ask(folder: Path, verb: str, **arguments) -> str:
    """Ask the supervisor to do something; return what it says."""
    connection, text = connect(folder, verb, **arguments)
    connection.close()
    return text


def down(folder: Path) -> str:
    """End a cluster, or remove the files of one that was killed; return what was done."""
    said = "down"
    try:
        pid = int(ask(folder, "down"))
        with contextlib.suppress(ProcessLookupError):  # the kernel ends its nodes before it
            ending = os.pidfd_open(pid)
            select.select([ending], [], [], ANSWER_S)
            os.close(ending)
    except cli.UsageError:
        if not (folder / "cluster.json").exists():
            raise
        said = "it was killed before; removed what it had left"
    for name in ("socket", "cluster.json", "hosts", "lock"):
        (folder / name).unlink(missing_ok=True)
    for name in ("clock", "disk"):
        shutil.rmtree(folder / name, ignore_errors=True)
    return said


# Running on nodes


def filled(argument: str, words: dict) -> str:
    """Fill in the placeholders of an argument; other text in braces stays as it is."""
    pattern = r"\{\{|\}\}|\{(" + "|".join(words) + r")\}"
    return re.sub(pattern, lambda m: str(words[m[1]]) if m[1] else m[0][0], argument)


CLOCK = """# This node's clock is wrong, for Python's time() and time_ns().
import os
import time

offset = float(os.environ["VIRTUAL_CLOCK_S"])
right, right_ns = time.time, time.time_ns
time.time = lambda: right() + offset
time.time_ns = lambda: right_ns() + round(offset * 1e9)
"""


def environment_of(name: str, run: str, folder: Path, offset: float | None) -> dict[str, str]:
    """Return what is set for a command on a node."""
    get = os.environ.get
    found = {
        "OMP_NUM_THREADS": get("OMP_NUM_THREADS", "1"),
        "GLOO_SOCKET_IFNAME": CARD,
        "NCCL_SOCKET_IFNAME": CARD,
        "VIRTUAL_NODE": name,
        "VIRTUAL_RUN": run,
        "PATH": f"{os.path.dirname(sys.executable)}:{get('PATH', os.defpath)}",
    }
    if offset is not None:  # every Python imports a sitecustomize that it finds
        (folder / "clock").mkdir(exist_ok=True)
        (folder / "clock" / "sitecustomize.py").write_text(CLOCK)
        found["VIRTUAL_CLOCK_S"] = str(offset)
        found["PYTHONPATH"] = f"{folder / 'clock'}:{get('PYTHONPATH', '')}".rstrip(":")
    return found


# In a namespace of mounts the way to the working directory starts anew.
ENTER = 'cd "$0" && exec "$@"'


def run_on_nodes(folder: Path, on: str | None, command: list[str]) -> int:
    """Run a command on nodes at once; return 0, or the code of the first that failed."""
    connection, said = connect(folder, "run", on=on, command=command)
    told = json.loads(said)
    enter = [program("nsenter"), *OWN]
    if told["user"]:
        enter += ["--user", "--preserve-credentials"]
    master = address(told["nodes"][0][0])
    started: list[subprocess.Popen] = []
    deadline = float("inf")

    def hand_on(number: int, _) -> None:
        """Pass SIGTERM or SIGINT on, so that jobs save; a second one does not wait for them."""
        nonlocal deadline
        deadline = time.monotonic() + (GRACE_S if deadline == float("inf") else 0)
        for process in started:
            with contextlib.suppress(psutil.Error):
                for agent in psutil.Process(process.pid).children():
                    agent.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, hand_on)
    lock, printers = threading.Lock(), []
    for place, (number, pid, offset) in enumerate(told["nodes"]):
        name = f"node{number}"
        words = {"node": place, "nodes": len(told["nodes"]), "name": name, "master": master,
                 "disk": str(folder / "disk")}  # fmt: skip
        filled_in = [filled(argument, words) for argument in command]
        environment = environment_of(name, told["run"], folder, offset)
        process = subprocess.Popen(
            [*enter, f"--target={pid}", "sh", "-c", ENTER, os.getcwd(), *filled_in],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=os.environ | environment, start_new_session=True,
        )  # fmt: skip
        started.append(process)
        for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            printer = threading.Thread(target=copy_lines, args=(name, source, target, lock))
            printer.start()
            printers.append(printer)
    code = 0
    running = dict(zip(started, told["nodes"], strict=True))
    while running:
        for process in [one for one in running if one.poll() is not None]:
            number = running.pop(process)[0]
            ended = process.returncode if process.returncode >= 0 else 128 - process.returncode
            code = code or ended
            with contextlib.suppress(cli.UsageError):  # the supervisor may be gone
                ask(folder, "ended", node=str(number), code=ended)
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    connection.close()  # the supervisor kills what is left
    for printer in printers:
        printer.join()
    return code or (137 if running else 0)


def copy_lines(name: str, source, target, lock: threading.Lock) -> None:
    """Print a command's lines with the name of its node before them."""
    for line in source:
        with lock:
            target.write(f"[{name}] {line.decode(errors='replace').rstrip(chr(10))}\n")
            target.flush()
