"""What pairwise_scan.py makes of its matrix: which rank, node or pair is slow, and a picture."""

import math
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path

from dist_common import cli
from dist_common.report import Report, figure

BELOW = 0.5  # a pair is slow below this part of what the fast pairs of its kind do
FAST = 0.9  # "fast" is as good as the best tenth
MOST = 8  # ranks whose matrix fits on a screen; findings that do
ANNOTATED = 16  # ranks whose cells in the picture have room for a number
WITHIN, ACROSS = "within a node", "across nodes"
SENDS, RECEIVES, BOTH = "sends", "receives", "sends and receives"
Way = tuple[int, int]  # sender, receiver
Cause = tuple[str, str, str]  # what, direction, where


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
        return WITHIN if self.node_of(way[0]) == self.node_of(way[1]) else ACROSS

    def node_of(self, rank: int) -> int:
        return next(number for number, node in enumerate(self.nodes) if rank in node)

    @property
    def ranks(self) -> int:
        return sum(len(node) for node in self.nodes)


@dataclass(frozen=True)
class Slow:
    """What explains slow ways: a rank, a node, two nodes, or two ranks."""

    what: str
    direction: str  # SENDS, RECEIVES or BOTH, from its side
    where: str
    of_fast: float  # the median of its ways, as a part of what the fast ones of their kind do


def find_slow(scan: Scan) -> list[Slow]:
    """Return the fewest causes that explain all slow ways, by the speeds alone.

    A rank or node is named where every way from it, or to it, is slow, and it has two peers at
    least: with one, nobody can tell which side it is.
    """
    part = parts_of_fast(scan)
    slow = {way for way in part if part[way] < BELOW}
    left, found = set(slow), []
    causes = {cause: ways for cause, ways in possible_causes(scan).items() if ways and ways <= slow}
    several = {cause: ways for cause, ways in causes.items() if told_apart(cause, ways)}
    while left and several:
        # The one that explains most; of two alike the larger: a node before its rank.
        best = max(several, key=lambda cause: (len(several[cause] & left), len(several[cause])))
        if len(several[best] & left) < 2:
            break
        left -= several[best]
        found.append((best, several.pop(best)))
    for cause, ways in causes.items():  # its one peer within the node, say, once it is known
        if ways & left and any(cause[:2] == known[:2] for known, _ in found):
            left -= ways
            found.append((cause, ways))
    for one, other in sorted(left):
        cause = f"rank {one} -> rank {other}", SENDS, scan.kind((one, other))
        found.append((cause, {(one, other)}))
    return [Slow(*cause, statistics.median(part[way] for way in ways))
            for cause, ways in merged(found)]  # fmt: skip


def told_apart(cause: Cause, ways: set[Way]) -> bool:
    """Say whether slow ways tell a rank or node from its peers: it has two of them at least."""
    what, direction, _ = cause
    return "->" in what or len({way[direction == SENDS] for way in ways}) > 1


def fast_speeds(scan: Scan) -> dict[str, float]:
    """Return GB/s that the best tenth of the ways of each kind reach."""
    fast = {}
    for kind in (WITHIN, ACROSS):
        known = sorted(gb_s for way, gb_s in scan.speeds.items() if scan.kind(way) == kind)
        if known:
            fast[kind] = known[math.ceil(FAST * (len(known) - 1))]
    return fast


def parts_of_fast(scan: Scan) -> dict[Way, float]:
    """Return each way's speed as a part of what the fast ways of its kind reach."""
    fast = fast_speeds(scan)
    return {way: gb_s / fast[scan.kind(way)] for way, gb_s in scan.speeds.items()}


def possible_causes(scan: Scan) -> dict[Cause, set[Way]]:
    """Return what could be slow, with the ways it would slow. Without ways: nothing is known."""
    causes: dict[Cause, set[Way]] = {}
    nodes = range(len(scan.nodes))
    for number in nodes if len(scan.nodes) > 2 else ():
        causes |= ways_of(scan, node_name(scan, number), set(scan.nodes[number]), ACROSS)
    for node in nodes:
        for other in nodes:
            ways = {(a, b) for a in scan.nodes[node] for b in scan.nodes[other]}
            if node != other and len(ways) > 1:
                causes[f"node {node} -> node {other}", SENDS, ACROSS] = ways & scan.speeds.keys()
    for rank in range(scan.ranks):
        for kind in (WITHIN, ACROSS):
            causes |= ways_of(scan, f"rank {rank}", {rank}, kind)
    return causes


def ways_of(scan: Scan, what: str, ranks: set[int], kind: str) -> dict[Cause, set[Way]]:
    """Return the ways of one kind that start at some ranks, and those that end there."""
    ways = [way for way in scan.speeds if scan.kind(way) == kind]
    return {
        (what, direction, kind): {way for way in ways if way[side] in ranks}
        for side, direction in enumerate((SENDS, RECEIVES))
    }


def node_name(scan: Scan, number: int) -> str:
    ranks = scan.nodes[number]
    return f"node {number} (rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))})"


