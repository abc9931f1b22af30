"""How long a step takes, what it sends, what memory it needs, how well it uses the device."""

from __future__ import annotations

import contextlib
import json
import math
import resource
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dist_common.cli import UsageError
from dist_common.models import TransformerConfig

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

    def start(self) -> None:
        """Begin the time that `lap` measures."""
        self.started = time.perf_counter()

    def lap(self, steps: int) -> float:
        """Return the mean time of the `steps` steps since `start` or the last lap, and keep it.

        Does not wait for the device: call it after reading a result of the last step.
        """
        now = time.perf_counter()
        mean_ms = (now - self.started) * 1e3 / steps
        self.steps_ms += [mean_ms] * steps
        self.started = now
        return mean_ms

    def __enter__(self) -> StepTimer:
        self.start()
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

    None where that cannot be known: only Linux counts them, and NCCL does not use the system calls
    that are counted. Source: proc(5), /proc/[pid]/io, wchar.
    """
    if dist.get_backend() != "gloo" or not sys.platform.startswith("linux"):
        return None
    return psutil.Process().io_counters().write_chars


def core_count() -> int | None:
    """Return the cores that this process may use, or that there are where macOS does not say."""
    if hasattr(psutil.Process, "cpu_affinity"):
        return len(psutil.Process().cpu_affinity())
    return psutil.cpu_count()


def peak_memory_gib(device: torch.device) -> float:
    """Return the most memory used so far: allocated on a GPU, resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB


def available_memory(device: torch.device) -> int:
    """Return the bytes that are free on a GPU, or that the machine can still give on the CPU."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


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
