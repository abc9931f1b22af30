"""Lab 3: fill the holes until `python labs/grade.py 3` says right everywhere."""

import torch
import torch.distributed as dist


def ring_reduce_scatter(parts, move):
    """Add up around a ring, in each step a part: part rank + 1 is whole on this rank at the end."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    following, previous = (rank + 1) % ranks, (rank - 1) % ranks
    raise NotImplementedError("hole reduce_scatter")


def ring_all_gather(parts, move):
    """Pass whole parts on around a ring, from part rank + 1: all are whole on all ranks then."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    following, previous = (rank + 1) % ranks, (rank - 1) % ranks
    raise NotImplementedError("hole all_gather")


def ring_all_reduce(x, move):
    """Add up around a ring, a part of x at a time, then pass the sums around once more."""
    parts = x.tensor_split(dist.get_world_size())  # views: (len(x) / ranks,) each
    ring_reduce_scatter(parts, move)
    ring_all_gather(parts, move)
