"""Time collectives over a range of sizes, in the table of nccl-tests.

    CPU   torchrun --standalone --nproc-per-node=2 04-nccl-operations/bandwidth_test.py
    GPU   torchrun --standalone --nproc-per-node=gpu \
              04-nccl-operations/bandwidth_test.py -e 8G

`--collective all` times every collective. Look for: small sizes that all take the same
time (latency), large sizes with the same busbw (the link), and #wrong, which must be 0.

Sources: github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md, for algbw and busbw; Hockney,
The communication challenge for MPP (1994), for latency and bandwidth.
"""

import argparse
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch
import torch.distributed as dist

from dist_common import cli, runtime
from dist_common.report import Report

WARMUP = 3  # calls of each size before the timed ones
# PyTorch 2.13 renamed them.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)


# One call of every collective. `sent` and `received` are one tensor where PyTorch works
# in place.


def all_reduce(sent, received):
    dist.all_reduce(received)


def all_gather(sent, received):
    all_gather_single(received, sent)


def reduce_scatter(sent, received):
    reduce_scatter_single(received, sent)


def alltoall(sent, received):
    dist.all_to_all_single(received, sent)


def broadcast(sent, received):
    dist.broadcast(received, src=0)


def reduce(sent, received):
    dist.reduce(received, dst=0)


def gather(sent, received):
    is_root = dist.get_rank() == 0
    parts = list(received.chunk(dist.get_world_size())) if is_root else None
    dist.gather(sent, parts, dst=0)


# Definitions


@dataclass
class Collective:
    """A collective, the bytes that it needs, and its definition.

    bus_factor: n ranks -> busbw / algbw, the buffers that the busiest rank sends.
    expected: (base, rank, n) -> the numbers that a rank receives if rank r sends
    base + r; None where the result is undefined.
    """

    run: Callable
    bus_factor: Callable
    expected: Callable
    sends_part: bool = False  # a rank sends an n-th of the size
    in_place: bool = False


def ring_factor(n):
    return (n - 1) / n


def total(base, n):
    """Return the sum of base + 0, base + 1 ... base + n - 1."""
    return n * base + n * (n - 1) / 2


def all_of(base, n):
    """Return base + 0, base + 1 ... base + n - 1, one after the other."""
    return torch.cat([base + rank for rank in range(n)])


COLLECTIVES = {  # by nccl-tests' names
    "all_reduce": Collective(
        all_reduce,
        lambda n: 2 * ring_factor(n),
        lambda base, rank, n: total(base, n),
        in_place=True,
    ),
    "all_gather": Collective(
        all_gather, ring_factor, lambda base, rank, n: all_of(base, n), sends_part=True
    ),
    "reduce_scatter": Collective(
        reduce_scatter,
        ring_factor,
        lambda base, rank, n: total(base, n).chunk(n)[rank],
    ),
    "alltoall": Collective(
        alltoall,
        ring_factor,
        lambda base, rank, n: all_of(base.chunk(n)[rank], n),
    ),
    "broadcast": Collective(
        broadcast, lambda n: 1, lambda base, rank, n: base, in_place=True
    ),
    "reduce": Collective(
        reduce,
        lambda n: 1,
        lambda base, rank, n: total(base, n) if rank == 0 else None,
        in_place=True,
    ),
    "gather": Collective(
        gather,
        ring_factor,
        lambda base, rank, n: all_of(base, n) if rank == 0 else None,
        sends_part=True,
    ),
}


# Measurements


def bytes_written():
    """Return the bytes that this process wrote, as Linux counts them: gloo's too."""
    if dist.get_backend() != "gloo" or not hasattr(psutil.Process, "io_counters"):
        return float("nan")
    return psutil.Process().io_counters().write_chars


def time_calls(function, prepare, args, device):
    """Return the microseconds of every timed iteration, by the GPU's clock on a GPU."""
    times, events = [], []
    for _ in range(WARMUP + args.iters):
        prepare()
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            end.record()
            events.append((start, end))
        else:
            started = time.perf_counter()
            function()
            times.append((time.perf_counter() - started) * 1e6)
    if events:
        torch.cuda.synchronize()
        times = [start.elapsed_time(end) * 1e3 for start, end in events]
    return times[WARMUP:]


def measure_size(name, size, args, run):
    """Check and time one size; return its numbers, or None if the parts are empty."""
    collective, n = COLLECTIVES[name], run.world_size
    count = size // 4 // n * n  # float32
    sent_count = count // n if collective.sends_part else count
    if count == 0:
        return None
    # The period is a prime, so that two parts in each other's place differ.
    base = torch.arange(sent_count, device=run.device) % 4099.0
    sent = base + run.rank
    expected = collective.expected(base, run.rank, n)
    if collective.in_place:
        received = sent
    elif expected is None:
        received = sent.new_empty(0)
    else:
        received = torch.zeros_like(expected)

    written = bytes_written()
    collective.run(sent, received)
    written = bytes_written() - written
    wrong = 0 if expected is None else int((received != expected).sum())

    dist.barrier()
    times = time_calls(
        lambda: collective.run(sent, received),
        lambda: sent.copy_(base),  # sums of sums would overflow
        args,
        run.device,
    )
    gathered = runtime.gather((wrong, written, times), run.cpu_group)
    return summarize(4 * count, collective.bus_factor(n), gathered)


