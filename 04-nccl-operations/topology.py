"""Show what connects the ranks: GPUs, cores, NICs, the interface that is used, and the settings.

    CPU   python 04-nccl-operations/topology.py
          torchrun --standalone --nproc-per-node=2 04-nccl-operations/topology.py
    GPU   srun python 04-nccl-operations/topology.py    (or torchrun, on each machine of the job)

`--variables` lists the environment variables that matter. Look for: the interface that gloo and
NCCL choose and why, and the warnings. Each choice is predicted from the rules, then held against
the address at which the library really listens, which needs no GPU.

Sources: NCCL user guide, "Environment Variables" and "Troubleshooting"; NCCL, src/misc/socket.cc;
PyTorch, ProcessGroupGloo.cpp and ProcessGroupNCCL.hpp; nvidia-smi(1), "topo"; sysfs(5), proc(5).
"""

import contextlib
import difflib
import fcntl
import ipaddress
import mmap
import os
import re
import resource
import shutil
import socket
import struct
import subprocess
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist

from dist_common import cli, runtime
from dist_common.report import Report

GIB = 2**30  # bytes
ROOT = Path("/")
LINKS = {"NV#": "so many NVLinks", "PIX": "one PCIe switch", "PXB": "several PCIe switches",
         "PHB": "a CPU's PCIe bridge", "NODE": "several bridges of a NUMA node",
         "SYS": "from CPU to CPU"}  # fmt: skip
