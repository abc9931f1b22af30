"""Join the job and add up a 1 from each rank."""

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

BEHIND = 1  # the rank behind the firewall

if int(os.environ["RANK"]) == BEHIND:  # a full queue drops what asks to connect, as a firewall
    wall = socket.create_server(("127.0.0.1", 0), backlog=0)
    queued = [socket.socket() for _ in range(3)]
    for connection in queued:
        connection.setblocking(False)
        connection.connect_ex(wall.getsockname())
    os.environ["MASTER_PORT"] = str(wall.getsockname()[1])
on_gpu = torch.cuda.is_available()
if on_gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.set_default_device("cuda")
timeout = timedelta(seconds=20 if on_gpu else 2)
dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout)

total = torch.ones(1)
dist.all_reduce(total)
print(f"sum {total.item():g}", flush=True)

dist.destroy_process_group()
