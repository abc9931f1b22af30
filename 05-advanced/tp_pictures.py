"""Draw what each rank holds of a block, from the shapes of a block that ran.

`blocks` is {name: tp_costs.BlockRun}: one process first, then tensor, then sequence parallelism.
"""

from collections.abc import Iterator
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from dist_common.report import figure
from tp_costs import BlockRun

GREY = "0.88"
# What passes through a block: its name in the picture, and what BlockRun.tensors calls it.
TENSORS = (
    ("x", "x"), ("norm", "attention_norm out"), ("f", "wq in"), ("q", "wq out"),
    ("wo", "wo out"), ("g, + x", "ffn_norm in"), ("norm", "ffn_norm out"), ("f", "gate in"),
    ("gate", "gate out"), ("down", "down out"), ("g, + x", "out"),
)  # fmt: skip
PARTIAL = ("wo", "down")  # each rank has a part of the sum that g makes


def parts_of(whole: tuple[int, ...], own: tuple[int, ...]) -> tuple[int | None, int]:
    """Return the dim that is cut, None where each rank has it whole, and into how many parts."""
    cut = [dim for dim, sizes in enumerate(zip(whole, own, strict=True)) if len(set(sizes)) > 1]
    return (cut[0], whole[cut[0]] // own[cut[0]]) if cut else (None, 1)


def rectangles(
    x: float, y: float, width: float, height: float, across: bool, parts: int
) -> Iterator[tuple[int, tuple[float, float, float, float]]]:  # fmt: skip
    """Yield (rank, (x, y, width, height)): stripes side by side, or one below the other."""
    for rank in range(parts):
        if across:
            yield rank, (x + rank * width / parts, y, width / parts, height)
        else:
            yield rank, (x, y + rank * height / parts, width, height / parts)


def draw_stripes(panel: Axes, box: tuple[float, ...], across: bool, parts: int, hatch="") -> None:
    """Draw a matrix cut into stripes, one a rank, with the rank's number; grey if it is whole."""
    for rank, (x, y, width, height) in rectangles(*box, across, parts):
        color = GREY if parts == 1 else f"C{rank % 10}"
        style = {"facecolor": color, "edgecolor": "black", "linewidth": 0.8, "hatch": hatch}
        panel.add_patch(Rectangle((x, y), width, height, alpha=0.75, **style))
        if parts > 1:
            middle = (x + width / 2, y + height / 2)
            panel.text(*middle, str(rank), ha="center", va="center", fontsize=9)


def draw_cuts(path: Path, blocks: dict[str, BlockRun]) -> None:
    """Draw each matrix of a block as (in, out), coloured by the rank that holds the part."""
    whole, own = blocks["one process"].weights, blocks["tensor parallel"].weights
    lines = (("attention", ("wq", "wk", "wv"), "wo"), ("feed-forward", ("gate", "up"), "down"))
    gap = 0.45 * whole["wq"][1]
    top, right = 0.0, 0.0
    with figure(path, 1, 1, figsize=(10, 5.4)) as panel:
        for title, into, out_of in lines:
            panel.text(0, top - 0.8 * gap, title, fontsize=12, weight="bold")
            x = step(panel, "f", 0.0, top, gap)
            for name in into:
                draw_matrix(panel, name, whole[name], own[name], x, top)
                x += whole[name][0] + gap
            x = step(panel, "heads" if out_of == "wo" else "silu, *", x - gap, top, gap)
            draw_matrix(panel, out_of, whole[out_of], own[out_of], x, top)
            right = max(right, step(panel, "g", x + whole[out_of][0], top, gap))
            top += whole[out_of][1] + 2 * gap
        panel.set_xlim(-0.2 * gap, right)
        panel.set_ylim(top - gap, -1.2 * gap)
        panel.set_aspect("equal")
        panel.axis("off")


def step(panel: Axes, text: str, x: float, top: float, gap: float) -> float:
    """Draw an arrow with a text above; return where it ends."""
    y, end = top + gap, x + 1.6 * gap
    panel.annotate("", (end - 0.2 * gap, y), (x + 0.2 * gap, y), arrowprops={"arrowstyle": "->"})
    panel.text((x + end) / 2, y - 0.15 * gap, text, ha="center", va="bottom", fontsize=11)
    return end


def draw_matrix(panel: Axes, name: str, whole, own, x: float, top: float) -> None:
    """Draw a matrix with its name and size. Shapes: a layer's weight is (out, in)."""
    outputs, inputs = whole
    dim, parts = parts_of(whole, own)
    draw_stripes(panel, (x, top, outputs, inputs), dim == 0, parts)
    how = {0: "columns", 1: "rows", None: "whole"}[dim]
    panel.text(x + outputs / 2, top - 5, f"{name}: {how}", ha="center", fontsize=9)
    size = f"{inputs} x {outputs}"
    panel.text(x + outputs / 2, top + inputs + 5, size, ha="center", va="top", fontsize=9)


def draw_tensors(path: Path, blocks: dict[str, BlockRun]) -> None:
    """Draw what passes through a block as (tokens, features), coloured by the rank that holds it.

    One row for tensor parallelism, one for sequence parallelism. Grey: whole on each rank.
    """
    whole = blocks["one process"].tensors
    names = list(blocks)[1:]
    with figure(path, len(names), 1, figsize=(11, 3.6)) as panels:
        for panel, name in zip(panels, names, strict=True):
            for number, (label, key) in enumerate(TENSORS):
                # The batch is not drawn: (B, T, features) becomes T down, features to the right.
                dim, parts = parts_of(whole[key][1:], blocks[name].tensors[key][1:])
                hatch = "///" if label in PARTIAL else ""
                draw_stripes(panel, (number * 1.35, 0, 1, 1), dim == 1, parts, hatch)
                panel.text(number * 1.35 + 0.5, 1.1, label, ha="center", va="top", fontsize=10)
            panel.set_title(name, loc="left", fontsize=11)
            panel.set_aspect("equal")
            panel.set_xlim(-0.7, len(TENSORS) * 1.35)
            panel.set_ylim(1.7, -0.15)
            panel.text(-0.25, 0.5, "tokens", rotation=90, va="center", ha="center", fontsize=9)
            panel.axis("off")
        panels[-1].text(
            0, 1.5, "number, colour: rank that holds this part    grey: whole on each rank    "
            "hatched: each rank's part of a sum", fontsize=9, va="top",
        )  # fmt: skip
