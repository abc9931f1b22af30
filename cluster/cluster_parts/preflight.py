"""What preflight.py makes of what it measured: nodes compared (compare.py), and the verdict."""

import argparse
import contextlib
import hashlib
import ipaddress
import os
import re
import socket
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cluster_parts.cause import ranks_of
from cluster_parts.compare import (
    ROWS,
    Finding,
    by_hosts,
    count,
    differing,
    gib,
    lacking,
    nodes_by_name,
    odd,
)
from cluster_parts.doctor import wrong_limits
from cluster_parts.host import addresses_of, read_interfaces
from cluster_parts.logs import IS_LOST
from legacy_common import cli
from legacy_common.report import Report

MESSAGE = {"cpu": 256 * 2**10, "cuda": 64 * 2**20}  # bytes, between nodes
SLOW_RANK = 0.6  # one of several that share a network card, not quite fairly
SLOW_GPU = 0.85  # GPUs of one kind differ by some percent
UNSEEN = "does not see what rank 0 wrote"


# what a node says of itself


def code_of(folder: Path) -> str:
    """Return a checksum of a package's source files."""
    total = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        total.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    return total.hexdigest()[:12]


def way_to(master: str) -> str:
    """Return the interface and address from which this host sends to another one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for address in addresses_of(master):
            with contextlib.suppress(OSError):
                probe.connect((address, 9))  # sends nothing
                own = probe.getsockname()[0]
                names = [one.name for one in read_interfaces() if own in one.ips()]
                return f"interface {(names or ['lo'])[0]}, {own}"
    return "no interface: there is no route"


# who was to come


def expected_nodes(given: str) -> int | list[str]:
    """Parse a number of nodes, or a list of names as SLURM writes it: dgx-[001-004,7]-ib,gpu9."""
    if given.isdecimal() and int(given):
        return int(given)
    word = r"(?:[\w.-]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+"
    names = [name for one in re.findall(word, given) for name in expand(one)]
    if given.isdecimal() or not re.fullmatch(f"{word}(?:,{word})*", given):
        raise argparse.ArgumentTypeError(f"must be a number or names, not {given!r}")
    return names


def expand(word: str) -> list[str]:
    """Return the names that brackets stand for, as `scontrol show hostnames` does."""
    before, bracket, rest = word.partition("[")
    if not bracket:
        return [word]
    inside, _, after = rest.partition("]")
    numbers = []
    for span in inside.split(","):
        first, _, last = span.partition("-")
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last or first) + 1)]
    return [before + number + end for number in numbers for end in expand(after)]


def expected_of_slurm() -> list[str] | None:
    with contextlib.suppress(argparse.ArgumentTypeError):
        listed = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST")
        return expected_nodes(listed) if listed else None
    return None


def absent(ranks: list[dict], world, expected: int | list[str] | None, wait_s: float) -> list:
    """Return what is to be said of nodes and ranks that did not come."""
    here = {one["host"].split(".")[0] for one in ranks}
    missing = sorted({*range(world.world_size)} - {one["rank"] for one in ranks})
    after = f"no word after {wait_s:g} s"
    if isinstance(expected, list):
        names = [name for name in expected if name.split(".")[0] not in here]
        if names:
            known = f" ({ranks_of(missing)})" if missing else ", and the job has no rank there"
            return [Finding(names, after + known)]
    elif expected and len(here) < expected:
        told = f": {ranks_of(missing)}" if missing else ""
        return [Finding([], f"{expected} nodes were expected, {len(here)} came, {after}{told}")]
    if not missing:
        return []
    numbers = sorted({rank // world.local_world_size for rank in missing})
    names = [f"the node of {ranks_of(r for r in missing if r // world.local_world_size == n)}"
             for n in numbers]  # fmt: skip
    return [Finding(names, f"{after} (--expect-nodes NAMES says who that is)")]


def cannot_meet(ranks: list[dict]) -> bool:
    """Say whether a process group of these ranks is refused, or would wait for its timeout."""
    told = [one for one in ranks if "versions" in one]
    sizes = {one["world_size"] for one in told}
    versions = {(one["versions"]["Python"], one["versions"]["torch"], one["legacy_common"])
                for one in told}  # fmt: skip
    return len(sizes) > 1 or len(versions) > 1 or bool([*problems(nodes_by_name(ranks))])


def rate(gb_s: float) -> str:
    return f"{gb_s:.3g} GB/s" if gb_s >= 1 else f"{1e3 * gb_s:.3g} MB/s"


def problems(nodes: dict[str, list[dict]]) -> Iterator[Finding]:
    """Find nodes that cannot start, and nodes at whose address no other one can reach them."""
    for name, here in nodes.items():
        for one in here:
            if "problem" in one:
                yield Finding([name], f"rank {one['rank']} cannot start: {one['problem']}")
                break
            places = [a for a in one["listens"].get("gloo") or () if len(nodes) > 1]
            if wrong := [a for a in places if ipaddress.ip_address(a).is_loopback]:
                why = "correct its name in /etc/hosts, or set GLOO_SOCKET_IFNAME"
                yield Finding([name], f"gloo listens at {wrong[0]}, out of others' reach: {why}")
                break


def by_facts(nodes: dict[str, list[dict]]) -> Iterator[Finding]:
    """Find what differs between nodes before anything is measured."""
    told = {name: here for name, here in nodes.items() if "versions" in here[0]}

    def of(key: str) -> dict[str, Any]:
        return {name: here[0][key] for name, here in told.items()}

    yield from differing("", "the version of legacy_common", of("legacy_common"))
    if len({*of("legacy_common").values()}) == 1:
        yield from differing("", "the code of legacy_common", of("code"))
    yield from differing("", "WORLD_SIZE", of("world_size"))
    counts = {name: len(here) for name, here in told.items()}
    yield from lacking("", "ranks", counts, count, 1.0)
    yield from by_hosts(told)


# what was measured


def slow_ranks(
    ways: list[list], nodes: list[list[int]], link: float | None, below: float
) -> dict[int, tuple[str, float, float]]:
    """Return {rank: (what it does slowly, GB/s, what it should reach)}.

    A rank's rate is that to the middle one of its peers, the better of two: one slow peer does not
    make a rank slow.
    """
    found = {}
    of_node = {rank: tuple(node) for node in nodes for rank in node}
    for end, does in ((0, "sends"), (1, "receives")):
        met = defaultdict(list)
        for way in ways:
            met[way[end]].append(way[2])
        rates = {rank: statistics.median_high(gb_s) for rank, gb_s in met.items()}
        totals: dict[tuple, float] = defaultdict(float)
        for rank, gb_s in rates.items():
            totals[of_node[rank]] += gb_s
        if not totals:
            continue
        usual, of_all = map(statistics.median_high, (rates.values(), totals.values()))
        promised = max(of_all if len(totals) > 2 else 0.0, (link or 0.0) / 1e9)
        for rank, gb_s in rates.items():
            node = of_node[rank]
            if totals[node] < below * promised:
                found.setdefault(rank, (does, totals[node], promised))
            elif len(totals) > 2 and gb_s < min(below, SLOW_RANK) * usual:
                found.setdefault(rank, (does, gb_s, usual))
    return found


def by_links(measured: list[dict], name_of: dict[int, str], args) -> Iterator[Finding]:
    """Find nodes that are slow in each scan of the links."""
    nodes = defaultdict(list)
    for rank, name in sorted(name_of.items()):
        nodes[name].append(rank)
    scans = zip(*(one["ways"] for one in measured if "ways" in one), strict=False)
    every = [slow_ranks(sum(ways, []), [*nodes.values()], args.link, args.slow_below)
             for ways in scans]  # fmt: skip
    if not every:
        return
    slow = {rank: found for rank, found in every[-1].items() if all(rank in one for one in every)}
    told = defaultdict(list)
    for rank, found in slow.items():
        told[name_of[rank]].append((rank, *found))
    if 2 * len(told) > len(nodes):
        worst = min((row for rows in told.values() for row in rows), key=lambda row: row[2])
        is_all = f"links reach {rate(worst[2])} of {rate(worst[3])}"
        some = [*told] if len(nodes) == 2 else []
        yield Finding(some, is_all + " on most nodes" * (not some), False)
        return
    for name, rows in told.items():
        rank, does, gb_s, usual = min(rows, key=lambda row: row[2] / row[3])
        which = "" if len(rows) == len(nodes[name]) else f"rank {rank} "
        told = f"{which}{does} {rate(gb_s)} over the network, others {rate(usual)}"
        yield Finding([name], told)


def by_products(measured: list[dict], name_of: dict[int, str]) -> Iterator[Finding]:
    """Find ranks whose product differs from that of most, or, without a majority, is wrong."""
    products = {one["rank"]: tuple(one["checksums"]) for one in measured if "checksums" in one}
    steady = {rank: len(sums) == 2 * len({*sums}) for rank, sums in products.items()}
    wrong = {one["rank"]: one["wrong_columns"] for one in measured if one.get("wrong_columns")}
    named, sure = odd(products)
    blamed = {*named, *wrong, *(r for r, s in steady.items() if not s)} if sure else {*wrong}
    for rank in sorted(blamed):
        how = "differs from that of most ranks" if rank in named and sure else "is wrong"
        told = f", {wrong[rank]} of its columns contradict their sums" if rank in wrong else ""
        again = "" if steady[rank] else ", and it is another one when computed again"
        yield Finding([name_of[rank]], f"the matrix product of rank {rank} {how}{told}{again}")
    if not sure and not blamed:
        suspects = [*dict.fromkeys(name_of[rank] for rank in named)]
        yield Finding(suspects, "matrix products differ between ranks", False)


def by_measurement(
    nodes: dict[str, list[dict]], measured: list[dict], args
) -> Iterator[Finding]:  # fmt: skip
    """Find what clocks, products, all-reduces, folder and links show."""
    name_of = {one["rank"]: name for name, here in nodes.items() for one in here}
    yield from lost(nodes, measured, name_of, args.timeout)
    clocks = {name_of[one["rank"]]: one["clock"] for one in measured if "clock" in one}
    named, sure = odd(clocks, lambda a, b: abs(a[0] - b[0]) <= args.max_skew + a[1] + b[1])
    middle = statistics.median_low([ahead for n, (ahead, _) in clocks.items() if n not in named]
                                   or [0.0])  # fmt: skip
    if sure:
        for name in named:
            ahead = clocks[name][0] - middle
            way = "ahead" if ahead > 0 else "behind"
            yield Finding([name], f"its clock is {abs(ahead):,.1f} s {way}")
    else:
        apart = max(a for a, _ in clocks.values()) - min(a for a, _ in clocks.values())
        yield Finding(named, f"their clocks are {apart:,.1f} s apart", False)
    yield from by_products(measured, name_of)
    gpus = {f"{one['rank']}": one["tflop_s"] for one in measured
            if "tflop_s" in one and args.device_type == "cuda"}  # fmt: skip
    for slow in lacking("", "TFLOP/s", gpus, lambda v: f"{v:.3g}", SLOW_GPU):
        rank = int(slow.nodes[0])
        yield Finding([name_of[rank]], f"the GPU of rank {rank} is slow: {slow.what}")
    yield from by_sums(nodes, measured, name_of)
    yield from by_folder(nodes, measured, name_of, args)
    garbled = {one["rank"]: one["wrong_numbers"] for one in measured if one.get("wrong_numbers")}
    for rank, number in garbled.items():
        told = f"{number:,} numbers that rank {rank} received are wrong"
        yield Finding([name_of[rank]], f"{told}: its link, or the sender's")
    yield from by_links(measured, name_of, args)


def by_sums(nodes, measured: list[dict], name_of: dict[int, str]) -> Iterator[Finding]:
    """Find groups whose all-reduce is wrong: the group of a node names it, that of all does not."""
    within = {name_of[one["rank"]] for one in measured if one.get("wrong_within")}
    for name in sorted(within):
        yield Finding([name], "the all-reduce within this node gives a wrong sum")
    everywhere = [one["rank"] for one in measured if one.get("wrong_in_all")]
    if everywhere and not within:
        on = ranks_of(everywhere)
        yield Finding([], f"the all-reduce of all ranks gives a wrong sum on {on}")


def by_folder(nodes, measured: list[dict], name_of, args) -> Iterator[Finding]:
    """Find nodes that cannot write to the checkpoint's folder, or see another one there."""
    said = {name_of[one["rank"]]: one["folder"] for one in measured if one.get("folder")}
    tried = f"--checkpoint-dir {args.checkpoint_dir}"
    if name_of[0] in said:  # then there is nothing for the others to see
        yield Finding([], f"{tried}: {said[name_of[0]]} on {name_of[0]}")
    elif len(said) == len(nodes) - 1 and {*said.values()} == {UNSEEN}:
        yield Finding([], f"{tried} is not shared: no other node sees what rank 0 wrote")
    else:
        for name, problem in said.items():
            yield Finding([name], f"{tried}: {problem}")
    room = nodes[name_of[0]][0]["room"]
    if room is not None and room < args.free:
        yield Finding([], f"{tried} has {gib(room)} left, --free asks for {gib(args.free)}")


