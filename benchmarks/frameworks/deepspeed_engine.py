"""The one job in DeepSpeed's engine, stage 0: plain data parallelism, configured by a dictionary.

    CPU   torchrun --standalone --nproc-per-node=2 benchmarks/frameworks/deepspeed_engine.py
    GPU   deepspeed --num_gpus=8 benchmarks/frameworks/deepspeed_engine.py --world-size 8

Source: deepspeed.ai, "Getting Started". Module 03 is about the other stages.
"""

import os

import deepspeed
from torch.utils.data import DataLoader, DistributedSampler

import framework_job as job
from legacy_common import cli


def train(args):
    device = job.pick_device(args, int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed()
    rank, world_size = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    dataset = job.build_dataset(args)
    sampler = DistributedSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, args.micro_batch_size, sampler=sampler)
    model = job.build_model(args)
    optimizer, schedule = job.build_optimizer(model, args)
    config = {
        "train_micro_batch_size_per_gpu": args.micro_batch_size,
        "gradient_clipping": job.MAX_NORM,  # left out, DeepSpeed clips all the same, at 1.0
        "zero_optimization": {"stage": 0},
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule, config=config
    )
    record = job.Record("deepspeed_engine", args, rank, world_size)
    for inputs, targets in loader:
        loss = job.loss_of(engine, inputs.to(device), targets.to(device))
        engine.backward(loss)
        engine.step()  # clips, updates, steps the schedule, sets gradients to zero
        record.step(loss)
    code = record.finish(job.mean_over_ranks)
    deepspeed.comm.destroy_process_group()
    return code


def main():
    # On CPUs DeepSpeed would compile an all-reduce of its own at this point: a minute.
    vars(deepspeed.ops)["__compatible_ops__"] = {}
    return train(job.parse_args(__doc__))


if __name__ == "__main__":
    cli.run(main)
