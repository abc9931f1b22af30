"""Compare the ranks' notes of their collectives: who differs, who waits for whom.

All members of a group have to make the same calls. Notes are recorder.py's, or
dumps that PyTorch writes on NCCL. Source: torch 2.14.1, FlightRecorder.hpp.
"""

import pickle
import re
from ast import literal_eval
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from cluster_parts.cause import ranks_of
from cluster_parts.recorder import KINDS
from dist_common import cli

ANSWER = {"send": "receive", "receive": "send"}


@dataclass
class Notes:
    """The calls of a rank."""

    calls: list = field(default_factory=list)  # in the group of all ranks
    new_groups: list = field(default_factory=list)  # calls of new_group
    first: int = 0  # calls before these: PyTorch keeps the last 2000
    members: dict = field(default_factory=dict)  # of smaller groups, by name
    within: dict = field(default_factory=dict)  # calls of smaller groups, by name
    started: dict = field(default_factory=dict)  # number of each group's last call
    open: list = field(default_factory=list)  # group, number, name: has not ended
    sends: dict = field(default_factory=dict)  # kind and peer -> how many
    waits: list = field(default_factory=list)  # kind, peer, number: has not ended
    world_size: int = 0

    @property
    def count(self):
        return self.first + len(self.calls)


@dataclass
class NotesVerdict:
    """The verdict from all ranks' notes, and the ranks to blame, if the notes tell."""

    reason: str
    ranks: set = field(default_factory=set)


# Reading


def read_folder(folder):
    """Read the notes of all ranks in a folder, or the dumps there, named ..._N."""
    notes = {}
    for file in Path(folder).glob("*") if folder else ():
        if name := re.fullmatch(r"rank-(\d+)\.trace|[^.]*_(\d+)", file.name):
            notes[int(name[1] or name[2])] = read_notes(file)
    return notes


def read_notes(file):
    """Read a rank's notes, or its dump as PyTorch writes it on NCCL."""
    dump = pickle.loads(file.read_bytes())
    if "pg_config" in dump:
        groups = {
            g["name"]: literal_eval(g["ranks"]) for g in dump["pg_config"].values()
        }
        dump = dump | {"groups": groups} | messages_of(dump["entries"], groups)
    groups = dump["groups"]
    world_size = max(map(len, groups.values()), default=0)
    notes = Notes(
        new_groups=dump.get("new_groups", []),
        first=dump.get("first", 0),
        members={
            name: ranks for name, ranks in groups.items() if len(ranks) < world_size
        },
        sends=dump["sends"],
        waits=dump["waits"],
        world_size=world_size,
    )
    for entry in dump["entries"]:
        if entry["is_p2p"]:
            continue
        name = entry["profiling_name"].split(":")[-1]
        shapes = " ".join(map(str, entry["input_sizes"] or entry["output_sizes"]))
        types = " ".join(entry["input_dtypes"] or entry["output_dtypes"])
        call, group = f"{name} {shapes} {types}", entry["process_group"][0]
        calls = (
            notes.within.setdefault(group, [])
            if group in notes.members
            else notes.calls
        )
        calls.append(call)
        notes.started[group] = entry["collective_seq_id"]
        if not entry["retired"]:
            notes.open.append((group, entry["collective_seq_id"], call))
    return notes


def messages_of(entries, groups):
    """Count the sends and receives in a dump, and list those that have not ended."""
    sends, waits = Counter(), []
    for entry in entries:
        named = re.fullmatch(
            r"nccl:(send|recv) \d+(?:->|<-)(\d+)", entry["profiling_name"]
        )
        if entry["is_p2p"] and named:
            peer = groups[entry["process_group"][0]][int(named[2])]
            message = KINDS[named[1]], peer
            sends[message] += 1
            if not entry["retired"]:
                waits.append((*message, sends[message]))
    return {"sends": sends, "waits": waits}


def count_calls(folder):
    """Return how many calls and messages all ranks have noted together."""
    all_notes = read_folder(folder).values()
    within = sum(len(calls) for notes in all_notes for calls in notes.within.values())
    return within + sum(notes.count + sum(notes.sends.values()) for notes in all_notes)


# Comparing


def compare(folder):
    """Print each rank's last call and the verdict; return the exit code."""
    notes = read_folder(folder)
    if not notes:
        raise cli.UsageError(f"there is no rank-N.trace in {folder}, nor a dump")
    size = max(max(notes) + 1, *(one.world_size for one in notes.values()))
    for rank in range(size):
        summary = "no file"
        if rank in notes:
            calls = notes[rank].calls
            last = f", the last one {calls[-1]}" if calls else ""
            summary = f"{notes[rank].count} calls{last}"
        print(f"rank {rank}: {summary}")
    if missing := {*range(size)} - {*notes}:
        counts = {rank: one.count for rank, one in notes.items()}
        fewest = {rank for rank in counts if counts[rank] == min(counts.values())}
        summary = f"no file of {ranks_of(missing)}, which died or wrote it elsewhere"
        if len(fewest) < len(notes):
            summary += f"; of the others {ranks_of(fewest)} made the fewest calls"
        print(summary)
        return 1
    verdict = judge([notes[rank] for rank in range(size)])
    print(verdict.reason if verdict else "the same calls on all ranks, in one order")
    return int(verdict is not None)