def lost(nodes, measured: list[dict], name_of: dict[int, str], timeout_s: float):
    """Find the nodes that stopped answering: who is silent, else whose address the others name."""
    failed = {one["rank"]: one for one in measured if "error" in one}
    silent = sorted(name_of.keys() - {one["rank"] for one in measured})
    if not measured or not (failed or silent):
        return
    step = Counter(one["step"] for one in failed.values()).most_common(1)
    during = f" while {step[0][0]}" if step else ""
    own = {rank: one for rank, one in failed.items() if not IS_LOST.search(one["error"])}
    if silent:
        names = [*dict.fromkeys(name_of[rank] for rank in silent)]
        told = f"{ranks_of(silent)} stopped answering{during}"
        if len(nodes) == 2 and len(names) == 1:
            yield Finding([*nodes], told, False)
        elif 2 * len(names) > len(nodes) > 2:  # rank 0, to which they report, is the odd one
            yield Finding([name_of[0]], f"rank 0 is cut off: {told}")
        else:
            yield Finding(names, told)
        return
    if 0 < len(own) < len(failed) or (own and len(failed) < len(name_of)):
        for rank, one in own.items():
            told = " ".join(one["error"].split())[:160]
            yield Finding([name_of[rank]], f"rank {rank} failed while {one['step']}: {told}")
        return
    owner = {a.split("/")[0]: name for name, here in nodes.items()
             for card in here[0]["interfaces"] for a in card["addresses"]}  # fmt: skip
    blamed = Counter(owner[a] for one in failed.values()
                     for a in {*re.findall(r"\[?(\d+\.\d+\.\d+\.\d+)\]?:\d", one["error"])}
                     if a in owner)  # fmt: skip
    (first, _), *_ = blamed.most_common(1) or [(None, 0)]
    named = [first] if first and len(nodes) > 2 else []
    why = next(iter(failed.values()))["error"]
    told = f"ranks lost each other{during}, within {timeout_s:g} s: {' '.join(why.split())[:160]}"
    yield Finding(named, told)


