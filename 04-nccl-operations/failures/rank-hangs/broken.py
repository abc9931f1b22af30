"""Train on one batch that a thread loads."""

import os
import queue
from datetime import timedelta

import torch
import torch.distributed as dist

STUCK = 1  # the rank whose loading thread has died

on_gpu = torch.cuda.is_available()
if on_gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.set_default_device("cuda")
dist.init_process_group(timeout=timedelta(seconds=20 if on_gpu else 2))
rank = dist.get_rank()
batches = queue.SimpleQueue()


def load():
    return torch.ones(1)


if rank != STUCK:
    batches.put(load())


def next_batch():
    return batches.get()


gradient = next_batch()
dist.all_reduce(gradient)
print(f"sum {gradient.item():g}", flush=True)

dist.destroy_process_group()
