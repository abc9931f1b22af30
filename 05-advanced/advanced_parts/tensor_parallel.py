"""What tensor_parallel.py compares: ways to join columns, and what a block sends and keeps."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from advanced_parts import tensor_job
from advanced_parts.kept_bytes import kept_for_backward
from legacy_common import models
from legacy_common.lab.figure import figure
from legacy_common.lab.traffic import TrafficCounter
from legacy_common.report import Report

TOLERANCE = 1e-5  # relative: float32 sums of a few hundred terms in another order
ROWS, WIDTH = 8, 16  # of the input; columns of the cut layer on each rank
same = nn.Identity()


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


def gradients_of(x, below, cut_layer, enter=same, join=same):
    """Return the gradients of W and A of the mean square of h + join(enter(h) W), h = x A."""
    h = F.linear(x, below)
    loss = (h + join(F.linear(enter(h), cut_layer))).square().mean()
    # Zeros where no path leads from the loss to a weight.
    return torch.autograd.grad(loss, (cut_layer, below), materialize_grads=True)


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
    x, below, whole = (
        (torch.randn(rows, width, device=report.device) / width**0.5).requires_grad_()
        for rows in (ROWS, width, width)
    )
    right, right_below = gradients_of(x, below, whole)
    right = (right.chunk(ranks)[rank], right_below)
    rows = []
    for name, (enter, join, wrong) in ways.items():
        own = whole.detach().chunk(ranks)[rank].requires_grad_()  # (width / n, width)
        found = gradients_of(x, below, own, enter, join)
        pairs = zip(found, right, strict=True)
        errors = torch.stack([(own - of_1).abs().max() / of_1.abs().max() for own, of_1 in pairs])
        dist.all_reduce(errors, op=dist.ReduceOp.MAX)  # the worst rank counts
        number = int((errors > TOLERANCE).sum())
        claim = f"{name}: weights with a wrong gradient"
        report.check(claim, number, wrong, 0, "which paths autograd can see")
        rows.append((name, f"{errors[0]:.1e}" if found[0].any() else "none", f"{errors[1]:.1e}"))
    report.say("relative error of the gradient, against one process:")
    report.table(rows, ("how the ranks' columns are joined", "cut layer", "layer below"))


def run_block(block: nn.Module, args, config, device, parts: int = 1) -> tuple[list, int]:
    """Return what forward and backward of a block send, and the bytes kept for backward.

    The input is random, of T / `parts` tokens. Kept is what autograd saves, each storage once,
    without the weights and the rotary tables.
    """
    positions = torch.arange(args.seq_len, device=device)
    tables = models.rotary_tables(positions, config.dim // config.num_heads, config.rope_theta)
    shape = (args.batch_size, args.seq_len // parts, config.dim)
    x = torch.randn(shape, device=device, requires_grad=True)
    with TrafficCounter() as counter:
        with kept_for_backward(block, tables) as kept:
            out = block(x, *tables)
        out.sum().backward()
    block.zero_grad()
    return counter.collectives, sum(kept.values())


def check_blocks(report: Report, blocks: dict[str, tuple[list, int]], args, config) -> None:
    """Print what a block sends and keeps each way; check both against the formulas."""
    ranks, tokens = report.world.world_size, args.batch_size * args.seq_len
    _, alone = blocks["one process"]
    rows = []
    for number, (name, (traffic, kept)) in enumerate(blocks.items()):
        rows.append([*tensor_job.row(name, traffic), f"{kept:,}", f"{kept / alone:.2f}"])
        report.metrics[f"bytes kept by a block, {name}"] = kept
        if number:
            expected = tensor_job.block(tokens, config.dim, sequence_parallel=number == 2)
            tensor_job.check_traffic(report, f"{name}, a block", traffic, expected)
    report.table(rows, ("a block", *tensor_job.HEADERS, "bytes kept", "of one process"))
    # What f gathers is one process's input of the matrices, so 1/n of it is counted already.
    whole = tokens * config.dim * tensor_job.FLOAT
    expected = round(alone / ranks + 2 * whole * (1 - 1 / ranks))
    # CUDA's kernels keep a few bytes more; of a single head, attention's output is not copied.
    copied = whole / ranks if config.num_heads == ranks else 0
    claim = f"{name}, a block: bytes kept for backward"
    source = "1/n of one process, and two inputs whole"
    report.check(claim, kept, expected, 0.01 * expected + copied, source)


def draw(path: Path, whole: nn.Module, own: nn.Module) -> None:
    """Draw a block's matrices as inputs x outputs, coloured by the rank that holds the part."""
    pairs = zip(whole.named_parameters(), own.parameters(), strict=True)
    cuts = [(name.split(".")[-2], w.shape, part.shape) for (name, w), part in pairs if w.dim() == 2]
    widths = [outputs for _, (outputs, _), _ in cuts]  # a layer's weight is (out, in)
    with figure(path, 1, len(cuts), figsize=(12, 3), width_ratios=widths) as panels:
        for panel, (name, (outputs, inputs), part) in zip(panels, cuts, strict=True):
            row, column = torch.arange(inputs) // part[1], torch.arange(outputs) // part[0]
            ranks = row[:, None] + column  # one of both is 0 everywhere: it is not cut
            panel.imshow(ranks, cmap="Set3", vmin=0, vmax=11)
            for rank in ranks.unique():
                y, x = (ranks == rank).nonzero().float().mean(dim=0).tolist()
                panel.text(x, y, str(rank.item()), ha="center", va="center")
            cut = "columns" if column.any() else "rows" if row.any() else "whole"
            panel.set(title=name, xlabel=f"{inputs} x {outputs}\n{cut}", xticks=[], yticks=[])
