"""Train the same network with DistributedDataParallel: single_process.py plus DDP.

    CPU   torchrun --standalone --nproc-per-node=2 01-ddp-basics/ddp_minimal.py
    GPU   torchrun --standalone --nproc-per-node=gpu 01-ddp-basics/ddp_minimal.py

Look for: the same losses with 1, 2 and 4 processes. Three processes are refused.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

rank = int(os.environ["RANK"])
local_rank = int(os.environ["LOCAL_RANK"])
world_size = int(os.environ["WORLD_SIZE"])
if 64 % world_size > 0:
    raise SystemExit(f"{world_size} ranks cannot share 64 samples: start 1, 2, 4 or 8")
# With a GPU for each process of this machine we use GPUs, else the CPU.
gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo")

pixels, labels = load_digits(return_X_y=True)  # 1,797 images of 8 x 8 pixels, 0 to 16
dataset = TensorDataset(torch.tensor(pixels).float() / 16, torch.tensor(labels))
sampler = DistributedSampler(dataset, drop_last=True)
loader = DataLoader(
    dataset, batch_size=64 // world_size, sampler=sampler, drop_last=True
)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10)).to(device)

model = DDP(model)  # from here on, backward averages the gradients over all processes

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

if rank == 0:
    torch.save(model.module.state_dict(), "digits.pt")
dist.destroy_process_group()
