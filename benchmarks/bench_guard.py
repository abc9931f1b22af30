"""End processes and all that they started; also when the process that should do it was killed.

Imports psutil alone, since a guard is a process of its own beside each launch.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

PATIENCE_S = 5.0  # for a launcher that has to tell other machines


def end(pids: Sequence[int], gently: bool = False) -> None:
    """Kill processes with their descendants. Gently: SIGTERM first, and time to act on it.

    torchrun's ranks are in sessions of their own: no process group holds all of them.
    """
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            found += [process, *process.children(recursive=True)]
    if gently:
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        psutil.wait_procs(found, PATIENCE_S)
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@contextlib.contextmanager
def guarded(pids: Sequence[int], gently: bool = False) -> Iterator[None]:
    """Have the processes ended if this one dies inside the `with` block, by SIGKILL too."""
    words = [str(int(gently)), *map(str, pids)]
    command = [sys.executable, "-c", "import bench_guard; bench_guard.watch()", *words]
    folder = str(Path(__file__).parent)
    paths = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    guard = subprocess.Popen(
        command,
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
