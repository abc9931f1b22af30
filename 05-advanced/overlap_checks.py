"""What communication_overlap.py proves of each way to a step, and prints of its time."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from dist_common import cli, measure
from dist_common.report import Report
from dist_common.runtime import gather
from overlap_predict import Job, computing_ms, predicted_ms, sending_ms
from overlap_trace import end, handed_over, last_gradient, sends_of, step_ms, work_of_blocks

PATIENCE_S = 30.0  # how long the last rank stays away at most: for a way that waits for it
# By source: dense bfloat16 of an H100 SXM, and GB/s of its NVLink and of one 400 Gbit/s adapter in
# each direction (NVIDIA's data sheets).
H100_FLOPS = 989e12
H100_LINKS = {"NVLink, 450 GB/s": 450e9, "InfiniBand, 50 GB/s": 50e9}
OPERATIONS = {"allreduce_": "all_reduce", "_allgather_base_": "all_gather",
              "_reduce_scatter_base_": "reduce_scatter"}  # fmt: skip


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
    # A call hands over the whole and a rank's part of it; the rest stays gathered for backward.
    gathered, reduced = rest + 2 * sum(blocks), rest + sum(blocks)
    handed = [whole + whole // job.ranks for whole in (gathered, reduced)]
    return {"all_gather": (2 * len(blocks) + 1, handed[0]),
            "reduce_scatter": (len(blocks) + 1, handed[1])}  # fmt: skip


def largest_error(job: Job, model: nn.Module, expected: torch.Tensor) -> torch.Tensor:
    """Return the largest error of this rank's gradients, whole or the part that FSDP gives it."""
    plain = list(job.model.parameters())
    worst = expected.new_zeros(())
    parts = expected.split([parameter.numel() for parameter in plain])
    for parameter, shape, part in zip(model.parameters(), plain, parts, strict=True):
        gradient, part = parameter.grad, part.view_as(shape)
        if isinstance(gradient, DTensor):
            gradient = gradient.to_local()
            rows = [*part.chunk(job.ranks), *[part[:0]] * job.ranks]
            part = rows[dist.get_rank()]
        worst = torch.cat(((gradient - part).abs().flatten(), worst[None])).max()
    return worst


def check_way(report: Report, job: Job, name: str, model, step, batch, expected) -> None:
    """Check loss and gradient of a way against one process, and its traffic against a formula."""
    expected_loss, expected_gradient = expected
    loss = step(batch)
    dist.all_reduce(loss)
    error = abs(loss.item() / job.ranks - expected_loss) / expected_loss
    report.check(f"{name}: loss, relative error", error, 0, 1e-5, "one process")
    error = largest_error(job, model, expected_gradient) / expected_gradient.abs().max()
    dist.all_reduce(error, op=dist.ReduceOp.MAX)  # the worst rank counts
    report.check(f"{name}: gradient, relative error", error.item(), 0, 1e-5, "one process")
    model.zero_grad()
    with measure.CollectiveCounter() as counter:
        step(batch)
    model.zero_grad()
    wanted = expected_traffic(job, name)
    for operation, kind in OPERATIONS.items():
        calls, handed = wanted.get(kind, (0, 0))
        if calls or counter.calls[operation]:
            what = f"{name}, {kind}"
            source = "formula in overlap_checks.py"
            report.check(f"{what}: calls", counter.calls[operation], calls, 0, source)
            report.check(f"{what}: bytes handed over", counter.bytes[operation], handed, 0, source)
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
        before = sum(call["ts"] < last_gradient(events) for call in handed_over(events))
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
    job.rest_ms = step_ms(events) - len(work) / 2 * sum(mean.values())


def print_times(report: Report, job: Job, traces: dict[str, list[dict]]) -> None:
    """Print each way's step beside what the sizes of model and link predict; keep the numbers."""
    computing = computing_ms(job)
    rows = []
    for name, events in traces.items():
        measured = step_ms(events)
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
