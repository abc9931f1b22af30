"""Pictures of point_to_point.py's all-reduces, drawn from the messages and buffers of a run."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from dist_common import runtime
from dist_common.report import figure
from p2p_checks import Mover

LARGEST_DRAWN = 8  # ranks
NUMBERS = 840  # of the buffer whose messages are drawn: 1 to 8 ranks divide it
COLUMNS = 5  # of the ring's steps, at most


class Step(NamedTuple):
    """One call of a Mover on one rank: whom it sent to, how many bytes, from whom it received."""

    to: int | None
    sent: int
    source: int | None


class Message(NamedTuple):
    """A message that leaves at a time, counted in steps, and arrives a step later."""

    time: int
    source: int
    to: int
    sent: int


class Watcher(Mover):
    """A Mover that notes each step, and what `buffer` held before it."""

    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self.buffer = buffer
        self.noted: list[Step] = []
        self.held: list[list[float]] = []

    def __call__(self, sent=None, to=None, received=None, source=None) -> None:
        self.noted.append(Step(to, 0 if sent is None else sent.nbytes, source))
        self.held.append(self.buffer.tolist())
        super().__call__(sent, to, received, source)


def watch(all_reduce: Callable, x: torch.Tensor) -> tuple[list[list[Step]], list[list]]:
    """Run an all-reduce; return each rank's steps, and what it held before each and at the end."""
    watcher = Watcher(x)
    all_reduce(x, watcher)
    watcher.held.append(x.tolist())
    steps, held = zip(*runtime.gather((watcher.noted, watcher.held)), strict=True)
    return list(steps), list(held)


def messages_of(steps: list[list[Step]]) -> list[Message]:
    """Place the messages of all ranks in time: a step begins when the rank's last one has ended.

    A step ends when what it sends has left, one unit of time later, and what it receives is there.
    """
    ready = [0] * len(steps)  # when each rank can begin its next step
    done = [0] * len(steps)  # how many of its steps are placed
    arrivals: dict[tuple[int, int], list[int]] = {}  # (source, to): times, first in, first out
    messages = []
    sent = [0] * len(steps)  # steps of each rank whose message has left
    while any(done[rank] < len(own) for rank, own in enumerate(steps)):
        for rank, own in enumerate(steps):
            if done[rank] == len(own):
                continue
            step = own[done[rank]]
            if step.sent and sent[rank] == done[rank]:
                messages.append(Message(ready[rank], rank, step.to, step.sent))
                arrivals.setdefault((rank, step.to), []).append(ready[rank] + 1)
            sent[rank] = done[rank] + 1
            queue = arrivals.get((step.source, rank), [])
            if step.source is not None and not queue:
                continue  # not sent yet
            end = ready[rank] + 1 if step.sent else ready[rank]
            ready[rank] = max(end, queue.pop(0)) if step.source is not None else end
            done[rank] += 1
    return sorted(messages)


def draw_messages(path, messages: dict[str, list[Message]], ranks: int, size: int) -> None:
    """Draw the messages of each all-reduce of `size` bytes: ranks downwards, steps to the right."""
    options = {"sharey": True, "squeeze": False, "figsize": (12, 1.3 + 0.5 * ranks)}
    ends = [max((m.time + 1 for m in own), default=0) for own in messages.values()]
    ratios = {"width_ratios": [max(3, end) for end in ends]}
    with figure(path, 1, len(messages), gridspec_kw=ratios, **options) as axes:
        for ax, end, (name, own) in zip(axes.flat, ends, messages.items(), strict=True):
            for message in own:
                arrow = {"arrowstyle": "->", "color": "tab:blue", "shrinkA": 3, "shrinkB": 3,
                         "linewidth": 0.8 + 2 * message.sent / size}  # fmt: skip
                start = (message.time, message.source)
                ax.annotate("", (message.time + 1, message.to), start, arrowprops=arrow)
            for rank in range(ranks):
                ax.plot(range(end + 1), [rank] * (end + 1), ".", color="black", markersize=4)
            share = max((message.sent for message in own), default=size) / size
            part = "whole buffers" if share == 1 else f"1/{1 / share:.0f} of the buffer in each"
            ax.set_title(f"{name}\n{end} steps\n{part}", loc="left", size=10)
            ax.set_xticks(range(end + 1))
            ax.set_xlabel("time in steps")
        axes[0, 0].set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
        axes[0, 0].invert_yaxis()


def ranks_in(value: float) -> list[int]:
    """Return the ranks whose buffers a sum contains, where rank r began with 2 to the r."""
    return [rank for rank in range(LARGEST_DRAWN) if int(value) >> rank & 1]


def draw_ring(path, held: list[list[list[float]]]) -> None:
    """Draw what each rank holds of each part before the ring's first step and after each one.

    `held[rank][step][part]` is a sum of powers of two.
    """
    ranks, panels = len(held), len(held[0])
    columns = min(panels, COLUMNS)
    rows = math.ceil(panels / columns)
    cell = 0.42 + 0.04 * ranks  # inches
    size = (columns * (0.9 + cell * ranks), rows * (0.5 + cell * ranks))
    with figure(path, rows, columns, figsize=size, squeeze=False) as axes:
        for ax in axes.flat[panels:]:
            ax.axis("off")
        for step, ax in enumerate(axes.flat[:panels]):
            sums = [[ranks_in(value) for value in own[step]] for own in held]
            ax.imshow([[len(one) for one in row] for row in sums], "Greens", vmin=0, vmax=ranks + 1)
            for rank, row in enumerate(sums):
                for part, one in enumerate(row):
                    whole = len(one) == ranks
                    names = "+".join(map(str, one)) if len(one) < 4 else f"{len(one)} of {ranks}"
                    ax.text(part, rank, "all" if whole else names, ha="center", va="center",
                            size=8, color="white" if whole else "black")  # fmt: skip
            ax.set_title(f"after step {step}" if step else "at the start", size=10)
            ax.set_xticks(range(ranks), [f"part {part}" for part in range(ranks)], size=7)
            ax.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)], size=7)
            ax.tick_params(length=0)


def draw_all(report, algorithms: dict[str, Callable]) -> None:
    """Run each all-reduce once more, watched, and draw it to --output-dir. A collective."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks > LARGEST_DRAWN:
        return
    messages = {}
    for name, all_reduce in algorithms.items():
        steps, _ = watch(all_reduce, torch.ones(NUMBERS, device=report.device))
        messages[name] = messages_of(steps)
    powers = torch.full((ranks,), 2.0**rank, device=report.device)
    _, held = watch(algorithms["ring"], powers)
    if report.world.is_rank0:
        draw_messages(report.output / "messages.png", messages, ranks, 4 * NUMBERS)
        draw_ring(report.output / "ring.png", held)
