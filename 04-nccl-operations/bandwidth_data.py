"""What the ranks of bandwidth_test.py send, and what each of them must receive; its flags' limits.

Whole numbers, so that sums and products are exact in 8 bits too, on any number of ranks.
"""

import argparse
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dist_common import cli, measure, runtime

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


@dataclass(frozen=True)
class Call:
    """Who calls a collective, and how: the same on all ranks but for `rank`."""

    group: Any  # None: all ranks
    rank: int  # in the group, as `root`
    ranks: int
    root: int
    op: Any  # torch.distributed's reduction


@dataclass(frozen=True)
class Part:
    """A part of a buffer: `length` numbers of a period, from the one at `start` on."""

    period: torch.Tensor
    start: int
    length: int


@dataclass(frozen=True)
class Sent:
    """What all ranks send, seen from one of them. Shapes: a period is (PERIOD,)."""

    periods: list[torch.Tensor]  # by rank
    total: torch.Tensor  # their reduction
    rank: int
    root: int
    count: int  # numbers in a part, or in the buffer of a collective without parts


# What a rank must hold afterwards, part by part; no part: its buffer is undefined.


def the_total(sent: Sent) -> list[Part]:
    return [Part(sent.total, 0, sent.count)]


def the_total_on_the_root(sent: Sent) -> list[Part]:
    return the_total(sent) if sent.rank == sent.root else []


def own_part_of_the_total(sent: Sent) -> list[Part]:
    return [Part(sent.total, sent.rank * sent.count, sent.count)]


def everyones_part(sent: Sent) -> list[Part]:
    return [Part(period, 0, sent.count) for period in sent.periods]


def everyones_part_on_the_root(sent: Sent) -> list[Part]:
    return everyones_part(sent) if sent.rank == sent.root else []


def own_part_from_each(sent: Sent) -> list[Part]:
    return [Part(period, sent.rank * sent.count, sent.count) for period in sent.periods]


def own_part_from_the_root(sent: Sent) -> list[Part]:
    return [own_part_from_each(sent)[sent.root]]


def the_buffer_of_the_root(sent: Sent) -> list[Part]:
    return [Part(sent.periods[sent.root], 0, sent.count)]


def the_buffer_of_the_previous(sent: Sent) -> list[Part]:
    return [Part(sent.periods[sent.rank - 1], 0, sent.count)]


def own_uneven_part_from_each(sent: Sent) -> list[Part]:
    parts = []
    for sender, period in enumerate(sent.periods):
        lengths = uneven_lengths(sender, len(sent.periods), sent.count)
        parts.append(Part(period, sum(lengths[: sent.rank]), lengths[sent.rank]))
    return parts


def uneven_lengths(rank: int, ranks: int, mean: int) -> list[int]:
    """Return how many numbers a rank sends to each: 1 to `ranks` units, for each another number.

    A rank receives as many as it sends, `ranks` times the mean, and sends rank r what it gets.
    """
    unit = 2 * mean // (ranks + 1)
    return [(1 + (rank + other) % ranks) * unit for other in range(ranks)]


