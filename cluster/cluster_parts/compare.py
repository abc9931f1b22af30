"""Nodes compared with the majority, for doctor.py and preflight.py: what most nodes have is right.

A number that is the worse the smaller it is (limits, disks, rates) names a node that is far below
the middle one. Anything else names the nodes that differ from more than half of all. Where neither
tells, as of two nodes, both are named, with "or". The keys are those of findings.toml, which says
what each finding costs, and its cure.
"""

import ipaddress
import operator
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from cluster_parts.cause import ranks_of
from cluster_parts.host import GIB

LITTLE = 0.5  # of the middle node's: a limit or a disk so small is another configuration
LITTLE_ROOM = GIB  # bytes: more is enough, whatever the others have
ROWS = 8  # nodes in a line


class Finding(NamedTuple):
    """What is wrong, and the nodes to drain: several with `sure` False are suspects, none a job."""

    nodes: list[str]
    what: str
    sure: bool = True
    key: str = ""  # of findings.toml

    @property
    def names(self) -> str:
        return (", " if self.sure else " or ").join(self.nodes)

    @property
    def line(self) -> str:
        return f"DRAIN {self.names}: {self.what}" if self.nodes else f"STOP: {self.what}"


def nodes_by_name(ranks: Iterable[dict]) -> dict[str, list[dict]]:
    """Return the ranks of each node by its host's name; two nodes of one name by their ranks."""
    by_key = defaultdict(list)
    for one in ranks:
        by_key[one["host"], one.get("boot"), one.get("torchrun")].append(one)
    often = Counter(host for host, *_ in by_key)
    return {
        host if often[host] == 1 else f"{host} ({ranks_of(o['rank'] for o in here)})": here
        for (host, *_), here in by_key.items()
    }


def odd(values: dict[str, Any], same: Callable = operator.eq) -> tuple[list[str], bool]:
    """Return the nodes whose value is not that of more than half; all and False if there is none.

    Nodes without a value (None) are left out.
    """
    known = {node: value for node, value in values.items() if value is not None}
    best: set[str] = set()
    for most in known.values():
        alike = {node for node, value in known.items() if same(value, most)}
        best = max(best, alike, key=len)
        if 2 * len(best) > len(known) and same is operator.eq:  # no other one can have more
            break
    if 2 * len(best) > len(known) or not known:
        return [node for node in known if node not in best], True
    return list(known), False


def usual(sets: Iterable[Iterable]) -> set:
    """Return what is in more than half of the nodes' sets."""
    listed = [set(one) for one in sets]
    often = Counter(value for one in listed for value in one)
    return {value for value, number in often.items() if 2 * number > len(listed)}


def differing(
    key: str, what: str, values: dict[str, Any], show: Callable = str, same: Callable = operator.eq
) -> Iterator[Finding]:  # fmt: skip
    """Find nodes of which something differs that should be alike on all."""
    named, sure = odd(values, same)
    if not sure:
        told = ", ".join(f"{node} has {show(values[node])}" for node in named[:ROWS])
        yield Finding(named, f"{what} differs: {told}; most do not agree", False, key)
    elif named:
        rest = Counter(show(v) for node, v in values.items() if v is not None and node not in named)
        for node in named:
            told = f"{what} is {show(values[node])}, others have {min(rest)}"
            yield Finding([node], told, key=key)


def lacking(
    key: str, what: str, values: dict[str, float | None], show: Callable, below: float = LITTLE,
    enough: float = float("inf"),
) -> Iterator[Finding]:  # fmt: skip
    """Find nodes that have less than a part of what the middle one of all has, and not enough."""
    known = {node: float("inf") if v is None else v for node, v in values.items()}
    if not known:
        return
    middle = statistics.median_high(known.values())
    for node, value in known.items():
        if value < below * middle and value < enough:
            yield Finding([node], f"{what}: {show(value)}, others have {show(middle)}", key=key)


def gib(nbytes: float) -> str:
    return "no limit" if nbytes == float("inf") else f"{nbytes / GIB:.2f} GiB"


