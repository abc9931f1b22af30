"""Plan a training job: which layout of GPUs fits, its memory, its speed, how certain.

    python planner/plan.py plan --model llama2-7b --gpus 8
    python planner/plan.py predict --model llama3-70b --tp 8 --pp 2 --dp 4 --zero 1

It needs no GPU and no PyTorch. `plan` searches all layouts and prints the best five.
`predict` prints the memory, traffic and step time of one layout. README.md explains
both, method.md has the formulas, and validate.py compares them with published runs.
"""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import asdict, replace

from planner import cli, plan_explain, plan_launch, plan_text
from planner.finetune import with_adapters
from planner.hardware import Cluster
from planner.job import Prediction, TrainingJob
from planner.memory import GIB
from planner.plan_args import (
    OPTIMIZERS,
    cluster_from,
    given_layout,
    job_of,
    one_layout,
    parse_args,
)
from planner.plan_search import SearchResult, layout_error, no_layout_error, search
from planner.step import axes_of, predict


def as_json(plan: Prediction, job: TrainingJob, cluster: Cluster, args) -> dict:
    """Return a prediction in bytes, seconds and rates."""
    total, limit = plan.memory_total, plan.memory_limit
    result = {
        "name": plan_text.name_of(plan.layout),
        "layout": asdict(plan.layout) | {"gpus": plan.layout.gpus},
        "fits": plan.fits,
        "memory_bytes": plan.memory | {"total": total, "limit": limit},
        "step_time_s": plan.step_time_s,
        "step_s": plan.step,
        "tokens_per_s_per_gpu": plan.tokens_per_s_per_gpu,
        "model_tflops_per_gpu": plan.model_tflops_per_gpu,
        "mfu": plan_text.mfu_of(plan, job, cluster),
        "micro_batches": plan.layout.micro_batches(job),
        "global_batch": job.global_batch,
        "certainty": plan_text.certainty_of(job, plan.layout, cluster),
    }
    axes = axes_of(job, plan.layout, cluster)
    result["axes"] = {name: asdict(axis) for name, axis in axes.items()}
    if args.tokens:
        days = plan_text.days_of(plan, args.tokens)
        result["days"] = days
        if args.dollars_per_gpu_hour:
            hours = days * 24 * plan.layout.gpus
            result["dollars"] = hours * args.dollars_per_gpu_hour
    return result


def predict_one(args) -> None:
    """Print the memory, traffic and step time of one layout."""
    layout = one_layout(args)
    cluster = cluster_from(args, layout.gpus)
    job = job_of(args, cluster, layout.gpus)
    if reason := layout_error(job, cluster, layout):
        raise cli.CommandLineError(reason)
    plan = predict(job, layout, cluster)
    if args.json:
        print(json.dumps(as_json(plan, job, cluster, args), indent=1))
        return
    print(*plan_text.head_lines(job, cluster, layout.gpus), sep="\n")
    print_plans(job, cluster, args, [plan])
    print(*plan_text.axes_lines(job, layout, cluster), sep="\n")
    certainty = plan_text.certainty_of(job, layout, cluster)
    print(plan_text.certainty_line(certainty, job, layout, cluster))
    if not plan.fits:
        over = (plan.memory_total - plan.memory_limit) / GIB
        print(f"DOES NOT FIT: {over:.1f} GiB over {plan.memory_limit / GIB:.1f}")
    if args.explain:
        print(*plan_explain.explain(job, cluster, plan), sep="\n")


def plan_all(args) -> None:
    """Print the best layouts, the reasons for the first, and its command."""
    gpus = args.gpus or 8
    cluster = cluster_from(args, gpus)
    job, only = job_of(args, cluster, gpus), given_layout(args)
    result = search(job, cluster, gpus, only)
    if not result.tried:
        raise cli.CommandLineError(no_layout_error(job, cluster, gpus, only))
    if not result.fitting:
        raise cli.CommandLineError(memory_error(args, job, cluster, gpus, result))
    fastest = plan_text.certainty_of(job, result.fitting[0].layout, cluster)
    tie = plan_text.tie_of(fastest)
    best = result.best(tie)[: plan_text.SHOWN]
    first = best[0]
    certainty = plan_text.certainty_of(job, first.layout, cluster)
    survives = plan_text.survival(job, cluster, first, result)
    reasons = [
        *plan_text.why_first(best, tie),
        plan_text.certainty_line(certainty, job, first.layout, cluster),
        *plan_text.survival_lines(first, survives),
        *plan_text.larger_memory(first, result),
        plan_text.batch_twice(job, cluster, first),
    ]
    number, launch, remarks = find_launch(args, job, cluster, best)
    if args.json:
        answer = {
            "plans": [as_json(plan, job, cluster, args) for plan in best],
            "reasons": reasons,
            "survives": survives,
            "launch": {"plan": number, **asdict(launch), "before": remarks},
            "tried": result.tried,
            "fitting": len(result.fitting),
        }
        print(json.dumps(answer, indent=1))
        return
    print(*plan_text.head_lines(job, cluster, gpus), sep="\n")
    limit = f"{first.memory_limit / GIB:.1f} of {cluster.gpu.memory_gib:g} GiB"
    print(f"{result.tried:,} layouts tried, {len(result.fitting):,} fit in {limit}")
    print_plans(job, cluster, args, best)
    print(*reasons, *remarks, sep="\n")
    if number:
        print(f"start {number} with")
    for command in launch.commands:
        print(f"  {command}")
    for remark in launch.remarks:
        print(f"  but: {remark}")
    if args.explain:
        print(*plan_explain.explain(job, cluster, first), sep="\n")


