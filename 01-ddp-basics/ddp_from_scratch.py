"""Build DistributedDataParallel in four steps, each one equal to a single process.

    CPU   torchrun --standalone --nproc-per-node=2 01-ddp-basics/ddp_from_scratch.py
    GPU   torchrun --standalone --nproc-per-node=gpu 01-ddp-basics/ddp_from_scratch.py

Add `--link 100mbit` to see on a laptop what overlap is for. Look for: the same gradient and the
same bytes in every step, fewer collectives from the second on, and from the third on a step time
that approaches max(compute, communication) instead of their sum.

`wrap` does it to any nn.Module: the page shows how, in a script of your own.
Source: Li et al., PyTorch Distributed (VLDB 2020), sections 3.2.1 to 3.2.3 for the first three.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_parts import ddp_from_scratch as part
from dist_common.links import slow_group
from legacy_common import cli, data, models, runtime
from legacy_common.lab import proofs
from legacy_common.report import Report

MIB = 2**20  # bytes


def start_equal(model):
    """Step 0. Before training: every rank takes rank 0's weights and buffers."""
    # lab: hole start
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor, src=0)
    # lab: end


def trainable(model):
    """Return the parameters that get a gradient; one that two layers share comes once."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def gradient_or_zeros(parameter):
    """Return the gradient; zeros on a rank whose loss did not use this parameter."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def average_each(model, all_reduce):
    """Step 1. After backward: one all-reduce for each parameter."""
    # lab: hole mean
    for parameter in trainable(model):
        gradient = gradient_or_zeros(parameter)

        all_reduce(gradient).wait()

        gradient /= dist.get_world_size()
    # lab: end


def buckets_of(model, bucket_bytes):
    """Cut the parameters into groups of at least bucket_bytes, the last layer's first.

    Backward computes gradients from the last layer to the first: so the first bucket is the first
    to be complete.
    """
    # lab: hole buckets
    buckets = []
    for parameter in reversed(trainable(model)):
        if not buckets or sum(p.nbytes for p in buckets[-1]) >= bucket_bytes:
            buckets.append([])
        buckets[-1].append(parameter)
    return buckets
    # lab: end


def pack(bucket):
    """Return the gradients of a bucket as one vector."""
    # lab: hole pack
    return torch.cat([gradient_or_zeros(parameter).flatten() for parameter in bucket])
    # lab: end


def unpack(flat, bucket):
    """Copy the averaged gradients from their bucket back to where the optimizer looks for them."""
    # lab: hole pack
    sums = flat.split([parameter.numel() for parameter in bucket])
    for parameter, total in zip(bucket, sums, strict=True):
        parameter.grad.copy_(total.view_as(parameter) / dist.get_world_size())
    # lab: end


def average_in_buckets(model, bucket_bytes, all_reduce):
    """Step 2. After backward: one all-reduce for each bucket of gradients."""
    for bucket in buckets_of(model, bucket_bytes):
        flat = pack(bucket)

        all_reduce(flat).wait()

        unpack(flat, bucket)


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
        # lab: hole hook
        self.missing[index].remove(parameter)
        # In order, whichever is complete first: all ranks must call their collectives alike.
        while len(self.started) < len(self.buckets) and not self.missing[len(self.started)]:
            self.start()
        # lab: end

    def start(self):
        bucket = self.buckets[len(self.started)]
        flat = pack(bucket)

        handle = self.all_reduce(flat)  # returns at once: backward continues meanwhile

        self.started.append((handle, flat, bucket))

    def wait(self):
        """After backward: wait for the all-reduces, and put the means where they belong."""
        # lab: hole wait
        while len(self.started) < len(self.buckets):  # these hold a parameter without a gradient
            self.start()
        for handle, flat, bucket in self.started:
            handle.wait()
            unpack(flat, bucket)
        # lab: end
        self.last_step = self.started  # kept until the next backward: see the page
        self.reset()


def start_sum(tensor, group=None):
    """Start an all-reduce and return at once; `wait()` on what it returns, then use the sum."""
    return dist.all_reduce(tensor, group=group, async_op=True)


def wrap(model, bucket_bytes=25 * MIB, all_reduce=start_sum):
    """Do to any model what DDP(model) does; call `wait()` of the result after each backward."""
    start_equal(model)
    return Overlapped(model, bucket_bytes, all_reduce)


def ways_of(build, bucket_bytes, group):
    """Return each way to a step's averaged gradient as name: (model, what to call after backward).

    `build(rank)` draws other weights on each rank, as a script without a seed would. Returns the
    Overlapped object too.
    """
    plain, each, buckets, overlapped, ddp = (build(dist.get_rank()) for _ in range(5))
    for model in (plain, each, buckets):
        start_equal(model)
    all_reduce = partial(start_sum, group=group)
    overlap = wrap(overlapped, bucket_bytes, all_reduce)
    ddp = DDP(ddp, process_group=group, bucket_cap_mb=bucket_bytes / MIB)
    ways = {
        "no communication": (plain, lambda: None),
        "1 each gradient": (each, lambda: average_each(each, all_reduce)),
        "2 buckets": (buckets, lambda: average_in_buckets(buckets, bucket_bytes, all_reduce)),
        "3 buckets, overlapped": (overlapped, overlap.wait),
        "4 PyTorch's DDP": (ddp, lambda: None),
    }
    return ways, overlap


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    add("--micro-batch-size", type=cli.positive_int, default=16, help="per rank and step (16)")
    add("--seq-len", type=cli.positive_int, default=128, help="tokens per sequence (128)")
    add("--bucket-cap-mb", type=cli.positive_float, default=0.5, help="MiB per bucket (0.5)")
    add("--link", type=cli.link_rate, default=0, help="emulate a link: 100mbit, 1gbit (none)")
    add("--max-steps", type=cli.positive_int, default=6, help="timed steps of each way (6)")
    return parser.parse_args()


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("01-ddp-basics/ddp_from_scratch.py", args, world, device)
        config = models.preset("tiny", args.seq_len)
        size = args.micro_batch_size
        text = data.Sequences(data.load_text(), args.seq_len, size * world.world_size)
        group, link = slow_group(args.link)
        bucket_bytes = int(args.bucket_cap_mb * MIB)
        report.start(f"{config.num_parameters():,} weights; {link}")

        def build(rank):
            runtime.seed_everything(args.seed + rank)
            return models.Transformer(config).to(device)

        def batch_of(rank):
            return next(data.batches_of(text, 1, size, rank * size, size, device))

        alone = build(rank=0)  # one process: the mean over all ranks' micro-batches
        losses = (
            part.loss_of(alone, batch_of(r)) / world.world_size for r in range(world.world_size)
        )
        expected = proofs.gradient_of_one_process(alone, losses)

        batch = batch_of(world.rank)
        ways, overlap = ways_of(build, bucket_bytes, group)
        rows = part.check_each(report, ways, batch, expected)
        rate = 0 if group is dist.group.WORLD else args.link
        part.time_each(report, ways, batch, rate, expected.nbytes, rows)
        name = "3 buckets, overlapped"
        part.check_overlap(report, name, ways[name], overlap, batch)
        return report.finish("every step gives the gradient of one process")


if __name__ == "__main__":
    cli.run(main)
