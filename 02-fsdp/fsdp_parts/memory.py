"""What was held at the peak of a step: predicted by class, or measured in all."""

import json
import math
import tempfile
from bisect import bisect
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import torch

from legacy_common.lab.trace import quiet_log
from legacy_common.measure import GIB
from legacy_common.report import Report

# What the classes of PyTorch's FSDPMemTracker are, in the table of several choices.
CLASSES = {
    "weights, sharded": ("Sharded Param",),
    "optimizer state": ("OptState",),
    "gradients, sharded": ("Sharded Grad",),
    "weights, gathered": ("Unsharded Param", "All Gather"),
    "gradients, not yet sharded": ("Unsharded Grad", "Reduce Scatter"),
    "activations": ("Activation", "Inputs", "Buffer"),
    "temporary, in backward": ("Temp",),
    "total": ("Total",),
}


def allocation_peak(take_steps: Callable[[], object], device: torch.device) -> tuple[int, int]:
    """Return the most bytes of tensors at once while a function ran, and gloo's largest copy.

    On a GPU beside what was allocated before: the first matrix product of each thread takes a
    workspace and keeps it, on an H200 32 MiB for forward and 32 for backward. On the CPU from the
    log of PyTorch's profiler, which slows a step down.
    """
    if device.type == "cuda":
        square = torch.ones(64, 64, device=device, requires_grad=True)
        (square @ square).sum().backward()
        del square
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        take_steps()
        return torch.cuda.max_memory_allocated(device) - before, 0
    quiet_log(device)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    # Where a CPU computes in bfloat16, oneDNN takes memory for itself from PyTorch's allocator.
    with (
        torch.backends.mkldnn.flags(enabled=False),
        torch.profiler.profile(activities=kinds, profile_memory=True) as profiler,
    ):
        take_steps()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return peak_in(json.loads(path.read_text())["traceEvents"])


def peak_in(events: list[dict]) -> tuple[int, int]:
    """Return the most bytes of tensors at once in a profiler's log, and the largest copy by gloo.

    Gloo copies what it gathers and scatters, within its call or in a thread of its own, and frees
    the copy unseen. NCCL copies nothing: a copy is no part of the peak.
    """
    events = sorted((event for event in events if "ts" in event), key=lambda event: event["ts"])
    calls, gathers, unpacked = (
        [event for event in events if event["name"].startswith(name) and "dur" in event]
        for name in ("c10d::", "FSDP::all_gather (", "FSDP::all_gather_copy_out")
    )
    changes = []  # (when, bytes more or less)
    live: dict[int, dict] = {}  # blocks by address
    largest_copy = 0

    def release(block: dict, when: float, seen: bool) -> None:
        if not seen and within(gathers, block):  # gloo's thread had it last: until FSDP was done
            later = (event["ts"] + event["dur"] for event in unpacked if event["ts"] > block["ts"])
            when = min(when, next(later, when))
        changes.append((when, -block["args"]["Bytes"]))

    for block in (event for event in events if "Addr" in event.get("args", ())):
        address, size = block["args"]["Addr"], block["args"]["Bytes"]
        if address in live:
            release(live.pop(address), block["ts"], size < 0)
        if size > 0 and calls and (block["tid"] != calls[0]["tid"] or within(calls, block)):
            largest_copy = max(largest_copy, size)
        elif size > 0:
            live[address] = block
            changes.append((block["ts"], size))
    for block in live.values():
        release(block, math.inf, seen=False)
    return max(accumulate(size for _, size in sorted(changes))), largest_copy


def within(spans: list[dict], event: dict) -> bool:
    """Say whether an event lies in one of some spans, which follow each other."""
    before = bisect(spans, event["ts"], key=lambda span: span["ts"])
    return before > 0 and event["ts"] <= spans[before - 1]["ts"] + spans[before - 1]["dur"]


def show_peak(report: Report, peak: dict[str, int]) -> None:
    """Print what one rank holds at its peak, in the tracker's own classes, and set the metrics."""
    rows = [[kind, f"{size:,}", f"{size / GIB:.2f}"] for kind, size in peak.items()]
    report.table(rows, ("held at the peak by one rank", "bytes", "GiB"))
    report.metrics |= {f"{kind}_gib": size / GIB for kind, size in peak.items()}


def show_peaks(report: Report, peaks: dict[str, dict[str, int]]) -> None:
    """Print one column for each choice, in GiB, and set the metrics."""
    rows = []
    for name, kinds in CLASSES.items():
        sizes = (sum(peak.get(kind, 0) for kind in kinds) for peak in peaks.values())
        rows.append([name, *(f"{size / GIB:.2f}" for size in sizes)])
    report.table(rows, ("GiB at the peak of one rank", *peaks))
    for name, peak in peaks.items():
        report.metrics[name] = {kind: size / GIB for kind, size in peak.items()}
