"""Whole runs of gradient_accumulation.py: every factorization, optimizers, a step's timeline."""

import argparse
import itertools
import json
import math
import statistics
import tempfile
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from acc_steps import DISTANCE, LR, TOLERANCE, Job, distance, tokens_in
from cp_memory import kept_for_backward
from dist_common import data, proofs, runtime
from dist_common.measure import RING_FACTOR, CollectiveCounter, StepTimer
from dist_common.report import figure
from link_group import slow_group

PROFILED = 3  # steps of each way: a busy machine spoils one
# The emulated link's spans hold gloo's, which are in the trace too: the first that is there counts.
SENDING = ("link:all_reduce", "gloo:all_reduce", "ncclDevKernel_AllReduce")
LABELS = {"neither": "does not compute"}
COLORS = {"forward": "C0", "backward": "C1", "neither": "0.75", "all-reduce": "C2"}


# every factorization


def check_factorizations(job: Job, train) -> list[torch.Tensor]:
    """Train an epoch in every factorization; check losses, weights and samples; print a table.

    Also measures the bytes kept for backward and the speed. Return the gradients of one process.
    """
    report, args = job.report, job.args
    losses, start, end, gradients = train_alone(job)
    moved = (end - start).abs().max()
    gradient_bytes = 4 * len(end)  # float32, also where layers compute in bfloat16
    rows = []
    for size in job.divisors:
        steps = args.global_batch_size // job.ranks // size
        name = f"{size} x {steps} x {job.ranks}"
        model = job.ddp()
        seen = watch_samples(model.module)
        optimizer = torch.optim.SGD(model.parameters(), LR)
        with CollectiveCounter() as counter:
            found = train(model, optimizer, epoch_of(job, size, steps))
        loss_error = (found - losses).abs().max().item()
        error = (proofs.flat(model.parameters()) - end).abs().max() / moved
        dist.all_reduce(error, op=dist.ReduceOp.MAX)
        source = "one process, the whole batch at once"
        report.check(f"{name}: largest error of a loss", loss_error, 0, TOLERANCE, source)
        report.check(f"{name}: weights, relative error", error.item(), 0, TOLERANCE, source)
        wrong = missed_or_repeated(job, seen)
        report.check(f"{name}: samples not seen exactly once", wrong, 0, 0, "the epoch's samples")
        sent, due = counter.bytes["allreduce_"], len(losses) * (gradient_bytes + 8 + 4)
        source = "per step a gradient, the number of tokens, a loss; whatever the accumulation"
        report.check(f"{name}, an epoch: bytes all-reduced", sent, due, 0, source)
        kept, (expected, source) = kept_bytes(job, size), kept_formula(job, size)
        tolerance = expected // 1000  # a GPU's attention kernels keep some numbers of their own
        report.check(f"{name}: bytes kept for backward", kept, expected, tolerance, source)
        rate = tokens_per_second(job, train, size, steps)
        errors = f"{loss_error:.1e}", f"{error:.1e}"
        rows.append((name, *errors, f"{sent // len(losses):,}", f"{kept:,}", f"{rate:,.0f} tok/s"))
        report.metrics |= {f"kept bytes, micro-batch {size}": kept, f"{name}: tok/s": rate}
    report.metrics |= {"losses": losses.tolist(), "factorizations": len(rows)}
    shown = ", ".join(f"{loss:.4f}" for loss in losses)
    report.say(f"{len(losses)} steps, {job.samples} sequences of 1 to {args.seq_len} tokens, "
               f"losses {shown}")  # fmt: skip
    errors, sizes = ("loss error", "weights error"), ("handed over", "bytes kept", "speed")
    headers = ("micro x acc. x ranks", *errors, *sizes)
    report.table(rows, headers)
    return gradients


