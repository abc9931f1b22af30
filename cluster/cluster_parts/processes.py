"""The processes of the jobs on this machine, from outside: what each is, and what it does.

Sources: proc(5); Linux, net/ipv4/tcp_ipv4.c (get_tcp4_sock); py-spy's README.
"""

import contextlib
import ipaddress
import json
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

from cluster_parts.verdicts import waits_in
from legacy_common import cli

RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")  # torchrun's ranks have the last too
SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS")
JOB = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")
LOADER = "pt_data_worker"  # as PyTorch calls the main thread of a data loader's worker
STEPS = ("step", "global_step", "iteration")  # what a training loop calls its counter
LIBRARY = re.compile(r"(site|dist)-packages/|/lib/python3|^<|cluster_parts/|cluster/triage\.py")
IDLE = "no code of its own"
ESTABLISHED = "01"  # in /proc/net/tcp
TOOL_S = 30.0  # the longest wait for py-spy
Frame = tuple[str, str, int, dict[str, str]]  # file, function, line, local variables


@dataclass
class Process:
    """A process of a job, as it was seen twice."""

    pid: int
    parent: int
    role: str  # "rank", "loader worker", "child" or "launcher"
    rank: int | None  # None: a launcher
    world_size: int | None
    local_size: int | None  # how many ranks its launcher was to start on this node
    node: str
    job: list[str]
    command: list[str]
    state: str = ""  # psutil's word: "stopped", "disk-sleep", "zombie", "sleeping", ...
    waits_in: str = ""  # the kernel function that it sleeps in, for root
    cpu: float = 0.0  # share of one core between the two looks
    addresses: list[str] = field(default_factory=list)  # of the node, where the job has sockets
    stuck: dict[str, int] = field(default_factory=dict)  # peer: bytes without acknowledgement
    stack: list[Frame] = field(default_factory=list)  # innermost first
    unread: str = ""  # why there is no stack
    on_gpu: bool = False  # whether it has opened one
    steps: list[int] = field(default_factory=list)  # the training loop's counter, at each look

    @property
    def title(self) -> str:
        """Return "rank 3", "loader worker of rank 3" or "launcher"."""
        rank = "" if self.rank is None else f"rank {self.rank}"
        return rank if self.role == "rank" else " of ".join(filter(None, (self.role, rank)))

    @property
    def place(self) -> str:
        """Return where it is in its own code: function, file, line, and small local values."""
        frame = next((frame for frame in self.stack if not LIBRARY.search(frame[0])), None)
        if frame is None:
            return IDLE if self.stack else self.state
        file, name, line, values = frame
        small = [f"{k}={v}" for k, v in values.items() if re.fullmatch(r"-?\d+|\"[^\"]{,20}\"", v)]
        return f"{name}, {Path(file).name}:{line}" + (f" ({', '.join(small)})" if small else "")

    @property
    def call(self) -> str:
        """Return the collective that it is in, and where."""
        called = self.stack and waits_in([frame[:3] for frame in self.stack])
        return f"{called} in {self.place}" if called else self.place


# Which processes there are, and what each of them is.


def find_processes() -> list[Process]:
    """Return the ranks of all jobs on this machine, their children and their launchers."""
    seen = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # another user's, or ended by now
            seen[process.pid] = (process.ppid(), process.environ(), process)
    found, best = [], {}
    for pid, (parent, environ, process) in seen.items():
        own, above = rank_in(environ), rank_in(seen[parent][1] if parent in seen else {})
        if own is None or "python" not in os.path.basename(text_of(process.exe)):
            continue
        if pid == os.getpid():  # srun gives it a rank, too
            continue
        place, rank = own
        role = "rank" if own != above else "loader worker" if name_of(pid) == LOADER else "child"
        size, local = environ.get(SIZES[place], ""), environ.get("LOCAL_WORLD_SIZE", "")
        job, command = [environ.get(name, "") for name in JOB], text_of(process.cmdline)
        sizes = number(size), number(local)
        one = Process(pid, parent, role, rank, *sizes, node_of(pid), job, [*command])
        found.append((environ.get("SLURM_JOB_ID"), place, one))
    for job, place, _ in found:  # srun names a rank, too, where it has started torchrun
        best[job] = min(place, best.get(job, place))
    found = [one for job, place, one in found if place == best[job]]
    launchers = {one.parent: one for one in found if one.role == "rank" and one.parent in seen}
    return found + [
        Process(pid, seen[pid][0], "launcher", None, rank.world_size, rank.local_size, rank.node,
                rank.job, [*text_of(seen[pid][2].cmdline)]) for pid, rank in launchers.items()
        if pid != os.getpid()
    ]  # fmt: skip


