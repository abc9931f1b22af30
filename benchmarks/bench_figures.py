"""A report as PNGs: speed, memory, communication, scaling."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import bench_words as words
from bench_analysis import Analysis, Row
from bench_records import LOSSY, PARTS, UNCOMPARED, WRONG
from bench_store import OK
from dist_common.measure import GIB
from dist_common.report import figure

NAMES = ("speed.png", "memory.png", "communication.png", "scaling.png")
MIB = 2**20  # bytes
MARKS = {LOSSY: "lossy", WRONG: "WRONG", UNCOMPARED: "loss not compared"}
COLORS = ("#2a78d6", "#eb8a2f", "#1a9e77", "#d5d8dc")  # of PARTS but the first
STYLES = ("-", "--", ":")  # of lines: matplotlib's ten colors come round again
ROW_IN, REST_IN = 0.34, 1.3  # inches: of a bar, of all else around a group's bars


def draw_all(analysis: Analysis, folder: Path) -> list[Path]:
    """Draw what there is to draw into a folder; return the files."""
    several = [rows for rows in analysis.groups if len(rows) > 1]
    measured = [[row for row in rows if row.verdict.kind in (OK, *MARKS)]
                for rows in several or analysis.groups]  # fmt: skip
    paths = []
    for name, has, draw in (
        (NAMES[0], lambda row: row.step_time_ms, draw_speed),
        (NAMES[1], lambda row: row.memory("rest") is not None, draw_memory),
        (NAMES[2], lambda row: row.median("bytes_sent_per_step"), draw_traffic),
    ):
        drawn = [[row for row in rows if has(row)] for rows in measured]
        drawn = [rows for rows in drawn if rows]
        if drawn:
            paths.append(folder / name)
            draw_groups(paths[-1], drawn, draw)
    if analysis.scaling:
        paths.append(folder / NAMES[3])
        draw_scaling(paths[-1], analysis)
    return paths


def draw_groups(path: Path, groups: Sequence[Sequence[Row]], draw: Callable) -> None:
    """Draw bars of each group below those of the one before, the first row on top."""
    heights = [ROW_IN * len(rows) + REST_IN for rows in groups]
    shape = {"figsize": (9, sum(heights)), "height_ratios": heights, "squeeze": False}
    with figure(path, len(groups), 1, **shape) as axes:
        for rows, (axis,) in zip(groups, axes, strict=True):
            axis.set_title(words.title(rows[0].group), loc="left", fontsize=10)
            draw(axis, rows)
            axis.set_yticks(range(len(rows)), [name_of(row, draw is draw_speed) for row in rows])
            axis.set_ylim(len(rows) - 0.4, -0.6)
            axis.margins(x=0.12)
            axis.spines[["top", "right"]].set_visible(False)


def name_of(row: Row, placed: bool) -> str:
    """Return a bar's label: strategy, and its place or what keeps it from having one."""
    mark = MARKS.get(row.verdict.kind)
    place = f"{row.place}  " if placed and row.place else ""
    return f"{row.label}: {mark}" if mark else f"{place}{row.label}"


def draw_speed(axis: Any, rows: Sequence[Row]) -> None:
    """Draw step times with whiskers from p10 to p90; hatched is what has no place."""
    for line, row in enumerate(rows):
        middle = row.step_time_ms
        whiskers = [
            max(0.0, middle - row.percentile_ms(10)),
            max(0.0, row.percentile_ms(90) - middle),
        ]
        wrong = row.verdict.kind == WRONG
        axis.barh(
            line, middle, 0.66, color="#f3b8b6" if wrong else COLORS[0] if row.verdict.ranked
            else "#b9d3f0", hatch=None if row.verdict.ranked else "///",
            edgecolor="#c62828" if wrong else "white", xerr=[[w] for w in whiskers], capsize=3,
            ecolor="#333333",
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


def draw_scaling(path: Path, analysis: Analysis) -> None:
    """Draw step time and efficiency over the number of ranks, a row for each job."""
    count = len(analysis.scaling)
    shape = {"figsize": (9, 3.6 * count), "squeeze": False}
    with figure(path, count, 2, **shape) as axes:
        for lines, (left, right) in zip(analysis.scaling, axes, strict=True):
            group = lines[0].row.group
            job = f"{group.preset}, {group.precision}, global batch {group.global_batch_size}"
            left.set_title(job, loc="left", fontsize=10)
            right.axhline(100, color="grey", linestyle="--", linewidth=1)
            for number, line in enumerate(lines):
                sizes = sorted(line.times_ms)
                style = {"marker": "o", "linestyle": STYLES[number // 10 % len(STYLES)]}
                left.plot(sizes, [line.times_ms[n] for n in sizes], **style)
                percents = [100 * line.efficiency[n] for n in sizes]
                right.plot(sizes, percents, label=line.row.label, **style)
            left.set(xlabel="ranks", ylabel="ms per step")
            right.set(xlabel="ranks", ylabel="percent of ideal")
            for axis in (left, right):
                axis.set_ylim(bottom=0)
                axis.set_xticks(sorted({n for line in lines for n in line.times_ms}))
                axis.grid(alpha=0.3)
            right.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