def epoch_of(job: Job, size: int, steps: int):
    """Yield an epoch's steps on this rank: `steps` micro-batches of `size` sequences each."""
    args = argparse.Namespace(**vars(job.args))
    args.micro_batch_size, args.grad_accum_steps = size, steps
    sampler = data.ShardedSampler(job.samples, job.rank, job.ranks, args.seed)
    count = math.ceil(job.samples / args.global_batch_size)
    for step in itertools.islice(data.job_batches(job.ragged, sampler, args), count):
        yield [[tensor.to(job.device) for tensor in batch] for batch in step]


def train_alone(job: Job) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Train with each whole batch at once; return losses, weights before and after, gradients."""
    model = job.model()
    optimizer = torch.optim.SGD(model.parameters(), LR)
    start, losses, gradients = proofs.flat(model.parameters()), [], []
    for indices in job.order.split(job.args.global_batch_size):
        inputs, targets = job.batch(job.ragged, indices)
        loss = job.summed_loss(model, inputs, targets) / tokens_in(targets)
        loss.backward()
        losses.append(loss.detach())
        gradients.append(proofs.flat(p.grad for p in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses), start, proofs.flat(model.parameters()), gradients


def watch_samples(model) -> Counter:
    """Count every row of tokens that the model reads; rows of zeros only fill up a batch."""
    seen: Counter = Counter()

    def note(module, inputs):
        seen.update(tuple(row) for row in inputs[0].tolist() if any(row))

    model.register_forward_pre_hook(note)
    return seen


def missed_or_repeated(job: Job, seen: Counter) -> int:
    """Return how many samples of the epoch all ranks together did not see exactly once."""
    found = sum(runtime.gather(seen), Counter())
    due = Counter(tuple(job.ragged[index][0].tolist()) for index in job.order)
    return sum(abs(found[row] - due[row]) for row in found | due)


# memory


def kept_bytes(job: Job, size: int) -> int:
    """Return the bytes that autograd keeps for the backward of a micro-batch."""
    model = job.model()
    with kept_for_backward(model) as kept:
        job.summed_loss(model, *job.batch(job.even, range(size)))
    return sum(kept.values())


def kept_formula(job: Job, size: int) -> tuple[int, str]:
    """Return the bytes that a micro-batch of `size` sequences should keep, and where it is from.

    Per token and block: for each of two norms its input, what it scales, what it returns and a
    root; queries, attention's output twice (its heads are copied side by side), keys, values, a
    number per head; gate, its SiLU, up, their product. Head: a norm, probabilities, token, target.
    Per micro-batch: two rotary tables, and a number of the loss.
    """
    config, T = job.config, job.args.seq_len
    D, heads = config.dim, config.num_heads
    kv_dim = D // heads * config.num_kv_heads
    block = 9 * D + 2 * kv_dim + 4 * config.ffn_dim + heads + 2
    token = 4 * (config.num_layers * block + 3 * D + 1 + config.vocab_size) + 2 * 8
    once = 4 * (2 * T * D // heads // 2 + 1)
    if job.device.type == "cpu":
        return once + size * T * token, "sizes of the tensors that backward needs"
    # A GPU's norms and attention keep other tensors.
    return once + size * (kept_bytes(job, 1) - once), "proportional to the micro-batch size"


# speed


def tokens_per_second(job: Job, train, size: int, steps: int) -> float:
    """Time an epoch in which nothing is counted, after another one; counted tokens per second."""
    model = job.ddp()
    optimizer = torch.optim.SGD(model.parameters(), LR)
    batches = list(epoch_of(job, size, steps))
    timer = StepTimer(job.device, warmup=1)
    for _ in range(2):
        dist.barrier()
        with timer:
            train(model, optimizer, batches)
    tokens = sum(tokens_in(job.ragged[index][1]) for index in job.order)
    return tokens / timer.median_ms() * 1e3


# an unscaled gradient


def check_optimizers(job: Job, gradients: list[torch.Tensor]) -> None:
    """Feed optimizers with gradients, and with these times the accumulation; compare the moves."""
    steps, weights = job.args.grad_accum_steps, proofs.flat(job.model().parameters())
    clip = statistics.median(gradient.norm().item() for gradient in gradients)
    adam = {"lr": 1e-3, "weight_decay": 0.0}
    optimizers = {
        "SGD": (torch.optim.SGD, {"lr": 1e-3}, None),
        "AdamW, eps 1e-30": (torch.optim.AdamW, adam | {"eps": 1e-30}, None),
        "AdamW, eps 1e-8": (torch.optim.AdamW, adam | {"eps": 1e-8}, None),
        "AdamW, weight decay 0.1": (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1}, None),
        "AdamW, norm clipped": (torch.optim.AdamW, adam, clip),
        "Adam, L2 weight decay 0.1": (torch.optim.Adam, {"lr": 1e-3, "weight_decay": 0.1}, None),
    }
    rows = []
    for name, (kind, options, limit) in optimizers.items():
        moves = [move(weights, gradients, kind, options, limit, by) for by in (1, steps)]
        error = distance(moves[1], moves[0])
        rows.append((name, f"{error:.3%}"))
        job.report.metrics[f"unscaled: {name}"] = error
        if name in ("SGD", "AdamW, eps 1e-30"):
            due = steps - 1 if name == "SGD" else 0
            claim = f"{name}: {DISTANCE}"
            job.report.check(
                claim, error, due, 1e-4 * steps, "linear in the gradient, or free of its size"
            )
    job.report.say(
        f"gradients x {steps}, {len(gradients)} steps: how far the weights' moves differ"
    )
    job.report.table(rows, ("optimizer", "difference"))


def move(weights, gradients, kind, options, limit, scale) -> torch.Tensor:
    """Return how an optimizer moves the weights by some gradients times `scale`."""
    weight = weights.clone().requires_grad_()
    optimizer = kind([weight], **options)
    for gradient in gradients:
        weight.grad = gradient * scale
        if limit:
            torch.nn.utils.clip_grad_norm_([weight], limit)
        optimizer.step()
    return weight.detach() - weights


# the timeline


def profile_steps(job, ways, factors_of) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Profile a step of each way over --link, and check its all-reduces; return spans by kind.

    Units: a span is (start, length) in ms from the start of the step.
    """
    report, steps = job.report, job.args.grad_accum_steps
    group, how = slow_group(job.args.link)
    report.say(how)
    micro_batches = job.dealt(job.even)
    factors = factors_of(micro_batches)
    buckets = report.metrics["buckets"]
    found = {}
    for name, way in ways.items():
        model = job.ddp(group)
        if job.device.type == "cuda":  # else a call ends when its kernels are queued
            model.register_forward_pre_hook(lambda *_: torch.cuda.synchronize())
            model.register_forward_hook(lambda *_: torch.cuda.synchronize())
        traces = [spans_of(profile_once(job, way, model, micro_batches, factors))
                  for _ in range(PROFILED)]  # fmt: skip
        found[name] = spans = min(traces, key=end_of)
        early = sum(start < spans["forward"][-1][0] for start, _ in spans["all-reduce"])
        before = (steps - 1) * buckets if name == "send each" else 0
        for what, measured, expected in (
            ("trace", len(spans["all-reduce"]), before + buckets),
            ("before the last forward", early, before),
        ):
            claim = f"{name}, {what}: all-reduces per step"
            report.check(claim, measured, expected, 0, "DDP paper, section 3.2.4")
        waited = sum(length for _, length in spans["neither"])
        report.metrics |= {f"{name}: step ms": end_of(spans), f"{name}: waited ms": waited}
    once = RING_FACTOR["all_reduce"](job.ranks) * 4 * job.config.num_parameters()
    once_ms = once / job.args.link * 1e3 if job.args.link else 0.0
    rows = []
    for name, spans in found.items():
        times = end_of(spans), report.metrics[f"{name}: waited ms"]
        least = len(spans["all-reduce"]) // buckets * once_ms
        report.metrics[f"{name}: sending ms"] = least
        shown = [f"{value:.1f} ms" for value in times] + [f"{least:.1f} ms" if once_ms else "-"]
        rows.append((name, str(len(spans["all-reduce"])), *shown))
    headers = ("profiled step, rank 0", "all-reduces", "step", "does not compute", "link busy")
    report.table(rows, headers)
    return found


