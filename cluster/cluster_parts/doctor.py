"""The rules of doctor.py: each looks at what host.py read, and yields what is wrong."""

import difflib
import ipaddress
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from cluster_parts import compare
from cluster_parts.host import GIB, matches, read_toml

FOLDER = Path(__file__).parents[1]
TABLE, FINDINGS = read_toml(FOLDER / "variables.toml"), read_toml(FOLDER / "findings.toml")
VARIABLES = {row["name"]: row for row in TABLE["variable"]}
STALE = {row["name"]: row for row in TABLE["stale"]}
LAUNCHER = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_RANK")
PLUGIN = re.compile(r"NCCL_(FASTRAK|GPUDIRECTTCPX|TUNER_CONFIG|INSPECTOR)|(OFI_NCCL|FI)_")
LIBRARIES = {"NCCL_": ("libnccl",), "TORCH_NCCL_": ("libtorch_cuda", "libtorch_cpu"),
             "TORCH_FR_": ("libtorch_cpu",)}  # fmt: skip


class Finding(NamedTuple):
    """Something wrong: what it is, what it costs, what to do."""

    kind: str
    what: str
    costs: str
    do: str
    key: str = ""  # of findings.toml


def finding(key: str, /, **values) -> Finding:
    """Return a finding in the words of findings.toml."""
    words = (FINDINGS[key][field].format(**values) for field in Finding._fields[:4])
    return Finding(*words, key)


def compared(one: compare.Finding) -> Finding:
    """Return what a comparison of nodes found, with its cost and cure from findings.toml."""
    words = FINDINGS[one.key]
    return Finding(words["kind"], one.what, words["costs"], words["do"], one.key)


def wrong_names(one: dict, names_in: Callable) -> Iterator[Finding]:
    """Find names that are out of date, and names that no library knows."""
    settings = one["settings"]
    for name in sorted(settings.keys() & STALE.keys()):
        yield Finding("stale", f"{name} is set", STALE[name]["why"], STALE[name]["do"])
    for name in sorted(settings.keys() - STALE.keys() - VARIABLES.keys()):
        prefix = next((prefix for prefix in LIBRARIES if name.startswith(prefix)), None)
        if prefix and not PLUGIN.match(name):
            found = [names_in(library, prefix) for library in LIBRARIES[prefix]]
            if None not in found and name not in set().union(*found):
                yield finding("misspelt", name=name, where=settings[name][1], hint=hint(name))
    for name in sorted(set(one["environ"]) - settings.keys()):
        if name not in LAUNCHER and nearest(name, 0.9):
            yield finding("misspelt", name=name, where="environment", hint=hint(name))


def nearest(name: str, cutoff: float = 0.8) -> str | None:
    """Return the known name that is most like this one, or None."""
    known = [*VARIABLES, *LAUNCHER]
    return next(iter(difflib.get_close_matches(name, known, 1, cutoff)), None)


def hint(name: str) -> str:
    near = nearest(name)
    return f"rename it: did you mean {near}?" if near else "unset it, unless it is a plugin's own"


def wrong_values(one: dict) -> Iterator[Finding]:
    """Find values that the library does not understand, and settings left over from a search."""
    for name, (value, where) in sorted(one["settings"].items()):
        row = VARIABLES.get(name, {})
        pattern = row.get("pattern")
        if pattern and value and not re.fullmatch(pattern, value, re.I):
            costs, do = what_a_wrong_value_costs(row, value), f"{name} takes: {row['values']}"
            yield Finding("value", f"{name}={value} ({where})", costs, do)
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
    names = ("NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_IB_HCA", "GLOO_SOCKET_IFNAME")
    named, disabled, rule, gloo_at = (one["settings"].get(name, [""])[0] for name in names)
    if one["listens"]["nccl"] == []:
        running = ", ".join(own["name"] for own in one["interfaces"] if own["running"])
        yield finding("no-interface", named=named, running=running)
    for library, addresses in one["listens"].items():
        for address in addresses or ():
            if several_hosts and is_loopback(address):
                variable = library.upper()
                yield finding("loopback", library=library, address=address, variable=variable)
    gloo = one["listens"]["gloo"] or ()
    has_cards = any(own["running"] and not own["loopback"] for own in one["interfaces"])
    if has_cards and not several_hosts and not gloo_at and any(map(is_loopback, gloo)):
        yield finding("name-loopback", host=one["host"], address=gloo[0])
    ports = one["infiniband"]
    active = [port["name"] for port in ports if port["state"] == "ACTIVE"]
    if disabled == "1" and active:
        yield finding("adapters-disabled", adapter=active[0])
    there = [port["name"] for port in ports]
    wanted = re.sub(r":[\d:]*", "", rule)  # without the numbers of ports
    if rule and ports and not any(matches(name.split(":")[0], wanted) for name in there):
        yield finding("no-adapter", rule=rule, there=", ".join(there))


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def usual_ports(hosts: list[list[dict]]) -> set[tuple]:
    """Return place and Gbit/s of the ports that most of several hosts have; none of one host."""
    found = [{(port["place"], port["gbit_s"]) for port in own} for own in hosts]
    return compare.usual(found) if len(found) > 1 else set()


