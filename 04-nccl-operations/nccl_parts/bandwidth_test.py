"""What bandwidth_test.py prints and draws: nccl-tests' columns, percentiles, whole sweeps."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from legacy_common import cli
from legacy_common.lab.figure import figure
from legacy_common.report import Report
from nccl_parts.clusters import Group, Yardstick
from nccl_parts.measurement import gb_per_s

OUTLIER = 3.0  # an iteration this many times as long as the median is counted as one
FEW_RANKS = 8  # a table has no more rows for ranks: those that wait least and most
ABOVE = 1.05  # times the bound: more than rounding
PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
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

    @property
    def wrong(self) -> int | None:
        """The wrong elements of all sizes; None where the data was not checked."""
        counts = [figures["wrong"] for row in self.rows for figures in row.values() if figures]
        return None if None in counts else sum(counts)


def figures_of(
    times: Sequence[list[float]], size: int, count: int, bus_factor: float, rooted: bool,
    wrong: int | None, written: int | None,
) -> Figures:  # fmt: skip
    """Return what one size's times say. Shapes: times[rank][iteration], in us; `size` in bytes."""
    pooled = np.array(times)  # of all ranks: nccl-tests averages over them too
    shares = list(PERCENTILES.values())
    percentiles = np.quantile(pooled, shares, method="higher").tolist()
    by_rank = np.quantile(pooled, shares, axis=1, method="higher").tolist()
    # A root of a broadcast need not wait for anybody: its times say nothing about the others'.
    last, late = (None, 0.0) if rooted else arrives_last(by_rank[0])
    algbw = gb_per_s(size, pooled.mean() / 1e6)
    return {
        "size": size, "count": count, "wrong": wrong, "time_us": pooled.mean(),
        "algbw_gb_s": algbw, "busbw_gb_s": bus_factor * algbw,
        **{f"{name}_us": us for name, us in zip(PERCENTILES, percentiles, strict=True)},
        **{f"rank_{name}_us": us for name, us in zip(PERCENTILES, by_rank, strict=True)},
        "outliers": int((pooled > OUTLIER * percentiles[0]).sum()), "iterations": pooled.size,
        "sent_x_size": None if written is None else written / size,
        "late_rank": last, "late_us": late,
    }  # fmt: skip


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


def narrow(value: float, width: int) -> str:
    """Write a number with as many decimals, up to two, as fit."""
    texts = (f"{value:.2f}", f"{value:.1f}", f"{value:.0f}")
    return next((text for text in texts if len(text) <= width), f"{value:.1e}")


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


def print_header(report: Report, sweep: Sweep) -> None:
    """Print which ranks run what, and the heads of nccl-tests' columns."""
    group = sweep.group
    several = f", {group.at_once} such groups at once" * (group.at_once > 1)
    report.say(f"\n# {sweep.label}: {group.ranks} ranks{several}")
    report.say(f"#{'out-of-place':>72}{'in-place':>31}")
    names, units = ("time", "algbw", "busbw", "#wrong"), ("(us)", "(GB/s)", "(GB/s)", "")
    report.say("#" + columns(("size", "count", "type", "redop", "root"), names, names)[1:])
    report.say("#" + columns(("(B)", "(elements)", "", "", ""), units, units)[1:])


