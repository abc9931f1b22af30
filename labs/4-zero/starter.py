"""Lab 4: fill the holes until `python labs/grade.py 4` says right everywhere."""

from functools import partial

import torch
import torch.distributed as dist

from deepspeed_parts.zero_from_scratch import buckets_of, flatten, part_of, views_of
from legacy_common.runtime import all_gather_single, reduce_scatter_single

MIB = 2**20  # bytes


class Bucket:
    """Parameters that are reduced together: one flat vector, of which each rank updates a part."""

    def __init__(self, parameters, dtype, reduce_dtype):
        self.parameters = parameters
        self.reduce_dtype = reduce_dtype
        original = flatten(parameters)  # and zeros, so that all parts are equally long

        self.part = part_of(original)  # The optimizer gets this only: moments for 1/N of it.

        self.flat = original.to(dtype)
        if dtype != original.dtype:
            self.part = self.part.clone()  # float32 weights: without it all would stay in memory
        for parameter, view in zip(parameters, views_of(self.flat, parameters), strict=True):
            parameter.data = view
        self.gradient = None

    def reduce(self):
        """Add up all ranks' gradients, each rank its own part, and drop the whole ones."""
        raise NotImplementedError("hole reduce")

    def gather(self):
        """Give every rank the parts that the others have updated."""
        raise NotImplementedError("hole gather")


class Zero:
    """ZeRO stage 1 or 2: call `step()` after a step's backward passes, instead of the optimizer's.

    Weights and gradients are in `dtype`; gradients are summed over ranks, in stage 2 over micro-
    batches too, in `reduce_dtype` (default: `dtype`). What the optimizer updates stays as built.
    """

    def __init__(
        self, parameters, make_optimizer, stage, dtype, reduce_dtype=None, bucket_bytes=25 * MIB
    ):
        self.stage = stage
        parameters = list(dict.fromkeys(parameters))  # one that two layers share comes once
        for parameter in parameters:
            if not parameter.requires_grad and parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        self.buckets = [
            Bucket(bucket, dtype, reduce_dtype or dtype)
            for bucket in buckets_of(trained, bucket_bytes)
        ]
        raise NotImplementedError("hole optimizer")
        self.queue = []  # the buckets that this backward has not yet reduced
        if stage == 2:
            for bucket in self.buckets:
                for parameter in bucket.parameters:
                    parameter.register_post_accumulate_grad_hook(partial(self.note, bucket))

    def note(self, bucket, parameter):
        """Stage 2: a gradient is there. Reduce the buckets that are complete, in order."""
        if not self.queue:  # backward has just begun
            self.queue = list(self.buckets)
            for waiting in self.queue:
                waiting.missing = set(waiting.parameters)
            torch.autograd.Variable._execution_engine.queue_callback(self.reduce_rest)
        bucket.missing.remove(parameter)
        while self.queue and not self.queue[0].missing:
            self.queue.pop(0).reduce()

    def reduce_rest(self):
        """At the end of backward: buckets with a parameter that this rank's loss did not use."""
        while self.queue:
            self.queue.pop(0).reduce()

    def step(self, max_grad_norm=None):
        """Update this rank's part, then share it. Stage 1 has whole gradients until here."""
        raise NotImplementedError("hole step")

    def clip(self, max_grad_norm):
        """Scale gradients to a norm of at most max_grad_norm; return the whole gradient's norm."""
        raise NotImplementedError("hole clip")
