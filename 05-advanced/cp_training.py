"""A step of training in which each rank reads a part of every sequence."""

import torch
import torch.distributed as dist
import torch.nn.functional as F


def set_attention(model, attend) -> None:
    """Put another function in the place of causal_attention, in all blocks."""
    for block in model.blocks:
        block.attention.attend = attend


def sharded_loss(model, batch, positions) -> torch.Tensor:
    """Return this rank's share of the mean loss: over all ranks the shares add up to it.

    Shapes: batch (tokens, targets), (B, T) each; `positions` (T/N,) of this rank's tokens.
    """
    tokens, targets = (x[:, positions] for x in batch)
    logits = model(tokens, positions)  # the rotation of q and k needs the true places
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total / batch[1].numel()  # of all ranks' tokens, not of this rank's


def sum_gradients(model, group=None) -> None:
    """Sum the weights' gradients: each rank's come from its own tokens only."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)
