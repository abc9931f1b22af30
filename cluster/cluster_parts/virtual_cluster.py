"""The supervisor of a virtual cluster, the socket on which it is asked, and processes on its nodes.

The supervisor is process 1 of a PID namespace in which all nodes are: however it ends, the kernel
ends all of them with it. Only files in the cluster's folder are left then.
"""

import argparse
import contextlib
import ctypes
import fcntl
import heapq
import itertools
import json
import os
import random
import re
import select
import selectors
import shutil
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from dist_common import cli
from dist_common.lab.namespaces import CARD, CLONE_NEWNET, address, become_root, call, run

CLONE_NEWNS, CLONE_NEWPID, ANY = 0x20000, 0x20000000, 0
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000  # mount(2)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
KINDS = ("user", "pid", "mnt", "net", "uts", "ipc")  # in the order in which they are entered
# torchrun leaves its workers 30 seconds to save after a SIGTERM.
GRACE_S = 40
ANSWER_S = 60
MESSAGE = 65_536


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
        return int(signal.Signals[name] if not text.isdecimal() else signal.Signals(int(text)))
    raise argparse.ArgumentTypeError(f"must be a signal such as SIGTERM, not {text!r}")


def mbit(rate: float) -> str:
    return f"{rate * 8 / 1e6:g} Mbit/s" if rate else "no limit"


def in_user_namespace() -> bool:
    """Say whether root here is another user outside."""
    return Path("/proc/self/uid_map").read_text().split()[1] != "0"


def host_id(pid: int | str) -> dict:
    """Return what tells a process from a later one with its number."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return {"pid": int(pid), "started": int(fields[19])}


# making a node


def mount(source, target, options: str | None = None, flags: int = 0) -> None:
    """Mount a file system, named by its type, or with MS_BIND a file or folder."""
    encode = [None if text is None else os.fsencode(text) for text in (source, target, options)]
    kind = None if flags else encode[0]
    try:
        call("mount", encode[0], encode[1], kind, ctypes.c_ulong(flags), encode[2])
    except OSError as error:
        raise OSError(error.errno, f"mount {target}: {os.strerror(error.errno)}") from None


def open_folder(path: str) -> int | None:
    """Open a folder that a mount is about to cover; None if there is none."""
    with contextlib.suppress(FileNotFoundError):
        return os.open(path, os.O_PATH | os.O_DIRECTORY)
    return None


def fork_init(furnish) -> tuple[int, int]:
    """Fork process 1 of a new PID namespace; return its number for us and for the machine.

    Raises: OSError with what it could not do.
    """
    home = os.open("/proc/self/ns/pid", os.O_RDONLY)
    ours, theirs = os.pipe()
    call("unshare", CLONE_NEWPID)  # for the children from now on
    pid = os.fork()
    if pid == 0:
        try:
            host_pid = os.readlink("/proc/self")  # /proc is still the machine's
            furnish()
            os.write(theirs, host_pid.encode())
        except BaseException as error:
            os.write(theirs, (getattr(error, "strerror", None) or str(error)).encode())
            os._exit(1)
        os.closerange(3, 4096)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps what it inherits
        while True:
            signal.pause()
    call("setns", home, CLONE_NEWPID)
    os.close(home)
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        said = pipe.read()
    if not said.isdecimal():
        raise OSError(0, said or "a node's first process was killed")
    return pid, int(said)


# packets that are late or lost


def lose_by_filter(port: str, share: float) -> None:
    """Lose a share of a port's packets, in each direction, by a filter in the kernel."""
    with contextlib.suppress(OSError):  # there was none
        run("tc", f"qdisc delete dev {port} clsact")
    if not share:
        return
    # Classic BPF: load a random number (SKF_AD_OFF + SKF_AD_RANDOM); below the limit it returns 2,
    # TC_ACT_SHOT, otherwise -1, "go on".
    limit = min(2**32 - 1, round(share * 2**32))
    program = f"4,32 0 0 {0xFFFFF000 + 56},53 0 1 {limit},6 0 0 {2**32 - 1},6 0 0 2"
    both = ("ingress", "egress")
    try:
        run("tc", f"qdisc add dev {port} clsact")
        run("tc", *(f'filter add dev {port} {way} bpf da bytecode "{program}"' for way in both))
    except OSError as error:
        raise cli.UsageError(
            f"this kernel cannot lose packets ({error.strerror or error}); with a delay, as in "
            "`up --link 1gbit,1ms`, our own switch does"
        ) from None


