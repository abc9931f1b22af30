"""Draw the pictures of this module's pages into images/.

python 05-advanced/figures.py
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

from activation_checkpointing import CHOICES, measure_blocks
from ring_attention import LAYOUTS, Ring

IMAGES = Path(__file__).with_name("images")


def draw_combining():
    """Communication over computation of FSDP and of tensor parallelism, on H100s."""
    flops = 400e12  # C: 40% of an H100's peak in bfloat16
    links = {"NVLink, 350 GB/s": 350e9, "one network card, 50 GB/s": 50e9}
    width = 8192  # D of Llama 3 70B
    tokens = np.logspace(2, 5)
    sizes = np.array([2, 4, 8, 16])
    figure, (fsdp, tensor) = plt.subplots(1, 2, figsize=(8, 3.2))
    for label, bandwidth in links.items():
        fsdp.loglog(tokens, 8 / bandwidth / (6 * tokens / flops), label=label)
        ratio = (4 / 18) * (sizes - 1) * flops / (width * bandwidth)
        tensor.loglog(sizes, ratio, "o-", label=label)
    fsdp.set_xlabel("tokens per GPU and micro-batch, T")
    fsdp.set_title("FSDP: hidden below the line")
    tensor.set_xlabel("GPUs of the axis, n")
    tensor.set_xticks(sizes, map(str, sizes))
    tensor.minorticks_off()
    tensor.set_title("tensor parallelism: added to the step")
    for axes in (fsdp, tensor):
        axes.axhline(1, color="gray", linestyle="--")
        axes.set_ylabel("communication / computation")
        axes.legend(fontsize=8)
    return figure


LANES = ("compute", "link")
COLORS = {
    "forward": "#4477aa",
    "backward": "#66ccee",
    "all-reduce": "#ee6677",
    "all-gather": "#ccbb44",
    "reduce-scatter": "#aa3377",
}


def plan_ddp(layers, buckets):
    """Return the bars (lane, kind, start, length) of a step with DDP.

    A layer takes 1 forward, 2 backward and 2 on the link.
    """
    bars = [("compute", "forward", n, 1) for n in range(layers)]
    bars += [("compute", "backward", layers + 2 * n, 2) for n in range(layers)]
    length = 2 * layers / buckets
    for n in range(1, buckets + 1):
        bars.append(("link", "all-reduce", layers + n * length, length))
    return bars


def plan_fsdp(layers, prefetch):
    """Return the bars of a step with FSDP on a CPU: a gather takes 1 on the link."""
    bars, now = [], 0
    for kind, length in (("forward", 1), ("backward", 2)):
        for n in range(layers):
            early = (
                prefetch or kind == "backward"
            )  # in backward it prefetches by itself
            if n == 0 or not early:
                bars.append(("link", "all-gather", now, 1))
                now += 1
            if n < layers - 1 and early:
                bars.append(("link", "all-gather", now, 1))
                if not prefetch:  # but a CPU waits
                    now += 1
            bars.append(("compute", kind, now, length))
            now += length
            if kind == "backward":
                bars.append(("link", "reduce-scatter", now, 1))
                now += 1
    return bars


def draw_communication_overlap():
    """What rank 0 computes and what its link sends, in four ways to take a step."""
    panels = {
        "ddp-one-bucket": plan_ddp(4, buckets=1),
        "ddp-buckets": plan_ddp(4, buckets=4),
        "fsdp": plan_fsdp(4, prefetch=False),
        "fsdp-prefetch": plan_fsdp(4, prefetch=True),
    }
    figure, rows = plt.subplots(4, 1, figsize=(8, 5), sharex=True)
    for axes, (name, bars) in zip(rows, panels.items(), strict=True):
        for lane, kind, start, length in bars:
            y = LANES.index(lane)
            axes.barh(y, length, left=start, color=COLORS[kind], edgecolor="white")
        axes.set_yticks(range(2), LANES)
        axes.invert_yaxis()
        axes.set_title(name, fontsize=9, loc="left")
        axes.set_xticks([])
    rows[-1].set_xlabel("time")
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    figure.legend(handles, COLORS, loc="upper right", ncols=5, fontsize=8)
    return figure


def draw_activation_checkpointing():
    """The bytes that exist after each operation of a step, by choice of checkpoints."""
    args = argparse.Namespace(seed=0)
    figure, panels = plt.subplots(1, 4, figsize=(9, 2.8), sharey=True)
    for axes, (name, choice) in zip(panels, CHOICES.items(), strict=True):
        _, meter = measure_blocks(choice, args, torch.device("cpu"))
        mb = [count / 1e6 for count in meter.history]
        axes.fill_between(range(len(mb)), mb, color="#4477aa")
        axes.set_title(f"{name}: peak {max(mb):.1f} MB", fontsize=9)
        axes.set_xlabel("operations")
    panels[0].set_ylabel("MB of activations")
    return figure


def draw_ring_attention():
    """The blocks of the attention matrix of four ranks: who computes each, and when."""
    figure, panels = plt.subplots(1, 2, figsize=(8, 4))
    for axes, (layout, chunks_per_rank) in zip(panels, LAYOUTS.items(), strict=True):
        num_chunks = 4 * chunks_per_rank
        ranks = np.full((num_chunks, num_chunks), np.nan)  # later keys stay white
        for rank in range(4):
            ring = Ring(layout, rank, 4)
            for step in range(4):
                for query, key in ring.blocks(step):
                    ranks[query, key] = rank
                    axes.text(key, query, step, ha="center", va="center", fontsize=9)
        image = axes.imshow(ranks, cmap="Set2", vmin=0, vmax=7)
        axes.set_xticks(range(num_chunks))
        axes.set_yticks(range(num_chunks))
        axes.set_xlabel("chunk of keys")
        axes.set_ylabel("chunk of queries")
        axes.set_title(layout)
    colors = [image.cmap(image.norm(rank)) for rank in range(4)]
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in colors]
    labels = [f"rank {rank}" for rank in range(4)]
    panels[0].legend(handles, labels, loc="upper right", fontsize=9)
    return figure


FIGURES = {
    "activation_checkpointing": draw_activation_checkpointing,
    "combining": draw_combining,
    "communication_overlap": draw_communication_overlap,
    "ring_attention_blocks": draw_ring_attention,
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
