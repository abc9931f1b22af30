"""How long a step takes, what it sends, what memory it needs, how well it uses the device."""

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

from dist_common.models import TransformerConfig

GIB = 2**30  # bytes
# Bytes that a rank sends per byte of the whole tensor, by algorithms that send no more than a ring.
# Source: Patarasuk and Yuan, Bandwidth Optimal All-reduce (2009).
RING_FACTOR = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "send": lambda ranks: 1,
} | dict.fromkeys(
    ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "broadcast", "reduce"),
    lambda ranks: (ranks - 1) / ranks,
)
# Dense peak in TFLOP/s: float32 outside the tensor cores, bfloat16 in them (V100: float16). By the
# name that the driver gives, the first that fits. Source: NVIDIA data sheets.
PEAK_TFLOPS = {
    "B200": (75.0, 2250.0), "H200": (67.0, 989.4), "H100 PCIe": (51.0, 756.0),
    "H100 80GB HBM3": (67.0, 989.4), "A100": (19.5, 312.0), "L40S": (91.6, 362.1),
    "V100": (15.7, 125.0),
}  # fmt: skip


class StepTimer:
    """Time steps in ms, on a GPU to the end of their kernels; the first `warmup` do not count."""

    def __init__(self, device: torch.device, warmup: int = 5) -> None:
        self.device, self.warmup = device, warmup
        self.steps_ms: list[float] = []
        self.steps_cpu_ms: list[float] = []  # of this process, all threads

    def start(self) -> "StepTimer":
        """Begin the time that `lap` measures."""
        self.started, self.cpu_started = time.perf_counter(), time.process_time()
        return self

    __enter__ = start

    def lap(self, steps: int) -> float:
        """Keep and return the mean time of the steps since `start`, once their results are read."""
        self.steps_ms += [(time.perf_counter() - self.started) * 1e3 / steps] * steps
        self.steps_cpu_ms += [(time.process_time() - self.cpu_started) * 1e3 / steps] * steps
        self.start()
        return self.steps_ms[-1]

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.steps_ms.append((time.perf_counter() - self.started) * 1e3)

    def median_ms(self) -> float:
        """Return the median step time; of the warm-up itself when there were no other steps."""
        return statistics.median(self.steps_ms[self.warmup :] or self.steps_ms)

    def cpu_ms(self) -> float:
        """Return the mean CPU time of the steps that `lap` timed, those of the warm-up left out."""
        return statistics.fmean(self.steps_cpu_ms[self.warmup :] or self.steps_cpu_ms)


class CollectiveCounter(TorchDispatchMode):
    """Count `calls` and `bytes` handed over by operation ("allreduce_"), those of DDP's own too."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__
            self.calls[name] += 1
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self.bytes[name] += sum(tensor.nbytes for tensor in tensors)
        return func(*args, **(kwargs or {}))


def bytes_written() -> int | None:
    """Return the bytes written to files and gloo's sockets (Linux, proc(5)); elsewhere None."""
    if dist.get_backend() != "gloo" or not sys.platform.startswith("linux"):
        return None
    return psutil.Process().io_counters().write_chars


def core_count() -> int | None:
    """Return the cores that this process may use, or that there are where macOS does not say."""
    known = hasattr(psutil.Process, "cpu_affinity")
    return len(psutil.Process().cpu_affinity()) if known else psutil.cpu_count()


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
    """Return the operations of forward and backward for one token (PaLM, 2022, appendix B)."""
    looked_up = 0 if config.tied_embeddings else config.vocab_size * config.dim
    weights = config.num_parameters() - looked_up  # those that multiply it: 6 operations each
    return 6 * weights + 12 * config.num_layers * config.dim * seq_len


def mfu(flops_per_second: float, device: torch.device, precision: str) -> float | None:
    """Return the part of one device's peak that the model uses; None where it is not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    for known, peaks in PEAK_TFLOPS.items():
        if known in name:
            return flops_per_second / (peaks[precision != "32-true"] * 1e12)
    return None


class StepLog:
    """Keep steps' numbers in folder/metrics.jsonl; drop older ones from `first_step` on."""

    def __init__(self, folder: Path | None, first_step: int) -> None:
        self.file = None
        if folder is None:
            return
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
