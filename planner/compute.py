"""Work of a GPU in a layer and its time: products, attention, memory, launches."""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner import models
from planner.activations import sequence_ranks, tokens_of
from planner.hardware import Cluster
from planner.job import Layout, ModelShape, TrainingJob
from planner.rates import rate_of

NARROW = ("fp8", "fp8-rows", "fp4")  # products of layers; the head stays in 16 bits
WIDTH = 2  # bytes of a number: bfloat16 or float16
HBM = 0.85  # share of the memory's rate that kernels reach
ATTENTION_BACKWARD = 0.8  # of forward's rate (Dao, 2023, figure 5)
ATTENTION_STORED = 0.5  # of the peak: products of attention that stores its scores
# 16-bit numbers that are read and written, forward. A float32 number counts twice.
FFN_PASSES = 3.0  # of the feed-forward's width: activation
SCORE_PASSES = 8.0  # of each score that is stored
LOGIT_PASSES = 6.0  # of each logit, forward and backward
# Eager kernels of Llama's RMSNorm: cast 3, square 4, mean 2, scale 4, cast 3, weight 2;
# less the 2 of one LayerNorm kernel, which `passes.hidden` has.
RMS_NORM_PASSES = 3 + 4 + 2 + 4 + 3 + 2 - 2
ROTARY_PASSES = 3 + 4 + 3  # of queries and keys: cast, complex product, cast
ROTARY_FUSED_PASSES = 2
LAUNCH_COMPILED_US = 150.0  # to launch a compiled layer's forward


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of one layer, or of the head, for one micro-batch."""

    forward: float
    backward: float
    attention: float  # included in forward
    attention_backward: float
    # The part of forward that recomputation of "operators" repeats: all but attention
    # and every second product. ("selective" repeats attention.)
    half: float = 0.0


def product_seconds(m, n, k, job: TrainingJob, cluster: Cluster, rates) -> float:
    """Return the seconds of a product (m, k) x (k, n).

    The tensor cores wait for part of the operands' traffic, so short sides reach a
    smaller share of the peak: a side of s gives s / (s + side). `side` is the number of
    times that an operand is moved x the GPU's FLOPs per byte of memory traffic
    (roofline: Williams et al., 2009).
    """
    gpu = cluster.gpu
    share = rate_of(rates, "matrix", gpu.family)
    if job.precision in NARROW:
        share *= rates[f"matrix.{job.precision}"]
    peak = gpu.tflops.get(job.precision.split("-")[0]) or gpu.tflops["bf16"]
    if job.precision == "fp4":
        # Power limits it: GB300 gains over GB200 as much as in 8 bits.
        peak = min(peak, 4 * gpu.tflops["bf16"])
    side = rate_of(rates, "traffic", gpu.family) * peak * 1e12 / (gpu.hbm_gb_s * 1e9)
    longer = (1 + side / m) * (1 + side / n) * (1 + side / k)
    rate = peak * 1e12 * share * cluster.matrix_scale
    return 2 * m * n * k / rate * longer


def three_products(m, n, k, job, cluster, rates) -> tuple[float, float]:
    """Return seconds of a matrix forward, and of its two products backward."""
    forward = product_seconds(m, n, k, job, cluster, rates)
    to_input = product_seconds(m, k, n, job, cluster, rates)
    if job.frozen:
        return forward, to_input
    to_weight = product_seconds(k, n, m, job, cluster, rates)
    return forward, to_input + to_weight


def fuses(job: TrainingJob) -> bool:
    """Tell whether norms and activations run in fused kernels."""
    return job.compiled or job.stack in ("megatron", "thunder")


def memory_seconds(numbers: float, cluster: Cluster) -> float:
    """Return the seconds to read or write a number of 16-bit numbers."""
    return WIDTH * numbers / (cluster.gpu.hbm_gb_s * 1e9 * HBM)


def attention_flops(model: ModelShape, pairs: float) -> float:
    """Return forward's FLOPs for a number of pairs of a query and a key, in all heads.

    Latent attention adds the rotated numbers of queries and keys to the scores.
    """
    return 2 * pairs * (2 * models.query_width(model) + model.heads * model.rope_dim)


def attention_seconds(
    job: TrainingJob, layout: Layout, cluster: Cluster, rates
) -> tuple[float, float]:
    """Return seconds of softmax(QK')V forward and backward, per micro-batch and layer.

    Flash attention skips the masked half and computes the scores again in backward: 2.5
    times forward's products (Dao, 2023, section 4.1). Each generation of kernels has a
    rate for each family of GPUs. Attention with stored scores computes both halves.
    """
    model = job.model
    gpu = cluster.gpu
    peak = gpu.tflops["fp16"] * 1e12 * cluster.matrix_scale
    sequences = layout.micro_batch
    pairs = sequences * job.seq_len * job.seq_len / layout.cp / layout.tp
    flops = attention_flops(model, pairs)
    if job.flash:
        rate = rate_of(rates, f"attention.{job.attention}", gpu.family)
        forward = flops / 2 / (peak * rate)
        return forward, 2.5 * forward / ATTENTION_BACKWARD
    products = flops / (peak * ATTENTION_STORED)
    scores = memory_seconds(SCORE_PASSES * pairs * model.heads, cluster)
    return products + scores, 2 * products + 1.5 * scores


def attention_matrices(model: ModelShape, t: int) -> list[tuple[float, float]]:
    """Return (n, k) of attention's matrices on one of t GPUs.

    Latent attention projects down to a rank, whole on each GPU, and up to the heads
    (DeepSeek-V2, section 2.1).
    """
    h, queries, keys = model.hidden, models.query_width(model), models.key_width(model)
    if not model.kv_rank:
        return [((queries + 2 * keys) / t, h), (h, queries / t)]
    rotated = queries + model.heads * model.rope_dim
    to_queries = [(rotated / t, h)]
    if model.q_rank:
        to_queries = [(model.q_rank, h), (rotated / t, model.q_rank)]
    return [
        *to_queries,
        (model.kv_rank + model.rope_dim, h),
        (2 * queries / t, model.kv_rank),
        (h, queries / t),
    ]


def layer_matrices(
    job: TrainingJob, layout: Layout, dense: bool
) -> list[tuple[float, float, float]]:
    """Return (m, n, k) of a layer's products on one GPU, without routed experts."""
    model = job.model
    t = layout.tp
    tokens = tokens_of(job, layout)
    shapes = [(tokens, n, k) for n, k in attention_matrices(model, t)]
    width = models.dense_width(model) if dense else model.shared_experts * model.ffn
    up = 2 if model.gated else 1
    if width:
        shapes.append((tokens, up * width / t, model.hidden))
        shapes.append((tokens, model.hidden, width / t))
    return shapes


def expert_matrices(
    job: TrainingJob, layout: Layout
) -> tuple[int, list[tuple[float, float, float]]]:
    """Return a GPU's number of experts, and (m, n, k) of the products of one.

    Tokens are spread evenly over the experts.
    """
    model = job.model
    experts = max(1, model.experts // layout.ep)
    tokens = (
        layout.micro_batch
        * job.seq_len
        / layout.cp
        * model.top_k
        * layout.ep
        / model.experts
    )
    t = layout.tp
    up = 2 if model.gated else 1
    return experts, [
        (tokens, up * model.ffn / t, model.hidden),
        (tokens, model.hidden, model.ffn / t),
    ]


def layer_numbers(
    job: TrainingJob, layout: Layout, width: int, dense: bool, rates
) -> float:
    """Return the 16-bit numbers that norms, residuals and activations move forward.

    For each token of a micro-batch on a rank; width: of the feed-forward, all experts
    of a token. A model without a table of positions rotates queries and keys, and a
    model with a gated feed-forward has RMSNorm.
    """
    model = job.model
    ranks = sequence_ranks(layout)
    hidden = model.hidden * (1 if dense else 1 + model.top_k / 2)
    numbers = rates["passes.hidden"] * hidden / ranks
    numbers += FFN_PASSES * width * (1.5 if model.gated else 1) / layout.tp
    rotated = 0 if model.learned_positions else models.rotated_width(model) / layout.tp
    if fuses(job):
        return rates["passes.compiled"] * numbers + ROTARY_FUSED_PASSES * rotated
    if model.gated:
        numbers += RMS_NORM_PASSES * model.norms * model.hidden / ranks
    return numbers + ROTARY_PASSES * rotated


def layer_seconds(job, layout, cluster, rates, dense: bool = True) -> LayerSeconds:
    """Return the seconds of one layer on one GPU for one micro-batch.

    Communication is not included.
    """
    model = job.model
    tokens = tokens_of(job, layout)
    forward = backward = 0.0
    for m, n, k in layer_matrices(job, layout, dense):
        one, two = three_products(m, n, k, job, cluster, rates)
        forward += one
        backward += two
    width = models.dense_width(model) if dense else model.shared_experts * model.ffn
    if not dense:
        experts, shapes = expert_matrices(job, layout)
        for m, n, k in shapes:
            one, two = three_products(m, n, k, job, cluster, rates)
            forward += experts * one
            backward += experts * two
        width += model.top_k * model.ffn
    numbers = layer_numbers(job, layout, width, dense, rates)
    moved = memory_seconds(numbers * tokens, cluster)
    attention, attention_backward = attention_seconds(job, layout, cluster, rates)
    products = forward
    forward += moved + attention
    backward += 1.5 * moved + attention_backward
    half = products / 2 + moved
    return LayerSeconds(forward, backward, attention, attention_backward, half)


def launch_seconds(job: TrainingJob, rates) -> float:
    """Return the host's seconds to launch a layer's forward, the GPU's lower limit."""
    return (LAUNCH_COMPILED_US if job.compiled else rates["launch.eager_us"]) * 1e-6


def head_seconds(
    job: TrainingJob, layout: Layout, cluster: Cluster, rates
) -> LayerSeconds:
    """Return the seconds of logits and loss, for one micro-batch on the last stage."""
    tokens = tokens_of(job, layout)
    vocab = job.model.vocab / layout.tp
    sixteen = replace(job, precision="bf16") if job.precision in NARROW else job
    one, two = three_products(tokens, vocab, job.model.hidden, sixteen, cluster, rates)
    passes = rates["passes.compiled"] if fuses(job) else 1.0
    moved = memory_seconds(passes * LOGIT_PASSES * tokens * vocab, cluster)
    return LayerSeconds(one + moved / 2, two + moved / 2, 0.0, 0.0)


def flops_per_token(model: ModelShape, seq_len: int) -> float:
    """Return the FLOPs of forward and backward for one token.

    Attention counts without a causal mask.

    Source: PaLM (Chowdhery et al., 2022), appendix B: 6 per weight and token, 12 per
    layer, width and position.
    """
    tables = models.table_parameters(model)
    weights = models.active_parameters(model) - tables * (
        1 if model.tied_embeddings else 2
    )
    weights += tables - model.learned_positions * model.hidden
    return 6 * weights + 12 * model.layers * models.query_width(model) * seq_len


def model_flops(job: TrainingJob) -> float:
    """Return the FLOPs of a step on all GPUs, without recomputation.

    Frozen weights get no gradients: 4 of 6 FLOPs per weight are left.
    """
    each = flops_per_token(job.model, job.seq_len)
    if job.frozen:
        attention = each - flops_per_token(job.model, 0)
        each = (each - attention) * 2 / 3 + attention
    return each * job.global_batch * job.seq_len