# what is said


def conclude(report: Report, args, world, ranks, measured: list[dict], absent_: list) -> int:
    """Print the nodes, the findings and the verdict, on rank 0; return the exit code."""
    nodes = nodes_by_name(ranks)
    args.device_type = ranks[0].get("device", "cpu").partition(":")[0]
    found = [*absent_, *problems(nodes), *by_facts(nodes)]
    if measured:
        found += by_measurement(nodes, measured, args)
    show_nodes(report, nodes, measured)
    notes = {hint.what for here in nodes.values() if "limits" in here[0]
             for hint in wrong_limits(here[0], world.world_size)}  # fmt: skip
    for note in sorted(notes):
        report.say(f"note: {note} (doctor.py says what it costs)")
    for finding in found:
        report.say(finding.line)
    drain = sorted({name for one in found if one.sure for name in one.nodes})
    suspects = sorted({name for one in found if not one.sure for name in one.nodes} - {*drain})
    report.check("ranks that came", len(ranks), world.world_size, 0, "WORLD_SIZE")
    report.check("nodes to drain", len(drain), 0, 0, "compared with most nodes")
    report.check("other findings", len(found) - sum(one.sure and bool(one.nodes) for one in found),
                 0, 0, "what keeps the job from running, or two nodes that differ")  # fmt: skip
    report.metrics |= {
        "drain": drain, "suspects": suspects, "ranks": ranks, "measured": measured,
        "findings": [one._asdict() for one in found],
    }  # fmt: skip
    code = report.finish(f"nodes that are healthy and alike: {len(nodes)}")
    return cli.BAD_INPUT if code and not (drain or suspects) else code


