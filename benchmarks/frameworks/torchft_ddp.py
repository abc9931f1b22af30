"""The one job in torchft: DDP between replica groups that may die and rejoin while the rest train.

    CPU   python benchmarks/frameworks/torchft_ddp.py
    GPU   torchft_lighthouse on one machine; a torchrun with TORCHFT_LIGHTHOUSE for each group

Source: torchft's README and documentation of `Manager`.
"""

import functools
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader
from torchft import (
    DistributedDataParallel,
    DistributedSampler,
    Manager,
    Optimizer,
    ProcessGroupGloo,
    ProcessGroupNCCL,
)
from torchft.coordination import LighthouseServer

import framework_job as job
from dist_common import cli


def mean(manager, values):
    """Return the mean over all groups."""
    manager.allreduce(values).wait()
    return values


def take_state(model, optimizer):
    """Return what a group that joins needs."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def load_state(model, optimizer, state):
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def train(replica, args, lighthouse):
    """Train as one replica group, here of a single rank."""
    device = job.pick_device(args, replica)
    dataset = job.build_dataset(args)
    sampler = DistributedSampler(dataset, replica, args.world_size, 0, 1, shuffle=False)
    loader = DataLoader(dataset, args.micro_batch_size, sampler=sampler)
    model = job.build_model(args).to(device)
    optimizer, schedule = job.build_optimizer(model, args)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupNCCL() if device.type == "cuda" else ProcessGroupGloo(),
        state_dict=functools.partial(take_state, model, optimizer),
        load_state_dict=functools.partial(load_state, model, optimizer),
        min_replica_size=args.world_size, replica_id=f"group_{replica}",
        init_sync=False,  # equal seeds; a group that fetches weights adds nothing to the first step
        rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port,
        lighthouse_addr=lighthouse,
    )  # fmt: skip
    manager.start_quorum()
    model = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, optimizer)
    record = job.Record("torchft_ddp", args, replica, manager.num_participants())
    for inputs, targets in loader:
        optimizer.zero_grad()  # finds out which groups take part in this step
        loss = job.loss_of(model, inputs.to(device), targets.to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.MAX_NORM)
        optimizer.step()  # updates if every group that takes part has the gradient
        schedule.step()
        record.step(loss)
    code = record.finish(functools.partial(mean, manager))
    manager.shutdown()
    sys.exit(code)


def main():
    args = job.parse_args(__doc__)
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=args.world_size)  # knows who is alive
    mp.spawn(train, (args, lighthouse.address()), nprocs=args.world_size)
    lighthouse.shutdown()
    return 0


if __name__ == "__main__":
    cli.run(main)
