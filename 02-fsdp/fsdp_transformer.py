"""Train a large transformer under FSDP2, or say on a laptop what it would need on a cluster.

    CPU   torchrun --standalone --nproc-per-node=2 02-fsdp/fsdp_transformer.py
    GPU   torchrun --standalone --nproc-per-node=gpu 02-fsdp/fsdp_transformer.py --preset llama3-8b
    any   python 02-fsdp/fsdp_transformer.py --preset llama3-70b --dry-run --world-size 64

Look for: the losses of one process, whatever saves memory (the tiny preset trains that one too);
the collectives of a step against the formula; with `--dry-run` the peak memory of one GPU by class.

Sources: Zhao et al., PyTorch FSDP (VLDB 2023); Chen et al., Training Deep Nets with Sublinear
Memory Cost (2016); Korthikanti et al., Reducing Activation Recomputation (2022), section 5.
"""

import argparse
import contextlib
import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.data import Subset

from dist_common import cli, data, measure, models, proofs, runtime
from dist_common.models import PRESETS, Transformer
from dist_common.report import Report
from fsdp_memory import AllocationPeak, require_memory

# How a preset is trained unless flags say otherwise.
DEFAULTS = ("seq_len", "micro_batch_size", "precision", "activation_checkpointing")
LAPTOP = (128, 4, "32-true", "none")
CLUSTER = (4096, 1, "bf16-mixed", "full")
# What selective activation checkpointing keeps: matrix products and attention, which take the time.
# It computes norms and activation functions again, which take memory only.
KEPT = [torch.ops.aten.mm.default] + [
    getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention{where}").default
    for kind, where in (("flash", ""), ("efficient", ""), ("cudnn", ""), ("flash", "_for_cpu"))
]
KEEPING = ("sharded", "whole", "gathered")
SCRIPT = "02-fsdp/fsdp_transformer.py"
LOSS_TOLERANCE = {"32-true": 1e-5, "bf16-mixed": 2e-2}


def build(args, mesh, device):
    """Build the model on no device, shard it there, and only then give each rank its memory."""
    with torch.device("meta"):
        model = Transformer(PRESETS[args.preset])
    checkpoint_activations(model.blocks, args.activation_checkpointing)
    if args.compile:
        for block in model.blocks:
            block.compile()  # one block is translated, and serves for all
    shard(model, mesh, args)
    prefetch(model.blocks, args.prefetch)

    model.to_empty(device="cpu" if args.cpu_offload else device)

    if model.config.tied_embeddings:
        model.head.weight = model.embedding.weight  # to_empty has made two of it
    return model


def shard(model, mesh, args):
    """Make each block a unit of FSDP, and the rest one more."""
    options = {"mesh": mesh}
    if args.precision == "bf16-mixed":
        # Gathered and computed with in bfloat16, added up over ranks in float32. The rotary tables
        # stay float32: inputs are not cast.
        options["mp_policy"] = MixedPrecisionPolicy(
            torch.bfloat16, torch.float32, cast_forward_inputs=False
        )
    if args.cpu_offload:  # to pinned memory, which a GPU reads by itself, where there is a GPU
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=args.sharding != "grad-op", **options)
    fully_shard(model, **options)


def checkpoint_activations(blocks, kind):
    """Have backward compute activations again: of each block, of each k-th, or some in each.

    Inside the unit, not around it: when backward gets there, it has gathered the unit's weights.
    """
    every = int(kind) if kind.isdecimal() else 1
    keep = functools.partial(create_selective_checkpoint_contexts, KEPT)
    options = {"context_fn": keep} if kind == "selective" else {}
    for block in [] if kind == "none" else blocks[::every]:
        forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)
        block.forward = forward


def prefetch(blocks, ahead):
    """Have each block start the all-gathers of the next ones, in forward and in backward."""
    for index, block in enumerate(blocks if ahead else []):
        block.set_modules_to_forward_prefetch(list(blocks[index + 1 : index + 1 + ahead]))
        earlier = list(blocks[max(0, index - ahead) : index])
        block.set_modules_to_backward_prefetch(earlier[::-1])


@torch.no_grad()
def draw_weights(model, device, seed):
    """Draw each weight whole, the same on all ranks, and keep the own part.

    So the model is the same on any number of ranks, and one weight at a time is in memory whole.
    """
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        whole = torch.empty(parameter.shape, device=device)
        model.draw(name, whole)
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            whole = here(distribute_tensor(whole, mesh, parameter.placements, src_data_rank=None))
        here(parameter).copy_(whole)