LIMITS = {"locked memory": resource.RLIMIT_MEMLOCK, "open files": resource.RLIMIT_NOFILE}
NCCL_RULES = {  # tried in this order
    "ib": "ib* comes first",
    "^docker,lo,virbr": "the first that is not docker*, lo* or virbr*",
    "docker": "there are only docker* and lo*",
    "lo": "there is only lo*",
}
LEFT_OVER = {
    "NCCL_P2P_DISABLE": "GPUs copy through host memory, not by NVLink or PCIe",
    "NCCL_SHM_DISABLE": "processes of one host meet over the network",
}
VARIABLES = """
seeing what happens
NCCL_DEBUG | silent | what NCCL tells: VERSION, WARN, INFO, TRACE | WARN always; INFO to look
NCCL_DEBUG_SUBSYS | INIT,BOOTSTRAP,ENV | topics of INFO | INIT,NET for transports, GRAPH for rings
NCCL_DEBUG_FILE | stdout | where to; %h is the host, %p the process | many ranks: their lines mix
NCCL_TOPO_DUMP_FILE | none | writes the machine as NCCL sees it, XML | a GPU or NIC seems too far
NCCL_CONF_FILE | ~/.nccl.conf | settings, beside /etc/nccl.conf | what holds for a whole cluster
choosing the network
NCCL_SOCKET_IFNAME | ib*, others, docker*, lo | prefixes eth,ib; exactly =eth0; not ^lo | VPNs
NCCL_SOCKET_FAMILY | first found | AF_INET or AF_INET6 | only one of the two is routed
NCCL_NET | best found | IB, Socket, or a plugin's name | fail rather than fall back to sockets
NCCL_NET_PLUGIN | libnccl-net.so | library for the network, or none | a cloud's has another name
NCCL_CROSS_NIC | 2: may | 0: a ring keeps to the same NIC, 1: need not | 0 if NICs are on rails
GLOO_SOCKET_IFNAME | host name's | exact names, comma between | host's name is 127.* or elsewhere
InfiniBand and RoCE
NCCL_IB_DISABLE | 0 | 1: sockets instead of InfiniBand and RoCE | to find out whether it is at fault
NCCL_IB_HCA | all | adapters: prefix mlx5; exactly =mlx5_0:1; not ^mlx5_3 | some are for storage
NCCL_IB_GID_INDEX | -1: chosen | row of a RoCE adapter's addresses | NCCL before 2.21: v2's row
NCCL_IB_TC | 0 | traffic class | RoCE: the class that the switches treat as lossless
NCCL_IB_SL | 0 | service level | an InfiniBand fabric that routes or shares by it
NCCL_IB_TIMEOUT | 20 | 4.096 us x 2^this until it sends again, 4.3 s | 22 if a large fabric gives up
NCCL_IB_RETRY_CNT | 7 | how often it sends again; no more than 7 | leave it
NCCL_IB_QPS_PER_CONNECTION | 1 | queue pairs, up to 128 | more where switches spread flows: measure
NCCL_IB_PCI_RELAXED_ORDERING | 2: if possible | 1: always, 0: never | 1: Azure's machines
NCCL_NET_GDR_LEVEL | by machine | NIC reads a GPU at most so far: LOC PIX PXB PHB SYS | if measured
inside a machine
NCCL_P2P_DISABLE | 0 | 1: no copies from GPU to GPU, NVLink's too | to find out whether they hang
NCCL_P2P_LEVEL | by machine | copies at most so far: LOC NVL PIX PXB PHB SYS | copies hang
NCCL_SHM_DISABLE | 0 | 1: the network instead of host memory | to find out whether /dev/shm fails
NCCL_CUMEM_HOST_ENABLE | by driver | 0: host memory in /dev/shm, 1: by CUDA | 0: docker, no NUMA
NCCL_NVLS_ENABLE | 2: if there | 0: sums are not made in NVSwitch | 0 if start-up fails for it
NCCL_TOPO_FILE | none | XML that says what connects what | virtual machines: the cloud's file
NCCL_IGNORE_CPU_AFFINITY | 0 | 1: threads near the GPU, whatever was bound | bound wrongly
buffers and threads
NCCL_BUFFSIZE | 4194304 | bytes of a buffer between two GPUs | less to save memory; more if measured
NCCL_SOCKET_NTHREADS | 1, AWS 2, gVNIC 4 | threads of a connection, 1 to 16 | 4: 100 Gbit/s, TCP
NCCL_NSOCKS_PERTHREAD | 1, AWS 8 | sockets of each; 64 in all | 4: one flow is slower than the link
NCCL_MAX_CTAS | by machine | most blocks of a GPU that a collective takes | kernels beside it starve
NCCL_ALGO | by size | Ring, Tree, NVLS, PAT, ... | to compare; never kept
NCCL_PROTO | by size | LL, LL128, Simple | ^LL128 if that is suspected of a bug; never kept
PyTorch's own
TORCH_NCCL_ASYNC_ERROR_HANDLING | 3 | on errors 0: go on, 1: abort, end, 2: abort, 3: end | leave it
TORCH_NCCL_BLOCKING_WAIT | 0 | 1: wait() blocks and raises on a timeout | to catch that in Python
TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC | 480 | ends a process whose watchdog hangs | it waits for the GIL
TORCH_FR_BUFFER_SIZE | 2000 | calls in the flight recorder, 0: off | more for long iterations
TORCH_NCCL_DUMP_ON_TIMEOUT | 1 | writes the flight recorder's file for each rank | leave it
TORCH_FR_DUMP_TEMP_FILE | ~/.cache/torch/... | path of it, the rank is added | on a shared disk
TORCH_NCCL_DESYNC_DEBUG | 0 | 1: a timeout names ranks that called otherwise | without recorder
TORCH_NCCL_NAN_CHECK | 0 | 1: stop where a NaN would be sent | the loss is NaN, and whose?
TORCH_DISTRIBUTED_DEBUG | OFF | INFO: of DDP; DETAIL: compares calls, slowly | a hang
others
CUDA_DEVICE_MAX_CONNECTIONS | 8 | queues to a GPU, 1 to 32 | 1: Megatron's overlap needs the order
CUDA_VISIBLE_DEVICES | all | GPUs that a process sees, in order | several jobs on one machine
OMP_NUM_THREADS | cores; torchrun: 1 | threads of an operation on the CPU | cores / ranks
"""
STALE = {
    "NCCL_TIMEOUT": "nobody reads it: use init_process_group(timeout=...)",
    "NCCL_IB_CUDA_SUPPORT": "gone since NCCL 2.4: use NCCL_NET_GDR_LEVEL",
    "NCCL_IB_GDR_LEVEL": "renamed in NCCL 2.4: use NCCL_NET_GDR_LEVEL",
    "NCCL_TREE_THRESHOLD": "gone since NCCL 2.5: use NCCL_ALGO",
    "NCCL_LL_THRESHOLD": "gone since NCCL 2.5: use NCCL_PROTO",
    "NCCL_MAX_NCHANNELS": "deprecated since NCCL 2.17: use NCCL_MAX_CTAS",
    "NCCL_MIN_NCHANNELS": "deprecated since NCCL 2.17: use NCCL_MIN_CTAS",
    "TORCH_NCCL_AVOID_RECORD_STREAMS": "what it asks for is the default: unset it",
}
for name in ("ASYNC_ERROR_HANDLING", "BLOCKING_WAIT", "DESYNC_DEBUG", "ENABLE_TIMING"):
    STALE[f"NCCL_{name}"] = f"an old name: use TORCH_NCCL_{name}"
