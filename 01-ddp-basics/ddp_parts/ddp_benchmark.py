"""What ddp_benchmark.py times, compares and draws; and the template's loop beside a bare one."""

import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import ddp_training as template
from legacy_common import cli, data, job, measure, models, runtime
from legacy_common.lab.figure import figure
from legacy_common.report import Report

TIMES = ("full", "slowest", "mean", "alone", "ideal")
PARTS = ("ideal", "small batch", "shared cores", "stragglers", "communication")
SEQ_LEN, IMAGE_SIZE = 128, 64  # tokens, pixels
BLOCK = 5  # steps between two waits for the device, in both loops
CLOCKS = {"CPU": time.process_time, "wall": time.perf_counter}


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


def gradient_norm(model, batch):
    """Return the norm of the gradient of the global batch, the same on any number of ranks."""
    model.eval()  # else batch norm would compute with the mean of a rank's samples
    inputs, targets = batch
    F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten()).backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    model.zero_grad(set_to_none=False)
    model.train()
    return norm.item()


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


class BareLoop:
    """What ddp_training.py does in a step, as one writes it without the rest."""

    def __init__(self, args, world, device):
        runtime.seed_everything(args.seed)
        model = models.Transformer(models.PRESETS[args.preset]).to(device)
        self.optimizer = torch.optim.AdamW(model.parameters(), 1.0, (0.9, 0.95), weight_decay=0.1)
        self.schedule = LambdaLR(self.optimizer, lambda done: job.lr_at(done + 1, args))
        self.model = DDP(model, device_ids=[device.index] if device.type == "cuda" else None)
        train_set, _, _ = data.job_text(args, world.world_size)
        sampler = data.ShardedSampler(len(train_set), world.rank, world.world_size, args.seed)
        self.batches = iter(DataLoader(train_set, args.micro_batch_size, sampler=sampler))
        self.device = device

    def gradient(self, inputs, targets):
        """Leave the mean gradient in the model; return the loss of this rank."""
        loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        return loss.detach()

    def step(self):
        inputs, targets = (tensor.to(self.device) for tensor in next(self.batches))
        self.optimizer.zero_grad()
        loss = self.gradient(inputs, targets)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        return loss

    def take_block(self):
        """Take a block of steps; return their losses on this rank."""
        return torch.stack([self.step() for _ in range(BLOCK)]).tolist()


class Quiet(Report):
    """A report that prints nothing: the benchmark has one of its own."""

    def say(self, line=""):
        pass

    def progress(self, items, description):
        return items


def start_template(rounds, world, device, folder):
    """Return the template's run, ready for its first step; it neither evaluates nor saves."""
    never = str(rounds + 1)
    flags = ["--device", device.type, "--max-steps", never, "--log-every", str(BLOCK)]
    flags += ["--save-every", never]
    with mock.patch.object(sys, "argv", ["ddp_training.py", *flags]):
        args = template.parse_args()
    run = template.set_up(args, Quiet("01-ddp-basics/ddp_training.py", args, world, device))
    epoch = len(run.job.train_set) // args.global_batch_size
    if rounds > epoch:
        why = "after which the two loops take other batches"
        raise cli.UsageError(f"--rounds {rounds} is more than the {epoch} steps of an epoch, {why}")
    # As with an output folder: it logs every step, and notes signals.
    run.job.log = measure.StepLog(Path(folder) if world.is_rank0 else None, 1)
    run.job.catch_preemption()
    return run


def take_template_steps(run, last):
    """Take the template's steps up to `last`; its job reads their losses then."""
    for step in run.job.steps(until=last):
        template.train_step(run, step)


def timed(function, *args):
    """Call a function on all ranks at once; return what it returns, and CPU and wall time in s."""
    dist.barrier()
    started = [clock() for clock in CLOCKS.values()]
    value = function(*args)  # reads its losses at the end, so the device is done
    return value, [clock() - start for clock, start in zip(CLOCKS.values(), started, strict=True)]


def measure_overhead(report, rounds):
    """Compare the template with the bare loop, and the bare loop with itself."""
    world, device = report.world, report.device
    times = {"template": [], "bare": [], "bare again": []}
    bare_losses = []
    with tempfile.TemporaryDirectory() as folder:
        run = start_template(rounds, world, device, folder)
        bare = {name: BareLoop(run.job.args, world, device) for name in ("bare", "bare again")}
        for last in report.progress(range(BLOCK, rounds + 1, BLOCK), "alternating"):
            _, seconds = timed(take_template_steps, run, last)
            times["template"].append(seconds)
            for name, loop in bare.items():
                losses, seconds = timed(loop.take_block)
                times[name].append(seconds)
            bare_losses += losses
    everywhere = torch.tensor(bare_losses, device=device)
    dist.all_reduce(everywhere)
    own = torch.tensor(run.job.losses)
    error = (own - everywhere.cpu() / world.world_size).abs().max().item()
    # Fused and plain AdamW round alike on some processors only, and each step adds to that.
    report.check("largest difference of losses", error, 0, 3e-4, "the same data in the same order")
    # The first block settles DDP's buckets and the caches.
    times = {
        name: [s for rank in runtime.gather(own[1:]) for s in rank] for name, own in times.items()
    }
    show_overhead(report, times)


def show_overhead(report, times):
    """Print how much longer a block takes than the bare loop's beside it."""
    rows = []
    for name, metric in (("template", "overhead_ratio"), ("bare again", "bare_ratio")):
        for position, clock in enumerate(CLOCKS):
            own, bare, again = (np.array(seconds)[:, position] for seconds in times.values())
            ratios = again / bare if name == "bare again" else own / ((bare + again) / 2)
            low, median, high = statistics.quantiles(ratios.tolist(), n=4)
            rows.append((name, clock, *(f"{ratio - 1:+.1%}" for ratio in (median, low, high))))
            report.metrics[metric if clock == "CPU" else f"{metric}_wall"] = median
    headers = ("against bare DDP", "time", "median", "half of the blocks from", "to")
    report.table(rows, headers, names=2)
