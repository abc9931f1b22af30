"""The one job in Thunder: it traces the model, and its DDP adds the all-reduces.

    CPU   torchrun --standalone --nproc-per-node=2 \\
              benchmarks/frameworks/thunder_ddp.py
    GPU   the same

Thunder 0.2.6 cannot be imported with PyTorch 2.13 or newer. It has its own environment:

    python -m venv .venv-thunder
    .venv-thunder/bin/python -m pip install --editable '.[thunder]'
Source: Thunder's documentation of `thunder.jit` and `thunder.distributed.ddp`.
"""

import os

import thunder
import torch
import torch.distributed as dist
import torch.nn.functional as F
from thunder.distributed import ddp
from torch.utils.data import DataLoader, DistributedSampler

import framework_job as job


def attend(q, k, v):
    """Attend with repeated keys: Thunder's attention has no `enable_gqa`."""
    shared_by = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(shared_by, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def train(args):
    device = job.pick_device(args, int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dataset = job.build_dataset(args)
    sampler = DistributedSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, args.micro_batch_size, sampler=sampler)
    model = job.build_model(args).to(device)
    for block in model.blocks:
        block.attention.attend = attend
    model = ddp(thunder.jit(model))
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
