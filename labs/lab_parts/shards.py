"""Vectors that the ranks shard, and the judge of a reduce-scatter, for labs 4 and 5."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from lab_parts.judging import named, same
from lab_parts.running import Setting


def tensors(setting: Setting, kind: int) -> list[torch.Tensor]:
    """Return random tensors, other ones for each kind.

    The ranks do not divide their numbers of elements.
    """
    width = 2 + setting.draw(5)[0]
    generator = torch.Generator().manual_seed(setting.seed + 97 * kind)
    shapes = [(3, width), (width,), (2, 2, width), (1,)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def padded(values: list[torch.Tensor], ranks: int) -> torch.Tensor:
    """Join tensors to one vector, with zeros until ranks can share it equally."""
    flat = torch.cat([value.flatten() for value in values])
    return F.pad(flat, (0, -len(flat) % ranks))


def gradients(setting: Setting, rank: int, micro: int) -> list[torch.Tensor | None]:
    """Return a rank's gradients of a micro-batch.

    Rank 1 lacks one of them in micro-batches 0 and 1, and all of them in 2.
    """
    drawn = tensors(setting, 10 + 10 * micro + rank)
    unused = range(len(drawn)) if micro == 2 else [1]
    return [
        None if rank == 1 and n in unused else tensor for n, tensor in enumerate(drawn)
    ]


def set_gradients(parameters: list[torch.Tensor], setting: Setting, micro: int) -> None:
    drawn = gradients(setting, setting.rank, micro)
    for parameter, gradient in zip(parameters, drawn, strict=True):
        parameter.grad = gradient


def kept(parameters: list[torch.Tensor], part: torch.Tensor | None) -> dict:
    """Return this rank's part after reduce, and the number of whole gradients."""
    whole = sum(parameter.grad is not None for parameter in parameters)
    return {"part": None if part is None else part.tolist(), "whole": whole}


def judge_reduce(
    ends: list[dict], rank: int, setting: Setting, name: str
) -> Iterator[str]:
    """Judge what a rank kept after each micro-batch. `name` is where it belongs."""
    ranks = setting.world_size
    means = [mean_gradient(setting, micro) for micro in range(len(ends))]
    if first := explain_first(ends[0]["part"], means[0], rank, ranks, name):
        yield first
    # Judge the sum over micro-batches also if all gradients have a wrong factor.
    for factor in (1, ranks, 1 / ranks):
        scaled = [factor * mean for mean in means]
        if same(ends[0]["part"], scaled[0].chunk(ranks)[rank].tolist()):
            if wrong := explain_later(ends, scaled, rank, ranks):
                yield wrong
            break
    if whole := max(end["whole"] for end in ends):
        yield f"{whole} whole gradients stay: drop them to save their memory"


def explain_later(ends, means, rank: int, ranks: int) -> str | None:
    """Explain a wrong part after the second micro-batch or later; else return None."""
    mistakes = {
        "the second micro-batch's gradient alone: add it to the first": means[1],
        "the first micro-batch's gradient alone: the second is lost": means[0],
        "the sum is divided again with each micro-batch": means[0] / ranks + means[1],
        "the whole sum is divided again": (means[0] + means[1]) / ranks,
    }
    unused = "a micro-batch is lost in which rank 1 used no parameter"
    for micro in range(1, len(ends)):
        expected = sum(means[: micro + 1]).chunk(ranks)[rank].tolist()
        if not same(ends[micro]["part"], expected):
            if micro == 2:
                mistakes = {unused: sum(means[:2])}
            parts = {w: m.chunk(ranks)[rank].tolist() for w, m in mistakes.items()}
            return named(ends[micro]["part"], expected, parts)
    return None


def mean_gradient(setting: Setting, micro: int) -> torch.Tensor:
    """Return the mean of all ranks' gradients as one vector."""
    zeros = [torch.zeros_like(tensor) for tensor in tensors(setting, 0)]
    total = 0
    for rank in range(setting.world_size):
        given = zip(gradients(setting, rank, micro), zeros, strict=True)
        filled = [zero if gradient is None else gradient for gradient, zero in given]
        total = total + padded(filled, setting.world_size)
    return total / setting.world_size


def explain_first(
    got: list[float] | None, mean: torch.Tensor, rank: int, ranks: int, name: str
) -> str | None:
    """Explain a wrong part after the first micro-batch; else return None."""

    def part(vector: torch.Tensor, of: int = rank) -> list[float]:
        return vector.chunk(ranks)[of].tolist()

    if got is None:
        return f"{name} is None after reduce: this rank's part belongs there"
    if len(got) == len(mean):
        return f"it keeps all ranks' parts of the gradient: keep 1/{ranks} of it"
    mistakes = {
        f"{ranks} times too large: summed, not divided by the ranks": part(
            ranks * mean
        ),
        f"{ranks} times too small: divided by the ranks twice": part(mean / ranks),
    }
    mistakes |= {f"the part of rank {of}": part(mean, of) for of in range(ranks)}
    return None if same(got, part(mean)) else named(got, part(mean), mistakes)
