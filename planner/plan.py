"""Plan a training job: which layout of GPUs fits, what it holds and sends, how long a step takes.

    python planner/plan.py plan --model llama2-7b --gpus 8
    python planner/plan.py predict --model llama3-70b --tp 8 --pp 2 --dp 4 --zero 1

No GPU and no PyTorch is needed. `plan` searches all layouts and prints the best five; `predict`
says what one layout holds, sends and takes. planner.md explains both, and validate.py compares
the formulas with published runs.

Sources: Korthikanti et al. (2022) for memory, Narayanan et al. (SC 2021) for pipelines and order.
"""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import asdict, replace

from planner import cli, models, plan_explain, plan_finetune, plan_launch, plan_text
from planner.hardware import Cluster
from planner.job import Job, Prediction
from planner.memory import GIB
from planner.plan_args import cluster_of, given_layout, job_of, one_layout, parse_args
from planner.plan_axes import axes_json, axes_lines
from planner.plan_rules import none_divides, why_not
from planner.plan_search import Found, search
from planner.step import predict


def mfu_of(plan: Prediction, job: Job, cluster: Cluster) -> float:
    """Return model FLOP/s over the peak of the job's precision."""
    return plan.model_tflops_per_gpu / cluster.gpu.tflops[job.precision]


def as_json(plan: Prediction, job: Job, cluster: Cluster, args) -> dict:
    """Return a prediction in bytes, seconds and rates."""
    result = {
        "name": plan_text.name_of(plan.layout),
        "layout": asdict(plan.layout) | {"gpus": plan.layout.gpus},
        "fits": plan.fits,
        "memory_bytes": {
            **plan.memory, "total": plan.memory_total, "limit": plan.memory_limit,
        },
        "step_time_s": plan.step_time_s,
        "step_s": plan.step,
        "tokens_per_s_per_gpu": plan.tokens_per_s_per_gpu,
        "model_tflops_per_gpu": plan.model_tflops_per_gpu,
        "mfu": mfu_of(plan, job, cluster),
        "micro_batches": plan.layout.micro_batches(job),
        "global_batch": job.global_batch,
    }  # fmt: skip
    if args.finetune not in ("lora", "qlora"):
        result["axes"] = axes_json(job, plan.layout, cluster)
    if args.tokens:
        result["days"] = plan_text.days_of(plan, args.tokens)
        if args.dollars_per_gpu_hour:
            price = args.dollars_per_gpu_hour
            result["dollars"] = plan_text.dollars_of(plan, args.tokens, price)
    return result


def predict_one(args) -> None:
    """Print what one layout holds and takes."""
    layout = one_layout(args)
    cluster = cluster_of(args, layout.gpus)
    job = job_of(args, layout.gpus)
    reason = why_not(job, cluster, layout)
    if reason:
        raise cli.UsageError(reason)
    if args.finetune in ("lora", "qlora"):
        refuse_adapters(args, job, cluster)
        plan = plan_finetune.retimed(job, layout, cluster, args.finetune, args.lora_rank)
    else:
        plan = predict(job, layout, cluster)
    if args.json:
        print(json.dumps(as_json(plan, job, cluster, args), indent=1))
        return
    head(job, cluster, layout.gpus)
    print_plans(job, cluster, args, [plan])
    if args.finetune not in ("lora", "qlora"):
        print(*axes_lines(job, layout, cluster), sep="\n")
    if not plan.fits:
        over = (plan.memory_total - plan.memory_limit) / GIB
        print(f"DOES NOT FIT: {over:.1f} GiB over {plan.memory_limit / GIB:.1f}")
    if args.explain:
        print(*explained(args, job, cluster, plan), sep="\n")


def plan_all(args) -> None:
    """Print the best layouts, why the first is first, and how to start it."""
    gpus = args.gpus or 8
    cluster, job = cluster_of(args, gpus), job_of(args, gpus)
    found = searched(args, job, cluster, gpus)
    if not found.tried:
        raise cli.UsageError(none_divides(job, cluster, gpus))
    if not found.fitting:
        raise cli.UsageError(too_large(cluster, found))
    best = found.best[: plan_text.SHOWN]
    number, launch, remarks = first_to_start(args, job, cluster, best)
    survives = plan_text.survival(job, cluster, found)
    reasons = [*plan_text.why_first(found), *what_changes(job, cluster, found, survives)]
    if args.json:
        plans = [as_json(plan, job, cluster, args) for plan in best]
        start = {"plan": number, **asdict(launch), "before": remarks}
        answer = {"plans": plans, "reasons": reasons, "survives": survives, "launch": start}
        answer |= {"tried": found.tried, "fitting": len(found.fitting)}
        print(json.dumps(answer, indent=1))
        return
    head(job, cluster, gpus)
    limit = f"{best[0].memory_limit / GIB:.1f} of {cluster.gpu.memory_gib:g} GiB"
    print(f"{found.tried:,} layouts looked at, {len(found.fitting):,} fit in {limit}")
    print_plans(job, cluster, args, best)
    print(*reasons, sep="\n")
    lines = [f"{number} is started by"] if number else []
    lines += [f"  {command}" for command in launch.commands]
    lines += [f"  but: {remark}" for remark in launch.remarks]
    for line in remarks + lines:
        print(line)
    if args.explain:
        print(*explained(args, job, cluster, best[0]), sep="\n")


