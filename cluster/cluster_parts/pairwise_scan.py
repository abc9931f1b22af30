"""What pairwise_scan.py makes of its matrix; as a program, slow ranks for it to find (Linux).

    torchrun ... cluster/cluster_parts/pairwise_scan.py --link 100mbit --slow 3=20mbit \
        SCRIPT ARGUMENTS

runs a script, which is not told, and limits the rate of each TCP socket of its process.

Source: socket(7), SO_MAX_PACING_RATE.
"""

import argparse
import contextlib
import os
import runpy
import socket
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from legacy_common import cli, measure, runtime
from legacy_common.report import Report

PERIOD = 4099  # numbers repeat after so many: a prime, so that shifted data differ
CLOCK_S = 5e-7  # what a CUDA event can tell apart: a time of 0 is shorter than this
MOST = 8  # ranks whose matrix fits on a screen; findings that do
WITHIN, ACROSS = "within a node", "across nodes"
SENDS, RECEIVES, BOTH = "sends", "receives", "sends and receives"
Way = tuple[int, int]  # sender, receiver
SO_MAX_PACING_RATE = 47  # asm-generic/socket.h; Python has no name for it


def numbers_of(rank: int, like: torch.Tensor) -> torch.Tensor:
    """Return what a rank sends, in a tensor like another one: no zeros, which links compress."""
    period = 1.0 + 15.0 * torch.rand(PERIOD, generator=torch.Generator().manual_seed(rank))
    return period.repeat(-(-len(like) // PERIOD))[: len(like)].to(like)


def refuse_size(size: int, world: runtime.World, device: torch.device) -> None:
    """Refuse three buffers of `size` bytes that do not fit into a rank's memory. A collective."""
    sharing = world.local_world_size if device.type == "cpu" else 1  # ranks of a machine
    most = int(0.9 * min(runtime.gather(measure.available_memory(device) // sharing))) // 3
    if size > most:
        raise cli.UsageError(f"-b {size} does not fit into a rank's memory: {most // 2**20}M does")


@dataclass
class Scan:
    """Who meets whom, and what came of it; `repeats` has GB/s from sender to receiver."""

    nodes: list[list[int]]
    rounds: list[list[tuple[int, int]]]
    nodes_only: bool = False
    repeats: dict[Way, list[float]] = field(default_factory=lambda: defaultdict(list))
    wrong: int = 0

    @property
    def speeds(self) -> dict[Way, float]:
        """Return the middle repeat of each way."""
        return {way: statistics.median_low(gb_s) for way, gb_s in self.repeats.items()}

    @cached_property
    def node_of(self) -> dict[int, int]:
        """Return each rank's node."""
        return {rank: number for number, node in enumerate(self.nodes) for rank in node}

    def kind(self, way: Way) -> str:
        """Say whether a message stays within a node."""
        return WITHIN if self.node_of[way[0]] == self.node_of[way[1]] else ACROSS

    @property
    def ranks(self) -> int:
        return sum(map(len, self.nodes))


class Slow(NamedTuple):
    """What explains slow ways: a rank, a node, two nodes, or two ranks."""

    what: str
    direction: str  # SENDS, RECEIVES or BOTH, from its side
    where: str
    of_fast: float  # the median of its ways, as a part of what the fast ones of their kind do


def part_of_fast(text: str) -> float:
    """Parse a part of the fast pairs' speed, above 0 and below 1."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) < 1:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be above 0 and below 1, such as 0.8, not {text!r}")


def rounds_needed(scan: Scan) -> int:
    """Return how few rounds can do it: in each a rank meets one other."""

    def needed(players: int) -> int:
        return players - 1 + players % 2 if players > 1 else 0  # of an odd number one has a break

    size = len(scan.nodes[0])
    if any(len(node) != size for node in scan.nodes):
        return needed(scan.ranks)
    across = needed(len(scan.nodes))
    return across if scan.nodes_only else needed(size) + size * across


def conclude(report: Report, scan: Scan, find_slow: Callable) -> int:
    """Print and write what was measured; return the exit code."""
    (found, noise), everybody = find_slow(scan), range(scan.ranks)
    speeds = scan.speeds
    matrix = [[speeds.get((a, b)) for b in everybody] for a in everybody]
    if scan.ranks <= MOST:
        names = [f"rank {rank}" for rank in everybody]
        cells = [["-" if s is None else f"{1e3 * s:,.1f} MB/s" for s in row] for row in matrix]
        rows = [(name, *row) for name, row in zip(names, cells, strict=True)]
        report.table(rows, ("from \\ to", *names))
    for kind, of_kind in noise.items():
        by_chance = 1 - of_kind.median_at(0.05) / of_kind.median_at(0.9)  # 19 of 20 are above
        told = f"a pair that is less than {1 - of_kind.limit():.0%} slower is not named"
        fast = f"{kind}, fast pairs reach {of_kind.fast_gb_s:.3g} GB/s"
        report.say(f"{fast}; noise is {by_chance:.0%}: {told}")
    for slow in found[:MOST]:
        report.say(f"SLOW: {slow.what}: {slow.direction} at {slow.of_fast:.2f}x, {slow.where}")
    if len(found) > MOST:
        report.say(f"... and {len(found) - MOST} more, in results.json")
    if not found:
        report.say("no rank, node or pair is slow")
    ways = scan.ranks * ((len(scan.nodes) if scan.nodes_only else scan.ranks) - 1)
    report.check("ways measured", len(speeds), ways, 0, "everybody to everybody else")
    source = "each rank meets one other in a round"
    report.check("rounds", len(scan.rounds), rounds_needed(scan), 0, source)
    report.check("elements that arrived wrong", scan.wrong, 0, 0, "what the sender sent")
    report.metrics |= {
        "matrix_gb_s": matrix, "fast_gb_s": {kind: one.fast_gb_s for kind, one in noise.items()},
        "repeats_gb_s": [[*way, *gb_s] for way, gb_s in scan.repeats.items()],
        "slow": [slow._asdict() for slow in found],
        "nodes": scan.nodes,
    }  # fmt: skip
    return report.finish(f"{len(speeds) // 2} pairs of {scan.ranks} ranks met")


def pace_sockets(bytes_per_second: int) -> None:
    """Limit what every TCP socket of this process sends, also those that it opens later."""
    while True:
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # closed by now
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    with socket.socket(fileno=os.dup(int(name))) as copy:
                        copy.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, bytes_per_second)
        time.sleep(0.02)


def slow_rank(text: str) -> tuple[int, float]:
    """Parse RANK=RATE, as 3=20mbit; return the rank and bytes/s."""
    rank, equals, rate = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"must be like 3=20mbit, not {text!r}")
    return cli.whole_number(rank), cli.link_rate(rate)


def main() -> int:
    """Run a script with its sockets slowed."""
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    add("--link", type=cli.link_rate, help="what every rank sends to each peer: 100mbit (as it is)")
    add("--slow", type=slow_rank, action="append", default=[], metavar="RANK=RATE",
        help="a rank that sends slower: 3=20mbit; may be repeated (none)")  # fmt: skip
    add("script", help="what to run")
    add("arguments", nargs=argparse.REMAINDER, help="of the script")
    args = parser.parse_args()
    if not sys.platform.startswith("linux"):
        raise cli.UsageError("only Linux limits the rate of a socket: start the script itself")
    if not os.path.exists(args.script):
        raise cli.UsageError(f"there is no {args.script}")
    rate = dict(args.slow).get(int(os.environ.get("RANK", "0")), args.link)
    if rate:
        threading.Thread(target=pace_sockets, args=(int(rate),), daemon=True).start()
    sys.argv = [args.script, *args.arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(args.script))
    runpy.run_path(args.script, run_name="__main__")
    return 0


if __name__ == "__main__":
    cli.run(main)
