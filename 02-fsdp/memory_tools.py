"""Is there memory enough for a model, what was held at the peak, and a picture of it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch

from dist_common.cli import UsageError
from dist_common.measure import GIB, available_memory
from dist_common.report import Report, figure
from dist_common.runtime import World, gather

# What the classes of PyTorch's FSDPMemTracker are, and in which colour a picture shows them.
CLASSES = {
    "weights, sharded": (("Sharded Param",), "#1f6f8b"),
    "optimizer state": (("OptState",), "#99c1de"),
    "gradients, sharded": (("Sharded Grad",), "#8a9a5b"),
    "weights, gathered": (("Unsharded Param", "All Gather"), "#e9a23b"),
    "gradients, not yet sharded": (("Unsharded Grad", "Reduce Scatter"), "#f2d399"),
    "activations": (("Activation", "Inputs", "Buffer"), "#c1121f"),
    "temporary, in backward": (("Temp",), "#e7a5a8"),
}


def require_memory(what: str, needed: int, shards: int, device: torch.device, world: World) -> None:
    """Refuse what takes more bytes than all ranks have; call it on all, before allocating.

    Units: bytes, `needed` of all `shards` ranks together, which hold equal parts.
    Raises: UsageError with what is needed, what there is, and how many ranks would do.
    """
    free = available_memory(device)
    free //= world.local_world_size if device.type == "cpu" else 1  # ranks share a machine's
    least = min(gather(free))
    if needed / shards > least:
        raise UsageError(
            f"{what} needs {needed / GIB:,.1f} GiB for weights, gradients and optimizer state, "
            f"{needed / shards / GIB:,.1f} GiB on each of {shards} ranks, and activations on top; "
            f"a rank has {least / GIB:,.1f} GiB: shard over more than {needed // least:,} such "
            "ranks, or take a smaller model"
        )


class AllocationPeak:
    """Measure the most bytes that tensors held at once between `start` and `stop`: `bytes`.

    On the CPU from the log of PyTorch's profiler, which slows a step down. What another thread
    frees, as gloo's do, is not in it: it is noticed when its address is given out again.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes = 0

    def start(self) -> None:
        """Begin; what was allocated before counts on a GPU, and does not on the CPU."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        kinds = [torch.profiler.ProfilerActivity.CPU]
        self.profiler = torch.profiler.profile(activities=kinds, profile_memory=True)
        self.profiler.start()

    def stop(self) -> None:
        """End, and work out `bytes`."""
        if self.device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self.device)
            return
        self.profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            self.profiler.export_chrome_trace(str(path))
            events = [e for e in json.loads(path.read_text())["traceEvents"] if "args" in e]
        live: dict[int, int] = {}
        total = 0
        events = [event for event in events if "Addr" in event["args"]]
        for event in sorted(events, key=lambda event: event["ts"]):
            address = event["args"]["Addr"]
            size = event["args"]["Bytes"]
            total += max(size, 0) - live.pop(address, 0)
            if size > 0:
                live[address] = size
            self.bytes = max(self.bytes, total)


def by_class(peak: dict[str, int]) -> dict[str, int]:
    """Return the bytes of a tracker's peak by the names of CLASSES."""
    return {name: sum(peak.get(kind, 0) for kind in kinds) for name, (kinds, _) in CLASSES.items()}


def show_peak(report: Report, peak: dict[str, int]) -> None:
    """Print what one rank holds at its peak, in the tracker's own classes, and set the metrics."""
    rows = [[kind, f"{size:,}", f"{size / GIB:.2f}"] for kind, size in peak.items()]
    report.table(rows, ("held at the peak by one rank", "bytes", "GiB"))
    report.metrics |= {f"{kind}_gib": size / GIB for kind, size in peak.items()}


def show_peaks(report: Report, peaks: dict[str, dict[str, int]]) -> None:
    """Print one column for each choice, in GiB, and set the metrics."""
    rows = []
    for name, (kinds, _) in CLASSES.items():
        sizes = [sum(peak.get(kind, 0) for kind in kinds) for peak in peaks.values()]
        rows.append([name, *(f"{size / GIB:.2f}" for size in sizes)])
    rows.append(["total", *(f"{peak['Total'] / GIB:.2f}" for peak in peaks.values())])
    report.table(rows, ("GiB at the peak of one rank", *peaks))
    for name, peak in peaks.items():
        report.metrics[name] = {kind: size / GIB for kind, size in peak.items()}


def draw_peaks(path: Path, peaks: dict[str, dict[str, int]], title: str) -> None:
    """Draw a stack of classes for each choice."""
    with figure(path, figsize=(9, 4.2)) as axes:
        bottom = [0.0] * len(peaks)
        for name, (_, colour) in CLASSES.items():
            sizes = [by_class(peak)[name] / GIB for peak in peaks.values()]
            axes.bar(list(peaks), sizes, 0.6, bottom=bottom, label=name, color=colour)
            bottom = [low + size for low, size in zip(bottom, sizes, strict=True)]
        for place, peak in enumerate(peaks.values()):
            total = peak["Total"] / GIB
            axes.text(place, total, f" {total:.2f}", ha="center", va="bottom")
        axes.set_ylabel("GiB at the peak of one rank")
        axes.set_title(title, fontsize=10)
        axes.margins(y=0.1)
        axes.spines[["top", "right"]].set_visible(False)
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1, 0.5),
                    frameon=False)  # fmt: skip
