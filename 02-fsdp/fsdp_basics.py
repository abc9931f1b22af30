"""Shard a model with FSDP2: what is a weight at each point of a step, and what does that cost?

    CPU   torchrun --standalone --nproc-per-node=2 02-fsdp/fsdp_basics.py
    GPU   torchrun --standalone --nproc-per-node=gpu 02-fsdp/fsdp_basics.py --precision bf16-mixed

Try `--sharding full grad-op hybrid hpz none` on 4 ranks, and `--grad-accum-steps 3`. Look for: a
rank that holds 1/N of everything between steps; a block that is whole only while it computes; the
losses and the gradient of one process.

Sources: Zhao et al., PyTorch FSDP (VLDB 2023), sections 3.2 and 4; Rajbhandari et al., ZeRO
(SC 2020), sections 5 and 7; docs.pytorch.org, torch.distributed.fsdp.fully_shard.
"""

import contextlib
import functools

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from fsdp_parts.fsdp_basics import GatherLog, check_gathers, draw_timeline, weigh
from fsdp_parts.sharding import loss_of, mesh_of, same_gradient
from fsdp_parts.strategies import (
    LOSS_TOLERANCE,
    Plan,
    check_step,
    describe,
    group_size_of,
    parse_sharding,
    print_points,
    print_strategies,
    steps_of,
    unit_weights,
    watch,
)
from legacy_common import cli, models, runtime
from legacy_common.lab import proofs
from legacy_common.lab.traffic import TrafficCounter
from legacy_common.report import Report


def shard(model, sharding, mesh, group_size=1, precision="32-true"):
    """Shard in place: each block is a unit, gathered and freed by itself; the rest is one more."""
    policy = MixedPrecisionPolicy()
    if precision == "bf16-mixed":  # without the last argument, the rotary tables are rounded too
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    within = group_size if group_size < mesh.size() else True  # a group of all is full sharding
    free_after_forward = {"grad-op": False, "hpz": within}.get(sharding, True)
    for block in model.blocks:
        # From here on a rank holds 1/N of the block, except while the block computes.
        fully_shard(block, mesh=mesh, reshard_after_forward=free_after_forward, mp_policy=policy)

    return fully_shard(model, mesh=mesh, mp_policy=policy)  # embedding, last norm and head


def replicate(model, device, precision):
    """Keep the whole model on each rank, for comparison: DDP, as in module 01."""
    if precision == "bf16-mixed":
        model.forward = torch.autocast(device.type, torch.bfloat16)(model.forward)
    return DDP(model, bucket_cap_mb=25, gradient_as_bucket_view=True)


def reducing(model, last):
    """Settle, for one micro-batch, what is sent of its gradients."""
    if isinstance(model, DDP) and not last:
        return model.no_sync()
    if isinstance(model, FSDPModule):
        # hybrid: gradients cross between the groups once a step, not once a micro-batch
        model.set_requires_all_reduce(last)

    return contextlib.nullcontext()


def accumulate(model, micro_batches):
    """Add up the gradients of a step's micro-batches; return the mean loss."""
    total = 0.0
    for number, batch in enumerate(micro_batches, 1):
        with reducing(model, last=number == len(micro_batches)):
            loss = loss_of(model, batch) / len(micro_batches)
            loss.backward()
        total += loss.detach()
    return total


def train_step(model, optimizer, micro_batches):
    """Take one step; return the mean loss of this rank's samples."""
    optimizer.zero_grad()
    loss = accumulate(model, micro_batches)
    optimizer.step()  # on this rank's shards: nothing is sent
    return loss


