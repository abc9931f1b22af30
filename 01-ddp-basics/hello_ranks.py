"""Say hello from every process, and add up their numbers.

    torchrun --standalone --nproc-per-node=2 01-ddp-basics/hello_ranks.py

Look for: one line from each process, and the same sum in both.
"""

import os

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])  # which process am I? 0, 1, ..., counted over all machines
local_rank = int(os.environ["LOCAL_RANK"])  # which one on this machine?
world_size = int(os.environ["WORLD_SIZE"])  # how many are we?

dist.init_process_group("gloo")  # waits until all processes are there
total = torch.tensor([rank])

dist.all_reduce(total)  # every process gives its number and gets the sum of all

line = f"rank {rank} of {world_size} (local rank {local_rank}): the sum is {total.item()}\n"
print(line, end="")  # in one piece: the processes share a terminal
dist.destroy_process_group()
