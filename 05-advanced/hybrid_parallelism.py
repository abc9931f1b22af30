"""Train a transformer with data, tensor, pipeline and context parallelism: a template.

Copy this file and dist_common, then change both.

    CPU   torchrun --standalone --nproc-per-node=8 \
              05-advanced/hybrid_parallelism.py --tp 2 --pp 2
    GPU   torchrun --standalone --nproc-per-node=8 \
              05-advanced/hybrid_parallelism.py --tp 2 --pp 2 --preset llama3-8b \
              --seq-len 4096 --micro-batch-size 1 --activation-checkpointing full

It does the same job as ddp_training.py of module 01: expect the same losses in every
layout. Ranks that --tp, --pp and --cp leave are data-parallel. With --output-dir and
--resume the run can be killed at any moment and started again in another layout.
--self-check compares two steps with one process.

Sources: Narayanan et al., Megatron-LM on GPU Clusters (SC 2021); Liang et al.,
TorchTitan (2024); Grattafiori et al., The Llama 3 Herd of Models (2024), section 3.3.2.
"""

import logging
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.attention.bias import causal_lower_right

from dist_common import check, cli, data, runtime, train
from dist_common.checkpoint import Checkpoints
from dist_common.model import (
    PRESETS,
    Transformer,
    build_transformer,
    init_weights,
    load_config,
    rotary_tables,
)
from dist_common.report import Report
from dist_common.train import every, lr_at, set_lr

SCHEDULES = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
}
LOOPED = ("interleaved", "zero-bubble")  # two stages per rank
FREED = ("full", "hybrid")  # weights, between forward and backward


def validate_layout(args, run, config):
    """Set args.dp and args.num_stages. Raises: UsageError."""
    args.num_stages = args.pp * (2 if args.schedule in LOOPED else 1)
    product = args.tp * args.pp * args.cp
    for divisor, total, flags in (
        (
            product,
            run.world_size,
            f"ranks: --tp {args.tp} --pp {args.pp} --cp {args.cp}",
        ),
        (args.tp, config.num_kv_heads, f"key and value heads: --tp {args.tp}"),
        (
            args.num_stages,
            config.num_layers,
            f"layers: --pp {args.pp} --schedule {args.schedule}",
        ),
        (
            args.tp * args.cp * 2,
            args.seq_len,
            f"tokens: --seq-len, --tp {args.tp} --cp {args.cp}",
        ),
    ):
        if total % divisor:
            raise cli.UsageError(f"{divisor} does not divide the {total} {flags}")
    args.dp = run.world_size // product
    recomputes = args.compile or args.activation_checkpointing != "none"
    if args.schedule == "zero-bubble" and (recomputes or args.sharding in FREED):
        # PyTorch 2.14 loses gradients without an error.
        raise cli.UsageError(
            "--schedule zero-bubble divides backward in two: it needs --sharding "
            "grad-op or replicate, no --activation-checkpointing and no --compile"
        )


def build_mesh(args, run):
    """Return the mesh of all ranks. Neighbours differ along its last axis, tp.

    Ranks of cp have the same weights and other tokens, as ranks of dp have. So both
    share weights and sum gradients: replicate x shard = dp x cp.
    """
    data_ranks = args.dp * args.cp
    shards = {
        "replicate": 1,
        "hybrid": args.shard_group_size or -(-run.local_world_size // args.tp),
    }.get(args.sharding, data_ranks)
    if data_ranks % shards:
        raise cli.UsageError(
            f"--shard-group-size {shards} does not divide {data_ranks} ranks of dp x cp"
        )
    sizes = {
        "pp": args.pp,
        "replicate": data_ranks // shards,
        "shard": shards,
        "tp": args.tp,
    }
    # An axis of size 1 would get a group per rank. FSDP needs one of them.
    sizes = {axis: n for axis, n in sizes.items() if n > 1 or axis == "shard"}
    return init_device_mesh(
        run.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)
    )


def shard_matrices(model, mesh):
    """Tensor parallelism: divide each matrix by columns, the next one by rows.

    Between them sequence parallelism divides the tokens: norms and residuals take T /
    tp. A norm's output is gathered once, for all matrices that read it.
    """
    columns, rows = ColwiseParallel(), RowwiseParallel(output_layouts=Shard(1))
    plan = {
        "embedding": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1)
        ),
        "blocks.*.attention.w[qkv]": columns,
        "blocks.*.attention.wo": rows,
        "blocks.*.gate": columns,
        "blocks.*.up": columns,
        "blocks.*.down": rows,
        "blocks.*.*_norm": SequenceParallel(),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    }
    gathered = PrepareModuleOutput(
        output_layouts=Shard(1),
        desired_output_layouts=Replicate(),
        use_local_output=False,
    )
    parallelize_module(model, mesh, plan)
    parallelize_module(model, mesh, {"blocks.*.*_norm": gathered})


