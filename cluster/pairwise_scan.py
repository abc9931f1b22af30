"""Send a message from every rank to every other one, and name the rank, node or pair that is slow.

    CPU   torchrun --standalone --nproc-per-node=4 cluster/pairwise_scan.py
    GPU   torchrun --standalone --nproc-per-node=gpu cluster/pairwise_scan.py -b 64M

A collective is as slow as its slowest link, and does not say which link that is. Look for: the
matrix of bandwidths, below it how slow a pair must be to stand out from noise, and the row, column
or block that is slow, if there is one.

Source: the circle method for tournaments (Lucas, Recreations mathematiques, volume 2, 1883).
"""

import functools
import math
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass

import torch
import torch.distributed as dist

from cluster_parts import pairwise_scan as part
from cluster_parts.host import nodes_of
from legacy_common import cli, runtime
from legacy_common.report import Report

# Nothing is called slow above this part of what the fast pairs of its kind do: one pair, several.
# What sets pairs apart in all repeats alike, as the core that a rank runs on, no repeat shows.
BELOW, BELOW_TOGETHER = 0.5, 0.75
FAST = 0.9  # "fast" is as good as the best tenth
CHANCE = 0.01  # that a healthy cluster has any finding at all
REPEATS = 5  # of all rounds, every other time in the opposite order


def tournament(players):
    """Yield rounds of disjoint pairs, in which everybody meets everybody else once."""
    seats = list(players)
    if len(seats) % 2:
        seats.append(None)  # whoever meets nobody has a break
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)

        yield [pair for pair in pairs if None not in pair]

        seats = [seats[0], seats[-1], *seats[1:-1]]  # the first stays, the others move on


def rounds_of(nodes, nodes_only=False):
    """Return rounds of disjoint pairs of ranks, in each of which all pairs share links alike.

    First within nodes, in all of them at once; then each node with one other, all ranks of both.
    With `nodes_only` a rank meets only its counterparts on other nodes.
    """
    size = len(nodes[0])
    if any(len(node) != size for node in nodes):
        return list(tournament(rank for node in nodes for rank in node))
    rounds = []
    if not nodes_only:
        for places in tournament(range(size)):
            rounds.append([(node[a], node[b]) for node in nodes for a, b in places])
    for meetings in tournament(nodes):
        for shift in range(1 if nodes_only else size):
            pairs = [(one[i], other[(i + shift) % size]) for one, other in meetings
                     for i in range(size)]  # fmt: skip
            rounds.append(pairs)
    return [pairs for pairs in rounds if pairs]  # one player alone has a round without pairs


def send(tensor, peer):
    """Send in the group that all ranks share: NCCL makes a communicator for each pair otherwise."""
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, peer)]):
        work.wait()


def receive(tensor, peer):
    for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, tensor, peer)]):
        work.wait()


def burst(message, arrived, sender, receiver, count):
    """Send a message `count` times, then wait for a short reply; return the seconds, both sides."""
    reply = message[:1].clone()
    started = time.perf_counter()
    if dist.get_rank() == sender:
        for _ in range(count):
            send(message, receiver)
        receive(reply, receiver)
    else:
        for _ in range(count):
            receive(arrived, sender)
        send(reply, sender)
    if message.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def meet(pair, message, arrived, iters, repeat):
    """Return this rank's GB/s to its peer, and how many elements of the peer's message differ.

    All ranks call it; those that have a break in this round, with None.
    """
    rank, speed, wrong = dist.get_rank(), None, 0
    for turn in (0, 1) if repeat % 2 == 0 else (1, 0):  # one way, then the other
        sender, receiver = (pair[turn], pair[1 - turn]) if pair else (None, None)
        for count in (1, iters) if repeat == 0 else (iters,):  # the first one connects
            dist.barrier()  # all pairs begin together: they may share a link
            if pair:
                seconds = burst(message, arrived, sender, receiver, count)
        if rank == sender:
            speed = iters * message.nbytes / max(seconds, part.CLOCK_S) / 1e9
        if rank == receiver:
            wrong = int((arrived != part.numbers_of(sender, arrived)).sum())
    return speed, wrong


