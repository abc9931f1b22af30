"""What a sweep runs on and scripts do not write: commit, CPU, GPUs, driver, CUDA and NCCL."""

import os
import subprocess
from collections import Counter
from pathlib import Path

import torch

from bench.launch import FORK
from bench.strategies import REPOSITORY


def describe(launcher: str) -> dict[str, str]:
    """Return what is known of this machine and code, by name; CUDA is not started for it."""
    listed = said("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    info = Path("/proc/cpuinfo")  # where Linux says the processor's name
    lines = info.read_text().splitlines() if info.exists() else []
    found = {
        "commit": commit(REPOSITORY),
        "CPU": next((x.split(": ", 1)[1] for x in lines if x.startswith("model name")), None),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") if launcher != FORK else None,
        "nodes": os.environ.get("SLURM_JOB_NUM_NODES"),
        **gpus(listed or ""),
    }
    return {name: value for name, value in found.items() if value}


def commit(repository: Path) -> str | None:
    """Return the commit of the code that runs, and whether files differ from it."""
    short = said("git", "-C", str(repository), "rev-parse", "--short=10", "HEAD")
    changed = said("git", "-C", str(repository), "status", "--porcelain", "--untracked-files=no")
    return f"{short} with changes" if short and changed else short


def gpus(listed: str) -> dict[str, str]:
    """Return names and number of the GPUs, driver, CUDA, NCCL; `listed` is "name, driver" lines."""
    rows = [line.split(", ") for line in listed.splitlines()]
    if not rows or any(len(row) != 2 for row in rows):
        return {}
    names = Counter(name for name, _ in rows)
    nccl = torch.cuda.nccl.version() if torch.version.cuda else ()
    return {
        "GPUs": " and ".join(f"{count} x {name}" for name, count in names.items()),
        "driver": " and ".join(dict.fromkeys(driver for _, driver in rows)),
        "CUDA": torch.version.cuda or "",
        "NCCL": ".".join(map(str, nccl)),
    }


def said(*words: str) -> str | None:
    """Return what a program printed; None where there is no such program, or it failed."""
    try:
        ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return ended.stdout.strip() or None
