"""Hide communication behind computation: six ways to send, as the profiler sees them.

    CPU   torchrun --standalone --nproc-per-node=2 05-advanced/communication_overlap.py
    GPU   torchrun --standalone --nproc-per-node=gpu \
              05-advanced/communication_overlap.py --width 8192

Look for: the collectives during which a matrix product runs. The computation hides
them; all others are exposed. With --output-dir each rank writes its traces.

Sources: Li et al., PyTorch Distributed (VLDB 2020), section 3.2.3; Zhao et al., PyTorch
FSDP (VLDB 2023), section 3.3.
"""

import os
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import DeviceType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import profile

from dist_common import check, cli, runtime
from dist_common.links import slow_group
from dist_common.report import Report

NUM_LAYERS = 4  # L; the weight of each is a matrix of D x D
BATCH = 32  # B, samples per rank


# The same all-reduce and the same matrix product


def wait_at_once(tensor, x, group):
    """Wait for the sum, then compute."""
    work = dist.all_reduce(tensor, group=group, async_op=True)
    work.wait()
    return x @ x


def wait_late(tensor, x, group):
    """Compute while the sum is on its way. Before `wait()`, do not touch the tensor."""
    work = dist.all_reduce(tensor, group=group, async_op=True)  # returns at once
    product = x @ x
    work.wait()
    return product


# The same model and the same gradient


def use_ddp(model, group, layers_per_bucket):
    """All-reduce each bucket of gradients as soon as it is complete."""
    layer_mib = model[0].weight.nbytes / 2**20
    cap = layers_per_bucket * layer_mib
    return DDP(model, process_group=group, bucket_cap_mb=cap)


def use_fsdp(model, group, prefetch):
    """Gather the weights of a layer when it needs them, or one layer earlier."""
    mesh = DeviceMesh.from_group(group, model[0].weight.device.type)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if prefetch:
        for layer, following in pairwise(model):
            layer.set_modules_to_forward_prefetch([following])
        # Without this call a CPU waits where it starts a gather. GPUs do not need the
        # call, and there is no public one.
        model._set_unshard_async_op(True)
    return model


def take_step(model, x):
    """Leave the gradient of the mean square in the model. Shapes: x is (B, D)."""
    model.zero_grad()
    model(x).square().mean().backward()


# Measurement


def record_spans(step, device, trace=None):
    """Profile a step; return the spans of its matrix products and of its collectives.

    A span is (start, end) in us. On a GPU every kernel but NCCL's counts as a product.
    trace: the path of a file to write, or None.
    """
    dist.barrier()
    with profile() as profiler:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    if trace:
        profiler.export_chrome_trace(trace)
    products, collectives = [], []
    for event in profiler.events():
        span = event.time_range.start, event.time_range.end
        if event.name.startswith(("link:", "ncclDevKernel")):
            collectives.append(span)
        elif event.name == "aten::mm" if device.type == "cpu" else is_kernel(event):
            products.append(span)
    return products, collectives


def is_kernel(event):
    return event.device_type == DeviceType.CUDA and not event.name.startswith("Mem")


def count_hidden(products, collectives):
    """Count the collectives during which a matrix product runs."""
    return sum(
        any(start < sent and sending < end for start, end in products)
        for sending, sent in collectives
    )


def build_model(width, seed, device):
    """Return the same layers on every rank."""
    torch.manual_seed(seed)
    layers = [nn.Linear(width, width, bias=False) for _ in range(NUM_LAYERS)]
    return nn.Sequential(*layers).to(device)


def build_ways(build, batch, group):
    """Return the four models by name, and a function that takes a step in each way."""
    models = {
        "ddp-one-bucket": use_ddp(build(), group, layers_per_bucket=NUM_LAYERS),
        "ddp-buckets": use_ddp(build(), group, layers_per_bucket=1),
        "fsdp": use_fsdp(build(), group, prefetch=False),
        "fsdp-prefetch": use_fsdp(build(), group, prefetch=True),
    }
    x = torch.ones(batch.shape[1], batch.shape[1], device=batch.device)
    steps = {
        "wait-at-once": partial(wait_at_once, x.clone(), x, group),
        "wait-late": partial(wait_late, x.clone(), x, group),
    }
    for name, model in models.items():
        steps[name] = partial(take_step, model, batch)
    return models, steps