SHOWN = re.compile(r"((TORCH_)?NCCL|TORCH_(FR|GLOO|DISTRIBUTED)|GLOO|FI|OFI_NCCL)_")
UNREAD = re.compile(r"NCCL_(VERSION|HOME|ROOT|(INCLUDE|LIB)_DIR|.*PACKAGE.*)$")  # images set them
PLUGIN = re.compile(r"NCCL_(FASTRAK|GPUDIRECTTCPX|TUNER_CONFIG)|(OFI_NCCL|FI)_")


def variables():
    """Return {name: (group, default, what it does, when to set it)} of VARIABLES."""
    rows, group = {}, ""
    for line in VARIABLES.strip().splitlines():
        name, *words = line.split(" | ")
        group = group if words else name
        rows.update({name: (group, *words)} if words else {})
    return rows


# What is there: read from files of the system, under another root in tests.


def text(path):
    """Return a file's text; nothing where the system has no such file, or no answer in it."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def number(path):
    found = text(path)
    return int(found) if re.fullmatch(r"-?\d+", found) else None


def numa_of(device):
    node = number(device / "numa_node")
    return None if node == -1 else node  # -1: the firmware does not say


def core_list(words):
    """Return the numbers in "0-3,8", the form of the kernel's lists."""
    spans = [word.split("-") for word in words.split(",") if word]
    return [core for span in spans for core in range(int(span[0]), int(span[-1]) + 1)]


def read_cores(root=ROOT):
    """Return the numbers of cores and sockets, and [cores, GiB] of each NUMA node."""
    folders = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/topology/physical_package_id")
    packages = [number(path) for path in folders]
    nodes = {}
    for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*")):
        memory = re.search(r"MemTotal:\s+(\d+) kB", text(folder / "meminfo"))
        cores = len(core_list(text(folder / "cpulist")))
        nodes[folder.name[4:]] = cores, int(memory[1]) * 1024 / GIB if memory else 0.0
    return {"online": len(packages), "sockets": len(set(packages)), "numa": nodes}


def read_cpu_limit(root=ROOT):
    """Return how many cores' time this process's control groups grant, None for all of it."""
    top = root / "sys/fs/cgroup"
    own = top / (re.findall(r"^0::/(.*)$", text(root / "proc/self/cgroup"), re.M) or [""])[0]
    pairs = [text(folder / "cpu.max").split() for folder in (own, *own.parents)]
    pairs += [[text(top / f"cpu/cpu.cfs_{name}_us") for name in ("quota", "period")]]  # version 1
    limits = [int(p[0]) / int(p[1]) for p in pairs if len(p) == 2 and p[0].isdecimal()]
    return min(limits, default=None)


def ipv4(name):
    """Return an interface's address with the length of its network's prefix, or None."""
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked, contextlib.suppress(OSError):
        # SIOCGIFADDR and SIOCGIFNETMASK of Linux
        own, mask = (fcntl.ioctl(asked, code, request)[20:24] for code in (0x8915, 0x891B))
        return str(ipaddress.ip_interface((own, int.from_bytes(mask, "big").bit_count())))
    return None


