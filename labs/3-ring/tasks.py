"""Lab 3, the ring all-reduce: how an answer is looked at, and which mistake a wrong one
shows.

Each number says whose part of what it is: rank r's part c holds 8 ** (r * ranks + c),
so that a sum tells how often each is in it.
"""

import functools

import torch
import torch.distributed as dist

from lab_parts.judging import Question
from lab_parts.running import OTHER_FORM, Setting, Task

LESSONS = {
    "04-nccl-operations/point_to_point.py": (
        "ring_reduce_scatter",
        "ring_all_gather",
        "ring_all_reduce",
    ),
}


class Move:
    """Send one tensor and receive another in the same step; note what was sent, what
    misfits.
    """

    def __init__(self, room: int) -> None:
        self.room, self.sent, self.misfits = room, [], []

    def __call__(self, sent=None, to=None, received=None, source=None) -> None:
        works, arrived = [], torch.empty(self.room + 1, dtype=torch.double)
        if sent is not None:
            letter = torch.zeros(self.room + 1, dtype=torch.double)
            letter[0], letter[1 : 1 + sent.numel()] = sent.numel(), sent
            works.append(dist.isend(letter, to))
            self.sent.append((to, sent.numel()))
        if received is not None:
            works.append(dist.irecv(arrived, source))
        for work in works:
            work.wait()
        if received is not None:
            numbers = int(arrived[0])
            if numbers != received.numel():
                self.misfits.append((numbers, source, received.numel()))
            fitting = min(numbers, received.numel())
            received[:fitting] = arrived[1 : 1 + fitting]


def lengths(setting: Setting) -> list[int]:
    """Return how many numbers x has: at first as many in each part, then not."""
    each = 2 + setting.draw(5)[0]
    return [setting.world_size * each, setting.world_size * each + 1]


def marked(length: int, setting: Setting, rank: int) -> torch.Tensor:
    """Return x of a rank, each part marked with whose it is. Shape: (length,)."""
    ranks = setting.world_size
    x = torch.zeros(length, dtype=torch.double)
    for number, part in enumerate(x.tensor_split(ranks)):
        part += 8.0 ** (rank * ranks + number)
    return x


