"""Draw when DDP computes and when it communicates, from what PyTorch's profiler saw.

    CPU   torchrun --standalone --nproc-per-node=2 01-ddp-basics/ddp_timeline.py
    GPU   torchrun --standalone --nproc-per-node=gpu 01-ddp-basics/ddp_timeline.py

Add --output-dir for the picture. Look for: with one bucket the all-reduce starts when backward
ends. With several, the first ones run beside backward. timeline.png shows it; the traces beside it
open in ui.perfetto.dev with all detail.

Sources: Li et al., PyTorch Distributed (VLDB 2020), sections 3.2.2 and 3.2.3; docs.pytorch.org,
torch.profiler.
"""

import json
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import ProfilerActivity, profile, record_function

from dist_common import data, measure, runtime
from dist_common.console import Console, plot_timeline
from dist_common.models import PRESETS, Transformer

WARMUP = 3  # steps: DDP settles its buckets in the first, and memory is there after the second
PROFILED = 3  # steps: a busy machine spoils one


def step(model, batch):
    """Take forward and backward, named for the profiler."""
    inputs, targets = batch
    with record_function("forward"):
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    with record_function("backward"):
        loss.backward()
        if inputs.is_cuda:
            torch.cuda.synchronize()  # else it ends when its kernels are queued
    model.zero_grad()


def trace_of(model, batch, path):
    """Profile some steps; return the events of the shortest as dictionaries, ts and dur in µs."""
    for _ in range(WARMUP):
        step(model, batch)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * batch[0].is_cuda
    traces = []
    for _ in range(PROFILED):
        dist.barrier()
        with profile(activities=activities, record_shapes=True) as profiler:
            step(model, batch)
        profiler.export_chrome_trace(str(path))
        traces.append(path.read_text())
    found = [[e for e in json.loads(t)["traceEvents"] if "dur" in e] for t in traces]
    shortest = min(found, key=lambda events: sum(spans_of(events)["DDP waits"][0]))
    path.write_text(traces[found.index(shortest)])
    return shortest


def spans_of(events):
    """Return (start, length) in ms from the start of forward, for each of four kinds of work."""
    start, ends = {}, {}
    for event in events:
        if event["name"] in ("forward", "backward") and event["cat"] == "user_annotation":
            start[event["name"]] = event["ts"]
            ends[event["name"]] = event["ts"] + event["dur"]
    sending = ("gloo:all_reduce", "ncclDevKernel_AllReduce")
    all_reduces = [event for event in events if event["name"].startswith(sending)]
    # The last gradient is known when the last function of autograd, or its kernel, has run. DDP
    # then waits for the all-reduces, inside the call of backward.
    kernels = [e for e in events if e["cat"] == "kernel" and e not in all_reduces]
    computing = kernels or [e for e in events if e["name"].startswith("autograd::engine")]
    known = max(event["ts"] + event["dur"] for event in computing)

    def span(begin, end):
        return (begin - start["forward"]) / 1e3, (end - begin) / 1e3

    return {
        "forward": [span(start["forward"], ends["forward"])],
        "backward": [span(start["backward"], known)],
        "all-reduce": sorted(span(e["ts"], e["ts"] + e["dur"]) for e in all_reduces),
        "DDP waits": [span(known, ends["backward"])],
    }


def hidden_ms(spans):
    """Return how much of the all-reduces' time lies within backward's."""
    ((start, length),) = spans["backward"]
    return sum(
        max(0.0, min(begin + duration, start + length) - max(begin, start))
        for begin, duration in spans["all-reduce"]
    )


def parse_args():
    parser = runtime.ArgumentParser(__doc__)
    add = parser.add_argument
    add("--micro-batch-size", type=runtime.positive_int, default=4, help="per rank and step (4)")
    add("--seq-len", type=runtime.positive_int, default=128, help="tokens per sequence (128)")
    add("--bucket-cap-mb", type=runtime.positive_float, default=0.5, help="MiB per bucket (0.5)")
    return parser.parse_args()


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        console = Console(world.is_rank0)
        results = measure.Results("01-ddp-basics/ddp_timeline.py", args, world, device)
        output = measure.claim_output_dir(args, world)
        runtime.seed_everything(args.seed)
        config = PRESETS["tiny"]
        if args.seq_len > config.max_seq_len:
            raise runtime.UsageError(f"--seq-len must be at most {config.max_seq_len}")
        needed = args.micro_batch_size * world.world_size
        text = data.Sequences(data.load_text(), args.seq_len, needed)
        items = [text[world.rank + i * world.world_size] for i in range(args.micro_batch_size)]
        batch = [torch.stack(part).to(device) for part in zip(*items, strict=True)]
        console.header(results, f"{config.num_parameters():,} weights")

        panels, rows = {}, []
        for name, cap in (("one bucket", 1e6), (f"{args.bucket_cap_mb:g} MiB", args.bucket_cap_mb)):
            ids = [device.index] if device.type == "cuda" else None
            model = DDP(Transformer(config).to(device), ids, bucket_cap_mb=cap)
            with tempfile.TemporaryDirectory() as folder:
                kept = output / f"trace-{name.split()[0]}.json" if output else None
                path = kept if kept and world.is_rank0 else Path(folder, "trace.json")
                events = trace_of(model, batch, path)
            spans = panels[name] = spans_of(events)
            with measure.CollectiveCounter() as counter:
                step(model, batch)
            seen, started = len(spans["all-reduce"]), counter.calls["allreduce_"]
            total, hidden = sum(length for _, length in spans["all-reduce"]), hidden_ms(spans)
            ((_, backward),) = spans["backward"]
            ((_, waited),) = spans["DDP waits"]
            times = (f"{value:.1f} ms" for value in (backward, total, hidden, waited))
            rows.append((name, str(seen), *times))
            shapes = [e["args"]["Input Dims"] for e in events if e["name"] == "c10d::allreduce_"]
            numbers, weights = sum(shape[0][0][0] for shape in shapes), config.num_parameters()
            results.check(f"{name}: numbers all-reduced", numbers, weights, 0, "one per weight")
            source = "calls counted in another step"
            results.check(f"{name}: spans of all-reduce", seen, started, 0, source)
            results.metrics[f"hidden_ms_{started}"] = hidden
        console.say("rank 0's view; a span of all-reduce also holds the wait for the other ranks")
        headers = (
            "buckets",
            "all-reduces",
            "backward",
            "in all-reduce",
            "beside backward",
            "waited",
        )
        console.table(rows, headers)
        if output and world.is_rank0:
            plot_timeline(output / "timeline.png", panels, "rank 0")
            results.write(output)
            console.say(f"timeline.png and the traces are in {output}")
        return console.verdict(results, "drawn from the profiler's trace")


if __name__ == "__main__":
    runtime.run(main)
