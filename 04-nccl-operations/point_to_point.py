"""Send messages between two ranks, and build all-reduces from such messages.

    CPU   torchrun --standalone --nproc-per-node=4 04-nccl-operations/point_to_point.py
    GPU   torchrun --standalone --nproc-per-node=gpu \
              04-nccl-operations/point_to_point.py

`--latency-ms 5 --link-mbit 100` emulates a slow network. Look for: who waits when both
ranks send first, what a message costs before its first byte, and which all-reduce is
faster for a small tensor and for a large one.

Sources: docs.pytorch.org, "Point-to-point communication"; Hockney, The communication
challenge for MPP (1994); Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms
(2009).
"""

import statistics
import time
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from dist_common import cli, runtime
from dist_common.check import CollectiveCounter
from dist_common.report import Report

DEADLOCK_S = 1.0  # how long two blocking sends may wait for each other
WARMUP, ROUNDS = 2, 10  # of every timing; the median of the rounds counts


# One message: three ways to send to the next rank of a ring


def send_recv(sent, to, received, source):
    """On gloo, `send` returns when the receiver has called `recv`: one has to begin."""
    if dist.get_rank() % 2 == 0:
        dist.send(sent, to)
        dist.recv(received, source)
    else:
        dist.recv(received, source)
        dist.send(sent, to)


def isend_irecv(sent, to, received, source):
    """Both calls return at once. Until `wait`, neither tensor may be touched."""
    works = [dist.isend(sent, to), dist.irecv(received, source)]
    for work in works:
        work.wait()


