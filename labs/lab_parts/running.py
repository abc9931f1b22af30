"""Run one task of a lab on some ranks, and say in a sentence how it ended.

What a rank saw comes back as JSON, and is judged in this process: an answer's code never runs here.
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
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from dist_common import ranks
from lab_parts.holes import Answer, import_lesson

DEADLINE_S = 120.0  # of a task, for a hang that nothing else shows: one takes a second or so
CPU_S = 8.0  # of a rank: more is a loop without an end
STUCK_S = 1.5  # a task hangs when all its ranks sleep and have used no CPU for as long
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
MISFIT = re.compile(r"op\.preamble|Received data size doesn't match")  # gloo's
UNEQUAL = "got another number of bytes than it waits for"
OTHER_FORM = "what came has another form than the lesson's: see the docstring"
# What a judge raises over something of another form: torch's errors are RuntimeErrors.
MISREAD = (ArithmeticError, AttributeError, LookupError, RuntimeError, StopIteration, TypeError,
           ValueError)  # fmt: skip
FRAME = re.compile(r'File "(.+)", line (\d+) in ([\w<>]+)')
# What a rank says whose partner is gone: the mistake is elsewhere.
LOST = re.compile(r"closed by peer|reset by peer|[Cc]onnection (refused|closed)|timed out")


@dataclass
class Setting:
    """What a task may use: which rank this is of how many, and a seed that is drawn anew."""

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

    def draw(self, *of: int) -> list[int]:
        """Return a number from 1 to each of `of`, the same on all ranks."""
        own = random.Random(self.seed)
        return [own.randint(1, most) for most in of]


@dataclass
class Task:
    """What is asked of a hole: `see` runs on each rank, `judge` gets what all of them saw.

    `see(answer, setting)` returns what JSON can hold; `judge(seen, setting)` the mistake in words,
    or None.
    """

    see: Callable[[Any, Setting], Any]
    judge: Callable[[list, Setting], str | None]


def run(
    see: Callable[[Any, Setting], Any], answer: Answer, hole: str | None, setting: Setting,
    folder: Path,
) -> tuple[list | None, str, str]:  # fmt: skip
    """Return what each rank saw, or None and why not; and what the ranks printed."""

    def be(rank: int) -> dict:
        os.environ.update(GLOO_SOCKET_IFNAME=LOOPBACK, OMP_NUM_THREADS="1")
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(setting.world_size))
        try:
            store = dist.FileStore(str(folder / "store"), setting.world_size)
            place = {"rank": rank, "world_size": setting.world_size, "store": store}
            dist.init_process_group("gloo", timeout=timedelta(seconds=2 * DEADLINE_S), **place)
            module = answer.module(hole)
            saw = see(module, Setting(rank, setting.world_size, setting.seed))
            json.dumps(saw)  # a tensor where a number should be: said here
            all_done.wait()  # one that left would cut the others' calls short
            return {"saw": saw}
        except BaseException as error:  # SystemExit too
            return {"error": describe(error, str(answer.path))}

    # Import here, once, what each fork would have to import again.
    importlib.import_module("torch._dynamo")
    for lesson in answer.lessons:
        import_lesson(lesson.path)
    aborted: list[int] = []
    all_done = multiprocessing.get_context("fork").Barrier(setting.world_size)
    try:
        ended = ranks.fork(
            be, setting.world_size, folder, DEADLINE_S,
            during=lambda pids: aborted.extend(abort_stuck(pids)), values=json,
        )  # fmt: skip
    except ValueError:  # a rank's answer is written by the grader's lines alone
        return None, "the answer overwrote what the grader wrote", ""
    printed = "".join(f"rank {n}: {line}\n" for n, rank in enumerate(ended)
                      for line in rank.out.splitlines())  # fmt: skip
    told = [rank.value if isinstance(rank.value, dict) else None for rank in ended]
    if all(one and "saw" in one for one in told):
        return [one["saw"] for one in told], "", printed
    errors = {n: one["error"] for n, one in enumerate(told) if one and "error" in one}
    own = {n: text for n, text in errors.items() if not LOST.search(text)}
    for number, text in own.items():
        return None, f"rank {number}: {text}", printed
    if hanging := [n for n, rank in enumerate(ended) if n in aborted or rank.code is None]:
        return None, hang(ended, hanging, errors, str(answer.path)), printed
    for number, rank in enumerate(ended):
        if told[number] is None:
            return None, f"rank {number} {crash(rank, str(answer.path))}", printed
    number = min(errors)
    return None, f"rank {number}: {errors[number]}: which rank makes another call?", printed


def judge(task: Task, seen: list, setting: Setting) -> str | None:
    """Return what is wrong, or None. In a fork: one after a backward pass could not run another.

    Its folder is one that no answer knows.
    """

    def be(_) -> str | None:
        try:
            return task.judge(seen, setting)
        except MISREAD:
            return OTHER_FORM

    with tempfile.TemporaryDirectory() as folder:
        (judged,) = ranks.fork(be, 1, Path(folder), DEADLINE_S, values=json)
    if judged.code != 0:
        raise RuntimeError(f"the grader itself ended by {judged.ended}: {judged.err[-500:]}")
    return judged.value


def abort_stuck(
    pids: list[int], stuck_s: float = STUCK_S, limit_s: float = DEADLINE_S
) -> list[int]:
    """Wait for the ranks; abort those that hang, so that each writes where; return which."""
    last, since = None, time.monotonic()
    end = since + limit_s
    while alive := {rank: pid for rank, pid in enumerate(pids) if runs(pid)}:
        try:
            processes = list(map(psutil.Process, alive.values()))
            used = [round(sum(process.cpu_times()[:2]), 2) for process in processes]
            # One that waits for the disk, or for its turn on a busy machine, does not sleep.
            asleep = all(process.status() == psutil.STATUS_SLEEPING for process in processes)
        except psutil.Error:  # it has ended by now
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
    """Say what was raised, and at which line of the answer."""
    text = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(": ")
    if MISFIT.search(text):
        text = UNEQUAL
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__)
             if frame.filename == path]  # fmt: skip
    if lines or isinstance(error, SystemExit | RuntimeError):
        return f"{text} ({line_of(path, lines[-1])})" if lines else text
    return f"{OTHER_FORM} ({text})"  # raised by the grader's lines, over what the answer returned


def crash(rank: ranks.Rank, path: str) -> str:
    """Say where a rank ended, as faulthandler wrote it: gloo aborts where messages do not fit."""
    lines = [int(line) for file, line, _ in FRAME.findall(rank.err) if file == path]
    at = f" ({line_of(path, lines[0])})" if lines else ""
    if MISFIT.search(rank.err):
        return f"{UNEQUAL}: it is in another call than the other ranks{at}"
    return f"ended before the task did: {rank.ended}{at}"


def line_of(path: str, number: int) -> str:
    return f"line {number}: {linecache.getline(path, number).strip()}"


def hang(ended: list[ranks.Rank], hanging: list[int], errors: dict[int, str], path: str) -> str:
    """Say which rank waits in which call, as faulthandler wrote it, and what the others do."""
    told = []
    for number, rank in enumerate(ended):
        frames = FRAME.findall(rank.err)
        own = [place for place, (file, _, _) in enumerate(frames) if file == path]
        if number not in hanging:
            told.append(f"rank {number} lost another rank")
        elif own:
            called = [name for _, _, name in frames[: own[0]] if name != "wrapper"]
            where = line_of(path, int(frames[own[0]][1]))
            told.append(f"rank {number} is in {called[-1]} ({where})" if called
                        else f"rank {number} is at {where}")  # fmt: skip
        else:
            told.append(f"rank {number} has ended its part")
    return f"hangs: {'; '.join(told)}"
