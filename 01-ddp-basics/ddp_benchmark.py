"""Measure how DDP scales and where the time of a step goes.

    CPU   python 01-ddp-basics/ddp_benchmark.py
    GPU   python 01-ddp-basics/ddp_benchmark.py --model resnet50 --global-batch-size 256

The script measures one process, then starts itself with torchrun on 2, 4, ... ranks up
to --max-ranks. Started by torchrun, it measures that number of ranks only. Look for:
the efficiency, and which loss is the largest.

Sources: Amdahl (1967) and Gustafson (1988) for strong and weak scaling; He et al.
(2016) for ResNet-50.
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

from dist_common import cli, runtime
from dist_common.model import PRESETS, build_transformer
from dist_common.report import Report

SEQ_LEN, IMAGE_SIZE = 128, 64  # tokens, pixels
LOSSES = ("slower computing", "stragglers", "communication")


def build_model(name, seed, device):
    """Return a model, the same on every rank, and a function that makes a batch."""
    runtime.seed_everything(seed)
    if name == "resnet50":
        from torchvision.models import resnet50  # takes two seconds to import

        def make_batch(size):  # images (B, 3, H, W), labels (B,)
            images = torch.randn(size, 3, IMAGE_SIZE, IMAGE_SIZE)
            return images.to(device), torch.randint(1000, (size,)).to(device)

        return resnet50().to(device), make_batch

    def make_batch(size):  # inputs and targets, (B, T) each
        tokens = torch.randint(256, (2, size, SEQ_LEN)).to(device)
        return tokens[0], tokens[1]

    return build_transformer(PRESETS["tiny"], seed, device), make_batch


def compute(model, batch):
    """Take forward and backward. DDP all-reduces the gradients in backward.

    Old scripts use nn.DataParallel instead:

        model = nn.DataParallel(model.cuda())  # one process uses all GPUs
        logits = model(inputs)  # copies the weights to each GPU, gathers the logits
    """
    inputs, targets = batch
    logits = model(inputs)
    F.cross_entropy(logits.flatten(0, -2), targets.flatten()).backward()


def gradient_error(ddp_model, local_batch, whole):
    """Return the relative error of DDP's gradient against one process.

    In evaluation mode, because batch norm would use the mean of a rank's samples.
    """
    gradients = []
    for model, batch in ((ddp_model, local_batch), (ddp_model.module, whole)):
        model.eval()
        compute(model, batch)
        gradients.append(torch.cat([w.grad.flatten() for w in model.parameters()]))
        model.zero_grad()
        model.train()
    averaged, expected = gradients
    return ((averaged - expected).norm() / expected.norm()).item()


def timed_ms(function, device):
    """Return the milliseconds of a call, on a GPU until its kernels have ended."""
    dist.barrier()
    started = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e3


def time_step(ddp_model, batch, rounds, run):
    """Time a step, and the same work without the all-reduce. Medians, in ms."""
    rows = []
    for _ in range(rounds):
        times = []
        for context in (contextlib.nullcontext, ddp_model.no_sync):
            with context():
                times.append(timed_ms(lambda: compute(ddp_model, batch), run.device))
            ddp_model.zero_grad()
        steps, silent = zip(*runtime.gather(times, run.cpu_group), strict=True)
        rows.append((max(steps), max(silent), statistics.mean(silent)))
    step, slowest, mean = map(statistics.median, zip(*rows, strict=True))
    return {"step": step, "slowest": slowest, "mean": mean}


def measure(args, run):
    """Time steps with the same global batch (strong) or batch per rank (weak)."""
    model, make_batch = build_model(args.model, args.seed, run.device)
    whole = make_batch(args.global_batch_size)
    local_batch = [part.chunk(run.world_size)[run.rank] for part in whole]
    ddp_model = DDP(model)
    error = max(
        runtime.gather(gradient_error(ddp_model, local_batch, whole), run.cpu_group)
    )
    return {
        "gradient_error": error,
        "strong": time_step(ddp_model, local_batch, args.rounds, run),
        "weak": time_step(ddp_model, whole, args.rounds, run),
    }


def measure_in_new_processes(ranks):
    """Start this script with torchrun and return its metrics."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={ranks}", *sys.argv, "--output-dir", folder]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, env=environ, capture_output=True, text=True)
        if ended.returncode:
            raise RuntimeError(f"{ranks} ranks failed: {ended.stdout} {ended.stderr}")
        return json.loads(Path(folder, "results.json").read_text())["metrics"]


