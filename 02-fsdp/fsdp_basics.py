"""Train under FSDP, watch what a weight becomes at each moment, and count what that costs.

    CPU   torchrun --standalone --nproc-per-node=2 02-fsdp/fsdp_basics.py
    GPU   torchrun --standalone --nproc-per-node=gpu 02-fsdp/fsdp_basics.py --precision bf16-mixed

Try `--sharding full grad-op hybrid none` on 4 ranks, and `--api fsdp1`. Look for: a rank that holds
1/N of everything between steps; 2 all-gathers and a reduce-scatter for each block and step; the
losses of one process.

Sources: Zhao et al., PyTorch FSDP (VLDB 2023), sections 3.2 and 4; Rajbhandari et al., ZeRO
(SC 2020), sections 5 and 7; docs.pytorch.org, "Getting Started with Fully Sharded Data Parallel".
"""

import argparse
import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FlatParameter,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor

from dist_common import cli, data, measure, models, proofs, runtime
from dist_common.models import Block, Transformer
from dist_common.proofs import RING_FACTOR
from dist_common.report import Report

FSDP1_NAMES = {
    "full": "FULL_SHARD",
    "grad-op": "SHARD_GRAD_OP",
    "hybrid": "HYBRID_SHARD",
    "none": "NO_SHARD",
}
WRAP_FROM = 40_000  # weights
LOSS_TOLERANCE = {"32-true": 1e-5, "bf16-mixed": 1e-2}  # of losses near 5; bf16 keeps 8 bits


def shard(model, sharding, mesh, precision):
    """Shard with FSDP2: each block is a unit, gathered and freed by itself; the rest is one."""
    policy = MixedPrecisionPolicy()
    if precision == "bf16-mixed":  # without the last argument, the rotary tables are rounded too
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    free_after_forward = sharding in ("full", "hybrid")
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=free_after_forward, mp_policy=policy)

    return fully_shard(model, mesh=mesh, mp_policy=policy)  # embedding, last norm and head


