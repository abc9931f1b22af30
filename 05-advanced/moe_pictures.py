"""Draw where tokens went, and the load of each expert over the steps of a training."""

import torch

from dist_common import runtime
from dist_common.report import figure

SHOWN_TOKENS = 8  # of each rank


def draw_tokens(report, model, batch):
    """Route the first tokens of every rank, and draw what the first block did with them.

    Every rank calls it; rank 0 draws expert_parallel_tokens.png, if there is an output folder.
    Shapes: batch is (inputs, targets), (B, T) each.
    """
    tokens = batch[0][:1, :SHOWN_TOKENS]
    with torch.no_grad():
        model(tokens)
    moe = model.blocks[0].moe
    ep = moe.mesh["ep"].size()
    routes = runtime.gather({
        "tokens": [chr(byte) for byte in tokens[0].tolist()],
        "chosen": moe.chosen.tolist(),
        "sent": moe.sent.tolist(),
    })  # fmt: skip
    if report.output is None or not report.world.is_rank0:
        return
    experts = len(moe.bias)
    group = routes[:ep]  # that rank 0 is in
    height = 1 + 0.26 * max(experts, sum(len(route["tokens"]) for route in group))
    path = report.output / "expert_parallel_tokens.png"
    with figure(path, figsize=(8, height)) as axes:
        _draw(axes, group, experts)


def _draw(axes, routes, experts):
    total = sum(len(route["tokens"]) for route in routes)
    per_rank = experts // len(routes)
    colors = [f"C{number % 10}" for number in range(len(routes))]
    heights = [-(number + 0.5) * total / experts for number in range(experts)]
    line = 0
    for rank, route in enumerate(routes):
        k = len(route["chosen"][0])
        for token, choices in enumerate(route["chosen"]):
            y = -(line + 0.5)
            label = repr(route["tokens"][token])
            axes.text(-0.02, y, label, ha="right", va="center_baseline", color=colors[rank],
                      family="monospace", size=9)  # fmt: skip
            for slot, expert in enumerate(choices):
                went = token * k + slot in route["sent"]
                style = {"color": colors[rank], "lw": 1.2, "alpha": 0.8}
                if not went:
                    style = {"color": "0.2", "lw": 1, "ls": (0, (2, 2))}
                axes.plot([0, 1], [y, heights[expert]], **style)
            line += 1
        middle = -(line - len(route["tokens"]) / 2)
        axes.text(-0.16, middle, f"tokens\nof rank {rank}", ha="right", va="center",
                  color=colors[rank], weight="bold")  # fmt: skip
    for expert, y in enumerate(heights):
        owner = expert // per_rank
        box = {"boxstyle": "round", "fc": "white", "ec": colors[owner], "lw": 1.6}
        axes.text(1.03, y, f"expert {expert}", ha="left", va="center", size=9, bbox=box)
    for rank in range(len(routes)):
        own = heights[rank * per_rank : (rank + 1) * per_rank]
        axes.text(1.26, sum(own) / len(own), f"experts\non rank {rank}", ha="left", va="center",
                  color=colors[rank], weight="bold")  # fmt: skip
    axes.plot([], [], color="0.2", lw=1, ls=(0, (2, 2)), label="dropped: the expert is full")
    axes.plot([], [], color="0.2", lw=1.2, label="sent (colour: from which rank)")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0), ncols=2, frameon=False)
    axes.set(xlim=(-0.45, 1.5), ylim=(-total, 0))
    axes.axis("off")


def draw_load(report, history):
    """Draw each expert's load in the first block over the steps, one panel for each way.

    `history` is {way: [(loss, load (L, E), dropped (L, E)) of each step]}. Rank 0 draws
    expert_parallel_load.png, if there is an output folder.
    """
    if report.output is None or not report.world.is_rank0:
        return
    path = report.output / "expert_parallel_load.png"
    with figure(path, 1, len(history), figsize=(10, 3.2), sharey=True) as panels:
        for axes, (name, steps) in zip(panels, history.items(), strict=True):
            load = torch.tensor([load[0] for _, load, _ in steps]).float()  # (steps, E)
            axes.plot(load / load.mean(1, keepdim=True), lw=1)
            axes.axhline(report.args.capacity_factor, color="black", ls="--", lw=1)
            axes.set(title=name, xlabel="step")
        panels[0].set_ylabel("tokens of an expert / mean")
        panels[0].set_ylim(0)
        panels[-1].plot([], [], color="black", ls="--", lw=1, label="capacity")
        panels[-1].legend(loc="upper right")
