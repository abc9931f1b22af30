"""Sum a gradient over all ranks."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

DOUBLE = 1  # the rank whose weight was never cast

on_gpu = torch.cuda.is_available()
if on_gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.set_default_device("cuda")
timeout = timedelta(seconds=20 if on_gpu else 2)
dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout)
rank = dist.get_rank()

gradient = torch.ones(4, dtype=torch.float64 if rank == DOUBLE else torch.float32)
gradient = gradient.float()
dist.all_reduce(gradient)
print(f"first {gradient[0].item():g}", flush=True)

dist.destroy_process_group()
