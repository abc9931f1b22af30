"""Which ranks share a node, and how fast a collective can be by its links (bandwidth_test.md)."""

import os
import socket
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from legacy_common import runtime
from legacy_common.report import Report

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


class Group(NamedTuple):
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
    sizes = [len(node) for node in nodes]
    groups = [Group("", None, sum(sizes), max(sizes))]
    if len(set(sizes)) > 1:
        report.say(f"# nodes of {', '.join(map(str, sizes))} ranks: all ranks only")
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


class Links(NamedTuple):
    """What the hardware promises, each way, in GB/s; None: not told."""

    nic: float | None = None  # one network adapter
    nics: int = 1  # of each node
    nvlink: float | None = None  # one GPU's


class Yardstick(NamedTuple):
    """The busbw (GB/s) that links permit, and which link it is that ends it."""

    gb_s: float
    link: str
    tree_gb_s: float | None = None  # where a tree, as NCCL may choose it, is bounded otherwise


def yardstick(path: str | None, group: Group, links: Links) -> Yardstick | None:
    """Return what to hold a group's busbw against; None where no link was told, or none fits."""
    n, k, nvlink = group.ranks, group.per_node, links.nvlink
    if n == k:  # one node
        if nvlink:
            return Yardstick(nvlink, "NVLink of a GPU")
        return Yardstick(links.nic, "link of a rank") if links.nic and not group.name else None
    if path is None or not links.nic:
        return None
    nics = links.nics * links.nic / group.at_once  # of a node, for this group
    several = f", {group.at_once} groups at once" if group.name and group.at_once > 1 else ""
    of_a_node = f"{links.nics} NIC{'s' * (links.nics > 1)} of a node{several}"
    bound = {  # by NICs: what leaves a node is what one rank sends, or what each of its ranks does
        RING: (nics, of_a_node),
        PAIRS: (nics / k * (n - 1) / (n - k), "NIC of a rank"),  # to n - k of a rank's n - 1 peers
        NEXT: (nics / k, "NIC of a rank"),
    }[path]
    if nvlink and k > 1:  # in one of k rings a rank is the one that sends to the next node
        full = {RING: nvlink * k / (k - 1), PAIRS: nvlink * (n - 1) / (k - 1), NEXT: nvlink}[path]
        bound = min(bound, (full, "NVLink of a GPU"))
    # A tree adds up in each node before it sends: NCCL's Tree on two nodes, NVLSTree on more.
    tree = nics * (n - 1) / (k * (n // k - 1)) if path == RING else None
    return Yardstick(*bound, tree)
