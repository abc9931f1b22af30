"""A step of DDP, timed whole and without what can hold it up."""

import contextlib
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from dist_common import models, runtime

TIMES = ("full", "slowest", "mean", "alone", "ideal")
SEQ_LEN, IMAGE_SIZE = 128, 64  # tokens, pixels


def build(name, device):
    """Return a model, the same on every rank, and a function that makes up a batch of a size."""
    runtime.seed_everything(0)
    if name == "resnet50":
        from torchvision.models import resnet50  # two seconds that the transformer saves

        def batch(size):  # images (B, 3, H, W), labels (B,)
            return torch.randn(size, 3, IMAGE_SIZE, IMAGE_SIZE), torch.randint(1000, (size,))

        return resnet50().to(device), batch

    def batch(size):  # tokens to read and to predict, (B, T) each
        return tuple(torch.randint(256, (size, SEQ_LEN)) for _ in range(2))

    return models.Transformer(models.PRESETS["tiny"]).to(device), batch


def compute(model, batch, synchronised=True):
    """Take forward and backward; DDP all-reduces gradients unless `synchronised` is false."""
    inputs, targets = batch
    with contextlib.nullcontext() if synchronised else model.no_sync():
        logits = model(inputs)
        F.cross_entropy(logits.flatten(0, -2), targets.flatten()).backward()
    model.zero_grad(set_to_none=False)


def timed(function, device):
    """Return the milliseconds that a call takes, on a GPU until its kernels have ended."""
    started = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e3


def measure_step(model, whole, own, rounds, world, device):
    """Time a step, and the same work with less and less that can hold it up. Medians, in ms.

    full: the step as it is. slowest: without communication, the slowest rank counts. mean: all
    ranks count alike. alone: they compute one at a time. ideal: rank 0 alone takes the `whole`
    batch, and its time is divided by the number of ranks.
    """
    found = {name: [] for name in TIMES}
    for _ in range(rounds):  # in turn: a noisy moment meets all of them
        dist.barrier()
        full = timed(lambda: compute(model, own), device)
        dist.barrier()
        together = timed(lambda: compute(model, own, synchronised=False), device)
        for rank in range(world.world_size):
            dist.barrier()
            if rank == world.rank:
                alone = timed(lambda: compute(model, own, synchronised=False), device)
        dist.barrier()
        ideal = alone
        if world.is_rank0 and whole is not own:
            ideal = timed(lambda: compute(model, whole, synchronised=False), device)
        everywhere = runtime.gather((full, together, alone, ideal / world.world_size))
        full, together, alone, ideal = zip(*everywhere, strict=True)
        now = (max(full), max(together), statistics.mean(together), statistics.mean(alone))
        for name, value in zip(found, (*now, ideal[0]), strict=True):
            found[name].append(value)
    return {name: statistics.median(times) for name, times in found.items()}


def gradient_norm(model, batch):
    """Return the norm of the gradient of the global batch, the same on any number of ranks."""
    model.eval()  # else batch norm would compute with the mean of a rank's samples
    inputs, targets = batch
    F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten()).backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    model.zero_grad(set_to_none=False)
    model.train()
    return norm.item()


def ddp_of(name, device, **options):
    """Return the model in DDP, after the first step, in which DDP settles its buckets."""
    model, make = build(name, device)
    model = DDP(model, device_ids=[device.index] if device.type == "cuda" else None, **options)
    compute(model, [tensor.to(device) for tensor in make(1)])
    return model, make


def part_of(batch, world):
    """Return this rank's share of a global batch."""
    size = len(batch[0]) // world.world_size
    start = world.rank * size
    return [tensor[start : start + size] for tensor in batch]
