"""Tools that look at a broken job from outside, and say which rank to look at.

None of them is told which rank is broken: each judges what all ranks left behind.
"""

import linecache
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dist_common.ranks import Rank

# A rank that says one of these waited for another one, or lost it. It is seldom the cause.
VICTIM = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|Socket closed|[Tt]imed out waiting"
    r"|wait timeout after|Received data size doesn't match|waiting for clients"
    r"|failed to recv|recvValue failed",
    re.I,
)

# Said before the last error, and closer to the cause.
ROOT = re.compile(r"network addresses of .* cannot be retrieved|Unable to find address|EADDRINUSE")
QUOTED = 110  # characters of an error in a verdict


@dataclass
class Verdict:
    """What a tool says of a job, and the ranks that it names: none where it cannot tell."""

    text: str
    named: frozenset[int] = frozenset()


def ranks_of(numbers) -> str:
    """Return "rank 1" or "ranks 0, 2"."""
    numbers = sorted(numbers)
    return f"rank{'s' * (len(numbers) != 1)} {', '.join(map(str, numbers))}"


def odd_ones_out(values: Mapping[int, object]) -> frozenset[int]:
    """Return the ranks whose value differs from what most ranks have; none without a majority."""
    groups: dict[str, set[int]] = {}
    for rank, value in values.items():
        groups.setdefault(repr(value), set()).add(rank)
    most = max(groups.values(), key=len)
    return frozenset(values) - most if 2 * len(most) > len(values) else frozenset()


def compare(values: Mapping[int, object], what: str) -> Verdict:
    """Say which rank has another value than most; of two that differ none can be named."""
    if not values:
        return Verdict(f"{what}: there is nothing to compare")
    parts: dict[str, list[int]] = {}
    for rank, value in values.items():
        parts.setdefault(str(value), []).append(rank)
    told = "; ".join(f"{ranks_of(ranks)}: {value}" for value, ranks in parts.items())
    if len(parts) == 1:
        return Verdict(f"{what} is the same on all ranks: {next(iter(parts))}")
    named = odd_ones_out(values)
    advice = f"look at {ranks_of(named)}" if named else "compare them"
    return Verdict(f"{what} differs: {told}: {advice}", named)


# The logs and exit codes of all ranks.


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
    return [
        line for text in (rank.out, rank.err) for line in map(shortened, text.splitlines()) if line
    ]


def last_line(rank: Rank, pattern: str = "") -> str:
    """Return the last line that matches, else the last error, else the last line, else ""."""
    lines = lines_of(rank)
    for wanted in (pattern, r"^[\w.]*(Error|Exception|Exit)\b:?", "."):
        matches = [line for line in lines if wanted and re.search(wanted, line)]
        if matches:
            return matches[-1]
    return ""


def ending(rank: Rank) -> str:
    """Say how a rank ended; it hangs where it still ran when it was ended from outside."""
    return "hangs" if rank.code in (None, -signal.SIGTERM) else rank.ended


def judge_logs(ranks: list[Rank]) -> Verdict:
    """Tell the ranks that have an error of their own from those that only lost another rank."""
    own, kinds = {}, {}
    for number, rank in enumerate(ranks):
        error = last_line(rank, ROOT)
        if ending(rank) in ("exit code 0", "hangs"):
            kinds[number] = "ended well" if rank.code == 0 else "says nothing, still runs"
        elif VICTIM.search(error):
            kinds[number] = "only lost another rank"
        elif rank.code < 0:
            kinds[number] = own[number] = f"{ending(rank)}, no error in its log"
        else:
            error = re.sub(r"^[\w.]+(Error|Exception): ", "", error)[:QUOTED]
            kinds[number] = own[number] = f"its own error, {error}"
    if "remote=127." in " ".join(kinds.values()):
        return Verdict("a rank was told to connect to 127.*, which each machine is for itself")
    joined = [re.search(r"(\d+)/(\d+) clients joined", text) for r in ranks for text in lines_of(r)]
    for match in filter(None, joined):
        if missing := set(range(len(ranks), int(match[2]))):
            text = f"{match[2]} ranks are expected, there are {len(ranks)} logs"
            return Verdict(f"{text}: {ranks_of(missing)} never started", frozenset(missing))
    silent = [number for number, kind in kinds.items() if "still runs" in kind]
    left = [number for number, kind in kinds.items() if kind == "ended well"]
    for named in (own, silent, left if 2 * len(left) < len(ranks) else []):
        if 0 < len(named) < len(ranks):
            told = "; ".join(f"{ranks_of([number])}: {kinds[number]}" for number in named)
            rest = {kinds[number] for number in kinds if number not in named}
            return Verdict(f"{told}; the others: {', '.join(sorted(rest))}", frozenset(named))
    return compare(kinds, "the end of the log")


