"""Time collectives over a range of sizes, as nccl-tests does, on any backend of PyTorch.

    CPU   torchrun --standalone --nproc-per-node=2 04-nccl-operations/bandwidth_test.py
    GPU   torchrun --standalone --nproc-per-node=gpu 04-nccl-operations/bandwidth_test.py -e 8G

`--collective all` times every one. Look for: a time that does not change with the size (latency),
then a bandwidth that does not (the link); where one turns into the other; #wrong, which must be 0.

Sources: github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md for the bandwidths and src/ for the
columns; Hockney, The communication challenge for MPP (1994), for latency and bandwidth.
"""

import argparse
import functools
import os
import re
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from dist_common import cli, measure, runtime
from dist_common.report import Report, figure

# torch 2.13 gave them these names; until then they were all_gather_into_tensor and so on.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

PERIOD = 4099  # of the numbers sent: a prime, so that two parts in the wrong places differ
CHUNK = PERIOD * 2**12  # elements that are checked at a time: copies of all would not fit
OUTLIER = 3.0  # an iteration this many times as long as the median is counted as one
TYPES = {  # by nccl-tests' names
    "int8": torch.int8, "uint8": torch.uint8, "int32": torch.int32, "int64": torch.int64,
    "half": torch.float16, "float": torch.float32, "double": torch.float64,
    "bfloat16": torch.bfloat16, "f8e4m3": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2,
}  # fmt: skip
REDUCTIONS = {
    "sum": (dist.ReduceOp.SUM, torch.add),
    "prod": (dist.ReduceOp.PRODUCT, torch.mul),
    "max": (dist.ReduceOp.MAX, torch.maximum),
    "min": (dist.ReduceOp.MIN, torch.minimum),
    "avg": (dist.ReduceOp.AVG, torch.add),
    "mulsum": (dist._make_nccl_premul_sum(2.0), torch.add),
}
NCCL_ONLY = ("mulsum", "f8e4m3", "f8e5m2")


@dataclass
class Collective:
    """What is timed. `bus` turns the algorithm's bandwidth on n ranks into that of the bus.

    `right` says what a rank receives, part by part, of what all ranks sent, of the reduction of
    it, and of `own`, which picks a rank's part.
    """

    run: Callable
    bus: Callable
    right: Callable
    sends: str = "whole"
    receives: str = "whole"
    parts: bool = False  # a rank's part is what nccl-tests counts
    in_place: bool = True
    reduces: bool = False
    rooted: bool = False


COLLECTIVES = {}  # by nccl-tests' names


def timed_with(**traits):
    def note(run):
        COLLECTIVES[run.__name__] = Collective(run, **traits)
        return run

    return note


def in_steps(n):
    return (n - 1) / n


# PyTorch reduces and broadcasts in place only: out of place, these cost a copy more.


@timed_with(bus=lambda n: 2 * (n - 1) / n, right=lambda x, total, own, rank: [total], reduces=True)
def all_reduce(sent, received, op, group):
    if received is not sent:
        received.copy_(sent)
    dist.all_reduce(received, op, group=group)


@timed_with(bus=in_steps, right=lambda x, total, own, rank: x, sends="part", parts=True)
def all_gather(sent, received, op, group):
    all_gather_single(received, sent, group=group)


@timed_with(bus=in_steps, right=lambda x, total, own, rank: [own(total)], receives="part",
            parts=True, reduces=True)  # fmt: skip
def reduce_scatter(sent, received, op, group):
    reduce_scatter_single(received, sent, op, group=group)


@timed_with(bus=in_steps, right=lambda x, total, own, rank: [own(sent) for sent in x],
            parts=True, in_place=False)  # fmt: skip
def alltoall(sent, received, op, group):
    dist.all_to_all_single(received, sent, group=group)


@timed_with(bus=lambda n: 1, right=lambda x, total, own, rank: [x[0]], rooted=True)
def broadcast(sent, received, op, group):
    if received is not sent and dist.get_rank(group) == 0:
        received.copy_(sent)
    dist.broadcast(received, group=group, group_src=0)


@timed_with(bus=lambda n: 1, right=lambda x, total, own, rank: [] if rank else [total],
            reduces=True, rooted=True)  # fmt: skip
def reduce(sent, received, op, group):
    if received is not sent:
        received.copy_(sent)
    dist.reduce(received, op=op, group=group, group_dst=0)


@timed_with(bus=in_steps, right=lambda x, total, own, rank: [] if rank else x,
            sends="part", parts=True, rooted=True)  # fmt: skip
