"""What zero_stages.py checks: bytes held and sent, by the ZeRO paper and as they were counted."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from dist_common.measure import RING_FACTOR, CollectiveCounter
from dist_common.models import TransformerConfig
from dist_common.proofs import same_losses
from dist_common.report import Report, figure
from tensor_bytes import bytes_by_place

KINDS = ("weights", "gradients", "optimizer state")
BF16, FP32 = 2, 4  # bytes of a number
WIDTHS = {"bf16-mixed": BF16, "32-true": FP32}  # of a weight and of its gradient
TOLERANCE = 0.02  # relative: buffers, and small weights that stay whole
LOSS_TOLERANCE = 1e-5  # float32, of losses near 5: the same sums in another order
COLORS = ("tab:blue", "tab:orange", "tab:green")
# How a name of PyTorch's ends, and what the rest of the world calls it.
COLLECTIVES = {
    "allreduce_": "all-reduce", "reduce_": "reduce", "_reduce_scatter_base_": "reduce-scatter",
    "_allgather_base_": "all-gather",
}  # fmt: skip


@dataclass
class Row:
    """A way of training: bytes per weight held and by formula, by kind; sent, by precision."""

    held: dict[str, float]
    formula: dict[str, float]
    sent: dict[str, float]
    calls: Counter  # of collectives in a step in bf16, by PyTorch's names


def held_per_weight(name: str, accumulate: int, ranks: int) -> dict[str, float]:
    """Return what a rank holds for each weight in bf16, in bytes by kind, in mid-step.

    Optimizer state is a float32 copy and Adam's two moments; under FSDP the float32 weights need no
    copy. With one micro-batch, stage 1 has reduced its gradient by then.
    Source: ZeRO paper, section 5 and figure 1.
    """
    if name == "FSDP":
        return {"weights": FP32 / ranks, "gradients": FP32 / ranks, "optimizer state": 8 / ranks}
    stage = int(name.split()[1])
    weights = BF16 / (ranks if stage == 3 else 1)
    reduced = stage >= 2 or (stage == 1 and accumulate == 1)
    state = 3 * FP32 / (ranks if stage >= 1 else 1)
    gradients = BF16 / (ranks if reduced else 1)
    return {"weights": weights, "gradients": gradients, "optimizer state": state}


def sent_per_weight(name: str, width: int, accumulate: int, ranks: int) -> float:
    """Return the bytes that a rank sends for each weight in a step, in rings.

    `width`: bytes of a weight and of a gradient, 2 or 4. All weights cross once in a reduction and
    once in a gathering; stages 2 and 3 reduce in every micro-batch, stage 3 gathers for forward and
    again for backward. FSDP does the same, but reduces in float32.
    Source: ZeRO paper, section 7, which has one micro-batch.
    """
    sizes = {
        "stage 0": 2 * width,  # an all-reduce is a reduction and a gathering
        "stage 1": width + width,
        "stage 2": accumulate * width + width,
        "stage 3": accumulate * 3 * width,
        "FSDP": accumulate * (2 * width + FP32),
    }
    return sizes[name] * RING_FACTOR["all_gather"](ranks)


def bytes_sent(counter: CollectiveCounter, ranks: int) -> float:
    """Return what the counted collectives make a rank send, in bytes, if they go in rings."""
    handed = counter.bytes
    # These are handed the whole and a part of it, 1 + 1/N wholes.
    whole = (handed["_allgather_base_"] + handed["_reduce_scatter_base_"]) * ranks / (ranks + 1)
    whole += handed["reduce_"]  # to one owner: each rank passes on what it summed, but the owner
    sent = whole * RING_FACTOR["all_gather"](ranks)
    return sent + handed["allreduce_"] * RING_FACTOR["all_reduce"](ranks)


def held_kinds(model: nn.Module, optimizer, total: int) -> dict[str, int]:
    """Return the bytes that this rank holds, by kind; of `total`, gradients are what is left.

    So they include DeepSpeed's buffers. Stage 3 keeps a rank's part of a weight in `ds_tensor`.
    """
    weights = [getattr(weight, "ds_tensor", weight) for weight in model.parameters()]
    weights = [getattr(weight, "to_local", lambda own=weight: own)() for weight in weights]
    while hasattr(optimizer, "optimizer"):  # PyTorch's, inside DeepSpeed's
        optimizer = optimizer.optimizer
    state = [t for owner, moments in optimizer.state.items() for t in (owner, *moments.values())]
    state = [getattr(tensor, "to_local", lambda own=tensor: own)() for tensor in state]
    in_weights = bytes_by_place(weights).total()
    in_state = bytes_by_place([*weights, *state]).total() - in_weights
    sizes = (in_weights, total - in_weights - in_state, in_state)
    return dict(zip(KINDS, sizes, strict=True))


def compare(
    report: Report, name: str, runs: dict, alone: torch.Tensor, accumulate: int,
    shape: TransformerConfig,
) -> Row:  # fmt: skip
    """Check a way's runs, by precision, against the formulas and the losses of one process."""
    ranks, weights = report.world.world_size, shape.num_parameters()
    own = torch.tensor([runs["bf16-mixed"].held[kind] for kind in KINDS], device=report.device)
    dist.all_reduce(own, op=dist.ReduceOp.MAX)  # the fullest rank: shards are not equally large
    held = dict(zip(KINDS, (own / weights).tolist(), strict=True))
    formula = held_per_weight(name, accumulate, ranks)
    tolerance = TOLERANCE * sum(formula.values())
    for kind in KINDS:
        source = "ZeRO paper, section 5"
        report.check(f"{name}: {kind}", held[kind], formula[kind], tolerance, source)
    sent = {}
    for precision, run in runs.items():
        expected = sent_per_weight(name, WIDTHS[precision], accumulate, ranks)
        sent[precision] = bytes_sent(run.counter, ranks) / weights
        check, source = f"{name}, {precision}: bytes sent", "ZeRO paper, section 7"
        report.check(check, sent[precision], expected, TOLERANCE * expected, source)
        report.metrics[f"bytes_sent_per_weight_{name}_{precision}"] = sent[precision]
    losses = runs["32-true"].losses
    dist.all_reduce(losses)
    same_losses(report, losses / ranks, alone, LOSS_TOLERANCE, f"{name}: largest error of a loss")
    report.metrics[f"bytes_per_weight_{name}"] = sum(held.values())
    return Row(held, formula, sent, runs["bf16-mixed"].counter.calls)


