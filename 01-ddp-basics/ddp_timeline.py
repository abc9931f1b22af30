"""Draw when DDP computes and when it communicates, from what PyTorch's profiler saw.

    CPU   torchrun --standalone --nproc-per-node=2 01-ddp-basics/ddp_timeline.py
    GPU   torchrun --standalone --nproc-per-node=gpu 01-ddp-basics/ddp_timeline.py

Add --output-dir for the picture. Look for: with one bucket the all-reduce starts when backward
ends. With several, the first ones run beside backward. timeline.png shows it; the traces beside it
open in ui.perfetto.dev with all detail.

Sources: Li et al., PyTorch Distributed (VLDB 2020), sections 3.2.2 and 3.2.3; docs.pytorch.org,
torch.profiler.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import record_function

from legacy_common import cli, data, models, runtime
from legacy_common.lab import traffic
from legacy_common.lab.figure import figure
from legacy_common.lab.trace import trace
from legacy_common.report import Report

WARMUP = 3  # steps: DDP settles its buckets in the first, and memory is there after the second
PROFILED = 3  # steps: a busy machine spoils one


def take_step(model, batch):
    """Take forward and backward, named for the profiler."""
    inputs, targets = batch
    with record_function("forward"):
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    with record_function("backward"):
        loss.backward()
        if inputs.is_cuda:
            torch.cuda.synchronize()  # else it ends when its kernels are queued
    model.zero_grad()


def profile_step(model, batch, path):
    """Profile some steps; keep the trace of the one that waited least; return its events.

    An event is a dictionary; its start `ts` and length `dur` are in µs.
    """
    for _ in range(WARMUP):
        take_step(model, batch)
    found = {}
    for _ in range(PROFILED):
        dist.barrier()
        events = trace(lambda: take_step(model, batch), batch[0].device, path)
        found[sum(spans_of(events)["DDP waits"][0])] = events, path.read_text()
    shortest, text = found[min(found)]
    path.write_text(text)
    return shortest


def spans_of(events):
    """Return (start, length) in ms from the start of forward, for each of four kinds of work."""
    start = {}
    ends = {}
    for event in events:
        if event["name"] in ("forward", "backward") and event["cat"] == "user_annotation":
            start[event["name"]] = event["ts"]
            ends[event["name"]] = event["ts"] + event["dur"]
    sending = ("gloo:all_reduce", "ncclDevKernel_AllReduce")
    all_reduces = [event for event in events if event["name"].startswith(sending)]
    # The last gradient is known when the last function of autograd, or its kernel, has run. DDP
    # then waits for the all-reduces, inside the call of backward.
    kernels = [e for e in events if e["cat"] == "kernel" and e not in all_reduces]
    computing = kernels or functions_of_autograd(events)
    known = max(event["ts"] + event["dur"] for event in computing)

    def span(begin, end):
        return (begin - start["forward"]) / 1e3, (end - begin) / 1e3

    return {
        "forward": [span(start["forward"], ends["forward"])],
        "backward": [span(start["backward"], known)],
        "all-reduce": sorted(span(e["ts"], e["ts"] + e["dur"]) for e in all_reduces),
        "DDP waits": [span(known, ends["backward"])],
    }


def functions_of_autograd(events):
    """Return the events of backward's functions; the last one stores the last gradient."""
    return [e for e in events if e["name"].startswith("autograd::engine::evaluate_function")]


def calls_of_all_reduce(events):
    """Return the events in which DDP hands a bucket to the process group."""
    return [e for e in events if e["name"] == "c10d::allreduce_"]


def begun_early(events):
    """Count the all-reduces that DDP called before backward's last function."""
    last = max(event["ts"] for event in functions_of_autograd(events))
    return sum(event["ts"] < last for event in calls_of_all_reduce(events))


def hidden_ms(spans):
    """Return how much of the all-reduces' time lies within backward's."""
    ((start, length),) = spans["backward"]
    return sum(
        max(0.0, min(begin + duration, start + length) - max(begin, start))
        for begin, duration in spans["all-reduce"]
    )


