"""What records of `comm` say: time and bandwidth by size, latency and bandwidth, wrong data."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from bench.records import median
from bench.words import DASH, us

# By nccl-tests' names, as bandwidth_test.py has them.
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "alltoall", "alltoallv",
               "broadcast", "reduce", "gather", "scatter", "sendrecv")  # fmt: skip
WRONG = "WRONG"
MEASURED = ("time_us", "p50_us", "p95_us", "algbw_gb_s", "busbw_gb_s")
Record = dict[str, Any]
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]  # headers, rows


def lines_of(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Return the numbers of each collective and size, for a CSV: medians over the repeats.

    In place, as the script's own fit, but for what cannot be in place. `wrong` is a sum.
    """
    found: dict[tuple, list[dict[str, Any]]] = defaultdict(list)
    for record, label, sizes in _sweeps(records):
        for sides in sizes:
            figures = sides["in_place"] or sides["out_of_place"]
            key = (*_names(record, label), figures["size"])
            found[key].append(figures | {"wrong": _wrong(sides)})
    lines = []
    for key in sorted(found, key=_order):
        repeats = found[key]
        times = [figures["time_us"] for figures in repeats]
        line = dict(zip(("collective", "ranks", "link", "bytes"), key, strict=True))
        line["repeats"] = len(repeats)
        line |= {name: median(figures[name] for figures in repeats) for name in MEASURED}
        line |= {"fastest_repeat_us": min(times), "slowest_repeat_us": max(times)}
        lines.append(line | {"wrong": sum(figures["wrong"] for figures in repeats)})
    return lines


def comm_table(records: Iterable[Record]) -> Table:
    """Return what each collective took at each size; of several repeats the median.

    time, algbw and busbw are means over iterations and ranks, as nccl-tests prints them; p50 and
    p95 are of all iterations, `spread` is the slowest repeat over the fastest, less 1. #wrong is a
    sum. A point without results has one row: its reason.
    """
    headers = ("collective", "ranks", "link", "bytes", "time", "spread", "p50", "p95", "algbw",
               "busbw", "#wrong")  # fmt: skip
    rows = {}
    for record in records:
        if record["point"].get("kind") == "comm" and not _sweeps([record]):
            names = _names(record, record["point"]["collective"])
            said = f"{record['status']}: {record.get('reason') or 'no reason recorded'}"
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

    The script fits time = alpha + size x beta; the size at "half speed" takes as long to send as
    the latency alone.
    """
    headers = ("collective", "ranks", "link", "alpha", "fitted busbw", "half speed at",
               "best busbw")  # fmt: skip
    columns = {"alpha_us": us, "busbw_gb_s": in_gb_s, "crossover_bytes": in_kb,
               "best_busbw_gb_s": in_gb_s}  # fmt: skip
    found: dict[tuple, list[dict[str, Any]]] = defaultdict(list)
    for record, label, _ in _sweeps(records):
        metrics = record["results"]["metrics"]
        fitted = {name: metrics.get(f"{label} {name}") for name in columns}
        found[(*_names(record, label), 0)].append(fitted)
    rows = []
    for key in sorted(found, key=_order):
        fits = {name: median(fitted[name] for fitted in found[key]) for name in columns}
        rows.append((*key[:-1], *(write(fits[name]) for name, write in columns.items())))
    return headers, rows


def in_gb_s(value: float | None) -> str:
    """Write a bandwidth with its unit; a slow link has 0.0125 GB/s."""
    return DASH if value is None else f"{value:.{4 if value < 1 else 2}f} GB/s"


def in_kb(value: float | None) -> str:
    return DASH if value is None else f"{value / 1e3:,.1f} KB"


def wrong_elements(records: Iterable[Record]) -> int:
    """Return how many of the numbers received were wrong, over all sizes and repeats."""
    return sum(_wrong(sides) for _, _, sizes in _sweeps(records) for sides in sizes)


def _sweeps(records: Iterable[Record]) -> list[tuple[Record, str, list[dict[str, Any]]]]:
    """Return each record of `comm`, a collective (and where, on several nodes), and its sizes."""
    found = []
    for record in records:
        if record["point"].get("kind") == "comm":
            metrics = (record.get("results") or {}).get("metrics") or {}
            found += [(record, label, sizes) for label, sizes in metrics.get("sweeps", {}).items()]
    return found


def _names(record: Record, label: str) -> tuple[str, str, str]:
    point = record["point"]
    return label, str(point["world_size"]), point.get("link") or DASH


def _order(key: tuple) -> tuple:
    """Sort by collective as they are listed, then by ranks, link and size."""
    label, ranks, link, size = key
    name = label.split()[0]
    place = COLLECTIVES.index(name) if name in COLLECTIVES else len(COLLECTIVES)
    return place, label, int(ranks), link, size


def _wrong(sides: dict[str, Any]) -> int:
    return sum(figures["wrong"] for figures in sides.values() if figures)
