"""What the profiler saw of a step: when blocks compute, what is handed over, when the link is busy.

An event is a dictionary of the trace; its start `ts` and length `dur` are in µs.
"""

import functools
import json
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from matplotlib.patches import Patch
from torch.profiler import ProfilerActivity, profile, record_function

from dist_common.report import Report, figure

HANDED_OVER = {
    "c10d::allreduce_": "all_reduce",
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
}
COLORS = {
    "forward": "#4477aa", "backward": "#66ccee", "all_reduce": "#ee6677",
    "all_gather": "#ccbb44", "reduce_scatter": "#aa3377",
}  # fmt: skip


class Pace:
    """The seconds that each block of a model waits in forward; in backward it waits twice that."""

    def __init__(self) -> None:
        self.seconds = 0.0


class _BackwardEnds(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, span):
        ctx.span = span
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.span.pop().__exit__(None, None, None)
        return grad, None


class _BackwardBegins(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, span, name, pace):
        ctx.span, ctx.name, ctx.pace = span, name, pace
        return x.clone()  # FSDP warns of a block that returns a view

    @staticmethod
    def backward(ctx, grad):
        ctx.span.append(record_function(ctx.name))
        ctx.span[-1].__enter__()
        time.sleep(2 * ctx.pace.seconds)
        return grad, None, None, None


def pace(model: torch.nn.Module) -> Pace:
    """Name each block's forward and backward for the profiler; return what makes them longer.

    A wait leaves the processor to the threads that communicate, as a GPU's work would.
    """
    shared = Pace()

    def paced(forward, number, x, *rest):
        span = []
        x = _BackwardEnds.apply(x, span)
        with record_function(f"forward {number}"):
            x = forward(x, *rest)
            time.sleep(shared.seconds)
        return _BackwardBegins.apply(x, span, f"backward {number}", shared)

    for number, block in enumerate(model.blocks):
        block.forward = functools.partial(paced, block.forward, number)
    return shared


def profile_step(step, batch, path: Path | None) -> list[dict]:
    """Take a step under the profiler; return its events in order, and keep the trace at `path`."""
    gpu = batch[0].is_cuda
    dist.barrier()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * gpu
    recording = profile(activities=activities, record_shapes=True)
    with recording as profiler, record_function("step"):
        step(batch)
        if gpu:
            torch.cuda.synchronize()  # else it ends when its kernels are queued
    with tempfile.TemporaryDirectory() as folder:
        file = path or Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    return sorted((e for e in events if "dur" in e), key=lambda event: event["ts"])


def profile_ways(report: Report, ways: dict, batch, seconds: float) -> dict[str, list[dict]]:
    """Return the events of a step of each way, in which each block takes `seconds` longer.

    With --output-dir rank 0 keeps the traces. Ways are name: (model, step).
    """
    events = {}
    for name, (model, step) in ways.items():
        shared = pace(model)
        step(batch)  # the first one after a change takes longer
        model.zero_grad()
        shared.seconds = seconds
        keep = report.output and report.world.is_rank0
        path = report.output / f"trace-{name[0]}.json" if keep else None
        events[name] = profile_step(step, batch, path)
        model.zero_grad()
    return events


def end(event: dict) -> float:
    """Return when an event ended, in µs."""
    return event["ts"] + event["dur"]


def handed_over(events: list[dict], kind: str | None = None) -> list[dict]:
    """Return the calls in which the process handed a collective to the group."""
    names = {name for name, each in HANDED_OVER.items() if kind in (None, each)}
    return [event for event in events if event["name"] in names]


def work_of_blocks(events: list[dict]) -> dict[str, dict]:
    """Return the event of each block's "forward 0", ..., "backward 0"."""
    annotated = (e for e in events if e.get("cat") == "user_annotation")
    return {e["name"]: e for e in annotated if e["name"].split()[0] in ("forward", "backward")
            and e["name"].split()[-1].isdecimal()}  # fmt: skip


def last_gradient(events: list[dict]) -> float:
    """Return when backward's last function began; it stores the last gradient."""
    prefix = "autograd::engine::evaluate_function"
    return max(event["ts"] for event in events if event["name"].startswith(prefix))


def sends_of(events: list[dict]) -> list[dict]:
    """Return the collectives, each from hand-over to completion, in the order they completed."""
    for prefixes in (("link:",), ("gloo:",), ("ncclDevKernel",)):
        found = [e for e in events if e["name"].startswith(prefixes)]
        if found:
            return sorted(found, key=end)
    return []


def kind_of(event: dict, sharded: bool) -> str:
    """Return the kind of a collective's span, by the names that gloo, NCCL and the link give it."""
    name = event["name"].lower().replace("_", "")
    kinds = {"allgather": "all_gather", "reducescatter": "reduce_scatter"}
    # gloo calls a reduce-scatter what it does for it, an all-reduce.
    other = "reduce_scatter" if sharded else "all_reduce"
    return next((kind for part, kind in kinds.items() if part in name), other)


def rows_of(events: list[dict]) -> dict[str, list[tuple[float, float, str]]]:
    """Return (start, length, kind) in ms from the start of the step, for computing and the link.

    The link sends one collective after the other: what is handed over earlier waits for its turn.
    """
    (step,) = (e for e in events if e["name"] == "step" and e.get("cat") == "user_annotation")
    kernels = [e for e in events if e.get("cat") == "kernel" and "nccl" not in e["name"].lower()]
    blocks = [(e, e["name"].split()[0]) for e in work_of_blocks(events).values()]
    rows = {"compute": [], "link": []}
    for event, kind in [(e, "forward") for e in kernels] or blocks:
        rows["compute"].append(((event["ts"] - step["ts"]) / 1e3, event["dur"] / 1e3, kind))
    free = step["ts"]
    sharded = bool(handed_over(events, "reduce_scatter"))
    for event in sends_of(events):
        start = max(event["ts"], free)
        free = end(event)
        rows["link"].append(
            ((start - step["ts"]) / 1e3, (free - start) / 1e3, kind_of(event, sharded))
        )
    return rows


def step_ms(events: list[dict]) -> float:
    """Return how long the step took, in ms."""
    return next(e["dur"] for e in events if e["name"] == "step") / 1e3


def draw(path: Path, panels: dict[str, list[dict]]) -> None:
    """Draw the timeline of each way, as this rank saw it: a panel each, one time axis in ms."""
    size = (10, 1.0 + 1.15 * len(panels))
    with figure(path, len(panels), 1, figsize=size, sharex=True, squeeze=False) as axes:
        shown = set()
        for panel, (name, events) in zip(axes[:, 0], panels.items(), strict=True):
            for place, spans in enumerate(rows_of(events).values()):
                for start, length, kind in spans:
                    shown.add(kind)
                    bar = ([(start, length)], (place - 0.4, 0.8))
                    panel.broken_barh(*bar, facecolor=COLORS[kind], edgecolor="white", lw=0.6)
            total = step_ms(events)
            panel.axvline(total, color="black", lw=1, ls="--")
            panel.set_yticks((0, 1), ("compute", "link"))
            panel.set_ylim(1.5, -0.5)
            panel.set_title(f"{name}: {total:.0f} ms", fontsize=10, loc="left")
            panel.grid(axis="x", alpha=0.3)
        axes[-1, 0].set_xlabel("ms from the start of the step, on rank 0")
        axes[0, 0].figure.legend(
            handles=[Patch(color=c, label=k.replace("_", "-")) for k, c in COLORS.items()
                     if k in shown],
            loc="outside upper right", ncols=5, fontsize=9, frameon=False,
        )  # fmt: skip
