"""What records of `comm` say: time and bandwidth by size, latency and bandwidth, wrong data."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from bench.records import median
from bench.words import DASH, us

# By nccl-tests' names, as bandwidth_test.py has them.
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "alltoall", "broadcast", "reduce",
               "gather")  # fmt: skip
WRONG = "WRONG"
MEASURED = ("time_us", "p50_us", "p95_us", "algbw_gb_s", "busbw_gb_s")
Record = dict[str, Any]
Table = tuple[Sequence[str], list[Sequence[str]]]  # headers, rows


def lines_of(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Return the numbers of each collective and size, for a CSV: medians over the repeats.

    `wrong` is a sum.
    """
    found = defaultdict(list)
    for names, metrics in _runs(records):
        for figures in metrics["sweeps"][names[0]]:
            found[(*names, figures["size"])].append(figures)
    lines = []
    for key in sorted(found, key=_order):
        repeats = found[key]
        line = dict(zip(("collective", "ranks", "link", "bytes"), key, strict=True))
        line["repeats"] = len(repeats)
        line |= {name: median(figures[name] for figures in repeats) for name in MEASURED}
        times = [figures["time_us"] for figures in repeats]
        line |= {"fastest_repeat_us": min(times), "slowest_repeat_us": max(times)}
        lines.append(line | {"wrong": sum(figures["wrong"] for figures in repeats)})
    return lines


def comm_table(records: Iterable[Record]) -> Table:
    """Return what each collective took at each size; of several repeats the median.

    time, algbw and busbw are means over iterations and ranks, as nccl-tests prints them; p50 and
    p95 are of all iterations, `spread` is the slowest repeat over the fastest, less 1. #wrong is a
    sum. A collective that a point did not come to has one row: the point's reason.
    """
    headers = ("collective", "ranks", "link", "bytes", "time", "spread", "p50", "p95", "algbw",
               "busbw", "#wrong")  # fmt: skip
    rows = {}
    for record in records:
        if record["point"].get("kind") == "comm":
            done = {label.split()[0] for (label, *_), _ in _runs([record])}
            for label in record["point"]["collectives"]:
                names = _names(record, label)
                said = f"{record['status']}: {record.get('reason') or 'no reason recorded'}"
                if label not in done:
                    rows[(*names, 0)] = (*names, said, *[""] * 7)
    for line in lines_of(records):
        names = line["collective"], line["ranks"], line["link"]
        time, p50, p95, *rates = (line[name] for name in MEASURED)
        spread = 100 * (line["slowest_repeat_us"] / line["fastest_repeat_us"] - 1)
        rows[(*names, line["bytes"])] = (
            *names, f"{line['bytes']:,}", us(time),
            f"{spread:.0f}%" if line["repeats"] > 1 else DASH,
            us(p50), us(p95), *map(in_gb_s, rates),
            f"{line['wrong']:,} {WRONG}" if line["wrong"] else "0",
        )  # fmt: skip
    return headers, [rows[key] for key in sorted(rows, key=_order)]


def fit_table(records: Iterable[Record]) -> Table:
    """Return latency and bandwidth of each collective, of several repeats the median.

    The script finds time = alpha + size x beta; the size at "half speed" takes as long to send as
    the latency alone.
    """
    headers = ("collective", "ranks", "link", "alpha", "fitted busbw", "half speed at",
               "best busbw")  # fmt: skip
    columns = {"alpha_us": us, "busbw_gb_s": in_gb_s, "crossover_bytes": in_kb,
               "best_busbw_gb_s": in_gb_s}  # fmt: skip
    found = defaultdict(list)
    for names, metrics in _runs(records):
        found[names].append(metrics)
    rows = []
    for names in sorted(found, key=_order):
        cells = (write(median(metrics.get(f"{names[0]} {name}") for metrics in found[names]))
                 for name, write in columns.items())  # fmt: skip
        rows.append((*names, *cells))
    return headers, rows


def in_gb_s(value: float | None) -> str:
    """Write a bandwidth with its unit; a slow link has 0.0125 GB/s."""
    return DASH if value is None else f"{value:.{4 if value < 1 else 2}f} GB/s"


def in_kb(value: float | None) -> str:
    return DASH if value is None else f"{value / 1e3:,.1f} KB"


def wrong_elements(records: Iterable[Record]) -> int:
    """Return how many of the numbers received were wrong, over all sizes and repeats."""
    return sum(line["wrong"] for line in lines_of(records))


def _runs(records: Iterable[Record]) -> Iterator[tuple[tuple[str, str, str], dict[str, Any]]]:
    """Yield the metrics of each record of `comm` by collective (and where, on several nodes)."""
    for record in records:
        if record["point"].get("kind") == "comm":
            metrics = (record.get("results") or {}).get("metrics") or {}
            for label in metrics.get("sweeps", ()):
                yield _names(record, label), metrics


def _names(record: Record, label: str) -> tuple[str, str, str]:
    point = record["point"]
    return label, str(point["world_size"]), point.get("link") or DASH


def _order(key: tuple) -> tuple:
    """Sort by collective as they are listed, then by ranks, link and size."""
    label, ranks, *rest = key
    return COLLECTIVES.index(label.split()[0]), label, int(ranks), *rest
