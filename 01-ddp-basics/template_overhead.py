"""What ddp_training.py costs over the same loop in bare DDP: both take turns, some steps each."""

import importlib.util
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

from dist_common import cli, data, measure, models, runtime
from dist_common.report import Report

BLOCK = 5  # steps between two waits for the device, in both loops
CLOCKS = {"CPU": time.process_time, "wall": time.perf_counter}


class BareLoop:
    """What ddp_training.py does in a step, as one writes it without the rest."""

    def __init__(self, template, args, world, device):
        runtime.seed_everything(args.seed)
        model = models.Transformer(models.PRESETS[args.preset]).to(device)
        self.optimizer = torch.optim.AdamW(model.parameters(), 1.0, (0.9, 0.95), weight_decay=0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda done: template.lr_at(done + 1, args)
        )
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

    def take(self, steps):
        """Take steps; return their losses on this rank."""
        return torch.stack([self.step() for _ in steps]).tolist()


class Quiet(Report):
    """A report that prints nothing: the benchmark has one of its own."""

    def say(self, line=""):
        pass


def load_template():
    """Import ddp_training.py by its path. It is no helper here, but the thing to be measured."""
    path = Path(__file__).with_name("ddp_training.py")
    spec = importlib.util.spec_from_file_location("template", path)
    template = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(template)
    return template


def start_template(template, rounds, world, device, folder):
    """Return the template's run, ready for its first step; it neither evaluates nor saves."""
    never = str(rounds + 1)
    flags = ["--device", device.type, "--max-steps", never, "--log-every", str(BLOCK)]
    flags += ["--eval-every", never, "--save-every", never]
    own_argv = sys.argv
    sys.argv = ["ddp_training.py", *flags]
    args = template.parse_args()
    sys.argv = own_argv
    run = template.set_up(args, Quiet("01-ddp-basics/ddp_training.py", args, world, device))
    if rounds * args.global_batch_size > len(run.train_set):
        raise cli.UsageError(
            f"--rounds {rounds} is more than the {len(run.train_set) // args.global_batch_size} "
            "steps of an epoch, after which the two loops take other batches"
        )
    run.log = measure.StepLog(folder if world.is_rank0 else None, 1)
    return run


def timed(function):
    """Call a function on all ranks at once; return what it returns, and CPU and wall time in s."""
    dist.barrier()
    started = [clock() for clock in CLOCKS.values()]
    value = function()  # reads its losses at the end, so the device is done
    return value, [clock() - start for clock, start in zip(CLOCKS.values(), started, strict=True)]


def measure_overhead(report, rounds):
    """Compare the template with the bare loop, and the bare loop with itself."""
    template, world, device = load_template(), report.world, report.device
    times = {"template": [], "bare": [], "bare again": []}
    bare_losses = []
    with tempfile.TemporaryDirectory() as folder:
        run = start_template(template, rounds, world, device, Path(folder))
        bare = {
            name: BareLoop(template, run.args, world, device) for name in ("bare", "bare again")
        }
        for first in report.progress(range(1, rounds - BLOCK + 2, BLOCK), "alternating"):
            steps = range(first, first + BLOCK)
            _, seconds = timed(lambda steps=steps: template.train(run, steps))
            times["template"].append(seconds)
            for name, loop in bare.items():
                losses, seconds = timed(lambda loop=loop, steps=steps: loop.take(steps))
                times[name].append(seconds)
            bare_losses += losses
        everywhere = torch.tensor(bare_losses, device=device)
        dist.all_reduce(everywhere)
        if world.is_rank0:
            lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
            own = torch.tensor([json.loads(line)["loss"] for line in lines])
            error = (own - everywhere.cpu() / world.world_size).abs().max().item()
            source = "the same data in the same order"
            report.check("largest difference of losses", error, 0, 1e-5, source)
    # The first block settles DDP's buckets and the caches.
    times = {
        name: [s for rank in runtime.gather(own[1:]) for s in rank] for name, own in times.items()
    }
    show(report, times)


def show(report, times):
    """Print how much longer a block takes than the bare loop's beside it."""
    rows = []
    for name, metric in (("template", "overhead_ratio"), ("bare again", "bare_ratio")):
        for position, clock in enumerate(CLOCKS):
            ratios = []
            for own, bare, again in zip(*times.values(), strict=True):
                if name == "template":
                    ratios.append(
                        own[position] / statistics.mean((bare[position], again[position]))
                    )
                else:
                    ratios.append(again[position] / bare[position])
            low, median, high = statistics.quantiles(ratios, n=4)
            rows.append((name, clock, *(f"{ratio - 1:+.1%}" for ratio in (median, low, high))))
            report.metrics[metric if clock == "CPU" else f"{metric}_wall"] = median
    headers = ("against bare DDP", "time", "median", "half of the blocks from", "to")
    report.table(rows, headers, names=2)
