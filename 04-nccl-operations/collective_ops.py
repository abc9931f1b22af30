"""Run every collective on small buffers, and see what each rank has before and after it.

    CPU   torchrun --standalone --nproc-per-node=3 04-nccl-operations/collective_ops.py
    GPU   torchrun --standalone --nproc-per-node=gpu 04-nccl-operations/collective_ops.py

`--op all_gather` shows one. Look for: who has what afterwards, and what in training
needs just that. Each result is held against the definition, worked out without a collective.

Sources: docs.pytorch.org, "Distributed communication package"; MPI: A Message-Passing Interface
Standard, version 4.1, chapter 6.
"""

import functools
import math
import operator
import time
import warnings

import torch
import torch.distributed as dist

from dist_common import cli, runtime
from dist_common.report import Report

# torch 2.13 gave them these names; until then they were all_gather_into_tensor and so on.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

COLLECTIVES = {}  # name: (function, definition, what training uses it for, dtype)
LACKING = {  # by backend; the other one has it
    "gloo": ("all_reduce PREMUL_SUM",),
    "nccl": ("all_reduce BAND", "all_reduce BOR", "all_reduce BXOR"),
}


def shown(used, defined, name=None, dtype=torch.float32):
    """Have the picture show a function; `defined` turns all ranks' buffers into all results.

    A result of None is one that the collective leaves undefined on that rank.
    """

    def note(function):
        COLLECTIVES[name or function.__name__] = function, defined, used, dtype
        return function

    return note


# From one rank to all, and from all to one. `mine` is this rank's buffer, N numbers for N ranks.


@shown("weights of rank 0, before the first step of DDP", lambda x: [x[0]] * len(x))
def broadcast(mine):
    dist.broadcast(mine, src=0)
    return mine


@shown("a loss that rank 0 prints; ZeRO's gradients, to their owner",
       lambda x: [sum(x)] + [None] * (len(x) - 1))  # fmt: skip
def reduce(mine):
    dist.reduce(mine, dst=0)
    return mine if dist.get_rank() == 0 else None


@shown("samples of all ranks, for rank 0 to save",
       lambda x: [torch.cat(x)] + [None] * (len(x) - 1))  # fmt: skip
def gather(mine):
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.gather(mine, parts if dist.get_rank() == 0 else None, dst=0)
    return torch.cat(parts) if dist.get_rank() == 0 else None


@shown("a batch that rank 0 alone has read", lambda x: list(x[0].chunk(len(x))))
def scatter(mine):
    own = mine.new_empty(1)
    parts = list(mine.chunk(dist.get_world_size())) if dist.get_rank() == 0 else None
    dist.scatter(own, parts, src=0)
    return own


# From all to all.


def all_reduce(op, mine):
    dist.all_reduce(mine, op=op)
    return mine


REAL, WHOLE = torch.float32, torch.int64
for name, used, rule, dtype in (
    ("SUM", "gradients, in DDP", sum, REAL),
    ("AVG", "gradients, and no division after", lambda x: sum(x) / len(x), REAL),
    ("PRODUCT", "nothing common", math.prod, REAL),
    ("MIN", "the memory that is free on every rank", lambda x: torch.stack(x).amin(0), REAL),
    ("MAX", "the time of the slowest rank", lambda x: torch.stack(x).amax(0), REAL),
    ("BAND", "flags that all ranks raised", lambda x: functools.reduce(operator.and_, x), WHOLE),
    ("BOR", "flags that any rank raised", lambda x: functools.reduce(operator.or_, x), WHOLE),
    ("BXOR", "a checksum", lambda x: functools.reduce(operator.xor, x), WHOLE),
):  # fmt: skip
    run = functools.partial(all_reduce, getattr(dist.ReduceOp, name))
    define = functools.partial(lambda rule, x: [rule(x)] * len(x), rule)
    shown(used, define, f"all_reduce {name}", dtype)(run)


@shown("gradients scaled on the way, NCCL's alone", lambda x: [sum(x) / 2] * len(x),
       "all_reduce PREMUL_SUM")  # fmt: skip
def all_reduce_scaled(mine):
    dist.all_reduce(mine, op=dist._make_nccl_premul_sum(0.5))
    return mine


@shown("metrics of each rank, for all", lambda x: [torch.cat(x)] * len(x))
def all_gather(mine):
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return torch.cat(parts)


@shown("FSDP's and ZeRO-3's weights, before a layer computes", lambda x: [torch.cat(x)] * len(x))
def all_gather_into_tensor(mine):
    whole = mine.new_empty(len(mine) * dist.get_world_size())
    all_gather_single(whole, mine)
    return whole


@shown("FSDP's gradients, after a layer's backward", lambda x: list(sum(x).chunk(len(x))))
def reduce_scatter_tensor(mine):
    own = mine.new_empty(1)
    reduce_scatter_single(own, mine)
    return own


@shown("sequences for heads, in Ulysses' attention",
       lambda x: [torch.stack(x)[:, rank].clone() for rank in range(len(x))])  # fmt: skip
def all_to_all(mine):
    sent = list(mine.chunk(dist.get_world_size()))
    received = [torch.empty_like(part) for part in sent]
    dist.all_to_all(received, sent)
    return torch.cat(received)


