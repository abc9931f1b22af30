"""One step as events: what each rank of a pipeline computes and sends, and when.

    events = run(tasks_of(schedule, stages))  # schedule: the instructions of each rank, in order
    print(makespan(events), waits(events))

A place has streams (compute, tp, cp, ep, dp, pp), each of which does its tasks in order, as CUDA
streams do. The ranks of a tp, cp or ep group do the same at the same time: they are one place.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

INSIDE = ("tp", "cp", "ep")  # axes whose collectives a layer waits for
STREAMS = ("compute", *INSIDE, "dp", "pp")
STEP = {"F": 1, "B": -1, "I": -1, "W": 0}  # from a stage to the one that waits for its result


class Place(NamedTuple):
    """A rank of the pipeline, in one of the replicas."""

    replica: int
    rank: int


class Task(NamedTuple):
    """Work of one stream. Tasks of one `group` start and end together, on all their places."""

    key: Hashable  # unique
    name: str
    place: Place
    stream: str
    seconds: float
    needs: tuple[Hashable, ...]  # keys of tasks that end before this one starts
    group: Hashable


class Event(NamedTuple):
    """A task, and when it ran, in s."""

    task: Task
    start: float
    end: float


@dataclass(frozen=True)
class Stage:
    """Seconds of a micro-batch's parts on one (virtual) stage; dp's are of all its weights.

    `inside` has by axis what compute waits for, in forward and in backward.
    """

    forward: float
    backward: float  # with what is recomputed
    inside: dict[str, tuple[float, float]] = field(default_factory=dict)
    send: float = 0.0  # of activations to a neighbour, or of their gradient
    gather: float = 0.0  # of weights
    reduce: float = 0.0  # of gradients
    gathers_each: bool = False  # ZeRO-3: in forward and backward of each micro-batch
    reduces_each: bool = False  # in each micro-batch, not in the last one alone
    overlaps: bool = True  # compute goes on while gradients are reduced
    optimizer: float = 0.0
    layers: int = 1
    leak: float = 0.0  # of what dp sends beside compute: it takes memory and SMs from the products


def run(tasks: Sequence[Task]) -> dict[Hashable, Event]:
    """Return when each task runs, as early as order, needs and groups permit.

    Raises: ValueError when tasks wait for each other for ever.
    """
    queues, groups = defaultdict(deque), defaultdict(list)
    for task in tasks:
        queues[task.place, task.stream].append(task)
        groups[task.group].append(task)
    free = dict.fromkeys(queues, 0.0)
    blocked = defaultdict(set)  # streams by the key that they wait for
    events: dict[Hashable, Event] = {}
    visit = deque(queues)
    while visit:
        stream = visit.popleft()
        if not queues[stream]:
            continue
        head = queues[stream][0]
        missing = next((key for key in head.needs if key not in events), None)
        if missing is not None:
            blocked[missing].add(stream)
            continue
        members = groups[head.group]
        places = [(task.place, task.stream) for task in members]
        there = (queues[at] and queues[at][0].group == head.group for at in places)
        if not all(there) or any(key not in events for task in members for key in task.needs):
            continue  # the last member to arrive starts it
        ended = [events[key].end for task in members for key in task.needs]
        start = max([free[at] for at in places] + ended)
        for task, at in zip(members, places, strict=True):
            end = start + max(each.seconds for each in members)
            events[task.key] = Event(task, start, end)
            free[at] = end
            queues[at].popleft()
            visit += [at, *blocked.pop(task.key, ())]
    stuck = [queue[0].name for queue in queues.values() if queue]
    if stuck:
        raise ValueError(f"waits for ever: {', '.join(stuck[:4])}")
    return events


def tasks_of(
    schedule: Sequence[Sequence], stages: Sequence[Stage],
    slow: dict[Place, float] | None = None, replicas: Iterable[int] = (0,),
) -> list[Task]:  # fmt: skip
    """Return the tasks of a step: `schedule` is by rank, of (kind, stage, micro-batch).

    Kinds: F forward, B backward, or I and W, its halves. `slow` has factors of compute by place.
    A gradient is summed over `replicas` together.
    """
    tasks = []
    for replica in replicas:
        for rank, instructions in enumerate(schedule):
            place = Place(replica, rank)
            factor = (slow or {}).get(place, 1.0)
            tasks += _Rank(place, len(schedule), stages, factor).tasks(instructions)
    return tasks


class _Rank:
    """Puts the tasks of one place in their order."""

    def __init__(self, place: Place, p: int, stages: Sequence[Stage], factor: float) -> None:
        self.place, self.p, self.stages, self.factor = place, p, stages, factor
        self.computed: list[Hashable] = []  # the last piece: its weights are freed after it
        self.reduced: list[Hashable] = []
        self.done: list[Hashable] = []  # what the next instruction comes after

    def tasks(self, instructions: Sequence) -> Iterator[Task]:
        first, last = {}, {}  # of each kind and stage, in which micro-batch
        for kind, stage, k in instructions:
            first.setdefault((kind, stage), k)
            last[kind, stage] = k
        for kind, stage, k in instructions:
            own = self.stages[stage]
            gathers = kind != "W" if own.gathers_each else kind == "F" and k == first["F", stage]
            reduces = kind in "BW" and (own.reduces_each or k == last[kind, stage])
            yield from self.instruction(kind, stage, k, gathers, reduces)
        own = [self.stages[s] for s in range(self.place.rank, len(self.stages), self.p)]
        seconds = sum(stage.optimizer for stage in own)
        if seconds:
            yield self.task(
                ("optimizer",), "optimizer", "compute", seconds, self.done + self.reduced
            )

    def task(self, key, name, stream, seconds, needs=(), together=False) -> Task:
        """Make a task of this place. `together`: with the same one of all replicas."""
        group = (self.place.rank, *key) if together else (self.place, *key)
        return Task((self.place, *key), name, self.place, stream, seconds, tuple(needs), group)

    def arrival(self, kind: str, number: int, k: int) -> tuple[Hashable, ...]:
        """Return the key of what another stage has to do first for this instruction."""
        source = number - STEP[kind]
        if source == number or not 0 <= source < len(self.stages):
            return ()
        there = Place(self.place.replica, source % self.p)
        return ((there, "send", kind, source, k),)

    def instruction(self, kind, number, k, gathers, reduces) -> Iterator[Task]:
        """Yield one instruction: its pieces, what each waits for, and the message at the end."""
        stage = self.stages[number]
        sends = (gathers and stage.gather) or (reduces and stage.reduce)
        pieces = stage.layers if sends else 1
        seconds = {"F": stage.forward, "B": stage.backward}.get(kind, stage.backward / 2)
        beside = stage.gather * gathers + stage.reduce * reduces
        compute = self.factor * (seconds + stage.leak * min(beside, seconds))
        name = f"{kind}{k}" + f" of stage {number}" * (len(self.stages) > self.p)
        needs = [*self.done, *self.arrival(kind, number, k)]
        gathered = stage.gather / pieces if gathers else 0.0
        for piece in range(pieces):
            this = kind, number, k, piece
            if gathered:
                # Before this piece's gradients are reduced; of weights that are freed, one ahead.
                for ahead in range(piece + (piece > 0), min(piece + 2, pieces)):
                    key = ("gather", kind, number, k, ahead)
                    free = self.computed if stage.gathers_each else []
                    yield self.task(key, f"gather for {name}", "dp", gathered, free, together=True)
                needs.append((self.place, "gather", *this))
            yield self.task(this, name, "compute", compute / pieces, needs)
            needs = [(self.place, *this)]
            self.computed = needs
            for axis, both in stage.inside.items():
                awaited = 0.0 if kind == "W" else both[kind != "F"] / pieces
                if awaited:
                    yield self.task((axis, *this), f"{axis} of {name}", axis, awaited, needs)
                    needs = [(self.place, axis, *this)]
            if reduces and stage.reduce:
                key, each = ("reduce", *this), stage.reduce / pieces
                yield self.task(key, f"reduce of {name}", "dp", each, needs, together=True)
                self.reduced.append((self.place, *key))
        self.done = needs if stage.overlaps else needs + self.reduced[-1:]
        to = number + STEP[kind]
        if to != number and 0 <= to < len(self.stages):
            key, seconds = ("send", kind, number, k), stage.send * (self.p > 1)
            yield self.task(key, f"send {name}", "pp", seconds, needs)


def makespan(events: dict[Hashable, Event]) -> float:
    """Return when the last task ends, in s."""
    return max(event.end for event in events.values())


def waits(events: dict[Hashable, Event]) -> dict[Place, dict[str, float]]:
    """Return by place the seconds of its compute stream: computing, and idle by what it waited for.

    Idle until another stage has sent, and after the last task, is `bubble`.
    """
    whole = makespan(events)
    found: dict[Place, dict[str, float]] = {}
    ends: dict[Place, float] = defaultdict(float)
    computing = (event for event in events.values() if event.task.stream == "compute")
    for event in sorted(computing, key=lambda event: event.start):
        place = event.task.place
        parts = found.setdefault(place, dict.fromkeys((*STREAMS[:-1], "optimizer", "bubble"), 0.0))
        idle_from = ends[place]
        needs = [events[key] for key in event.task.needs]
        for need in sorted(needs, key=lambda need: (need.task.stream == "pp", need.end)):
            stream = "bubble" if need.task.stream == "pp" else need.task.stream
            parts[stream] += max(0.0, need.end - idle_from)
            idle_from = max(idle_from, need.end)
        kind = "optimizer" if event.task.name == "optimizer" else "compute"
        parts[kind] += event.end - event.start
        ends[place] = event.end
    for event in events.values():  # what ends a step without an optimizer
        place = event.task.place
        if event.end > ends[place] and event.task.stream != "pp":
            found[place][event.task.stream] += event.end - ends[place]
            ends[place] = event.end
    for place, end in ends.items():
        found[place]["bubble"] += whole - end
    return found


def chrome_trace(events: dict[Hashable, Event], names: dict[Place, str]) -> dict:
    """Return the events as ui.perfetto.dev opens them (Google, Trace Event Format); times in us."""
    pids = {place: pid for pid, place in enumerate(sorted(names))}
    listed = []
    for place, pid in pids.items():
        of_threads = [("thread", tid, stream) for tid, stream in enumerate(STREAMS)]
        for kind, tid, name in [("process", 0, names[place]), *of_threads]:
            at = {"pid": pid, "tid": tid, "args": {"name": name}}
            listed.append({"name": f"{kind}_name", "ph": "M", **at})
    for task, start, end in sorted(events.values(), key=lambda event: event.start):
        if end > start:
            at = {"pid": pids[task.place], "tid": STREAMS.index(task.stream)}
            times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
            listed.append({"name": task.name, "cat": task.stream, "ph": "X", **times, **at})
    return {"traceEvents": listed, "displayTimeUnit": "ms"}
