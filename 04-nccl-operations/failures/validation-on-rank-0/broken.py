"""Train a model with a batch norm, and validate on one rank."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

VALIDATOR = 0  # the rank that validates, so that the others need not

on_gpu = torch.cuda.is_available()
if on_gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.set_default_device("cuda")
dist.init_process_group(timeout=timedelta(seconds=20 if on_gpu else 2))
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))

for step in range(4):
    model.train()
    model(torch.randn(8, 4)).sum().backward()
    if rank == VALIDATOR and step == 1:
        model.eval()
        model(torch.randn(8, 4))
print("took 4 steps", flush=True)

dist.destroy_process_group()
