"""What zero_from_scratch.py does not teach: cutting and joining vectors, and its proofs."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from deepspeed_parts.tensor_bytes import live_bytes
from deepspeed_parts.zero_stages import in_rings, sharded
from legacy_common import data, runtime
from legacy_common.lab.proofs import flat, same_losses
from legacy_common.lab.traffic import TrafficCounter
from legacy_common.report import Report
from legacy_common.runtime import all_gather_single
from zero_stages import loss_of

# Of losses near 5 and, relative to the largest number, of gradients. In float32 sums of some 1,000
# numbers in another order; bf16 keeps 8 bits of each weight, activation and gradient.
LOSS_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
GRADIENT_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-2}
LR = 2e-3


def flatten(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return tensors as one vector, with zeros at its end until N ranks can share it equally."""
    vector = flat(tensors)
    return F.pad(vector, (0, -len(vector) % dist.get_world_size()))


def part_of(vector: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a vector. Shapes: (n,) in, (n / N,) out."""
    return vector.chunk(dist.get_world_size())[dist.get_rank()]


def views_of(vector: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return a vector's pieces in the shapes of some tensors."""
    sizes = [tensor.numel() for tensor in like]
    pieces = vector[: sum(sizes)].split(sizes)
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


def buckets_of(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Cut parameters into groups of at least bucket_bytes and one dtype, the last layer's first."""
    buckets: list[list[nn.Parameter]] = []
    for parameter in reversed(parameters):
        full = buckets and sum(p.nbytes for p in buckets[-1]) >= bucket_bytes
        if not buckets or full or buckets[-1][0].dtype != parameter.dtype:
            buckets.append([])
        buckets[-1].append(parameter)
    return buckets


def assemble(zero: Any, parts: Sequence[torch.Tensor]) -> dict[nn.Parameter, torch.Tensor]:
    """Return whole tensors by parameter, of which each rank has a part for each bucket."""
    whole = {}
    for bucket, part in zip(zero.buckets, parts, strict=True):
        vector = part.new_empty(bucket.flat.shape)
        all_gather_single(vector, part.clone())
        whole |= dict(zip(bucket.parameters, views_of(vector, bucket.parameters), strict=True))
    return whole


@dataclass
class Run:
    """What a run left: mean losses, first gradient and last weights of all ranks, and costs."""

    losses: torch.Tensor  # (steps,)
    gradient: torch.Tensor  # in the order of the model's parameters
    weights: torch.Tensor
    held: float = 0.0  # bytes per weight, after the first backward of the last step
    counter: TrafficCounter = field(default_factory=TrafficCounter)  # of the last step
    zero: Any = None


def batches_of(args: Any, world: runtime.World, device: torch.device) -> tuple[list, list, str]:
    """Return each step's batch, this rank's micro-batches of it, and how their sizes multiply."""
    size = args.micro_batch_size
    ranks = world.world_size
    accumulated = args.grad_accum_steps
    together = size * ranks * accumulated
    text = data.Sequences(data.load_text(), args.seq_len, together)
    whole = list(data.batches_of(text, args.max_steps, together, 0, together, device))
    count = args.max_steps * accumulated
    own = list(data.batches_of(text, count, size * ranks, world.rank * size, size, device))
    steps = [own[place : place + accumulated] for place in range(0, count, accumulated)]
    sizes = f"{size} per rank x {accumulated} micro-batches x {ranks} ranks"
    return whole, steps, f"global batch {together} = {sizes}"


def adamw(weights: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    """Return the optimizer of all runs."""
    return torch.optim.AdamW(weights, LR, (0.9, 0.95), weight_decay=0.1)


def train_alone(model: nn.Module, batches: list) -> Run:
    """Train in one process, in float32: every rank the same."""
    optimizer = adamw(model.parameters())
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        if not losses:
            gradient = flat(p.grad for p in model.parameters())
        optimizer.step()
        losses.append(loss.detach())
    return Run(torch.stack(losses), gradient, flat(model.parameters()))


def train(build: Callable[[], nn.Module], wrap: Callable, steps: list[list]) -> Run:
    """Train the model in a stage: `wrap` makes a Zero of its parameters and `adamw`."""
    before = live_bytes().total()
    model = build()
    zero = wrap(model.parameters(), adamw)
    parts: list[torch.Tensor] = []

    def keep(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parts.extend(bucket.part.grad.clone() for bucket in zero.buckets)
        note.remove()

    note = zero.optimizer.register_step_pre_hook(keep)
    losses = torch.zeros(len(steps), device=steps[0][0][0].device)
    run = Run(losses, losses, losses, zero=zero)
    for number, micro_batches in enumerate(steps):
        with TrafficCounter() as run.counter:
            for place, batch in enumerate(micro_batches):
                loss = loss_of(model, batch) / len(micro_batches)
                loss.backward()
                losses[number] += loss.detach()
                del loss
                if number == len(steps) - 1 and place == 0:  # moments and a gradient are there
                    kept = sum(tensor.nbytes for tensor in (*parts, losses))
                    run.held = live_bytes().total() - before - kept
            zero.step()
    dist.all_reduce(losses)
    losses /= dist.get_world_size()
    run.held /= sum(parameter.numel() for parameter in model.parameters())
    for name, tensors in (("gradient", parts), ("weights", [b.part for b in zero.buckets])):
        whole = assemble(zero, tensors)
        setattr(run, name, flat(whole[parameter] for parameter in model.parameters()))
    return run


def check(
    report: Report, name: str, run: Run, alone: Run, stage: int, dtype: torch.dtype, reduce_dtype
) -> list[str]:
    """Check a run against one process and the ZeRO paper; return its row of the table."""
    ranks = dist.get_world_size()
    width = dtype.itemsize
    reduced = (reduce_dtype or dtype).itemsize
    buckets = len(run.zero.buckets)
    times = report.args.grad_accum_steps if stage == 2 else 1
    counts, source = [], "ZeRO paper, section 7.2"
    for kind, right in (("reduce-scatter", times * buckets), ("all-gather", buckets)):
        counts.append(run.counter.calls[kind.replace("-", "_")])
        report.check(f"{name}, {kind}s: calls per step", counts[-1], right, 0, source)
    # Adam's moments are float32, and next to weights of another dtype a float32 copy of them.
    state = 8 if dtype == torch.float32 else 12
    held = sum(sharded((width, width if stage == 1 else reduced, state), stage, ranks))
    report.check(f"{name}: bytes held per weight", run.held, held, 0.01 * held, "ZeRO, section 5")
    sent = sum(call.sent for call in run.counter.collectives) / len(run.weights)
    right = in_rings(stage, ranks, times, width, reduced)
    report.check(f"{name}: bytes sent per weight", sent, right, 0.001 * right, source)
    report.metrics[f"sent_{name.replace(', ', '_')}"] = sent
    same_losses(report, run.losses, alone.losses, LOSS_TOLERANCE[dtype], f"{name}: error of a loss")
    error = (run.gradient - alone.gradient).abs().max() / alone.gradient.abs().max()
    kind = f"{name}: relative error of the gradient"
    report.check(kind, error.item(), 0, GRADIENT_TOLERANCE[dtype], "one process")
    if dtype == torch.float32:
        error = (run.weights - alone.weights).abs().max().item()
        # AdamW divides by the gradient's size: where it is near 0, rounding shows.
        report.check(f"{name}: error of a weight", error, 0, LR / 10, "one process")
    report.metrics["final_loss"] = run.losses[-1].item()
    return [name, *map(str, counts), f"{run.held:.2f}", f"{sent:.2f}", f"{run.losses[-1]:.6f}"]
