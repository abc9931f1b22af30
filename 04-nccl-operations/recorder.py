"""Put into a job from outside, without a change to its script: notes of each collective.

    torchrun --standalone --nproc-per-node=2 04-nccl-operations/recorder.py FOLDER SCRIPT ARGS
    python 04-nccl-operations/recorder.py FOLDER

The first command runs SCRIPT, and writes what PyTorch's flight recorder holds to
FOLDER/rank-0.trace and so on, up to 50 times a second: of a rank that is killed the last notes may
be missing. The second one compares those files, also while the job hangs. It takes all ranks to
make the same calls, as in DDP and FSDP. On NCCL PyTorch can write such files itself
(TORCH_NCCL_DUMP_ON_TIMEOUT); on gloo it only keeps them in memory. failure_gallery.md uses it.

Source: torch 2.14.1, FlightRecorder.hpp.
"""

import argparse
import atexit
import os
import pickle
import re
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from dist_common import cli, runtime
from dist_common.ranks import Rank
from gallery_tools import Verdict, compare, ending, odd_ones_out, ranks_of

EVERY_S = 0.02
REST = 9  # times as long as writing takes: at least so long the job has the process for itself

made_groups: list[str] = []  # what this rank called new_group with


def write_notes(file: Path) -> None:
    """Write the flight recorder's notes, and the groups made, whole or not at all."""
    # With the stacks it takes seconds, since PyTorch loads its compiler to read them.
    notes = torch._C._distributed_c10d._dump_fr_trace(includeStackTraces=False)
    partial = file.with_suffix(".partial")
    partial.write_bytes(pickle.dumps((pickle.loads(notes)["entries"], list(made_groups))))
    partial.replace(file)


@dataclass
class Notes:
    """What recorder.py noted of a rank: its collectives, with the time in s, and its new_groups."""

    calls: list[tuple[str, float]]
    groups: list[str] = field(default_factory=list)
    first: int = 0  # calls before these, which PyTorch no longer has: it keeps the last 2000

    @property
    def count(self) -> int:
        return self.first + len(self.calls)


def notes_of(file: Path) -> Notes:
    """Read the notes of a rank; none where it wrote none."""
    entries, groups = pickle.loads(file.read_bytes()) if file.exists() else ([], [])
    calls = []
    for entry in entries:
        name = entry["profiling_name"].split(":")[-1]
        shapes = " ".join(map(str, entry["input_sizes"] or entry["output_sizes"]))
        types = " ".join(entry["input_dtypes"] or entry["output_dtypes"])
        calls.append((f"{name} {shapes} {types}", entry["time_created_ns"] / 1e9))
    return Notes(calls, groups, first=entries[0]["record_id"] if entries else 0)


def judge_recorder(notes: list[Notes], ranks: Sequence[Rank] = ()) -> Verdict:
    """Compare the ranks' collectives: what they called, how many, and who came last.

    Without `ranks` it cannot tell whose last notes are missing, because it was killed. The times
    are of one machine's clock; between machines they are as good as NTP.
    """
    for position, groups in enumerate(zip(*(n.groups for n in notes), strict=False), 1):
        if len(set(groups)) > 1:
            return compare(dict(enumerate(groups)), f"new_group {position}")
    start = max(n.first for n in notes)  # from here on every rank's notes are there
    calls = [n.calls[start - n.first :] for n in notes]
    for position, alike in enumerate(zip(*calls, strict=False), start + 1):
        if len({call for call, _ in alike}) > 1:
            return compare({rank: call for rank, (call, _) in enumerate(alike)}, f"call {position}")
    counts = [n.count for n in notes]
    behind = frozenset(rank for rank, count in enumerate(counts) if count < max(counts))
    if killed := [n for n in behind if ranks and ending(ranks[n]).startswith("SIG")]:
        return Verdict(f"the last notes of {ranks_of(killed)} may be missing: it ended by a signal")
    if behind:
        ahead = set(range(len(calls))) - behind
        text = f"{ranks_of(ahead)} made call {max(counts)}"
        text += f"; {ranks_of(behind)} ended with call {min(counts)}"
        odd = odd_ones_out(dict(enumerate(counts)))
        advice = f"look at {ranks_of(odd)}" if odd else "one calls too often, or one too seldom"
        return Verdict(f"{text}: {advice}", odd)
    late = [0.0] * len(calls)
    for alike in zip(*calls, strict=True):
        first = min(at for _, at in alike)
        late = [total + at - first for total, (_, at) in zip(late, alike, strict=True)]
    last = max(range(len(late)), key=late.__getitem__)
    others = max((s for rank, s in enumerate(late) if rank != last), default=0.0)
    if late[last] > 0.3 and late[last] > 3 * others:
        text = f"rank {last} comes last: {late[last]:.1f} s behind the first"
        return Verdict(f"{text} in {len(calls[0])} calls", frozenset([last]))
    return Verdict(f"{counts[0]} calls, the same on all ranks, and no rank is late")


