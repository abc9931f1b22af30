"""A sharded transformer and one step of it, whose memory fsdp_memory.py predicts."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from legacy_common import cli, measure, recompute
from legacy_common.models import Transformer

KEEPING = ("sharded", "whole", "gathered")  # between micro-batches


def shards_of(sharding, group_size, world):
    """Return over how many ranks the model is sharded; hybrid: those of a machine by default."""
    size = min(group_size or world.local_world_size, world.world_size)
    if sharding == "hybrid" and world.world_size % size:
        raise cli.UsageError(
            f"--sharding hybrid: --shard-group-size {size} does not divide {world.world_size} ranks"
        )
    return size if sharding == "hybrid" else world.world_size


def mesh_of(shards, device):
    """Arrange all ranks: a row shards one replica of the model, a column holds the same shard."""
    ranks = dist.get_world_size()
    if shards == ranks:
        return init_device_mesh(device.type, (shards,), mesh_dim_names=("shard",))
    shape = (ranks // shards, shards)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def build(args, config, mesh, device):
    """Build the model on no device, shard it there, and only then give each rank its memory."""
    with torch.device("meta"):
        model = Transformer(config)
    # The loss multiplies by the head's weight itself: then it may do so slice by slice.
    model.head.forward = lambda hidden: hidden
    kind = args.activation_checkpointing
    every = int(kind) if kind.isdecimal() else 1  # of each k-th block
    recompute.checkpoint_activations(model.blocks[::every], kind)
    if args.compile:
        for block in model.blocks:
            block.compile()  # one block is translated, and serves for all
    shard(model, mesh, args)
    prefetch(model.blocks, args.prefetch)

    model.to_empty(device="cpu" if args.cpu_offload else device)

    if config.tied_embeddings:
        model.head.weight = model.embedding.weight  # to_empty has made two of it
    return model


def shard(model, mesh, args):
    """Make a unit of FSDP of the embedding, of each block, and of norm and head together."""
    options = {"mesh": mesh}
    if args.precision == "bf16-mixed":
        # Gathered and computed with in bfloat16, added up over ranks in float32. The rotary tables
        # stay float32: inputs are not cast.
        options["mp_policy"] = MixedPrecisionPolicy(
            torch.bfloat16, torch.float32, cast_forward_inputs=False
        )
    if args.cpu_offload:  # to pinned memory, which a GPU reads by itself, where there is a GPU
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    free_after_forward = args.sharding != "grad-op"
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=free_after_forward, **options)

    last = [model.norm, model.head]
    if model.config.tied_embeddings:  # one weight is in one unit
        last.append(model.embedding)
    else:
        fully_shard(model.embedding, reshard_after_forward=free_after_forward, **options)
    # Backward begins with these: freed after forward they would be gathered again at once.
    fully_shard(last, reshard_after_forward=False, **options)
    fully_shard(model, **options)  # the root, which has no weights left
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            # Add up gradients over ranks instead of their mean: the loss is divided already, by
            # the tokens of all ranks. As a plain sum, which every backend has.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)


def prefetch(blocks, ahead):
    """Have each block start the all-gathers of the next ones, in forward and in backward."""
    for index, block in enumerate(blocks if ahead else []):
        block.set_modules_to_forward_prefetch(list(blocks[index + 1 : index + 1 + ahead]))
        earlier = list(blocks[max(0, index - ahead) : index])
        block.set_modules_to_backward_prefetch(earlier[::-1])


def make_optimizer(model, args):
    """Return the job's AdamW, made of the shards. Fused, it needs no memory beside its state."""
    return torch.optim.AdamW(model.parameters(), args.lr, (0.9, 0.95), weight_decay=0.1, fused=True)


def cross_entropy(hidden, weight, targets):
    """Return the loss, summed over tokens. Shapes: (tokens, D), (V, D), (tokens,)."""
    logits = F.linear(hidden, weight).float()  # (tokens, V)
    return F.cross_entropy(logits, targets, reduction="sum")


def summed_loss(model, inputs, targets, args):
    """Return a micro-batch's cross-entropy, summed over tokens. Shapes: (B, T) both."""
    hidden, targets = model(inputs).flatten(0, 1), targets.flatten()  # (B T, D), (B T,)
    weight = model.head.weight  # (V, D): FSDP has gathered it, and keeps it until backward
    if args.fused_loss:
        rows = -(-len(hidden) // args.loss_chunks)
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows)
        return F.linear_cross_entropy(hidden, weight, targets, reduction="sum", options=options)
    if args.loss_chunks == 1:
        return cross_entropy(hidden, weight, targets)
    # Backward computes the logits of a slice again: no more than one slice of them is ever there.
    slices = zip(hidden.chunk(args.loss_chunks), targets.chunk(args.loss_chunks), strict=True)
    return sum(
        checkpoint(cross_entropy, part, weight, of_part, use_reentrant=False)
        for part, of_part in slices
    )


