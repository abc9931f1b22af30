"""What pairwise_scan.py makes of its matrix: how fast the fast pairs are, and checks."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from dist_common import cli
from dist_common.report import Report

BELOW = 0.5  # a pair is slow below this part of what the fast pairs of its kind do
FAST = 0.9  # "fast" is as good as the best tenth
MOST = 8  # ranks whose matrix fits on a screen; findings that do
WITHIN, ACROSS = "within a node", "across nodes"
SENDS, RECEIVES, BOTH = "sends", "receives", "sends and receives"
Way = tuple[int, int]  # sender, receiver


@dataclass
class Scan:
    """Who meets whom, and what came of it; `speeds` has GB/s from sender to receiver."""

    nodes: list[list[int]]
    rounds: list[list[tuple[int, int]]]
    nodes_only: bool = False
    speeds: dict[Way, float] = field(default_factory=dict)
    wrong: int = 0

    def kind(self, way: Way) -> str:
        """Say whether a message stays within a node."""
        return WITHIN if any(set(way) <= set(node) for node in self.nodes) else ACROSS

    @property
    def ranks(self) -> int:
        return sum(map(len, self.nodes))


class Slow(NamedTuple):
    """What explains slow ways: a rank, a node, two nodes, or two ranks."""

    what: str
    direction: str  # SENDS, RECEIVES or BOTH, from its side
    where: str
    of_fast: float  # the median of its ways, as a part of what the fast ones of their kind do


def fast_speeds(scan: Scan) -> dict[str, float]:
    """Return GB/s that the best tenth of the ways of each kind reach."""
    fast = {}
    for kind in (WITHIN, ACROSS):
        known = sorted(gb_s for way, gb_s in scan.speeds.items() if scan.kind(way) == kind)
        if known:
            fast[kind] = known[math.ceil(FAST * (len(known) - 1))]
    return fast


def rounds_needed(scan: Scan) -> int:
    """Return how few rounds can do it: in each a rank meets one other."""

    def needed(players: int) -> int:
        return players - 1 + players % 2 if players > 1 else 0  # of an odd number one has a break

    size = len(scan.nodes[0])
    if any(len(node) != size for node in scan.nodes):
        return needed(scan.ranks)
    across = needed(len(scan.nodes))
    return across if scan.nodes_only else needed(size) + size * across


def conclude(report: Report, scan: Scan, find_slow: Callable, interrupted: bool) -> int:
    """Print and write what was measured; return the exit code. One rank can, whatever hangs."""
    found, everybody = find_slow(scan), range(scan.ranks)
    matrix = [[scan.speeds.get((a, b)) for b in everybody] for a in everybody]
    if scan.ranks <= MOST:
        names = [f"rank {rank}" for rank in everybody]
        cells = [["-" if s is None else f"{1e3 * s:,.1f} MB/s" for s in row] for row in matrix]
        rows = [(name, *row) for name, row in zip(names, cells, strict=True)]
        report.table(rows, ("from \\ to", *names))
    fast = fast_speeds(scan)
    for kind, gb_s in fast.items():
        report.say(f"{kind}, fast pairs reach {gb_s:.3g} GB/s")
    for slow in found[:MOST]:
        report.say(f"SLOW: {slow.what}: {slow.direction} at {slow.of_fast:.2f}x, {slow.where}")
    if len(found) > MOST:
        report.say(f"... and {len(found) - MOST} more, in results.json")
    if not found:
        report.say(f"no rank, node or pair is below {BELOW:g}x of the fast ones")
    if not interrupted:
        ways = scan.ranks * ((len(scan.nodes) if scan.nodes_only else scan.ranks) - 1)
        report.check("ways measured", len(scan.speeds), ways, 0, "everybody to everybody else")
        source = "each rank meets one other in a round"
        report.check("rounds", len(scan.rounds), rounds_needed(scan), 0, source)
        report.check("elements that arrived wrong", scan.wrong, 0, 0, "what the sender sent")
    report.metrics |= {
        "matrix_gb_s": matrix, "fast_gb_s": fast, "slow": [slow._asdict() for slow in found],
        "nodes": scan.nodes, "interrupted": interrupted,
    }  # fmt: skip
    met = f"{len(scan.speeds) // 2} pairs of {scan.ranks} ranks met"
    code = report.finish(met + ", interrupted by Ctrl-C" * interrupted)
    return cli.INTERRUPTED if interrupted else code
