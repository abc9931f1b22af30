"""Run one task of a lab on several ranks, and say in a sentence what went wrong.

The ranks return JSON, which this process judges: an answer's code never runs here.
"""

import importlib
import json
import linecache
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from dist_common import ranks
from dist_common.check import CollectiveCounter
from lab_parts.holes import Answer, import_lesson
from lab_parts.judging import distinct

DEADLINE_S = 120.0  # of a task; a right answer takes about a second
CPU_S = 8.0  # of a rank; a rank that uses more is in an endless loop
STUCK_S = 1.5  # a task hangs if all ranks sleep and use no CPU for this long
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
MISFIT = re.compile(r"op\.preamble|Received data size doesn't match")  # gloo's words
UNEQUAL = "got another number of bytes than it waits for"
OTHER_FORM = "the answer returns another form than the docstring asks for"
# A judge raises these for a value of another form: torch's errors are RuntimeErrors.
MISREAD = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    StopIteration,
    TypeError,
    ValueError,
)
FRAME = re.compile(r'File "(.+)", line (\d+) in ([\w<>]+)')
# Errors of a rank whose partner has failed: the mistake is on another rank.
LOST = re.compile(
    r"closed by peer|reset by peer|[Cc]onnection (refused|closed)|timed out"
)


@dataclass
class Setting:
    """The input of a task: the rank, the number of ranks, and a seed."""

    rank: int
    world_size: int
    seed: int

    def generator(self) -> torch.Generator:
        """Return a generator of random numbers, the same on all ranks."""
        return torch.Generator().manual_seed(self.seed)

    def all_agree(self, mine: bool) -> bool:
        """Say whether this is so on every rank. A collective."""
        agreed = torch.tensor(int(mine))
        dist.all_reduce(agreed, dist.ReduceOp.MIN)
        return bool(agreed)

    def draw(self, *limits: int) -> list[int]:
        """Return a number from 1 to each limit, the same on all ranks."""
        generator = random.Random(self.seed)
        return [generator.randint(1, limit) for limit in limits]


@dataclass
class Task:
    """The test of a hole: `see` runs on each rank, `judge` gets all ranks' results.

    `see(answer, setting)` returns a value that JSON can hold. `judge(seen, setting)`
    yields the mistakes in words, the most important one first.
    """

    see: Callable[[Any, Setting], Any]
    judge: Callable[[list, Setting], Iterable[str]]


@dataclass
class RankResults:
    """The ranks' return values, or the reason for their failure, and their output."""

    seen: list | None
    problem: str | None = None
    printed: str = ""
    calls: list[dict] = field(default_factory=list)  # collectives by kind, of each rank


def grade(
    task: Task, answer: Answer, hole: str, setting: Setting
) -> tuple[list[str], RankResults]:
    """Return each fault of an answer, and the results that show it."""
    results = run(task.see, answer, hole, setting)
    if results.seen is None:
        return [f"{results.problem}; the task ended there"], results
    faults = judge(task, results.seen, setting)
    return faults or list(compare_calls(results.calls)), results


def run(
    see: Callable[[Any, Setting], Any],
    answer: Answer,
    hole: str,
    setting: Setting,
) -> RankResults:
    """Run `see` on all ranks; the answer's own lines are in this hole only."""
    # Import once what each fork would import again.
    importlib.import_module("torch._dynamo")
    for lesson in answer.lessons:
        import_lesson(lesson.path)
    aborted: list[int] = []
    all_done = multiprocessing.get_context("fork").Barrier(setting.world_size)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)

        def body(rank: int) -> dict:
            place = Setting(rank, setting.world_size, setting.seed)
            return run_rank(see, answer, hole, place, folder / "store", all_done)

        try:
            ended = ranks.fork(
                body,
                setting.world_size,
                folder,
                DEADLINE_S,
                during=lambda pids: aborted.extend(abort_stuck(pids)),
                values=json,
            )
        except ValueError:  # only the grader's lines write a rank's result
            return RankResults(None, "the answer overwrote a file of the grader")
    lines = [f"rank {n}: {s}\n" for n, rank in enumerate(ended) for s in lines_of(rank)]
    printed = "".join(lines)
    values = [rank.value if isinstance(rank.value, dict) else {} for rank in ended]
    if all("seen" in value for value in values):
        seen = [value["seen"] for value in values]
        return RankResults(seen, None, printed, [value["calls"] for value in values])
    return RankResults(None, explain(ended, values, aborted, str(answer.path)), printed)


def lines_of(rank: ranks.Rank) -> list[str]:
    return rank.out.splitlines()


def run_rank(see, answer, hole, setting, store, all_done) -> dict:
    """Be a rank: return what `see` returns and the collectives, or the error."""
    environ = {"RANK": setting.rank, "LOCAL_RANK": setting.rank}
    environ |= {"WORLD_SIZE": setting.world_size, "OMP_NUM_THREADS": 1}
    os.environ.update({name: str(value) for name, value in environ.items()})
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    try:
        dist.init_process_group(
            "gloo",
            timeout=timedelta(seconds=2 * DEADLINE_S),
            rank=setting.rank,
            world_size=setting.world_size,
            store=dist.FileStore(str(store), setting.world_size),
        )
        module = answer.module(hole)
        with CollectiveCounter() as counter:
            seen = see(module, setting)
        json.dumps(seen)  # an error if there is a tensor instead of a number
        all_done.wait()  # a rank that left would end the other ranks' calls
        return {"seen": seen, "calls": dict(counter.calls)}
    except BaseException as error:  # SystemExit too
        return {"error": describe(error, str(answer.path))}


