"""The table of calibrated constants, which no data sheet has.

`planner/calibrate.py` fits `value` on half of the published rows, drawn to `prior` and
within its range. Everything else follows from shapes, data sheets and the constants
that stand with their formulas in compute.py, communication.py and step.py.
"""

from __future__ import annotations

from typing import NamedTuple


class Rate(NamedTuple):
    """A calibrated constant: its value, where the fit starts, and its range."""

    name: str
    value: float
    prior: float
    low: float
    high: float
    meaning: str


TABLE = (
    # The share of the peak that products reach when all sides are long.
    Rate("matrix.ampere", 0.984, 0.82, 0.5, 1.0, "A100"),
    Rate("matrix.hopper", 0.74, 0.74, 0.4, 0.90, "no row fitted: bf16 since 2025"),
    Rate("matrix.hopper-500w", 0.655, 0.60, 0.3, 0.85, "H100 of 500 W"),
    Rate("matrix.blackwell", 0.525, 0.60, 0.3, 0.90, "B200, GB200"),
    Rate("matrix.blackwell-ultra", 0.776, 0.60, 0.3, 0.90, "GB300"),
    Rate("matrix.other", 0.6, 0.60, 0.3, 0.90, "no row: V100, L40S"),
    Rate("matrix.tpu", 0.9, 0.90, 0.3, 0.95, "no row fitted: TPU"),
    Rate("matrix.ada-geforce", 0.95, 0.95, 0.5, 0.95, "no row fitted: RTX 4090"),
    Rate("matrix.cdna3", 0.25, 0.25, 0.1, 0.90, "no row fitted: MI300X"),
    Rate(
        "matrix.fp8", 0.92, 0.85, 0.5, 1.2, "times the 16-bit share, of the 8-bit peak"
    ),
    Rate(
        "matrix.fp8-rows", 0.399, 0.60, 0.3, 1.0, "the same, with a scale for each row"
    ),
    Rate(
        "matrix.fp4", 0.911, 0.70, 0.3, 1.2, "times the 16-bit share, of the 4-bit peak"
    ),
    Rate("matrix.side", 467, 200.0, 50, 800, "a side of s gives s / (s + this)"),
    # Attention: the share of the 16-bit peak, by generation of kernels.
    Rate("attention.flash2.ampere", 0.372, 0.50, 0.25, 0.75, "forward"),
    Rate("attention.flash2.hopper", 0.221, 0.35, 0.15, 0.75, "forward"),
    Rate("attention.flash2.other", 0.4, 0.40, 0.15, 0.75, "no row"),
    Rate(
        "attention.flash3.hopper", 0.5, 0.50, 0.25, 0.75, "no row fitted: FA 3, cuDNN"
    ),
    Rate("attention.flash3.blackwell", 0.428, 0.45, 0.15, 0.75, "forward"),
    Rate("attention.flash3.other", 0.4, 0.40, 0.15, 0.75, "no row"),
    # Memory-bound work: 16-bit numbers read and written forward, for each token.
    Rate("passes.hidden", 34.2, 25.0, 8, 60, "of `hidden`: norms, residuals, copies"),
    Rate("passes.compiled", 0.38, 0.4, 0.15, 0.9, "times that: compiled, Megatron-LM"),
    # Launches, and communication that compute hides.
    Rate(
        "launch.eager_us", 918, 500.0, 100, 1500, "of one layer forward, at the least"
    ),
    Rate("step.micro_ms", 2.55, 2.0, 0.1, 10, "of a micro-batch: all that is no layer"),
    Rate("overlap.leak", 0.4, 0.2, 0.03, 0.5, "of hidden communication: it takes SMs"),
)

RATES: dict[str, float] = {rate.name: rate.value for rate in TABLE}
FITTED = [rate for rate in TABLE if not rate.meaning.startswith("no row")]


def rate_of(rates: dict[str, float], kind: str, family: str) -> float:
    """Return a rate of a family (hopper-500w: or of hopper), or what is usual."""
    for name in (family, family.partition("-")[0]):
        if f"{kind}.{name}" in rates:
            return rates[f"{kind}.{name}"]
    return rates[f"{kind}.other"]