def find_positions(args, run):
    """Return this rank's positions in each sequence. Shape: (T / cp,).

    A late token attends to more keys. So each rank takes one part from the front, and
    one as far from the end.
    """
    cp_rank = run.rank // args.tp % args.cp
    parts = torch.arange(args.seq_len, device=run.device).chunk(2 * args.cp)
    return torch.cat((parts[cp_rank], parts[-1 - cp_rank]))


def shard_sequences(model, positions, args, run):
    """Context parallelism: own queries attend to the keys and values of all ranks."""
    ranks = torch.arange(run.world_size).view(-1, args.cp, args.tp).mT.flatten(0, 1)
    group, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
    mesh = DeviceMesh.from_group(group, run.device.type)
    # Each part attends to all keys up to its own end.
    masks = [causal_lower_right(len(p), int(p[-1]) + 1) for p in positions.chunk(2)]

    def attend(q, k, v):
        """Shapes: q (B, H, T/cp, D/H), k and v with fewer heads -> as q."""
        part = DTensor.from_local(torch.stack((k, v)), mesh, [Shard(3)])
        whole = part.redistribute(placements=[Replicate()])
        # Each rank's queries give a part of the gradient: backward reduce-scatters.
        parts = whole.to_local(grad_placements=[Partial()]).chunk(2 * args.cp, dim=3)
        # In the order of positions: the front parts, then the others.
        whole = torch.cat(parts[::2] + parts[::-2], dim=3)
        outputs = []
        for queries, mask in zip(q.chunk(2, dim=2), masks, strict=True):
            k, v = whole[..., : mask.seq_len_kv, :]
            outputs.append(
                F.scaled_dot_product_attention(queries, k, v, mask, enable_gqa=True)
            )
        return torch.cat(outputs, dim=2)

    for block in model.blocks:
        block.attention.attend = attend


class Stage(nn.Module):
    """A part of the model: the blocks with these numbers keep their names.

    The stage of block 0 embeds the tokens. The stage of the last block returns logits.
    """

    def __init__(self, model, numbers, positions):
        super().__init__()
        self.config = model.config
        self.positions = positions
        self.embedding = model.embedding if 0 in numbers else None
        self.blocks = nn.ModuleDict({str(n): model.blocks[n] for n in numbers})
        is_last = len(model.blocks) - 1 in numbers
        self.norm, self.head = (model.norm, model.head) if is_last else (None, None)

    def forward(self, x):
        """Shapes: tokens (B, T/cp) or x (B, T/cp/tp, D) -> x or logits (B, T/cp, V)."""
        head_dim = self.config.dim // self.config.num_heads
        tables = rotary_tables(self.positions, head_dim, self.config.rope_theta)
        if self.embedding:
            # A compiled block gives no gradient to a sum that is still on its way.
            x = self.embedding(x).clone()
        for block in self.blocks.values():
            x = block(x, *tables)
        return self.head(self.norm(x)) if self.head else x


def build_model(config, args, run, mesh):
    """Build the model without memory, divide it, then give each rank its part.

    Returns: this rank's part of the model, and the stages that it consists of.
    """
    with torch.device("meta"):
        model = Transformer(config)
    positions = find_positions(args, run)
    if args.tp > 1:
        shard_matrices(model, mesh["tp"])
    if args.cp > 1:
        shard_sequences(model, positions, args, run)
    for block in model.blocks:
        block.activation_checkpointing = args.activation_checkpointing
        if args.compile:
            block.compile()
    numbers = torch.arange(config.num_layers).chunk(args.num_stages)
    numbers = numbers[run.rank * args.pp // run.world_size :: args.pp]
    stages = [Stage(model, part.tolist(), positions) for part in numbers]
    for stage in stages:
        shard_weights(stage, mesh, args)
    part = Stage(model, torch.cat(numbers).tolist(), positions)
    part.to_empty(device=run.device)
    init_weights(part, args.seed)
    return part, stages


def shard_weights(stage, mesh, args):
    """Data parallelism: shard a stage's weights with FSDP, or replicate them."""
    compute = torch.bfloat16 if args.precision == "bf16-mixed" else torch.float32
    policy = MixedPrecisionPolicy(compute, torch.float32, cast_forward_inputs=False)
    has_replicas = "replicate" in mesh.mesh_dim_names
    options = {
        "mesh": mesh["replicate", "shard"] if has_replicas else mesh["shard"],
        "mp_policy": policy,
    }
    for block in stage.blocks.values():
        fully_shard(block, reshard_after_forward=args.sharding in FREED, **options)
    # Backward starts with the head: it would be gathered again at once.
    fully_shard(stage, reshard_after_forward=False, **options)


def build_optimizer(model, args):
    """Return AdamW on this rank's shards."""
    return torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )


