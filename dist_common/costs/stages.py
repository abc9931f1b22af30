"""What a layout's stages take, for timeline.py: the seconds of step.py before anything overlaps."""

from __future__ import annotations

from dist_common.costs import compute, memory, models, step
from dist_common.costs.collectives import seconds_of
from dist_common.costs.hardware import Cluster
from dist_common.costs.job import Job, Layout
from dist_common.costs.rates import RATES
from dist_common.costs.sent import passes_of_activations
from dist_common.costs.timeline import Stage


def stages_of(
    job: Job, layout: Layout, cluster: Cluster, rates: dict[str, float] | None = None
) -> list[Stage]:
    """Return the seconds of each (virtual) stage, first to last; the last has the head.

    Of tp, cp and ep they have what predict() calls exposed: timeline.py hides none of it. Compute
    has the gaps in which the GPU waits for launches.
    """
    rates = rates or RATES
    p, v, m = layout.pp, layout.virtual_stages, layout.micro_batches(job)
    counts = memory.layers_of_stages(job.model.layers, p)
    send = step.pipeline_seconds(job, layout, cluster, rates) / (2 * v * m)
    head = compute.head_seconds(job, layout, cluster, rates)
    overlaps = layout.overlap_dp and not (layout.zero == 3 and job.stack == "deepspeed")
    each = layout.zero == 3 and not memory.gathers_once(job, layout)
    whole = memory.gradients_stay_whole(job, layout)
    reduces_each = each or (layout.zero == 2 and not whole)
    stages = []
    for number in range(p * v):
        rank = number % p
        own = step.stage_seconds(job, layout, cluster, counts[rank], rank == p - 1, rates)
        forward, backward = own.forward, own.backward
        if rank == p - 1:
            forward, backward = forward - head.forward, backward - head.backward
        last = number == p * v - 1
        weights = sum(memory.weights_of_stage(job, layout, rank))
        gather, reduce = replica_seconds(job, layout, cluster, weights, counts[rank], rates)
        update = step.optimizer_seconds(job, layout, cluster, weights, rates)
        stages.append(
            Stage(
                forward=(forward + own.gaps / 3) / v + head.forward * last,
                backward=(backward + own.gaps * 2 / 3) / v + head.backward * last,
                inside=inside_layers(own, layout),
                send=send,
                gather=gather / v,
                reduce=reduce / v,
                gathers_each=each,
                reduces_each=reduces_each,
                overlaps=overlaps,
                optimizer=(update + rates["step.fixed_ms"] / 1e3) / v,
                layers=max(1, counts[rank] // v) if overlaps else 1,
                leak=rates["overlap.leak"] if overlaps else 0.0,
            )
        )
    return stages


def inside_layers(own: step.Stage, layout: Layout) -> dict[str, tuple[float, float]]:
    """Return by axis what compute waits for on a virtual stage: (forward, backward).

    Backward sends as much as forward, and repeats forward's with full recomputation.
    """
    passes = passes_of_activations(layout.recompute)
    seconds = {"tp": own.tp, "cp": own.cp, "ep": own.ep}
    forward = {axis: each / passes / layout.virtual_stages for axis, each in seconds.items()}
    return {axis: (each, each * (passes - 1)) for axis, each in forward.items() if each}


def replica_seconds(job, layout, cluster, weights, layers: int, rates) -> tuple[float, float]:
    """Return seconds to gather a stage's weights, and to reduce its gradients, over replicas."""
    if layout.replicas == 1:
        return 0.0, 0.0
    width = job.reduce_bytes
    if layout.zero == 0:
        nodes = step.nodes_of(layout, step.REPLICAS, layout.replicas, cluster)
        size = weights * width
        return 0.0, seconds_of("all_reduce", size, layout.replicas, cluster, nodes, rates)
    times = 1
    if layout.zero == 3:  # a unit for each layer
        layer = job.model.layers - 1
        routed = models.expert_parameters(job.model, layer)
        weights = models.layer_parameters(job.model, layer) - routed + routed / layout.ep
        times = layers / (rates["zero3.tensors"] if job.stack == "deepspeed" else 1)
        weights /= layout.tp
    gather = step.shard_seconds(layout, cluster, weights, step.WIDTH, "all_gather", rates)
    reduce = step.shard_seconds(layout, cluster, weights, width, "reduce_scatter", rates)
    reduce += step.copies_seconds(layout, cluster, weights, width, rates)
    return times * gather, times * reduce
