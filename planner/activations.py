"""The bytes that a GPU keeps from forward to backward: activations and logits.

s: tokens of a sequence, b: sequences of a micro-batch, h: hidden, t: tensor parallel
ranks.
"""

from __future__ import annotations

from planner import models
from planner.job import Layout, ModelShape, TrainingJob
from planner.stacks import STACKS, Stack

BF16, FP32 = 2, 4  # bytes of a number
LOSS_CHUNKS = 8  # of a micro-batch's tokens (torchtune, Liger: logits of one at a time)


def stack_of(job: TrainingJob) -> Stack:
    """Return the facts of the library that runs a job."""
    return STACKS[job.stack]


def number_bytes(job: TrainingJob) -> int:
    """Return the bytes of an activation."""
    return FP32 if job.precision in ("fp32", "tf32") else BF16


def layers_of_stages(layers: int, stages: int) -> list[int]:
    """Return the layers of each stage.

    If only layers + 2 divides evenly, the first and the last stage have one layer less.
    """
    if (layers + 2) % stages == 0 and layers % stages:
        inner = (layers + 2) // stages
        return [inner - 1, *[inner] * (stages - 2), inner - 1]
    each, more = divmod(layers, stages)
    return [each + (stage < more) for stage in range(stages)]


def layers_of(model: ModelShape, layout: Layout, stage: int) -> list[tuple[int, int]]:
    """Return (number of one layer, count) for each kind of layer of a stage.

    The kinds are dense layers and layers with experts.
    """
    counts = layers_of_stages(model.layers, layout.pp)
    start = sum(counts[:stage])
    end = start + counts[stage]
    first_experts = model.dense_layers if model.experts else model.layers
    dense = max(0, min(end, first_experts) - start)
    kinds = [(0, dense), (model.layers - 1, counts[stage] - dense)]
    return [(layer, count) for layer, count in kinds if count]


def sequence_ranks(layout: Layout) -> int:
    """Return the ranks that share norms and residuals: tp's, or 1 without sequence
    parallelism.
    """
    return layout.tp if layout.sequence_parallel else 1


# --- Activations of a layer, in bytes per token of a cp rank ---


def norm_bytes(job: TrainingJob, layout: Layout) -> float:
    """Return the bytes that a norm keeps: its input, its scale and its output.

    tp's matrices read the output. Megatron keeps the rank's slice and gathers the whole
    again (Korthikanti, section 4.2.2). PyTorch's tensor parallelism keeps the whole.
    """
    stack, h = stack_of(job), job.model.hidden
    number = number_bytes(job)
    kept = number if job.compiled or number == FP32 else stack.norm_bytes
    output = 1 if job.precision == "fp8" and job.stack == "megatron" else number
    ranks = sequence_ranks(layout)
    whole = stack.keeps_gathered and layout.tp > 1
    return (kept * h + FP32) / ranks + output * h / (1 if whole else ranks)


def mlp_bytes(job: TrainingJob, layer: int) -> tuple[float, float]:
    """Return a feed-forward's bytes per token: the part that tp splits, and the rest.

    GeLU keeps its input and output. SwiGLU keeps gate, up, their product, and without a
    fused kernel SiLU's result. Experts keep the sorted tokens, once for each of top_k.
    Some libraries also keep the experts' results and the router's float32 input.
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


def attention_bytes(job: TrainingJob, layout: Layout) -> float:
    """Return attention's bytes per token: queries, keys, values, output, stored scores.

    Stored scores are the softmax output and, with dropout, a mask and the result
    (Korthikanti, section 4.1: 5 a s). Flash attention keeps a float32 number per head
    instead (Dao et al., 2022).
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


def latent_attention_bytes(model: ModelShape, number: int) -> float:
    """Return bytes per token of latent attention: compressed, norms, and per head."""
    wide, rotated = models.query_width(model), model.heads * model.rope_dim
    compressed = 2 * (model.q_rank + model.kv_rank) + model.rope_dim
    per_head = 2 * (wide + rotated) + 2 * wide  # queries, keys; values, output
    return number * (compressed + per_head)


def layer_bytes(job: TrainingJob, layout: Layout, layer: int = -1) -> float:
    """Return the bytes that a layer keeps for each token of a cp rank.

    tp splits attention and feed-forward. It splits norms and dropout's masks (2 h) only
    with sequence parallelism (Korthikanti, equations 1, 2 and 4).
    """
    split, whole = mlp_bytes(job, layer % job.model.layers)
    split += attention_bytes(job, layout)
    whole += 2 * job.model.hidden if job.dropout else 0
    kept = split / layout.tp + whole / sequence_ranks(layout)
    return kept + 2 * norm_bytes(job, layout)


