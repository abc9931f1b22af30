"""The one job in plain DistributedDataParallel: the base of the comparison.

    CPU   torchrun --standalone --nproc-per-node=2 \\
              benchmarks/frameworks/bare_ddp.py
    GPU   the same

Source: PyTorch's tutorial "Getting Started with Distributed Data Parallel".
"""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

import framework_job as job


def train(args):
    device = job.pick_device(args, int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dataset = job.build_dataset(args)
    sampler = DistributedSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, args.micro_batch_size, sampler=sampler)
    model = job.build_model(args).to(device)
    optimizer, schedule = job.build_optimizer(model, args)
    model = DDP(model)
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
