"""What communication_overlap.py predicts, traces and proves of each way to a step."""

import functools
import math
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from matplotlib.patches import Patch
from torch import nn
from torch.profiler import record_function

from dist_common import cli
from dist_common.lab import proofs
from dist_common.lab.figure import figure
from dist_common.lab.links import LateGroup
from dist_common.lab.trace import trace
from dist_common.lab.traffic import RING_FACTOR, TrafficCounter
from dist_common.models import cut_like
from dist_common.report import Report
from dist_common.runtime import gather

# the prediction


@dataclass
class Job:
    """What all ways share: the sizes of a plain model's parts, and the link between the ranks."""

    model: nn.Module
    group: dist.ProcessGroup
    rate: float  # bytes/s; 0 where it is not known
    bucket_bytes: float
    arrived: list[nn.Parameter]  # parameters, in the order in which backward completes gradients
    forward_ms: float = 0.0  # of a block, without communication
    backward_ms: float = 0.0
    rest_ms: float = 0.0  # of the step: embedding, head, loss

    @property
    def ranks(self) -> int:
        return dist.get_world_size()

    def units(self) -> list[int]:
        """Return the bytes that fully_shard gathers: the rest of the model's, then each block's.

        It cuts each weight by rows, and fills up to a multiple of the ranks.
        """

        def filled(weights):
            rows = ((math.ceil(w.shape[0] / self.ranks) * self.ranks, w) for w in weights)
            return sum(count * w[0].numel() * w.element_size() for count, w in rows)

        blocks = [filled(block.parameters()) for block in self.model.blocks]
        return [filled(self.model.parameters()) - sum(blocks), *blocks]

    def buckets(self) -> list[list[nn.Parameter]]:
        """Return what DDP all-reduces together: gradients as they arrive, in buckets."""
        buckets = [[]]
        for parameter in self.arrived:
            if sum(p.nbytes for p in buckets[-1]) >= self.bucket_bytes:
                buckets.append([])
            buckets[-1].append(parameter)
        return buckets

    def ms(self, kind: str, tensor_bytes: int, rate: float | None = None) -> float:
        """Return how long the link takes for a collective of a whole tensor, in ms."""
        if kind == "reduce_scatter" and not isinstance(self.group, LateGroup):
            kind = "all_reduce"  # gloo sends as much for both
        return RING_FACTOR[kind](self.ranks) * tensor_bytes / (rate or self.rate) * 1e3


def computing_ms(job: Job) -> float:
    """Return how long a step computes, in ms."""
    return len(job.model.blocks) * (job.forward_ms + job.backward_ms) + job.rest_ms


def sending_ms(job: Job, name: str) -> float:
    """Return how long the link sends in a step of this way, in ms."""
    return sum(job.ms(kind, size) for kind, (_, size) in expected_traffic(job, name).items())


def predicted_ms(job: Job, name: str) -> float:
    """Return how long a step takes, in ms, if the link sends one collective at a time."""
    if name[0] in "14":
        return computing_ms(job) + sending_ms(job, name)
    if name[0] == "5":
        return prefetched_ms(job)
    groups = job.buckets() if name[0] == "3" else [[p] for p in job.arrived]
    number = {p: n for n, block in enumerate(job.model.blocks) for p in block.parameters()}
    blocks = len(job.model.blocks)
    backward_at = blocks * job.forward_ms + job.rest_ms
    done = 0.0
    for group in groups:
        # A block's gradients are there when its backward has ended; the embedding's at the end.
        place = number.get(group[-1], 0 if group[-1] is job.arrived[-1] else blocks)
        ready = backward_at + (blocks - place) * job.backward_ms
        done = max(ready, done) + job.ms("all_reduce", sum(p.nbytes for p in group))
    return max(done, computing_ms(job))


