"""What one GPU of a layout holds, in bytes: states, gathered weights, activations, logits.

s: tokens of a sequence, b: sequences of a micro-batch, h: hidden, t: tensor parallel ranks.
A GPU is fullest at one of two moments: at the loss, when all layers' tensors and the logits are
there, or in the backward of the last layer, when logits are gone and a layer's gradients are there.
"""

from __future__ import annotations

from functools import cache

from planner import models
from planner.hardware import Gpu
from planner.job import Job, Layout, Model
from planner.stacks import STACKS, Stack

GIB = 2**30
BF16, FP32 = 2, 4  # bytes of a number
# The stage of ZeRO from which on a part is sharded (Rajbhandari et al., 2020, figure 1).
SHARDED_FROM = {"parameters": 3, "gradients": 2, "optimizer": 1}
# Fitted on the rows that validate_memory.py does not hold out: reserved over
# allocated, of torchtitan's rows, whose collectives' streams have pools of their own.
RESERVED = 1.10
# What a job may fill. litgpt trained at 0.89 of a GPU's memory (llama2-13b, 38.1 GB of 42.9), and
# the context of CUDA and NCCL takes about a GiB outside the allocator.
CONTEXT = 1.0 * GIB
WASTED = 0.07  # of the rest: blocks that fit no request


def stack_of(job: Job) -> Stack:
    """Return the facts of the library that runs a job."""
    return STACKS[job.stack]


def number_bytes(job: Job) -> int:
    """Return the bytes of an activation."""
    return FP32 if job.precision in ("fp32", "tf32") else BF16


def layers_of_stages(layers: int, stages: int) -> list[int]:
    """Return each stage's layers; first and last have one less where that is what divides."""
    if (layers + 2) % stages == 0 and layers % stages:
        inner = (layers + 2) // stages
        return [inner - 1, *[inner] * (stages - 2), inner - 1]
    each, more = divmod(layers, stages)
    return [each + (stage < more) for stage in range(stages)]


def layers_of(model: Model, layout: Layout, stage: int) -> list[tuple[int, int]]:
    """Return a stage's kinds of layer: the number of one such layer, and how many there are."""
    counts = layers_of_stages(model.layers, layout.pp)
    start = sum(counts[:stage])
    end = start + counts[stage]
    first = model.dense_layers if model.experts else model.layers  # the first with experts
    dense = max(0, min(end, first) - start)
    kinds = [(0, dense), (model.layers - 1, counts[stage] - dense)]
    return [(layer, count) for layer, count in kinds if count]


def cut_of_sequence(layout: Layout) -> int:
    """Return how many ways tp cuts what it does not compute: sequence parallelism, or 1."""
    return layout.tp if layout.sequence_parallel else 1


# --- States: parameters, gradients, optimizer ---


def tables_of_stage(job: Job, layout: Layout, stage: int) -> tuple[float, float]:
    """Return the weights of the first table and of the output layer on a GPU of a stage."""
    model = job.model
    table = models.table_parameters(model)
    first = table / (1 if stack_of(job).embedding_whole else layout.tp) * (stage == 0)
    tied = model.tied_embeddings and layout.pp == 1
    last = table / layout.tp * (stage == layout.pp - 1 and not tied)
    return first, last


def tensors_of_stage(job: Job, layout: Layout, stage: int) -> list[tuple[float, float, str, int]]:
    """Return the weights on a GPU of a stage before ZeRO: outputs, inputs, kind, how many.

    tp cuts matrices and tables and leaves norms whole (Shoeybi et al., 2019, section 3); ep cuts
    experts. With one stage, tied tables are one.
    """
    model, t = job.model, layout.tp
    found = []
    for layer, count in layers_of(model, layout, stage):
        for outputs, inputs, kind in models.shapes_of_kind(model, models.is_dense(model, layer)):
            if kind in (models.COLUMN, models.EXPERT):
                outputs /= t
            elif kind == models.ROW:
                inputs /= t
            found.append((outputs, inputs, kind, count))
    for table in tables_of_stage(job, layout, stage):
        found.append((table / model.hidden, model.hidden, models.COLUMN, 1))
    last = (stage == layout.pp - 1) * (2 if model.biases else 1)
    found.append((model.hidden, 1, models.WHOLE, last))
    found.append((model.learned_positions, model.hidden, models.WHOLE, int(stage == 0)))
    return found


