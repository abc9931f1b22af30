"""Read what a rank sees of its node: settings, interfaces, memory, limits, versions.

The facts are plain values, which travel as JSON. Nothing is judged here.
Sources: sysfs(5), proc(5), getrlimit(2); NCCL user guide, "Environment Variables".
"""

import contextlib
import difflib
import functools
import ipaddress
import mmap
import os
import platform
import re
import resource
import shutil
import socket
import tempfile
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from dist_common import runtime

ROOT = Path("/")
# Variables of these libraries are read, and compared between nodes.
PREFIXES = re.compile(r"(NCCL|TORCH_NCCL|TORCH_FR|GLOO)_")
# Images set these, a plugin reads them, or each rank has its own value.
IGNORED = re.compile(
    r"NCCL_(VERSION|HOME|ROOT|DEBUG_FILE|HOSTID|FASTRAK_\w+|\w+_DIR|\w*PACKAGE\w*)$"
)
# Which loaded library has the names that begin like this.
LIBRARIES = {
    "NCCL_": "libnccl",
    "TORCH_NCCL_": "libtorch_cuda",
    "TORCH_FR_": "libtorch_cpu",
    "GLOO_": "libtorch_cpu",
}
LAUNCHER = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
# Interfaces of containers and virtual machines come and go on a healthy node.
VIRTUAL = re.compile(r"(lo|docker|veth|virbr|vnet|br-|cni|flannel|cali|tun|tap|vxlan)")


def read_facts(place, device):
    """Return the facts of this rank's node, and the problem that stops the rank.

    `place` has the rank and the numbers of ranks. Only the first rank of a node reads
    the names in the libraries, which are large files.
    """
    names = set(os.environ)
    facts = {
        "rank": place.rank,
        "host": socket.gethostname(),
        "boot": text("proc/sys/kernel/random/boot_id"),  # two hosts may have one name
        "settings": read_settings(),
        "interfaces": read_interfaces(),
        "alike": read_versions() | {"WORLD_SIZE": place.world_size},
        "amounts": read_amounts(),
        "problem": "",
    }
    facts["misspelt"] = {}
    if place.local_rank == 0:
        facts["misspelt"] = find_misspelt(names | set(facts["settings"]))
    try:
        runtime.choose_device(
            device, place.launcher, place.local_rank, place.local_world_size
        )
        facts["listens"] = {"gloo": listens_at(make_group_of_one)}
    except Exception as error:  # whatever it is, rank 0 has to hear of it
        named = os.environ.get("GLOO_SOCKET_IFNAME")
        where = f" (GLOO_SOCKET_IFNAME={named})" if named else ""
        why = re.sub(r"\[enforce fail at .*?\] ", "", " ".join(str(error).split()))
        facts["problem"] = f"{why[:160].rstrip('. ')}{where}"
        return facts
    if nccl_version():
        facts["listens"]["NCCL"] = nccl_listens_at()
    return facts


def text(path):
    """Return the text of a file below ROOT; nothing if it cannot be read."""
    try:
        return (ROOT / path).read_text().strip()
    except OSError:
        return ""


# Settings


def read_settings():
    """Return the libraries' variables: the environment wins over NCCL's files."""
    settings = {}
    config_file = os.environ.get("NCCL_CONF_FILE", os.path.expanduser("~/.nccl.conf"))
    for path in ("etc/nccl.conf", config_file):
        for line in text(path).splitlines():
            name, equals, value = line.partition("=")
            if equals and not line.startswith("#"):
                settings[name] = value
    settings |= {
        name: value for name, value in os.environ.items() if PREFIXES.match(name)
    }
    return {name: value for name, value in settings.items() if not IGNORED.match(name)}


