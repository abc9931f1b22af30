"""Gather the weights of all ranks for a checkpoint."""

import io
import os
from datetime import timedelta

import torch
import torch.distributed as dist

WRITER = 0  # the rank that writes the checkpoint

on_gpu = torch.cuda.is_available()
if on_gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.set_default_device("cuda")
dist.init_process_group(timeout=timedelta(seconds=20 if on_gpu else 2))
rank = dist.get_rank()


def gather_weights():
    parts = [torch.empty(1) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, torch.tensor([float(rank)]))
    return torch.cat(parts)


if rank == WRITER:
    weights = gather_weights()
    torch.save(weights, io.BytesIO())  # a file, in a real job
dist.barrier()
print("saved", flush=True)

dist.destroy_process_group()
