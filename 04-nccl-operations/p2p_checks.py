"""What point_to_point.py sends: messages checked, steps and bytes counted, times predicted."""

import math
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from dist_common import measure

SMALL = 64  # numbers in a message that is all latency: 256 bytes
WARM_UP, ROUNDS = 2, 10  # of each timed operation; the median counts


class Mover:
    """Send and receive in steps; count the steps and bytes of this rank, and its largest message.

    With a rate (bytes/s) and a latency (s), a message leaves no sooner than on such a link.
    """

    def __init__(self, rate: float = math.inf, latency_s: float = 0.0) -> None:
        self.rate = rate
        self.latency_s = latency_s
        self.steps = 0
        self.bytes = 0
        self.largest = 0

    def __call__(self, sent=None, to=None, received=None, source=None) -> None:
        """Send the tensor `sent` to a rank and fill `received` from another one, as one step."""
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


class Cost(NamedTuple):
    """What the busiest rank of an all-reduce does; bytes in sizes of the buffer."""

    steps: int
    sent: float
    in_a_step: float


def theory(name: str, ranks: int) -> Cost:
    """Return what an all-reduce of ALGORITHMS costs by the papers.

    Source: Thakur et al. (2005), section 4.5, for ring and recursive doubling; a binomial
    reduce and broadcast, sections 4.1 and 4.4, for the tree.
    """
    whole = int(math.log2(ranks))
    extra = ranks > 2**whole
    return {
        "ring": Cost(2 * (ranks - 1), 2 * (ranks - 1) / ranks, 1 / ranks),
        "recursive doubling": Cost(whole + 2 * extra, whole + extra, 1),
        "tree": Cost(2 * (whole + extra), whole + extra, 1),
    }[name]


def median_s(run: Callable[[], None], device: torch.device) -> float:
    """Return the median time of `run`, which every rank calls, in s; of the slowest rank."""
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


def ping_pong(numbers: int, device: torch.device, move: Mover) -> float:
    """Return the time of one message one way, in s; ranks 0 and 1, 2 and 3 ... at once."""
    rank = dist.get_rank()
    ball = torch.zeros(numbers, device=device)
    peer = rank ^ 1

    def there_and_back() -> None:
        if peer >= dist.get_world_size():
            return
        for turn in (0, 1):
            if rank % 2 == turn:
                move(ball, peer)
            else:
                move(received=ball, source=peer)

    return median_s(there_and_back, device) / 2


def check_spellings(report, spellings: tuple[Callable, ...]) -> None:
    """Check that each spelling brings every rank the number of the rank before it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for spelling in spellings:
        mine = torch.tensor([rank + 1.0], device=report.device)
        received = torch.zeros_like(mine)
        spelling(mine, received, (rank + 1) % ranks, (rank - 1) % ranks)
        wrong = (received != (rank - 1) % ranks + 1).float()
        dist.all_reduce(wrong)
        name = f"{spelling.__name__}: ranks with another number than the previous rank's"
        report.check(name, int(wrong.item()), 0, 0, "PyTorch, Point-to-point communication")


def measure_link(report, large: int, link: tuple[float, float]) -> tuple[float, float]:
    """Return alpha in s and the rate in bytes/s, from messages of SMALL and of `large` numbers."""
    alpha = ping_pong(SMALL, report.device, Mover(*link))
    rate = 4 * large / (ping_pong(large, report.device, Mover(*link)) - alpha)
    report.say(f"ping-pong: {alpha * 1e6:.0f} us for nothing (alpha), then {rate / 1e6:,.0f} MB/s")
    report.metrics.update(alpha_us=alpha * 1e6, link_mb_s=rate / 1e6)
    return alpha, rate


def compare_all_reduces(
    report, algorithms: dict[str, Callable], large: int, link: tuple[float, float], alpha: float,
    rate: float,
) -> None:  # fmt: skip
    """Check what each all-reduce does and sends; print its time beside that of the cost model."""
    rows = []
    for numbers in (SMALL, large):
        for name, all_reduce in algorithms.items():
            check_counts(report, name, all_reduce, numbers, link, large)
            size = 4 * numbers
            cost = theory(name, dist.get_world_size())
            x = torch.ones(numbers, device=report.device)
            took = median_s(lambda run=all_reduce, x=x: run(x, Mover(*link)), report.device)
            predicted = cost.steps * (alpha + cost.in_a_step * size / rate)
            rows.append((name, f"{size:,} bytes", f"{cost.steps}", f"{cost.sent:g}",
                         f"{1e3 * predicted:.2f} ms", f"{1e3 * took:.2f} ms",
                         f"{took / predicted:.2f}x"))  # fmt: skip
            report.metrics[f"{name} {size:,} bytes ms"] = 1e3 * took
    headers = ("all-reduce", "size", "steps", "sends x size", "predicted", "median", "ratio")
    report.table(rows, headers, names=2)


def check_counts(
    report, name: str, all_reduce: Callable, numbers: int, link: tuple[float, float], large: int
) -> None:
    """Check one all-reduce of so many numbers: its sums, and the steps and bytes that it took."""
    device = report.device
    begun = (torch.arange(numbers, device=device) % 97 + dist.get_rank()).float()  # sums are exact
    right = begun.clone()
    dist.all_reduce(right)
    move = Mover(*link)
    before = measure.bytes_written()

    all_reduce(begun, move)

    counted = move.bytes if before is None else measure.bytes_written() - before
    wrong = (begun != right).sum().item()
    most = torch.tensor([wrong, move.steps, counted, move.largest], device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    wrong, steps, sent, largest = most.tolist()

    cost, size, source = theory(name, dist.get_world_size()), 4 * numbers, "Thakur et al. 4.5"
    label = f"{name}, {size:,} bytes"
    report.check(f"{label}: numbers unlike dist.all_reduce's", wrong, 0, 0, "dist.all_reduce")
    report.check(f"{label}: steps", steps, cost.steps, 0, source)
    # Parts of a buffer differ in length by one number, of 4 bytes.
    in_a_step = round(cost.in_a_step * size)
    report.check(f"{label}: bytes that one step sends", largest, in_a_step, 4, source)
    if numbers == large:  # gloo's headers would outweigh 256 bytes
        expected = round(cost.sent * size)
        report.check(f"{label}: bytes that the busiest rank sends", sent, expected,
                     expected // 100, source)  # fmt: skip
