"""End processes and their children, even if this process is killed.

Started as a script, this file is the guard: it waits until its stdin closes, then ends
the processes whose ids are its arguments. A guard runs next to each launch, so it
imports only psutil.
"""

import contextlib
import os
import signal
import subprocess
import sys

import psutil

GRACE_S = 3.0  # between SIGTERM and SIGKILL: srun has to tell other machines


def run(words, timeout_s, **options):
    """Run a command with Popen's options; return its exit code, None at the deadline.

    At its end, all processes that it started end, too.
    """
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, start_new_session=True, **options
    )
    with guarded([process.pid]):
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end([process.pid])
            process.wait()


def end(pids):
    """End processes and their descendants: SIGTERM, then SIGKILL.

    torchrun starts a session for each rank, so no process group contains all ranks.
    """
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            processes += [process, *process.children(recursive=True)]
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, running = psutil.wait_procs(processes, GRACE_S)
    for process in running:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    for pid in pids:  # orphans of a process that has ended are still in its group
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


@contextlib.contextmanager
def guarded(pids):
    """End these processes if this one dies inside the block, by SIGKILL too."""
    guard = subprocess.Popen(
        [sys.executable, __file__, *map(str, pids)],
        stdin=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C in the terminal is not for the guard
    )
    try:
        yield
    finally:
        guard.kill()
        guard.wait()
        guard.stdin.close()


if __name__ == "__main__":
    sys.stdin.read()
    end([int(word) for word in sys.argv[1:]])
