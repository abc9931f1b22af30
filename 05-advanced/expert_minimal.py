"""Send each token to the process that has its expert, and the result back.

    CPU   torchrun --standalone --nproc-per-node=2 05-advanced/expert_minimal.py
    GPU   torchrun --standalone --nproc-per-node=gpu 05-advanced/expert_minimal.py

Look for: the number of tokens of each expert; the error against one process with all
experts.
"""

import os

import torch
import torch.distributed as dist
from torch import nn

rank = int(os.environ["RANK"])
local_rank = int(os.environ["LOCAL_RANK"])
world_size = int(os.environ["WORLD_SIZE"])
gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])  # one each
device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo")

torch.manual_seed(0)
width = 16
# This process works with experts[rank]. The other experts only check the result.
experts = [nn.Linear(width, width).to(device) for _ in range(world_size)]
router = nn.Linear(width, world_size).to(device)  # a score for each expert
torch.manual_seed(rank)
tokens = torch.randn(8, width, device=device)  # different ones on each process


def exchange(rows, sends, receives):
    """Send sends[r] rows to rank r; return receives[r] rows from each rank r."""
    received = rows.new_empty(sum(receives), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), receives, sends)
    return received


with torch.no_grad():
    choice = router(tokens).argmax(dim=1)  # (8,), the expert of each token
    order = choice.argsort(stable=True)  # tokens for rank 0 first
    sends = choice.bincount(minlength=world_size)
    ones = [1] * world_size
    receives = exchange(sends, ones, ones)  # how many rows each rank will send

    arrived = exchange(tokens[order], sends.tolist(), receives.tolist())
    computed = experts[rank](arrived)
    output = torch.empty_like(tokens)
    output[order] = exchange(computed, receives.tolist(), sends.tolist())

    # One process with all experts:
    pairs = zip(choice, tokens, strict=True)
    expected = torch.stack([experts[expert](token) for expert, token in pairs])

error = (output - expected).abs().max().item()
line = f"rank {rank}: sent {sends.tolist()}, its expert got {receives.sum()}, "
print(f"{line}error {error:.0e}\n", end="")  # in one piece: they share a terminal
dist.destroy_process_group()
