"""Write a checkpoint, then go on training."""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

WRITER = 0  # the rank that writes a checkpoint, for 2 s

on_gpu = torch.cuda.is_available()
if on_gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.set_default_device("cuda")
dist.init_process_group(timeout=timedelta(seconds=60))
rank = dist.get_rank()

if rank == WRITER:
    time.sleep(20 if on_gpu else 2)
gradient = torch.ones(1)
dist.all_reduce(gradient)
print(f"sum {gradient.item():g}", flush=True)

dist.destroy_process_group()
