"""The one job in Horovod, as it was written until 2023. Never run here: Horovod does not build.

    CPU   horovodrun -np 2 --gloo python benchmarks/frameworks/horovod_ddp.py
    GPU   the same, without --gloo

Source: Horovod's documentation, "Horovod with PyTorch".
"""

import torch
from torch.utils.data import DataLoader, DistributedSampler

import framework_job as job
from legacy_common import cli

try:
    import horovod.torch as hvd
except ImportError:
    hvd = None


def train(args):
    hvd.init()
    device = job.pick_device(args, hvd.local_rank())
    dataset = job.build_dataset(args)
    sampler = DistributedSampler(dataset, hvd.size(), hvd.rank(), shuffle=False)
    loader = DataLoader(dataset, args.micro_batch_size, sampler=sampler)
    model = job.build_model(args).to(device)
    optimizer, schedule = job.build_optimizer(model, args)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    # Not broadcast_optimizer_state: on a fresh AdamW it takes a hidden step, which decays weights.
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    record = job.Record("horovod_ddp", args, hvd.rank(), hvd.size())
    for inputs, targets in loader:
        loss = job.loss_of(model, inputs.to(device), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.synchronize()  # the hooks of backward all-reduce: wait before the norm is taken
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.MAX_NORM)
        with optimizer.skip_synchronize():
            optimizer.step()
        schedule.step()
        record.step(loss)
    return record.finish(hvd.allreduce)  # which takes the mean unless told otherwise


def main():
    args = job.parse_args(__doc__)
    if hvd is None:
        raise cli.UsageError(
            "Horovod is not installed. Its last release, 0.28.1 of 2023, does not build against "
            "this PyTorch, which needs C++17; bare_ddp.py is what it has become"
        )
    return train(args)


if __name__ == "__main__":
    cli.run(main)
