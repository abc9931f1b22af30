"""Predict which network interface gloo and NCCL choose, then look where they really listen.

    CPU   torchrun --standalone --nproc-per-node=2 04-nccl-operations/interfaces.py
    GPU   srun python 04-nccl-operations/interfaces.py    (or torchrun, on each machine of the job)

Look for: two libraries with two rules, and the reason beside each choice. NCCL needs no GPU for
this: it opens the socket at which the ranks of a communicator meet.

Sources: PyTorch 2.14, ProcessGroupGloo.cpp (createDefaultDevice) and gloo's tcp/device.cc;
NCCL 2.30.7, src/misc/socket.cc (ncclFindInterfaces) and src/os/linux.cc (ncclOsFindInterfaces).
"""

import contextlib
import ipaddress
import os
import socket
from dataclasses import asdict, dataclass

import psutil
import torch
import torch.distributed as dist

from dist_common import cli, runtime
from dist_common.report import Report

# NCCL tries these lists in this order, and takes the first running interface that one matches.
NCCL_RULES = {
    "ib": "ib* comes first",
    "^docker,lo,virbr": "the first that is not docker*, lo* or virbr*",
    "docker": "docker*, since there is nothing better",
    "lo": "lo*, since there is nothing better",
    "virbr": "virbr*, since there is nothing else",
}
SOURCES = {"gloo": "ProcessGroupGloo.cpp", "nccl": "NCCL, socket.cc"}


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


@dataclass
class Choice:
    """The interface that a library is predicted to use, and why."""

    interface: str | None
    addresses: list[str]
    why: str


def gloo_choice(interfaces, settings, hostname):
    """Predict gloo: the address of this host's name, unless GLOO_SOCKET_IFNAME names interfaces."""
    named = long_enough(settings.get("GLOO_SOCKET_IFNAME"))
    if named:
        first = {one.name: one.ips()[0] for one in interfaces}
        addresses = sorted({first[name] for name in named.split(",")})
        return Choice(named, addresses, f"GLOO_SOCKET_IFNAME={named}")

    address = resolve_here(hostname)

    why = f"address of this host's name, {hostname}"
    if address is None:
        address = "127.0.0.1"
        why = f"this host's name, {hostname}, has no address here"
    owners = [one.name for one in interfaces if address in one.ips()]
    loops = [one.name for one in interfaces if one.loopback]  # lo answers to all of 127.*
    return Choice((owners or loops or [None])[0], [address], why)


def nccl_choice(interfaces, settings):
    """Predict NCCL: the first running interface, in the order of NCCL_RULES."""
    usable = usable_by_nccl(interfaces, long_enough(settings.get("NCCL_SOCKET_FAMILY")))
    named = long_enough(settings.get("NCCL_SOCKET_IFNAME"))
    rules = {named: f"NCCL_SOCKET_IFNAME={named}"} if named else NCCL_RULES

    for rule, why in rules.items():
        for name, address in usable:
            if matches(name, rule):
                return Choice(name, [address], why)

    return Choice(None, [], f"no running interface matches {', '.join(rules)}")


def matches(name, rule):
    """Say whether a name is in a list of NCCL's: "eth,ib" prefixes, "=eth0" exactly, "^lo" not."""
    exclude = rule.startswith("^")
    rule = rule.removeprefix("^")
    exact = rule.startswith("=")
    words = [word for word in rule.removeprefix("=").split(",") if word]
    found = any(name == word if exact else name.startswith(word) for word in words)
    return found != exclude


def usable_by_nccl(interfaces, family):
    """Return (name, address) of running interfaces in NCCL's order: all IPv4, then IPv6, no ::1."""
    only = {"AF_INET": 4, "AF_INET6": 6}.get(family)
    pairs = [(one.name, ip) for one in interfaces if one.running for ip in one.ips() if ip != "::1"]
    pairs.sort(key=lambda pair: ipaddress.ip_address(pair[1]).version)
    return [pair for pair in pairs if only in (None, ipaddress.ip_address(pair[1]).version)]


def long_enough(value):
    """Return a setting as both libraries see it: one of fewer than two letters counts as unset."""
    return value if value and len(value) > 1 else ""


# What there is: the kernel's interfaces, and the sockets at which this process listens.


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


def resolve_here(hostname):
    """Return the first address of a name at which this machine can listen, or None."""
    with contextlib.suppress(OSError):
        for place in socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(*place[:3]) as probe:
                probe.bind(place[4])
                return place[4][0]
    return None


def addresses_of(hostname):
    """Return the addresses that a name resolves to here; none if it does not."""
    with contextlib.suppress(OSError):
        places = socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)
        return sorted({place[4][0] for place in places})
    return []


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


def look(settings, rank):
    """Return what this rank predicts and finds, as plain values that can be gathered."""
    interfaces = read_interfaces()
    hostname = socket.gethostname()
    chosen = {
        "gloo": asdict(gloo_choice(interfaces, settings, hostname)),
        "nccl": asdict(nccl_choice(interfaces, settings)),
    }
    return {"host": hostname, "rank": rank, "chosen": chosen, "found": ask_libraries(settings),
            "interfaces": [asdict(one) for one in interfaces]}  # fmt: skip


def show(report, one):
    """Print what a rank has, predicts and finds."""
    report.say(f"\nrank {one['rank']} on host {one['host']}")
    rows = [(own["name"], "yes" if own["running"] else "no", " ".join(own["addresses"]))
            for own in one["interfaces"]]  # fmt: skip
    report.table(rows, ("interface", "running", "addresses"), names=3)
    report.say()
    rows = []
    for library, choice in one["chosen"].items():
        listens = " ".join(one["found"].get(library, ["not asked"])) or "nowhere"
        predicted = " ".join(choice["addresses"]) or "nowhere"
        rows.append((library, choice["interface"] or "none", predicted, listens, choice["why"]))
    report.table(rows, ("library", "interface", "predicted", "listens at", "because"), names=5)


def refuse_unknown(named):
    """Raises: UsageError for an interface that gloo would stop for, saying less."""
    known = [one.name for one in read_interfaces()]
    for name in long_enough(named).split(","):
        if name and known and name not in known:
            raise cli.UsageError(f"GLOO_SOCKET_IFNAME: {name} has no address, {known} have")


def parse_args():
    return cli.ArgumentParser(__doc__).parse_args()


def main():
    args = parse_args()
    refuse_unknown(os.environ.get("GLOO_SOCKET_IFNAME"))
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("04-nccl-operations/interfaces.py", args, world, device)
        report.start(f"NCCL {nccl_version() or 'is not in this PyTorch'}")
        ranks = runtime.gather(look(os.environ, world.rank))
        first_of = {one["host"]: one for one in reversed(ranks)}
        for one in sorted(first_of.values(), key=lambda one: one["rank"]):
            show(report, one)
        report.say()
        for library, source in SOURCES.items():
            wrong = [one["found"][library] != one["chosen"][library]["addresses"]
                     for one in ranks if library in one["found"]]  # fmt: skip
            if wrong:
                name = f"{library}: ranks that listen elsewhere than predicted"
                report.check(name, sum(wrong), 0, 0, source)
        report.metrics |= {"hosts": len(first_of), "ranks": ranks}
        return report.finish("every rank listens where the rules say")


if __name__ == "__main__":
    cli.run(main)
