"""Average a gradient, step the weights, print the loss."""

import os

import torch
import torch.distributed as dist

SICK = 1  # the rank whose gradient has one NaN

if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.set_default_device("cuda")
dist.init_process_group()
rank = dist.get_rank()

weights = torch.ones(4)
gradient = torch.ones(4)
if rank == SICK:
    gradient[2] = float("nan")
dist.all_reduce(gradient)
loss = (weights - 0.1 * gradient).sum()
print(f"loss {loss.item():g}", flush=True)

dist.destroy_process_group()
