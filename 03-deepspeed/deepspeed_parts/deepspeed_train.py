"""What deepspeed_train.py refuses and proves: its config; losses of one process, bytes, weights."""

import argparse
import itertools
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import check_config
from deepspeed_parts import config_judge, config_rules, setup
from deepspeed_parts.config_rules import offloads, part_of
from deepspeed_parts.tensor_bytes import bytes_by_kind, live_bytes
from deepspeed_parts.zero_stages import held_per_weight, sizes_of
from legacy_common import data, job, models, runtime
from legacy_common.cli import UsageError
from legacy_common.job import Step
from legacy_common.lab.proofs import documents_alone, every_token_once, same_losses, same_weights
from legacy_common.lab.traffic import StepProbe

# Of losses near 5. float32 sums in another order; bf16 rounds sums of gradients to 8 bits.
LOSS_TOLERANCE = {"32-true": 1e-5, "bf16-mixed": 2e-3, "16-mixed": 2e-3}
# What DeepSpeed takes from an Adam's parameters before PyTorch's own class sees them.
ADAM_EXTRAS = {"torch_adam", "adam_w_mode", "bias_correction", "fp32_optimizer_states"}
NORM_TOLERANCE = {"32-true": 1e-5, "bf16-mixed": 2e-2}  # relative
PAPER = "ZeRO paper, section 5"


def examined(run) -> dict[str, Any]:
    """Return the config; have DeepSpeed's ops compiled, or PyTorch's Adam take their place.

    Raises: UsageError in one line for all that DeepSpeed would take without a word, or refuse in
    many, and for what this machine lacks.
    """
    args, report = run.args, run.report
    setup.prepare(report.device)
    config = checked_config(args, run.given, models.shape_of(args.preset), report.world.world_size)
    if args.output_dir and "async_io" in setup.ops_needed(config):
        resumed = "a run that DeepSpeed resumes with an optimizer on nvme takes other losses than "
        resumed += "one that never stopped, so none is saved here"
        cure = "offload to cpu, or leave out --output-dir"
        raise UsageError(f"{args.deepspeed_config}: {resumed}: {cure}")
    setup.fall_back(config, report)
    setup.build_ops(setup.ops_needed(config), report)
    return config


