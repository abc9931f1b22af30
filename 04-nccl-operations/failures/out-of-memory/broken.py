"""Compute the sum of squares of a batch."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

LONG = 1  # the rank that gets a long sequence

on_gpu = torch.cuda.is_available()
if on_gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.set_default_device("cuda")
timeout = timedelta(seconds=20 if on_gpu else 2)
dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout)
rank = dist.get_rank()
mebibytes = 400 if rank == LONG else 1

batch = torch.ones(mebibytes, 2**18)  # float32
loss = batch.square().mean()
dist.all_reduce(loss)
print(f"sum {loss.item():.3f}", flush=True)

dist.destroy_process_group()