def judge_lines(ranks: list[Rank]) -> Verdict:
    """Compare what the ranks printed, line by line, without their rank numbers."""
    printed = [re.sub(r"\brank \d+", "rank R", rank.out).splitlines() for rank in ranks]
    for position, lines in enumerate(zip(*printed, strict=False), 1):
        if len(set(lines)) > 1:
            return compare(dict(enumerate(lines)), f"line {position}")
    return compare({number: len(lines) for number, lines in enumerate(printed)}, "number of lines")


def judge_epochs(ranks: list[Rank]) -> Verdict:
    """Compare what each rank printed in one epoch with what it printed in the next."""
    same = set()
    for number, rank in enumerate(ranks):
        epochs = re.findall(r"epoch \d+: (.+)", rank.out)
        if len(epochs) > 1 and len(set(epochs)) == 1:
            same.add(number)
    if not same:
        return Verdict("the epochs differ")
    return Verdict(f"{ranks_of(same)}: every epoch has the same samples in order", frozenset(same))


def judge_detail(ranks: list[Rank]) -> Verdict:
    """Read what TORCH_DISTRIBUTED_DEBUG=DETAIL says each rank is about to call."""
    calls = {}
    said = "\n".join(rank.err for rank in ranks)
    pattern = r"Rank (\d+) is running collective: CollectiveFingerPrint\((.*?)\)(?=[.,])"
    for rank, call in re.findall(pattern, said):
        parts = re.findall(r"OpType=(\w+)|TensorShape=(\[.*?\])|TensorDtypes=(\w+)", call)
        calls[int(rank)] = " ".join("".join(part) for part in parts)
    return compare(calls, "the collective") if calls else Verdict("DETAIL says nothing")


def judge_inputs(ranks: list[Rank]) -> Verdict:
    """Find who was first to hand a number that is not finite to a collective."""
    first = {}
    for number, rank in enumerate(ranks):
        if match := re.search(r"inputs: call (\d+) is not finite", rank.err):
            first[number] = int(match[1])
    if not first:
        return Verdict("every input of every collective is finite")
    call = min(first.values())
    named = frozenset(number for number in first if first[number] == call)
    return Verdict(f"{ranks_of(named)}: the input of call {call} is not finite", named)


def judge_waits(before: list[Rank], ranks: list[Rank]) -> Verdict:
    """Find the ranks that print something else once every collective is waited for."""
    named = {
        n for n, pair in enumerate(zip(before, ranks, strict=True)) if pair[0].out != pair[1].out
    }
    if not named:
        return Verdict("waiting for every collective changes nothing")
    number = min(named)
    pair = f"{last_line(before[number])!r} becomes {last_line(ranks[number])!r}"
    return Verdict(f"{ranks_of(named)} read a result before it is there: {pair}", frozenset(named))


# The stacks of all ranks.


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
    places, waiting = {}, set()
    for rank, frames in enumerate(stacks):
        if frames is None:
            places[rank] = "has ended"
            continue
        _, function, line = next((f for f in frames if Path(f[0]).name == script), frames[-1])
        called = waits_in(frames)
        places[rank] = f"{function}, line {line}" + (f", in {called}" if called else "")
        if called:
            waiting.add(rank)
    running = {rank for rank in places if stacks[rank] is not None}
    elsewhere = running - waiting
    if elsewhere and len(elsewhere) < len(stacks):
        told = "; ".join(f"rank {rank}: {places[rank]}" for rank in sorted(elsewhere))
        rest = "wait in a collective" if waiting else "have ended"
        return Verdict(f"{told}; all others {rest}", frozenset(elsewhere))
    return compare(places, "the stack")


def judge_heartbeat(stuck: list[int], ranks: list[Rank]) -> Verdict:
    """Say which ranks stood still: none of them is to blame more than another if all did."""
    if not stuck:
        return Verdict("every rank ended by itself")
    text = f"{ranks_of(stuck)}: no new line and no CPU time"
    if len(stuck) == len(ranks):
        return Verdict(f"{text}: compare their stacks")
    return Verdict(f"{text}; all others have ended", frozenset(stuck))
