"""Start an all-reduce, and use what it returns."""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

LATER = 1  # the rank that happens to come a little later

on_gpu = torch.cuda.is_available()
if on_gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.set_default_device("cuda")
timeout = timedelta(seconds=20 if on_gpu else 2)
dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout)
rank = dist.get_rank()
dist.barrier()
if rank == LATER:
    time.sleep(0.2)

gradient = torch.ones(1)
work = dist.all_reduce(gradient, async_op=True)
work.wait()  # only now is the sum there
norm = gradient.item()
print(f"norm {norm:g}", flush=True)

dist.destroy_process_group()
