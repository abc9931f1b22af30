"""Predict on a laptop what each rank of a large FSDP job would hold at its peak, by class.

    any   python 02-fsdp/fsdp_memory.py --preset llama3-8b --world-size 8 --precision bf16-mixed
    CPU   torchrun --standalone --nproc-per-node=2 02-fsdp/fsdp_memory.py --check
    GPU   torchrun --standalone --nproc-per-node=gpu 02-fsdp/fsdp_memory.py --check

It takes two steps of fsdp_parts/fsdp_memory.py, or of your copy of it (--template), with tensors
that have shapes and no content. Look for: which class is the largest; with
--compare how the choices change it; with --check the peak of two real steps against the prediction.

Sources: Rajbhandari et al., ZeRO (SC 2020), section 3.1; PyTorch's FSDPMemTracker.
"""

import argparse
import importlib.util
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from fsdp_parts.fsdp_memory import add_flags, describe, mesh_of, refuse, shards_of
from fsdp_parts.memory import allocation_peak, show_peak, show_peaks
from legacy_common import cli, data, job, measure, models, runtime
from legacy_common.lab.traffic import TrafficCounter
from legacy_common.report import Report

# What --compare changes, each beside the flags as they are.
CHOICES = {
    "grad-op": {"sharding": "grad-op"},
    "hybrid": {"sharding": "hybrid"},
    "full": {"sharding": "full"},
    "+ checkpoints": {"sharding": "full", "activation_checkpointing": "full"},
    "+ loss slices": {"sharding": "full", "activation_checkpointing": "full", "loss_chunks": 8},
}


def predict(template, args, config, mesh, on_gpu=True):
    """Take a step of the template on tensors without content; return what one rank would hold.

    At its peak, in bytes by class. No kernel runs: what a kernel takes for itself, and what an
    allocator leaves unused, is not counted.
    """
    # Private to PyTorch, and so may move: imported for nothing else.
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    device = torch.device("cpu")
    with FakeTensorMode(), warnings.catch_warnings():
        # Of a tensor without content it cannot tell; the real run has no such view.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")

        run = start(template, args, config, mesh, device)
        if on_gpu:
            models.norms_of_a_gpu(run.model)

        settle(run, template)
        tracker = FSDPMemTracker(run.model, run.optimizer)
        end_units_once(tracker)
        tracker.track_inputs(run.batch)
        with tracker:
            # It takes one forward only, and is told before each that it is the first.
            run.model.register_forward_pre_hook(lambda *_: tracker.reset_mod_stats(), prepend=True)
            take_step(template, run)
    peak = tracker.get_tracker_snapshot("peak")[device]
    return {getattr(kind, "value", kind): size for kind, size in peak.items() if size}


def shape_of(args):
    """Return the model's shape. The mask of --document-attention takes memory too."""
    end = 0 if args.document_attention else None
    return replace(models.preset(args.preset, args.seq_len), document_end=end)


def start(template, args, config, mesh, device):
    """Build the template's model and optimizer, and a micro-batch of zeros."""
    run = SimpleNamespace(args=args, device=device, config=config)
    run.model = template.build(args, config, mesh, device)
    run.optimizer = template.make_optimizer(run.model, args)
    shape = (2, args.micro_batch_size, args.seq_len)
    run.batch = torch.zeros(shape, dtype=torch.int64, device=device).unbind()
    run.tokens = torch.ones((), device=device)
    return run


def settle(run, template):
    """Take an optimizer step on gradients of 0, which is not to be counted.

    Adam makes its state, and DTensor tries each operation once on tensors of the whole size, which
    hold no memory but would be counted. PyTorch's fused kernel has no shapes without content.
    """
    for group in run.optimizer.param_groups:
        group["fused"] = False
        group["foreach"] = False
    for weight in run.model.parameters():
        weight.grad = torch.zeros_like(weight)
    template.update(run, lr=1e-3)


def end_units_once(tracker):
    """Have a unit of several modules end its forward after the last of them, as FSDP2 does.

    The tracker takes each of [norm, head] for a unit: it would reduce the head's gradient too soon.
    """
    hook_of_module = tracker._fsdp_state_post_forward

    def hook_of_unit(module, end_forward):
        state = module._get_fsdp_state()
        left = state._modules_to_run_forward

        def after_module(*call):
            left.update(() if left else state._modules)
            left.discard(module)
            return call[-1] if left else end_forward(*call)  # the output, or what FSDP2 makes of it

        return hook_of_module(module, after_module)

    tracker._fsdp_state_post_forward = hook_of_unit


def take_step(template, run):
    """Take the template's step, on the same micro-batch --grad-accum-steps times."""
    template.accumulate_gradient(run, [run.batch] * run.args.grad_accum_steps, run.tokens)
    template.update(run, lr=1e-3)


def measure_peak(template, args, config, mesh, device):
    """Take two real steps; return the most bytes of tensors at once, and gloo's largest copy."""

    def take_steps():
        run = start(template, args, config, mesh, device)
        models.draw_weights(run.model, config, args.seed)
        for _ in range(2):  # Adam makes its state in the first one
            take_step(template, run)

    return allocation_peak(take_steps, device)


