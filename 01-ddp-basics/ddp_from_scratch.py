"""Build DistributedDataParallel in four steps, each with the gradient of one process.

    CPU   torchrun --standalone --nproc-per-node=2 01-ddp-basics/ddp_from_scratch.py
    GPU   torchrun --standalone --nproc-per-node=gpu 01-ddp-basics/ddp_from_scratch.py

`--link-mbit 100` emulates a slow link between CPU ranks. Look for: every step sends the
same bytes, buckets need fewer all-reduces, and overlap hides part of the communication
behind backward. With --output-dir the script also writes the profiler's traces, and
figures.py draws a timeline from them.

`wrap` works with any nn.Module: the page shows how to use it in your own script.
Sources: Li et al., PyTorch Distributed (VLDB 2020), sections 3.2.1 to 3.2.3; Patarasuk
and Yuan, Bandwidth Optimal All-reduce Algorithms (2009) for the bytes of a ring.
"""

import os
import statistics
import sys
import time
from functools import partial

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import profile, record_function
from torch.utils.data import default_collate

from dist_common import cli, runtime
from dist_common.check import CollectiveCounter
from dist_common.data import Sequences, load_text
from dist_common.links import slow_group
from dist_common.model import PRESETS, build_transformer
from dist_common.report import Report

MIB = 2**20  # bytes
# Names in a profile: ours, and the all-reduces of an emulated link, gloo and NCCL.
SPANS = ("forward", "backward", "wait", "link:all_reduce", "gloo:all_reduce", "ncclDev")
HEADERS = ("way", "all-reduces", "bytes sent", "seen by Linux", "step")


# Four steps to DDP


def start_equal(model):
    """Step 0. Before training: every rank takes rank 0's weights and buffers."""
    # lab: hole start
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor, src=0)
    # lab: end


def trainable(model):
    """Return the parameters that get a gradient. A shared parameter comes once."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def gradient_or_zeros(parameter):
    """Return the gradient, or zeros if this rank's loss did not use the parameter."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def average_each(model, all_reduce):
    """Step 1. After backward: one all-reduce for each parameter."""
    # lab: hole mean
    for parameter in trainable(model):
        gradient = gradient_or_zeros(parameter)

        all_reduce(gradient).wait()

        gradient /= dist.get_world_size()
    # lab: end


def buckets_of(model, bucket_bytes):
    """Cut the parameters into groups of at least bucket_bytes, the last layer's first.

    Backward computes gradients from the last layer to the first, so the first bucket
    is the first one to be complete.
    """
    # lab: hole buckets
    buckets = []
    for parameter in reversed(trainable(model)):
        if not buckets or sum(p.nbytes for p in buckets[-1]) >= bucket_bytes:
            buckets.append([])
        buckets[-1].append(parameter)
    return buckets
    # lab: end


def pack(bucket):
    """Return the gradients of a bucket as one vector."""
    # lab: hole pack
    return torch.cat([gradient_or_zeros(parameter).flatten() for parameter in bucket])
    # lab: end


def unpack(flat, bucket):
    """Divide the sums by the number of ranks and copy them into the gradients."""
    # lab: hole pack
    sums = flat.split([parameter.numel() for parameter in bucket])
    for parameter, total in zip(bucket, sums, strict=True):
        parameter.grad.copy_(total.view_as(parameter) / dist.get_world_size())
    # lab: end


def average_in_buckets(model, bucket_bytes, all_reduce):
    """Step 2. After backward: one all-reduce for each bucket of gradients."""
    for bucket in buckets_of(model, bucket_bytes):
        flat = pack(bucket)

        all_reduce(flat).wait()

        unpack(flat, bucket)


