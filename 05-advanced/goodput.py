"""Goodput: how often should a run save, and how much of a month does it really train?

    CPU   python 05-advanced/goodput.py
    GPU   the same: formulas and a simulation need no GPU

Look for: the best interval between two saves, by Daly's formula and by a search; the
share of a month that is kept, by two formulas and in simulated months.

Sources: Young, A First Order Approximation to the Optimum Checkpoint Interval (1974);
Daly, A Higher Order Estimate (2006); The Llama 3 Herd of Models (2024), section 3.3.4.
"""

import math
import random
from dataclasses import dataclass
from statistics import mean, stdev

from dist_common import cli, runtime
from dist_common.report import Report

DAY_S = 24 * 3600
GPUS_PER_NODE = 8
SIZES = (1_000, 4_000, 16_384, 100_000)  # GPUs of a job
MONTHS = 24  # simulated for each size
LLAMA3_RATE = 419 / 54 / 2048  # unexpected interruptions, days, nodes


@dataclass(frozen=True)
class Job:
    """The costs of a save and of a failure, in seconds; failures come at random."""

    between_s: float  # M, mean time between failures: any node's stops the job
    save_s: float  # training stands still for each save
    restart_s: float  # from a failure until the job trains again


def young_interval(job):
    """Return the seconds of training between two saves: the sum of costs is least."""
    return math.sqrt(2 * job.save_s * job.between_s)


def daly_interval(job):
    """Return the same, also for saves that take up to M. Source: Daly, equation 37."""
    x = math.sqrt(job.save_s / (2 * job.between_s))
    return young_interval(job) * (1 + x / 3 + x * x / 9) - job.save_s


def add_up_goodput(job, interval_s):
    """Return 1 less three shares: saves, half an interval per failure, restarts."""
    saving = job.save_s / interval_s
    return 1 - saving - (interval_s / 2 + job.restart_s) / job.between_s


def exact_goodput(job, interval_s):
    """Return the share of time whose training is kept.

    The k-th save after a failure is complete if no failure comes for
    restart + k (interval + save) seconds: with probability e^(-that / M).
    """
    M = job.between_s
    saves = math.exp(-job.restart_s / M) / math.expm1((interval_s + job.save_s) / M)
    return saves * interval_s / M


def simulate(job, interval_s, seed):
    """Return the share of a month whose training is kept, failure by failure."""
    generator = random.Random(seed)
    now = 0.0
    kept = 0.0
    while now < 30 * DAY_S:
        until_failure = generator.expovariate(1 / job.between_s)
        trained = until_failure - job.restart_s  # below 0: it failed in the restart
        saves = max(0, math.floor(trained / (interval_s + job.save_s)))
        kept += saves * interval_s
        now += until_failure
    return kept / now


def search_best_interval(job):
    """Return the interval of the highest goodput, to 1%."""
    intervals = [job.between_s / 1.01**power for power in range(1500)]
    return max(intervals, key=lambda interval_s: exact_goodput(job, interval_s))


def minutes(seconds):
    return f"{seconds / 60:,.1f} min"


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    add("--save-s", type=cli.positive_float, default=60, help="seconds of a save (60)")
    add(
        "--restart-s",
        type=cli.positive_float,
        default=360,
        help="seconds from a failure until the job trains again (360)",
    )
    add(
        "--failures-per-node-day",
        type=cli.positive_float,
        default=LLAMA3_RATE,
        help="that stop the job (0.0038, Llama 3's)",
    )
    return parser.parse_args()


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as run:
        report = Report("05-advanced/goodput.py", args, run)
        rows, sigmas, ratios = [], [], []
        for gpus in SIZES:
            failures_per_day = gpus / GPUS_PER_NODE * args.failures_per_node_day
            job = Job(DAY_S / failures_per_day, args.save_s, args.restart_s)
            if max(job.save_s, job.restart_s) > job.between_s:
                raise cli.UsageError(
                    f"--save-s and --restart-s: at most {job.between_s:.0f} s, the "
                    f"time between failures of {gpus:,} GPUs"
                )
            interval_s = daly_interval(job)
            exact = exact_goodput(job, interval_s)
            seeds = range(args.seed * MONTHS, (args.seed + 1) * MONTHS)
            months = [simulate(job, interval_s, seed) for seed in seeds]
            error = stdev(months) / math.sqrt(MONTHS)  # of their mean
            sigmas.append(abs(mean(months) - exact) / error)
            ratios.append(abs(interval_s / search_best_interval(job) - 1))
            times = (job.between_s, young_interval(job), interval_s)
            shares = (add_up_goodput(job, interval_s), exact, mean(months))
            rows.append(
                (f"{gpus:,}", *map(minutes, times), *(f"{x:.1%}" for x in shares))
            )
        headers = ("GPUs", "M", "Young", "Daly", "added up", "exact", "simulated")
        report.table(rows, headers)
        # The mean of 24 months is this far off once in 20,000 times.
        report.check("simulated, standard errors off", max(sigmas), 0, 5)
        report.check("Daly's interval, share off the best", max(ratios), 0, 0.02)
        return report.finish("the formulas agree with a search and with a simulation")


if __name__ == "__main__":
    cli.run(main)
