"""What communication_overlap.py predicts, traces and proves of each way to a step."""

import functools
import math
import re
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
import torch.distributed as dist
from matplotlib.patches import Patch
from torch import nn
from torch.profiler import record_function

from dist_common.links import SlowGroup
from legacy_common import cli
from legacy_common.lab import proofs
from legacy_common.lab.figure import figure
from legacy_common.lab.trace import trace
from legacy_common.lab.traffic import RING_FACTOR, TrafficCounter
from legacy_common.models import cut_like
from legacy_common.report import Report
from legacy_common.runtime import gather

# the prediction


@dataclass
class Job:
    """What all ways share: the sizes of a plain model's parts, and the link between the ranks."""

    model: nn.Module
    group: dist.ProcessGroup
    ranks: int
    rate: float  # bytes/s; 0 where it is not known
    bucket_bytes: float
    forward_ms: float = 0.0  # of a block, without communication
    backward_ms: float = 0.0
    rest_ms: float = 0.0  # of the step: embedding, head, loss

    @property
    def arrived(self) -> list[nn.Parameter]:
        """Return the parameters in the order in which backward completes their gradients."""
        return list(reversed(list(self.model.parameters())))

    def units(self) -> tuple[int, int]:
        """Return the bytes that fully_shard gathers for each block, and for the rest of the model.

        It cuts each weight by rows, and fills up to a multiple of the ranks.
        """

        def filled(module):
            weights = module.parameters()
            return sum(math.ceil(len(w) / self.ranks) * self.ranks * w[0].nbytes for w in weights)

        block = filled(self.model.blocks[0])
        return block, filled(self.model) - len(self.model.blocks) * block

    def buckets(self, name: str) -> list[tuple[nn.Parameter, int]]:
        """Return what ways 1 to 3 all-reduce together: the last gradient to arrive, and bytes."""
        full = {"1": math.inf, "2": 0, "3": self.bucket_bytes}[name[0]]
        buckets, nbytes = [], 0
        for parameter in self.arrived:
            nbytes += parameter.nbytes
            if nbytes >= full or parameter is self.arrived[-1]:
                buckets.append((parameter, nbytes))
                nbytes = 0
        return buckets

    def ms(self, kind: str, tensor_bytes: int) -> float:
        """Return how long the link takes for a collective of a whole tensor, in ms."""
        if kind == "reduce_scatter" and not isinstance(self.group, SlowGroup):
            kind = "all_reduce"  # gloo sends as much for both
        return RING_FACTOR[kind](self.ranks) * tensor_bytes / self.rate * 1e3


def expected_traffic(job: Job, name: str) -> list[tuple[str, int]]:
    """Return (kind, bytes handed over) of each collective in a step, by formula."""
    if "FSDP" not in name:
        return [("all_reduce", nbytes) for _, nbytes in job.buckets(name)]
    if job.ranks == 1:
        return []
    block, rest = job.units()
    reduced = [rest] + [block] * len(job.model.blocks)
    gathered = reduced + [block] * len(job.model.blocks)  # the rest stays gathered for backward
    kinds = {"all_gather": gathered, "reduce_scatter": reduced}
    return [(kind, nbytes) for kind, sizes in kinds.items() for nbytes in sizes]


def sending_ms(job: Job, name: str) -> float:
    """Return how long the link sends in a step of this way, in ms."""
    return sum(job.ms(kind, nbytes) for kind, nbytes in expected_traffic(job, name))


def predicted_ms(job: Job, name: str) -> float:
    """Return how long a step takes, in ms, if the link sends one collective at a time."""
    blocks = len(job.model.blocks)
    if "FSDP" in name:
        # With prefetch each gather but a direction's first is sent while the block before computes.
        gather_ms = job.ms("all_gather", job.units()[0])
        hidden = min(gather_ms, job.forward_ms) + min(gather_ms, job.backward_ms)
        pairs = blocks - 1 if "prefetch" in name else 0
        computing = blocks * (job.forward_ms + job.backward_ms) + job.rest_ms
        return computing + sending_ms(job, name) - pairs * hidden
    # A block's gradients are there when its backward has ended; the embedding's at the end.
    number = {p: n for n, block in enumerate(job.model.blocks) for p in block.parameters()}
    number[job.arrived[-1]] = 0
    done = 0.0
    for last, nbytes in job.buckets(name):
        backwards = blocks - number.get(last, blocks)
        ready = blocks * job.forward_ms + job.rest_ms + backwards * job.backward_ms
        done = max(ready, done) + job.ms("all_reduce", nbytes)
    return done


