"""Measure why nn.DataParallel is not used: the same training by it and by DDP, on the same GPUs.

    GPU   python 01-ddp-basics/data_parallel_vs_ddp.py          (needs two GPUs or more)
    CPU   nn.DataParallel does nothing without GPUs: exit code 2

It starts one process for each GPU with torchrun. Rank 0 first trains alone, with DataParallel over
all GPUs, then all ranks with DDP. Look for: equal losses, the time of a step, and GPU 0's memory.

Sources: docs.pytorch.org, nn.DataParallel ("it is recommended to use DistributedDataParallel") and
CUDA semantics; Li et al., PyTorch Distributed (VLDB 2020), section 2.2.
"""

import os
import subprocess
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from dist_common import cli, data, measure, models, runtime
from dist_common.lab import proofs
from dist_common.report import Report


@dataclass
class Training:
    """What a training took: losses (steps,), median step time in ms, peak memory by GPU in GiB."""

    losses: torch.Tensor
    step_time_ms: float
    peaks: list[float]


def train(model, batches, device):
    """Train on the batches; return each step's loss, and the median time of a step in ms."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    timer = measure.StepTimer(device)
    losses = []
    for inputs, targets in batches:
        with timer:
            optimizer.zero_grad()

            # DataParallel: copies all weights to each GPU, scatters inputs, gathers logits on GPU
            # 0, and all that from one process, whose threads take turns. DDP: none of it.
            logits = model(inputs)

            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), timer.median_ms()


def train_data_parallel(args, sequences, device):
    """Train in one process, whose DataParallel spreads each global batch over all GPUs."""
    whole = args.global_batch_size
    batches = data.batches_of(sequences, args.max_steps, whole, 0, whole, device)
    losses, step_time_ms = train(nn.DataParallel(build(args, device)), batches, device)
    gpus = range(torch.cuda.device_count())
    peaks = [peak_gib(torch.device("cuda", gpu)) for gpu in gpus] or [0.0]
    return Training(losses, step_time_ms, peaks)


def train_ddp(args, sequences, device):
    """Train in a process per GPU, each on its part of the global batch."""
    rank, ranks, whole = dist.get_rank(), dist.get_world_size(), args.global_batch_size
    part = whole // ranks
    batches = data.batches_of(sequences, args.max_steps, whole, rank * part, part, device)
    model = DDP(build(args, device), [device.index] if device.type == "cuda" else None)
    losses, step_time_ms = train(model, batches, device)
    dist.all_reduce(losses)
    return Training(losses / ranks, step_time_ms, runtime.gather(peak_gib(device)))


def build(args, device):
    runtime.seed_everything(args.seed)
    return models.Transformer(models.preset(args.preset, args.seq_len)).to(device)


def peak_gib(device):
    """Return the most memory allocated on a GPU since the last call, by this process."""
    if device.type != "cuda":
        return 0.0
    peak = torch.cuda.max_memory_allocated(device) / measure.GIB
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def need_two_gpus(device):
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    if gpus < 2:
        raise cli.UsageError(
            f"nn.DataParallel spreads one process over several GPUs, and there are {gpus} here: "
            "run this where there are two or more; data_parallel_vs_ddp.md says what it shows"
        )


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add, positive = parser.add_argument, cli.positive_int
    add("--preset", choices=models.PRESETS, default="124m", help="size of the model (124m)")
    add("--seq-len", type=positive, default=512, help="tokens per sequence (512)")
    add("--global-batch-size", type=positive, default=32, help="sequences per step (32)")
    add("--max-steps", type=positive, default=20, help="steps of each kind (20)")
    return parser.parse_args()


def compare(report, spread, ddp):
    """Print both trainings side by side, and check that their losses are equal."""
    rows = []
    for name, key, training in (("DataParallel", "data_parallel", spread), ("DDP", "ddp", ddp)):
        first, last = training.peaks[0], training.peaks[-1]
        numbers = (f"{training.step_time_ms:.1f} ms", f"{first:.2f} GiB", f"{last:.2f} GiB")
        rows.append((name, *numbers))
        report.metrics[f"{key}_step_time_ms"] = training.step_time_ms
        report.metrics[f"{key}_gpu0_peak_memory_gib"] = first
    report.table(rows, ("", "step", "GPU 0", "last GPU"))
    name, source = "largest difference of losses", "the same global batches"
    proofs.same_losses(report, spread.losses, ddp.losses, 1e-3, name, source)
    return f"{ddp.step_time_ms:.1f} ms a step, not {spread.step_time_ms:.1f} ms"


def main():
    args = parse_args()
    need_two_gpus(args.device)
    if runtime.discover().launcher == "python":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node=gpu", __file__, *sys.argv[1:]]
        return subprocess.run(command, env=dict(os.environ), check=False).returncode
    with runtime.init(args.device, args.timeout) as (world, device):
        if args.global_batch_size % world.world_size:
            raise cli.UsageError(f"--global-batch-size must divide by {world.world_size} ranks")
        report = Report("01-ddp-basics/data_parallel_vs_ddp.py", args, world, device)
        needed = args.global_batch_size * args.max_steps
        sequences = data.Sequences(data.load_text(), args.seq_len, needed)
        report.start(f"{args.preset}, global batch {args.global_batch_size}")
        # Ranks that wait for rank 0 leave their GPUs to it: a barrier of NCCL's keeps them busy.
        waiting = dist.new_group(backend="gloo")
        spread = train_data_parallel(args, sequences, device) if world.is_rank0 else None
        dist.barrier(waiting)
        ddp = train_ddp(args, sequences, device)
        summary = compare(report, spread, ddp) if world.is_rank0 else ""
        return report.finish(summary)


if __name__ == "__main__":
    cli.run(main)
