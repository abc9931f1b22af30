"""GPUs and links: rates of data sheets, each with its source."""

from __future__ import annotations

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


@dataclass(frozen=True)
class Cluster:
    """GPUs, the nodes they stand in, and a network card for each GPU."""

    gpu: Gpu
    gpus_per_node: int = 8
    network_gb_s: float = 50.0  # of a GPU's own card, each way
