"""Compare the nodes of a job: preflight.py's rules on facts and on measurements.

The value that more than half of the nodes have is right, and a node with another value
is named. If no value has a majority, as on two nodes that differ, all nodes are named
with "or".
"""

import ipaddress
import operator
import re
import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass

from cluster_parts.cause import ranks_of

GIB = 2**30  # bytes
FAR_LESS = 0.5  # of the median over nodes: such a limit is another configuration
SLOW = 0.6  # of the median rate
SHOWN = 8  # nodes in a line or a table
SAME_IMAGE = "Use one image or one environment on all nodes."
DO = {
    "Python": SAME_IMAGE,
    "torch": SAME_IMAGE,
    "NCCL": SAME_IMAGE,
    "NVIDIA driver": "Install the others' version.",
    "GPUs": "Run nvidia-smi and dmesg there.",
    "active RDMA ports": "Run ibstat there: cable, switch or subnet manager.",
    "WORLD_SIZE": "Start all nodes with the same command.",
    "ranks": "Start all nodes with the same command.",
}
# Least amount that a job needs, and the cure. The first four are also compared.
AMOUNTS = {
    "/dev/shm": (
        GIB,
        "Use docker run --shm-size=8g, or an emptyDir in memory on Kubernetes.",
    ),
    "open files": (1024, "Run ulimit -n 65536."),
    "processes": (1024, "Run ulimit -u unlimited."),
    "locked memory": (0, "Run ulimit -l unlimited, or docker run --ulimit memlock=-1."),
    "free in /dev/shm": (
        GIB,
        "See ls -l /dev/shm: killed jobs leave their files there.",
    ),
    "free in /tmp": (GIB, "Remove old files there."),
    "free in this folder": (GIB, "Remove old files there."),
}
COMPARED = ("/dev/shm", "open files", "processes", "locked memory")
FILES_PER_RANK = 16  # sockets to each other rank, and some files


@dataclass
class Finding:
    """Something wrong.

    nodes: their names, suspects if not sure; stops: the ranks cannot measure anything.
    """

    nodes: list
    what: str
    do: str = ""
    sure: bool = True
    stops: bool = False

    @property
    def line(self):
        names = (", " if self.sure else " or ").join(self.nodes[:SHOWN])
        if len(self.nodes) > SHOWN:
            names += f" and {len(self.nodes) - SHOWN} more"
        return f"{names or 'job'}: {self.what}. {self.do}".rstrip()


# Nodes and their names


def group_by_node(ranks):
    """Return {name: facts of the node's ranks}; nodes of one name get their ranks."""
    nodes = defaultdict(list)
    for one in ranks:
        nodes[one["host"], one["boot"]].append(one)
    often = Counter(host for host, _ in nodes)
    return {
        host if often[host] == 1 else f"{host} ({ranks_of(numbers(members))})": members
        for (host, _), members in nodes.items()
    }


def numbers(ranks):
    return [one["rank"] for one in ranks]


def expand(names):
    """Return the names in a list as SLURM writes it: node[0-2,7],gpu9."""
    expanded = []
    for word in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", names):
        before, _, rest = word.partition("[")
        inside, _, after = rest.partition("]")
        for span in inside.split(",") if inside else ():
            first, _, last = span.partition("-")
            for number in range(int(first), int(last or first) + 1):
                expanded += expand(f"{before}{number:0{len(first)}}{after}")
        if not inside:
            expanded.append(word)
    return expanded


