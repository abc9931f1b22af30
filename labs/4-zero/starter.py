"""Lab 4: fill the holes until `python labs/grade.py 4` says right everywhere."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils import vector_to_parameters

MIB = 2**20  # bytes
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def flatten(tensors):
    """Return tensors as one vector, padded with zeros so that N ranks can share it."""
    vector = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return F.pad(vector, (0, -len(vector) % dist.get_world_size()))


def part_of(vector):
    """Return this rank's part of a vector. Shapes: (n,) -> (n / N,)."""
    return vector.chunk(dist.get_world_size())[dist.get_rank()]


def group_parameters(parameters, bucket_bytes):
    """Group parameters, the last layer's first, into at least bucket_bytes each."""
    groups = []
    for parameter in reversed(parameters):
        if not groups or sum(p.nbytes for p in groups[-1]) >= bucket_bytes:
            groups.append([])
        groups[-1].append(parameter)
    return groups


class Bucket:
    """Parameters in one flat vector; each rank updates its own part of the vector."""

    def __init__(self, parameters, dtype, reduce_dtype):
        self.parameters = parameters
        self.reduce_dtype = reduce_dtype
        original = flatten(parameters)

        self.part = part_of(original)  # all that the optimizer gets

        self.flat = original.to(dtype)
        if dtype != original.dtype:
            self.part = self.part.clone()  # master weights: lets `original` be freed
        vector_to_parameters(self.flat, parameters)  # they are views of it now
        self.gradient = None

    def reduce(self):
        """Sum the gradients over ranks; keep the mean of this rank's part only."""
        raise NotImplementedError("hole reduce")

    def gather(self):
        """Give every rank the parts that the other ranks have updated."""
        raise NotImplementedError("hole gather")


class Zero:
    """ZeRO stage 1 or 2. Call `step` after a step's backward passes.

    Weights and gradients are in `dtype`. Gradients are summed over ranks in
    `reduce_dtype` (default: `dtype`). The optimizer updates float32 weights.
    """

    def __init__(
        self,
        parameters,
        make_optimizer,
        stage,
        dtype,
        reduce_dtype=None,
        bucket_bytes=MIB // 2,
    ):
        self.stage = stage
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        self.buckets = [
            Bucket(group, dtype, reduce_dtype or dtype)
            for group in group_parameters(trained, bucket_bytes)
        ]
        raise NotImplementedError("hole optimizer")
        self.queue = []  # buckets that this backward has not yet reduced
        if stage == 2:
            for bucket in self.buckets:
                for parameter in bucket.parameters:
                    hook = partial(self.reduce_ready, bucket)
                    parameter.register_post_accumulate_grad_hook(hook)

    def reduce_ready(self, bucket, parameter):
        """Stage 2: a gradient is complete. Reduce the complete buckets, in order."""
        if not self.queue:  # backward has just begun
            self.queue = list(self.buckets)
            for waiting in self.queue:
                waiting.missing = set(waiting.parameters)
            # DDP and FSDP use it too: no public hook runs at the end of backward.
            torch.autograd.Variable._execution_engine.queue_callback(self.reduce_rest)
        bucket.missing.remove(parameter)
        while self.queue and not self.queue[0].missing:
            self.queue.pop(0).reduce()

    def reduce_rest(self):
        """Reduce the buckets with a parameter that this rank's loss did not use."""
        for bucket in self.queue:
            bucket.reduce()
        self.queue = []

    def step(self, max_grad_norm=None):
        """Update this rank's part, then share it; return the norm if it clips."""
        raise NotImplementedError("hole step")

    def clip(self, max_grad_norm):
        """Scale the gradient to a norm of at most max_grad_norm; return its norm."""
        raise NotImplementedError("hole clip")
