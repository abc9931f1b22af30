"""Measure how DDP scales and where the time goes.

    CPU   python 01-ddp-basics/ddp_benchmark.py
    GPU   the same: one process for each GPU, as far as --max-ranks goes

It starts the processes itself, with torchrun. (Started by torchrun, it measures that number of
ranks only.) Look for: what a step loses, part by part, and the efficiency that is left.

    --model resnet50     instead of the transformer
    --buckets 0.1 1 25   compare sizes of DDP's buckets, in MiB, on --max-ranks ranks

Sources: Amdahl (1967) and Gustafson (1988) for strong and weak scaling; Li et al., PyTorch
Distributed (VLDB 2020), section 5, for what is measured.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_parts import ddp_benchmark as part
from legacy_common import cli, measure, runtime
from legacy_common.lab import proofs, traffic
from legacy_common.report import Report


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
    found = {name: [] for name in part.TIMES}
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


def ddp_of(name, device, **options):
    """Return the model in DDP, after the first step, in which DDP settles its buckets.

    Old scripts use nn.DataParallel instead; ddp_benchmark.md says why DDP replaced it:

        model = nn.DataParallel(model.cuda())  # one process copies the weights to every GPU
        logits = model(inputs)  # inputs: the global batch; GPU 0 gathers the logits of all GPUs
    """
    model, make = part.build(name, device)
    model = DDP(model, device_ids=[device.index] if device.type == "cuda" else None, **options)
    compute(model, [tensor.to(device) for tensor in make(1)])
    return model, make


def part_of(batch, world):
    """Return this rank's share of a global batch."""
    size = len(batch[0]) // world.world_size
    start = world.rank * size
    return [tensor[start : start + size] for tensor in batch]


def check_bytes(report, model, batch, name):
    """Count a step's all-reduces; together they carry the gradient once. Return how many."""
    with traffic.TrafficCounter() as counter:
        compute(model, batch)
    proofs.one_gradient_sent(report, model, counter, name=f"{name}: bytes all-reduced")
    return counter.calls["all_reduce"]


def measure_this_world(report, args):
    """Fill in what a step takes on these ranks: with the same global batch, and per rank."""
    model, make = ddp_of(args.model, report.device)
    whole = [tensor.to(report.device) for tensor in make(args.global_batch_size)]
    own = part_of(whole, report.world)
    report.metrics["gradient_norm"] = part.gradient_norm(model, own)
    check_bytes(report, model, own, "step")
    for kind, batch in (("strong", own), ("weak", whole)):
        times = measure_step(model, whole, batch, args.rounds, report.world, report.device)
        if kind == "weak":
            times["ideal"] = times["alone"]  # each rank has as much to do as one alone
        report.metrics |= {f"{kind}_{name}_ms": value for name, value in times.items()}


def compare_buckets(report, args):
    """Time a step for each size of DDP's buckets, in turn; and as DDP cuts them by itself."""
    sizes = {"default": {}} | {f"{size:g}": {"bucket_cap_mb": size} for size in args.buckets}
    built = {name: ddp_of(args.model, report.device, **option) for name, option in sizes.items()}
    _, make = built["default"]
    whole = [tensor.to(report.device) for tensor in make(args.global_batch_size)]
    batch = part_of(whole, report.world)
    calls = {}
    for name, (model, _) in built.items():
        calls[name] = check_bytes(report, model, batch, f"bucket {name}")
    times = {name: [] for name in built}
    for _ in report.progress(range(args.rounds), "timing"):
        for name, (model, _) in built.items():
            dist.barrier()
            times[name].append(timed(lambda model=model: compute(model, batch), report.device))
    rows = []
    for name in built:
        median = statistics.median(times[name])
        rows.append((name, str(calls[name]), f"{median:.1f} ms"))
        report.metrics[f"step_time_ms_{name}_mib"] = median
    report.table(rows, ("bucket in MiB", "all-reduces", "step"))


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add, positive = parser.add_argument, cli.positive_int
    add("--model", choices=("transformer", "resnet50"), default="transformer", help="(transformer)")
    add("--max-ranks", type=positive, default=torch.cuda.device_count() or 2,
        help="most processes to start (one per GPU; without a GPU 2)")  # fmt: skip
    add("--global-batch-size", type=positive, default=8,
        help="samples per step in strong scaling, per rank in weak scaling (8)")  # fmt: skip
    add("--rounds", type=positive, default=8, help="times that each thing is measured (8)")
    add("--buckets", type=cli.positive_float, nargs="+", metavar="MIB", help="sizes to compare")
    return parser.parse_args()


def launch(ranks, *flags, **options):
    """Start this script with torchrun on ranks of this machine; return how it ended."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", __file__, *sys.argv[1:], *flags]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}  # one core for a rank, also where it is alone
    return subprocess.run(command, env=environ, text=True, check=False, **options)


def numbers_of_ranks(args):
    """Return 1, 2, 4, ... and --max-ranks. Raises: UsageError when the batch cannot be divided."""
    sizes = [2**power for power in range(32) if 2**power < args.max_ranks] + [args.max_ranks]
    for ranks in sizes:
        if args.global_batch_size % ranks:
            raise cli.UsageError(
                f"--global-batch-size {args.global_batch_size} cannot be dealt to {ranks} ranks"
            )
    return sizes


def measure_all(report, sizes):
    """Measure each number of ranks, one after the other. Return the metrics by number of ranks."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in report.progress(sizes, "numbers of ranks"):
            own = Path(folder, str(ranks))
            ended = launch(ranks, "--output-dir", str(own), capture_output=True)
            if ended.returncode:
                raise RuntimeError(f"{ranks} ranks failed: {ended.stdout} {ended.stderr[-500:]}")
            found[ranks] = json.loads((own / "results.json").read_text())["metrics"]
    return found


def main():
    args = parse_args()
    world = runtime.discover()
    alone = world.launcher == "python"
    if alone and args.buckets:
        return launch(args.max_ranks).returncode  # it prints itself what it finds
    if alone:
        ranks = args.max_ranks
        device = runtime.pick_device(args.device, runtime.World(0, 0, ranks, ranks, "python"))
        report = Report("01-ddp-basics/ddp_benchmark.py", args, world, device)
        sizes = numbers_of_ranks(args)
        start(report, args, ranks)
        part.show_scaling(report, args, measure_all(report, sizes))
        return report.finish("measured")
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("01-ddp-basics/ddp_benchmark.py", args, world, device)
        start(report, args, world.world_size)
        if args.buckets:
            compare_buckets(report, args)
        else:
            measure_this_world(report, args)
        return report.finish("measured")


def start(report, args, ranks):
    """Print the header; warn where the figures say nothing about DDP."""
    cores = measure.core_count()
    report.start(f"{args.model}; {cores} cores for at most {ranks} ranks")
    if report.device.type == "cpu" and ranks > cores:
        report.say("more ranks than cores: they share cores, so this does not show how DDP scales")


if __name__ == "__main__":
    cli.run(main)
