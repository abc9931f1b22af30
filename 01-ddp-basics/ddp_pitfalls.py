"""Reproduce what goes wrong with DDP, one mistake at a time; --cured does the same without it.

    CPU   torchrun --standalone --nproc-per-node=2 01-ddp-basics/ddp_pitfalls.py batch-norm
    GPU   torchrun --standalone --nproc-per-node=gpu 01-ddp-basics/ddp_pitfalls.py batch-norm

Each mistake is one function. Look for: the symptom, as an error or as a check that fails (exit code
1), and what the same command says with --cured.

Sources: docs.pytorch.org, DistributedDataParallel (notes), torch.utils.data.distributed, and
SyncBatchNorm; Goyal et al., ImageNet in 1 Hour (2017), section 3, for batch norm.
"""

import contextlib
import resource
import time

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from legacy_common import cli, runtime
from legacy_common.lab import proofs
from legacy_common.report import Report

MIB = 2**20  # bytes


def ddp(model, device, **options):
    ids = [device.index] if device.type == "cuda" else None
    return DDP(model.to(device), ids, **options)


def samples(count, device):
    """Return digits and their labels. Shapes: (count, 64), (count,)."""
    pixels, labels = load_digits(return_X_y=True)
    chosen = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[:count]
    images = (torch.tensor(pixels).float() - 4.88) / 6.02  # mean 0, standard deviation 1
    return images[chosen].to(device), torch.tensor(labels)[chosen].to(device)


def train(model, batches):
    """Take a step on each batch; return the losses of this rank."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for images, labels in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()  # a GPU has only been told so far: this waits for it


def hang_at_a_step(args, world, device, report):
    """Rank 1 has one batch less. The others wait for it in the all-reduce of the last step."""
    images, labels = samples(40, device)
    batches = list(zip(images.split(10), labels.split(10), strict=True))
    mine = batches[:-1] if world.rank == 1 and not args.cured else batches
    losses = train(ddp(nn.Linear(64, 10), device), mine)
    if len(losses) < len(batches):
        time.sleep(2 * args.timeout)  # it is elsewhere: evaluates, saves, or has ended
    # Cure: deal equally many samples to all ranks, as ShardedSampler and DistributedSampler do.
    report.check("steps of this rank", len(losses), len(batches), 0, "the other ranks")


def unused_parameters(args, world, device, report):
    """A layer takes no part in the loss: DDP waits for a gradient that never comes."""

    class Branched(nn.Module):
        def __init__(self):
            super().__init__()
            self.used = nn.Linear(64, 10)
            self.unused = nn.Linear(64, 10)

        def forward(self, images):
            return self.used(images)

    # Cure: take the layer out; or have DDP look for such layers, at a cost in each step.
    model = ddp(Branched(), device, find_unused_parameters=args.cured)
    losses = train(model, [samples(32, device)] * 2)
    report.check("steps taken", len(losses), 2, 0, "two batches")


def bypassed_wrapper(args, world, device, report):
    """The loop calls the model inside the wrapper: DDP averages nothing, and ranks drift apart."""
    plain = nn.Linear(64, 10)
    ddp_model = ddp(plain, device)
    images, labels = samples(32 * world.world_size, device)
    own = slice(world.rank, None, world.world_size)
    train(ddp_model if args.cured else ddp_model.module, [(images[own], labels[own])])
    proofs.same_weights(report, plain)


def losses_differ(args, world, device, report):
    """Each rank prints the loss of its own samples. Nothing is wrong but the printing."""
    images, labels = samples(32 * world.world_size, device)
    own = slice(world.rank, None, world.world_size)
    loss = train(ddp(nn.Linear(64, 10), device), [(images[own], labels[own])])[0].to(device)
    if args.cured:  # the mean over ranks, which is the loss of the global batch
        dist.all_reduce(loss)
        loss /= world.world_size
    printed = runtime.gather(f"{loss.item():.4f}")
    name = f"distinct losses, of {' '.join(sorted(set(printed)))}"
    report.check(name, len(set(printed)), 1, 0, "one model, one global batch")


def forgotten_set_epoch(args, world, device, report):
    """PyTorch's sampler shuffles by seed and epoch; nobody tells it the epoch."""
    sampler = DistributedSampler(range(1000), world.world_size, world.rank)
    orders = set()
    for epoch in range(3):
        if args.cured:
            sampler.set_epoch(epoch)
        orders.add(tuple(sampler))
    report.check("distinct orders in 3 epochs", len(orders), 3, 0, "a shuffle for each epoch")


