"""What has changed since another sweep, beyond the noise of both. Nothing is printed."""

import statistics
from dataclasses import dataclass
from typing import Any

from bench_analysis import Analysis, Row, noisy_by
from bench_records import Group, differences, finite
from bench_verdicts import tolerance_of

# The numbers of Run that are compared.
COMPARED = {"step_time_ms": "step time", "peak_memory_gib": "memory", "bytes_sent_per_step": "sent"}


@dataclass
class Change:
    """One number of a strategy, new and old; `beyond` None where no noise is known for it."""

    name: str
    old: float
    new: float
    beyond: bool | None

    @property
    def ratio(self) -> float:
        return self.new / self.old if self.old else (1.0 if self.new == self.old else float("inf"))


@dataclass
class Pair:
    """A strategy that both sweeps have: its numbers; flags and verdict where they changed."""

    row: Row
    changes: dict[str, Change]
    loss: Change | None
    flags: tuple[str, str] | None  # old, new
    verdict: tuple[str, str] | None  # old, new


@dataclass
class Comparison:
    folder: str  # of the older sweep
    pairs: list[Pair]
    only_new: list[Row]
    only_old: list[Row]
    conditions: list[tuple[str, str, str]]  # name, old, new


def compare(new: Analysis, old: Analysis) -> Comparison:
    """Set each strategy beside itself in an older sweep: same job, ranks and link."""
    before = {key_of(row): row for row in old.rows}
    after = {key_of(row): row for row in new.rows}
    memory = wider(new.memory_noise, old.memory_noise)
    pairs = []
    for key, row in after.items():
        if key in before:
            both = [(new, row), (old, before[key])]
            time = wider(*(found.noises[noisy_by(own.group)].width for found, own in both))
            widths = dict(zip(COMPARED, (time, memory, 0.0), strict=True))  # bytes are counted
            pairs.append(pair_of(row, before[key], widths))
    return Comparison(
        " and ".join(str(sweep.folder) for sweep in old.sweeps),
        pairs,
        [row for key, row in after.items() if key not in before],
        [row for key, row in before.items() if key not in after],
        differences(old.conditions, new.conditions),
    )


def wider(*widths: float | None) -> float | None:
    """Return the larger width; None where one of them is not known."""
    return None if None in widths else max(widths)


def key_of(row: Row) -> tuple[Any, ...]:
    """Return what names a point in any sweep."""
    return (*(getattr(row.group, name) for name in NAMES), row.label)


NAMES = [name for name in Group.__dataclass_fields__ if name != "scope"]


def pair_of(new: Row, old: Row, widths: dict[str, float | None]) -> Pair:
    """Compare two rows; what one of them lacks is left out."""
    changes = {}
    for name, width in widths.items():
        values = old.median(name), new.median(name)
        if None in values:
            continue
        change = Change(COMPARED[name], *values, None)
        low, high = sorted(values)
        change.beyond = None if width is None else high > low * (1 + width)
        changes[name] = change
    losses = loss_of(old), loss_of(new)
    loss = None
    if None not in losses:
        allowed = tolerance_of(new.group)
        apart = [abs(a - b) for a, b in zip(new.runs[0].losses, old.runs[0].losses, strict=False)]
        early = max(filter(finite, apart), default=0.0)
        loss = Change("loss", *losses, abs(losses[1] - losses[0]) > allowed.final)
        loss.beyond = loss.beyond or early > allowed.early
    flags = flags_of(old), flags_of(new)
    verdicts = old.verdict.kind, new.verdict.kind
    return Pair(new, changes, loss, changed(*flags), changed(*verdicts))


def changed(old: str, new: str) -> tuple[str, str] | None:
    """Return both where they differ."""
    return (old, new) if old != new else None


def loss_of(row: Row) -> float | None:
    """Return the median loss of the repeats that have one."""
    losses = [run.final_loss for run in row.runs if finite(run.final_loss)]
    return statistics.median(losses) if losses else None


def flags_of(row: Row) -> str:
    """Return the script and its flags, as the sweep started it."""
    point = row.runs[0].record["point"]
    return " ".join(map(str, (point.get("script", ""), *(point.get("flags") or ()))))


def beyond_noise(comparison: Comparison) -> list[tuple[Pair, Change]]:
    """Return what changed beyond the noise."""
    return [
        (pair, change)
        for pair in comparison.pairs
        for change in (*pair.changes.values(), pair.loss)
        if change and change.beyond
    ]
