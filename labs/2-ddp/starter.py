"""Lab 2: fill the holes until `python labs/grade.py 2` says right everywhere."""

import torch
import torch.distributed as dist

MIB = 2**20  # bytes


def start_equal(model):
    """Step 0. Before training: every rank takes rank 0's weights and buffers."""
    raise NotImplementedError("hole start")


def trainable(model):
    """Return the parameters that get a gradient; one that two layers share comes once."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def gradient_or_zeros(parameter):
    """Return the gradient; zeros on a rank whose loss did not use this parameter."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def buckets_of(model, bucket_bytes):
    """Cut the parameters into groups of at least bucket_bytes, the last layer's first.

    Backward computes gradients from the last layer to the first: so the first bucket is the first
    to be complete.
    """
    raise NotImplementedError("hole buckets")


def pack(bucket):
    """Return the gradients of a bucket as one vector."""
    raise NotImplementedError("hole pack")


def unpack(flat, bucket):
    """Copy the averaged gradients from their bucket back to where the optimizer looks for them."""
    raise NotImplementedError("hole pack")


class Overlapped:
    """Step 3. During backward: start a bucket's all-reduce when its last gradient is there."""

    def __init__(self, model, bucket_bytes, all_reduce):
        self.all_reduce = all_reduce
        self.buckets = buckets_of(model, bucket_bytes)
        self.reset()
        for index, bucket in enumerate(self.buckets):
            for parameter in bucket:
                # Called in each backward, once the parameter's gradient is complete.
                parameter.register_post_accumulate_grad_hook(lambda p, i=index: self.note(p, i))

    def reset(self):
        self.missing = [set(bucket) for bucket in self.buckets]
        self.started = []

    def note(self, parameter, index):
        """Note that a gradient is there; start the buckets that are complete, in order."""
        if parameter not in self.missing[index]:
            raise RuntimeError("a second backward: call wait() after each one")
        self.last_step = []
        raise NotImplementedError("hole hook")

    def start(self):
        bucket = self.buckets[len(self.started)]
        flat = pack(bucket)

        handle = self.all_reduce(flat)  # returns at once: backward continues meanwhile

        self.started.append((handle, flat, bucket))

    def wait(self):
        """After backward: wait for the all-reduces, and put the means where they belong."""
        raise NotImplementedError("hole wait")
        self.last_step = self.started  # kept until the next backward: see the page
        self.reset()


def start_sum(tensor, group=None):
    """Start an all-reduce and return at once; `wait()` on what it returns, then use the sum."""
    return dist.all_reduce(tensor, group=group, async_op=True)


def wrap(model, bucket_bytes=25 * MIB, all_reduce=start_sum):
    """Do to any model what DDP(model) does; call `wait()` of the result after each backward."""
    start_equal(model)
    return Overlapped(model, bucket_bytes, all_reduce)
