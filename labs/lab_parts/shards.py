"""What labs 4 and 5 share: vectors of which each rank keeps a part, and how a reduce is judged."""

import torch
import torch.nn.functional as F

from lab_parts.judging import named, same
from lab_parts.running import Setting


def tensors(setting: Setting, kind: int) -> list[torch.Tensor]:
    """Return tensors of odd shapes, drawn anew for each kind; ranks do not divide their numbers."""
    width = 2 + setting.draw(5)[0]
    generator = torch.Generator().manual_seed(setting.seed + 97 * kind)
    shapes = [(3, width), (width,), (2, 2, width), (1,)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def padded(values: list[torch.Tensor], ranks: int) -> torch.Tensor:
    """Join tensors to one vector, with zeros until ranks can share it equally."""
    flat = torch.cat([value.flatten() for value in values])
    return F.pad(flat, (0, -len(flat) % ranks))


def gradients(setting: Setting, rank: int, micro: int) -> list[torch.Tensor | None]:
    """Return a rank's gradients of a micro-batch; of one parameter none on rank 1."""
    drawn = tensors(setting, 10 + 10 * micro + rank)
    return [None if rank == 1 and n == 1 else tensor for n, tensor in enumerate(drawn)]


def set_gradients(parameters: list[torch.Tensor], setting: Setting, micro: int) -> None:
    own = gradients(setting, setting.rank, micro)
    for parameter, gradient in zip(parameters, own, strict=True):
        parameter.grad = gradient


def kept(parameters: list[torch.Tensor], part: torch.Tensor | None) -> dict:
    """Return what is left after reduce: this rank's part, and how many whole gradients."""
    whole = sum(parameter.grad is not None for parameter in parameters)
    return {"part": None if part is None else part.tolist(), "whole": whole}


def judge_reduce(seen: list[list[dict]], setting: Setting, name: str) -> str | None:
    """Judge what each rank kept after each of two micro-batches; `name` is where its part goes."""
    ranks, means = setting.world_size, []
    zeros = [torch.zeros_like(tensor) for tensor in tensors(setting, 0)]
    for micro in (0, 1):
        of_ranks = (gradients(setting, rank, micro) for rank in range(ranks))
        filled = ([z if g is None else g for g, z in zip(own, zeros, strict=True)]
                  for own in of_ranks)  # fmt: skip
        means.append(sum(padded(own, ranks) for own in filled) / ranks)

    for rank, (first, second) in enumerate(seen):
        where = f"rank {rank}: "

        def part(vector: torch.Tensor, of: int = rank) -> list[float]:
            return vector.chunk(ranks)[of].tolist()

        if first["part"] is None:
            return f"{where}{name} is None after reduce: that is where this rank's part belongs"
        if len(first["part"]) == len(means[0]):
            return f"{where}the gradient of all ranks' parts is kept: 1/{ranks} of it is enough"
        mistakes = {
            f"{ranks} times too large: summed, not divided by the ranks": part(ranks * means[0]),
            f"{ranks} times too small: divided by the ranks twice": part(means[0] / ranks),
        }
        mistakes |= {f"the part of rank {of}": part(means[0], of) for of in range(ranks)}
        if not same(first["part"], part(means[0])):
            return where + named(first["part"], part(means[0]), mistakes)
        if first["whole"]:
            return f"{where}{first['whole']} whole gradients are kept: they are what is to be saved"
        mistakes = {
            "the second micro-batch's gradient alone: add it to the first": part(means[1]),
            "the first micro-batch's gradient alone: the second is lost": part(means[0]),
            "the sum is divided again with each micro-batch": part(means[0] / ranks + means[1]),
            "the whole sum is divided again": part((means[0] + means[1]) / ranks),
        }
        total = part(means[0] + means[1])
        if not same(second["part"], total):
            return where + named(second["part"], total, mistakes)
    return None
