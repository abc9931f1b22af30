"""The time that LoRA and 4-bit weights add to a layer: thin products, and unpacking.

Frozen weights get no gradient, so two of three products are left (compute.py,
`three_products`). Beside each adapted matrix stand A (rank, inputs) and B (outputs,
rank) with all three of theirs (Hu et al., 2021, section 4.1). A 4-bit weight is
unpacked to 16 bits for every product with it (Dettmers et al., 2023, equation 5):
forward, again where forward is recomputed, and backward.
"""

from __future__ import annotations

from dataclasses import replace

from planner import compute, finetune, models
from planner.compute import LayerSeconds
from planner.hardware import Cluster
from planner.job import Layout, TrainingJob
from planner.rates import rate_of

# Of a matrix' output and a number each, beside the thin products: B's result is scaled
# (read, written) and added (two read, one written); compiled, one kernel adds both.
SCALE, ADD = 2, 3
# Operators that an eager adapter launches forward (A, B, scale, add), of about 45 of a
# layer.
LAUNCHED = 4 / 45


def thin_seconds(
    m: float, n: float, k: float, job: TrainingJob, cluster: Cluster, rates
) -> float:
    """Return the seconds of a product (m, k) x (k, n) one side of which is a rank.

    A rank of r computes about r FLOPs for each byte, and a GPU some 150 to 300 in the
    time of one: reading and writing takes longer (roofline: Williams et al., 2009).
    """
    gpu = cluster.gpu
    share = rate_of(rates, "matrix", gpu.family) * cluster.matrix_scale
    flops = 2 * m * n * k / (gpu.tflops["bf16"] * 1e12 * share)
    return max(flops, compute.memory_seconds(m * n + n * k + m * k, cluster))


def adapter_seconds(
    job: TrainingJob, layout: Layout, cluster: Cluster, rates
) -> tuple[float, float]:
    """Return seconds forward and backward of a layer's adapters, for one micro-batch.

    Forward x A' B' and its sum with the matrix' output. Backward the gradients of both
    sides of both products, and the sum of two gradients of x.

    Source: Hu et al., 2021, equation 3.
    """
    rank, m = job.adapter_rank, layout.micro_batch * job.seq_len / layout.cp
    forward = backward = 0.0
    if not rank:
        return forward, backward
    scale = 0 if compute.fuses(job) else SCALE
    for inputs, outputs in finetune.adapter_shapes(job.model, job.adapter_targets):
        forward += thin_seconds(m, rank, inputs, job, cluster, rates)
        forward += thin_seconds(m, outputs, rank, job, cluster, rates)
        forward += compute.memory_seconds((scale + ADD) * m * outputs, cluster)
        for width in (inputs, outputs):
            backward += thin_seconds(m, width, rank, job, cluster, rates)
            backward += thin_seconds(rank, width, m, job, cluster, rates)
        backward += compute.memory_seconds(
            m * (scale * outputs + ADD * inputs), cluster
        )
    return forward, backward


def unpack_seconds(job: TrainingJob, cluster: Cluster, dense: bool = True) -> float:
    """Return the seconds to read a layer's 4-bit weights and scales and to write 16
    bits of each.

    bitsandbytes 0.50 does so as fast as memory allows; the kernels of 2024 decoded
    weights more slowly (`finetune.NF4_RATE`).

    Source: Dettmers et al., 2023, equation 6.
    """
    if not job.quant:
        return 0.0
    model = job.model
    number = 0 if dense else model.layers - 1
    moved = finetune.frozen_weight_bytes(job.quant) + compute.WIDTH
    share = finetune.NF4_RATE if job.unpacks_slowly else compute.HBM
    weights = models.matrix_parameters(model, number)
    return weights * moved / (cluster.gpu.hbm_gb_s * 1e9 * share)


def with_adapters(
    layer: LayerSeconds,
    job: TrainingJob,
    layout: Layout,
    cluster: Cluster,
    rates,
    dense,
):
    """Return a layer's seconds with those of its adapters, and of unpacking its
    weights.
    """
    forward, backward = adapter_seconds(job, layout, cluster, rates)
    unpacked = unpack_seconds(job, cluster, dense)
    return replace(
        layer,
        forward=layer.forward + forward + unpacked,
        backward=layer.backward + backward + unpacked,
    )


def launch_factor(job: TrainingJob) -> float:
    """Return how many times as long the host launches a layer that has adapters."""
    matrices = len(finetune.adapter_shapes(job.model, job.adapter_targets))
    return 1 + LAUNCHED * matrices if job.adapter_rank else 1.0
