"""The time that LoRA and 4-bit weights add to a layer: thin products, and unpacking.

A frozen weight gets no gradient, so it has two of three products (compute.py,
`three_products`). Each adapted matrix has two trained matrices, A (rank, inputs) and B
(outputs, rank), with three products each (Hu et al., 2021, section 4.1). A 4-bit weight
is unpacked to 16 bits before each product (Dettmers et al., 2023, equation 5): forward,
backward, and in recomputation.
"""

from __future__ import annotations

from dataclasses import replace

from planner import compute, finetune, models
from planner.activations import tokens_of
from planner.compute import LayerSeconds
from planner.hardware import Cluster
from planner.job import Layout, TrainingJob
from planner.rates import rate_of

# Numbers moved for each number of a matrix' output. B's result is scaled (1 read, 1
# written) and added (2 read, 1 written). torch.compile fuses both.
SCALE, ADD = 2, 3
# An eager adapter launches 4 operators forward (A, B, scale, add); a layer about 45.
LAUNCHED = 4 / 45


def thin_seconds(
    m: float, n: float, k: float, job: TrainingJob, cluster: Cluster, rates
) -> float:
    """Return the seconds of a product (m, k) x (k, n) with a LoRA rank as one side.

    A rank of r gives about r FLOPs per byte, and a GPU computes 150 to 300 FLOPs in the
    time of one byte. Memory limits such products (roofline: Williams et al., 2009).
    """
    gpu = cluster.gpu
    share = rate_of(rates, "matrix", gpu.family) * cluster.matrix_scale
    flops = 2 * m * n * k / (gpu.tflops["bf16"] * 1e12 * share)
    return max(flops, compute.memory_seconds(m * n + n * k + m * k, cluster))


def adapter_seconds(
    job: TrainingJob, layout: Layout, cluster: Cluster, rates
) -> tuple[float, float]:
    """Return seconds forward and backward of a layer's adapters, for one micro-batch.

    Forward computes x A' B' and adds it to the matrix' output. Backward computes the
    gradients of both factors of both products, and adds two gradients of x.

    Source: Hu et al., 2021, equation 3.
    """
    rank, m = job.adapter_rank, tokens_of(job, layout)
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
    """Return the seconds to read a layer's 4-bit weights and to write 16-bit weights.

    bitsandbytes 0.50 is as fast as the memory. The kernels of 2024 decoded weights more
    slowly (`finetune.NF4_RATE`).

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
    """Add the seconds of adapters and of unpacking to the seconds of a layer."""
    forward, backward = adapter_seconds(job, layout, cluster, rates)
    unpacked = unpack_seconds(job, cluster, dense)
    return replace(
        layer,
        forward=layer.forward + forward + unpacked,
        backward=layer.backward + backward + unpacked,
    )


def launch_factor(job: TrainingJob) -> float:
    """Return the launch time of a layer with adapters over the time without them."""
    matrices = len(finetune.adapter_shapes(job.model, job.adapter_targets))
    return 1 + LAUNCHED * matrices if job.adapter_rank else 1.0
