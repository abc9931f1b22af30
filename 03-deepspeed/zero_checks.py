"""What zero_from_scratch.py does not teach: cutting vectors, whole weights, proofs, a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dist_common import data, runtime
from dist_common.measure import RING_FACTOR, CollectiveCounter
from dist_common.proofs import flat, same_losses
from dist_common.report import Report, figure
from tensor_bytes import live_bytes

# torch 2.13 gave them these names; until then they were all_gather_into_tensor and so on.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# Of losses near 5 and, relative to the largest number, of gradients. In float32 sums of some 1,000
# numbers in another order; bf16 keeps 8 bits of each weight, activation and gradient.
LOSS_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
GRADIENT_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-2}
LR = 2e-3
KINDS = {"weights": "tab:blue", "gradients": "tab:orange", "optimizer state": "tab:green"}

# for any model


def flatten(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return tensors as one vector, with zeros at its end until N ranks can share it equally."""
    vector = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return F.pad(vector, (0, -len(vector) % dist.get_world_size()))


def part_of(vector: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a vector. Shapes: (n,) in, (n / N,) out."""
    return vector.chunk(dist.get_world_size())[dist.get_rank()]


def views_of(vector: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return a vector's pieces in the shapes of some tensors."""
    sizes = [tensor.numel() for tensor in like]
    pieces = vector[: sum(sizes)].split(sizes)
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


def gradient_of(parameter: nn.Parameter) -> torch.Tensor:
    """Return a parameter's gradient, or zeros where it has none."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


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
        all_gather(vector, part.clone())
        whole |= dict(zip(bucket.parameters, views_of(vector, bucket.parameters), strict=True))
    return whole


def whole_state(zero: Any, model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's state dict with the weights that the optimizer updates, in float32.

    `model.state_dict()` has them in the precision of the model. Every rank must call it.
    """
    whole = assemble(zero, [bucket.part for bucket in zero.buckets])
    by_id = {id(parameter): tensor for parameter, tensor in whole.items()}
    own = model.state_dict(keep_vars=True)
    return {name: by_id.get(id(value), value) for name, value in own.items()}


def load_whole_state(zero: Any, model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Load a state dict; every rank must call it. Raises: RuntimeError for other names or sizes."""
    names = {id(value): name for name, value in model.state_dict(keep_vars=True).items()}
    model.load_state_dict(state)
    for bucket in zero.buckets:
        whole = flatten([state[names[id(p)]] for p in bucket.parameters])
        bucket.part.copy_(part_of(whole))


# the lesson's proofs


@dataclass
class Job:
    """The batches of each step, in micro-batches: all ranks' in one, and this rank's own."""

    whole: list[list]
    own: list[list]
    sizes: str


@dataclass
class Run:
    """What a run left: mean losses, first gradient and last weights of all ranks, and costs."""

    losses: torch.Tensor  # (steps,)
    gradient: torch.Tensor  # in the order of the model's parameters
    weights: torch.Tensor
    held: float = 0.0  # bytes per weight, after the first backward of the last step
    counter: CollectiveCounter = field(default_factory=CollectiveCounter)  # of the last step
    zero: Any = None


def job_of(args: Any, world: runtime.World, device: torch.device) -> Job:
    """Cut text into batches, so that all ranks' micro-batches are the one process's batch."""
    size = args.micro_batch_size
    ranks = world.world_size
    accumulated = args.grad_accum_steps
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


def adamw(weights: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    """Return the optimizer of all runs."""
    return torch.optim.AdamW(weights, LR, (0.9, 0.95), weight_decay=0.1)


def train_alone(model: nn.Module, steps: list[list]) -> Run:
    """Train in one process, in float32: every rank the same."""
    optimizer = adamw(model.parameters())
    losses = []
    for [batch] in steps:
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
        with CollectiveCounter() as run.counter:
            for place, batch in enumerate(micro_batches):
                loss = loss_of(model, batch) / len(micro_batches)
                loss.backward()
                losses[number] += loss.detach()
                del loss
                if number == len(steps) - 1 and place == 0:  # moments and a gradient are there
                    kept = sum(tensor.nbytes for tensor in (*parts, losses))
                    run.held = live_bytes().total() - before - kept
                    run.spans = spans_of(zero)
            zero.step()
    dist.all_reduce(losses)
    losses /= dist.get_world_size()
    run.held /= sum(parameter.numel() for parameter in model.parameters())
    for name, tensors in (("gradient", parts), ("weights", [b.part for b in zero.buckets])):
        whole = assemble(zero, tensors)
        setattr(run, name, flat(whole[parameter] for parameter in model.parameters()))
    return run


def check_held_and_sent(
    report: Report, name: str, run: Run, stage: int, dtype: torch.dtype, reduce_dtype: Any
) -> list[str]:
    """Check bytes per weight, held and sent in a step, and calls; return a row of the table.

    Source: ZeRO paper, sections 5 and 7.2.
    """
    ranks = dist.get_world_size()
    buckets = len(run.zero.buckets)
    width = dtype.itemsize
    reduced = (reduce_dtype or dtype).itemsize
    times = report.args.grad_accum_steps if stage == 2 else 1
    calls = [run.counter.calls[f"_{kind}_base_"] for kind in ("reduce_scatter", "allgather")]
    for what, counted, expected in zip(
        ("reduce-scatters", "all-gathers"), calls, (times * buckets, buckets), strict=True
    ):
        check = f"{name}, {what}: calls per step"
        report.check(check, counted, expected, 0, "ZeRO paper, section 7.2")
    # Two moments, and float32 weights where the model's are not; then the gradient.
    state = (8 + 4 * (dtype != torch.float32)) / ranks
    gradient = width if stage == 1 else reduced / ranks
    held = width + gradient + state
    report.check(f"{name}: bytes held per weight", run.held, held, 0.01 * held, "ZeRO, section 5")
    # A call is handed the whole and a rank's part, N + 1 parts; a ring sends N - 1 of them.
    handed = sum(run.counter.bytes[f"_{kind}_base_"] for kind in ("reduce_scatter", "allgather"))
    sent = handed / (ranks + 1) * (ranks - 1) / len(run.weights)
    expected = (times * reduced + width) * RING_FACTOR["all_gather"](ranks)
    check = f"{name}: bytes sent per weight"
    report.check(check, sent, expected, 0.001 * expected, "ZeRO paper, section 7.2")
    key = name.replace(", ", "_")
    report.metrics |= {f"held_{key}": run.held, f"sent_{key}": sent}
    return [name, *map(str, calls), f"{run.held:.2f}", f"{sent:.2f}", f"{run.losses[-1]:.6f}"]


def check_one_process(
    report: Report, name: str, run: Run, expected: Run, dtype: torch.dtype
) -> None:
    """Check losses, first gradient and, in float32, the weights at the end against one process."""
    same_losses(
        report, run.losses, expected.losses, LOSS_TOLERANCE[dtype], f"{name}: error of a loss"
    )
    error = (run.gradient - expected.gradient).abs().max() / expected.gradient.abs().max()
    check = f"{name}: relative error of the gradient"
    report.check(check, error.item(), 0, GRADIENT_TOLERANCE[dtype], "one process")
    if dtype == torch.float32:
        error = (run.weights - expected.weights).abs().max().item()
        # AdamW divides by the gradient's size: where it is near 0, rounding shows.
        report.check(f"{name}: error of a weight", error, 0, LR / 10, "one process")
    report.metrics["final_loss"] = run.losses[-1].item()


def spans_of(zero: Any) -> dict[str, list[tuple[int, int]]]:
    """Return where in the model's weights this rank holds something now, by kind."""
    spans: dict[str, list[tuple[int, int]]] = {kind: [] for kind in KINDS}
    start = 0
    for bucket in zero.buckets:
        whole = (start, start + len(bucket.flat))
        moment = zero.optimizer.state[bucket.part]["exp_avg"]
        first = start + dist.get_rank() * len(moment)
        part = (first, first + len(moment))
        is_whole = all(p.grad is not None for p in bucket.parameters)
        spans["weights"].append(whole)
        spans["gradients"].append(whole if is_whole else part)
        spans["optimizer state"].append(part)
        start = whole[1]
    return spans


def held_spans(run: Run) -> list[dict[str, list[tuple[int, int]]]]:
    """Return all ranks' spans. A collective."""
    return runtime.gather(run.spans)


def draw_shares(path: Path, spans: dict[str, list]) -> None:
    """Draw which part of the model's weights each rank holds what of, in each stage, as PNG."""
    ranks = len(next(iter(spans.values())))
    shape = {"figsize": (10, 1.2 + 0.9 * ranks), "sharey": True}
    with figure(path, 1, len(spans), **shape) as panels:
        for axes, (stage, by_rank) in zip(panels, spans.items(), strict=True):
            for rank, kinds in enumerate(by_rank):
                for row, (kind, color) in enumerate(KINDS.items()):
                    bars = [(start / 1e3, (end - start) / 1e3) for start, end in kinds[kind]]
                    label = kind if rank == 0 else None
                    axes.broken_barh(bars, (rank + 0.27 * row, 0.24), color=color, label=label)
            axes.set(title=stage, xlabel="weights, bucket after bucket, in thousands")
            for edge in {end for _, end in by_rank[0]["weights"]}:
                axes.axvline(edge / 1e3, color="black", lw=0.5, ls=":")
        panels[0].set_yticks(
            [rank + 0.4 for rank in range(ranks)], [f"rank {r}" for r in range(ranks)]
        )
        panels[0].invert_yaxis()
        labels = panels[0].get_legend_handles_labels()
        panels[0].figure.legend(*labels, loc="outside lower center", ncols=len(KINDS))