def find_absent(ranks, place, expected, wait_s):
    """Name the nodes of ranks that put nothing into the store; `expected` may be []."""
    missing = sorted({*range(place.world_size)} - {*numbers(ranks)})
    present = {one["host"].split(".")[0] for one in ranks}
    names = [name for name in expected if name.split(".")[0] not in present]
    if not missing and not names:
        return []
    detail = (
        f" from {ranks_of(missing)}" if missing else ", and the job has no rank there"
    )
    if not names:
        each = place.local_world_size
        first = sorted({rank // each * each for rank in missing})
        names = [f"the node of rank {rank}" for rank in first]
    where = f"{place.master}:{place.port}"
    do = f"Read its own message: is it up, and does it reach {where}?"
    return [Finding(names, f"no word{detail} in {wait_s:g} s", do, stops=True)]


# Facts compared


def compare_nodes(nodes):
    """Return the findings in the facts of all nodes."""
    findings = []
    for name, members in nodes.items():
        problems = {one["problem"] for one in members if one["problem"]}
        findings += [
            Finding([name], f"a rank cannot start: {problem}", stops=True)
            for problem in sorted(problems)
        ]
    first = {name: members[0] for name, members in nodes.items()}
    for library in ("gloo", "NCCL"):
        findings += compare_listening(library, first)
    findings += compare_networks(first)
    alike = {name: one["alike"] for name, one in first.items()}
    for name, members in nodes.items():
        alike[name]["ranks"] = len(members)
    for what, do in DO.items():
        values = {name: facts[what] for name, facts in alike.items()}
        findings += differing(f"{what}:", values, do)
    settings = {name: one["settings"] for name, one in first.items()}
    # Cards may have other names on other nodes: compare_listening judges these.
    for what in sorted({key for facts in settings.values() for key in facts}):
        if not what.endswith("_SOCKET_IFNAME"):
            values = {
                name: facts.get(what, "unset") for name, facts in settings.items()
            }
            findings += differing(
                f"{what}:", values, "Set the same value on all nodes."
            )
    findings += compare_amounts(
        {name: one["amounts"] for name, one in first.items()}, nodes
    )
    for name, members in nodes.items():
        for wrong, meant in sorted(members[0]["misspelt"].items()):
            do = f"Did you mean {meant}?"
            findings.append(Finding([name], f"{wrong}: no library reads this name", do))
    return fold(findings)


def fold(findings):
    """Put nodes with the same finding into one line."""
    folded = {}
    for one in findings:
        known = folded.setdefault((one.what, one.do, one.sure), one)
        if known is not one:
            known.nodes = known.nodes + one.nodes
    return list(folded.values())


def find_odd(values, same=operator.eq):
    """Return the nodes unlike more than half of all, and True; or all nodes and False.

    Nodes whose value is None are left out.
    """
    known = {name: value for name, value in values.items() if value is not None}
    most = set()
    for value in known.values():
        alike = {name for name, other in known.items() if same(value, other)}
        most = max(most, alike, key=len)
    if 2 * len(most) > len(known) or not known:
        return [name for name in known if name not in most], True
    return list(known), False


def differing(what, values, do, show=str, same=operator.eq):
    """Return findings for nodes that do not have the value of most nodes."""
    odd, sure = find_odd(values, same)
    if not sure:
        examples = ", ".join(f"{show(values[name])} on {name}" for name in odd[:SHOWN])
        return [Finding(odd, f"{what} {examples}", do, sure=False, stops=True)]
    usual = [show(values[name]) for name in values if name not in odd]
    return [
        Finding([n], f"{what} {show(values[n])}, others: {usual[0]}", do, stops=True)
        for n in odd
    ]


def compare_listening(library, first):
    """Find nodes on which a library listens where no other node can reach it."""
    findings, places = [], {}
    for name, one in first.items():
        addresses = one.get("listens", {}).get(library)
        variable = f"{library.upper()}_SOCKET_IFNAME"
        if addresses == []:
            there = ", ".join(sorted({card["name"] for card in one["interfaces"]}))
            what = f"{library} finds no interface with {variable}"
            what += f"={one['settings'].get(variable, '')}; the node has {there}"
            findings.append(Finding([name], what, "Name one of these.", stops=True))
        for address in addresses or ():
            if ipaddress.ip_address(address).is_loopback and len(first) > 1:
                what = f"{library} listens at {address}, where no other node reaches it"
                do = f"Correct /etc/hosts there, or set {variable}."
                findings.append(Finding([name], what, do, stops=True))
            for card in one["interfaces"]:
                if address == card["address"] and not address.startswith("127."):
                    places[name] = card
    findings += differing(
        f"network of {library}:",
        places,
        f"Set {library.upper()}_SOCKET_IFNAME.",
        lambda card: f"{card['network']} ({card['name']})",
        # Racks may have networks of their own, on cards of one name.
        lambda a, b: a["network"] == b["network"] or a["name"] == b["name"],
    )
    mtus = {name: card["mtu"] for name, card in places.items()}
    return findings + differing(f"MTU of {library}'s card:", mtus, "Set one MTU.")


def compare_networks(first):
    """Find nodes without a card in a network in which most nodes have one."""
    networks = {
        name: {c["network"] for c in one["interfaces"] if not c["virtual"]}
        for name, one in first.items()
    }
    often = Counter(network for known in networks.values() for network in known)
    return [
        Finding([name], f"no card that is up in {network}", "Run ip address there.")
        for network, number in sorted(often.items())
        for name, known in networks.items()
        if 2 * number > len(first) and network not in known
    ]


def compare_amounts(amounts, nodes):
    """Find limits, memory and disks that are too small, or far smaller than others."""
    findings = []
    world_size = sum(map(len, nodes.values()))
    for what, (least, do) in AMOUNTS.items():
        if what == "open files":
            least = max(least, FILES_PER_RANK * world_size)
        known = {
            name: float("inf") if values[what] is None else values[what]
            for name, values in amounts.items()
            if what in values
        }
        middle = statistics.median_high(known.values()) if known else 0
        show = show_number if what in ("open files", "processes") else show_gib
        for name, value in known.items():
            small_shm = amounts[name].get("/dev/shm", GIB) < GIB
            if what == "free in /dev/shm" and small_shm:
                continue  # the finding above says it
            amount = f"{what}: {show(value)}"
            if value < least:
                findings.append(
                    Finding([name], f"{amount}, at least {show(least)} needed", do)
                )
            elif what in COMPARED and value < FAR_LESS * middle:
                findings.append(
                    Finding([name], f"{amount}, others: {show(middle)}", do)
                )
    return findings


def show_number(number):
    return "no limit" if number == float("inf") else f"{number:,.0f}"


def show_gib(number):
    return "no limit" if number == float("inf") else f"{number / GIB:.2f} GiB"


# Measurements compared


def compare_results(nodes, results, timeout_s):
    """Return the findings in the ranks' results, by rank."""
    name_of = {one["rank"]: name for name, members in nodes.items() for one in members}
    findings = find_lost(nodes, results, name_of, timeout_s)
    wrong = [rank for rank, one in results.items() if one.get("wrong")]
    if wrong:
        what = f"the all-reduce gives a wrong sum on {ranks_of(wrong)}"
        findings.append(Finding([], what, "Run it on fewer nodes until it is right."))
    rates = {
        rank: {int(peer): rate for peer, rate in one["rates"].items()}
        for rank, one in results.items()
        if "rates" in one
    }
    return findings + fold(find_slow(rates, name_of))


def find_lost(nodes, results, name_of, timeout_s):
    """Name who stopped answering, or else who cannot be reached by most others."""
    failed = {rank: one for rank, one in results.items() if "error" in one}
    silent = sorted(name_of.keys() - results.keys())
    if silent:
        names = list(dict.fromkeys(name_of[rank] for rank in silent))
        what = f"{ranks_of(silent)} stopped answering in {results[0]['step']}"
        return [Finding(names, what, "Run dmesg there.")]
    if not failed:
        return []
    owner = {
        card["address"]: name
        for name, members in nodes.items()
        for card in members[0]["interfaces"]
        if not card["address"].startswith("127.")
    }
    # The error of each rank has the address of its missing peer.
    blamed = Counter()
    for rank, one in failed.items():
        for address in set(re.findall(r"(\d+\.\d+\.\d+\.\d+)\]?:\d", one["error"])):
            if owner.get(address, name_of[rank]) != name_of[rank]:
                blamed[owner[address]] += 1
    first = failed[min(failed)]
    error = " ".join(first["error"].split())[:160]
    what = (
        f"{first['step']} failed within {timeout_s:g} s on {ranks_of(failed)}: {error}"
    )
    most = max(blamed.values(), default=0)
    named = [name for name, number in blamed.items() if number == most]
    do = "The store was reached: does a firewall close the other ports?"
    return [Finding(named, what, do, sure=len(named) == 1 and len(nodes) > 2)]


def find_slow(rates, name_of):
    """Name slow nodes, then slow pairs between nodes that are fast to others.

    rates: {rank: {peer: bytes/s}}. A rank's rate is the median over its peers, so that
    one slow path does not make a rank slow.
    """
    middle = {
        rank: statistics.median_high(peers.values())
        for rank, peers in rates.items()
        if len(peers) > 1
    }
    if not middle:
        return  # two nodes: there is nothing to compare their pair with
    usual = statistics.median_high(middle.values())
    slow = defaultdict(list)
    for rank, rate in middle.items():
        if rate < SLOW * usual:
            slow[name_of[rank]].append(rank)
    for name, ranks in slow.items():
        rate = min(middle[rank] for rank in ranks)
        what = f"{ranks_of(ranks)}: {show_rate(rate)} to most nodes, others: "
        do = "Compare ethtool or ibstat with another node's."
        yield Finding([name], what + show_rate(usual), do)
    for rank, peers in rates.items():
        for peer, rate in peers.items():
            if rank < peer and rate < SLOW * min(middle[rank], middle[peer]):
                what = f"{show_rate(rate)} between ranks {rank} and {peer}, to others: "
                what += show_rate(min(middle[rank], middle[peer]))
                do = "Both nodes are fast to others: look at the path between them."
                yield Finding([name_of[rank], name_of[peer]], what, do, sure=False)


def show_rate(rate):
    return f"{rate / 1e9:.3g} GB/s" if rate >= 1e9 else f"{rate / 1e6:.3g} MB/s"