def checked_config(
    args: argparse.Namespace, given: Collection[str], shape: models.TransformerConfig, ranks: int
) -> dict[str, Any]:
    """Read --deepspeed_config, make its offload's folders; after `prepare`. Raises: UsageError."""
    config = config_judge.read_right(args.deepspeed_config)
    config_rules.refuse(args.deepspeed_config, config_judge.of_reader(config))
    config_rules.fill_disk(config, args, given)
    fp16 = config.get("fp16", {}).get("enabled") is True or args.precision == "16-mixed"
    wanted = {**config, "fp16": {"enabled": fp16}}
    config_rules.refuse(args.deepspeed_config, check_config.of_machine(wanted))
    part = -(-max(sizes_of(shape)) // ranks)
    offload = part_of(config, "zero_optimization.offload_param")
    size = offload.get("buffer_size", 100_000_000)  # DeepSpeed's default
    if offload.get("device") == "nvme" and size < part:  # an assertion would end the run
        least = f"{part:,} elements, a rank's part of the largest weight"
        small = f"offload_param.buffer_size {size:,} is below {least}"
        raise UsageError(f"{args.deepspeed_config}: {small}")
    setup.make_swap_folders([part for _, part in offloads(config)])
    return config


def proven_steps(run, steps: Iterable[Step]) -> Iterator[Step]:
    """Yield the run's steps and look on; check at the end what they left.

    None after the first --parity-steps, if their losses are not those of one process.
    """
    report = run.report
    alone = run_alone(run)
    probe = StepProbe(report.device, run.job.memory_before)
    held: list[float] = []
    count_bytes(run, probe, held)
    yield from probe.watch(compared(run, steps, alone))
    if report.failed:
        return
    check_weights(run)
    check_bytes(run, held)
    every_token_once(run.job)
    report.metrics |= probe.metrics(run.job.timer)


def run_alone(run) -> torch.Tensor:
    """Return loss and gradient norm of --parity-steps steps of one process, in plain PyTorch.

    In DeepSpeed's arithmetic: with bf16 weights, the optimizer steps on a float32 copy of them.
    The whole model and each step's whole batch are on every rank. Shape: (steps, 2); no steps for
    a resumed run, and in float16, where the loss is scaled and steps that overflow are left out.
    """
    args, config, device = run.args, run.config, run.report.device
    if run.job.found or args.precision == "16-mixed" or not args.parity_steps:
        return torch.zeros(0, 2)
    model = documents_alone(models.Transformer(run.shape).to(device, run.dtype), run.shape)
    models.draw_weights(model, run.shape, args.seed)
    weights = list(model.parameters())
    copies = [weight.detach().float().clone() for weight in weights]
    for copy in copies:
        copy.grad = torch.zeros_like(copy)
    adam, schedule = config["optimizer"], config.get("scheduler")
    params = {n: v for n, v in adam["params"].items() if n not in ADAM_EXTRAS}
    decoupled = adam["type"].lower() == "adamw" or adam["params"].get("adam_w_mode", True)
    optimizer = (torch.optim.AdamW if decoupled else torch.optim.Adam)(copies, **params)
    if schedule:
        from deepspeed.runtime import lr_schedules

        schedule = getattr(lr_schedules, schedule["type"])(optimizer, **schedule["params"])
    whole = {"grad_accum_steps": args.grad_accum_steps * dist.get_world_size()}
    sampler = run.job.sampler.at_start()
    sampler.rank, sampler.world_size = 0, 1
    together = argparse.Namespace(**vars(args) | whole)
    batches = data.job_batches(run.job.train_set, sampler, together)
    found = []
    for step in range(1, min(args.parity_steps, args.max_steps) + 1):
        micro_batches = next(batches)
        tokens = sum(int((targets != data.IGNORED).sum()) for _, targets in micro_batches)
        mean = 0.0
        for batch in micro_batches:
            inputs, targets = (tensor.to(device) for tensor in batch)
            with torch.autocast(device.type, run.autocast, enabled=run.autocast is not None):
                logits = model(inputs)
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
            loss = loss / tokens
            for copy, gradient in zip(copies, torch.autograd.grad(loss, weights), strict=True):
                copy.grad += gradient.float()
            mean += loss.item()
        norm = torch.nn.utils.get_total_norm([copy.grad for copy in copies])
        if config["gradient_clipping"]:
            torch.nn.utils.clip_grads_with_norm_(copies, config["gradient_clipping"], norm)
        if not schedule:
            for group in optimizer.param_groups:
                group["lr"] = job.lr_at(step, args)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        if schedule:
            schedule.step()
        sampler.advance(args.global_batch_size)
        for copy, weight in zip(copies, weights, strict=True):
            weight.data.copy_(copy)
        found.append((mean, norm.item()))
    return torch.tensor(found)


def compared(run, steps: Iterable[Step], alone: torch.Tensor) -> Iterator[Step]:
    """Yield steps; end if the first losses and gradient norms are not those of one process."""
    report, precision, count = run.report, run.args.precision, len(alone)
    first: list[tuple[float, float]] = []
    for step in steps:
        yield step
        if len(first) == count:
            continue
        loss_sum = step.loss_sum.double()
        dist.all_reduce(loss_sum)
        norm = float("nan") if step.norm is None else float(step.norm)
        first.append(((loss_sum / step.tokens).item(), norm))
        if len(first) < count:
            continue
        losses, norms = torch.tensor(first).T
        name = f"largest error of the first {count} losses"
        same_losses(report, losses, alone[:, 0], LOSS_TOLERANCE[precision], name)
        if run.stage == 0 and norms.isnan().all():
            report.say("gradient norms not compared: in stage 0 DeepSpeed keeps none in float32")
        else:
            error = (norms / alone[:, 1] - 1).abs().max().item()
            name = f"relative error of the first {count} gradient norms"
            report.check(name, error, 0, NORM_TOLERANCE[precision], "one process")
        if report.failed:  # now, and not after days
            return


def count_bytes(run, probe: StepProbe, per_weight: list[float]) -> None:
    """Have the engine count what this rank holds after its second step's first backward.

    Adam's moments are made in the first step. `per_weight` gets the bytes per weight, and the probe
    what they are for.
    """
    engine = run.engine
    backward = engine.backward
    calls = itertools.count()

    def counting(*args, **kwargs):
        result = backward(*args, **kwargs)
        if next(calls) == run.args.grad_accum_steps:
            engine.backward = backward
            held = live_bytes()
            per_weight.append(held.total() / run.shape.num_parameters())
            kinds = bytes_by_kind(engine.module, engine.optimizer, held)
            own = [kind[run.report.device.type] for kind in kinds]
            probe.held = dict(zip(("weights", "optimizer", "gradients"), own, strict=True))
        return result

    engine.backward = counting


def bytes_per_weight(run) -> float | None:
    """Return what a rank holds for each weight after a micro-batch, by formula.

    None where offload, large buckets, other data types or weights that stay whole, as by
    DeepSpeed's own defaults, make another sum. Source: ZeRO paper, section 5.
    """
    zero, shape, stage = run.config["zero_optimization"], run.shape, run.stage
    size = run.dtype.itemsize
    step = run.args.grad_accum_steps, dist.get_world_size(), sizes_of(shape)
    total = sum(held_per_weight(f"stage {stage}", *step, size))
    elsewhere = any(part.get("device", "none") != "none" for _, part in offloads(run.config))
    bucket = size * zero.get("reduce_bucket_size", 5e8) if stage else 0
    whole = zero.get("stage3_param_persistence_threshold", 1e5) if stage == 3 else 0
    other = elsewhere or "data_types" in run.config or "torch_autocast" in run.config
    if other or whole > 10 * shape.dim or bucket > 0.02 * total * shape.num_parameters():
        return None
    return total


def check_bytes(run, held: list[float]) -> None:
    """Check the bytes that `count_bytes` found, on the rank that holds most."""
    if not held:  # fewer than two steps
        return
    most = max(runtime.gather(held[0]))
    expected = bytes_per_weight(run)
    if expected:
        run.report.check("bytes per weight", most, expected, 0.02 * expected, PAPER)
    else:
        run.report.say(f"{most:.2f} bytes per weight, buffers and all")


def check_weights(run) -> None:
    """Check that all ranks compute with the same weights, bit by bit.

    In stage 3 of those that stay whole: of the others each rank has a shard that no other has.
    """
    weights = list(run.engine.module.parameters())
    if run.stage == 3:
        weights = [weight for weight in weights if weight.ds_persist]
    if weights:
        same_weights(run.report, nn.ParameterList(weights))
    else:
        run.report.say("weights not compared: every one is cut into shards that lie on one rank")
