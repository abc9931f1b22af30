"""Join the job and add up a 1 from each rank."""

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

SERVER = 0  # rank 0 holds the store at which the ranks meet

if int(os.environ["RANK"]) == SERVER:  # another program, often your last job
    other_program = socket.create_server(("", int(os.environ["MASTER_PORT"])))
os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)  # on every rank
on_gpu = torch.cuda.is_available()
torch.set_default_device(f"cuda:{os.environ['LOCAL_RANK']}" if on_gpu else "cpu")
timeout = timedelta(seconds=60)
dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout)

total = torch.ones(1)
dist.all_reduce(total)
print(f"sum {total.item():g}", flush=True)

dist.destroy_process_group()