class Overlapped:
    """Step 3. During backward: start the all-reduce of each bucket that is complete."""

    def __init__(self, model, bucket_bytes, all_reduce):
        self.all_reduce = all_reduce
        self.buckets = buckets_of(model, bucket_bytes)
        self.reset()
        for index, bucket in enumerate(self.buckets):
            for parameter in bucket:
                # Backward calls the hook when the parameter's gradient is complete.
                hook = partial(self.note, index=index)
                parameter.register_post_accumulate_grad_hook(hook)

    def reset(self):
        self.missing = [set(bucket) for bucket in self.buckets]
        self.started = []

    def note(self, parameter, index):
        """Note that a gradient is complete; start the complete buckets, in order."""
        if parameter not in self.missing[index]:
            raise RuntimeError("a second backward: call wait() after each one")
        self.last_step = []
        # lab: hole hook
        self.missing[index].remove(parameter)
        # All ranks must start the same bucket next, whichever is complete first.
        while (
            len(self.started) < len(self.buckets)
            and not self.missing[len(self.started)]
        ):
            self.start()
        # lab: end

    def start(self):
        bucket = self.buckets[len(self.started)]
        flat = pack(bucket)

        handle = self.all_reduce(flat)  # returns at once, and backward continues

        self.started.append((handle, flat, bucket))

    def wait(self):
        """After backward: wait for the all-reduces, then unpack the means."""
        # lab: hole wait
        # A bucket with a parameter that this rank did not use is still not started.
        while len(self.started) < len(self.buckets):
            self.start()
        for handle, flat, bucket in self.started:
            handle.wait()
            unpack(flat, bucket)
        # lab: end
        # PyTorch 2.14 may abort at exit if gloo's thread drops a handle last (issue
        # 190489). So keep the handles until the next backward.
        self.last_step = self.started
        self.reset()


def start_sum(tensor, group=None):
    """Start an all-reduce and return its handle. The sum is there after `wait()`."""
    return dist.all_reduce(tensor, group=group, async_op=True)


def wrap(model, bucket_bytes=25 * MIB, all_reduce=start_sum):
    """Do what DDP(model) does. Call `wait()` of the result after each backward."""
    start_equal(model)
    return Overlapped(model, bucket_bytes, all_reduce)


# Measurements


def build_ways(build, bucket_bytes, group, early):
    """Return {name: (model, function to call after backward)}.

    The models differ between ranks at first, as in a script without a seed. `early`
    gets True for each all-reduce of way 3 that starts while gradients are missing.
    """
    each, buckets, overlapped, ddp = (build(dist.get_rank()) for _ in range(4))
    start_equal(each)
    start_equal(buckets)
    all_reduce = partial(start_sum, group=group)

    def note_and_start(flat):
        early.append(any(weight.grad is None for weight in trainable(overlapped)))
        return all_reduce(flat)

    overlap = wrap(overlapped, bucket_bytes, note_and_start)
    ddp = DDP(ddp, process_group=group, bucket_cap_mb=bucket_bytes / MIB)
    return {
        "1-each": (each, lambda: average_each(each, all_reduce)),
        "2-buckets": (
            buckets,
            lambda: average_in_buckets(buckets, bucket_bytes, all_reduce),
        ),
        "3-overlapped": (overlapped, overlap.wait),
        "4-DDP": (ddp, lambda: None),
    }


def take_step(model, after_backward, batch):
    """Compute one averaged gradient; return the ms that it takes."""
    inputs, targets = batch  # (B, T) each
    model.zero_grad()
    started = clock(inputs.device)
    with record_function("forward"):
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    with record_function("backward"):
        loss.backward()
        clock(inputs.device)
    with record_function("wait"):
        after_backward()
    return (clock(inputs.device) - started) * 1e3


def clock(device):
    """Return seconds, after the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def bytes_written():
    """Return the bytes that this process wrote, as Linux counts them: gloo's too."""
    if not sys.platform.startswith("linux") or dist.get_backend() != "gloo":
        return float("nan")
    return psutil.Process().io_counters().write_chars


def ring_bytes(num_bytes):
    """Return the bytes that each rank sends in a ring all-reduce of so many bytes."""
    ranks = dist.get_world_size()
    return 2 * (ranks - 1) / ranks * num_bytes


def gradient_of(model):
    return torch.cat([weight.grad.flatten() for weight in trainable(model)])


