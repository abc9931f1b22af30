"""What a rank finds on its host, as plain values that can be gathered: read only, no judgement.

Sources: sysfs(5), proc(5), cgroups(7), getrlimit(2).
"""

import contextlib
import ipaddress
import mmap
import os
import platform
import re
import resource
import shutil
import socket
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from legacy_common import cli, runtime

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path("/")
GIB = 2**30  # bytes
# Cards of containers and virtual machines, which come and go on a healthy host.
VIRTUAL = re.compile(r"(lo|docker|veth|virbr|vnet|br-|cni|flannel|cali|podman|tun|tap|vxlan)")
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


# Network interfaces, and where gloo and NCCL listen.


@dataclass
class Interface:
    """A network interface as the kernel shows it."""

    name: str
    running: bool  # switched on, and its cable has a signal
    loopback: bool
    mtu: int  # bytes of the largest packet
    addresses: list[str]  # with the length of the network's prefix, IPv4 first: 10.0.0.5/24

    def ips(self):
        """Return the addresses without the length of their prefix."""
        return [address.split("/")[0] for address in self.addresses]


def read_interfaces():
    """Return the interfaces that have an address, in the kernel's order."""
    stats = psutil.net_if_stats()
    found = []
    for name, entries in psutil.net_if_addrs().items():
        addresses = [with_prefix(entry.address, entry.netmask) for entry in entries
                     if entry.family in (socket.AF_INET, socket.AF_INET6)]  # fmt: skip
        state = stats.get(name.split(":")[0])  # eth0:1 is a second address of eth0
        if addresses and state:
            loopback = "loopback" in state.flags.split(",")
            found.append(Interface(name, state.isup, loopback, state.mtu, addresses))
    return sorted(found, key=lambda interface: socket.if_nametoindex(interface.name))


def with_prefix(address, netmask):
    """Return an address with the length of its prefix: 255.255.255.0 is /24."""
    own = ipaddress.ip_address(address.split("%")[0])  # fe80::1%eth0 names its interface
    mask = ipaddress.ip_address(netmask) if netmask else None
    return f"{own}/{int(mask).bit_count() if mask else own.max_prefixlen}"


def addresses_of(hostname):
    """Return the addresses that a name resolves to here; none if it does not."""
    with contextlib.suppress(OSError):
        places = socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)
        return sorted({place[4][0] for place in places})
    return []


def matches(name, rule):
    """Say whether a name is in a list of NCCL's: "eth,ib" prefixes, "=eth0" exactly, "^lo" not."""
    exclude = rule.startswith("^")
    rule = rule.removeprefix("^")
    exact = rule.startswith("=")
    words = [word for word in rule.removeprefix("=").split(",") if word]
    found = any(name == word if exact else name.startswith(word) for word in words)
    return found != exclude


def listens_at(start):
    """Call start(); return the addresses at which it made this process listen."""

    def listening():
        sockets = psutil.Process().net_connections("tcp")
        return {own.laddr for own in sockets if own.status == psutil.CONN_LISTEN}

    before = listening()
    with contextlib.suppress(RuntimeError):  # NCCL found no interface
        start()
    return sorted({place.ip for place in listening() - before})


def ask_libraries(settings):
    """Return where gloo and NCCL make this process listen. A collective: gloo makes a group."""
    found = {"gloo": listens_at(lambda: dist.new_group(backend="gloo"))}
    # Where NCCL_COMM_ID is set, NCCL looks for the subnet of that address, which is not shown here.
    if nccl_version() and "NCCL_COMM_ID" not in settings:
        found["nccl"] = listens_at(torch.cuda.nccl.unique_id)
    return found


def nccl_version():
    """Return NCCL's version, as 2.30.7; None for a PyTorch without NCCL."""
    with contextlib.suppress(AttributeError, ImportError):
        return ".".join(map(str, torch.cuda.nccl.version()))
    return None


def refuse_unknown(named):
    """Raises: UsageError for an interface that gloo would stop for, saying less."""
    known = [one.name for one in read_interfaces()]
    for name in (named or "").split(","):
        if name and known and name not in known:
            raise cli.UsageError(f"GLOO_SOCKET_IFNAME: {name} has no address, {known} have")


# What the host has.


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


def read_processes() -> int | None:
    most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    return None if most == resource.RLIM_INFINITY else most


def free_in(folder: str) -> int | None:
    with contextlib.suppress(OSError):
        return shutil.disk_usage(folder).free
    return None