def gather(sent, received, op, group):
    ranks, root = dist.get_world_size(group), dist.get_rank(group) == 0
    dist.gather(sent, list(received.chunk(ranks)) if root else None, group=group, group_dst=0)


@timed_with(bus=in_steps, right=lambda x, total, own, rank: [own(x[0])],
            receives="part", parts=True, rooted=True)  # fmt: skip
def scatter(sent, received, op, group):
    ranks, root = dist.get_world_size(group), dist.get_rank(group) == 0
    dist.scatter(received, list(sent.chunk(ranks)) if root else None, group=group, group_src=0)


@timed_with(bus=lambda n: 1, right=lambda x, total, own, rank: [x[rank - 1]], in_place=False)
def sendrecv(sent, received, op, group):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    sending = dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % ranks)
    taking = dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % ranks)
    for work in dist.batch_isend_irecv([sending, taking]):
        work.wait()


def timed(run, warmup, iters, device):
    """Return the time of each iteration in us; on a GPU between events of its stream."""
    for _ in range(warmup):
        run()
    if device.type == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in range(iters + 1)]
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        torch.cuda.synchronize()
        return [1e3 * a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)]
    times = []
    for _ in range(iters):
        started = time.perf_counter()
        run()
        times.append(1e6 * (time.perf_counter() - started))
    return times


def buffers(collective, size, dtype, rank, ranks, in_place, device):
    """Return (sent, received), and the count that nccl-tests prints for a size in bytes."""
    count, aligned = size // dtype.itemsize, 16 // dtype.itemsize
    if collective.parts:  # nccl-tests keeps parts aligned to 16 bytes
        count = count // ranks // aligned * aligned
    lengths = {"part": count, "whole": count * ranks if collective.parts else count}
    sides = lengths[collective.sends], lengths[collective.receives]
    if not in_place:
        return *(torch.zeros(n, dtype=dtype, device=device) for n in sides), count
    whole = torch.zeros(max(sides), dtype=dtype, device=device)
    own = whole[rank * count : (rank + 1) * count]
    return *(whole if n == len(whole) else own for n in sides), count