def compare_ways(report, ways, batch, expected):
    """Check a step of each way; return rows of all-reduces and bytes sent."""
    gradient_error, byte_error, rows = 0.0, 0.0, []
    for name, way in ways.items():
        take_step(*way, batch)  # DDP settles its buckets in the first step
        dist.barrier()
        written = bytes_written()
        with CollectiveCounter() as counter:
            take_step(*way, batch)
        written = bytes_written() - written
        error = (gradient_of(way[0]) - expected).norm() / expected.norm()
        gradient_error = max(gradient_error, *runtime.gather(error.item()))
        sent = counter.bytes_sent["all_reduce"]
        byte_error = max(byte_error, abs(sent - ring_bytes(expected.nbytes)))
        calls = f"{counter.calls['all_reduce']}"
        rows.append([name, calls, f"{sent:,.0f}", f"{written / 1e6:.2f} MB"])
    report.check("gradient: largest relative error", gradient_error, 0, 1e-5)
    report.check("bytes sent: largest difference from a ring", byte_error, 0, 1)
    return rows


def time_ways(ways, batch, num_steps):
    """Return the median ms of a step of each way."""
    times = {name: [] for name in ways}
    for _ in range(num_steps):
        for name, way in ways.items():  # in turns, so that noise meets all ways
            dist.barrier()
            times[name].append(take_step(*way, batch))
    return {name: statistics.median(measured) for name, measured in times.items()}


def record_timeline(way, batch, path):
    """Profile a step, write its trace; return its spans (name, start, length) in ms."""
    with profile() as profiler:
        take_step(*way, batch)  # starting the profiler slows this step down
        dist.barrier()
        take_step(*way, batch)
    profiler.export_chrome_trace(path)
    events = profiler.events()
    start = max(event.time_range.start for event in events if event.name == "forward")
    return [
        (
            event.name,
            (event.time_range.start - start) / 1e3,
            event.time_range.elapsed_us() / 1e3,
        )
        for event in events
        if event.name.startswith(SPANS) and event.time_range.start >= start
    ]


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add, positive = parser.add_argument, cli.positive_int
    add("--micro-batch-size", type=positive, default=8, help="sequences per rank (8)")
    add(
        "--bucket-cap-mb",
        type=cli.positive_float,
        default=0.5,
        help="MiB per bucket (0.5)",
    )
    add(
        "--link-mbit",
        type=cli.positive_float,
        default=0,
        help="emulate a link of so many Mbit/s per rank (none)",
    )
    add("--max-steps", type=positive, default=6, help="timed steps of each way (6)")
    return parser.parse_args()


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as run:
        report = Report("01-ddp-basics/ddp_from_scratch.py", args, run)
        size = args.micro_batch_size * run.world_size
        sequences = Sequences(load_text(), seq_len=128)
        samples = [sequences[number % len(sequences)] for number in range(size)]
        global_batch = [part.to(run.device) for part in default_collate(samples)]
        batch = [part.chunk(run.world_size)[run.rank] for part in global_batch]
        bytes_per_second = args.link_mbit * 1e6 / 8
        group, link = slow_group(bytes_per_second)

        def build(rank):
            return build_transformer(PRESETS["tiny"], args.seed + rank, run.device)

        alone = build(rank=0)  # one process computes the global batch
        take_step(alone, lambda: None, global_batch)
        expected = gradient_of(alone)
        run.print0(f"{expected.numel():,} weights; {link}")

        early = []
        ways = build_ways(build, int(args.bucket_cap_mb * MIB), group, early)
        rows = compare_ways(report, ways, batch, expected)
        num_buckets = len(early) // 2  # of two steps
        name = "3-overlapped: all-reduces before the last gradient"
        report.check(name, sum(early[num_buckets:]), num_buckets - 1, 0)

        rows.insert(0, ["0-none", "0", "0", "0.00 MB"])
        ways = {"0-none": (alone, lambda: None)} | ways
        times = time_ways(ways, batch, args.max_steps)
        report.metrics["step_time_ms"] = times
        for row, step in zip(rows, times.values(), strict=True):
            row.append(f"{step:.1f} ms")
        report.table(rows, HEADERS)
        if group is not dist.group.WORLD:
            sending = ring_bytes(expected.nbytes) / bytes_per_second * 1e3
            run.print0(f"sending takes {sending:.1f} ms over this link")
        if args.output_dir:
            # Do not log that the profiler finds no GPU.
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")
            report.metrics["timeline"] = {
                name: record_timeline(
                    way, batch, f"{args.output_dir}/{name}-rank{run.rank}.json"
                )
                for name, way in ways.items()
            }
        return report.finish("every way gives the gradient of one process")


if __name__ == "__main__":
    cli.run(main)
