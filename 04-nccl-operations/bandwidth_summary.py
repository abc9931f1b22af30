"""What bandwidth_test.py says of whole sweeps: a fit, a yardstick, bytes, a picture."""

from pathlib import Path

import numpy as np

from bandwidth_tables import Sweep
from dist_common import cli
from dist_common.report import Report, figure

ABOVE = 1.05  # times the yardstick: more than rounding


def conclude(report: Report, sweeps: list[Sweep], copied: float, interrupted: bool) -> int:
    """Print and write what was measured; return the exit code. One rank can, whatever hangs.

    `copied`: GB/s of a copy in memory.
    """
    sweeps = [sweep for sweep in sweeps if sweep.rows]
    summarise(report, sweeps, copied)
    ranks = f"{report.world.world_size} ranks"
    if report.output and report.world.is_rank0:
        if sweeps:
            plot(report.output / "bandwidth.png", sweeps, copied, ranks)
        report.metrics["sweeps"] = {sweep.label: sweep.rows for sweep in sweeps}
    report.metrics["interrupted"] = interrupted
    several = "s" * (len(sweeps) != 1)
    ended = ", interrupted by Ctrl-C" * interrupted
    code = report.finish(f"{len(sweeps)} sweep{several} on {ranks}{ended}")
    return cli.INTERRUPTED if interrupted else code


def fit(sizes, times) -> tuple[float, float, float] | tuple[None, None, None]:
    """Fit time = alpha + size / rate; return alpha in us, rate in GB/s, and the largest error.

    Errors count relative to the time: those of 8 bytes as much as those of 128 MiB. None for all
    three where the sizes do not tell: one size only, or times that do not grow with the size.
    """
    sizes, times = np.array(sizes, dtype=float), np.array(times)
    design = np.stack([1 / times, sizes / times], axis=1)
    (alpha, per_byte), _, independent, _ = np.linalg.lstsq(design, np.ones_like(times), rcond=None)
    if alpha < 0:  # the best line through 0 instead
        alpha, per_byte = 0.0, design[:, 1].sum() / (design[:, 1] ** 2).sum()
    if independent < 2 or per_byte <= 0:
        return None, None, None
    error = np.abs((alpha + per_byte * sizes) / times - 1).max()
    return float(alpha), float(1e-3 / per_byte), float(error)


def summarise(report: Report, sweeps: list[Sweep], copied: float) -> None:
    """Check the data of all sweeps, and print what their times and bytes say."""
    if not sweeps:
        report.say("# nothing was measured")
        return
    times, held, sent = [], [], []
    for sweep in sweeps:
        if sweep.wrong is not None:
            name, source = f"{sweep.label}: wrong elements", "the collective's definition"
            report.check(name, sweep.wrong, 0, 0, source)
        times.append(_row_of_times(report, sweep, copied))
        sent.append(_row_of_bytes(report, sweep))
        if sweep.yardstick:
            held.append(_row_of_yardstick(report, sweep))
    heads = ("time = alpha + beta x size", "alpha", "1/beta", "as busbw", "half speed at")
    report.say()
    report.table(times, (*heads, "fit off by", "best of a copy"))
    report.say(f"a copy in memory, on all ranks at once: {copied:.2f} GB/s\n")
    if held:
        report.table(held, ("busbw held against", "link", "bound", "best", "best of bound"), 2)
        report.say()
    for sweep in sweeps:
        _explain_above(report, sweep)
    report.table(sent, ("bytes by size", "busbw counts", "busiest rank sent"))


def best_busbw(sweep: Sweep) -> float:
    """Return the highest busbw of a sweep, in GB/s."""
    return max(figures["busbw_gb_s"] for figures in sweep.best_side())


def _row_of_times(report: Report, sweep: Sweep, copied: float) -> tuple[str, ...]:
    figures = sweep.best_side()
    alpha, rate, error = fit([f["size"] for f in figures], [f["p50_us"] for f in figures])
    bus = sweep.bus_factor
    report.metrics.update({
        f"{sweep.label} best_busbw_gb_s": best_busbw(sweep),
        f"{sweep.label} alpha_us": alpha,
        f"{sweep.label} busbw_gb_s": rate and bus * rate,
        f"{sweep.label} crossover_bytes": rate and 1e3 * alpha * rate,
    })  # fmt: skip
    of_a_copy = f"{best_busbw(sweep) / copied:.2f}x"
    if rate is None:
        return (sweep.label, *["n/a"] * 5, of_a_copy)
    speeds = (f"{rate:.2f} GB/s", f"{bus * rate:.2f} GB/s")
    half, off = f"{alpha * rate:,.1f} KB", f"{100 * error:.0f}%"
    return (sweep.label, f"{alpha:.0f} us", *speeds, half, off, of_a_copy)


def _row_of_yardstick(report: Report, sweep: Sweep) -> tuple[str, ...]:
    best, bound = best_busbw(sweep), sweep.yardstick
    report.metrics[f"{sweep.label} bound_gb_s"] = bound.gb_s
    report.metrics[f"{sweep.label} bound_by"] = bound.link
    speeds = (f"{bound.gb_s:.2f} GB/s", f"{best:.2f} GB/s", f"{best / bound.gb_s:.2f}x")
    return (sweep.label, bound.link, *speeds)


def _row_of_bytes(report: Report, sweep: Sweep) -> tuple[str, ...]:
    sent = sweep.best_side()[-1]["sent_x_size"]
    report.metrics[f"{sweep.label} sent_x_size"] = sent
    return sweep.label, f"{sweep.bus_factor:.2f}", "n/a" if sent is None else f"{sent:.2f}"


def _explain_above(report: Report, sweep: Sweep) -> None:
    bound = sweep.yardstick
    if bound is None or best_busbw(sweep) < ABOVE * bound.gb_s:
        return
    why = "the network adds (NVLS, SHARP), or the link is faster than you said"
    if bound.tree_gb_s:
        tree = f"a tree, up to {bound.tree_gb_s:.0f} GB/s"
        why = f"NCCL took {tree} (NCCL_ALGO=Ring compares), or {why}"
    report.say(f"{sweep.label} is above its bound: {why}")


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