def read_nics(root=ROOT):
    """Return the network interfaces in the kernel's order, with their addresses, IPv4 first."""
    found = []
    sixes = [line.split() for line in text(root / "proc/net/if_inet6").splitlines()]
    sixes.sort(key=lambda row: row[3])  # scope: global before link
    for folder in (root / "sys/class/net").glob("*/"):
        name, speed = folder.name, number(folder / "speed")  # Mbit/s
        kind = "card" if (folder / "device").exists() else "virtual"
        known = {"772": "loopback", "32": "InfiniBand"}.get(text(folder / "type"), kind)
        up = int(text(folder / "flags") or "0", 16) & 1
        own = [f"{ipaddress.ip_address(bytes.fromhex(row[0]))}/{int(row[2], 16)}"
               for row in sixes if row[5] == name]  # fmt: skip
        found.append({
            "name": name, "index": number(folder / "ifindex"), "kind": known,
            "running": bool(up) and text(folder / "operstate") in ("up", "unknown"),
            "gbit_s": speed / 1000 if speed and speed > 0 else None,
            "mtu": number(folder / "mtu"), "numa": numa_of(folder / "device"),
            "addresses": [*filter(None, [ipv4(name)]), *own],
        })  # fmt: skip
    return sorted((nic for nic in found if nic["index"]), key=lambda nic: nic["index"])


def read_infiniband(root=ROOT):
    found = []
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        device, rate = port.parent.parent / "device", text(port / "rate").split()
        found.append({
            "name": f"{port.parent.parent.name}:{port.name}", "layer": text(port / "link_layer"),
            "state": text(port / "state").split(": ")[-1],
            "gbit_s": float(rate[0]) if rate else None, "numa": numa_of(device),
            "nics": sorted(nic.name for nic in (device / "net").glob("*")),
        })  # fmt: skip
    return found


def read_pci(pci, root=ROOT):
    folder = root / "sys/bus/pci/devices" / pci
    return {"pci": pci, "numa": numa_of(folder), "link": text(folder / "current_link_speed"),
            "lanes": number(folder / "current_link_width"),
            "most_lanes": number(folder / "max_link_width")}  # fmt: skip


def read_gpus():
    found, gpus = [], range(torch.cuda.device_count())
    for gpu in gpus:
        card = torch.cuda.get_device_properties(gpu)
        pci = f"{card.pci_domain_id:04x}:{card.pci_bus_id:02x}:{card.pci_device_id:02x}.0"
        peers = [torch.cuda.can_device_access_peer(gpu, peer) for peer in gpus if peer != gpu]
        memory = {"gib": card.total_memory / GIB, "peers": sum(peers)}
        found.append({"name": card.name, **memory, **read_pci(pci)})
    return found


def parse_topo(printed):
    """Return {device: {device: link}} of the matrix that `nvidia-smi topo -m` prints."""
    lines = re.sub(r"\x1b\[\d*m", "", printed).split("Legend:")[0].splitlines()
    rows = [[cell.strip() for cell in line.split("\t")] for line in lines if line.strip()]
    names = {row[0] for row in rows[1:]}
    columns = {i: name for i, name in enumerate(rows[0] if rows else []) if name in names}
    own = dict(re.findall(r"^\s*(NIC\d+): (\S+)", printed, re.M))  # a legend of its own
    return {own.get(row[0], row[0]): {own.get(name, name): row[i] for i, name in columns.items()}
            for row in rows[1:]}  # fmt: skip


def read_settings(environ, root=ROOT):
    """Return {name: [value, where it was set]}: the environment wins, then the first file."""
    found, known = {}, variables()
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


def read_limits():
    """Return what NCCL and DataLoader's workers run short of first; None is unlimited."""
    soft = {name: resource.getrlimit(limit)[0] for name, limit in LIMITS.items()}
    found = {name: None if most == resource.RLIM_INFINITY else most for name, most in soft.items()}
    if Path("/dev/shm").exists():
        room = os.statvfs("/dev/shm")
        found["shared memory"] = room.f_blocks * room.f_frsize
    return found


# Which interface is used, and why; where the libraries really listen.


def value_of(settings, name):
    value = settings.get(name, [""])[0]
    return value if len(value) > 1 else ""  # as both libraries see it


def bind_first(hostname):
    """Return the first address of a name at which this machine can listen, or None."""
    with contextlib.suppress(socket.gaierror):
        for place in socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(*place[:3]) as probe:
                probe.bind(place[4])
                return place[4][0]
    return None


