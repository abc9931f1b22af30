"""Run a function on several ranks of this machine, with a deadline, and tell how each ended.

For tests, launchers, failures, sweeps and graders: a rank that hangs is a finding, and never hangs
the process that asked.
"""

from __future__ import annotations

import faulthandler
import gc
import io
import os
import pickle
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass
class Rank:
    """How a rank ended: its exit code, -9 for SIGKILL and so on; None if it had to be killed.

    seconds: how long it ran. out, err: what it printed. value: what the function returned.
    """

    code: int | None
    seconds: float
    out: str
    err: str
    value: Any = None

    @property
    def ended(self) -> str:
        """Say it in words: "exit code 1", "SIGKILL" or "hangs"."""
        if self.code is None:
            return "hangs"
        return f"exit code {self.code}" if self.code >= 0 else signal.Signals(-self.code).name


def fork(
    body: Callable[[int], Any],
    world_size: int,
    folder: Path,
    deadline_s: float,
    grace_s: float | None = None,
    during: Callable[[list[int]], None] = lambda pids: None,
) -> list[Rank]:
    """Run body(rank) in forks of this process, with output kept in `folder`; return how they ended.

    A fork inherits the imported torch: two ranks cost 0.2 s, a torchrun launch 5 s or more. Ranks
    that are late are killed, and write to stderr first where they hang. With `grace_s`, the others
    get SIGTERM so long after the first failure, as from a launcher. `during` gets the pids once all
    run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    ends: dict[int, tuple[int | None, float]] = {}  # rank: exit code, seconds
    pids = [_start(body, rank, folder, deadline_s) for rank in range(world_size)]
    end_others_at, deadline = float("inf"), started + deadline_s
    try:
        during(pids)
        while len(ends) < world_size and time.monotonic() < deadline:
            for rank in set(range(world_size)) - set(ends):
                done, status = os.waitpid(pids[rank], os.WNOHANG)
                if done:
                    code = os.waitstatus_to_exitcode(status)
                    ends[rank] = code, time.monotonic() - started
                    if code and grace_s is not None:
                        end_others_at = min(end_others_at, time.monotonic() + grace_s)
            if time.monotonic() > end_others_at:
                end_others_at = float("inf")
                for rank in set(range(world_size)) - set(ends):
                    os.kill(pids[rank], signal.SIGTERM)
            time.sleep(0.005)
    finally:
        late = set(range(world_size)) - set(ends)
        for rank in late:
            os.kill(pids[rank], signal.SIGABRT)  # faulthandler writes where it hangs
        time.sleep(0.3 * bool(late))
        for rank in late:
            os.kill(pids[rank], signal.SIGKILL)
            os.waitpid(pids[rank], 0)
            ends[rank] = None, time.monotonic() - started
    return [_read(folder, rank, *ends[rank]) for rank in range(world_size)]


def _read(folder: Path, rank: int, code: int | None, seconds: float) -> Rank:
    said = [(folder / f"rank-{rank}.{kind}").read_text(errors="replace") for kind in ("out", "err")]
    returned = folder / f"rank-{rank}.value"
    value = pickle.loads(returned.read_bytes()) if returned.exists() else None
    return Rank(code, seconds, *said, value)


def _start(body: Callable[[int], Any], rank: int, folder: Path, deadline_s: float) -> int:
    for kind in ("out", "err"):
        (folder / f"rank-{rank}.{kind}").touch()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        torch.set_num_threads(1)  # a fork has none of the threads that autograd would ask for
        signal.alarm(int(deadline_s) + 60)  # ends this rank if the process that should is gone
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # an abort need not leave a file behind
        gc.freeze()  # what the parent holds is not this rank's to collect, nor to copy
        for number, kind in ((1, "out"), (2, "err")):
            descriptor = os.open(folder / f"rank-{rank}.{kind}", os.O_WRONLY | os.O_APPEND)
            os.dup2(descriptor, number)
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
        sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), write_through=True)
        faulthandler.enable(sys.stderr)
        value = body(rank)
        (folder / f"rank-{rank}.value").write_bytes(pickle.dumps(value))
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # without the parent's own clean-up