def run_rounds(scan, message, iters):
    """Have all pairs meet, round by round, and note their speeds: the same on all ranks."""
    rank = dist.get_rank()
    arrived = torch.empty_like(message)
    for repeat in range(REPEATS):
        for pairs in scan.rounds if repeat % 2 == 0 else scan.rounds[::-1]:
            pair = next((pair for pair in pairs if rank in pair), None)

            own = meet(pair, message, arrived, iters, repeat)

            every = runtime.gather(own)
            for one, other in pairs:
                scan.repeats[one, other].append(every[one][0])
                scan.repeats[other, one].append(every[other][0])
            scan.wrong += sum(wrong for _, wrong in every)


def possible_causes(scan):
    """Return what could be slow, with the measured ways that it would slow: larger ones first."""
    of_nodes, of_paths, of_ranks = defaultdict(set), defaultdict(set), defaultdict(set)
    several = [f"rank{'s' * (len(node) > 1)} {', '.join(map(str, node))}" for node in scan.nodes]
    for way in sorted(scan.repeats):
        kind, nodes = scan.kind(way), [scan.node_of[rank] for rank in way]
        for rank, node, direction in zip(way, nodes, (part.SENDS, part.RECEIVES), strict=True):
            of_ranks[f"rank {rank}", direction, kind].add(way)
            if kind == part.ACROSS and len(scan.nodes) > 2:
                of_nodes[f"node {node} ({several[node]})", direction, kind].add(way)
        if kind == part.ACROSS:
            of_paths[f"node {nodes[0]} -> node {nodes[1]}", part.SENDS, kind].add(way)
    return of_nodes | of_paths | of_ranks


@dataclass
class Noise:
    """How slow healthy ways of one kind can look by chance, as a part of the fast ones' speed."""

    fast_gb_s: float
    off: torch.Tensor  # sorted: repeats, each as a part of the median of its way's others
    repeats: int
    fast_at: float  # the chance to be no faster than the fast ones; of few, these may be lucky
    causes: int  # that are tried at once
    below: tuple[float, float]  # no limit is above these: of one way, of several

    def limit(self, ways=1):
        """Return the part below which so many ways are slow together, other than by chance."""
        of_each = (CHANCE / self.causes) ** (1 / ways)  # Bonferroni: any of the causes
        return min(self.below[ways > 1], self.median_at(of_each) / self.median_at(self.fast_at))

    def median_at(self, chance):
        """Return what the median of a healthy way's repeats stays below with this chance.

        It does where the lower half of them and the middle one do, each by itself.
        """
        half = (self.repeats - 1) // 2 + 1
        low, high = 0.0, 1.0  # of one repeat
        for _ in range(40):
            one = (low + high) / 2
            of_median = sum(math.comb(self.repeats, k) * one**k * (1 - one) ** (self.repeats - k)
                            for k in range(half, self.repeats + 1))  # fmt: skip
            low, high = (one, high) if of_median < chance else (low, one)
        return self.off[min(int(low * len(self.off)), len(self.off) - 1)].item()


def fast_of(speeds):
    """Return what the best tenth of the ways reach."""
    return speeds.kthvalue(1 + math.ceil(FAST * (len(speeds) - 1))).values


def noise_of(scan, causes, below):
    """Return the noise of each kind of way, from how much repeats of one way differ."""
    found, by_kind = {}, defaultdict(list)
    for way, gb_s in scan.repeats.items():
        by_kind[scan.kind(way)].append(gb_s)
    for kind, rows in by_kind.items():
        repeats = min(map(len, rows))
        speeds = torch.tensor([gb_s[:repeats] for gb_s in rows])
        off = torch.tensor([0.0, 1.0])  # of one repeat nothing is known: all is possible
        if repeats > 1:
            others = [speeds[:, torch.arange(repeats) != one].quantile(0.5, dim=1)
                      for one in range(repeats)]  # fmt: skip
            off = (speeds / torch.stack(others, 1)).flatten().sort().values
        fast = fast_of(torch.tensor([*map(statistics.median_low, rows)])).item()
        fast_at = FAST if len(rows) >= 10 else FAST ** (1 / len(rows))
        found[kind] = Noise(fast, off, repeats, fast_at, causes, below)
    return found


