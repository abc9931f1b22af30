"""Send from one rank to another, and build three all-reduces out of nothing else.

    CPU   torchrun --standalone --nproc-per-node=4 04-nccl-operations/point_to_point.py
    GPU   torchrun --standalone --nproc-per-node=gpu 04-nccl-operations/point_to_point.py

`--link 100mbit --latency-ms 5` emulates a slow network. Look for: who waits when both sides
send first; what a message costs before its first byte; which all-reduce takes the fewest steps,
and which one sends the fewest bytes.

Sources: Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in
MPICH (2005), sections 3 and 4; Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms for
Clusters of Workstations (2009); docs.pytorch.org, "Point-to-point communication".
"""

import math
import statistics
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from dist_common import cli, measure, runtime
from dist_common.report import Report

SMALL = 64  # numbers in a message that is all latency: 256 bytes
WARM_UP, ROUNDS = 2, 10  # of each timed operation; the median counts
DEADLOCK_S = 1.0  # how long two blocking sends are watched


# Three spellings of one message to the next rank of a ring.


def send_recv(mine, received, to, source):
    # A blocking send returns when the other side takes it. Somebody has to receive first.
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
    # One group of NCCL operations, which makes progress together: no order to get wrong.
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


# Three all-reduces. `move` sends one tensor and receives another in the same step.


class Mover:
    """Send and receive in steps; count the steps and bytes of this rank, and its largest message.

    With a rate (bytes/s) and a latency (s), a message leaves no sooner than on such a link.
    """

    def __init__(self, rate=math.inf, latency_s=0.0):
        self.rate, self.latency_s = rate, latency_s
        self.steps = self.bytes = self.largest = 0

    def __call__(self, sent=None, to=None, received=None, source=None):
        operations = []
        if sent is not None and sent.numel():
            time.sleep(self.latency_s + sent.nbytes / self.rate)
            operations.append(dist.P2POp(dist.isend, sent, to))
            self.bytes += sent.nbytes
            self.largest = max(self.largest, sent.nbytes)
        if received is not None and received.numel():
            operations.append(dist.P2POp(dist.irecv, received, source))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        self.steps += 1