class LateSwitch:
    """A switch in user space: a process that hands on what ports receive, late.

    It sees packets as the kernel has them, up to 64 KiB long, with a header that says how they are
    to be cut and what sums are still to be made (packet(7), PACKET_VNET_HDR).
    """

    SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
    ALL = 0x0003  # protocols
    BUFFER_BYTES = 1 << 24

    def __init__(self, delay: float) -> None:
        self.delay = delay
        self.ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.dup2(theirs.fileno(), 3)
                os.closerange(4, 4096)  # `up` reads until nobody writes any more
                self.carry(socket.socket(fileno=3))
            finally:
                os._exit(1)
        theirs.close()

    def connect(self, port: str, card: int) -> None:
        """Take over a port of the switch's namespace."""
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0) as raw:
            raw.setsockopt(self.SOL_PACKET, self.PACKET_VNET_HDR, 1)
            raw.setsockopt(self.SOL_PACKET, self.PACKET_IGNORE_OUTGOING, 1)
            for plain, forced in ((socket.SO_RCVBUF, 33), (socket.SO_SNDBUF, 32)):
                try:
                    raw.setsockopt(socket.SOL_SOCKET, forced, self.BUFFER_BYTES)
                except PermissionError:
                    raw.setsockopt(socket.SOL_SOCKET, plain, self.BUFFER_BYTES)
            raw.bind((port, self.ALL))
            told = json.dumps({"port": port, "card": card}).encode()
            socket.send_fds(self.ours, [told], [raw.fileno()])

    def lose(self, port: str, share: float) -> None:
        self.ours.send(json.dumps({"port": port, "loss": share}).encode())

    def carry(self, orders: socket.socket) -> None:
        self.ports: dict[str, socket.socket] = {}
        self.cards: dict[str, int] = {}  # by port
        self.loss: dict[str, float] = {}
        self.known: dict[bytes, str] = {}  # port by MAC address
        self.waiting: list = []  # a heap of (due, number, ports, packet)
        self.numbers = itertools.count()
        while True:
            wait = max(0.0, self.waiting[0][0] - time.monotonic()) if self.waiting else None
            ready, _, _ = select.select([orders, *self.ports.values()], [], [], wait)
            self.send_due()
            if orders in ready:
                self.obey(orders)
            for port, raw in self.ports.items():
                if raw in ready:
                    self.receive(port, raw)

    def obey(self, orders: socket.socket) -> None:
        message, descriptors, *_ = socket.recv_fds(orders, MESSAGE, 1)
        order = json.loads(message)
        port = order["port"]
        self.loss[port] = order.get("loss", 0.0)
        if descriptors:
            self.ports[port] = socket.socket(fileno=descriptors[0])
            self.ports[port].setblocking(False)
            self.cards[port] = order["card"]

    def receive(self, port: str, raw: socket.socket) -> None:
        for _ in range(64):  # then the others
            try:
                packet = raw.recv(70_000)
            except OSError:  # no more, or unplugged
                return
            target, source = packet[10:16], packet[16:22]  # behind the header of 10 bytes
            self.known[source] = port
            peers = [
                one for one in self.ports if one != port and self.cards[one] == self.cards[port]
            ]
            targets = [self.known[target]] if target in self.known else peers
            arrives = [one for one in targets
                       if random.random() >= max(self.loss[port], self.loss[one])]  # fmt: skip
            due = time.monotonic() + self.delay
            heapq.heappush(self.waiting, (due, next(self.numbers), arrives, packet))

    def send_due(self) -> None:
        while self.waiting and self.waiting[0][0] <= time.monotonic():
            _, _, targets, packet = heapq.heappop(self.waiting)
            for port in targets:
                with contextlib.suppress(OSError):  # unplugged, or its queue is full
                    self.ports[port].send(packet)


# the supervisor