def count(number: float) -> str:
    return "no limit" if number == float("inf") else f"{number:,.0f}"


def by_hosts(nodes: dict[str, list[dict]]) -> Iterator[Finding]:
    """Find what differs between hosts that should be alike, of what host.py reads.

    `nodes` are those that could read it, as `nodes_by_name` returns them.
    """
    one = {name: here[0] for name, here in nodes.items()}

    def of(key: str) -> dict[str, Any]:
        return {name: own[key] for name, own in one.items()}

    for library in ("Python", "torch", "NCCL"):
        seen = {n: {rank["versions"].get(library) for rank in here} - {None}
                for n, here in nodes.items()}  # fmt: skip
        versions = {n: " and ".join(sorted(own)) or None for n, own in seen.items()}
        yield from differing("other-version", library, versions)
    yield from differing("other-driver", "NVIDIA's driver", of("driver"))
    yield from differing("other-driver", "the adapters' driver (OFED)", of("ofed"))
    yield from by_firmware(of("infiniband"))
    yield from lacking("fewer-gpus", "GPUs", of("installed"), count, 1.0)
    yield from by_adapters(of("infiniband"))
    yield from by_cards(of("cards"))
    yield from by_listening(one)
    yield from by_limits(of("limits"))
    yield from lacking("few-processes", "processes (ulimit -u)", of("processes"), count)
    left = of("temporary")
    yield from lacking("disk-full", "free for temporary files", left, gib, enough=LITTLE_ROOM)


def by_firmware(ports: dict[str, list[dict]]) -> Iterator[Finding]:
    """Find adapters with another firmware than most of their model: of a node, or one in it."""
    for board in sorted({port["board"] for own in ports.values() for port in own} - {None}):
        values = {}
        for node, own in ports.items():
            adapters = defaultdict(set)
            for port in own:
                if port["board"] == board:
                    adapters[port["firmware"]].add(port["name"].split(":")[0])
            told = sorted(f"{version} ({', '.join(sorted(names))})"
                          for version, names in adapters.items())  # fmt: skip
            values[node] = " and ".join(told if len(told) > 1 else map(str, adapters)) or None
        yield from differing("other-firmware", f"firmware of the adapters {board}", values)


def by_adapters(ports: dict[str, list[dict]]) -> Iterator[Finding]:
    """Find nodes with fewer active RDMA ports than most, or slower ones.

    A port that is down on most nodes is not in use, as some for storage or management are.
    """
    active = {node: {port["place"]: port for port in own if port["state"] == "ACTIVE"}
              for node, own in ports.items()}  # fmt: skip
    expected = usual(active.values())
    fewer = {one.nodes[0]: one for one in lacking(
        "fewer-ports", "active RDMA ports", {n: len(own) for n, own in active.items()}, count, 1.0
    )}  # fmt: skip
    for node, own in ports.items():
        there = {port["place"]: port for port in own}
        gone = sorted(expected - active[node].keys())
        told = [f"{there[place]['name']} is {there[place]['state']}" for place in gone
                if place in there]  # fmt: skip
        absent = [place for place in gone if place not in there]
        if node in fewer:
            told += [f"no adapter at {place}" for place in absent]
            what = ": ".join([fewer[node].what, *[", ".join(told)] * bool(told)])
            yield fewer[node]._replace(what=what)
        elif told:  # as many as others have, but another one
            yield Finding([node], f"{', '.join(told)}, ACTIVE on others", key="fewer-ports")
    rates = {node: sum(port["gbit_s"] or 0 for port in own.values())
             for node, own in active.items() if node not in fewer}  # fmt: skip
    yield from lacking("slower-ports", "Gbit/s of all RDMA ports", rates, count, 1.0)


