"""Lab 3, the ring all-reduce: what the grader runs, and which mistakes it names.

Each number names its rank and part: rank r's part c holds 8 ** (r * ranks + c). So a
sum tells how often it contains each part.
"""

import functools
from collections.abc import Iterator

import torch
import torch.distributed as dist

from lab_parts.judging import Question, judge_each_rank
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


def judge_each_length(judge, seen, setting):
    """Yield the mistakes with parts of equal length, or else with others."""
    if any(len(ends) != len(lengths(setting)) for ends in seen):
        yield OTHER_FORM
        return
    for ends in zip(*seen, strict=True):
        faults = list(judge(ends, setting))
        yield from faults
        if faults:
            return


def explain_moves(got: dict, rank: int, setting: Setting) -> Iterator[str]:
    """Yield what is wrong with the messages of a rank."""
    ranks, longest = setting.world_size, -(-got["length"] // setting.world_size)
    if not got["sent"]:
        yield "sends nothing"
        return
    most = max(numbers for _, numbers in got["sent"])
    if most > longest:
        yield (
            f"sends {most} numbers in a step: all of x has {got['length']}; a step "
            f"sends one part, {longest} at most"
        )
    elif got["misfits"]:
        numbers, source, room = got["misfits"][0]
        yield (
            f"receives {numbers} numbers from rank {source} in a place for {room}: "
            "parts differ in length: receive into one as long as the part that comes"
        )
    following = (rank + 1) % ranks
    if strays := [to for to, _ in got["sent"] if to != following]:
        yield (
            f"sends to rank {strays[0]}: in a ring it sends to the next one, "
            f"{following}"
        )
    if len(got["sent"]) > ranks - 1:
        yield (
            f"sends {len(got['sent'])} times, {ranks - 1} are enough: what left comes "
            f"back after {ranks} rounds"
        )
    if len(got["sent"]) < ranks - 1:
        yield f"sends {len(got['sent'])} times, {ranks - 1} are needed"


def explain_parts(got: dict, rank: int, ranks: int) -> str | None:
    """Say which part contains numbers of another part."""
    for part, counts in enumerate(got["parts"]):
        for row in counts or ():
            if other := [c for c in range(ranks) if row[c] and c != part]:
                to, before = got["sent"][0][0], (rank - 1) % ranks
                turned = to == before and ranks > 2
                back = f"; it sends to rank {to}, the one before it" if turned else ""
                return (
                    f"part {part} has numbers of part {other[0]} in it: what is sent "
                    "and what it is added to, on the next rank, are not the same "
                    f"part{back}"
                )
    return None


def explain_sum(counts: list[list[int]] | None, part: int) -> str | None:
    """Say what is wrong with a part that has to be the sum over all ranks."""
    if not counts:
        return f"part {part} was overwritten in places: a view of another length"
    times = [row[part] for row in counts]
    if twice := [rank for rank, n in enumerate(times) if n > 1]:
        return f"rank {twice[0]}'s part {part} is in the sum {times[twice[0]]} times"
    if missing := [rank for rank, n in enumerate(times) if n == 0]:
        return f"part {part} lacks what rank {missing[0]} has"
    return None


def explain_rounds(got: dict, rank: int, setting: Setting) -> Iterator[str]:
    """Yield what is wrong with the parts and the messages of a reduce-scatter."""
    ranks, part = setting.world_size, (rank + 1) % setting.world_size
    whole = [n for n in range(ranks) if not explain_sum(got["parts"][n], n)]
    if got["sent"] and (mixed := explain_parts(got, rank, ranks)):
        yield mixed
    elif whole and part not in whole:
        yield (
            f"ends with part {whole[0]} whole, not part {part}, rank + 1: the loop "
            "begins with another part, or sends in the other direction"
        )
    else:
        yield from explain_moves(got, rank, setting)


def explain_reduced(got: dict, rank: int, setting: Setting) -> Iterator[str]:
    part = (rank + 1) % setting.world_size
    if wrong := explain_sum(got["parts"][part], part):
        yield wrong


def explain_gathered(got: dict, rank: int, setting: Setting) -> Iterator[str]:
    if mixed := explain_parts(got, rank, setting.world_size):
        yield mixed
        return
    for part in range(setting.world_size):
        if wrong := explain_sum(got["parts"][part], part):
            yield wrong


def judge_reduce_scatter(seen, setting):
    faults = list(judge_each_rank(explain_rounds)(seen, setting))
    yield from faults or judge_each_rank(explain_reduced)(seen, setting)


def judge_all_gather(seen, setting):
    faults = list(judge_each_rank(explain_moves)(seen, setting))
    yield from faults or judge_each_rank(explain_gathered)(seen, setting)


def task(loop, judge):
    return Task(
        functools.partial(see, loop), functools.partial(judge_each_length, judge)
    )


TASKS = {
    "reduce_scatter": task("reduce_scatter", judge_reduce_scatter),
    "all_gather": task("all_gather", judge_all_gather),
}
WHOLE = task("all_reduce", judge_all_gather)


# Predictions: 1,200 numbers on 4 ranks.

NUMBERS, RANKS = 1200, 4


def measure(kind, answer, setting):
    """Return the messages that a rank sends, or the numbers in them."""
    move = Move(NUMBERS)
    answer.ring_all_reduce(torch.ones(NUMBERS, dtype=torch.double), move)
    return {"steps": len(move.sent), "sent": sum(size for _, size in move.sent)}[kind]


def mistakes_of_steps(measured):
    return {
        "that is one of the two loops": RANKS - 1,
        "a loop has N - 1 rounds, not N: a rank need not send to itself": 2 * RANKS,
        "that is what a tree needs, and all of x in each step": 4,
    }


def mistakes_of_sent(measured):
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