def here(tensor):
    """Return what this rank holds of a tensor, sharded or not."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train_step(model, optimizer, micro_batches, args):
    """Add up the gradients of micro-batches and take a step; return the mean loss and the norm."""
    total = 0.0
    for index, (inputs, targets) in enumerate(micro_batches):
        if args.accumulate != "sharded" and isinstance(model, FSDPModule):
            last = index == len(micro_batches) - 1

            model.set_requires_gradient_sync(last)  # until then this rank keeps a whole gradient

            if args.accumulate == "gathered":
                model.set_reshard_after_backward(last)
        logits = model(inputs).float().flatten(0, 1)
        # All sequences are full, so the mean over micro-batches is that over tokens.
        loss = F.cross_entropy(logits, targets.flatten()) / len(micro_batches)
        del logits  # the largest tensor there is: not needed twice
        loss.backward()
        total += loss.detach()
    norm = clip(model, args.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return total, norm


def clip(model, max_norm):
    """Shorten the gradient to max_norm: the norm of the whole, not that of each rank's part.

    `clip_grad_norm_` does this too, but with offloaded gradients asks for a gloo group beside NCCL.
    """
    gradients = [parameter.grad for parameter in model.parameters()]
    square = sum(here(gradient).square().sum() for gradient in gradients)
    if isinstance(gradients[0], DTensor):
        mesh = gradients[0].device_mesh
        square = square.to(mesh.device_type)
        dist.all_reduce(square, group=mesh.get_group(mesh.ndim - 1))
    norm = square.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        here(gradient).mul_(scale.to(gradient.device))
    return norm


def adamw(model, args, device):
    # Fused, or weight by weight: both take no memory beside the state, as foreach would.
    options = {"fused": device.type == "cuda" and not args.cpu_offload, "foreach": False}
    return torch.optim.AdamW(model.parameters(), args.lr, (0.9, 0.95), weight_decay=0.1, **options)


def predict(args, mesh):
    """Take a step of the real model on tensors without content; return what one rank would hold.

    At its peak, in bytes by class. No kernel runs: what a kernel takes for itself, and what an
    allocator leaves unused, is not counted.
    """
    # Private to PyTorch, and so may move: imported for nothing else.
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    device = torch.device("cpu")
    with FakeTensorMode():
        model = build(args, mesh, device)
        optimizer = adamw(model, args, device)
        batch = torch.zeros(2, args.micro_batch_size, args.seq_len, dtype=torch.int64).unbind()
        # Not tracked: Adam makes its state, and DTensor tries each operation once on tensors of the
        # whole size, which hold no memory but would be counted.
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs(batch)
        with tracker:
            # It takes one forward only, and is told before each that it is the first.
            model.register_forward_pre_hook(lambda *_: tracker.reset_mod_stats(), prepend=True)
            train_step(model, optimizer, [batch] * args.grad_accum_steps, args)
    peak = tracker.get_tracker_snapshot("peak")[device]
    return {getattr(kind, "value", kind): size for kind, size in peak.items() if size}


def dry_run(args):
    """Say what --world-size ranks would hold each, in a process group that answers by itself."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if runtime.discover().world_size > 1:
        raise cli.UsageError("--dry-run is one process: start it with python, not torchrun")
    world = runtime.World(0, 0, args.world_size, min(8, args.world_size), "python")
    device = torch.device("cpu")
    report = Report(SCRIPT, args, world, device)
    config = models.preset(args.preset, args.seq_len)
    weights = config.num_parameters() / shards_of(args, world)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.world_size)
    start(report, args, config)
    peak = predict(args, mesh_of(args, world, device))
    rows = [[kind, f"{size:,}", f"{size / measure.GIB:.2f}"] for kind, size in peak.items()]
    report.table(rows, ("held at the peak by one rank", "bytes", "GiB"))
    for kind, times in (("Sharded Param", 4), ("OptState", 8)):
        formula = round(times * weights)
        source = "ZeRO paper, section 3.1"
        report.check(f"bytes of {kind}", peak[kind], formula, 0.01 * formula, source)
    report.metrics |= {f"{kind}_gib": size / measure.GIB for kind, size in peak.items()}
    return report.finish(f"{peak['Total'] / measure.GIB:.2f} GiB at the peak of each GPU")