def by_cards(cards: dict[str, list[dict]]) -> Iterator[Finding]:
    """Find nodes without a card in a network in which most have one, or with fewer or slower cards.

    Networks are compared first, since the names of cards differ between healthy hosts. A network
    of which most nodes have no part (a link of its own for each card, as with RoCE; the parts of a
    bond, which have no address) is compared by the card's name.
    """
    if len(cards) < 2:
        return
    running = {node: [card for card in own if card["running"]] for node, own in cards.items()}
    networks = usual({card["network"] for card in own} - {None} for own in running.values())
    names = usual({card["name"] for card in own} for own in running.values())
    down = {node: [card["name"] for card in own if not card["running"] and card["name"] in names]
            for node, own in cards.items()}  # fmt: skip
    for one in missing_cards(running, sorted(networks)):
        gone = down[one.nodes[0]]
        yield one._replace(what=one.what + f": {', '.join(gone)} is down" * bool(gone))
    for network in sorted(networks):
        known = {node: card for node, own in running.items() for card in own[::-1]
                 if card["network"] == network}  # fmt: skip
        mtus = {node: card["mtu"] for node, card in known.items()}
        yield from differing("other-mtu", f"MTU in {network}", mtus)
        speeds = {node: card["mbit_s"] for node, card in known.items() if card["mbit_s"]}
        what = f"Mbit/s of the card in {network}"
        yield from lacking("slower-card", what, speeds, count, 1.0)
    for name in sorted(names):
        mtus = {node: card["mtu"] for node, own in running.items() for card in own
                if card["name"] == name and card["network"] not in networks}  # fmt: skip
        if 2 * len(mtus) > len(cards):
            yield from differing("other-mtu", f"MTU of {name}", mtus)


def missing_cards(running: dict[str, list[dict]], networks: list[str]) -> Iterator[Finding]:
    """Find nodes without a card in one of these networks, or else with fewer cards than most."""
    named = set()
    for network in networks:
        known = [node for node, own in running.items()
                 if any(card["network"] == network for card in own)]  # fmt: skip
        for node in [node for node in running if node not in known]:
            named.add(node)
            told = f"no running card in {network}, where {len(known)} nodes have one"
            yield Finding([node], told, key="no-card")
    # A card of an RDMA adapter is down if its port is, and that is said already.
    counts = {node: sum(card["physical"] and not card["rdma"] for card in own)
              for node, own in running.items()}  # fmt: skip
    for one in lacking("no-card", "running network cards", counts, count, 1.0):
        if one.nodes[0] not in named:
            yield one


def by_listening(one: dict[str, dict]) -> Iterator[Finding]:
    """Find nodes whose libraries listen neither in the network nor at the interface of most."""
    for library in ("gloo", "nccl"):
        places = {}
        for node, own in one.items():
            for card in own["interfaces"]:
                for address in map(ipaddress.ip_interface, card["addresses"]):
                    listens = own["listens"].get(library) or ()
                    if str(address.ip) in listens and not address.is_loopback:
                        places.setdefault(node, (str(address.network), card["name"]))
        yield from differing(
            "other-network", f"network of {library}", places, "{0[0]} ({0[1]})".format,
            lambda a, b: a[0] == b[0] or a[1] == b[1],
        )  # fmt: skip  # racks may have networks of their own


def by_limits(limits: dict[str, dict]) -> Iterator[Finding]:
    """Find nodes with far smaller limits than others."""
    small = set()
    for name, key, what, show, enough in (
        ("shared memory", "shared-memory", "/dev/shm", gib, float("inf")),
        ("shared memory left", "shared-memory-full", "left in /dev/shm", gib, LITTLE_ROOM),
        ("locked memory", "locked-memory", "memory that may be locked", gib, float("inf")),
        ("open files", "open-files", "open files (ulimit -n)", count, float("inf")),
    ):
        has = {n: own[name] for n, own in limits.items() if name in own}
        if name == "shared memory left":  # a small one has little left, too: said once
            has = {n: free if n not in small else None for n, free in has.items()}
        found = [*lacking(key, what, has, show, enough=enough)]
        small |= {one.nodes[0] for one in found}
        yield from found
