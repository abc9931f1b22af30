"""What a rank finds on its host, as plain values that can be gathered: read only, no judgement.

Sources: sysfs(5), proc(5), cgroups(7), getrlimit(2).
"""

import mmap
import os
import re
import resource
import shutil
import socket
from dataclasses import asdict
from pathlib import Path

import torch

from interfaces import ask_libraries, nccl_version, read_interfaces

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

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


def read_toml(path: Path) -> dict:
    return tomllib.loads(path.read_text())


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
    found = {name: resource.getrlimit(limit)[0] for name, limit in LIMITS.items()}
    found = {name: None if most == resource.RLIM_INFINITY else most for name, most in found.items()}
    if Path("/dev/shm").exists():
        shm = shutil.disk_usage("/dev/shm")
        found |= {"shared memory": shm.total, "shared memory left": shm.free}
    return found


def read_infiniband(root: Path = ROOT) -> list[dict]:
    """Return name, state and Gbit/s of each port of an InfiniBand or RoCE adapter."""
    found = []
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        rate, state = text(port / "rate").split(), text(port / "state").split(": ")[-1]
        name, gbit_s = f"{port.parent.parent.name}:{port.name}", float(rate[0]) if rate else None
        found.append({"name": name, "state": state, "gbit_s": gbit_s})
    return found


def read_lanes(pci: str, root: Path = ROOT) -> dict:
    """Return how many PCIe lanes a device uses now, and how many it could."""
    files = [root / f"sys/bus/pci/devices/{pci}/{kind}_link_width" for kind in ("current", "max")]
    lanes, most = (int(width) if width.isdecimal() else None for width in map(text, files))
    return {"pci": pci, "lanes": lanes, "most_lanes": most}


def read_gpus() -> list[dict]:
    """Return PCI address and lanes of the GPUs that this process sees."""
    cards = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    places = ((card.pci_domain_id, card.pci_bus_id, card.pci_device_id) for card in cards)
    return [read_lanes("{:04x}:{:02x}:{:02x}.0".format(*place)) for place in places]


def names_in(library: str, prefix: str) -> set[str] | None:
    """Return the names with this prefix among the strings of a loaded library; None without it."""
    loaded = re.search(rf"/\S*{library}\.so\S*", text(ROOT / "proc/self/maps"))
    if not loaded:
        return None
    with open(loaded[0], "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
        return {name.decode() for name in re.findall(rb"%b[A-Z0-9_]*" % prefix.encode(), data)}


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
        "listens": {"nccl": None} | ask_libraries(settings),
        "versions": {"torch": torch.__version__, "NCCL": nccl_version()},
    }  # fmt: skip
