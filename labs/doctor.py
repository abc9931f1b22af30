"""Say in a minute what this machine lacks to do the labs.

    python labs/doctor.py

Look for: a line that does not say ok, which says what to do. Exit code 1 if there is
one. It runs before anything is installed, too, and on a Python that is too old.
"""

import contextlib
import importlib.metadata
import importlib.util
import multiprocessing
import os
import re
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
INSTALL = "type make labs, or pip install --requirement labs/requirements.txt"
GIB, MIB = 2**30, 2**20
MEMORY_GIB = (
    1  # the grader with three ranks takes 0.6: they share what they have imported
)
ADDRESS_SPACE_GIB = 6  # PyTorch maps three when it is imported, of which it uses little
DISK_MIB = 100
PORTS = 16  # three ranks open two for each pair of them
DEADLINE_S = 30.0  # of the two ranks, for a hang: they take a second


class Lack(Exception):
    """What is missing, and what to do about it."""


def python():
    """Look at the version."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < (3, 11):  # noqa: UP036  that is the question
        raise Lack(f"{version} is too old: install Python 3.11 or later")
    return f"{version}, tested on 3.11"


def packages():
    """Compare the installed versions with labs/requirements.txt; name older ones."""
    text = (REPO / "labs/requirements.txt").read_text()
    pins = dict(re.findall(r"^([\w-]+)==([\d.]+)", text, re.M))
    least = dict(
        re.findall(r'"([\w-]+)>=([\d.]+)"', (REPO / "pyproject.toml").read_text())
    )
    wrong, other = [], []
    for name, pin in pins.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"no {name}")
            continue
        if numbers(version) < numbers(least.get(name, "0")):
            wrong.append(f"{name} {version} is older than {least[name]}")
        if numbers(version) != numbers(pin):
            other.append(f"{name} {version} (tested: {pin})")
    if wrong:
        raise Lack(f"{', '.join(wrong)}: {INSTALL}")
    spec = importlib.util.find_spec("dist_common")
    if spec is None or REPO not in Path(spec.origin).resolve().parents:
        whose = f"dist_common is {spec.origin}'s" if spec else "no dist_common"
        raise Lack(f"{whose}: in this folder, pip install --no-deps --editable .")
    return f"{len(pins)} of labs/requirements.txt" + "".join(
        f", {one}" for one in other
    )


def numbers(version):
    """Return a version's numbers, without what follows them, as in 2.14.1+cpu."""
    return [int(number) for number in re.match(r"[\d.]*\d", version).group().split(".")]


def cores():
    """Count the cores that this process may use."""
    count = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    return (
        str(count)
        if count > 1
        else "1: ranks take turns on it, and the grader takes longer"
    )


def memory():
    """Compare what is free, and what limits leave, with what the grader takes."""
    with contextlib.suppress(ImportError):  # Windows has none
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY and limit < ADDRESS_SPACE_GIB * GIB:
            raise Lack(f"ulimit -v is {limit / GIB:.1f} GiB: type ulimit -v unlimited")
    import psutil

    free, by = psutil.virtual_memory().available, "free"
    for path in limits_of_the_container():
        with contextlib.suppress(OSError, ValueError):  # no such file, or the word max
            if int(path.read_text()) < free:
                free, by = int(path.read_text()), "the container's limit"
    if free < MEMORY_GIB * GIB:
        do = "close programs, or give the container or the virtual machine more"
        raise Lack(f"{free / GIB:.1f} GiB, {by}: {MEMORY_GIB} GiB is needed: {do}")
    return f"{free / GIB:.1f} GiB, {by}"


def limits_of_the_container():
    """Return the files that limit this process's control groups, of both versions."""
    top, file = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
    name = re.findall(r"^0::/(.*)$", file.read_text(), re.M) if file.exists() else []
    group = top / (name[0] if name else "")
    groups = [group, *(one for one in group.parents if top in [one, *one.parents])]
    return [one / "memory.max" for one in groups] + [
        top / "memory/memory.limit_in_bytes"
    ]


