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

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from dist_common import cli, data, measure, models, runtime
from dist_common.report import Report


def need_two_gpus():
    gpus = torch.cuda.device_count()
    if gpus < 2:
        raise cli.UsageError(
            f"nn.DataParallel spreads one process over several GPUs, and this machine has {gpus}: "
            "run this where there are two or more; the guide says what it shows"
        )


def build(args, device):
    runtime.seed_everything(args.seed)
    return models.Transformer(models.preset(args.preset, args.seq_len)).to(device)


def batch_of(args, step, ranks, sequences, device):
    """Return one rank's part of a step's global batch, or all of it. Shapes: (B, T) each."""
    first = step * args.global_batch_size
    items = [sequences[first + i] for i in range(args.global_batch_size)]
    parts = [torch.stack(part).to(device) for part in zip(*items, strict=True)]
    return [part[ranks] for part in parts]


def train(model, batches, device):
    """Train on the batches; return each step's loss, and the median time of a step in ms."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    timer, losses = measure.StepTimer(device), []
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


def peak_gib(device):
    """Return the most memory allocated on a GPU since the last call, by this process."""
    if device.type != "cuda":
        return 0.0
    peak = torch.cuda.max_memory_allocated(device) / measure.GIB
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add, positive = parser.add_argument, cli.positive_int
    add("--preset", choices=models.PRESETS, default="124m", help="size of the model (124m)")
    add("--seq-len", type=positive, default=512, help="tokens per sequence (512)")
    add("--global-batch-size", type=positive, default=32, help="sequences per step (32)")
    add("--max-steps", type=positive, default=20, help="steps of each kind (20)")
    return parser.parse_args()


def main():
    args = parse_args()
    need_two_gpus()
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
        steps, mine = range(args.max_steps), slice(world.rank, None, world.world_size)

        spread, alone_ms, memory = torch.zeros(args.max_steps, device=device), 0.0, [0.0]
        if world.is_rank0:
            batches = (batch_of(args, i, slice(None), sequences, device) for i in steps)
            spread, alone_ms = train(nn.DataParallel(build(args, device)), batches, device)
            gpus = range(torch.cuda.device_count())
            memory = [peak_gib(torch.device("cuda", gpu)) for gpu in gpus] or [0.0]
        dist.barrier(waiting)
        model = DDP(build(args, device), [device.index] if device.type == "cuda" else None)
        batches = (batch_of(args, i, mine, sequences, device) for i in steps)
        losses, step_ms = train(model, batches, device)
        dist.all_reduce(losses)
        losses /= world.world_size
        peaks = runtime.gather(peak_gib(device))

        rows = [
            ("DataParallel", f"{alone_ms:.1f} ms", f"{memory[0]:.2f} GiB", f"{memory[-1]:.2f} GiB"),
            ("DDP", f"{step_ms:.1f} ms", f"{peaks[0]:.2f} GiB", f"{peaks[-1]:.2f} GiB"),
        ]
        report.table(rows, ("", "step", "GPU 0", "last GPU"))
        report.metrics = {
            "data_parallel_step_time_ms": alone_ms,
            "ddp_step_time_ms": step_ms,
            "data_parallel_gpu0_peak_memory_gib": memory[0],
            "ddp_gpu0_peak_memory_gib": peaks[0],
        }
        if world.is_rank0:
            error = (spread - losses).abs().max().item()
            name, source = "largest difference of losses", "the same global batches"
            report.check(name, error, 0, 1e-3, source)
        return report.finish(f"{step_ms:.1f} ms a step, not {alone_ms:.1f} ms")


if __name__ == "__main__":
    cli.run(main)
