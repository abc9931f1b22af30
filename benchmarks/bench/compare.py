"""Compare two sweeps: changes beyond the noise, and the settings that differ."""

import math
import statistics

from scipy.special import stdtrit
from tabulate import tabulate

from bench.analysis import CONFIDENCE, OK, Interval, analyse

NOT_SETTINGS = ("output_dir", "points")


def welch_interval(ours, theirs):
    """Return the ratio of mean step times with Welch's 95% interval, from logarithms.

    The rounds of two sweeps do not alternate, so they cannot be paired.
    """
    first, second = ([math.log(ms) for ms in times] for times in (ours, theirs))
    ratio = statistics.mean(second) - statistics.mean(first)
    if min(len(first), len(second)) < 2:
        return Interval(ratio, math.inf)
    errors = [statistics.variance(logs) / len(logs) for logs in (first, second)]
    total = sum(errors)
    if total == 0:
        return Interval(ratio, 0.0)
    degrees = total**2 / sum(
        error**2 / (len(logs) - 1)
        for error, logs in zip(errors, (first, second), strict=True)
    )
    return Interval(ratio, stdtrit(degrees, (1 + CONFIDENCE) / 2) * math.sqrt(total))


def compare(first, second):
    """Return the comparison of two sweeps: the answer, its condition, the tables."""
    analyses = [analyse(first), analyse(second)]
    rows_of = [
        {
            (table.title, row.strategy): row
            for table in analysis.tables
            for row in table.rows
        }
        for analysis in analyses
    ]
    shared = [key for key in rows_of[0] if key in rows_of[1]]
    titles = list(dict.fromkeys(title for title, _ in shared))
    lines = []
    counts = {"faster": [], "slower": [], "within the noise": []}
    for title in titles:
        rows = []
        for key in shared:
            if key[0] == title:
                ours, theirs = (side[key] for side in rows_of)
                rows.append(make_row(key[1], ours, theirs, counts))
        headers = ("strategy", "A", "B", "B/A", "B is", "memory", "sent", "verdict")
        lines += ["", title, tabulate(rows, headers, disable_numparse=True)]
    parts = [f"{len(names)} {word}" for word, names in counts.items() if names]
    answer = f"{len(shared)} strategies, B against A: {', '.join(parts)}"
    if not shared:
        answer = (
            "no strategy trained the same job in both: compare sweeps of one config"
        )
    head = [answer]
    for name, analysis in zip("AB", analyses, strict=True):
        head.append(f"{name}: {analysis.sweep.name}: {analysis.condition}")
    settings = find_differences(*analyses)
    end = ["", "no setting, version or machine differs"]
    if settings:
        headers = ("what differs", "A", "B")
        end = ["", tabulate(settings, headers, disable_numparse=True)]
    return "\n".join([*head, *lines, *end])


def make_row(strategy, ours, theirs, counts):
    """Return a row of the comparison, and add its result to the counts."""
    cells = [strategy, *(f"{row.step_time_ms or 0:.1f} ms" for row in (ours, theirs))]
    result, ratio = "-", "-"
    if ours.verdict == theirs.verdict == OK:
        interval = welch_interval(
            [*ours.times_by_round().values()], [*theirs.times_by_round().values()]
        )
        result, ratio = "within the noise", str(interval)
        if interval.differs:
            result = "slower" if interval.log > 0 else "faster"
        counts[result].append(strategy)
    for name in ("peak_memory_gib", "bytes_sent_per_step"):
        before, after = ours.median(name), theirs.median(name)
        cells.append(f"{after / before - 1:+.1%}" if before and after else "-")
    verdict = theirs.verdict
    if ours.verdict != theirs.verdict:
        verdict = f"{ours.verdict} -> {theirs.verdict}"
    return [*cells[:3], ratio, result, *cells[3:], verdict]


def find_differences(first, second):
    """Return (name, A, B) for each setting, version and machine that differs."""
    rows = []
    sides = [analysis.sweep.settings | analysis.where for analysis in (first, second)]
    for name in sorted(sides[0].keys() | sides[1].keys()):
        values = [format_value(side.get(name)) for side in sides]
        if values[0] != values[1] and name not in NOT_SETTINGS:
            rows.append((name, *values))
    return rows


def format_value(value):
    if value is None:
        return "-"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
