"""How failure_gallery.py judges what all ranks say, without knowing which one is broken."""

import re
import signal
from collections.abc import Mapping
from typing import NamedTuple

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
QUOTED = 110  # characters of an error in a verdict


class Verdict(NamedTuple):
    """What a tool says of a job, and the ranks that it names: none where it cannot tell."""

    text: str
    named: frozenset[int] = frozenset()


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
