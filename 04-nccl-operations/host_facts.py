"""What a rank finds on its host, as plain values that can be gathered: read only, no judgement.

Sources: sysfs(5), proc(5), cgroups(7), getrlimit(2).
"""

import mmap
import os
import re
import resource
import socket
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from net_devices import listens_at, nccl_version, read_interfaces

ROOT = Path("/")
GIB = 2**30  # bytes
LIMITS = {"locked memory": resource.RLIMIT_MEMLOCK, "open files": resource.RLIMIT_NOFILE}
SHOWN = re.compile(r"((TORCH_)?NCCL|TORCH_(FR|GLOO|DISTRIBUTED)|GLOO|FI|OFI_NCCL|RDMAV)_")
UNREAD = re.compile(r"NCCL_(VERSION|HOME|ROOT|(INCLUDE|LIB)_DIR|.*PACKAGE.*)$")  # images set them


def text(path: Path) -> str:
    """Return a file's text; nothing where the system has no such file, or no answer in it."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def number(path: Path) -> int | None:
    """Return the whole number in a file, or None."""
    found = text(path)
    return int(found) if re.fullmatch(r"-?\d+", found) else None


def read_settings(environ, known, root: Path = ROOT) -> dict[str, list[str]]:
    """Return {name: [value, where it was set]}: the environment wins, then the first file."""
    found = {}
    for name, value in environ.items():
        if name in known or (SHOWN.match(name) and not UNREAD.match(name)):
            found[name] = [value, "environment"]
    own = environ.get("NCCL_CONF_FILE") or f"{environ.get('HOME', '')}/.nccl.conf"
    for path in (own, "/etc/nccl.conf"):
        for line in text(root / path.lstrip("/")).splitlines():
            name, equals, value = line.partition("=")
            if equals and not line.startswith("#"):
                found.setdefault(name, [value, path])
    return found


def read_cpu_limit(root: Path = ROOT) -> float | None:
    """Return how many cores' time this process's control groups grant, None for all of it."""
    top = root / "sys/fs/cgroup"
    own = top / (re.findall(r"^0::/(.*)$", text(root / "proc/self/cgroup"), re.M) or [""])[0]
    pairs = [text(folder / "cpu.max").split() for folder in (own, *own.parents)]
    pairs += [[text(top / f"cpu/cpu.cfs_{name}_us") for name in ("quota", "period")]]  # version 1
    limits = [int(p[0]) / int(p[1]) for p in pairs if len(p) == 2 and p[0].isdecimal()]
    return min(limits, default=None)


def read_limits() -> dict[str, int | None]:
    """Return limits that NCCL and data loaders meet first, in bytes or files; None: unlimited."""
    soft = {name: resource.getrlimit(limit)[0] for name, limit in LIMITS.items()}
    found = {name: None if most == resource.RLIM_INFINITY else most for name, most in soft.items()}
    if Path("/dev/shm").exists():
        room = os.statvfs("/dev/shm")
        found["shared memory"] = room.f_blocks * room.f_frsize
    return found


def read_infiniband(root: Path = ROOT) -> list[dict]:
    """Return name, state and Gbit/s of each port of an InfiniBand or RoCE adapter."""
    found = []
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        rate = text(port / "rate").split()
        state = text(port / "state").split(": ")[-1]
        found.append({"name": f"{port.parent.parent.name}:{port.name}", "state": state,
                      "gbit_s": float(rate[0]) if rate else None})  # fmt: skip
    return found


def read_lanes(pci: str, root: Path = ROOT) -> dict:
    """Return how many PCIe lanes a device uses now, and how many it could."""
    folder = root / "sys/bus/pci/devices" / pci
    return {"pci": pci, "lanes": number(folder / "current_link_width"),
            "most_lanes": number(folder / "max_link_width")}  # fmt: skip


def read_gpus() -> list[dict]:
    """Return PCI address and lanes of the GPUs that this process sees."""
    found = []
    for gpu in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(gpu)
        place = card.pci_domain_id, card.pci_bus_id, card.pci_device_id
        found.append(read_lanes("{:04x}:{:02x}:{:02x}.0".format(*place)))
    return found


def names_in(library: str, prefix: str) -> set[str] | None:
    """Return the names with this prefix among the strings of a loaded library; None without it."""
    loaded = re.search(rf"/\S*{library}\.so\S*", text(ROOT / "proc/self/maps"))
    if not loaded:
        return None
    start, found = prefix.encode(), set()
    with open(loaded[0], "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
        at = data.find(start)
        while at >= 0:
            name = re.match(rb"[A-Z0-9_]+", data[at : at + 80])[0]
            found.add(name.decode())
            at = data.find(start, at + len(name))
    return found


def addresses_of(hostname: str) -> list[str]:
    """Return the addresses that a name resolves to here; none if it does not."""
    try:
        places = socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({place[4][0] for place in places})


def listening_addresses(settings) -> dict[str, list[str] | None]:
    """Return where gloo and NCCL make this process listen; None where NCCL was not asked."""
    # With NCCL_COMM_ID set, NCCL asks that address instead of choosing one.
    asked = nccl_version() and "NCCL_COMM_ID" not in settings
    gloo = listens_at(lambda: dist.new_group(backend="gloo"))
    return {"gloo": gloo, "nccl": listens_at(torch.cuda.nccl.unique_id) if asked else None}


def read_host(world, known) -> dict:
    """Return what this rank finds on its host. A collective: gloo makes a group."""
    settings = read_settings(os.environ, known)
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count())
    return {
        "host": socket.gethostname(), "boot": text(ROOT / "proc/sys/kernel/random/boot_id"),
        "rank": world.rank, "told": world.local_world_size,
        "torchrun": os.environ.get("GROUP_RANK"),  # there may be two on one host
        "environ": sorted(os.environ), "settings": settings, "limits": read_limits(),
        "cores": sorted(cores), "cpu_limit": read_cpu_limit(), "threads": torch.get_num_threads(),
        "gpus": read_gpus(), "installed": len([*Path("/proc/driver/nvidia/gpus").glob("*")]),
        "infiniband": read_infiniband(), "interfaces": [asdict(own) for own in read_interfaces()],
        "listens": listening_addresses(settings),
        "versions": {"torch": torch.__version__, "NCCL": nccl_version()},
    }  # fmt: skip
