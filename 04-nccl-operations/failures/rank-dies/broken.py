"""Train for three steps."""

import os
import signal
from datetime import timedelta

import torch
import torch.distributed as dist

KILLED = 1  # the rank that the kernel kills, as for memory

on_gpu = torch.cuda.is_available()
torch.set_default_device(f"cuda:{os.environ['LOCAL_RANK']}" if on_gpu else "cpu")
timeout = timedelta(seconds=20 if on_gpu else 2)
dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout)
rank = dist.get_rank()
first_launch = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"

for step in range(3):
    if rank == KILLED and step == 1 and first_launch:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
print("finished 3 steps", flush=True)

dist.destroy_process_group()
