"""Draw the pictures of this module's pages into images/.

python 05-advanced/figures.py
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

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


FIGURES = {"combining": draw_combining}


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