def merged(found: list) -> list:
    """Join what differs in direction or place only: (what, direction, where), ways."""
    by_what: dict[str, list] = {}  # rows of direction, where, ways, whether it is the way back
    for (what, direction, where), ways in found:
        one, arrow, other = what.partition(" -> ")
        back = f"{other} -> {one}"
        name = back if arrow and back in by_what else what
        by_what.setdefault(name, []).append((direction, where, ways, name != what))
    joined = []
    for what, rows in by_what.items():
        turned = any(back for *_, back in rows)
        directions = {direction for direction, *_ in rows}
        direction = BOTH if len(directions) > 1 or turned else directions.pop()
        where = ", ".join(sorted({where for _, where, *_ in rows}))
        name = what.replace(" -> ", " <-> ") if turned else what
        joined.append(((name, direction, where), set().union(*(ways for _, _, ways, _ in rows))))
    return joined


def needed(players: int) -> int:
    """Return the rounds in which everybody can meet everybody else once."""
    return players - 1 + players % 2 if players > 1 else 0  # of an odd number one has a break


def rounds_needed(scan: Scan) -> int:
    """Return how few rounds can do it: in each a rank meets one other."""
    size = len(scan.nodes[0])
    if any(len(node) != size for node in scan.nodes):
        return needed(scan.ranks)
    if scan.nodes_only:
        return needed(len(scan.nodes))
    return needed(size) + size * needed(len(scan.nodes))


def conclude(report: Report, scan: Scan, interrupted: bool) -> int:
    """Print and write what was measured, and what is slow; return the exit code.

    One rank can, whatever hangs.
    """
    found = find_slow(scan)
    if scan.ranks <= MOST:
        print_matrix(report, scan)
    for kind, gb_s in fast_speeds(scan).items():
        report.say(f"{kind}, fast pairs reach {gb_s:.3g} GB/s")
    for slow in found[:MOST]:
        report.say(f"SLOW: {slow.what}: {slow.direction} at {slow.of_fast:.2f}x, {slow.where}")
    if len(found) > MOST:
        report.say(f"... and {len(found) - MOST} more, in results.json")
    if not found:
        report.say(f"no rank, node or pair is below {BELOW:g}x of the fast ones")
    if not interrupted:
        check(report, scan)
    everybody = range(scan.ranks)
    report.metrics |= {
        "matrix_gb_s": [[scan.speeds.get((a, b)) for b in everybody] for a in everybody],
        "fast_gb_s": fast_speeds(scan), "slow": [asdict(slow) for slow in found],
        "nodes": scan.nodes, "interrupted": interrupted,
    }  # fmt: skip
    if report.output and report.world.is_rank0:
        draw(report.output / "pairwise.png", scan)
    met = f"{len(scan.speeds) // 2} pairs of {scan.ranks} ranks met"
    code = report.finish(met + ", interrupted by Ctrl-C" * interrupted)
    return cli.INTERRUPTED if interrupted else code


def check(report: Report, scan: Scan) -> None:
    """Check the messages, that everybody met, and that it took no more rounds than needed."""
    sizes = [len(node) for node in scan.nodes]
    ways = scan.ranks * (scan.ranks - 1)
    if scan.nodes_only:
        ways = scan.ranks * (len(sizes) - 1)
    report.check("ways measured", len(scan.speeds), ways, 0, "everybody to everybody else")
    name, source = "rounds", "each rank meets one other in a round"
    report.check(name, len(scan.rounds), rounds_needed(scan), 0, source)
    report.check("elements that arrived wrong", scan.wrong, 0, 0, "what the sender sent")


def print_matrix(report: Report, scan: Scan) -> None:
    """Print MB/s, senders down and receivers across."""
    rows = []
    for sender in range(scan.ranks):
        speeds = [scan.speeds.get((sender, other)) for other in range(scan.ranks)]
        cells = ("-" if gb_s is None else f"{1e3 * gb_s:,.1f} MB/s" for gb_s in speeds)
        rows.append((f"rank {sender}", *cells))
    report.table(rows, ("from \\ to", *(f"rank {rank}" for rank in range(scan.ranks))))


def draw(path: Path, scan: Scan) -> None:
    """Draw the matrix as a heat map, GB/s on an axis of logarithms, with lines between nodes."""
    ranks = range(scan.ranks)
    order = [rank for node in scan.nodes for rank in node]
    cells = [[scan.speeds.get((a, b), math.nan) for b in order] for a in order]
    with figure(path, figsize=(5.5, 4.6)) as axes:
        image = axes.imshow(cells, norm="log", cmap="viridis")
        axes.figure.colorbar(image, label="GB/s")
        borders = [sum(len(node) for node in scan.nodes[:count]) - 0.5
                   for count in range(1, len(scan.nodes))]  # fmt: skip
        for border in borders:
            axes.axhline(border, color="white", linewidth=2)
            axes.axvline(border, color="white", linewidth=2)
        if scan.ranks <= ANNOTATED:
            axes.set_xticks(ranks, order)
            axes.set_yticks(ranks, order)
            write_speeds(axes, cells)
        axes.set(title="Bandwidth of each pair", xlabel="to rank", ylabel="from rank")


def write_speeds(axes, cells: list[list[float]]) -> None:
    """Write each cell's GB/s into it, dark on bright cells."""
    known = [gb_s for row in cells for gb_s in row if not math.isnan(gb_s)]
    for row, speeds in enumerate(cells):
        for column, gb_s in enumerate(speeds):
            if not math.isnan(gb_s):
                color = "black" if gb_s**2 > 0.5 * min(known) * max(known) else "white"
                place = {"ha": "center", "va": "center", "fontsize": 8, "color": color}
                axes.text(column, row, f"{gb_s:.2g}", **place)
