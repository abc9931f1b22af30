"""Train for three steps."""

import os
import signal
from datetime import timedelta

import torch
import torch.distributed as dist

KILLED = 1  # the rank that the kernel kills, as for memory

on_gpu = torch.cuda.is_available()
if on_gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.set_default_device("cuda")
timeout = timedelta(seconds=20 if on_gpu else 2)
dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout)
rank = dist.get_rank()
first_launch = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"

first_step = 0
for step in range(first_step, 3):
    if rank == KILLED and step == 1 and first_launch:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
print(f"finished 3 steps, started at step {first_step}", flush=True)

dist.destroy_process_group()
