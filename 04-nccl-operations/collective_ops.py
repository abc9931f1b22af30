"""Run every collective on small buffers, and see what each rank has before and after it.

    CPU   torchrun --standalone --nproc-per-node=3 04-nccl-operations/collective_ops.py
    GPU   torchrun --standalone --nproc-per-node=gpu 04-nccl-operations/collective_ops.py

`--op all_gather` shows one. Look for: who has what afterwards, and what in training needs it. Each
result is compared with its definition in nccl_parts/collective_ops.py, computed without one.

Sources: docs.pytorch.org, "Distributed communication package"; MPI: A Message-Passing Interface
Standard, version 4.1, chapter 6.
"""

import functools
import time
import warnings

import torch
import torch.distributed as dist

from legacy_common import cli, runtime
from legacy_common.report import Report
from legacy_common.runtime import all_gather_single, reduce_scatter_single
from nccl_parts import collective_ops as part

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


def all_reduce(mine, op):
    scaled = dist._make_nccl_premul_sum(0.5)  # halves each buffer first
    op = scaled if op == "PREMUL_SUM" else getattr(dist.ReduceOp, op)
    dist.all_reduce(mine, op)
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


# Without a tensor, of several ones, of any Python objects.


def barrier(mine):
    arrived = functools.partial(dist.group.WORLD.get_group_store().add, "collective_ops/arrived")
    time.sleep(0.05 * dist.get_rank())  # the ranks arrive one after the other
    arrived(1)
    dist.barrier()
    return arrived(0)  # how many had arrived when the barrier let this rank through


def all_reduce_coalesced(mine):
    other = mine.flip(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its name is to go, and gloo has no other one yet
        dist.all_reduce_coalesced([mine, other])
    return mine + other


def broadcast_object_list(mine):
    box = [part.text_of(mine)]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def all_gather_object(mine):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, part.text_of(mine))
    return found


def gather_object(mine):
    found = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(part.text_of(mine), found, dst=0)
    return found


def scatter_object_list(mine):
    box = [None]
    dist.scatter_object_list(box, part.text_of(mine).split(), src=0)
    return box[0]


COLLECTIVES = (
    broadcast, scatter, reduce, gather, all_reduce, all_gather, all_gather_into_tensor,
    reduce_scatter_tensor, all_to_all, all_to_all_single, all_reduce_async, all_reduce_of_a_group,
    barrier, all_reduce_coalesced, broadcast_object_list, all_gather_object, gather_object,
    scatter_object_list,
)  # fmt: skip


def buffer_of(rank, ranks, dtype, device):
    """Return what a rank begins with: 1 2 3 ... on rank 0, 11 12 13 ... on rank 1. (ranks,)."""
    return torch.arange(1, ranks + 1, dtype=dtype, device=device) + 10 * rank


def run_one(name, device):
    """Run a collective; return what all ranks held before it and after it, on every rank."""
    function, *op = name.split()  # "all_reduce SUM" is all_reduce(mine, "SUM")
    call = {one.__name__: one for one in COLLECTIVES}[function]
    bits = name in part.LACKING["nccl"]  # those of whole numbers
    dtype = torch.int64 if bits else torch.float32
    mine = buffer_of(dist.get_rank(), dist.get_world_size(), dtype, device)
    begun = mine.clone()

    after = call(mine, *op)

    own = [held.cpu() if isinstance(held, torch.Tensor) else held for held in (begun, after)]
    return zip(*runtime.gather(own), strict=True)


def wrong_elements(result, defined, rounding):
    """Return how many elements of a rank's result are not as defined; of an undefined one, none."""
    if defined is None:
        return 0
    if not isinstance(defined, torch.Tensor):
        return int(result != defined)
    if result.shape != defined.shape:
        return max(result.numel(), defined.numel())
    right = (result == defined) | torch.isclose(result, defined, rtol=rounding, atol=0)
    return (~right).sum().item()


def show_and_check(report, name, before, after):
    """Print what all ranks held before and after; check it against the definition."""
    used, results = part.DEFINITIONS[name]
    defined = results([buffer.clone() for buffer in before])
    rounding = part.ROUNDING.get(name, 0.0)
    wrong = sum(wrong_elements(*pair, rounding) for pair in zip(after, defined, strict=True))
    report.check(f"{name}: elements not as defined", wrong, 0, 0, "MPI 4.1, chapter 6")
    report.say(f"\n{name}: {used}")
    rows = enumerate(zip(map(part.text_of, before), map(part.text_of, after), strict=True))
    report.table([(f"{rank}", *row) for rank, row in rows], ("rank", "before", "after"), names=3)


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    names = ", ".join(part.DEFINITIONS)
    parser.add_argument(
        "--op", choices=part.DEFINITIONS, metavar="NAME", help=f"one of {names} (all)"
    )
    return parser.parse_args()


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("04-nccl-operations/collective_ops.py", args, world, device)
        if world.world_size == 1:
            raise cli.UsageError("one rank has nobody to talk to: start 2 or more (torchrun)")
        backend = dist.get_backend()
        lacking = part.LACKING[backend]
        if args.op in lacking:
            other = {"gloo": "nccl", "nccl": "gloo"}[backend]
            raise cli.UsageError(f"--op {args.op}: {backend} has it not; {other} has")
        report.start(f"each rank begins with {world.world_size} numbers")
        names = [args.op] if args.op else [n for n in part.DEFINITIONS if n not in lacking]
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
            part.draw(report.output / "collectives.png", held)
        several = "s" * (len(held) != 1)
        return report.finish(f"{len(held)} collective{several} on {world.world_size} ranks")


if __name__ == "__main__":
    cli.run(main)
