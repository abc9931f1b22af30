"""What bandwidth_test.py prints of each size: nccl-tests' columns, and percentiles by rank."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster_nodes import Group, Yardstick
from dist_common.report import Report

OUTLIER = 3.0  # an iteration this many times as long as the median is counted as one
FEW_RANKS = 8  # a table has no more rows for ranks: those that wait least and most
Figures = dict[str, Any]


@dataclass
class Sweep:
    """One collective, on one kind of groups, at all sizes."""

    name: str  # of the collective
    group: Group
    bus_factor: float
    rooted: bool
    yardstick: Yardstick | None
    rows: list[dict[str, Figures | None]] = field(default_factory=list)  # out_of_place, in_place

    @property
    def label(self) -> str:
        return f"{self.name} {self.group.name}".strip()

    def best_side(self) -> list[Figures]:
        """Return the figures in place, or out of place of what cannot be in place."""
        return [row["in_place"] or row["out_of_place"] for row in self.rows]

    def both_sides(self) -> list[Figures]:
        return [figures for row in self.rows for figures in row.values() if figures]

    @property
    def wrong(self) -> int | None:
        """The wrong elements of all sizes; None where the data was not checked."""
        counts = [figures["wrong"] for figures in self.both_sides()]
        return None if None in counts else sum(counts)


def figures_of(
    times: Sequence[list[float]], size: int, count: int, bus_factor: float, rooted: bool,
    wrong: int | None, written: int | None,
) -> Figures:  # fmt: skip
    """Return what one size's times say. Shapes: times[rank][iteration], in us; `size` in bytes."""
    pooled = sorted(sum(times, []))  # of all ranks: nccl-tests averages over them too
    mean = statistics.mean(pooled)
    by_rank = [sorted(own) for own in times]
    p50_by_rank = [percentile(own, 0.5) for own in by_rank]
    # A root of a broadcast need not wait for anybody: its times say nothing about the others'.
    last, late = (None, 0.0) if rooted else arrives_last(p50_by_rank)
    p50 = percentile(pooled, 0.5)
    return {
        "size": size, "count": count, "wrong": wrong, "time_us": mean,
        "algbw_gb_s": size / mean / 1e3, "busbw_gb_s": bus_factor * size / mean / 1e3,
        "p50_us": p50, "p95_us": percentile(pooled, 0.95), "p99_us": percentile(pooled, 0.99),
        "max_us": pooled[-1], "outliers": sum(t > OUTLIER * p50 for t in pooled),
        "iterations": len(pooled), "sent_x_size": None if written is None else written / size,
        "rank_p50_us": p50_by_rank, "rank_p95_us": [percentile(own, 0.95) for own in by_rank],
        "rank_max_us": [own[-1] for own in by_rank], "late_rank": last, "late_us": late,
    }  # fmt: skip


def percentile(times: list[float], share: float) -> float:
    """Return the percentile of sorted times."""
    return times[min(len(times) - 1, int(share * len(times)))]


def arrives_last(p50_us: list[float]) -> tuple[int | None, float]:
    """Return the rank that the others wait for, and how long, us; None where none stands out.

    A collective ends on all ranks together, so the last one to begin spends least time in it.
    """
    rank = min(range(len(p50_us)), key=p50_us.__getitem__)
    others = p50_us[:rank] + p50_us[rank + 1 :]
    late = statistics.median(others) - p50_us[rank]
    spread = max(others) - min(others)
    clear = late > 0.5 * statistics.median(others) and late > 3 * spread
    return (rank, late) if clear else (None, 0.0)


# nccl-tests' columns


def narrow(value: float, width: int) -> str:
    """Write a number with as many decimals, up to two, as fit."""
    texts = (f"{value:.2f}", f"{value:.1f}", f"{value:.0f}", f"{value:.1e}")
    return next(text for text in texts if len(text) <= width or text is texts[-1])


