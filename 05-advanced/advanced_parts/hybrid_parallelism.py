"""What hybrid_parallelism.py proves: first steps of one process, bytes of each axis, layout."""

import copy
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from advanced_parts.hybrid_sends import (
    SHOWN_AXES,
    check_bytes,
    check_overlap,
    choices,
    sums_begun,
)
from legacy_common import data, models, runtime
from legacy_common.job import Step, lr_at
from legacy_common.lab import proofs
from legacy_common.lab.traffic import TrafficCounter
from legacy_common.models import local

# Relative, after AdamW's first step: it turns the rounding of a gradient's smallest numbers into
# whole steps of the learning rate. Another batch or rate changes loss or norm by percents.
TRAINED = 1e-3


def proven_steps(run, steps: Iterable[Step], accumulate_gradient: Callable) -> Iterator[Step]:
    """Say where each rank is; yield the run's steps between the proofs."""
    say_layout(run)

    def before() -> None:
        check_gradient(run, accumulate_gradient)
        if run.job.args.init_from and not run.job.found:
            check_files(run, run.job.args.init_from)

    def after() -> None:
        check_replicas(run)

    compared = same_steps(run, steps)
    yield from proofs.proven_steps(run.job, compared, run.model, run.optimizer, before, after)


def check_files(run, folder: str, kind: str = "") -> None:
    """Compare the weights in a folder's files with this rank's parts."""
    group = run.job.store.group
    proofs.same_as_files(run.job.report, run.model, run.model.config, folder, group, kind)


def check_gradient(run, accumulate_gradient: Callable) -> None:
    """Compare a gradient and its loss with those of one process, and bytes with the formulas.

    With --parity-steps 0 only the bytes are compared. Weights and data stay where they are.
    """
    job, args = run.job, run.job.args
    sampler = job.sampler.at_start()
    batches = data.job_batches(job.train_set, sampler, args)
    orders = list(islice(sampler.ahead(args.global_batch_size), 2))
    accumulate_gradient(run, next(batches))  # the first one settles FSDP's and the stages' buffers
    run.optimizer.zero_grad()
    batch = next(batches)
    with TrafficCounter() as counter, sums_begun(run, counter) as begun, choices(run) as chosen:
        loss_sum = accumulate_gradient(run, batch)
    if args.compile:  # which the counter does not see: this one is to be compared
        run.optimizer.zero_grad()
        loss_sum = accumulate_gradient(run, batch)
    if args.parity_steps:
        items = [job.train_set[index] for index in orders[1]]
        alone, _ = one_process(run)
        proofs.same_as_one_process(job, run.model, alone, items, loss_sum, run.tokens)
    else:
        job.report.say("not compared with one process (--parity-steps 0)")
    run.optimizer.zero_grad()
    check_bytes(run, counter, chosen)
    check_overlap(run, *begun)


def one_process(run) -> tuple[models.Transformer, torch.optim.AdamW]:
    """Return the whole model and its optimizer: drawn from the seed, or of the checkpoint."""
    job = run.job
    model = proofs.whole_model(job, run.model.config)
    optimizer = torch.optim.AdamW(model.parameters(), job.args.lr, (0.9, 0.95), weight_decay=0.1)
    if job.found:
        store = copy.copy(job.store)
        store.model = model
        store.optimizer = optimizer
        store.read(job.found[0])
    return model, optimizer


def steps_alone(run, count: int) -> Iterator[tuple[float, float]]:
    """Take the run's next steps in one process; yield the loss and the gradient norm of each."""
    job, args = run.job, run.job.args
    if not count:  # the whole model may not fit
        return
    model, optimizer = one_process(run)
    ahead = islice(job.sampler.ahead(args.global_batch_size), count)
    for number, indices in enumerate(ahead, job.step + 1):
        items = [job.train_set[index] for index in indices]
        inputs, targets = (x.to(job.device) for x in data.collate(len(items), args.seq_len, items))
        tokens = (targets != data.IGNORED).sum()
        losses = []
        micro_batches = (side.split(args.micro_batch_size) for side in (inputs, targets))
        for x, y in zip(*micro_batches, strict=True):
            mixed = args.precision == "bf16-mixed"
            with torch.autocast(job.device.type, torch.bfloat16, enabled=mixed):
                logits = model(x).float().flatten(0, 1)
            losses.append(F.cross_entropy(logits, y.flatten(), reduction="sum") / tokens)
            losses[-1].backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(number, args)
        optimizer.step()
        optimizer.zero_grad()
        yield sum(losses).item(), norm.item()


def same_steps(run, steps: Iterable[Step]) -> Iterator[Step]:
    """Yield steps; end them when the first --parity-steps differ from those of one process.

    What a gradient before training cannot show: clipping, zero_grad, learning rate, the batches.
    """
    report, args = run.job.report, run.job.args
    expected = list(steps_alone(run, args.parity_steps))
    tolerance = proofs.tolerance_of(args)
    for (loss, norm), step in zip(expected, steps, strict=False):
        yield step
        total = step.loss_sum.detach().clone()
        dist.all_reduce(total)
        if not math.isfinite(total):  # the job says where it began, and ends the run
            break
        found = (total / step.tokens).item() / loss, float(step.norm) / norm
        error = max(runtime.gather(max(abs(ratio - 1) for ratio in found)))
        name = f"step {step.number}: relative error of loss and gradient norm"
        report.check(name, error, 0, tolerance, "one process")
        tolerance = max(TRAINED, tolerance)
    if not report.failed:
        yield from steps


def check_replicas(run) -> None:
    """Check that ranks that hold the same part of a weight hold the same bits."""
    own = {}
    for name, weight in run.model.named_parameters():
        place = ()
        if isinstance(weight, DTensor):
            coordinates = zip(weight.device_mesh.get_coordinate(), weight.placements, strict=True)
            place = tuple(None if cut.is_replicate() else number for number, cut in coordinates)
        content = local(weight).detach().cpu().flatten().view(torch.uint8).numpy()
        own[name, place] = hashlib.sha256(content).hexdigest()
    copies = {part for rank in runtime.gather(own) for part in rank.items()}
    differing = len(copies) - len({part for part, _ in copies})
    name = "parts of weights whose copies differ between ranks"
    run.job.report.check(name, differing, 0, 0, "replicas stay equal")


def say_layout(run):
    """Print for each axis its size, the group of rank 0, and whether that group leaves a node."""
    rows, meshes = [], {axis: run.mesh[axis] for axis in SHOWN_AXES}
    if run.expert_meshes:
        meshes["ep, of dp"] = run.expert_meshes[0]
    for axis, mesh in meshes.items():
        group = mesh.mesh.tolist()
        nodes = {rank // run.job.args.ranks_per_node for rank in group}
        link = "-" if len(group) == 1 else "within a node" if len(nodes) == 1 else "between nodes"
        shown = " ".join(map(str, group[:8])) + " ..." * (len(group) > 8)
        rows.append((axis, str(len(group)), shown, link))
    run.job.report.table(rows, ("axis", "ranks", "group of rank 0", "its link"), names=1)
