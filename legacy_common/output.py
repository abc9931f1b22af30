"""The folder of --output-dir: claimed, locked, and refused where a run would be lost."""

import atexit
import os
import socket
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path

import psutil
from filelock import SoftFileLease, Timeout

from legacy_common import cli

HEARTBEAT_S, LEASE_S = 10.0, 60.0  # a lock is refreshed so often; it lapses when it is not
LOCK, HOLDER = ".lock", ".holder"


def claim(path: Path, resume: bool | None) -> None:
    """Make a folder and lock it until this process ends; refuse one in which a run would be lost.

    The lock of a process that died on this machine is taken over at once; on another (a shared
    disk) the lease decides. `resume` is None for a script that cannot resume.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise cli.UsageError(f"--output-dir {path} cannot be written: {error.strerror}") from error
    times = {"lease_duration": LEASE_S, "heartbeat_interval": HEARTBEAT_S}
    lease = SoftFileLease(path / LOCK, **times, on_compromise=_stop)
    _acquire(lease, path)
    atexit.register(lease.release)
    resumable = (path / "checkpoints").is_dir()
    if {entry.name for entry in path.iterdir()} - {LOCK, HOLDER} and not (resumable and resume):
        lease.release()
        hint = ", or add --resume to continue the run in it" if resumable else ""
        raise cli.UsageError(f"--output-dir {path} is not empty: name another folder{hint}")
    now = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    holder = f"pid {os.getpid()} on {socket.gethostname()} since {now}"
    (path / HOLDER).write_text(f"{holder}\n{_began(os.getpid())}")
    atexit.register((path / HOLDER).unlink, missing_ok=True)
    if resume is not None:  # a run that is killed before its first checkpoint resumes too
        (path / "checkpoints").mkdir(exist_ok=True)


def _acquire(lease: SoftFileLease, path: Path) -> None:
    for patience in (0.0, LEASE_S + HEARTBEAT_S):
        try:
            lease.acquire(timeout=patience)
            return
        except Timeout:
            text = (path / HOLDER).read_text() if (path / HOLDER).exists() else "another job"
            holder, _, began = text.partition("\n")
            here = f" on {socket.gethostname()} " in holder and began == _began(lease.pid or 0)
        if here or patience:
            held = f"--output-dir {path} is in use by {holder}"
            raise cli.UsageError(f"{held}: wait for it, end it, or name another folder")
        print(f"warning: {path}: waiting {LEASE_S:.0f} s for a sign of {holder}", file=sys.stderr)


def _began(pid: int) -> str:
    """Tell a process from an earlier one: a pod has the name and the pids of the one before it."""
    try:
        return str(psutil.Process(pid).create_time())
    except psutil.Error:
        return "ended"


def _stop(_: object) -> None:
    # This process stood still for longer than the lease, and another job has the folder now.
    print("error: another job has taken over --output-dir: stopping", file=sys.stderr, flush=True)
    os._exit(cli.BAD_INPUT)
