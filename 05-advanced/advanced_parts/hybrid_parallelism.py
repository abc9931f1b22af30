"""What hybrid_parallelism.py proves: first steps of one process, bytes of each axis, layout."""

import copy
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from advanced_parts.hybrid_sends import (
    SHOWN_AXES,
    check_bytes,
    check_overlap,
    choices,
    data_axis,
    experts_axis,
    sums_begun,
)
from dist_common import data, measure, models, runtime
from dist_common.costs import job as costs
from dist_common.costs import memory
from dist_common.costs.axes import axes_of, bytes_per_weight
from dist_common.costs.hardware import Cluster, Gpu
from dist_common.costs.models import of_config
from dist_common.costs.rates import RATES
from dist_common.costs.step import step_seconds
from dist_common.job import Step, lr_at
from dist_common.lab import proofs
from dist_common.lab.traffic import TrafficCounter
from dist_common.layout import SPLIT_BACKWARD
from dist_common.models import local

# Relative, after AdamW's first step: it turns the rounding of a gradient's smallest numbers into
# whole steps of the learning rate. Another batch or rate changes loss or norm by percents.
TRAINED = 1e-3
# Of the costs' rates those of what reaches all that it is given; the others take no time.
REACHED = ("matrix.other", "attention.other", "attention.backward", "hbm", "link.ring")
FREE = dict.fromkeys(RATES, 0.0) | dict.fromkeys((*REACHED, "network.rate"), 1.0)


def proven_steps(run, steps: Iterable[Step], accumulate_gradient: Callable) -> Iterator[Step]:
    """Say where each rank is; yield the run's steps between the proofs."""
    say_layout(run)

    def before() -> None:
        check_gradient(run, accumulate_gradient)
        if run.job.args.init_from and not run.job.found:
            check_files(run, run.job.args.init_from)

    def after() -> None:
        check_replicas(run)
        say_plan(run)

    compared = same_steps(run, steps)
    yield from proofs.proven_steps(run.job, compared, run.model, run.optimizer, before, after)


def check_files(run, folder: str, kind: str = "") -> None:
    """Compare the weights in a folder's files with this rank's parts."""
    group = run.job.store.group
    proofs.same_as_files(run.job.report, run.model, run.model.config, folder, group, kind)


def check_gradient(run, accumulate_gradient: Callable) -> None:
    """Compare a gradient and its loss with those of one process, and bytes with the formulas.

    With --parity-steps 0 only the bytes are compared. Weights and data stay where they are.
    """
    job, args = run.job, run.job.args
    sampler = job.sampler.at_start()
    batches = data.job_batches(job.train_set, sampler, args)
    orders = list(islice(sampler.ahead(args.global_batch_size), 2))
    accumulate_gradient(run, next(batches))  # the first one settles FSDP's and the stages' buffers
    run.optimizer.zero_grad()
    batch = next(batches)
    with TrafficCounter() as counter, sums_begun(run, counter) as begun, choices(run) as chosen:
        loss_sum = accumulate_gradient(run, batch)
    if args.compile:  # which the counter does not see: this one is to be compared
        run.optimizer.zero_grad()
        loss_sum = accumulate_gradient(run, batch)
    if args.parity_steps:
        items = [job.train_set[index] for index in orders[1]]
        alone, _ = one_process(run)
        proofs.same_as_one_process(job, run.model, alone, items, loss_sum, run.tokens)
    else:
        job.report.say("not compared with one process (--parity-steps 0)")
    run.optimizer.zero_grad()
    check_bytes(run, counter, chosen)
    check_overlap(run, *begun)


def one_process(run) -> tuple[models.Transformer, torch.optim.AdamW]:
    """Return the whole model and its optimizer: drawn from the seed, or of the checkpoint."""
    job = run.job
    model = proofs.whole_model(job, run.model.config)
    optimizer = torch.optim.AdamW(model.parameters(), job.args.lr, (0.9, 0.95), weight_decay=0.1)
    if job.found:
        store = copy.copy(job.store)
        store.model = model
        store.optimizer = optimizer
        store.read(job.found[0])
    return model, optimizer


