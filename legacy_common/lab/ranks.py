"""Run a function on several ranks of this machine, with a deadline, and tell how each ended."""

import faulthandler
import gc
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass
class Rank:
    """How a rank ended: exit code, -9 for SIGKILL, None if it hung; what it printed, returned."""

    code: int | None
    seconds: float
    out: str
    err: str
    value: Any = None

    @property
    def ended(self) -> str:
        """Say it in words: "exit code 1", "SIGKILL" or "hangs"."""
        if self.code is None or self.code >= 0:
            return "hangs" if self.code is None else f"exit code {self.code}"
        return signal.Signals(-self.code).name


def fork(
    body: Callable[[int], Any], world_size: int, folder: Path, deadline_s: float,
    grace_s: float | None = None, during: Callable[[list[int]], None] = lambda pids: None,
    guard: Callable[[list[int]], None] = lambda pids: None, values: Any = pickle,
) -> list[Rank]:  # fmt: skip
    """Run body(rank) in forks of this process, with output kept in `folder`; return how they ended.

    Late ranks write to stderr where they hang, and are killed. `grace_s` after the first failure
    the others get SIGTERM, as from a launcher. `during` gets the pids once all run, `guard` before:
    no body runs until it has returned, and none ever if this process is killed by then. `values`
    writes and reads what bodies return: json where they are not to be trusted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("fork")
    stems = [folder / f"rank-{rank}" for rank in range(world_size)]
    gate = os.pipe()
    ranks = [context.Process(target=_be, args=(body, rank, stem, deadline_s, gate, values))
             for rank, stem in enumerate(stems)]  # fmt: skip
    started, seconds, terminate_at = time.monotonic(), {}, float("inf")
    try:
        for stem, process in zip(stems, ranks, strict=True):
            stem.with_suffix(".out").write_text("")
            stem.with_suffix(".err").write_text("")
            process.start()
        guard([process.pid for process in ranks])
        os.write(gate[1], bytes(world_size))
    finally:
        for end in gate:
            os.close(end)
    try:
        during([process.pid for process in ranks])
        while len(seconds) < world_size and time.monotonic() < started + deadline_s:
            now = time.monotonic()
            for process in ranks:
                if process.exitcode is not None and process not in seconds:
                    seconds[process] = now - started
                    if process.exitcode and grace_s is not None:
                        terminate_at = min(terminate_at, now + grace_s)
                elif process.exitcode is None and now > terminate_at:
                    process.terminate()
            time.sleep(0.005)
    finally:
        late = [process for process in ranks if process.exitcode is None]
        for number in (signal.SIGABRT, signal.SIGKILL) if late else ():
            for process in late:
                os.kill(process.pid, number)  # the first has faulthandler write where it hangs
            time.sleep(0.3)
        for process in ranks:
            process.join()
    ended = []
    for stem, process in zip(stems, ranks, strict=True):
        out, err = (stem.with_suffix(kind).read_text(errors="replace") for kind in (".out", ".err"))
        returned = stem.with_suffix(".value")
        value = values.loads(returned.read_bytes()) if returned.exists() else None
        code = None if process in late else process.exitcode
        ended.append(Rank(code, seconds.get(process, deadline_s), out, err, value))
    return ended


def _be(
    body: Callable[[int], Any], rank: int, stem: Path, deadline_s: float, gate: tuple[int, int],
    values: Any,
) -> None:  # fmt: skip
    os.close(gate[1])
    if not os.read(gate[0], 1):  # its other end closed with nothing written
        os._exit(1)
    os.close(gate[0])
    for number, kind in ((1, ".out"), (2, ".err")):
        log = os.open(stem.with_suffix(kind), os.O_WRONLY | os.O_APPEND)
        os.dup2(log, number)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  until the rank ends
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(sys.stderr)
    torch.set_num_threads(1)  # a fork has none of the threads that autograd would ask for
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(deadline_s) + 60)  # ends this rank if the process that should is gone
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # an abort need not leave a file behind
    gc.freeze()  # what the parent holds is not this rank's to collect, nor to copy
    weakref.finalize._registry.clear()  # nor to finalize: 200 libraries of torch, 30 ms
    returned = values.dumps(body(rank))
    stem.with_suffix(".value").write_bytes(
        returned if isinstance(returned, bytes) else returned.encode()
    )
