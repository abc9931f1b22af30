"""What adapters, frozen weights and moments cost in bytes: formulas, a table, a figure."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from dist_common import measure, models
from dist_common.measure import RING_FACTOR
from dist_common.report import Report, figure
from lora_layers import LAYERS, layers_of
from nf4 import NF4_BLOCK
from shard_tools import local

STATE_BLOCK = 256  # numbers of 8-bit optimizer state that share a scale
FROZEN_BYTES = {
    "LoRA": 4.0, "LoRA-bf16": 2.0, "QLoRA": 0.5 + 4 / NF4_BLOCK, "QLoRA-bf16": 0.5 + 4 / NF4_BLOCK,
}  # fmt: skip


def over_ranks(value: float, device: torch.device, op=dist.ReduceOp.MAX) -> float:
    """Return the largest value of all ranks, or their sum. A collective."""
    box = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(box, op=op)
    return box.item()


def frozen_cost(model: nn.Module, device: torch.device) -> float:
    """Return the bytes that all ranks hold for a frozen weight of the blocks' linear layers."""
    layers = [getattr(layer, "base_layer", layer) for _, layer in layers_of(model)]
    own = sum(local(weight).nbytes for layer in layers for weight in layer.parameters())
    weights = sum(layer.in_features * layer.out_features for layer in layers)
    return over_ranks(own, device, dist.ReduceOp.SUM) / weights


