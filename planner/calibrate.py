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

from planner import published
from planner import rates as table
from planner.step import step_seconds

SCALE = 0.06  # residuals beyond this count less
PULL = 0.15  # to the prior, per factor of e
EVERY, WEIGHT = 4, 0.5  # of vTrain's single node: every fourth row, at half the weight


def fitted_runs() -> list[tuple[published.Run, float]]:
    """Return the runs to fit on, each with its weight."""
    runs = [run for run in published.read_runs() if run.set == "fit"]
    single = [run for run in runs if run.source_name == published.SINGLE_NODE]
    others = [run for run in runs if run.source_name != published.SINGLE_NODE]
    found = [(run, 1.0) for run in others if not run.job.adapter_rank]
    return found + [(run, WEIGHT) for run in single[::EVERY]]


def calibrate() -> dict[str, float]:
    """Return the fitted rates, to three digits."""
    runs, rates = fitted_runs(), table.FITTED
    prior = np.log([rate.prior for rate in rates])
    low = np.log([rate.low for rate in rates])
    high = np.log([rate.high for rate in rates])

    def rates_of(logs):
        values = np.exp(logs).tolist()
        return table.RATES | {
            rate.name: value for rate, value in zip(rates, values, strict=True)
        }

    def objective(logs):
        tried = rates_of(logs)
        found = np.array(
            [
                weight * math.log(seconds / run.step_time_s) / SCALE
                for run, weight in runs
                for seconds in [step_seconds(run.job, run.layout, run.cluster, tried)]
            ]
        )
        soft = np.sign(found) * np.sqrt(2 * (np.sqrt(1 + found**2) - 1))
        return np.concatenate([soft, PULL * (logs - prior)])

    solved = least_squares(
        objective, prior, bounds=(low, high), x_scale=0.1, diff_step=1e-3, max_nfev=25
    )
    return {name: float(f"{value:.3g}") for name, value in rates_of(solved.x).items()}


def write(found: dict[str, float]) -> None:
    """Write fitted values into the table's file."""
    path = Path(table.__file__)
    text = path.read_text()
    for name, value in found.items():
        pattern = rf'(    Rate\(\s*"{re.escape(name)}",\s*)[-0-9.e]+'
        text = re.sub(pattern, lambda match, v=value: f"{match[1]}{v:g}", text)
    path.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--write", action="store_true", help="write the fit into the table"
    )
    args = parser.parse_args()
    found = calibrate()
    for rate in table.TABLE:
        fit = found[rate.name]
        print(f"{rate.name:24} prior {rate.prior:6g}  table {rate.value:6g}  {fit:6g}")
    if args.write:
        write(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