@cache
def weights_of_stage(job: Job, layout: Layout, stage: int) -> tuple[float, float]:
    """Return the weights on a GPU of a stage before ZeRO: those of all tokens, and of experts."""
    dense = experts = 0.0
    for outputs, inputs, kind, count in tensors_of_stage(job, layout, stage):
        if kind == models.EXPERT:
            experts += outputs * inputs * count / layout.ep
        else:
            dense += outputs * inputs * count
    return dense, experts


@cache
def shards_of_stage(job: Job, layout: Layout, stage: int) -> tuple[float, float]:
    """Return the weights of a stage on the fullest of the ranks that ZeRO shards over.

    FSDP2 cuts each tensor by its rows, and the first ranks get what does not divide (fully_shard,
    dim 0); ZeRO of DeepSpeed and Megatron cuts one long vector.
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
    """Return the numbers of a tensor on the fullest of the ranks that FSDP2 cuts its rows over."""
    return -(-rows // ranks) * columns


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
    if zero == 3 and master and not stack_of(job).sharded_copy:
        bytes_of["parameters"] = FP32
        bytes_of["optimizer"] -= FP32
    return bytes_of


def gathers_once(job: Job, layout: Layout) -> bool:
    """Tell whether ZeRO-3 gathers and reduces a stage's weights once a step: with a pipeline.

    PyTorch's stage frees and reduces nothing before its last backward (backward_maybe_with_nosync
    of torch.distributed.pipelining, stage.py). After a forward torchtitan's default frees nothing
    either (get_fsdp_reshard_after_forward_policy of distributed/fsdp.py); KempnerForge's does.
    """
    return layout.zero == 3 and layout.pp > 1 and not stack_of(job).reshards_stage


def gradients_stay_whole(job: Job, layout: Layout) -> bool:
    """Tell whether micro-batches' gradients are added up whole under ZeRO 2 and 3.

    A pipeline reduces them once a step: its stages' backwards are not one after the other.
    """
    stack, several = stack_of(job), layout.micro_batches(job) > 1
    if job.frozen or layout.zero == 3 and stack.reduces_each:
        return False
    return layout.zero >= 2 and several and (layout.pp > 1 or stack.no_sync)


def states(
    job: Job,
    layout: Layout,
    weights: tuple[float, float],
    shards: tuple[float, float] | None = None,
) -> dict[str, float]:
    """Return bytes of parameters, gradients and optimizer on a GPU (ZeRO, figure 1).

    Experts have fewer copies.
    `weights`, `shards`: those of all tokens, and of experts; shards are even where not given.
    """
    bytes_of = state_bytes_per_weight(job, layout.zero)
    if shards is None:
        shards = (weights[0] / layout.shards, weights[1] / max(1, layout.shards // layout.ep))
    held = {}
    for part, stage in SHARDED_FROM.items():
        held[part] = bytes_of[part] * sum(shards if layout.zero >= stage else weights)
    if gradients_stay_whole(job, layout):
        held["gradients"] = FP32 * sum(weights)
    if layout.offload in ("optimizer", "all"):
        held["optimizer"] = 0.0
    if layout.offload == "all":
        held["parameters"] = held["gradients"] = 0.0
    return held


# --- Activations of a layer, in bytes per token of a cp rank ---


def norm_bytes(job: Job, layout: Layout) -> float:
    """Return what a norm keeps: input (float32 copies where not fused), a number, output.

    Its output is what tp's matrices read: Megatron keeps the rank's slice and gathers it again
    (Korthikanti, section 4.2.2), PyTorch's tensor parallelism keeps it whole.
    """
    stack, h = stack_of(job), job.model.hidden
    number = number_bytes(job)
    kept = number if job.compiled or number == FP32 else stack.norm_bytes
    output = 1 if job.precision == "fp8" and job.stack == "megatron" else number
    cut = cut_of_sequence(layout)
    whole = stack.keeps_gathered and layout.tp > 1
    return (kept * h + FP32) / cut + output * h / (1 if whole else cut)


def mlp_bytes(job: Job, layer: int) -> tuple[float, float]:
    """Return a feed-forward's bytes per token: what tp splits, and what it does not (router).

    GeLU: its input and output. SwiGLU: gate, up, their product, and SiLU's result if not fused.
    Experts: the tokens they got, sorted, for each of top_k; some libraries keep what they return,
    to weight it, and the router's float32 input.
    """
    model, number = job.model, number_bytes(job)
    fused = job.compiled or stack_of(job).swiglu == 3
    inner = (3 if fused else 4) if model.gated else 2
    if models.is_dense(model, layer):
        return number * inner * models.dense_width(model), 0.0
    width = model.ffn * (model.top_k + model.shared_experts)
    routed = number * model.top_k * model.hidden
    router = FP32 * 2 * model.experts
    if stack_of(job).rows_twice:
        routed, router = 2 * routed, router + FP32 * model.hidden
    return number * inner * width, routed + router


def attention_bytes(job: Job, layout: Layout) -> float:
    """Return attention's bytes per token: queries, keys, values, output, and scores if stored.

    Scores: softmax' output and, with dropout, mask and result (Korthikanti, section 4.1: 5 a s).
    Flash attention keeps a float32 number per head instead (Dao et al., 2022).
    """
    model, number = job.model, number_bytes(job)
    queries, keys = models.query_width(model), models.key_width(model)
    if stack_of(job).repeats_keys and not job.compiled:
        keys = queries
    kept = number * 2 * (queries + keys)
    if model.kv_rank:
        kept = latent_attention_bytes(model, number)
    if layout.cp > 1 and layout.cp_kind == "ulysses" and stack_of(job).ulysses_copy:
        kept += number * queries
    if layout.cp > 1 and layout.cp_kind == "gather":
        kept += number * 2 * keys * (layout.cp - 1)
        if stack_of(job).joins_chunks:
            kept += number * queries
    if job.flash:
        return kept + FP32 * model.heads
    if layout.recompute == "selective":
        return kept
    scores = (2 * number + 1) if job.dropout else number
    return kept + scores * model.heads * job.seq_len


def latent_attention_bytes(model: Model, number: int) -> float:
    """Return bytes per token of latent attention: compressed, its norms, and per head."""
    wide, turned = models.query_width(model), model.heads * model.rope_dim
    compressed = 2 * (model.q_rank + model.kv_rank) + model.rope_dim
    per_head = 2 * (wide + turned) + 2 * wide  # queries, keys; values, output
    return number * (compressed + per_head)


def layer_bytes(job: Job, layout: Layout, layer: int = -1) -> float:
    """Return bytes per token of a cp rank that a layer keeps (Korthikanti, equations 1, 2 and 4).

    tp splits attention and feed-forward; norms and dropout's masks (2 h) only with sequence
    parallelism.
    """
    split, whole = mlp_bytes(job, layer % job.model.layers)
    split += attention_bytes(job, layout)
    whole += 2 * job.model.hidden if job.dropout else 0
    kept = split / layout.tp + whole / cut_of_sequence(layout)
    return kept + 2 * norm_bytes(job, layout)


def input_bytes(job: Job, layout: Layout) -> float:
    """Return bytes per token of a layer's input."""
    return number_bytes(job) * job.model.hidden / cut_of_sequence(layout)


