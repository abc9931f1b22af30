"""What a step does and when: the profiler's events."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from legacy_common.measure import quiet_log


def trace(step: Callable[[], object], device: torch.device, path: Path | None = None) -> list[dict]:
    """Profile one call, as the span "step"; return the trace's events by start.

    The trace is kept at `path`, if one is given. Units: an event's `ts` and `dur` are in µs.
    """
    gpu = device.type == "cuda"
    quiet_log(device)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * gpu
    with profile(activities=activities, record_shapes=True) as profiler, record_function("step"):
        step()
        if gpu:
            torch.cuda.synchronize(device)  # else it ends when its kernels are queued
    with tempfile.TemporaryDirectory() as folder:
        file = path or Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    return sorted((event for event in events if "dur" in event), key=lambda event: event["ts"])
