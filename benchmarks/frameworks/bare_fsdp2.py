"""The one job in PyTorch's FSDP2, with which the sharded ports are compared.

    CPU   torchrun --standalone --nproc-per-node=2 \\
              benchmarks/frameworks/bare_fsdp2.py
    GPU   the same

Sources: PyTorch's tutorial "Getting Started with Fully Sharded Data Parallel
(FSDP2)"; module 02.
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

import framework_job as job


def shard(model, mesh):
    """Shard each block's parameters, then the rest."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(args):
    device = job.pick_device(args, int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dataset = job.build_dataset(args)
    sampler = DistributedSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, args.micro_batch_size, sampler=sampler)
    mesh = init_device_mesh(device.type, (world_size,))
    model = shard(job.build_model(args).to(device), mesh)
    optimizer, schedule = job.build_optimizer(model, args)
    record = job.Record(args, rank, world_size)
    for inputs, targets in loader:
        loss = job.loss_of(model, inputs.to(device), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.MAX_NORM)
        optimizer.step()
        schedule.step()
        record.step(loss)
    code = record.finish(job.mean_over_ranks)
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    job.run(train, __doc__)