def wrong_ports(one: dict, usual: set[tuple] = frozenset()) -> Iterator[Finding]:
    """Find ports of a host that NCCL is to use and cannot, or that are slower than their like.

    A host has ports for storage and management, too, some slower and some without a cable, and no
    file says which these are. So a port that is down is judged where NCCL_IB_HCA names it, or where
    its cable has a signal; a slow one beside those that NCCL_IB_HCA names, or beside most of the
    same model, unless it is `usual`: most of several hosts have it so. compare.py tells the rest.
    """
    ports, rule = one["infiniband"], one["settings"].get("NCCL_IB_HCA", [""])[0]
    if rule.startswith("^"):
        ports = [port for port in ports if matches(port["name"].split(":")[0], rule)]
    words = [] if rule.startswith("^") else rule.lstrip("=").split(",")
    named = [port for port in ports if {port["name"], port["name"].split(":")[0]} & {*words}]
    for port in ports:
        if port["state"] != "ACTIVE" and (port in named or port["state"] in ("INIT", "ARMED")):
            yield finding("port-down", **port)
    groups = {"named": named} if named else defaultdict(list)
    if not named:
        for port in ports:
            groups[port["board"], port["link"]].append(port)
    for alike in groups.values():
        rates = [port["gbit_s"] for port in alike if port["state"] == "ACTIVE" and port["gbit_s"]]
        fastest = max(rates, default=0)
        if not named and 2 * rates.count(fastest) <= len(rates):  # half of them: another use
            continue
        for port in alike:
            if not named and (port["place"], port["gbit_s"]) in usual:
                continue
            if port["state"] == "ACTIVE" and port["gbit_s"] and port["gbit_s"] < fastest:
                yield finding("port-slow", fastest=fastest, **port)


def wrong_limits(one: dict, world_size: int) -> Iterator[Finding]:
    """Find limits of the process and of the container that are too small."""
    lock, room, files = map(one["limits"].get, ("locked memory", "shared memory", "open files"))
    if lock is not None and lock < GIB and one["infiniband"]:
        yield finding("locked-memory", gib=lock / GIB)
    if room is not None and room < GIB:
        yield finding("shared-memory", gib=room / GIB)
    free = one["limits"].get("shared memory left")
    if room and free is not None and free < min(GIB, room / 2):
        yield finding("shared-memory-full", free=free / GIB, gib=room / GIB)
    if files and files < max(1024, 16 * world_size):  # some for each peer
        yield finding("open-files", files=files, ranks=world_size)


def wrong_machine(here: list[dict]) -> Iterator[Finding]:
    """Find ranks that share cores or GPUs of their host, and GPUs on half a slot."""
    one, ranks = here[0], len(here)
    cores = len(set().union(*(rank["cores"] for rank in here)))
    usable = min(cores, max(1, int(one["cpu_limit"] or cores)))
    if usable < cores:
        yield finding("cpu-limit", cores=cores, granted=one["cpu_limit"])
    many = {"ranks": ranks, "usable": usable, "each": usable // ranks, "threads": one["threads"]}
    if ranks > usable:
        yield finding("ranks-share-cores", **many)
    elif sum(rank["threads"] for rank in here) > usable:
        yield finding("threads", **many)
    gpus = {gpu["pci"]: gpu for rank in here for gpu in rank["gpus"]}  # srun may bind them
    shared = one["settings"].get("NCCL_MULTI_RANK_GPU_ENABLE", ["0"])[0] == "1"
    if 0 < len(gpus) < ranks and not shared:
        yield finding("ranks-share-gpus", ranks=ranks, gpus=len(gpus))
    hidden = one["installed"] - len(gpus)
    if hidden > 0 and "CUDA_VISIBLE_DEVICES" in one["settings"]:
        yield finding("hidden-gpus", hidden=hidden, installed=one["installed"])
    for gpu in gpus.values():
        if gpu["lanes"] and gpu["most_lanes"] and gpu["lanes"] < gpu["most_lanes"]:
            yield finding("lanes", **gpu)
