"""What a sharding strategy holds, calls and sends: by formula, and as counted in a step."""

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_parts.sharding import held_bytes
from legacy_common import data, runtime
from legacy_common.cli import UsageError
from legacy_common.lab.traffic import TrafficCounter
from legacy_common.models import local
from legacy_common.report import Report

# What --sharding takes, and FSDP1's names of it.
NAMES = {"full": "FULL_SHARD", "grad-op": "SHARD_GRAD_OP", "hybrid": "HYBRID_SHARD",
         "none": "NO_SHARD", "hpz": None}  # fmt: skip
LOSS_TOLERANCE = {"32-true": 1e-5, "bf16-mixed": 1e-2}  # of losses near 5; bf16 keeps 8 bits
SOURCE = "ZeRO paper, sections 5 and 7"
MIB = 2**20  # bytes


def parse_sharding(text: str) -> str:
    """Parse a strategy by its own or FSDP1's name."""
    aliases = {name: name for name in NAMES} | {old: new for new, old in NAMES.items() if old}
    if text not in aliases:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(aliases)}, not {text!r}")
    return aliases[text]


def group_size_of(args: argparse.Namespace, world: runtime.World) -> int:
    """Settle --shard-group-size: by default the ranks of one machine, and 2 on a single one.

    Raises: UsageError when the groups would not be equally large.
    """
    several = world.local_world_size < world.world_size
    size = args.shard_group_size or min(world.local_world_size if several else 2, world.world_size)
    for sharding in args.sharding:
        if sharding in ("hybrid", "hpz") and world.world_size % size:
            why = f"--shard-group-size {size} does not divide {world.world_size} ranks"
            raise UsageError(f"--sharding {sharding}: {why}")
    return size


def steps_of(
    args: argparse.Namespace, world: runtime.World, device: torch.device
) -> tuple[list[list], list[list]]:
    """Return this rank's micro-batches, a list for each step, and the same for one process."""
    m = args.grad_accum_steps
    size = args.micro_batch_size
    together = size * world.world_size
    text = data.Sequences(data.load_text(), args.seq_len, together * m * args.max_steps)
    count = args.max_steps * m, together
    mine = list(data.batches_of(text, *count, world.rank * size, size, device))
    every = list(data.batches_of(text, *count, 0, together, device))
    starts = range(0, len(mine), m)
    return [mine[i : i + m] for i in starts], [every[i : i + m] for i in starts]


@dataclass(frozen=True)
class Plan:
    """A strategy, and what its bytes depend on."""

    sharding: str  # one of NAMES
    weights: int  # of the model, without padding
    precision: str  # 32-true: gather 4 bytes per weight; bf16-mixed: 2. Gradients are float32
    micro_batches: int  # of a step, on each rank
    ranks: int
    group: int  # ranks that hybrid shards over, and that hpz gathers from for backward

    @property
    def shards(self) -> int:
        """Return over how many ranks the weights are sharded between steps."""
        return {"hybrid": self.group, "none": 1}.get(self.sharding, self.ranks)

    @property
    def gathered_bytes(self) -> int:
        """Return the bytes of a weight while it is whole."""
        return 2 if self.precision == "bf16-mixed" else 4


