"""Train the same network, divided: each process computes a part of each product.

    CPU   torchrun --standalone --nproc-per-node=2 05-advanced/tensor_minimal.py
    GPU   torchrun --standalone --nproc-per-node=gpu 05-advanced/tensor_minimal.py

Look for: the losses of ddp_minimal.py, although every process reads all samples.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

rank = int(os.environ["RANK"])
local_rank = int(os.environ["LOCAL_RANK"])
world_size = int(os.environ["WORLD_SIZE"])
gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])  # one each
device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo")

pixels, labels = load_digits(return_X_y=True)  # 1,797 images of 8 x 8 pixels, 0 to 16
dataset = TensorDataset(torch.tensor(pixels).float() / 16, torch.tensor(labels))
sampler = DistributedSampler(dataset, num_replicas=1, rank=0, drop_last=True)
loader = DataLoader(dataset, batch_size=64, sampler=sampler, drop_last=True)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10)).to(device)

mesh = init_device_mesh(device.type, (world_size,))
parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

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
    mean = total.item() / len(loader)
    if rank == 0:
        print(f"epoch {epoch + 1}: loss {mean:.4f}")

dist.destroy_process_group()
