"""Say hello from every process, and add up their numbers.

    torchrun --standalone --nproc-per-node=2 01-ddp-basics/hello_ranks.py

Look for: one line from each process, and the same sum in each line.
"""

import os

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])  # this process's number: 0, 1, ... over all machines
local_rank = int(os.environ["LOCAL_RANK"])  # its number on this machine
world_size = int(os.environ["WORLD_SIZE"])  # the number of processes

dist.init_process_group("gloo")  # waits until all processes have started
total = torch.tensor([rank])

dist.all_reduce(total)  # every process passes its number and gets the sum

place = f"rank {rank} of {world_size} (local rank {local_rank})"
print(f"{place}: the sum is {total.item()}\n", end="")  # one write: ranks share stdout
dist.destroy_process_group()
