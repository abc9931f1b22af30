"""What the notes of all ranks tell: who called something else or is late, who waits for whom.

A rank waits for all that have not come to its call, and for the other end of its message.
"""

from collections import defaultdict

import torch

from cluster_parts.recorder import Notes
from cluster_parts.verdicts import NETWORK, Verdict, compare, latest, odd_ones_out, ranks_of

ANSWER = {"send": "receive", "receive": "send"}


def waits_of(notes: list[Notes]) -> dict[int, dict[int, str]]:
    """Return whom each rank waits for, and in which call: who has not come to it."""
    found: dict[int, dict[int, str]] = defaultdict(dict)
    for rank, own in enumerate(notes):
        for group, number, call in own.open:
            members = own.members.get(group, range(len(notes)))
            for other in members:
                if notes[other].started.get(group, 0) < number:
                    of = f" of group {members}" if group in own.members else ""
                    found[rank][other] = f"call {number}{of}, {call}"
        for kind, peer, number in unanswered(notes, rank):
            found[rank][peer] = f"{kind} {number} {'to' if kind == 'send' else 'from'} it"
    return found


def unanswered(notes: list[Notes], rank: int) -> list[tuple[str, int, int]]:
    """Return the messages of a rank whose other end was never called: kind, peer, number."""
    return [(kind, peer, number) for kind, peer, number in notes[rank].waits
            if notes[peer].sends.get((ANSWER[kind], rank), 0) < number]  # fmt: skip


def reaches(waits: dict[int, dict[int, str]], start: int, goal: int) -> bool:
    """Say whether a rank waits for another one, or for somebody who does."""
    seen, left = set(), [start]
    while left:
        new = set(waits.get(left.pop(), ())) - seen
        seen |= new
        left += new
    return goal in seen


def judge_waits(notes: list[Notes]) -> Verdict | None:
    """Name who closes a circle of ranks, or who is missing in a group or at a message's end."""
    waits = waits_of(notes)
    circle = [rank for rank in waits if reaches(waits, rank, rank)]
    told = {rank: "; ".join(f"rank {rank} waits for rank {other} in {call}"
                            for other, call in others.items()) for rank, others in waits.items()
            }  # fmt: skip
    if circle:
        text = f"{ranks_of(circle)} wait in a circle: {'; '.join(told[rank] for rank in circle)}"
        late = late_message(notes, waits) or out_of_order(notes, circle)
        return (
            late._replace(text=f"{text}; {late.text}") if late else Verdict(text, frozenset(circle))
        )
    missing = {other for others in waits.values() for other in others} - waits.keys()
    if missing and any(own.sends or own.members for own in notes):
        text = f"{'; '.join(told.values())}; {ranks_of(missing)} waits for nobody"
        return Verdict(f"{text}: look at {ranks_of(missing)}", frozenset(missing))
    return None


def late_message(notes: list[Notes], waits: dict[int, dict[int, str]]) -> Verdict | None:
    """Name who owes a message, and waits in a collective for the one who waits for it."""
    for rank in range(len(notes)):
        for kind, peer, number in unanswered(notes, rank):
            if not unanswered(notes, peer) and reaches(waits, peer, rank):
                made = notes[peer].sends.get((ANSWER[kind], rank), 0)
                text = f"rank {peer} has no {ANSWER[kind]} {number} for rank {rank}, only {made}"
                return Verdict(text, frozenset([peer]), "send")
    return None


def out_of_order(notes: list[Notes], circle: list[int]) -> Verdict | None:
    """Name the one rank whose last call came after a call that it never came after before."""
    broke = []
    for rank in circle:
        steps = list(zip(notes[rank].order, notes[rank].order[1:], strict=False))
        broke += [rank] if steps and steps[-1] not in steps[:-1] else []
    if len(broke) != 1:
        return None
    text = f"rank {broke[0]} came to its last call in an order of groups that it never had before"
    return Verdict(text, frozenset(broke), "order")


def judge_recorder(notes: list[Notes]) -> Verdict:
    """Compare the ranks' collectives: what they called, how many, and who came last."""
    for position, groups in enumerate(zip(*(n.groups for n in notes), strict=False), 1):
        if len(set(groups)) > 1:
            return compare(dict(enumerate(groups)), f"new_group {position}")
    if found := judge_waits(notes):
        return found
    for group, members in {name: who for n in notes for name, who in n.members.items()}.items():
        if any(n.first for n in notes):  # calls of any group
            return Verdict("the oldest notes are gone: nobody waits for a call that another left")
        made = [notes[rank].within.get(group, []) for rank in members]
        for position, alike in enumerate(zip(*made, strict=False), 1):
            if len(set(alike)) > 1:
                what = f"call {position} of group {members}"
                return compare(dict(zip(members, alike, strict=True)), what)
    start = max(n.first for n in notes)  # from here on every rank's notes are there
    calls = [n.calls[start - n.first :] for n in notes]
    for position, alike in enumerate(zip(*calls, strict=False), start + 1):
        if len({call for call, _ in alike}) > 1:
            return compare({rank: call for rank, (call, _) in enumerate(alike)}, f"call {position}")
    counts = [n.count for n in notes]
    behind = {rank for rank, count in enumerate(counts) if count < max(counts)}
    if behind:
        odd = odd_ones_out(dict(enumerate(counts)))
        advice = f"look at {ranks_of(odd)}" if odd else "one calls too often, or one too seldom"
        ahead = f"{ranks_of({*range(len(calls))} - behind)} made call {max(counts)}"
        return Verdict(f"{ahead}; {ranks_of(behind)} ended with call {min(counts)}: {advice}", odd)
    at = torch.tensor([[at for _, at in own] for own in calls], dtype=torch.float64)
    if late := latest(at):
        return late
    if not any(n.count or n.sends or n.within for n in notes):
        return Verdict("no rank called torch.distributed, or none was recorded: look at the stacks")
    text = f"{counts[0]} calls, the same on all ranks, and no rank is late"
    text = f"{text}; if it hangs nevertheless, look at the stacks"
    return Verdict(f"{text}; where all wait in one call, {NETWORK}")
