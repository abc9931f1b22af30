"""How the tools of failure_gallery.py judge what all ranks left, not told which one is broken."""

import linecache
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from dist_common.lab.ranks import Rank

# A rank that says one of these waited for another one, or lost it. It is seldom the cause.
VICTIM = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|Socket closed|[Tt]imed out waiting"
    r"|wait timeout after|Received data size doesn't match|waiting for clients"
    r"|failed to recv|recvValue failed",
    re.I,
)
# Raised by other libraries in the same words, of a connection of their own: to storage, say.
ELSEWHERE = re.compile(
    r"(?!(torch\.distributed\.)?(RuntimeError|Dist\w+Error|SystemExit))[\w.]*(Error|Exception|Timeout)\b"
)
# Said before the last error, and closer to the cause.
ROOT = re.compile(r"network addresses of .* cannot be retrieved|Unable to find address|EADDRINUSE")
LATE_S = 0.3  # behind the first in all calls together: more than a busy machine's noise
ENOUGH_CALLS, LATE_PART = 10, 0.3  # of the time between two calls
QUOTED = 110  # characters of an error in a verdict
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


def lines_of(rank: Rank) -> list[str]:
    """Return the lines of a rank's log, shortened, without the empty ones."""
    return [*filter(None, map(shortened, f"{rank.out}\n{rank.err}".splitlines()))]


def last_line(rank: Rank, pattern: str | re.Pattern = "") -> str:
    """Return the last line that matches, else the last error, else the last line, else ""."""
    lines = lines_of(rank)[::-1]
    for wanted in filter(None, (pattern, r"^[\w.]*(Error|Exception|Exit)\b:?", ".")):
        if found := next((line for line in lines if re.search(wanted, line)), ""):
            return found
    return ""


def ending(rank: Rank) -> str:
    """Say how a rank ended; it hangs where it still ran when it was ended from outside."""
    return "hangs" if rank.code in (None, -signal.SIGTERM) else rank.ended


def judge_logs(ranks: list[Rank]) -> Verdict:
    """Tell the ranks that have an error of their own from those that only lost another rank."""
    own, silent, left, kinds = set(), set(), set(), {}
    for number, rank in enumerate(ranks):
        error = last_line(rank, ROOT)
        if rank.code == 0:
            left.add(number)
            kinds[number] = "ended well"
        elif ending(rank) == "hangs":
            silent.add(number)
            kinds[number] = "says nothing, still runs"
        elif VICTIM.search(error) and not ELSEWHERE.match(error):
            kinds[number] = "only lost another rank"
        else:
            own.add(number)
            error = re.sub(r"^[\w.]+(Error|Exception): ", "", error)[:QUOTED]
            killed = f"{ending(rank)}, no error in its log"
            kinds[number] = killed if rank.code < 0 else f"its own error, {error}"
    if "remote=127." in " ".join(kinds.values()):
        return Verdict("a rank was told to connect to 127.*, which each machine is for itself")
    lines = "\n".join(text for rank in ranks for text in lines_of(rank))
    for match in re.finditer(r"\d+/(\d+) clients joined", lines):
        if missing := set(range(len(ranks), int(match[1]))):
            text = f"{match[1]} ranks are expected, there are {len(ranks)} logs"
            return Verdict(f"{text}: {ranks_of(missing)} never started", frozenset(missing))
    for named in (own, silent, left if 2 * len(left) < len(ranks) else ()):
        if 0 < len(named) < len(ranks):
            told = "; ".join(f"{ranks_of([number])}: {kinds[number]}" for number in sorted(named))
            rest = {kinds[number] for number in kinds.keys() - named}
            return Verdict(f"{told}; the others: {', '.join(sorted(rest))}", frozenset(named))
    return compare(kinds, "the end of the log")


def calls_in_detail(ranks: list[Rank]) -> dict[int, str]:
    """Return what each rank was about to call, as TORCH_DISTRIBUTED_DEBUG=DETAIL writes it.

    A rank names itself first, by its number in the group; its log has its number in the job.
    """
    pattern = r"Rank \d+ is running collective: CollectiveFingerPrint\((.*?)\)(?=[.,])"
    calls = {}
    for number, rank in enumerate(ranks):
        if found := re.search(pattern, rank.err):
            words = re.findall(r"OpType=(\w+)|TensorShape=(\[.*?\])|TensorDtypes=(\w+)", found[1])
            calls[number] = " ".join("".join(word) for word in words)
    return calls


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


def judge_stacks(stacks: list[list[tuple[str, str, int]] | None], script: str) -> Verdict:
    """Name the ranks that are in no collective while others wait in one."""
    places, elsewhere = dict.fromkeys(range(len(stacks)), "has ended"), set()
    for rank, frames in enumerate(stacks):
        if frames == []:
            places[rank] = "is stopped (SIGSTOP, or a debugger): kill -CONT lets it continue"
            elsewhere.add(rank)
        elif frames is not None:
            _, function, line = next((f for f in frames if Path(f[0]).name == script), frames[-1])
            called = waits_in(frames)
            places[rank] = f"{function}, line {line}" + (f", in {called}" if called else "")
            elsewhere |= set() if called else {rank}
    if 0 < len(elsewhere) < len(stacks):
        told = "; ".join(f"rank {rank}: {places[rank]}" for rank in sorted(elsewhere))
        waiting = any(stacks[rank] is not None for rank in places.keys() - elsewhere)
        rest = "wait in a collective" if waiting else "have ended"
        return Verdict(f"{told}; all others {rest}", frozenset(elsewhere))
    verdict = compare(places, "the stack")
    if len(alike(places)) > 1:
        return verdict
    advice = "ask the recorder" + f", or {NETWORK}" * (any(stacks) and not elsewhere)
    return Verdict(f"{verdict.text}: stacks do not tell groups and calls apart; {advice}")
