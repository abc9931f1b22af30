"""Make a group of some ranks and add up a 1 from each of its members."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

OUTSIDER = 1  # the rank that is no member

on_gpu = torch.cuda.is_available()
if on_gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.set_default_device("cuda")
timeout = timedelta(seconds=20 if on_gpu else 2)
dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout)
rank = dist.get_rank()
members = [other for other in range(dist.get_world_size()) if other != OUTSIDER]

group = dist.new_group(members, timeout=timeout)  # on every rank, members or not
if rank in members:
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
everybody = dist.new_group(list(range(dist.get_world_size())), timeout=timeout)
total = torch.ones(1)
dist.all_reduce(total, group=everybody)
print(f"sum {total.item():g}", flush=True)

dist.destroy_process_group()
