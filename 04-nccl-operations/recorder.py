"""Put into a job from outside, without a change to its script: notes of each collective.

    torchrun --standalone --nproc-per-node=2 04-nccl-operations/recorder.py FOLDER SCRIPT ARGS

runs SCRIPT, and writes what PyTorch's flight recorder holds to FOLDER/rank-0.trace and so on, 50
times a second: of a rank that is killed the last one or two notes may be missing. On NCCL PyTorch
can write such files itself (TORCH_NCCL_DUMP_ON_TIMEOUT); on gloo it only keeps them in memory.
"""

import os
import pickle
import runpy
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

EVERY_S = 0.02


made_groups: list[str] = []  # what this rank called new_group with
writing = threading.Lock()


def write_notes(file: Path) -> None:
    """Write the flight recorder's notes, and the groups made, whole or not at all."""
    with writing:  # the thread, or the end of the script
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


def notes_of(file: Path) -> Notes:
    """Read the notes of a rank; none where it wrote none."""
    entries, groups = pickle.loads(file.read_bytes()) if file.exists() else ([], [])
    calls = []
    for entry in entries:
        name = entry["profiling_name"].split(":")[-1]
        shapes = " ".join(map(str, entry["input_sizes"] or entry["output_sizes"]))
        types = " ".join(entry["input_dtypes"] or entry["output_dtypes"])
        calls.append((f"{name} {shapes} {types}", entry["time_created_ns"] / 1e9))
    return Notes(calls, groups)


def record(file: Path) -> None:
    """Write the notes to `file` every EVERY_S seconds, from a thread of this rank."""

    def run():
        while True:
            write_notes(file)
            time.sleep(EVERY_S)

    new_group = dist.new_group

    def noted(ranks=None, *args, **kwargs):
        made_groups.append(f"new_group {ranks}")
        return new_group(ranks, *args, **kwargs)

    dist.new_group = noted  # the recorder has no note of it
    file.parent.mkdir(parents=True, exist_ok=True)
    threading.Thread(target=run, daemon=True).start()


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


if __name__ == "__main__":
    notes = Path(sys.argv[1]) / f"rank-{os.environ['RANK']}.trace"
    record(notes)
    sys.argv = sys.argv[2:]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        write_notes(notes)
