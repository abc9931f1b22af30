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
import math
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
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
)
from dist_common.report import Report
from dist_common.train import build_optimizer, every, lr_at, set_lr

SCHEDULES = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
}
LOOPED = ("interleaved", "zero-bubble")  # two stages per rank
FREED = ("full", "hybrid")  # weights, between forward and backward


def validate_layout(args, run, config):
    """Set args.dp and args.num_stages; return this rank's place in data parallelism.

    Raises: UsageError.
    """
    args.num_stages = args.pp * (2 if args.schedule in LOOPED else 1)
    product = args.tp * args.pp * args.cp
    axes = f"--tp {args.tp} --pp {args.pp} --cp {args.cp}"
    for divisor, total, what in (
        (product, run.world_size, f"ranks: {axes}"),
        (args.tp, config.num_kv_heads, f"key and value heads: --tp {args.tp}"),
        (
            args.num_stages,
            config.num_layers,
            f"layers: --pp {args.pp} --schedule {args.schedule}",
        ),
        (args.tp * args.cp, args.seq_len, f"tokens of --seq-len: {axes}"),
    ):
        if total % divisor:
            raise cli.UsageError(f"{divisor} does not divide the {total} {what}")
    if args.schedule == "zero-bubble" and (
        args.sharding in FREED
        or args.activation_checkpointing != "none"
        or args.compile
    ):
        # PyTorch 2.14 loses gradients without an error.
        raise cli.UsageError(
            "--schedule zero-bubble divides backward in two: it needs --sharding "
            "grad-op or replicate, no --activation-checkpointing and no --compile"
        )
    args.dp = run.world_size // product
    rank = run.rank // args.tp // args.cp
    return replace(run, rank=rank % args.dp, world_size=args.dp)


