"""The processes of a job on this machine, looked at twice from outside.

Nothing is put into the job, and it continues. Sources: proc(5); Linux,
net/ipv4/tcp_ipv4.c (get_tcp4_sock); py-spy's README.
"""

import contextlib
import ipaddress
import json
import linecache
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from dist_common import cli

RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")  # torchrun's have the last too
SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS")
RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")
JOB = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", *RENDEZVOUS)
LOADER = "pt_data_worker"  # PyTorch's name for the main thread of a loader's worker
LIBRARY = re.compile(
    r"(site|dist)-packages/|/lib/python3|^<|cluster_parts/|cluster/triage\.py"
)
# DDP and FSDP wait in C++, below these.
WRAPPERS = re.compile(
    r"torch/(autograd/graph|nn/parallel/distributed)\.py$|/_fully_shard/"
)
ESTABLISHED = "01"  # in /proc/net/tcp
PY_SPY_S = 30.0  # the longest wait for it


@dataclass
class Snapshot:
    """The state of a process at one moment."""

    state: str = ""  # psutil's word: "stopped", "disk-sleep", "zombie", "sleeping", ...
    stack: list = field(default_factory=list)  # [file, function, line], innermost first
    values: dict = field(default_factory=dict)  # "function: name" -> integer, own code
    call: str = ""  # the collective that it waits in
    cpu_s: float = 0.0
    written: dict = field(default_factory=dict)  # path -> size of a file that it writes
    unsent: dict = field(default_factory=dict)  # peer -> bytes sent again and again
    unread: str = ""  # why there is no stack

    @property
    def place(self):
        """Return where it is in its own code: "train, train.py:12"."""
        for file, function, line in self.stack:
            if not LIBRARY.search(file):
                return f"{function}, {Path(file).name}:{line}"
        return "no code of its own" if self.stack else self.state


@dataclass
class Process:
    """A process of a job. Ranks that wait for each other have one `job`."""

    pid: int
    parent: int
    role: str  # "rank", "loader worker" or "child"
    rank: int
    world_size: int | None
    local_size: int | None  # how many ranks its launcher was to start on this node
    node: str
    job: list
    rendezvous: str  # MASTER_ADDR:MASTER_PORT
    addresses: list = field(default_factory=list)  # of the node, where it has sockets
    on_gpu: bool = False
    snapshots: list = field(default_factory=list)  # two

    @property
    def title(self):
        return (
            f"rank {self.rank}"
            if self.role == "rank"
            else f"{self.role} of {self.rank}"
        )

    @property
    def last(self):
        return self.snapshots[-1]

    def cpu(self, seconds):
        """Return the share of a core that it used between the snapshots."""
        return (self.last.cpu_s - self.snapshots[0].cpu_s) / seconds


# Which processes there are


def find_processes():
    """Return the ranks of all jobs on this machine, and their children in Python."""
    seen = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # another user's, or it has ended
            program = os.path.basename(process.exe() or "python")
            seen[process.pid] = (process.ppid(), process.environ(), program)
    candidates = []
    for pid, (parent, environ, program) in seen.items():
        place, rank = rank_in(environ)
        if rank is None or "python" not in program or pid == os.getpid():
            continue
        is_child = parent in seen and (place, rank) == rank_in(seen[parent][1])
        role = "rank"
        if is_child:
            role = "loader worker" if file_of(pid, "comm") == LOADER else "child"
        process = Process(
            pid,
            parent,
            role,
            rank,
            number(environ.get(SIZES[place])),
            number(environ.get("LOCAL_WORLD_SIZE")),
            node_of(pid),
            [environ.get(name, "") for name in JOB],
            ":".join(environ.get(name, "") for name in RENDEZVOUS),
        )
        candidates.append((environ.get("SLURM_JOB_ID"), place, process))
    # srun names a rank, too, where it has started torchrun.
    best = {}
    for job, place, _ in candidates:
        best[job] = min(place, best.get(job, place))
    return [process for job, place, process in candidates if place == best[job]]


def select(processes, pid):
    """Return the processes of one job. Raises: UsageError."""
    if pid:
        of_rank = [one.parent for one in processes if one.pid == pid]
        tree = {of_rank[0] if of_rank else pid}
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(*tree).children(recursive=True)
            tree |= {one.pid for one in children}
        processes = [one for one in processes if one.pid in tree]
    ranks = [one for one in processes if one.role == "rank"]
    if not ranks:
        raise cli.UsageError("no rank runs here: no process of such a job has RANK set")
    numbers = [one.rank for one in ranks]
    is_one_job = len({*numbers}) == len(numbers) == ranks[0].world_size
    if len({tuple(one.job) for one in ranks}) > 1 and not is_one_job:
        launchers = ", ".join(sorted({str(one.parent) for one in ranks}))
        raise cli.UsageError(
            f"several jobs run here: name one by --pid, of {launchers}"
        )
    return processes


def rank_in(environ):
    """Return which of RANKS names a rank, and the rank."""
    for place, name in enumerate(RANKS):
        if (rank := number(environ.get(name))) is not None:
            return place, rank
    return 0, None


def number(text):
    return int(text) if text and text.isdecimal() else None