def input_bytes(job: TrainingJob, layout: Layout) -> float:
    """Return bytes per token of a layer's input."""
    return number_bytes(job) * job.model.hidden / sequence_ranks(layout)


def operators_bytes(job: TrainingJob, layout: Layout) -> float:
    """Return bytes per token with torchtitan's selective checkpointing.

    It keeps the layer's input, attention's output, and every second product: queries,
    values, gate and the last one.
    """
    model, number = job.model, number_bytes(job)
    kept = 2 * models.query_width(model) + models.key_width(model)
    kept += models.dense_width(model) + model.hidden
    return (number * kept + FP32 * model.heads) / layout.tp + input_bytes(job, layout)


def kept_bytes(job: TrainingJob, layout: Layout, layer: int) -> float:
    """Return bytes per token that a layer keeps from forward to backward."""
    if layout.recompute == "full":
        return input_bytes(job, layout)
    if layout.recompute == "operators":
        return operators_bytes(job, layout)
    return layer_bytes(job, layout, layer)


def layer_gradient_bytes(job: TrainingJob, layout: Layout) -> float:
    """Return bytes per token of the gradients of gate and up, and of the residual."""
    model, number = job.model, number_bytes(job)
    wide = models.dense_width(model) if not model.experts else model.ffn * model.top_k
    inner = (2 if model.gated else 1) * wide
    return number * inner / layout.tp + input_bytes(job, layout)


# --- A stage ---


def in_flight(
    pp: int, stage: int, micro_batches: int, virtual_stages: int = 1
) -> float:
    """Return the micro-batches whose activations a stage holds at once.

    1F1B: Narayanan et al., 2021, section 2.2. Interleaved stages count in shares of a
    rank's layers: stage 0 holds v p + p - 1 chunks of 1/v each (Korthikanti et al.,
    2022, section 4.2.3).
    """
    if virtual_stages == 1:
        return min(micro_batches, pp - stage)
    chunks = 2 * (pp - stage - 1) + (virtual_stages - 1) * pp + 1
    return min(micro_batches * virtual_stages, chunks) / virtual_stages


def tokens_of(job: TrainingJob, layout: Layout) -> float:
    """Return the tokens of a micro-batch on a cp rank: b s / cp."""
    return layout.micro_batch * job.seq_len / layout.cp


def kept_by_stage(job: TrainingJob, layout: Layout, stage: int) -> float:
    """Return bytes that a stage keeps when it holds the most micro-batches."""
    flying = in_flight(
        layout.pp, stage, layout.micro_batches(job), layout.virtual_stages
    )
    kinds = layers_of(job.model, layout, stage)
    kept = sum(count * kept_bytes(job, layout, layer) for layer, count in kinds)
    if job.dropout and stage == 0:
        # The mask of the embeddings (Korthikanti, section 4.3).
        kept += job.model.hidden / sequence_ranks(layout)
    return tokens_of(job, layout) * flying * kept


def backward_of_layer(job: TrainingJob, layout: Layout, stage: int) -> float:
    """Return bytes of a layer's backward: its gradients, and recomputed tensors."""
    again = 0.0
    if layout.recompute in ("full", "operators"):
        for layer, _ in layers_of(job.model, layout, stage):
            one = layer_bytes(job, layout, layer) - kept_bytes(job, layout, layer)
            again = max(again, one)
    return tokens_of(job, layout) * (again + layer_gradient_bytes(job, layout))


def logit_bytes(job: TrainingJob) -> float:
    """Return bytes per logit at the loss.

    A loss in chunks holds a part of the logits. A fused kernel writes the gradient over
    the logits in Megatron-LM; torch.compile keeps both.
    """
    if job.loss == "fused":
        return BF16 if job.stack == "megatron" else 2 * BF16
    chunks = LOSS_CHUNKS if job.loss == "chunked" else 1
    return stack_of(job).logit_bytes / chunks


def logits(job: TrainingJob, layout: Layout, stage: int) -> float:
    """Return the last stage's bytes of logits, and of the last norm's input and output.

    With tp the output layer gathers its whole input, and the gradient of this input.
    """
    if stage < layout.pp - 1:
        return 0.0
    h, number = job.model.hidden, number_bytes(job)
    whole = 1 if stack_of(job).loss_whole else layout.tp
    edge = 2 * number * h / sequence_ranks(layout) + 2 * number * h
    return tokens_of(job, layout) * (logit_bytes(job) * job.model.vocab / whole + edge)
