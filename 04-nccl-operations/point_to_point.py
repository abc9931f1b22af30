"""Send from one rank to another, and build three all-reduces out of nothing else.

    CPU   torchrun --standalone --nproc-per-node=4 04-nccl-operations/point_to_point.py
    GPU   torchrun --standalone --nproc-per-node=gpu 04-nccl-operations/point_to_point.py

`--link 100mbit --latency-ms 5` emulates a slow network. Look for: who waits when both sides send
first; what a message costs before its first byte; which all-reduce takes the fewest steps, and
which one sends the fewest bytes.

Sources: Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in
MPICH (2005), sections 3 and 4; Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms for
Clusters of Workstations (2009); docs.pytorch.org, "Point-to-point communication".
"""

import itertools
import math
import statistics
from datetime import timedelta

import torch
import torch.distributed as dist

from legacy_common import cli, runtime
from legacy_common.report import Report
from nccl_parts import point_to_point as part

DEADLOCK_S = 1.0  # how long two blocking sends may wait for each other


# Three spellings of one message to the next rank of a ring.


def send_recv(mine, received, to, source):
    # A blocking send returns when the other side receives: somebody has to receive first.
    if dist.get_rank() % 2 == 0:
        dist.send(mine, to)
        dist.recv(received, source)
    else:
        dist.recv(received, source)
        dist.send(mine, to)


def isend_irecv(mine, received, to, source):
    works = [dist.isend(mine, to), dist.irecv(received, source)]  # both return at once
    for work in works:
        work.wait()  # until then, neither read `received` nor write to `mine`


