"""Put into a job from outside, without a change to its script: notes of each collective.

PyTorch's flight recorder, as FOLDER/rank-0.trace and so on, up to 50 times a second, with groups,
sends and receives. All members of a group are to make the same calls in it. Source: torch 2.14.1,
FlightRecorder.hpp.
"""

import atexit
import functools
import inspect
import os
import pickle
import re
import runpy
import sys
import threading
import time
import traceback
from ast import literal_eval
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist

from cluster_parts.verdicts import Verdict, ranks_of
from legacy_common import cli, runtime

EVERY_S = 0.02
MESSAGES = {"send": "send", "isend": "send", "recv": "receive", "irecv": "receive"}
REST = 9  # times as long as writing takes, a second at most, the job has the process for itself


def noted() -> list[dict]:
    """Return the flight recorder's notes, oldest first."""
    # With the stacks it takes seconds, since PyTorch loads its compiler to read them.
    dump = torch._C._distributed_c10d._dump_fr_trace
    return pickle.loads(dump(includeStackTraces=False))["entries"]


class Notes(NamedTuple):
    """What recorder.py noted of a rank: collectives of all ranks, with the time in s, and more."""

    calls: list[tuple[str, float]]
    groups: list[str] = []  # calls of new_group
    first: int = 0  # calls before these, which PyTorch no longer has: it keeps the last 2000
    members: dict[str, list[int]] = {}  # of groups that are not of all ranks
    within: dict[str, list[str]] = {}  # calls in these groups
    started: dict[str, int] = {}  # the last call of each group
    open: list[tuple[str, int, str]] = []  # group, number and name of calls that have not ended
    sends: dict[tuple[str, int], int] = {}  # by "send" or "receive" and peer: how many
    waits: list[tuple[str, int, int]] = []  # of these which have not ended: by kind, peer, number
    world_size: int = 0
    order: list[str] = []  # the group of each call, one after the other

    @property
    def count(self) -> int:
        return self.first + len(self.calls)


def notes_of(file: Path) -> Notes:
    """Read the notes of a rank; none where it wrote none."""
    if not file.exists():
        return Notes([])
    told = pickle.loads(file.read_bytes())
    if isinstance(told, dict):  # as PyTorch writes it on NCCL
        config = told.get("pg_config", {}).values()
        everybody = {group["name"]: literal_eval(group["ranks"]) for group in config}
        sends, waits = messages_of(told["entries"], everybody)
        calls = [one for one in told["entries"] if not one["is_p2p"]]
        told = (0, calls, [], everybody, sends, waits)
    first, entries, groups, everybody, sends, waits = told
    world_size = max(map(len, everybody.values()), default=0)
    members = {name: ranks for name, ranks in everybody.items() if len(ranks) < world_size}
    calls, within, started, unfinished, order = [], defaultdict(list), {}, [], []
    for entry in entries:
        name = entry["profiling_name"].split(":")[-1]
        shapes = " ".join(map(str, entry["input_sizes"] or entry["output_sizes"]))
        types = " ".join(entry["input_dtypes"] or entry["output_dtypes"])
        call, group = f"{name} {shapes} {types}", entry["process_group"][0]
        if group in members:
            within[group].append(call)
        else:
            calls.append((call, entry["time_created_ns"] / 1e9))
        started[group] = entry["collective_seq_id"]
        order.append(group)
        if not entry["retired"]:
            unfinished.append((group, started[group], call))
    more = (within, started, unfinished, sends, waits, world_size, order)
    return Notes(calls, groups, first, members, *more)


def notes_in(folder: Path) -> dict[int, Notes]:
    """Read the notes of all ranks: rank-N.trace, or a dump of PyTorch's, whose name ends in _N."""
    names = [(file, re.fullmatch(r"rank-(\d+)\.trace|[^.]*_(\d+)", file.name))
             for file in folder.glob("*")]  # fmt: skip
    return {int(name[1] or name[2]): notes_of(file) for file, name in names if name}


def messages_of(entries: list[dict], everybody: dict[str, list[int]]) -> tuple[Counter, list]:
    """Count the sends and receives in a dump of PyTorch's, and list those that have not ended."""
    sends, waits = Counter(), []
    for entry in entries:
        named = re.fullmatch(r"nccl:(send|recv) \d+(?:->|<-)(\d+)", entry["profiling_name"])
        if entry["is_p2p"] and named:
            peer = everybody[entry["process_group"][0]][int(named[2])]
            sends[message := (MESSAGES[named[1]], peer)] += 1
            if not entry["retired"]:
                waits.append((*message, sends[message]))
    return sends, waits


