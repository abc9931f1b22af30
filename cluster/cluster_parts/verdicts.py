"""What the programs here judge alike: ranks that differ from most, that wait, that are late."""

import linecache
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

# A rank that says one of these waited for another one, or lost it. It is seldom the cause.
VICTIM = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|Socket closed|[Tt]imed out waiting"
    r"|wait timeout after|Received data size doesn't match|waiting for clients"
    r"|failed to recv|recvValue failed",
    re.I,
)
LATE_S = 0.3  # behind the first in all calls together: more than a busy machine's noise
ENOUGH_CALLS, LATE_PART = 10, 0.3  # of the time between two calls
NETWORK = "look at the network: ss -tn shows bytes that no peer acknowledges"


class Verdict(NamedTuple):
    """What a tool says of a job, and the ranks that it names: none where it cannot tell."""

    text: str
    named: frozenset[int] = frozenset()
    kind: str = "calls"  # "send", "order": who closes a circle; "late": who is slow


def ranks_of(numbers) -> str:
    """Return "rank 1" or "ranks 0, 2"."""
    numbers = sorted(numbers)
    return f"rank{'s' * (len(numbers) != 1)} {', '.join(map(str, numbers))}"


def alike(values: Mapping[int, object]) -> dict[str, list[int]]:
    """Return the ranks of each value."""
    found: dict[str, list[int]] = {}
    for rank, value in values.items():
        found.setdefault(str(value), []).append(rank)
    return found


def odd_ones_out(values: Mapping[int, object]) -> frozenset[int]:
    """Return the ranks whose value differs from what most ranks have; none without a majority."""
    most = max(alike(values).values(), key=len)
    return frozenset(values) - frozenset(most) if 2 * len(most) > len(values) else frozenset()


def compare(values: Mapping[int, object], what: str) -> Verdict:
    """Say which rank has another value than most; of two that differ none can be named."""
    if not values:
        return Verdict(f"{what}: there is nothing to compare")
    parts = alike(values)
    if len(parts) == 1:
        return Verdict(f"{what} is the same on all ranks: {next(iter(parts))}")
    told = "; ".join(f"{ranks_of(ranks)}: {value}" for value, ranks in parts.items())
    named = odd_ones_out(values)
    advice = f"look at {ranks_of(named)}" if named else "compare them"
    return Verdict(f"{what} differs: {told}: {advice}", named)


def shortened(line: str) -> str:
    """Leave out of a line where PyTorch's source says it, and to which address."""
    line = re.sub(r"^(\[rank\d\]:)?\[[EWI]\d+ [^]]+\] (\[c10d\] )?|what\(\): ", "", line.strip())
    line = re.sub(r"\[(enforce fail at )?/[^]]+\] ", "", line)
    line = re.sub(r"remote=\[([\d.]+)\]:\d+(\$\d)?", r"remote=\1", line)
    line = re.sub(r"\[[\da-f.:]+\]:\d+", "PEER", line)
    line = re.sub(r"\. This is typically caused by .*", "", line)  # from torch 2.14 on
    line = re.sub(r'File ".*/(\w+\.py)", line \d+', r'File "\1"', line)
    return " ".join(re.sub(r"\b\d{5,}\b", "NUMBER", line).split())


def latest(at: torch.Tensor) -> Verdict | None:
    """Name the rank that comes last to the same calls. Shapes: (ranks, calls). Units: s.

    By seconds in all of them; or, in ten calls and more, by what it holds up the middle one.
    """
    behind, calls = at - at.amin(0), at.shape[1]
    (most, *others), (last, *_) = map(torch.Tensor.tolist, behind.sum(1).sort(descending=True))
    if most > LATE_S and most > 3 * max(others, default=0.0):
        text = f"rank {last} comes last: {most:.1f} s behind the first in {calls} calls"
        return Verdict(text, frozenset([last]), "late")
    if calls < ENOUGH_CALLS:
        return None
    (most, *others), (last, *_) = map(
        torch.Tensor.tolist, behind.median(1).values.sort(descending=True)
    )
    between = at.amin(0).diff().median().item()
    if most > LATE_PART * between and most > 3 * max(others, default=0.0):
        text = f"rank {last} comes last to every call, {most / between:.0%} of the time between two"
        return Verdict(f"{text} after the first", frozenset([last]), "late")
    return None


def waits_in(frames: list[tuple[str, str, int]]) -> str | None:
    """Return the call in which a rank waits for the others; None where its stack shows none."""
    called = [name for file, name, _ in frames if Path(file).name == "distributed_c10d.py"]
    if called:
        return called[-1]
    file, name, line = frames[0]
    if re.search(r"torch/(autograd/graph|nn/parallel/distributed)\.py$|/_fully_shard/", file):
        return name  # DDP and FSDP wait in C++, below these
    return "wait" if ".wait(" in linecache.getline(file, line) else None  # C++ as well