def dealt_unevenly(x):
    """The last rank is dealt two numbers of each buffer, the first one none, the others one."""
    last = len(x) - 1
    return [
        torch.cat([b[max(0, rank - 1) : rank + (rank == last)] for b in x]) if rank else x[0][:0]
        for rank in range(len(x))
    ]


@shown("tokens to their experts, as many as each expert gets", dealt_unevenly)
def all_to_all_single(mine):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sent = [0] + [1] * (ranks - 2) + [2]
    received = mine.new_empty(sent[rank] * ranks)
    dist.all_to_all_single(received, mine, [sent[rank]] * ranks, sent)
    return received


# The same in other forms.


@shown("several small tensors at the price of one", lambda x: [sum(x) + sum(x).flip(0)] * len(x))
def all_reduce_coalesced(mine):
    other = mine.flip(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a new name that is to come
        dist.all_reduce_coalesced([mine, other])
    return mine + other


@shown("gradients, while backward goes on", lambda x: [sum(x)] * len(x))
def all_reduce_async(mine):
    work = dist.all_reduce(mine, async_op=True)  # returns at once: compute something else here
    work.wait()
    return mine


@shown("gradients of a tensor-parallel layer; one machine's ranks",
       lambda x: [sum(x[rank % 2 :: 2]) for rank in range(len(x))])  # fmt: skip
def all_reduce_of_a_group(mine):
    # Every rank makes every group, in the same order, also those that it is not in.
    groups = [dist.new_group(list(range(dist.get_world_size()))[first::2]) for first in (0, 1)]
    dist.all_reduce(mine, group=groups[dist.get_rank() % 2])
    return mine


@shown("rank 0 has downloaded the data: now all may read", lambda x: [len(x)] * len(x))
def barrier(mine):
    arrived = functools.partial(dist.group.WORLD.get_group_store().add, "collective_ops/arrived")
    time.sleep(0.05 * dist.get_rank())  # they come one after the other
    arrived(1)
    dist.barrier()
    return arrived(0)


@shown("settings; pickled, so not for large tensors", lambda x: [picture(x[0])] * len(x))
def broadcast_object_list(mine):
    box = [picture(mine)]
    dist.broadcast_object_list(box, src=0)
    return box[0]


@shown("what each rank found, of any length", lambda x: [[picture(b) for b in x]] * len(x))
def all_gather_object(mine):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, picture(mine))
    return found


@shown("the same, for rank 0 to print", lambda x: [[picture(b) for b in x]] + [None] * (len(x) - 1))
def gather_object(mine):
    found = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(picture(mine), found, dst=0)
    return found


@shown("a file name for each rank", lambda x: picture(x[0]).split())
def scatter_object_list(mine):
    box = [None]
    dist.scatter_object_list(box, picture(mine).split(), src=0)
    return box[0]


def difference(result, right):
    """Return how many elements of a result are not as defined; of what is undefined, none."""
    if right is None:
        return 0
    if not isinstance(right, torch.Tensor):
        return int(result != right)
    if result.shape != right.shape:
        return max(result.numel(), right.numel())
    return (result != right).sum().item()


def picture(value):
    """Return a buffer as it is printed."""
    if value is None:
        return "undefined"
    if isinstance(value, torch.Tensor):
        return " ".join(f"{number:g}" for number in value.tolist()) or "nothing"
    return " | ".join(value) if isinstance(value, list) else str(value)


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    add("--op", choices=COLLECTIVES, metavar="NAME", help=f"one of {', '.join(COLLECTIVES)} (all)")
    return parser.parse_args()


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        ranks = world.world_size
        report = Report("04-nccl-operations/collective_ops.py", args, world, device)
        if ranks == 1:
            raise cli.UsageError("one rank has nobody to talk to: start 2 or more (torchrun)")
        backend = dist.get_backend()
        lacking = LACKING[backend]
        other = {"gloo": "nccl", "nccl": "gloo"}[backend]
        if args.op in lacking:
            raise cli.UsageError(f"--op {args.op}: {backend} has it not; {other} has")
        report.start(f"each rank begins with {ranks} numbers")
        names = [args.op] if args.op else [name for name in COLLECTIVES if name not in lacking]
        for name in names:
            run, defined, used, dtype = COLLECTIVES[name]
            mine = torch.arange(1, ranks + 1, dtype=dtype, device=device) + 10 * world.rank
            begun = mine.clone()

            try:
                after = run(mine)
            except RuntimeError as error:  # gloo had no all_to_all in torch 2.11: the same on all
                if "does not support" not in str(error) or args.op:
                    raise
                report.say(f"\n{name} is left out: {error}")
                continue

            own = [t.cpu() if isinstance(t, torch.Tensor) else t for t in (begun, after)]
            before, after = zip(*runtime.gather(own), strict=True)
            right = defined([buffer.clone() for buffer in before])
            wrong = sum(difference(*pair) for pair in zip(after, right, strict=True))
            report.check(f"{name}: elements not as defined", wrong, 0, 0, "MPI 4.1, chapter 6")
            report.say(f"\n{name}: {used}")
            rows = [
                (str(rank), picture(before[rank]), picture(after[rank])) for rank in range(ranks)
            ]
            report.table(rows, ("rank", "before", "after"), names=3)
        report.say()
        several = "s" * (len(report.checks) != 1)
        return report.finish(f"{len(report.checks)} collective{several} on {ranks} ranks")


if __name__ == "__main__":
    cli.run(main)
