"""Train a model with two heads."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

SKIPPING = 1  # the rank whose batches have no samples for the second head

on_gpu = torch.cuda.is_available()
if on_gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.set_default_device("cuda")
dist.init_process_group(timeout=timedelta(seconds=20 if on_gpu else 2))
rank = dist.get_rank()


class Heads(torch.nn.ModuleList):
    def forward(self, x):
        used = self[:1] if rank == SKIPPING else self
        return sum(head(x) for head in used)


model = DDP(
    Heads([torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)]), find_unused_parameters=True
)
for _ in range(2):
    model(torch.ones(2, 4)).sum().backward()
print("took 2 steps", flush=True)

dist.destroy_process_group()