def gloo_choice(nics, settings, hostname):
    """Return [interface, address, why] by the rule of ProcessGroupGloo."""
    named = value_of(settings, "GLOO_SOCKET_IFNAME")
    plain = {nic["name"]: [own.split("/")[0] for own in nic["addresses"]] for nic in nics}
    if named:
        first = named.split(",")[0]
        return [first, (plain.get(first) or [None])[0], f"GLOO_SOCKET_IFNAME={named}"]
    address, why = bind_first(hostname), f"address of the host's name, {hostname}"
    if address is None:
        address, why = "127.0.0.1", f"the host's name, {hostname}, has no address here"
    owners = [nic for nic, own in plain.items() if address in own]
    loops = [nic["name"] for nic in nics if nic["kind"] == "loopback"]  # has all of 127.*
    return [(owners or loops or [None])[0], address, why]


def matches(name, rule):
    """Say whether a name is in a list of NCCL's: "eth,ib" prefixes, "=eth0" exactly, "^lo" not."""
    exclude, rule = rule.startswith("^"), rule.removeprefix("^")
    exact, rule = rule.startswith("="), rule.removeprefix("=")
    words = [word for word in rule.split(",") if word]
    return any(name == word if exact else name.startswith(word) for word in words) != exclude


def nccl_choice(nics, settings):
    """Return [interface, address, why] of NCCL's meeting place; [None, None, why] if none."""
    only = {"AF_INET": 4, "AF_INET6": 6}.get(value_of(settings, "NCCL_SOCKET_FAMILY"))
    running = [(nic["name"], ipaddress.ip_interface(own))
               for nic in nics if nic["running"] for own in nic["addresses"]]  # fmt: skip
    running.sort(key=lambda pair: pair[1].version)  # getifaddrs(3) gives IPv4 first
    usable = [(name, own.ip) for name, own in running
              if only in (None, own.version) and str(own.ip) != "::1"]  # fmt: skip
    named = value_of(settings, "NCCL_SOCKET_IFNAME")
    rules = {named: f"NCCL_SOCKET_IFNAME={named}"} if named else NCCL_RULES
    for rule, why in rules.items():
        for name, address in usable:
            if matches(name, rule):
                return [name, str(address), why]
    return [None, None, f"no running interface has an address: {next(iter(rules.values()))}"]


def address_of(digits):
    """Return the address that /proc/net/tcp writes as 32-bit words in the machine's order."""
    words = struct.iter_unpack("=I", bytes.fromhex(digits))
    return str(ipaddress.ip_address(b"".join(struct.pack("!I", word) for (word,) in words)))


