"""Build DistributedDataParallel in four steps, each one equal to a single process.

    CPU   torchrun --standalone --nproc-per-node=2 01-ddp-basics/ddp_from_scratch.py
    GPU   torchrun --standalone --nproc-per-node=gpu 01-ddp-basics/ddp_from_scratch.py

Add `--link 100mbit` to see on a laptop what overlap is for. Look for: the same gradient and the
same bytes in every step, fewer collectives from the second on, and from the third on a step time
that approaches max(compute, communication) instead of their sum.

The functions work on any nn.Module: see `wrap` on the page for one of your own.
Source: Li et al., PyTorch Distributed (VLDB 2020), sections 3.2.1 to 3.2.3 for the first three.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from dist_common import cli, data, models, proofs, runtime
from dist_common.report import Report
from gradient_ways import check_each, loss_of, time_each
from slow_link import SlowLink

MIB = 2**20  # bytes


def start_equal(model):
    """Step 0. Before training: every rank takes rank 0's weights and buffers."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor, src=0)


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
    for parameter in trainable(model):
        gradient = gradient_or_zeros(parameter)

        all_reduce(gradient).wait()

        gradient /= dist.get_world_size()


def buckets_of(model, bucket_bytes):
    """Cut the parameters into groups of about bucket_bytes, the last layer's first.

    Backward computes gradients from the last layer to the first: so the first bucket is the first
    to be complete.
    """
    buckets = [[]]
    for parameter in reversed(trainable(model)):
        if sum(p.nbytes for p in buckets[-1]) >= bucket_bytes:
            buckets.append([])
        buckets[-1].append(parameter)
    return buckets


def pack(bucket):
    """Return the gradients of a bucket as one vector."""
    return torch.cat([gradient_or_zeros(parameter).flatten() for parameter in bucket])


def unpack(flat, bucket):
    """Copy the averaged gradients from their bucket back to where the optimizer looks for them."""
    parts = flat.split([parameter.numel() for parameter in bucket])
    for parameter, part in zip(bucket, parts, strict=True):
        parameter.grad.copy_(part.view_as(parameter) / dist.get_world_size())


def average_in_buckets(model, bucket_bytes, all_reduce):
    """Step 2. After backward: one all-reduce for each bucket of gradients."""
    for bucket in buckets_of(model, bucket_bytes):
        flat = pack(bucket)

        all_reduce(flat).wait()

        unpack(flat, bucket)


class Overlapped:
    """Step 3. During backward: start a bucket's all-reduce when its last gradient is there."""

    def __init__(self, model, bucket_bytes, all_reduce):
        self.all_reduce, self.pending = all_reduce, []
        self.buckets = buckets_of(model, bucket_bytes)
        self.missing = [len(bucket) for bucket in self.buckets]
        for index, bucket in enumerate(self.buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(lambda _, i=index: self.count(i))

    def count(self, index):
        """Note that one more gradient of a bucket is there; start what is complete, in order."""
        self.missing[index] -= 1
        # In order, whichever is complete first: all ranks must call their collectives alike.
        while len(self.pending) < len(self.buckets) and self.missing[len(self.pending)] == 0:
            self.start()

    def start(self):
        bucket = self.buckets[len(self.pending)]
        flat = pack(bucket)

        handle = self.all_reduce(flat)  # returns at once: backward goes on

        self.pending.append((handle, flat, bucket))

    def wait(self):
        """After backward: wait for the all-reduces, and put the means where they belong."""
        self.started_in_backward = len(self.pending)
        while len(self.pending) < len(self.buckets):  # those that wait for an unused parameter
            self.start()
        for handle, flat, bucket in self.pending:
            handle.wait()
            unpack(flat, bucket)
        self.pending.clear()
        self.missing = [len(bucket) for bucket in self.buckets]


def variants_of(build, bucket_bytes, link):
    """Return each way to a step's averaged gradient as name: (model, what follows backward).

    `build(rank)` draws other weights on each rank, as a script without a seed would.
    """
    plain, each, buckets, overlapped, ddp = (build(dist.get_rank()) for _ in range(5))
    for model in (plain, each, buckets, overlapped):
        start_equal(model)
    overlap = Overlapped(overlapped, bucket_bytes, link.all_reduce)
    ddp = DDP(ddp, bucket_cap_mb=bucket_bytes / MIB)
    if link.bytes_per_second:
        ddp.register_comm_hook(None, link.hook)
    return {
        "no communication": (plain, lambda: None),
        "1 each gradient": (each, lambda: average_each(each, link.all_reduce)),
        "2 buckets": (
            buckets, lambda: average_in_buckets(buckets, bucket_bytes, link.all_reduce)
        ),
        "3 buckets, overlapped": (overlapped, overlap.wait),
        "4 PyTorch's DDP": (ddp, lambda: None),
    }  # fmt: skip


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
        link = SlowLink(args.link)
        bucket_bytes = int(args.bucket_cap_mb * MIB)
        report.start(f"{config.num_parameters():,} weights")

        def build(rank):
            runtime.seed_everything(args.seed + rank)
            return models.Transformer(config).to(device)

        def batch_of(rank):
            return next(data.batches_of(text, 1, size, rank * size, size, device))

        alone = build(rank=0)  # one process: the mean over all ranks' micro-batches
        losses = (loss_of(alone, batch_of(r)) / world.world_size for r in range(world.world_size))
        expected = proofs.gradient_of_one_process(alone, losses)

        batch = batch_of(world.rank)
        variants = variants_of(build, bucket_bytes, link)
        rows = check_each(report, variants, batch, expected)
        time_each(report, variants, batch, link, expected.nbytes, rows)
        started = variants["3 buckets, overlapped"][1].__self__.started_in_backward
        name = "3 buckets, overlapped: all-reduces started during backward"
        buckets = len(buckets_of(alone, bucket_bytes))
        report.check(name, started, buckets, 0, "DDP paper, section 3.2.3")
        return report.finish("every step gives the gradient of one process")


if __name__ == "__main__":
    cli.run(main)
