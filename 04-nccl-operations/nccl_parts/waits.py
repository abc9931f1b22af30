"""Who waits for whom, by the notes of all ranks: circles, and who is missing.

A rank waits for all that have not come to its call, and for the other end of its message.
"""

from collections import defaultdict

from nccl_parts.recorder import Notes
from nccl_parts.verdicts import Verdict, ranks_of

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