def expected_collectives(args, num_layers, shards, replicas):
    """Return by formula how many collectives a step takes (FSDP paper, section 3.2)."""
    units = num_layers + 1
    turns = args.grad_accum_steps
    again = 0 if args.sharding == "grad-op" else num_layers  # in backward; the rest is still there
    gathers = (1 if args.accumulate == "gathered" else turns) * units + turns * again
    reductions = turns * units if args.accumulate == "sharded" else units
    return [
        ("all-gathers", "_allgather_base_", gathers * (shards > 1)),
        ("reduce-scatters", "_reduce_scatter_base_", reductions * (shards > 1)),
        ("all-reduces", "allreduce_", reductions * (replicas > 1) + 1),  # and the norm's
    ]


def shards_of(args, world):
    """Return between how many ranks the model is sharded."""
    size = args.shard_group_size or world.local_world_size
    if args.sharding == "hybrid" and world.world_size % size:
        raise cli.UsageError(
            f"--sharding hybrid: --shard-group-size {size} does not divide {world.world_size} ranks"
        )
    return size if args.sharding == "hybrid" else world.world_size


def mesh_of(args, world, device):
    """Arrange the ranks: a row holds a model between them, a column the same part of it."""
    shards = shards_of(args, world)
    if shards == world.world_size:
        return init_device_mesh(device.type, (shards,), mesh_dim_names=("shard",))
    shape = (world.world_size // shards, shards)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def refuse_what_cannot_fit(args, config, world, device):
    """Stop before anything is allocated when not even weights, gradients and Adam's state fit."""
    where = torch.device("cpu") if args.cpu_offload else device
    # 4 + 4 + 8 bytes: float32 weight, gradient and Adam's two moments
    needed = 16 * config.num_parameters()
    require_memory(f"--preset {args.preset}", needed, shards_of(args, world), where, world)


def parse_kind(text):
    if text in ("none", "full", "selective") or (text.isdecimal() and int(text) > 1):
        return text
    allowed = "none, full, selective, or k of at least 2 for each k-th block"
    raise argparse.ArgumentTypeError(f"must be {allowed}, not {text!r}")


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    positive = cli.positive_int
    real = cli.positive_float
    add("--preset", choices=PRESETS, default="tiny", help="size of the model (tiny)")
    add("--text-file", help="train on its bytes (without: the sources of Python's own library)")
    add("--seq-len", type=positive, help="tokens per sequence (4096 or the preset's; tiny 128)")
    add("--micro-batch-size", type=positive, help="sequences per rank at a time (1; tiny 4)")
    add("--grad-accum-steps", type=positive, default=1, help="micro-batches per step (1)")
    add("--max-steps", type=positive, default=10, help="(10)")
    add("--lr", type=real, default=3e-4, help="of AdamW (0.0003)")
    add("--max-grad-norm", type=real, default=1.0, help="clip gradients longer than this (1)")
    add("--precision", choices=LOSS_TOLERANCE, help="(bf16-mixed; tiny 32-true)")
    add("--sharding", choices=("full", "grad-op", "hybrid"), default="full", help="(full)")
    add("--shard-group-size", type=positive, help="of hybrid (the ranks of one machine)")
    kinds = "none, full, selective, or k for each k-th block (full; tiny none)"
    add("--activation-checkpointing", type=parse_kind, metavar="KIND", help=kinds)
    between = "keep gradients sharded, whole, or whole and weights gathered too (sharded)"
    add("--accumulate", choices=KEEPING, default="sharded", help=f"between micro-batches {between}")
    add("--prefetch", type=cli.whole_number, default=0, help="blocks gathered ahead (0)")
    add("--cpu-offload", action="store_true", help="keep shards and optimizer in host memory")
    add("--compile", action="store_true", help="translate each block by torch.compile")
    add("--dry-run", action="store_true", help="train nothing, say what --world-size GPUs need")
    add("--world-size", type=positive, default=8, help="ranks of a dry run, 8 on a machine (8)")
    add("--check-dry-run", action="store_true", help="hold the real peak against the dry run's")
    args = parser.parse_args()
    longest = PRESETS[args.preset].max_seq_len
    chosen = LAPTOP if args.preset == "tiny" else (min(longest, CLUSTER[0]), *CLUSTER[1:])
    for name, value in zip(DEFAULTS, chosen, strict=True):
        setattr(args, name, getattr(args, name) or value)
    if args.dry_run and args.cpu_offload:
        parser.error("--dry-run knows one kind of memory only: leave out --cpu-offload")
    if args.check_dry_run and args.max_steps < 2:
        parser.error("--check-dry-run needs --max-steps of at least 2: Adam's state comes after 1")
    return args


def start(report, args, config):
    """Claim --output-dir, and print what is trained."""
    ranks = report.world.world_size
    sequences = args.micro_batch_size * args.grad_accum_steps * ranks
    report.start(
        f"{args.preset}: {config.num_parameters():,} weights; {args.sharding} sharding, "
        f"{args.precision}, activation checkpointing {args.activation_checkpointing}",
        f"global batch {sequences} = {args.micro_batch_size} per rank x {args.grad_accum_steps} "
        f"micro-batches x {ranks} ranks, of {args.seq_len:,} tokens each",
    )


def train(model, args, device, batches, after_step=lambda *_: None):
    """Draw the weights and train; return this rank's losses, times, and the last step's traffic."""
    draw_weights(model, device, args.seed)
    optimizer = adamw(model, args, device)
    losses = []
    timer = measure.StepTimer(device, warmup=2)
    counter = measure.CollectiveCounter()
    for step in range(1, args.max_steps + 1):
        micro_batches = [next(batches) for _ in range(args.grad_accum_steps)]
        with timer, counter if step == args.max_steps else contextlib.nullcontext():
            losses.append(train_step(model, optimizer, micro_batches, args)[0])
        after_step(step, losses[-1].clone(), timer.steps_ms[-1])
    return torch.stack(losses), timer, counter


def main():
    args = parse_args()
    if args.dry_run:
        return dry_run(args)
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report(SCRIPT, args, world, device)
        config = models.preset(args.preset, args.seq_len)
        shards = shards_of(args, world)
        ranks = world.world_size
        refuse_what_cannot_fit(args, config, world, device)
        text = data.Sequences(data.load_text(args.text_file), args.seq_len, ranks)
        shuffled = torch.randperm(len(text), generator=torch.Generator().manual_seed(args.seed))
        text = Subset(text, shuffled.tolist())
        start(report, args, config)
        size = args.micro_batch_size
        flops = measure.flops_per_token(config, args.seq_len)
        together = args.max_steps * args.grad_accum_steps, size * ranks
        if args.preset == "tiny":  # one process, on the global batch
            every = data.batches_of(text, *together, 0, size * ranks, device)
            expected, *_ = train(Transformer(config).to(device), args, device, every)

        def speed(time_ms):  # tokens per second of all ranks, model FLOPs utilisation of one
            tokens = size * args.grad_accum_steps * ranks * args.seq_len / time_ms * 1e3
            return tokens, measure.mfu(tokens / ranks * flops, device, args.precision)

        def after_step(step, loss, time_ms):
            if args.check_dry_run and step == 2:
                allocated.stop()
            if step % 5 == 0 or step == args.max_steps:
                dist.all_reduce(loss)
                report.step(step, loss.item() / ranks, time_ms, *speed(time_ms))

        allocated = AllocationPeak(device)
        if args.check_dry_run:
            allocated.start()
        model = build(args, mesh_of(args, world, device), device)
        mine = data.batches_of(text, *together, world.rank * size, size, device)
        losses, timer, counter = train(model, args, device, mine, after_step)
        dist.all_reduce(losses)
        losses /= ranks

        calls = expected_collectives(args, config.num_layers, shards, ranks // shards)
        for name, kind, right in calls:
            report.check(f"{name} per step", counter.calls[kind], right, 0, "FSDP paper, 3.2")
        if args.preset == "tiny":
            proofs.same_losses(report, losses, expected, LOSS_TOLERANCE[args.precision])
        if args.check_dry_run:
            mesh = mesh_of(args, world, torch.device("cpu"))
            dry = runtime.from_rank0(world.is_rank0 and predict(args, mesh)["Total"])
            real = allocated.bytes / 1e6
            right = dry / 1e6
            report.check("peak of MB allocated", real, right, 0.05 * right, "--dry-run")
        tokens_per_second, mfu = speed(timer.median_ms())
        report.metrics |= {
            "tokens_per_second": tokens_per_second,
            "mfu": mfu,
            "final_loss": losses[-1].item(),
            "step_time_ms": timer.median_ms(),
            "peak_memory_gib": measure.peak_memory_gib(device),
        }
        return report.finish(f"loss {losses[-1].item():.4f} after step {args.max_steps}")


if __name__ == "__main__":
    cli.run(main)