def compare_calls(calls: list[dict]) -> Iterator[str]:
    """Yield a fault for a collective that not all ranks call equally often."""
    for rank, counts in enumerate(calls):
        for kind in sorted(counts.keys() | calls[0].keys()):
            number, first = counts.get(kind, 0), calls[0].get(kind, 0)
            if number != first:
                yield (
                    f"rank 0 calls {kind} {times(first)}, rank {rank} {times(number)}: "
                    "every rank has to make the same calls, whatever its values are"
                )


def times(number: int) -> str:
    return f"{number} time" if number == 1 else f"{number} times"


def explain(ended, values, aborted, path: str) -> str:
    """Say why some ranks returned nothing: an error, a hang or a crash."""
    errors = {n: value["error"] for n, value in enumerate(values) if "error" in value}
    for number, text in errors.items():
        if not LOST.search(text):
            return f"rank {number}: {text}"
    hanging = [n for n, rank in enumerate(ended) if n in aborted or rank.code is None]
    if hanging:
        return describe_hang(ended, hanging, path)
    for number, rank in enumerate(ended):
        if not values[number]:
            return f"rank {number} {describe_crash(rank, path)}"
    number = min(errors)
    return f"rank {number}: {errors[number]}: which rank makes another call?"


def judge(task: Task, seen: list, setting: Setting) -> list[str]:
    """Return each distinct fault.

    It judges in a fork, because a process that has run backward could not fork ranks
    again. No answer knows the fork's folder.
    """

    def body(_) -> list[str]:
        faults = []
        try:
            for fault in task.judge(seen, setting):
                faults.append(fault)
        except MISREAD:
            faults.append(OTHER_FORM)
        return distinct(faults)

    with tempfile.TemporaryDirectory() as folder:
        (judged,) = ranks.fork(body, 1, Path(folder), DEADLINE_S, values=json)
    if judged.code != 0:
        raise RuntimeError(f"the grader failed: {judged.ended}: {judged.err[-500:]}")
    return judged.value


def abort_stuck(
    pids: list[int], stuck_s: float | None = None, limit_s: float = DEADLINE_S
) -> list[int]:
    """Wait for the ranks. If they hang, abort them: each writes where. Return which."""
    stuck_s = stuck_s or STUCK_S
    last, since = None, time.monotonic()
    end = since + limit_s
    while alive := {rank: pid for rank, pid in enumerate(pids) if runs(pid)}:
        try:
            processes = list(map(psutil.Process, alive.values()))
            used = [round(sum(process.cpu_times()[:2]), 2) for process in processes]
            # A rank that waits for the disk or for its turn on a core does not sleep.
            asleep = all(p.status() == psutil.STATUS_SLEEPING for p in processes)
        except psutil.Error:  # the process has ended by now
            continue
        if used != last or not asleep:
            last, since = used, time.monotonic()
        now = time.monotonic()
        if now - since > stuck_s or max(used) > CPU_S or now > end:
            for pid in alive.values():
                os.kill(pid, signal.SIGABRT)
            return list(alive)
        time.sleep(0.02)
    return []


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def describe(error: BaseException, path: str) -> str:
    """Return an error's name, message and line in the answer."""
    text = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(": ")
    if MISFIT.search(text):
        text = UNEQUAL
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == path]
    if lines:
        return f"{text} ({line_of(path, lines[-1])})"
    if isinstance(error, SystemExit | RuntimeError):
        return text
    return f"{OTHER_FORM} ({text})"  # the grader's lines raised it


def describe_crash(rank: ranks.Rank, path: str) -> str:
    """Say where a rank ended. gloo aborts a process whose messages do not fit."""
    lines = [int(n) for file, n, _ in FRAME.findall(rank.err) if file == path]
    place = f" ({line_of(path, lines[0])})" if lines else ""
    if MISFIT.search(rank.err):
        return f"{UNEQUAL}: it is in another call than the other ranks{place}"
    return f"ended before the task did: {rank.ended}{place}"


def line_of(path: str, number: int) -> str:
    return f"line {number}: {linecache.getline(path, number).strip()}"


def describe_hang(ended: list[ranks.Rank], hanging: list[int], path: str) -> str:
    """Say in which call each rank waits, as faulthandler wrote it."""
    parts = []
    for number, rank in enumerate(ended):
        place = "lost another rank"
        if number in hanging:
            place = describe_place(FRAME.findall(rank.err), path)
        parts.append(f"rank {number} {place}")
    return f"hangs: {'; '.join(parts)}"


def describe_place(frames: list[tuple[str, str, str]], path: str) -> str:
    """Say where a rank is. frames: (file, line, function), innermost first."""
    inside = [place for place, (file, _, _) in enumerate(frames) if file == path]
    if inside:
        called = [name for _, _, name in frames[: inside[0]] if name != "wrapper"]
        where = line_of(path, int(frames[inside[0]][1]))
        return f"is in {called[-1]} ({where})" if called else f"is at {where}"
    if any(
        "synchronize.py" in file or "/distributed/" in file for file, _, _ in frames
    ):
        return "has ended its part"
    return "reads what the answer returns, which does not end"
