"""A sampler that deals one shuffled order to all ranks. Lab 1 cuts its holes from it.

PyTorch's DistributedSampler deals the same way, but it cannot resume inside an epoch.
"""

import torch
from torch.utils.data import Sampler

from dist_common.cli import UsageError


class ShardedSampler(Sampler):
    """Deal one seeded shuffle to all ranks; resume inside an epoch.

    Rank r gets every world_size-th index of the remaining order, so a global batch has
    the same samples on any number of ranks. `position` is the number of samples of this
    epoch on which all ranks together have trained. The last samples, too few for all
    ranks, are left out.
    """

    def __init__(self, num_samples, rank, world_size, seed=0):
        """Raises: UsageError for fewer samples than ranks."""
        if num_samples < world_size:
            raise UsageError(
                f"{num_samples} samples for {world_size} ranks: start fewer ranks"
            )
        self.num_samples = num_samples
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.epoch = 0
        self.position = 0

    def set_epoch(self, epoch):
        """Go to the start of an epoch. The current epoch keeps its position."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.position = 0

    def global_order(self):
        """Return this epoch's order of all samples, the same on every rank. (N,)"""
        # lab: hole epoch
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(self.num_samples, generator=generator)
        # lab: end

    def __len__(self):
        """Return how many of the remaining samples each rank gets."""
        return (self.num_samples - self.position) // self.world_size

    def __iter__(self):
        """Yield this rank's samples, from `position` on."""
        # lab: hole sampler
        rest = self.global_order()[self.position :]
        return iter(rest[self.rank :: self.world_size][: len(self)].tolist())
        # lab: end