def build_mesh(args, run):
    """Return the mesh of all ranks. Neighbours differ along its last axis, tp.

    Ranks of cp have the same weights and other tokens, as ranks of dp have. So both
    share weights and sum gradients: replicate x shard = dp x cp. Hybrid sharding has a
    replica per machine, or more if they are small: only gradients cross machines.
    """
    data_ranks = args.dp * args.cp
    per_machine = math.gcd(data_ranks, run.local_world_size // args.tp)
    shards = {"replicate": 1, "hybrid": per_machine}.get(args.sharding, data_ranks)
    sizes = {
        "pp": args.pp,
        "replicate": data_ranks // shards,
        "shard": shards,
        "tp": args.tp,
    }
    # An axis of size 1 would get a group per rank. FSDP needs the shard axis.
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


def shard_sequences(model, args, run):
    """Context parallelism: own queries attend to the keys and values of all ranks."""
    ranks = torch.arange(run.world_size).view(-1, args.cp, args.tp).mT.flatten(0, 1)
    group, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
    mesh = DeviceMesh.from_group(group, run.device.type)
    mask = causal_lower_right(len(model.positions), int(model.positions[-1]) + 1)

    def attend(q, k, v):
        """Shapes: q (B, H, T/cp, D/H), k and v with fewer heads -> as q."""
        part = DTensor.from_local(torch.stack((k, v)), mesh, [Shard(3)])
        # Each rank's queries give a part of the gradient: backward reduce-scatters.
        whole = part.full_tensor(grad_placements=[Partial()])
        k, v = whole[..., : mask.seq_len_kv, :]  # up to this rank's last query
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

    for block in model.blocks:
        block.attention.attend = attend


class Stage(nn.Module):
    """A part of the model: the blocks with these numbers keep their names.

    The stage of block 0 embeds the tokens. The stage of the last block returns logits.
    Shapes: tokens (B, T/cp) or x (B, T/cp/tp, D) -> x or logits (B, T/cp, V).
    """

    forward = Transformer.forward

    def __init__(self, model, numbers):
        super().__init__()
        self.config = model.config
        self.positions = model.positions
        is_last = len(model.blocks) - 1 in numbers
        self.embedding = model.embedding if 0 in numbers else nn.Identity()
        self.blocks = nn.ModuleDict({str(n): model.blocks[n] for n in numbers})
        self.norm = model.norm if is_last else nn.Identity()
        self.head = model.head if is_last else nn.Identity()

    def mean_loss(self, logits, targets):
        """Return the cross-entropy summed over tokens, divided by `num_tokens`.

        Shapes: logits (B, T/cp, V), divided by tp along V; targets (B, T/cp).
        """
        loss = F.cross_entropy(
            logits.float().flatten(0, 1), targets.flatten(), reduction="sum"
        )
        # accumulate_gradient sets num_tokens.
        return (
            loss.to_local() if isinstance(loss, DTensor) else loss
        ) / self.num_tokens


def build_model(config, args, run, mesh):
    """Build the model without memory, divide it, then give each rank its part.

    Returns: this rank's part of the model, and the stages that it consists of.
    """
    with torch.device("meta"):
        model = Transformer(config)
    positions = torch.arange(args.seq_len, device=run.device).chunk(args.cp)
    model.positions = positions[run.rank // args.tp % args.cp]  # (T/cp,)
    if args.tp > 1:
        shard_matrices(model, mesh["tp"])
    if args.cp > 1:
        shard_sequences(model, args, run)
    # A compiled block gives no gradient to a sum that is still on its way.
    model.embedding.register_forward_hook(lambda *given: given[-1].clone())
    for block in model.blocks:
        block.activation_checkpointing = args.activation_checkpointing
        if args.compile:
            block.compile()
    numbers = torch.arange(config.num_layers).chunk(args.num_stages)
    numbers = numbers[run.rank * args.pp // run.world_size :: args.pp]
    stages = [Stage(model, part.tolist()) for part in numbers]
    for stage in stages:
        shard_weights(stage, mesh, args)
    part = Stage(model, torch.cat(numbers).tolist())
    part.to_empty(device=run.device)
    init_weights(part, args.seed)
    return part, stages


def shard_weights(stage, mesh, args):
    """Data parallelism: shard a stage's weights with FSDP, or replicate them."""
    compute = torch.bfloat16 if args.precision == "bf16-mixed" else None
    policy = MixedPrecisionPolicy(compute, torch.float32, cast_forward_inputs=False)
    has_replicas = "replicate" in mesh.mesh_dim_names
    mesh = mesh["replicate", "shard"] if has_replicas else mesh["shard"]
    for block in stage.blocks.values():
        fully_shard(
            block,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=args.sharding in FREED,
        )
    # Backward starts with the head: it would be gathered again at once.
    fully_shard(stage, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def build_schedule(stages, args, run, group):
    """Return the schedule of the pipeline, None without one. Raises: UsageError."""
    if not group:
        return None
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
            args.num_micro_batches,
            loss_fn=stages[-1].mean_loss,
            scale_grads=False,  # mean_loss divides by the tokens of all micro-batches
        )
    except ValueError as error:  # too few micro-batches
        raise cli.UsageError(f"--schedule {args.schedule}: {error}") from error


def accumulate_gradient(stages, schedule, micro_batches, args):
    """Leave the gradient of the mean loss over all tokens of the global batch.

    Without gradients (torch.no_grad) it computes the loss only.
    Returns: this rank's sum of losses, and the number of tokens of all ranks.
    """
    positions = stages[0].positions
    inputs, targets = (  # (m, B, T/cp)
        torch.stack(tensors).to(positions.device)[..., positions]
        for tensors in zip(*micro_batches, strict=True)
    )
    num_tokens = (targets != data.IGNORED).sum()
    dist.all_reduce(num_tokens)
    # FSDP averages gradients over ranks: divide by the tokens of an average rank.
    num_tokens = num_tokens / dist.get_world_size()
    stages[-1].num_tokens = num_tokens
    losses = []
    with loss_parallel():  # logits stay divided over tp
        if schedule:
            drive = schedule.step if torch.is_grad_enabled() else schedule.eval
            tokens = [inputs.flatten(0, 1)] if "0" in stages[0].blocks else []
            drive(
                *tokens,  # the schedule divides them into micro-batches again
                target=targets.flatten(0, 1),
                losses=losses,
                return_outputs=False,
            )
        else:
            for i, (tokens, labels) in enumerate(zip(inputs, targets, strict=True), 1):
                stages[0].set_requires_all_reduce(i == len(inputs))
                loss = stages[0].mean_loss(stages[0](tokens), labels)
                losses.append(loss)
                if torch.is_grad_enabled():
                    loss.backward()
    # The last stage has losses. Ranks of tp have the same ones.
    loss_sum = sum(losses, torch.zeros_like(num_tokens)).detach()
    return loss_sum * num_tokens / args.tp, num_tokens * args.dp * args.cp


def clip_grad_norm_(model, args):
    """Clip by the gradient norm of all stages together, and return this norm."""
    gradients = [weight.grad for weight in model.parameters()]
    square = nn.utils.get_total_norm(gradients).full_tensor() ** 2
    dist.all_reduce(square)  # all ranks of a stage add its norm
    norm = (square * args.pp / dist.get_world_size()).sqrt()
    nn.utils.clip_grads_with_norm_(model.parameters(), args.max_grad_norm, norm)
    return norm


@torch.no_grad()
def evaluate(stages, schedule, test_set, args, run):
    """Yield this rank's share of the tokens and the loss of each test batch."""
    batches = data.GlobalBatches(test_set, args, run)
    while batches.samples_seen < len(test_set):
        loss_sum, num_tokens = accumulate_gradient(
            stages, schedule, next(batches), args
        )
        yield num_tokens / dist.get_world_size(), loss_sum


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
    args = parser.parse_args()
    cli.validate_training_args(args)
    return args


def main():
    args = parse_args()
    # It recommends one all-reduce instead of two for the gradient norm's 4 bytes.
    logging.getLogger("torch.distributed.tensor").setLevel("ERROR")
    with runtime.init(args.device, args.timeout) as run:
        args.precision = args.precision or runtime.default_precision(run.device)
        train_set, test_set, args.data, vocab_size = data.load_sequences(args)
        config = load_config(args.preset, args.seq_len, vocab_size)
        data_run = validate_layout(args, run, config)
        mesh = build_mesh(args, run)
        pp_group = mesh.get_group("pp") if args.pp > 1 else None
        report = Report("05-advanced/hybrid_parallelism.py", args, run)
        model, stages = build_model(config, args, run, mesh)
        run.print0(
            f"{args.preset}: {config.num_parameters():,} weights\n"
            f"ranks: pp {args.pp} x dp {args.dp} x cp {args.cp} x tp {args.tp}"
        )
        optimizer = build_optimizer(model, args)
        # Ranks of tp have parts of the same layer, and draw the same numbers.
        runtime.seed_everything(args.seed, run.rank // args.tp)
        checkpoints = Checkpoints(run, args, model, optimizer)
        saved = checkpoints.resume()
        first_step = saved["step"] + 1
        train.settle_batch_size(args, data_run, args.pp)  # one for each stage
        batches = data.GlobalBatches(train_set, args, data_run, saved["samples_seen"])
        schedule = build_schedule(stages, args, run, pp_group)

        flops = config.flops_per_token(args.seq_len)
        log = train.Log(run, args, first_step, flops, check.CollectiveCounter())
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
            if args.self_check and step == 2 and first_step == 1:
                check.first_two_steps(
                    report,
                    log,
                    model,
                    optimizer,
                    train_set,
                    lambda: build_transformer(config, args.seed, run.device),
                    stages=pp_group,
                )
            if every(step, args.eval_every, args.max_steps):
                log.evaluation(
                    step, evaluate(stages, schedule, test_set, args, data_run)
                )
            stopping = stop.requested()
            if stopping or every(step, args.save_every, args.max_steps):
                log.flush()  # stops the run if the loss is not a number
                checkpoints.save(step, {"samples_seen": batches.samples_seen})
            if stopping:
                run.print0(f"stopped by a signal after step {step}")
                break

        checkpoints.wait()
        report.metrics |= log.finish()
        return report.finish(log.summary())


if __name__ == "__main__":
    cli.run(main)