def rank_in(environ: dict) -> tuple[int, int] | None:
    """Return which variable names a rank, of those in RANKS, and the rank."""
    found = [(place, number(environ.get(name, ""))) for place, name in enumerate(RANKS)]
    return next((one for one in found if one[1] is not None), None)


def number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def text_of(read):
    """Return what psutil reads, or nothing of a process that has ended."""
    with contextlib.suppress(psutil.Error):
        return read()
    return ""


def file_of(pid: int, name: str) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_text().strip()
    return ""


def name_of(pid: int) -> str:
    return file_of(pid, "comm")


def node_of(pid: int) -> str:
    """Return this machine's name; of a process in a network of its own, an address there."""
    with contextlib.suppress(OSError):
        if os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net"):
            routes = re.findall(r"\|-- ([\d.]+)\n\s+/32 host LOCAL", file_of(pid, "net/fib_trie"))
            return next((one for one in routes if not one.startswith("127.")), f"network of {pid}")
    return socket.gethostname()


# What a process does.


def look_twice(processes: list[Process], seconds: float) -> None:
    """Fill in state, CPU time, stack, counter and sockets: at the second look, what remains."""
    before = {}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read_stack, processes))
        for one in processes:
            before[one.pid] = cpu_seconds(one.pid), sockets_of(one)
        time.sleep(seconds)
        list(pool.map(read_stack, processes))
    for one in processes:
        used, sent = before[one.pid]
        one.cpu = round((cpu_seconds(one.pid) - used) / seconds, 2)
        now = sockets_of(one)
        # A peer that is alive acknowledges within milliseconds, and takes some of it.
        one.stuck = {peer: size for peer, size in now.items() if 0 < sent.get(peer, 0) <= size}


def cpu_seconds(pid: int) -> float:
    with contextlib.suppress(psutil.Error):
        return sum(psutil.Process(pid).cpu_times()[:2])
    return 0.0


def read_stack(one: Process) -> None:
    """Read state, stack with local variables, and the training loop's counter."""
    try:
        one.state = psutil.Process(one.pid).status()
    except psutil.Error:
        one.state = psutil.STATUS_ZOMBIE
    one.waits_in, one.stack = file_of(one.pid, "wchan"), []
    if one.state in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE) or one.role == "launcher":
        return  # py-spy would wait for the first
    command = [py_spy() or "", "dump", "--json", "--locals", "--pid", str(one.pid)]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", "") or "").strip().splitlines()
        one.unread = said[-1] if said else "py-spy is not installed" if not command[0] else "late"
        return
    one.unread = ""
    one.stack = [(frame["filename"], frame["name"], frame["line"],
                  {local["name"]: local["repr"] or "" for local in frame["locals"] or ()})
                 for frame in main_thread(json.loads(asked.stdout), one.pid)]  # fmt: skip
    forked = [at for at, frame in enumerate(one.stack) if frame[1] == "_worker_loop"]
    if forked:  # what is below was its parent's
        one.stack = one.stack[: forked[0] + 1]
    counters = [number(names[name]) for *_, names in one.stack for name in STEPS if name in names]
    one.steps += [step for step in counters[-1:] if step is not None]


