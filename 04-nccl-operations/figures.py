"""Draw the pictures of this module's pages into images/.

python 04-nccl-operations/figures.py
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import EngFormatter, StrMethodFormatter

IMAGES = Path(__file__).with_name("images")
# busbw (GB/s) of an all-reduce on 8 H200, from 32 KiB on in steps of 4. Source:
# S. Bekman, ml-engineering, network/benchmarks/results/all-reduce-8xH200.md (2026).
H200_BUSBW = [1.44, 5.73, 23.94, 64.53, 155.53, 275.84, 401.93, 450.29, 469.17, 477.45]


def draw_collectives():
    """Which numbers three ranks hold after each collective."""
    # a0 is the first number of rank 0; S0 is the sum of a0, b0 and c0.
    panels = {
        "before": "a0 a1 a2,b0 b1 b2,c0 c1 c2",
        "broadcast": "a0 a1 a2,a0 a1 a2,a0 a1 a2",
        "all-reduce": "S0 S1 S2,S0 S1 S2,S0 S1 S2",
        "reduce": "S0 S1 S2,,",
        "all-gather": ",".join(["a0 a1 a2 b0 b1 b2 c0 c1 c2"] * 3),
        "gather": "a0 a1 a2 b0 b1 b2 c0 c1 c2,,",
        "reduce-scatter": "S0,S1,S2",
        "scatter": "a0,a1,a2",
        "all-to-all": "a0 b0 c0,a1 b1 c1,a2 b2 c2",
    }
    colors = {"a": "C0", "b": "C1", "c": "C2", "S": "0.3"}
    figure, axes = plt.subplots(3, 3, figsize=(8, 4.2))
    for panel, (name, rows) in zip(axes.flat, panels.items(), strict=True):
        for rank, row in enumerate(rows.split(",")):
            for place, number in enumerate(row.split()):
                color = colors[number[0]]
                cell = panel.barh(rank, 0.9, 0.8, place, color=color)
                style = {"color": "white", "fontsize": 8, "label_type": "center"}
                panel.bar_label(cell, [number], **style)
        panel.set(title=name, xlim=(0, 9), ylim=(2.6, -0.6), xticks=[])
        panel.set_yticks([0, 1, 2], ["rank 0", "rank 1", "rank 2"])
    return figure


def label_ticks(axes):
    """Write sizes in bytes with their unit, and other numbers without exponents."""
    axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.minorticks_off()


def draw_all_reduces():
    """Predicted time of two all-reduces by size: 4 ranks, 5 ms, 100 Mbit/s."""
    ranks, alpha, beta = 4, 5e-3, 8e-8  # seconds, seconds per byte
    size = np.logspace(2, 7)
    ring = 2 * (ranks - 1) * (alpha + size / ranks * beta)
    one_shot = alpha + (ranks - 1) * size * beta
    figure, axes = plt.subplots(figsize=(7, 3.2))
    axes.loglog(size, ring * 1e3, label="ring")
    axes.loglog(size, one_shot * 1e3, label="one-shot")
    axes.set(xlabel="size of the tensor", ylabel="predicted time, ms")
    axes.set_xticks([1e2, 1e3, 1e4, 1e5, 1e6, 1e7])
    axes.set_yticks([10, 100, 1000])
    label_ticks(axes)
    axes.legend()
    return figure


def draw_bandwidth():
    """Published busbw of an all-reduce by size, next to alpha + beta x size."""
    size = 2.0**15 * 4.0 ** np.arange(len(H200_BUSBW))
    factor = 2 * 7 / 8  # busbw / algbw on 8 ranks
    seconds = factor * size / np.array(H200_BUSBW) / 1e9
    beta = (seconds[-1] - seconds[0]) / (size[-1] - size[0])
    predicted = seconds[0] + beta * (size - size[0])
    figure, axes = plt.subplots(figsize=(7, 3.4))
    axes.loglog(size, H200_BUSBW, "o", label="measured")
    axes.loglog(size, factor * size / predicted / 1e9, label="alpha + beta x size")
    axes.axhline(450, color="0.7", linestyle="--", label="NVLink, one direction")
    axes.set(xlabel="size of the tensor", ylabel="busbw, GB/s")
    axes.set_xticks([1e5, 1e6, 1e7, 1e8, 1e9, 1e10])
    axes.set_yticks([1, 10, 100, 450])
    label_ticks(axes)
    axes.legend()
    return figure


FIGURES = {
    "collectives": draw_collectives,
    "all_reduces": draw_all_reduces,
    "bandwidth": draw_bandwidth,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output-dir", type=Path, default=IMAGES, help="(images/)")
    folder = parser.parse_args().output_dir
    plt.switch_backend("Agg")
    for name, draw in FIGURES.items():
        figure = draw()
        figure.tight_layout()
        figure.savefig(folder / f"{name}.png")


if __name__ == "__main__":
    main()