# the trace

COLORS = {
    "forward": "#4477aa", "backward": "#66ccee", "all_reduce": "#ee6677",
    "all_gather": "#ccbb44", "reduce_scatter": "#aa3377",
}  # fmt: skip
# Category and name of the events that say what a step did.
STEP, BLOCK = r"user_annotation step$", r"user_annotation (forward|backward) \d+$"
KERNEL, CALL = "kernel (?!.*(?i:nccl))", "cpu_op c10d::"
SENDS = ("user_annotation link:", "user_annotation gloo:", "kernel ncclDevKernel")


class Span(NamedTuple):
    """An event of a trace. Units: ms from the start of the step."""

    kind: str | None  # of COLORS
    start: float
    end: float
    waits: bool = False  # of a call: whether it returns when the collective has ended


def pace(model: torch.nn.Module, seconds: float) -> None:
    """Name each block's forward and backward for the profiler, and have them wait, backward twice.

    A wait leaves the processor to the threads that communicate, as a GPU's work would.
    """

    def paced(forward, number, x, *rest):
        backward = record_function(f"backward {number}")

        def begin(_):
            backward.__enter__()
            time.sleep(2 * seconds)

        # Clones have gradients of their own: what FSDP hooks to a block's input and output is
        # called outside of the span.
        x = x.clone()
        x.register_hook(lambda _: backward.__exit__(None, None, None))
        with record_function(f"forward {number}"):
            x = forward(x, *rest)
            time.sleep(seconds)
        x.register_hook(begin)
        return x.clone()

    for number, block in enumerate(model.blocks):
        block.forward = functools.partial(paced, block.forward, number)


def profile_ways(report: Report, ways: dict, batch, seconds: float) -> dict[str, list[dict]]:
    """Return the events of a step of each way, in which each block takes `seconds` longer.

    With --output-dir rank 0 keeps the traces. Ways are name: (model, step).
    """
    events = {}
    for name, (model, step) in ways.items():
        pace(model, seconds)
        step(batch)  # the first one after a change takes longer
        model.zero_grad()
        keep = report.output and report.world.is_rank0
        path = report.output / f"trace-{name[0]}.json" if keep else None
        dist.barrier()
        events[name] = trace(functools.partial(step, batch), report.device, path)
    return events


def spans(events: list[dict], pattern: str) -> list[Span]:
    """Return the events whose category and name begin as the pattern says, by start."""
    began = next(event["ts"] for event in events if event["name"] == "step")
    found = []
    for event in events:
        if re.match(pattern, f"{event.get('cat')} {event['name']}"):
            name = event["name"].lower().replace("_", "")  # as c10d, gloo, NCCL or `pace` call it
            kind = next((kind for kind in COLORS if kind.replace("_", "") in name), None)
            start = (event["ts"] - began) / 1e3
            waits = "True" not in event.get("args", {}).get("Concrete Inputs", ())
            found.append(Span(kind, start, start + event["dur"] / 1e3, waits))
    return found


def sends_of(events: list[dict]) -> list[Span]:
    """Return the collectives as the link sends them: one at a time, in the order they completed."""
    found = next(filter(None, (spans(events, pattern) for pattern in SENDS)), [])
    kinds = {call.kind for call in spans(events, CALL)}
    # gloo calls a reduce-scatter what it does for it, an all-reduce.
    other = "reduce_scatter" if "reduce_scatter" in kinds else "all_reduce"
    sends, free = [], 0.0
    for span in sorted(found, key=lambda span: span.end):
        kind = span.kind if span.kind in kinds else other
        sends.append(Span(kind, max(span.start, free), span.end))
        free = span.end
    return sends