def numbers(rank, ranks, redop):
    """Return the period of what a rank sends: whole numbers, whose sums and products are exact."""
    drawn = torch.randint(0, 3, (PERIOD,), generator=torch.Generator().manual_seed(rank))
    if redop in ("max", "min"):
        return drawn.float()
    # At each place 4 ranks at most take part, for 8 at most: exact in 8 bits too.
    every = -(-ranks // 4)
    takes_part = torch.arange(PERIOD) % every == rank % every
    if redop == "prod":
        return 1.0 + drawn % 2 * takes_part  # 16 at most
    return (drawn * takes_part).float()


def fill(tensor, period):
    whole = len(tensor) // PERIOD * PERIOD
    period = period.to(tensor)
    tensor[:whole].view(-1, PERIOD)[:] = period
    tensor[whole:] = period[: len(tensor) - whole]
    return tensor


def count_wrong(received, collective, rank, ranks, count, redop):
    """Return how many elements differ, by more than rounding, from what the definition says."""
    sent = [numbers(other, ranks, redop) for other in range(ranks)]
    total = functools.reduce(REDUCTIONS[redop][1], sent)
    total = total / ranks if redop == "avg" else total * 2 if redop == "mulsum" else total
    parts = collective.right(sent, total, lambda whole: whole.roll(-rank * count), rank)
    slack = 2 * torch.finfo(received.dtype).eps if redop == "avg" else 0  # it divides
    wrong = 0
    for got, period in zip(received.chunk(len(parts)) if parts else (), parts, strict=True):
        for piece in got.split(CHUNK):
            right = fill(torch.empty_like(piece), period)
            if piece.itemsize == 1 and piece.is_floating_point():  # float8 can only be converted
                piece, right = piece.float(), right.float()
            wrong += (~torch.isclose(piece, right, rtol=slack, atol=0)).sum().item()
    return wrong


def measure_one(name, size, in_place, args, group, device):
    """Return one size's figures, the same on all ranks; None where each part would be empty."""
    collective, (op, _) = COLLECTIVES[name], REDUCTIONS[args.op]
    rank, ranks, dtype = dist.get_rank(group), dist.get_world_size(group), TYPES[args.datatype]
    sent, received, count = buffers(collective, size, dtype, rank, ranks, in_place, device)
    if count == 0 or in_place and not collective.in_place:
        return None
    fill(sent, numbers(rank, ranks, args.op))
    before = measure.bytes_written()

    collective.run(sent, received, op, group)

    written = None if before is None else measure.bytes_written() - before
    wrong = count_wrong(received, collective, rank, ranks, count, args.op)
    sent.zero_()  # sums of sums overflow
    dist.barrier()
    times = timed(lambda: collective.run(sent, received, op, group),
                  args.warmup_iters, args.iters, device)  # fmt: skip
    times, wrong, written = zip(*runtime.gather((times, wrong, written)), strict=True)
    times = sorted(sum(times, []))  # of all ranks: nccl-tests averages over them too
    mean, whole = statistics.mean(times), max(sent.nbytes, received.nbytes)
    p50, p95, p99 = (times[min(len(times) - 1, int(s * len(times)))] for s in (0.5, 0.95, 0.99))
    return {
        "size": whole, "count": count, "wrong": sum(wrong), "time_us": mean,
        "algbw_gb_s": whole / mean / 1e3, "busbw_gb_s": collective.bus(ranks) * whole / mean / 1e3,
        "p50_us": p50, "p95_us": p95, "p99_us": p99, "max_us": times[-1],
        "outliers": sum(t > OUTLIER * p50 for t in times), "iterations": len(times),
        "sent_x_size": None if before is None else max(written) / whole,
    }  # fmt: skip


# Printing as nccl-tests does.


def narrow(value, width):
    """Write a number with as many decimals, up to two, as fit."""
    texts = (f"{value:.2f}", f"{value:.1f}", f"{value:.0f}", f"{value:.1e}")
    return next(text for text in texts if len(text) <= width or text is texts[-1])


def columns(left, *sides):
    widths = (12, 12, 8, 6, 6, *(7, 6, 6, 6) * len(sides))
    words = [*left, *(word for side in sides for word in side)]
    return "  ".join(f"{word:>{width}}" for word, width in zip(words, widths, strict=True)).rstrip()


def side(figures):
    if figures is None:
        return ["N/A"] * 4
    speeds = [narrow(figures[key], 6) for key in ("algbw_gb_s", "busbw_gb_s")]
    return [narrow(figures["time_us"], 7), *speeds, figures["wrong"]]


def sweep(report, name, args, group):
    """Time one collective at every size, print a line for each; return the figures by size."""
    report.say(
        f"# Collective test starting: {name}\n"
        f"# minBytes {args.minbytes} maxBytes {args.maxbytes} step: {args.stepfactor}(factor) "
        f"warmup iters: {args.warmup_iters} iters: {args.iters} validation: 1\n#\n"
        f"#{'out-of-place':>72}{'in-place':>31}"
    )
    names, units = ("time", "algbw", "busbw", "#wrong"), ("(us)", "(GB/s)", "(GB/s)", "")
    report.say("#" + columns(("size", "count", "type", "redop", "root"), names, names)[1:])
    report.say("#" + columns(("(B)", "(elements)", "", "", ""), units, units)[1:])
    size, rows, collective = args.minbytes, [], COLLECTIVES[name]
    while size <= args.maxbytes:
        out, inside = (
            measure_one(name, size, way, args, group, report.device) for way in (False, True)
        )
        if out:
            redop, root = args.op if collective.reduces else "none", 0 if collective.rooted else -1
            left = (out["size"], out["count"], args.datatype, redop, root)
            report.say(columns(left, side(out), side(inside)))
            rows.append({"out_of_place": out, "in_place": inside})
        size *= args.stepfactor
    if not rows:
        raise cli.UsageError(f"-e {args.maxbytes} leaves each rank of {name} nothing")
    both = [figures for row in rows for figures in row.values() if figures]
    wrong = sum(figures["wrong"] for figures in both)
    busbw = statistics.mean(figures["busbw_gb_s"] for figures in both)
    report.say(f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}")
    report.say(f"# Avg bus bandwidth    : {busbw:g}")
    return rows


def percentiles(report, rows):
    keys, lines = ("p50_us", "p95_us", "p99_us", "max_us"), []
    for figures in best_side(rows):
        outliers = f"{figures['outliers']} of {figures['iterations']}"
        lines.append(
            (f"{figures['size']:,}", *(f"{figures[key]:.1f} us" for key in keys), outliers)
        )
    report.table(lines, ("size", "p50", "p95", "p99", "max", f"above {OUTLIER:g} x p50"))


def best_side(rows):
    """Return the figures in place, or out of place of what cannot be in place."""
    return [row["in_place"] or row["out_of_place"] for row in rows]


# What the figures say: latency and bandwidth, and what bounds them.


def fit(sizes, times):
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


def summarise(report, label, name, ranks, rows, args, copied):
    """Check a sweep's data; return its lines of the last two tables: of times, and of bytes."""
    wrong = sum(figures["wrong"] for row in rows for figures in row.values() if figures)
    report.check(f"{label}: wrong elements", wrong, 0, 0, "the collective's definition")
    figures = best_side(rows)
    alpha, rate, error = fit([f["size"] for f in figures], [f["p50_us"] for f in figures])
    best, bus = max(f["busbw_gb_s"] for f in figures), COLLECTIVES[name].bus(ranks)
    sent, fitted = figures[-1]["sent_x_size"], ("n/a",) * 5
    report.metrics.update({
        f"{label} best_busbw_gb_s": best, f"{label} sent_x_size": sent, f"{label} alpha_us": alpha,
        f"{label} busbw_gb_s": rate and bus * rate,
        f"{label} crossover_bytes": rate and 1e3 * alpha * rate,
    })  # fmt: skip
    if rate:
        fitted = (f"{alpha:.0f} us", f"{rate:.2f} GB/s", f"{bus * rate:.2f} GB/s",
                  f"{alpha * rate:,.1f} KB", f"{100 * error:.0f}%")  # fmt: skip
    of_link = (f"{1e9 * best / args.link:.2f}x",) if args.link else ()
    counted = "n/a" if sent is None else f"{sent:.2f}"
    return (label, *fitted, f"{best / copied:.2f}x", *of_link), (label, f"{bus:.2f}", counted)


def copy_rate(size, device):
    """Return GB/s of a copy in memory, of `size` bytes, while all ranks make one."""
    source = torch.ones(max(size, 4) // 4, device=device)
    target = torch.empty_like(source)
    dist.barrier()
    times = timed(lambda: target.copy_(source), 2, 10, device)
    of_all = runtime.gather(statistics.median(times))
    return source.nbytes / statistics.median(of_all) / 1e3


def groups_of(report):
    """Return (name, group, groups at once) of what to time.

    That is all ranks; on several nodes with equally many ranks, also within and across nodes.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")  # containers may share a host's name
    own = socket.gethostname(), boot.exists() and boot.read_text(), os.environ.get("GROUP_RANK")
    places = runtime.gather(own)
    nodes = [[r for r, other in enumerate(places) if other == place]
             for place in dict.fromkeys(places)]  # fmt: skip
    groups = [("", None, 1)]
    if len({len(node) for node in nodes}) > 1:
        report.say(f"# nodes of {', '.join(str(len(n)) for n in nodes)} ranks: all ranks only")
        return groups
    for name, split in (("within a node", nodes), ("across nodes", [*zip(*nodes, strict=True)])):
        if len(nodes) > 1 and len(split[0]) > 1:  # every rank makes every group
            made = [dist.new_group(list(members)) for members in split]
            mine = next(g for g, m in zip(made, split, strict=True) if dist.get_rank() in m)
            groups.append((name, mine, len(split)))
    return groups


def byte_size(text):
    match = re.fullmatch(r"(\d+)([KMG]?)", text, re.IGNORECASE)
    if not match or not int(match[1]):
        raise argparse.ArgumentTypeError(f"must be a size like 8, 4K, 128M or 1G, not {text!r}")
    return int(match[1]) * 1024 ** " KMG".index(match[2].upper() or " ")


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add, count = parser.add_argument, cli.positive_int
    add("--collective", choices=[*COLLECTIVES, "all"], default="all_reduce", metavar="NAME",
        help=f"{', '.join(COLLECTIVES)} or all (all_reduce)")  # fmt: skip
    add("-b", "--minbytes", type=byte_size, default="8", metavar="SIZE", help="first size (8)")
    add("-e", "--maxbytes", type=byte_size, default="16M", metavar="SIZE", help="last size (16M)")
    add("-f", "--stepfactor", type=lambda text: cli.whole_number(text, 2), default=2,
        metavar="N", help="from one size to the next (2)")  # fmt: skip
    add("-o", "--op", choices=REDUCTIONS, default="sum", help="of a reduction (sum)")
    add("-d", "--datatype", choices=TYPES, default="float", help="(float)")
    add("-n", "--iters", type=count, default=20, help="timed iterations of each size (20)")
    add("-w", "--warmup_iters", type=cli.whole_number, default=3,
        help="untimed ones before them (3)")  # fmt: skip
    add("-I", "--per_iter_timing", type=int, choices=(0, 1), default=0,
        help="1: print percentiles and outliers of each size too (0)")  # fmt: skip
    add("--link", type=cli.link_rate, help="each rank's link, as 400gbit: compare with it")
    args = parser.parse_args()
    smallest = TYPES[args.datatype].itemsize
    if args.minbytes > args.maxbytes:
        parser.error(f"-b {args.minbytes} is above -e {args.maxbytes}, the last size")
    if args.minbytes < smallest:
        parser.error(f"-b {args.minbytes} is less than a number of -d {args.datatype}: {smallest}")
    reduces = args.collective == "all" or COLLECTIVES[args.collective].reduces
    if reduces and args.op in ("avg", "mulsum") and not TYPES[args.datatype].is_floating_point:
        parser.error(f"-o {args.op} needs a floating-point -d, not {args.datatype}")
    return args


def refuse(names, args, device, world):
    """Refuse in one line what the backend lacks, or what does not fit into memory."""
    if dist.get_backend() == "gloo":
        for flag, value in (("-o", args.op), ("-d", args.datatype)):
            if value in NCCL_ONLY and (flag == "-d" or any(COLLECTIVES[n].reduces for n in names)):
                raise cli.UsageError(f"{flag} {value}: gloo has it not, nccl has")
    free = measure.available_memory(device)
    free //= world.local_world_size if device.type == "cpu" else 1  # ranks share a machine's
    most = int(0.9 * min(runtime.gather(free))) // 2  # out of place, a rank has two buffers
    if args.maxbytes > most:
        raise cli.UsageError(
            f"-e {args.maxbytes}: two buffers of it do not fit into a rank's memory; at most "
            f"-e {most // 2**20}M does"
        )


def plot_bandwidth(path, curves, bounds, title):
    """Draw bus bandwidths (GB/s) against sizes (bytes), log-log, and lines that bound them, as PNG.

    Shapes: a curve is (sizes, bandwidths), equally long.
    """
    with figure(path, figsize=(9, 4)) as axes:
        for name, (sizes, bandwidths) in curves.items():
            axes.plot(sizes, bandwidths, marker="o", markersize=3, label=name)
        for number, (name, bound) in enumerate(bounds.items()):
            axes.axhline(bound, color="grey", linestyle=("--", ":")[number % 2], label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set(title=f"Bus bandwidth ({title})", xlabel="bytes", ylabel="GB/s")
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("04-nccl-operations/bandwidth_test.py", args, world, device)
        if world.world_size == 1:
            raise cli.UsageError("one rank has nobody to talk to: start 2 or more (torchrun)")
        names = [*COLLECTIVES] if args.collective == "all" else [args.collective]
        refuse(names, args, device, world)
        report.start()

        copied = copy_rate(args.maxbytes, device)
        report.metrics["copy_gb_s"] = copied
        lines, sweeps = [], {}
        for where, group, at_once in groups_of(report):
            ranks = dist.get_world_size(group)
            for name in names:
                label = f"{name} {where}".strip()
                several = f", {at_once} such groups at once" if at_once > 1 else ""
                report.say(f"\n# {label}: {ranks} ranks{several}")
                rows = sweeps[label] = sweep(report, name, args, group)
                if args.per_iter_timing:
                    percentiles(report, rows)
                lines.append(summarise(report, label, name, ranks, rows, args, copied))
        times, sizes = zip(*lines, strict=True)
        heads = ["time = alpha + beta x size", "alpha", "1/beta", "as busbw", "half speed at"]
        heads += ["fit off by", "best of a copy", *(["of the link"] if args.link else [])]
        report.say()
        report.table(times, heads)
        report.say(f"a copy in memory, on all ranks at once: {copied:.2f} GB/s\n")
        report.table(sizes, ("bytes by size", "busbw counts", "busiest rank sent"))

        if report.output and world.is_rank0:
            curves = {
                label: ([f["size"] for f in side], [f["busbw_gb_s"] for f in side])
                for label, side in ((label, best_side(rows)) for label, rows in sweeps.items())
            }
            bounds = {"copy in memory": copied} | ({"link": args.link / 1e9} if args.link else {})
            title = f"{world.world_size} ranks"
            plot_bandwidth(report.output / "bandwidth.png", curves, bounds, title)
            report.metrics["sweeps"] = sweeps
        several = "s" * (len(sweeps) != 1)
        return report.finish(f"{len(sweeps)} sweep{several} on {world.world_size} ranks")


if __name__ == "__main__":
    cli.run(main)