def print_percentiles(report: Report, sweep: Sweep) -> None:
    """Print percentiles of each size, those of each rank at the last, and who arrives last."""
    sizes = sweep.best_side()
    last, rows = sizes[-1], []
    for figures in sizes:
        times = [f"{figures[f'{name}_us']:.1f} us" for name in PERCENTILES]
        outliers = f"{figures['outliers']} of {figures['iterations']}"
        rows.append((f"{figures['size']:,} bytes", *times, outliers))
    ranks = sorted(range(sweep.group.ranks), key=last["rank_p50_us"].__getitem__)
    for rank in sorted({*ranks[: FEW_RANKS // 2], *ranks[-FEW_RANKS // 2 :]}):
        times = [f"{last[f'rank_{name}_us'][rank]:.1f} us" for name in PERCENTILES]
        rows.append((f"the last size on rank {rank}", *times, ""))
    report.table(rows, ("times of", *PERCENTILES, f"above {OUTLIER:g} x p50"))
    for rank in sorted({f["late_rank"] for f in sizes} - {None}):
        late = [f["late_us"] for f in sizes if f["late_rank"] == rank]
        wait = f"the others wait {statistics.median(late):.0f} us for it"
        report.say(f"rank {rank} arrives last at {len(late)} of {len(sizes)} sizes: {wait}")


def conclude(
    report: Report, sweeps: list[Sweep], copied_gb_s: float, fit: Callable, interrupted: bool
) -> int:
    """Print and write what was measured; return the exit code. One rank can, whatever hangs."""
    sweeps = [sweep for sweep in sweeps if sweep.rows]
    ranks = f"{report.world.world_size} ranks"
    if sweeps:
        summarise(report, sweeps, copied_gb_s, fit)
        if report.output and report.world.is_rank0:
            plot(report.output / "bandwidth.png", sweeps, copied_gb_s, ranks)
    report.metrics["sweeps"] = rows_of(sweeps)
    report.metrics["interrupted"] = interrupted
    ended = ", interrupted by Ctrl-C" * interrupted
    code = report.finish(f"{len(sweeps)} sweep{'s' * (len(sweeps) != 1)} on {ranks}{ended}")
    return cli.INTERRUPTED if interrupted else code


def rows_of(sweeps: list[Sweep]) -> dict[str, list]:
    """Return what results.json holds of those that have measured something."""
    return {sweep.label: sweep.rows for sweep in sweeps if sweep.rows}


def summarise(report: Report, sweeps: list[Sweep], copied: float, fit: Callable) -> None:
    """Check the data of all sweeps, and print what their times and bytes say."""
    times, open_, held, above, sent = [], [], [], [], []
    for sweep in sweeps:
        label, factor, figures = sweep.label, sweep.bus_factor, sweep.best_side()
        best, share = max(f["busbw_gb_s"] for f in figures), figures[-1]["sent_x_size"]
        if sweep.wrong is not None:
            source = "the collective's definition"
            report.check(f"{label}: wrong elements", sweep.wrong, 0, 0, source)
        alpha, rate, error = fit([f["size"] for f in figures], [f["p50_us"] for f in figures])
        fitted = ["n/a"] * 5
        if rate is None:
            open_.append(label)
        else:
            speeds = f"{rate:.2f} GB/s", f"{factor * rate:.2f} GB/s"
            fitted = [f"{alpha:.0f} us", *speeds, f"{alpha * rate:,.1f} KB", f"{100 * error:.0f}%"]
        times.append((label, *fitted, f"{best / copied:.2f}x"))
        sent.append((label, f"{factor:.2f}", "n/a" if share is None else f"{share:.2f}"))
        report.metrics |= {
            f"{label} best_busbw_gb_s": best, f"{label} alpha_us": alpha,
            f"{label} busbw_gb_s": rate and factor * rate,
            f"{label} crossover_bytes": rate and 1e3 * alpha * rate, f"{label} sent_x_size": share,
        }  # fmt: skip
        if bound := sweep.yardstick:
            speeds = f"{bound.gb_s:.2f} GB/s", f"{best:.2f} GB/s", f"{best / bound.gb_s:.2f}x"
            held.append((label, bound.link, *speeds))
            report.metrics |= {f"{label} bound_gb_s": bound.gb_s, f"{label} bound_by": bound.link}
            if best >= ABOVE * bound.gb_s:
                above.append(f"{label} is above its bound: {why_above(bound)}")
    heads = ("time = alpha + beta x size", "alpha", "1/beta", "as busbw", "half speed at")
    report.say()
    report.table(times, (*heads, "fit off by", "best of a copy"))
    if open_:
        names = ", ".join(open_)
        report.say(f"{names}: too few sizes, or the time grows by no more than its noise: no fit")
    report.say(f"a copy in memory, on all ranks at once: {copied:.2f} GB/s\n")
    if held:
        report.table(held, ("busbw held against", "link", "bound", "best", "best of bound"), 2)
        report.say()
    for line in above:
        report.say(line)
    report.table(sent, ("bytes by size", "busbw counts", "busiest rank sent"))


def why_above(bound: Yardstick) -> str:
    why = "the network adds (NVLS, SHARP), or the link is faster than you said"
    if bound.tree_gb_s is None:
        return why
    return f"NCCL took a tree, up to {bound.tree_gb_s:.0f} GB/s (NCCL_ALGO=Ring compares), or {why}"


def plot(path: Path, sweeps: list[Sweep], copied: float, title: str) -> None:
    """Draw bus bandwidths (GB/s) against sizes (bytes), log-log, and lines that bound them."""
    bounds = {"copy in memory": copied}
    bounds |= {f"{s.label}: {s.yardstick.link}": s.yardstick.gb_s for s in sweeps if s.yardstick}
    with figure(path, figsize=(9, 4)) as axes:
        for sweep in sweeps:
            sizes = [figures["size"] for figures in sweep.best_side()]
            busbw = [figures["busbw_gb_s"] for figures in sweep.best_side()]
            axes.plot(sizes, busbw, marker="o", markersize=3, label=sweep.label)
        for number, (name, bound) in enumerate(bounds.items()):
            axes.axhline(bound, color="grey", linestyle=("--", ":")[number % 2], label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set(title=f"Bus bandwidth ({title})", xlabel="bytes", ylabel="GB/s")
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
