"""One folder per sweep: what was asked for, a line for every finished point, the points' folders.

OUT/sweep.json       {"settings": {...}, "started": ISO time, "machines": [{...}, ...]}
OUT/results.jsonl    a record a line, appended and flushed as each point ends
OUT/points/ID/       the script's own folder, and log.txt
"""

import json
import os
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from legacy_common import cli

# Of a point.
OK, FAILED, TIMEOUT, SKIPPED, OUT_OF_MEMORY = STATUSES = (
    "ok", "failed", "timeout", "skipped", "out of memory",
)  # fmt: skip
SETTINGS, RESULTS = "sweep.json", "results.jsonl"
LOCK, PARTIAL = ".lock", ".partial"
LOCK_PATIENCE_S = 3.0  # the ranks of a killed sweep may hold its lock for a moment longer


@dataclass
class Sweep:
    """What a folder holds: records in the order in which they were first written, one per id."""

    folder: Path
    settings: dict[str, Any]
    started: str  # ISO time
    records: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # a line for every damaged line
    machines: list[dict[str, str]] = field(default_factory=list)  # on which its points ran


def now() -> str:
    """Return the time in UTC, as ISO 8601 to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def load(folder: str | Path) -> Sweep:
    """Read a sweep's folder; a damaged line is left out and named in `warnings`.

    Of two records with one id, as after --retry-failed, the later one counts. Raises: UsageError
    where there is no sweep or its sweep.json cannot be read.
    """
    folder = Path(folder)
    path = folder / SETTINGS
    if not path.is_file():
        raise cli.UsageError(f"{folder} holds no sweep: there is no {path}")
    try:
        content = json.loads(path.read_text())
        sweep = Sweep(folder, content["settings"], content["started"])
        sweep.machines = content.get("machines", [])
        if not (isinstance(sweep.settings, dict) and isinstance(sweep.started, str)):
            raise TypeError(content)
    except (ValueError, KeyError, TypeError) as error:
        damaged = f"{path} is damaged: name another folder, or remove this one"
        raise cli.UsageError(damaged) from error
    path = folder / RESULTS
    lines = path.read_bytes().splitlines() if path.exists() else []
    found: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        record = _record(line)
        if record is None:
            damage = "truncated" if number == len(lines) else "damaged"
            sweep.warnings.append(f"{path} line {number} is {damage}: left out")
        else:
            found[record["id"]] = record
    sweep.records = list(found.values())
    return sweep


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
        whole = isinstance(record["point"], dict) and record["id"] and record["status"] in STATUSES
    except (ValueError, KeyError, TypeError):
        return None
    return record if whole else None


class Store:
    """The folder of the sweep that runs: locked until `close`, a line appended for each point."""

    def __init__(
        self, folder: str | Path, settings: dict[str, Any], machine: dict[str, str] | None = None
    ) -> None:
        """Make the folder, or continue in it; `machine` is noted with the first point that runs.

        Raises: UsageError where it holds another sweep or other files, or a sweep runs in it.
        """
        self.folder = Path(folder)
        self.settings = json.loads(json.dumps(settings))  # as they will be read: lists, no tuples
        self.machine = machine
        self._make_folder()
        self.lock = FileLock(self.folder / LOCK)
        try:
            self.lock.acquire(timeout=LOCK_PATIENCE_S)
        except Timeout:
            held = f"another sweep is running in {self.folder}"
            raise cli.UsageError(f"{held}: wait for it, end it, or name another folder") from None
        if (self.folder / SETTINGS).exists():
            self._compare(load(self.folder).settings)
        else:
            self._write(Sweep(self.folder, self.settings, now()))
        cut = self._cut_half_a_line()
        self.sweep = load(self.folder)
        self.sweep.warnings += cut

    def _write(self, sweep: Sweep) -> None:
        content = {name: getattr(sweep, name) for name in ("settings", "started", "machines")}
        partial = self.folder / PARTIAL
        partial.write_text(json.dumps(content, indent=2) + "\n")
        partial.replace(self.folder / SETTINGS)

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            names = {entry.name for entry in self.folder.iterdir()}
            if SETTINGS not in names and names - {PARTIAL, LOCK}:
                other = f"{self.folder} holds other files than a sweep's"
                raise cli.UsageError(f"{other}: name another folder")
            (self.folder / LOCK).touch()
        except OSError as error:
            raise cli.UsageError(f"{self.folder} cannot be written: {error.strerror}") from error

    def _compare(self, old: dict[str, Any]) -> None:
        """Raise UsageError where the folder's sweep was asked for with other settings."""
        differ = []
        for name in {**self.settings, **old}:
            pair = [json.dumps(own.get(name)) for own in (old, self.settings)]
            if pair[0] != pair[1] and name != "points":  # which follow from the others
                there, here = (text if len(text) <= 60 else f"{text[:57]}..." for text in pair)
                differ.append(f"{name} ({there} there, {here} here)")
        if differ:
            other = f"{self.folder} holds another sweep's results: {', '.join(differ)}"
            raise cli.UsageError(f"{other}: name another folder, or ask for the same")

    def _cut_half_a_line(self) -> list[str]:
        """Cut what a killed sweep left of its last line, and say so: its point runs again."""
        path = self.folder / RESULTS
        text = path.read_bytes() if path.exists() else b""
        *lines, last = text.split(b"\n")
        if last and _record(last) is None:
            os.truncate(path, len(text) - len(last))
            return [f"{path} line {len(lines) + 1} was truncated: cut, its point runs again"]
        if last:
            path.write_bytes(text + b"\n")
        return []

    def append(self, record: dict[str, Any]) -> None:
        """Write a point's record to disk; it counts from then on, whatever happens to the sweep."""
        if self.machine and self.machine not in self.sweep.machines:
            self.sweep.machines.append(self.machine)
            self._write(self.sweep)
        with (self.folder / RESULTS).open("a") as file:
            file.write(json.dumps(record, default=str) + "\n")
            file.flush()
            os.fsync(file.fileno())
        others = [kept for kept in self.sweep.records if kept["id"] != record["id"]]
        self.sweep.records = [*others, record]

    def close(self) -> None:
        """Let another sweep have the folder."""
        self.lock.release()
