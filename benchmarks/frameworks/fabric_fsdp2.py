"""The one job in Lightning Fabric with its ModelParallelStrategy, where FSDP2 is your own function.

    CPU   python benchmarks/frameworks/fabric_fsdp2.py
    GPU   the same

Source: Lightning's documentation, "ModelParallelStrategy".
"""

from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import framework_job as job
from legacy_common import cli


def shard(model, mesh):
    """Shard each block's parameters, then the rest."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def train(args):
    strategy = ModelParallelStrategy(shard, args.world_size, tensor_parallel_size=1)
    fabric = Fabric(accelerator=args.device, devices=args.world_size, strategy=strategy)
    fabric.launch()  # starts this script again, once for each other rank
    dataset = job.build_dataset(args)
    loader = DataLoader(dataset, args.micro_batch_size, shuffle=False)
    loader = fabric.setup_dataloaders(loader)  # puts a DistributedSampler into it
    model = fabric.setup_module(job.build_model(args))  # the optimizer needs the shards
    optimizer, schedule = job.build_optimizer(model, args)
    optimizer = fabric.setup_optimizers(optimizer)
    record = job.Record("fabric_fsdp2", args, fabric.global_rank, fabric.world_size)
    for inputs, targets in loader:
        loss = job.loss_of(model, inputs, targets)
        optimizer.zero_grad()
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=job.MAX_NORM)
        optimizer.step()
        schedule.step()
        record.step(loss)
    return record.finish(fabric.all_reduce)  # which takes the mean unless told otherwise


def main():
    return train(job.parse_args(__doc__))


if __name__ == "__main__":
    cli.run(main)
