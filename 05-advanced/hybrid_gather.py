"""Keys and values of a whole sequence on every rank that holds a part of it."""

import torch
import torch.distributed as dist


class GatherSequence(torch.autograd.Function):
    """All-gather the parts of a sequence; in backward each rank gets the sum for its own part."""

    @staticmethod
    def forward(ctx, part, group):
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]

        dist.all_gather(parts, part.contiguous(), group=group)

        return torch.cat(parts, dim=2)  # (B, heads, T / cp, head_dim) -> (B, heads, T, head_dim)

    @staticmethod
    def backward(ctx, gradient):
        ranks = dist.get_world_size(ctx.group)
        parts = [part.contiguous() for part in gradient.chunk(ranks, dim=2)]
        own = torch.empty_like(parts[0])

        dist.reduce_scatter(own, parts, group=ctx.group)

        return own, None
