"""Train the same network with DeepSpeed: ddp_minimal.py, with an engine for the model.

    CPU   torchrun --standalone --nproc-per-node=2 03-deepspeed/deepspeed_minimal.py
    GPU   torchrun --standalone --nproc-per-node=gpu 03-deepspeed/deepspeed_minimal.py

Look for: the losses of ddp_minimal.py, although no process holds the whole optimizer
state.
"""

import os
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

rank = int(os.environ["RANK"])
local_rank = int(os.environ["LOCAL_RANK"])
world_size = int(os.environ["WORLD_SIZE"])
if 64 % world_size > 0:
    raise SystemExit(f"{world_size} ranks cannot share 64 samples: start 1, 2, 4 or 8")
# With a GPU for each process of this machine we use GPUs, else the CPU.
gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])

os.environ["DS_ACCELERATOR"] = "cuda" if gpu else "cpu"
warnings.filterwarnings("ignore")
import deepspeed  # noqa: E402

deepspeed.logger.setLevel("ERROR")
deepspeed.ops.__compatible_ops__ = {}  # otherwise it compiles an all-reduce for CPUs

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

optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

config = {
    "train_micro_batch_size_per_gpu": 64 // world_size,
    "zero_optimization": {"stage": 2},  # divides gradients and optimizer state
    "zero_allow_untested_optimizer": True,  # such as SGD
    "gradient_clipping": 0.0,  # without this line DeepSpeed clips at a norm of 1
}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

for epoch in range(5):
    sampler.set_epoch(epoch)
    total = torch.zeros((), device=device)
    for images, targets in loader:
        loss = F.cross_entropy(engine(images.to(device)), targets.to(device))
        engine.backward(loss)
        engine.step()
        total += loss.detach()
    dist.all_reduce(total)
    mean = total.item() / len(loader) / world_size
    if rank == 0:
        print(f"epoch {epoch + 1}: loss {mean:.4f}")

engine.save_checkpoint("digits_deepspeed")  # every process writes what it holds
dist.destroy_process_group()
