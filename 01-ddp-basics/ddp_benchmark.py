"""Measure how DDP scales, and what is lost to what; or what the template costs over bare DDP.

    CPU   python 01-ddp-basics/ddp_benchmark.py
    GPU   the same: one process for each GPU, as far as --max-ranks goes

It starts the processes itself, with torchrun. (Started by a launcher, it measures that number of
ranks alone.) Look for: the parts of the time that is lost, and the efficiency they leave.

    --model resnet50     instead of the transformer
    --buckets 0.1 1 25   compare sizes of DDP's buckets, in MiB, on --max-ranks ranks
    --overhead           ddp_training.py's step against the same loop in bare DDP

Sources: Amdahl (1967) and Gustafson (1988) for strong and weak scaling; Li et al., PyTorch
Distributed (VLDB 2020), section 5, for what is measured.
"""

import contextlib
import importlib.util
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
from torch.utils.data import DataLoader

from dist_common import data, measure, runtime
from dist_common.console import Console, plot_stacked
from dist_common.models import PRESETS, Transformer

TIMES = ("full", "slowest", "mean", "alone", "ideal")
PARTS = ("ideal", "small batch", "shared cores", "stragglers", "communication")
SEQ_LEN, IMAGE_SIZE = 128, 64  # tokens, pixels
WARMUP = 5  # steps of --overhead that do not count


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

    return Transformer(PRESETS["tiny"]).to(device), batch


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
        everywhere = [None] * world.world_size
        dist.all_gather_object(everywhere, (full, together, alone, ideal / world.world_size))
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


def ddp_of(args, device, **options):
    """Return the model in DDP, after the first step, in which DDP settles its buckets."""
    model, make = build(args.model, device)
    model = DDP(model, device_ids=[device.index] if device.type == "cuda" else None, **options)
    compute(model, [tensor.to(device) for tensor in make(1)])
    return model, make


def check_bytes(results, model, batch, name):
    """Count a step's all-reduces; together they carry the gradient once. Return how many."""
    with measure.CollectiveCounter() as counter:
        compute(model, batch)
    sent, gradient = counter.bytes["allreduce_"], sum(p.nbytes for p in model.parameters())
    results.check(f"{name}: bytes all-reduced", sent, gradient, 0, "one gradient per weight")
    return counter.calls["allreduce_"]


def part_of(batch, world):
    """Return this rank's share of a global batch."""
    size = len(batch[0]) // world.world_size
    return [tensor[world.rank * size : (world.rank + 1) * size] for tensor in batch]


def measure_this_world(args, world, device, results):
    """Fill in what a step takes on these ranks: with the same global batch, and per rank."""
    model, make = ddp_of(args, device)
    whole = [tensor.to(device) for tensor in make(args.global_batch_size)]
    own = part_of(whole, world)
    results.metrics["gradient_norm"] = gradient_norm(model, own)
    check_bytes(results, model, own, "step")
    for kind, batch in (("strong", own), ("weak", whole)):
        times = measure_step(model, whole, batch, args.rounds, world, device)
        if kind == "weak":
            times["ideal"] = times["alone"]  # each rank has as much to do as one alone
        results.metrics |= {f"{kind}_{name}_ms": value for name, value in times.items()}


def compare_buckets(args, world, device, console, results):
    """Time a step for each size of DDP's buckets, in turn."""
    built = {size: ddp_of(args, device, bucket_cap_mb=size) for size in args.buckets}
    _, make = built[args.buckets[0]]
    batch = part_of([tensor.to(device) for tensor in make(args.global_batch_size)], world)
    models = {size: model for size, (model, _) in built.items()}
    calls = {size: check_bytes(results, m, batch, f"{size:g} MiB") for size, m in models.items()}
    times, rows = {size: [] for size in models}, []
    for _ in console.progress(range(args.rounds), "timing"):
        for size, model in models.items():
            dist.barrier()
            times[size].append(timed(lambda model=model: compute(model, batch), device))
    for size in models:
        median = statistics.median(times[size])
        rows.append((f"{size:g}", str(calls[size]), f"{median:.1f} ms"))
        results.metrics[f"step_time_ms_{size:g}_mib"] = median
    console.table(rows, ("bucket in MiB", "all-reduces", "step"))


