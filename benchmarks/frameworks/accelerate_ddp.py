"""The one job in Hugging Face Accelerate: your loop, `prepare` wraps its objects.

    CPU   torchrun --standalone --nproc-per-node=2 \\
              benchmarks/frameworks/accelerate_ddp.py
    GPU   accelerate launch --num_processes 8 \\
              benchmarks/frameworks/accelerate_ddp.py --world-size 8

Source: Accelerate's documentation, "Add Accelerate to your code".
"""

from accelerate import Accelerator
from torch.utils.data import DataLoader

import framework_job as job


def train(args):
    accelerator = Accelerator(cpu=args.device == "cpu")
    dataset = job.build_dataset(args)
    loader = DataLoader(dataset, args.micro_batch_size, shuffle=False)
    model = job.build_model(args)
    optimizer, schedule = job.build_optimizer(model, args)
    # Not the schedule: a prepared one takes a step for each rank at a time.
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    rank, world_size = accelerator.process_index, accelerator.num_processes
    record = job.Record(args, rank, world_size)
    for inputs, targets in loader:
        loss = job.loss_of(model, inputs, targets)
        optimizer.zero_grad()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), job.MAX_NORM)
        optimizer.step()
        schedule.step()
        record.step(loss)
    code = record.finish(lambda values: accelerator.reduce(values, "mean"))
    accelerator.end_training()
    return code


if __name__ == "__main__":
    job.run(train, __doc__)