def file_of(pid, name):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_text().strip()
    return ""


def node_of(pid):
    """Return this machine's name; of a process in its own network, an address there."""
    with contextlib.suppress(OSError):
        if os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net"):
            routes = file_of(pid, "net/fib_trie")
            for address in re.findall(r"\|-- ([\d.]+)\n\s+/32 host LOCAL", routes):
                if not address.startswith("127."):
                    return address
            return f"network of {pid}"
    return socket.gethostname()


# Their activity


def take_snapshots(processes, seconds):
    """Take two snapshots of each process, `seconds` apart."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(take_snapshot, processes))
        time.sleep(seconds)
        list(pool.map(take_snapshot, processes))


def take_snapshot(process):
    """Append the state of a process at this moment to its snapshots."""
    snapshot = Snapshot()
    process.snapshots.append(snapshot)
    try:
        program = psutil.Process(process.pid)
        snapshot.state = program.status()
        snapshot.cpu_s = sum(program.cpu_times()[:2])
    except psutil.Error:
        snapshot.state = psutil.STATUS_ZOMBIE
        return
    snapshot.written = files_written(process.pid)
    read_sockets(process, snapshot)
    if snapshot.state != psutil.STATUS_STOPPED:  # py-spy would wait for it
        read_stack(process.pid, snapshot)


def read_stack(pid, snapshot):
    """Read the main thread's stack and its integers, by py-spy."""
    beside = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
    py_spy = shutil.which("py-spy", path=beside)
    if py_spy is None:
        snapshot.unread = "py-spy is not installed"
        return
    command = [py_spy, "dump", "--json", "--locals", "--pid", str(pid)]
    try:
        asked = subprocess.run(
            command, capture_output=True, text=True, timeout=PY_SPY_S, check=True
        )
    except subprocess.SubprocessError as error:
        message = (getattr(error, "stderr", "") or "py-spy gave no answer").strip()
        snapshot.unread = message.splitlines()[-1]
        return
    for frame in main_thread(json.loads(asked.stdout), pid):
        file, function = frame["filename"], frame["name"]
        snapshot.stack.append([file, function, frame["line"]])
        values = {one["name"]: one["repr"] or "" for one in frame["locals"] or ()}
        if Path(file).name == "distributed_c10d.py":  # the outermost one is the call
            snapshot.call = function
        if not LIBRARY.search(file):
            for name, value in values.items():
                if re.fullmatch(r"-?\d+", value):
                    snapshot.values[f"{function}: {name}"] = int(value)
        if function == "_worker_loop":  # the frames below were its parent's
            break
    snapshot.call = snapshot.call or waits_below(snapshot.stack)


def waits_below(stack):
    """Return the wait of DDP, FSDP or a work handle, which has no frame of Python."""
    if not stack:
        return ""
    file, function, line = stack[0]
    if WRAPPERS.search(file):
        return function
    return "wait" if ".wait(" in linecache.getline(file, line) else ""


def main_thread(threads, pid):
    """Return the frames of the main thread. In a container it has another number."""
    inner = re.search(r"^NSpid:.*?(\d+)$", file_of(pid, "status"), re.M)
    pids = {pid, int(inner[1])} if inner else {pid}
    return next((one["frames"] for one in threads if one["os_thread_id"] in pids), [])


def files_written(pid):
    """Return path and size of the regular files that a process has open to write."""
    sizes = {}
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                flags = re.search(
                    r"flags:\s+(\d+)", file_of(pid, f"fdinfo/{entry.name}")
                )
                path = os.readlink(entry)
                if os.path.isfile(path) and int(flags[1], 8) & (
                    os.O_WRONLY | os.O_RDWR
                ):
                    sizes[path] = os.path.getsize(path)
    return sizes


def read_sockets(process, snapshot):
    """Note which peers have not acknowledged what was sent to them."""
    opened = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{process.pid}/fd"):
            with contextlib.suppress(OSError):
                opened.append(os.readlink(entry))
    process.on_gpu |= any(re.match(r"/dev/(nvidia\d|kfd)", path) for path in opened)
    inodes = {
        match[1] for path in opened if (match := re.match(r"socket:\[(\d+)", path))
    }
    for table in ("net/tcp", "net/tcp6"):
        for row in map(str.split, file_of(process.pid, table).splitlines()[1:]):
            if row[9] not in inodes or row[3] != ESTABLISHED:
                continue
            address, peer = read_address(row[1]), read_address(row[2])
            if ipaddress.ip_address(address).is_loopback:
                continue
            process.addresses = sorted({*process.addresses, address})
            size, retransmissions = int(row[4].split(":")[0], 16), int(row[6], 16)
            if size and retransmissions:  # without them it is traffic
                snapshot.unsent[peer] = size + snapshot.unsent.get(peer, 0)


def read_address(column):
    """Read a column of /proc/net/tcp: words of 32 bits, the lowest byte first."""
    digits = column.split(":")[0]
    words = [digits[at : at + 8] for at in range(0, len(digits), 8)]
    address = ipaddress.ip_address(b"".join(bytes.fromhex(w)[::-1] for w in words))
    return str(getattr(address, "ipv4_mapped", None) or address)
