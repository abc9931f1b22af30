"""Tables of goodput with their checks, the best interval by search, published runs, the figure.

The published numbers and their sources are in goodput_published.json.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev

from legacy_common import cli
from legacy_common.lab.figure import figure
from legacy_common.report import Report

PUBLISHED = json.loads(Path(__file__).with_name("goodput_published.json").read_text())
LLAMA3_RATE = 419 / 54 / 2048  # unexpected interruptions, days, nodes of 8 GPUs
SIGMAS = 5  # of the mean of months: t with 23 degrees of freedom is over it once in 20,000 times
# How far Daly's interval may lie from the best, as a share of it: below half of M per save, above.
DALY_OFF = (0.01, 0.06)
SIZES_OF_CURVES = [round(1_000 * 10 ** (step / 12)) for step in range(28)]  # GPUs, to 178,000
COLORS = ("#4477aa", "#ee6677", "#228833", "#aa3377")  # Paul Tol, bright


def read_measured(path: str) -> dict[str, float]:
    """Return detect_s and restart_s of a JSON file; of a results.json they are metrics.

    Raises: UsageError when there is no such file, or neither is in it.
    """
    try:
        content = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or f"no JSON ({error})"
        raise cli.UsageError(f"--measured {path}: {why}") from None
    found = content.get("metrics", content) if isinstance(content, dict) else {}
    found = found if isinstance(found, dict) else {}
    measured = {name: found[name] for name in ("detect_s", "restart_s") if name in found}
    for name, value in measured.items():
        if not (isinstance(value, (int, float)) and 0 < value < 1e9):
            raise cli.UsageError(f"--measured {path}: {name} is {value!r}, not a time in seconds")
    if not measured:
        raise cli.UsageError(f"--measured {path}: has neither detect_s nor restart_s")
    return measured


def best_interval(job, goodput: Callable) -> float:
    """Find the interval of the highest goodput by search: it has one peak."""
    low, high = math.log(1e-3), math.log(100 * job.between_s)
    for _ in range(200):
        third = (high - low) / 3
        left, right = low + third, high - third
        if goodput(job, math.exp(left)) < goodput(job, math.exp(right)):
            low = left
        else:
            high = right
    return math.exp(low)


# simulated months


def shares(months, what: str) -> list[float]:
    return [month.spent[what] / month.end_s for month in months]


def simulated(prediction, what="kept") -> tuple[float, float]:
    """Return the share of time spent so, on average, and that average's standard error."""
    found = shares(prediction.months, what)
    return mean(found), stdev(found) / math.sqrt(len(found))


def compare(report: Report, name: str, prediction, expected: float, what="kept") -> None:
    """Check a simulated share of time against a formula's."""
    share, error = simulated(prediction, what)
    source = f"{SIGMAS} standard errors of {len(prediction.months)} months"
    report.check(f"{name}: simulated", share, expected, SIGMAS * error + 1e-9, source)
    for month in prediction.months:
        total = sum(month.spent.values()) / month.end_s
        if abs(total - 1) > 1e-9:
            report.check(f"{name}: time adds up", total, 1.0, 1e-9, "each second is spent once")


def minutes(seconds: float) -> str:
    return f"{seconds / 60:,.1f} min"


def list_ways(report: Report, ways: dict) -> None:
    """Print, for each way to save, what a save and a failure cost, and where time goes."""
    rows = []
    for name, prediction in ways.items():
        job = prediction.job
        spent = [simulated(prediction, what)[0] for what in ("saving", "lost", "down", "kept")]
        costs = f"{job.stall_s:g} s", f"{job.write_s:g} s", f"{job.down_s:g} s"
        numbers = (f"{share:.1%}" for share in (*spent, prediction.exact))
        rows.append((name, *costs, minutes(prediction.interval_s), *numbers))
        compare(report, f"saved to {name}", prediction, prediction.exact)
    report.table(rows, ("saved to", "stall", "write", "down", "interval", "saving", "lost", "down",
                        "goodput", "formula"))  # fmt: skip
    report.metrics["goodput"] = {name: each.exact for name, each in ways.items()}
    report.metrics["interval_s"] = {name: each.interval_s for name, each in ways.items()}


def list_sizes(report: Report, way: str, sizes: dict, young, daly, goodput) -> None:
    """Print goodput over the number of GPUs, by both formulas and simulated."""
    report.say(f"by number of GPUs, saved to {way}; M is the mean time between failures:")
    rows = []
    for gpus, prediction in sizes.items():
        job = prediction.job
        best = best_interval(job, goodput)
        times = (job.between_s, young(job), daly(job), best)
        share, error = simulated(prediction)
        formulas = f"{prediction.first_order:.1%}", f"{prediction.exact:.1%}"
        result = f"{share:.1%} +- {error:.1%}"
        rows.append((f"{gpus:,}", *(minutes(time) for time in times), *formulas, result))
        compare(report, f"{gpus:,} GPUs", prediction, prediction.exact)
        tolerance = DALY_OFF[job.stall_s > job.between_s / 2]
        report.check(f"{gpus:,} GPUs: Daly's interval, of the best", daly(job) / best, 1.0,
                     tolerance, "the formula beside a search")  # fmt: skip
        waste = 1 - prediction.first_order
        report.check(f"{gpus:,} GPUs: first order", prediction.first_order, prediction.exact,
                     waste**2, "it leaves out products of two shares that are lost")  # fmt: skip
    report.table(rows, ("GPUs", "M", "Young", "Daly", "best", "first order", "exact", "simulated"))
    report.metrics["goodput_by_gpus"] = {gpus: each.exact for gpus, each in sizes.items()}


