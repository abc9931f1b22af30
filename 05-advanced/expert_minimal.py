"""Send each token to the process that has its expert, and the result back, by all-to-alls.

    CPU   torchrun --standalone --nproc-per-node=2 05-advanced/expert_minimal.py
    GPU   torchrun --standalone --nproc-per-node=gpu 05-advanced/expert_minimal.py

Look for: how many tokens each expert gets, and the error against one process with all experts.
"""

import os

import torch
import torch.distributed as dist
from torch import nn

rank = int(os.environ["RANK"])
local_rank = int(os.environ["LOCAL_RANK"])
world_size = int(os.environ["WORLD_SIZE"])
gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])  # one for each rank here
device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo")

torch.manual_seed(0)
width = 16
# This process works with experts[rank]; the others only check the result.
experts = [nn.Linear(width, width).to(device) for _ in range(world_size)]
router = nn.Linear(width, world_size).to(device)  # a score for each expert
torch.manual_seed(rank)
tokens = torch.randn(8, width, device=device)  # of this process: others have others


def exchange(rows, give, take):
    """Send give[r] rows to each rank r; return the take[r] rows that came from each, in order."""
    received = rows.new_empty(sum(take), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), take, give)
    return received


with torch.no_grad():
    choice = router(tokens).argmax(dim=1)  # (8,), the expert of each token
    order = choice.argsort(stable=True)  # those for rank 0 first
    give = choice.bincount(minlength=world_size)
    ones = [1] * world_size
    take = exchange(give, ones, ones)  # how many rows each rank will send us

    arrived = exchange(tokens[order], give.tolist(), take.tolist())
    computed = experts[rank](arrived)
    output = torch.empty_like(tokens)
    output[order] = exchange(computed, take.tolist(), give.tolist())

    # One process with all experts:
    expected = torch.stack([experts[e](token) for e, token in zip(choice, tokens, strict=True)])

error = (output - expected).abs().max().item()
line = f"rank {rank}: sent {give.tolist()}, its expert got {take.sum()}, error {error:.0e}\n"
print(line, end="")  # in one piece: the processes share a terminal
dist.destroy_process_group()