def steps_alone(run, count: int) -> Iterator[tuple[float, float]]:
    """Take the run's next steps in one process; yield the loss and the gradient norm of each."""
    job, args = run.job, run.job.args
    if not count:  # the whole model may not fit
        return
    model, optimizer = one_process(run)
    ahead = islice(job.sampler.ahead(args.global_batch_size), count)
    for number, indices in enumerate(ahead, job.step + 1):
        items = [job.train_set[index] for index in indices]
        inputs, targets = (x.to(job.device) for x in data.collate(len(items), args.seq_len, items))
        tokens = (targets != data.IGNORED).sum()
        losses = []
        micro_batches = (side.split(args.micro_batch_size) for side in (inputs, targets))
        for x, y in zip(*micro_batches, strict=True):
            mixed = args.precision == "bf16-mixed"
            with torch.autocast(job.device.type, torch.bfloat16, enabled=mixed):
                logits = model(x).float().flatten(0, 1)
            losses.append(F.cross_entropy(logits, y.flatten(), reduction="sum") / tokens)
            losses[-1].backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(number, args)
        optimizer.step()
        optimizer.zero_grad()
        yield sum(losses).item(), norm.item()


def same_steps(run, steps: Iterable[Step]) -> Iterator[Step]:
    """Yield steps; end them when the first --parity-steps differ from those of one process.

    What a gradient before training cannot show: clipping, zero_grad, learning rate, the batches.
    """
    report, args = run.job.report, run.job.args
    expected = list(steps_alone(run, args.parity_steps))
    tolerance = proofs.tolerance_of(args)
    for (loss, norm), step in zip(expected, steps, strict=False):
        yield step
        total = step.loss_sum.detach().clone()
        dist.all_reduce(total)
        if not math.isfinite(total):  # the job says where it began, and ends the run
            break
        found = (total / step.tokens).item() / loss, float(step.norm) / norm
        error = max(runtime.gather(max(abs(ratio - 1) for ratio in found)))
        name = f"step {step.number}: relative error of loss and gradient norm"
        report.check(name, error, 0, tolerance, "one process")
        tolerance = max(TRAINED, tolerance)
    if not report.failed:
        yield from steps


def check_replicas(run) -> None:
    """Check that ranks that hold the same part of a weight hold the same bits."""
    own = {}
    for name, weight in run.model.named_parameters():
        place = ()
        if isinstance(weight, DTensor):
            coordinates = zip(weight.device_mesh.get_coordinate(), weight.placements, strict=True)
            place = tuple(None if cut.is_replicate() else number for number, cut in coordinates)
        content = local(weight).detach().cpu().flatten().view(torch.uint8).numpy()
        own[name, place] = hashlib.sha256(content).hexdigest()
    copies = {part for rank in runtime.gather(own) for part in rank.items()}
    differing = len(copies) - len({part for part, _ in copies})
    name = "parts of weights whose copies differ between ranks"
    run.job.report.check(name, differing, 0, 0, "replicas stay equal")


def plan_of(run) -> tuple[costs.Job, costs.Layout]:
    """Return what a run trains, and its layout, as the costs have them."""
    args, shape = run.job.args, of_config(run.model.config)
    job = costs.Job(shape, args.seq_len, args.global_batch_size, stack="hybrid_parallelism")
    zero = {"replicate": 0, "grad-op": 2, "full": 3}[args.data_parallel]
    if args.dp * args.cp == 1:
        zero = 0  # nobody to share with
    return job, costs.Layout(
        *(args.tp, args.cp, args.pp, args.dp, args.ep),
        zero=zero,
        micro_batch=args.micro_batch_size,
        recompute=args.activation_checkpointing,
        virtual_stages=len(run.stages),
        cp_kind="gather",
    )