def numbers(rank: int, ranks: int, redop: str) -> torch.Tensor:
    """Return the period of what a rank sends when the data is checked."""
    drawn = torch.randint(0, 3, (PERIOD,), generator=torch.Generator().manual_seed(rank))
    if redop in ("max", "min"):
        return drawn.float()
    # At each place 4 ranks at most take part, for 8 at most: exact in 8 bits too.
    every = -(-ranks // 4)
    takes_part = torch.arange(PERIOD) % every == rank % every
    if redop == "prod":
        return 1.0 + drawn % 2 * takes_part  # 16 at most
    return (drawn * takes_part).float()


def noise(rank: int) -> torch.Tensor:
    """Return the period of what a rank sends when it is timed: no zeros, 1 to 16.

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


@dataclass(frozen=True)
class Buffers:
    """What a rank sends from and receives into, and the count that nccl-tests prints."""

    sent: torch.Tensor
    received: torch.Tensor  # in place, the memory of `sent` or a part of it
    count: int

    @property
    def nbytes(self) -> int:
        return max(self.sent.nbytes, self.received.nbytes)


def buffers_of(collective, size: int, dtype, rank: int, ranks: int, in_place: bool, device):
    """Make one rank's buffers for a size in bytes. Where that is too small, `count` is 0.

    `collective` says by `sends`, `receives`, `in_parts` and `uneven` what they hold.
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
        return Buffers(*(torch.zeros(n, dtype=dtype, device=device) for n in sides), count)
    whole = torch.zeros(max(sides), dtype=dtype, device=device)
    own = whole[rank * count : (rank + 1) * count]
    return Buffers(*(whole if n == len(whole) else own for n in sides), count)


def count_wrong(
    received: torch.Tensor, expected: Callable[[Sent], list[Part]],
    rank: int, ranks: int, root: int, count: int, redop: str,
) -> int:  # fmt: skip
    """Return how many elements differ, by more than rounding, from what the definition says."""
    periods = [numbers(other, ranks, redop) for other in range(ranks)]
    total = functools.reduce(REDUCTIONS[redop][1], periods)
    if redop == "avg":
        total = total / ranks
    if redop == "mulsum":
        total = total * 2
    slack = 2 * torch.finfo(received.dtype).eps if redop == "avg" else 0  # it divides
    wrong = start = 0
    for part in expected(Sent(periods, total, rank, root, count)):
        got = received[start : start + part.length]
        period = part.period.roll(-part.start)
        wrong += part.length - len(got)
        wrong += sum(_wrong_in(piece, period, slack) for piece in got.split(CHUNK))
        start += part.length
    return wrong


def _wrong_in(piece: torch.Tensor, period: torch.Tensor, slack: float) -> int:
    right = fill(torch.empty_like(piece), period)
    if piece.itemsize == 1 and piece.is_floating_point():  # float8 can only be converted
        piece, right = piece.float(), right.float()
    return int((~torch.isclose(piece, right, rtol=slack, atol=0)).sum())


# flags


def byte_size(text: str) -> int:
    """Parse 8, 4K, 128M or 1G: powers of 1024, as nccl-tests does."""
    match = re.fullmatch(r"(\d+)([KMG]?)", text, re.IGNORECASE)
    if not match or not int(match[1]):
        raise argparse.ArgumentTypeError(f"must be a size like 8, 4K, 128M or 1G, not {text!r}")
    return int(match[1]) * 1024 ** " KMG".index(match[2].upper() or " ")


def not_here(text: str) -> None:
    """Refuse nccl-tests' flags for ranks in one process."""
    raise argparse.ArgumentTypeError("ranks come from the launcher: torchrun --nproc-per-node")


def refuse(reduces: bool, args: argparse.Namespace, world, device) -> None:
    """Refuse in one line what the backend lacks, or what does not fit into memory. A collective."""
    if args.root >= world.world_size:
        raise cli.UsageError(f"-r {args.root} must be below {world.world_size}, the ranks")
    if dist.get_backend() == "gloo":
        if args.op in NCCL_ONLY and reduces:
            raise cli.UsageError(f"-o {args.op}: gloo has it not, nccl has")
        if args.datatype in NCCL_ONLY:
            raise cli.UsageError(f"-d {args.datatype}: gloo has it not, nccl has")
    refuse_size("-e", args.maxbytes, world, device)


def refuse_size(flag: str, size: int, world, device) -> None:
    """Refuse two buffers of `size` bytes that do not fit into a rank's memory. A collective."""
    free = measure.available_memory(device)
    free //= world.local_world_size if device.type == "cpu" else 1  # ranks share a machine's
    most = int(0.9 * min(runtime.gather(free))) // 2
    if size > most:
        raise cli.UsageError(
            f"{flag} {size}: two buffers of it do not fit into a rank's memory; at most "
            f"{flag} {most // 2**20}M does"
        )
