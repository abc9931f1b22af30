"""Show the order in which each rank meets its samples, epoch by epoch."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler

on_gpu = torch.cuda.is_available()
if on_gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.set_default_device("cuda")
timeout = timedelta(seconds=20 if on_gpu else 2)
dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout)
sampler = DistributedSampler(range(12))

orders = []
for epoch in range(2):
    sampler.set_epoch(epoch)
    with torch.device("cpu"):
        orders.append(list(sampler))
    print(f"epoch {epoch}: {orders[-1]}", flush=True)
print("the order changes" if orders[0] != orders[1] else "twice the same order", flush=True)

dist.destroy_process_group()
