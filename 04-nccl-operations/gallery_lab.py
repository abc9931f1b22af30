"""Start the ranks of a failure's script as a launcher would, under the limits that it asks for."""

import ctypes
import faulthandler
import functools
import importlib
import json
import os
import random
import re
import resource
import runpy
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch.distributed as dist

from dist_common import cli, ranks

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

FAILURES = Path(__file__).parent / "failures"
STUCK_S = 1.0  # without a line and without CPU time, a rank counts as stuck
GRACE_S = 3.0  # after the first failure, until the ranks that still run are ended
PR_SET_PTRACER, ANY = 0x59616D61, ctypes.c_ulong(-1)  # prctl(2)
# The line of a broken script that says which rank is broken, where one rank is.
CULPRIT = re.compile(r"^([A-Z]+) = (\d+)(?=  # the rank )", re.M)


@dataclass
class Failure:
    """What case.toml says of a failure."""

    name: str
    group: str  # "calls", "one", "silent" or "start": the table of the page it stands in
    symptom: str
    cause: str
    message: str  # a regular expression: what a rank of the broken job says; "" for silence
    ends: dict[str, str]  # regular expressions: how `culprit` and `others` of the broken job end
    tool: str  # what finds it
    says: str  # a regular expression: what the tool says
    # "the rank", "the odd one" (of 3 or more), "the others" (and perhaps that rank), "all", "none"
    names: str
    cure: str
    right: str  # what each rank of the cured job prints last; {n}: ranks, {others}: one less
    page: str = ""  # what the page adds
    ranks: int = 2  # that are started, unless --ranks says otherwise
    missing: int = 0  # ranks that WORLD_SIZE promises and nobody starts
    restarts: int = 0  # of the cured job, after a failure
    limits: dict[str, int] = field(default_factory=dict)  # of each rank's process
    linux: bool = False  # whether it needs what only Linux does
    lowest: int = 0  # the first rank that it can be moved to
    fixed: int | None = None  # the broken rank, where no other one can be

    @property
    def folder(self) -> Path:
        return FAILURES / self.name

    def culprit(self) -> int | None:
        """Return the rank that broken.py breaks; None where it breaks all of them."""
        if self.fixed is not None:
            return self.fixed
        named = CULPRIT.search((self.folder / "broken.py").read_text())
        return int(named[2]) if named else None


def load(name: str) -> Failure:
    """Read failures/NAME/case.toml."""
    return Failure(name, **tomllib.loads((FAILURES / name / "case.toml").read_text()))


NAMES = sorted(folder.parent.name for folder in FAILURES.glob("*/case.toml"))


@dataclass
class Job:
    """A script of a failure, as it is started: on how many ranks, broken on which, in a folder."""

    failure: Failure
    world_size: int
    culprit: int | None
    folder: Path
    deadline_s: float

    def run(self, script: str, put_in=lambda rank: None, during=lambda pids: None, **environ):
        """Run broken.py or cured.py; return how its ranks ended. `put_in` runs in each first."""
        hosts = "host" in self.failure.limits
        if hosts:
            enter(NEW_NETWORK)
            look, during = during, lambda pids: (connect_hosts(pids), look(pids))
        for attempt in range(1 + (self.failure.restarts if script == "cured.py" else 0)):
            file = self.folder / script
            source = (self.failure.folder / script).read_text()
            file.write_text(CULPRIT.sub(rf"\g<1> = {self.culprit}", source))
            launched = {
                "WORLD_SIZE": self.world_size, "LOCAL_WORLD_SIZE": self.world_size,
                "MASTER_ADDR": f"{NETWORK}.1" if hosts else "127.0.0.1", "MASTER_PORT": free_port(),
                "TORCHELASTIC_RESTART_COUNT": attempt, "OMP_NUM_THREADS": 1,
                "TORCHELASTIC_RUN_ID": f"gallery-{os.getpid()}", "CUDA_VISIBLE_DEVICES": "",
                "TORCH_DISTRIBUTED_DEBUG": "OFF", **environ,
            }  # fmt: skip
            if re.search("DistributedDataParallel|fully_shard", source):
                importlib.import_module("torch._dynamo")  # here once, not in each rank: it is slow
            body = functools.partial(self._be, file, launched, put_in)
            started = self.world_size - self.failure.missing * (script == "broken.py")
            ended = ranks.fork(
                body, started, self.logs(script, attempt), self.deadline_s, GRACE_S, during
            )
            if all(rank.code == 0 for rank in ended):
                break
        return ended

    def logs(self, script: str, attempt: int = 0) -> Path:
        return self.folder / f"logs-{script}-{attempt}"

    def _be(self, file: Path, launched: dict, put_in, rank: int) -> None:
        faulthandler.disable()  # a rank that is ended would tell of that, and not of what it did
        os.environ.update({name: str(value) for name, value in launched.items()})
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        os.chdir(self.folder)
        dist.set_debug_level_from_env()
        if sys.platform == "linux":  # Ubuntu lets py-spy read none but its own children otherwise
            ctypes.CDLL(None).prctl(PR_SET_PTRACER, ANY)
        limit(self.failure.limits, rank)
        at_end = put_in(rank)
        sys.argv = [str(file)]
        try:
            runpy.run_path(str(file), run_name="__main__")
        finally:
            if at_end:
                at_end()


