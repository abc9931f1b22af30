"""Run a function on several ranks of this machine, with a deadline.

For tests, labs and benchmarks. A fork inherits the imported torch: two ranks start in
0.2 s.
"""

import atexit
import faulthandler
import gc
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Rank:
    """How a rank ended, and its output and return value.

    code: the exit code, negative for a signal (-9 is SIGKILL), None if the rank hung.
    """

    code: int | None
    out: str
    err: str
    value: Any = None

    @property
    def ended(self):
        """Return "exit code 1", "SIGKILL" or "hangs"."""
        if self.code is None:
            return "hangs"
        if self.code >= 0:
            return f"exit code {self.code}"
        return signal.Signals(-self.code).name


def fork(
    body, world_size, folder, deadline_s, grace_s=None, during=None, values=pickle
):
    """Run body(rank) in forks of this process; return a Rank for each.

    The ranks' output is kept in `folder`. Those that run after `deadline_s` are killed;
    their stderr ends with where they hang. `grace_s` after the first failure the others
    get SIGTERM, as from a launcher. `during(pids)` is called once all ranks run.
    `values` writes and reads what bodies return: pickle, or json for code that is not
    trusted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("fork")
    stems = [folder / f"rank-{rank}" for rank in range(world_size)]
    processes = [
        context.Process(target=run_rank, args=(body, rank, stem, deadline_s, values))
        for rank, stem in enumerate(stems)
    ]
    for process in processes:
        process.start()
    try:
        if during:
            during([process.pid for process in processes])
        wait(processes, deadline_s, grace_s)
    finally:
        hanging = [process for process in processes if process.exitcode is None]
        for process in hanging:
            os.kill(process.pid, signal.SIGABRT)  # it writes its stack
        time.sleep(0.3 if hanging else 0)
        for process in hanging:
            process.kill()
        for process in processes:
            process.join()
    ranks = []
    for stem, process in zip(stems, processes, strict=True):
        returned = stem.with_suffix(".value")
        ranks.append(
            Rank(
                None if process in hanging else process.exitcode,
                stem.with_suffix(".out").read_text(errors="replace"),
                stem.with_suffix(".err").read_text(errors="replace"),
                values.loads(returned.read_bytes()) if returned.exists() else None,
            )
        )
    return ranks


def wait(processes, deadline_s, grace_s):
    """Wait until all ranks have ended or time is up; end them after a failure."""
    ends_at = time.monotonic() + deadline_s
    terminate_at = float("inf")
    while time.monotonic() < ends_at:
        running = [process for process in processes if process.exitcode is None]
        if not running:
            return
        if grace_s is not None and any(process.exitcode for process in processes):
            terminate_at = min(terminate_at, time.monotonic() + grace_s)
        if time.monotonic() > terminate_at:
            for process in running:
                process.terminate()
        time.sleep(0.005)


def run_rank(body, rank, stem, deadline_s, values):
    """Run a body in its own process and end it."""
    for number, suffix in ((1, ".out"), (2, ".err")):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        os.dup2(os.open(stem.with_suffix(suffix), flags), number)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable()
    torch.set_num_threads(1)  # a fork has none of the threads that autograd would ask
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(deadline_s) + 60)  # ends this rank if its parent was killed
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # an abort leaves no core file
    atexit._clear()  # the parent's handlers, which remove its temporary folders
    gc.freeze()  # leave the parent's objects alone
    returned = values.dumps(body(rank))
    if isinstance(returned, str):
        returned = returned.encode()
    stem.with_suffix(".value").write_bytes(returned)
