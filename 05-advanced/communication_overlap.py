"""Hide communication behind computation: one step in five ways, on a link whose speed you set.

    CPU   torchrun --standalone --nproc-per-node=2 05-advanced/communication_overlap.py
    GPU   torchrun --standalone --nproc-per-node=gpu 05-advanced/communication_overlap.py

Look for: the same gradient in all ways; what is handed over before it is needed; a step that takes
the larger of computing and sending where they overlap, and their sum where they do not. Add
--output-dir for the timelines. On a CPU each block waits --layer-ms, in the place of a GPU's work.

Sources: Li et al., PyTorch Distributed (VLDB 2020), section 3.2.3; Zhao et al., PyTorch FSDP (VLDB
2023), section 3.3; docs.pytorch.org, fully_shard.
"""

import functools
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from advanced_parts import communication_overlap as part
from dist_common.links import slow_group
from legacy_common import cli, data, models, runtime
from legacy_common.lab import proofs
from legacy_common.report import Report

MIB = 2**20  # bytes


def loss_of(model, batch):
    """Return the mean cross-entropy. Shapes: batch is inputs and targets, (B, T) each."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def forward_and_backward(model, batch):
    """Return the loss of a batch, and leave its gradients in the model."""
    loss = loss_of(model, batch)
    loss.backward()
    return loss.detach()


def no_overlap(model, group):
    """Way 1. Compute all gradients; then send all of them, while nothing computes."""

    def step(batch):
        loss = forward_and_backward(model, batch)
        gradients = [parameter.grad for parameter in model.parameters()]
        flat = proofs.flat(gradients)

        dist.all_reduce(flat, group=group)

        flat /= dist.get_world_size()
        means = flat.split([gradient.numel() for gradient in gradients])
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.copy_(mean.view_as(gradient))
        return loss

    return step


def start_early_wait_late(model, group):
    """Way 2. Start each gradient's sum when the gradient is there; wait when backward has ended."""
    started = []

    def start(parameter):
        work = dist.all_reduce(parameter.grad, group=group, async_op=True)  # returns at once

        started.append((work, parameter.grad))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(start)

    def step(batch):
        loss = forward_and_backward(model, batch)
        for work, gradient in started:
            work.wait()  # until here nobody may read the gradient

            gradient /= dist.get_world_size()
        started.clear()
        return loss

    return step


def in_buckets(model, group, bucket_mb):
    """Way 3. DDP: the same with fewer, larger sums."""
    model = DDP(model, process_group=group, bucket_cap_mb=bucket_mb)
    return lambda batch: forward_and_backward(model, batch)


def sharded(model, group, prefetch):
    """Ways 4 and 5. FSDP2: gather a block's weights when they are needed, or one block earlier."""
    device = model.head.weight.device.type
    mesh = DeviceMesh.from_group(group, device, mesh_dim_names=("dp",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # Gathers are asynchronous operations that FSDP waits for where the weights are used. Without
    # this line a CPU waits where the gather begins, and a GPU prefetches by itself.
    model._set_unshard_async_op(True)

    forward = [model, *model.blocks]
    backward = [model, *reversed(model.blocks)]
    for unit, following in pairwise(forward):
        unit.set_modules_to_forward_prefetch([following] if prefetch else [])
    for unit, following in pairwise(backward):
        # The unit itself is gathered already: naming it switches FSDP's own choice off.
        unit.set_modules_to_backward_prefetch([following] if prefetch else [unit])
    return lambda batch: forward_and_backward(model, batch)


def read_before_wait(group, device):
    """Return a sum as it reads before and after `wait()`; the last rank starts it late."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    store = dist.group.WORLD.get_group_store()
    tensor = torch.tensor([rank + 1.0], device=device)
    if rank == last:
        store.wait([f"read by {other}" for other in range(last)])
    work = dist.all_reduce(tensor, group=group, async_op=True)

    early = tensor.item()  # the mistake: no error, no warning, a wrong number

    store.set(f"read by {rank}", "")
    work.wait()
    return early, tensor.item()


def ways_of(build, group, bucket_mb):
    """Return each way as name: (its model, a function that takes forward, backward and sums)."""
    ways = {
        "1 no overlap": no_overlap,
        "2 start early": start_early_wait_late,
        "3 DDP buckets": functools.partial(in_buckets, bucket_mb=bucket_mb),
        "4 FSDP": functools.partial(sharded, prefetch=False),
        "5 FSDP, prefetch": functools.partial(sharded, prefetch=True),
    }
    built = ((name, build(), way) for name, way in ways.items())
    return {name: (model, way(model, group)) for name, model, way in built}


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    add("--link", type=cli.link_rate, help="emulate a link on a CPU: 100mbit, 1gbit (100mbit)")
    add("--layer-ms", type=cli.positive_float, metavar="MS",
        help="on a CPU a block's forward waits so long, its backward twice (40)")  # fmt: skip
    add("--bucket-cap-mb", type=cli.positive_float, default=0.5, help="MiB per DDP bucket (0.5)")
    add("--micro-batch-size", type=cli.positive_int, default=2, help="per rank and step (2)")
    add("--seq-len", type=cli.positive_int, default=64, help="tokens per sequence (64)")
    return parser.parse_args()


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("05-advanced/communication_overlap.py", args, world, device)
        config = models.preset("tiny", args.seq_len)
        size, ranks = args.micro_batch_size, world.world_size
        text = data.Sequences(data.load_text(), args.seq_len, size * ranks)
        rate, seconds = part.emulation_of(args.link, args.layer_ms, device)
        group, how = slow_group(rate)
        report.start(how, f"{config.num_parameters():,} weights, {config.num_layers} blocks")

        def build():
            runtime.seed_everything(args.seed)
            return models.Transformer(config).to(device)

        def batch_of(rank):
            return next(data.batches_of(text, 1, size, rank * size, size, device))

        alone = build()  # one process: the mean over all ranks' micro-batches
        losses = [loss_of(alone, batch_of(rank)) / ranks for rank in range(ranks)]
        expected = sum(losses).item(), proofs.gradient_of_one_process(alone, losses)
        batch = batch_of(world.rank)
        job = part.Job(alone, group, ranks, rate, args.bucket_cap_mb * MIB)

        ways = ways_of(build, group, args.bucket_cap_mb)
        for name, (model, step) in ways.items():
            part.check_way(report, job, name, model, step, batch, expected)
        part.check_trap(report, *read_before_wait(group, device))
        ways["0 no communication"] = alone, lambda batch: forward_and_backward(alone, batch)
        traces = part.profile_ways(report, ways, batch, seconds)
        part.check_and_time(report, job, traces)
        if report.output and world.is_rank0:
            part.draw(report.output / "communication_overlap.png", traces)
        return report.finish("one gradient in five ways, and each began when it says")


if __name__ == "__main__":
    cli.run(main)
