"""`combining.py plan` and `predict --model resnet50`: images instead of tokens, replicas alone.

DDP and ZeRO-1 by micro-batch: 25.6e6 weights need no other axis. `predict` takes a GPU's whole
batch unless told. dist_common/costs/resnet.py has the formulas.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace

from advanced_parts import plan_text
from advanced_parts.plan_rules import divisors
from advanced_parts.plan_search import FALL
from dist_common import cli
from dist_common.costs import resnet
from dist_common.costs.hardware import Cluster
from dist_common.costs.job import Layout, Prediction
from dist_common.costs.step import slower

USUAL_BATCH = 256  # images of a GPU in a step
ALLOWED = {
    "verb", "model", "json", "gpu", "gpus", "gpus_per_node", "gpu_memory_gib", "gpu_tflops",
    "hbm_gb_s", "link_gb_s", "network_gb_s", "precision", "global_batch", "micro_batch", "zero",
    "dp",
}  # fmt: skip
SPELLED = {"virtual_stages": "interleave", "sequence_parallel": "no-sequence-parallel"}


def check(args, usual) -> None:
    """Refuse flags of transformers. usual: the same verb without them. Raises: UsageError."""
    for name, value in vars(args).items():
        if name not in ALLOWED and value != getattr(usual, name):
            flag = SPELLED.get(name, name).replace("_", "-")
            raise cli.UsageError(
                f"--model resnet50 has no --{flag}: it is planned with DDP or ZeRO-1 alone"
            )
    if (args.zero or 0) > 1:
        raise cli.UsageError(f"--zero {args.zero}: --model resnet50 is planned with 0 or 1")
    if args.dp and args.gpus and args.dp != args.gpus:
        raise cli.UsageError(f"dp {args.dp} must be all of --gpus {args.gpus}")
    if args.precision not in ("bf16", "fp16", "fp32", "tf32"):
        raise cli.UsageError(f"--precision {args.precision}: convolutions take 16 or 32 bits here")


def layouts(args, gpus: int, batch: int) -> list[Layout]:
    """Return DDP and ZeRO-1 with each micro-batch that divides a GPU's images."""
    own = batch // gpus
    sizes = [own] if args.verb == "predict" else divisors(own)
    sizes = [args.micro_batch] if args.micro_batch else sizes
    stages = (0, 1) if args.verb == "plan" and gpus > 1 else (0,)
    stages = stages if args.zero is None else (args.zero,)
    if batch % gpus:
        raise cli.UsageError(f"{gpus} GPUs do not divide --global-batch {batch}")
    if any(own % size for size in sizes):
        raise cli.UsageError(f"micro-batch {sizes[0]} does not divide a GPU's {own} images")
    return [Layout(dp=gpus, zero=zero, micro_batch=size) for zero in stages for size in sizes]


def as_json(plan: Prediction, batch: int, mfu: float) -> dict:
    """Return a prediction in bytes, seconds and images."""
    return {
        "layout": asdict(plan.layout) | {"gpus": plan.layout.gpus},
        "fits": plan.fits,
        "memory_bytes": {
            **plan.memory, "total": plan.memory_total, "limit": plan.memory_limit,
        },
        "step_time_s": plan.step_time_s,
        "step_s": plan.step,
        "images_per_s_per_gpu": plan.tokens_per_s_per_gpu,
        "model_tflops_per_gpu": plan.model_tflops_per_gpu,
        "mfu": mfu,
        "global_batch": batch,
    }  # fmt: skip


def show(plans: list[Prediction], mfus: list[float]) -> None:
    """Print three tables: layouts, memory by part, step by part."""
    rows = []
    for number, (plan, mfu) in enumerate(zip(plans, mfus, strict=True), 1):
        layout = plan.layout
        count = plan.tokens // layout.dp // layout.micro_batch
        names = str(number), plan_text.axes_of(layout), plan_text.sharding_of(layout)
        held = f"{plan.memory_total / plan_text.GIB:.1f} GiB"
        speed = f"{plan.step_time_s:.3f} s", f"{plan.tokens_per_s_per_gpu:,.0f}", f"{mfu:.1%}"
        rows.append((*names, f"{layout.micro_batch} x {count}", held, *speed))
    headers = ("", "layout", "states", "micro", "memory", "step", "images/s", "MFU")
    print(plan_text.table(rows, headers, 4), end="\n\n")
    print(plan_text.parts_table(plans, "memory", plan_text.GIB, 1), end="\n\n")
    print(plan_text.parts_table(plans, "step", 1, 3), end="\n\n")


def changes(best: list[Prediction], batch: int, cluster: Cluster, precision: str) -> list[str]:
    """Say how many rows are as good as the first, and what a fifth less of a rate costs it."""
    first = best[0]
    close = sum(plan.step_time_s <= (1 + plan_text.CLOSE) * first.step_time_s for plan in best)
    lines = [f"{close} of these rows lie within {plan_text.CLOSE:.0%}: measure them"]
    worse = {
        "bandwidth": slower(cluster, network=FALL),
        "matrix rate": slower(cluster, matrix=FALL),
        "HBM": replace(cluster, gpu=replace(cluster.gpu, hbm_gb_s=FALL * cluster.gpu.hbm_gb_s)),
    }
    for name, machine in worse.items():
        plan = resnet.predict(batch, first.layout, machine, precision)
        lines.append(f"-20% of {name}: step {plan.step_time_s / first.step_time_s - 1:+.1%}")
    return lines


def run(args, usual, cluster_of) -> None:
    """Print the answer to a verb. Raises: UsageError."""
    check(args, usual)
    gpus = args.gpus or args.dp or (8 if args.verb == "plan" else 1)
    cluster: Cluster = cluster_of(args, gpus)
    batch = args.global_batch or USUAL_BATCH * gpus
    tried = [
        resnet.predict(batch, each, cluster, args.precision) for each in layouts(args, gpus, batch)
    ]
    tried.sort(key=lambda plan: (plan.step_time_s, plan.memory_total))
    plans = tried if args.verb == "predict" else [plan for plan in tried if plan.fits]
    if not plans:
        least = min(tried, key=lambda plan: plan.memory_total)
        raise cli.UsageError(
            f"no layout fits: micro-batch {least.layout.micro_batch} holds"
            f" {least.memory_total / plan_text.GIB:.2f} GiB of"
            f" {least.memory_limit / plan_text.GIB:.2f}"
        )
    best = plans[: plan_text.SHOWN]
    mfus = [plan.model_tflops_per_gpu / cluster.gpu.tflops[args.precision] for plan in best]
    if args.json:
        found = [as_json(plan, batch, mfu) for plan, mfu in zip(best, mfus, strict=True)]
        print(json.dumps({"plans": found} if args.verb == "plan" else found[0], indent=1))
        return
    print(
        f"resnet50: {resnet.parameters() / 1e6:.1f}e6 weights,"
        f" {resnet.forward_flops() / 1e9:.2f}e9 FLOPs an image forward; {gpus:,} {cluster.gpu.name}"
    )
    print(f"{batch:,} images of {resnet.SIDE} x {resnet.SIDE} a step, {args.precision}")
    show(best, mfus)
    if args.verb == "plan":
        print(*changes(best, batch, cluster, args.precision), sep="\n")
    elif not best[0].fits:
        print(f"DOES NOT FIT: {best[0].memory_limit / plan_text.GIB:.1f} GiB may be held")
    print("no template trains it: 01-ddp-basics/ddp_benchmark.py --model resnet50 times its DDP")
