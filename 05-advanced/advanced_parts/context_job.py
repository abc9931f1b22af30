"""What both lessons of context parallelism train and check: against full attention, one process.

A rank reads a part of every sequence: the tokens at `positions`, (T/N,) of T.
"""

import dataclasses

import torch
import torch.distributed as dist
import torch.nn.functional as F

from legacy_common import data, models, runtime
from legacy_common.cli import UsageError
from legacy_common.lab import proofs
from legacy_common.lab.traffic import TrafficCounter

# float32 keeps 1.2e-7 of a number; sums of a few hundred terms, in another order.
TOLERANCE = 1e-5


def set_attention(model, attend) -> None:
    """Put another function in the place of causal_attention, in all blocks."""
    for block in model.blocks:
        block.attention.attend = attend


def sharded_loss(model, batch, positions) -> torch.Tensor:
    """Return a rank's share of the mean loss: all shares add up to it. Shapes: batch (B, T) x 2."""
    tokens, targets = (x[:, positions] for x in batch)
    logits = model(tokens, positions)  # the rotation of q and k needs the true places
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total / batch[1].numel()  # of all ranks' tokens, not of this rank's


def sum_gradients(model) -> None:
    """Sum the weights' gradients: each rank's come from its own tokens only."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def build(seed, seq_len, device) -> models.Transformer:
    """Return the preset `tiny` for any length, since rotary positions have no weights."""
    config = dataclasses.replace(models.PRESETS["tiny"], max_seq_len=seq_len)
    runtime.seed_everything(seed)  # the same model on every rank
    return models.Transformer(config).to(device)


def batch_of(seq_len: int, batch_size: int, device) -> list[torch.Tensor]:
    """Return the same tokens and targets on every rank. Shapes: (B, T) each."""
    text = data.load_text()
    if seq_len * batch_size > len(text):
        what = f"{batch_size} sequences of {seq_len:,} tokens"
        raise UsageError(f"--seq-len, --batch-size: {what} are more than the text's {len(text):,}")
    sequences = data.Sequences(text, seq_len)
    return next(data.batches_of(sequences, 1, batch_size, 0, batch_size, device))


def refuse_uneven(flag: str, tokens: int, parts: int, why: str) -> None:
    """Raise UsageError when a sequence cannot be cut into equal parts."""
    if tokens % parts:
        low, high = tokens // parts * parts, (tokens // parts + 1) * parts
        near = " or ".join(str(n) for n in (low, high) if n)
        raise UsageError(f"{flag} {tokens} is not divisible by {parts} ({why}): take {near}")


def check_transformer(report, name, model, attend, positions, batch) -> list[TrafficCounter]:
    """Check the transformer's loss and gradients against one process that reads whole sequences.

    Return what was counted in forward and in backward. Shapes: batch (B, T) twice.
    """
    set_attention(model, models.causal_attention)
    tokens, targets = batch
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    gradient = proofs.gradient_of_one_process(model, [loss])

    set_attention(model, attend)
    model.zero_grad()
    with TrafficCounter() as forward:
        share = sharded_loss(model, batch, positions)
    with TrafficCounter() as backward:
        share.backward()
    sum_gradients(model)

    source = "one process, whole sequences"
    error = abs(sum(runtime.gather(share.item())) / loss.item() - 1)
    report.check(f"{name}: loss, relative error", error, 0, TOLERANCE, source)
    name = f"{name}: gradient, relative error"
    proofs.same_gradient(report, model, gradient, TOLERANCE, name, source)
    return [forward, backward]


def check_bytes(report, name, counted, layers: int, expected, source) -> None:
    """Check the bytes that the busiest rank sent per layer, in (forward, backward)."""
    for way, counter, formula in zip(("forward", "backward"), counted, expected, strict=True):
        sent = round(sum(call.sent for call in counter.collectives)) // layers
        most = max(runtime.gather(sent))
        report.check(f"{name}, {way}: bytes sent per layer", most, formula, 0, source)
        report.metrics[f"{name} {way} bytes per layer"] = most
