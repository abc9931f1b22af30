"""Predict a step of communication_overlap.py from the sizes of a model and the speed of a link."""

import math
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from dist_common.measure import RING_FACTOR
from link_group import LateGroup


@dataclass
class Job:
    """What all ways share: the sizes of a plain model's parts, and the link between the ranks."""

    model: nn.Module
    group: dist.ProcessGroup
    rate: float  # bytes/s; 0 where it is not known
    bucket_bytes: float
    arrived: list[nn.Parameter]  # parameters, in the order in which backward completes gradients
    forward_ms: float = 0.0  # of a block, without communication
    backward_ms: float = 0.0
    rest_ms: float = 0.0  # of the step: embedding, head, loss

    @property
    def ranks(self) -> int:
        return dist.get_world_size()

    def units(self) -> list[int]:
        """Return the bytes that fully_shard gathers: the rest of the model's, then each block's.

        It cuts each weight by rows, and fills up to a multiple of the ranks.
        """

        def filled(weights):
            rows = ((math.ceil(w.shape[0] / self.ranks) * self.ranks, w) for w in weights)
            return sum(count * w[0].numel() * w.element_size() for count, w in rows)

        blocks = [filled(block.parameters()) for block in self.model.blocks]
        return [filled(self.model.parameters()) - sum(blocks), *blocks]

    def buckets(self) -> list[list[nn.Parameter]]:
        """Return what DDP all-reduces together: gradients as they arrive, in buckets."""
        buckets = [[]]
        for parameter in self.arrived:
            if sum(p.nbytes for p in buckets[-1]) >= self.bucket_bytes:
                buckets.append([])
            buckets[-1].append(parameter)
        return buckets

    def ms(self, kind: str, tensor_bytes: int, rate: float | None = None) -> float:
        """Return how long the link takes for a collective of a whole tensor, in ms."""
        if kind == "reduce_scatter" and not isinstance(self.group, LateGroup):
            kind = "all_reduce"  # gloo sends as much for both
        return RING_FACTOR[kind](self.ranks) * tensor_bytes / (rate or self.rate) * 1e3


def computing_ms(job: Job) -> float:
    """Return how long a step computes, in ms."""
    return len(job.model.blocks) * (job.forward_ms + job.backward_ms) + job.rest_ms


def sending_ms(job: Job, name: str) -> float:
    """Return how long the link sends in a step of this way, in ms."""
    if "FSDP" not in name:
        return job.ms("all_reduce", sum(p.nbytes for p in job.arrived))
    rest, *blocks = job.units()
    gathered, reduced = rest + 2 * sum(blocks), rest + sum(blocks)
    return job.ms("all_gather", gathered) + job.ms("reduce_scatter", reduced)


def predicted_ms(job: Job, name: str) -> float:
    """Return how long a step takes, in ms, if the link sends one collective at a time."""
    if name[0] in "14":
        return computing_ms(job) + sending_ms(job, name)
    if name[0] == "5":
        return prefetched_ms(job)
    groups = job.buckets() if name[0] == "3" else [[p] for p in job.arrived]
    number = {p: n for n, block in enumerate(job.model.blocks) for p in block.parameters()}
    blocks = len(job.model.blocks)
    backward_at = blocks * job.forward_ms + job.rest_ms
    done = 0.0
    for group in groups:
        # A block's gradients are there when its backward has ended; the embedding's at the end.
        place = number.get(group[-1], 0 if group[-1] is job.arrived[-1] else blocks)
        ready = backward_at + (blocks - place) * job.backward_ms
        done = max(ready, done) + job.ms("all_reduce", sum(p.nbytes for p in group))
    return max(done, computing_ms(job))


def prefetched_ms(job: Job) -> float:
    """Return how long way 5 takes, in ms: `now` is the clock of computing, `free` the link's."""
    rest, *blocks = job.units()
    now = job.ms("all_gather", rest)
    free = now

    def pass_over(sizes, computing, reduces):
        nonlocal now, free
        free = max(now, free) + job.ms("all_gather", sizes[0])
        for place, size in enumerate(sizes):
            now = max(now, free)
            if place + 1 < len(sizes):
                free = now + job.ms("all_gather", sizes[place + 1])
            now += computing
            if reduces:  # FSDP on a CPU waits for a reduce-scatter
                now = free = max(now, free) + job.ms("reduce_scatter", size)

    pass_over(blocks, job.forward_ms, reduces=False)
    now += job.rest_ms
    pass_over(blocks[::-1], job.backward_ms, reduces=True)
    return max(now, free) + job.ms("reduce_scatter", rest)
