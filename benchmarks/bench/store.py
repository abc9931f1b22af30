"""A sweep's folder: its settings, and a record for each point that has ended.

DIR/sweep.json               {"settings": {...}, "started": ISO time, "command": "..."}
DIR/points/ID/record.json    written when the point has ended; its log is next to it
DIR/points/ID/run/           the script's own --output-dir
"""

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from dist_common.cli import UsageError

# How a point ended.
OK, FAILED, TIMEOUT, REFUSED = "ok", "failed", "timeout", "refused"
OUT_OF_MEMORY = "out of memory"
LOCK_WAIT_S = 10.0  # the ranks of a killed sweep hold its lock a little longer


@dataclass
class Sweep:
    """The content of a folder, or of one file of the gallery."""

    name: str
    settings: dict
    started: str
    command: str
    records: list


def now():
    return datetime.now(UTC).isoformat(timespec="seconds")


def load(path):
    """Read a sweep from its folder or from a file of results/. Raises: UsageError."""
    path = Path(path)
    file = path if path.is_file() else path / "sweep.json"
    try:
        content = json.loads(file.read_text())
        records = content.get("records", [])
        for record in sorted(path.glob("points/*/record.json")):
            file = record
            records.append(json.loads(record.read_text()))
        head = (content["settings"], content["started"], content["command"])
    except FileNotFoundError as error:
        raise UsageError(f"{path} is not a sweep: there is no {file}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error
    return Sweep(str(path), *head, records)


def write_json(path, content):
    """Write a file whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=2, default=str) + "\n")
    partial.replace(path)


class Store:
    """The folder of the sweep that runs, locked until this process ends."""

    def __init__(self, folder, settings, command):
        """Make the folder, or continue its sweep.

        Raises: UsageError when the folder is in use or holds something else.
        """
        self.folder = Path(folder)
        settings = json.loads(json.dumps(settings, default=str))
        head = self.folder / "sweep.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = FileLock(self.folder / ".lock")
            self.lock.acquire(timeout=LOCK_WAIT_S)
            others = {path.name for path in self.folder.iterdir()} - {".lock"}
        except Timeout as error:
            raise UsageError(
                f"another sweep runs in {folder}: wait for it, or name another folder"
            ) from error
        except OSError as error:
            raise UsageError(f"{folder} cannot be written: {error.strerror}") from error
        if head.exists():
            self.compare_settings(load(self.folder).settings, settings)
            return
        if others:
            raise UsageError(f"{folder} holds other files: name another folder")
        content = {"settings": settings, "started": now(), "command": command}
        write_json(head, content)

    def compare_settings(self, old, new):
        for name in sorted(old.keys() | new.keys()):
            if old.get(name) != new.get(name):
                raise UsageError(
                    f"{self.folder} holds a sweep with {name} {old.get(name)}, not "
                    f"{new.get(name)}: ask for the same, or name another folder"
                )

    def point_folder(self, identity):
        return self.folder / "points" / identity

    def read(self, identity):
        """Return a point's record; None if it has not ended."""
        path = self.point_folder(identity) / "record.json"
        return json.loads(path.read_text()) if path.exists() else None

    def write(self, record):
        folder = self.point_folder(record["id"])
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "record.json", record)