def shared_memory():
    """Write to it where it is a folder, and make what the ranks wait at."""
    folder = Path("/dev/shm")
    try:
        if folder.is_dir():
            write_to(folder)
        multiprocessing.Barrier(2)
    except OSError as error:
        raise Lack(f"{error}: start a container with --shm-size 64m or more") from error
    return "a barrier of processes works"


def write_to(folder):
    """Write a MiB, and take it away again. Raises: OSError."""
    with tempfile.TemporaryFile(dir=str(folder)) as file:
        file.write(bytes(MIB))


def disk():
    """Write to the two folders that the grader writes to."""
    runs = REPO / "runs"
    try:
        runs.mkdir(exist_ok=True)
        for folder in (runs, Path(tempfile.gettempdir())):
            write_to(folder)
            free = shutil.disk_usage(folder).free
            if free < DISK_MIB * MIB:
                raise Lack(f"{free // MIB} MiB free in {folder}: free {DISK_MIB} MiB")
    except OSError as error:
        raise Lack(
            f"{error}: make it a folder of yours that can be written to"
        ) from error
    return f"{shutil.disk_usage(runs).free / GIB:.1f} GiB free in runs/"


def start_method():
    """Fork: the grader's ranks are forks of it."""
    if "fork" not in multiprocessing.get_all_start_methods():
        raise Lack(f"{sys.platform} cannot fork: on Windows use WSL, see labs/SETUP.md")
    process = multiprocessing.get_context("fork").Process(target=os.getpid)
    try:
        process.start()
    except OSError as error:
        raise Lack(
            f"fork: {error}: look at ulimit -u, or a container's --pids-limit"
        ) from error
    process.join()
    return "fork"


def ports():
    """Open ports of this machine, all at once, and connect to each."""
    opened = []
    try:
        for _ in range(PORTS):
            opened.append(socket.create_server(("127.0.0.1", 0)))
            opened.append(socket.create_connection(opened[-1].getsockname(), timeout=5))
        address = socket.gethostbyname("localhost")
    except OSError as error:
        do = "look at ip address show lo, at a firewall, at ulimit -n"
        raise Lack(
            f"{len(opened) // 2} of {PORTS} ports answer, then: {error}: {do}"
        ) from error
    finally:
        for one in opened:
            one.close()
    if not address.startswith("127."):
        raise Lack(
            f"localhost is {address}: /etc/hosts needs a line 127.0.0.1 localhost"
        )
    return f"{PORTS} on 127.0.0.1"


def loopback():
    """Add up two numbers on two processes, as the grader starts them."""
    import torch
    import torch.distributed as dist

    from dist_common import ranks
    from lab_parts.running import LOOPBACK

    def be(rank):
        os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
        store = dist.FileStore(str(Path(folder) / "store"), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        total = torch.tensor(float(rank + 1))
        dist.all_reduce(total)
        dist.barrier()  # one that left would cut the other's call short
        return total.item()

    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        ended = ranks.fork(be, 2, Path(folder), DEADLINE_S)
    for number, rank in enumerate(ended):
        if rank.value != 3:
            said = (rank.err.strip().splitlines() or ["it says nothing"])[-1]
            do = f"look at ip address show {LOOPBACK}, at a firewall"
            raise Lack(f"rank {number} ended by {rank.ended}: {said}: {do}")
    return (
        f"an all-reduce of two processes over {LOOPBACK}, "
        f"{time.monotonic() - started:.1f} s"
    )


CHECKS = (
    python,
    packages,
    cores,
    memory,
    shared_memory,
    disk,
    start_method,
    ports,
    loopback,
)


def main():
    missing = 0
    for check in CHECKS:
        try:
            said = f"ok: {check()}"
        except Lack as lack:
            said = str(lack)
        except ImportError as error:
            said = f"not tried, {error}: {INSTALL}"
        except (
            Exception
        ) as error:  # whatever it is, the other lines are to be read, too
            said = f"{type(error).__name__}: {error}: ask for help, with this line"
        missing += not said.startswith("ok: ")
        print(f"{check.__name__.replace('_', ' '):<14} {said}", flush=True)
    print(
        f"{missing} of {len(CHECKS)} need something"
        if missing
        else "Nothing is missing."
    )
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
