"""Run a function in a process that can do no harm: Linux namespaces, limits, and a watcher.

Inside, a process sees programs, packages and this repository, read-only, and a folder for its own
files; of the network only a loopback of its own; of processes only those that it started. All of
that belongs to the process, and is gone with it, also when the grader is killed.

Sources: user_namespaces(7), pid_namespaces(7), mount_setattr(2), pivot_root(2), capabilities(7),
prctl(2).
"""

import contextlib
import ctypes
import fcntl
import json
import os
import re
import resource
import select
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from lab_parts.holes import REPO

MIB = 2**20
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
MNT_DETACH, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 2, -100, 0x8000, 1
SYS_MOUNT_SETATTR = 442  # on every architecture
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP = 1, 4, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
CAPABILITY_VERSION_3, CAPABILITIES = 0x20080522, 64
SIOCSIFFLAGS, IFF_UP = 0x8914, 1

PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
SETTINGS = ("passwd", "group", "hosts", "nsswitch.conf", "ld.so.cache", "localtime")  # of /etc
DEVICES = ("null", "zero", "full", "random", "urandom")
KEPT = ("PATH", "LANG", "LC_ALL", "OMP_NUM_THREADS")  # of the environment: the rest may be secret
OUT = 3  # the descriptor through which a box says how it went
POLL_S = 0.05


@dataclass(frozen=True)
class Limits:
    """What a submission may use; more ends it. Units: seconds, bytes."""

    seconds: float = 300.0
    processes: int = 64  # of a right answer there are five
    memory: int = 4096 * MIB  # of all processes, on top of what each has from the grader
    file: int = 64 * MIB
    disk: int = 256 * MIB


