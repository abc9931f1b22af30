"""What the papers say of a schedule, what is checked of it, and its picture.

`spans` are what the lesson's simulate returns: each rank's (instruction, start, end), in order.
"""

from pathlib import Path

from legacy_common.lab.figure import figure
from legacy_common.report import Report

COLOURS = {"F": "#4c78a8", "B": "#f58518", "I": "#f58518", "W": "#54a24b"}
LEGEND = {"F": "F forward", "B": "B backward, I input gradient", "W": "W weight gradient"}
SOURCE = "the paper's formula"


def bubble_formula(name: str, p: int, m: int, v: int = 1, backward: float = 2.0) -> float:
    """Return the idle fraction of all ranks' time, for m >= p where a schedule needs it.

    Sources: Huang et al., 2019, section 2.3; Narayanan et al., 2021, section 2.2; Qi et al., 2024,
    section 2, with I at most as long as F.
    """
    if name == "naive":  # one rank of p works at any time
        return (p - 1) / p
    if name == "zb-h1":
        idle = p - 1  # times F + I - W, where I takes as long as W
        return idle / (idle + m * (1 + backward))
    share = v if name == "interleaved" else 1
    return (p - 1) / (share * m + p - 1)


def peak_formula(name: str, rank: int, p: int, m: int, v: int = 1) -> float:
    """Return the most micro-batches whose activations a rank keeps (sources as above).

    Interleaved, in chunks of 1/v of a rank's layers: Korthikanti et al. (2022), section 4.2.3.
    """
    chunks = 2 * (p - rank - 1) + (v - 1) * p + 1
    return {
        "naive": 1,
        "gpipe": m,
        "1f1b": min(m, p - rank),
        "interleaved": min(m * v, chunks) / v,
        "zb-h1": min(m, p),  # 1F1B's p - rank, and `rank` micro-batches whose W is put off
    }[name]


def check(report: Report, name: str, v: int, wrong: list, idle: float, held: list) -> None:
    """Check broken rules, the bubble, and the micro-batches that each rank keeps."""
    p, m = report.args.stages, report.args.micro_batches
    for line in wrong[:3]:
        report.say(f"{name}: {line}")
    report.check(f"{name}: broken rules", len(wrong), 0, 0, "what each instruction needs")
    expected = bubble_formula(name, p, m, v, report.args.backward)
    report.check(f"{name}: bubble", idle, expected, 1e-9, SOURCE)
    errors = sum(abs(kept - peak_formula(name, rank, p, m, v)) for rank, kept in enumerate(held))
    report.check(f"{name}: error of micro-batches kept", errors, 0, 1e-9, SOURCE)
    report.metrics[name] = {"bubble": idle, "held": held}


def span_of(spans) -> tuple[float, float]:
    """Return when the first instruction starts and the last one ends."""
    every = [span for rank in spans for span in rank]
    return min(span.start for span in every), max(span.end for span in every)


def draw(path: Path, timelines: dict, label: str | None = None) -> None:
    """Draw {title: spans} below each other; on one axis of time if `label` names it."""
    from matplotlib.patches import Patch

    p = len(next(iter(timelines.values())))
    size = (10, 0.6 + len(timelines) * (0.6 + 0.2 * p))
    lengths = [end - start for start, end in map(span_of, timelines.values())]
    with figure(path, len(timelines), 1, figsize=size, squeeze=False, sharex=bool(label)) as axes:
        for row, (title, spans), length in zip(axes[:, 0], timelines.items(), lengths, strict=True):
            draw_ranks(row, spans, title, max(lengths) if label else length)
        if label:
            row.set_xlabel(label, fontsize=9)
        handles = [Patch(color=COLOURS[kind], label=text) for kind, text in LEGEND.items()]
        place = {"loc": "outside upper right", "ncols": 3, "fontsize": 8, "frameon": False}
        row.figure.legend(handles=handles, **place)


def draw_ranks(axes, spans, title: str, width: float) -> None:
    """Draw a row per rank and a box per instruction, with its micro-batch; paler: a later stage."""
    p = len(spans)
    zero, _ = span_of(spans)
    for rank, row in enumerate(spans):
        for (kind, stage, k), start, end in row:
            style = {"color": COLOURS[kind], "alpha": 0.9 if stage < p else 0.45}
            style |= {"edgecolor": "white", "linewidth": 0.6}
            box = axes.barh(rank, end - start, 0.86, start - zero, **style)
            if end - start > 0.011 * width:
                axes.bar_label(box, [k], label_type="center", fontsize=7)
    names = [f"rank {rank}" for rank in range(p)]
    axes.set(xlim=(0, width), ylim=(p - 0.5, -0.5), yticks=range(p), yticklabels=names)
    axes.set_title(title, fontsize=9, loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False, labelsize=8)
