"""Compute the mean square of a batch."""

import os
import resource
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist

LONG = 1  # the rank that gets a long sequence

on_gpu = torch.cuda.is_available()
if on_gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.set_default_device("cuda")
dist.init_process_group(timeout=timedelta(seconds=20 if on_gpu else 2))
rank = dist.get_rank()
allowed = 300 * 2**20  # bytes, on this rank
if on_gpu:
    memory = torch.cuda.get_device_properties().total_memory
    torch.cuda.set_per_process_memory_fraction(allowed / memory)
else:
    allowed += psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))
mebibytes = 400 if rank == LONG else 1

batch = torch.ones(mebibytes, 2**18)  # float32
loss = batch.square().mean()
dist.all_reduce(loss)
print(f"sum {loss.item():.3f}", flush=True)

dist.destroy_process_group()
