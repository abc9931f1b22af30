"""Train the network of ddp_minimal.py with its layers divided over two processes.

    CPU   torchrun --standalone --nproc-per-node=2 05-advanced/pipeline_minimal.py
    GPU   torchrun --standalone --nproc-per-node=2 05-advanced/pipeline_minimal.py

Look for: the losses of ddp_minimal.py. The last process prints them.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
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

model = model[:2] if rank == 0 else model[2:]  # our layers; the others are freed
stage = PipelineStage(model, stage_index=rank, num_stages=2, device=device)
schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=F.cross_entropy)

optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for epoch in range(5):
    sampler.set_epoch(epoch)
    total = torch.zeros((), device=device)
    for images, targets in loader:
        optimizer.zero_grad()
        losses = []
        if rank == 0:
            schedule.step(images.to(device))  # all forwards and backwards
        else:
            schedule.step(target=targets.to(device), losses=losses)
        optimizer.step()
        total += sum(loss.detach() for loss in losses) / 4  # of four micro-batches
    mean = total.item() / len(loader)
    if rank == 1:
        print(f"epoch {epoch + 1}: loss {mean:.4f}")

dist.destroy_process_group()
