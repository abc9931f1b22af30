"""What fsdp_transformer.py proves: the gradient of one process, collectives by formula."""

import argparse
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import torch
import torch.distributed as dist

from legacy_common import data
from legacy_common.job import Job, Step
from legacy_common.lab import proofs, traffic
from legacy_common.models import TransformerConfig


def expected_collectives(
    args: argparse.Namespace, config: TransformerConfig, shards: int, replicas: int
) -> list[tuple[str, str, int]]:
    """Return how many collectives a step's gradient takes: (name, kind, number) of each.

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
        ("all-gathers", "all_gather", gathers * (shards > 1)),
        ("reduce-scatters", "reduce_scatter", scatters * (shards > 1)),
        ("all-reduces", "all_reduce", units * (replicas > 1)),  # between groups, once per step
    ]


def proven_steps(run, steps: Iterable[Step], accumulate_gradient: Callable) -> Iterator[Step]:
    """Yield the run's steps between the proofs."""

    def before() -> None:
        check_gradient(run, accumulate_gradient)
        if run.args.init_from and not run.job.found:
            check_files(run, run.args.init_from)

    return proofs.proven_steps(run.job, steps, run.model, run.optimizer, before, lambda: None)


def check_files(run, folder: str, kind: str = "") -> None:
    """Compare the weights in a folder's files with this rank's shards."""
    group = run.job.store.group
    proofs.same_as_files(run.job.report, run.model, run.config, folder, group, kind)


def check_gradient(run, accumulate_gradient: Callable) -> None:
    """Compare gradient, loss and norm with those of one process; count the collectives.

    With --parity-steps 0, or after a resume, only the collectives are counted.
    """
    args, report, resumed = run.args, run.job.report, run.job.found
    parity = 0 if resumed else args.parity_steps
    if not parity:
        why = "the first weights are gone" if resumed else "--parity-steps 0"
        report.say(f"gradient not compared with one process ({why})")
    batches = run.job.sampler.at_start().ahead(args.global_batch_size)
    for indices in islice(batches, max(1, parity)):
        items = unequal(run.job.train_set, indices)
        tokens = torch.tensor(sum(int((t != data.IGNORED).sum()) for _, t in items))
        tokens = tokens.to(run.device)
        with traffic.TrafficCounter() as counter:
            loss = accumulate_gradient(run, micro_batches_of(run.job, items), tokens)
        if args.compile:  # which the counter does not see: this one is to be compared
            run.optimizer.zero_grad()
            loss = accumulate_gradient(run, micro_batches_of(run.job, items), tokens)
        if parity:
            alone = proofs.whole_model(run.job, run.config)
            compare_with_one_process(run.job, run.model, alone, items, tokens, loss)
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


def micro_batches_of(job: Job, items: list) -> list:
    """Deal a global batch to this rank as data.job_batches does."""
    size, length = job.args.micro_batch_size, job.args.seq_len
    own = items[job.sampler.rank :: job.sampler.world_size]
    starts = range(0, size * job.args.grad_accum_steps, size)
    return [data.collate(size, length, own[start : start + size]) for start in starts]


def compare_with_one_process(job: Job, model, alone, items, tokens, loss: torch.Tensor) -> None:
    """Hold loss, norm and every rank's part of the gradient against a plain model's."""
    gradient = proofs.same_as_one_process(job, model, alone, items, loss, tokens)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")).full_tensor()
    expected = gradient.double().norm().item()  # in float32 it loses four digits
    tolerance, source = proofs.tolerance_of(job.args), "one process on the same global batch"
    job.report.check("gradient norm", norm.item(), expected, tolerance * expected, source)
