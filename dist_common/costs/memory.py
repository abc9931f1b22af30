"""What one GPU of a layout holds, in bytes: states, gathered weights, activations, logits.

s: tokens of a sequence, b: sequences of a micro-batch, h: hidden, t: tensor parallel ranks.
"""

from __future__ import annotations

from dist_common.costs import models
from dist_common.costs.hardware import Gpu
from dist_common.costs.job import Job, Layout, Model

GIB = 2**30
BF16, FP32 = 2, 4  # bytes of a number
LOGIT_BYTES = 10  # bfloat16 logit, float32 copy, float32 probabilities whose gradient is in place
CONTEXT = 1.5 * GIB  # CUDA's context, cuBLAS' workspace and NCCL's buffers: outside the allocator
FRAGMENTED = 0.04  # of the memory: what the allocator reserves and cannot give


def layers_of_stages(layers: int, stages: int) -> list[int]:
    """Return each stage's layers; first and last have one less where that is what divides."""
    if layers % stages == 0:
        return [layers // stages] * stages
    if (layers + 2) % stages == 0:
        inner = (layers + 2) // stages
        return [inner - 1, *[inner] * (stages - 2), inner - 1]
    each, more = divmod(layers, stages)
    return [each + (stage < more) for stage in range(stages)]


def first_layer(layers: int, stages: int, stage: int) -> int:
    """Return the number of a stage's first layer."""
    return sum(layers_of_stages(layers, stages)[:stage])


def weights_of_stage(model: Model, layout: Layout, stage: int) -> tuple[float, float]:
    """Return the weights on a GPU of a stage before ZeRO: those of all tokens, and of experts.

    tp splits matrices and tables and leaves norms whole (Shoeybi et al., 2019, section 3);
    ep splits experts.
    """
    start = first_layer(model.layers, layout.pp, stage)
    numbers = range(start, start + layers_of_stages(model.layers, layout.pp)[stage])
    last = stage == layout.pp - 1
    tables = (stage == 0) + (last and not (model.tied_embeddings and layout.pp == 1))
    split = tables * models.table_parameters(model)
    split += sum(models.split_parameters(model, layer) for layer in numbers)
    whole = sum(models.whole_parameters(model, layer) for layer in numbers)
    whole += last * model.hidden * (2 if model.biases else 1)
    whole += (stage == 0) * model.learned_positions * model.hidden
    experts = sum(models.expert_parameters(model, layer) for layer in numbers)
    return split / layout.tp + whole, experts / layout.tp / layout.ep


def state_bytes_per_weight(job: Job, zero: int) -> dict[str, float]:
    """Return bytes per weight: parameters, gradients, optimizer (ZeRO, section 3).

    FSDP2 (zero 3) keeps float32 shards that it casts when it gathers them: the master copy is the
    parameter. Megatron and DeepSpeed keep 16-bit parameters beside it.
    """
    bytes_of = {
        "parameters": job.parameter_bytes,
        "gradients": job.gradient_bytes,
        "optimizer": job.optimizer_bytes,
    }
    master = job.parameter_bytes < FP32 and job.optimizer_bytes >= 12
    if zero == 3 and master and not job.sharded_copy:
        bytes_of["parameters"] = FP32
        bytes_of["optimizer"] -= FP32
    return bytes_of


def states(job: Job, layout: Layout, dense: float, experts: float = 0) -> dict[str, float]:
    """Return bytes of parameters, gradients and optimizer on a GPU (ZeRO, figure 1).

    Stage 1 shards the optimizer, 2 gradients too, 3 parameters too. Experts have fewer copies.
    """
    bytes_of = state_bytes_per_weight(job, layout.zero)
    sharded_from = {"parameters": 3, "gradients": 2, "optimizer": 1}
    held = {}
    for part, stage in sharded_from.items():
        over = layout.shards if layout.zero >= stage else 1
        over_experts = max(1, over // layout.ep)
        held[part] = bytes_of[part] * (dense / over + experts / over_experts)
    if layout.offload in ("optimizer", "all"):
        held["optimizer"] = 0.0
    if layout.offload == "all":
        held["parameters"] = 0.0
        held["gradients"] = 0.0
    return held


def in_flight(pp: int, stage: int, micro_batches: int, virtual_stages: int = 1) -> float:
    """Return micro-batches whose activations a stage holds at once, in units of its layers.

    1F1B (Narayanan et al., 2021, section 2.2); interleaved: v p + p - 1 chunks of 1/v on stage 0
    (Korthikanti et al., 2022, section 4.2.3).
    """
    if virtual_stages == 1:
        return min(pp - stage, micro_batches)
    chunks = 2 * (pp - stage - 1) + (virtual_stages - 1) * pp + 1
    return min(chunks / virtual_stages, micro_batches)


def mlp_bytes(job: Job, layer: int) -> tuple[float, float]:
    """Return a feed-forward's bytes per token: what tp splits, and what it does not (router).

    GeLU: its input and output. SwiGLU: gate, up and product, where not compiled SiLU's output too.
    """
    model = job.model
    kept = (3 if job.compiled else 4) if model.gated else 2
    if models.is_dense(model, layer):
        return BF16 * kept * models.dense_width(model), 0.0
    width = model.ffn * (model.top_k + model.shared_experts)
    copies = BF16 * 2 * model.top_k * model.hidden  # tokens as experts get them, and what they give
    return BF16 * kept * width + copies, FP32 * 2 * model.experts


def attention_bytes(job: Job, layout: Layout) -> float:
    """Return attention's bytes per token: queries, keys, values, output, and scores if stored.

    Scores: softmax' output and, with dropout, mask and result (Korthikanti, section 4.1: 5 a s).
    """
    model = job.model
    kept = BF16 * 2 * (models.query_width(model) + models.key_width(model))
    if job.flash:
        return kept + FP32 * model.heads  # log-sum-exp
    if layout.recompute == "selective":
        return kept
    return kept + (5 if job.dropout else 2) * model.heads * job.seq_len


def layer_bytes(job: Job, layout: Layout, layer: int = -1) -> float:
    """Return bytes per token of a cp rank that a layer keeps (Korthikanti, equations 1, 2 and 4).

    tp splits attention and feed-forward; norms' inputs and outputs (8 h) and dropout's masks (2 h)
    only with sequence parallelism.
    """
    model = job.model
    split, whole = mlp_bytes(job, layer % model.layers)
    split += attention_bytes(job, layout)
    whole += BF16 * 4 * model.hidden + 2 * FP32
    whole += 2 * model.hidden if job.dropout else 0
    return split / layout.tp + whole / (layout.tp if layout.sequence_parallel else 1)


def activations(job: Job, layout: Layout, stage: int) -> float:
    """Return bytes that a stage's layers keep at its peak.

    With full recomputation: each layer's input, and one layer whole while it is recomputed.
    """
    model = job.model
    tokens = layout.micro_batch * job.seq_len / layout.cp
    start = first_layer(model.layers, layout.pp, stage)
    count = layers_of_stages(model.layers, layout.pp)[stage]
    flying = in_flight(layout.pp, stage, layout.micro_batches(job), layout.virtual_stages)
    kept = [layer_bytes(job, layout, start + index) for index in range(count)]
    if layout.recompute == "full":
        cut = layout.tp if layout.sequence_parallel else 1
        return tokens * (flying * count * BF16 * model.hidden / cut + max(kept))
    return tokens * flying * sum(kept)


def logits(job: Job, layout: Layout, stage: int) -> float:
    """Return bytes of logits and of the last norm's input and output, on the last stage."""
    if stage < layout.pp - 1:
        return 0.0
    tokens = layout.micro_batch * job.seq_len / layout.cp
    return tokens * (LOGIT_BYTES * job.model.vocab + 2 * BF16 * job.model.hidden) / layout.tp


def gathered(job: Job, layout: Layout, stage: int) -> float:
    """Return bytes of the weights and gradients that FSDP holds whole (ZeRO-3).

    A layer in use and the next on its way, and one table; the gradients of one layer in float32.
    """
    if layout.zero < 3:
        return 0.0
    model = job.model
    layer = models.layer_parameters(model) / layout.tp
    if model.experts:
        routed = models.expert_parameters(model, model.layers - 1)
        layer = (models.layer_parameters(model) - routed + routed / layout.ep) / layout.tp
    edge = stage in (0, layout.pp - 1)
    table = edge * models.table_parameters(model) / layout.tp
    return job.parameter_bytes * (2 * layer + table) + job.gradient_bytes * max(layer, table)


def memory_of_stage(job: Job, layout: Layout, stage: int) -> dict[str, float]:
    """Return bytes by part on one GPU of a stage, at its peak."""
    dense, experts = weights_of_stage(job.model, layout, stage)
    return states(job, layout, dense, experts) | {
        "activations": activations(job, layout, stage),
        "logits": logits(job, layout, stage),
        "gathered": gathered(job, layout, stage),
    }


def memory_of(job: Job, layout: Layout, gpus_per_node: int = 8) -> dict[str, float]:
    """Return bytes by part on the fullest GPU: what torch.cuda.max_memory_allocated would say."""
    stages = range(layout.pp) if layout.pp < 4 else (0, 1, layout.pp - 1)
    return max((memory_of_stage(job, layout, s) for s in stages), key=lambda m: sum(m.values()))


def memory_limit(gpu: Gpu) -> float:
    """Return the bytes that a job may allocate: all but context and what fragments."""
    return gpu.memory_gib * GIB * (1 - FRAGMENTED) - CONTEXT