def operators_bytes(job: Job, layout: Layout) -> float:
    """Return what torchtitan's selective checkpointing keeps: every second product, attention.

    Of seven products those of queries, values, gate and the last; the layer's input.
    """
    model, number = job.model, number_bytes(job)
    kept = 2 * models.query_width(model) + models.key_width(model)
    kept += models.dense_width(model) + model.hidden
    return (number * kept + FP32 * model.heads) / layout.tp + input_bytes(job, layout)


def kept_bytes(job: Job, layout: Layout, layer: int) -> float:
    """Return bytes per token that a layer keeps from forward to backward."""
    if layout.recompute == "full":
        return input_bytes(job, layout)
    if layout.recompute == "operators":
        return operators_bytes(job, layout)
    return layer_bytes(job, layout, layer)


def layer_gradient_bytes(job: Job, layout: Layout) -> float:
    """Return bytes per token of gradients in a layer's backward: of gate and up, and of h."""
    model, number = job.model, number_bytes(job)
    wide = models.dense_width(model) if not model.experts else model.ffn * model.top_k
    inner = (2 if model.gated else 1) * wide
    return number * inner / layout.tp + input_bytes(job, layout)


# --- A stage ---


def in_flight(pp: int, stage: int, micro_batches: int, virtual_stages: int = 1) -> float:
    """Return micro-batches whose activations a stage holds at once, in units of its layers.

    1F1B (Narayanan et al., 2021, section 2.2). With several virtual stages interleaved: v p + p - 1
    chunks of 1/v on stage 0 (Korthikanti et al., 2022, section 4.2.3).
    """
    if virtual_stages == 1:
        return min(micro_batches, pp - stage)
    chunks = 2 * (pp - stage - 1) + (virtual_stages - 1) * pp + 1
    return min(micro_batches * virtual_stages, chunks) / virtual_stages