def sent_per_weight(plan: Plan, rest: float) -> float:
    """Return the bytes that a rank sends in a step, per weight, in rings.

    `rest`, from 0 to 1, is the last unit's part of all weights: it stays whole from forward to
    backward, which begins with it, so `full` gathers it once. Source: ZeRO paper, section 7.
    """
    m, N, G, w = plan.micro_batches, plan.ranks, plan.group, plan.gathered_bytes
    again = w * (1 - rest)
    all_ranks, group, copies = ((n - 1) / n for n in (N, G, N // G))  # of a ring, per pass
    return {
        "none": (4 + 4) * all_ranks,
        "grad-op": m * (w + 4) * all_ranks,
        "full": m * (w + again + 4) * all_ranks,
        "hpz": m * ((w + 4) * all_ranks + again * group),
        # and the all-reduce of a shard's gradients over the replicas
        "hybrid": m * (w + again + 4) * group + (4 + 4) / G * copies,
    }[plan.sharding]


def held_per_weight(way: str, precision: str, ranks: int) -> tuple[float, float, float]:
    """Return bytes per weight between steps: of weights, gradients, optimizer state (Adam).

    ZeRO is DeepSpeed's: weights and gradients in the precision of computing, and beside Adam's
    moments a float32 copy of the weights. Source: ZeRO paper, section 5 and figure 1.
    """
    weight, state = 4, 4 + 4
    if way.startswith("ZeRO"):
        weight, state = (2 if precision == "bf16-mixed" else 4), 4 + 4 + 4
    stage = {"DDP": 0, "ZeRO-1": 1, "ZeRO-2": 2}.get(way, 3)
    whole = ((weight, 3), (weight, 2), (state, 1))  # bytes, and the stage that shards them
    return tuple(size / ranks if stage >= first else size for size, first in whole)


def unit_weights(modules: Sequence[nn.Module], shards: int, flat: bool = False) -> list[int]:
    """Return each unit's weights with its padding; a module's unit is what none before it has.

    FSDP2 cuts each parameter into equally many rows, FSDP1 (`flat`) a unit's as one vector.
    """
    seen: set[nn.Parameter] = set()
    units = []
    for module in modules:
        unit = [parameter for parameter in module.parameters() if parameter not in seen]
        seen.update(unit)
        if flat:
            units.append(shards * -(-sum(p.numel() for p in unit) // shards))
        else:
            parts = (-(-len(p) // shards) * p[0].numel() for p in unit)
            units.append(shards * sum(parts))
    return units


def whole_at_once(plan: Plan, units: Sequence[int]) -> int:
    """Return the bytes of gathered weights on a rank at the worst point of a step.

    That is in backward; grad-op keeps every block from forward on.
    """
    if plan.sharding == "none":
        return 0
    *blocks, rest = units
    kept = plan.sharding == "grad-op"
    # In backward FSDP gathers the next block while one computes.
    whole = sum(units) if kept else sum(sorted(blocks)[-2:]) + rest
    return plan.gathered_bytes * whole


def expected_of(
    plan: Plan, units: Sequence[int], all_reduces: int | None = None
) -> dict[str, float]:
    """Return by formula what a rank holds, and calls and sends in a step.

    `all_reduces` by default: one per unit of replicas, under DDP one per bucket of 25 MiB.
    """
    weights, count, m = sum(units), sum(map(bool, units)), plan.micro_batches
    way = "DDP" if plan.sharding == "none" else "FSDP"
    held = [weights * b for b in held_per_weight(way, plan.precision, plan.shards)]
    twice = plan.sharding not in ("grad-op", "none")  # gathered for forward, again for backward
    gathers = m * (2 * count - bool(units[-1]) if twice else count) * (plan.shards > 1)
    if all_reduces is None:
        replicated = count if plan.sharding != "none" else -(-4 * weights // (25 * MIB))
        all_reduces = replicated * (plan.shards < plan.ranks or plan.sharding == "none")
    return {
        "parameters: bytes held": round(held[0]),
        "gradients: bytes held": round(held[1]),
        "Adam moments: bytes held": round(held[2]),
        "all-gathers: collectives": gathers,
        "reduce-scatters: collectives": m * count * (plan.shards > 1),
        "all-reduces: collectives": all_reduces,
        "bytes sent": round(weights * sent_per_weight(plan, units[-1] / weights)),
    }


def check_step(
    report: Report, name: str, plan: Plan, units: Sequence[int], weights: Iterable[torch.Tensor],
    optimizer: torch.optim.Optimizer, counter: TrafficCounter, all_reduces: int | None = None,
) -> list[float]:  # fmt: skip
    """Check what is held after a step and what the step sent; return the measured numbers."""
    expected = expected_of(plan, units, all_reduces)
    calls = [counter.calls[kind] for kind in ("all_gather", "reduce_scatter", "all_reduce")]
    sent = round(sum(call.sent for call in counter.collectives))
    measured = [*held_bytes(weights, optimizer), *calls, sent]
    for (what, right), value in zip(expected.items(), measured, strict=True):
        joined = ", " if ": " in what else ": "
        report.check(f"{name}{joined}{what}", value, right, 0, SOURCE)
    if plan.sharding == "hpz":
        within = [call for call in counter.collectives if call.ranks == plan.group]
        small = sum(call.kind == "all_gather" for call in within)
        blocks = plan.micro_batches * (len(units) - 1)  # the rest is still whole
        every = blocks * (plan.group > 1)
        if plan.group == plan.ranks:
            every = expected["all-gathers: collectives"]
        what = f"{name}, all-gathers within a group: collectives"
        report.check(what, small, every, 0, "ZeRO++, section 3.2")
    per_weight = measured[-1] / plan.weights * plan.ranks / max(1, plan.ranks - 1)
    report.metrics[f"sent_per_weight_{name}"] = per_weight
    return [*measured, per_weight]


def print_strategies(report: Report, seen: dict[str, list[float]]) -> None:
    """Print what check_step measured of each strategy, by name."""
    headers = ("", "parameters", "gradients", "moments", "all-gathers", "reduce-scatters",
               "all-reduces", "bytes sent", "per weight")  # fmt: skip
    rows = [
        [name, *(f"{value:,}" for value in measured[:-1]), f"{measured[-1]:.2f}"]
        for name, measured in seen.items()
    ]
    report.table(rows, headers)
    report.say("per weight: bytes sent per weight and step, in units of (N-1)/N")


def print_points(report: Report, points: Sequence[list]) -> None:
    """Print what a weight is at each point of a step."""
    headers = ["when", "block 0's down.weight", "shape on rank 0", "bytes"]
    report.table(points, headers, names=2)


def describe(tensor: torch.Tensor) -> tuple[str, str, str]:
    """Return a tensor's kind, the shape that this rank holds, and its bytes, to be printed."""
    kind = type(tensor).__name__
    if isinstance(tensor, DTensor):
        kind = f"DTensor, {', '.join(str(place) for place in tensor.placements)}"
    held = local(tensor)
    return kind, " x ".join(str(size) for size in held.shape), f"{held.nbytes:,}"


def watch(
    model: nn.Module, layer: nn.Module, weight: Callable[[], torch.Tensor],
    optimizer: torch.optim.Optimizer, step: Callable[[], Any],
) -> list[list[str]]:  # fmt: skip
    """Take a step; return what a layer's weight is at each point of its last micro-batch."""
    points: dict[str, tuple[str, str, str]] = {}

    def note(when: str) -> None:
        points[when] = describe(weight())

    hooks = [
        layer.register_forward_pre_hook(lambda *_: note("in the forward of block 0")),
        model.register_forward_hook(lambda *_: note("after the forward")),
        layer.register_full_backward_pre_hook(lambda *_: note("in its backward")),
        optimizer.register_step_pre_hook(lambda *_: note("after the backward")),
    ]
    note("before the step")
    step()
    points["its gradient"] = describe(weight().grad)
    points["each Adam moment"] = describe(optimizer.state[weight()]["exp_avg"])
    for hook in hooks:
        hook.remove()
    return [[when, *described] for when, described in points.items()]