def synchronise(model, accumulate, last):
    """Say what FSDP does with gradients and weights after the backward of a micro-batch."""
    if accumulate == "sharded":
        model.set_requires_all_reduce(last)  # of hybrid: between the groups once per step
        return

    model.set_requires_gradient_sync(last)  # until then this rank keeps a whole gradient

    if accumulate == "gathered":
        model.set_reshard_after_backward(last)


def accumulate_gradient(run, micro_batches, tokens):
    """Leave the shards of the mean gradient over the global batch's `tokens` in the model.

    Return this rank's sum of losses, still on the device.
    Shapes: a micro-batch is inputs and targets, (B, T) each.
    """
    device = run.device
    loss_sum = torch.zeros((), device=device)
    for number, (inputs, targets) in enumerate(micro_batches, 1):
        synchronise(run.model, run.args.accumulate, number == len(micro_batches))
        inputs = inputs.to(device, non_blocking=True)
        targets = targets.to(device, non_blocking=True)
        loss = summed_loss(run.model, inputs, targets, run.args)

        (loss / tokens).backward()  # by the tokens of all ranks: each counts alike

        loss_sum += loss.detach()
    return loss_sum


def update(run, lr):
    """Clip the gradient, step the optimizer on the shards; return the norm before."""
    norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), run.args.max_grad_norm)
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    run.optimizer.step()
    run.optimizer.zero_grad()
    return norm.full_tensor()  # a DTensor: each rank has the norm of its own part


def add_flags(parser):
    """Add the flags that say how the model is sharded and what saves memory."""
    add, positive = parser.add_argument, cli.positive_int
    add("--sharding", choices=("full", "grad-op", "hybrid"), default="full", help="(full)")
    add("--shard-group-size", type=positive, help="of hybrid (the ranks of one machine)")
    kinds = "none, full, selective, or k for each k-th block (none)"
    add("--activation-checkpointing", type=parse_kind, default="none", metavar="KIND", help=kinds)
    between = "keep gradients sharded, whole, or whole and weights gathered too (sharded)"
    add("--accumulate", choices=KEEPING, default="sharded", help=f"between micro-batches {between}")
    add("--loss-chunks", type=positive, default=1,
        help="slices of tokens whose logits are computed one after the other (1)")  # fmt: skip
    add("--fused-loss", action="store_true", help="take PyTorch's linear_cross_entropy for it")
    add("--prefetch", type=cli.whole_number, default=0, help="blocks gathered ahead (0)")
    add("--cpu-offload", action="store_true", help="keep shards and optimizer in host memory")
    add("--compile", action="store_true", help="translate each block by torch.compile")


def parse_kind(text):
    """Parse --activation-checkpointing."""
    if text in ("none", "full", "selective") or (text.isdecimal() and int(text) > 1):
        return text
    allowed = "none, full, selective, or k of at least 2 for each k-th block"
    raise argparse.ArgumentTypeError(f"must be {allowed}, not {text!r}")


# what is refused, before anything is allocated


def refuse(args, config, shards, world, device):
    """Stop before anything is allocated when this cannot work: UsageError. A collective."""
    if args.precision == "16-mixed":
        raise cli.UsageError("--precision 16-mixed needs a loss scaler over shards: use bf16-mixed")
    tokens = args.micro_batch_size * args.seq_len
    if args.loss_chunks > tokens:
        raise cli.UsageError(f"--loss-chunks must be at most the {tokens} tokens of a micro-batch")
    if args.fused_loss and not hasattr(F, "linear_cross_entropy"):
        raise cli.UsageError(
            f"--fused-loss needs F.linear_cross_entropy, of PyTorch 2.14; this is "
            f"{torch.__version__}: use --loss-chunks N"
        )
    where = torch.device("cpu") if args.cpu_offload else device
    # 4 + 4 + 8 bytes: float32 weight, gradient and Adam's two moments
    needed = 16 * config.num_parameters()
    measure.require_memory(f"--preset {args.preset}", needed, shards, where, world)


def describe(args, config):
    """Return in one line what is trained, and how."""
    size = f"{args.preset}: {config.num_parameters():,} weights"
    recomputed = f"activation checkpointing {args.activation_checkpointing}"
    precision = args.precision
    return f"{size}; {args.sharding} sharding, {precision}, {recomputed}"