def tokens_of(job: Job, layout: Layout) -> float:
    """Return a micro-batch's tokens on a rank of cp: b s / cp."""
    return layout.micro_batch * job.seq_len / layout.cp


def kept_by_stage(job: Job, layout: Layout, stage: int) -> float:
    """Return bytes that a stage's layers keep when it holds most micro-batches."""
    flying = in_flight(layout.pp, stage, layout.micro_batches(job), layout.virtual_stages)
    kinds = layers_of(job.model, layout, stage)
    kept = sum(count * kept_bytes(job, layout, layer) for layer, count in kinds)
    if job.dropout and stage == 0:  # the mask of the embeddings' (Korthikanti, section 4.3)
        kept += job.model.hidden / cut_of_sequence(layout)
    return tokens_of(job, layout) * flying * kept


def edge_bytes(job: Job, layout: Layout) -> float:
    """Return bytes per token beside layers', without a pipeline (Korthikanti, section 4.3).

    The embeddings' dropout mask, the last norm's input and the output layer's; not the logits.
    """
    mask = 1 if job.dropout else 0
    return (mask + 2 * number_bytes(job)) * job.model.hidden / layout.tp


def backward_of_layer(job: Job, layout: Layout, stage: int) -> float:
    """Return bytes of one layer's backward: its gradients; all of it where it is computed again."""
    again = 0.0
    if layout.recompute in ("full", "operators"):
        for layer, _ in layers_of(job.model, layout, stage):
            one = layer_bytes(job, layout, layer) - kept_bytes(job, layout, layer)
            again = max(again, one)
    return tokens_of(job, layout) * (again + layer_gradient_bytes(job, layout))


def logit_bytes(job: Job) -> int:
    """Return bytes per logit at the loss: by the library, or of a fused kernel.

    A fused kernel writes the gradient over the logits; torch.compile keeps both.
    """
    if job.fused_loss:
        return BF16 if job.stack == "megatron" else 2 * BF16
    return stack_of(job).logit_bytes


def logits(job: Job, layout: Layout, stage: int) -> float:
    """Return bytes of logits and of the last norm's input and output, on the last stage.

    Under tp the output layer reads all of h: gathered, and its gradient too.
    """
    if stage < layout.pp - 1:
        return 0.0
    h, number = job.model.hidden, number_bytes(job)
    whole = 1 if stack_of(job).loss_whole else layout.tp
    edge = 2 * number * h / cut_of_sequence(layout) + 2 * number * h
    return tokens_of(job, layout) * (logit_bytes(job) * job.model.vocab / whole + edge)


def layer_weights(job: Job, layout: Layout) -> float:
    """Return the weights of the largest layer on a GPU before ZeRO."""
    model = job.model
    split = models.split_parameters(model, model.layers - 1)
    routed = models.expert_parameters(model, model.layers - 1)
    return (split + routed / layout.ep) / layout.tp + models.whole_parameters(model, 0)


def gathered(job: Job, layout: Layout, stage: int, moment: str) -> float:
    """Return bytes of weights and gradients that FSDP holds whole (ZeRO-3).

    The tables stay from forward to backward; a layer in use and the next on its way; in backward
    a layer's gradients as computed and in float32 as they are reduced. A pipeline's stage keeps
    all that it gathered, unless it reduces in each micro-batch.
    """
    if layout.zero < 3 or layout.shards == 1:
        return 0.0
    dense, experts = weights_of_stage(job, layout, stage)
    number = min(number_bytes(job), 4)
    layer = layer_weights(job, layout)
    if layout.pp > 1 and not stack_of(job).reduces_each:
        return number * (dense + experts)
    tables = 0 if stack_of(job).reshards_root else sum(tables_of_stage(job, layout, stage))
    if moment == "loss":
        return number * (tables + layer)
    reduced = 0 if gradients_stay_whole(job, layout) else FP32 * layer
    return number * (2 * layer + tables + layer) + reduced  # a block, the next one, gradients


