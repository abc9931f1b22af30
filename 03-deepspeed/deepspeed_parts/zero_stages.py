"""What zero_stages.py checks: bytes held and sent; and the plain PyTorch it compares with."""

from collections.abc import Sequence
from itertools import accumulate as sums
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from legacy_common.lab.proofs import same_losses
from legacy_common.models import Transformer, TransformerConfig
from legacy_common.report import Report

BF16, FP32 = 2, 4  # bytes of a number
KINDS = ("weights", "gradients", "optimizer state")
STAGES = ("stage 0", "stage 1", "stage 2", "stage 3")
WIDTHS = {"bf16-mixed": BF16, "32-true": FP32}  # of a weight and of its gradient
TOLERANCE = 0.02  # relative: buffers, and small weights that stay whole
LOSS_TOLERANCE = 1e-5  # float32, of losses near 5: the same sums in another order


class Row(NamedTuple):
    """A way of training: bytes per weight held and by formula, by kind; sent, by precision."""

    held: list[float]
    formula: tuple[float, ...]
    sent: dict[str, float]


def gradient_share(sizes: Sequence[int], ranks: int) -> float:
    """Return the part of all gradients that the fullest rank keeps in stages 1 and 2.

    Weights of these sizes lie end to end and are cut into equal parts, even numbers of elements;
    of a weight that a cut goes through, the ranks on both sides keep the whole gradient.
    """
    part = 2 * -(-sum(sizes) // (2 * ranks))
    starts = list(sums(sizes, initial=0))
    kept = [
        sum(end - start for start, end in zip(starts, starts[1:], strict=False)
            if start < part * (rank + 1) and end > part * rank)
        for rank in range(ranks)
    ]  # fmt: skip
    return max(kept) / sum(sizes)


def sizes_of(shape: TransformerConfig) -> list[int]:
    with torch.device("meta"):
        return [weight.numel() for weight in Transformer(shape).parameters()]


def sharded(sizes: Sequence[float], stage: int, ranks: int) -> tuple[float, ...]:
    """Return bytes per weight of each of KINDS on a rank, under a stage of ZeRO (figure 1)."""
    first_sharded = zip(sizes, (3, 2, 1), strict=True)
    return tuple(size / ranks if stage >= first else size for size, first in first_sharded)


def in_rings(stage: int, ranks: int, micro_batches: int, gather: float, reduce: float) -> float:
    """Return bytes per weight that a rank sends in a step (ZeRO paper, section 7).

    `gather`, `reduce`: bytes of a weight and of its gradient.
    """
    m = micro_batches
    passes = {0: 2 * reduce, 1: reduce + gather, 2: m * reduce + gather}
    passes[3] = m * (gather + gather + reduce)
    return passes[stage] * (ranks - 1) / ranks


def held_per_weight(
    name: str, accumulate: int, ranks: int, sizes: Sequence[int], width: int = BF16
) -> tuple[float, ...]:
    """Return what a rank holds for each weight, in bytes of each of KINDS, in mid-step.

    `sizes`: elements of each weight. `width`: bytes of one, and of its gradient. Optimizer state is
    a float32 copy and Adam's two moments; FSDP and stage 0 need no copy of float32 weights. With
    one micro-batch, stage 1 has reduced its gradient by then. Source: ZeRO paper, section 5.
    """
    if name == "FSDP":
        return sharded((FP32, FP32, 2 * FP32), 3, ranks)
    stage = STAGES.index(name)
    copy = stage > 0 or width < FP32
    held = sharded((width, width, (3 if copy else 2) * FP32), stage, ranks)
    if stage == 2 or (stage == 1 and accumulate == 1):
        return held[0], width * gradient_share(sizes, ranks), held[2]
    return held


def sent_per_weight(
    name: str, width: int, accumulate: int, ranks: int, all_reduces: bool = False
) -> float:
    """Return the bytes that a rank sends for each weight in a step, in rings.

    `width`: bytes of a weight and of a gradient, 2 or 4. All weights cross once in a reduction and
    once in a gathering; stages 2 and 3 reduce in every micro-batch, stage 3 gathers for forward and
    again for backward. FSDP does the same, but reduces in float32. By its default DeepSpeed
    `all_reduces` in stages 1 and 2, where a reduction to each owner would do: twice the bytes.
    Source: ZeRO paper, section 7, which has one micro-batch.
    """
    if name == "FSDP":
        return in_rings(3, ranks, accumulate, width, FP32)
    stage = STAGES.index(name)
    reduction = 2 * width if all_reduces and stage in (1, 2) else width
    return in_rings(stage, ranks, accumulate, width, reduction)


def compare(
    report: Report, name: str, runs: dict, alone: torch.Tensor, accumulate: int,
    shape: TransformerConfig,
) -> Row:  # fmt: skip
    """Check a way's runs, by precision, against the formulas and the losses of one process."""
    ranks = report.world.world_size
    weights = shape.num_parameters()
    own = torch.tensor([runs["bf16-mixed"].held[kind] for kind in KINDS], device=report.device)
    dist.all_reduce(own, op=dist.ReduceOp.MAX)  # the fullest rank: shards are not equally large
    formula = held_per_weight(name, accumulate, ranks, sizes_of(shape))
    row = Row((own / weights).tolist(), formula, {})
    tolerance = TOLERANCE * sum(row.formula)
    for kind, held, expected in zip(KINDS, row.held, row.formula, strict=True):
        report.check(f"{name}: {kind}", held, expected, tolerance, "ZeRO paper, section 5")
    all_reduces = report.args.all_reduce_buckets
    for precision, run in runs.items():
        expected = sent_per_weight(name, WIDTHS[precision], accumulate, ranks, all_reduces)
        sent = sum(call.sent for call in run.counter.collectives) / weights
        check, source = f"{name}, {precision}: bytes sent", "ZeRO paper, section 7"
        report.check(check, sent, expected, TOLERANCE * expected, source)
        report.metrics[f"bytes_sent_per_weight_{name}_{precision}"] = row.sent[precision] = sent
    losses = runs["32-true"].losses
    dist.all_reduce(losses)
    same_losses(report, losses / ranks, alone, LOSS_TOLERANCE, f"{name}: largest error of a loss")
    report.metrics[f"bytes_per_weight_{name}"] = sum(row.held)
    return row


def print_table(report: Report, rows: dict[str, Row]) -> None:
    """Print what a rank held and sent, in bytes per weight."""
    cells = []
    for name, row in rows.items():
        sent = [row.sent[precision] for precision in WIDTHS]
        numbers = (*row.held, sum(row.held), sum(row.formula), *sent)
        cells.append((name, *(f"{number:.2f}" for number in numbers)))
    report.say("bytes per weight and rank: held in bf16, sent in a step")
    report.table(cells, ("", *KINDS, "all", "by formula", "sent, bf16", "sent, float32"))


# Plain PyTorch behind the three calls of a DeepSpeed engine: one process, and FSDP.


class OneProcess:
    """A plain model and AdamW; `step` updates after every `accumulate`-th micro-batch."""

    def __init__(self, model: nn.Module, lr: float, accumulate: int) -> None:
        self.model, self.accumulate, self.calls = model, accumulate, 0
        self.optimizer = torch.optim.AdamW(model.parameters(), lr, (0.9, 0.95), weight_decay=0.1)

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens)

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self.accumulate).backward()

    def step(self) -> None:
        self.calls += 1
        if self.calls % self.accumulate == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()


def shard_with_fsdp(model: nn.Module, lr: float, accumulate: int, bf16: bool) -> OneProcess:
    """Shard a Transformer fully: float32 weights, cast where they are used, reduced in float32."""
    policy = MixedPrecisionPolicy()
    if bf16:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for module in (*model.blocks, model):
        # The root too, which would otherwise stay whole from forward to backward.
        fully_shard(module, mp_policy=policy, reshard_after_forward=True)
    return OneProcess(model, lr, accumulate)
