"""What hybrid_parallelism.py proves, what it refuses, and what each of its axes sends."""

import copy
import hashlib
from collections import Counter

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from dist_common import data, models, proofs, runtime
from dist_common.cli import UsageError
from dist_common.steps import TrafficCounter
from hybrid_layout import AXES, cut_like, local

# Relative. fp32 sums in another order differ in the last bits; bfloat16 keeps 8 bits.
TOLERANCE = {"32-true": 1e-5, "bf16-mixed": 5e-2}


def refuse(args):
    """Refuse what PyTorch gets wrong without an error, and what has no stages to fill."""
    if args.precision == "16-mixed":
        raise UsageError("--precision 16-mixed needs a loss scaler over all stages: use bf16-mixed")
    if args.schedule == "zero-bubble" and args.data_parallel == "full":
        raise UsageError(
            "--schedule zero-bubble with --data-parallel full: PyTorch loses gradients without an "
            "error where FSDP frees weights between forward and a backward in two parts: use "
            "--data-parallel grad-op or replicate, or --schedule 1f1b or interleaved"
        )
    if args.schedule != "gpipe" and args.grad_accum_steps < args.pp:
        raise UsageError(
            f"--schedule {args.schedule} needs at least as many micro-batches as stages: "
            f"--grad-accum-steps {args.grad_accum_steps} is less than --pp {args.pp}"
        )
    if args.schedule in ("interleaved", "zero-bubble") and args.grad_accum_steps % args.pp:
        raise UsageError(
            f"--schedule {args.schedule} needs micro-batches in groups of --pp {args.pp}: "
            f"--grad-accum-steps {args.grad_accum_steps} is no multiple of it"
        )


def sent_per_axis(run, counter):
    """Return the bytes that this rank sent along each axis, in rings: {axis: bytes}."""
    meshes = [(axis, run.mesh[axis]) for axis in AXES]
    meshes.append((data_axis(run.args), run.data_mesh))
    axes = {mesh.get_group().group_name: axis for axis, mesh in meshes}
    sent = Counter()
    for call in counter.collectives:
        sent[axes.get(call.group)] += call.sent
    return sent


def data_axis(args):
    """Name the axis along which gradients are summed: ranks that differ in samples or in tokens."""
    return "dp and cp" if args.dp > 1 and args.cp > 1 else "dp" if args.dp > 1 else "cp"