def up(folder: Path, build) -> str:
    """Start a supervisor that builds the cluster; return what it says once it is ready."""
    claim(folder)
    ours, theirs = os.pipe()
    if os.fork() == 0:
        os.close(ours)
        try:
            os.setsid()
            become_root()
            call("unshare", CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWNET)
            if os.fork() == 0:
                os.dup2(theirs, 3)
                theirs = 3
                os.closerange(4, 4096)  # what a test or a terminal had open
                _supervise(folder, build, theirs)
        except cli.UsageError as error:
            os.write(theirs, str(error).encode())
        except BaseException as error:
            problem = getattr(error, "strerror", None) or error
            os.write(theirs, f"this machine permits no nodes: {problem}{INSTEAD}".encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        said = pipe.read()
    os.wait()
    if not said.startswith("ready: "):
        raise cli.UsageError(said or "the supervisor was killed")
    return said.removeprefix("ready: ")


def claim(folder: Path) -> None:
    """Make the cluster's folder. Raises: UsageError where files are that `down` would remove."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        ours = any((folder / name).exists() for name in ("lock", "supervisor.log"))
        taken = [name for name in ("disk", "hosts", "clock") if (folder / name).exists()]
        if taken and not ours:
            raise cli.UsageError(f"--at {folder}: {taken[0]} in it is no cluster's: another folder")
        (folder / "lock").touch()
        (folder / "disk").mkdir(exist_ok=True)
    except OSError as error:
        raise cli.UsageError(f"--at {folder}: {error.strerror}") from None


def refuse_other_systems() -> None:
    if not sys.platform.startswith("linux"):
        raise cli.UsageError("a virtual cluster needs namespaces, which Linux has" + INSTEAD)


INSTEAD = (". What works without: two torchruns on one machine (--nnodes 2, --master-addr "
           "127.0.0.1), and --link of the scripts that have it")  # fmt: skip


def _supervise(folder: Path, build, ready: int) -> None:
    """Build the cluster, say so, and answer until told to end. Process 1 of its namespace."""
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise cli.UsageError(f"a cluster is up already at {folder}: `down` ends it") from None
    for name in ("socket", "cluster.json", "events.jsonl"):
        (folder / name).unlink(missing_ok=True)
    log = os.open(folder / "supervisor.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    null = os.open(os.devnull, os.O_RDWR)
    for target, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, target)
    mount(None, "/", flags=MS_REC | MS_PRIVATE)
    supervisor = Supervisor(folder, build())
    os.write(ready, b"ready: " + supervisor.status().encode())
    os.close(ready)
    supervisor.serve()
    os._exit(0)


class Supervisor:
    """Answers on a socket, and notes what happens in events.jsonl."""

    def __init__(self, folder: Path, cluster) -> None:
        self.folder, self.cluster = folder, cluster
        self.wake, wake = os.pipe2(os.O_NONBLOCK)
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # Its path may be longer than a socket's may be.
        inside = os.open(folder, os.O_PATH)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.bind(f"/proc/self/fd/{inside}/socket")
        self.socket.listen(64)
        os.close(inside)
        self.ended = False
        self.note("up", user_namespace=in_user_namespace())
        self.write_state()

    def serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self.wake, selectors.EVENT_READ)
            selector.register(self.socket, selectors.EVENT_READ)
            while not self.ended:
                for key, _ in selector.select():
                    if key.fileobj is self.socket:
                        connection, _ = self.socket.accept()
                        with connection, contextlib.suppress(OSError):
                            connection.settimeout(5)
                            self.answer(connection)
                    else:
                        with contextlib.suppress(BlockingIOError):
                            os.read(self.wake, MESSAGE)
                self.reap()

    def answer(self, connection: socket.socket) -> None:
        descriptors = []
        try:
            reply = {"text": self.do(json.loads(connection.recv(MESSAGE)), descriptors)}
        except Exception as error:  # a verb that fails must not end the cluster
            reply = {"error": getattr(error, "strerror", None) or str(error) or repr(error)}
        socket.send_fds(connection, [json.dumps(reply).encode()], descriptors)
        for descriptor in descriptors:
            os.close(descriptor)

    def do(self, asked: dict, descriptors: list[int]) -> str:
        """Do what a verb says; return what to print. `run` gets descriptors of namespaces."""
        verb = asked.pop("verb")
        if verb == "status":
            return self.status()
        if verb == "down":
            self.ended = True
            self.note("down")
            return str(host_id(os.readlink("/proc/self"))["pid"])
        if verb == "enter":
            nodes = [self.find(name, alive=True) for name in (asked["on"] or "").split(",") if name]
            nodes = nodes or [node for node in self.cluster.nodes if node.pid]
            if not nodes:
                raise cli.UsageError("no node is up: start one")
            for node in nodes:
                for kind in KINDS:
                    path = f"/proc/{node.host_pid}/ns/{kind}"
                    descriptors.append(os.open(path, os.O_RDONLY))
                self.note("run", node, command=asked["command"])
            clocks = dict(self.cluster.args.clock)
            return json.dumps([(node.number, clocks.get(node.name)) for node in nodes])
        if verb == "ended":
            self.note("ended", self.find(asked["node"]), code=asked["code"])
            return ""
        node = self.find(asked.pop("node"), alive=None if verb == "start" else True)
        if verb == "start" and node.pid:
            raise cli.UsageError(f"{node.name} is up already")
        if asked.get("card") is not None and asked["card"] not in self.cluster.cards:
            last = len(self.cluster.cards) - 1
            raise cli.UsageError(f"--card {asked['card']}: the cards are 0 to {last}")
        note = {name: value for name, value in asked.items() if value is not None}
        if verb == "signal":
            text = self.signal(node, **asked)
        else:
            text = getattr(self.cluster, verb)(node, **asked)
        self.note(verb, node, **note)
        if verb == "kill":
            self.wait_for(node)
        self.write_state()
        return text

    def find(self, name: str, alive: bool | None = None):
        """Return a node by its name or number."""
        nodes = self.cluster.nodes
        for node in nodes:
            if name in (node.name, str(node.number)):
                if alive and not node.pid:
                    raise cli.UsageError(f"{node.name} is off: `start {node.name}` boots it")
                return node
        raise cli.UsageError(f"no node {name!r}: the nodes are node0 to {nodes[-1].name}")

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
            node.pid = node.host_pid = None
            self.cluster.unplug(node)
            self.note("died", node)
            self.write_state()

    def processes(self, node) -> dict[int, tuple[int, dict]]:
        """Return a node's processes, its first one and `run`'s own left out.

        As {pid for us: (parent, environment)}: what a command is started with, not what it sets.
        """
        found = {}
        space = os.stat(f"/proc/{node.host_pid}/ns/pid").st_ino
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, KeyError):  # it has ended
                if os.stat(folder / "ns/pid").st_ino != space:
                    continue
                lines = dict(line.split(":\t", 1)
                             for line in (folder / "status").read_text().splitlines()
                             if ":\t" in line)  # fmt: skip
                pairs = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
                environment = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
                if environment.get("VIRTUAL_NODE") == node.name and lines["State"][0] != "Z":
                    pid = int(lines["NSpid"].split()[-2])
                    found[int(folder.name)] = pid, int(lines["PPid"]), environment
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
            state = "cut" if node.cut else "up" if node.pid else "off"
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


# asking it


def _ask(folder: Path, verb: str, **arguments) -> tuple[str, list[int]]:
    try:
        inside = os.open(folder, os.O_PATH)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(ANSWER_S)
            connection.connect(f"/proc/self/fd/{inside}/socket")
            os.close(inside)
            connection.send(json.dumps({"verb": verb, **arguments}).encode())
            message, descriptors, *_ = socket.recv_fds(connection, MESSAGE, 250)
    except (FileNotFoundError, NotADirectoryError, ConnectionError):
        raise cli.UsageError(f"no cluster is up at {folder}: `up` starts one") from None
    reply = json.loads(message or '{"error": "the supervisor was killed"}')
    if "error" in reply:
        raise cli.UsageError(reply["error"])
    return reply["text"], descriptors


def ask(folder: Path, verb: str, **arguments) -> str:
    """Ask the supervisor to do something; return what it says."""
    return _ask(folder, verb, **arguments)[0]


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


# running on nodes


def run_on_nodes(folder: Path, on: str | None, command: list[str]) -> int:
    """Run a command on nodes at once; return 0, or the code of the first that failed."""
    said, descriptors = _ask(folder, "enter", on=on, command=command)
    nodes = json.loads(said)
    runs = Runs(folder)
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # until there is somebody to hand them to
    user = descriptors[0]
    if os.fstat(user).st_ino != os.stat("/proc/self/ns/user").st_ino:
        call("setns", user, ANY)
    for place, (number, clock) in enumerate(nodes):
        mine = descriptors[place * len(KINDS) + 1 : (place + 1) * len(KINDS)]
        words = {"node": place, "nodes": len(nodes), "name": f"node{number}",
                 "master": address(nodes[0][0]), "disk": str(folder / "disk")}  # fmt: skip
        environment = os.environ | environment_of(f"node{number}", folder, clock)
        runs.start(number, mine, [filled(argument, words) for argument in command], environment)
    for descriptor in descriptors:
        os.close(descriptor)
    for number in signals:
        signal.signal(number, runs.hand_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    return runs.wait()


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


def environment_of(name: str, folder: Path, offset: float | None) -> dict[str, str]:
    """Return what is set for a command on a node."""
    get = os.environ.get
    found = {
        "OMP_NUM_THREADS": get("OMP_NUM_THREADS", "1"),
        "GLOO_SOCKET_IFNAME": CARD,
        "NCCL_SOCKET_IFNAME": CARD,
        "VIRTUAL_NODE": name,
        "PATH": f"{os.path.dirname(sys.executable)}:{get('PATH', os.defpath)}",
    }
    if offset is not None:  # every Python imports a sitecustomize that it finds
        (folder / "clock").mkdir(exist_ok=True)
        (folder / "clock" / "sitecustomize.py").write_text(CLOCK)
        found["VIRTUAL_CLOCK_S"] = str(offset)
        found["PYTHONPATH"] = f"{folder / 'clock'}:{get('PYTHONPATH', '')}".rstrip(":")
    return found


class Runs:
    """The command on each node: a shepherd there starts it, and ends all that it started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.selector = selectors.DefaultSelector()
        self.pids: dict[int, int] = {}  # by node
        self.open: dict[int, int] = {}  # pipes that are still open, by node
        self.deadline = float("inf")
        self.code = 0

    def start(self, number: int, namespaces: list[int], command: list[str], environment) -> None:
        pipes = [os.pipe(), os.pipe()]
        call("setns", namespaces[0], CLONE_NEWPID)  # for the children from now on
        pid = os.fork()
        if pid == 0:
            try:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                for target, (_, writer) in enumerate(pipes, 1):
                    os.dup2(writer, target)
                _shepherd(namespaces[1:], command, environment)
            except BaseException as error:
                os.write(2, f"{error}\n".encode())
                os._exit(1)
        for (reader, writer), stream in zip(pipes, (sys.stdout, sys.stderr), strict=True):
            os.close(writer)
            self.selector.register(reader, selectors.EVENT_READ, [number, stream, b""])
        self.pids[number], self.open[number] = pid, len(pipes)

    def hand_on(self, number: int, _) -> None:
        """Pass SIGTERM or SIGINT on, so that jobs save; a second one does not wait for them."""
        again = self.deadline < float("inf")
        self.deadline = min(self.deadline, time.monotonic() + (0 if again else GRACE_S))
        for pid in self.pids.values():
            os.kill(pid, number)

    def wait(self) -> int:
        """Print the nodes' lines until all have ended."""
        while self.pids:
            left = self.deadline - time.monotonic()
            if left <= 0:
                self.deadline = float("inf")
                for pid in self.pids.values():
                    os.kill(pid, signal.SIGUSR2)
            for key, _ in self.selector.select(min(1.0, max(0.0, left))):
                self.print_lines(key)
        return self.code

    def print_lines(self, key) -> None:
        number, stream, begun = key.data
        data = os.read(key.fd, MESSAGE)
        *lines, key.data[2] = (begun + data).split(b"\n") if data else [*begun.split(b"\n"), b""]
        for line in lines if data or begun else []:
            stream.write(f"[node{number}] {line.decode(errors='replace')}\n")
        stream.flush()
        if not data:
            self.selector.unregister(key.fd)
            os.close(key.fd)
            self.open[number] -= 1
            if not self.open[number]:
                self.ended(number)

    def ended(self, number: int) -> None:
        status = os.waitpid(self.pids.pop(number), 0)[1]
        code = os.waitstatus_to_exitcode(status)
        code = 128 - code if code < 0 else code
        self.code = self.code or code
        with contextlib.suppress(cli.UsageError):  # the supervisor may be gone
            ask(self.folder, "ended", node=str(number), code=code)


def _shepherd(namespaces: list[int], command: list[str], environment: dict) -> None:
    """Run a command on a node; whatever ends it or us, end all processes that came of it."""
    place = os.getcwd()
    os.setsid()  # a terminal's ^C goes to `run`, which hands it on
    agent = 0
    signal.signal(signal.SIGUSR2, lambda *_: _end_children(137))
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, lambda number, _: os.kill(agent, number))
    call("prctl", PR_SET_PDEATHSIG, signal.SIGUSR2)
    call("prctl", PR_SET_CHILD_SUBREAPER, 1)  # orphans become our children
    for descriptor in namespaces:
        call("setns", descriptor, ANY)
    os.chdir(place)
    os.closerange(3, 4096)
    agent = os.fork()
    masked = {signal.SIGTERM, signal.SIGINT}
    if agent == 0:
        for one in (*masked, signal.SIGUSR2):
            signal.signal(one, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, masked)
        try:
            os.execvpe(command[0], command, environment)
        except OSError as error:
            os.write(2, f"{command[0]}: {error.strerror}\n".encode())
            os._exit(127)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, masked)
    while (ended := os.wait())[0] != agent:
        pass
    code = os.waitstatus_to_exitcode(ended[1])
    _end_children(128 - code if code < 0 else code)


def _end_children(code: int) -> None:
    """Kill until nothing is left: what a killed process leaves behind becomes our child."""
    with contextlib.suppress(ChildProcessError):
        while True:
            for child in psutil.Process().children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.01)
    os._exit(code)
