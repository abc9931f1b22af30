"""Show each process's tensor before and after each of the five collectives.

    torchrun --standalone --nproc-per-node=3 01-ddp-basics/hello_collectives.py

Look for: which numbers moved, and which were added up. Rank 1 starts with 11, 12, 13.
"""

import os

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
world_size = int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")


def print_title(name):
    if rank == 0:
        print(name, flush=True)


def print_tensors(before, after):
    """Print one line from each process, in the order of the ranks."""
    for turn in range(world_size):
        if turn == rank:
            print(f"  rank {rank}: {before.tolist()} -> {after.tolist()}", flush=True)
        dist.barrier()  # no process continues before all have reached this line


before = 10 * rank + torch.arange(1, world_size + 1)  # rank 1 of 3: [11, 12, 13]

print_title("broadcast from rank 0")
after = before.clone()
dist.broadcast(after, src=0)
print_tensors(before, after)

print_title("all-reduce")
after = before.clone()
dist.all_reduce(after)
print_tensors(before, after)

print_title("all-gather")
parts = [torch.zeros_like(before) for _ in range(world_size)]
dist.all_gather(parts, before)
print_tensors(before, torch.cat(parts))

print_title("reduce-scatter")
after = torch.zeros(1, dtype=torch.int64)
dist.reduce_scatter(after, list(before.split(1)))
print_tensors(before, after)

print_title("all-to-all")
after = torch.zeros_like(before)
dist.all_to_all_single(after, before)
print_tensors(before, after)

dist.destroy_process_group()