def batch_norm(args, world, device, report):
    """The mean over a rank's samples is not that over the global batch: another gradient."""
    # Cure: a norm that looks at one sample. On GPUs nn.SyncBatchNorm.convert_sync_batchnorm(model)
    # takes the mean over all ranks: an all-gather forward, an all-reduce backward for each layer.
    norm = nn.LayerNorm(32) if args.cured else nn.BatchNorm1d(32)
    plain = nn.Sequential(nn.Linear(64, 32), norm, nn.GELU(), nn.Linear(32, 10)).to(device)
    images, labels = samples(16 * world.world_size, device)
    alone = proofs.gradient_of_one_process(plain, [F.cross_entropy(plain(images), labels)])
    model = ddp(plain, device)
    own = slice(world.rank, None, world.world_size)
    F.cross_entropy(model(images[own]), labels[own]).backward()
    proofs.same_gradient(report, plain, alone, 1e-5)


def out_of_memory(args, world, device, report):
    """The last rank has not enough memory for its batch. The others lose it."""
    wanted = 32_768  # samples
    batch = 1024 if args.cured else wanted  # cure: accumulate over parts
    steps = wanted // batch
    model = ddp(nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 10)), device)
    images, labels = (tensor[torch.arange(batch) % 1000] for tensor in samples(1000, device))
    if world.rank == world.world_size - 1:
        leave_only(100 * MIB, device)
    for step in range(steps):
        with model.no_sync() if step < steps - 1 else contextlib.nullcontext():
            (F.cross_entropy(model(images), labels) / steps).backward()
    report.check("samples", batch * steps, wanted, 0, "the batch that was wanted")


def leave_only(more, device):
    """Let this process have `more` bytes than it holds now (on a GPU: in all)."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(more / total, device)
    else:
        limit = psutil.Process().memory_info().vms + more
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


class SlowDigits(Dataset):
    """Digits that take 1 ms each to arrive, as from a disk far away; and when loading one began."""

    def __init__(self):
        self.images, self.labels = samples(512, "cpu")

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        begun = time.monotonic()  # the same clock in all processes of a machine
        time.sleep(0.001)
        return self.images[index], self.labels[index], begun


def slow_input(args, world, device, report):
    """Each step waits for its data: nobody loads the next batch while this one is trained on."""
    model = ddp(nn.Sequential(nn.Linear(64, 4096), nn.GELU(), nn.Linear(4096, 10)), device)
    batches = iter(DataLoader(SlowDigits(), 16, num_workers=2 if args.cured else 0))
    next(batches)  # workers need a while to start
    waited = 0.0  # seconds
    not_begun = 0
    started = time.monotonic()
    for _ in range(20):
        asked = time.monotonic()
        images, labels, begun = next(batches)
        waited += time.monotonic() - asked
        not_begun += int(begun.min() >= asked)
        train(model, [(images.to(device), labels.to(device))] * 4)
    share = waited / (time.monotonic() - started)
    report.say(f"rank 0 waited for data {share:.0%} of the time")
    name = "of 20 batches, begun only when they were asked for"
    report.check(name, max(runtime.gather(not_begun)), 0, 10, "loaded ahead")


PITFALLS = {
    function.__name__.replace("_", "-"): function
    for function in (hang_at_a_step, unused_parameters, bypassed_wrapper, losses_differ,
                     forgotten_set_epoch, batch_norm, out_of_memory, slow_input)
}  # fmt: skip


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    parser.add_argument("pitfall", choices=PITFALLS, help="the mistake to make")
    parser.add_argument("--cured", action="store_true", help="do not make it")
    return parser.parse_args()


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        if world.world_size < 2:
            raise cli.UsageError("needs 2 ranks: start it with torchrun --nproc-per-node=2")
        report = Report("01-ddp-basics/ddp_pitfalls.py", args, world, device)
        pitfall = PITFALLS[args.pitfall]
        runtime.seed_everything(args.seed)
        report.start(f"{args.pitfall}: {pitfall.__doc__}")
        pitfall(args, world, device, report)
        return report.finish("cured" if args.cured else "nothing went wrong")


if __name__ == "__main__":
    cli.run(main)
