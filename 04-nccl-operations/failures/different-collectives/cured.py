"""Average the loss over all ranks and print it."""

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
rank = dist.get_rank()

loss = torch.ones(1)
dist.all_reduce(loss)  # the same collective on every rank
print(f"sum {loss.item():g}", flush=True)

dist.destroy_process_group()
