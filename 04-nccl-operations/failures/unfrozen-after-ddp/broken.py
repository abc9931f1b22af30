"""Fine-tune: first the bias alone, then the weight too."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.set_default_device("cuda")
dist.init_process_group()
rank = dist.get_rank()

layer = torch.nn.Linear(1, 1)
layer.weight.requires_grad_(False)  # in a real job, all layers but the head
model = DDP(layer)
batch = torch.full((1, 1), float(rank))
model(batch).sum().backward()

layer.weight.requires_grad_(True)
model(batch).sum().backward()
print(f"gradient {layer.weight.grad.item():g}", flush=True)

dist.destroy_process_group()