def judge(notes):
    """Return who called something else, or for whom the others wait; None if nobody."""
    for number, made in enumerate(
        zip(*(one.new_groups for one in notes), strict=False), 1
    ):
        if len({*made}) > 1:
            return report_difference(
                dict(enumerate(made)), f"new_group {number} differs"
            )
    if verdict := judge_waits(notes):
        return verdict
    for group, members in collect_members(notes).items():
        calls = [notes[rank].within.get(group, []) for rank in members]
        # PyTorch drops the oldest notes, of whichever group.
        if any(one.first for one in notes):
            break
        for number, made in enumerate(zip(*calls, strict=False), 1):
            if len({*made}) > 1:
                what = f"call {number} of group {members} differs"
                return report_difference(dict(zip(members, made, strict=True)), what)
    start = max(one.first for one in notes)
    calls = [one.calls[start - one.first :] for one in notes]
    for number, made in enumerate(zip(*calls, strict=False), start + 1):
        if len({*made}) > 1:
            return report_difference(dict(enumerate(made)), f"call {number} differs")
    counts = {rank: one.count for rank, one in enumerate(notes)}
    if len({*counts.values()}) > 1:
        calls = {rank: f"{count} calls" for rank, count in counts.items()}
        return report_difference(calls, "one calls too often, or too seldom")
    return None


def report_difference(values, what):
    return NotesVerdict(f"{what}: {tell_apart(values)}", find_minority(values))


def tell_apart(values):
    """Return "ranks 0, 2: a; rank 1: b" for values by rank."""
    ranks = defaultdict(list)
    for rank, value in values.items():
        ranks[value].append(rank)
    return "; ".join(f"{ranks_of(some)}: {value}" for value, some in ranks.items())


def find_minority(values):
    """Return the ranks that differ from the majority; none if there is no majority."""
    (most, many), *_ = Counter(values.values()).most_common(1)
    if 2 * many <= len(values):
        return set()
    return {rank for rank, value in values.items() if value != most}


def collect_members(notes):
    return {name: ranks for one in notes for name, ranks in one.members.items()}


def judge_waits(notes):
    """Name a rank that is waited for and waits for nobody, or that owes data."""
    waits = {
        rank: awaited
        for rank in range(len(notes))
        if (awaited := waits_of(notes, rank))
    }
    waiting = "; ".join(
        f"rank {rank} waits for rank {other} in {call}"
        for rank, others in waits.items()
        for other, call in others.items()
    )
    absent = {other for others in waits.values() for other in others} - waits.keys()
    if absent and any(one.sends or one.members for one in notes):
        return NotesVerdict(f"{waiting}; {ranks_of(absent)} waits for nobody", absent)
    circle = [rank for rank in waits if reaches(waits, rank, rank)]
    if not circle:
        return None
    if late := name_late_message(notes, waits):
        return NotesVerdict(f"{waiting}; {late.reason}", late.ranks)
    return NotesVerdict(f"{ranks_of(circle)} wait in a circle: {waiting}")


def waits_of(notes, rank):
    """Return {other rank: call}: who has not come to a call that this rank waits in."""
    calls = {}
    for group, number, call in notes[rank].open:
        for other in notes[rank].members.get(group, range(len(notes))):
            if notes[other].started.get(group, 0) < number:
                of = (
                    f" of group {notes[rank].members[group]}"
                    if group in notes[rank].members
                    else ""
                )
                calls[other] = f"call {number}{of}, {call}"
    for kind, peer, number in find_unanswered(notes, rank):
        calls[peer] = f"{kind} {number} {'to' if kind == 'send' else 'from'} it"
    return calls


def find_unanswered(notes, rank):
    """Return this rank's messages whose other end was never called."""
    return [
        (kind, peer, number)
        for kind, peer, number in notes[rank].waits
        if notes[peer].sends.get((ANSWER[kind], rank), 0) < number
    ]


def reaches(waits, start, goal):
    """Say whether a rank waits for another one, or for somebody who does."""
    seen, left = set(), [start]
    while left:
        new = {*waits.get(left.pop(), ())} - seen
        seen |= new
        left += new
    return goal in seen


def name_late_message(notes, waits):
    """Name who owes a message, and itself waits for the one who needs it."""
    for rank in range(len(notes)):
        for kind, peer, number in find_unanswered(notes, rank):
            if not find_unanswered(notes, peer) and reaches(waits, peer, rank):
                made = notes[peer].sends.get((ANSWER[kind], rank), 0)
                owed = f"has no {ANSWER[kind]} {number} for rank {rank}, only {made}"
                return NotesVerdict(f"rank {peer} {owed}", {peer})
    return None
