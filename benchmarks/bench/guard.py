"""Run a command, and end processes with all that they started, also when this process is killed.

Imports psutil alone, since a guard is a process of its own beside each launch.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

PATIENCE_S = 5.0  # for a launcher that has to tell other machines
# Holds a command back until its guard is there; never runs it if this process is killed by then.
GATE = ("sh", "-c", 'read -r go && exec "$@" </dev/null', "gate")


def run(words: Sequence[str], timeout_s: float, gently: bool = False, **how) -> int | None:
    """Run a command with Popen's arguments `how`; return its exit code, None at the deadline.

    What it started is ended with it, and so is all of it if this process dies.
    """
    how |= {"stdin": subprocess.PIPE, "start_new_session": True}
    process = subprocess.Popen([*GATE, *words], **how)
    with guarded([process.pid], gently):
        process.stdin.write(b"go\n")
        process.stdin.close()
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end([process.pid], gently)
            process.wait()


def end(pids: Sequence[int], gently: bool = False) -> None:
    """Kill processes with their descendants. Gently: SIGTERM first, and time to act on it.

    torchrun's ranks are in sessions of their own: no process group holds all of them. Orphans of
    a process that has ended are no descendants of it, but are in the group that it led.
    """
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            found += [process, *process.children(recursive=True)]
    for number in (signal.SIGTERM, signal.SIGKILL)[not gently :]:
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        if number == signal.SIGTERM:
            psutil.wait_procs(found, PATIENCE_S)
    for pid in pids:
        # No such group, or on macOS one of zombies.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


@contextlib.contextmanager
def guarded(pids: Sequence[int], gently: bool = False) -> Iterator[None]:
    """Have the processes ended if this one dies inside the `with` block, by SIGKILL too."""
    words = [str(int(gently)), *map(str, pids)]
    folder = str(Path(__file__).parents[1])
    paths = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    guard = subprocess.Popen(
        [sys.executable, "-c", "from bench import guard; guard.watch()", *words],
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths},
        start_new_session=True,  # Ctrl-C in the terminal is not meant for it
    )
    try:
        yield
    finally:
        guard.kill()
        guard.wait()
        guard.stdin.close()


def watch() -> None:
    """Wait until the pipe to the process that started this one closes, then end the others."""
    sys.stdin.read()
    gently, *pids = map(int, sys.argv[1:])
    end(pids, bool(gently))
