"""Put into a job from outside, without a change to its script: notes of each collective.

PyTorch's flight recorder, as FOLDER/rank-0.trace and so on, up to 50 times a second. It takes all
ranks to make the same calls, as in DDP and FSDP. Source: torch 2.14.1, FlightRecorder.hpp.
"""

import atexit
import itertools
import os
import pickle
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist

from dist_common import cli, runtime
from dist_common.lab.ranks import Rank
from nccl_parts.verdicts import Verdict, compare, ending, odd_ones_out, ranks_of

EVERY_S = 0.02
REST = 9  # times as long as writing takes: at least so long the job has the process for itself


def noted() -> list[dict]:
    """Return the flight recorder's notes, oldest first."""
    # With the stacks it takes seconds, since PyTorch loads its compiler to read them.
    dump = torch._C._distributed_c10d._dump_fr_trace
    return pickle.loads(dump(includeStackTraces=False))["entries"]


class Notes(NamedTuple):
    """What recorder.py noted of a rank: its collectives, with the time in s, and its new_groups."""

    calls: list[tuple[str, float]]
    groups: list[str] = []
    first: int = 0  # calls before these, which PyTorch no longer has: it keeps the last 2000

    @property
    def count(self) -> int:
        return self.first + len(self.calls)


def notes_of(file: Path) -> Notes:
    """Read the notes of a rank; none where it wrote none."""
    first, entries, groups = pickle.loads(file.read_bytes()) if file.exists() else (0, [], [])
    calls = []
    for entry in entries:
        name = entry["profiling_name"].split(":")[-1]
        shapes = " ".join(map(str, entry["input_sizes"] or entry["output_sizes"]))
        types = " ".join(entry["input_dtypes"] or entry["output_dtypes"])
        calls.append((f"{name} {shapes} {types}", entry["time_created_ns"] / 1e9))
    return Notes(calls, groups, first)


def judge_recorder(notes: list[Notes], ranks: Sequence[Rank] = ()) -> Verdict:
    """Compare the ranks' collectives: what they called, how many, and who came last."""
    for position, groups in enumerate(zip(*(n.groups for n in notes), strict=False), 1):
        if len(set(groups)) > 1:
            return compare(dict(enumerate(groups)), f"new_group {position}")
    start = max(n.first for n in notes)  # from here on every rank's notes are there
    calls = [n.calls[start - n.first :] for n in notes]
    for position, alike in enumerate(zip(*calls, strict=False), start + 1):
        if len({call for call, _ in alike}) > 1:
            return compare({rank: call for rank, (call, _) in enumerate(alike)}, f"call {position}")
    counts = [n.count for n in notes]
    behind = {rank for rank, count in enumerate(counts) if count < max(counts)}
    if killed := [n for n in behind if ranks and ending(ranks[n]).startswith("SIG")]:
        return Verdict(f"the last notes of {ranks_of(killed)} may be missing: it ended by a signal")
    if behind:
        odd = odd_ones_out(dict(enumerate(counts)))
        advice = f"look at {ranks_of(odd)}" if odd else "one calls too often, or one too seldom"
        ahead = f"{ranks_of({*range(len(calls))} - behind)} made call {max(counts)}"
        return Verdict(f"{ahead}; {ranks_of(behind)} ended with call {min(counts)}: {advice}", odd)
    at = torch.tensor([[at for _, at in own] for own in calls], dtype=torch.float64)
    late = (at - at.amin(0)).sum(1)  # by rank, in s
    (most, *others), (last, *_) = map(torch.Tensor.tolist, late.sort(descending=True))
    if most > 0.3 and most > 3 * max(others, default=0.0):
        text = f"rank {last} comes last: {most:.1f} s behind the first"
        return Verdict(f"{text} in {len(calls[0])} calls", frozenset([last]))
    return Verdict(f"{counts[0]} calls, the same on all ranks, and no rank is late")


def record(file: Path) -> Callable[[], None]:
    """Write notes of all calls from now on to `file`, from a thread; return what ends it."""
    made, new_group = [], dist.new_group
    before = noted()  # in a fork: what its parent called
    start = before[-1]["record_id"] + 1 if before else 0
    ended = threading.Event()

    def note_group(ranks=None, *args, **kwargs):
        made.append(f"new_group {ranks}")
        return new_group(ranks, *args, **kwargs)

    def write():
        entries = [entry for entry in noted() if entry["record_id"] >= start]
        first = entries[0]["record_id"] - start if entries else 0
        partial = file.with_suffix(".partial")  # whole or not at all
        partial.write_bytes(pickle.dumps((first, entries, made)))
        partial.replace(file)

    def run():
        pause_s = 0.0
        while not ended.wait(pause_s):
            started = time.monotonic()
            write()
            pause_s = max(EVERY_S, REST * (time.monotonic() - started))

    def finish():
        ended.set()
        thread.join()
        write()

    dist.new_group = note_group  # PyTorch's recorder has no note of it
    file.parent.mkdir(parents=True, exist_ok=True)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return finish


def around_all_reduce(before=lambda call, tensor: None, after=lambda work: None) -> None:
    """Have dist.all_reduce call before(number of the call, tensor) and after(what it returns)."""
    all_reduce, calls = dist.all_reduce, itertools.count(1)

    def watched(tensor, *args, **kwargs):
        before(next(calls), tensor)
        work = all_reduce(tensor, *args, **kwargs)
        after(work)
        return work

    dist.all_reduce = watched


def run_or_compare(words: list[str]) -> int:
    """Run a script as --record FOLDER SCRIPT ARGS asks; of --record FOLDER compare the notes."""
    if not words:
        raise cli.UsageError("--record needs a FOLDER for the notes, then the SCRIPT to run")
    folder = Path(words[0])
    if len(words) > 1:
        run_recorded(folder, *words[1:])
    files = folder.glob("rank-*.trace")
    found = {int(file.stem[5:]): notes_of(file) for file in files if file.stem[5:].isdigit()}
    if not found:
        raise cli.UsageError(f"there is no rank-N.trace in {folder}")
    notes = [found.get(rank, Notes([])) for rank in range(max(found) + 1)]
    for rank, of_rank in enumerate(notes):
        made = "no calls" if rank in found else "no file"
        if of_rank.calls:
            made = f"{of_rank.count} calls, the last one {of_rank.calls[-1][0]}"
        print(f"rank {rank}: {made}")
    print(judge_recorder(notes).text)
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
