"""What is calibrated: the one table of constants that no data sheet has.

`planner/calibrate.py` fits `value` on half of the published rows, drawn to `prior` and
within its range, and `planner/validate.py` shows the other half. Everything else in the
planner follows from shapes and data sheets.
"""

from __future__ import annotations

from typing import NamedTuple


class Rate(NamedTuple):
    """A calibrated constant: its value, where the fit starts, and what it may be."""

    name: str
    value: float
    prior: float
    low: float
    high: float
    meaning: str


TABLE = (
    # Matrix products: share of the peak when all sides are long; what a short side loses.
    Rate("matrix.volta", 0.75, 0.75, 0.4, 0.95, "no row: as Ampere, less"),
    Rate("matrix.ampere", 0.937, 0.82, 0.5, 0.95, "share of the 16-bit peak: A100"),
    Rate("matrix.hopper", 0.744, 0.70, 0.4, 0.90, "H100 of 700 W, H200: power limits it"),
    Rate("matrix.hopper-500w", 0.619, 0.60, 0.3, 0.85, "H100 of 500 W"),
    Rate("matrix.blackwell", 0.503, 0.65, 0.3, 0.90, "B200, GB200"),
    Rate("matrix.blackwell-ultra", 0.633, 0.65, 0.3, 0.90, "GB300"),
    Rate("matrix.ada-geforce", 0.95, 0.82, 0.5, 0.95, "no row but finetune_times.csv: RTX 4090"),
    Rate("matrix.tpu", 0.9, 0.90, 0.3, 0.95, "no row fitted: MaxText's 32B has 71% MFU on v5p"),
    Rate("matrix.other", 0.6, 0.60, 0.3, 0.90, "no row: MI300X, L40S"),
    Rate("matrix.fp8", 1.05, 0.85, 0.5, 1.05, "times the 16-bit share, of the 8-bit peak"),
    Rate("matrix.fp8-rows", 0.41, 0.60, 0.3, 1.0, "the same, with a scale for each row"),
    Rate("matrix.fp4", 0.96, 0.70, 0.3, 1.0, "times the 16-bit share, of the 4-bit peak"),
    Rate("matrix.side", 380, 200.0, 50, 800, "a side of s gives s / (s + this) of the rate"),
    # Attention has its own rate, of the 16-bit peak.
    Rate("attention.ampere", 0.451, 0.50, 0.25, 0.75, "flash, forward"),
    Rate("attention.hopper", 0.265, 0.35, 0.15, 0.75, "flash, forward"),
    Rate("attention.hopper-500w", 0.271, 0.35, 0.15, 0.75, "flash, forward"),
    Rate("attention.blackwell", 0.492, 0.45, 0.15, 0.75, "flash, forward"),
    Rate("attention.blackwell-ultra", 0.75, 0.45, 0.15, 0.75, "flash, forward"),
    Rate("attention.other", 0.4, 0.40, 0.15, 0.75, "no row"),
    Rate("attention.backward", 0.622, 0.80, 0.6, 1.0, "times forward's rate"),
    Rate("attention.stored", 0.674, 0.50, 0.2, 0.8, "products of attention that stores scores"),
    # Memory-bound work: 16-bit numbers read and written, forward, for each token.
    Rate("hbm", 0.95, 0.85, 0.7, 0.95, "share of the memory's rate"),
    Rate("passes.hidden", 50.3, 25.0, 8, 60, "of `hidden`: norms, residuals, copies"),
    Rate("passes.ffn", 2, 3.0, 2, 8, "of the feed-forward's width: activation"),
    Rate("passes.scores", 8.92, 8.0, 3, 20, "of each score, where they are stored"),
    Rate("passes.logits", 3, 6.0, 3, 20, "of each logit, forward and backward"),
    Rate("passes.compiled", 0.239, 0.5, 0.15, 0.9, "times that: compiled, Megatron-LM"),
    Rate("passes.cast", 1.46, 1.5, 0.5, 4, "of each product's input, in 8 or 4 bits"),
    # Launches.
    Rate("launch.eager_us", 898, 400.0, 100, 1500, "of one layer forward, at the least"),
    Rate("launch.compiled_us", 150, 150.0, 50, 600, "the same, compiled"),
    Rate("step.micro_ms", 3.34, 1.0, 0.1, 10, "of a micro-batch: all that is no layer"),
    Rate("step.fixed_ms", 3.31, 5.0, 1, 20, "of a step: its loop, clipping, logging"),
    # Overlap.
    Rate("overlap.leak", 0.39, 0.15, 0.03, 0.5, "of hidden communication: it takes SMs"),
    Rate("overlap.tp", 0.95, 0.6, 0.2, 0.95, "hidden of tp's, where products are cut to hide it"),
    Rate("zero3.tensors", 0.173, 0.2, 0.05, 1, "of the links, one tensor at a time (DeepSpeed)"),
    Rate("optimizer.bytes", 49.2, 36.0, 25, 60, "read and written per weight"),
    # Links (collectives.py).
    Rate("link.ring", 0.753, 0.77, 0.5, 1, "of NVLink's rate"),
    Rate("link.switch.hopper", 0.597, 0.58, 0.3, 1, "NVLS: a tensor is sent once"),
    Rate("link.switch.blackwell", 0.49, 0.53, 0.3, 1, "the same"),
    Rate("link.switch.other", 0.55, 0.55, 0.3, 1, "no row"),
    Rate("link.mesh", 0.928, 0.90, 0.6, 1, "of a DGX-1's links"),
    Rate("link.start_us", 7.16, 10.0, 2, 40, "of any collective"),
    Rate("network.rate", 0.88, 0.90, 0.5, 1, "of the network cards' rate"),
    Rate("network.cloud.start_us", 113, 80.0, 5, 200, "to leave the node: EFA, TCPX"),
    Rate("network.cloud.ramp_us", 87.6, 50.0, 5, 200, "per doubling from 1 to 64 MiB: EFA, TCPX"),
    Rate("network.rdma.start_us", 26.9, 20.0, 3, 100, "to leave the node: InfiniBand, RoCE"),
    Rate("network.rdma.ramp_us", 5.26, 20.0, 3, 100, "per doubling from 1 to 64 MiB"),
    Rate("network.node_us", 8.71, 5.0, 1, 20, "to each further node"),
    Rate("link.python_us", 24.8, 20.0, 5, 60, "more where torch.distributed is timed alone"),
    Rate("link.hop_us", 8.52, 8.0, 2, 20, "to each further GPU of a ring"),
    Rate("link.hop_switch_us", 1.32, 2.5, 0.5, 10, "the same, where the switch adds"),
    Rate("link.ramp_us", 7.38, 8.0, 1, 30, "per doubling of a message from 1 to 64 MiB"),
)

RATES: dict[str, float] = {rate.name: rate.value for rate in TABLE}
PRIORS: dict[str, float] = {rate.name: rate.prior for rate in TABLE}
FITTED = tuple(rate.name for rate in TABLE if not rate.meaning.startswith("no row"))
RANGES: dict[str, tuple[float, float]] = {
    rate.name: (rate.low, rate.high) for rate in TABLE if rate.name in FITTED
}


def rate_of(rates: dict[str, float], kind: str, family: str) -> float:
    """Return a rate of a family of GPUs; of an unknown family, what is usual."""
    return rates.get(f"{kind}.{family}", rates[f"{kind}.other"])
