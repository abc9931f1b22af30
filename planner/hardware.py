"""GPUs and links: rates of data sheets, each with its source. Nothing here is derated.

What a job reaches of these rates is in `step.py` (matrix products, memory) and `collectives.py`
(links).
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """A GPU as its data sheet has it; `tflops` by precision, dense."""

    name: str
    memory_gib: float
    tflops: dict[str, float]
    hbm_gb_s: float
    link_gb_s: float  # to the GPUs of its node, each way
    source: str
    family: str = "ampere"  # whose measured efficiencies apply
    switch_reduces: bool = False  # NVLink SHARP (NVLS): the switch adds, the GPUs send once
    mesh: bool = False  # links join pairs of GPUs, without a switch
    host_gb_s: float = 25.0  # to the memory of its host, each way
    gpus_per_node: int = 8
    network_gb_s: float = 50.0  # its usual network card, each way

    def __hash__(self) -> int:
        return hash(self.name)


@dataclass(frozen=True)
class Cluster:
    """GPUs, the nodes they stand in, and a network card for each GPU.

    The scales are what-ifs: 0.8 is a network, or a matrix unit, that gives a fifth less.
    """

    gpu: Gpu
    gpus_per_node: int = 8
    network_gb_s: float = 50.0  # of a GPU's own card, each way
    network: str = "rdma"  # InfiniBand, RoCE; or "cloud": EFA, GPUDirect-TCPX
    network_scale: float = 1.0  # of every link, inside nodes and between them
    matrix_scale: float = 1.0


def _gpu(name, memory_gib, tflops, hbm_gb_s, link_gb_s, source, **more) -> Gpu:
    return Gpu(name, memory_gib, tflops, hbm_gb_s, link_gb_s, source, **more)


_VOLTA = {"fp32": 15.7, "tf32": 15.7, "fp16": 125.0, "bf16": 15.7}
_AMPERE = {"fp32": 19.5, "tf32": 156.0, "fp16": 312.0, "bf16": 312.0, "int8": 624.0}
_H100_SXM = {"fp32": 67.0, "tf32": 494.7, "fp16": 989.4, "bf16": 989.4, "fp8": 1978.9}
_H100_PCIE = {"fp32": 51.0, "tf32": 378.0, "fp16": 756.0, "bf16": 756.0, "fp8": 1513.0}
_H100_NVL = {"fp32": 60.0, "tf32": 417.5, "fp16": 835.5, "bf16": 835.5, "fp8": 1670.5}
_B200 = {"fp32": 75.0, "tf32": 1125.0, "fp16": 2250.0, "bf16": 2250.0, "fp8": 4500.0, "fp4": 9000.0}
_GB200 = {
    "fp32": 80.0, "tf32": 1250.0, "fp16": 2500.0, "bf16": 2500.0, "fp8": 5000.0, "fp4": 10000.0,
}  # fmt: skip
_GB300 = {
    "fp32": 80.0, "tf32": 1250.0, "fp16": 2500.0, "bf16": 2500.0, "fp8": 5000.0, "fp4": 15000.0,
}  # fmt: skip
_MI300X = {"fp32": 163.4, "tf32": 653.7, "fp16": 1307.4, "bf16": 1307.4, "fp8": 2614.9}
_L40S = {"fp32": 91.6, "tf32": 183.0, "fp16": 362.05, "bf16": 362.05, "fp8": 733.0}
_RTX4090 = {"fp32": 82.6, "tf32": 82.6, "fp16": 165.2, "bf16": 165.2, "fp8": 330.3}

GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu(
            "v100", 32, _VOLTA, 900, 150, "NVIDIA V100 data sheet (2020), SXM2 32 GB",
            family="volta", mesh=True, host_gb_s=12, network_gb_s=12.5,
        ),
        _gpu(
            "a100-40gb", 40, _AMPERE, 1555, 300, "NVIDIA A100 data sheet (2021), SXM4 40 GB",
            network_gb_s=25,
        ),
        _gpu(
            "a100", 80, _AMPERE, 2039, 300, "NVIDIA A100 data sheet (2021), SXM4 80 GB",
            network_gb_s=25,
        ),
        _gpu(
            "a100-pcie", 80, _AMPERE, 1935, 25, "NVIDIA A100 data sheet (2021), PCIe 80 GB",
            network_gb_s=25,
        ),
        _gpu(
            "h100", 80, _H100_SXM, 3350, 450, "NVIDIA H100 data sheet (2023), SXM5",
            family="hopper", switch_reduces=True, host_gb_s=50,
        ),
        _gpu(
            "h100-96gb", 96, _H100_SXM, 2400, 450,
            "torchtitan benchmarks: H100 with HBM2e, limited to 500 W",
            family="hopper-500w", switch_reduces=True, host_gb_s=50,
        ),
        _gpu(
            "h100-pcie", 80, _H100_PCIE, 2000, 50, "NVIDIA H100 data sheet (2023), PCIe",
            family="hopper", host_gb_s=50,
        ),
        _gpu(
            "h100-nvl", 94, _H100_NVL, 3900, 300, "NVIDIA H100 data sheet (2023), NVL: pairs",
            family="hopper", host_gb_s=50,
        ),
        _gpu(
            "h200", 141, _H100_SXM, 4800, 450, "NVIDIA H200 data sheet (2024), SXM",
            family="hopper", switch_reduces=True, host_gb_s=50,
        ),
        _gpu(
            "gh200", 96, _H100_SXM, 4000, 450, "NVIDIA GH200 data sheet (2024)",
            family="hopper", switch_reduces=True, host_gb_s=450,
        ),
        _gpu(
            "b200", 180, _B200, 8000, 900, "NVIDIA HGX B200 data sheet (2024)",
            family="blackwell", switch_reduces=True, host_gb_s=50,
        ),
        _gpu(
            "gb200", 186, _GB200, 8000, 900, "NVIDIA GB200 NVL72 data sheet (2024)",
            family="blackwell", switch_reduces=True, host_gb_s=450, gpus_per_node=72,
        ),
        _gpu(
            "gb300", 279, _GB300, 8000, 900, "NVIDIA GB300 NVL72 data sheet (2025)",
            family="blackwell-ultra", switch_reduces=True, host_gb_s=450, gpus_per_node=72,
            network_gb_s=100,
        ),
        _gpu(
            "mi300x", 192, _MI300X, 5300, 448, "AMD Instinct MI300X data sheet (2023)",
            family="cdna3", host_gb_s=50,
        ),
        _gpu(
            "l40s", 48, _L40S, 864, 25, "NVIDIA L40S data sheet (2023)",
            family="ada", network_gb_s=25,
        ),
        _gpu(
            "rtx4090", 24, _RTX4090, 1008, 12,
            "NVIDIA Ada architecture white paper (2022), float32 accumulation; no peer to peer",
            family="ada-geforce", network_gb_s=3,
        ),
        _gpu(
            "tpu-v5p", 95, {"bf16": 459.0, "fp16": 459.0, "fp32": 229.0}, 2765, 300,
            "Google Cloud TPU v5p documentation (2023): 4,800 Gbit/s of links, both ways",
            family="tpu", gpus_per_node=4, network_gb_s=75,
        ),
    )
}  # fmt: skip

_ALIASES = {"4090": "rtx4090", "geforcertx4090": "rtx4090", "v5p": "tpu-v5p"}


def find_gpu(name: str, memory_gib: float | None = None) -> Gpu:
    """Return the GPU that a name means, however it is spelled: `H100-SXM-80GB`, `NVIDIA L40S`.

    Raises: ValueError with the known names.
    """
    plain = re.sub(r"[^a-z0-9]|nvlink", "", name.lower())  # an H100 with NVLink is no H100 NVL
    exact = GPUS.get(name.lower())
    if exact and memory_gib in (None, exact.memory_gib):
        return exact
    for alias, known in _ALIASES.items():
        if alias in plain:
            return GPUS[known]
    found = [known for known in GPUS if known.split("-")[0] in plain and known[:3] != "tpu"]
    if plain == "tpuv5":
        found = ["tpu-v5p"]
    if not found:
        near = difflib.get_close_matches(name.lower(), GPUS, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"unknown GPU {name!r}; {hint}known are {', '.join(GPUS)}")
    longest = max(len(known.split("-")[0]) for known in found)
    found = [known for known in found if len(known.split("-")[0]) == longest]
    for known in found:
        details = known.split("-")[1:]
        if details and all(detail in plain for detail in details):
            return GPUS[known]
    plainest = next((known for known in found if "-" not in known), found[0])
    if memory_gib:
        for known in found:
            if "pcie" not in known and GPUS[known].memory_gib == memory_gib:
                return GPUS[known]
    return GPUS[plainest]