def say_plan(run) -> None:
    """Print what combining.py plans of this layout beside what the run counted. A collective.

    Of bf16-mixed, and where the plan has what the run does. Seconds are planned at the rate that a
    product of a block reaches here, on all ranks at once, with sends that take no time.
    """
    args, job = run.job.args, run.job
    unplanned = args.schedule in ("gpipe", *SPLIT_BACKWARD)
    unplanned |= args.activation_checkpointing == "selective" or bool(args.float8)
    if args.precision != "bf16-mixed" or unplanned:
        return
    plan, layout = plan_of(run)
    tflops = min(runtime.gather(product_tflops(run)))
    here = of_products(tflops, args.ranks_per_node)
    sent = planned_bytes(args, plan, layout, here)
    counted = job.report.metrics["bytes_per_axis"]
    held = sum(memory.memory_of(plan, layout).values())
    peak = max(runtime.gather(measure.peak_memory_gib(job.device)))
    # On the CPU a process's memory is libraries, which hide its tensors.
    seen = f"{peak:.3f} GiB" if job.device.type == "cuda" else "-"
    rows = [(f"bytes sent along {axis}", sent[axis], counted[axis]) for axis in counted]
    rows = [(name, f"{first:,}", f"{second:,}") for name, first, second in rows if first]
    rows.append(("on the fullest rank", f"{held / measure.GIB:.3f} GiB", seen))
    name = f"compute and bubble, at {1e3 * tflops:,.0f} GFLOP/s; all"
    times = 1e3 * step_seconds(plan, layout, here, FREE), job.timer.median_ms()
    rows.append((name, *(f"{time:,.1f} ms" for time in times)))
    job.report.table(rows, ("of a step", "combining.py", "this run"), names=1)
    job.report.metrics["planned_bytes_per_axis"] = dict(sent)


def planned_bytes(args, plan: costs.Job, layout: costs.Layout, cluster: Cluster) -> Counter:
    """Return what a rank sends along each axis in a step, if experts get equally many tokens."""
    axes = axes_of(plan, layout, cluster)
    sent = Counter({axis: each.step_bytes for axis, each in axes.items() if axis != "dp"})
    dense, experts = max(memory.weights_of_stage(plan, layout, s) for s in range(layout.pp))
    sent[data_axis(args)] += dense * bytes_per_weight(plan, layout)
    # Each expert has as many copies as a job of dp / ep has of everything.
    fewer = replace(plan, global_batch=plan.global_batch // layout.ep)
    copies = replace(layout, dp=layout.dp // layout.ep)
    sent[experts_axis(args)] += experts * bytes_per_weight(fewer, copies)
    return Counter({axis: round(size) for axis, size in sent.items()})


def of_products(tflops: float, gpus_per_node: int) -> Cluster:
    """Return a cluster that computes at the rate of a product; all else takes no time (FREE)."""
    rates = {"bf16": tflops, "fp16": tflops}
    gpu = Gpu("measured", math.inf, rates, math.inf, math.inf, "product_tflops", family="other")
    return Cluster(gpu, gpus_per_node, math.inf)


def product_tflops(run) -> float:
    """Return the rate of a micro-batch's product with a block's largest matrix. A collective."""
    args, device = run.job.args, run.job.device
    rows = args.micro_batch_size * len(run.positions)
    config, kind = run.model.config, torch.bfloat16
    x = torch.randn(rows, config.dim, device=device, dtype=kind)
    matrix = torch.randn(config.dim, config.ffn_dim // args.tp, device=device, dtype=kind)
    timer = measure.StepTimer(device, warmup=5)
    dist.barrier()
    for _ in range(20):
        with timer:
            x @ matrix
    return 2 * x.numel() * matrix.shape[1] / timer.median_ms() / 1e9


def say_layout(run):
    """Print for each axis its size, the group of rank 0, and whether that group leaves a node."""
    rows, meshes = [], {axis: run.mesh[axis] for axis in SHOWN_AXES}
    if run.expert_meshes:
        meshes["ep, of dp"] = run.expert_meshes[0]
    for axis, mesh in meshes.items():
        group = mesh.mesh.tolist()
        nodes = {rank // run.job.args.ranks_per_node for rank in group}
        link = "-" if len(group) == 1 else "within a node" if len(nodes) == 1 else "between nodes"
        shown = " ".join(map(str, group[:8])) + " ..." * (len(group) > 8)
        rows.append((axis, str(len(group)), shown, link))
    run.job.report.table(rows, ("axis", "ranks", "group of rank 0", "its link"), names=1)
