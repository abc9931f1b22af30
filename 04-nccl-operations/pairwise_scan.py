"""Send a message from every rank to every other one, and name the rank, node or pair that is slow.

    CPU   torchrun --standalone --nproc-per-node=4 04-nccl-operations/pairwise_scan.py
    GPU   torchrun --standalone --nproc-per-node=gpu 04-nccl-operations/pairwise_scan.py -b 64M

A collective is as slow as its slowest link, and does not say which link that is. Look for: the
matrix of bandwidths, and below it the row, column or block that is slow, if there is one.

Source: the circle method for tournaments (Lucas, Recreations mathematiques, volume 2, 1883).
"""

import time

import torch
import torch.distributed as dist

import bandwidth_data as data
from cluster_nodes import nodes_of
from dist_common import cli, runtime
from dist_common.report import Report
from pairwise_verdict import Scan, conclude
from stop_early import StopEarly

BURSTS = 3  # timed ones, each way


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


def meet(pair, message, arrived, iters):
    """Return this rank's GB/s to its peer, and how many elements of the peer's message differ.

    All ranks call it; those that have a break in this round, with None.
    """
    rank, speed, wrong = dist.get_rank(), None, 0
    for turn in (0, 1):  # one way, then the other
        sender, receiver = (pair[turn], pair[1 - turn]) if pair else (None, None)
        times = []
        for count in (1, *[iters] * BURSTS):  # the first one connects
            dist.barrier()  # all pairs begin together: they may share a link
            if pair:
                times.append(burst(message, arrived, sender, receiver, count))
        if rank == sender:
            # The best one: what another program disturbs is not the link's fault.
            speed = iters * message.nbytes / min(times[1:]) / 1e9
        if rank == receiver:
            right = data.fill(torch.empty_like(arrived), data.noise(sender))
            wrong = int((arrived != right).sum())
    return speed, wrong


def run_rounds(scan, message, iters, stop):
    """Have all pairs meet, round by round, and note their speeds: the same on all ranks."""
    rank = dist.get_rank()
    arrived = torch.empty_like(message)
    for number, pairs in enumerate(scan.rounds, 1):
        pair = next((pair for pair in pairs if rank in pair), None)
        met = ", ".join(f"{one}-{other}" for one, other in pairs)
        stop.during = f"round {number} of {len(scan.rounds)}, ranks {met}"

        own = meet(pair, message, arrived, iters)

        every = runtime.gather(own)
        for one, other in pairs:
            scan.speeds[one, other] = every[one][0]
            scan.speeds[other, one] = every[other][0]
        scan.wrong += sum(wrong for _, wrong in every)
        if stop.agreed():
            break


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    add("-b", "--bytes", type=data.byte_size, default="4M", metavar="SIZE",
        help="size of a message (4M)")  # fmt: skip
    add("-n", "--iters", type=cli.positive_int, default=5,
        help="messages in a burst; the best of three bursts counts (5)")  # fmt: skip
    add("--nodes-only", action="store_true",
        help="only between nodes, each rank with its counterparts: fewer rounds")  # fmt: skip
    return parser.parse_args()


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("04-nccl-operations/pairwise_scan.py", args, world, device)
        if world.world_size == 1:
            raise cli.UsageError("one rank has nobody to talk to: start 2 or more (torchrun)")
        nodes = nodes_of()
        if args.nodes_only and len(nodes) == 1:
            raise cli.UsageError("--nodes-only: all ranks are on one node")
        data.refuse_size("-b", args.bytes, world, device)
        scan = Scan(nodes, rounds_of(nodes, args.nodes_only), args.nodes_only)
        report.start(f"nodes: {len(nodes)}, rounds: {len(scan.rounds)}")

        message = torch.empty(max(1, args.bytes // 4), device=device)  # of 4 bytes each
        data.fill(message, data.noise(world.rank))
        with StopEarly(report.say, lambda: conclude(report, scan, True)) as stop:
            run_rounds(scan, message, args.iters, stop)
        return conclude(report, scan, stop.stopped)


if __name__ == "__main__":
    cli.run(main)
