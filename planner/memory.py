"""The bytes on one GPU of a layout: states, gathered weights, activations.

The peak is at one of two moments. At the loss, a GPU holds the activations of all
layers and the logits. In the backward of the last layer, the logits are gone, and the
gradients of one layer are there.
"""

from __future__ import annotations

from functools import cache

from planner import finetune, models
from planner.activations import (
    BF16,
    FP32,
    backward_of_layer,
    kept_by_stage,
    layers_of,
    logits,
    number_bytes,
    stack_of,
)
from planner.hardware import Gpu
from planner.job import Layout, TrainingJob

GIB = 2**30
# The first stage of ZeRO that shards a part (Rajbhandari et al., 2020, figure 1).
SHARDED_FROM = {"parameters": 3, "gradients": 2, "optimizer": 1}
# Reserved over allocated memory, fitted on torchtitan's `fit` rows. The streams of
# collectives have separate pools.
RESERVED = 1.10
# The context of CUDA and NCCL takes about a GiB outside the allocator, and some blocks
# fit no request. litgpt trained at 0.89 of a GPU's memory: llama2-13b, 38.1 of 42.9 GB.
CONTEXT = 1.0 * GIB
WASTED = 0.07  # of the rest


# --- States: parameters, gradients, optimizer ---


def tables_of_stage(
    job: TrainingJob, layout: Layout, stage: int
) -> tuple[float, float]:
    """Return a stage's weights on a GPU in the embedding table and the output layer."""
    model = job.model
    table = models.table_parameters(model)
    first = last = 0.0
    if stage == 0:
        first = table if stack_of(job).embedding_whole else table / layout.tp
    tied = model.tied_embeddings and layout.pp == 1
    if stage == layout.pp - 1 and not tied:
        last = table / layout.tp
    return first, last


def tensors_of_stage(
    job: TrainingJob, layout: Layout, stage: int
) -> list[tuple[float, float, str, int]]:
    """Return (outputs, inputs, kind, count) of a stage's tensors on a GPU before ZeRO.

    tp divides matrices and tables and leaves norms whole (Shoeybi et al., 2019, section
    3). ep divides experts. With one stage, tied tables are one tensor.
    """
    model, t = job.model, layout.tp
    tensors = []
    for layer, count in layers_of(model, layout, stage):
        for outputs, inputs, kind in models.shapes_of_kind(
            model, models.is_dense(model, layer)
        ):
            if kind in (models.COLUMN, models.EXPERT):
                outputs /= t
            elif kind == models.ROW:
                inputs /= t
            tensors.append((outputs, inputs, kind, count))
    for table in tables_of_stage(job, layout, stage):
        tensors.append((table / model.hidden, model.hidden, models.COLUMN, 1))
    if stage == 0:
        tensors.append((model.learned_positions, model.hidden, models.WHOLE, 1))
    if stage == layout.pp - 1:
        norm = 2 if model.biases else 1  # a scale, and a bias
        tensors.append((model.hidden, 1, models.WHOLE, norm))
    return tensors


@cache
def weights_of_stage(
    job: TrainingJob, layout: Layout, stage: int
) -> tuple[float, float]:
    """Return a stage's weights on a GPU before ZeRO: (dense, experts)."""
    dense = experts = 0.0
    for outputs, inputs, kind, count in tensors_of_stage(job, layout, stage):
        if kind == models.EXPERT:
            experts += outputs * inputs * count / layout.ep
        else:
            dense += outputs * inputs * count
    return dense, experts