def show_scaling(args, found, console, results, output):
    """Print and draw what a step takes on each number of ranks, and where it goes."""
    rows, strong, efficiency = [], [], {"strong": [], "weak": []}
    for kind in efficiency:
        for ranks, metrics in found.items():
            full, slowest, mean, alone, ideal = (metrics[f"{kind}_{name}_ms"] for name in TIMES)
            parts = (ideal, alone - ideal, mean - alone, slowest - mean, full - slowest)
            efficiency[kind].append(100 * ideal / full)
            numbers = [f"{value:.1f} ms" for value in (full, *parts)]
            rows.append((kind, str(ranks), *numbers, f"{100 * ideal / full:.0f}%"))
            results.metrics[f"{kind}_step_time_ms_{ranks}"] = full
            results.metrics[f"{kind}_efficiency_{ranks}"] = ideal / full
            strong += [parts] if kind == "strong" else []
    console.say("a step is the sum of ideal and four losses:")
    console.table(rows, ("scaling", "ranks", "step", *PARTS, "efficiency"))
    if output:
        title = f"{args.model}, global batch {args.global_batch_size}"
        columns = dict(zip(PARTS, zip(*strong, strict=True), strict=True))
        plot_stacked(output / "scaling.png", list(found), columns, efficiency, title)
    expected = found[1]["gradient_norm"]
    for ranks, metrics in list(found.items())[1:]:
        # A ReLU at its kink may turn a last bit into a different gradient: resnet50 has those.
        tolerance = expected * (1e-4 if args.model == "resnet50" else 1e-5)
        name = f"{ranks} ranks: norm of the gradient"
        results.check(name, metrics["gradient_norm"], expected, tolerance, "one process")


