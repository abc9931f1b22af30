"""The one job in DeepSpeed's engine, stage 0: data parallel, set by a dictionary.

    CPU   torchrun --standalone --nproc-per-node=2 \\
              benchmarks/frameworks/deepspeed_engine.py
    GPU   deepspeed --num_gpus=8 \\
              benchmarks/frameworks/deepspeed_engine.py --world-size 8

Source: deepspeed.ai, "Getting Started". Module 03 is about the other stages.
"""

import os

import deepspeed
from torch.utils.data import DataLoader, DistributedSampler

import framework_job as job


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
        "gradient_clipping": job.MAX_NORM,  # without it DeepSpeed clips at 1.0, too
        "zero_optimization": {"stage": 0},
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule, config=config
    )
    record = job.Record(args, rank, world_size)
    for inputs, targets in loader:
        loss = job.loss_of(engine, inputs.to(device), targets.to(device))
        engine.backward(loss)
        engine.step()  # clips, updates, steps the schedule, sets gradients to zero
        record.step(loss)
    code = record.finish(job.mean_over_ranks)
    deepspeed.comm.destroy_process_group()
    return code


if __name__ == "__main__":
    # DeepSpeed would compile its own all-reduce for CPUs, which takes a minute.
    vars(deepspeed.ops)["__compatible_ops__"] = {}
    job.run(train, __doc__)
