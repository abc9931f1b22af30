"""Sum two gradients over all ranks."""

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

gradients = {"weight": torch.ones(1), "bias": torch.full((1,), 10.0)}
names = sorted(gradients)
for name in names:
    print(f"reducing {name}", flush=True)
    dist.all_reduce(gradients[name])
weight, bias = (gradients[name].item() for name in ("weight", "bias"))
print(f"weight {weight:g}, bias {bias:g}", flush=True)

dist.destroy_process_group()