def columns(left: Sequence, *sides: Sequence) -> str:
    """Lay out a line as nccl-tests does: five columns, then four for each side."""
    widths = (12, 12, 8, 6, 6, *(7, 6, 6, 6) * len(sides))
    words = [*left, *(word for side in sides for word in side)]
    return "  ".join(f"{word:>{width}}" for word, width in zip(words, widths, strict=True)).rstrip()


def side(figures: Figures | None) -> list:
    """Return the four columns of one side."""
    if figures is None:
        return ["N/A"] * 4
    speeds = [narrow(figures[key], 6) for key in ("algbw_gb_s", "busbw_gb_s")]
    wrong = "N/A" if figures["wrong"] is None else figures["wrong"]
    return [narrow(figures["time_us"], 7), *speeds, wrong]


def print_header(report: Report, sweep: Sweep, args) -> None:
    """Print which ranks run what, and what nccl-tests prints above its rows."""
    group = sweep.group
    several = f", {group.at_once} such groups at once" if group.at_once > 1 else ""
    report.say(f"\n# {sweep.label}: {group.ranks} ranks{several}")
    step = f"{args.stepbytes}(bytes)" if args.stepbytes else f"{args.stepfactor}(factor)"
    report.say(
        f"# Collective test starting: {sweep.name}\n"
        f"# minBytes {args.minbytes} maxBytes {args.maxbytes} step: {step} "
        f"warmup iters: {args.warmup_iters} iters: {args.iters} validation: {args.check}\n#\n"
        f"#{'out-of-place':>72}{'in-place':>31}"
    )
    names, units = ("time", "algbw", "busbw", "#wrong"), ("(us)", "(GB/s)", "(GB/s)", "")
    report.say("#" + columns(("size", "count", "type", "redop", "root"), names, names)[1:])
    report.say("#" + columns(("(B)", "(elements)", "", "", ""), units, units)[1:])


def print_footer(report: Report, sweep: Sweep, args) -> None:
    """Print what nccl-tests prints below its rows, and with -I percentiles."""
    verdict = "N/A" if sweep.wrong is None else f"{sweep.wrong} {'FAILED' if sweep.wrong else 'OK'}"
    busbw = statistics.mean(figures["busbw_gb_s"] for figures in sweep.both_sides())
    report.say(f"# Out of bounds values : {verdict}")
    report.say(f"# Avg bus bandwidth    : {busbw:g}")
    if args.per_iter_timing:
        print_percentiles(report, sweep)


def print_percentiles(report: Report, sweep: Sweep) -> None:
    """Print percentiles of each size, those of each rank at the last, and who arrives last."""
    keys, rows = ("p50_us", "p95_us", "p99_us", "max_us"), []
    for figures in sweep.best_side():
        times = [f"{figures[key]:.1f} us" for key in keys]
        outliers = f"{figures['outliers']} of {figures['iterations']}"
        rows.append((f"{figures['size']:,}", *times, outliers))
    report.table(rows, ("size", "p50", "p95", "p99", "max", f"above {OUTLIER:g} x p50"))

    last = sweep.best_side()[-1]
    ranks = sorted(range(len(last["rank_p50_us"])), key=last["rank_p50_us"].__getitem__)
    if len(ranks) > FEW_RANKS:
        ranks = ranks[: FEW_RANKS // 2] + ranks[-FEW_RANKS // 2 :]
    keys = ("rank_p50_us", "rank_p95_us", "rank_max_us")
    rows = [(f"rank {r}", *(f"{last[key][r]:.1f} us" for key in keys)) for r in sorted(ranks)]
    report.table(rows, (f"at {last['size']:,}", "p50", "p95", "max"))
    named = [f for f in sweep.best_side() if f["late_rank"] is not None]
    for rank in sorted({figures["late_rank"] for figures in named}):
        late = [f["late_us"] for f in named if f["late_rank"] == rank]
        report.say(
            f"rank {rank} arrives last at {len(late)} of {len(sweep.rows)} sizes: "
            f"the others wait {statistics.median(late):.0f} us for it"
        )