def draw(path: Path, panels: dict[str, list[dict]]) -> None:
    """Draw the timeline of each way, as this rank saw it: a panel each, one time axis in ms."""
    size = (10, 1.0 + 1.15 * len(panels))
    with figure(path, len(panels), 1, figsize=size, sharex=True, squeeze=False) as axes:
        shown = set()
        for panel, (name, events) in zip(axes[:, 0], panels.items(), strict=True):
            (step,) = spans(events, STEP)
            kernels = [span._replace(kind="forward") for span in spans(events, KERNEL)]
            for place, row in enumerate((kernels or spans(events, BLOCK), sends_of(events))):
                bars = [(span.start, span.end - span.start) for span in row]
                colors = [COLORS[span.kind] for span in row]
                panel.broken_barh(bars, (place - 0.4, 0.8), fc=colors, ec="white", lw=0.6)
                shown |= {span.kind for span in row}
            panel.axvline(step.end, color="black", lw=1, ls="--")
            panel.set(yticks=(0, 1), yticklabels=("compute", "link"), ylim=(1.5, -0.5))
            panel.set_title(f"{name}: {step.end:.0f} ms", fontsize=10, loc="left")
            panel.grid(axis="x", alpha=0.3)
        axes[-1, 0].set_xlabel("ms from the start of the step, on rank 0")
        kinds = [kind for kind in COLORS if kind in shown]
        boxes = [Patch(color=COLORS[kind], label=kind.replace("_", "-")) for kind in kinds]
        style = {"loc": "outside upper right", "ncols": 5, "fontsize": 9, "frameon": False}
        axes[0, 0].figure.legend(handles=boxes, **style)


# the checks

PATIENCE_S = 30.0  # how long the last rank stays away at most: for a way that waits for it


def emulation_of(link: float | None, layer_ms: float | None, device) -> tuple[float, float]:
    """Return the link's bytes/s and the seconds that a block waits. Raises: UsageError on GPUs."""
    if device.type == "cpu":
        return link or cli.link_rate("100mbit"), (layer_ms or 40) / 1e3
    if link or layer_ms:
        raise cli.UsageError("--link and --layer-ms emulate what GPUs have: leave them out there")
    return 0.0, 0.0


def check_way(report: Report, job: Job, name: str, model, step, batch, expected) -> None:
    """Check loss and gradient of a way against one process, and its traffic against a formula."""
    expected_loss, expected_gradient = expected
    loss = step(batch)
    dist.all_reduce(loss)
    error = abs(loss.item() / job.ranks - expected_loss) / expected_loss
    report.check(f"{name}: loss, relative error", error, 0, 1e-5, "one process")
    weights = list(model.parameters())
    parts = expected_gradient.split([weight.numel() for weight in weights])
    pairs = zip(weights, parts, strict=True)  # FSDP gives a rank a part of each
    own = proofs.flat(cut_like(part.view(weight.shape), weight.grad) for weight, part in pairs)
    proofs.same_gradient(report, model, own, 1e-5, f"{name}: gradient, relative error")
    model.zero_grad()
    with TrafficCounter() as counter:
        step(batch)
    model.zero_grad()
    source = "formula: expected_traffic"
    for kind in ("all_reduce", "all_gather", "reduce_scatter"):  # DDP broadcasts new buckets once
        sizes = [nbytes for sent, nbytes in expected_traffic(job, name) if sent == kind]
        calls, handed = counter.calls[kind], counter.nbytes[kind]
        if sizes or calls:
            what = f"{name}, {kind}"
            report.check(f"{what}: calls", calls, len(sizes), 0, source)
            report.check(f"{what}: bytes handed over", handed, sum(sizes), 0, source)
    if name[0] in "23" and job.ranks > 1:
        check_asynchrony(report, name, model, step, batch)


