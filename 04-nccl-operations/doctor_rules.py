"""The rules of doctor.py: each looks at what host_facts.py read, and yields what is wrong."""

import difflib
import ipaddress
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from host_facts import GIB

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

TABLE = tomllib.loads((Path(__file__).parent / "variables.toml").read_text())
VARIABLES = {row["name"]: row for row in TABLE["variable"]}
STALE = {row["name"]: row for row in TABLE["stale"]}
LAUNCHER = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_RANK")
PLUGIN = re.compile(r"NCCL_(FASTRAK|GPUDIRECTTCPX|TUNER_CONFIG)|(OFI_NCCL|FI)_")
LIBRARIES = {"NCCL_": ("libnccl",), "TORCH_NCCL_": ("libtorch_cuda", "libtorch_cpu"),
             "TORCH_FR_": ("libtorch_cpu",)}  # fmt: skip
OWN_OF_A_RANK = {"CUDA_VISIBLE_DEVICES", "NCCL_DEBUG_FILE"}
Settings = dict[str, list[str]]  # {name: [value, where it was set]}


@dataclass(frozen=True)
class Finding:
    """Something wrong: what it is, what it costs, what to do."""

    kind: str
    what: str
    costs: str
    do: str


def wrong_names(one: dict, names_in: Callable) -> Iterator[Finding]:
    """Find names that are out of date, and names that no library knows."""
    for name in sorted(one["settings"].keys() & STALE.keys()):
        row = STALE[name]
        yield Finding("stale", f"{name} is set", row["why"], row["do"])
    for name in sorted(one["settings"].keys() - STALE.keys() - VARIABLES.keys()):
        prefix = next((prefix for prefix in LIBRARIES if name.startswith(prefix)), None)
        if prefix and not PLUGIN.match(name):
            found = [names_in(library, prefix) for library in LIBRARIES[prefix]]
            if None not in found and name not in set().union(*found):
                where = one["settings"][name][1]
                costs = "nobody reads it, and nobody says so"
                yield Finding("misspelt", f"{name} ({where})", costs, hint(name))
    for name in sorted(set(one["environ"]) - one["settings"].keys()):
        if name not in LAUNCHER and nearest(name, 0.9):
            yield Finding("misspelt", f"{name} (environment)", "nobody reads it", hint(name))


def nearest(name: str, cutoff: float = 0.8) -> str | None:
    """Return the known name that is most like this one, or None."""
    known = [*VARIABLES, *LAUNCHER]
    return next(iter(difflib.get_close_matches(name, known, 1, cutoff)), None)


def hint(name: str) -> str:
    """Say what to do about a name that no library has."""
    near = nearest(name)
    return f"rename it: did you mean {near}?" if near else "unset it, unless it is a plugin's own"


def wrong_values(one: dict) -> Iterator[Finding]:
    """Find values that the library does not understand, and settings left over from a search."""
    for name, (value, where) in sorted(one["settings"].items()):
        row = VARIABLES.get(name, {})
        pattern = row.get("pattern")
        if pattern and value and not re.fullmatch(pattern, value, re.I):
            what = f"{name}={value} ({where})"
            costs = what_a_wrong_value_costs(row, value)
            yield Finding("value", what, costs, f"{name} takes: {row['values']}")
    for row in TABLE["left_over"]:
        value, where = one["settings"].get(row["name"], ("", ""))
        if value and re.fullmatch(row["value"], value, re.I):
            what = f"{row['name']}={value} ({where})"
            yield Finding("left over", what, row["costs"], "unset it when the search is over")


def what_a_wrong_value_costs(row: dict, value: str) -> str:
    """Say what the variable's library makes of a value that it does not understand."""
    is_number = any(re.fullmatch(row["pattern"], digit) for digit in "012")
    is_word = re.search("[A-Z]", row["pattern"])
    if row["library"] == "NCCL" and is_number and not is_word:
        digits = re.match(r"\s*[-+]?\d+", value)
        return f"NCCL reads the number {int(digits[0]) if digits else 0}, without a warning"
    if row["library"] == "PyTorch":
        return "PyTorch stops at start-up, or ignores it"
    return f"{row['library']} ignores it, or does something else"