def ring_all_reduce(x, move):
    """Add up around a ring, a part of x at a time, then pass the sums around once more."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    following, previous = (rank + 1) % ranks, (rank - 1) % ranks
    parts = x.tensor_split(ranks)  # views: (len(x) / ranks,) each
    for step in range(ranks - 1):  # reduce-scatter: part rank + 1 is whole here at the end
        target = parts[(rank - step - 1) % ranks]
        arrived = torch.empty_like(target)
        move(parts[(rank - step) % ranks], following, arrived, previous)
        target += arrived
    for step in range(ranks - 1):  # all-gather
        move(parts[(rank + 1 - step) % ranks], following, parts[(rank - step) % ranks], previous)


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


def theory(name, ranks):
    """Return the busiest rank's steps, what it sends, and what one step sends, in sizes of x.

    Source: Thakur et al. (2005), section 4.5, for ring and recursive doubling; a binomial
    reduce and broadcast, sections 4.1 and 4.4, for the tree.
    """
    whole = int(math.log2(ranks))
    extra = ranks > 2**whole
    return {
        "ring": (2 * (ranks - 1), 2 * (ranks - 1) / ranks, 1 / ranks),
        "recursive doubling": (whole + 2 * extra, whole + extra, 1),
        "tree": (2 * (whole + extra), whole + extra, 1),
    }[name]


ALGORITHMS = {
    "ring": ring_all_reduce,
    "recursive doubling": doubling_all_reduce,
    "tree": tree_all_reduce,
}


def median_s(run, device):
    """Return the median time of `run`, which every rank calls; of the slowest rank."""
    times = []
    for _ in range(WARM_UP + ROUNDS):
        dist.barrier()
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    slowest = torch.tensor([statistics.median(times[WARM_UP:])], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def ping_pong(numbers, device, move):
    """Return the time of one message one way, in s; ranks 0 and 1, 2 and 3 ... at once."""
    rank, ball = dist.get_rank(), torch.zeros(numbers, device=device)
    peer = rank ^ 1

    def there_and_back():
        if peer >= dist.get_world_size():
            return
        for turn in (0, 1):
            if rank % 2 == turn:
                move(ball, peer)
            else:
                move(received=ball, source=peer)

    return median_s(there_and_back, device) / 2


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
        report.start(f"messages of {SMALL * 4} bytes and of {args.mib} MiB")

        large = args.mib * 2**20 // 4  # numbers of 4 bytes
        link = args.link, args.latency_ms / 1e3
        check_spellings(report)
        show_deadlock(report)
        alpha, rate = measure_link(report, large, link)
        compare_all_reduces(report, large, link, alpha, rate)
        return report.finish(f"three all-reduces on {world.world_size} ranks")


def check_spellings(report):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for spelling in (send_recv, isend_irecv, batch_isend_irecv):
        mine = torch.tensor([rank + 1.0], device=report.device)
        received = torch.zeros_like(mine)
        spelling(mine, received, (rank + 1) % ranks, (rank - 1) % ranks)
        wrong = (received != (rank - 1) % ranks + 1).float()
        dist.all_reduce(wrong)
        name = f"{spelling.__name__}: ranks with another number than the previous rank's"
        report.check(name, int(wrong.item()), 0, 0, "PyTorch, Point-to-point communication")


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


def measure_link(report, large, link):
    """Return alpha in s and the rate in bytes/s, from a small and a large message."""
    alpha = ping_pong(SMALL, report.device, Mover(*link))
    rate = 4 * large / (ping_pong(large, report.device, Mover(*link)) - alpha)
    report.say(f"ping-pong: {alpha * 1e6:.0f} us for nothing (alpha), then {rate / 1e6:,.0f} MB/s")
    report.metrics.update(alpha_us=alpha * 1e6, link_mb_s=rate / 1e6)
    return alpha, rate


def compare_all_reduces(report, large, link, alpha, rate):
    """Check what each all-reduce does and sends; print its time beside that of the cost model."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = report.device
    rows = []
    for numbers in (SMALL, large):
        begun = (torch.arange(numbers, device=device) % 97 + rank).float()  # whole: sums are exact
        right = begun.clone()
        dist.all_reduce(right)
        for name, all_reduce in ALGORITHMS.items():
            x, move = begun.clone(), Mover(*link)
            before = measure.bytes_written()

            all_reduce(x, move)

            counted = move.bytes if before is None else measure.bytes_written() - before
            wrong = (x != right).sum().item()
            most = torch.tensor([wrong, move.steps, counted, move.largest], device=device)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            wrong, steps, sent, largest = most.tolist()
            steps_expected, factor, part = theory(name, ranks)
            size, source = 4 * numbers, "Thakur et al. 4.5"
            label = f"{name}, {size:,} bytes"
            report.check(f"{label}: numbers unlike dist.all_reduce's", wrong, 0, 0,
                         "dist.all_reduce")  # fmt: skip
            report.check(f"{label}: steps", steps, steps_expected, 0, source)
            # Parts of a buffer differ in length by one number, of 4 bytes.
            report.check(f"{label}: bytes that one step sends", largest, round(part * size), 4,
                         source)  # fmt: skip
            if numbers == large:  # gloo's headers would outweigh 256 bytes
                report.check(f"{label}: bytes that the busiest rank sends", sent,
                             round(factor * size), round(0.01 * factor * size), source)  # fmt: skip
            scratch = begun.clone()
            took = median_s(lambda run=all_reduce, x=scratch: run(x, Mover(*link)), device)
            predicted = steps_expected * (alpha + part * size / rate)
            rows.append((name, f"{size:,} bytes", f"{steps}", f"{factor:g}",
                         f"{1e3 * predicted:.2f} ms", f"{1e3 * took:.2f} ms",
                         f"{took / predicted:.2f}x"))  # fmt: skip
            report.metrics[f"{name} {size:,} bytes ms"] = 1e3 * took
    headers = ("all-reduce", "size", "steps", "sends x size", "predicted", "median", "ratio")
    report.table(rows, headers, names=2)


if __name__ == "__main__":
    cli.run(main)
