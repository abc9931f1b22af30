"""Hold FSDP from scratch against one process, PyTorch's own and formulas, and draw its moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dist_common import data, proofs
from dist_common.measure import RING_FACTOR, CollectiveCounter
from dist_common.report import Report, figure
from dist_common.runtime import World
from scratch_tools import assemble

CALLS = {"all-gathers": "_allgather_base_", "reduce-scatters": "_reduce_scatter_base_"}
GATHERED_BYTES = {"32-true": 4, "bf16-mixed": 2}  # per weight; gradients are reduced in float32
# Of losses near 5 and, relative to the largest number, of gradients. In float32 sums of some 1,000
# numbers in another order; bf16 keeps 8 bits of each weight and activation.
LOSS_TOLERANCE = {"32-true": 1e-5, "bf16-mixed": 1e-2}
GRADIENT_TOLERANCE = {"32-true": 1e-5, "bf16-mixed": 5e-2}
# Both ways round alike in bf16; on 3 ranks one divides before it sums, and roundings differ.
TWIN_TOLERANCE = {"32-true": 1e-5, "bf16-mixed": 1e-3}
LR = 1e-3


@dataclass
class Job:
    """The batches of each step, in micro-batches: all ranks' in one, and this rank's own."""

    whole: list[list]
    own: list[list]
    sizes: str


@dataclass
class Run:
    """What a run left: mean losses, the first gradient, the last step's traffic, bytes held."""

    losses: torch.Tensor  # (steps,)
    gradients: list[torch.Tensor]  # in the order of the optimizer's tensors
    counter: CollectiveCounter
    held: int


def job_of(args: Any, world: World, device: torch.device) -> Job:
    """Cut text into batches, so that all ranks' micro-batches are the one process's batch."""
    size = args.micro_batch_size
    ranks, accumulated = world.world_size, args.grad_accum_steps
    together = size * ranks * accumulated
    text = data.Sequences(data.load_text(), args.seq_len, together)
    whole = data.batches_of(text, args.max_steps, together, 0, together, device)
    count = args.max_steps * accumulated
    own = list(data.batches_of(text, count, size * ranks, world.rank * size, size, device))
    steps = [own[place : place + accumulated] for place in range(0, count, accumulated)]
    sizes = (
        f"global batch {together} = {size} per rank x {accumulated} micro-batches x {ranks} ranks"
    )
    return Job([[batch] for batch in whole], steps, sizes)


