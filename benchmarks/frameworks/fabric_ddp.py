"""The one job in Lightning Fabric: it starts ranks and wraps objects of your loop.

    CPU   python benchmarks/frameworks/fabric_ddp.py
    GPU   the same

Source: Lightning's documentation, "Convert PyTorch code to Fabric".
"""

from lightning.fabric import Fabric
from torch.utils.data import DataLoader

import framework_job as job


def train(args):
    fabric = Fabric(accelerator=args.device, devices=args.world_size, strategy="ddp")
    fabric.launch()  # starts this script again, once for each other rank
    dataset = job.build_dataset(args)
    loader = DataLoader(dataset, args.micro_batch_size, shuffle=False)
    loader = fabric.setup_dataloaders(loader)  # puts a DistributedSampler into it
    model = job.build_model(args)
    optimizer, schedule = job.build_optimizer(model, args)
    model, optimizer = fabric.setup(model, optimizer)
    record = job.Record(args, fabric.global_rank, fabric.world_size)
    for inputs, targets in loader:
        loss = job.loss_of(model, inputs, targets)
        optimizer.zero_grad()
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=job.MAX_NORM)
        optimizer.step()
        schedule.step()
        record.step(loss)
    return record.finish(
        fabric.all_reduce
    )  # which takes the mean unless told otherwise


if __name__ == "__main__":
    job.run(train, __doc__)
