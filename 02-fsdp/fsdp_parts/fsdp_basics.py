"""When FSDP2 gathers and frees each unit, who holds what (both drawn), and what it weighs."""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

# Private to PyTorch, and so may move: only there is a gather that has begun but not ended seen.
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from dist_common import models, runtime
from dist_common.cli import UsageError
from dist_common.lab.figure import figure
from dist_common.measure import GIB
from dist_common.models import local
from dist_common.report import Report
from fsdp_parts.sharding import mesh_of
from fsdp_parts.strategies import SOURCE, Plan, held_per_weight, unit_weights, whole_at_once

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

    def __enter__(self) -> GatherLog:
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
    ranks = dist.get_world_size()
    units = len(next(iter(logs.values())).units)
    names = [*(f"block {n}" for n in range(units - 1)), "rest"]
    size = (9, 1 + len(logs) * (0.9 + 0.1 * ranks * units))
    options = {"figsize": size, "sharex": True, "squeeze": False}
    with figure(report.output / "timeline.png", len(logs), 1, **options) as axes:
        for ax, (name, of_ranks) in zip(axes.flat, points.items(), strict=True):
            states = torch.tensor([list(of_rank.values()) for of_rank in of_ranks])
            draw_states(ax, states.permute(2, 0, 1).flatten(0, 1), PALETTE)  # a row: unit, rank
            ax.set_title(name, loc="left", fontsize=10)
            ax.set_yticks([ranks * (n + 0.5) - 0.5 for n in range(units)], names)
            columns = [key.replace(" ", "\n") for key in of_ranks[0]]
            ax.set_xticks(range(len(columns)), columns, fontsize=8)
            ax.hlines([ranks * n - 0.5 for n in range(1, units)], *ax.get_xlim(), "white", lw=4)
        title = f"each unit: a line for each of {ranks} ranks; columns: what computes"
        draw_legend(axes, title, zip(PALETTE, STATES, strict=True))


def draw_states(ax: Any, states: torch.Tensor, colors: Sequence[str]) -> None:
    """Draw a table of states from 0 to 3, without a frame."""
    from matplotlib.colors import ListedColormap

    ax.imshow(states, ListedColormap(colors), vmin=0, vmax=3, aspect="auto")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def draw_legend(axes: Any, title: str, kinds: Iterable[tuple[str, str]]) -> None:
    """Say above all axes which color stands for what."""
    from matplotlib.patches import Patch

    handles = [Patch(color=color, label=text) for color, text in kinds]
    options = {"loc": "outside upper center", "ncols": len(handles), "title": title}
    axes[0, 0].figure.legend(handles=handles, **options)


def parse_layout(text: str) -> tuple[int, int]:
    """Parse machines x ranks on each, such as 2x4."""
    match = re.fullmatch(r"([1-9]\d?)x([1-9]\d?)", text)
    if not match or not 2 <= int(match[1]) * int(match[2]) <= 64:
        raise argparse.ArgumentTypeError(f"must be like 2x4, for 2 to 64 ranks, not {text!r}")
    return int(match[1]), int(match[2])


def show_layout(script: str, args: argparse.Namespace, shard: Callable) -> int:
    """Draw who holds what on `args.layout`, and say what that weighs for `args.preset`.

    One process plays all ranks in turn, in a process group that answers by itself.
    """
    if runtime.discover().world_size > 1:
        raise UsageError("--layout is one process: start it with python, not torchrun")
    machines, per_machine = args.layout
    ranks = machines * per_machine
    world = runtime.World(0, 0, ranks, per_machine, "python")
    report = Report(script, args, world, torch.device("cpu"))
    report.start(f"{machines} machines of {per_machine} ranks, in one process")
    held = {}
    for sharding in ("full", "grad-op", "hybrid"):
        plan = Plan(sharding, args.precision, 1, ranks, per_machine)
        held[sharding] = who_holds(report, plan, shard)
    if report.output:
        draw_layout(report.output / "layout.png", held, machines)
    weigh(report, models.PRESETS[args.preset], args.preset, ranks)
    return report.finish("who holds what, as fully_shard placed it")


