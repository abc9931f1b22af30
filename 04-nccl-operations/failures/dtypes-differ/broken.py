"""Sum a gradient over all ranks."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

DOUBLE = 1  # the rank whose weight was never cast

on_gpu = torch.cuda.is_available()
torch.set_default_device(f"cuda:{os.environ['LOCAL_RANK']}" if on_gpu else "cpu")
timeout = timedelta(seconds=20 if on_gpu else 2)
dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout)
rank = dist.get_rank()

gradient = torch.ones(4, dtype=torch.float64 if rank == DOUBLE else torch.float32)
dist.all_reduce(gradient)
print(f"first {gradient[0].item():g}", flush=True)

dist.destroy_process_group()