def print_table(report: Report, rows: dict[str, Row]) -> None:
    """Print what a rank held and sent, in bytes per weight, and the collectives of a step."""
    cells, calls = [], []
    for name, row in rows.items():
        held = [f"{row.held[kind]:.2f}" for kind in KINDS]
        sums = [f"{sum(numbers.values()):.2f}" for numbers in (row.held, row.formula)]
        sent = [f"{row.sent[precision]:.2f}" for precision in WIDTHS]
        cells.append((name, *held, *sums, *sent))
        calls.append((name, *[str(row.calls[key] or "-") for key in COLLECTIVES]))
    report.say("bytes per weight and rank: held in bf16, sent in a step")
    report.table(cells, ("", *KINDS, "all", "by formula", "sent, bf16", "sent, float32"))
    report.say("collectives of a step in bf16")
    report.table(calls, ("", *COLLECTIVES.values()))


def draw_stages(path: Path, rows: dict[str, Row], report: Report, accumulate: int) -> None:
    """Draw as PNG what each way held, beside the formula, and what it sends by micro-batches."""
    ranks = report.world.world_size
    with figure(path, 1, 2, figsize=(11, 4), width_ratios=(3, 2)) as (left, right):
        for place, row in enumerate(rows.values()):
            stack(left, place - 0.2, row.held)
            stack(left, place + 0.2, row.formula, hatched=True)
        marks = [left.bar(0, 0, color=color) for color in COLORS]
        marks.append(left.bar(0, 0, facecolor="none", edgecolor="gray", hatch="///"))
        left.legend(marks, [*KINDS, "by formula"])
        left.set_xticks(range(len(rows)), rows)
        left.set(title=f"held by each of {ranks} ranks in bf16", ylabel="bytes per weight")
        counts = range(1, max(8, accumulate) + 1)
        for name, row in rows.items():
            line = [sent_per_weight(name, BF16, count, ranks) for count in counts]
            wide = {"linewidth": 5, "alpha": 0.4} if name == "stage 0" else {}  # stage 1 covers it
            (drawn,) = right.plot(counts, line, label=name, **wide)
            right.plot(accumulate, row.sent["bf16-mixed"], "o", color=drawn.get_color())
        right.set(title="sent per step (point: counted)", ylabel="bytes per weight")
        right.set_xlabel("micro-batches per step")
        right.set_ylim(0)
        right.legend()


def stack(axes, place: float, sizes: dict[str, float], hatched: bool = False) -> None:
    """Draw a bar of stacked kinds, with its height in bytes above it."""
    floor = 0.0
    for kind, color in zip(KINDS, COLORS, strict=True):
        fill = {"facecolor": "none", "edgecolor": color, "hatch": "///"}
        axes.bar(place, sizes[kind], 0.36, bottom=floor, **(fill if hatched else {"color": color}))
        floor += sizes[kind]
    axes.text(place, floor, f"{floor:.2f}", ha="center", va="bottom", fontsize=8)