def find_misspelt(names):
    """Return {name: similar name} for names that no library reads."""
    misspelt = {}
    for name in names:
        prefix = next((one for one in LIBRARIES if name.startswith(one)), None)
        known = names_in(LIBRARIES[prefix], prefix) if prefix else set(LAUNCHER)
        likeness = 0.8 if prefix else 0.9
        if known and name not in known and not IGNORED.match(name):
            similar = difflib.get_close_matches(name, known, 1, likeness)
            # A name unlike all others may be a variable of a network plugin.
            if similar:
                misspelt[name] = similar[0]
    return misspelt


@functools.cache
def names_in(library, prefix):
    """Return the names that begin so in a loaded library; none if it is not loaded."""
    loaded = re.search(rf"/\S*{library}\.so\S*", text("proc/self/maps"))
    if not loaded:
        return set()
    with (
        open(loaded[0], "rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data,
    ):
        names = re.findall(rb"%b[A-Z0-9_]+" % prefix.encode(), data)
    return {name.decode() for name in names}


# Network


def read_interfaces():
    """Return name, address, network, MTU in bytes of each interface that is up."""
    stats = psutil.net_if_stats()
    interfaces = []
    for name, entries in psutil.net_if_addrs().items():
        state = stats.get(name.split(":")[0])  # eth0:1 is a second address of eth0
        for entry in entries:
            if entry.family == socket.AF_INET and state and state.isup:
                interface = ipaddress.ip_interface(
                    f"{entry.address}/{entry.netmask or 32}"
                )
                one = {"name": name, "address": str(interface.ip), "mtu": state.mtu}
                one["network"] = str(interface.network)
                one["virtual"] = bool(VIRTUAL.match(name))
                interfaces.append(one)
    return interfaces


def make_group_of_one():
    """Have gloo listen where it would in the job, without another rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def listens_at(start):
    """Call start(); return the addresses at which this process then listens."""

    def listening():
        sockets = psutil.Process().net_connections("tcp")
        return {one.laddr for one in sockets if one.status == psutil.CONN_LISTEN}

    before = listening()
    try:
        start()
        return sorted({place.ip for place in listening() - before})
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def nccl_listens_at():
    """Return the address of NCCL's first socket; none if it finds no interface."""
    with contextlib.suppress(RuntimeError):
        return listens_at(torch.cuda.nccl.unique_id)
    return []


# Versions and devices


def read_versions():
    """Return versions and numbers of devices, which should be equal on all nodes."""
    driver = re.search(r"\d+\.\d[\d.]*", text("proc/driver/nvidia/version"))
    ports = (ROOT / "sys/class/infiniband").glob("*/ports/*/state")
    return {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "NCCL": nccl_version(),
        "NVIDIA driver": driver[0] if driver else "none",
        "GPUs": len(list((ROOT / "proc/driver/nvidia/gpus").glob("*"))),
        "active RDMA ports": sum("ACTIVE" in text(port) for port in ports),
    }


def nccl_version():
    """Return NCCL's version, as 2.30.7; nothing for a PyTorch without NCCL."""
    with contextlib.suppress(AttributeError, ImportError):
        return ".".join(map(str, torch.cuda.nccl.version()))
    return ""


# Memory, disks, limits


def read_amounts():
    """Return sizes in bytes and limits; None means unlimited."""
    limits = {
        "open files": resource.RLIMIT_NOFILE,
        "processes": resource.RLIMIT_NPROC,
        "locked memory": resource.RLIMIT_MEMLOCK,
    }
    amounts = {name: resource.getrlimit(limit)[0] for name, limit in limits.items()}
    for name, most in amounts.items():
        amounts[name] = None if most == resource.RLIM_INFINITY else most
    folders = {"/tmp": tempfile.gettempdir(), "this folder": "."}
    if os.path.isdir("/dev/shm"):
        amounts["/dev/shm"] = shutil.disk_usage("/dev/shm").total
        folders["/dev/shm"] = "/dev/shm"
    for name, folder in folders.items():
        amounts[f"free in {name}"] = shutil.disk_usage(folder).free
    return amounts