def listening(root=ROOT):
    """Return address and port of each socket at which this process listens; None if not Linux."""
    if not (root / "proc/net/tcp").exists():
        return None
    own = set()
    for descriptor in (root / "proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            own |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(descriptor)))
    tables = text(root / "proc/net/tcp").splitlines() + text(root / "proc/net/tcp6").splitlines()
    rows = [row for row in map(str.split, tables) if row[3] == "0A" and row[9] in own]  # LISTEN
    return {(address_of(row[1].split(":")[0]), row[1].split(":")[1]) for row in rows}


def listens_at(start):
    """Call start(); return the addresses at which it made this process listen."""
    before = listening()
    with contextlib.suppress(RuntimeError):  # NCCL found no interface
        start()
    return None if before is None else sorted({place[0] for place in listening() - before})


def nccl_version():
    with contextlib.suppress(AttributeError, ImportError):
        return ".".join(map(str, torch.cuda.nccl.version()))
    return None


def findings(world):
    """Return what this rank finds, as plain values that can be gathered and written."""
    settings, nics, hostname = read_settings(os.environ), read_nics(), socket.gethostname()
    affinity, links = getattr(os, "sched_getaffinity", lambda _: []), ""
    if shutil.which("nvidia-smi") and world.local_rank == 0:
        asked = ["nvidia-smi", "topo", "-m"]
        links = subprocess.run(asked, capture_output=True, text=True).stdout
    # NCCL makes the meeting place of a communicator, as it does for rank 0, without a GPU too.
    # Where NCCL_COMM_ID is set, the subnet of that address decides instead.
    meets = nccl_version() and "NCCL_COMM_ID" not in settings
    return {
        "host": hostname, "boot": text(ROOT / "proc/sys/kernel/random/boot_id"),
        "rank": world.rank, "told": world.local_world_size,
        "torchrun": os.environ.get("GROUP_RANK"),  # there may be two on one host
        "cores": read_cores(),
        "allowed": sorted(affinity(0)) or list(range(os.cpu_count())), "limit": read_cpu_limit(),
        "threads": torch.get_num_threads(), "gpus": read_gpus(), "nics": nics,
        "installed": len(list(Path("/proc/driver/nvidia/gpus").glob("*"))),
        "links": parse_topo(links), "infiniband": read_infiniband(),
        "settings": settings, "limits": read_limits(),
        "chosen": {"gloo": gloo_choice(nics, settings, hostname),
                   "nccl": nccl_choice(nics, settings)},
        "found": {"gloo": listens_at(lambda: dist.new_group(backend="gloo")),
                  "nccl": listens_at(torch.cuda.nccl.unique_id) if meets else None},
        "versions": {"torch": torch.__version__, "NCCL": nccl_version()},
    }  # fmt: skip


# The usual mistakes, each with its cure.


def nccl_knows(name):
    """Say whether the name is in the NCCL that this process has loaded; True if there is none."""
    loaded = re.search(r"/\S*libnccl\.so\S*", text(ROOT / "proc/self/maps"))
    if not loaded:
        return True
    with open(loaded[0], "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as library:
        return library.find(b"\0" + name.encode() + b"\0") >= 0


def wrong_settings(one):
    settings, known = {name: value for name, (value, _) in one["settings"].items()}, variables()
    for name in sorted(settings):
        if name in STALE:
            yield f"{name}: {STALE[name]}"
        ours = name in known or PLUGIN.match(name) or not name.startswith("NCCL_")
        if not (ours or name in STALE or nccl_knows(name)):
            near = difflib.get_close_matches(name, known, 1, 0.8)
            hint = f"did you mean {near[0]}?" if near else "misspelt, or a plugin's own?"
            yield f"{name} is not one that NCCL knows: {hint}"
    for name, lost in LEFT_OVER.items():
        if settings.get(name) == "1":
            yield f"{name}=1 is left over from looking for a fault: {lost}; unset it"
    if settings.get("NCCL_DEBUG", "").upper() in ("INFO", "TRACE"):
        yield "NCCL_DEBUG writes pages for each rank: use WARN in long runs"
    active = [port["name"] for port in one["infiniband"] if port["state"] == "ACTIVE"]
    if settings.get("NCCL_IB_DISABLE") == "1" and active:
        yield f"NCCL_IB_DISABLE=1, but {active[0]} is up: unset it, or all goes by sockets"
    rule, ports = settings.get("NCCL_IB_HCA"), [port["name"] for port in one["infiniband"]]
    devices = re.sub(r":[\d:]*", "", rule or "")
    if rule and ports and not any(matches(port.split(":")[0], devices) for port in ports):
        yield f"NCCL_IB_HCA={rule} names no adapter: this host has {', '.join(ports)}"


def wrong_network(one, several_hosts):
    if value_of(one["settings"], "NCCL_SOCKET_IFNAME") and one["chosen"]["nccl"][0] is None:
        there = ", ".join(nic["name"] for nic in one["nics"] if nic["running"])
        yield f"NCCL cannot start: {one['chosen']['nccl'][2]}; there are {there}"
    for library, (name, address, _) in one["chosen"].items():
        if several_hosts and address and ipaddress.ip_address(address).is_loopback:
            cure = f"set {library.upper()}_SOCKET_IFNAME, or correct /etc/hosts"
            yield f"{library} meets at {address} ({name}), which no other host reaches: {cure}"
    fastest = max((port["gbit_s"] or 0 for port in one["infiniband"]), default=0)
    for port in one["infiniband"]:
        if port["state"] != "ACTIVE":
            yield f"{port['name']} is {port['state']}: NCCL leaves it out; cable or subnet manager?"
        elif port["gbit_s"] and port["gbit_s"] < fastest:
            yield f"{port['name']} has {port['gbit_s']:g} of {fastest:g} Gbit/s: cable or switch?"
    lock = one["limits"].get("locked memory")
    if lock is not None and lock < GIB and one["infiniband"]:
        yield f"only {lock / GIB:.2f} GiB may be locked, as RDMA needs: ulimit -l unlimited"


def gpus_of(here):
    """Return a host's GPUs; srun may let each rank see its own alone."""
    return list({gpu["pci"]: gpu for rank in here for gpu in rank["gpus"]}.values())


def wrong_machine(here, world_size):
    one, ranks = here[0], len(here)
    cores = len(set().union(*(rank["allowed"] for rank in here)))
    usable = min(cores, max(1, int(one["limit"] or cores)))
    if usable < cores:
        yield f"{cores} cores are seen, the time of {one['limit']:g} is granted: ask for more"
    if ranks > usable:
        yield f"{ranks} ranks share {usable} cores and wait for each other: start fewer"
    elif sum(rank["threads"] for rank in here) > usable:
        cure = f"set OMP_NUM_THREADS={usable // ranks}"
        yield f"{ranks} ranks x {one['threads']} threads on {usable} cores: {cure}"
    gpus = len(gpus_of(here))
    if 0 < gpus < ranks:
        yield f"{ranks} ranks but {gpus} GPUs: start one rank for each GPU"
    if gpus < one["installed"] and "CUDA_VISIBLE_DEVICES" in one["settings"]:
        yield f"CUDA_VISIBLE_DEVICES hides {one['installed'] - gpus} of {one['installed']} GPUs"
    for gpu in gpus_of(here):
        if gpu["lanes"] and gpu["most_lanes"] and gpu["lanes"] < gpu["most_lanes"]:
            lanes = f"{gpu['lanes']} of {gpu['most_lanes']} PCIe lanes"
            yield f"GPU {gpu['pci']} has {lanes}: slot, riser or BIOS?"
    room, files = one["limits"].get("shared memory"), one["limits"]["open files"]
    if room is not None and room < GIB:
        yield f"/dev/shm has {room / GIB:.2f} GiB for NCCL and DataLoader: docker run --shm-size=8g"
    if files and files < max(1024, 16 * world_size):  # some for each peer
        yield f"at most {files} open files for {world_size} ranks: ulimit -n 65536"


def disagreements(hosts):
    """Name what differs between hosts that should be alike."""
    seen = defaultdict(dict)
    for one in (here[0] for here in hosts):
        for name in sorted(set().union(*(here[0]["settings"] for here in hosts))):
            seen[name][one["host"]] = one["settings"].get(name, ["unset"])[0]
        for library, version in one["versions"].items():
            seen[f"version of {library}"][one["host"]] = version
        for library, (_, address, _) in one["chosen"].items():
            for nic in one["nics"]:
                for own in map(ipaddress.ip_interface, nic["addresses"]):
                    if str(own.ip) == address:
                        seen[f"network of {library}"][one["host"]] = str(own.network)
                        seen[f"MTU of {library}"][one["host"]] = nic["mtu"]
    for what, values in seen.items():
        if len(set(values.values())) > 1:
            yield f"{what} differs: " + ", ".join(f"{host} {v}" for host, v in values.items())


# What is printed, and checked.


def show_host(report, here):
    one, cores, none = here[0], here[0]["cores"], "-"
    say = report.say
    say(f"\nhost {one['host']}: ranks {' '.join(str(rank['rank']) for rank in here)}")
    may = " or ".join(sorted({f"{len(rank['allowed'])} cores" for rank in here}))
    say(f"CPU: {cores['online']} cores, sockets: {cores['sockets']}; a rank may use {may}")
    for node, (inside, gib) in cores["numa"].items():
        say(f"NUMA node {node}: {inside} cores, {gib:.2f} GiB")
    for gpu in gpus_of(here):
        say(f"GPU {gpu['pci']}: {gpu['name']}, {gpu['gib']:.2f} GiB, NUMA node {gpu['numa']}")
        say(f"    PCIe x{gpu['lanes']}, now {gpu['link']}, which is less when idle; "
            f"reads the memory of {gpu['peers']} others")  # fmt: skip
    for port in one["infiniband"]:
        say(f"{port['layer']} {port['name']}: {port['state']}, {port['gbit_s']} Gbit/s, "
            f"NUMA node {port['numa']}, {' '.join(port['nics'])}")  # fmt: skip
    if one["links"]:
        rows = [(name, *links.values()) for name, links in one["links"].items()]
        report.table(rows, ("", *next(iter(one["links"].values()))))
        links = {re.sub(r"\d+", "#", link) for row in rows for link in row[1:]}
        say("; ".join(f"{link}: {words}" for link, words in LINKS.items() if link in links))
    if not gpus_of(here):
        say("GPUs: none; the ranks meet on the CPU, by gloo")
    if not one["infiniband"]:
        say("InfiniBand: none; between hosts all goes by sockets, or by a plugin")
    rows = [(nic["name"], nic["kind"], "up" if nic["running"] else "down",
             *(none if cell is None else str(cell) for cell in (
                 next(iter(nic["addresses"]), None), nic["gbit_s"], nic["mtu"], nic["numa"],
             ))) for nic in one["nics"]]  # fmt: skip
    report.table(rows, ("NIC", "kind", "state", "address", "Gbit/s", "MTU", "NUMA"), names=4)
    say()
    rows = [(library, name or none, address or none, " ".join(one["found"][library] or [none]), why)
            for library, (name, address, why) in one["chosen"].items()]  # fmt: skip
    report.table(rows, ("library", "uses", "predicted", "listens at", "because"), names=5)
    known = variables()
    for name, (value, where) in sorted(one["settings"].items()):
        what = known[name][2] if name in known else "not in the list of --variables"
        say(f"{name}={value} ({where}): {what}")


def show_variables():
    group = None
    for name, (own, default, does, when) in variables().items():
        if own != group:
            print(own)
        group = own
        print(f"  {name} ({default}): {does}\n      set it: {when}")


def check_all(report, hosts):
    """Add what was predicted and then seen, or counted twice."""
    check = report.check
    ranks = [one for here in hosts for one in here]
    for library, source in (("gloo", "ProcessGroupGloo.cpp"), ("nccl", "NCCL, socket.cc")):
        pairs = [(one["found"][library], one["chosen"][library][1]) for one in ranks]
        wrong = [seen != ([wanted] if wanted else []) for seen, wanted in pairs if seen is not None]
        if wrong:
            check(f"{library}: ranks that listen elsewhere", sum(wrong), 0, 0, source)
    counted = [here[0]["cores"] for here in hosts]
    if all(cores["numa"] for cores in counted):
        inside = sum(own for cores in counted for own, _ in cores["numa"].values())
        online = sum(cores["online"] for cores in counted)
        check("cores of all NUMA nodes", inside, online, 0, "/sys: node*/cpulist, cpu*/topology")
    wrong = sum(
        one["told"] != sum(other["torchrun"] == one["torchrun"] for other in here)
        for here in hosts for one in here
    )  # fmt: skip
    check("ranks that miscount those of their host", wrong, 0, 0, "LOCAL_WORLD_SIZE")


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    what = "list the environment variables that matter, and stop"
    parser.add_argument("--variables", action="store_true", help=what)
    return parser.parse_args()


def main():
    args = parse_args()
    if args.variables:
        if runtime.discover().is_rank0:
            show_variables()
        return 0
    there = [nic["name"] for nic in read_nics() if nic["addresses"]]
    for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(","):
        if name and there and name not in there:  # gloo would not start, and say less
            raise cli.UsageError(f"GLOO_SOCKET_IFNAME: {name} has no address, {there} have")
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("04-nccl-operations/topology.py", args, world, device)
        ranks = runtime.gather(findings(world))
        by_host = defaultdict(list)
        for one in ranks:
            by_host[one["host"], one["boot"]].append(one)
        hosts = list(by_host.values())
        report.start(f"hosts: {len(hosts)}")
        warnings = [f"between hosts: {line}" for line in disagreements(hosts)]
        for here in hosts:
            show_host(report, here)
            mistakes = [*wrong_settings(here[0]), *wrong_network(here[0], len(hosts) > 1),
                        *wrong_machine(here, world.world_size)]  # fmt: skip
            warnings += [f"{here[0]['host']}: {line}" for line in mistakes]
        report.say()
        for line in warnings:
            report.say(f"warning: {line}")
        check_all(report, hosts)
        report.metrics |= {"hosts": len(hosts), "warnings": warnings, "reports": ranks}
        return report.finish(f"warnings: {len(warnings)}")


if __name__ == "__main__":
    cli.run(main)
