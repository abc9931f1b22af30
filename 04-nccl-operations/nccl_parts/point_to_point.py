"""What point_to_point.py counts, predicts and draws of the messages that its functions send."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from legacy_common import runtime
from legacy_common.lab import traffic
from legacy_common.lab.figure import figure

SMALL = 64  # numbers in a message that is all latency: 256 bytes
WARM_UP, ROUNDS = 2, 10  # of each timed operation; the median counts
LARGEST_DRAWN = 8  # ranks
NUMBERS = 840  # of the buffer whose messages are drawn: 1 to 8 ranks divide it


@dataclass
class Mover:
    """Send and receive in steps; count the steps and bytes of this rank, and its largest message.

    With a rate (bytes/s) and a latency (s), a message leaves no sooner than on such a link.
    """

    rate: float = math.inf
    latency_s: float = 0.0
    steps: int = 0
    bytes: int = 0
    largest: int = 0

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


def times_s(device: torch.device, *runs: Callable[[], None]) -> list[list[float]]:
    """Return the times of each run, in s, of the slowest rank; the runs take turns."""
    own = [[] for _ in runs]
    for _ in range(WARM_UP + ROUNDS):
        for times, run in zip(own, runs, strict=True):
            dist.barrier()
            started = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
    counted = [times[WARM_UP:] for times in own]
    slowest = torch.tensor(counted, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist()


class Cost(NamedTuple):
    """What a message costs: alpha in s, and bytes/s; None where noise hides them."""

    alpha: float
    rate: float | None

    def predict(self, steps: int, nbytes: float) -> float | None:
        """Return the time of steps that send so many bytes each, in s."""
        if self.rate is None:
            return steps * self.alpha if nbytes <= 4 * SMALL else None
        return steps * (self.alpha + nbytes / self.rate)


def measure_link(report, ping_pong: Callable, cost_of: Callable, large: int, link: tuple) -> Cost:
    """Return what a message costs, by messages of SMALL and of `large` numbers there and back."""
    balls = [torch.zeros(numbers, device=report.device) for numbers in (SMALL, large)]
    runs = (lambda ball=ball: ping_pong(ball, Mover(*link)) for ball in balls)
    small, large_ = ([t / 2 for t in times] for times in times_s(report.device, *runs))
    cost = cost_of(small, large_, balls[1].nbytes)
    report.metrics |= {"alpha_us": cost.alpha * 1e6, "link_mb_s": cost.rate and cost.rate / 1e6}
    noise = "no rate: the large message takes longer by no more than noise"
    then = noise if cost.rate is None else f"{cost.rate / 1e6:,.0f} MB/s"
    report.say(f"ping-pong: {cost.alpha * 1e6:.0f} us for nothing (alpha), then {then}")
    return cost


def theory(name: str, ranks: int) -> tuple[int, float, float]:
    """Return steps, and sizes of the buffer that the busiest rank sends in all, and in one step.

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


def check_counts(report, label: str, all_reduce, numbers: int, move: Mover, paper: tuple) -> None:
    """Check one all-reduce of so many numbers: its sums, and the steps and bytes that it took."""
    begun = torch.arange(numbers, device=report.device) % 97.0 + dist.get_rank()  # exact sums
    right = begun.clone()
    dist.all_reduce(right)
    before = traffic.bytes_written()

    all_reduce(begun, move)

    counted = move.bytes if before is None else traffic.bytes_written() - before
    own = (begun != right).sum().item(), move.steps, move.largest, counted
    wrong, *found = map(max, zip(*runtime.gather(own), strict=True))

    report.check(f"{label}: numbers unlike dist.all_reduce's", wrong, 0, 0, "dist.all_reduce")
    steps, sent, in_a_step = paper[0], round(paper[1] * 4 * numbers), round(paper[2] * 4 * numbers)
    rows = [
        ("steps", steps, 0),
        ("bytes that one step sends", in_a_step, 4),  # parts differ in length by one number
        ("bytes that the busiest rank sends", sent, sent // 100),
    ]
    # Of 256 bytes all but the last: gloo's headers would outweigh them.
    for (name, *expected), measured in zip(rows[: 2 + (numbers > SMALL)], found, strict=False):
        report.check(f"{label}: {name}", measured, *expected, "Thakur et al. 4.5")


class Watcher(Mover):
    """A Mover that notes its messages: (time of leaving, sender, receiver, bytes).

    Time is a clock of steps, which travels beside each message: a step begins when the rank's last
    one has ended, and ends when its message has left, one unit later, and the other one is there.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.clock = torch.zeros((), device=device)
        self.messages: list[tuple[int, int, int, int]] = []

    def __call__(self, sent=None, to=None, received=None, source=None) -> None:
        if sent is not None:
            self.messages.append((int(self.clock), dist.get_rank(), to, sent.nbytes))
        super().__call__(sent, to, received, source)
        ready = self.clock + (sent is not None)
        arrived = torch.zeros_like(ready)
        clocks = (None if sent is None else ready, to, None if received is None else arrived)
        super().__call__(*clocks, source)
        self.clock = torch.maximum(ready, arrived)


def messages_of(all_reduce: Callable, x: torch.Tensor) -> list[tuple[int, int, int, int]]:
    """Run an all-reduce; return the messages of all ranks, in order of time. A collective."""
    watcher = Watcher(x.device)
    all_reduce(x, watcher)
    return sorted(sum(runtime.gather(watcher.messages), []))


def draw(report, algorithms: dict[str, Callable]) -> None:
    """Run each all-reduce once more and draw its messages over time. A collective."""
    ranks, size = dist.get_world_size(), 4 * NUMBERS
    if ranks > LARGEST_DRAWN:
        return
    messages = {name: messages_of(all_reduce, torch.ones(NUMBERS, device=report.device))
                for name, all_reduce in algorithms.items()}  # fmt: skip
    if not report.world.is_rank0:
        return
    ends = [max((leaves + 1 for leaves, *_ in own), default=1) for own in messages.values()]
    widths = {"width_ratios": [max(3, end) for end in ends]}
    options = {"figsize": (12, 1.3 + 0.5 * ranks), "gridspec_kw": widths}
    with figure(report.output / "messages.png", 1, len(ends), sharey=True, **options) as axes:
        for ax, end, (name, own) in zip(axes, ends, messages.items(), strict=True):
            for leaves, source, to, nbytes in own:
                arrow = {"arrowstyle": "->", "color": "tab:blue", "shrinkA": 3, "shrinkB": 3,
                         "linewidth": 0.8 + 2 * nbytes / size}  # fmt: skip
                ax.annotate("", (leaves + 1, to), (leaves, source), arrowprops=arrow)
            for rank in range(ranks):
                ax.plot(range(end + 1), [rank] * (end + 1), ".", color="black", markersize=4)
            share = max((nbytes for *_, nbytes in own), default=size) / size
            part = "whole buffers" if share == 1 else f"1/{1 / share:.0f} of the buffer in each"
            ax.set_title(f"{name}\n{end} steps\n{part}", loc="left", size=10)
            ax.set_xticks(range(end + 1))
            ax.set_xlabel("time in steps")
        axes[0].set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
        axes[0].invert_yaxis()
