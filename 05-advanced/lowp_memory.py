"""What each precision of low_precision.py holds, keeps for backward and sends: bytes counted."""

import copy
import math
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from cp_memory import kept_for_backward, storages
from dist_common import models, runtime
from dist_common.measure import CollectiveCounter
from dist_common.report import Report
from lowp_checks import Job, loss_of
from lowp_formats import OTHER_SEED

# Bytes per weight of weights, gradients and optimizer state, between two steps: bf16-masters keeps
# float32 weights beside Adam's two float32 moments.
STATE = {
    "32-true": (4, 4, 8), "bf16-mixed": (4, 4, 8), "16-mixed": (4, 4, 8), "fp8": (4, 4, 8),
    "fp8-emulated": (4, 4, 8), "bf16-true": (2, 2, 4), "bf16-masters": (2, 2, 12),
    "bf16-stochastic": (2, 2, 8),
}  # fmt: skip


def kept_formula(config: models.TransformerConfig, name: str) -> tuple[int, int]:
    """Return the bytes that the blocks' linear layers keep for backward: per token, and copies.

    Inputs: D numbers for query, key and value together, D for output, D for gate and up together,
    F for down. What casts each layer's input by itself keeps D for each of these six, and a copy
    of the weights.
    """
    D, F_, layers = config.dim, config.ffn_dim, config.num_layers
    weights = 2 * D * (D + D // config.num_heads * config.num_kv_heads) + 3 * D * F_
    if name in ("bf16-mixed", "16-mixed"):
        return layers * 2 * (6 * D + F_), layers * 2 * weights
    if name == "fp8-emulated":  # 7 layers, 2 scales in float32
        return layers * (6 * D + F_), layers * (weights + 7 * 2 * 4)
    return layers * (3 * D + F_) * (4 if name == "32-true" else 2), 0


def kept_bytes(job: Job, model: nn.Module, dtype, times: int) -> tuple[int, int]:
    """Count what autograd keeps of a batch, `times` over: of the blocks' linear layers, of all."""
    inside, hooks, found = [], [], []
    for layer in model.blocks.modules():
        if isinstance(layer, nn.Linear):
            hooks.append(layer.register_forward_pre_hook(lambda *_: inside.append(0)))
            hooks.append(layer.register_forward_hook(lambda *_: inside.clear()))
    batch = [part.repeat(times, 1) for part in next(job.batches(1, job.rank))]
    for counts in (lambda: inside, lambda: True):
        with (
            kept_for_backward(model, counts) as kept,
            torch.autocast(job.device.type, dtype, enabled=dtype is not None),
        ):
            loss_of(model, *batch)
        found.append(sum(kept.values()))
    for hook in hooks:
        hook.remove()
    return tuple(found)


def state_bytes(model: nn.Module, optimizer) -> tuple[int, int, int]:
    """Sum the bytes of weights, their gradients, and all that the optimizer holds."""
    weights = list(model.parameters())
    adam = getattr(optimizer, "adamw", optimizer)
    state = [t for s in adam.state.values() for name, t in s.items() if name != "step"]
    masters = getattr(optimizer, "masters", [])
    kinds = weights, [w.grad for w in weights], [state, masters, [m.grad for m in masters]]
    return tuple(sum(s.nbytes() for s in storages(kind).values()) for kind in kinds)


def check_memory(report: Report, job: Job, trained: dict, train: Callable, autocast: dict) -> None:
    """Print each precision's loss, bytes per weight, kept bytes per token, and DDP's bytes."""
    rows, N = [], job.config.num_parameters()
    other = copy.copy(job)
    other.seed += 1
    noise = train(other, "32-true", job.args.max_steps)[2]
    tokens = job.args.micro_batch_size * job.args.seq_len
    for name, (model, optimizer, losses, _) in trained.items():
        held = state_bytes(model, optimizer)
        source = "bytes of each number"
        for kind, measured, each in zip(
            ("weights", "gradients", "optimizer"), held, STATE[name], strict=True
        ):
            report.check(f"{name}, {kind}: bytes held", measured, each * N, 0, source)
        once, twice = (kept_bytes(job, model, autocast.get(name), times) for times in (1, 2))
        linears, everything = ((b - a) // tokens for a, b in zip(once, twice, strict=True))
        copies = 2 * once[0] - twice[0]  # what does not grow with the batch
        if name != "fp8":  # torchao decides what it keeps
            formula, source = kept_formula(job.config, name), "inputs and casts of 7 layers a block"
            kind = f"{name}: bytes kept by linear layers"
            report.check(f"{kind} per token", linears, formula[0], 0, source)
            report.check(f"{name}: bytes of weights cast and kept", copies, formula[1], 0, source)
        with CollectiveCounter() as counter:
            train(job, name, 1)
        sent = counter.bytes["allreduce_"]
        gradient = STATE[name][1] * N
        report.check(f"{name}: bytes all-reduced by DDP", sent, gradient, 0, "dtype of weights")
        loss = final_loss(report, job, name, losses)
        report.metrics[f"{name}: bytes kept per token"] = everything
        per_weight = " + ".join(str(size // N) for size in held)
        rows.append((name, f"{loss:.3f}", f"{per_weight} = {sum(held) // N}", sent // N,
                     f"{linears:,}", f"{copies:,}", f"{everything:,}"))  # fmt: skip
    rows.append((OTHER_SEED, f"{final_loss(report, job, OTHER_SEED, noise):.3f}", *[""] * 5))
    report.say("bytes per weight, held and all-reduced by DDP; bytes kept for backward:")
    headers = ("precision", "loss", "weights + grads + Adam", "DDP", "linears/token",
               "weights cast", "all/token")  # fmt: skip
    report.table(rows, headers)


def final_loss(report: Report, job: Job, name: str, losses: torch.Tensor) -> float:
    """Return the mean loss of the last ten steps over all ranks; keep all of them as a metric."""
    mean = sum(runtime.gather(losses.float())) / job.ranks
    report.metrics[f"{name}: losses"] = mean.tolist()
    report.metrics[f"{name}: loss"] = mean[-10:].mean().item()
    return report.metrics[f"{name}: loss"]


def check_fsdp_bytes(report: Report, job: Job) -> None:
    """Print what FSDP2 gathers and reduces under three MixedPrecisionPolicies, on several ranks."""
    if job.ranks == 1:
        return
    bf16 = torch.bfloat16
    policies = {
        "float32": (MixedPrecisionPolicy(), 4, 4),
        "bf16, reduce in float32": (MixedPrecisionPolicy(bf16, torch.float32), 2, 4),
        "bf16, reduce in bf16": (MixedPrecisionPolicy(bf16, bf16), 2, 2),
    }
    rows, mesh = [], init_device_mesh(job.device.type, (job.ranks,))
    for name, (policy, gather, reduce) in policies.items():
        model = job.build()
        groups = [[p.shape for p in block.parameters()] for block in model.blocks]
        root = [p.shape for p in (model.embedding.weight, model.norm.weight, model.head.weight)]
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        with CollectiveCounter() as counter:
            loss_of(model, *next(job.batches(1, job.rank))).backward()
        blocks, root = (sum(padded(shape, job.ranks) for shape in shapes)
                        for shapes in (sum(groups, []), root))  # fmt: skip
        # The counter sees a collective's whole tensor and the rank's part of it.
        seen = (job.ranks + 1) / job.ranks
        gathered = counter.bytes["_allgather_base_"] / seen
        reduced = counter.bytes["_reduce_scatter_base_"] / seen
        source = "blocks twice, the rest once" if name == "float32" else "param_dtype"
        expected = gather * (2 * blocks + root)
        report.check(f"FSDP2, {name}: bytes gathered", int(gathered), expected, 0, source)
        source, expected = "reduce_dtype", reduce * (blocks + root)
        report.check(f"FSDP2, {name}: bytes reduced", int(reduced), expected, 0, source)
        total = blocks + root
        rows.append((name, f"{gathered / total:.2f}", f"{reduced / total:.2f}"))
    report.table(rows, ("FSDP2's policy", "gathered, B/weight", "reduced, B/weight"))


def padded(shape: torch.Size, ranks: int) -> int:
    """Return the numbers of a weight whose first dimension is filled up to a multiple of ranks."""
    return math.ceil(shape[0] / ranks) * ranks * math.prod(shape[1:])