def expected_of(
    config: models.TransformerConfig, way: str, args: argparse.Namespace, ranks: int
) -> dict[str, int]:
    """Return by formula what is trained, what a rank holds, and what a ring has it send."""

    def part(shapes) -> int:  # FSDP2 cuts each tensor by rows; parts are filled up to be equal
        return sum(-(-rows // ranks) * columns for rows, columns in shapes)

    V = config.vocab_size
    D = config.dim
    wide = config.ffn_dim
    L = config.num_layers
    kv = D // config.num_heads * config.num_kv_heads
    r = args.lora_rank
    sides = [(D, D), (kv, D), (kv, D), (D, D), (wide, D), (wide, D), (D, wide)]  # (out, in)
    norms = [(D, 1)] * 2
    rest = [(V, D)] * (2 - config.tied_embeddings) + [(D, 1)]
    named = dict(zip(LAYERS, sides, strict=True))
    targets = [shape for name, shape in named.items() if name in args.target_modules]
    adapters = [shape for rows, columns in targets for shape in ((r, columns), (rows, r))]
    size = 2 if way.endswith("bf16") else 4  # bytes of a frozen weight, and of any gathered one
    block = size * part(norms + sides)
    if way.startswith("QLoRA"):
        block = size * part(norms) + part([(a * b // 2, 1) for a, b in sides])
        block += part([(-(-a * b // NF4_BLOCK), 4) for a, b in sides])
    trained = (norms + sides) * L + rest if way == "full" else adapters * L
    held = 0 if way == "full" else L * block + size * part(rest)  # frozen
    block += 0 if way == "full" else size * part(adapters)
    # Blocks are gathered for forward and again for backward; the rest stays in between.
    gathered_bytes = ranks * (2 * L * block + size * part(rest))
    gradients = 4 * part(trained)  # float32, whatever the frozen weights are
    moments = 2 * gradients
    if eight_bit(args):
        moments = max(
            bytes_of_8bit_state(sizes_on(rank, ranks, trained), args.min_shard_size)
            for rank in range(ranks)
        )
    reduce_scatter = RING_FACTOR["reduce_scatter"](ranks) * ranks
    return {
        "trained weights": sum(rows * columns for rows, columns in trained),
        "bytes of parameters": held + gradients,
        "bytes of gradients": gradients,
        "bytes of Adam moments": moments,
        "bytes sent in reduce-scatters": round(gradients * reduce_scatter),
        "bytes sent in all-gathers": round(gathered_bytes * RING_FACTOR["all_gather"](ranks)),
    }


def eight_bit(args: argparse.Namespace) -> bool:
    """Say whether the optimizer's moments are kept in 8 bits."""
    return getattr(args, "optimizer", "adamw") == "adamw8bit"


def bytes_of_8bit_state(sizes: list[int], min_8bit_size: int) -> int:
    """Return by formula the bytes of AdamW8bit's state for shards of these numbers of weights.

    Two moments: a byte each and a float32 scale for 256, or 4 bytes each for smaller shards.
    """
    blocks = [-(-size // STATE_BLOCK) for size in sizes]
    return sum(
        8 * size if size < min_8bit_size else 2 * size + 8 * count
        for size, count in zip(sizes, blocks, strict=True)
    )


def sizes_on(rank: int, ranks: int, shapes: list[tuple[int, int]]) -> list[int]:
    """Return how many weights of each tensor a rank holds: the last ranks may get fewer rows."""
    parts = [-(-rows // ranks) for rows, _ in shapes]
    return [
        max(0, min(part, rows - rank * part)) * columns
        for part, (rows, columns) in zip(parts, shapes, strict=True)
    ]


def kinds_of(numbers: dict[str, int], ranks: int, weights: int) -> dict[str, float]:
    """Return the bytes that all ranks hold for each weight of the model, by what they are."""
    gradients = numbers["bytes of gradients"]
    kinds = {
        "frozen weights": numbers["bytes of parameters"] - gradients,
        "trained weights": gradients,
        "gradients": gradients,
        "Adam's moments": numbers["bytes of Adam moments"],
    }
    return {kind: count * ranks / weights for kind, count in kinds.items()}


def print_large(report: Report, args: argparse.Namespace, ways: tuple[str, ...]) -> None:
    """Print what a rank of 8 holds of large models, by the formulas that were just checked."""
    rows = []
    for name in ("llama3-8b", "llama3-70b"):
        for way in ways:
            numbers = expected_of(models.PRESETS[name], way, args, 8)
            kinds = kinds_of(numbers, 1, measure.GIB)
            values = (f"{value:.2f}" for value in (*kinds.values(), sum(kinds.values())))
            sent = numbers["bytes sent in all-gathers"] / measure.GIB
            rows.append([name, way, *values, f"{sent:.2f}"])
    report.say(
        "by the same formulas, GiB that a rank of 8 holds, and sends in a step's all-gathers:"
    )
    headers = ("model", "way", "frozen", "trained", "gradients", "moments", "all", "all-gathers")
    report.table(rows, headers, names=2)


def draw(path: Path, report: Report, config: models.TransformerConfig) -> None:
    """Draw bytes per weight, stacked by kind: measured here, and by formula for llama3-8b."""
    args, ranks = report.args, report.world.world_size
    large = models.PRESETS["llama3-8b"]
    here = config.num_parameters()
    bytes_of = {way: report.metrics[f"bytes_{way}"] for way in args.ways}
    panels = {
        f"{args.preset}, measured on {ranks} ranks": {
            way: kinds_of(numbers, ranks, here) for way, numbers in bytes_of.items()
        },
        "llama3-8b on 8 ranks, by the same formulas": {
            way: kinds_of(expected_of(large, way, args, 8), 8, large.num_parameters())
            for way in args.ways
        },
    }
    with figure(path, 1, 2, figsize=(10, 4), sharey=True) as axes:
        for axis, (title, ways) in zip(axes, panels.items(), strict=True):
            bottom = [0.0] * len(ways)
            for kind in next(iter(ways.values())):
                heights = [kinds[kind] for kinds in ways.values()]
                axis.bar(list(ways), heights, bottom=bottom, label=kind, width=0.6)
                bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
            for place, total in enumerate(bottom):
                axis.text(place, total + 0.2, f"{total:.2f}", ha="center")
            axis.set_title(title)
            axis.set_ylim(0, 17.5)
        axes[0].set_ylabel("bytes per weight of the model, all ranks together")
        axes[1].legend(frameon=False)
