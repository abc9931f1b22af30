"""Train a transformer that fits on no single device, with FSDP2: a template.

Copy this file and dist_common, then change both.

    CPU   torchrun --standalone --nproc-per-node=2 02-fsdp/fsdp_transformer.py
    GPU   torchrun --standalone --nproc-per-node=gpu 02-fsdp/fsdp_transformer.py \
              --preset llama3-8b --seq-len 4096 --micro-batch-size 1 \
              --activation-checkpointing full

It does the same job as ddp_training.py of module 01: expect the same losses. With
--output-dir and --resume the run can be killed at any moment and started again, on any
number of ranks. --self-check compares two steps with one process.

Sources: Zhao et al., PyTorch FSDP (VLDB 2023); Liang et al., TorchTitan (2024); Chen et
al., Training Deep Nets with Sublinear Memory Cost (2016).
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

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


def build_mesh(args, run):
    """Return how the ranks share the model: each row of the mesh shards one replica.

    Hybrid sharding has a replica per machine: only gradients cross between machines.
    """
    if args.sharding != "hybrid":
        return init_device_mesh(run.device.type, (run.world_size,))
    group_size = args.shard_group_size or run.local_world_size
    if run.world_size % group_size:
        raise cli.UsageError(
            f"--shard-group-size {group_size} does not divide {run.world_size} ranks"
        )
    return init_device_mesh(
        run.device.type,
        (run.world_size // group_size, group_size),
        mesh_dim_names=("replicate", "shard"),
    )


def build_model(config, args, mesh, device):
    """Build the model without memory, shard it, then give each rank its shards."""
    with torch.device("meta"):
        model = Transformer(config)
    for block in model.blocks:
        block.activation_checkpointing = args.activation_checkpointing
        if args.compile:
            block.compile()  # all blocks share the compiled code of the first
    shard_model(model, mesh, args)
    model.to_empty(device=device)
    if config.tied_embeddings:  # to_empty made two tensors of one
        model.head.weight = model.embedding.weight
    init_weights(model, args.seed)
    return model


def shard_model(model, mesh, args):
    """Shard the embedding, each block, and norm and head as units of their own."""
    options = {"mesh": mesh}
    if args.precision == "bf16-mixed":
        # Gather and compute in bfloat16, add up gradients in float32. The rotary tables
        # are inputs of a block and stay float32.
        options["mp_policy"] = MixedPrecisionPolicy(
            torch.bfloat16, torch.float32, cast_forward_inputs=False
        )
    # grad-op (ZeRO-2) keeps the gathered weights from forward to backward.
    reshard = args.sharding != "grad-op"
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard, **options)
    last_unit = [model.norm, model.head]
    if model.config.tied_embeddings:  # a weight belongs to one unit
        last_unit.append(model.embedding)
    else:
        fully_shard(model.embedding, reshard_after_forward=reshard, **options)
    # Backward starts with these: it would gather them again at once.
    fully_shard(last_unit, reshard_after_forward=False, **options)
    fully_shard(model, **options)  # the root: starts the gathers of the units


def summed_loss(model, inputs, targets):
    """Return the cross-entropy summed over tokens. Shapes: inputs, targets (B, T)."""
    logits = model(inputs)  # (B, T, V)
    return F.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), reduction="sum"
    )


def accumulate_gradient(model, micro_batches, device):
    """Leave the shards of the mean gradient over all tokens of the global batch.

    Returns: this rank's sum of losses, and the number of tokens of all ranks.
    """
    counts = [(targets != data.IGNORED).sum() for _, targets in micro_batches]
    num_tokens = sum(counts).to(device, non_blocking=True)
    dist.all_reduce(num_tokens)
    loss_sum = torch.zeros((), device=device)
    for number, (inputs, targets) in enumerate(micro_batches, 1):
        inputs = inputs.to(device, non_blocking=True)
        targets = targets.to(device, non_blocking=True)
        # Each backward reduce-scatters, so that gradients stay sharded. The replicas
        # of hybrid sharding all-reduce only the sum.
        model.set_requires_all_reduce(number == len(micro_batches))
        loss = summed_loss(model, inputs, targets)
        # FSDP averages over ranks, but we divide by the tokens of all ranks: undo the
        # average.
        (loss * dist.get_world_size() / num_tokens).backward()
        loss_sum += loss.detach()
    return loss_sum, num_tokens


@torch.no_grad()
def evaluate(model, test_set, args, run):
    """Yield the tokens and the summed loss of each of this rank's test batches."""
    runtime.sync_buffers(model)
    model.eval()
    for inputs, targets in data.evaluation_batches(test_set, args, run):
        inputs = inputs.to(run.device)
        targets = targets.to(run.device)
        num_tokens = (targets != data.IGNORED).sum()
        yield num_tokens, summed_loss(model, inputs, targets)
    model.train()
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()  # forward keeps some weights for a backward


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    cli.add_training_flags(parser, PRESETS, precisions=("32-true", "bf16-mixed"))
    add = parser.add_argument
    kinds = ("full", "grad-op", "hybrid")
    add("--sharding", choices=kinds, default="full", help="ZeRO-3, ZeRO-2, HSDP (full)")
    add(
        "--shard-group-size",
        type=cli.positive_int,
        help="ranks that share a replica of hybrid sharding (the ranks of a machine)",
    )
    args = parser.parse_args()
    cli.validate_training_args(args)
    return args


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as run:
        args.precision = args.precision or runtime.default_precision(run.device)
        mesh = build_mesh(args, run)
        train_set, test_set, args.data, vocab_size = data.load_sequences(args)
        config = load_config(args.preset, args.seq_len, vocab_size)
        report = Report("02-fsdp/fsdp_transformer.py", args, run)
        model = build_model(config, args, mesh, run.device)
        run.print0(f"{args.preset}: {config.num_parameters():,} weights")
        optimizer = build_optimizer(model, args)
        runtime.seed_everything(args.seed, run.rank)

        checkpoints = Checkpoints(run, args, model, optimizer)
        saved = checkpoints.resume()
        first_step = saved["step"] + 1
        train.settle_batch_size(args, run)
        batches = data.GlobalBatches(train_set, args, run, saved["samples_seen"])

        counter = check.CollectiveCounter()
        flops = config.flops_per_token(args.seq_len)
        log = train.Log(run, args, first_step, flops, counter)
        stop = train.StopSignal(run.cpu_group)

        for step in range(first_step, args.max_steps + 1):
            with log.step(step):
                loss_sum, num_tokens = accumulate_gradient(
                    model, next(batches), run.device
                )
                grad_norm = torch.nn.utils.clip_grad_norm_(
                    model.parameters(), args.max_grad_norm
                )
                set_lr(optimizer, lr_at(step, args))
                optimizer.step()
                optimizer.zero_grad()
            log.add(step, loss_sum, num_tokens, check.whole(grad_norm))
            if args.self_check and step == 2 and first_step == 1:
                check.first_two_steps(
                    report,
                    log,
                    model,
                    optimizer,
                    train_set,
                    lambda: build_transformer(config, args.seed, run.device),
                )
            if every(step, args.eval_every, args.max_steps):
                log.evaluation(step, evaluate(model, test_set, args, run))
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
