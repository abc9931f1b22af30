"""Compare two sweeps: changes beyond the noise, and the settings that differ."""

import math
import statistics
from collections import defaultdict

from scipy.special import stdtrit
from tabulate import tabulate

from bench.analysis import CONFIDENCE, OK, Interval, analyse

HEADERS = ("strategy", "A", "B", "B/A", "B is", "memory", "sent", "verdict")
NOT_SETTINGS = ("output_dir", "points")


def welch_interval(times_a, times_b):
    """Return the ratio of mean step times with Welch's 95% interval, from logarithms.

    The rounds of two sweeps do not alternate, so they cannot be paired.
    """
    first, second = ([math.log(ms) for ms in times] for times in (times_a, times_b))
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
    rows_a, rows_b = (rows_by_key(analysis) for analysis in analyses)
    shared = [key for key in rows_a if key in rows_b]
    counts = {"faster": [], "slower": [], "within the noise": []}
    tables = defaultdict(list)
    for title, strategy in shared:
        pair = (rows_a[title, strategy], rows_b[title, strategy])
        tables[title].append(make_row(strategy, *pair, counts))
    parts = [f"{len(names)} {word}" for word, names in counts.items() if names]
    lines = [f"{len(shared)} strategies, B against A: {', '.join(parts)}"]
    if not shared:
        lines = [
            "no strategy trained the same job in both: compare sweeps of one config"
        ]
    for name, analysis in zip("AB", analyses, strict=True):
        lines.append(f"{name}: {analysis.sweep.name}: {analysis.condition}")
    for title, rows in tables.items():
        lines += ["", title, tabulate(rows, HEADERS, disable_numparse=True)]
    settings = find_differences(*analyses)
    text = "no setting, version or machine differs"
    if settings:
        headers = ("what differs", "A", "B")
        text = tabulate(settings, headers, disable_numparse=True)
    return "\n".join([*lines, "", text])


def rows_by_key(analysis):
    """Return (title of the table, strategy) -> row."""
    return {
        (table.title, row.strategy): row
        for table in analysis.tables
        for row in table.rows
    }


def make_row(strategy, row_a, row_b, counts):
    """Return a row of the comparison, and add its result to the counts."""
    cells = [strategy, *(f"{row.step_time_ms or 0:.1f} ms" for row in (row_a, row_b))]
    result, ratio = "-", "-"
    if row_a.verdict == row_b.verdict == OK:
        interval = welch_interval(
            [*row_a.times_by_round().values()], [*row_b.times_by_round().values()]
        )
        result, ratio = "within the noise", str(interval)
        if interval.differs:
            result = "slower" if interval.log > 0 else "faster"
        counts[result].append(strategy)
    for name in ("peak_memory_gib", "bytes_sent_per_step"):
        before, after = row_a.median(name), row_b.median(name)
        cells.append(f"{after / before - 1:+.1%}" if before and after else "-")
    verdict = row_b.verdict
    if row_a.verdict != row_b.verdict:
        verdict = f"{row_a.verdict} -> {row_b.verdict}"
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