def prefetched_ms(job: Job) -> float:
    """Return how long way 5 takes, in ms: `now` is the clock of computing, `free` the link's."""
    rest, *blocks = job.units()
    now = job.ms("all_gather", rest)
    free = now

    def pass_over(sizes, computing, reduces):
        nonlocal now, free
        free = max(now, free) + job.ms("all_gather", sizes[0])
        for place, size in enumerate(sizes):
            now = max(now, free)
            if place + 1 < len(sizes):
                free = now + job.ms("all_gather", sizes[place + 1])
            now += computing
            if reduces:  # FSDP on a CPU waits for a reduce-scatter
                now = free = max(now, free) + job.ms("reduce_scatter", size)

    pass_over(blocks, job.forward_ms, reduces=False)
    now += job.rest_ms
    pass_over(blocks[::-1], job.backward_ms, reduces=True)
    return max(now, free) + job.ms("reduce_scatter", rest)


# the trace

HANDED_OVER = {
    "c10d::allreduce_": "all_reduce",
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
}
COLORS = {
    "forward": "#4477aa", "backward": "#66ccee", "all_reduce": "#ee6677",
    "all_gather": "#ccbb44", "reduce_scatter": "#aa3377",
}  # fmt: skip


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


def sends_of(events: list[dict]) -> list[dict]:
    """Return the collectives, each from hand-over to completion, in the order they completed."""
    for prefixes in (("link:",), ("gloo:",), ("ncclDevKernel",)):
        found = [e for e in events if e["name"].startswith(prefixes)]
        if found:
            return sorted(found, key=end)
    return []


def rows_of(events: list[dict]) -> dict[str, list[tuple[float, float, str]]]:
    """Return (start, length, kind) in ms from the start of the step, for computing and the link.

    The link sends one collective after the other: what is handed over earlier waits for its turn.
    """
    step = step_of(events)
    kernels = [e for e in events if e.get("cat") == "kernel" and "nccl" not in e["name"].lower()]
    blocks = [(e, e["name"].split()[0]) for e in work_of_blocks(events).values()]
    rows = {"compute": [], "link": []}

    def add(row, start, stop, kind):
        rows[row].append(((start - step["ts"]) / 1e3, (stop - start) / 1e3, kind))

    for event, kind in [(e, "forward") for e in kernels] or blocks:
        add("compute", event["ts"], end(event), kind)
    free = step["ts"]
    # gloo calls a reduce-scatter what it does for it, an all-reduce.
    other = "reduce_scatter" if handed_over(events, "reduce_scatter") else "all_reduce"
    kinds = {"allgather": "all_gather", "reducescatter": "reduce_scatter"}
    for event in sends_of(events):
        start = max(event["ts"], free)
        free = end(event)
        name = event["name"].lower().replace("_", "")  # by gloo, NCCL, or the emulated link
        add("link", start, free, next((kinds[part] for part in kinds if part in name), other))
    return rows


def step_of(events: list[dict]) -> dict:
    """Return the event of the whole step."""
    return next(e for e in events if e["name"] == "step" and e.get("cat") == "user_annotation")


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
            total = step_of(events)["dur"] / 1e3
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


# the checks

PATIENCE_S = 30.0  # how long the last rank stays away at most: for a way that waits for it
# By source: dense bfloat16 of an H100 SXM, and GB/s of its NVLink and of one 400 Gbit/s adapter in
# each direction (NVIDIA's data sheets).
H100_FLOPS = 989e12
H100_LINKS = {"NVLink, 450 GB/s": 450e9, "InfiniBand, 50 GB/s": 50e9}


def emulation_of(link: float | None, layer_ms: float | None, device) -> tuple[float, float]:
    """Return the link's bytes/s and the seconds that a block waits. Raises: UsageError on GPUs."""
    if device.type == "cpu":
        return link or cli.link_rate("100mbit"), (layer_ms or 40) / 1e3
    if link or layer_ms:
        raise cli.UsageError("--link and --layer-ms emulate what GPUs have: leave them out there")
    return 0.0, 0.0


def order_of_arrival(model: nn.Module, step, batch) -> list[nn.Parameter]:
    """Return a plain model's parameters in the order in which a backward completes gradients."""
    arrived = []
    hooks = [p.register_post_accumulate_grad_hook(arrived.append) for p in model.parameters()]
    step(model, batch)
    for hook in hooks:
        hook.remove()
    return arrived


