"""Fit the constants of `planner/rates.py` on half of the published figures.

    python planner/calibrate.py            print the fit next to the values in the table
    python planner/calibrate.py --write    write the fit into the table

Links first, on collectives; then the rest, on steps, links held. Residuals are logarithms of
predicted over published, beyond a few percent weighed by size and not by square (soft L1); each
constant is drawn to the value that data sheets and papers suggest and kept in a plausible range.
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

SCALE_LINKS, SCALE_STEPS = 0.08, 0.06  # residuals beyond these count less
PULL_LINKS, PULL_STEPS = 0.2, 0.15  # to the prior, per factor of e
LINKS = ("link.", "network.cloud.", "network.rate")  # collectives say no more: no RDMA among them
SINGLE_NODE = published.SINGLE_NODE  # every fourth of its rows, at a quarter of the weight


def fit(rates: dict[str, float], names: list[str], residuals, pull: float) -> dict[str, float]:
    """Return `rates` with `names` such that the residuals are small; in logarithms of the rates."""
    prior = np.log([table.PRIORS[name] for name in names])
    low, high = np.log([table.RANGES[name] for name in names]).T

    def objective(logs):
        tried = {**rates, **dict(zip(names, np.exp(logs).tolist(), strict=True))}
        found = np.array(residuals(tried))
        soft = np.sign(found) * np.sqrt(2 * (np.sqrt(1 + found**2) - 1))
        return np.concatenate([soft, pull * (logs - prior)])

    start = np.clip(prior, low + 1e-6, high - 1e-6)
    solved = least_squares(
        objective, start, bounds=(low, high), x_scale=0.1, diff_step=1e-3, max_nfev=40
    )
    return {**rates, **dict(zip(names, np.exp(solved.x).tolist(), strict=True))}


def fit_links(rates: dict[str, float]) -> dict[str, float]:
    """Return the rates with those of links fitted on half of the published collectives."""
    transfers = published.read_transfers(published.ANCHORS / "collectives.csv")
    half = published.calibration_half(transfers)
    transfers = [each for each in transfers if each.id in half]

    def residuals(tried):
        return [
            math.log(each.predicted_us(tried) / each.time_us) / SCALE_LINKS for each in transfers
        ]

    return fit(
        rates, [name for name in table.RANGES if name.startswith(LINKS)], residuals, PULL_LINKS
    )


def fit_steps(rates: dict[str, float]) -> dict[str, float]:
    """Return the rates with those of steps fitted on half of the published runs."""
    rows = published.read_all_runs()
    half = published.calibration_half(rows)
    rows = [row for row in rows if row.id in half]
    single = [row for row in rows if row.short_source == SINGLE_NODE][::4]
    rows = [row for row in rows if row.short_source != SINGLE_NODE] + single

    def residuals(tried):
        return [
            math.log(step_seconds(row.job, row.layout, row.cluster, tried) / row.step_time_s)
            / SCALE_STEPS
            * (0.5 if row.short_source == SINGLE_NODE else 1.0)
            for row in rows
        ]

    return fit(
        rates, [name for name in table.RANGES if not name.startswith(LINKS)], residuals, PULL_STEPS
    )


def calibrate() -> dict[str, float]:
    """Return all rates as a fit gives them, to three digits."""
    found = fit_steps(fit_links(dict(table.PRIORS)))
    return {name: float(f"{value:.3g}") for name, value in found.items()}


def write(found: dict[str, float]) -> None:
    """Write fitted values into the table's file."""
    path = Path(table.__file__)
    text = path.read_text()
    for name, value in found.items():
        pattern = rf'(    Rate\(\s*"{re.escape(name)}",\s*)[-0-9.e]+'
        text, count = re.subn(pattern, lambda match, v=value: f"{match[1]}{v:g}", text)
        assert count == 1, name
    path.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the fit into the table")
    args = parser.parse_args()
    found = calibrate()
    for name, value in found.items():
        print(
            f"{name:26} prior {table.PRIORS[name]:8g}  table {table.RATES[name]:8g}  fit {value:8g}"
        )
    if args.write:
        write(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
