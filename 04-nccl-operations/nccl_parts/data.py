"""What the ranks send, in bandwidth_test.py and pairwise_scan.py, and what they must receive."""

import argparse
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from legacy_common import cli
from nccl_parts.measurement import refuse_size

PERIOD = 4099  # numbers repeat after so many: a prime, so that two parts in wrong places differ
CHUNK = PERIOD * 2**12  # elements that are checked at a time: copies of all would not fit
ALIGNED = 16  # bytes: nccl-tests aligns the parts of a buffer so
TYPES = {  # by nccl-tests' names
    "int8": torch.int8, "uint8": torch.uint8, "int32": torch.int32, "int64": torch.int64,
    "half": torch.float16, "float": torch.float32, "double": torch.float64,
    "bfloat16": torch.bfloat16, "f8e4m3": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2,
}  # fmt: skip
REDUCTIONS = {
    "sum": (dist.ReduceOp.SUM, torch.add),
    "prod": (dist.ReduceOp.PRODUCT, torch.mul),
    "max": (dist.ReduceOp.MAX, torch.maximum),
    "min": (dist.ReduceOp.MIN, torch.minimum),
    "avg": (dist.ReduceOp.AVG, torch.add),
    "mulsum": (dist._make_nccl_premul_sum(2.0), torch.add),
}
NCCL_ONLY = ("mulsum", "f8e4m3", "f8e5m2")


def refuse(reduces: bool, args: argparse.Namespace, world, device: torch.device) -> None:
    """Refuse in one line what the backend lacks, or what does not fit into memory. A collective."""
    if args.root >= world.world_size:
        raise cli.UsageError(f"-r {args.root} must be below {world.world_size}, the ranks")
    for flag, value in (("-o", reduces and args.op), ("-d", args.datatype)):
        if dist.get_backend() == "gloo" and value in NCCL_ONLY:
            raise cli.UsageError(f"{flag} {value}: gloo has it not, nccl has")
    refuse_size("-e", args.maxbytes, world, device)


class Call(NamedTuple):
    """Who calls a collective, and how: the same on all ranks but for `rank`."""

    group: Any  # None: all ranks
    rank: int  # in the group, as `root`
    ranks: int
    root: int
    op: Any = None  # torch.distributed's reduction


TOTAL = -1  # not one rank's numbers, but the reduction of all
# What a rank must hold afterwards, part by part: (whose numbers, from which one on, how many); no
# part: nothing is defined. `n` is how many numbers a part has, or a buffer without parts.
EXPECTED: dict[str, Callable[[Call, int], list[tuple[int, int, int]]]] = {
    "all_reduce": lambda call, n: [(TOTAL, 0, n)],
    "all_gather": lambda call, n: [(sender, 0, n) for sender in range(call.ranks)],
    "reduce_scatter": lambda call, n: [(TOTAL, call.rank * n, n)],
    "alltoall": lambda call, n: [(sender, call.rank * n, n) for sender in range(call.ranks)],
    "alltoallv": lambda call, n: [uneven_part(sender, call, n) for sender in range(call.ranks)],
    "broadcast": lambda call, n: [(call.root, 0, n)],
    "reduce": lambda call, n: [(TOTAL, 0, n)] * (call.rank == call.root),
    "gather": lambda call, n: [(s, 0, n) for s in range(call.ranks) if call.rank == call.root],
    "scatter": lambda call, n: [(call.root, call.rank * n, n)],
    "sendrecv": lambda call, n: [((call.rank - 1) % call.ranks, 0, n)],
}


def uneven_lengths(rank: int, ranks: int, mean: int) -> list[int]:
    """Return how many numbers a rank sends to each: as many as it receives from that one."""
    unit = 2 * mean // (ranks + 1)
    return [(1 + (rank + other) % ranks) * unit for other in range(ranks)]


def uneven_part(sender: int, call: Call, mean: int) -> tuple[int, int, int]:
    lengths = uneven_lengths(sender, call.ranks, mean)
    return sender, sum(lengths[: call.rank]), lengths[call.rank]


def noise(rank: int) -> torch.Tensor:
    """Return the period of what a rank sends when it is timed: no zeros, 1 to 16. (PERIOD,).

    Zeros cost a GPU less power than data, hence a higher clock; links may compress them.
    """
    return 1.0 + 15.0 * torch.rand(PERIOD, generator=torch.Generator().manual_seed(rank))


def fill(tensor: torch.Tensor, period: torch.Tensor) -> torch.Tensor:
    """Repeat a period until a tensor is full; return the tensor."""
    whole = len(tensor) // PERIOD * PERIOD
    period = period.to(tensor)
    tensor[:whole].view(-1, PERIOD)[:] = period
    tensor[whole:] = period[: len(tensor) - whole]
    return tensor


def numbers(rank: int, ranks: int, redop: str) -> torch.Tensor:
    """Return the period of what a rank sends when the data is checked: whole numbers. (PERIOD,)."""
    drawn = torch.randint(0, 3, (PERIOD,), generator=torch.Generator().manual_seed(rank))
    if redop in ("max", "min"):
        return drawn.float()
    # At each place 4 ranks at most take part, for 8 at most: exact in 8 bits too.
    every = -(-ranks // 4)
    takes_part = torch.arange(PERIOD) % every == rank % every
    if redop == "prod":
        return 1.0 + drawn % 2 * takes_part  # 16 at most
    return (drawn * takes_part).float()


def count_wrong(
    received: torch.Tensor, parts: list[tuple[int, int, int]], ranks: int, redop: str
) -> int:
    """Return how many elements differ, by more than rounding, from what the definition says."""
    periods = [numbers(rank, ranks, redop) for rank in range(ranks)]
    total = functools.reduce(REDUCTIONS[redop][1], periods)
    periods.append(total * {"avg": 1 / ranks, "mulsum": 2}.get(redop, 1))  # the last one: TOTAL
    slack = 2 * torch.finfo(received.dtype).eps if redop == "avg" else 0  # it divides
    only_converts = received.itemsize == 1 and received.is_floating_point()  # float8
    wrong = start = 0
    for owner, first, length in parts:
        got = received[start : start + length]
        wrong += length - len(got)
        start += length
        for piece in got.split(CHUNK):
            right = fill(torch.empty_like(piece), periods[owner].roll(-first))
            if only_converts:
                piece, right = piece.float(), right.float()
            wrong += int((~torch.isclose(piece, right, rtol=slack, atol=0)).sum())
    return wrong


def buffers_of(collective, size: int, dtype, rank: int, ranks: int, in_place: bool, device):
    """Return what one rank sends from and receives into, in place one or a part of the other.

    And the count that nccl-tests prints, 0 where `size`, in bytes, is too small.
    """
    count = size // dtype.itemsize
    aligned = ALIGNED // dtype.itemsize
    if collective.uneven:
        units = ranks * (ranks + 1) // 2
        count = count // units // aligned * aligned * (ranks + 1) // 2
    elif collective.in_parts:
        count = count // ranks // aligned * aligned
    lengths = {"part": count, "whole": count * ranks if collective.in_parts else count}
    sides = lengths[collective.sends], lengths[collective.receives]
    if not in_place:
        return *(torch.zeros(n, dtype=dtype, device=device) for n in sides), count
    whole = torch.zeros(max(sides), dtype=dtype, device=device)
    own = whole[rank * count : (rank + 1) * count]
    return *(whole if n == len(whole) else own for n in sides), count