def buffers(job: Job, layout: Layout, stage: int) -> float:
    """Return bytes of copies of gradients: DDP's buckets, or Megatron's stand-ins.

    Transformer Engine and Megatron's output layer add weight gradients to float32 buffers in the
    product's kernel and hand autograd an uninitialised 16-bit tensor of each shape.
    """
    stack = stack_of(job)
    dense, experts = weights_of_stage(job, layout, stage)
    if stack.dummy_gradients and job.gradient_bytes == FP32 and layout.zero < 3:
        model, kinds = job.model, layers_of(job.model, layout, stage)
        shapes = max(models.split_parameters(model, layer) for layer, _ in kinds)
        shapes += max(models.expert_parameters(model, layer) for layer, _ in kinds) / layout.ep
        return BF16 * (shapes / layout.tp + tables_of_stage(job, layout, stage)[1])
    if layout.zero == 0 and layout.replicas > 1 and stack.bucket_copy:
        return job.gradient_bytes * (dense + experts)
    return 0.0


def returns_gradients_together(job: Job, layout: Layout) -> bool:
    """Tell whether one compiled graph computes all gradients, beside those added up before.

    Without FSDP or DDP nothing cuts the graph of torch.compile: it returns the gradients of all
    weights at its end, while the loss' tensors are still its inputs' (AOTAutograd).
    """
    alone = layout.zero == 0 and layout.replicas == 1
    own = job.stack not in ("megatron", "thunder")
    return alone and own and job.compiled and layout.micro_batches(job) > 1


def memory_of_stage(job: Job, layout: Layout, stage: int) -> dict[str, float]:
    """Return bytes by part on one GPU of a stage, at the fuller of its two moments."""
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


def memory_of(job: Job, layout: Layout, gpus_per_node: int = 8) -> dict[str, float]:
    """Return bytes by part on the fullest GPU: what torch.cuda.max_memory_allocated would say."""
    stages = sorted({0, min(1, layout.pp - 1), layout.pp - 1})
    return max((memory_of_stage(job, layout, s) for s in stages), key=lambda m: sum(m.values()))


# --- DeepSpeed's own estimate ---

T5_3B = 2_851_598_336  # weights of t5-3b, DeepSpeed's example


def deepspeed_estimate(
    weights: float,
    largest_layer: float,
    gpus_per_node: int,
    nodes: int = 1,
    stage: int = 3,
    parameters_on_host: bool = False,
    optimizer_on_host: bool = False,
    sharded_at_start: bool = True,
    spare: float = 1.5,
) -> tuple[float, float]:
    """Return bytes of model states on a GPU and in a node's RAM, as DeepSpeed documents them.

    Source: DeepSpeed's documentation, "Memory Requirements": fp16 weights and gradients, 16 bytes
    of float32 copies and moments in its count; `spare` is its additional buffer factor.
    """
    gpus = gpus_per_node * nodes
    copies = 4 * gpus_per_node  # each process builds the model in float32
    if stage == 2:
        on_gpu = 2 * weights if optimizer_on_host else 4 * weights + 16 * weights / gpus
        on_host = max(copies, 16) if optimizer_on_host else copies
        return on_gpu, weights * on_host * spare
    on_gpu = 4 * largest_layer
    if not optimizer_on_host:
        on_gpu += 18 * weights / gpus
        built = largest_layer if sharded_at_start else weights
        return on_gpu, built * copies * spare
    shards = 18 if parameters_on_host else 16
    if not parameters_on_host:
        on_gpu += 2 * weights / gpus
    on_host = shards / nodes if sharded_at_start else max(copies, shards / nodes)
    return on_gpu, weights * on_host * spare


def reserved(allocated: float) -> float:
    """Return what torch.cuda.max_memory_reserved would say: streams' pools, and what fragments."""
    return allocated * RESERVED


def memory_limit(gpu: Gpu) -> float:
    """Return the bytes that a job may allocate: less context and what the allocator wastes."""
    return (gpu.memory_gib * GIB - CONTEXT) * (1 - WASTED)
