"""What deepspeed_train.py proves: losses and norms of one process, bytes held, equal weights."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

import ds_checkpoint
from dist_common import cli, data, runtime
from dist_common.models import Transformer
from dist_common.proofs import same_losses
from ds_rules import offloads
from ds_schema import ADAM_EXTRAS
from ds_setup import draw_weights
from tensor_bytes import bytes_by_place, live_bytes

# Of losses near 5. float32 sums in another order; bf16 rounds sums of gradients to 8 bits.
LOSS_TOLERANCE = {"32-true": 1e-5, "bf16-mixed": 2e-3, "16-mixed": 2e-3}
NORM_TOLERANCE = {"32-true": 1e-5, "bf16-mixed": 2e-2}  # relative
PAPER = "ZeRO paper, section 5"


def run_alone(run: SimpleNamespace, summed_loss: Callable) -> list[tuple[float, float]]:
    """Return loss and gradient norm of --parity-steps steps of one process, in plain PyTorch.

    In DeepSpeed's arithmetic: with bf16 weights, the optimizer steps on a float32 copy of them.
    The whole model and each step's whole batch are on every rank. Empty for a resumed run, and in
    float16, where the loss is scaled and steps that overflow are left out.
    """
    args, config = run.args, run.config
    if run.found or args.precision == "16-mixed" or not args.parity_steps:
        return []
    model = Transformer(run.shape)
    draw_weights(model, args.seed, run.report.device)
    model.to(run.report.device, run.dtype)
    weights = list(model.parameters())
    copies = [weight.detach().float().clone() for weight in weights]
    optimizer = _adam(copies, config["optimizer"])
    schedule = _schedule(optimizer, config, args)
    whole = {"grad_accum_steps": args.grad_accum_steps * dist.get_world_size()}
    sampler = data.ShardedSampler(len(run.train_set), 0, 1, args.seed)
    batches = data.job_batches(run.train_set, sampler, SimpleNamespace(**vars(args) | whole))
    found = []
    for _ in range(min(args.parity_steps, args.max_steps)):
        micro_batches = next(batches)
        tokens = sum(int((targets != data.IGNORED).sum()) for _, targets in micro_batches)
        mean = 0.0
        for batch in micro_batches:
            loss = summed_loss(run, model, *batch) / tokens
            for copy, gradient in zip(copies, torch.autograd.grad(loss, weights), strict=True):
                part = gradient.float()
                copy.grad = part if copy.grad is None else copy.grad + part
            mean += loss.item()
        norm = torch.nn.utils.get_total_norm([copy.grad for copy in copies])
        if config["gradient_clipping"]:
            torch.nn.utils.clip_grads_with_norm_(copies, config["gradient_clipping"], norm)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        sampler.advance(args.global_batch_size)
        for copy, weight in zip(copies, weights, strict=True):
            weight.data.copy_(copy)
        found.append((mean, norm.item()))
    return found


def _adam(weights: list[torch.Tensor], section: dict) -> torch.optim.Optimizer:
    params = {n: v for n, v in section["params"].items() if n not in ADAM_EXTRAS}
    decoupled = section["type"].lower() == "adamw" or section["params"].get("adam_w_mode", True)
    return (torch.optim.AdamW if decoupled else torch.optim.Adam)(weights, **params)


def _schedule(optimizer: torch.optim.Optimizer, config: dict, args):
    from deepspeed.runtime import lr_schedules

    if "scheduler" in config:
        schedule = config["scheduler"]
        return getattr(lr_schedules, schedule["type"])(optimizer, **schedule["params"])
    factor = lambda step: cli.lr_at(step + 1, args) / args.lr  # noqa: E731
    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def check_first_steps(run: SimpleNamespace, alone: list[tuple[float, float]]) -> None:
    """Compare the losses and gradient norms of the first steps with those of one process."""
    precision, count = run.args.precision, len(alone)
    losses, norms = torch.tensor(alone).T
    name = f"largest error of the first {count} losses"
    own = torch.tensor(run.losses[:count])
    same_losses(run.report, own, losses, LOSS_TOLERANCE[precision], name)
    own = torch.tensor(run.norms[:count])
    if run.stage == 0 and own.isnan().all():
        run.report.say("gradient norms not compared: in stage 0 DeepSpeed keeps none in float32")
        return
    error = (own / norms - 1).abs().max().item()
    name = f"relative error of the first {count} gradient norms"
    run.report.check(name, error, 0, NORM_TOLERANCE[precision], "one process")


def count_bytes(run: SimpleNamespace) -> None:
    """Have the engine count what this rank holds after its second step's first backward.

    Adam's moments are made in the first step. `run.held` gets the bytes per weight, and the probe
    what they are for.
    """
    engine = run.engine
    backward = engine.backward
    calls = 0

    def counting(*args, **kwargs):
        nonlocal calls
        result = backward(*args, **kwargs)
        calls += 1
        if calls > run.args.grad_accum_steps:
            held = live_bytes() - run.bytes_before
            run.held = held.total() / run.shape.num_parameters()
            run.probe.held = parts_of(engine, held)
            del engine.backward  # the method of its class again
        return result

    engine.backward = counting


def parts_of(engine, held: Counter[str]) -> dict[str, int]:
    """Return the bytes of weights and of optimizer state on the engine's device, and the rest.

    The rest of `held` is gradients, and the buffers in which they are reduced.
    """
    weights = list(engine.module.parameters())
    weights += [weight.ds_tensor for weight in weights if hasattr(weight, "ds_tensor")]
    adam = getattr(engine.optimizer, "optimizer", engine.optimizer)  # in that of ZeRO
    state = [t for values in adam.state.values() for t in values.values() if torch.is_tensor(t)]
    copies = [weight for group in adam.param_groups for weight in group["params"]]
    place = engine.device.type if isinstance(engine.device, torch.device) else "cpu"
    own = bytes_by_place(weights)[place]
    both = bytes_by_place([*weights, *state, *copies])[place]
    return {"weights": own, "optimizer": both - own, "gradients": held[place] - both}


def bytes_per_weight(run: SimpleNamespace) -> float | None:
    """Return what a rank holds for each weight after a micro-batch, by formula: (2 + 2 + K) / N.

    K is 12: Adam's two moments and a float32 copy of the weight, which stages 1 to 3 keep of
    float32 weights too. None where offload, large buckets, other data types or weights that stay
    whole, as by DeepSpeed's own defaults, make another sum. Source: ZeRO paper, section 5.
    """
    zero, shape, stage = run.config["zero_optimization"], run.shape, run.stage
    ranks = dist.get_world_size()
    size = run.dtype.itemsize
    optimizer = 8 if stage == 0 and size == 4 else 12
    early = 1 if run.args.grad_accum_steps == 1 else 2  # a single micro-batch is reduced at once
    parts = (optimizer, 1), (size, early), (size, 3)  # bytes, and the first stage that shares them
    total = sum(part / (ranks if stage >= first else 1) for part, first in parts)
    elsewhere = any(part.get("device", "none") != "none" for _, part in offloads(run.config))
    bucket = size * zero.get("reduce_bucket_size", 5e8) if stage else 0
    whole = zero.get("stage3_param_persistence_threshold", 1e5) if stage == 3 else 0
    other = elsewhere or "data_types" in run.config or "torch_autocast" in run.config
    if other or whole > 10 * shape.dim or bucket > 0.02 * total * shape.num_parameters():
        return None
    return total


def check_bytes(run: SimpleNamespace) -> None:
    """Check the bytes that `count_bytes` found, on the rank that holds most."""
    if run.held is None:  # fewer than two steps
        return
    own = torch.tensor(run.held, device=run.report.device)
    dist.all_reduce(own, op=dist.ReduceOp.MAX)
    expected = bytes_per_weight(run)
    if expected:
        run.report.check("bytes per weight", own.item(), expected, 0.02 * expected, PAPER)
    else:
        run.report.say(f"{own.item():.2f} bytes per weight, buffers and all")


def check_weights(run: SimpleNamespace) -> None:
    """Check that all ranks compute with the same weights, by a fingerprint of the bits.

    In stage 3 of those that stay whole: of the others each rank has a shard that no other has.
    """
    weights = list(run.engine.module.parameters())
    if run.stage == 3:
        weights = [weight for weight in weights if weight.ds_persist]
    if not weights:
        run.report.say("weights not compared: every one is cut into shards that lie on one rank")
        return
    fingerprints = len(set(runtime.gather(fingerprint_of(weights))))
    run.report.check("distinct sets of weights over all ranks", fingerprints, 1, 0, PAPER)


def fingerprint_of(weights: Iterable[torch.Tensor]) -> str:
    """Return a digest of each row's and column's sum of bits: little to copy from the device."""
    digest = hashlib.sha256()
    for weight in weights:
        bits = weight.detach().view({2: torch.int16, 4: torch.int32}[weight.itemsize])
        bits = bits.reshape(len(bits), -1)
        for dim in (0, 1):
            digest.update(bits.sum(dim, dtype=torch.int64).cpu().numpy())
    return digest.hexdigest()


def check_exported(run: SimpleNamespace, folder: Path, evaluate: Callable) -> None:
    """Check that a plain model, with the weights of a folder, has the engine's test loss.

    With --parity-steps 0 it is left out: no rank may have room for the whole model.
    """
    if not run.args.parity_steps:
        run.report.say(f"{folder} not loaded into a plain model (--parity-steps 0)")
        return
    plain: nn.Module = Transformer(run.shape)
    plain.load_state_dict(ds_checkpoint.load_weights(folder))
    loss, _ = evaluate(run, plain.to(run.report.device))
    tolerance = LOSS_TOLERANCE[run.args.precision]
    name = f"test loss of {folder.name}, in a plain model"
    run.report.check(name, loss, run.test_loss, tolerance, "the engine's")
