"""Call collectives with a root, in groups, with unequal parts, early and wrongly.

    CPU   torchrun --standalone --nproc-per-node=4 04-nccl-operations/collective_ops.py
    GPU   torchrun --standalone --nproc-per-node=gpu \
              04-nccl-operations/collective_ops.py

`--topic groups` shows one topic. Look for: which ranks hold the result, when it is
there, and a wrong call that raises no error.

Sources: MPI: A Message-Passing Interface Standard, version 4.1, chapter 6;
docs.pytorch.org, "Distributed communication package".
"""

import torch
import torch.distributed as dist

from dist_common import cli, runtime
from dist_common.report import Report


def buffer_of(rank, device="cpu"):
    """Return a rank's numbers: 1 2 3 on rank 0 of 3, 11 12 13 on rank 1. (ranks,)"""
    ranks = dist.get_world_size()
    return torch.arange(1.0, ranks + 1, device=device) + 10 * rank


def sum_of(ranks):
    """Return the sum of the buffers of some ranks, computed without a collective."""
    return sum(buffer_of(rank) for rank in ranks)


# From one rank to all, and from all ranks to one


def call_with_root(report):
    """Scatter from rank 0, gather and reduce to rank 0."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = buffer_of(rank, report.run.device)
    is_root = rank == 0

    part = x.new_empty(1)
    dist.scatter(part, list(x.split(1)) if is_root else None, src=0)
    wrong = show(report, "scatter", x, part, buffer_of(0)[rank : rank + 1])

    parts = [torch.empty_like(x) for _ in range(ranks)] if is_root else None
    dist.gather(x, parts, dst=0)
    gathered = torch.cat(parts) if is_root else None
    expected = torch.cat([buffer_of(other) for other in range(ranks)])
    wrong += show(report, "gather", x, gathered, expected)

    total = x.clone()
    dist.reduce(total, dst=0)  # undefined on all other ranks: NCCL may leave part sums
    wrong += show(report, "reduce", x, total if is_root else None, sum_of(range(ranks)))
    report.check("root: wrong elements", wrong, 0, 0)


# Unequal parts


def call_with_unequal_parts(report):
    """Send r numbers to rank r, as a router sends tokens to experts."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sizes = list(range(ranks))  # how many numbers go to ranks 0, 1, 2 ...
    x = buffer_of(rank, report.run.device).repeat(ranks)[: sum(sizes)]

    received = x.new_empty(rank * ranks)  # both sides must know the sizes
    dist.all_to_all_single(received, x, [rank] * ranks, sizes)

    start = sum(sizes[:rank])
    expected = [buffer_of(other).repeat(ranks) for other in range(ranks)]
    expected = torch.cat([numbers[start : start + rank] for numbers in expected])
    wrong = show(report, "all-to-all, r numbers to rank r", x, received, expected)
    report.check("unequal: wrong elements", wrong, 0, 0)


# Some of the ranks


def make_group(divisions):
    """Return this rank's group. Every rank makes every group, in the same order."""
    for ranks in divisions:
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            group_of_this_rank = group
    return group_of_this_rank


def call_in_groups(report):
    """Place the ranks on a grid; sum within the rows, then within the columns."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    width = 2 if ranks % 2 == 0 else 1
    grid = torch.arange(ranks).view(-1, width)  # 4 ranks: rows 0 1 and 2 3
    row = make_group(grid.tolist())
    column = make_group(grid.T.tolist())
    x = buffer_of(rank, report.run.device)

    total = x.clone()
    dist.all_reduce(total, group=row)
    expected = sum_of(grid[rank // width].tolist())
    wrong = show(report, "all-reduce within the rows", x, total, expected)

    before = total.clone()
    dist.all_reduce(total, group=column)
    expected = sum_of(range(ranks))
    wrong += show(report, "then within the columns", before, total, expected)
    report.check("groups: wrong elements", wrong, 0, 0)


# Without waiting


def call_without_waiting(report):
    """Start an all-reduce on rank 0 and read before the other ranks have joined."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = buffer_of(rank, report.run.device)
    before = x.clone()
    early = None
    if rank == 0:
        work = dist.all_reduce(x, async_op=True)  # returns at once
        early = x.clone()  # too early: there is no error
    runtime.from_rank0(None, report.run.cpu_group)  # now the other ranks join
    if rank > 0:
        work = dist.all_reduce(x, async_op=True)
    work.wait()
    report.run.print0(f"\nasync: rank 0 reads {as_text(early)} before wait()")
    unchanged = count_equal(early, before) if rank == 0 else None
    unchanged = runtime.from_rank0(unchanged, report.run.cpu_group)
    report.check("async: rank 0's own numbers before wait()", unchanged, ranks, 0)
    wrong = show(report, "async, after wait()", before, x, sum_of(range(ranks)))
    report.check("async: wrong elements after wait()", wrong, 0, 0)


# Wrongly


def call_in_different_order(report):
    """Sum two tensors; rank 0 starts with the second one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    loss = buffer_of(rank, report.run.device)
    gradient = 100 * loss
    before = loss.clone()
    calls = [gradient, loss] if rank == 0 else [loss, gradient]
    for tensor in calls:
        dist.all_reduce(tensor)
    others = range(1, ranks)
    mixed = 100 * buffer_of(0) + sum_of(others)  # of the first call of every rank
    if rank == 0:
        mixed = buffer_of(0) + 100 * sum_of(others)
    unlike = show(report, "rank 0 in another order", before, loss, mixed)
    report.check("order: elements unlike the mixture", unlike, 0, 0)


# Printing and checking


def count_equal(tensor, expected):
    return int((tensor.cpu() == expected.cpu()).sum())


def show(report, title, before, after, expected):
    """Print every rank's numbers before and after. A collective.

    Returns: how many elements, over all ranks, differ from `expected`. A result of None
    is undefined and has no wrong elements.
    """
    wrong = 0
    if after is not None:
        wrong = max(after.numel(), len(expected)) - count_equal(after, expected)
    row = (f"{report.run.rank}", as_text(before), as_text(after))
    gathered = runtime.gather((row, wrong), report.run.cpu_group)
    report.run.print0(f"\n{title}")
    report.table([row for row, _ in gathered], ("rank", "before", "after"))
    return sum(wrong for _, wrong in gathered)


def as_text(numbers):
    if numbers is None:
        return "undefined"
    return " ".join(f"{number:g}" for number in numbers.tolist()) or "nothing"


TOPICS = {
    "root": call_with_root,
    "unequal": call_with_unequal_parts,
    "groups": call_in_groups,
    "async": call_without_waiting,
    "order": call_in_different_order,
}


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    parser.add_argument("--topic", choices=TOPICS, help="show one topic (all)")
    return parser.parse_args()


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as run:
        report = Report("04-nccl-operations/collective_ops.py", args, run)
        topics = [args.topic] if args.topic else list(TOPICS)
        for topic in topics:
            TOPICS[topic](report)
        run.print0("")
        return report.finish(f"topics: {', '.join(topics)}")


if __name__ == "__main__":
    cli.run(main)
