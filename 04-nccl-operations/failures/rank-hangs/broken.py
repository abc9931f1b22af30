"""Train on one batch that a thread loads."""

import os
import queue
from datetime import timedelta

import torch
import torch.distributed as dist

STUCK = 1  # the rank whose loading thread has died

on_gpu = torch.cuda.is_available()
torch.set_default_device(f"cuda:{os.environ['LOCAL_RANK']}" if on_gpu else "cpu")
timeout = timedelta(seconds=20 if on_gpu else 2)
dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout)
rank = dist.get_rank()
batches = queue.SimpleQueue()
if rank != STUCK:
    batches.put(torch.ones(1))


def next_batch():
    return batches.get()


gradient = next_batch()
dist.all_reduce(gradient)
print(f"sum {gradient.item():g}", flush=True)

dist.destroy_process_group()
