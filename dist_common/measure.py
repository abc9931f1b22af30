"""What a script measured, what it expected, and the results.json that holds both."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dist_common
from dist_common.models import TransformerConfig
from dist_common.runtime import UsageError, World

GIB = 2**30  # bytes
# Dense peak in TFLOP/s: float32 outside the tensor cores, and bfloat16 or float16 in them (V100:
# float16 only). By the name that the driver gives, the first that fits. Source: NVIDIA data sheets.
PEAK_TFLOPS = {
    "B200": (75.0, 2250.0),
    "H200": (67.0, 989.4),
    "H100 PCIe": (51.0, 756.0),
    "H100 80GB HBM3": (67.0, 989.4),
    "A100": (19.5, 312.0),
    "L40S": (91.6, 362.1),
    "V100": (15.7, 125.0),
}


class StepTimer:
    """Time training steps; the first `warmup` of them stay out of the statistics.

    Units: milliseconds. On a GPU a step ends when its kernels have, not when they are queued.
    """

    def __init__(self, device: torch.device, warmup: int = 5) -> None:
        self.device, self.warmup = device, warmup
        self.steps_ms: list[float] = []

    def __enter__(self) -> StepTimer:
        self.started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.steps_ms.append((time.perf_counter() - self.started) * 1e3)

    def median_ms(self) -> float:
        """Return the median step time; of the warm-up itself when there were no other steps."""
        return statistics.median(self.steps_ms[self.warmup :] or self.steps_ms)


class CollectiveCounter(TorchDispatchMode):
    """Count the collectives that this rank starts inside a `with` block, and their bytes.

    `calls` and `bytes` are keyed by the name of the operation ("allreduce_",
    "broadcast_"). Bytes are those of the tensors handed to the operation, which is what a
    collective's cost formulas take; what crosses the wire is a factor of it. Sees what PyTorch
    itself starts too, as DistributedDataParallel does in backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__
            self.calls[name] += 1
            self.bytes[name] += sum(
                leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)
            )
        return func(*args, **(kwargs or {}))


def bytes_written() -> int | None:
    """Return the bytes that this process has written so far, to files and to gloo's sockets.

    None where that cannot be known: NCCL does not send by the system calls that are counted here,
    and it is Linux that counts them (proc(5), /proc/[pid]/io).
    """
    counters = Path("/proc/self/io")
    if dist.get_backend() != "gloo" or not counters.exists():
        return None
    return int(dict(line.split(": ") for line in counters.read_text().splitlines())["wchar"])


def core_count() -> int | None:
    """Return the cores that this process may use, or that there are where macOS does not say."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def peak_memory_gib(device: torch.device) -> float:
    """Return the most memory used so far: allocated on a GPU, resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB


def live_bytes() -> Counter[str]:
    """Return the bytes of all floating-point tensors that this process holds, by type of device.

    That is weights, gradients, optimizer state and buffers of them; tokens and indices are left
    out. Memory that several tensors share counts once; what autograd alone holds is not seen.
    """
    time.sleep(0.2)  # gloo's threads let go of what they reduced a moment after it is done
    gc.collect()
    storages = {}
    # By type: isinstance would wake lazy objects of libraries, which warn.
    things = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    # A gradient that nobody has looked at yet is no Python object.
    things += [thing.grad for thing in things if thing.is_leaf and thing.grad is not None]
    for thing in things:
        if thing.is_floating_point() and not thing.is_meta:
            with contextlib.suppress(NotImplementedError, RuntimeError):  # no storage of its own
                storage = thing.untyped_storage()
                storages[storage.device.type, storage.data_ptr()] = storage.nbytes()
    held: Counter[str] = Counter()
    for (device, _), size in storages.items():
        held[device] += size
    return held