def loss_of(model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mean cross-entropy. Shapes: batch is inputs and targets, (B, T) each."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())


def train(
    model: nn.Module, weights: list[torch.Tensor], steps: list[list], log: MoveLog | None = None
) -> Run:
    """Train with AdamW on micro-batches; every rank must call it."""
    optimizer = torch.optim.AdamW(weights, lr=LR)
    losses = torch.zeros(len(steps), device=weights[0].device)
    for number, micro_batches in enumerate(steps):
        optimizer.zero_grad()
        with CollectiveCounter() as counter:
            for batch in micro_batches:
                if log:
                    log.moves.clear()  # the last micro-batch's are drawn
                loss = loss_of(model, batch) / len(micro_batches)
                loss.backward()
                losses[number] += loss.detach()
        if number == 0:
            gradients = [weight.grad.clone() for weight in weights]
        optimizer.step()
    dist.all_reduce(losses)
    moments = [t for state in optimizer.state.values() for t in state.values() if t.dim()]
    held = sum(tensor.nbytes for tensor in (*weights, *(w.grad for w in weights), *moments))
    return Run(losses / dist.get_world_size(), gradients, counter, held)


class MoveLog:
    """Write down each move of each unit, and the bytes that are whole on this rank after it."""

    def __init__(self, sharded: Any) -> None:
        self.units = sharded.units
        self.moves: list[tuple[str, int, int]] = []  # the move, the unit's number, bytes
        self.most = 0
        for number, unit in enumerate(self.units):
            for move in ("gather", "free", "reduce"):
                setattr(unit, move, partial(self.note, move, number, getattr(unit, move)))

    def note(self, move: str, number: int, make: Any) -> None:
        before = self.bytes_of(number)
        had_gradient = self.units[number].shard.grad
        make()
        reduced = move == "reduce" and self.units[number].shard.grad is not had_gradient
        if reduced or self.bytes_of(number) != before:
            whole = sum(self.bytes_of(unit) for unit in range(len(self.units)))
            self.moves.append((move, number, whole))
            self.most = max(self.most, whole)

    def bytes_of(self, number: int) -> int:
        """Return the bytes of a unit that are whole on this rank now: 0 when it is freed."""
        return self.units[number].whole.untyped_storage().nbytes()


def padded(weights: int) -> int:
    """Return a number of weights rounded up, so that all ranks get equally many."""
    ranks = dist.get_world_size()
    return -(-weights // ranks) * ranks


def check_run(
    report: Report, precision: str, sizes: list[int], ours: Run, theirs: Run, log: MoveLog
) -> list[list[str]]:
    """Check traffic and memory against formulas, losses against PyTorch's own; return two rows.

    `sizes` are the numbers of weights in each unit, the rest last; it may be empty.
    """
    ranks = dist.get_world_size()
    source = "FSDP paper, section 3.2"
    rest = padded(sizes[-1])
    units = [padded(size) for size in sizes[:-1]]
    total = sum(units) + rest
    times = report.args.grad_accum_steps
    width = GATHERED_BYTES[precision]
    ring = RING_FACTOR["all_gather"](ranks)
    # A unit is gathered for forward and for backward, the rest once: backward begins with it.
    gathers = times * (2 * len(units) + bool(rest))
    gathered = times * width * (2 * sum(units) + rest)
    for what, calls, handed in (
        ("all-gathers", gathers, gathered),
        ("reduce-scatters", times * (len(units) + bool(rest)), times * 4 * total),
    ):
        name = f"{precision}, {what}"
        counted = ours.counter.calls[CALLS[what]]
        report.check(f"{name}: calls per step", counted, calls, 0, source)
        sent = sent_bytes(ours.counter, what)
        report.check(f"{name}: bytes sent per step", sent, round(handed * ring), 0, source)
    held = 16 * total // ranks  # a weight, its gradient and two moments in float32
    report.check(f"{precision}: bytes held between steps", ours.held, held, 0, source)
    most = width * (rest + max(units, default=0))
    report.check(f"{precision}: most bytes whole at once", log.most, most, 0, "rest and one unit")
    tolerance = TWIN_TOLERANCE[precision]
    name = f"{precision}, fully_shard: error of a loss"
    proofs.same_losses(report, ours.losses, theirs.losses, tolerance, name, "fully_shard")
    rows = []
    for way, run in (("from scratch", ours), ("fully_shard", theirs)):
        calls = [str(run.counter.calls[name]) for name in CALLS.values()]
        sent = sum(sent_bytes(run.counter, what) for what in CALLS)
        per_weight = f"{sent / sum(sizes):.2f}"
        loss = f"{run.losses[-1]:.6f}"
        rows.append([f"{precision} {way}", *calls, f"{sent:,}", per_weight, loss])
    report.metrics[f"bytes_per_weight_{precision}"] = sent_per_weight(ours, sizes)
    return rows


def sent_per_weight(run: Run, sizes: list[int]) -> float:
    """Return the bytes that a rank sends in a step, for each weight of the model."""
    return sum(sent_bytes(run.counter, what) for what in CALLS) / sum(sizes)


def sent_bytes(counter: CollectiveCounter, what: str) -> int:
    """Return the bytes that a ring sends for the calls of a kind.

    A call is handed the whole and a rank's part, N + 1 parts; a ring sends N - 1 of them.
    """
    ranks = dist.get_world_size()
    return counter.bytes[CALLS[what]] // (ranks + 1) * (ranks - 1)


def check_one_process(
    report: Report, precision: str, sharded: Any, ours: Run, alone: nn.Module, expected: Run
) -> None:
    """Check losses, first gradient and, in float32, the weights at the end against one process."""
    name = f"{precision}, one process: error of a loss"
    proofs.same_losses(report, ours.losses, expected.losses, LOSS_TOLERANCE[precision], name)
    trained = [unit for unit in sharded.units if unit.parameters[0].requires_grad]
    parts = zip(trained, ours.gradients, strict=True)
    gradient = in_order(sharded, dict(parts))
    right = proofs.flat(expected.gradients)
    error = ((gradient - right).abs().max() / right.abs().max()).item()
    tolerance = GRADIENT_TOLERANCE[precision]
    name = f"{precision}: relative error of the gradient"
    report.check(name, error, 0, tolerance, "one process")
    if precision == "32-true":
        weights = in_order(sharded, {unit: unit.shard for unit in sharded.units})
        error = (weights - proofs.flat(alone.parameters())).abs().max().item()
        # AdamW divides by the gradient's size: where it is near 0, rounding shows.
        report.check(f"{precision}: error of a weight", error, 0, LR / 10, "one process")
    report.metrics["final_loss"] = ours.losses[-1].item()


def in_order(sharded: Any, parts: dict[Any, torch.Tensor]) -> torch.Tensor:
    """Return what ranks hold parts of, whole, in the order of the model's parameters."""
    whole = {}
    for unit, part in parts.items():
        whole |= dict(zip(unit.parameters, assemble(unit, part), strict=True))
    return proofs.flat(whole[p] for p in sharded.model.parameters() if p in whole)


def draw_moves(path: Path, log: MoveLog) -> None:
    """Draw when each unit is whole, and the bytes that are, over the moves of a micro-batch."""
    units = len(log.units)
    names = [f"unit {number}" for number in range(units)]
    rest = log.moves[0][1] == units - 1
    if rest:
        names[-1] = "rest"
    shape = {"figsize": (9, 4.5), "sharex": True, "height_ratios": (2, 1)}
    with figure(path, 2, 1, **shape) as (rows, levels):
        since = {}
        half = next(i for i, (move, *_) in enumerate(log.moves) if move == "reduce") - 1
        for place, (move, number, _) in enumerate(log.moves):
            if move == "gather":
                since[number] = place
            elif move == "free":
                color = "tab:blue" if place < half else "tab:orange"
                color = "tab:gray" if rest and number == units - 1 else color
                rows.barh(number, place - since[number], left=since[number], color=color)
            else:
                rows.plot(place, number, "kv")
        rows.plot([], [], "kv", label="reduce-scatter")
        for label, color in (
            ("whole in forward", "tab:blue"),
            ("whole in backward", "tab:orange"),
            ("whole in both", "tab:gray"),
        ):
            rows.barh(0, 0, color=color, label=label)
        rows.set_yticks(range(units), names)
        rows.set_title("One micro-batch: a unit is whole from its all-gather until it is freed")
        rows.legend(loc="center right")
        held = [whole / 2**20 for *_, whole in log.moves]
        levels.step(range(len(held)), held, where="post", label="whole on this rank")
        everything = sum(unit.whole.nbytes for unit in log.units) / 2**20
        levels.axhline(everything, color="tab:red", ls="--", label="the whole model")
        levels.set(xlabel="moves, in order", ylabel="MiB", ylim=(0, 1.2 * everything))
        levels.legend(loc="center right")
        for axes in (rows, levels):
            axes.axvline(half, color="black", lw=0.5, ls=":")
            axes.grid(alpha=0.3)
