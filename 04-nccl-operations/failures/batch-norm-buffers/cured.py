"""Train with batch norm, then evaluate on every rank."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.set_default_device("cuda")
dist.init_process_group()
rank = dist.get_rank()

norm = torch.nn.BatchNorm1d(1, momentum=None)  # a plain average over the steps
model = DDP(norm, broadcast_buffers=False)  # each rank keeps its own
for _ in range(4):
    batch = torch.tensor([[rank - 1.0], [rank + 1.0]])  # its mean is the rank
    model(batch).sum().backward()
for buffer in (norm.running_mean, norm.running_var):
    dist.all_reduce(buffer)  # before evaluation, the average over all ranks
    buffer /= dist.get_world_size()
model.eval()
print(f"running mean {norm.running_mean.item():g}", flush=True)

dist.destroy_process_group()
