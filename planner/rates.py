"""Calibrated constants that no data sheet gives: shares, factors and times.

`planner/calibrate.py` fits the constants in `FITTED` on half of the published rows. The
fit is drawn to `prior` and stays in the range. `FIXED` has constants that these rows
cannot tell. Everything else follows from shapes, data sheets and the constants next to
their formulas in compute.py, communication.py and step.py.
"""

from __future__ import annotations

from typing import NamedTuple


class FittedRate(NamedTuple):
    """A fitted constant: its value, its prior, and its range."""

    name: str
    value: float
    prior: float
    low: float
    high: float
    meaning: str


FITTED = (
    # The share of the peak that products reach when all sides are long.
    FittedRate("matrix.ampere", 0.938, 0.86, 0.5, 1.0, "A100"),
    FittedRate("matrix.hopper-500w", 0.837, 0.80, 0.3, 0.95, "H100 of 500 W"),
    FittedRate("matrix.blackwell", 0.581, 0.78, 0.3, 0.90, "B200, GB200"),
    FittedRate("matrix.blackwell-ultra", 0.784, 0.78, 0.3, 0.90, "GB300"),
    # Narrow numbers take less power, and power limits the 16-bit rate.
    FittedRate("matrix.fp8", 1.25, 1.0, 0.5, 1.5, "times the 16-bit share: 8-bit peak"),
    FittedRate("matrix.fp8-rows", 0.6, 0.6, 0.3, 1.0, "a scale for each row"),
    FittedRate("matrix.fp4", 1.56, 1.0, 0.3, 1.8, "times the 16-bit share: 4-bit peak"),
    FittedRate("traffic.other", 2.56, 2.0, 0.5, 5.0, "times that an operand is moved"),
    # Attention, forward: the share of the 16-bit peak, by generation of kernels.
    FittedRate("attention.flash2.ampere", 0.367, 0.50, 0.25, 0.75, "A100"),
    FittedRate("attention.flash2.hopper", 0.22, 0.35, 0.15, 0.75, "H100, H200"),
    FittedRate("attention.flash3.blackwell", 0.396, 0.45, 0.15, 0.75, "cuDNN"),
    # Memory-bound work: 16-bit numbers read and written forward, for each token.
    FittedRate("passes.hidden", 20.6, 25.0, 8, 60, "of `hidden`: norms, sums, copies"),
    FittedRate("passes.compiled", 0.485, 0.4, 0.15, 0.9, "times that: fused kernels"),
    # Launches, and communication that compute hides.
    FittedRate("launch.eager_us", 912, 500, 100, 1500, "at the least: a layer forward"),
    FittedRate("step.micro_ms", 2.79, 2.0, 0.1, 10, "of a micro-batch: no layer"),
    FittedRate("overlap.leak", 0.403, 0.2, 0.03, 0.5, "of hidden calls: they take SMs"),
)
FIXED = {
    "matrix.hopper": 0.80,  # H100 of 700 W: the fastest that ml-engineering measured
    "matrix.cdna3": 0.25,  # MI300X, from one row
    "matrix.tpu": 0.90,
    "matrix.ada-geforce": 0.95,  # RTX 4090: clocks above the data sheet's
    "matrix.other": 0.60,
    "traffic.ada": 1.0,  # 72 to 96 MB of cache hold operands (RTX 4090, L40S)
    "attention.flash3.hopper": 0.50,  # FlashAttention 3, cuDNN (Shah et al., 2024)
    "attention.flash2.other": 0.40,
    "attention.flash3.other": 0.40,
}
RATES: dict[str, float] = FIXED | {rate.name: rate.value for rate in FITTED}


def rate_of(rates: dict[str, float], kind: str, family: str) -> float:
    """Return a rate of a family of GPUs.

    A variant (hopper-500w) falls back to its family (hopper), and an unknown family to
    the usual rate.
    """
    for name in (family, family.partition("-")[0]):
        if f"{kind}.{name}" in rates:
            return rates[f"{kind}.{name}"]
    return rates[f"{kind}.other"]
