"""Pictures of simulate.py: a step by stage, its collectives beneath; MFU by number of GPUs."""

from __future__ import annotations

from pathlib import Path

from dist_common.costs.timeline import makespan
from dist_common.lab.figure import figure

COLOURS = {
    "F": "#4c78a8", "B": "#f58518", "I": "#f58518", "W": "#54a24b", "optimizer": "#888888",
    "tp": "#b279a2", "cp": "#9d755d", "ep": "#ff9da6", "dp": "#d62728", "pp": "#17a2a2",
}  # fmt: skip
LEGEND = {"F": "forward", "B": "backward", "W": "weight gradient", "optimizer": "optimizer"}


def draw(path: Path, cases: list, found: list) -> None:
    """Draw each case on one axis of time: a row per stage, its collectives as lines beneath."""
    from matplotlib.patches import Patch

    heights = [0.5 + 0.4 * len(case.names()) for case in cases]
    whole = max(map(makespan, found))
    options = {"figsize": (11, 0.9 + sum(heights)), "squeeze": False, "sharex": True}
    with figure(path, len(cases), 1, height_ratios=heights, **options) as axes:
        used = []
        for row, case, events in zip(axes[:, 0], cases, found, strict=True):
            used += draw_case(row, case, events, whole)
            row.set_title(f"{case.name}: {makespan(events):.3f} s", fontsize=9, loc="left")
        row.set_xlabel("seconds", fontsize=9)
        kinds = [kind for kind in COLOURS if kind in used and kind != "I"]
        handles = [Patch(color=COLOURS[kind], label=LEGEND.get(kind, kind)) for kind in kinds]
        place = {"loc": "outside upper right", "ncols": 8, "fontsize": 8, "frameon": False}
        row.figure.legend(handles=handles, **place)


def draw_case(axes, case, events, whole: float) -> list[str]:
    """Draw the events of one case; return the kinds that were drawn."""
    names = dict(sorted(case.names().items()))
    rows = {place: row for row, place in enumerate(names)}
    drawn = [event for event in events.values() if event.end > event.start]
    streams = [s for s in COLOURS if any(event.task.stream == s for event in drawn)]
    boxes: dict[tuple, list] = {}
    spans: dict[tuple, tuple] = {}  # of an instruction, over its pieces
    for (key, name, place, stream, *_), start, end in drawn:
        kind = stream if stream != "compute" else "optimizer" if name == "optimizer" else key[1]
        boxes.setdefault((place, stream, kind), []).append((start, end - start))
        if stream == "compute" and kind != "optimizer":
            first, _ = spans.get((place, *key[1:4]), (start, end))
            spans[(place, *key[1:4])] = first, end
    for (place, stream, kind), bars in boxes.items():
        line = 0.36 / max(1, len(streams))
        low = rows[place] + 0.1 + line * streams.index(stream) if stream in streams else rows[place]
        lane = (rows[place] - 0.42, 0.5) if stream == "compute" else (low, line)
        axes.broken_barh(bars, lane, color=COLOURS[kind], linewidth=0)
    for (place, _, _, k), (start, end) in spans.items():
        axes.plot([end, end], [rows[place] - 0.42, rows[place] + 0.08], color="white", lw=0.5)
        if end - start > 0.012 * whole:
            style = {"ha": "center", "va": "center", "fontsize": 6.5, "color": "white"}
            axes.text((start + end) / 2, rows[place] - 0.17, k, **style)
    axes.set(xlim=(0, whole), ylim=(len(names) - 0.5, -0.5), yticks=range(len(names)))
    axes.set_yticklabels([name.partition(" (")[0] for name in names.values()], fontsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False, labelsize=8)
    return [kind for _, _, kind in boxes]


def draw_scale(path: Path, points: list) -> None:
    """Draw (GPUs, MFU with sequences per GPU kept, MFU with those of a step kept or None)."""
    with figure(path, figsize=(6, 3.2)) as axes:
        for column, label in ((1, "sequences per GPU kept"), (2, "sequences per step kept")):
            known = [(point[0], 100 * point[column]) for point in points if point[column]]
            axes.plot(*zip(*known, strict=True), marker="o", label=label)
        axes.set(xscale="log", xlabel="GPUs", ylabel="MFU, %", ylim=(0, None))
        axes.legend()
