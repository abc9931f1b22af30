"""What was held at the peak of a step: predicted by class, or measured in all."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from dist_common.lab.trace import quiet_log
from dist_common.measure import GIB
from dist_common.report import Report

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


def allocation_peak(take_steps: Callable[[], object], device: torch.device) -> int:
    """Return the most bytes that tensors held at once while a function ran.

    On a GPU with what was allocated before. On the CPU from the log of PyTorch's profiler, which
    slows a step down; what another thread frees, as gloo's do, is not in it: it is noticed when its
    address is given out again.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        take_steps()
        return torch.cuda.max_memory_allocated(device)
    quiet_log(device)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, profile_memory=True) as profiler:
        take_steps()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    events = [event for event in events if "Addr" in event.get("args", ())]
    live: dict[int, int] = {}  # bytes by address
    total = most = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        total += max(size, 0) - live.pop(address, 0)
        if size > 0:
            live[address] = size
        most = max(most, total)
    return most


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