def gradient_of(model):
    """Return the whole gradient as one vector. A collective."""
    return torch.cat([check.whole(w.grad).flatten() for w in model.parameters()])


def gathers_sent(name):
    """Return the bytes that a step sends, in gathers of a layer's weight."""
    if name.startswith("wait"):
        return 2  # an all-reduce sends twice as much as a gather
    if name.startswith("ddp"):
        return 2 * NUM_LAYERS
    return 3 * NUM_LAYERS  # gathers for forward and backward, and a reduce-scatter


def check_hidden(report, hidden, ranks):
    """Compare the hidden collectives with the number that the order allows."""
    pairs = NUM_LAYERS - 1  # one layer computes while its neighbor sends
    expected = {"wait-late": 1, "ddp-buckets": pairs, "fsdp-prefetch": 2 * pairs}
    for name, count in expected.items():
        count = count if ranks > 1 else 0  # one rank sends nothing
        report.check(f"{name}: hidden collectives", hidden[name], count, 0)
    others = sum(count for name, count in hidden.items() if name not in expected)
    report.check("other ways: hidden collectives", others, 0, 0)


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    add("--width", type=cli.positive_int, default=240, help="D, of each layer (240)")
    add(
        "--link-mbit",
        type=cli.positive_float,
        default=40,
        help="speed of the emulated link between CPU ranks, in Mbit/s (40)",
    )
    return parser.parse_args()


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as run:
        ranks = run.world_size
        if args.width % ranks:
            raise cli.UsageError(f"--width must be a multiple of the {ranks} ranks")
        report = Report("05-advanced/communication_overlap.py", args, run)
        group, link = slow_group(args.link_mbit * 1e6 / 8)
        run.print0(link)
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # do not log a missing GPU
        build = partial(build_model, args.width, args.seed, run.device)
        alone = build()  # one process computes the global batch
        global_batch = torch.randn(BATCH * ranks, args.width).to(run.device)
        take_step(alone, global_batch)
        expected = gradient_of(alone)
        batch = global_batch.chunk(ranks)[run.rank]
        models, steps = build_ways(build, batch, group)

        rows, hidden, sent = [], {}, {}
        for name, step in steps.items():
            step()  # DDP settles its buckets after its first step
            with check.CollectiveCounter() as counter:
                step()
            del counter.bytes_sent["broadcast"]  # DDP sends the sizes of its buckets
            sent[name] = round(counter.bytes_sent.total())
            trace = args.output_dir and f"{args.output_dir}/{name}-rank{run.rank}.json"
            products, collectives = record_spans(step, run.device, trace)
            hidden[name] = count_hidden(products, collectives)
            exposed = len(collectives) - hidden[name]
            rows.append((name, hidden[name], exposed, f"{sent[name]:,}"))
        report.table(rows, ("way", "hidden", "exposed", "bytes sent"))

        errors = [
            ((gradient_of(model) - expected).norm() / expected.norm()).item()
            for model in models.values()
        ]
        worst = torch.tensor(runtime.gather(errors)).max().item()
        report.check("gradient: largest relative error", worst, 0, 1e-5)
        gather = (
            (ranks - 1) / ranks * 4 * args.width**2
        )  # bytes, for the weight of a layer
        difference = max(abs(sent[name] - gathers_sent(name) * gather) for name in sent)
        report.check(
            "bytes sent: largest difference from the formula", difference, 0, 1
        )
        if run.device.type == "cpu":  # the emulated link is slow on any machine
            check_hidden(report, hidden, ranks)
        report.metrics["hidden"] = hidden
        return report.finish(
            "one gradient in four ways, hidden or exposed as predicted"
        )


if __name__ == "__main__":
    cli.run(main)
