"""A report as PNGs: speed, memory, communication."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench import words
from bench.analysis import Analysis, Row
from bench.records import LOSSY, PARTS, UNCOMPARED, WRONG
from bench.store import OK
from legacy_common.lab.figure import figure
from legacy_common.measure import GIB

NAMES = ("speed.png", "memory.png", "communication.png")
MIB = 2**20  # bytes
MARKS = {LOSSY: "lossy", WRONG: "WRONG", UNCOMPARED: "loss not compared"}
COLORS = ("#2a78d6", "#eb8a2f", "#1a9e77", "#d5d8dc")  # of PARTS but the first
ROW_IN, REST_IN = 0.34, 1.3  # inches: of a bar, of all else around a group's bars


def draw_all(analysis: Analysis, folder: Path) -> list[Path]:
    """Draw what there is to draw into a folder; return the files."""
    groups = [rows for rows in analysis.groups if len(rows) > 1] or analysis.groups
    speed, memory, traffic = (folder / name for name in NAMES)
    for path, has, draw in (
        (speed, lambda row: row.step_time_ms, draw_speed),
        (memory, lambda row: row.memory("rest") is not None, draw_memory),
        (traffic, lambda row: row.median("bytes_sent_per_step"), draw_traffic),
    ):
        drawn = [[row for row in rows if row.verdict.kind in (OK, *MARKS) and has(row)]
                 for rows in groups]  # fmt: skip
        if any(drawn):
            draw_groups(path, list(filter(None, drawn)), draw)
    return [path for path in (speed, memory, traffic) if path.exists()]


def draw_groups(path: Path, groups: Sequence[Sequence[Row]], draw: Callable) -> None:
    """Draw bars of each group below those of the one before, the first row on top."""
    heights = [ROW_IN * len(rows) + REST_IN for rows in groups]
    shape = {"figsize": (9, sum(heights)), "height_ratios": heights, "squeeze": False}
    with figure(path, len(groups), 1, **shape) as axes:
        for rows, (axis,) in zip(groups, axes, strict=True):
            axis.set_title(words.title(rows[0].group), loc="left", fontsize=10)
            draw(axis, rows)
            names = []
            for row in rows:  # with its place, or with what keeps it from having one
                mark = MARKS.get(row.verdict.kind)
                place = f"{row.place}  " if draw is draw_speed and row.place else ""
                names.append(f"{row.label}: {mark}" if mark else f"{place}{row.label}")
            axis.set_yticks(range(len(rows)), names)
            axis.set_ylim(len(rows) - 0.4, -0.6)
            axis.margins(x=0.12)
            axis.spines[["top", "right"]].set_visible(False)


def draw_speed(axis: Any, rows: Sequence[Row]) -> None:
    """Draw step times with whiskers from p10 to p90; hatched is what has no place."""
    for line, row in enumerate(rows):
        middle, wrong = row.step_time_ms, row.verdict.kind == WRONG
        whiskers = middle - row.percentile_ms(10), row.percentile_ms(90) - middle
        axis.barh(
            line, middle, 0.66, color="#f3b8b6" if wrong else COLORS[0] if row.verdict.ranked
            else "#b9d3f0", hatch=None if row.verdict.ranked else "///",
            edgecolor="#c62828" if wrong else "white", capsize=3, ecolor="#333333",
            xerr=[[max(0.0, long)] for long in whiskers],
        )  # fmt: skip
    axis.set_xlabel("ms per step: median, p10 to p90")


def draw_memory(axis: Any, rows: Sequence[Row]) -> None:
    """Stack what a rank holds at its peak, without what it held before the model."""
    for line, row in enumerate(rows):
        left = 0.0
        for part, color in zip(PARTS[1:], COLORS, strict=True):
            width = row.memory(part) * GIB / MIB
            axis.barh(line, width, 0.66, left=left, color=color, label=None if line else part)
            left += width
        peak = words.gib(row.median("peak_memory_gib"))
        axis.text(left, line, f" peak {peak}", va="center", fontsize=8)
    axis.set_xlabel("MiB at the peak, on the rank with most, beyond what it held before the model")
    axis.legend(ncols=len(PARTS), fontsize=8, frameon=False, loc="lower right",
                bbox_to_anchor=(1, 1))  # fmt: skip
    axis.set_title(axis.get_title(loc="left"), loc="left", fontsize=10, pad=24)


def draw_traffic(axis: Any, rows: Sequence[Row]) -> None:
    """Draw what a rank sends in a step, and in how many calls."""
    sent = [row.median("bytes_sent_per_step") / MIB for row in rows]
    bars = axis.barh(range(len(rows)), sent, 0.66, color=COLORS[2])
    calls = [f"{words.count(row.median('calls_per_step'))} calls" for row in rows]
    axis.bar_label(bars, calls, padding=3, fontsize=8)
    axis.set_xlabel("MiB sent per step, by the rank that sends most")
