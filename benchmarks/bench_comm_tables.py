"""What records of `comm` say: time and bandwidth by size, latency and bandwidth, wrong data."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

# By nccl-tests' names, as bandwidth_test.py has them.
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "alltoall", "alltoallv",
               "broadcast", "reduce", "gather", "scatter", "sendrecv")  # fmt: skip
UNKNOWN = "-"
WRONG = "WRONG"
Record = dict[str, Any]
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]  # headers, rows


@dataclass
class Line:
    """The repeats of a collective at one size."""

    names: tuple[str, str, str]  # collective, ranks, link
    size: int  # bytes
    repeats: list[dict[str, Any]]  # what each measured

    @property
    def wrong(self) -> int:
        return sum(figures["wrong"] for figures in self.repeats)

    @property
    def times_us(self) -> list[float]:
        return sorted(figures["time_us"] for figures in self.repeats)

    def median(self, name: str) -> float | None:
        return _median(self.repeats, name)


def lines_of(records: Iterable[Record]) -> list[Line]:
    """Gather the repeats of each collective and size, in the order of the tables."""
    found: dict[tuple, list[dict[str, Any]]] = defaultdict(list)
    for record in filter(is_comm, records):
        for label, sizes in _sweeps(record).items():
            for sides in sizes:
                # In place, as the script's own fit, but for what cannot be in place.
                figures = sides["in_place"] or sides["out_of_place"]
                key = (*_names(record, label), figures["size"])
                found[key].append(figures | {"wrong": _wrong(sides)})
    return [Line(key[:-1], key[-1], found[key]) for key in sorted(found, key=_order)]


def comm_table(records: Iterable[Record]) -> Table:
    """Return what each collective took at each size; of several repeats the median.

    time, algbw and busbw are means over iterations and ranks, as nccl-tests prints them; p50 and
    p95 are of all iterations, `spread` is the slowest repeat over the fastest, less 1. #wrong is a
    sum. A point without results has one row: its reason.
    """
    headers = ("collective", "ranks", "link", "bytes", "time", "spread", "p50", "p95", "algbw",
               "busbw", "#wrong")  # fmt: skip
    records = list(filter(is_comm, records))
    rows = {}
    for record in records:
        if not _sweeps(record):
            names = _names(record, record["point"]["collective"])
            said = f"{record['status']}: {record.get('reason') or 'no reason recorded'}"
            rows[(*names, 0)] = (*names, said, *[""] * (len(headers) - len(names) - 1))
    for line in lines_of(records):
        time, p50, p95 = [in_us(line.median(key)) for key in ("time_us", "p50_us", "p95_us")]
        rates = [in_gb_s(line.median(key)) for key in ("algbw_gb_s", "busbw_gb_s")]
        fastest, slowest = line.times_us[0], line.times_us[-1]
        spread = f"{100 * (slowest / fastest - 1):.0f}%" if len(line.repeats) > 1 else UNKNOWN
        marked = f"{line.wrong:,} {WRONG}" if line.wrong else "0"
        rows[(*line.names, line.size)] = (
            *line.names, f"{line.size:,}", time, spread, p50, p95, *rates, marked
        )  # fmt: skip
    return headers, [rows[key] for key in sorted(rows, key=_order)]


def comm_lines(records: Iterable[Record]) -> list[dict[str, object]]:
    """Return the numbers of `comm_table` for a CSV: a line for each collective and size."""
    lines = []
    for line in lines_of(records):
        values = {name: line.median(name) for name in
                  ("time_us", "p50_us", "p95_us", "algbw_gb_s", "busbw_gb_s")}  # fmt: skip
        lines.append({
            **dict(zip(("collective", "ranks", "link"), line.names, strict=True)),
            "bytes": line.size, "repeats": len(line.repeats), **values,
            "fastest_repeat_us": line.times_us[0], "slowest_repeat_us": line.times_us[-1],
            "wrong": line.wrong,
        })  # fmt: skip
    return lines


def fit_table(records: Iterable[Record]) -> Table:
    """Return latency and bandwidth of each collective, of several repeats the median.

    The script fits time = alpha + size x beta; the size at "half speed" takes as long to send as
    the latency alone.
    """
    headers = ("collective", "ranks", "link", "alpha", "fitted busbw", "half speed at",
               "best busbw")  # fmt: skip
    columns = (("alpha_us", in_us), ("busbw_gb_s", in_gb_s), ("crossover_bytes", in_kb),
               ("best_busbw_gb_s", in_gb_s))  # fmt: skip
    found: dict[tuple, list[dict[str, Any]]] = defaultdict(list)
    for record in filter(is_comm, records):
        for label in _sweeps(record):
            metrics = record["results"]["metrics"]
            figures = {name: metrics.get(f"{label} {name}") for name, _ in columns}
            found[(*_names(record, label), 0)].append(figures)
    rows = []
    for key in sorted(found, key=_order):
        values = [write(_median(found[key], name)) for name, write in columns]
        rows.append((*key[:-1], *values))
    return headers, rows


def in_us(value: float | None) -> str:
    """Write a time with its unit."""
    return UNKNOWN if value is None else f"{value:,.1f} us"


def in_gb_s(value: float | None) -> str:
    """Write a bandwidth with its unit; a slow link has 0.0125 GB/s."""
    return UNKNOWN if value is None else f"{value:.{4 if value < 1 else 2}f} GB/s"


def in_kb(value: float | None) -> str:
    """Write bytes in KB."""
    return UNKNOWN if value is None else f"{value / 1e3:,.1f} KB"


def wrong_elements(records: Iterable[Record]) -> int:
    """Return how many of the numbers received were wrong, over all sizes and repeats."""
    every = [_sweeps(record).values() for record in records if is_comm(record)]
    return sum(_wrong(sides) for sweeps in every for sizes in sweeps for sides in sizes)


def is_comm(record: Record) -> bool:
    """Say whether a record is of `comm`, not of a training."""
    return record["point"].get("kind") == "comm"


def _sweeps(record: Record) -> dict[str, list[dict[str, Any]]]:
    """Return what was measured at each size, by collective and, on several nodes, where."""
    return ((record.get("results") or {}).get("metrics") or {}).get("sweeps") or {}


def _names(record: Record, label: str) -> tuple[str, str, str]:
    point = record["point"]
    return label, str(point["world_size"]), point.get("link") or UNKNOWN


def _order(key: tuple) -> tuple:
    """Sort by collective as they are listed, then by ranks, link and size."""
    label, ranks, link, size = key
    name = label.split()[0]
    place = COLLECTIVES.index(name) if name in COLLECTIVES else len(COLLECTIVES)
    return place, label, int(ranks), link, size


def _wrong(sides: dict[str, Any]) -> int:
    return sum(figures["wrong"] for figures in sides.values() if figures)


def _median(figures: Sequence[dict[str, Any]], key: str) -> float | None:
    known = [figure[key] for figure in figures if figure[key] is not None]
    return statistics.median(known) if known else None
