"""Load a checkpoint and continue training."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

READER = 0  # the rank that reads the file

if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.set_default_device("cuda")
dist.init_process_group()
rank = dist.get_rank()
checkpoint = {"weight": torch.ones(1, 1), "bias": torch.ones(1)}

torch.manual_seed(0)
model = DDP(torch.nn.Linear(1, 1))
if rank == READER:
    model.module.load_state_dict(checkpoint)
print(f"weight {model.module.weight.item():.2f}", flush=True)

dist.destroy_process_group()
