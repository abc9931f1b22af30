"""Train the same network with its weights cut over the processes: ddp_minimal.py, sharded.

    CPU   torchrun --standalone --nproc-per-node=2 02-fsdp/fsdp_minimal.py
    GPU   torchrun --standalone --nproc-per-node=gpu 02-fsdp/fsdp_minimal.py

Look for: the losses of ddp_minimal.py, although no process keeps the whole network.
"""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

rank = int(os.environ["RANK"])
local_rank = int(os.environ["LOCAL_RANK"])
world_size = int(os.environ["WORLD_SIZE"])
gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])  # one for each rank here
device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo")

pixels, labels = load_digits(return_X_y=True)  # 1,797 images of 8 x 8 pixels, 0 to 16
dataset = TensorDataset(torch.tensor(pixels).float() / 16, torch.tensor(labels))
sampler = DistributedSampler(dataset, drop_last=True)
loader = DataLoader(dataset, batch_size=64 // world_size, sampler=sampler, drop_last=True)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10)).to(device)

mesh = init_device_mesh(device.type, (world_size,))
fully_shard(model[0], mesh=mesh)  # put together for its own forward and backward, then freed again
fully_shard(model[2], mesh=mesh)
fully_shard(model, mesh=mesh)  # the closing call: takes what no inner call took, ties them together

optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for epoch in range(5):
    sampler.set_epoch(epoch)
    total = torch.zeros((), device=device)
    for images, targets in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images.to(device)), targets.to(device))
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    mean = total.item() / len(loader) / world_size
    if rank == 0:
        print(f"epoch {epoch + 1}: loss {mean:.4f}")

dcp.save(model.state_dict(), checkpoint_id="digits_fsdp")  # every process writes what it holds
dist.destroy_process_group()