def expected_traffic(job: Job, name: str) -> dict[str, tuple[int, int]]:
    """Return (calls, bytes handed over) of each kind of collective in a step, by formula."""
    if "FSDP" not in name:
        calls = {"1": 1, "2": len(job.arrived), "3": len(job.buckets())}[name[0]]
        return {"all_reduce": (calls, sum(p.nbytes for p in job.arrived))}
    if job.ranks == 1:
        return {}
    rest, *blocks = job.units()
    # Of the whole tensors, all ranks' parts; the rest stays gathered for backward.
    return {"all_gather": (2 * len(blocks) + 1, rest + 2 * sum(blocks)),
            "reduce_scatter": (len(blocks) + 1, rest + sum(blocks))}  # fmt: skip


def check_way(report: Report, job: Job, name: str, model, step, batch, expected) -> None:
    """Check loss and gradient of a way against one process, and its traffic against a formula."""
    expected_loss, expected_gradient = expected
    loss = step(batch)
    dist.all_reduce(loss)
    error = abs(loss.item() / job.ranks - expected_loss) / expected_loss
    report.check(f"{name}: loss, relative error", error, 0, 1e-5, "one process")
    plain = list(job.model.parameters())
    parts = expected_gradient.split([parameter.numel() for parameter in plain])
    pairs = zip(model.parameters(), plain, parts, strict=True)  # FSDP gives a rank a part of each
    own = proofs.flat(cut_like(part.view_as(whole), p.grad) for p, whole, part in pairs)
    proofs.same_gradient(report, model, own, 1e-5, f"{name}: gradient, relative error")
    model.zero_grad()
    with TrafficCounter() as counter:
        step(batch)
    model.zero_grad()
    wanted, source = expected_traffic(job, name), "formula: expected_traffic"
    for kind in ("all_reduce", "all_gather", "reduce_scatter"):  # DDP broadcasts new buckets once
        calls, handed = wanted.get(kind, (0, 0))
        if not calls and not counter.calls[kind]:
            continue
        what = f"{name}, {kind}"
        report.check(f"{what}: calls", counter.calls[kind], calls, 0, source)
        report.check(f"{what}: bytes handed over", counter.nbytes[kind], handed, 0, source)
    if name[0] in "23":
        check_asynchrony(report, name, model, step, batch)


def check_order(report: Report, job: Job, name: str, events: list[dict]) -> None:
    """Check, in a trace, what was handed over before what; no time enters."""
    wanted = expected_traffic(job, name)
    calls = sum(count for count, _ in wanted.values())
    if job.ranks > 1:
        what = f"{name}: collectives in the trace"
        report.check(what, len(sends_of(events)), calls, 0, "calls by formula")
    if "FSDP" not in name:
        prefix = "autograd::engine::evaluate_function"  # the last one stores the last gradient
        last = max(event["ts"] for event in events if event["name"].startswith(prefix))
        before = sum(call["ts"] < last for call in handed_over(events))
        early = 0 if name.startswith("1") else calls - 1
        what = f"{name}: handed over before the last gradient"
        report.check(what, before, early, 0, "all but the last")
    elif wanted:
        ahead, late = gathers_ahead(job, events)
        pairs = 2 * (len(job.model.blocks) - 1)
        on_time = pairs if "prefetch" in name else 0
        source = "the block before runs meanwhile"
        what = f"{name}: gathers begun before the block before computes"
        report.check(what, ahead, on_time, 0, source)
        what = f"{name}: gathers begun after the block before has ended"
        report.check(what, late, pairs - on_time, 0, source)


def gathers_ahead(job: Job, events: list[dict]) -> tuple[int, int]:
    """Count gathers begun before the block before computes, and those after it has ended.

    A gather counts as begun early only if the call does not wait for it.
    """
    last = len(job.model.blocks) - 1
    _, *gathers = handed_over(events, "all_gather")
    work = work_of_blocks(events)
    order = [*(f"forward {n}" for n in range(last + 1)),
             *(f"backward {n}" for n in range(last, -1, -1))]  # fmt: skip
    ahead = late = 0
    for place, call in enumerate(gathers):
        if place in (0, last + 1):  # no block computes before these, in their direction
            continue
        before = work[order[place - 1]]
        waits = "True" not in call["args"]["Concrete Inputs"]
        ahead += call["ts"] < before["ts"] and not waits
        late += call["ts"] >= end(before)
    return ahead, late