def profile_once(job, way, model, micro_batches, factors) -> list[dict]:
    """Return the events of a step; an event's start `ts` and length `dur` are in µs."""
    model.zero_grad()
    dist.barrier()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (job.device.type == "cuda")
    with profile(activities=activities) as profiler, record_function("accumulated step"):
        way(model, micro_batches, factors)
        if job.device.type == "cuda":
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return [e for e in json.loads(path.read_text())["traceEvents"] if "dur" in e]


def spans_of(events: list[dict]) -> dict[str, list[tuple[float, float]]]:
    """Return (start, length) in ms of each micro-batch's forward, backward and rest, and of sends.

    Backward ends with the last gradient; the time from there to the next forward is neither.
    """

    def ends(event):
        return event["ts"] + event["dur"]

    def span(begin, end):
        return (begin - step["ts"]) / 1e3, (end - begin) / 1e3

    (step,) = (e for e in events if e["name"] == "accumulated step" and "user" in e["cat"])
    forwards = sorted((e for e in events if e["name"] == "DistributedDataParallel.forward"
                       and e["cat"] != "gpu_user_annotation"), key=lambda e: e["ts"])  # fmt: skip
    found = ([e for e in events if e["name"].startswith(name)] for name in SENDING)
    sends = next(filter(None, found), [])
    kernels = [e for e in events if e["cat"] == "kernel" and e not in sends]
    functions = "autograd::engine::evaluate_function"
    computing = kernels or [e for e in events if e["name"].startswith(functions)]
    borders = [event["ts"] for event in forwards[1:]] + [ends(step)]
    spans = {"forward": [], "backward": [], "neither": []}
    for forward, border in zip(forwards, borders, strict=True):
        known = max(ends(e) for e in computing if ends(forward) < ends(e) <= border)
        spans["forward"].append(span(forward["ts"], ends(forward)))
        spans["backward"].append(span(ends(forward), known))
        spans["neither"].append(span(known, border))
    return spans | {"all-reduce": sorted(span(e["ts"], ends(e)) for e in sends)}