@dataclass
class Box:
    """A submission that is being graded: what it has said, and why it ended if not by itself."""

    pid: int
    pipe: int
    limits: Limits
    started: float = field(default_factory=time.monotonic)
    said: bytes = b""
    ended: str | None = None

    def lines(self) -> list[Any]:
        """Return what it has said, a value of JSON a line; one that was cut short is left out."""
        return [json.loads(line) for line in self.said.split(b"\n")[:-1]]

    def over(self) -> bool:
        """Say whether it has ended. End it if it takes too much."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        self._read()
        if not pid and (excess := self._excess()):
            self.end(excess)
        elif pid:
            self._close(status)
        return self.pipe < 0

    def end(self, why: str) -> None:
        """Kill all of its processes, and wait until they are gone."""
        self.ended = why
        for process in self._processes()[::-1]:  # itself last: it waits for what it started
            with contextlib.suppress(psutil.Error):
                process.kill()
        _, status = os.waitpid(self.pid, 0)
        self._read()
        self._close(status)

    def _processes(self) -> list[psutil.Process]:
        """Return itself and all that it started: orphans become children of one of them."""
        try:
            own = psutil.Process(self.pid)
            return [own, *own.children(recursive=True)]
        except psutil.Error:
            return []

    def _excess(self) -> str | None:
        """Say of what it takes too much; None where it does not."""
        limits, processes = self.limits, self._processes()
        if len(processes) > limits.processes:
            return f"ended: more than {limits.processes} processes at once"
        if time.monotonic() - self.started > limits.seconds:
            return f"ended: not done after {limits.seconds:g} s"
        shared, taken = memory_of(psutil.Process()), 0
        for process in processes:
            with contextlib.suppress(psutil.Error, OSError):
                taken += max(0, memory_of(process) - shared)
        if taken > limits.memory:
            return f"ended: more than {limits.memory // MIB:,} MiB of memory"
        return None

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while more := os.read(self.pipe, 65536):
                self.said += more

    def _close(self, status: int) -> None:
        os.close(self.pipe)
        self.pipe = -1
        code = os.waitstatus_to_exitcode(status)
        if code and not self.ended:
            how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
            self.ended = f"ended: the grader itself, by {how}"


def memory_of(process: psutil.Process) -> int:
    """Return the bytes of memory that a process holds, without files, which processes share."""
    if not sys.platform.startswith("linux"):
        return process.memory_info().rss
    text = Path(f"/proc/{process.pid}/status").read_text()
    return 1024 * sum(map(int, re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", text, re.M)))


def start(
    body: Callable[[Callable[[Any], None]], None], isolated: bool, given: list[Path],
    hidden: list[Path], top: Path, limits: Limits,
) -> Box:  # fmt: skip
    """Start body(say) in a box, with copies of `given` files in its folder.

    What it says comes back by `Box.lines`. `isolated`: in namespaces, in which `hidden` folders are
    empty and `top`, an empty folder, is the root; otherwise in `top`, with the limits alone.
    """
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    pid = os.fork()
    if pid:
        os.close(theirs)
        return Box(pid, ours, limits)
    try:
        _be(body, isolated, given, hidden, top, limits, theirs)
    finally:
        os._exit(1)


def why_not(top: Path) -> str | None:
    """Say in one line why this machine has no sandbox; None if it has. Tries it."""
    if not sys.platform.startswith("linux"):
        return "namespaces are Linux's"
    box = start(lambda say: say("works"), True, [], [], top, Limits(seconds=20))
    while not box.over():
        time.sleep(0.01)
    said = box.lines()
    return None if said == ["works"] else str(said[0]["problem"] if said else box.ended)


def kill_others(isolated: bool) -> None:
    """End what an answer has left running, before it is judged."""
    if isolated:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # all of this namespace, whose first process this is
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=5)


def _be(
    body, isolated: bool, given: list[Path], hidden: list[Path], top: Path, limits: Limits,
    pipe: int,
) -> None:  # fmt: skip
    """Be a box: from here on nothing of the teacher's is open."""
    os.setsid()
    os.dup2(pipe, OUT)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.closerange(OUT + 1, max(256, null + 1, pipe + 1))
    os.set_inheritable(OUT, False)
    environment = {name: os.environ[name] for name in KEPT if name in os.environ}
    folder = Path("/tmp") if isolated else top
    os.environ.clear()
    os.environ.update(environment, HOME=str(folder), TMPDIR=str(folder))
    sys.path = [entry for entry in sys.path if os.path.isabs(entry)]  # none that an answer fills
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    def say(what: Any) -> None:
        os.write(OUT, json.dumps(what).encode() + b"\n")

    try:
        contents = {path.name: path.read_bytes() for path in given}
        _limit(limits)
        if sys.platform.startswith("linux"):
            _prctl(PR_SET_CHILD_SUBREAPER, 1)
        if isolated:
            _enter(hidden, top, limits)
        os.chdir(folder)
        tempfile.tempdir = str(folder)
        for name, content in contents.items():
            Path(name).write_bytes(content)
    except OSError as error:
        say({"problem": error.strerror or str(error)})
        os._exit(0)
    os.register_at_fork(after_in_child=lambda: os.close(OUT))  # an answer says nothing here
    body(say)
    os._exit(0)


def _limit(limits: Limits) -> None:
    """Limit each process. Not RLIMIT_NPROC: it counts all of an account, and nothing of root."""
    data = getattr(psutil.Process().memory_info(), "data", 0) + limits.memory
    for kind, most in (("DATA", data), ("FSIZE", limits.file), ("CORE", 0)):
        number = getattr(resource, f"RLIMIT_{kind}")
        allowed = resource.getrlimit(number)[1]
        if allowed != resource.RLIM_INFINITY:
            most = min(most, allowed)  # nobody may raise it
        resource.setrlimit(number, (most, most))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # an error at the line that writes


