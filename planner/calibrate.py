"""Fit the constants of `planner/rates.py` on half of the published step times.

    python planner/calibrate.py            print the fit next to the values in the table
    python planner/calibrate.py --write    write the fit into the table

Residuals are logarithms of predicted over published. Beyond a few percent they count by
size and not by square (soft L1). Each constant is drawn to the value that data sheets
and papers suggest, and stays in a plausible range.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from planner import published, rates
from planner.step import step_seconds

SCALE = 0.06  # residuals beyond this count less
PULL = 0.15  # to the prior, per factor of e
EVERY, WEIGHT = 4, 0.5  # of vTrain's single node: every fourth row, at half the weight


def fitted_runs() -> list[tuple[published.PublishedRun, float]]:
    """Return the runs to fit on, each with its weight."""
    runs = [run for run in published.read_runs() if run.set == "fit"]
    single = [run for run in runs if run.source_name == published.SINGLE_NODE]
    weighted = [
        (run, 1.0)
        for run in runs
        if run.source_name != published.SINGLE_NODE and not run.job.adapter_rank
    ]
    return weighted + [(run, WEIGHT) for run in single[::EVERY]]


def with_fitted(logarithms: np.ndarray) -> dict[str, float]:
    """Return all constants, the fitted ones from their logarithms."""
    values = np.exp(logarithms).tolist()
    names = (rate.name for rate in rates.FITTED)
    return rates.FIXED | dict(zip(names, values, strict=True))


def calibrate() -> dict[str, float]:
    """Return the fitted constants, to three digits."""
    runs = fitted_runs()
    prior, low, high = (
        np.log([getattr(rate, field) for rate in rates.FITTED])
        for field in ("prior", "low", "high")
    )

    def residuals(logarithms: np.ndarray) -> np.ndarray:
        """Return the soft errors of the runs, and the distances from the priors."""
        tried = with_fitted(logarithms)
        errors = np.array(
            [
                weight
                * math.log(
                    step_seconds(run.job, run.layout, run.cluster, tried)
                    / run.step_time_s
                )
                / SCALE
                for run, weight in runs
            ]
        )
        soft = np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + errors**2) - 1))
        return np.concatenate([soft, PULL * (logarithms - prior)])

    solved = least_squares(
        residuals, prior, bounds=(low, high), x_scale=0.1, diff_step=1e-3, max_nfev=60
    )
    fitted = with_fitted(solved.x)
    return {rate.name: float(f"{fitted[rate.name]:.3g}") for rate in rates.FITTED}


def write(fitted: dict[str, float]) -> None:
    """Write fitted values into the table's file."""
    path = Path(rates.__file__)
    text = path.read_text()
    for name, value in fitted.items():
        pattern = rf'(FittedRate\(\s*"{re.escape(name)}",\s*)[-0-9.e]+'
        text = re.sub(pattern, lambda match, v=value: f"{match[1]}{v:g}", text)
    path.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--write", action="store_true", help="write the fit into the table"
    )
    args = parser.parse_args()
    fitted = calibrate()
    for rate in rates.FITTED:
        numbers = (
            f"prior {rate.prior:6g}  table {rate.value:6g}  fit {fitted[rate.name]:6g}"
        )
        print(f"{rate.name:26}  {numbers}")
    if args.write:
        write(fitted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