def show_nodes(report: Report, nodes, measured: list[dict]) -> None:
    """Print a row for each node: of many, those with the slowest links."""
    by_rank = {one["rank"]: one for one in measured}
    rows = []
    for name, here in nodes.items():
        own = [by_rank.get(one["rank"], {}) for one in here]
        ahead, off = next((one["clock"] for one in own if "clock" in one), (None, None))
        sent = defaultdict(list)
        for one in own:
            for sender, _, gb_s in (one.get("ways") or [[]])[-1]:
                sent[sender].append(gb_s)
        gb_s = sum(map(statistics.median_high, sent.values()))
        rates = [one["tflop_s"] for one in own if "tflop_s" in one]
        limits = here[0].get("limits", {})
        rows.append((gb_s, (
            name, ",".join(str(one["rank"]) for one in here),
            "-" if ahead is None else f"{1e3 * ahead:,.1f} ms (+-{1e3 * off:.1f} ms)",
            f"{1e3 * gb_s:,.1f} MB/s" if gb_s else "-",
            f"{min(rates):.3g} TFLOP/s" if rates else "-",
            gib(limits["shared memory"]) if limits.get("shared memory") else "-",
        )))  # fmt: skip
    shown = rows if len(rows) <= ROWS else sorted(rows, key=lambda row: row[0])[:ROWS]
    head = ("node", "ranks", "clock", "sends", "slowest rank", "/dev/shm")
    report.table([row for _, row in shown], head, names=2)
    if len(rows) > ROWS:
        report.say(f"... and {len(rows) - ROWS} nodes with faster links")