def tolerance_mb(args, config, device, predicted):
    """Return how far the real peak may be from the predicted one.

    On a GPU 2 percent, for what kernels take. On the CPU 1 percent, and what the prediction does
    not see: each call of `checkpoint` saves the random state, and recomputing saves two more.
    """
    if device.type != "cpu":
        return 0.02 * predicted
    kind = args.activation_checkpointing
    every = int(kind) if kind.isdecimal() else 1
    calls = 0 if kind == "none" else -(-config.num_layers // every)
    calls += args.loss_chunks if args.loss_chunks > 1 and not args.fused_loss else 0
    states = calls + 2 if calls else 0
    return 0.01 * predicted + states * torch.get_rng_state().nbytes / 1e6  # 5,056 bytes each


def load_template(path):
    """Import a script by its path. It is no helper here, but the thing to be measured."""
    try:
        spec = importlib.util.spec_from_file_location("template", path)
        template = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = template  # which a dataclass in it asks for
        spec.loader.exec_module(template)
        for name in ("build", "make_optimizer", "accumulate_gradient", "update"):
            getattr(template, name)
    except (AttributeError, OSError, SyntaxError) as error:
        raise cli.UsageError(f"--template {path}: {error}") from error
    return template


def check_shards(report, name, peak, config, shards):
    """Hold weights and optimizer state against the formula: 4 and 8 bytes per weight, sharded."""
    for kind, size in (("Sharded Param", 4), ("OptState", 8)):
        formula = round(size * config.num_parameters() / shards)
        source = "ZeRO paper, section 3.1"
        prefix = f"{name}: " if name else ""
        report.check(f"{prefix}bytes of {kind}", peak.get(kind, 0), formula, 0.01 * formula, source)


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    job.add_flags(parser, models.PRESETS)  # --preset, --micro-batch-size, --seq-len, ...
    add_flags(parser)  # --sharding, --activation-checkpointing, --loss-chunks, ...
    add = parser.add_argument
    template = Path(__file__).with_name("fsdp_parts") / "fsdp_memory.py"
    add("--template", metavar="FILE", default=template, help="the model and its step")
    add("--world-size", type=cli.positive_int, default=8, help="ranks, 8 on a machine (8)")
    add("--compare", action="store_true", help="predict for several choices")
    add("--check", action="store_true", help="take two real steps on the ranks started, compare")
    args = parser.parse_args()
    if args.cpu_offload:
        parser.error("a prediction knows one kind of memory only: leave out --cpu-offload")
    if args.compile:
        parser.error("a prediction calls PyTorch's own operations: leave out --compile")
    if not args.check:
        args.precision = args.precision or "bf16-mixed"  # as on the GPUs that it asks about
    if args.check and args.compare:
        parser.error("--check takes the flags as they are: leave out --compare")
    return args


def predict_all(report, template, config):
    """Predict for the flags as they are, or for each of CHOICES; print and check."""
    args, world = report.args, report.world
    peaks = {}
    for name, change in (CHOICES if args.compare else {"": {}}).items():
        own = argparse.Namespace(**{**vars(args), **change})
        shards = shards_of(own.sharding, own.shard_group_size, world)
        peaks[name] = predict(template, own, config, mesh_of(shards, torch.device("cpu")))
        check_shards(report, name, peaks[name], config, shards)
    if not args.compare:
        show_peak(report, peaks[""])
        return f"{peaks['']['Total'] / measure.GIB:.2f} GiB at the peak of each rank"
    show_peaks(report, peaks)
    least = min(peaks, key=lambda name: peaks[name]["Total"])
    return f"least with {least!r}: {peaks[least]['Total'] / measure.GIB:.2f} GiB at the peak"


def check(args, template):
    """Compare two real steps with the prediction, on every rank; the worst one counts."""
    with runtime.init(args.device, args.timeout, cpu_tensors=True) as (world, device):
        report = Report("02-fsdp/fsdp_memory.py", args, world, device)
        identity = data.settle_batch_sizes(args, world.world_size)
        config = shape_of(args)
        shards = shards_of(args.sharding, args.shard_group_size, world)
        refuse(args, config, shards, world, device)
        report.start(describe(args, config), identity)

        on_gpu = device.type == "cuda"
        if on_gpu and args.precision == "32-true":
            why = "the prediction knows flash attention, which takes no float32"
            raise cli.UsageError(f"--check on a GPU with --precision 32-true: {why}")

        with TrafficCounter() as counter:
            real, copy = measure_peak(template, args, config, mesh_of(shards, device), device)

        peak = predict(template, args, config, mesh_of(shards, torch.device("cpu")), on_gpu)
        show_peak(report, peak)
        if device.type == "cpu":  # gloo copies a unit's weights or gradient; NCCL copies nothing
            copied = ("all_gather", "reduce_scatter")  # an all-reduce is done in place
            sent = max((c.nbytes for c in counter.collectives if c.kind in copied), default=0)
            report.check("bytes of gloo's largest copy", copy, sent, 0, "the largest collective")
        pairs = runtime.gather((real / 1e6, peak["Total"] / 1e6))
        real, predicted = max(pairs, key=lambda pair: abs(pair[0] / pair[1] - 1))
        tolerance = tolerance_mb(args, config, device, predicted)
        report.check("peak of MB allocated", real, predicted, tolerance, "the prediction")
        report.metrics |= {"predicted_mb": predicted, "peak_mb": real}
        return report.finish(f"{real:.1f} MB at the peak, {predicted:.1f} MB predicted")


def main():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    args = parse_args()
    models.Embedding.forward = torch.nn.Embedding.forward  # as on a GPU, which needs no LookUp
    template = load_template(args.template)
    if args.check:
        return check(args, template)
    if runtime.discover().world_size > 1:
        raise cli.UsageError("a prediction is one process: start it with python, not torchrun")
    # A process group that answers by itself, as one of many ranks.
    world = runtime.World(0, 0, args.world_size, min(8, args.world_size), "python")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.world_size)
    report = Report("02-fsdp/fsdp_memory.py", args, world, torch.device("cpu"))
    identity = data.settle_batch_sizes(args, args.world_size)
    config = shape_of(args)
    report.start(describe(args, config), f"{identity}, of {args.seq_len:,} tokens each")
    return report.finish(predict_all(report, template, config))


if __name__ == "__main__":
    cli.run(main)