def print_plans(
    job: TrainingJob, cluster: Cluster, args, plans: list[Prediction]
) -> None:
    """Print tables of layouts, memory and step, and a line with days."""
    print(plan_text.layouts_table(job, cluster, plans), end="\n\n")
    print(plan_text.parts_table(plans, "memory", GIB, 1), end="\n\n")
    print(plan_text.parts_table(plans, "step", 1, 3), end="\n\n")
    if args.tokens:
        price = args.dollars_per_gpu_hour
        print(f"1: {plan_text.money_line(plans[0], args.tokens, price)}")


def find_launch(args, job: TrainingJob, cluster: Cluster, best: list[Prediction]):
    """Return the first plan with a template, its launch, and the others' reasons."""
    remarks = []
    for number, plan in enumerate(best, 1):
        launch = plan_launch.launch_of(
            job,
            plan.layout,
            cluster.gpus_per_node,
            args.finetune,
            plan.memory_limit,
        )
        if launch.commands:
            return number, launch, remarks
        remarks.append(f"{number} has no template: {'; '.join(launch.remarks)}")
    return 0, plan_launch.Launch([], []), remarks


# Changes that make a job fit


def memory_error(
    args, job: TrainingJob, cluster: Cluster, gpus: int, result: SearchResult
) -> str:
    """Return the closest layout, its lack of memory, and flags that fit, as text."""
    plan = result.smallest
    held, limit = plan.memory_total / GIB, plan.memory_limit / GIB
    sizes = {name: size / GIB for name, size in plan.memory.items() if size}
    parts = ", ".join(f"{name} {size:.1f}" for name, size in sizes.items())
    text = (
        f"no layout fits: the closest, {plan_text.name_of(plan.layout)}, lacks"
        f" {held - limit:.1f} GiB on each GPU: it holds {held:.1f} ({parts}) of"
        f" {limit:.1f}"
    )
    only = given_layout(args)
    changes = smaller_jobs(args, job)
    fits = [
        flags
        for flags, other in changes.items()
        if search(other, cluster, gpus, only).fitting
    ]
    if only.get("offload") == "none" and search(job, cluster, gpus).fitting:
        fits.append("offload")
    return f"{text}; it fits with {' or '.join(fits)}" if fits else text


def smaller_jobs(args, job: TrainingJob) -> dict[str, TrainingJob]:
    """Return jobs that need less memory, by their flags."""
    changes = {}
    if job.loss == "whole":
        changes["--loss chunked"] = replace(job, loss="chunked")
    if job.seq_len >= 2048:
        changes[f"--seq-len {job.seq_len // 2}"] = replace(
            job, seq_len=job.seq_len // 2
        )
    if not job.frozen and args.optimizer == "adamw":
        parameter, gradient, optimizer = OPTIMIZERS["adamw-8bit"]
        changes["--optimizer adamw-8bit"] = replace(
            job,
            parameter_bytes=parameter,
            gradient_bytes=gradient,
            optimizer_bytes=optimizer,
        )
    tuned = {"full": ("lora", "qlora"), "lora": ("qlora",)}.get(args.finetune, ())
    for method in tuned:
        changes[f"--finetune {method}"] = with_adapters(job, method, args.lora_rank)
    return changes


def main() -> int:
    args = parse_args(sys.argv[1:])
    with contextlib.suppress(BrokenPipeError):  # nobody reads, as under `| head`
        {"plan": plan_all, "predict": predict_one}[args.verb](args)
    return 0


if __name__ == "__main__":
    cli.run(main)
