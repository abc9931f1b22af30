"""Run every collective on small buffers, and see what each rank has before and after it.

    CPU   torchrun --standalone --nproc-per-node=3 04-nccl-operations/collective_ops.py
    GPU   torchrun --standalone --nproc-per-node=gpu 04-nccl-operations/collective_ops.py

`--op all_gather` shows one. Look for: who has what afterwards, and what in training needs it. Each
result is compared with its definition in collective_definitions.py, computed without a collective.

Sources: docs.pytorch.org, "Distributed communication package"; MPI: A Message-Passing Interface
Standard, version 4.1, chapter 6.
"""

import functools

import torch
import torch.distributed as dist

from collective_definitions import (
    DEFINITIONS,
    LACKING,
    buffer_of,
    draw,
    refuse_lacking,
    show_and_check,
)
from collective_variants import VARIANTS
from dist_common import cli, runtime
from dist_common.report import Report

# torch 2.13 gave them these names; until then they were all_gather_into_tensor and so on.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# From one rank to all, and from all to one. `mine` is this rank's buffer: N numbers for N ranks.


def broadcast(mine):
    dist.broadcast(mine, src=0)
    return mine


def scatter(mine):
    own = mine.new_empty(1)
    parts = list(mine.chunk(dist.get_world_size())) if dist.get_rank() == 0 else None
    dist.scatter(own, parts, src=0)
    return own


def reduce(mine):
    dist.reduce(mine, dst=0)
    return mine if dist.get_rank() == 0 else None  # elsewhere the buffer is undefined now


def gather(mine):
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.gather(mine, parts if dist.get_rank() == 0 else None, dst=0)
    return torch.cat(parts) if dist.get_rank() == 0 else None


# From all to all.


def all_reduce(op, mine):
    dist.all_reduce(mine, op=op)
    return mine


def all_gather(mine):
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return torch.cat(parts)


def all_gather_into_tensor(mine):
    whole = mine.new_empty(len(mine) * dist.get_world_size())
    all_gather_single(whole, mine)
    return whole


def reduce_scatter_tensor(mine):
    own = mine.new_empty(1)
    reduce_scatter_single(own, mine)
    return own


def all_to_all(mine):
    sent = list(mine.chunk(dist.get_world_size()))
    received = [torch.empty_like(part) for part in sent]
    dist.all_to_all(received, sent)
    return torch.cat(received)


def all_to_all_single(mine):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sent = [0] + [1] * (ranks - 2) + [2]  # numbers for rank 0, for the others, for the last one
    received = mine.new_empty(sent[rank] * ranks)
    dist.all_to_all_single(received, mine, [sent[rank]] * ranks, sent)
    return received


# Without waiting, and among some of the ranks.


def all_reduce_async(mine):
    work = dist.all_reduce(mine, async_op=True)  # returns at once: compute something else here
    work.wait()
    return mine


def all_reduce_of_a_group(mine):
    # Every rank makes every group, in the same order, also those that it is not in.
    groups = [dist.new_group(list(range(dist.get_world_size()))[first::2]) for first in (0, 1)]
    dist.all_reduce(mine, group=groups[dist.get_rank() % 2])
    return mine


HERE = (
    broadcast, scatter, reduce, gather, all_gather, all_gather_into_tensor, reduce_scatter_tensor,
    all_to_all, all_to_all_single, all_reduce_async, all_reduce_of_a_group,
)  # fmt: skip


def function_of(name):
    """Return the function that calls a collective of DEFINITIONS, here or in VARIANTS."""
    kind, _, op = name.partition(" ")
    if op and name not in VARIANTS:
        return functools.partial(all_reduce, getattr(dist.ReduceOp, op))
    return VARIANTS.get(name) or {function.__name__: function for function in HERE}[kind]


def run_one(name, device):
    """Run a collective; return what all ranks held before it and after it, on every rank."""
    ranks = dist.get_world_size()
    mine = buffer_of(dist.get_rank(), ranks, DEFINITIONS[name].dtype, device)
    begun = mine.clone()

    after = function_of(name)(mine)

    own = [held.cpu() if isinstance(held, torch.Tensor) else held for held in (begun, after)]
    return zip(*runtime.gather(own), strict=True)


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    names = ", ".join(DEFINITIONS)
    parser.add_argument("--op", choices=DEFINITIONS, metavar="NAME", help=f"one of {names} (all)")
    return parser.parse_args()


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("04-nccl-operations/collective_ops.py", args, world, device)
        if world.world_size == 1:
            raise cli.UsageError("one rank has nobody to talk to: start 2 or more (torchrun)")
        backend = dist.get_backend()
        refuse_lacking(args.op, backend)
        report.start(f"each rank begins with {world.world_size} numbers")
        names = [args.op] if args.op else [n for n in DEFINITIONS if n not in LACKING[backend]]
        held = {}
        for name in names:
            try:
                before, after = run_one(name, device)
            except RuntimeError as error:  # gloo had no all_to_all in torch 2.11: the same on all
                if "does not support" not in str(error) or args.op:
                    raise
                report.say(f"\n{name} is left out: {error}")
                continue
            show_and_check(report, name, before, after)
            held[name] = before, after
        report.say()
        if report.output and world.is_rank0:
            draw(report.output / "collectives.png", held)
        several = "s" * (len(held) != 1)
        return report.finish(f"{len(held)} collective{several} on {world.world_size} ranks")


if __name__ == "__main__":
    cli.run(main)
