"""What scripts do not write of the machine and the code that runs; CUDA is not started for it."""

import ctypes
import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import torch

from bench import launch
from bench.strategies import REPOSITORY


def describe_machine(launcher: str) -> dict[str, str]:
    """Return what scripts do not write of code and machine, by name; CUDA is not started for it."""
    info = Path("/proc/cpuinfo")  # where Linux says the processor's name
    model = re.search(r"^model name\s*: (.+)", info.read_text() if info.exists() else "", re.M)
    found = {
        "commit": commit(REPOSITORY),
        "CPU": model and model[1],
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") if launcher != launch.FORK else None,
        "nodes": os.environ.get("SLURM_JOB_NUM_NODES"),
        **gpus(output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")),
    }
    return {name: value for name, value in found.items() if value}


def commit(repository: Path) -> str:
    """Return the commit of the code that runs, and whether files differ from it."""
    words = ("describe", "--always", "--exclude=*", "--abbrev=10", "--dirty= with changes")
    return output_of("git", "-C", str(repository), *words)


def gpus(listed: str) -> dict[str, str]:
    """Return names and number of the GPUs, driver, CUDA, NCCL; `listed` is "name, driver" lines."""
    rows = [line.split(", ") for line in listed.splitlines()]
    if not rows or any(len(row) != 2 for row in rows):
        return {}
    names = Counter(name for name, _ in rows)
    nccl = nccl_version() if torch.version.cuda else ()
    return {
        "GPUs": " and ".join(f"{count} x {name}" for name, count in names.items()),
        "driver": " and ".join(dict.fromkeys(driver for _, driver in rows)),
        "CUDA": torch.version.cuda or "",
        "NCCL": ".".join(map(str, nccl)),
    }


def nccl_version() -> tuple[int, ...]:
    """Return the version of the library that is there; PyTorch tells that it was built with."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):  # linked into PyTorch
        return torch.cuda.nccl.version()
    return number.value // 10000, number.value // 100 % 100, number.value % 100


def output_of(*words: str) -> str:
    """Return what a program printed; nothing where there is no such program, or it failed."""
    try:
        ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return ended.stdout.strip()