@cache
def shards_of_stage(
    job: TrainingJob, layout: Layout, stage: int
) -> tuple[float, float]:
    """Return a stage's weights on the fullest ZeRO rank: (dense, experts).

    FSDP2 divides the rows of each tensor, and the first ranks get the remainder
    (fully_shard, dim 0). ZeRO in DeepSpeed and Megatron divides one long vector.
    """
    dense, experts = weights_of_stage(job, layout, stage)
    over = layout.shards
    over_experts = max(1, over // layout.ep)
    if layout.zero < 3 or stack_of(job).sharded_copy:
        return dense / over, experts / over_experts
    dense = experts = 0.0
    for outputs, inputs, kind, count in tensors_of_stage(job, layout, stage):
        if kind == models.EXPERT:
            experts += largest_part(outputs, inputs, over_experts) * count / layout.ep
        else:
            dense += largest_part(outputs, inputs, over) * count
    return dense, experts


def largest_part(rows: float, columns: float, ranks: int) -> float:
    """Return the numbers of a tensor on the fullest rank if FSDP2 divides its rows."""
    return -(-rows // ranks) * columns


def state_bytes_per_weight(job: TrainingJob, zero: int) -> dict[str, float]:
    """Return bytes per weight: parameters, gradients, optimizer (ZeRO, section 3).

    FSDP2 (zero 3) keeps float32 shards and casts them when it gathers: the master copy
    is the parameter. Megatron and DeepSpeed keep 16-bit parameters as well.
    """
    bytes_of = {
        "parameters": job.parameter_bytes,
        "gradients": job.gradient_bytes,
        "optimizer": job.optimizer_bytes,
    }
    master = job.parameter_bytes < FP32 and job.optimizer_bytes >= 12
    if zero == 3 and master and not stack_of(job).sharded_copy:
        bytes_of["parameters"] = FP32
        bytes_of["optimizer"] -= FP32
    return bytes_of


def gathers_once(job: TrainingJob, layout: Layout) -> bool:
    """Tell whether ZeRO-3 gathers and reduces a stage's weights once a step.

    With a pipeline, PyTorch frees and reduces nothing before the last backward of a
    stage (backward_maybe_with_nosync in torch.distributed.pipelining, stage.py).
    torchtitan's default frees nothing after a forward either
    (get_fsdp_reshard_after_forward_policy in distributed/fsdp.py). KempnerForge does.
    """
    return layout.zero == 3 and layout.pp > 1 and not stack_of(job).reshards_stage


def gradients_stay_whole(job: TrainingJob, layout: Layout) -> bool:
    """Tell whether micro-batches add up whole gradients under ZeRO 2 and 3.

    A pipeline reduces gradients once a step, because forwards run between the backwards
    of a stage.
    """
    stack, several = stack_of(job), layout.micro_batches(job) > 1
    if job.frozen or layout.zero == 3 and stack.reduces_each:
        return False
    return layout.zero >= 2 and several and (layout.pp > 1 or stack.no_sync)


def states(
    job: TrainingJob,
    layout: Layout,
    weights: tuple[float, float],
    shards: tuple[float, float] | None = None,
) -> dict[str, float]:
    """Return bytes of parameters, gradients and optimizer on a GPU (ZeRO, figure 1).

    weights, shards: numbers of (dense, experts) before and after sharding. Shards are
    even by default. Experts have fewer replicas, so fewer ranks share them.
    """
    bytes_of = state_bytes_per_weight(job, layout.zero)
    if shards is None:
        shards = (
            weights[0] / layout.shards,
            weights[1] / max(1, layout.shards // layout.ep),
        )
    held = {}
    for part, stage in SHARDED_FROM.items():
        held[part] = bytes_of[part] * sum(shards if layout.zero >= stage else weights)
    if gradients_stay_whole(job, layout):
        held["gradients"] = FP32 * sum(weights)
    if job.updates_in_backward:  # a gradient is freed once it has updated its weight
        held["gradients"] = 0.0
    if layout.offload in ("optimizer", "all"):
        held["optimizer"] = 0.0
    if layout.offload == "all":
        held["parameters"] = held["gradients"] = 0.0
    return held


def layer_weights(job: TrainingJob, layout: Layout) -> float:
    """Return the weights of the largest layer on a GPU before ZeRO."""
    model = job.model
    split = models.split_parameters(model, model.layers - 1)
    routed = models.expert_parameters(model, model.layers - 1)
    return (split + routed / layout.ep) / layout.tp + models.whole_parameters(model, 0)


def gathered(job: TrainingJob, layout: Layout, stage: int, moment: str) -> float:
    """Return bytes of weights and gradients that FSDP holds whole (ZeRO-3).

    FSDP holds the tables from forward to backward, the current layer, and the next
    layer. In backward it also holds a layer's gradients, as computed and in float32 for
    the reduction. A pipeline's stage keeps all gathered weights, unless it reduces
    gradients in each micro-batch.
    """
    if layout.zero < 3 or layout.shards == 1:
        return 0.0
    dense, experts = weights_of_stage(job, layout, stage)
    number = min(number_bytes(job), 4)
    layer = layer_weights(job, layout)
    if layout.pp > 1 and not stack_of(job).reduces_each:
        return number * (dense + experts)
    tables = (
        0 if stack_of(job).reshards_root else sum(tables_of_stage(job, layout, stage))
    )
    if moment == "loss":
        return number * (tables + layer)
    reduced = 0 if gradients_stay_whole(job, layout) else job.reduce_bytes * layer
    current, coming, gradients = layer, layer, layer
    return number * (current + coming + tables + gradients) + reduced


def buffers(job: TrainingJob, layout: Layout, stage: int) -> float:
    """Return bytes of copies of gradients: DDP's buckets, or Megatron's stand-ins.

    In Transformer Engine and in Megatron's output layer, the product's kernel adds
    weight gradients to float32 buffers. Autograd gets an uninitialized 16-bit tensor of
    each shape.
    """
    stack = stack_of(job)
    dense, experts = weights_of_stage(job, layout, stage)
    if stack.dummy_gradients and job.gradient_bytes == FP32 and layout.zero < 3:
        model, kinds = job.model, layers_of(job.model, layout, stage)
        shapes = max(models.split_parameters(model, layer) for layer, _ in kinds)
        shapes += (
            max(models.expert_parameters(model, layer) for layer, _ in kinds)
            / layout.ep
        )
        return BF16 * (shapes / layout.tp + tables_of_stage(job, layout, stage)[1])
    if layout.zero == 0 and layout.replicas > 1 and stack.bucket_copy:
        return job.gradient_bytes * (dense + experts)
    return 0.0


def returns_gradients_together(job: TrainingJob, layout: Layout) -> bool:
    """Tell whether one compiled graph returns new gradients of all weights at its end.

    Without FSDP or DDP nothing divides the graph of torch.compile (AOTAutograd). The
    gradients of earlier micro-batches and the loss' tensors are still there.
    """
    alone = layout.zero == 0 and layout.replicas == 1
    compiles = job.stack not in ("megatron", "thunder")
    return alone and compiles and job.compiled and layout.micro_batches(job) > 1


def memory_of_stage(job: TrainingJob, layout: Layout, stage: int) -> dict[str, float]:
    """Return bytes by part on one GPU of a stage, at the larger of its two peaks."""
    dense, experts = weights_of_stage(job, layout, stage)
    held = states(job, layout, (dense, experts), shards_of_stage(job, layout, stage))
    held["buffers"] = buffers(job, layout, stage)
    kept = kept_by_stage(job, layout, stage)
    at_loss = held | {
        "activations": kept,
        "logits": logits(job, layout, stage),
        "gathered": gathered(job, layout, stage, "loss"),
    }
    if returns_gradients_together(job, layout):
        at_loss["buffers"] += job.parameter_bytes * (dense + experts)
    in_backward = held | {
        "activations": kept + backward_of_layer(job, layout, stage),
        "logits": 0.0,
        "gathered": gathered(job, layout, stage, "backward"),
    }
    return max(at_loss, in_backward, key=lambda parts: sum(parts.values()))


def distinct_stages(layout: Layout) -> list[int]:
    """Return the first, the second and the last stage: the others are as the second."""
    return sorted({0, min(1, layout.pp - 1), layout.pp - 1})


def memory_of(job: TrainingJob, layout: Layout) -> dict[str, float]:
    """Return bytes by part on the fullest GPU.

    The sum corresponds to torch.cuda.max_memory_allocated.
    """
    if job.adapter_rank:
        return finetune.memory_of_adapters(job, layout)
    held = [memory_of_stage(job, layout, s) for s in distinct_stages(layout)]
    return max(held, key=lambda parts: sum(parts.values()))


def reserved(allocated: float) -> float:
    """Return the bytes of torch.cuda.max_memory_reserved for allocated bytes."""
    return allocated * RESERVED


def memory_limit(gpu: Gpu) -> float:
    """Return the bytes that a job may allocate.

    The CUDA context and the waste of the allocator are subtracted.
    """
    return (gpu.memory_gib * GIB - CONTEXT) * (1 - WASTED)