def sockets_of(one: Process) -> dict[str, int]:
    """Return how many bytes each peer has not acknowledged."""
    found, opened = {}, " ".join(paths_of(one.pid))
    inodes = set(re.findall(r"socket:\[(\d+)\]", opened))
    one.on_gpu = bool(re.search(r"/dev/(nvidia\d|kfd)", opened))
    for table in ("net/tcp", "net/tcp6"):
        for row in map(str.split, file_of(one.pid, table).splitlines()[1:]):
            if row[9] in inodes and row[3] == ESTABLISHED:
                here, peer = map(address, row[1:3])
                if not ipaddress.ip_address(here).is_loopback:
                    one.addresses = sorted({*one.addresses, here})
                if size := int(row[4].split(":")[0], 16):
                    found[peer] = size + found.get(peer, 0)
    return found


def paths_of(pid: int) -> list[str]:
    """Return what a process has open, and where it works."""
    found = []
    with contextlib.suppress(OSError):
        for entry in [f"/proc/{pid}/cwd", *os.scandir(f"/proc/{pid}/fd")]:
            with contextlib.suppress(OSError):
                found.append(os.readlink(entry))
    return found


def address(told: str) -> str:
    """Return the address in a column of /proc/net/tcp: words of 32 bits, lowest byte first."""
    digits = told.split(":")[0]
    raw = b"".join(bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8))
    found = ipaddress.ip_address(raw)
    return str(getattr(found, "ipv4_mapped", None) or found)


# What py-spy reads.


def py_spy() -> str | None:
    """Return py-spy's path: beside this Python, or on PATH."""
    beside = f"{Path(sys.executable).parent}:{sys.exec_prefix}/bin"
    return shutil.which("py-spy", path=f"{beside}:{os.environ.get('PATH', os.defpath)}")


def stack_of(pid: int) -> list[tuple[str, str, int]] | None:
    """Return (file, function, line) of a process's main thread, innermost first, by py-spy.

    Nothing of a process that is stopped (SIGSTOP); None of one that has ended.
    """
    command = py_spy()
    if command is None:
        raise cli.UsageError("this tool needs py-spy: pip install py-spy")
    for _ in range(3):  # it may stop, or end, while py-spy reads it
        if not runs(pid):
            return None
        if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
            return []  # py-spy would wait for it
        asked = subprocess.run([command, "dump", "--json", "--pid", str(pid)], capture_output=True)
        if asked.returncode == 0:
            frames = main_thread(json.loads(asked.stdout), pid)
            return [(frame["filename"], frame["name"], frame["line"]) for frame in frames]
        time.sleep(0.1)
    raise cli.UsageError(f"py-spy cannot read process {pid}: {asked.stderr.decode().strip()}")


def main_thread(threads: list[dict], pid: int) -> list[dict]:
    """Return the frames of a process's main thread, as py-spy says; it may count as a container."""
    status = Path(f"/proc/{pid}/status")
    inner = re.search(r"^NSpid:.*?(\d+)$", status.read_text(), re.M) if status.exists() else None
    pids = {pid, int(inner[1])} if inner else {pid}
    return next((one["frames"] for one in threads if one["os_thread_id"] in pids), [])


def runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def show_stacks(script):
    """Print node, rank, role and stack of each process of a job that runs here, ranks first."""
    found = [one for one in find_processes() if one.role != "launcher" and one.pid != os.getpid()]
    found = [one for one in found if script in " ".join(one.command)]
    if not found:
        raise cli.UsageError(f"--stacks: no rank on this node runs {script}")
    for one in sorted(found, key=lambda one: (one.role != "rank", one.rank, one.pid)):
        role = "rank" if one.role == "rank" else "worker of its loader"
        print(f"node {one.node}, rank {one.rank}, {role}, pid {one.pid}")
        try:
            frames = stack_of(one.pid)
        except cli.UsageError as error:  # this process's; the others may be readable
            print(f"  {error}")
            continue
        stopped = "  is stopped (SIGSTOP)" if frames == [] else "  has ended"
        for file, name, line in frames or ():
            print(f"  {name}, {Path(file).name}:{line}")
        if not frames:
            print(stopped)
    return 0
