"""Name the first cause in the logs of a failed job, and who only suffered from it."""

import re
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime

from cluster_parts.logs import CAUSES, HARDWARE, KILLED, LOST, WAITED, Event, Position

NOBODY = "nobody can be named"
DIFFERS = re.compile(r"\b(rank|GPU|pid|port|from) ?\d+|0x[\da-f]+|\d[\d.,:]{4,}", re.I)
ADVICE = {
    HARDWARE: "drain the node; 04-nccl-operations/hardware.md says what its log means",
    KILLED: "dmesg and sacct on its node: who killed it? Often its memory was full",
    WAITED: "look at it while it hangs: triage.py --pid LAUNCHER; or start it again "
    "under triage.py --record FOLDER, and compare its notes",
    LOST: "find the log of the rank that was lost first; dmesg and sacct on its node",
}


@dataclass
class Cause:
    """Who failed first (NOBODY if the logs do not tell), and its events."""

    who: str
    reason: str
    advice: str
    events: list[Event] = field(default_factory=list)


def name_cause(logs):
    """Return the first cause; None where the logs have no error.

    A rank's or node's report about itself comes first, whatever the clocks say: a rank
    that fails takes a second to leave, and others may notice and end before.
    """
    if errors := [event for event in logs.events if event.kind in CAUSES]:
        return name_first_error(errors, logs)
    if behind := name_ranks_behind(logs.positions):
        return behind
    if not logs.events:
        return None
    waited = {event.source.name for event in logs.events if event.kind == WAITED}
    if not waited:
        return Cause(NOBODY, "all of them lost another rank", ADVICE[LOST])
    groups = group_positions(logs.positions)
    reason = f"{join_names(waited)} waited, and none of them says for whom"
    if len(groups) > 1:
        places = "; ".join(
            f"{join_names({one.source.name for one in members})} in group {group}"
            for group, members in groups.items()
        )
        reason += (
            f". They wait in different groups: {places}. Their numbers say nothing"
        )
    elif groups:
        reason += ": all have enqueued the same work"
    return Cause(NOBODY, reason, ADVICE[WAITED])


def name_first_error(errors, logs):
    """Name the sources of the surest error; among equals, of the earliest."""
    first = min(errors, key=lambda event: (CAUSES.index(event.kind), event.line.time))
    alike = [one for one in errors if normalize(one) == normalize(first)]
    names = {event.source.name for event in alike}
    advice = ADVICE.get(first.kind) or f"read {first.code or first.line.place}"
    if re.search("out of memory|oom.kill", first.message, re.I):
        advice = "a smaller micro-batch there; compare the ranks' sizes of samples"
        if first.kind == HARDWARE:
            advice = (
                "the node's own memory was full: fewer loader workers, or more --mem"
            )
    everybody = {
        event.source.name for event in logs.events if event.source.rank is not None
    }
    if len(names) > 1 and names >= everybody:
        return Cause(NOBODY, f"{join_names(names)} fail alike", advice, alike)
    return Cause(join_names(names), first.message, advice, alike)


def name_ranks_behind(positions):
    """Name the ranks for which their group waits: they have enqueued less work."""
    for group, members in group_positions(positions).items():
        most = max(one.enqueued for one in members)
        behind = [one for one in members if one.enqueued < most]
        if behind:
            names = {one.source.name for one in behind}
            fewest = min(one.enqueued for one in behind)
            reason = f"enqueued {fewest}, the others {most} in group {group}"
            advice = f"read what its code does after call {fewest} of this group"
            return Cause(join_names(names), reason, advice)
    return None


def group_positions(positions) -> dict[str, list[Position]]:
    """Numbers of different process groups cannot be compared."""
    groups = defaultdict(list)
    for one in sorted(positions, key=lambda one: one.enqueued):
        groups[one.group].append(one)
    return groups


def normalize(event):
    """Return a message without what differs between ranks."""
    return event.kind, DIFFERS.sub(r"\1 N", shorten(event.message))


def fold(events):
    """Return the events with equal messages together, in order of their first time."""
    folded = defaultdict(list)
    for event in sorted(events, key=lambda event: event.line.time):
        folded[normalize(event)].append(event)
    return list(folded.values())


def join_names(names):
    """Return "ranks 0, 2" for the names of several ranks."""
    names = sorted(names)
    ranks = [
        match for name in names if (match := re.fullmatch(r"rank (\d+)( on .*)?", name))
    ]
    if len(names) == 1 or len(ranks) < len(names):
        return ", ".join(names)
    return ranks_of(int(match[1]) for match in ranks)


def describe_time(event):
    clock = datetime.fromtimestamp(event.line.time).strftime("%d %b %H:%M:%S")
    return f"{event.line.about} {clock}"


def show(cause, logs):
    """Print the cause with its evidence, who suffered from it, and the next step."""
    if cause is None:
        print("no error in these logs")
        return
    print(f"first cause: {cause.who}: {shorten(cause.reason)}")
    if cause.events:  # all of them say the same
        first = min(cause.events, key=lambda event: event.line.time)
        code = f", {first.code}" if first.code else ""
        print(f"  {describe_time(first)}, {first.line.place}{code}")
        if len(cause.events) > 1:
            print(f"  {len(cause.events)} lines like it")
        print(f"  > {first.line.raw.strip()[:200]}")
    for group, members in group_positions(logs.positions).items():
        print(f"\ngroup {group}: last collective enqueued and completed, lowest first")
        for one in members:
            print(f"  {one.source.name}: {one.enqueued} {one.completed}")
    print("")
    others = [event for event in logs.events if event not in cause.events]
    for events in fold(others)[:8]:
        names = join_names({event.source.name for event in events})
        verb = {WAITED: "waited", LOST: "lost another rank"}.get(events[0].kind, "also")
        message = shorten(events[0].message)[:120]
        lines = f" ({len(events)} lines)" if len(events) > 1 else ""
        print(f"{verb}: {names}, {describe_time(events[0])}: {message}{lines}")
    if not cause.events:
        failed = {event.source.name for event in logs.events}
        last = {line.source.name: line.text for line in logs.lines}
        for name in [name for name in last if "rank" in name and name not in failed]:
            print(f"no error from {name}; its last line: {last[name][:120]}")
    print(f"next: {cause.advice}")


def ranks_of(numbers):
    """Return "rank 1" or "ranks 0, 2"."""
    numbers = sorted(numbers)
    word = "rank" if len(numbers) == 1 else "ranks"
    return f"{word} {', '.join(map(str, numbers))}"


def shorten(line):
    """Leave out of a message where PyTorch's source says it, and addresses."""
    line = re.sub(r"\[(enforce fail at )?/[^]]+\] ", "", line.strip())
    line = re.sub(r"\[[\da-f.:]+\]:\d+", "PEER", line)
    line = re.sub(r"\. This is typically caused by .*", "", line)  # torch 2.14
    return " ".join(line.split())
