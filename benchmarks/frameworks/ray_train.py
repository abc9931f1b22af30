"""The one job in Ray Train: Ray starts a worker for each rank of a Ray cluster.

    CPU   python benchmarks/frameworks/ray_train.py
    GPU   the same, or `ray job submit` on a cluster

Source: Ray's documentation, "Get Started with Distributed Training using PyTorch".
"""

import argparse
import os
import tempfile

import ray
import torch
from ray.train import RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch.utils.data import DataLoader

import framework_job as job


def train_on_worker(config):
    """Train on one worker. Ray passes a dictionary."""
    args = argparse.Namespace(**config)
    rank, world_size = get_context().get_world_rank(), get_context().get_world_size()
    dataset = job.build_dataset(args)
    loader = DataLoader(dataset, args.micro_batch_size, shuffle=False)
    loader = prepare_data_loader(loader)  # puts a DistributedSampler into it
    model = prepare_model(job.build_model(args))  # to its device, and into DDP
    optimizer, schedule = job.build_optimizer(model, args)
    record = job.Record(args, rank, world_size)
    for inputs, targets in loader:
        loss = job.loss_of(model, inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.MAX_NORM)
        optimizer.step()
        schedule.step()
        record.step(loss)
    if record.finish(job.mean_over_ranks):
        raise RuntimeError("another run than asked for")


def train(args):
    on_gpus = args.device == "cuda"
    # The paths of Ray's sockets have to be short.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        # One CPU for each worker, and one for the process that looks after them.
        ray.init(
            num_cpus=args.world_size + 1, include_dashboard=False, _temp_dir=folder
        )
        trainer = TorchTrainer(
            train_on_worker,
            train_loop_config=vars(args),
            scaling_config=ScalingConfig(num_workers=args.world_size, use_gpu=on_gpus),
            run_config=RunConfig(name="one-job", storage_path=folder),
        )
        try:
            trainer.fit()
        finally:
            ray.shutdown()
    return 0


if __name__ == "__main__":
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would report its use
    job.run(train, __doc__)
