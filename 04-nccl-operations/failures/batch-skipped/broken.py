"""Sum each batch's gradient over all ranks; skip what cannot be read."""

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


def gradient_of(batch):
    if rank == UNLUCKY and batch == 1:
        raise ValueError("sample 7 cannot be decoded")
    return torch.tensor(10.0**batch)


sums = []
for batch in range(4):
    try:
        gradient = gradient_of(batch)
    except ValueError:
        continue
    dist.all_reduce(gradient)
    sums.append(round(gradient.item()))
    print(f"sums {sums}", flush=True)

dist.destroy_process_group()