def expected_bytes(run):
    """Return what this rank sends along each axis in one step, by formula: {axis: bytes}."""
    args, config, micro_batches = run.args, run.model.config, run.args.grad_accum_steps
    blocks = sum(len(stage.blocks) for stage in run.stages)
    first = run.stages[0].embedding is not None
    last = run.stages[-1].head is not None
    rows = args.micro_batch_size * len(run.positions)  # tokens of a micro-batch on this rank
    activations = 4 * rows * config.dim  # bytes, float32
    ring = {axis: (getattr(args, axis) - 1) / getattr(args, axis) for axis in AXES}
    # Two all-reduces in a block's forward (wo, down), two in backward (the inputs of q, k, v and of
    # gate, up); the embedding's columns gathered, which is half of one; the gradient of the head's
    # input; and for each row the loss's maximum, sum of exponentials and target's logit.
    reduced = (4 * blocks + first / 2 + last) * activations + last * 3 * 4 * rows
    # k and v of (B, kv heads / tp, T, head_dim), gathered in forward, their gradients scattered.
    kv_dim = config.num_kv_heads * (config.dim // config.num_heads) // args.tp
    gathered = 2 * 4 * args.micro_batch_size * args.seq_len * kv_dim
    stages = [stage.number for stage in run.stages]
    total = args.pp * len(stages)
    crossings = sum((n < total - 1) + (n > 0) for n in stages)  # one way, and the gradient back
    own = 4 * sum(local(weight).numel() for weight in run.model.parameters())
    group = args.dp * args.cp
    if args.data_parallel == "replicate":
        gradients = 2 * (group - 1) / group * own
    else:  # gradients scattered once; a rank holds 1 / group of them, and of the weights
        # full frees weights after each forward: whatever comes next gathers them again.
        gathers = micro_batches + 1 if args.data_parallel == "full" else 1
        gradients = (gathers + 1) * (group - 1) * own
    sent = {
        "tp": 2 * ring["tp"] * micro_batches * reduced,
        "cp": 2 * ring["cp"] * micro_batches * blocks * gathered,
        "pp": crossings * micro_batches * activations if args.pp > 1 else 0,
    }
    sent[data_axis(args)] = sent.get(data_axis(args), 0) + gradients
    return sent


def check_gradient(run, accumulate_gradient):
    """Compare a gradient and its loss with those of one process, and bytes with the formulas.

    With --parity-steps 0 only the bytes are compared. Weights and data stay where they are.
    """
    args, report = run.args, run.report
    sampler = copy.copy(run.sampler)
    batches = data.job_batches(run.train_set, sampler, args)
    orders = sampler.global_order().split(args.global_batch_size)
    accumulate_gradient(run, next(batches))  # the first one settles FSDP's and the stages' buffers
    for indices in orders[1 : 1 + max(1, args.parity_steps)]:
        run.optimizer.zero_grad()
        with TrafficCounter() as counter:
            loss = accumulate_gradient(run, next(batches))
        dist.all_reduce(loss)
        if args.parity_steps:
            compare_with_one_process(run, loss, indices)
        else:
            report.say("not compared with one process (--parity-steps 0)")
    run.optimizer.zero_grad()
    check_bytes(run, sent_per_axis(run, counter))


def compare_with_one_process(run, loss, indices):
    """Hold the loss and every rank's part of the gradient against the whole model on one device."""
    args, device = run.args, run.report.device
    runtime.seed_everything(args.seed)
    alone = models.Transformer(run.model.config).to(device)
    parts = indices.split(args.micro_batch_size)
    tokens = int(run.train_set.lengths[indices].sum())
    dtype = torch.bfloat16 if args.precision == "bf16-mixed" else None
    losses = []

    def losses_alone():
        for part in parts:
            items = [run.train_set[index] for index in part]
            inputs, targets = data.collate(args.micro_batch_size, args.seq_len, items)
            with torch.autocast(device.type, dtype, enabled=dtype is not None):
                logits = alone(inputs.to(device)).float().flatten(0, 1)
            targets = targets.flatten().to(device)
            losses.append(F.cross_entropy(logits, targets, reduction="sum") / tokens)
            yield losses[-1]

    gradient = proofs.gradient_of_one_process(alone, losses_alone())
    sizes = [weight.numel() for weight in alone.parameters()]
    whole = {
        name: part.view_as(weight)
        for (name, weight), part in zip(
            alone.named_parameters(), gradient.split(sizes), strict=True
        )
    }
    error = torch.zeros((), device=device)
    for name, weight in run.model.named_parameters():
        assert weight.grad is not None, f"no gradient for {name}"
        difference = local(weight.grad) - cut_like(whole[name], weight)
        if difference.numel():
            error = torch.maximum(error, difference.abs().max() / gradient.abs().max())
    dist.all_reduce(error, op=dist.ReduceOp.MAX)  # the worst rank counts
    tolerance, source = TOLERANCE[args.precision], "one process on the same global batch"
    name = "gradient: relative error against one process"
    run.report.check(name, error.item(), 0, tolerance, source)
    expected = sum(losses).item()
    run.report.check("loss", loss.item(), expected, tolerance * expected, source)


def check_bytes(run, sent):
    """Compare what each axis sent in one step with the formula, on the rank that differs most."""
    expected = expected_bytes(run)
    every_rank = runtime.gather([(round(sent[axis]), round(expected[axis])) for axis in expected])
    run.bytes_per_axis = {}
    for number, axis in enumerate(expected):
        measured, wanted = max(
            (rank[number] for rank in every_rank),
            key=lambda pair: (abs(pair[0] - pair[1]), pair[0]),
        )
        run.bytes_per_axis[axis] = max(rank[number][0] for rank in every_rank)
        if run.args.precision == "32-true" and wanted:
            name, source = f"bytes sent by a rank along {axis}", "see combining.md"
            run.report.check(name, measured, wanted, round(0.001 * wanted), source)


def check_replicas(run):
    """Check that ranks that hold the same part of a weight hold the same bits."""
    own = {}
    for name, weight in run.model.named_parameters():
        place = ()
        if isinstance(weight, DTensor):
            coordinates = weight.device_mesh.get_coordinate()
            place = tuple(
                None if placement.is_replicate() else number
                for number, placement in zip(coordinates, weight.placements, strict=True)
            )
        content = local(weight).detach().cpu().flatten().view(torch.uint8).numpy()
        own[name, place] = hashlib.sha256(content).hexdigest()
    digests = {}
    for rank in runtime.gather(own):
        for part, digest in rank.items():
            digests.setdefault(part, set()).add(digest)
    differing = sum(len(found) > 1 for found in digests.values())
    name = "parts of weights whose copies differ between ranks"
    run.report.check(name, differing, 0, 0, "replicas stay equal")
