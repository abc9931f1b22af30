"""Join the job and add up a 1 from each rank."""

import contextlib
import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

SERVER = 0  # rank 0 holds the store at which the ranks meet

if int(os.environ["RANK"]) == SERVER:  # another program, often your last job
    with contextlib.suppress(OSError):  # under torchrun its own store is that program
        other_program = socket.create_server(("", int(os.environ["MASTER_PORT"])))
os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # rank 0 starts a store here too
os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)  # on every rank
on_gpu = torch.cuda.is_available()
if on_gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.set_default_device("cuda")
timeout = timedelta(seconds=60)
dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout)

total = torch.ones(1)
dist.all_reduce(total)
print(f"sum {total.item():g}", flush=True)

dist.destroy_process_group()
