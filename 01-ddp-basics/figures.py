"""Draw the pictures of this module's pages.

    python 01-ddp-basics/figures.py                   images/ring.png
    python 01-ddp-basics/figures.py --run runs/DIR    what a run has measured

DIR is the --output-dir of ddp_from_scratch.py or ddp_benchmark.py. The script draws
timeline.png or scaling.png there.
"""

import json
from pathlib import Path

from matplotlib.figure import Figure

from dist_common import cli

IMAGES = Path(__file__).with_name("images")
COLORS = {"forward": "C0", "backward": "C1", "wait": "0.75", "all-reduce": "C2"}


def draw_ring(path):
    """Draw the chunks of three ranks in a ring all-reduce, round by round."""
    ranks = 3
    # For each rank and chunk: the ranks whose numbers are in the sum.
    state = [[{rank} for _ in range(ranks)] for rank in range(ranks)]
    states = [state]
    for step in range(2 * (ranks - 1)):
        after = [[set(parts) for parts in chunks] for chunks in states[-1]]
        for rank in range(ranks):
            chunk = (rank - step) % ranks  # the chunk that this rank sends
            arriving = states[-1][rank][chunk]
            after[(rank + 1) % ranks][chunk] |= arriving
        states.append(after)
    figure = Figure(figsize=(8, 2.3), layout="constrained")
    titles = ["start", "reduce-scatter 1", "reduce-scatter 2"]
    titles += ["all-gather 1", "all-gather 2"]
    for axes, title, chunks in zip(figure.subplots(1, 5), titles, states, strict=True):
        counts = [[len(parts) for parts in row] for row in chunks]
        axes.imshow(counts, cmap="Greens", vmin=0, vmax=4)
        for rank, row in enumerate(chunks):
            for chunk, parts in enumerate(row):
                text = "+".join(map(str, sorted(parts)))
                if len(parts) == ranks:
                    text = "all"
                axes.text(chunk, rank, text, ha="center", va="center")
        axes.set_title(title, fontsize=11)
        axes.set_xticks(range(ranks), "abc")
        axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    for axes in figure.axes[1:]:
        axes.set_yticks([])
    figure.savefig(path, dpi=100)


def draw_timeline(path, timeline):
    """Draw when rank 0 computes and when it sends, for the ways to average."""
    ways = list(timeline)[2:]
    figure = Figure(figsize=(8, 1.5 * len(ways) + 0.4), layout="constrained")
    all_axes = figure.subplots(len(ways), 1, sharex=True)
    for axes, way in zip(all_axes, ways, strict=True):
        spans = {name: [] for name in COLORS}
        # An emulated link's span contains the span of gloo, which is faster.
        is_slow = any(name.startswith("link") for name, _, _ in timeline[way])
        for name, start, length in timeline[way]:
            if not (is_slow and name.startswith("gloo")):
                spans[name if name in COLORS else "all-reduce"].append((start, length))
        for row, (name, bars) in enumerate(spans.items()):
            axes.broken_barh(
                bars, (row - 0.4, 0.8), facecolor=COLORS[name], edgecolor="white"
            )
        axes.set_yticks(range(len(spans)), list(spans))
        axes.invert_yaxis()
        axes.set_title(way, loc="left", fontsize=11)
        axes.grid(axis="x", alpha=0.3)
    all_axes[-1].set_xlabel("ms")
    figure.savefig(path, dpi=100)


def draw_scaling(path, rows):
    """Draw where the time of a step goes, by number of ranks."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    for axes, kind in zip(figure.subplots(1, 2), ("strong", "weak"), strict=True):
        selected = [row for row in rows if row["kind"] == kind]
        ranks = [str(row["ranks"]) for row in selected]
        floor = [0.0] * len(selected)
        for part in list(selected[0])[3:]:
            heights = [max(row[part], 0.0) for row in selected]  # noise may be negative
            axes.bar(ranks, heights, 0.6, bottom=floor, label=part)
            floor = [low + height for low, height in zip(floor, heights, strict=True)]
        axes.set(title=f"{kind} scaling", xlabel="ranks", ylabel="ms per step")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=100)


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    parser.add_argument("--run", type=Path, metavar="DIR", help="draw this run")
    return parser.parse_args()


def main():
    args = parse_args()
    if not args.run:
        draw_ring((args.output_dir or IMAGES) / "ring.png")
        return 0
    file = args.run / "results.json"
    if not file.exists():
        raise cli.UsageError(f"--run {args.run}: there is no results.json")
    metrics = json.loads(file.read_text())["metrics"]
    if "timeline" in metrics:
        draw_timeline(args.run / "timeline.png", metrics["timeline"])
    elif "scaling" in metrics:
        draw_scaling(args.run / "scaling.png", metrics["scaling"])
    else:
        raise cli.UsageError(f"--run {args.run}: nothing to draw in results.json")
    return 0


if __name__ == "__main__":
    cli.run(main)
