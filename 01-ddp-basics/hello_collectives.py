"""Show what every process has before and after each of the five collectives.

    torchrun --standalone --nproc-per-node=3 01-ddp-basics/hello_collectives.py

Look for: which numbers moved, and which were added up. Those of rank 1 are 11, 12, 13.
"""

import os

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
world_size = int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")


def show(text):
    """Print one line from each process, in the order of the ranks."""
    for turn in range(world_size):
        if turn == rank:
            print(f"  rank {rank}: {text}", flush=True)
        dist.barrier()  # nobody passes before all are here


def title(name):
    if rank == 0:
        print(name, flush=True)


mine = 10 * rank + torch.arange(1, world_size + 1)  # rank 1 of 3: [11, 12, 13]

title("broadcast from rank 0")
after = mine.clone()
dist.broadcast(after, src=0)
show(f"{mine.tolist()} -> {after.tolist()}")

title("all-reduce")
after = mine.clone()
dist.all_reduce(after)
show(f"{mine.tolist()} -> {after.tolist()}")

title("all-gather")
parts = [torch.zeros_like(mine) for _ in range(world_size)]
dist.all_gather(parts, mine)
show(f"{mine.tolist()} -> {torch.cat(parts).tolist()}")

title("reduce-scatter")
after = torch.zeros(1, dtype=torch.int64)
dist.reduce_scatter(after, list(mine.split(1)))
show(f"{mine.tolist()} -> {after.tolist()}")

title("all-to-all")
after = torch.zeros_like(mine)
dist.all_to_all_single(after, mine)
show(f"{mine.tolist()} -> {after.tolist()}")

dist.destroy_process_group()
