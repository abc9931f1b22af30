"""The picture of `combining.py plan --output-dir`: the best layouts, part by part."""

from __future__ import annotations

from pathlib import Path

from advanced_parts.plan_text import GIB, axes_of, parts_shown, sharding_of
from dist_common.costs.job import Prediction
from dist_common.lab.figure import figure
from dist_common.output import claim_empty

PICTURE = "combining.png"
COLORS = ("#4477aa", "#ee6677", "#ccbb44", "#66ccee", "#228833", "#aa3377", "#bbbbbb",
          "#222255", "#994455")  # fmt: skip


def claim(folder: str) -> None:
    """Make an empty folder for the picture. Raises: UsageError."""
    claim_empty(folder, "--output-dir")


def draw(folder: str, plans: list[Prediction]) -> None:
    """Draw each layout's step time and memory, and the memory that a job may fill (dashed)."""
    size = (11, 1.6 + 0.62 * len(plans))
    with figure(Path(folder) / PICTURE, 1, 2, figsize=size, sharey=True) as (left, right):
        draw_parts(left, [plan.step for plan in plans], 1, "seconds per step")
        draw_parts(right, [plan.memory for plan in plans], GIB, "GiB on the fullest GPU")
        right.axvline(plans[0].memory_limit / GIB, color="black", linestyle="--")
        left.set_yticks(range(len(plans)), [label_of(plan) for plan in plans])
        left.invert_yaxis()
        right.tick_params(left=False)


def label_of(plan: Prediction) -> str:
    layout = plan.layout
    return f"{axes_of(layout)}\n{sharding_of(layout)}, recompute {layout.recompute}"


def draw_parts(axes, values: list[dict[str, float]], unit: float, label: str) -> None:
    """Stack the parts of each row that are not zero everywhere."""
    start = [0.0] * len(values)
    for name, color in zip(parts_shown(values), COLORS, strict=False):
        widths = [each.get(name, 0.0) / unit for each in values]
        axes.barh(range(len(values)), widths, left=start, label=name, color=color)
        start = [a + b for a, b in zip(start, widths, strict=True)]
    axes.set_xlabel(label)
    axes.legend(ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1), fontsize=7)
