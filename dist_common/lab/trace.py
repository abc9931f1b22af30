"""What a step does and when: the profiler's events."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function


def quiet_log(device: torch.device) -> None:
    """Have the profiler's library not log, as an error, that a CPU is no GPU; call it before."""
    if device.type == "cpu":
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")


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
