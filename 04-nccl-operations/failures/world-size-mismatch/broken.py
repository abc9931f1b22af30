"""Join the job and add up a 1 from each rank."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

on_gpu = torch.cuda.is_available()
if on_gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.set_default_device("cuda")
timeout = timedelta(seconds=20 if on_gpu else 2)
dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout)

total = torch.ones(1)
dist.all_reduce(total)
print(f"sum {total.item():g}", flush=True)

dist.destroy_process_group()
