"""Train for three steps."""

import os
import signal
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

KILLED = 1  # the rank that the kernel kills, as for memory

on_gpu = torch.cuda.is_available()
if on_gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.set_default_device("cuda")
timeout = timedelta(seconds=20 if on_gpu else 2)
dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout)
rank = dist.get_rank()
first_launch = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"

# On several nodes: on a disk that they share.
checkpoint = Path(tempfile.gettempdir(), f"checkpoint-{os.environ['TORCHELASTIC_RUN_ID']}")
first_step = int(checkpoint.read_text()) if checkpoint.exists() else 0
for step in range(first_step, 3):
    if rank == KILLED and step == 1 and first_launch:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
    if rank == 0:
        checkpoint.write_text(str(step + 1))
    dist.barrier()  # no rank takes the next step before this one is kept
checkpoint.unlink(missing_ok=True)
print(f"finished 3 steps, started at step {first_step}", flush=True)

dist.destroy_process_group()