def shard_with_fsdp1(model, sharding, mesh, args, device):
    """Shard with FSDP1: a unit's parameters become one flat parameter; a policy picks the units."""
    policies = {
        "block": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        "size": functools.partial(size_based_auto_wrap_policy, min_num_params=WRAP_FROM),
    }
    bf16 = MixedPrecision(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    return FSDP1(
        model,
        auto_wrap_policy=policies[args.auto_wrap],
        # A hybrid of a single group is a full one.
        sharding_strategy=ShardingStrategy[
            "FULL_SHARD" if sharding == "hybrid" and mesh.ndim == 1 else FSDP1_NAMES[sharding]
        ],
        device_mesh=None if sharding == "none" else mesh,
        mixed_precision=bf16 if args.precision == "bf16-mixed" else None,
        device_id=device,
    )


def mesh_of(sharding, group_size, device):
    """Arrange the ranks: those of a row hold a model between them, those of a column the same."""
    world_size = dist.get_world_size()
    shards = {"hybrid": group_size, "none": 1}.get(sharding, world_size)
    if shards == world_size:
        return init_device_mesh(device.type, (shards,), mesh_dim_names=("shard",))
    shape = (world_size // shards, shards)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def watch(model, api, optimizer, batch):
    """Take one step; return what the down projection of block 0 is at each moment, as rows."""
    block, layer, rows = model.blocks[0], model.blocks[0].down, []
    unit = layer if isinstance(layer, FSDP1) else block
    layer = getattr(layer, "module", layer)

    def weight():  # FSDP1 has only the flat parameter that holds it among others of its unit
        return layer.weight if api == "fsdp2" else next(unit.parameters())

    def note(moment):
        rows.append([moment, *describe(weight())])

    layer.register_forward_pre_hook(lambda *_: note("in the forward of block 0"))
    layer.register_full_backward_pre_hook(lambda *_: note("in its backward"))
    note("before the step")
    loss = loss_of(model, batch)
    note("after the forward")
    loss.backward()
    note("after the backward")
    rows.append(["its gradient", *describe(weight().grad)])
    optimizer.step()
    rows.append(["each Adam moment", *describe(optimizer.state[weight()]["exp_avg"])])
    return rows


def describe(tensor):
    """Say what a tensor is: its kind, the shape that this rank holds, and its bytes."""
    kind = "FlatParameter" if isinstance(tensor, FlatParameter) else type(tensor).__name__
    local = here(tensor)
    if local is not tensor:
        kind = f"DTensor, {', '.join(str(place) for place in tensor.placements)}"
    return kind, " x ".join(str(size) for size in local.shape), f"{local.nbytes:,}"


def here(tensor):
    """Return what this rank holds of a tensor, sharded or not."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def held_bytes(model, optimizer):
    """Return the bytes of parameters, gradients and optimizer state on the rank that has most."""
    kinds = (
        list(model.parameters()),
        [parameter.grad for parameter in model.parameters()],
        [state[n] for state in optimizer.state.values() for n in ("exp_avg", "exp_avg_sq")],
    )
    own = torch.tensor([sum(here(t).nbytes for t in tensors) for tensors in kinds])
    own = own.to(kinds[0][0].device)
    dist.all_reduce(own, op=dist.ReduceOp.MAX)
    return own.tolist()


def unit_bytes(config, api, auto_wrap, shards):
    """Return what each unit weighs in float32 with its padding, the rest last, by formula.

    FSDP2 cuts each parameter into rows, FSDP1 a unit's as one vector; padding makes parts equal.
    """
    model = Transformer(config)
    units = list(model.blocks)
    if api == "fsdp1" and auto_wrap == "size":  # whatever has WRAP_FROM weights by itself
        units = [layer for b in units for layer in (b.attention, b.gate, b.up, b.down)]
    units = [list(unit.parameters()) for unit in units]
    inside = {parameter for unit in units for parameter in unit}
    units.append([parameter for parameter in model.parameters() if parameter not in inside])
    if api == "fsdp1":
        return [4 * shards * -(-sum(p.numel() for p in unit) // shards) for unit in units]
    return [4 * shards * sum(-(-len(p) // shards) * p[0].numel() for p in unit) for unit in units]


def expected_of(units, sharding, shards, precision, api):
    """Return by formula what a rank holds, which collectives it calls and what a ring has it send.

    Sources: ZeRO paper, sections 5 and 7. The rest is not freed after forward: backward begins
    with it.
    """
    replicas = dist.get_world_size() // shards
    weights = sum(units)
    twice = sharding in ("full", "hybrid")  # gathered for forward, and again for backward
    gathered = 2 * weights - units[-1] if twice else weights
    gathered //= 2 if precision == "bf16-mixed" else 1
    sent = gathered * RING_FACTOR["all_gather"](shards)
    sent += weights * RING_FACTOR["reduce_scatter"](shards)
    sent += weights / shards * RING_FACTOR["all_reduce"](replicas)
    return {
        "bytes of parameters": weights // shards,
        "bytes of gradients": weights // shards,
        "bytes of Adam moments": 2 * weights // shards,
        "all-gathers": (2 * len(units) - 1 if twice else len(units)) * (shards > 1),
        "reduce-scatters": len(units) * (shards > 1),
        # With one rank, FSDP1 still has it sum with itself.
        "all-reduces": len(units) * (replicas > 1 or (api == "fsdp1" and shards == 1)),
        "bytes sent": round(sent),
    }


def measured_of(model, optimizer, counter, shards):
    """Return the same from the tensors that are there and the collectives that a step started."""
    kinds = {
        "all_gather": ("_allgather_base_", "allgather_"),
        "reduce_scatter": ("_reduce_scatter_base_",),
        "all_reduce": ("allreduce_",),
    }
    counts = [sum(counter.calls[name] for name in names) for names in kinds.values()]
    sent = 0
    for kind, names in kinds.items():
        handed = sum(counter.bytes[name] for name in names)
        if kind == "all_reduce":
            sent += handed * RING_FACTOR[kind](dist.get_world_size() // shards)
        else:  # a whole and a rank's part of it: shards + 1 parts
            sent += handed * shards / (shards + 1) * RING_FACTOR[kind](shards)
    return [*held_bytes(model, optimizer), *counts, round(sent)]


def loss_of(model, batch):
    """Return the mean cross-entropy. Shapes: batch is inputs and targets, (B, T) each."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())


def train(model, optimizer, batches):
    """Take a step on each batch; return the losses of this rank's samples."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def parse_sharding(text):
    aliases = {name: name for name in FSDP1_NAMES} | {old: new for new, old in FSDP1_NAMES.items()}
    if text not in aliases:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(aliases)}, not {text!r}")
    return aliases[text]


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    positive = cli.positive_int
    names = "one or several of full, grad-op, hybrid, none, or FSDP1's names of them (full)"
    add("--sharding", type=parse_sharding, nargs="+", default=["full"], metavar="NAME", help=names)
    group = "ranks between which hybrid shards (2; on several machines, those of one)"
    at_least_2 = functools.partial(cli.whole_number, low=2)
    add("--shard-group-size", type=at_least_2, help=group)
    add("--api", choices=("fsdp2", "fsdp1"), default="fsdp2", help="(fsdp2)")
    add("--auto-wrap", choices=("block", "size"), default="block", help="FSDP1's units (block)")
    add("--precision", choices=LOSS_TOLERANCE, default="32-true", help="(32-true)")
    add("--micro-batch-size", type=positive, default=8, help="per rank and step (8)")
    add("--seq-len", type=positive, default=64, help="tokens per sequence (64)")
    add("--max-steps", type=positive, default=5, help="training steps (5)")
    return parser.parse_args()


def group_size_of(args, world):
    """Settle --shard-group-size: the ranks of one machine, between which links are fast."""
    several = world.local_world_size < world.world_size
    size = args.shard_group_size or min(world.local_world_size if several else 2, world.world_size)
    if "hybrid" in args.sharding and world.world_size % size:
        raise cli.UsageError(
            f"--sharding hybrid: --shard-group-size {size} does not divide {world.world_size} ranks"
        )
    return size


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("02-fsdp/fsdp_basics.py", args, world, device)
        group_size = group_size_of(args, world)
        config = models.preset("tiny", args.seq_len)
        global_batch = args.micro_batch_size * world.world_size
        text = data.Sequences(data.load_text(), args.seq_len, global_batch * args.max_steps)
        weights = config.num_parameters()
        report.start(
            f"{weights:,} weights, {4 * weights:,} bytes in float32",
            f"global batch {global_batch} = {args.micro_batch_size} per rank x "
            f"{world.world_size} ranks",
        )

        def build():
            runtime.seed_everything(args.seed)
            return Transformer(config).to(device)

        alone = build()  # one process, on the global batch
        together = args.max_steps, global_batch
        every = data.batches_of(text, *together, 0, global_batch, device)
        expected_losses = train(alone, adam(alone), every)
        own = world.rank * args.micro_batch_size, args.micro_batch_size
        mine = list(data.batches_of(text, *together, *own, device))
        rows = []
        for sharding in args.sharding:
            mesh = mesh_of(sharding, group_size, device)
            model = build()
            shards = mesh.size(mesh.ndim - 1)
            built = describe(model.blocks[0].down.weight)
            if args.api == "fsdp2":
                shard(model, sharding, mesh, args.precision)
            else:
                model = shard_with_fsdp1(model, sharding, mesh, args, device)
            optimizer = adam(model)

            losses = train(model, optimizer, mine) / world.world_size

            dist.all_reduce(losses)
            optimizer.zero_grad()
            with measure.CollectiveCounter() as counter:
                moments = watch(model, args.api, optimizer, mine[0])
            units = unit_bytes(config, args.api, args.auto_wrap, shards)
            name = f"{args.api} {sharding}"
            if len(args.sharding) == 1:
                report.say(f"{len(units)} units, {world.world_size // shards} x {shards} ranks")
                rows = [["block 0's down.weight as built", *built], *moments]
            measured = measured_of(model, optimizer, counter, shards)
            expected = expected_of(units, sharding, shards, args.precision, args.api)
            for (what, right), value in zip(expected.items(), measured, strict=True):
                tolerance = 0.01 * right if what.startswith("bytes") else 0
                report.check(f"{name}: {what}", value, right, tolerance, "ZeRO, sections 5 and 7")
            tolerance = LOSS_TOLERANCE[args.precision]
            what = f"{name}: largest error of a loss"
            proofs.same_losses(report, losses, expected_losses, tolerance, what)
            if len(args.sharding) > 1:
                rows.append([sharding, *(f"{value:,}" for value in measured)])
            report.metrics[f"final_loss_{sharding}"] = losses[-1].item()
        if len(args.sharding) == 1:
            report.table(rows, ("moment", "kind", "shape on rank 0", "bytes"), names=2)
        else:
            headers = ("sharding", "parameters", "gradients", "Adam moments", "all-gathers",
                       "reduce-scatters", "all-reduces", "bytes sent")  # fmt: skip
            report.table(rows, headers)
        return report.finish(f"loss {losses[-1].item():.4f} after step {args.max_steps}")


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


if __name__ == "__main__":
    cli.run(main)