def check_asynchrony(report: Report, name: str, model, step, batch) -> None:
    """Check that backward waits for no sum: the last rank begins once the others' have ended."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if not last:
        return
    store = dist.group.WORLD.get_group_store()
    keys = [f"{name} computed by {other}" for other in range(last)]
    ended = True
    if rank == last:
        try:
            store.wait(keys, timedelta(seconds=PATIENCE_S))
        except dist.DistStoreError:
            ended = False
        step(batch)
    else:
        weight = next(model.parameters())  # the embedding's, whose gradient comes last
        hook = weight.register_post_accumulate_grad_hook(lambda _: store.set(keys[rank], ""))
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
        report.check(
            "sum is there before wait()", int(early == late), 0, 0, "the last rank is late"
        )
    report.check("sum after wait()", late, ranks * (ranks + 1) / 2, 0, "1 + ... + N")


def check_and_time(report: Report, job: Job, traces: dict[str, list[dict]]) -> None:
    """Check the order of events in each way's trace, and set times beside predictions.

    Takes "0 no communication" out of `traces`: how long computing alone takes.
    """
    time_blocks(job, traces.pop("0 no communication"))
    for name, events in traces.items():
        check_order(report, job, name, events)
    print_times(report, job, traces)
    print_rule(report, job)


def time_blocks(job: Job, events: list[dict]) -> None:
    """Take from the trace of a step without communication how long its parts compute."""
    work = work_of_blocks(events)
    mean = {way: sum(e["dur"] for n, e in work.items() if n.startswith(way)) / len(work) * 2 / 1e3
            for way in ("forward", "backward")}  # fmt: skip
    job.forward_ms, job.backward_ms = mean["forward"], mean["backward"]
    job.rest_ms = step_of(events)["dur"] / 1e3 - len(work) / 2 * sum(mean.values())


def print_times(report: Report, job: Job, traces: dict[str, list[dict]]) -> None:
    """Print each way's step beside what the sizes of model and link predict; keep the numbers."""
    computing = computing_ms(job)
    rows = []
    for name, events in traces.items():
        measured = step_of(events)["dur"] / 1e3
        calls = sum(count for count, _ in expected_traffic(job, name).values())
        report.metrics[f"step_time_ms_{name[0]}"] = measured
        cells = ["-"] * 4
        if job.rate and job.ranks > 1:
            sending, predicted = sending_ms(job, name), predicted_ms(job, name)
            report.metrics[f"sending_ms_{name[0]}"] = sending
            report.metrics[f"predicted_ms_{name[0]}"] = predicted
            times = sending, computing + sending, max(computing, sending), predicted
            cells = [f"{value:.1f} ms" for value in times]
        rows.append((name, str(calls), *cells, f"{measured:.1f} ms"))
    report.metrics["computing_ms"] = computing
    report.say(f"computing takes {computing:.1f} ms in each way; without communication, measured")
    headers = ("way", "collectives", "sending", "sum", "larger", "predicted", "step")
    report.table(rows, headers)


def print_rule(report: Report, job: Job) -> None:
    """Print which links the computing of a block hides, and what an H100 needs."""
    block = job.units()[1]
    rows = []
    for link, rate in (("100 Mbit/s", 12.5e6), ("1 Gbit/s", 125e6)) if job.ranks > 1 else ():
        cells = []
        for kind, beside in (("all_gather", job.forward_ms), ("all_reduce", job.backward_ms)):
            sending = job.ms(kind, block, rate)
            cells += [f"{sending:.1f} ms", f"{beside:.1f} ms", "yes" if sending < beside else "no"]
        rows.append((link, *cells))
    if rows and job.rate:
        report.say(f"a block's {block:,} bytes beside the computing of one block:")
        sides = ("gather", "forward", "hidden", "all-reduce", "backward", "hidden")
        report.table(rows, ("link", *sides))
    tokens = {link: H100_FLOPS / rate for link, rate in H100_LINKS.items()}
    report.metrics["tokens_to_hide"] = tokens
    needs = "; ".join(f"{count:,.0f} over {link}" for link, count in tokens.items())
    report.say(f"tokens per rank that hide a block, H100 at its bf16 peak: {needs}")
