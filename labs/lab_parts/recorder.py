"""Observe a rank of the exam's job: its calls, its summands and its stack.

PyTorch's flight recorder notes the calls. Source: torch 2.14.1, FlightRecorder.hpp.
"""

import json
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dist_common.cli import UsageError
from lab_parts.running import runs

EVERY_S = 0.1


def noted() -> list[dict]:
    """Return the flight recorder's notes, oldest first."""
    # With the stacks it takes seconds, since PyTorch loads its compiler to read them.
    dump = torch._C._distributed_c10d._dump_fr_trace
    return pickle.loads(dump(includeStackTraces=False))["entries"]


def record(file: Path) -> Callable[[], None]:
    """Write this rank's calls to `file` again and again, from a thread; return what
    ends it.
    """
    before = noted()  # of the process that forked this one
    start = before[-1]["record_id"] + 1 if before else 0
    ended = threading.Event()

    def write():
        calls = [words_of(entry) for entry in noted() if entry["record_id"] >= start]
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(calls))
        partial.replace(file)  # whole or not at all

    def run():
        while not ended.wait(EVERY_S):
            write()

    def finish():
        ended.set()
        thread.join()
        write()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return finish


def words_of(entry: dict) -> str:
    """Return a call's name, shape and dtype."""
    name = entry["profiling_name"].split(":")[-1]
    shapes = " ".join(map(str, entry["input_sizes"] or entry["output_sizes"]))
    types = " ".join(entry["input_dtypes"] or entry["output_dtypes"])
    return f"{name} {shapes} {types}"


def before_each_sum(note: Callable[[torch.Tensor], None]) -> None:
    """Call note(tensor) before each all-reduce and for each gradient under DDP."""
    all_reduce, make_ddp = dist.all_reduce, DistributedDataParallel.__init__

    def watched(tensor, *args, **kwargs):
        note(tensor)
        return all_reduce(tensor, *args, **kwargs)

    def make_watched(ddp, *args, **kwargs):
        make_ddp(ddp, *args, **kwargs)
        for weight in ddp.parameters():
            if weight.requires_grad:
                weight.register_hook(note)

    dist.all_reduce, DistributedDataParallel.__init__ = watched, make_watched


def py_spy() -> str | None:
    """Return py-spy's path: next to this Python, or on PATH."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.exists() else shutil.which("py-spy")


def stack_of(pid: int) -> list[tuple[str, str, int]]:
    """Return (file, function, line) of a process's frames, innermost first.

    The list is empty if the process has ended.
    """
    if py_spy() is None:
        raise UsageError("this needs py-spy: pip install py-spy")
    command = [py_spy(), "dump", "--json", "--pid", str(pid)]
    asked = subprocess.run(command, capture_output=True, text=True)
    if asked.returncode:
        if runs(pid):
            raise UsageError(
                f"py-spy cannot read process {pid}: {asked.stderr.strip()}"
            )
        return []
    threads = [one for one in json.loads(asked.stdout) if one["os_thread_id"] == pid]
    frames = threads[0]["frames"] if threads else []
    return [(frame["filename"], frame["name"], frame["line"]) for frame in frames]