def split_step(kind, ranks, measured, alone):
    """Divide a step into the ideal time and three losses, in ms; they add up to it.

    `measured` and `alone` are the times of these ranks and of one rank.
    """
    ideal = alone["mean"] / ranks if kind == "strong" else alone["mean"]
    losses = (
        measured["mean"] - ideal,
        measured["slowest"] - measured["mean"],
        measured["step"] - measured["slowest"],
    )
    return {"ideal": ideal, **dict(zip(LOSSES, losses, strict=True))}


def show_scaling(report, measured):
    """Print where the time goes on each number of ranks, and the efficiency."""
    rows = []
    report.metrics["scaling"] = []
    for kind in ("strong", "weak"):
        for ranks, metrics in measured.items():
            step = metrics[kind]["step"]
            parts = split_step(kind, ranks, metrics[kind], measured[1][kind])
            efficiency = parts["ideal"] / step
            times = [f"{value:.1f} ms" for value in (step, *parts.values())]
            rows.append((kind, str(ranks), *times, f"{efficiency:.0%}"))
            report.metrics[f"{kind}_step_time_ms_{ranks}"] = step
            report.metrics[f"{kind}_efficiency_{ranks}"] = efficiency
            row = {"kind": kind, "ranks": ranks, "step": step, **parts}
            report.metrics["scaling"].append(row)
    headers = ("scaling", "ranks", "step", "ideal", *LOSSES, "efficiency")
    report.table(rows, headers)


def choose_rank_counts(args):
    """Return 2, 4, 8, ... and --max-ranks."""
    powers = [2**power for power in range(1, 20)]
    smaller = [ranks for ranks in powers if ranks < args.max_ranks]
    return smaller + ([args.max_ranks] if args.max_ranks > 1 else [])


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add, positive = parser.add_argument, cli.positive_int
    add(
        "--model",
        choices=("transformer", "resnet50"),
        default="transformer",
        help="(transformer)",
    )
    add(
        "--max-ranks",
        type=positive,
        default=torch.cuda.device_count() or 2,
        help="most processes to start (one per GPU; 2 without a GPU)",
    )
    add(
        "--global-batch-size",
        type=positive,
        default=8,
        help="samples per step in strong scaling, and per rank in weak scaling (8)",
    )
    add("--rounds", type=positive, default=8, help="measurements of each time (8)")
    return parser.parse_args()


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as run:
        started_alone = run.launcher == "python"
        more_ranks = choose_rank_counts(args) if started_alone else []
        for ranks in (*more_ranks, run.world_size):
            if args.global_batch_size % ranks:
                raise cli.UsageError(
                    f"--global-batch-size {args.global_batch_size} is not a multiple "
                    f"of {ranks} ranks"
                )
        report = Report("01-ddp-basics/ddp_benchmark.py", args, run)
        if run.device.type == "cpu":
            torch.set_num_threads(1)  # one core for each rank, also for a single one
        measured = {run.world_size: measure(args, run)}
        for ranks in more_ranks:
            measured[ranks] = measure_in_new_processes(ranks)
        if started_alone:
            show_scaling(report, measured)
        else:
            report.metrics = measured[run.world_size]
            for kind in ("strong", "weak"):
                times = report.metrics[kind]
                run.print0(
                    f"{kind} scaling: {times['step']:.1f} ms per step, "
                    f"{times['slowest']:.1f} ms without the all-reduce"
                )
        for ranks, metrics in measured.items():
            # A ReLU near 0 may turn a last bit into another gradient.
            tolerance = 0.05 if args.model == "resnet50" else 1e-5
            name = f"world size {ranks}: relative error of the gradient"
            report.check(name, metrics["gradient_error"], 0, tolerance)
        return report.finish("the gradients are right, so the times count")


if __name__ == "__main__":
    cli.run(main)