def build_schedule(stages, args, run, mesh, num_micro_batches):
    """Return the schedule of the pipeline, or None. Raises: UsageError."""
    if args.pp == 1:
        return None
    group = mesh.get_group("pp")
    piped = [
        pipelining.PipelineStage(
            stage,
            group.rank() + i * args.pp,
            args.num_stages,
            run.device,
            group=group,
        )
        for i, stage in enumerate(stages)
    ]
    try:
        return SCHEDULES[args.schedule](
            piped if args.schedule in LOOPED else piped[0],
            num_micro_batches,
            loss_fn=mean_loss,
            scale_grads=False,  # mean_loss divides by the tokens of all micro-batches
        )
    except ValueError as error:  # too few micro-batches
        raise cli.UsageError(f"--schedule {args.schedule}: {error}") from error


def mean_loss(logits, targets, num_tokens):
    """Return the cross-entropy summed over tokens, divided by a number of tokens.

    Shapes: logits (B, T/cp, V), divided by tp along V; targets (B, T/cp).
    """
    loss = F.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), reduction="sum"
    )
    return (loss.to_local() if isinstance(loss, DTensor) else loss) / num_tokens


def accumulate_gradient(stages, schedule, micro_batches, args):
    """Leave the gradient of the mean loss over all tokens of the global batch.

    Without gradients (torch.no_grad) it computes the loss only.
    Returns: this rank's sum of losses, and the number of tokens of all ranks.
    """
    positions = stages[0].positions

    def own_part(tensor, filler):
        """Stages exchange buffers of one shape: (b, T) -> (B, T/cp)."""
        tensor = tensor.to(positions.device, non_blocking=True)[:, positions]
        missing = args.micro_batch_size - len(tensor)
        return F.pad(tensor, (0, 0, 0, missing), value=filler)

    inputs = [own_part(tokens, 0) for tokens, _ in micro_batches]
    targets = [own_part(tokens, data.IGNORED) for _, tokens in micro_batches]
    num_tokens = (torch.stack(targets) != data.IGNORED).sum()
    dist.all_reduce(num_tokens)
    # FSDP averages gradients over ranks: divide by the tokens of an average rank.
    num_tokens = num_tokens / dist.get_world_size()
    losses = []
    with loss_parallel():  # logits stay divided over tp
        if schedule:
            drive = schedule.step if torch.is_grad_enabled() else schedule.eval
            drive(
                arg_mbs=[(tokens,) for tokens in inputs],
                target_mbs=targets,
                losses=losses,
                loss_kwargs={"num_tokens": num_tokens},
                return_outputs=False,
            )
        else:
            for number, batch in enumerate(zip(inputs, targets, strict=True), 1):
                stages[0].set_requires_all_reduce(number == len(inputs))
                loss = mean_loss(stages[0](batch[0]), batch[1], num_tokens)
                losses.append(loss)
                if torch.is_grad_enabled():
                    loss.backward()
    # The last stage has losses. Ranks of tp have the same ones.
    loss_sum = sum(losses, torch.zeros((), device=positions.device)).detach()
    return loss_sum * num_tokens / args.tp, num_tokens * args.dp * args.cp


def clip_grad_norm_(model, args):
    """Clip by the gradient norm of all stages together, and return this norm."""
    gradients = [weight.grad for weight in model.parameters()]
    square = torch.nn.utils.get_total_norm(gradients).full_tensor() ** 2
    dist.all_reduce(square)  # all ranks of a stage add its norm
    norm = (square * args.pp / dist.get_world_size()).sqrt()
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), args.max_grad_norm, norm)
    return norm


@torch.no_grad()
def evaluate(stages, schedule, test_set, args, run):
    """Return the mean loss per token of the test set; the ranks share its batches."""
    sums = torch.zeros(2, dtype=torch.float64, device=run.device)  # loss, tokens
    batches = data.GlobalBatches(test_set, args, run)
    while batches.samples_seen < len(test_set):
        loss_sum, num_tokens = accumulate_gradient(
            stages, schedule, next(batches), args
        )
        sums += torch.stack((loss_sum, num_tokens / dist.get_world_size()))
    for stage in stages:
        for unit in stage.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()  # forward keeps some weights for a backward
    dist.all_reduce(sums)
    means = (sums / sums[1]).tolist()
    return {"test_loss": means[0]}


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    cli.add_training_flags(
        parser,
        # Tied embeddings are one weight on two stages.
        [name for name, config in PRESETS.items() if not config.tied_embeddings],
        precisions=("32-true", "bf16-mixed"),
        without=("--num-workers", "--tensorboard", "--resume-step", "--keep"),
    )
    add = parser.add_argument
    add("--tp", type=cli.positive_int, default=1, help="tensor-parallel ranks (1)")
    add("--pp", type=cli.positive_int, default=1, help="pipeline-parallel ranks (1)")
    add("--cp", type=cli.positive_int, default=1, help="context-parallel ranks (1)")
    add("--schedule", choices=SCHEDULES, default="1f1b", help="of --pp (1f1b)")
    add(
        "--sharding",
        choices=("replicate", "grad-op", "full", "hybrid"),
        default="grad-op",
        help="of weights over dp x cp (grad-op)",
    )
    add(
        "--shard-group-size",
        type=cli.positive_int,
        help="ranks that share a replica of hybrid sharding (those of a machine)",
    )
    add(
        "--activation-checkpointing",
        choices=("none", "full", "selective"),
        default="none",
        help="what backward computes again (none)",
    )
    add("--async-save", action="store_true", help="train on while a save is written")
    args = parser.parse_args()
    cli.validate_training_args(args)
    return args