def profile_buckets(report, config, batch, name, cap):
    """Profile a step with buckets of `cap` MiB and check it; return its spans and its table row."""
    ids = [report.device.index] if report.device.type == "cuda" else None
    model = DDP(models.Transformer(config).to(report.device), ids, bucket_cap_mb=cap)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        if report.output and report.world.is_rank0:
            path = report.output / f"trace-{name.split()[0]}.json"
        events = profile_step(model, batch, path)
    spans = spans_of(events)
    with traffic.TrafficCounter() as counter:  # in another step: the profiler is no witness here
        take_step(model, batch)
    check_trace(report, name, events, spans, counter.calls["all_reduce"], config.num_parameters())
    ((_, backward),) = spans["backward"]
    ((_, waited),) = spans["DDP waits"]
    sending = sum(length for _, length in spans["all-reduce"])
    times = (f"{value:.1f} ms" for value in (backward, sending, hidden_ms(spans), waited))
    return spans, (name, str(len(spans["all-reduce"])), *times)


def check_trace(report, name, events, spans, counted, weights):
    """Check that the trace holds every all-reduce, and that only the last one begins late."""
    shapes = [event["args"]["Input Dims"] for event in calls_of_all_reduce(events)]
    numbers = sum(shape[0][0][0] for shape in shapes)
    report.check(f"{name}: numbers all-reduced", numbers, weights, 0, "one per weight")
    spans_seen = len(spans["all-reduce"])
    source = "calls counted in another step"
    # Of one rank's tensor NCCL has nothing to add, and starts no kernel.
    silent = report.device.type == "cuda" and report.world.world_size == 1
    report.check(f"{name}: spans of all-reduce", spans_seen, counted * (not silent), 0, source)
    source = "all but the last bucket, DDP paper, section 3.2.3"
    claim = f"{name}: begun before the last gradient"
    report.check(claim, begun_early(events), counted - 1, 0, source)
    report.metrics[f"hidden_ms_{counted}"] = hidden_ms(spans)


def draw(path, panels, title):
    """Draw spans of time: a panel for each entry, in it a row for each kind of work.

    Units: a span is (start, length) in ms; the panels share one axis.
    """
    heights = [len(rows) for rows in panels.values()]
    size = (9, 0.5 + 0.6 * sum(heights))
    options = {"sharex": True, "squeeze": False, "height_ratios": heights}
    with figure(path, len(panels), 1, figsize=size, **options) as axes:
        for panel, (name, rows) in zip(axes[:, 0], panels.items(), strict=True):
            for number, spans in enumerate(rows.values()):
                place = (number - 0.35, 0.7)
                panel.broken_barh(spans, place, facecolor=f"C{number}", edgecolor="white")
            panel.set_yticks(range(len(rows)), rows)
            panel.invert_yaxis()
            panel.set_title(f"{name} ({title})", fontsize=10, loc="left")
            panel.grid(axis="x", alpha=0.3)
        axes[-1, 0].set_xlabel("ms")


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    add("--micro-batch-size", type=cli.positive_int, default=4, help="per rank and step (4)")
    add("--seq-len", type=cli.positive_int, default=128, help="tokens per sequence (128)")
    add("--bucket-cap-mb", type=cli.positive_float, default=0.5, help="MiB per bucket (0.5)")
    return parser.parse_args()


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("01-ddp-basics/ddp_timeline.py", args, world, device)
        runtime.seed_everything(args.seed)
        config = models.preset("tiny", args.seq_len)
        size = args.micro_batch_size
        text = data.Sequences(data.load_text(), args.seq_len, size * world.world_size)
        batch = next(data.batches_of(text, 1, size, world.rank * size, size, device))
        report.start(f"{config.num_parameters():,} weights")
        panels = {}
        rows = []
        for name, cap in (("one bucket", 1e6), (f"{args.bucket_cap_mb:g} MiB", args.bucket_cap_mb)):
            panels[name], row = profile_buckets(report, config, batch, name, cap)
            rows.append(row)
        report.say("rank 0's view; a span of all-reduce also holds the wait for the other ranks")
        times = ("backward", "in all-reduce", "beside backward", "waited")
        report.table(rows, ("buckets", "all-reduces", *times))
        if report.output and world.is_rank0:
            draw(report.output / "timeline.png", panels, "rank 0")
            report.say(f"timeline.png and the traces are in {report.output}")
        return report.finish("drawn from the profiler's trace")


if __name__ == "__main__":
    cli.run(main)
