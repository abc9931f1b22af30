"""Measure how DDP scales and where the time goes; or what the template costs over bare DDP.

    CPU   python 01-ddp-basics/ddp_benchmark.py
    GPU   the same: one process for each GPU, as far as --max-ranks goes

It starts the processes itself, with torchrun. (Started by torchrun, it measures that number of
ranks only.) Look for: what a step loses, part by part, and the efficiency that is left.

    --model resnet50     instead of the transformer
    --buckets 0.1 1 25   compare sizes of DDP's buckets, in MiB, on --max-ranks ranks
    --overhead           ddp_training.py's step against the same loop in bare DDP

Sources: Amdahl (1967) and Gustafson (1988) for strong and weak scaling; Li et al., PyTorch
Distributed (VLDB 2020), section 5, for what is measured.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from bench_steps import TIMES, compute, ddp_of, gradient_norm, measure_step, part_of, timed
from dist_common import cli, measure, proofs, runtime
from dist_common.report import Report, figure
from template_overhead import BLOCK, measure_overhead

PARTS = ("ideal", "small batch", "shared cores", "stragglers", "communication")


def check_bytes(report, model, batch, name):
    """Count a step's all-reduces; together they carry the gradient once. Return how many."""
    with measure.CollectiveCounter() as counter:
        compute(model, batch)
    proofs.one_gradient_sent(report, model, counter, name=f"{name}: bytes all-reduced")
    return counter.calls["allreduce_"]


def measure_this_world(report, args):
    """Fill in what a step takes on these ranks: with the same global batch, and per rank."""
    model, make = ddp_of(args.model, report.device)
    whole = [tensor.to(report.device) for tensor in make(args.global_batch_size)]
    own = part_of(whole, report.world)
    report.metrics["gradient_norm"] = gradient_norm(model, own)
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


def show_scaling(report, args, found):
    """Print and draw what a step takes on each number of ranks, and where it goes."""
    rows = []
    strong = []
    noise = 0.0
    efficiency = {"strong": [], "weak": []}
    for kind in efficiency:
        for ranks, metrics in found.items():
            full, slowest, mean, alone, ideal = (metrics[f"{kind}_{name}_ms"] for name in TIMES)
            parts = (ideal, alone - ideal, mean - alone, slowest - mean, full - slowest)
            efficiency[kind].append(100 * ideal / full)
            numbers = [f"{value:.1f} ms" for value in (full, *parts)]
            rows.append((kind, str(ranks), *numbers, f"{100 * ideal / full:.0f}%"))
            report.metrics[f"{kind}_step_time_ms_{ranks}"] = full
            report.metrics[f"{kind}_efficiency_{ranks}"] = ideal / full
            strong += [parts] if kind == "strong" else []
            if ranks == 1:
                noise = max(noise, *map(abs, parts[1:]))
    report.metrics["noise_ms"] = noise
    report.say("a step is the sum of ideal and four losses:")
    report.table(rows, ("scaling", "ranks", "step", *PARTS, "efficiency"))
    report.say(f"noise {noise:.1f} ms: one rank loses nothing, and its rows show up to that")
    if report.output:
        title = f"{args.model}, global batch {args.global_batch_size}"
        columns = dict(zip(PARTS, zip(*strong, strict=True), strict=True))
        draw(report.output / "scaling.png", list(found), columns, efficiency, title)
    expected = found[1]["gradient_norm"]
    for ranks, metrics in list(found.items())[1:]:
        # A ReLU at its kink may turn a last bit into a different gradient: resnet50 has those.
        tolerance = expected * (1e-4 if args.model == "resnet50" else 1e-5)
        name = f"{ranks} ranks: norm of the gradient"
        report.check(name, metrics["gradient_norm"], expected, tolerance, "one process")


def draw(path, ranks, parts, efficiency, title):
    """Draw a step's milliseconds, stacked, and the efficiencies. Shapes: lists as long as ranks."""
    with figure(path, 1, 2, figsize=(9, 3.6)) as (left, right):
        names = [str(number) for number in ranks]
        floor = [0.0] * len(ranks)
        for name, values in parts.items():
            heights = [max(value, 0.0) for value in values]  # noise may make a part negative
            left.bar(names, heights, 0.6, bottom=floor, label=name)
            floor = [below + height for below, height in zip(floor, heights, strict=True)]
        steps = [sum(values) for values in zip(*parts.values(), strict=True)]
        places = range(len(names))
        ends = [place - 0.35 for place in places], [place + 0.35 for place in places]
        left.hlines(steps, *ends, colors="black", label="the step")
        left.set(title=f"A step of strong scaling\n({title})", xlabel="ranks", ylabel="ms")
        left.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)  # beside the bars
        right.axhline(100, color="grey", linestyle="--", linewidth=1)
        for name, percents in efficiency.items():
            right.plot(names, percents, marker="o", label=name)
        right.set(title="Efficiency against ideal", xlabel="ranks", ylabel="percent")
        right.set_ylim(0, 110)
        right.legend()
        right.grid(alpha=0.3)


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add, positive = parser.add_argument, cli.positive_int
    add("--model", choices=("transformer", "resnet50"), default="transformer", help="(transformer)")
    add("--max-ranks", type=positive, default=torch.cuda.device_count() or 2,
        help="most processes to start (one per GPU; without a GPU 2)")  # fmt: skip
    add("--global-batch-size", type=positive, default=8,
        help="samples per step in strong scaling, per rank in weak scaling (8)")  # fmt: skip
    add("--rounds", type=positive, help="times that each thing is measured (8; --overhead 60)")
    add("--buckets", type=cli.positive_float, nargs="+", metavar="MIB", help="sizes to compare")
    add("--overhead", action="store_true", help="of ddp_training.py over bare DDP")
    args = parser.parse_args()
    args.rounds = args.rounds or (60 if args.overhead else 8)
    if args.overhead and args.rounds < 3 * BLOCK:
        parser.error(f"--overhead needs --rounds of at least {3 * BLOCK}")
    return args


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
    if alone and (args.overhead or args.buckets):
        return launch(args.max_ranks).returncode  # it prints itself what it finds
    if alone:
        ranks = args.max_ranks
        device = runtime.pick_device(args.device, runtime.World(0, 0, ranks, ranks, "python"))
        report = Report("01-ddp-basics/ddp_benchmark.py", args, world, device)
        sizes = numbers_of_ranks(args)
        start(report, args, ranks)
        show_scaling(report, args, measure_all(report, sizes))
        return report.finish("measured")
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("01-ddp-basics/ddp_benchmark.py", args, world, device)
        start(report, args, world.world_size)
        if args.overhead:
            measure_overhead(report, args.rounds)
        elif args.buckets:
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