def first_to_start(args, job: Job, cluster: Cluster, best: list[Prediction]):
    """Return the first plan that a template runs, its launch, and why none before it has one."""
    remarks = []
    node, rank = cluster.gpus_per_node, args.lora_rank
    for number, plan in enumerate(best, 1):
        launch = plan_launch.launch_of(job, plan.layout, node, args.finetune, rank)
        if launch.commands and args.finetune == "lora":
            launch = fitting_launch(launch, job, plan, rank)
        if launch.commands:
            return number, launch, remarks
        remarks.append(f"{number} has no template: {'; '.join(launch.remarks)}")
    return 0, plan_launch.Launch([], []), remarks


def fitting_launch(launch, job: Job, plan: Prediction, rank: int):
    """Return a launch line of adapters, or why the template does not fit where the plan does."""
    layout, flag = plan.layout, f"--micro-batch-size {plan.layout.micro_batch}"
    while True:
        lacks = plan_finetune.template_bytes(job, layout, rank) - plan.memory_limit
        if lacks <= 0 or layout.micro_batch == 1:
            break
        layout = replace(layout, micro_batch=layout.micro_batch // 2)
    if lacks > 0:
        text = "02-fsdp/fsdp_finetune.py keeps frozen weights in float32: it lacks"
        return plan_launch.Launch([], [f"{text} {lacks / GIB:.1f} GiB on each GPU"])
    if layout == plan.layout:
        return launch
    smaller = f"--micro-batch-size {layout.micro_batch}"
    lines = [line.replace(flag, smaller) for line in launch.commands]
    text = f"they leave room for micro-batch {layout.micro_batch}, not {plan.layout.micro_batch}"
    return plan_launch.Launch(lines, [*launch.remarks, text])


def refuse_adapters(args, job: Job, cluster: Cluster) -> None:
    """Stop at flags that a plan of adapters has no meaning for. Raises: UsageError."""
    given = given_layout(args)
    if why := plan_finetune.refuse(job, cluster, args.finetune, args.lora_rank, given):
        raise cli.UsageError(why)


def explained(args, job: Job, cluster: Cluster, plan: Prediction) -> list[str]:
    if args.finetune in ("lora", "qlora"):
        job = plan_finetune.job_of_adapters(job, args.finetune, args.lora_rank)
    return plan_explain.explain(job, cluster, plan)


def searched(args, job: Job, cluster: Cluster, gpus: int) -> Found:
    """Search layouts that train all weights, or those of adapters."""
    if args.finetune in ("lora", "qlora"):
        refuse_adapters(args, job, cluster)
        if job.global_batch % gpus:
            text = f"{gpus} GPUs do not divide the {job.global_batch} sequences of a step"
            raise cli.UsageError(f"{text}, and --finetune {args.finetune} has replicas alone")
        given, rank = given_layout(args), args.lora_rank
        return plan_finetune.search(job, cluster, gpus, args.finetune, rank, given)
    return search(job, cluster, gpus, given_layout(args))


def what_changes(job: Job, cluster: Cluster, found: Found, survives: dict) -> list[str]:
    """Return a line for each change of hardware or batch that was looked at."""
    lines = plan_text.survival_lines(found, survives)
    lines += [plan_text.larger_memory(cluster, found)]
    lines += [plan_text.batch_twice(job, cluster, found)]
    return [line for line in lines if line]


def too_large(cluster: Cluster, found: Found) -> str:
    """Say which layout came closest, and what it lacks."""
    plan = found.smallest
    held, limit = plan.memory_total / GIB, plan.memory_limit / GIB
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in plan.memory.items() if size)
    return (
        f"no layout fits: the closest, {plan_text.name_of(plan.layout)}, lacks"
        f" {held - limit:.1f} GiB on each GPU: it holds {held:.1f} ({parts}) of {limit:.1f}"
    )


def head(job: Job, cluster: Cluster, gpus: int) -> None:
    """Print what is trained on what."""
    model = job.model
    weights = f"{models.parameters(model) / 1e9:.2f}e9 weights"
    if model.experts:
        weights += f", {models.active_parameters(model) / 1e9:.2f}e9 for a token"
    node = f"{min(gpus, cluster.gpus_per_node)} a node"
    print(f"{model.name or 'model'}: {weights}; {gpus:,} {cluster.gpu.name}, {node}")
    rates = f"{cluster.gpu.link_gb_s:g} GB/s in a node, {cluster.network_gb_s:g} between"
    tokens = job.global_batch * job.seq_len
    batch = f"{job.global_batch:,} sequences of {job.seq_len:,}: {tokens / 1e6:.2f}e6 tokens a step"
    print(f"{batch}, {job.precision}; {rates}")


def print_plans(job: Job, cluster: Cluster, args, plans: list[Prediction]) -> None:
    """Print three tables: layouts, memory by part, step by part; and days."""
    mfus = [mfu_of(plan, job, cluster) for plan in plans]
    print(plan_text.layouts_table(job, plans, mfus), end="\n\n")
    print(plan_text.parts_table(plans, "memory", GIB, 1), end="\n\n")
    print(plan_text.parts_table(plans, "step", 1, 3), end="\n\n")
    if args.tokens:
        print(f"1: {plan_text.money(plans[0], args.tokens, args.dollars_per_gpu_hour)}")


def main() -> int:
    args = parse_args(sys.argv[1:])
    with contextlib.suppress(BrokenPipeError):  # nobody reads any more, as under `| head`
        {"plan": plan_all, "predict": predict_one}[args.verb](args)
    return 0


if __name__ == "__main__":
    cli.run(main)
