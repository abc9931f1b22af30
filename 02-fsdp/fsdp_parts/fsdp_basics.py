"""When FSDP2 gathers and frees each unit, drawn too, and what a rank holds by formula."""

import argparse
import contextlib
from collections.abc import Callable, Mapping, Sequence
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

# Private to PyTorch, and so may move: only there is a gather that has begun but not ended seen.
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from fsdp_parts.strategies import NAMES, Plan, held_per_weight, unit_weights, whole_at_once
from legacy_common import models, runtime
from legacy_common.cli import UsageError
from legacy_common.lab.figure import figure
from legacy_common.measure import GIB
from legacy_common.report import Report

SHARDED, LARGER, GATHERING, WHOLE = range(4)
PALETTE = ("#b5cbe0", "#7fa7cc", "#f2b263", "#2f6690")  # of these four
STATES = ("this rank's shard only", "a larger shard, of its group", "all-gather begun", "whole")
MAX_LIVE = 10**9  # weights that ZeRO-3 keeps gathered: DeepSpeed's stage3_max_live_parameters


class GatherLog(contextlib.ExitStack):
    """Note for a `with` block when each unit is gathered and freed: point by point, and at most.

    `points` are (name, state of each unit) in the order of computing; of several micro-batches
    the last one's. Units: the blocks in order, then the rest.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = getattr(model, "module", model)  # under DDP nothing is ever sharded
        self.units = [*self.model.blocks, self.model]
        weights = [list(unit.parameters())[-1] for unit in self.units]
        self.state = [SHARDED if isinstance(w, DTensor) else WHOLE for w in weights]
        self.bytes = [0] * len(self.units)  # of a unit while it is whole, once known
        self.points: dict[str, list[int]] = {}
        self.history: list[list[int]] = []

    def __enter__(self) -> "GatherLog":
        states = {"unshard": GATHERING, "_to_unsharded": WHOLE, "_to_sharded": SHARDED,
                  "_to_sharded_post_forward": LARGER}  # fmt: skip
        for name, state in states.items():
            method = self.noting(getattr(FSDPParamGroup, name), state)
            self.enter_context(mock.patch.object(FSDPParamGroup, name, method))
        for number, block in enumerate(self.model.blocks):
            self.hook(block.down, f"forward {number}", f"backward {number}")
        self.hook(self.model.embedding, "embedding")
        # Not the head itself: its output is the model's, on which FSDP2 has a hook of its own.
        self.hook(self.model.norm, "head", "backward head")
        self.note("before")
        self.callback(self.note, "after")
        return self

    def hook(self, layer: nn.Module, forward: str, backward: str = "") -> None:
        """Note the states when a layer, in the middle of its unit, computes."""
        note = lambda when: lambda *_: self.note(when)  # noqa: E731
        self.enter_context(layer.register_forward_pre_hook(note(forward)))
        if backward:
            self.enter_context(layer.register_full_backward_pre_hook(note(backward)))

    def note(self, when: str) -> None:
        self.points.pop(when, None)  # of the last micro-batch, and so in its order
        self.points[when] = list(self.state)

    def noting(self, original: Callable, state: int) -> Callable:
        def method(group: FSDPParamGroup, *args, **kwargs):
            value = original(group, *args, **kwargs)
            unit = next(n for n, u in enumerate(self.units) if u is group.modules[0])
            if state == WHOLE:
                gathered = (t for p in group.fsdp_params for t in p.all_gather_outputs)
                self.bytes[unit] = sum(tensor.nbytes for tensor in gathered)  # padding too
            # It is also told to gather what is whole already, and then does nothing.
            if not (state == GATHERING and self.state[unit] == WHOLE):
                self.state[unit] = state
            self.history.append(list(self.state))
            return value

        return method

    def most_bytes(self) -> int:
        """Return the bytes of gathered weights, or of those on their way, at the worst point."""
        there = (torch.tensor(states) >= GATHERING for states in self.history)
        sizes = torch.tensor(self.bytes)
        return max((int(sizes[whole].sum()) for whole in there), default=0)


def check_gathers(report: Report, plan: Plan, units: Sequence[int], log: GatherLog) -> None:
    """Check how much was whole at once, and that all ranks gathered and freed in one order."""
    source = "two blocks and the rest, by fully_shard's prefetch"
    worst = whole_at_once(plan, units)
    report.check(f"{plan.sharding}: most bytes whole at once", log.most_bytes(), worst, 0, source)
    report.metrics[f"states_{plan.sharding}"] = log.points
    others = sum(history != log.history for history in runtime.gather(log.history))
    what = f"{plan.sharding}: ranks that gather and free in another order"
    report.check(what, others, 0, 0, "collectives are called alike")


def draw_timeline(report: Report, logs: Mapping[str, GatherLog]) -> None:
    """Draw for each strategy which units are whole at each point, on each rank. A collective."""
    points = {name: runtime.gather(log.points) for name, log in logs.items()}
    if report.output is None or dist.get_rank():
        return
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    ranks = dist.get_world_size()
    units = len(next(iter(logs.values())).units)
    names = [*(f"block {n}" for n in range(units - 1)), "rest"]
    size = (9, 1 + len(logs) * (0.9 + 0.1 * ranks * units))
    options = {"figsize": size, "sharex": True, "squeeze": False}
    with figure(report.output / "timeline.png", len(logs), 1, **options) as axes:
        for ax, (name, of_ranks) in zip(axes.flat, points.items(), strict=True):
            states = torch.tensor([list(of_rank.values()) for of_rank in of_ranks])
            rows = states.permute(2, 0, 1).flatten(0, 1)  # a row: unit, rank
            ax.imshow(rows, ListedColormap(PALETTE), vmin=0, vmax=3, aspect="auto")
            ax.tick_params(length=0)
            ax.spines[:].set_visible(False)
            ax.set_title(name, loc="left", fontsize=10)
            ax.set_yticks([ranks * (n + 0.5) - 0.5 for n in range(units)], names)
            columns = [key.replace(" ", "\n") for key in of_ranks[0]]
            ax.set_xticks(range(len(columns)), columns, fontsize=8)
            ax.hlines([ranks * n - 0.5 for n in range(1, units)], *ax.get_xlim(), "white", lw=4)
        title = f"each unit: a line for each of {ranks} ranks; columns: what computes"
        handles = [Patch(color=c, label=text) for c, text in zip(PALETTE, STATES, strict=True)]
        options = {"loc": "outside upper center", "ncols": len(handles), "title": title}
        axes[0, 0].figure.legend(handles=handles, **options)


def weigh(script: str, args: argparse.Namespace) -> int:
    """Print by formula what each of --weigh ranks holds of --preset, between steps and whole.

    Left out: activations, gradients before they are reduced, the buffers of collectives.
    """
    if runtime.discover().world_size > 1:
        raise UsageError("--weigh is one process: start it with python, not torchrun")
    ranks = args.weigh
    config = models.PRESETS[args.preset]
    report = Report(script, args, runtime.World(0, 0, 1, 1, "python"), torch.device("cpu"))
    report.start()
    with torch.device("meta"):
        model = models.Transformer(config)
    units = unit_weights([*model.blocks, model], shards=1)
    weights = sum(units)
    rows = []
    for precision in ("32-true", "bf16-mixed"):
        plans = {name: Plan(name, weights, precision, 1, ranks, ranks) for name in NAMES}
        copied = weights - config.vocab_size * config.dim if precision == "bf16-mixed" else 0
        whole = {  # bytes
            "DDP": 2 * copied,  # by autocast
            "ZeRO-1": 0,
            "ZeRO-2": 0,
            "ZeRO-3": plans["full"].gathered_bytes * min(weights, MAX_LIVE),
            "FSDP grad-op": whole_at_once(plans["grad-op"], units),
            "FSDP full": whole_at_once(plans["full"], units),
        }
        for way, most in whole.items():
            held = [weights * b / GIB for b in held_per_weight(way, precision, ranks)]
            held.append(most / GIB)
            rows.append([precision, way, *(f"{part:.1f}" for part in (*held, sum(held)))])
            report.metrics[f"{way}_{precision}_gib"] = sum(held)
    report.say(f"{args.preset}, {weights:,} weights, on {ranks} ranks: GiB on each, by formula")
    kinds = ("weights", "gradients", "optimizer state", "whole in a step", "sum")
    report.table(rows, ("", "", *kinds), names=2)
    return report.finish("nothing trained")
