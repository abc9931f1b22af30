"""Read old code: FSDP1's FullyShardedDataParallel beside FSDP2's fully_shard, row by row.

    CPU   torchrun --standalone --nproc-per-node=2 02-fsdp/fsdp1.py
    GPU   torchrun --standalone --nproc-per-node=gpu 02-fsdp/fsdp1.py --precision bf16-mixed

Try `--sharding FULL_SHARD SHARD_GRAD_OP HYBRID_SHARD NO_SHARD` on 4 ranks, and `--auto-wrap size`.
Look for: the same bytes and losses; a flat parameter where FSDP2 keeps names and shapes.

Sources: Zhao et al., PyTorch FSDP (VLDB 2023), sections 3.2 and 4; docs.pytorch.org,
torch.distributed.fsdp.FullyShardedDataParallel and torch.distributed.fsdp.fully_shard.
"""

import functools
import warnings

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import (
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from dist_common import cli, models, runtime
from dist_common.lab import proofs
from dist_common.lab.traffic import TrafficCounter
from dist_common.models import Block
from dist_common.report import Report
from fsdp_parts.sharding import loss_of, mesh_of
from fsdp_parts.strategies import (
    LOSS_TOLERANCE,
    NAMES,
    Plan,
    check_step,
    group_size_of,
    parse_sharding,
    print_points,
    print_strategies,
    steps_of,
    unit_weights,
    watch,
)

WRAP_FROM = 40_000  # weights of a unit, at least, under --auto-wrap size


def wrap_with_fsdp1(model, sharding, mesh, auto_wrap, precision, device):
    """Wrap with FSDP1: a policy picks the units, and a unit becomes one flat parameter."""
    policies = {
        "block": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        "size": functools.partial(size_based_auto_wrap_policy, min_num_params=WRAP_FROM),
    }
    bf16 = MixedPrecision(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    # A hybrid of a single group is a full one; FSDP1 would fall back to NO_SHARD.
    single = sharding == "hybrid" and mesh.ndim == 1

    return FSDP1(
        model,
        auto_wrap_policy=policies[auto_wrap],
        sharding_strategy=ShardingStrategy["FULL_SHARD" if single else NAMES[sharding]],
        device_mesh=None if sharding == "none" else mesh,
        mixed_precision=bf16 if precision == "bf16-mixed" else None,
        device_id=device,
    )


def shard_with_fsdp2(model, sharding, mesh, precision):
    """Do the same with FSDP2: a call for each unit, in place. For NO_SHARD, see the mesh."""
    policy = MixedPrecisionPolicy()
    if precision == "bf16-mixed":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    free = sharding in ("full", "hybrid")
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=free, mp_policy=policy)

    return fully_shard(model, mesh=mesh, mp_policy=policy)


def units_of(model, api, auto_wrap):
    """Return the modules that become units, the one that takes the rest last."""
    if api == "FSDP1" and auto_wrap == "size":  # whatever has WRAP_FROM weights by itself
        layers = [(b.attention, b.gate, b.up, b.down) for b in model.blocks]
        return [*(layer for block in layers for layer in block), model]
    return [*model.blocks, model]


def weight_of(model):
    """Return block 0's down projection, and a function that finds the parameter of its weight."""
    block = model.blocks[0]
    layer = getattr(block.down, "module", block.down)
    wrapped = [module for module in (block.down, block, model) if isinstance(module, FSDP1)]
    if wrapped:  # the weight is a part of its unit's only parameter
        return layer, lambda: next(wrapped[0].parameters())
    return layer, lambda: layer.weight


def train_step(model, optimizer, batch):
    """Take one step; return the loss of this rank's samples."""
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    return loss.detach()


def train(model, optimizer, batches):
    """Take a step on each batch; return the losses. Shapes: (steps,)."""
    return torch.stack([train_step(model, optimizer, batch) for batch in batches])


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def prove(report, api, plan, model, args, expected_losses, batches):
    """Train with one of the two, hold it against one process and its formulas; return rows."""
    name = f"{NAMES[plan.sharding]} {api}"
    mesh = mesh_of(plan.shards, report.device)
    units = unit_weights(units_of(model, api, args.auto_wrap), plan.shards, flat=api == "FSDP1")
    if api == "FSDP1":
        with warnings.catch_warnings(record=True) as caught:
            options = args.auto_wrap, args.precision, report.device
            model = wrap_with_fsdp1(model, plan.sharding, mesh, *options)
        for message in {str(warning.message) for warning in caught}:
            report.say(f"{name}: PyTorch says: {message}")
    else:
        shard_with_fsdp2(model, plan.sharding, mesh, args.precision)
    optimizer = adam(model)

    losses = train(model, optimizer, batches) / plan.ranks
    dist.all_reduce(losses)
    report.metrics[f"final_loss_{name}"] = losses[-1].item()
    tolerance = LOSS_TOLERANCE[args.precision]
    proofs.same_losses(
        report, losses, expected_losses, tolerance, f"{name}: largest error of a loss"
    )

    layer, weight = weight_of(model)
    step = functools.partial(train_step, model, optimizer, batches[0])
    with TrafficCounter() as counter:
        points = watch(model, layer, weight, optimizer, step)
    # On one rank, FSDP1 still has it sum with itself.
    reduced = len(units) * (plan.shards < plan.ranks or (api == "FSDP1" and plan.shards == 1))
    weights = model.parameters()
    measured = check_step(report, name, plan, units, weights, optimizer, counter, reduced)
    return points, measured


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    parser.set_defaults(grad_accum_steps=1)
    add = parser.add_argument
    positive = cli.positive_int
    names = "FULL_SHARD (default), SHARD_GRAD_OP, HYBRID_SHARD, NO_SHARD, or the new names"
    add("--sharding", type=parse_sharding, nargs="+", default=["full"], metavar="NAME", help=names)
    group = "ranks over which HYBRID_SHARD shards (2; on several machines, those of one)"
    at_least_2 = functools.partial(cli.whole_number, low=2)
    add("--shard-group-size", type=at_least_2, help=group)
    add("--auto-wrap", choices=("block", "size"), default="block", help="FSDP1's units (block)")
    add("--precision", choices=LOSS_TOLERANCE, default="32-true", help="(32-true)")
    add("--micro-batch-size", type=positive, default=8, help="sequences per rank and step (8)")
    add("--seq-len", type=positive, default=64, help="tokens per sequence (64)")
    add("--max-steps", type=positive, default=5, help="training steps (5)")
    args = parser.parse_args()
    if "hpz" in args.sharding:
        parser.error("--sharding: FSDP1 has no hpz: see fsdp_basics.py")
    return args


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("02-fsdp/fsdp1.py", args, world, device)
        group_size = group_size_of(args, world)
        config = models.preset("tiny", args.seq_len)
        mine, every = ([batch for (batch,) in steps] for steps in steps_of(args, world, device))
        weights = config.num_parameters()
        report.start(
            f"{weights:,} weights, {4 * weights:,} bytes in float32; {args.precision}",
            f"global batch {args.micro_batch_size * world.world_size} = "
            f"{args.micro_batch_size} per rank x {world.world_size} ranks",
        )

        def build():
            runtime.seed_everything(args.seed)
            return models.Transformer(config).to(device)

        alone = build()  # one process, on the global batch
        expected_losses = train(alone, adam(alone), every)

        points, seen = {}, {}
        for sharding in args.sharding:
            plan = Plan(sharding, weights, args.precision, 1, world.world_size, group_size)
            for api in ("FSDP2", "FSDP1"):
                name = f"{NAMES[sharding]} {api}"
                points[name], seen[name] = prove(
                    report, api, plan, build(), args, expected_losses, mine
                )
        if len(args.sharding) == 1:
            print_points(report, *points.values())
        print_strategies(report, seen)
        return report.finish(f"loss {expected_losses[-1].item():.4f} after step {args.max_steps}")


if __name__ == "__main__":
    cli.run(main)
