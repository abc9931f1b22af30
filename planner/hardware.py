"""GPUs and links: rates of data sheets (data/gpus.csv), each with its source.

The share that a job reaches is in `rates.py` (matrix products, memory) and in
`communication.py` (links).
"""

from __future__ import annotations

import csv
import difflib
import re
from dataclasses import dataclass, replace
from pathlib import Path

DATA = Path(__file__).parent / "data"
PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8", "fp4")
# Microseconds before the first byte arrives on another node.
LATENCY_US = {"rdma": 20.0, "ethernet": 100.0}
SLOW_CARD_GB_S = 3.0  # a usual card up to here is Ethernet without RDMA


@dataclass(frozen=True)
class Gpu:
    """A GPU as its data sheet describes it. `tflops` are dense, by precision."""

    name: str
    memory_gib: float
    tflops: dict[str, float]
    hbm_gb_s: float
    link_gb_s: float  # to the GPUs of its node, each way
    network_gb_s: float  # its usual network card, each way
    host_gb_s: float  # to the memory of its host, each way
    gpus_per_node: int
    family: str  # selects the constants of rates.py
    switch_reduces: bool  # NVLink SHARP (NVLS): the switch adds, the GPUs send once
    source: str

    def __hash__(self) -> int:
        return hash(self.name)


@dataclass(frozen=True)
class Cluster:
    """GPUs, their nodes, and a network card for each GPU.

    The scales change rates: 0.8 is a network, or a matrix unit, with a fifth less.
    """

    gpu: Gpu
    gpus_per_node: int = 8
    network_gb_s: float = 50.0  # of a GPU's own card, each way
    network: str = "rdma"  # or ethernet
    network_scale: float = 1.0  # of every link, inside nodes and between them
    matrix_scale: float = 1.0


def read_gpus() -> tuple[dict[str, Gpu], dict[str, str]]:
    """Return the GPUs of data/gpus.csv, and a pattern for the spellings of each."""
    gpus, patterns = {}, {}
    with (DATA / "gpus.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            patterns[row["name"]] = row.pop("pattern")
            tflops = {kind: row.pop(kind) for kind in PRECISIONS}
            texts = {key: row.pop(key) for key in ("name", "family", "source")}
            whole = {
                "gpus_per_node": int(row.pop("gpus_per_node")),
                "switch_reduces": row.pop("switch_reduces") == "1",
            }
            gpus[texts["name"]] = Gpu(
                tflops={kind: float(rate) for kind, rate in tflops.items() if rate},
                **texts,
                **whole,
                **{key: float(value) for key, value in row.items()},
            )
    return gpus, patterns


GPUS, PATTERNS = read_gpus()


def find_gpu(name: str) -> Gpu:
    """Return the GPU for a name such as `H100-SXM-80GB`, `NVIDIA L40S` or `mi300x`.

    Raises: ValueError with the known names.
    """
    if name.lower() in GPUS:
        return GPUS[name.lower()]
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    for known, pattern in PATTERNS.items():
        if re.search(pattern, plain):
            return GPUS[known]
    near = difflib.get_close_matches(name.lower(), GPUS, 1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ValueError(f"unknown GPU {name!r}; {hint}known are {', '.join(GPUS)}")


def cluster_of(gpu: Gpu, **other) -> Cluster:
    """Return a cluster with the given fields; the GPU's usual values replace None."""
    slow = gpu.network_gb_s <= SLOW_CARD_GB_S
    usual = {
        "gpus_per_node": gpu.gpus_per_node,
        "network_gb_s": gpu.network_gb_s,
        "network": "ethernet" if slow else "rdma",
    }
    given = {name: value for name, value in other.items() if value is not None}
    return Cluster(gpu, **usual | given)


def slower(cluster: Cluster, network: float = 1.0, matrix: float = 1.0) -> Cluster:
    """Return a cluster with a share of the rate of its links, or matrix units."""
    return replace(
        cluster,
        network_scale=cluster.network_scale * network,
        matrix_scale=cluster.matrix_scale * matrix,
    )
