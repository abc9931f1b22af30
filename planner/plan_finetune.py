"""Plans for adapters (LoRA) beside frozen weights, in 16 bits or in 4 (QLoRA).

Replicas only, as 02-fsdp has them: every GPU with all frozen weights (DDP), or FSDP2, which holds
a block's weights whole while it computes. Bytes are planner/finetune.py's.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from planner import compute, finetune, memory, models
from planner.hardware import Cluster
from planner.job import Job, Layout, Model, Prediction
from planner.plan_search import MICRO_BATCHES, NEAR, Found
from planner.rates import RATES as REACHED
from planner.step import step_of_adapters

EVERY_MATRIX = ("query", "key", "value", "projection", "mlp")
QUANT = {"lora": "", "qlora": "nf4-dq"}
PLAIN = ("tp", "cp", "pp", "ep")  # axes that are 1 here


def targets_of(model: Model) -> tuple[str, ...]:
    """Return what has adapters: of experts, which are no linear layers in transformers, nothing."""
    return EVERY_MATRIX[:-1] if model.experts else EVERY_MATRIX


def memory_of(job: Job, layout: Layout, method: str, rank: int) -> dict[str, float]:
    """Return bytes by part on a GPU: frozen weights, those of adapters, activations, a block.

    Adapters, their gradients and Adam's moments are float32. With recomputation a block keeps its
    input (Chen et al., 2016).
    """
    model, quant = job.model, QUANT[method]
    shards = layout.replicas if layout.zero == 3 else 1
    targets = targets_of(model)
    trained = finetune.trained_parameters(model, "lora", rank, targets)
    tokens = layout.micro_batch * job.seq_len
    layer = finetune.layer_bytes(model, "lora", job.seq_len, quant, targets, False)
    kept = model.layers * layer
    if layout.recompute == "full":
        kept = model.layers * memory.BF16 * model.hidden + layer
    weights = models.layer_parameters(model)
    block = 2 * weights * finetune.frozen_weight_bytes(quant) if shards > 1 else 0.0
    unpacked = memory.BF16 * weights if quant else 0.0  # of a matrix at a time, at most a block
    return {
        "parameters": (finetune.frozen_bytes(model, "lora", quant, False) + 4 * trained) / shards,
        "gradients": 4 * trained / shards,
        "optimizer": 8 * trained / shards,
        "activations": tokens * kept,
        "logits": tokens * memory.logit_bytes(job) * model.vocab,
        "gathered": block + unpacked,
    }


def job_of_adapters(job: Job, method: str, rank: int) -> Job:
    """Return the job with frozen weights, in 4 bits for qlora, and adapters on every matrix."""
    targets = targets_of(job.model)
    return replace(
        job, frozen=True, adapter_rank=rank, adapter_targets=targets, quant=QUANT[method]
    )


def retimed(job: Job, layout: Layout, cluster: Cluster, method: str, rank: int) -> Prediction:
    """Return a plan's prediction, by the bytes and the seconds of adapters."""
    held = memory_of(job, layout, method, rank)
    step = step_of_adapters(job_of_adapters(job, method, rank), layout, cluster, REACHED)
    tokens = job.global_batch * job.seq_len
    limit = memory.memory_limit(cluster.gpu)
    return Prediction(layout, held, step, model_flops(job), tokens, limit)


def model_flops(job: Job) -> float:
    """Return FLOPs of a step without those of frozen weights' gradients: 4 of 6 per weight."""
    model = job.model
    tokens = job.global_batch * job.seq_len
    attention = 12 * model.layers * models.query_width(model) * job.seq_len * tokens
    return (compute.model_flops(job) - attention) * 2 / 3 + attention


def template_bytes(job: Job, layout: Layout, rank: int) -> float:
    """Return what 02-fsdp/fsdp_finetune.py holds on a GPU of this plan.

    It shards float32 weights, frozen ones too, and recomputes every layer.
    """
    sharded = replace(layout, zero=3 if layout.gpus > 1 else 0, recompute="full")
    held = memory_of(job, sharded, "lora", rank)
    frozen = finetune.frozen_bytes(job.model, "lora", "", False)
    return sum(held.values()) + (memory.FP32 / memory.BF16 - 1) * frozen / layout.gpus


def refuse(job: Job, cluster: Cluster, method: str, rank: int, only: dict) -> str:
    """Return why no plan of adapters can have these flags, or nothing."""
    named = [f"{axis} {only[axis]}" for axis in PLAIN if only.get(axis, 1) > 1]
    if named:
        return f"{', '.join(named)}: --finetune {method} is planned with replicas alone: --dp"
    if only.get("zero", 3) not in (0, 3):
        return f"--zero {only['zero']}: --finetune {method} is planned with 0 (DDP) or 3 (FSDP)"
    if only.get("offload", "none") != "none":
        return f"--offload {only['offload']}: --finetune {method} is planned without offload"
    if only.get("recompute", "none") not in ("none", "full"):
        return f"--recompute {only['recompute']}: --finetune {method} has none or full"
    if job.precision not in ("bf16", "fp16"):
        return f"--precision {job.precision}: --finetune {method} computes in bf16 or fp16"
    widest = min(job.model.hidden, models.key_width(job.model))
    if rank >= widest:
        return f"--lora-rank {rank}: an adapter is thinner than its matrix, here less than {widest}"
    return ""


def search(job: Job, cluster: Cluster, gpus: int, method: str, rank: int, only: dict) -> Found:
    """Return all plans by time: DDP or FSDP, micro-batch, recomputation."""

    def timed(job: Job, layout: Layout, cluster: Cluster) -> Prediction:
        return retimed(job, layout, cluster, method, rank)

    found = Found(timed=timed, row_of=lambda layout: (layout.zero, layout.recompute))
    if job.global_batch % gpus:
        return found
    own = job.global_batch // gpus
    stages = (0, 3) if gpus > 1 else (0,)
    for zero, size, again in product(stages, MICRO_BATCHES, ("none", "full")):
        layout = Layout(dp=gpus, zero=zero, micro_batch=size, recompute=again)
        if own % size or any(getattr(layout, name) != value for name, value in only.items()):
            continue
        plan = timed(job, layout, cluster)
        found.tried += 1
        if not found.smallest or plan.memory_total < found.smallest.memory_total:
            found.smallest = plan
        if plan.fits:
            found.fitting.append(plan)
        elif plan.memory_total < NEAR * plan.memory_limit:
            found.near.append(plan)
    found.fitting.sort(key=lambda plan: (plan.step_time_s, plan.memory_total))
    found.near.sort(key=lambda plan: plan.step_time_s)
    return found
