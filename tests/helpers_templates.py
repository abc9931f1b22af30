"""Helpers for the tests of templates: a small job, signals and kills, sabotage."""

import ast
import dataclasses
import json
import os
import resource
import signal
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from conftest import REPO

from dist_common import checkpoint, data, model, train

DDP = "01-ddp-basics/ddp_training.py"
FSDP = "02-fsdp/fsdp_transformer.py"
NARROW = model.Config(256, 32, 2, 4, 2, 64, 256)
SMALL_JOB = (
    *("--seq-len", 32, "--micro-batch-size", 2, "--max-steps", 8, "--warmup-steps", 3),
    *("--lr", 1e-2, "--log-every", 1, "--eval-every", 0, "--save-every", 0),
)


def write_text(folder: Path) -> Path:
    """Write 3 kB to train on: 8 steps of 12 sequences go over the end of an epoch."""
    path = folder / "text"
    path.write_bytes((REPO / "dist_common" / "text.txt").read_bytes()[:3000])
    return path


def small_model(*changes):
    """Return `before` for run_script: make `tiny` small, then make the changes."""

    def before(script):
        model.PRESETS["tiny"] = NARROW
        for change in changes:
            change(script)

    return before


# Files of a run


def rows_of(folder: Path, name: str = "loss") -> dict[int, float]:
    """Return a number of metrics.jsonl by step; the last row of a step counts."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = map(json.loads, lines)
    return {row["step"]: row[name] for row in rows if name in row}


def checkpoints_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


# Signals and kills


def in_step(step, action, rank=None):
    """Return a change that calls `action` at the end of a step, on one rank or all."""

    def change(script):
        add = train.Log.add

        def add_and_act(self, number, *results):
            add(self, number, *results)
            if number == step and rank in (None, self.run.rank):
                action()

        train.Log.add = add_and_act

    return change


def stop_in(step, number=signal.SIGTERM):
    """Ask one rank alone to stop: rank 1, or the only one."""

    def change(script):
        only_rank = int(os.environ["WORLD_SIZE"]) - 1
        in_step(step, lambda: os.kill(os.getpid(), number), rank=only_rank)(script)

    return change


def kill_in(step):
    return in_step(step, lambda: os.kill(os.getpid(), signal.SIGKILL))


def kill_in_save(step):
    """Kill all ranks when a checkpoint's parts are written and it has no name yet."""

    def change(script):
        write = checkpoint.Checkpoints.write_part

        def killed(self, folder, *parts):
            checksums = write(self, folder, *parts)
            if folder.name == f".partial-{step:08}":
                os.kill(os.getpid(), signal.SIGKILL)
            return checksums

        checkpoint.Checkpoints.write_part = killed

    return change


def fill_the_disk(script):
    """Let rank 1 write no file of more than 20 kB from the checkpoint of step 4 on."""
    write = checkpoint.Checkpoints.write

    def write_little(self, step, *parts):
        if step == 4 and self.run.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        write(self, step, *parts)

    checkpoint.Checkpoints.write = write_little


# The loop


def loop_of(script: str) -> list[str]:
    """Return the names that a template's loop calls, in order."""
    tree = ast.parse((REPO / script).read_text())
    loops = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.For) and ast.unparse(node.target) == "step"
    ]
    assert len(loops) == 1, f"{script} has {len(loops)} loops over steps"
    calls = [node for node in ast.walk(loops[0]) if isinstance(node, ast.Call)]
    calls.sort(key=lambda call: (call.func.end_lineno, call.func.end_col_offset))
    return [ast.unparse(call.func).split(".")[-1] for call in calls]


# Sabotage: each change breaks one thing that a training loop has to do


def optimize_a_copy(script):
    build = script.build_optimizer

    def build_on_copies(model, args):
        copies = [torch.nn.Parameter(w.detach().clone()) for w in model.parameters()]
        return build(SimpleNamespace(parameters=lambda: copies), args)

    script.build_optimizer = build_on_copies


def forget_zero_grad(script):
    build = script.build_optimizer

    def build_without(model, args):
        optimizer = build(model, args)
        optimizer.zero_grad = lambda: None
        return optimizer

    script.build_optimizer = build_without


def decay_weights_by_10(script):
    build = script.build_optimizer

    def build_with(model, args):
        optimizer = build(model, args)
        optimizer.param_groups[0]["weight_decay"] = 10.0
        return optimizer

    script.build_optimizer = build_with


def clip_nothing(script):
    norm_of = torch.nn.utils.get_total_norm
    torch.nn.utils.clip_grad_norm_ = lambda weights, most: norm_of(
        [weight.grad for weight in weights]
    )


def clip_by_the_local_norm(script):
    clip = torch.nn.utils.clip_grad_norm_

    def clip_locally(weights, most):
        weights = list(weights)
        norm = clip(weights, float("inf"))
        local_norm = torch.stack(
            [weight.grad.to_local().norm() for weight in weights]
        ).norm()
        for weight in weights:
            weight.grad.to_local().mul_(min(1.0, most / local_norm.item()))
        return norm

    torch.nn.utils.clip_grad_norm_ = clip_locally


def clip_before_unscaling(script):
    torch.amp.GradScaler.unscale_ = lambda self, optimizer: None


def count_the_schedule_by_micro_batches(script):
    rate = script.lr_at
    script.lr_at = lambda step, args: rate(2 * step, args)


def set_the_rate_after_the_step(script):
    set_lr, due = script.set_lr, []

    def set_late(optimizer, lr):
        due.append(lr)
        if len(due) > 1:
            set_lr(optimizer, due[-2])

    script.set_lr = set_late


def shift_no_targets(script):
    loss = script.summed_loss
    script.summed_loss = lambda model, inputs, targets, *more: loss(
        model, inputs, inputs, *more
    )


def count_local_tokens(script):
    script.dist = SimpleNamespace(
        all_reduce=lambda tensor: None, get_world_size=dist.get_world_size
    )


def average_the_averages(script):
    """Give each rank's mean loss the same weight, although token counts differ."""
    loss = script.summed_loss

    def scaled(model, inputs, targets, *more):
        num_tokens = (targets != data.IGNORED).sum().float()
        total = num_tokens.clone()
        dist.all_reduce(total)
        mean = total / dist.get_world_size()
        return loss(model, inputs, targets, *more) * mean / num_tokens

    script.summed_loss = scaled


def synchronise_nothing(script):
    class Unsynchronised(script.DDP):
        def forward(self, *inputs):
            self.require_backward_grad_sync = False
            return super().forward(*inputs)

    script.DDP = Unsynchronised


def all_reduce_nothing_between_replicas(script):
    """Leave each replica of hybrid sharding with its own gradient."""
    module = script.FSDPModule
    original = module.set_requires_all_reduce
    module.set_requires_all_reduce = lambda self, _: original(self, False)


def deal_rank_0_s_samples_to_all(script):
    class Same(data.GlobalBatches):
        def __init__(self, dataset, args, run, seen=0):
            super().__init__(dataset, args, dataclasses.replace(run, rank=0), seen)

    data.GlobalBatches = Same


def drop_a_micro_batch(script):
    original = data.GlobalBatches.__next__
    data.GlobalBatches.__next__ = lambda self: original(self)[:-1]


def forget_the_moments(script):
    """Resume without the optimizer's state."""
    load = checkpoint.Checkpoints.load

    def load_weights_only(self, facts):
        load(self, facts)
        self.optimizer.state.clear()

    checkpoint.Checkpoints.load = load_weights_only