def counts_in(number: float, ranks: int) -> list[list[int]]:
    """Return how often each rank's each part is in a sum: [rank][part]."""
    return [
        [int(number) // 8 ** (r * ranks + c) % 8 for c in range(ranks)]
        for r in range(ranks)
    ]


def see(loop, answer, setting):
    return [see_one(loop, answer, setting, length) for length in lengths(setting)]


def see_one(loop, answer, setting, length):
    ranks, move = setting.world_size, Move(length)
    x = marked(length, setting, setting.rank)
    if loop == "all_reduce":
        answer.ring_all_reduce(x, move)
        move.sent = (
            move.sent[: len(move.sent) // 2] if len(move.sent) == 2 * ranks - 2 else []
        )
    elif loop == "reduce_scatter":
        answer.ring_reduce_scatter(x.tensor_split(ranks), move)
    else:  # part rank + 1 is whole, the others are not
        whole = sum(marked(length, setting, rank) for rank in range(ranks))
        place = (setting.rank + 1) % ranks
        x.tensor_split(ranks)[place].copy_(whole.tensor_split(ranks)[place])
        answer.ring_all_gather(x.tensor_split(ranks), move)
    ends = [part.unique().tolist() for part in x.tensor_split(ranks)]
    parts = [
        counts_in(values[0], ranks) if len(values) == 1 else None for values in ends
    ]
    return {
        "parts": parts,
        "sent": move.sent,
        "misfits": move.misfits,
        "length": length,
    }


def judge_each(judge, seen, setting):
    """Return the first mistake: with parts of equal length, then with others."""
    if any(len(own) != len(lengths(setting)) for own in seen):
        return OTHER_FORM
    return next(
        filter(None, (judge(one, setting) for one in zip(*seen, strict=True))), None
    )


def judge_moves(own: dict, setting: Setting, place: str) -> str | None:
    """Say what is wrong with the messages of a rank."""
    ranks, longest = setting.world_size, -(-own["length"] // setting.world_size)
    if not own["sent"]:
        return f"{place} sends nothing"
    most = max(numbers for _, numbers in own["sent"])
    if most > longest:
        return (
            f"{place} sends {most} numbers in a step: all of x has {own['length']}; a "
            "step "
            f"sends one part, {longest} at most"
        )
    if own["misfits"]:
        numbers, source, room = own["misfits"][0]
        arrive = (
            f"{place}: {numbers} numbers arrive from rank {source} in a place for "
            f"{room}"
        )
        return (
            f"{arrive}: parts differ in length: receive into one as long as the part "
            "that comes"
        )
    following = (int(place.split()[1]) + 1) % ranks
    if strays := [to for to, _ in own["sent"] if to != following]:
        return (
            f"{place} sends to rank {strays[0]}: in a ring it sends to the next one, "
            f"{following}"
        )
    if len(own["sent"]) > ranks - 1:
        rounds = f"{place} sends {len(own['sent'])} times, {ranks - 1} are enough"
        return f"{rounds}: what left comes back after {ranks} rounds"
    if len(own["sent"]) < ranks - 1:
        return f"{place} sends {len(own['sent'])} times, {ranks - 1} are needed"
    return None


def judge_parts(own: dict, ranks: int, place: str) -> str | None:
    """Say which part has numbers of another one in it."""
    for part, counts in enumerate(own["parts"]):
        for row in counts or ():
            if other := [c for c in range(ranks) if row[c] and c != part]:
                to, before = own["sent"][0][0], (int(place.split()[1]) - 1) % ranks
                turned = to == before and ranks > 2
                back = f"; it sends to rank {to}, the one before it" if turned else ""
                return (
                    f"{place}: part {part} has numbers of part {other[0]} in it: what "
                    "is sent and "
                    "what it is added to, on the next rank, are not the same "
                    f"part{back}"
                )
    return None


def judge_sum(counts: list[list[int]] | None, part: int, place: str) -> str | None:
    """Say what is wrong with a part that has to be the sum over all ranks."""
    if not counts:
        return (
            f"{place}: part {part} was overwritten in places: a view of another length"
        )
    times = [row[part] for row in counts]
    if twice := [rank for rank, n in enumerate(times) if n > 1]:
        return (
            f"{place}: rank {twice[0]}'s part {part} is in the sum {times[twice[0]]} "
            "times"
        )
    if missing := [rank for rank, n in enumerate(times) if n == 0]:
        return f"{place}: part {part} lacks what rank {missing[0]} has"
    return None


def whole_parts(own: dict, ranks: int) -> list[int]:
    return [
        part for part in range(ranks) if not judge_sum(own["parts"][part], part, "")
    ]


def judge_reduce_scatter(seen, setting):
    ranks = setting.world_size
    for rank, own in enumerate(seen):
        place, part = f"rank {rank}", (rank + 1) % ranks
        if own["sent"] and (mixed := judge_parts(own, ranks, place)):
            return mixed
        wrong = judge_sum(own["parts"][part], part, place)
        found = whole_parts(own, ranks)
        if wrong and found:
            return (
                f"{place} ends with part {found[0]} whole, not part {part}, rank + 1: "
                "the loop "
                "begins with another part, or sends in the other direction"
            )
        if moves := judge_moves(own, setting, place):
            return moves
        if wrong:
            return wrong
    return None


def judge_all_gather(seen, setting):
    ranks = setting.world_size
    for rank, own in enumerate(seen):
        if moves := judge_moves(own, setting, f"rank {rank}"):
            return moves
    for rank, own in enumerate(seen):
        if mixed := judge_parts(own, ranks, f"rank {rank}"):
            return mixed
        for part in range(ranks):
            if wrong := judge_sum(own["parts"][part], part, f"rank {rank}"):
                return wrong
    return None


def task(loop, judge):
    return Task(functools.partial(see, loop), functools.partial(judge_each, judge))


TASKS = {
    "reduce_scatter": task("reduce_scatter", judge_reduce_scatter),
    "all_gather": task("all_gather", judge_all_gather),
}
WHOLE = task("all_reduce", judge_all_gather)


# What is to be predicted: 1,200 numbers on 4 ranks.

NUMBERS, RANKS = 1200, 4


def measure(kind, answer, setting):
    """Return the messages that a rank sends, or the numbers in them."""
    move = Move(NUMBERS)
    answer.ring_all_reduce(torch.ones(NUMBERS, dtype=torch.double), move)
    return {"steps": len(move.sent), "sent": sum(size for _, size in move.sent)}[kind]


def mistakes_of_steps(right):
    return {
        "that is one of the two loops": RANKS - 1,
        "a loop has N - 1 rounds, not N: a rank need not send to itself": 2 * RANKS,
        "that is what a tree needs, and all of x in each step": 4,
    }


def mistakes_of_sent(right):
    return {
        "that is one of the two loops": NUMBERS * (RANKS - 1) / RANKS,
        "a loop has N - 1 rounds, not N": 2 * NUMBERS,
        "x once: each number travels there, and its sum back": NUMBERS,
        "a step sends a part, not all of x": 2 * (RANKS - 1) * NUMBERS,
    }


QUESTIONS = {
    "steps": Question(
        "messages", functools.partial(measure, "steps"), mistakes_of_steps, RANKS
    ),
    "sent": Question(
        "numbers", functools.partial(measure, "sent"), mistakes_of_sent, RANKS
    ),
}