def read_infiniband(root: Path = ROOT) -> list[dict]:
    """Return state, Gbit/s and adapter of each port of an InfiniBand or RoCE adapter.

    Adapters are numbered in the order in which they were found, so that after a missing one the
    names of the others shift: `place`, the PCI address and port, does not.
    """
    found = []
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        adapter, rate = port.parent.parent, text(port / "rate").split()
        pci = (adapter / "device").resolve().name if (adapter / "device").exists() else adapter.name
        found.append({
            "name": f"{adapter.name}:{port.name}", "place": f"{pci} port {port.name}",
            "state": text(port / "state").split(": ")[-1], "link": text(port / "link_layer"),
            "gbit_s": float(rate[0]) if rate else None, "board": text(adapter / "board_id") or None,
            "firmware": text(adapter / "fw_ver") or None,
        })  # fmt: skip
    return found


def read_cards(interfaces: list[dict], root: Path = ROOT) -> list[dict]:
    """Return the network cards that other hosts can be behind, those without an address too.

    `interfaces` as read_interfaces returns them. `physical` has a device: a bond has none, its
    parts have; `rdma` belongs to one of the adapters of read_infiniband.
    """
    known, folder = {own["name"]: own for own in interfaces}, root / "sys/class/net"
    # By USB a server's controller (BMC) shows itself: it leads to no other host.
    devices = {path.parent.name for path in folder.glob("*/device")
               if "/usb" not in str(path.resolve())}  # fmt: skip
    found = []
    for name in sorted(known.keys() | devices):
        own, seen = known.get(name), folder / name
        if VIRTUAL.match(name) or (own and own["loopback"]):
            continue
        addresses = map(ipaddress.ip_interface, own["addresses"] if own else ())
        networks = [str(one.network) for one in addresses if not one.ip.is_link_local]
        speed, mtu, state = (text(seen / file) for file in ("speed", "mtu", "operstate"))
        found.append({
            "name": name, "running": own["running"] if own else state == "up",
            "network": next(iter(networks), None),
            "mtu": own["mtu"] if own else int(mtu or 0),
            "mbit_s": int(speed) if speed.isdecimal() else None,
            "physical": name in devices, "rdma": (seen / "device/infiniband").exists(),
        })  # fmt: skip
    return found


def read_driver(root: Path = ROOT) -> str | None:
    """Return the version of NVIDIA's driver; None where there is none."""
    found = re.search(r"(\d+\.\d[\d.]*)", text(root / "proc/driver/nvidia/version"))
    return found[1] if found else None


def read_ofed(root: Path = ROOT) -> str | None:
    """Return the version of the adapters' driver; None without such adapters.

    OFED's modules (DOCA-OFED, MLNX_OFED) say their version, recent kernels' own do not.
    """
    module = root / "sys/module/mlx5_core"
    return (text(module / "version") or "the kernel's own") if module.exists() else None


def read_hardware(interfaces: list[dict], root: Path = ROOT) -> dict:
    """Return adapters, network cards, GPUs and their drivers."""
    return {
        "infiniband": read_infiniband(root), "cards": read_cards(interfaces, root),
        "installed": len([*(root / "proc/driver/nvidia/gpus").glob("*")]),
        "driver": read_driver(root), "ofed": read_ofed(root),
    }  # fmt: skip


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
    interfaces = [asdict(own) for own in read_interfaces()]
    return {
        "host": socket.gethostname(), "boot": text(ROOT / "proc/sys/kernel/random/boot_id"),
        "rank": world.rank, "told": world.local_world_size,
        "torchrun": os.environ.get("GROUP_RANK"),  # there may be two on one host
        "environ": sorted(os.environ), "settings": settings, "limits": read_limits(),
        "cores": sorted(cores), "cpu_limit": read_cpu_limit(), "threads": torch.get_num_threads(),
        "gpus": read_gpus(), "interfaces": interfaces, **read_hardware(interfaces),
        "processes": read_processes(), "temporary": free_in(tempfile.gettempdir()),
        "listens": {"nccl": None} | ask_libraries(settings),
        "versions": {"Python": platform.python_version(), "torch": torch.__version__,
                     "NCCL": nccl_version()},
    }  # fmt: skip


def nodes_of() -> list[list[int]]:
    """Return the ranks of each node, nodes in order of their first rank. A collective."""
    boot_id = text(ROOT / "proc/sys/kernel/random/boot_id")  # containers may share a host's name
    places = runtime.gather((socket.gethostname(), boot_id, os.environ.get("GROUP_RANK")))
    return [[r for r, other in enumerate(places) if other == p] for p in dict.fromkeys(places)]
