"""Put into a job without a change to its script: notes of each rank's collectives.

PyTorch's flight recorder is written to FOLDER/rank-N.trace up to 50 times a second.
On gloo it lacks groups, sends and receives, so these are added. Source: torch 2.14.1,
FlightRecorder.hpp.
"""

import atexit
import functools
import inspect
import os
import pickle
import runpy
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist

from dist_common import cli

EVERY_S = 0.02
REST = 9  # times as long as writing takes, the job has the process for itself
KINDS = {"send": "send", "isend": "send", "recv": "receive", "irecv": "receive"}


def run_recorded(words):
    """Run a script as Python would, with notes: words are FOLDER SCRIPT ARGUMENTS."""
    if len(words) < 2:
        raise cli.UsageError("--record needs a folder for the notes, then a script")
    folder, script = Path(words[0]), words[1]
    file = folder / f"rank-{os.environ.get('RANK', '0')}.trace"
    if not os.path.exists(script):
        raise cli.UsageError(f"there is no {script}")
    if file.exists() and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        raise cli.UsageError(f"{file} is of an earlier job: name another folder")
    finish = record(file)
    atexit.register(finish)
    sys.argv = words[1:]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        finish()
    return 0


def record(file):
    """Write notes of all calls from now on, from a thread; return what ends it."""
    new_groups, groups = [], {}
    new_group = dist.new_group
    sends, pending = count_messages()
    before = read_entries()  # in a fork: its parent's calls
    start = before[-1]["record_id"] + 1 if before else 0
    ended, was_open, was_waiting = threading.Event(), set(), set()

    def note_group(ranks=None, *args, **kwargs):
        new_groups.append(f"new_group {ranks}")
        return new_group(ranks, *args, **kwargs)

    def write():
        nonlocal was_open, was_waiting
        entries = [entry for entry in read_entries() if entry["record_id"] >= start]
        # A call that failed has ended, too. The last call of a group that was seen to
        # wait is kept as open: if it went well, all others have come to it.
        now_open = {entry["record_id"] for entry in entries if not entry["retired"]}
        newest = {entry["process_group"][0]: entry["record_id"] for entry in entries}
        was_open = (was_open | now_open) & {*newest.values()}
        for entry in entries:
            entry["retired"] = entry["record_id"] not in now_open | was_open
        pending[:] = [one for one in pending if not one[3]()]
        was_waiting |= {one[:3] for one in pending}
        was_waiting = {one for one in was_waiting if sends[one[:2]] == one[2]}
        groups.update(members_of_groups())  # at the end there are none any more
        notes = {
            "entries": entries,
            "first": entries[0]["record_id"] - start if entries else 0,
            "new_groups": new_groups,
            "groups": groups,
            "sends": dict(sends),
            "waits": sorted(was_waiting),
        }
        partial = file.with_suffix(".partial")
        partial.write_bytes(pickle.dumps(notes))
        partial.replace(file)  # whole or not at all

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


def read_entries():
    """Return the flight recorder's entries, oldest first."""
    # With stacks it takes seconds: PyTorch loads its compiler to read them.
    dump = torch._C._distributed_c10d._dump_fr_trace
    return pickle.loads(dump(includeStackTraces=False))["entries"]


def members_of_groups():
    """Return the ranks of each process group by its name."""
    known = dist.distributed_c10d._world
    names, ranks = known.pg_names.copy(), known.pg_group_ranks.copy()
    return {names[group]: sorted(ranks[group]) for group in ranks if group in names}


def count_messages():
    """Count messages by kind and peer, and list those that wait."""
    sends, pending, depth = Counter(), [], []

    def counting(call, kind):
        @functools.wraps(call)
        def counted(*args, **kwargs):
            given = inspect.signature(call).bind(*args, **kwargs).arguments
            peer = given.get("dst", given.get("src"))
            in_group = given.get("group_dst", given.get("group_src"))
            if in_group is not None:
                group = given.get("group") or dist.group.WORLD
                peer = dist.get_global_rank(group, in_group)
            if (
                depth or peer is None
            ):  # send calls isend; from any rank: nobody is awaited
                return call(*args, **kwargs)
            sends[kind, peer] += 1
            work = []
            waiting = (
                kind,
                peer,
                sends[kind, peer],
                lambda: work and has_ended(work[0]),
            )
            pending.append(waiting)
            depth.append(call)
            try:
                work.append(call(*args, **kwargs))
            finally:
                depth.pop()
            return work[0]

        return counted

    def has_ended(work):  # a call that failed has waited to the end
        if not isinstance(work, dist.Work):
            return True
        return work.is_completed() and work.exception() is None

    for name, kind in KINDS.items():
        counted = counting(getattr(dist, name), kind)
        for module in (dist, dist.distributed_c10d):  # P2POp compares with its own
            setattr(module, name, counted)
    return sends, pending
