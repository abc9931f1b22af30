"""Hold several ways to one averaged gradient against one process, and time them.

`ways` is {name: (model, what to call after backward)}; the first one does not communicate.
"""

import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

from legacy_common.lab import proofs, traffic


def loss_of(model, batch):
    """Return the mean cross-entropy. Shapes: batch is inputs and targets, (B, T) each."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def take_step(model, after_backward, batch):
    """Compute one averaged gradient; return the milliseconds of forward, and of the whole step."""
    model.zero_grad()
    started = clock(batch)
    loss = loss_of(model, batch)
    forward = clock(batch)
    loss.backward()
    after_backward()
    return (forward - started) * 1e3, (clock(batch) - started) * 1e3


def clock(batch):
    """Return seconds, once the device has done what it was told to."""
    if batch[0].is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def check_each(report, ways, batch, expected):
    """Take one counted step of each way, and add its checks; return rows of what it sent."""
    rows = []
    world_size = dist.get_world_size()
    for name, way in list(ways.items())[1:]:
        take_step(*way, batch)  # DDP settles its buckets in its first step
        dist.barrier()
        before = traffic.bytes_written()
        with traffic.TrafficCounter() as counter:
            take_step(*way, batch)
        calls = counter.calls["all_reduce"]
        model = way[0]
        source = f"DDP paper, section 3.2.{name[0]}" if name[0] != "4" else "one process"
        proofs.same_gradient(report, model, expected, 1e-5, f"{name}: gradient error", source)
        proofs.one_gradient_sent(report, model, counter, name=f"{name}: bytes handed over")
        if before is not None:
            sent = traffic.bytes_written() - before
            ring = round(traffic.RING_FACTOR["all_reduce"](world_size) * expected.nbytes)
            # Up to 1,000 bytes for each message of a ring, and as much from the barrier before.
            headers = 1000 * (world_size - 1) * (calls + 1)
            source = "2(N-1)/N of them, and gloo's headers"
            report.check(f"{name}: bytes sent", sent, ring, headers, source)
        rows.append([name, str(calls), f"{counter.nbytes['all_reduce']:,}"])
        report.metrics[f"collectives_{name[0]}"] = calls
    return rows


def check_overlap(report, name, way, overlap, batch):
    """Take a step; check that all-reduces begin while gradients are still missing.

    All but the last bucket's can: the last bucket waits for the last gradient.
    """
    parameters = [p for p in way[0].parameters() if p.requires_grad]
    all_reduce = overlap.all_reduce
    early = []

    def noted(tensor):
        early.append(any(parameter.grad is None for parameter in parameters))
        return all_reduce(tensor)

    overlap.all_reduce = noted
    take_step(*way, batch)
    overlap.all_reduce = all_reduce
    all_but_one = report.metrics[f"collectives_{name[0]}"] - 1
    name = f"{name}: all-reduces begun before the last gradient"
    report.check(name, sum(early), all_but_one, 0, "DDP paper, section 3.2.3")


def time_each(report, ways, batch, link_rate, gradient_bytes, rows):
    """Time steps of each way, in turn, and print them beside what an ideal overlap would take.

    Units: bytes/s of an emulated link; 0 is none.
    """
    timings = {name: [] for name in ways}
    for _ in report.progress(range(report.args.max_steps), "timing"):
        for name, way in ways.items():  # in turn: a noisy moment meets all of them
            dist.barrier()
            timings[name].append(take_step(*way, batch))
    alone = timings.pop("no communication")
    forward, compute = (statistics.median(column) for column in zip(*alone, strict=True))
    ring = traffic.RING_FACTOR["all_reduce"](dist.get_world_size()) * gradient_bytes
    sending = ring / link_rate * 1e3 if link_rate else 0.0
    for row, (name, times) in zip(rows, timings.items(), strict=True):
        median = statistics.median(whole for _, whole in times)
        ideal = compute + sending
        if name[0] in "34":  # backward and sending at the same time
            ideal = forward + max(compute - forward, sending)
        row += [f"{median:.1f} ms", f"{ideal:.1f} ms" if sending else "-"]
        report.metrics[f"step_time_ms_{name[0]}"] = median
    report.metrics |= {"forward_ms": forward, "compute_ms": compute, "sending_ms": sending}
    report.table(rows, ("way", "all-reduces", "bytes handed over", "step", "ideal"))
    report.say(f"computing takes {compute:.1f} ms, of it {forward:.1f} ms forward")
    if sending:
        ends = f"{compute + sending:.1f} ms, max(computing, sending) {max(compute, sending):.1f} ms"
        report.say(f"sending takes {sending:.1f} ms: the sum is {ends}")