def find_slow(scan, below=(BELOW, BELOW_TOGETHER)):
    """Return the fewest causes that explain all slow ways, by the speeds alone, and the noise.

    A rank or node is named where every way from it, or to it, is slow, and it has two peers at
    least: with one, nobody can tell which side it is. What an earlier cause explains is not
    counted again.
    """
    causes, speeds = possible_causes(scan), scan.speeds
    noise = noise_of(scan, len(causes) + len(speeds), below)
    of_fast = {way: gb_s / noise[scan.kind(way)].fast_gb_s for way, gb_s in speeds.items()}
    explained, found = set(), []

    @functools.cache
    def limit_of(kind, ways):
        return noise[kind].limit(ways)

    def is_slow(kind, ways):
        # Most causes are ruled out by the first of their ways: a scan of 1,000 ranks has a million.
        limit = limit_of(kind, len(ways)) if ways else 0
        return bool(ways) and all(of_fast[way] < limit for way in ways)

    while True:
        left = {}
        for cause, ways in causes.items():
            loosest = limit_of(cause[2], len(ways))
            if all(of_fast[way] < loosest or way in explained for way in ways):
                left[cause] = ways - explained
        left = {cause: ways for cause, ways in left.items()
                if is_slow(cause[2], ways) and told_apart(cause, causes[cause])}  # fmt: skip
        # The one that explains most; of two alike the larger: a node before its rank.
        best = max(left, key=lambda cause: (len(left[cause]), len(causes[cause])), default=None)
        if best is None or len(left[best]) < 2:
            break
        found.append((best, causes[best]))
        explained |= causes[best]
    for cause, ways in causes.items():  # its one peer within the node, say, once it is known
        known = any(cause[:2] == other[:2] for other, _ in found)
        if known and is_slow(cause[2], ways - explained):
            explained |= ways
            found.append((cause, ways))
    for one, other in sorted(speeds.keys() - explained):
        cause = f"rank {one} -> rank {other}", part.SENDS, scan.kind((one, other))
        if is_slow(cause[2], {(one, other)}):
            found.append((cause, {(one, other)}))
    return sorted(merged(found, of_fast), key=lambda slow: slow.of_fast), noise


def merged(found, of_fast):
    """Join causes that differ in direction or place only."""
    joined = {}
    for (what, direction, where), ways in found:
        back = " -> ".join(reversed(what.split(" -> ")))
        if back != what and back in joined:
            what, direction = back, part.RECEIVES
        joined.setdefault(what, []).append((direction, where, ways))
    for what, rows in joined.items():
        directions, places, ways = zip(*rows, strict=True)
        direction = part.BOTH if len(set(directions)) > 1 else directions[0]
        name = what.replace(" -> ", " <-> ") if direction == part.BOTH else what
        speed = statistics.median(of_fast[way] for way in set().union(*ways))
        yield part.Slow(name, direction, ", ".join(sorted(set(places))), speed)


def told_apart(cause, ways):
    """Say whether slow ways tell a rank or node from its peers: it has two of them at least."""
    what, direction, _ = cause
    return "->" in what or len({way[direction == part.SENDS] for way in ways}) > 1


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    add("-b", "--bytes", type=cli.byte_size, default="4M", metavar="SIZE",
        help="size of a message (4M)")  # fmt: skip
    add("-n", "--iters", type=cli.positive_int, default=5,
        help="messages in a burst; the median of five bursts counts (5)")  # fmt: skip
    add("--below", type=part.part_of_fast, metavar="PART",
        help="call slow what is below this part of the fast pairs' speed, and no noise "
        f"({BELOW:g}; {BELOW_TOGETHER:g} where several pairs agree)")  # fmt: skip
    add("--nodes-only", action="store_true",
        help="only between nodes, each rank with its counterparts: fewer rounds")  # fmt: skip
    return parser.parse_args()


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("cluster/pairwise_scan.py", args, world, device)
        if world.world_size == 1:
            raise cli.UsageError("one rank has nobody to talk to: start 2 or more (torchrun)")
        nodes = nodes_of()
        if args.nodes_only and len(nodes) == 1:
            raise cli.UsageError("--nodes-only: all ranks are on one node")
        part.refuse_size(args.bytes, world, device)
        scan = part.Scan(nodes, rounds_of(nodes, args.nodes_only), args.nodes_only)
        report.start(f"nodes: {len(nodes)}, rounds: {len(scan.rounds)}")

        message = torch.empty(max(1, args.bytes // 4), device=device)  # of 4 bytes each
        message = part.numbers_of(world.rank, message)
        below = (args.below,) * 2 if args.below else (BELOW, BELOW_TOGETHER)
        find = functools.partial(find_slow, below=below)
        run_rounds(scan, message, args.iters)
        return part.conclude(report, scan, find)


if __name__ == "__main__":
    cli.run(main)
