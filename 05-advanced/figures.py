"""Draw the pictures of this module's pages into images/.

python 05-advanced/figures.py
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

import goodput
import pipeline_schedules
from activation_checkpointing import CHOICES, measure_blocks
from low_precision import activation_gradient, build_model
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
    tensor.set_title("tensor parallelism: added to the step")
    fsdp.set_yticks([0.01, 0.1, 1, 10, 100])
    fsdp.set_xticks([100, 1000, 10_000, 100_000])
    fsdp.xaxis.set_major_formatter("{x:,.0f}")
    tensor.set_yticks([0.1, 1])
    for axes in (fsdp, tensor):
        axes.axhline(1, color="gray", linestyle="--")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
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
    """Draw the computation and the traffic of rank 0, in four ways to take a step."""
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


INSTRUCTIONS = {  # colors and names
    "F": ("#4477aa", "F forward"),
    "B": ("#ee6677", "B backward"),
    "I": ("#cc88bb", "I backward: input gradient"),
    "W": ("#ccbb44", "W backward: weight gradients"),
}


def draw_schedules(names, num_micro_batches, kinds):
    """Each of four ranks' work over time, as pipeline_schedules.py simulates it."""
    size = (9, 0.6 + 1.3 * len(names))
    figure, panels = plt.subplots(len(names), 1, figsize=size, sharex=True)
    for axes, name in zip(panels, names, strict=True):
        stages = pipeline_schedules.STAGES_PER_RANK.get(name, 1)
        schedule = pipeline_schedules.build(name, 4, num_micro_batches, stages)
        for rank, row in enumerate(pipeline_schedules.simulate(schedule)):
            for (kind, stage, k), start, end in row:
                color, _ = INSTRUCTIONS[kind]
                style = {"color": color, "alpha": 0.9 if stage < 4 else 0.5}
                bar = axes.barh(
                    rank, end - start, left=start, edgecolor="white", **style
                )
                axes.bar_label(bar, [k], label_type="center", fontsize=7)
        axes.set_yticks(range(4), [f"rank {rank}" for rank in range(4)], fontsize=8)
        axes.invert_yaxis()
        axes.margins(x=0)
        axes.set_title(name, fontsize=9, loc="left")
    axes.set_xlabel("time, in forwards of one micro-batch")
    shown = [INSTRUCTIONS[kind] for kind in kinds]
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color, _ in shown]
    labels = [label for _, label in shown]
    figure.legend(handles, labels, loc="upper right", ncols=4, fontsize=8)
    return figure


def draw_pipeline_gpipe():
    return draw_schedules(["naive", "gpipe"], 4, "FB")


def draw_pipeline_schedules():
    return draw_schedules(["gpipe", "1f1b", "interleaved", "zb-h1"], 8, "FBIW")


def draw_tensor_parallel():
    """A block's matrices, inputs x outputs, by the rank of two that has each part."""
    dim, ffn_dim = 128, 352  # of the preset tiny
    matrices = {
        "wq, wk, wv": (dim, dim, [[0, 1]]),
        "wo": (dim, dim, [[0], [1]]),
        "gate, up": (dim, ffn_dim, [[0, 1]]),
        "down": (ffn_dim, dim, [[0], [1]]),
    }
    widths = [outputs for _, outputs, _ in matrices.values()]
    figure, panels = plt.subplots(1, 4, figsize=(8, 2.8), width_ratios=widths)
    for axes, (name, shape) in zip(panels, matrices.items(), strict=True):
        inputs, outputs, ranks = shape
        axes.imshow(ranks, cmap="Set3", vmin=0, vmax=11, extent=(0, outputs, inputs, 0))
        for rank, share in enumerate((0.25, 0.75)):
            x, y = (share, 0.5) if len(ranks) == 1 else (0.5, share)
            axes.text(x * outputs, y * inputs, rank, ha="center", va="center")
        divided = "columns" if len(ranks) == 1 else "rows"
        axes.set_title(f"{name}\nby {divided}", fontsize=9)
        axes.set_xlabel("outputs", fontsize=9)
        axes.set_xticks([0, outputs])
        axes.set_yticks([0, inputs])
    panels[0].set_ylabel("inputs", fontsize=9)
    return figure


def draw_low_precision():
    """The range of each format, and the gradients of a layer with and without scale."""
    formats = ("float32", "bfloat16", "float16", "float8_e5m2", "float8_e4m3fn")
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 4.2), sharex=True)
    for row, name in enumerate(formats):
        info = torch.finfo(getattr(torch, name))
        smallest = info.smallest_normal * info.eps
        top.barh(row, info.max, left=info.smallest_normal, color="#4477aa")
        top.barh(row, info.smallest_normal, left=smallest, color="#a0c4e0")
        bits = round(1 - np.log2(info.eps))
        top.text(2, row, f"{bits} bits", color="white", ha="center", va="center")
    top.set_yticks(range(5), formats)
    top.invert_yaxis()
    top.set_title("range (light: fewer bits) and precision", fontsize=10)
    model = build_model("32-true", argparse.Namespace(seed=0), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(256, (2, 33), generator=generator)
    for factor, label in ((1 / 512, "32,768 tokens"), (128, "the same, loss x 65,536")):
        gradient = activation_gradient(model, tokens, None, factor)
        magnitudes = gradient.abs().flatten().numpy()
        bottom.hist(magnitudes, np.logspace(-13, 5, 73), histtype="step", label=label)
    bottom.axvline(2.0**-25, color="gray", linestyle=":", label="below: 0 in float16")
    bottom.set(xscale="log", xlim=(1e-13, 1e6), xlabel="magnitude", yticks=[])
    bottom.set_title("gradients of a layer's output", fontsize=10)
    bottom.legend(fontsize=8)
    return figure


def draw_goodput():
    """Goodput over the interval between saves, for jobs of four sizes."""
    figure, axes = plt.subplots(figsize=(6.5, 3.4))
    intervals = np.logspace(1, 5)  # seconds
    for gpus in goodput.SIZES:
        failures_per_day = gpus / goodput.GPUS_PER_NODE * goodput.LLAMA3_RATE
        job = goodput.Job(goodput.DAY_S / failures_per_day, save_s=60, restart_s=360)
        shares = [goodput.exact_goodput(job, interval_s) for interval_s in intervals]
        (line,) = axes.semilogx(intervals / 60, shares, label=f"{gpus:,} GPUs")
        best = goodput.daly_interval(job)
        share = goodput.exact_goodput(job, best)
        axes.plot(best / 60, share, "o", color=line.get_color())
    axes.set_xlabel("minutes of training between saves (dot: Daly's formula)")
    axes.set_ylabel("goodput")
    axes.legend(fontsize=8)
    return figure


FIGURES = {
    "goodput": draw_goodput,
    "low_precision": draw_low_precision,
    "activation_checkpointing": draw_activation_checkpointing,
    "combining": draw_combining,
    "communication_overlap": draw_communication_overlap,
    "ring_attention_blocks": draw_ring_attention,
    "pipeline_gpipe": draw_pipeline_gpipe,
    "pipeline_schedules": draw_pipeline_schedules,
    "tensor_parallel": draw_tensor_parallel,
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