class BareLoop:
    """What ddp_training.py does in a step, as one writes it without the rest."""

    def __init__(self, template, args, world, device):
        runtime.seed_everything(args.seed)
        model = Transformer(PRESETS[args.preset]).to(device)
        self.optimizer = torch.optim.AdamW(model.parameters(), 1.0, (0.9, 0.95), weight_decay=0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda done: template.lr_at(done + 1, args)
        )
        self.model = DDP(model, device_ids=[device.index] if device.type == "cuda" else None)
        text = data.load_text(max_bytes=1_000_000)
        train_set = data.Sequences(text[: len(text) - len(text) // 20], args.seq_len)
        sampler = data.ShardedSampler(len(train_set), world.rank, world.world_size, args.seed)
        self.batches = self.endless(DataLoader(train_set, args.micro_batch_size, sampler=sampler))
        self.device, self.sampler = device, sampler

    def endless(self, loader):
        while True:
            yield from loader
            self.sampler.set_epoch(self.sampler.epoch + 1)

    def step(self):
        inputs, targets = (tensor.to(self.device) for tensor in next(self.batches))
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        return loss.detach()


def load_template():
    """Import ddp_training.py by its path. It is no helper here, but the thing to be measured."""
    path = Path(__file__).with_name("ddp_training.py")
    spec = importlib.util.spec_from_file_location("template", path)
    template = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(template)
    return template


def alternate(template, console, times, losses):
    """Make the template's loop take a step of each bare loop between any two of its own steps.

    Its loop runs over what its console's `progress` yields. Fills in `times`, pairs of CPU and wall
    time in ms from all ranks, and the bare loop's `losses`, each the mean over ranks.
    """

    def clocks():
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.process_time() * 1e3, time.perf_counter() * 1e3

    def took(before):
        return [after - start for start, after in zip(before, clocks(), strict=True)]

    class Between(Console):
        def say(self, line=""):
            pass

        def progress(self, steps, name):
            args, world = template.parse_args(), runtime.discover()
            device = runtime.pick_device(args.device, world)
            template.plan_batches(args, world)
            bare = {name: BareLoop(template, args, world, device) for name in list(times)[1:]}
            for step in console.progress(steps, "alternating"):
                dist.barrier()
                before = clocks()
                yield step
                times["template"].append(took(before))
                for name, loop in bare.items():
                    dist.barrier()
                    before = clocks()
                    loss = loop.step()
                    times[name].append(took(before))
                losses.append(loss)
            means = torch.stack(losses)
            dist.all_reduce(means)
            losses[:] = (means / world.world_size).tolist()
            for name in times:
                everywhere = [None] * world.world_size
                dist.all_gather_object(everywhere, times[name])
                times[name] = [step for own in everywhere for step in own[WARMUP:]]

    template.Console = Between


def measure_overhead(args, console, results):
    """Compare the template with the bare loop, and the bare loop with itself."""
    template, losses = load_template(), []
    times = {name: [] for name in ("template", "bare", "bare again")}
    alternate(template, console, times, losses)
    with tempfile.TemporaryDirectory() as folder:
        # Saving and evaluating are left out: they take their time, but not in each step.
        rarely = ["--save-every", str(10**9), "--eval-every", str(10**9)]
        flags = ["--max-steps", str(args.rounds), "--output-dir", f"{folder}/run", *rarely]
        sys.argv = ["ddp_training.py", "--device", args.device, *flags]
        if template.main():
            raise RuntimeError("ddp_training.py failed one of its own checks: run it alone")
        if not results.world.is_rank0:
            return
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
        own_losses = [json.loads(line)["loss"] for line in lines if '"loss"' in line]
    rows = []
    for name, metric in (("template", "overhead_ratio"), ("bare again", "bare_ratio")):
        for clock, position in (("CPU", 0), ("wall", 1)):
            ratios = []
            for own, *bare in zip(*times.values(), strict=True):
                mine, others = (own, bare) if name == "template" else (bare[1], bare[:1])
                ratios.append(mine[position] / statistics.mean(b[position] for b in others))
            low, median, high = statistics.quantiles(ratios, n=4)
            rows.append((name, clock, *(f"{ratio - 1:+.1%}" for ratio in (median, low, high))))
            results.metrics[metric if clock == "CPU" else f"{metric}_wall"] = median
    headers = ("against bare DDP", "time", "median", "half of the steps from", "to")
    console.table(rows, headers, names=2)
    error = max(abs(one - other) for one, other in zip(own_losses, losses, strict=True))
    results.check("largest difference of losses", error, 0, 1e-5, "the same data in the same order")


def parse_args():
    parser = runtime.ArgumentParser(__doc__)
    add, positive = parser.add_argument, runtime.positive_int
    add("--model", choices=("transformer", "resnet50"), default="transformer", help="(transformer)")
    add("--max-ranks", type=positive, default=torch.cuda.device_count() or 2,
        help="most processes to start (one per GPU; without a GPU 2)")  # fmt: skip
    add("--global-batch-size", type=positive, default=8,
        help="samples per step in strong scaling, per rank in weak scaling (8)")  # fmt: skip
    add("--rounds", type=positive, help="times that each thing is measured (8; --overhead 60)")
    add("--buckets", type=runtime.positive_float, nargs="+", metavar="MIB", help="sizes to compare")
    add("--overhead", action="store_true", help="of ddp_training.py over bare DDP")
    args = parser.parse_args()
    args.rounds = args.rounds or (60 if args.overhead else 8)
    if args.overhead and args.rounds < 2 * WARMUP:
        parser.error(f"--overhead needs --rounds of at least {2 * WARMUP}")
    return args


def launch(args, ranks, *flags, **options):
    """Start this script with torchrun on ranks of this machine; return how it ended."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", __file__, *sys.argv[1:], *flags]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}  # one core for a rank, also where it is alone
    return subprocess.run(command, env=environ, text=True, check=False, **options)


def measure_all(args, console):
    """Measure 1, 2, 4, ... ranks one after the other. Return the metrics by number of ranks."""
    sizes = [2**power for power in range(32) if 2**power < args.max_ranks] + [args.max_ranks]
    for ranks in sizes:
        if args.global_batch_size % ranks:
            raise runtime.UsageError(
                f"--global-batch-size {args.global_batch_size} cannot be dealt to {ranks} ranks"
            )
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in console.progress(sizes, "numbers of ranks"):
            own = Path(folder, str(ranks))
            ended = launch(args, ranks, "--output-dir", str(own), capture_output=True)
            if ended.returncode:
                raise RuntimeError(f"{ranks} ranks failed: {ended.stdout} {ended.stderr[-500:]}")
            found[ranks] = json.loads((own / "results.json").read_text())["metrics"]
    return found


def main():
    args = parse_args()
    world = runtime.discover()
    alone = world.launcher == "python"
    if alone and (args.overhead or args.buckets):
        return launch(args, args.max_ranks).returncode  # it says itself what it finds
    ranks = args.max_ranks if alone else world.world_size
    device = runtime.pick_device(
        args.device, runtime.World(0, 0, ranks, ranks, "python") if alone else world
    )
    console = Console(world.is_rank0)
    results = measure.Results("01-ddp-basics/ddp_benchmark.py", args, world, device)
    output = measure.claim_output_dir(args, world)
    console.header(results, f"{args.model}; {measure.core_count()} cores for at most {ranks} ranks")
    if device.type == "cpu" and ranks > measure.core_count():
        console.say("more ranks than cores: this shows them share, and not how DDP scales")
    if alone:
        show_scaling(args, measure_all(args, console), console, results, output)
    elif args.overhead:
        measure_overhead(args, console, results)
    else:
        with runtime.init(args.device, args.timeout) as (world, device):
            if args.buckets:
                compare_buckets(args, world, device, console, results)
            else:
                measure_this_world(args, world, device, results)
    if output and world.is_rank0:
        results.write(output)
    return console.verdict(results, "measured")


if __name__ == "__main__":
    runtime.run(main)