def wrong_network(one: dict, several_hosts: bool) -> Iterator[Finding]:
    """Find a meeting place that others cannot reach, and adapters that are left out or slow."""
    settings, listens = one["settings"], one["listens"]
    named = settings.get("NCCL_SOCKET_IFNAME", [""])[0]
    if listens["nccl"] == []:
        running = ", ".join(own["name"] for own in one["interfaces"] if own["running"])
        what = f"NCCL finds no interface with NCCL_SOCKET_IFNAME={named}"
        yield Finding("network", what, "NCCL cannot start", f"name one of {running}, or unset it")
    for library, addresses in listens.items():
        for address in addresses or ():
            if several_hosts and ipaddress.ip_address(address).is_loopback:
                what = f"{library} listens at {address}"
                do = f"set {library.upper()}_SOCKET_IFNAME, or correct this host in /etc/hosts"
                yield Finding("network", what, "no other host can reach it", do)
    yield from wrong_adapters(one["infiniband"], settings)


def wrong_adapters(ports: list[dict], settings: Settings) -> Iterator[Finding]:
    """Find settings that leave out every adapter, and ports that are down or slow."""
    active = [port["name"] for port in ports if port["state"] == "ACTIVE"]
    if settings.get("NCCL_IB_DISABLE", [""])[0] == "1" and active:
        costs = f"{active[0]} is up, but all data goes by sockets"
        yield Finding("left over", "NCCL_IB_DISABLE=1", costs, "unset it")
    rule = settings.get("NCCL_IB_HCA", [""])[0]
    names = [port["name"].split(":")[0] for port in ports]
    if rule and ports and not any(in_list(name, re.sub(r":[\d:]*", "", rule)) for name in names):
        there = ", ".join(port["name"] for port in ports)
        costs = "NCCL finds no adapter and takes sockets"
        yield Finding("network", f"NCCL_IB_HCA={rule}", costs, f"this host has {there}")
    fastest = max((port["gbit_s"] or 0 for port in ports), default=0)
    for port in ports:
        if port["state"] != "ACTIVE":
            do = "look at cable, switch and subnet manager (ibstat)"
            what = f"{port['name']} is {port['state']}"
            yield Finding("network", what, "NCCL leaves it out", do)
        elif port["gbit_s"] and port["gbit_s"] < fastest:
            what = f"{port['name']} has {port['gbit_s']:g} of {fastest:g} Gbit/s"
            yield Finding("network", what, "all ranks wait for it", "look at cable and switch")


def in_list(name: str, rule: str) -> bool:
    """Say whether a name is in a list of NCCL's: "mlx5" prefix, "=mlx5_0" exactly, "^" not."""
    exact = "=" in rule[:2]
    words = [word for word in rule.lstrip("^=").split(",") if word]
    found = any(name == word if exact else name.startswith(word) for word in words)
    return found != rule.startswith("^")


def wrong_limits(one: dict, world_size: int) -> Iterator[Finding]:
    """Find limits of the process and of the container that are too small."""
    limits = one["limits"]
    lock = limits["locked memory"]
    if lock is not None and lock < GIB and one["infiniband"]:
        what = f"{lock / GIB:.2f} GiB of memory may be locked"
        costs = "RDMA cannot register its buffers: ibv_reg_mr fails"
        do = "ulimit -l unlimited; docker run --ulimit memlock=-1"
        yield Finding("limit", what, costs, do)
    room = limits.get("shared memory")
    if room is not None and room < GIB:
        what = f"/dev/shm has {room / GIB:.2f} GiB"
        costs = "NCCL cannot start, or data loader workers die of SIGBUS"
        yield Finding("limit", what, costs, "docker run --shm-size=8g; Kubernetes: an emptyDir")
    files = limits["open files"]
    if files and files < max(1024, 16 * world_size):  # some for each peer
        what = f"{files} open files for {world_size} ranks"
        yield Finding("limit", what, "Too many open files in the first step", "ulimit -n 65536")