def _enter(hidden: list[Path], top: Path, limits: Limits) -> None:
    """Move this process into namespaces of its own, of which it is the first process."""
    uid, gid = os.getuid(), os.getgid()
    kinds = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC
    _call("unshare", kinds)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    ours, theirs = os.pipe()  # whose other end closes with the process that holds it
    first = os.fork()
    if first:
        os.close(ours)
        os.close(OUT)
        _, status = os.waitpid(first, 0)
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(code)
    os.close(theirs)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if select.select([ours], [], [], 0)[0]:  # it was killed before this one asked to be told
        os._exit(1)
    os.close(ours)
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
    _build_root(hidden, top, limits)
    Path("/proc/sys/user/max_user_namespaces").write_text("0")
    with contextlib.suppress(OSError):  # from Linux 6.14 on: a limit that no watcher can miss
        Path("/proc/sys/kernel/pid_max").write_text("400")
    _read_only("/proc")
    _drop_privileges()


def _build_root(hidden: list[Path], top: Path, limits: Limits) -> None:
    """Make a root folder that holds what an answer needs, and move there."""
    _mount("none", "/", flags=MS_REC | MS_PRIVATE)
    _mount("tmpfs", top, "tmpfs", options="size=16m,mode=755")
    own = [top / "tmp", top / "dev/shm"]
    for folder in own:
        folder.mkdir(parents=True)
        size = f"size={limits.disk},mode=1777"
        _mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, size)
    for path in shown():
        place = top / path.relative_to("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            place.symlink_to(path.readlink())
            continue
        place.mkdir() if path.is_dir() else place.touch()
        _mount(path, place, flags=MS_BIND | MS_REC)
    for path in hidden:
        if (place := top / path.relative_to("/")).is_dir():
            _mount("tmpfs", place, "tmpfs", options="size=1m")
    (top / "proc").mkdir()
    _read_only(top)
    for folder in own:
        _set_mount(folder, 0, 0, MOUNT_ATTR_RDONLY)
    _mount("proc", top / "proc", "proc", MS_NOSUID | MS_NODEV)
    os.chdir(top)
    _call("pivot_root", b".", b".")
    _call("umount2", b".", MNT_DETACH)


def shown() -> list[Path]:
    """Return what can be seen in a sandbox, without what lies in another of these."""
    needed = [*PROGRAMS, *(f"/etc/{name}" for name in SETTINGS), *(f"/dev/{n}" for n in DEVICES),
              sys.prefix, sys.base_prefix, REPO, Path(torch.__file__).parents[1]]  # fmt: skip
    found: list[Path] = []
    for path in sorted({*map(Path, needed)}):
        if os.path.lexists(path) and not any(path.is_relative_to(other) for other in found):
            found.append(path)
    return found


def _drop_privileges() -> None:
    """Give up for ever what made the namespaces, so that an answer cannot undo them."""
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    for capability in range(CAPABILITIES):
        with contextlib.suppress(OSError):  # the kernel has fewer
            _prctl(PR_CAPBSET_DROP, capability)
    _call("capset", struct.pack("Ii", CAPABILITY_VERSION_3, 0), bytes(24))
    _prctl(PR_SET_DUMPABLE, 0)  # an answer's processes cannot read or write this one's memory


def _mount(source, target, kind: str | None = None, flags: int = 0, options: str = "") -> None:
    words = [None if word is None else str(word).encode() for word in (source, target, kind)]
    try:
        _call("mount", *words, ctypes.c_ulong(flags), options.encode())
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} at {target}") from error


def _read_only(path) -> None:
    """Make a mount, and all below it, read-only."""
    _set_mount(path, AT_RECURSIVE, MOUNT_ATTR_RDONLY, 0)


def _set_mount(path, flags: int, added: int, taken: int) -> None:
    attributes = struct.pack("QQQQ", added, taken, 0, 0)
    where = ctypes.c_long(SYS_MOUNT_SETATTR), AT_FDCWD, str(path).encode(), flags
    _call("syscall", *where, attributes, ctypes.c_size_t(len(attributes)))


def _prctl(option: int, value: int) -> None:
    _call("prctl", option, *(ctypes.c_ulong(n) for n in (value, 0, 0, 0)))


def _call(name: str, *arguments: Any) -> None:
    """Call the C library. Raises: OSError."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
