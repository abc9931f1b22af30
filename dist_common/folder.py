"""An output folder belongs to one job: claimed, locked, and never taken from a run in it."""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from filelock import SoftFileLease, Timeout

from dist_common.cli import BAD_INPUT, UsageError

HEARTBEAT_S = 10.0  # how often a holder refreshes its lock
LEASE_S = 60.0  # a holder on another machine that has not refreshed it for so long is gone
POLL_S = 1.0
LOCK, HOLDER = ".lock", ".holder"


def claim(path: Path, resume: bool | None) -> None:
    """Make a folder and hold it until this process ends; refuse one in which a run would be lost.

    `resume` is None for a script that cannot resume. The lock of a process that died on this
    machine is taken over at once; on another machine (a shared disk) the lease decides.
    Raises: UsageError when it cannot be written, is held by another job, or is not empty.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UsageError(f"--output-dir {path} cannot be written: {error.strerror}") from error
    lease = SoftFileLease(
        path / LOCK, lease_duration=LEASE_S, heartbeat_interval=HEARTBEAT_S, on_compromise=_lost
    )
    _acquire(lease, path)
    empty = not {entry.name for entry in path.iterdir()} - {LOCK, HOLDER}
    resumable = (path / "checkpoints").is_dir()
    if not empty and not (resumable and resume):
        release(lease, path)
        hint = ", or add --resume to continue the run in it" if resumable else ""
        raise UsageError(f"--output-dir {path} is not empty: name another folder{hint}")
    now = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    (path / HOLDER).write_text(json.dumps({"pid": os.getpid(), "since": now, **_machine()}))
    atexit.register(release, lease, path)
    if resume is not None:  # a run that is killed before its first checkpoint resumes too
        (path / "checkpoints").mkdir(exist_ok=True)


def release(lease: SoftFileLease, path: Path) -> None:
    """Give the folder back."""
    (path / HOLDER).unlink(missing_ok=True)
    lease.release()


def _acquire(lease: SoftFileLease, path: Path) -> None:
    refreshed = None
    while True:
        try:
            lease.acquire(timeout=0)
            return
        except Timeout:
            try:
                holder = json.loads((path / HOLDER).read_text())
                marker = (path / LOCK).stat().st_mtime_ns
            except (OSError, ValueError):  # it is just being claimed or given back
                time.sleep(POLL_S / 10)
                continue
        who = f"pid {holder['pid']} on {holder['host']} since {holder['since']}"
        local = _machine().items() <= holder.items()
        if local or refreshed not in (None, marker):
            raise UsageError(
                f"--output-dir {path} is in use by {who}: wait for it, end it, or name another"
            )
        if refreshed is None:
            print(f"warning: {path} was claimed by {who}: waiting up to {LEASE_S:.0f} s for a sign "
                  "that this job still runs", file=sys.stderr)  # fmt: skip
        refreshed = marker
        time.sleep(POLL_S)


def _machine() -> dict[str, Any]:
    # Containers may share a host's name, but not its process numbers.
    namespace = Path("/proc/self/ns/pid")
    inode = namespace.stat().st_ino if namespace.exists() else 0
    return {"host": socket.gethostname(), "pid_namespace": inode}


def _lost(_: Any) -> None:
    # This process stood still for longer than the lease, and another job has the folder now.
    print(f"{Path(sys.argv[0]).name}: error: another job has taken over --output-dir: stopping",
          file=sys.stderr, flush=True)  # fmt: skip
    os._exit(BAD_INPUT)
