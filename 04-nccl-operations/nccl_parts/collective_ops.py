"""What each collective leaves on each rank, worked out without calling one; and its picture."""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from legacy_common.lab.figure import figure

LACKING = {  # by backend; the other one has it
    "gloo": ("all_reduce PREMUL_SUM",),
    "nccl": ("all_reduce BAND", "all_reduce BOR", "all_reduce BXOR"),
}
DRAWN = ("broadcast", "scatter", "reduce", "gather", "all_reduce SUM", "reduce_scatter_tensor",
         "all_gather_into_tensor", "all_to_all")  # fmt: skip
LARGEST_DRAWN = 8  # ranks: buffers of more overlap in their numbers
SUM_COLOR = (0.35, 0.35, 0.35)
# Relative: of a mean and a product the backend chooses the order of operations.
ROUNDING = {"all_reduce AVG": 1e-5, "all_reduce PRODUCT": 1e-5}


# Each returns what turns all buffers into all results: who gets what `rule` makes of them.


def on_rank0(rule: Callable) -> Callable:
    return lambda buffers: [rule(buffers)] + [None] * (len(buffers) - 1)


def on_all(rule: Callable) -> Callable:
    return lambda buffers: [rule(buffers)] * len(buffers)


def folded(rule: Callable) -> Callable:
    return on_all(lambda buffers: functools.reduce(rule, buffers))


def in_parts(rule: Callable) -> Callable:
    return lambda buffers: list(rule(buffers).chunk(len(buffers)))


def dealt_unevenly(buffers: list[torch.Tensor]) -> list[torch.Tensor]:
    """Give the last rank two numbers of each buffer, the first rank none, all others one."""
    lengths = [0] + [1] * (len(buffers) - 2) + [2]
    parts = zip(*(buffer.split(lengths) for buffer in buffers), strict=True)
    return [torch.cat(own) for own in parts]


def text_of(value: Any) -> str:
    """Return a buffer as it is printed."""
    if value is None:
        return "undefined"
    if isinstance(value, torch.Tensor):
        return " ".join(f"{number:g}" for number in value.tolist()) or "nothing"
    return " | ".join(value) if isinstance(value, list) else str(value)


# By collective: what training needs it for, and what turns the buffers of all ranks into the
# results of all ranks. A result of None is one that the collective leaves undefined on that rank.
DEFINITIONS: dict[str, tuple[str, Callable[[list[torch.Tensor]], list[Any]]]] = {
    "broadcast": ("weights of rank 0, before the first step of DDP", on_all(lambda x: x[0])),
    "scatter": ("a batch that rank 0 alone has read", in_parts(lambda x: x[0])),
    "reduce": ("a loss that rank 0 prints; ZeRO's gradients, to their owner", on_rank0(sum)),
    "gather": ("samples of all ranks, for rank 0 to save", on_rank0(torch.cat)),
    "all_reduce SUM": ("gradients, in DDP", on_all(sum)),
    "all_reduce AVG": ("gradients, and no division after", on_all(lambda x: sum(x) / len(x))),
    "all_reduce PRODUCT": ("nothing common", on_all(math.prod)),
    "all_reduce MIN": ("the memory that is free on every rank", folded(torch.minimum)),
    "all_reduce MAX": ("the time of the slowest rank", folded(torch.maximum)),
    "all_reduce BAND": ("flags that all ranks raised", folded(operator.and_)),
    "all_reduce BOR": ("flags that any rank raised", folded(operator.or_)),
    "all_reduce BXOR": ("a checksum", folded(operator.xor)),
    "all_reduce PREMUL_SUM": ("gradients scaled first, on NCCL", on_all(lambda x: sum(x) / 2)),
    "all_gather": ("metrics of each rank, for all", on_all(torch.cat)),
    "all_gather_into_tensor": ("weights in FSDP and ZeRO-3, of the next layer", on_all(torch.cat)),
    "reduce_scatter_tensor": ("gradients in FSDP, after a layer's backward", in_parts(sum)),
    "all_to_all": ("sequences for heads, in Ulysses' attention", lambda x: list(torch.stack(x).T)),
    "all_to_all_single": ("tokens to their experts, as many as each expert gets", dealt_unevenly),
    "all_reduce_coalesced": ("small tensors at once", on_all(lambda x: sum(x) + sum(x).flip(0))),
    "all_reduce_async": ("gradients, while backward computes", on_all(sum)),
    "all_reduce_of_a_group": ("gradients of a tensor-parallel layer; ranks of one machine",
                              lambda x: [sum(x[rank % 2 :: 2]) for rank in range(len(x))]),
    "barrier": ("rank 0 has downloaded the data: now all may read", on_all(len)),
    "broadcast_object_list": ("settings; not large tensors", on_all(lambda x: text_of(x[0]))),
    "all_gather_object": ("what each rank found", on_all(lambda x: [*map(text_of, x)])),
    "gather_object": ("the same, for rank 0 to print", on_rank0(lambda x: [*map(text_of, x)])),
    "scatter_object_list": ("a file name for each rank", lambda x: text_of(x[0]).split()),
}  # fmt: skip


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

    The unit of width is one number, which has the color of its owner; a sum is dark.
    """
    from matplotlib import colormaps

    ranks = len(before)
    most = max(4, ranks**2 if "gather" in name else ranks)
    gap = max(1.5, 0.1 * most)
    size = min(9, 180 / (ranks + gap + most))
    owned = {n: colormaps["Set3"](rank) for rank, own in enumerate(before) for n in own.tolist()}
    results = {} if "reduce" in name else owned
    for left, buffers, colors in ((0, before, owned), (ranks + gap, after, results)):
        for rank, buffer in enumerate(buffers):
            if buffer is None:
                ax.text(left, rank, "undefined", va="center", size=9, style="italic")
                continue
            numbers = buffer.tolist()
            starts = [left + place + 0.03 for place in range(len(numbers))]
            fills = [colors.get(number, SUM_COLOR) for number in numbers]
            cells = ax.barh(rank, 0.94, 0.84, starts, color=fills)
            texts = [f"{number:g}" if size > 4 else "" for number in numbers]
            ink = "black" if colors else "white"
            ax.bar_label(cells, texts, label_type="center", size=size, color=ink)
    start, end = (ranks + share * gap for share in (0.2, 0.8))
    middle = (ranks - 1) / 2
    ax.annotate("", (end, middle), (start, middle), arrowprops={"arrowstyle": "->"})
    ax.set(xlim=(0, ranks + gap + most), ylim=(ranks - 0.5, -0.5), xticks=[], frame_on=False)
    ax.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    ax.tick_params(length=0)
    ax.set_title(name, loc="left", size=11)
