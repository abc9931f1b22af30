"""Read a sample, then average the gradient."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

UNLUCKY = 1  # the rank that gets the damaged sample

on_gpu = torch.cuda.is_available()
if on_gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.set_default_device("cuda")
dist.init_process_group(timeout=timedelta(seconds=20 if on_gpu else 2))
rank = dist.get_rank()


def read_sample():
    if rank == UNLUCKY:
        raise ValueError("sample 7 cannot be decoded")
    return torch.ones(1)


gradient = read_sample()
dist.all_reduce(gradient)
print(f"sum {gradient.item():g}", flush=True)
dist.destroy_process_group()
