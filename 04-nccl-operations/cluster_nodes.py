"""Which ranks share a node, and how fast a collective can be, given the links in and between nodes.

The formulas are derived in bandwidth_test.md; tests count bytes in schedules to prove them.
"""

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dist_common import runtime
from dist_common.report import Report

# How a collective's bytes cross the border of a node.
RING = "ring"  # each ring enters and leaves a node once
PAIRS = "pairs"  # every rank sends to every other one, or all to one
NEXT = "next"  # each rank sends to the next one only


def nodes_of() -> list[list[int]]:
    """Return the ranks of each node, nodes in order of their first rank. A collective."""
    boot = Path("/proc/sys/kernel/random/boot_id")  # containers may share a host's name
    boot_id = boot.read_text() if boot.exists() else None
    places = runtime.gather((socket.gethostname(), boot_id, os.environ.get("GROUP_RANK")))
    return [[r for r, other in enumerate(places) if other == p] for p in dict.fromkeys(places)]


@dataclass(frozen=True)
class Group:
    """Ranks that run a collective together; `at_once` groups of their kind do so at a time."""

    name: str  # empty: all ranks
    group: Any  # of torch.distributed; None: all ranks
    ranks: int
    per_node: int  # of these ranks
    at_once: int = 1


def groups_of(nodes: list[list[int]], report: Report) -> list[Group]:
    """Return the groups to time: all ranks; on several nodes, also within and across nodes.

    A collective: every rank makes every group. Nodes of unequal sizes have the group of all only.
    """
    largest = max(len(node) for node in nodes)
    groups = [Group("", None, sum(len(node) for node in nodes), largest)]
    if len({len(node) for node in nodes}) > 1:
        report.say(f"# nodes of {', '.join(str(len(n)) for n in nodes)} ranks: all ranks only")
        return groups
    splits = {"within a node": nodes, "across nodes": [list(r) for r in zip(*nodes, strict=True)]}
    for name, split in splits.items():
        if len(nodes) == 1 or len(split[0]) == 1:
            continue
        made = [dist.new_group(members) for members in split]
        mine = next(g for g, m in zip(made, split, strict=True) if dist.get_rank() in m)
        per_node = len(split[0]) if name == "within a node" else 1
        groups.append(Group(name, mine, len(split[0]), per_node, len(split)))
    return groups


@dataclass(frozen=True)
class Links:
    """What the hardware promises, each way, in GB/s; None: not told."""

    nic: float | None = None  # one network adapter
    nics: int = 1  # of each node
    nvlink: float | None = None  # one GPU's


@dataclass(frozen=True)
class Yardstick:
    """The busbw (GB/s) that links permit, and which link it is that ends it."""

    gb_s: float
    link: str
    tree_gb_s: float | None = None  # where a tree, as NCCL may choose it, is bounded otherwise


def yardstick(path: str | None, group: Group, links: Links) -> Yardstick | None:
    """Return what to hold a group's busbw against; None where no link was told, or none fits."""
    if group.ranks == group.per_node:  # one node
        inside = links.nvlink or (links.nic if not group.name else None)
        words = "NVLink of a GPU" if links.nvlink else "link of a rank"
        return Yardstick(inside, words) if inside else None
    if path is None or not links.nic:
        return None
    nics = links.nics * links.nic / group.at_once  # of a node, for this group
    bounds = [Yardstick(nics_bound(path, group, nics), _words(path, group, links))]
    if links.nvlink and group.per_node > 1:
        bounds.append(Yardstick(nvlink_bound(path, group, links.nvlink), "NVLink of a GPU"))
    least = min(bounds, key=lambda bound: bound.gb_s)
    tree = tree_bound(group, nics) if path == RING else None
    return Yardstick(least.gb_s, least.link, tree)


def nics_bound(path: str, group: Group, nics: float) -> float:
    """Return the busbw at which the NICs of a node, `nics` GB/s in all, are full."""
    n, k = group.ranks, group.per_node
    if path == RING:
        return nics  # what leaves a node is what one rank sends
    if path == PAIRS:
        return nics / k * (n - 1) / (n - k)  # n - k of a rank's n - 1 peers are elsewhere
    return nics / k  # one rank of a node sends all it has through its own NIC


def nvlink_bound(path: str, group: Group, nvlink: float) -> float:
    """Return the busbw at which NVLink is full, of a group on several nodes."""
    n, k = group.ranks, group.per_node
    # In one of k rings a rank is the one that sends to the next node.
    return {RING: nvlink * k / (k - 1), PAIRS: nvlink * (n - 1) / (k - 1), NEXT: nvlink}[path]


def tree_bound(group: Group, nics: float) -> float:
    """Return the busbw at which NICs are full if each node adds up before it sends.

    So do NCCL's Tree on two nodes and NVLSTree on more.
    """
    n, k = group.ranks, group.per_node
    nodes = n // k
    return nics * (n - 1) / (k * (nodes - 1))


def _words(path: str, group: Group, links: Links) -> str:
    if path != RING:
        return "NIC of a rank"
    several = f", {group.at_once} groups at once" if group.name and group.at_once > 1 else ""
    return f"{links.nics} NIC{'s' * (links.nics > 1)} of a node{several}"