def batch_isend_irecv(mine, received, to, source):
    # NCCL gets both as one group and runs them together: no order to get wrong.
    operations = [dist.P2POp(dist.isend, mine, to), dist.P2POp(dist.irecv, received, source)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def both_send_first(peer, group):
    """Send to each other before either receives; return what was raised after DEADLOCK_S."""
    mine, received = torch.ones(1), torch.empty(1)
    try:
        dist.send(mine, peer, group=group)  # the other one is here too
        dist.recv(received, peer, group=group)
    except RuntimeError as error:
        return str(error)
    return None


# What is made of such messages. `move(sent, to, received, source)` sends one tensor and receives
# another in the same step.


def ping_pong(ball, move):
    """Send a tensor there and back: ranks 0 and 1, 2 and 3 ... at once."""
    rank, peer = dist.get_rank(), dist.get_rank() ^ 1
    if peer >= dist.get_world_size():
        return
    for turn in (0, 1):
        if rank % 2 == turn:
            move(ball, peer)
        else:
            move(received=ball, source=peer)


def cost_of(small, large, nbytes):
    """Return what a message costs, by times of small and large ones, taken in turns, in s.

    The bytes cost the median difference. Where the middle half of the differences is spread wider
    than that, it is noise: another run could find half or twice as much, or less than nothing.
    """
    differences = [more - less for less, more in zip(small, large, strict=True)]
    low, middle, high = statistics.quantiles(differences, n=4, method="inclusive")
    rate = nbytes / middle if middle > high - low else None
    return part.Cost(alpha=statistics.median(small), rate=rate)


def ring_reduce_scatter(parts, move):
    """Add up around a ring, in each step a part: part rank + 1 is whole on this rank at the end."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    following, previous = (rank + 1) % ranks, (rank - 1) % ranks
    # lab: hole reduce_scatter
    for step in range(ranks - 1):
        target = parts[(rank - step - 1) % ranks]
        arrived = torch.empty_like(target)
        move(parts[(rank - step) % ranks], following, arrived, previous)
        target += arrived
    # lab: end


def ring_all_gather(parts, move):
    """Pass whole parts on around a ring, from part rank + 1: all are whole on all ranks then."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    following, previous = (rank + 1) % ranks, (rank - 1) % ranks
    # lab: hole all_gather
    for step in range(ranks - 1):
        move(parts[(rank + 1 - step) % ranks], following, parts[(rank - step) % ranks], previous)
    # lab: end


def ring_all_reduce(x, move):
    """Add up around a ring, a part of x at a time, then pass the sums around once more."""
    parts = x.tensor_split(dist.get_world_size())  # views: (len(x) / ranks,) each
    ring_reduce_scatter(parts, move)
    ring_all_gather(parts, move)


def doubling_all_reduce(x, move):
    """Exchange all of x with the rank 1 away, then 2, 4 ...: recursive doubling."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    power = 2 ** int(math.log2(ranks))
    arrived = torch.empty_like(x)
    if rank >= power:  # ranks beyond a power of two hand theirs in, and get the sum at the end
        move(x, rank - power)
        move(received=x, source=rank - power)
        return
    if rank + power < ranks:
        move(received=arrived, source=rank + power)
        x += arrived
    distance = 1
    while distance < power:
        peer = rank ^ distance
        move(x, peer, arrived, peer)
        x += arrived
        distance *= 2
    if rank + power < ranks:
        move(x, rank + power)


def tree_all_reduce(x, move):
    """Add up along a binomial tree to rank 0, then send the sum back down."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    arrived, distance, children = torch.empty_like(x), 1, []
    while distance < ranks and not rank & distance:
        if rank + distance < ranks:
            move(received=arrived, source=rank + distance)
            x += arrived
            children.append(rank + distance)
        distance *= 2
    if rank:
        move(x, rank - distance)
        move(received=x, source=rank - distance)
    for child in reversed(children):  # the deepest subtree first: it has the longest way to go
        move(x, child)


ALGORITHMS = {
    "ring": ring_all_reduce,
    "recursive doubling": doubling_all_reduce,
    "tree": tree_all_reduce,
}


def check_spellings(report):
    """Check that each spelling brings every rank the number of the rank before it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for spelling in (send_recv, isend_irecv, batch_isend_irecv):
        mine = torch.tensor([rank + 1.0], device=report.device)
        received = torch.zeros_like(mine)
        spelling(mine, received, (rank + 1) % ranks, (rank - 1) % ranks)
        wrong = sum(runtime.gather(received.item() != (rank - 1) % ranks + 1))
        name = f"{spelling.__name__}: ranks with another number than the previous rank's"
        report.check(name, wrong, 0, 0, "PyTorch, Point-to-point communication")


def show_deadlock(report):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # By gloo also where there are GPUs: a GPU that waits for ever takes its process along.
    watched = dist.new_group(backend="gloo", timeout=timedelta(seconds=DEADLOCK_S))
    raised = both_send_first(rank ^ 1, watched) if (rank ^ 1) < ranks else None
    errors = [error for error in runtime.gather(raised) if error]
    # The first one to give up closes the connection, which is what the others may see.
    said = min(errors, key=lambda error: "imed out" not in error, default="no deadlock")
    report.say(f"both send first: {said.rpartition('] ')[2]}")  # without gloo's source file
    pairs = 2 * (ranks // 2)
    report.check("both send first: ranks whose send did not end", len(errors), pairs, 0,
                 "both wait for a receive")  # fmt: skip


def compare_all_reduces(report, large, link, cost):
    """Check what each all-reduce does and sends; print its time beside that of the cost model."""
    rows = []
    for numbers, (name, all_reduce) in itertools.product((part.SMALL, large), ALGORITHMS.items()):
        size, x = 4 * numbers, torch.ones(numbers, device=report.device)
        steps, sent, in_a_step = paper = part.theory(name, dist.get_world_size())
        label, move = f"{name}, {size:,} bytes", part.Mover(*link)
        part.check_counts(report, label, all_reduce, numbers, move, paper)

        (times,) = part.times_s(report.device, lambda: all_reduce(x, part.Mover(*link)))  # noqa: B023

        took, predicted = statistics.median(times), cost.predict(steps, in_a_step * size)
        beside = ("unknown", f"{1e3 * took:.2f} ms", "")
        if predicted is not None:
            beside = f"{1e3 * predicted:.2f} ms", beside[1], f"{took / predicted:.2f}x"
        rows.append((name, f"{size:,} bytes", f"{steps}", f"{sent:g}", *beside))
        report.metrics[f"{name} {size:,} bytes ms"] = 1e3 * took
    headers = ("all-reduce", "size", "steps", "sends x size", "predicted", "median", "ratio")
    report.table(rows, headers, names=2)


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    add("--mib", type=cli.positive_int, default=4, help="size of the large buffer, MiB (4)")
    add("--link", type=cli.link_rate, default=math.inf,
        help="emulate a link: 100mbit, 1gbit (none)")  # fmt: skip
    add("--latency-ms", type=cli.positive_float, default=0.0, help="of that link, ms (0)")
    return parser.parse_args()


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("04-nccl-operations/point_to_point.py", args, world, device)
        if world.world_size == 1:
            raise cli.UsageError("one rank has nobody to send to: start 2 or more (torchrun)")
        if device.type == "cuda" and (math.isfinite(args.link) or args.latency_ms):
            # Its sends are queued, and waited for by the GPU: the host would sleep beside them.
            raise cli.UsageError("--link and --latency-ms emulate on the CPU: --device cpu")
        report.start(f"messages of {part.SMALL * 4} bytes and of {args.mib} MiB")

        large = args.mib * 2**20 // 4  # numbers of 4 bytes
        link = args.link, args.latency_ms / 1e3
        check_spellings(report)
        show_deadlock(report)
        cost = part.measure_link(report, ping_pong, cost_of, large, link)
        compare_all_reduces(report, large, link, cost)
        if report.output:
            part.draw(report, ALGORITHMS)
        return report.finish(f"three all-reduces on {world.world_size} ranks")


if __name__ == "__main__":
    cli.run(main)