def wrong_machine(here: list[dict]) -> Iterator[Finding]:
    """Find ranks that share cores or GPUs of their host, and GPUs on half a slot."""
    one, ranks = here[0], len(here)
    cores = len(set().union(*(rank["cores"] for rank in here)))
    usable = min(cores, max(1, int(one["cpu_limit"] or cores)))
    if usable < cores:
        what = f"{cores} cores are seen, the time of {one['cpu_limit']:g} is granted"
        yield Finding("cores", what, "threads wait for each other", "ask for more CPU time")
    if ranks > usable:
        what = f"{ranks} ranks share {usable} cores"
        yield Finding("cores", what, "ranks wait for a core in each collective", "start fewer")
    elif sum(rank["threads"] for rank in here) > usable:
        what = f"{ranks} ranks x {one['threads']} threads on {usable} cores"
        do = f"set OMP_NUM_THREADS={usable // ranks}"
        yield Finding("cores", what, "threads wait for each other", do)
    gpus = {gpu["pci"]: gpu for rank in here for gpu in rank["gpus"]}  # srun may bind them
    shared = one["settings"].get("NCCL_MULTI_RANK_GPU_ENABLE", ["0"])[0] == "1"
    if 0 < len(gpus) < ranks and not shared:
        what = f"{ranks} ranks but {len(gpus)} GPUs"
        yield Finding("GPU", what, "NCCL refuses two ranks on a GPU", "start one rank for each")
    if len(gpus) < one["installed"] and "CUDA_VISIBLE_DEVICES" in one["settings"]:
        what = f"CUDA_VISIBLE_DEVICES hides {one['installed'] - len(gpus)} of {one['installed']}"
        yield Finding("GPU", f"{what} GPUs", "they stay idle", "unset it, if the job owns the node")
    for gpu in gpus.values():
        if gpu["lanes"] and gpu["most_lanes"] and gpu["lanes"] < gpu["most_lanes"]:
            what = f"GPU {gpu['pci']} has {gpu['lanes']} of {gpu['most_lanes']} PCIe lanes"
            yield Finding("GPU", what, "copies to host and NIC are slower", "slot, riser or BIOS?")


def differences(ranks: list[dict]) -> Iterator[Finding]:
    """Find what differs between ranks that should be alike."""
    seen = defaultdict(dict)
    for one in ranks:
        who = f"rank {one['rank']} on {one['host']}"
        for name in set().union(*(other["settings"] for other in ranks)) - OWN_OF_A_RANK:
            seen[name][who] = one["settings"].get(name, ["unset"])[0]
        for library, version in one["versions"].items():
            seen[f"version of {library}"][who] = version
        for library, network, mtu in networks(one):
            seen[f"network of {library}"][who] = network
            seen[f"MTU of {library}"][who] = mtu
    for what, values in sorted(seen.items()):
        if len(set(values.values())) > 1:
            first = {value: who for who, value in reversed(values.items())}
            told = ", ".join(f"{who} has {value}" for value, who in reversed(first.items()))
            costs = "ranks may choose differently, and hang"
            yield Finding("differs", f"{what}: {told}", costs, "make it the same everywhere")


def networks(one: dict) -> Iterator[tuple[str, str, int]]:
    """Yield library, network and MTU of each interface at which a library listens."""
    for library, addresses in one["listens"].items():
        for own in one["interfaces"]:
            for place in map(ipaddress.ip_interface, own["addresses"]):
                if str(place.ip) in (addresses or ()):
                    yield library, str(place.network), own["mtu"]