def check_asynchrony(report: Report, name: str, model, step, batch) -> None:
    """Check that backward waits for no sum: the last rank begins once the others' have ended."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    store = dist.group.WORLD.get_group_store()
    keys = [f"{name} computed by {other}" for other in range(last + 1)]
    weight = next(model.parameters())  # the embedding's, whose gradient comes last
    hook = weight.register_post_accumulate_grad_hook(lambda _: store.set(keys[rank], ""))
    ended = True
    if rank == last:
        try:
            store.wait(keys[:last], timedelta(seconds=PATIENCE_S))
        except dist.DistStoreError:
            ended = False
    step(batch)
    hook.remove()
    model.zero_grad()
    what = f"{name}: backward ends while a rank is missing"
    report.check(what, int(gather(ended)[last]), 1, 0, "no sum can be complete by then")


def check_trap(report: Report, early: float, late: float) -> None:
    """Show what a sum reads like before it was waited for, and check that it was no sum yet."""
    ranks = dist.get_world_size()
    early, late = gather((early, late))[0]  # on the last rank, which is late, the sum may be there
    if ranks > 1:
        report.say(f"1 + ... + {ranks} reads {early:g} before wait(), {late:g} after")
        what, source = "sum is there before wait()", "the last rank is late"
        report.check(what, int(early == late), 0, 0, source)
    report.check("sum after wait()", late, ranks * (ranks + 1) / 2, 0, "1 + ... + N")


def check_and_time(report: Report, job: Job, traces: dict[str, list[dict]]) -> None:
    """Check the order of events in each way's trace, and set times beside predictions.

    Takes "0 no communication" out of `traces`: how long computing alone takes.
    """
    alone = traces.pop("0 no communication")
    ms = [span.end - span.start for span in spans(alone, BLOCK)]
    blocks = len(ms) // 2  # all forward, then all backward
    job.forward_ms, job.backward_ms = fmean(ms[:blocks]), fmean(ms[blocks:])
    (step,) = spans(alone, STEP)
    job.rest_ms = step.end - sum(ms)
    for name, events in traces.items():
        check_order(report, job, name, events)
    print_times(report, job, step.end, traces)


def check_order(report: Report, job: Job, name: str, events: list[dict]) -> None:
    """Check, in a trace, what was handed over before what; no time enters."""
    calls = len(expected_traffic(job, name))
    if "FSDP" not in name:
        last = spans(events, "cpu_op autograd::engine::evaluate_function")[-1]  # stores a gradient
        before = sum(call.start < last.start for call in spans(events, CALL))
        what = f"{name}: handed over before the last gradient"
        report.check(what, before, 0 if name[0] == "1" else calls - 1, 0, "all but the last")
    elif calls:
        ahead, late = gathers_ahead(events)
        pairs = 2 * (len(job.model.blocks) - 1)
        on_time = pairs if "prefetch" in name else 0
        what, source = f"{name}: gathers begun", "the block before runs meanwhile"
        report.check(f"{what} before the block before computes", ahead, on_time, 0, source)
        report.check(f"{what} after the block before has ended", late, pairs - on_time, 0, source)


def gathers_ahead(events: list[dict]) -> tuple[int, int]:
    """Count gathers begun before the block before computes, and those after it has ended.

    A gather counts as begun early only if the call does not wait for it.
    """
    ahead = late = 0
    blocks = spans(events, BLOCK)  # all forward, then all backward, as they ran
    _, first, *gathers = (call for call in spans(events, CALL) if call.kind == "all_gather")
    for place, (before, gather_) in enumerate(zip(blocks, gathers, strict=False), 1):
        if place != len(blocks) // 2:  # no block computes before a direction's first gather
            ahead += gather_.start < before.start and not gather_.waits
            late += gather_.start >= before.end
    return ahead, late


def print_times(report: Report, job: Job, computing: float, traces: dict[str, list[dict]]) -> None:
    """Print each way's step beside what the sizes of model and link predict; keep the numbers."""
    rows = []
    for name, events in traces.items():
        (step,) = spans(events, STEP)
        report.metrics[f"step_time_ms_{name[0]}"] = step.end
        cells = ["-"] * 4
        if job.rate and job.ranks > 1:
            sending = report.metrics[f"sending_ms_{name[0]}"] = sending_ms(job, name)
            predicted = report.metrics[f"predicted_ms_{name[0]}"] = predicted_ms(job, name)
            times = sending, computing + sending, max(computing, sending), predicted
            cells = [f"{value:.1f} ms" for value in times]
        rows.append((name, len(expected_traffic(job, name)), *cells, f"{step.end:.1f} ms"))
    report.say(f"computing takes {computing:.1f} ms in each way; without communication, measured")
    report.table(rows, ("way", "collectives", "sending", "sum", "larger", "predicted", "step"))
    if job.rate and job.ranks > 1:
        block, _ = job.units()
        gather_ms, reduce_ms = (job.ms(kind, block) for kind in ("all_gather", "all_reduce"))
        beside = f"{gather_ms:.1f} ms to gather beside {job.forward_ms:.1f} ms of forward"
        beside += f", {reduce_ms:.1f} ms to all-reduce beside {job.backward_ms:.1f} ms of backward"
        report.say(f"a block's {block:,} bytes: {beside}")
