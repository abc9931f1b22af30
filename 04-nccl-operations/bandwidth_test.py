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
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from legacy_common import cli, runtime
from legacy_common.lab import traffic
from legacy_common.report import Report
from legacy_common.runtime import all_gather_single, reduce_scatter_single
from nccl_parts import bandwidth_test as part
from nccl_parts import clusters, data
from nccl_parts.clusters import NEXT, PAIRS, RING
from nccl_parts.measurement import StopEarly, gb_per_s

# One call of each collective. PyTorch reduces and broadcasts in place only: out of place, these
# cost a copy more.


def all_reduce(sent, received, call):
    if received is not sent:
        received.copy_(sent)
    dist.all_reduce(received, call.op, group=call.group)


def all_gather(sent, received, call):
    all_gather_single(received, sent, group=call.group)


def reduce_scatter(sent, received, call):
    reduce_scatter_single(received, sent, call.op, group=call.group)


def alltoall(sent, received, call):
    dist.all_to_all_single(received, sent, group=call.group)


def alltoallv(sent, received, call):
    lengths = data.uneven_lengths(call.rank, call.ranks, len(sent) // call.ranks)
    dist.all_to_all_single(received, sent, lengths, lengths, group=call.group)


def broadcast(sent, received, call):
    if received is not sent and call.rank == call.root:
        received.copy_(sent)
    dist.broadcast(received, group=call.group, group_src=call.root)


def reduce(sent, received, call):
    if received is not sent:
        received.copy_(sent)
    dist.reduce(received, op=call.op, group=call.group, group_dst=call.root)


def gather(sent, received, call):
    parts = list(received.chunk(call.ranks)) if call.rank == call.root else None
    dist.gather(sent, parts, group=call.group, group_dst=call.root)


def scatter(sent, received, call):
    parts = list(sent.chunk(call.ranks)) if call.rank == call.root else None
    dist.scatter(received, parts, group=call.group, group_src=call.root)


def sendrecv(sent, received, call):
    following, previous = (call.rank + 1) % call.ranks, (call.rank - 1) % call.ranks
    sending = dist.P2POp(dist.isend, sent, group=call.group, group_peer=following)
    taking = dist.P2POp(dist.irecv, received, group=call.group, group_peer=previous)
    for work in dist.batch_isend_irecv([sending, taking]):
        work.wait()


@dataclass
class Collective:
    """What is timed, and what is known of it. A "part" is 1/n of a "whole" buffer."""

    run: Callable  # (sent, received, call)
    bus_factor: Callable  # n ranks -> busbw / algbw: the buffers that the busiest has to send
    sends: str = "whole"
    receives: str = "whole"
    in_parts: bool = False  # nccl-tests prints the count of a part
    in_place: bool = True  # can be
    reduces: bool = False
    rooted: bool = False
    uneven: bool = False
    path: str | None = RING  # how its bytes cross the border of a node


COLLECTIVES = {  # by nccl-tests' names
    "all_reduce": Collective(all_reduce, lambda n: 2 * (n - 1) / n, reduces=True),
    "all_gather": Collective(all_gather, lambda n: (n - 1) / n, sends="part", in_parts=True),
    "reduce_scatter": Collective(
        reduce_scatter, lambda n: (n - 1) / n, receives="part", in_parts=True, reduces=True
    ),
    "alltoall": Collective(
        alltoall, lambda n: (n - 1) / n, in_parts=True, in_place=False, path=PAIRS
    ),
    "alltoallv": Collective(
        # Rank 0 keeps 1 of 1 + 2 + ... + n units, and sends the rest.
        alltoallv, lambda n: 1 - 2 / (n * (n + 1)), in_parts=True, in_place=False, uneven=True,
        path=None,
    ),
    "broadcast": Collective(broadcast, lambda n: 1, rooted=True),
    "reduce": Collective(reduce, lambda n: 1, reduces=True, rooted=True),
    "gather": Collective(
        gather, lambda n: (n - 1) / n, sends="part", in_parts=True, rooted=True, path=PAIRS
    ),
    "scatter": Collective(
        scatter, lambda n: (n - 1) / n, receives="part", in_parts=True, rooted=True, path=PAIRS
    ),
    "sendrecv": Collective(sendrecv, lambda n: 1, in_place=False, path=NEXT),
}  # fmt: skip


def timed(run, prepare, warmup, iters, device):
    """Return how long each iteration took, in us, without `prepare`; on a GPU by its own clock."""
    times = []
    for _ in range(warmup + iters):
        prepare()
        if device.type == "cuda":
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            run()
            events[1].record()
            times.append(events)
        else:
            started = time.perf_counter()
            run()
            times.append(1e6 * (time.perf_counter() - started))
    if device.type == "cuda":
        torch.cuda.synchronize()
        times = [1e3 * start.elapsed_time(end) for start, end in times]
    return times[warmup:]


def measure_one(name, size, in_place, args, call, device):
    """Return one size's figures, the same on all ranks; None where each part would be empty."""
    collective, dtype = COLLECTIVES[name], data.TYPES[args.datatype]
    place = call.rank, call.ranks, in_place, device
    sent, received, count = data.buffers_of(collective, size, dtype, *place)
    if count == 0 or in_place and not collective.in_place:
        return None

    def run():
        collective.run(sent, received, call)
        if args.blocking and device.type == "cuda":
            torch.cuda.synchronize()

    data.fill(sent, data.numbers(call.rank, call.ranks, args.op))
    before, written, wrong = traffic.bytes_written(), None, None

    run()

    if before is not None:
        written = traffic.bytes_written() - before
    if args.check:
        expected = data.EXPECTED[name](call, count)
        wrong = data.count_wrong(received, expected, call.ranks, args.op)

    noise = data.noise(call.rank)
    data.fill(sent, noise)
    grows = in_place and collective.reduces  # sums of sums: fresh data for each iteration
    prepare = (lambda: data.fill(sent, noise)) if grows else lambda: None
    dist.barrier()
    own = timed(run, prepare, args.warmup_iters, args.iters, device), wrong, written

    times, wrong, written = zip(*runtime.gather(own), strict=True)
    return part.figures_of(
        times, max(sent.nbytes, received.nbytes), count, collective.bus_factor(call.ranks),
        collective.rooted, sum(wrong) if args.check else None,
        None if before is None else max(written),
    )  # fmt: skip


def fit(sizes, times):
    """Fit time = alpha + size / rate; return alpha in us, rate in GB/s, and the largest error.

    Errors count relative to the time: those of 8 bytes as much as those of 128 MiB. None for all
    three where the times leave them open: one or two sizes, which any line fits, or times that grow
    with the size by no more than the fit is off, which is noise.
    """
    if len(set(sizes)) < 3:
        return None, None, None
    sizes, times = np.array(sizes, dtype=float), np.array(times)
    design = np.stack([1 / times, sizes / times], axis=1)
    (alpha, per_byte), *_ = np.linalg.lstsq(design, np.ones_like(times), rcond=None)
    if alpha < 0:  # the best line through 0 instead
        alpha, per_byte = 0.0, design[:, 1].sum() / (design[:, 1] ** 2).sum()
    fitted = alpha + per_byte * sizes
    error = np.abs(fitted / times - 1).max()
    if per_byte <= 0 or fitted.max() - fitted.min() <= error * fitted.min():
        return None, None, None
    return float(alpha), float(1e-3 / per_byte), float(error)


def sweep_of(name, group, links):
    """Return one collective's sweep on a kind of groups, with nothing measured yet."""
    collective = COLLECTIVES[name]
    bound = clusters.yardstick(collective.path, group, links)
    return part.Sweep(name, group, collective.bus_factor(group.ranks), collective.rooted, bound)


def run_sweep(report, sweep, args, stop):
    """Time one collective at every size; print a line for each, and add it to the sweep."""
    collective, group = COLLECTIVES[sweep.name], sweep.group.group
    ranks, op = sweep.group.ranks, data.REDUCTIONS[args.op][0]
    call = data.Call(group, dist.get_rank(group), ranks, args.root % ranks, op)
    part.print_header(report, sweep)
    size = args.minbytes
    while size <= args.maxbytes and not stop.stopped:
        stop.during = f"{sweep.label}, {size} bytes"
        out = measure_one(sweep.name, size, False, args, call, report.device)
        if out:
            inside = measure_one(sweep.name, size, True, args, call, report.device)
            redop = args.op if collective.reduces else "none"
            root = call.root if collective.rooted else -1
            left = (out["size"], out["count"], args.datatype, redop, root)
            report.say(part.columns(left, part.side(out), part.side(inside)))
            sweep.rows.append({"out_of_place": out, "in_place": inside})
        size = size + args.stepbytes if args.stepbytes else size * args.stepfactor
        stop.agreed()
    if sweep.rows and args.per_iter_timing:
        part.print_percentiles(report, sweep)
    elif not sweep.rows and not stop.stopped:
        raise cli.UsageError(f"-e {args.maxbytes} leaves each rank of {sweep.name} nothing")


def copy_rates(size, device):
    """Return GB/s of a copy in memory on each rank, of `size` bytes, while all ranks make one."""
    source = torch.ones(max(size, 4) // 4, device=device)
    target = torch.empty_like(source)
    dist.barrier()
    times = timed(lambda: target.copy_(source), lambda: None, 2, 10, device)
    return runtime.gather(gb_per_s(source.nbytes, statistics.median(times) / 1e6))


def parse_args():
    def not_here(text):
        raise argparse.ArgumentTypeError("ranks come from the launcher: torchrun --nproc-per-node")

    parser = cli.ArgumentParser(__doc__)
    add, count, size = parser.add_argument, cli.positive_int, cli.byte_size
    add("--collective", nargs="+", choices=[*COLLECTIVES, "all"], default=["all_reduce"],
        metavar="NAME", help=f"{', '.join(COLLECTIVES)} or all (all_reduce)")  # fmt: skip
    add("-b", "--minbytes", type=size, default="8", metavar="SIZE", help="first size (8)")
    add("-e", "--maxbytes", type=size, default="16M", metavar="SIZE", help="last size (16M)")
    add("-f", "--stepfactor", type=lambda text: cli.whole_number(text, 2), default=2,
        metavar="N", help="from one size to the next (2)")  # fmt: skip
    add("-i", "--stepbytes", type=size, metavar="SIZE",
        help="from one size to the next by addition, instead of -f (none)")  # fmt: skip
    add("-o", "--op", choices=data.REDUCTIONS, default="sum", help="of a reduction (sum)")
    add("-r", "--root", type=cli.whole_number, default=0,
        help="the root's rank; of a smaller group its remainder (0)")  # fmt: skip
    add("-d", "--datatype", choices=data.TYPES, default="float", help="(float)")
    add("-n", "--iters", type=count, default=20, help="timed iterations of each size (20)")
    add("-w", "--warmup_iters", type=cli.whole_number, default=3,
        help="untimed ones before them (3)")  # fmt: skip
    add("-c", "--check", type=int, choices=(0, 1), default=1,
        help="0: do not check the data of each size (1)")  # fmt: skip
    add("-z", "--blocking", type=int, choices=(0, 1), default=0,
        help="1: on a GPU, wait for each call, and count the wait (0)")  # fmt: skip
    add("-I", "--per_iter_timing", type=int, choices=(0, 1), default=0,
        help="1: print percentiles of sizes and ranks, and outliers, too (0)")  # fmt: skip
    add("-g", "--ngpus", "-t", "--nthreads", type=not_here, help=argparse.SUPPRESS)
    add("--link", type=cli.link_rate, help="one network adapter, as 400gbit: compare with it")
    add("--nics", type=count, help="network adapters of each node (one per rank)")
    add("--nvlink-gb-s", type=cli.positive_float,
        help="NVLink of one GPU, GB/s each way: compare with it")  # fmt: skip
    args = parser.parse_args()
    smallest = data.TYPES[args.datatype].itemsize
    if args.minbytes > args.maxbytes:
        parser.error(f"-b {args.minbytes} is above -e {args.maxbytes}, the last size")
    if args.minbytes < smallest:
        parser.error(f"-b {args.minbytes} is less than a number of -d {args.datatype}: {smallest}")
    if "all" in args.collective:
        args.collective = [*COLLECTIVES]
    args.collective = list(dict.fromkeys(args.collective))  # named twice, timed once
    reduces = any(COLLECTIVES[name].reduces for name in args.collective)
    divides = reduces and args.op in ("avg", "mulsum")
    if divides and not data.TYPES[args.datatype].is_floating_point:
        parser.error(f"-o {args.op} needs a floating-point -d, not {args.datatype}")
    if args.nics and not args.link:
        parser.error(f"--nics {args.nics} needs --link, the speed of each")
    return args


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("04-nccl-operations/bandwidth_test.py", args, world, device)
        if world.world_size == 1:
            raise cli.UsageError("one rank has nobody to talk to: start 2 or more (torchrun)")
        names = args.collective
        data.refuse(any(COLLECTIVES[name].reduces for name in names), args, world, device)
        report.start()

        rates = copy_rates(args.maxbytes, device)
        copied = statistics.median(rates)
        report.metrics |= {"copy_gb_s": copied, "copy_gb_s_by_rank": rates}
        nodes = clusters.nodes_of()
        nics = args.nics or max(len(node) for node in nodes)
        links = clusters.Links(args.link and args.link / 1e9, nics, args.nvlink_gb_s)
        groups = clusters.groups_of(nodes, report)
        sweeps = [sweep_of(name, group, links) for group in groups for name in names]

        end = functools.partial(part.conclude, report, sweeps, copied, fit)
        with StopEarly(report.say, lambda: end(interrupted=True)) as stop:
            for sweep in sweeps:
                if not stop.stopped:
                    run_sweep(report, sweep, args, stop)
                    report.metrics["sweeps"] = part.rows_of(sweeps)
                    report.save()  # the next collective may hang
        return end(interrupted=stop.stopped)


if __name__ == "__main__":
    cli.run(main)
