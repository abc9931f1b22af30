"""Hold ways to join the columns of a cut layer against one process: the gradients of two layers."""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dist_common.report import Report

TOLERANCE = 1e-5  # relative: float32 sums of a few hundred terms in another order
ROWS, WIDTH = 8, 16  # of the input; columns of the cut layer on each rank


def same(x):
    return x


def join_plain(part):
    """Join the ranks' columns. The values are right; autograd sees no path through them."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part)
    return torch.cat(parts, dim=-1)


def join_own(part):
    """Join the ranks' columns and put the own ones back, with the path that leads to them."""
    parts = list(join_plain(part).chunk(dist.get_world_size(), dim=-1))
    parts[dist.get_rank()] = part
    return torch.cat(parts, dim=-1)


def loss_of(x, below, cut_layer, enter=same, join=same):
    """Return the mean square of h + join(h W), h = x A: a layer, then a residual layer."""
    h = F.linear(x, below)
    return (h + join(F.linear(enter(h), cut_layer))).square().mean()


def check_ways(report: Report, f: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Check how many of two weights get a wrong gradient, without `f` and with it."""
    ranks, rank = report.world.world_size, report.world.rank
    # Without a path through the collective the cut layer has no gradient, and the layer below only
    # the residual's. With this rank's path, the other ranks' part is missing below. f adds it.
    ways = {
        "plain all_gather": (same, join_plain, 2),
        "own columns put back": (same, join_own, int(ranks > 1)),
        "own columns put back, and f": (f, join_own, 0),
    }
    width = WIDTH * ranks
    torch.manual_seed(1)
    x, below, whole = (torch.randn(rows, width, device=report.device) / width**0.5
                       for rows in (ROWS, width, width))  # fmt: skip
    below, whole = nn.Parameter(below), nn.Parameter(whole)
    right = torch.autograd.grad(loss_of(x, below, whole), (whole, below))
    right = (right[0].chunk(ranks)[rank], right[1])
    rows = []
    for name, (enter, join, wrong) in ways.items():
        own = nn.Parameter(whole.detach().chunk(ranks)[rank].clone())  # (width / n, width)
        loss = loss_of(x, below, own, enter, join)
        found = torch.autograd.grad(loss, (own, below), allow_unused=True)
        errors = [relative_error(*pair) for pair in zip(found, right, strict=True)]
        number = sum(error > TOLERANCE for error in errors)
        claim = f"{name}: weights with a wrong gradient"
        report.check(claim, number, wrong, 0, "which paths autograd can see")
        missing = "none" if found[0] is None else f"{errors[0]:.1e}"
        rows.append((name, missing, f"{errors[1]:.1e}"))
        report.metrics[f"gradient error below, {name}"] = errors[1]
    headers = ("how the ranks' columns are joined", "cut layer", "layer below")
    report.say("relative error of the gradient, against one process:")
    report.table(rows, headers)


def relative_error(found: torch.Tensor | None, right: torch.Tensor) -> float:
    """Return the largest error on any rank, relative to the largest number; 1 if there is none."""
    found = torch.zeros_like(right) if found is None else found
    error = (found - right).abs().max() / right.abs().max()
    dist.all_reduce(error, op=dist.ReduceOp.MAX)
    return error.item()