def who_holds(report: Report, plan: Plan, shard: Callable) -> list[torch.Tensor]:
    """Shard a small model as each rank in turn; return what it holds between and in steps.

    Shapes: an entry per rank, (2, units, N): between steps, and while block 1 computes forward;
    N parts of each unit's first dim. 1 is held as a shard, 2 as part of a whole unit, 0 not held.
    """
    # Private to PyTorch, and so may move: imported for nothing else.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    N = plan.ranks
    config = models.TransformerConfig(4 * N, 4 * N, 3, 2, 2, 8 * N, 8)
    held = []
    for rank in range(N):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=N)
        model = models.Transformer(config)
        layers = [*(block.down for block in model.blocks), model.head]
        for layer in layers:  # its rows say of which part they are
            rows = torch.arange(len(layer.weight))[:, None]
            layer.weight.data[:] = rows * N // len(rows)
        mesh = mesh_of(plan.shards, torch.device("cpu"))
        shard(model, plan.sharding, mesh, plan.group, plan.precision)
        own = sum(local(weight).nbytes for weight in model.parameters())
        between = torch.zeros(len(layers), N)
        for unit, layer in enumerate(layers):
            between[unit, local(layer.weight)[:, 0].long()] = 1
        during = between.clone()

        def note(*_, layers=layers, during=during):
            during[[not isinstance(layer.weight, DTensor) for layer in layers]] = 2

        model.blocks[1].down.register_forward_pre_hook(note)
        with torch.no_grad():
            model(torch.zeros(1, 8, dtype=torch.int64))
        held.append(torch.stack((between, during)))
        dist.destroy_process_group()
    formula = held_per_weight("FSDP", plan.precision, plan.shards)[0] * config.num_parameters()
    name = plan.sharding
    report.check(f"{name}: bytes of parameters, last rank", own, round(formula), 0, SOURCE)
    copies = sum(held)[0]  # of each part of each unit
    for what, number in (("fewest", int(copies.min())), ("most", int(copies.max()))):
        what = f"{name}: {what} ranks with a part"
        report.check(what, number, N // plan.shards, 0, "ranks / shards")
    whole = int((held[0][1] == 2).all(dim=1).sum())
    right = 3 if name == "grad-op" else 2  # block 0 too, which grad-op keeps
    report.check(f"{name}: units whole in block 1's forward", whole, right, 0, "fully_shard")
    return held


def draw_layout(path: Path, held: Mapping[str, list[torch.Tensor]], machines: int) -> None:
    """Draw for each strategy, between steps and in one, which parts of which units a rank holds."""
    colors = ("#ffffff", "#f1f1f1", PALETTE[0], PALETTE[WHOLE])
    with figure(path, len(held), 2, figsize=(11, 1.2 + 1.5 * len(held)), squeeze=False) as axes:
        for row, (name, of_ranks) in zip(axes, held.items(), strict=True):
            ranks, _, units, N = torch.stack(of_ranks).shape
            places = [
                rank * (units + 1) + 3 * (rank * machines // ranks) + (units - 1) / 2
                for rank in range(ranks)
            ]
            for ax, states in zip(row, torch.stack(of_ranks, 1) + 1, strict=True):
                cells = F.pad(states, (0, 0, 0, 1))  # a gap after each rank: (ranks, units + 1, N)
                cells = F.pad(cells.reshape(machines, -1, N), (0, 0, 0, 3))  # and each machine
                draw_states(ax, cells.flatten(0, 1).T, colors)
                ax.set_xticks(places, range(ranks))
                ax.set_yticks([])
            row[0].set_ylabel(name, fontsize=11)
        axes[0, 0].set_title("between steps", fontsize=11)
        axes[0, 1].set_title("in a step: block 1 computes its forward", fontsize=11)
        for ax in axes[-1]:
            ax.set_xlabel(f"rank; the gap lies between the {machines} machines")
        kinds = "not here", "this rank's shard: with its gradient and moments", "gathered, whole"
        title = "each rank: 4 units (3 blocks, the rest) side by side, cut into N parts"
        draw_legend(axes, title, zip(colors[1:], kinds, strict=True))


def weigh(report: Report, config: models.TransformerConfig, preset: str, ranks: int) -> None:
    """Print by formula what a rank holds of a model: weights, gradients, state, whole.

    Left out: activations, gradients before they are reduced, the buffers of collectives.
    """
    with torch.device("meta"):
        model = models.Transformer(config)
    units = unit_weights([*model.blocks, model], shards=1)
    weights = sum(units)
    rows = []
    for precision in ("32-true", "bf16-mixed"):
        grad_op, full = (Plan(name, precision, 1, ranks, ranks) for name in ("grad-op", "full"))
        copied = weights - config.vocab_size * config.dim if precision == "bf16-mixed" else 0
        whole = {  # bytes
            "DDP": 2 * copied,  # by autocast
            "ZeRO-1": 0,
            "ZeRO-2": 0,
            "ZeRO-3": full.gathered_bytes * min(weights, MAX_LIVE),
            "FSDP grad-op": whole_at_once(grad_op, units),
            "FSDP full": whole_at_once(full, units),
        }
        for way, most in whole.items():
            held = [weights * b / GIB for b in held_per_weight(way, precision, ranks)]
            held.append(most / GIB)
            rows.append([precision, way, *(f"{part:.1f}" for part in (*held, sum(held)))])
            report.metrics[f"{way}_{precision}_gib"] = sum(held)
    report.say(f"{preset}, {weights:,} weights, on {ranks} ranks: GiB on each, by formula")
    kinds = ("weights", "gradients", "optimizer state", "whole in a step", "sum")
    report.table(rows, ("", "", *kinds), names=2)