def main():
    args = parse_args()
    # It recommends one all-reduce instead of two for the gradient norm's 4 bytes.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    with runtime.init(args.device, args.timeout) as run:
        args.precision = args.precision or runtime.default_precision(run.device)
        train_set, test_set, args.data, vocab_size = data.load_sequences(args)
        config = load_config(args.preset, args.seq_len, vocab_size)
        validate_layout(args, run, config)
        mesh = build_mesh(args, run)
        report = Report("05-advanced/hybrid_parallelism.py", args, run)
        model, stages = build_model(config, args, run, mesh)
        run.print0(f"{args.preset}: {config.num_parameters():,} weights")
        run.print0(f"ranks: pp {args.pp} x dp {args.dp} x cp {args.cp} x tp {args.tp}")
        optimizer = build_optimizer(model, args)
        # Ranks of tp have parts of the same layer, and draw the same numbers.
        layout = [args.tp, args.pp, args.cp, args.dp]
        runtime.seed_everything(args.seed, run.rank // args.tp)

        checkpoints, saved = None, None
        if args.output_dir:
            folder = args.output_dir / "checkpoints"
            checkpoints = Checkpoints(
                run, folder, model, optimizer, args.keep, args.timeout
            )
            saved = checkpoints.find() if args.resume else None
        if args.global_batch_size is None and not saved:
            # At least one micro-batch for each stage.
            args.global_batch_size = args.micro_batch_size * args.dp * args.pp
        train.settle_batch_size(args, replace(run, world_size=args.dp), saved)
        dp_rank = run.rank // (args.tp * args.cp) % args.dp
        data_run = replace(run, rank=dp_rank, world_size=args.dp)
        batches = data.GlobalBatches(train_set, args, data_run)
        schedule = build_schedule(stages, args, run, mesh, batches.num_micro_batches())
        first_step = 1
        if saved:
            first_step = saved["step"] + 1
            train.compare_settings(args, run, saved["settings"], first_step)
            checkpoints.load(saved)
            if saved.get("layout") != layout:  # the random states are of other ranks
                seed = args.seed + saved["step"]
                runtime.seed_everything(seed, run.rank // args.tp)
            batches.samples_seen = saved["samples_seen"]

        counter = check.CollectiveCounter()
        flops = config.flops_per_token(args.seq_len)
        log = train.Log(run, args, first_step, flops, counter)
        stop = train.StopSignal(run.cpu_group)

        for step in range(first_step, args.max_steps + 1):
            with log.step(step):
                loss_sum, num_tokens = accumulate_gradient(
                    stages, schedule, next(batches), args
                )
                grad_norm = clip_grad_norm_(model, args)
                set_lr(optimizer, lr_at(step, args))
                optimizer.step()
                optimizer.zero_grad()
            log.add(step, loss_sum, num_tokens, grad_norm)
            if args.self_check and step == 2 and not saved:
                check.first_two_steps(
                    report,
                    args,
                    log,
                    model,
                    optimizer,
                    train_set,
                    lambda: build_transformer(config, args.seed, run.device),
                    stages=mesh.get_group("pp") if args.pp > 1 else None,
                )
            if every(step, args.eval_every, args.max_steps):
                log.evaluation(
                    step,
                    evaluate(stages, schedule, test_set, args, data_run),
                )
            stopping = stop.requested()
            if checkpoints and (
                stopping or every(step, args.save_every, args.max_steps)
            ):
                log.flush()  # stops the run if the loss is not a number
                facts = {
                    "samples_seen": batches.samples_seen,
                    "settings": train.settings_of(args),
                    "layout": layout,
                }
                checkpoints.save(step, facts, background=args.async_save)
            if stopping:
                run.print0(f"stopped by a signal after step {step}")
                break

        if checkpoints:
            checkpoints.wait()
        report.metrics |= log.finish()
        return report.finish(log.summary())


if __name__ == "__main__":
    cli.run(main)