def batch_isend_irecv(sent, to, received, source):
    """NCCL runs both calls together, so they have no order that could be wrong."""
    operations = [
        dist.P2POp(dist.isend, sent, to),
        dist.P2POp(dist.irecv, received, source),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def both_send_first(peer, group):
    """Send to each other before either receives; return the error after DEADLOCK_S."""
    sent, received = torch.ones(1), torch.empty(1)
    try:
        dist.send(sent, peer, group=group)
        dist.recv(received, peer, group=group)
    except RuntimeError as error:
        return str(error)
    return None


# A link with a latency and a bandwidth


class Link:
    """Sends and receives in steps.

    A step is held back as long as a link with this latency and speed would need.
    """

    def __init__(self, latency_s, seconds_per_byte):
        self.latency_s = latency_s
        self.seconds_per_byte = seconds_per_byte

    def move(self, sent=None, to=None, received=None, source=None):
        """Send one tensor and receive another one, in the same step."""
        outgoing = [(sent, to)] if sent is not None else []
        incoming = [(received, source)] if received is not None else []
        self.exchange(outgoing, incoming)

    def exchange(self, outgoing, incoming):
        """Send and receive several tensors, in the same step."""
        if outgoing:
            num_bytes = sum(tensor.nbytes for tensor, _ in outgoing)
            time.sleep(self.latency_s + num_bytes * self.seconds_per_byte)
        operations = [dist.P2POp(dist.isend, tensor, to) for tensor, to in outgoing]
        operations += [dist.P2POp(dist.irecv, tensor, src) for tensor, src in incoming]
        for work in dist.batch_isend_irecv(operations):
            work.wait()


# All-reduces from messages


def ring_reduce_scatter(parts, move):
    """Add up around a ring: at the end, part rank + 1 is the whole sum on this rank."""
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
    """Pass the whole sums around a ring, from part rank + 1 on, until all have all."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    following, previous = (rank + 1) % ranks, (rank - 1) % ranks
    # lab: hole all_gather
    for step in range(ranks - 1):
        sent = parts[(rank + 1 - step) % ranks]
        received = parts[(rank - step) % ranks]
        move(sent, following, received, previous)
    # lab: end


def ring_all_reduce(x, move):
    """Add up around a ring, one part of x at a time; then pass the sums around."""
    parts = x.tensor_split(dist.get_world_size())  # views: (len(x) / ranks,) each
    ring_reduce_scatter(parts, move)
    ring_all_gather(parts, move)


def one_shot_all_reduce(x, exchange):
    """Send all of x to every other rank, and add up what arrives: one step."""
    others = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
    arrived = [torch.empty_like(x) for _ in others]
    exchange([(x, to) for to in others], list(zip(arrived, others, strict=True)))
    for other in arrived:
        x += other


ALL_REDUCES = {
    "ring": lambda x, link: ring_all_reduce(x, link.move),
    "one-shot": lambda x, link: one_shot_all_reduce(x, link.exchange),
}
# Steps, and bytes that a rank sends, for n ranks and a tensor of `size` bytes.
COSTS = {
    "ring": lambda n, size: (2 * (n - 1), 2 * (n - 1) / n * size),
    "one-shot": lambda n, size: (1, (n - 1) * size),
}


# Measurements


def check_ways_to_send(report):
    """Check that every way brings the previous rank's number."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    to, source = (rank + 1) % ranks, (rank - 1) % ranks
    wrong = 0
    for way in (send_recv, isend_irecv, batch_isend_irecv):
        sent = torch.tensor([float(rank)], device=report.run.device)
        received = torch.full_like(sent, -1)
        way(sent, to, received, source)
        wrong += sum(runtime.gather(received.item() != source, report.run.cpu_group))
    report.check("messages that did not arrive", wrong, 0, 0)


def show_deadlock(report):
    """Let pairs of ranks both send first, with a short timeout."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # On gloo even with GPUs: a GPU that waits forever would take its process along.
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=DEADLOCK_S))
    peer = rank ^ 1  # 0 and 1, 2 and 3 ...
    error = both_send_first(peer, group) if peer < ranks else None
    errors = [error for error in runtime.gather(error, report.run.cpu_group) if error]
    # The first rank that gives up closes its connections; the others may see that.
    timeouts = [error.split("] ")[-1] for error in errors if "imed out" in error]
    report.run.print0(f"both send first: {', '.join(timeouts[:1])}")
    report.check("both send first: ranks that hang", len(errors), ranks // 2 * 2, 0)


def clock(device):
    """Return seconds, after the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def median_s(run, function):
    """Return the median time of a function, of the slowest rank in each round."""
    times = []
    for _ in range(WARMUP + ROUNDS):
        dist.barrier()
        started = clock(run.device)
        function()
        times.append(clock(run.device) - started)
    rounds = zip(*runtime.gather(times[WARMUP:], run.cpu_group), strict=True)
    return statistics.median(map(max, rounds))


def ping_pong(ball, move):
    """Send a tensor to the partner and back: ranks 0 and 1, 2 and 3 ... at once."""
    rank = dist.get_rank()
    peer = rank ^ 1
    if peer >= dist.get_world_size():
        return
    for turn in (0, 1):
        if rank % 2 == turn:
            move(ball, peer)
        else:
            move(received=ball, source=peer)


def measure_message(run, link, large):
    """Return alpha, the seconds of an empty message, and beta, the seconds per byte."""
    small = torch.zeros(1, device=run.device)
    alpha = median_s(run, partial(ping_pong, small, link.move)) / 2
    whole = median_s(run, partial(ping_pong, large, link.move)) / 2
    return alpha, max(0.0, whole - alpha) / large.nbytes


def check_all_reduce(report, name, x, link):
    """Check the sum of an all-reduce, and the bytes that the busiest rank sends."""
    group = report.run.cpu_group
    result, expected = x.clone(), x.clone()
    dist.all_reduce(expected)
    with CollectiveCounter() as counter:
        ALL_REDUCES[name](result, link)
    wrong = sum(runtime.gather(int((result != expected).sum()), group))
    num_bytes = max(runtime.gather(round(counter.bytes_sent["send"]), group))
    steps, expected_bytes = COSTS[name](report.run.world_size, x.nbytes)
    report.check(f"{name}: numbers unlike dist.all_reduce", wrong, 0, 0)
    name = f"{name}: bytes sent by a rank"
    # The parts of a ring differ in length by at most one number.
    report.check(name, num_bytes, round(expected_bytes), 4 * steps)


def compare_all_reduces(report, link, large):
    """Time the all-reduces of a small and a large tensor next to their predictions."""
    run = report.run
    alpha, beta = measure_message(run, link, large)
    run.print0(
        f"a message: alpha = {alpha * 1e3:.2f} ms, beta = {beta * 1e9:.2f} ms per MB"
    )
    report.metrics |= {"alpha_ms": alpha * 1e3, "beta_ms_per_mb": beta * 1e9}
    rows = []
    for x in (large[:64], large):
        for name, all_reduce in ALL_REDUCES.items():
            steps, num_bytes = COSTS[name](run.world_size, x.nbytes)
            predicted = steps * alpha + num_bytes * beta
            took = median_s(run, partial(all_reduce, x, link))
            times = [f"{seconds * 1e3:.2f} ms" for seconds in (predicted, took)]
            rows.append(
                (name, f"{x.nbytes:,}", f"{steps}", f"{num_bytes:,.0f}", *times)
            )
            report.metrics[f"{name}, {x.nbytes} bytes, ms"] = took * 1e3
    titles = ("bytes", "steps", "sent by a rank", "predicted", "median")
    report.table(rows, ("all-reduce", *titles))


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    add(
        "--kib",
        type=cli.positive_int,
        default=1024,
        help="the large tensor, KiB (1024)",
    )
    add(
        "--latency-ms",
        type=cli.positive_float,
        default=0.0,
        help="hold each message back so long (0)",
    )
    add(
        "--link-mbit",
        type=cli.positive_float,
        help="emulate a link of so many Mbit/s per rank (none)",
    )
    return parser.parse_args()


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as run:
        if run.world_size == 1:
            raise cli.UsageError("1 rank has nobody to send to: start 2 or more")
        report = Report("04-nccl-operations/point_to_point.py", args, run)
        seconds_per_byte = 8e-6 / args.link_mbit if args.link_mbit else 0.0
        link = Link(args.latency_ms / 1e3, seconds_per_byte)
        check_ways_to_send(report)
        show_deadlock(report)
        count = args.kib * 256  # float32
        large = torch.arange(count, device=run.device) % 97.0 + run.rank
        for name in ALL_REDUCES:
            check_all_reduce(report, name, large, link)
        compare_all_reduces(report, link, large)
        return report.finish(f"two all-reduces on {run.world_size} ranks")


if __name__ == "__main__":
    cli.run(main)