def summarize(size, bus_factor, gathered):
    """Return the numbers of one size, from every rank's (wrong, written, times)."""
    wrong, written, times = zip(*gathered, strict=True)
    pooled = sorted(sum(times, []))  # of all ranks, as nccl-tests averages over them
    time_us = statistics.mean(pooled)
    algbw_gb_s = size / time_us / 1e3
    return {
        "size": size,
        "time_us": time_us,
        "p50_us": statistics.median(pooled),
        "p95_us": pooled[int(0.95 * len(pooled))],
        "algbw_gb_s": algbw_gb_s,
        "busbw_gb_s": bus_factor * algbw_gb_s,
        "wrong": sum(wrong),
        "sent_x_size": max(written) / size,
    }


def sweep(name, args, run):
    """Measure a collective at every size; print a line for each; return the rows."""
    run.print0(f"\n{name}")
    run.print0("      size (B)          time         algbw         busbw        #wrong")
    rows = []
    size = args.minbytes
    while size <= args.maxbytes:
        if row := measure_size(name, size, args, run):
            rows.append(row)
            run.print0(
                f"{row['size']:>14}{row['time_us']:>11.1f} us"
                f"{row['algbw_gb_s']:>9.3f} GB/s{row['busbw_gb_s']:>9.3f} GB/s"
                f"{row['wrong']:>14}"
            )
        size *= args.stepfactor
    if not rows:
        raise cli.UsageError(f"-e {args.maxbytes} leaves each rank of {name} nothing")
    return rows


def fit(rows):
    """Return alpha (us) and rate (GB/s) of time = alpha + size / rate.

    The smallest and the largest size decide. If noise hides the difference of their
    times, the rate is the algbw of the largest.
    """
    first, last = rows[0], rows[-1]
    longer_us = last["p50_us"] - first["p50_us"]
    rate = last["algbw_gb_s"]
    if longer_us > 0:
        rate = (last["size"] - first["size"]) / longer_us / 1e3
    return first["p50_us"], rate


def print_summary(report, sweeps, bound_gb_s):
    """Print latency, bandwidth and the bytes sent of every collective."""
    rows = []
    for name, sizes in sweeps.items():
        factor = COLLECTIVES[name].bus_factor(report.run.world_size)
        alpha_us, rate = fit(sizes)
        crossover = alpha_us * rate * 1e3  # bytes
        best = max(row["busbw_gb_s"] for row in sizes)
        report.metrics |= {
            f"{name} alpha_us": alpha_us,
            f"{name} busbw_gb_s": factor * rate,
            f"{name} crossover_bytes": crossover,
            f"{name} best_busbw_gb_s": best,
        }
        half_speed = f"{crossover / 1e3:,.1f} KB"
        of_bound = f"{best / bound_gb_s:.2f}x" if bound_gb_s else "no bound"
        times = (f"{alpha_us:.0f} us", half_speed, f"{best:.3f} GB/s", of_bound)
        sent = sizes[-1]["sent_x_size"]
        rows.append((name, *times, f"{factor:.2f}", f"{sent:.2f}"))
    report.run.print0("")
    titles = ("alpha", "half speed at", "best busbw", "of bound", "counts", "sent")
    report.table(rows, ("collective", *titles))


def byte_size(text):
    """Parse a size in bytes, such as 8, 64K, 16M or 1G."""
    match = re.fullmatch(r"([1-9]\d*)([KMG]?)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"must be like 8, 64K or 1G, not {text!r}")
    return int(match[1]) * 1024 ** " KMG".index(match[2] or " ")


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    add(
        "--collective",
        nargs="+",
        choices=[*COLLECTIVES, "all"],
        default=["all_reduce"],
        help="(all_reduce)",
    )
    add("-b", "--minbytes", type=byte_size, default="8", help="first size (8)")
    add("-e", "--maxbytes", type=byte_size, default="16M", help="last size (16M)")
    add(
        "-f",
        "--stepfactor",
        type=lambda text: cli.whole_number(text, low=2),
        default=2,
        help="from one size to the next (2)",
    )
    add("-n", "--iters", type=cli.positive_int, default=20, help="timed calls (20)")
    add(
        "--bound-gb-s",
        type=cli.positive_float,
        help="the busbw that the links allow, GB/s: compare with it (none)",
    )
    return parser.parse_args()


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as run:
        if run.world_size == 1:
            raise cli.UsageError("1 rank has nobody to send to: start 2 or more")
        report = Report("04-nccl-operations/bandwidth_test.py", args, run)
        names = list(COLLECTIVES) if "all" in args.collective else args.collective
        sweeps = report.metrics["sweeps"] = {}
        for name in names:
            sweeps[name] = sweep(name, args, run)
            report.write()  # the next collective may hang
        print_summary(report, sweeps, args.bound_gb_s)
        wrong = sum(row["wrong"] for rows in sweeps.values() for row in rows)
        report.check("wrong elements", wrong, 0, 0)
        return report.finish(f"{', '.join(names)} on {run.world_size} ranks")


if __name__ == "__main__":
    cli.run(main)