def record(file: Path) -> Callable[[], None]:
    """Write notes of all calls from now on to `file`, from a thread; return what ends it."""
    made, members, new_group = [], {}, dist.new_group
    sends, waits = note_messages()
    before = noted()  # in a fork: what its parent called
    start = before[-1]["record_id"] + 1 if before else 0
    ended, seen_open, messages = threading.Event(), set(), set()

    def note_group(ranks=None, *args, **kwargs):
        made.append(f"new_group {ranks}")
        return new_group(ranks, *args, **kwargs)

    def write():
        nonlocal seen_open, messages
        entries = [entry for entry in noted() if entry["record_id"] >= start]
        first = entries[0]["record_id"] - start if entries else 0
        partial = file.with_suffix(".partial")  # whole or not at all
        # A call that fails has ended, too: the last one of a group that was seen to wait is kept.
        # If it went well, all others have come to it, and nobody seems to wait for them.
        unfinished = {entry["record_id"] for entry in entries if not entry["retired"]}
        newest = {entry["process_group"][0]: entry["record_id"] for entry in entries}
        seen_open = (seen_open | unfinished) & set(newest.values())
        waits[:] = [wait for wait in waits if not wait[3]()]
        messages |= {wait[:3] for wait in waits}
        messages = {one for one in messages if sends[one[:2]] == one[2]}
        for entry in entries:
            entry["retired"] = entry["record_id"] not in unfinished | seen_open
        members.update(members_of_groups())  # at the end there are no groups any more
        told = (first, entries, made, members, dict(sends), sorted(messages))
        partial.write_bytes(pickle.dumps(told))
        partial.replace(file)

    def run():
        pause_s = 0.0
        while not ended.wait(pause_s):
            started = time.monotonic()
            write()
            pause_s = min(1.0, max(EVERY_S, REST * (time.monotonic() - started)))

    def finish():
        if not ended.is_set():
            ended.set()
            thread.join()
            write()

    dist.new_group = note_group  # PyTorch's recorder has no note of it
    file.parent.mkdir(parents=True, exist_ok=True)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return finish


def members_of_groups() -> dict[str, list[int]]:
    """Return the ranks of each process group by its name."""
    known = dist.distributed_c10d._world
    names, groups = known.pg_names.copy(), known.pg_group_ranks.copy()  # the job may add to them
    return {names[group]: sorted(ranks) for group, ranks in groups.items() if group in names}


def note_messages() -> tuple[Counter, list]:
    """Count messages by kind and peer, and list those that wait: PyTorch's recorder does not."""
    sends, waits, depth = Counter(), [], []

    def noting(call, kind):
        @functools.wraps(call)
        def noted(*args, **kwargs):
            given = inspect.signature(call).bind(*args, **kwargs).arguments
            peer = given.get("dst", given.get("src"))
            in_group = given.get("group_dst", given.get("group_src"))
            if in_group is not None:
                peer = dist.get_global_rank(given.get("group") or dist.group.WORLD, in_group)
            if depth or peer is None:  # send calls isend; from any rank: nobody to wait for
                return call(*args, **kwargs)
            sends[kind, peer] += 1
            work: list = []
            waits.append((kind, peer, sends[kind, peer], lambda: work and has_ended(work[0])))
            depth.append(call)
            try:
                result = call(*args, **kwargs)
            finally:
                depth.pop()
            work.append(result)
            return result

        return noted

    def has_ended(work):  # send and recv return when they have; what failed waited to the end
        if not isinstance(work, dist.Work):
            return True
        return work.is_completed() and work.exception() is None

    for name, kind in MESSAGES.items():
        noted = noting(getattr(dist, name), kind)
        for module in (dist, dist.distributed_c10d):  # P2POp asks whether it is given its own
            setattr(module, name, noted)
    return sends, waits


def run_or_compare(words: list[str], judge: Callable[[list[Notes]], Verdict]) -> int:
    """Run a script as --record FOLDER SCRIPT ARGS asks; of --record FOLDER compare the notes."""
    if not words:
        raise cli.UsageError("--record needs a FOLDER for the notes, then the SCRIPT to run")
    folder = Path(words[0])
    if len(words) > 1:
        run_recorded(folder, *words[1:])
    found = notes_in(folder)
    if not found:
        raise cli.UsageError(f"there is no rank-N.trace in {folder}, nor a dump of PyTorch's")
    ranks = max(max(found) + 1, *(own.world_size for own in found.values()))
    notes = [found.get(rank, Notes([])) for rank in range(ranks)]
    for rank, of_rank in enumerate(notes):
        made = "no calls" if rank in found else "no file"
        if of_rank.calls:
            made = f"{of_rank.count} calls, the last one {of_rank.calls[-1][0]}"
        print(f"rank {rank}: {made}")
    if missing := {*range(len(notes))} - found.keys():
        counts = {rank: own.count for rank, own in found.items()}
        fewest = {rank for rank, count in counts.items() if count == min(counts.values())}
        others = f"; of the others {ranks_of(fewest)} made the fewest calls" * (fewest != {*found})
        print(f"no file of {ranks_of(missing)}, which died or wrote it elsewhere{others}")
    else:
        print(judge(notes).text)
    return 0


def run_recorded(folder: Path, script: str, *arguments: str) -> NoReturn:
    """Run a script as Python would, write its notes, and exit."""
    file = folder / f"rank-{runtime.discover().rank}.trace"
    if not os.path.exists(script):
        raise cli.UsageError(f"there is no {script}")
    if file.exists() and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        raise cli.UsageError(f"{file} is of an earlier job: name another folder")
    finish = record(file)
    atexit.register(finish)  # a script that ends by os._exit, as cli.run does, calls these first
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    try:
        runpy.run_path(script, run_name="__main__")
    except Exception:
        traceback.print_exc()
        sys.exit(cli.FAILED)
    finally:
        finish()
    sys.exit(0)  # unlike cli.run this waits for the script's threads
