"""Draw the pictures of this module's pages into images/.

python 02-fsdp/figures.py
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

IMAGES = Path(__file__).with_name("images")
STATES = {"shard only": "#b5cbe0", "being gathered": "#f2b263", "whole": "#2f6690"}


def draw_timeline():
    """The units of fsdp_basics.py during a step: a block is whole while it computes."""
    forward = [f"block {n}\nforward" for n in range(4)]
    backward = [f"block {n}\nbackward" for n in (3, 2, 1, 0)]
    columns = ["before", "embed-\nding", *forward, "head", *backward, "after"]
    states = np.zeros((5, 12))
    for block in range(4):
        states[block, [2 + block, 10 - block]] = 2
        states[block, 9 - block] = 1  # while the unit before it in backward computes
    states[4, 1:-1] = 2
    figure, axes = plt.subplots(figsize=(8, 3.2))
    axes.imshow(states, ListedColormap(list(STATES.values())), aspect="auto")
    axes.set_yticks(range(5), [f"block {n}" for n in range(4)] + ["rest"])
    axes.set_xticks(range(12), columns, fontsize=8)
    axes.set_xlabel("what computes")
    axes.hlines(np.arange(4) + 0.5, -0.5, 11.5, color="white", linewidth=3)
    handles = [Patch(color=color, label=name) for name, color in STATES.items()]
    axes.legend(handles=handles, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))
    return figure


def draw_strategies():
    """Bytes per weight that each of 8 GPUs holds in bf16-mixed."""
    stacks = {  # weights, gradients, optimizer state, kept from forward to backward
        "DDP": (4, 4, 8, 0),
        "ZeRO-1": (2, 2, 12 / 8, 0),
        "ZeRO-2": (2, 2 / 8, 12 / 8, 0),
        "FSDP grad-op": (4 / 8, 4 / 8, 8 / 8, 2),
        "HSDP\n2 groups of 4": (4 / 4, 4 / 4, 8 / 4, 0),
        "FSDP full": (4 / 8, 4 / 8, 8 / 8, 0),
    }
    kinds = ("weights", "gradients", "optimizer state", "forward to backward")
    colors = ("#2f6690", "#7fa7cc", "#b5cbe0", "#f2b263")
    figure, axes = plt.subplots(figsize=(8, 3.2))
    left = 0
    columns = np.array(list(stacks.values())).T
    for kind, color, sizes in zip(kinds, colors, columns, strict=True):
        axes.barh(list(stacks), sizes, left=left, color=color, label=kind)
        left = left + sizes
    axes.bar_label(axes.containers[-1], [f" {total:.1f}" for total in left])
    axes.axis((0, 20, 5.5, -0.5))
    axes.set_xlabel("bytes per weight on each of 8 GPUs, bf16-mixed")
    axes.legend()
    return figure


FIGURES = {
    "fsdp_timeline": draw_timeline,
    "strategies": draw_strategies,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output-dir", type=Path, default=IMAGES, help="(images/)")
    folder = parser.parse_args().output_dir
    plt.switch_backend("Agg")
    for name, draw in FIGURES.items():
        figure = draw()
        figure.tight_layout()
        figure.savefig(folder / f"{name}.png", dpi=120)


if __name__ == "__main__":
    main()
