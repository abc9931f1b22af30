"""What a person sees: lines from one rank, tables, a progress bar, a plot."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from tabulate import tabulate
from tqdm import tqdm

from dist_common.measure import Results


class Console:
    """Print from rank 0 only; on the other ranks every call does nothing."""

    def __init__(self, is_rank0: bool) -> None:
        self.enabled = is_rank0

    def say(self, line: str = "") -> None:
        """Print one line, above the progress bar if there is one."""
        if self.enabled:
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()

    def warn(self, line: str) -> None:
        """Print one line to stderr."""
        if self.enabled:
            tqdm.write(f"warning: {line}", file=sys.stderr)

    def header(self, results: Results, *lines: str) -> None:
        """Print what runs where, then the lines that only this script can say."""
        world = results.world
        ranks = "1 rank" if world.world_size == 1 else f"{world.world_size} ranks"
        backend = dist.get_backend() if dist.is_initialized() else "no backend"
        self.say(
            f"{results.script}: {ranks} started by {world.launcher}, {results.device.type} with "
            f"{backend}, torch {torch.__version__}"
        )
        for line in lines:
            self.say(line)

    def step(
        self,
        step: int,
        loss: float,
        step_time_ms: float,
        tokens_per_second: float,
        peak_memory_gib: float,
        mfu: float | None = None,
    ) -> None:
        """Print the one line that every training script has for a step; no MFU where it is None."""
        line = f"step {step} | loss {loss:.4f} | {step_time_ms:.1f} ms | "
        line += f"{tokens_per_second:,.0f} tok/s | mem {peak_memory_gib:.2f} GiB"
        self.say(line if mfu is None else f"{line} | mfu {mfu:.1%}")

    def table(self, rows: Iterable[Sequence[str]], headers: Sequence[str], names: int = 1) -> None:
        """Print an aligned table: the first `names` columns to the left, values to the right."""
        sides = (*["left"] * names, *["right"] * (len(headers) - names))
        self.say(tabulate(rows, headers, "simple", colalign=sides, disable_numparse=True))

    def progress(self, items: Collection, name: str) -> Iterable:
        """Iterate over items, with a progress bar where a person is watching a terminal."""
        hidden = not (self.enabled and sys.stderr.isatty())
        return tqdm(items, name, disable=hidden, leave=False)

    def verdict(self, results: Results, summary: str) -> int:
        """Print measured beside expected and a last line; return the script's exit code."""
        rows = [
            (
                check.name,
                *(_number(value) for value in (check.measured, check.expected, check.tolerance)),
                "yes" if check.ok else "NO",
            )
            for check in results.checks
        ]
        self.table(rows, ("check", "measured", "expected", "tolerance", "ok"))
        if results.failed:
            self.say("FAILED: " + "; ".join(check.name for check in results.failed))
            return 1
        self.say(f"OK: {len(results.checks)} checks passed, {summary}")
        return 0


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def plot_training(path: str | Path, losses: Sequence[float], accuracies: Sequence[float]) -> None:
    """Draw the loss of each step and the accuracy after each epoch, the last one named, as PNG."""
    import matplotlib

    matplotlib.use("Agg")  # no display on a cluster
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    left.plot(range(1, len(losses) + 1), losses, linewidth=1)
    left.set(title="Training loss (mean over ranks)", xlabel="step", ylabel="cross-entropy")
    left.set_yscale("log")
    percent = [100 * accuracy for accuracy in accuracies]
    right.plot(range(1, len(percent) + 1), percent, marker="o", markersize=3)
    right.set(title=f"Test accuracy: {percent[-1]:.1f}%", xlabel="epoch", ylabel="percent")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    # Without a date or version inside, the same run draws the same file.
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)