def record(file: Path) -> Callable[[], None]:
    """Write the notes to `file` every EVERY_S seconds, from a thread; return what ends it."""
    ended = threading.Event()

    def run():
        pause_s = 0.0
        while not ended.wait(pause_s):
            started = time.monotonic()
            write_notes(file)
            pause_s = max(EVERY_S, REST * (time.monotonic() - started))

    def finish():
        ended.set()
        thread.join()
        write_notes(file)

    new_group = dist.new_group

    def noted(ranks=None, *args, **kwargs):
        made_groups.append(f"new_group {ranks}")
        return new_group(ranks, *args, **kwargs)

    dist.new_group = noted  # the recorder has no note of it
    file.parent.mkdir(parents=True, exist_ok=True)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return finish


def check_inputs() -> None:
    """Have dist.all_reduce say on stderr when what this rank hands to it is not finite.

    On NCCL TORCH_NCCL_NAN_CHECK=1 does this, for every collective.
    """
    all_reduce, calls = dist.all_reduce, []

    def checked(tensor, *args, **kwargs):
        calls.append(tensor)
        if not tensor.isfinite().all():
            print(f"inputs: call {len(calls)} is not finite", file=sys.stderr, flush=True)
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = checked


def wait_for_each() -> None:
    """Have dist.all_reduce return only when it is done, also with async_op=True."""
    all_reduce = dist.all_reduce

    def waited(*args, **kwargs):
        work = all_reduce(*args, **kwargs)
        if work is not None:
            work.wait()
        return work

    dist.all_reduce = waited


def read(folder: Path) -> None:
    """Print how many calls each rank made, and what their comparison says."""
    names = [re.fullmatch(r"rank-(\d+)\.trace", file.name) for file in folder.glob("*")]
    found = [int(name[1]) for name in names if name]
    if not found:
        raise cli.UsageError(f"there is no rank-N.trace in {folder}")
    notes = [notes_of(folder / f"rank-{rank}.trace") for rank in range(max(found) + 1)]
    for rank, of_rank in enumerate(notes):
        if of_rank.calls:
            print(f"rank {rank}: {of_rank.count} calls, the last one {of_rank.calls[-1][0]}")
        else:
            print(f"rank {rank}: {'no calls' if rank in found else 'no file'}")
    print(judge_recorder(notes).text)


def run_recorded(folder: Path, script: str, arguments: list[str]) -> None:
    """Run a script as Python would, and write its notes."""
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


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    add("folder", type=Path, metavar="FOLDER", help="where the notes of each rank are")
    add("script", nargs="?", metavar="SCRIPT", help="what to run (without: compare the notes)")
    add("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="of the script")
    return parser.parse_args()


def main():
    args = parse_args()
    if args.script is None:
        read(args.folder)
    else:
        run_recorded(args.folder, args.script, args.arguments)
    return 0


if __name__ == "__main__":
    cli.run(main)
