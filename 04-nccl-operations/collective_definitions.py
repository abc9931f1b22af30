"""What each collective leaves on each rank, worked out without calling one; and its picture."""

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dist_common.cli import UsageError
from dist_common.report import figure

LACKING = {  # by backend; the other one has it
    "gloo": ("all_reduce PREMUL_SUM",),
    "nccl": ("all_reduce BAND", "all_reduce BOR", "all_reduce BXOR"),
}
DRAWN = (
    "broadcast", "scatter", "reduce", "gather", "all_reduce SUM", "reduce_scatter_tensor",
    "all_gather_into_tensor", "all_to_all",
)  # fmt: skip
LARGEST_DRAWN = 8  # ranks: buffers of more overlap in their numbers
SUM_COLOR = (0.35, 0.35, 0.35)


@dataclass(frozen=True)
class Definition:
    """One collective: `results` turns the buffers of all ranks into the results of all ranks.

    A result of None is one that the collective leaves undefined on that rank.
    """

    used: str  # what training needs it for
    results: Callable[[list[torch.Tensor]], list[Any]]
    dtype: torch.dtype = torch.float32
    rounding: float = 0.0  # relative: the backend chooses the order of the operations


def buffer_of(rank: int, ranks: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return what a rank begins with: 1 2 3 ... on rank 0, 11 12 13 ... on rank 1. (ranks,)."""
    return torch.arange(1, ranks + 1, dtype=dtype, device=device) + 10 * rank


def on_rank0(result: Any, ranks: int) -> list[Any]:
    """Return results of which rank 0 alone has one."""
    return [result] + [None] * (ranks - 1)


def on_all(rule: Callable) -> Callable:
    """Return a definition by which every rank gets what `rule` makes of all buffers."""
    return lambda buffers: [rule(buffers)] * len(buffers)


def bitwise(operation: Callable) -> Callable:
    """Return a definition that combines all buffers by `operation`, bit by bit."""
    return on_all(functools.partial(functools.reduce, operation))


def transposed(buffers: list[torch.Tensor]) -> list[torch.Tensor]:
    """Give rank r the number at place r of every rank's buffer."""
    return [torch.stack(buffers)[:, rank].clone() for rank in range(len(buffers))]


def dealt_unevenly(buffers: list[torch.Tensor]) -> list[torch.Tensor]:
    """Give the last rank two numbers of each buffer, the first rank none, all others one."""
    last = len(buffers) - 1
    starts = [max(0, rank - 1) for rank in range(len(buffers))]
    ends = [rank + (rank == last) for rank in range(len(buffers))]
    return [torch.cat([buffer[starts[r] : ends[r]] for buffer in buffers]) for r in range(last + 1)]


def summed_in_groups(buffers: list[torch.Tensor]) -> list[torch.Tensor]:
    """Give each rank the sum over the ranks with even numbers, or over those with odd ones."""
    return [sum(buffers[rank % 2 :: 2]) for rank in range(len(buffers))]


def text_of(value: Any) -> str:
    """Return a buffer as it is printed."""
    if value is None:
        return "undefined"
    if isinstance(value, torch.Tensor):
        return " ".join(f"{number:g}" for number in value.tolist()) or "nothing"
    return " | ".join(value) if isinstance(value, list) else str(value)


WHOLE = torch.int64
DEFINITIONS = {
    "broadcast": Definition(
        "weights of rank 0, before the first step of DDP", on_all(lambda x: x[0])
    ),
    "scatter": Definition("a batch that rank 0 alone has read", lambda x: list(x[0].chunk(len(x)))),
    "reduce": Definition(
        "a loss that rank 0 prints; ZeRO's gradients, to their owner",
        lambda x: on_rank0(sum(x), len(x)),
    ),
    "gather": Definition(
        "samples of all ranks, for rank 0 to save", lambda x: on_rank0(torch.cat(x), len(x))
    ),
    "all_reduce SUM": Definition("gradients, in DDP", on_all(sum)),
    "all_reduce AVG": Definition(
        "gradients, and no division after", on_all(lambda x: sum(x) / len(x)), rounding=1e-5
    ),
    "all_reduce PRODUCT": Definition("nothing common", on_all(math.prod), rounding=1e-5),
    "all_reduce MIN": Definition(
        "the memory that is free on every rank", on_all(lambda x: torch.stack(x).amin(0))
    ),
    "all_reduce MAX": Definition(
        "the time of the slowest rank", on_all(lambda x: torch.stack(x).amax(0))
    ),
    "all_reduce BAND": Definition("flags that all ranks raised", bitwise(operator.and_), WHOLE),
    "all_reduce BOR": Definition("flags that any rank raised", bitwise(operator.or_), WHOLE),
    "all_reduce BXOR": Definition("a checksum", bitwise(operator.xor), WHOLE),
    "all_reduce PREMUL_SUM": Definition(
        "gradients scaled before they are added, on NCCL", on_all(lambda x: sum(x) / 2)
    ),
    "all_gather": Definition("metrics of each rank, for all", on_all(torch.cat)),
    "all_gather_into_tensor": Definition(
        "weights in FSDP and ZeRO-3, before a layer computes", on_all(torch.cat)
    ),
    "reduce_scatter_tensor": Definition(
        "gradients in FSDP, after a layer's backward", lambda x: list(sum(x).chunk(len(x)))
    ),
    "all_to_all": Definition("sequences for heads, in Ulysses' attention", transposed),
    "all_to_all_single": Definition(
        "tokens to their experts, as many as each expert gets", dealt_unevenly
    ),
    "all_reduce_coalesced": Definition(
        "several small tensors in one call", on_all(lambda x: sum(x) + sum(x).flip(0))
    ),
    "all_reduce_async": Definition("gradients, while backward computes", on_all(sum)),
    "all_reduce_of_a_group": Definition(
        "gradients of a tensor-parallel layer; ranks of one machine", summed_in_groups
    ),
    "barrier": Definition("rank 0 has downloaded the data: now all may read", on_all(len)),
    "broadcast_object_list": Definition(
        "settings; pickled, so not for large tensors", on_all(lambda x: text_of(x[0]))
    ),
    "all_gather_object": Definition(
        "what each rank found, of any length", on_all(lambda x: [text_of(b) for b in x])
    ),
    "gather_object": Definition(
        "the same, for rank 0 to print", lambda x: on_rank0([text_of(b) for b in x], len(x))
    ),
    "scatter_object_list": Definition("a file name for each rank", lambda x: text_of(x[0]).split()),
}


def refuse_lacking(name: str | None, backend: str) -> None:
    """Raise UsageError when the one collective asked for is not in this backend."""
    if name in LACKING[backend]:
        other = {"gloo": "nccl", "nccl": "gloo"}[backend]
        raise UsageError(f"--op {name}: {backend} has it not; {other} has")


def wrong_elements(result: Any, defined: Any, rounding: float) -> int:
    """Return how many elements of a rank's result are not as defined; of an undefined one, none."""
    if defined is None:
        return 0
    if not isinstance(defined, torch.Tensor):
        return int(result != defined)
    if result.shape != defined.shape:
        return max(result.numel(), defined.numel())
    right = (result == defined) | torch.isclose(result, defined, rtol=rounding, atol=0)
    return (~right).sum().item()


def show_and_check(report, name: str, before: list, after: list) -> None:
    """Print what all ranks held before and after; check it against the definition."""
    definition = DEFINITIONS[name]
    defined = definition.results([buffer.clone() for buffer in before])
    wrong = sum(wrong_elements(*pair, definition.rounding)
                for pair in zip(after, defined, strict=True))  # fmt: skip
    report.check(f"{name}: elements not as defined", wrong, 0, 0, "MPI 4.1, chapter 6")
    report.say(f"\n{name}: {definition.used}")
    rows = [
        (str(rank), text_of(held), text_of(result))
        for rank, (held, result) in enumerate(zip(before, after, strict=True))
    ]
    report.table(rows, ("rank", "before", "after"), names=3)


def draw(path, held: dict[str, tuple[list, list]]) -> None:
    """Draw the buffers of all ranks before and after each collective of DRAWN that ran.

    `held` maps a name to what all ranks held before and after; colors say whose number it is.
    """
    names = [name for name in DRAWN if name in held]
    ranks = len(held[names[0]][0]) if names else 0
    if not 0 < ranks <= LARGEST_DRAWN:
        return
    rows = math.ceil(len(names) / 2)
    height = 0.7 + 0.34 * ranks
    with figure(path, rows, 2, figsize=(12, rows * height), squeeze=False) as axes:
        for ax in axes.flat[len(names) :]:
            ax.axis("off")
        for ax, name in zip(axes.flat, names, strict=False):
            draw_one(ax, name, *held[name])


def draw_one(ax, name: str, before: list, after: list) -> None:
    """Draw one collective: a row for each rank, what it held to the left, its result to the right.

    The unit of width is one number.
    """
    ranks = len(before)
    most = max(4, ranks**2 if "gather" in name else ranks)
    gap = max(1.5, 0.1 * most)
    right = ranks + gap
    size = min(9, 180 / (right + most))
    owners = {number: rank for rank, own in enumerate(before) for number in own.tolist()}
    for rank in range(ranks):
        draw_row(ax, rank, 0, before[rank], owners, size)
        draw_row(ax, rank, right, after[rank], {} if "reduce" in name else owners, size)
    start, end = (ranks + 0.2 * gap, ranks / 2), (ranks + 0.8 * gap, ranks / 2)
    ax.annotate("", end, start, arrowprops={"arrowstyle": "->"})
    ax.set_xlim(0, right + most)
    ax.set_ylim(ranks, 0)
    ax.set_xticks([])
    ax.set_yticks([rank + 0.5 for rank in range(ranks)], [f"rank {rank}" for rank in range(ranks)])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_title(name, loc="left", size=11)


def draw_row(ax, rank: int, left: float, held: Any, owners: dict, size: float) -> None:
    """Draw what one rank holds: a number has the color of its owner, a sum is dark."""
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    if held is None:
        ax.text(left, rank + 0.5, "undefined", va="center", size=9, style="italic")
        return
    for place, number in enumerate(held.tolist()):
        owner = owners.get(number)
        color = SUM_COLOR if owner is None else colormaps["Set3"](owner)
        ax.add_patch(Rectangle((left + place + 0.03, rank + 0.08), 0.94, 0.84, facecolor=color))
        ink = "white" if owner is None else "black"
        if size > 4:
            middle = left + place + 0.5, rank + 0.5
            ax.text(*middle, f"{number:g}", ha="center", va="center", size=size, color=ink)