def plot_stacked(
    path: str | Path,
    ranks: Sequence[int],
    parts: dict[str, Sequence[float]],
    efficiency: dict[str, Sequence[float]],
    title: str,
) -> None:
    """Draw what a step's milliseconds are made of on numbers of ranks, and efficiencies, as PNG.

    Shapes: each list is as long as `ranks`. Parts below 0, which noise makes, are drawn as 0.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    names, floor = [str(number) for number in ranks], [0.0] * len(ranks)
    for name, values in parts.items():
        heights = [max(value, 0.0) for value in values]
        left.bar(names, heights, 0.6, bottom=floor, label=name)
        floor = [below + height for below, height in zip(floor, heights, strict=True)]
    left.set(title=f"A step of strong scaling\n({title})", xlabel="ranks", ylabel="ms")
    left.legend(fontsize=8)
    right.axhline(100, color="grey", linestyle="--", linewidth=1)
    for name, percents in efficiency.items():
        right.plot(names, percents, marker="o", label=name)
    right.set(title="Efficiency against ideal", xlabel="ranks", ylabel="percent")
    right.set_ylim(0, 110)
    right.legend()
    right.grid(alpha=0.3)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)


def plot_timeline(
    path: str | Path, panels: dict[str, dict[str, Sequence[tuple[float, float]]]], title: str
) -> None:
    """Draw spans of time as PNG: a panel for each entry, in it a row for each kind of work.

    Units: a span is (start, length) in ms; the panels share one axis.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    heights = [len(rows) for rows in panels.values()]
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(9, 0.5 + 0.6 * sum(heights)), sharex=True, squeeze=False,
        height_ratios=heights, layout="constrained",
    )  # fmt: skip
    for panel, (name, rows) in zip(axes[:, 0], panels.items(), strict=True):
        for number, spans in enumerate(rows.values()):
            panel.broken_barh(
                spans, (number - 0.35, 0.7), facecolor=f"C{number}", edgecolor="white"
            )
        panel.set_yticks(range(len(rows)), rows)
        panel.invert_yaxis()
        panel.set_title(f"{name} ({title})", fontsize=10, loc="left")
        panel.grid(axis="x", alpha=0.3)
    axes[-1, 0].set_xlabel("ms")
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)


def plot_levels(
    path: str | Path, levels: dict[str, Sequence[int]], title: str, xlabel: str
) -> None:
    """Draw how many bytes are held after each event of a log, a line for each kind, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 3), layout="constrained")
    for name, values in levels.items():
        axes.step(range(len(values)), [v / 2**20 for v in values], where="post", label=name)
    axes.set(title=title, xlabel=xlabel, ylabel="MiB")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylim(bottom=0)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)


def plot_bars(
    path: str | Path,
    names: Sequence[str],
    parts: dict[str, Sequence[float]],
    expected: Sequence[float],
    title: str,
    ylabel: str,
) -> None:
    """Draw a bar of stacked parts for each name, and a line where its height should be, as PNG.

    Shapes: each part and `expected` are as long as `names`.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 3.4), layout="constrained")
    floor = [0.0] * len(names)
    for part, heights in parts.items():
        axes.bar(names, heights, 0.6, bottom=floor, label=part)
        floor = [below + height for below, height in zip(floor, heights, strict=True)]
    places = range(len(names))
    axes.hlines(
        expected, [p - 0.4 for p in places], [p + 0.4 for p in places],
        colors="black", linestyles="dashed", label="expected",
    )  # fmt: skip
    for place, height in zip(places, floor, strict=True):
        axes.text(place, height, f"{height:.2f}", ha="center", va="bottom", fontsize=9)
    axes.set(title=title, ylabel=ylabel)
    axes.set_ylim(0, 1.15 * max(*floor, *expected))
    axes.legend()
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)


def plot_bandwidth(
    path: str | Path,
    curves: dict[str, tuple[Sequence[int], Sequence[float]]],
    bounds: dict[str, float],
    title: str,
) -> None:
    """Draw bus bandwidths (GB/s) against sizes (bytes), log-log, and lines that bound them, as PNG.

    Shapes: a curve is (sizes, bandwidths), equally long.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
    for name, (sizes, bandwidths) in curves.items():
        axes.plot(sizes, bandwidths, marker="o", markersize=3, label=name)
    for number, (name, bound) in enumerate(bounds.items()):
        axes.axhline(bound, color="grey", linestyle=("--", ":")[number % 2], label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(title=f"Bus bandwidth ({title})", xlabel="bytes", ylabel="GB/s")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)
