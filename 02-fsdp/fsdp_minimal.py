"""Train the same network with its weights sharded: ddp_minimal.py with FSDP.

    CPU   torchrun --standalone --nproc-per-node=2 02-fsdp/fsdp_minimal.py
    GPU   torchrun --standalone --nproc-per-node=gpu 02-fsdp/fsdp_minimal.py

Look for: the losses of ddp_minimal.py, although no process keeps the whole network, and
the same loss after a fresh network has loaded the checkpoint.
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

mesh = init_device_mesh(device.type, (world_size,))
fully_shard(model[0], mesh=mesh)  # gathered for its own forward and backward only
fully_shard(model[2], mesh=mesh)
fully_shard(model, mesh=mesh)  # the last call makes the model the root of all units

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

dcp.save(model.state_dict(), checkpoint_id="digits_fsdp")  # each writes its part

# Load the checkpoint into a fresh network, whose first weights are random.
fresh = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10)).to(device)
fully_shard(fresh, mesh=mesh)  # one unit: a checkpoint does not depend on the units
state = fresh.state_dict()
dcp.load(state, checkpoint_id="digits_fsdp")  # each process reads its part
fresh.load_state_dict(state)

with torch.no_grad():
    images, targets = (tensor.to(device) for tensor in dataset.tensors)
    trained = F.cross_entropy(model(images), targets).item()
    loaded = F.cross_entropy(fresh(images), targets).item()
if rank == 0:
    print(f"on all images: trained network {trained:.4f}, loaded network {loaded:.4f}")
dist.destroy_process_group()
