"""Lab 3: fill the holes until `python labs/grade.py 3` says right everywhere."""

import torch
import torch.distributed as dist


def ring_reduce_scatter(parts, move):
    """Add up around a ring: at the end, part rank + 1 is the whole sum on this rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    following, previous = (rank + 1) % ranks, (rank - 1) % ranks
    raise NotImplementedError("hole reduce_scatter")


def ring_all_gather(parts, move):
    """Pass the whole sums around a ring, from part rank + 1 on, until all have all."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    following, previous = (rank + 1) % ranks, (rank - 1) % ranks
    raise NotImplementedError("hole all_gather")


def ring_all_reduce(x, move):
    """Add up around a ring, one part of x at a time; then pass the sums around."""
    parts = x.tensor_split(dist.get_world_size())  # views: (len(x) / ranks,) each
    ring_reduce_scatter(parts, move)
    ring_all_gather(parts, move)