def end_of(spans) -> float:
    """Return the ms from the start of a step to its end."""
    return sum(spans["neither"][-1])


def draw_steps(path, steps) -> None:
    """Draw a panel for each way, one scale: what the rank computes, and what it sends."""
    titles = {
        "send each": "all-reduce in every micro-batch",
        "no_sync": "no_sync: all-reduce in the last one",
    }
    options = {"figsize": (9, 4.2), "sharex": True}
    with figure(path, len(steps), 1, **options) as axes:
        for panel, (name, spans) in zip(axes, steps.items(), strict=True):
            for kind, color in COLORS.items():
                row = 1 if kind == "all-reduce" else 0
                edge = {"facecolor": color, "edgecolor": "white", "linewidth": 0.5}
                panel.broken_barh(
                    spans[kind], (row - 0.38, 0.76), label=LABELS.get(kind, kind), **edge
                )
            for number, (start, _) in enumerate(spans["forward"], 1):
                panel.axvline(start, color="0.4", linewidth=0.6, linestyle=":")
                panel.text(start, -0.46, f" {number}", fontsize=8, va="bottom", color="0.3")
            panel.set_yticks((0, 1), ("computes", "sends"))
            panel.set_ylim(1.5, -0.75)
            panel.set_title(titles[name], fontsize=10, loc="left")
            panel.grid(axis="x", alpha=0.3)
        axes[0].legend(ncols=4, fontsize=8, loc="lower right", bbox_to_anchor=(1, 1))
        axes[-1].set_xlabel("ms from the start of the step, rank 0; numbers are micro-batches")
