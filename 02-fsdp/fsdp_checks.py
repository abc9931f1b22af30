"""What fsdp_transformer.py proves: the gradient of one process, collectives by formula, tokens."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F

from dist_common import data, measure, models, proofs, runtime
from dist_common.models import TransformerConfig
from fsdp_job import cut_like
from shard_tools import local

# Relative. fp32 sums in another order differ in the last bits; bfloat16 keeps 8 bits.
TOLERANCE = {"32-true": 1e-5, "bf16-mixed": 5e-2}


def expected_collectives(
    args: argparse.Namespace, config: TransformerConfig, shards: int, replicas: int
) -> list[tuple[str, str, int]]:
    """Return how many collectives a step's gradient takes: (name, operation, number) of each.

    Source: FSDP paper, section 3.2.
    """
    first = not config.tied_embeddings  # whether the embedding is a unit of its own
    units = config.num_layers + first + 1
    micro_batches = args.grad_accum_steps
    # Gathered again for backward: all but norm and head, which are still there.
    again = 0 if args.sharding == "grad-op" else config.num_layers + first
    forward = units * (1 if args.accumulate == "gathered" else micro_batches)
    gathers = forward + micro_batches * again
    scatters = units * (micro_batches if args.accumulate == "sharded" else 1)
    return [
        ("all-gathers", "_allgather_base_", gathers * (shards > 1)),
        ("reduce-scatters", "_reduce_scatter_base_", scatters * (shards > 1)),
        ("all-reduces", "allreduce_", units * (replicas > 1)),  # between groups, once per step
    ]


def check_gradient(run: SimpleNamespace, accumulate_gradient: Callable) -> None:
    """Compare gradient, loss and norm with those of one process; count the collectives.

    With --parity-steps 0, or after a resume, only the collectives are counted.
    """
    args, report = run.args, run.report
    parity = 0 if run.resumed else args.parity_steps
    if not parity:
        why = "the first weights are gone" if run.resumed else "--parity-steps 0"
        report.say(f"gradient not compared with one process ({why})")
    for indices in run.sampler.global_order().split(args.global_batch_size)[: max(1, parity)]:
        items = unequal(run.train_set, indices)
        tokens = torch.tensor(sum(int((t != data.IGNORED).sum()) for _, t in items))
        tokens = tokens.to(run.device)
        with measure.CollectiveCounter() as counter:
            loss = accumulate_gradient(run, micro_batches_of(run, items), tokens)
        if parity:
            compare_with_one_process(run, items, tokens, loss)
        run.optimizer.zero_grad()
    replicas = dist.get_world_size() // run.shards
    for name, kind, expected in expected_collectives(args, run.config, run.shards, replicas):
        report.check(f"{name} per step", counter.calls[kind], expected, 0, "FSDP paper, 3.2")


def unequal(sequences, indices: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return sequences of which a loss counts unequally many tokens: so a wrong mean shows."""
    items = []
    for index in indices.tolist():
        inputs, targets = sequences[index]
        targets = targets.clone()
        targets[len(targets) - index % (len(targets) // 2 + 1) :] = data.IGNORED
        items.append((inputs, targets))
    return items


def micro_batches_of(run: SimpleNamespace, items: list) -> list:
    """Deal a global batch to this rank as data.job_batches does."""
    size, length = run.args.micro_batch_size, run.args.seq_len
    own = items[run.sampler.rank :: run.sampler.world_size]
    starts = range(0, size * run.args.grad_accum_steps, size)
    return [data.collate(size, length, own[start : start + size]) for start in starts]


def compare_with_one_process(run: SimpleNamespace, items, tokens, loss: torch.Tensor) -> None:
    """Hold loss, norm and every rank's part of the gradient against a plain model's."""
    args, device = run.args, run.device
    runtime.seed_everything(args.seed)
    alone = models.Transformer(run.config).to(device)
    dtype = torch.bfloat16 if args.precision == "bf16-mixed" else None
    losses = []

    def losses_alone():
        for start in range(0, len(items), args.micro_batch_size):
            part = items[start : start + args.micro_batch_size]
            inputs, targets = data.collate(len(part), args.seq_len, part)
            with torch.autocast(device.type, dtype, enabled=dtype is not None):
                logits = alone(inputs.to(device)).float().flatten(0, 1)
            targets = targets.flatten().to(device)
            losses.append(F.cross_entropy(logits, targets, reduction="sum") / tokens)
            yield losses[-1]

    gradient = proofs.gradient_of_one_process(alone, losses_alone())
    sizes = [weight.numel() for weight in alone.parameters()]
    parts = zip(alone.named_parameters(), gradient.split(sizes), strict=True)
    whole = {name: part.view_as(weight) for (name, weight), part in parts}
    error = torch.zeros((), device=device)
    for name, weight in run.model.named_parameters():
        own = local(weight.grad).to(device)
        difference = own - cut_like(whole[name], weight).to(device)
        if difference.numel():
            error = torch.maximum(error, difference.abs().max() / gradient.abs().max())
    dist.all_reduce(error, op=dist.ReduceOp.MAX)  # the worst rank counts
    tolerance, source = TOLERANCE[args.precision], "one process on the same global batch"
    name = "gradient: relative error against one process"
    run.report.check(name, error.item(), 0, tolerance, source)
    dist.all_reduce(loss)
    expected = sum(losses).item()
    mean = loss.item() / tokens.item()
    run.report.check("loss", mean, expected, tolerance * expected, source)
    norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), float("inf")).full_tensor()
    expected = gradient.double().norm().item()  # in float32 it loses four digits
    run.report.check("gradient norm", norm.item(), expected, tolerance * expected, source)


def check_trained_tokens(run: SimpleNamespace) -> None:
    """Check that every token from this start's place in the data to its end was trained on once."""
    sampler, lengths = run.sampler, run.train_set.lengths
    order = sampler.global_order()
    first_epoch, first = run.first_sample
    expected = (sampler.epoch - first_epoch) * int(lengths.sum())
    expected += int(lengths[order[: sampler.position]].sum())
    now = sampler.epoch, sampler.position
    sampler.set_epoch(first_epoch)
    expected -= int(lengths[sampler.global_order()[:first]].sum())
    sampler.epoch, sampler.position = now
    name, source = "tokens trained on since the start", "each once"
    run.report.check(name, run.trained_tokens, expected, 0, source)