def list_limits(report: Report, cases: dict, waiting: float) -> None:
    """Print the cases in which a formula is wrong, and what the simulation says."""
    report.say("where the formulas end:")
    rows = []
    for name, prediction in cases.items():
        share, error = simulated(prediction)
        formulas = f"{prediction.first_order:.1%}", f"{prediction.exact:.1%}"
        waits, _ = simulated(prediction, "waiting for a spare")
        rows.append((name, *formulas, f"{share:.1%} +- {error:.1%}", f"{waits:.1%}"))
        if waits == 0:
            compare(report, name, prediction, prediction.exact)
        else:  # while it waits, nothing else happens
            compare(report, name, prediction, prediction.exact * (1 - waiting))
            compare(report, f"{name}, waiting", prediction, waiting, "waiting for a spare")
    report.table(rows, ("case", "first order", "exact", "simulated", "waiting"))
    report.metrics["waiting_by_formula"] = waiting


# published runs


def list_published(report: Report, make_job, interval_of, goodput) -> None:
    """Print published runs: time between failures, what each failure may cost, goodput."""
    rows = []
    for run in PUBLISHED["between"]:
        hours = make_job(run["gpus"] / 8, run["rate"], 0, 0).between_s / 3600
        verdict = "" if run["holds"] else "not by this rate"
        rows.append((run["name"], f"{run['hours']:g} h", f"{hours:.2f} h", verdict))
        if run["holds"]:
            report.check(f"{run['name']}: hours between failures", hours, run["hours"],
                         run["within"], "as many digits as published")  # fmt: skip
    for run in PUBLISHED["lost"]:
        interval_s = run["interval_h"] * 3600
        hours = lost_per_failure(job_of(run, make_job), interval_s) / 3600
        rows.append((f"{run['name']}, lost per crash", f"{run['hours']:g} h", f"{hours:.2f} h", ""))
        report.check(f"{run['name']}: hours lost per crash", hours, run["hours"], run["within"],
                     "half an interval, less what failures soon after a save spare")  # fmt: skip
    report.table(rows, ("time between failures", "published", "predicted", ""))

    rows = []
    for run in PUBLISHED["runs"]:
        job = job_of(run, make_job)
        allowed = -job.between_s * math.log(run["goodput"])
        published = "> " * run.get("at_least", False) + f"{run['goodput']:.0%}"
        predicted = "n/a"
        if "below" in run:
            found = goodput(job, interval_of(job))
            predicted = f"{found:.1%}"
            middle = run["goodput"] + (run["above"] - run["below"]) / 2
            report.check(f"{run['name']}: goodput", found, middle,
                         (run["above"] + run["below"]) / 2, run["assumed"])  # fmt: skip
        sizes = f"{run['gpus']:,}", f"{job.between_s / 3600:.2f} h", published, minutes(allowed)
        rows.append((run["name"], *sizes, predicted, run["assumed"]))
    report.table(rows, ("run", "GPUs", "M", "published", "allows", "predicted", "assumed"))
    report.say("allows: what a failure may cost, saves included, for the published goodput")


def job_of(run: dict, make_job):
    """Return a published run as a job; seconds that nobody needs are 0."""
    nodes = run["gpus"] / 8
    rate = run.get("rate") or run["stops"] / run["days"] / nodes
    seconds = (run.get(name, 0) for name in ("stall_s", "down_s", "write_s"))
    return make_job(nodes, rate, *seconds)


def lost_per_failure(job, interval_s: float) -> float:
    """Return the seconds of training that a failure undoes, on average, if saves take no time."""
    # A failure comes somewhere in an interval, sooner rather than later: M - T / (e^(T/M) - 1).
    return job.between_s - interval_s / math.expm1(interval_s / job.between_s)


# the figure


def draw(path, sizes: dict, curves: dict, interval_of, goodput) -> None:
    """Draw goodput over the interval, for some sizes, and over the number of GPUs, for all ways."""
    with figure(path, 1, 2, figsize=(11, 4), sharey=True) as (left, right):
        for (gpus, prediction), color in zip(sizes.items(), COLORS, strict=True):
            job = prediction.job
            intervals = [10 ** (step / 20) for step in range(20, 101)]
            label = f"{gpus:,} GPUs"
            values = [goodput(job, each) for each in intervals]
            left.plot([each / 60 for each in intervals], values, color=color, label=label)
            best = prediction.interval_s / 60
            left.plot([best], [prediction.exact], "o", color=color, mfc="white", ms=8)
            left.plot([best], [simulated(prediction)[0]], ".", color=color)
        left.set_xscale("log")
        left.set_xlabel("minutes from save to save (circle: Daly's; dot: simulated)")
        left.set_ylabel("goodput")
        ways = next(iter(curves.values()))
        for way, color in zip(ways, COLORS, strict=False):
            jobs = [curves[gpus][way] for gpus in curves]
            values = [goodput(job, interval_of(job)) for job in jobs]
            right.plot(list(curves), values, color=color, label=f"--way {way}")
        for run in PUBLISHED["runs"]:
            right.plot([run["gpus"]], [run["goodput"]], "kx", ms=5)
        right.set_xscale("log")
        right.set_xlabel("GPUs (x: published)")
        for axes, place in ((left, "upper left"), (right, "lower left")):
            axes.set_ylim(0, 1.02)
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8, loc=place)