def free_port() -> int:
    """Return a port that nobody listens on, and the next one neither."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)  # below those that Linux hands out
        try:
            for number in (port, port + 1):
                socket.create_server(("", number)).close()
            return port
        except OSError:
            continue


def limit(limits: dict[str, int], rank: int) -> None:
    """Give this rank less than the machine has, as `ulimit -n`, `ulimit -v` or docker would."""
    if "host" in limits:
        be_a_host(rank)
    if "shm_mib" in limits:
        enter(NEW_MOUNTS)
        mount(b"tmpfs", b"/dev/shm", f"size={limits['shm_mib']}m".encode())
    if "open_files" in limits:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limits["open_files"],) * 2)
    if "memory_mib" in limits:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + limits["memory_mib"] * 2**20,) * 2)


# What can be seen of a running job from outside.


def py_spy() -> str | None:
    """Return py-spy's path: from this Python's environment, active or not, or from PATH."""
    beside = f"{Path(sys.executable).parent}:{sys.exec_prefix}/bin"
    return shutil.which("py-spy", path=beside) or shutil.which("py-spy")


def stack_of(pid: int) -> list[tuple[str, str, int]] | None:
    """Return (file, function, line) of a process's main thread, innermost first, by py-spy."""
    command = py_spy()
    if command is None:
        raise cli.UsageError("this tool needs py-spy: pip install py-spy")
    asked = subprocess.run([command, "dump", "--json", "--pid", str(pid)], capture_output=True)
    if asked.returncode:
        if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            raise cli.UsageError(
                f"py-spy cannot read process {pid}: {asked.stderr.decode().strip()}"
            )
        return None
    main = next(t for t in json.loads(asked.stdout) if t["os_thread_id"] == pid)
    return [(frame["filename"], frame["name"], frame["line"]) for frame in main["frames"]]


def wait_until_stuck(pids: list[int], logs: list[Path]) -> list[int]:
    """Watch logs and CPU time; once all ranks that run are stuck, end them and return which."""
    alive = {rank: psutil.Process(pid) for rank, pid in enumerate(pids)}
    since = {rank: time.monotonic() for rank in alive}
    last: dict[int, tuple] = {}
    while alive:
        time.sleep(0.1)
        for rank, process in list(alive.items()):
            try:
                gone = process.status() == psutil.STATUS_ZOMBIE
                beat = (logs[rank].stat().st_size, round(sum(process.cpu_times()[:2]), 1))
            except psutil.Error:
                gone = True
            if gone:
                del alive[rank]
            elif last.get(rank) != beat:
                last[rank], since[rank] = beat, time.monotonic()
        quiet = [time.monotonic() - since[rank] for rank in alive]
        if alive and min(quiet) > STUCK_S:
            for process in alive.values():
                process.terminate()
            return sorted(alive)
    return []


# Namespaces of Linux: what a process mounts or connects there, no other process sees.

LIBC = ctypes.CDLL(None, use_errno=True)
NEW_MOUNTS, NEW_NAME, NEW_NETWORK = 0x20000, 0x4000000, 0x40000000  # of unshare(2)
RECURSIVE, PRIVATE, BIND = 0x4000, 0x40000, 0x1000  # of mount(2)
NETWORK = "10.79.0"  # of the hosts of a failure that needs several


def enter(namespaces: int) -> None:
    """Leave the machine's namespaces for own ones; needs root."""
    if LIBC.unshare(namespaces):
        raise OSError(ctypes.get_errno(), "unshare")
    if namespaces & NEW_MOUNTS:
        mount(None, b"/", None, RECURSIVE | PRIVATE)


def mount(kind: bytes | None, target: bytes, data: bytes | None = None, flags=0, source=b"none"):
    if LIBC.mount(source, target, kind, flags, data):
        raise OSError(ctypes.get_errno(), f"mount {target.decode()}")


def may_enter() -> bool:
    """Say whether this process may make namespaces; tried in a process that ends at once."""
    if sys.platform != "linux":
        return False
    pid = os.fork()
    if pid == 0:
        os._exit(LIBC.unshare(NEW_MOUNTS | NEW_NAME | NEW_NETWORK) != 0)
    return os.waitpid(pid, 0)[1] == 0


def be_a_host(rank: int) -> None:
    """Make this process a machine of its own, with /etc/hosts as Debian writes it."""
    enter(NEW_MOUNTS | NEW_NAME | NEW_NETWORK)
    socket.sethostname(f"node-{rank}")
    hosts = Path.cwd() / f"hosts-{rank}"
    hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 node-{rank}\n")
    mount(None, b"/etc/hosts", None, BIND, str(hosts).encode())
    while "eth0" not in [name for _, name in socket.if_nameindex()]:
        time.sleep(0.02)  # until connect_hosts has plugged it in
    for command in (
        "link set lo up",
        f"addr add {NETWORK}.{rank + 1}/24 dev eth0",
        "link set eth0 up",
    ):
        ip(command)


def connect_hosts(pids: list[int]) -> None:
    """Connect hosts by cables to a switch, in a network that this process has for itself."""
    ip("link add switch type bridge")
    ip("link set switch up")
    for rank, pid in enumerate(pids):
        before = os.readlink("/proc/self/ns/net")
        while os.readlink(f"/proc/{pid}/ns/net") == before:
            time.sleep(0.02)
        ip(f"link add cable{rank} type veth peer name eth0 netns {pid}")
        ip(f"link set cable{rank} master switch up")


def ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True)
