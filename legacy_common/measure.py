"""How long a step takes, what it sends, what memory it needs, how well it uses the device."""

import contextlib
import os
import resource
import secrets
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from legacy_common.cli import UsageError
from legacy_common.models import TransformerConfig

GIB = 2**30  # bytes
# Peaks in TFLOP/s, without sparsity: of 16 bits, and of float32. Source: the vendors' data sheets.
PEAK_TFLOPS = {
    "H100 PCIe": (756.0, 51.0), "H100 NVL": (835.5, 60.0), "H100": (989.4, 67.0),
    "H200": (989.4, 67.0), "GH200": (989.4, 67.0), "B200": (2250.0, 75.0), "A100": (312.0, 19.5),
    "V100": (125.0, 15.7), "L40S": (362.05, 91.6), "RTX 4090": (165.2, 82.6),
    "MI300X": (1307.4, 163.4),
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


def memory_in_use(device: torch.device) -> int:
    """Return the bytes in use now: allocated on a GPU, resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return psutil.Process().memory_info().rss


def available_memory(device: torch.device) -> int:
    """Return the bytes that are free on a GPU, or that the machine can still give on the CPU."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def flops_per_token(config: TransformerConfig, seq_len: int) -> float:
    """Return the operations of forward and backward for one token (PaLM, 2022, appendix B).

    6 per weight that multiplies it, and 12 per layer, width and position of attention.
    """
    D, L = config.dim, config.num_layers
    looked_up = 0 if config.tied_embeddings else config.vocab_size * D
    idle = max(0, config.num_experts - config.top_k) * 3 * D * config.ffn_dim * L
    return 6 * (config.num_parameters() - looked_up - idle) + 12 * L * D * seq_len


def mfu(flops_per_second: float, device: torch.device, precision: str) -> float | None:
    """Return the part of one device's peak that the model uses; None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    peaks = next((peaks for gpu, peaks in PEAK_TFLOPS.items() if gpu in name), None)
    if peaks is None:
        return None
    return flops_per_second / (peaks[1 if precision == "32-true" else 0] * 1e12)


class TensorBoard:
    """Write numbers to folder/tensorboard. Raises: UsageError when it is not installed."""

    def __init__(self, folder: Path, first_step: int, run: dict[str, Any]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UsageError("--logger tensorboard: pip install tensorboard first") from error
        self.writer = SummaryWriter(folder / "tensorboard", purge_step=first_step)
        self.close = self.writer.close

    def write(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()


class WandB:
    """Send numbers to one run of wandb, which a resume continues: its id is in folder/wandb-id.

    Raises: UsageError when wandb is not installed, or refuses, as without an account.
    """

    def __init__(self, folder: Path, first_step: int, run: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UsageError("--logger wandb: pip install wandb first") from error
        name = folder / "wandb-id"
        if not name.exists():
            name.write_text(secrets.token_hex(4))
        options = {"id": name.read_text(), "resume": "allow", "name": folder.name, "config": run}
        # It leaves the lines of the script alone.
        settings = wandb.Settings(console="off")
        try:
            self.run = wandb.init(dir=folder, settings=settings, **options)
        except wandb.Error as error:
            why = f"{error}; WANDB_MODE=offline needs no account"
            raise UsageError(f"--logger wandb: {why}") from error
        self.close = self.run.finish

    def write(self, step: int, values: dict[str, float]) -> None:
        if step >= self.run.step:  # which cannot go back to the checkpoint of a resume
            self.run.log(values, step=step)


LOGGERS = {"tensorboard": TensorBoard, "wandb": WandB}


def quiet_log(device: torch.device) -> None:
    """Have the profiler's library not log, as an error, that a CPU is no GPU; call it before."""
    if device.type == "cpu":
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")


class Profile:
    """Write what steps `first` to `last` of this rank do to a folder: a trace for each rank.

    On a GPU a snapshot of its memory too. Sources: torch.profiler, for perfetto.dev; PyTorch's
    Understanding CUDA Memory Usage, for pytorch.org/memory_viz.
    """

    def __init__(self, folder: Path, steps: tuple[int, int], device: torch.device) -> None:
        self.folder, (self.first, self.last), self.device = folder, steps, device
        self.trace: torch.profiler.profile | None = None

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Profile a step, if it is one of them; after the last one's results call `stop`."""
        if not self.first <= number <= self.last:
            yield
            return
        if self.trace is None:
            self.start()
        with torch.profiler.record_function(f"step {number}"):
            yield

    def start(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # what steps before it queued is not theirs
            torch.cuda.memory._record_memory_history(max_entries=1_000_000)
        quiet_log(self.device)
        self.trace = torch.profiler.profile()
        self.trace.start()

    def stop(self) -> None:
        """Write the files, if a profile has begun; also of fewer steps, when a run is stopped."""
        if self.trace is None:
            return
        rank, trace = dist.get_rank(), self.trace
        self.trace = None
        trace.stop()  # waits for a GPU
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(self.folder / f"memory-rank{rank}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        trace.export_chrome_trace(str(self.folder / f"trace-rank{rank}.json"))
