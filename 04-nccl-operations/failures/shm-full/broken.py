"""Load one large batch by a worker, then average."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

LARGE = 1  # the rank with large samples

on_gpu = torch.cuda.is_available()
if on_gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.set_default_device("cuda")
timeout = timedelta(seconds=20 if on_gpu else 2)
dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout)
rank = dist.get_rank()
numbers = 2**20 if rank == LARGE else 2**10
samples = torch.ones(2, numbers, device="cpu")

loader = DataLoader(samples, batch_size=2, num_workers=1)
loss = next(iter(loader)).mean()
dist.all_reduce(loss)
print(f"sum {loss.item():g}", flush=True)

dist.destroy_process_group()