def train(model, optimizer, steps):
    """Take a step on each list of micro-batches; return the losses. Shapes: (steps,)."""
    return torch.stack([train_step(model, optimizer, micro_batches) for micro_batches in steps])


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def prove(report, plan, model, expected, steps):
    """Train one strategy, hold it against one process, and watch a step; return what was seen."""
    name = plan.sharding
    layer = model.blocks[0].down
    built = ["as built", *describe(layer.weight)]
    units = unit_weights([*model.blocks, model], plan.shards)
    if name == "none":
        model = replicate(model, report.device, plan.precision)
    else:
        shard(model, name, mesh_of(plan.shards, report.device), plan.group, plan.precision)
    optimizer = adam(model)

    accumulate(model, steps[0])
    what = f"{name}: gradient, relative error"
    same_gradient(report, what, model, expected["gradient"], proofs.TOLERANCE[plan.precision])
    losses = train(model, optimizer, steps) / plan.ranks
    dist.all_reduce(losses)
    report.metrics[f"final_loss_{name}"] = losses[-1].item()
    what = f"{name}: largest error of a loss"
    proofs.same_losses(report, losses, expected["losses"], LOSS_TOLERANCE[plan.precision], what)

    take_step = functools.partial(train_step, model, optimizer, steps[0])
    with TrafficCounter() as counter, GatherLog(model) as log:
        points = watch(model, layer, lambda: layer.weight, optimizer, take_step)
    measured = check_step(report, name, plan, units, model.parameters(), optimizer, counter)
    check_gathers(report, plan, units, log)
    return [built, *points], measured, log


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    positive = cli.positive_int
    names = "one or several of full, grad-op, hybrid, none (DDP), hpz, or FSDP1's names (full)"
    add("--sharding", type=parse_sharding, nargs="+", default=["full"], metavar="NAME", help=names)
    group = "ranks over which hybrid shards, and hpz for backward (2; on several machines, of one)"
    at_least_2 = functools.partial(cli.whole_number, low=2)
    add("--shard-group-size", type=at_least_2, help=group)
    add("--precision", choices=LOSS_TOLERANCE, default="32-true", help="(32-true)")
    add("--micro-batch-size", type=positive, default=8, help="sequences per rank at a time (8)")
    add("--grad-accum-steps", type=positive, default=1, help="micro-batches per rank and step (1)")
    add("--seq-len", type=positive, default=64, help="tokens per sequence (64)")
    add("--max-steps", type=positive, default=5, help="training steps (5)")
    nothing = "train nothing: print what each of so many ranks holds of --preset, by formula"
    add("--weigh", type=at_least_2, metavar="RANKS", help=nothing)
    add("--preset", choices=models.PRESETS, default="llama3-8b", help="of --weigh (llama3-8b)")
    return parser.parse_args()


def main():
    args = parse_args()
    if args.weigh:
        return weigh("02-fsdp/fsdp_basics.py", args)
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("02-fsdp/fsdp_basics.py", args, world, device)
        group_size = group_size_of(args, world)
        config = models.preset("tiny", args.seq_len)
        steps, steps_of_all = steps_of(args, world, device)
        weights = config.num_parameters()
        m = args.grad_accum_steps
        report.start(
            f"{weights:,} weights, {4 * weights:,} bytes in float32; {args.precision}",
            f"global batch {args.micro_batch_size * m * world.world_size} = "
            f"{args.micro_batch_size} per rank x {m} micro-batches x {world.world_size} ranks",
        )

        def build():
            runtime.seed_everything(args.seed)
            return models.Transformer(config).to(device)

        alone = build()  # one process, on the global batch
        first = (loss_of(alone, batch) / m for batch in steps_of_all[0])
        expected = {"gradient": proofs.gradient_of_one_process(alone, first)}
        expected["losses"] = train(alone, adam(alone), steps_of_all)

        seen, logs = {}, {}
        for name in args.sharding:
            plan = Plan(name, weights, args.precision, m, world.world_size, group_size)
            points, seen[name], logs[name] = prove(report, plan, build(), expected, steps)
        if len(seen) == 1:
            print_points(report, points)
        print_strategies(report, seen)
        draw_timeline(report, logs)
        return report.finish(
            f"loss {expected['losses'][-1].item():.4f} after step {args.max_steps}"
        )


if __name__ == "__main__":
    cli.run(main)