def available_memory(device: torch.device) -> int:
    """Return the bytes that are free on a GPU, or that the machine can still give on the CPU."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    info = Path("/proc/meminfo")
    if not info.exists():  # macOS: all that there is
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 1024 * int(info.read_text().split("MemAvailable:")[1].split()[0])


def require_memory(what: str, needed: int, shards: int, device: torch.device, world: World) -> None:
    """Refuse what takes more bytes than all ranks have; call it on all, before allocating.

    Units: bytes, `needed` of all `shards` ranks together, which hold equal parts.
    Raises: UsageError with what is needed, what there is, and how many ranks would do.
    """
    free = available_memory(device)
    free //= world.local_world_size if device.type == "cpu" else 1  # ranks share a machine's
    everywhere = [0] * world.world_size
    dist.all_gather_object(everywhere, free)
    least = min(everywhere)
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
        self.device, self.bytes = device, 0

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
            address, size = event["args"]["Addr"], event["args"]["Bytes"]
            total += max(size, 0) - live.pop(address, 0)
            if size > 0:
                live[address] = size
            self.bytes = max(self.bytes, total)


def flops_per_token(config: TransformerConfig, seq_len: int) -> float:
    """Return the floating-point operations of forward and backward for one token.

    6 for each weight that multiplies it, and 12 L D T for attention, as if it saw all T tokens.
    Source: Chowdhery et al., PaLM (2022), appendix B.
    """
    looked_up = 0 if config.tied_embeddings else config.vocab_size * config.dim
    weights = config.num_parameters() - looked_up
    return 6 * weights + 12 * config.num_layers * config.dim * seq_len


def mfu(flops_per_second: float, device: torch.device, precision: str) -> float | None:
    """Return the model FLOPs utilisation: the part of one device's peak that the model uses.

    None where the peak is not known: on the CPU, and on a GPU that PEAK_TFLOPS does not name.
    """
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for known, peaks in PEAK_TFLOPS.items():
        if known in name:
            return flops_per_second / (peaks[0 if precision == "32-true" else 1] * 1e12)
    return None


class StepLog:
    """Keep each step's numbers: a line of JSON in metrics.jsonl; on request TensorBoard's file too.

    Does nothing without a folder, as on ranks other than 0. Lines of `first_step` and later, which
    a run wrote after the checkpoint that it is resumed from, are dropped: those steps come again.

    Raises: UsageError when TensorBoard is asked for and not installed.
    """

    def __init__(self, folder: Path | None, first_step: int, tensorboard: bool = False) -> None:
        self.file = self.tensorboard = None
        if folder is None:
            return
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise UsageError("--tensorboard: pip install tensorboard first") from error
            self.tensorboard = SummaryWriter(folder / "tensorboard", purge_step=first_step)
        path, partial = folder / "metrics.jsonl", folder / "metrics.partial"
        kept = []
        for line in path.read_text().splitlines() if path.exists() else []:
            with contextlib.suppress(ValueError):  # killed while it wrote the last line
                kept += [line] if json.loads(line)["step"] < first_step else []
        partial.write_text("".join(f"{line}\n" for line in kept))
        partial.replace(path)
        self.file = path.open("a")

    def write(self, step: int, **values: float) -> None:
        """Write the values of a step by name, at once: a run that is killed has them."""
        # JSON knows no infinity, which the norm of a gradient is where float16 overflowed.
        values = {name: value if math.isfinite(value) else None for name, value in values.items()}
        if self.file:
            self.file.write(json.dumps({"step": step, **values}) + "\n")
            self.file.flush()
        if self.tensorboard:
            for name, value in values.items():
                if value is not None:
                    self.tensorboard.add_scalar(name, value, step)
            self.tensorboard.flush()


@dataclass
class Check:
    """Something measured beside what it must be, derived independently of it."""

    name: str
    measured: float
    expected: float
    tolerance: float
    source: str

    @property
    def ok(self) -> bool:
        # NaN compares false with everything, so a NaN fails.
        return abs(self.measured - self.expected) <= self.tolerance


@dataclass
class Results:
    """Collect a script's metrics and checks; write them as DIR/results.json."""

    script: str
    args: argparse.Namespace
    world: World
    device: torch.device
    metrics: dict[str, float | None] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    started: datetime = field(default_factory=lambda: datetime.now(timezone.utc))

    def check(
        self, name: str, measured: float, expected: float, tolerance: float, source: str
    ) -> None:
        """Add a check. Tolerance is absolute, in the unit of the two values."""
        self.checks.append(Check(name, measured, expected, tolerance, source))

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if not check.ok]

    def write(self, output_dir: str | Path) -> Path:
        """Write results.json whole or not at all. Call it on one rank."""
        gpu = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else None
        content = {
            "script": self.script,
            "args": vars(self.args),
            "started": self.started.isoformat(timespec="seconds"),
            "seconds": round((datetime.now(timezone.utc) - self.started).total_seconds(), 2),
            "world_size": self.world.world_size,
            "device": self.device.type,
            "backend": dist.get_backend() if dist.is_initialized() else None,
            "launcher": self.world.launcher,
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "dist_common": dist_common.__version__,
            },
            "machine": {
                "cores": core_count(),
                "gpu": gpu,
                "system": platform.system(),
                "processor": platform.machine(),
            },
            "metrics": self.metrics,
            "checks": [{**vars(check), "ok": check.ok} for check in self.checks],
        }
        if "deepspeed" in sys.modules:
            content["versions"]["deepspeed"] = sys.modules["deepspeed"].__version__
        path = Path(output_dir) / "results.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(content, indent=2, default=str) + "\n")
        return partial.replace(path)


def claim_output_dir(args: argparse.Namespace, world: World) -> Path | None:
    """Make the folder of --output-dir, and refuse one in which an earlier run would be lost.

    Raises: UsageError when it cannot be written, or is not empty, unless there are checkpoints in
    it and --resume is given.
    """
    if args.output_dir is None:
        return None
    path = Path(args.output_dir)
    if not world.is_rank0:
        return path
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UsageError(f"--output-dir {path} cannot be written: {error.strerror}") from error
    empty, has_checkpoints = not any(path.iterdir()), (path / "checkpoints").is_dir()
    if not empty and not (has_checkpoints and getattr(args, "resume", False)):
        raise UsageError(
            f"--output-dir {path} is not empty: name another folder"
            + (", or add --resume to go on with the run in it" if has_checkpoints else "")
        )
    if hasattr(args, "resume"):  # a run that is killed before its first checkpoint may go on too
        (path / "checkpoints").mkdir(exist_ok=True)
    return path
