"""Talk once in H steps: average the weights of the ranks, or take DiLoCo's outer step.

    CPU   torchrun --standalone --nproc-per-node=2 05-advanced/local_sgd.py
    GPU   torchrun --standalone --nproc-per-node=gpu 05-advanced/local_sgd.py

Look for: the bytes, 1/H of DDP's; the held-out loss after the same number of samples, and how much
of it the bytes cost; accumulation, which sends as little and loses more. Sources: Stich, Local SGD
(2018); Douillard et al., DiLoCo (2023).
"""

import functools
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from advanced_parts import local_sgd as part
from dist_common.links import slow_group
from legacy_common import cli, measure, runtime
from legacy_common.lab import traffic
from legacy_common.report import Report

GENTLE = 0.5  # outer momentum that needs fewer rounds than the paper's 0.9
TIMED = 3  # times that all settings end whole rounds, after one that does not count


@torch.no_grad()
def mean_over_ranks(tensors, group):
    """Replace each tensor by its mean over all ranks, in one all-reduce."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])

    dist.all_reduce(flat, group=group)

    flat /= dist.get_world_size(group)
    parts = flat.split([tensor.numel() for tensor in tensors])
    for tensor, mean in zip(tensors, parts, strict=True):
        tensor.copy_(mean.view_as(tensor))


def average(model, optimizer, moments, group):
    """End a round of periodic averaging: all ranks go on from the mean of their weights."""
    mean_over_ranks(list(model.parameters()), group)

    if moments == "averaged":
        states = [optimizer.state[p] for p in model.parameters()]
        names = ("exp_avg", "exp_avg_sq")
        mean_over_ranks([state[name] for state in states for name in names], group)
    elif moments == "reset":
        optimizer.state.clear()


def make_outer(model, lr, momentum):
    """Return DiLoCo's outer optimizer, over a copy of the weights that the ranks agree on."""
    agreed = [p.detach().clone() for p in model.parameters()]
    return torch.optim.SGD(agreed, lr, momentum, nesterov=momentum > 0)


@torch.no_grad()
def outer_step(model, outer, group):
    """End a round of DiLoCo: take the way that the ranks went, on average, as a gradient."""
    agreed = outer.param_groups[0]["params"]
    for old, new in zip(agreed, model.parameters(), strict=True):
        old.grad = old - new  # against the way this rank went in H inner steps

    mean_over_ranks([old.grad for old in agreed], group)
    outer.step()

    for old, new in zip(agreed, model.parameters(), strict=True):
        new.copy_(old)


@dataclass(frozen=True)
class Setting:
    """A way to train, of those that the table compares."""

    name: str
    method: str  # alone, DDP, averaging or DiLoCo
    every: int = 1  # H: steps per round
    moments: str = "kept"  # AdamW's, when weights are averaged: kept, averaged or reset
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    accumulate: int = 1  # micro-batches per step, in one backward


def prepare(setting, model, optimizer, group):
    """Return what computes the logits, and what to call at the end of each round."""
    if setting.method == "DDP":
        return DDP(model, process_group=group), lambda: None
    if setting.method == "averaging":
        return model, functools.partial(average, model, optimizer, setting.moments, group)
    if setting.method == "DiLoCo":
        outer = make_outer(model, setting.outer_lr, setting.outer_momentum)
        return model, functools.partial(outer_step, model, outer, group)
    return model, lambda: None


def train(setting, model, optimizer, batches, steps, group=None):
    """Take `steps` inner steps on this rank's own batches; a round ends every H of them."""
    compute, end_round = prepare(setting, model, optimizer, group)
    schedule = part.warmup_and_decay(optimizer, steps)
    for step, (tokens, targets) in enumerate(batches, 1):
        F.cross_entropy(compute(tokens).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % setting.every == 0:
            end_round()


def settings_of(args):
    """Return the ways to compare."""
    settings = [Setting("alone", "alone"), Setting("DDP", "DDP")]
    for h in args.every:
        settings.append(Setting(f"DDP, accumulating {h}", "DDP", accumulate=h))
        settings.append(Setting(f"averaging, H = {h}", "averaging", h))
        for momentum in sorted({args.outer_momentum, GENTLE}, reverse=True):
            name = f"DiLoCo, H = {h}, momentum {momentum:g}"
            settings.append(Setting(name, "DiLoCo", h, "kept", args.outer_lr, momentum))
    for moments in ("averaged", "reset"):
        longest = args.every[-1]
        name = f"averaging, H = {longest}, moments {moments}"
        settings.append(Setting(name, "averaging", longest, moments))
    return settings


def run_setting(setting, task, args, group):
    """Train one setting; return held-out loss, what rounds send, and ms per step on the link."""

    def run(steps, group=None, timer=None):
        model, optimizer = task.build(setting)
        steps //= setting.accumulate
        batches = task.batches(steps, setting)
        if timer:
            batches = part.time_rounds(batches, args.whole_rounds // setting.accumulate, timer)
        train(setting, model, optimizer, batches, steps, group)
        return model

    loss = task.held_out_loss(run(args.max_steps))
    with traffic.TrafficCounter() as counter:
        run(args.whole_rounds)
    timer = measure.StepTimer(task.device, warmup=1)
    run((timer.warmup + TIMED) * args.whole_rounds, group, timer)
    return loss, counter, timer.median_ms() / args.whole_rounds


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add, positive, number = parser.add_argument, cli.positive_int, cli.positive_float
    add("--every", type=positive, nargs="+", default=[5, 25], metavar="H",
        help="steps per round, one value or several (5 25)")  # fmt: skip
    add("--max-steps", type=positive, default=400, help="inner steps of each setting (400)")
    add("--micro-batch-size", type=positive, default=2, help="sequences per rank and step (2)")
    add("--seq-len", type=positive, default=64, help="tokens per sequence (64)")
    add("--lr", type=number, default=3e-3, help="peak learning rate of AdamW (0.003)")
    add("--outer-lr", type=number, default=0.7, help="DiLoCo's outer learning rate (0.7)")
    add("--outer-momentum", type=float, default=0.9, help="DiLoCo's Nesterov momentum (0.9)")
    add("--link", type=cli.link_rate, default=100e6 / 8,
        help="link to emulate for step times, such as 1gbit (100mbit)")  # fmt: skip
    args = parser.parse_args()
    args.every = sorted(set(args.every))
    args.whole_rounds = math.lcm(*args.every)  # steps in which every setting ends whole rounds
    for h in (h for h in args.every if args.max_steps % h):
        near = [str(n * h) for n in (args.max_steps // h, args.max_steps // h + 1) if n]
        parser.error(f"--max-steps {args.max_steps} is not a multiple of --every {h}: "
                     f"take {' or '.join(near)}")  # fmt: skip
    if not 0 <= args.outer_momentum < 1:
        parser.error(f"--outer-momentum {args.outer_momentum:g} must be from 0 to below 1")
    return args


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("05-advanced/local_sgd.py", args, world, device)
        task = part.Task(args, world, device)
        group, how = slow_group(args.link)
        report.start(task.says, how)

        part.check_rounds(report, task, train, Setting)

        settings = settings_of(args)
        results = [run_setting(setting, task, args, group) for setting in settings]
        part.compare(report, task, settings, results)
        return report.finish("each method equals itself in one process")


if __name__ == "__main__":
    cli.run(main)
