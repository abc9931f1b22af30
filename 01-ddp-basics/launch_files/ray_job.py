"""Run a script on the workers of a Ray cluster, unchanged, and again when a worker is lost.

    CPU   python 01-ddp-basics/launch_files/ray_job.py 01-ddp-basics/ddp_training.py --resume \
              --output-dir runs/ray
    GPU   the same with --workers 16 --gpus --storage-path FOLDER, by `ray job submit`

Ray has to be installed: `make frameworks`, or the Dockerfile beside this file with its RAY.
Source: Ray's documentation, "Get Started with Distributed Training using PyTorch".
"""

import argparse
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import ray
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def die_with_the_worker():
    """Have the kernel end this process when the worker that starts it ends, however that ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def run_script(config):
    """Run the script as this worker's rank; Ray has set RANK, WORLD_SIZE, MASTER_ADDR and so on.

    In a process of its own: the script handles signals, which only a main thread may, and joins a
    process group, where Ray has joined one already. That one agrees on a port for the script.
    """
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = [probe.getsockname()[1]]
    dist.broadcast_object_list(port, src=0)
    dist.destroy_process_group()
    environ = os.environ | {"MASTER_PORT": str(port[0])}
    command = [sys.executable, *config["command"]]
    ended = subprocess.run(
        command, env=environ, cwd=config["folder"], preexec_fn=die_with_the_worker
    )
    if ended.returncode:
        raise RuntimeError(f"{command[1]} ended with exit code {ended.returncode}")


def fit(args, storage_path):
    """Start the workers; start all of them again when one is lost or fails."""
    trainer = TorchTrainer(
        run_script,
        train_loop_config={"command": args.command, "folder": str(Path.cwd())},
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=args.gpus),
        run_config=RunConfig(
            storage_path=storage_path,
            failure_config=FailureConfig(max_failures=args.max_failures),
        ),
    )
    trainer.fit()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--workers", type=int, default=2, help="ranks (2)")
    add("--gpus", action="store_true", help="a GPU for each rank")
    add("--max-failures", type=int, default=3, help="how often to start again (3)")
    add("--storage-path", metavar="FOLDER",
        help="for Ray's own files, on a disk that all machines share (of this one)")  # fmt: skip
    add("command", nargs=argparse.REMAINDER, help="a script and its arguments")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # short, for sockets
        if "RAY_ADDRESS" in os.environ:  # as `ray job submit` sets it
            ray.init()
        else:  # a cluster of this machine alone, with one CPU for Ray's own process
            ray.init(num_cpus=args.workers + 1, include_dashboard=False, _temp_dir=folder)
        try:
            fit(args, args.storage_path or folder)
        finally:
            ray.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would report its use
    main()
