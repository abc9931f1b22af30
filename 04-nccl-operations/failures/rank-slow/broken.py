"""Take three steps."""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

SLOW = 1  # the rank that needs 300 ms for a step, where others need 10 ms

on_gpu = torch.cuda.is_available()
if on_gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.set_default_device("cuda")
timeout = timedelta(seconds=20 if on_gpu else 2)
dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout)
rank = dist.get_rank()

dist.barrier()
started = time.perf_counter()
for _ in range(3):
    time.sleep(0.3 if rank == SLOW else 0.01)  # forward and backward
    gradient = torch.ones(1)
    dist.all_reduce(gradient)
    loss = gradient.item()
elapsed_ms = 1e3 * (time.perf_counter() - started)
print(f"3 steps took {elapsed_ms:.0f} ms", flush=True)
print(f"sum {loss:g}", flush=True)

dist.destroy_process_group()
