"""The memory of fsdp_transformer.py: is there enough, and how much was held at its peak."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch

from dist_common.cli import UsageError
from dist_common.measure import GIB, available_memory
from dist_common.runtime import World, gather


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
