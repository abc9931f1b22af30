"""The claims that many lessons make, a call each: it measures, and adds a check to the report."""

from collections.abc import Iterable

import torch
from torch import nn

# Relative. fp32 sums in another order differ in the last bits; bfloat16 keeps 8 bits.
TOLERANCE = {"32-true": 1e-5, "bf16-mixed": 5e-2}


def tolerance_of(args) -> float:
    """Return the relative tolerance of a loss and a gradient in the run's precision."""
    return TOLERANCE[args.precision]


def gradient_of_one_process(model: nn.Module, losses: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return a plain model's gradient of the sum of `losses`, graph by graph, as one vector."""
    weights = [p for p in model.parameters() if p.requires_grad]
    total = [torch.zeros_like(weight) for weight in weights]
    for loss in losses:
        for sum_, part in zip(total, torch.autograd.grad(loss, weights), strict=True):
            sum_ += part
    return flat(total)


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return tensors as one vector."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])
