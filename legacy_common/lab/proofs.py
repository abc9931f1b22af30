"""The claims that many lessons make, a call each: it measures, and adds a check to the report."""

import hashlib
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from legacy_common.lab.traffic import TrafficCounter
from legacy_common.models import local
from legacy_common.report import Report
from legacy_common.runtime import gather

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


def same_gradient(
    report: Report, model: nn.Module, expected: torch.Tensor, tolerance: float,
    name: str = "gradient: relative error against one process", source: str = "one process",
) -> None:  # fmt: skip
    """Check every rank's `.grad` against a vector; the error is relative to the largest number."""
    own = flat(local(p.grad) for p in model.parameters() if p.requires_grad)
    error = (own - expected).abs().max() / expected.abs().max()
    dist.all_reduce(error, op=dist.ReduceOp.MAX)  # the worst rank counts
    report.check(name, error.item(), 0, tolerance, source)


def same_losses(
    report: Report, losses: torch.Tensor, expected: torch.Tensor, tolerance: float,
    name: str = "largest error of a loss", source: str = "one process",
) -> None:  # fmt: skip
    """Check the losses of some steps against those of a reference. Shapes: (steps,) both."""
    report.check(name, (losses - expected).abs().max().item(), 0, tolerance, source)


def same_weights(report: Report, model: nn.Module) -> None:
    """Check that all ranks hold the same weights, bit by bit, by a fingerprint."""
    digest = hashlib.sha256()
    for weight in model.parameters():
        digest.update(weight.detach().cpu().flatten().view(torch.uint8).numpy())
    fingerprints = len(set(gather(digest.hexdigest())))
    report.check("distinct sets of weights over all ranks", fingerprints, 1, 0, "equal replicas")


def one_gradient_sent(
    report: Report, model: nn.Module, counter: TrafficCounter, other: int = 0,
    name: str = "bytes all-reduced per step", share: float = 1.0,
) -> None:  # fmt: skip
    """Check that a step all-reduced each gradient once, a `share` of its bytes, and `other`."""
    gradient = int(share * sum(p.nbytes for p in model.parameters() if p.requires_grad))
    source = "one gradient per weight" + " and what the loop sums" * bool(other)
    report.check(name, counter.nbytes["all_reduce"], gradient + other, 0, source)
