"""What the papers say of a schedule, and its picture."""

from pp_schedules import Span

COLOURS = {"F": "#4c78a8", "B": "#f58518", "I": "#f58518", "W": "#54a24b"}


def durations(name: str, v: int, backward: float = 2.0) -> dict[str, float]:
    """Return how long each kind takes; a stage of v on a rank takes 1/v, I and W half of B each."""
    share = v if name == "interleaved" else 1
    half = backward / 2
    return {"F": 1 / share, "B": backward / share, "I": half, "W": half}


def bubble_formula(name: str, p: int, m: int, v: int = 1, backward: float = 2.0) -> float:
    """Return the idle fraction of all ranks' time, for m >= p where a schedule needs it.

    Sources: Huang et al., 2019, section 2.3; Narayanan et al., 2021, section 2.2; Qi et al., 2024,
    section 2, with I at most as long as F.
    """
    if name == "naive":  # one rank of p works at any time
        return (p - 1) / p
    if name == "interleaved":
        return (p - 1) / (v * m + p - 1)
    if name == "zb-h1":
        t = durations(name, v, backward)
        idle = (p - 1) * (t["F"] + t["I"] - t["W"])
        return idle / (idle + m * (t["F"] + t["I"] + t["W"]))
    return (p - 1) / (m + p - 1)


def peak_formula(name: str, rank: int, p: int, m: int, v: int = 1) -> float:
    """Return the most micro-batches whose activations a rank keeps (sources as above)."""
    return {
        "naive": 1,
        "gpipe": m,
        "1f1b": min(m, p - rank),
        "interleaved": min(m * v, 2 * (p - rank - 1) + (v - 1) * p + 1) / v,
        "zb-h1": min(m, p),  # 1F1B's p - rank, and `rank` micro-batches whose W is put off
    }[name]


def span_of(spans: list[list[Span]]) -> tuple[float, float]:
    """Return when the first instruction starts and the last one ends."""
    every = [span for rank in spans for span in rank]
    return min(span.start for span in every), max(span.end for span in every)


def draw(axes, spans: list[list[Span]], title: str, width: float) -> None:
    """Draw a row per rank and a box per instruction, with its micro-batch; paler: a later stage.

    `width` is the time that the axis covers.
    """
    p = len(spans)
    zero, _ = span_of(spans)
    for rank, row in enumerate(spans):
        for span in row:
            kind, length = span.instruction.kind, span.end - span.start
            alpha = 0.9 if span.instruction.stage < p else 0.45
            axes.barh(rank, length, left=span.start - zero, height=0.86, color=COLOURS[kind],
                      alpha=alpha, edgecolor="white", linewidth=0.6)  # fmt: skip
            if length > 0.011 * width:
                axes.text(span.start - zero + length / 2, rank, str(span.instruction.micro_batch),
                          ha="center", va="center", fontsize=7)  # fmt: skip
    names = [f"rank {rank}" for rank in range(p)]
    axes.set(xlim=(0, width), ylim=(p - 0.5, -0.5), yticks=range(p), yticklabels=names)
    axes.set_title(title, fontsize=9, loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False, labelsize=8)


def legend(canvas) -> None:
    """Say once what the colours mean."""
    from matplotlib.patches import Patch

    kinds = {"F": "F forward", "B": "B backward, I input gradient", "W": "W weight gradient"}
    handles = [Patch(color=COLOURS[kind], label=text) for kind, text in kinds.items()]
    canvas.legend(handles=handles, loc="outside upper right", ncols=3, fontsize=8, frameon=False)
