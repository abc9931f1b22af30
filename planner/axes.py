"""What each axis of a layout sends, over which link, and what hides it: step.py's seconds, opened.

Seconds of sending alone are step.py's with nothing beside them. Bytes are its seconds on a wire
that moves a byte in a nanosecond and needs no start, so that no formula stands twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner import compute, memory, models, step
from planner.hardware import Cluster
from planner.job import Job, Layout
from planner.rates import RATES
from planner.sent import bytes_of_weights, passes_of_activations

ENDLESS = 2**40  # GPUs of a node: the wire reaches all ranks
WIRE_RATES = {
    name: {"link.ring": 1.0, "zero3.tensors": 1.0}.get(name, 0.0 if "link." in name else rate)
    for name, rate in RATES.items()
}


@dataclass(frozen=True)
class Axis:
    """One axis as a GPU of the slowest stage sees it; seconds are of a step."""

    ranks: int  # dp: all that hold the same weights, those of cp too
    nodes: int  # on which a group of its ranks stands
    cards: int  # of a node that the group's traffic leaves through; 0: it stays inside
    gb_s: float  # of a data sheet: the link of a GPU in its node, or its node's cards
    layer_bytes: float  # per layer and micro-batch; dp: per step; pp: per stage of the rank
    step_bytes: float
    seconds: float  # of sending alone
    beside: float  # of compute that runs meanwhile
    exposed: float  # what is left of it in the step


def axes_of(
    job: Job, layout: Layout, cluster: Cluster, rates: dict[str, float] | None = None
) -> dict[str, Axis]:
    """Return the axes that are larger than 1: of tp, cp, ep, dp and pp."""
    rates = rates or RATES
    m, shown = layout.micro_batches(job), step.step_parts(job, layout, cluster, rates)
    kinds = step.kinds_of_stage(job, layout)
    stage = max(kinds, key=lambda k: step.stage_seconds(job, layout, cluster, *k, rates).total)
    takes = alone(job, layout, cluster, stage, rates)
    gpu = replace(cluster.gpu, link_gb_s=1.0, switch_reduces=False, mesh=False)
    wire = replace(cluster, gpu=gpu, gpus_per_node=ENDLESS, network_scale=1.0)
    sent = alone(job, layout, wire, stage, WIRE_RATES)
    sent = {axis: seconds * 1e9 for axis, seconds in sent.items()}
    calls = {axis: m * (layout.virtual_stages if axis == "pp" else stage[0]) for axis in sent}
    of_layer = {axis: size / calls[axis] for axis, size in sent.items()}
    # Embedding and head are cut too: a collective forward and one backward, where a layer has 4.
    ends = stage[1] + (layout.pp == 1)
    sent["tp"] += ends * m * of_layer["tp"] / (2 * passes_of_activations(layout.recompute))
    sent["dp"], of_layer["dp"] = replicas_bytes(job, layout)
    if layout.pp == 2:  # the first and the last of a rank's stages have one neighbour
        sent["pp"] *= 1 - 1 / (2 * layout.virtual_stages)
    beside = compute_beside(job, layout, cluster, stage, rates)
    found = {}
    for axis, (axes, ranks) in groups_of(layout).items():
        if ranks == 1 or (axis == "dp" and job.frozen and layout.zero < 3):
            continue
        nodes, cards, gb_s = link_of(layout, axis, axes, ranks, cluster)
        found[axis] = Axis(
            ranks, nodes, cards, gb_s, of_layer[axis], sent[axis],
            takes[axis], beside[axis], shown[axis],
        )  # fmt: skip
    return found


def groups_of(layout: Layout) -> dict[str, tuple[tuple[str, ...], int]]:
    """Return for each axis in which axes its ranks differ, and how many they are."""
    both = step.REPLICAS
    return {
        "tp": (("tp",), layout.tp),
        "cp": (("cp",), layout.cp),
        "ep": (both, layout.ep),
        "dp": (both, layout.replicas),
        "pp": (("pp",), layout.pp),
    }


def link_of(layout: Layout, axis: str, axes, ranks: int, cluster: Cluster):
    """Return the nodes of a group, the cards of a node that it uses, and GB/s.

    A collective uses a card for each of its ranks in a node; to one neighbour goes one.
    """
    nodes = step.nodes_of(layout, axes, ranks, cluster)
    if nodes == 1:
        return 1, 0, cluster.gpu.link_gb_s
    hops = axis == "pp" or (axis == "cp" and layout.cp_kind == "ring")
    cards = 1 if hops else max(1, ranks // nodes)
    return nodes, cards, min(cluster.gpu.link_gb_s, cards * cluster.network_gb_s)


def alone(job: Job, layout: Layout, cluster: Cluster, stage, rates) -> dict[str, float]:
    """Return the seconds per step in which each axis sends, if nothing computes meanwhile."""
    m, plain = layout.micro_batches(job), replace(layout, overlap_tp=False)
    own = step.stage_seconds(job, plain, cluster, *stage, rates, alone=True)
    weights = sum(memory.weights_of_stage(job, layout, layout.pp - 1))
    reduced = step.gradient_seconds(job, layout, cluster, weights, 0.0, rates)
    return {
        "tp": m * own.tp,
        "cp": m * own.cp,
        "ep": m * own.ep,
        "dp": m * own.dp + reduced,
        "pp": step.pipeline_seconds(job, layout, cluster, rates),
    }


def bytes_per_weight(job: Job, layout: Layout) -> float:
    """Return the bytes that a GPU sends per step for each weight that it has before ZeRO.

    HSDP averages a shard's gradients over its copies besides. Adapters' gradients are left out.
    """
    m, zero = layout.micro_batches(job), layout.zero
    once = zero == 2 and memory.gradients_stay_whole(job, layout)
    if once or memory.gathers_once(job, layout):
        zero = 1
    copies = layout.replicas // layout.shards
    reduce = 0 if job.frozen else job.reduce_bytes
    each = bytes_of_weights(zero, layout.shards, m, step.WIDTH, reduce)
    if copies > 1 and zero:
        each += (m if zero >= 2 else 1) * bytes_of_weights(0, copies, 1, 0, reduce / layout.shards)
    return each


def replicas_bytes(job: Job, layout: Layout) -> tuple[float, float]:
    """Return the bytes that a GPU sends for its weights in a step: all of them, and a layer's."""
    each = bytes_per_weight(job, layout)
    stages = {0, min(1, layout.pp - 1), layout.pp - 1}
    weights = max(sum(memory.weights_of_stage(job, layout, stage)) for stage in stages)
    layer = models.layer_parameters(job.model, job.model.layers - 1) / layout.tp
    return each * weights, each * layer


def compute_beside(job: Job, layout: Layout, cluster: Cluster, stage, rates) -> dict[str, float]:
    """Return the seconds per step of what computes while an axis sends."""
    m, layers = layout.micro_batches(job), stage[0]
    own = step.stage_seconds(job, layout, cluster, *stage, rates)
    layer = compute.layer_seconds(job, layout, cluster, rates)
    again = layer.attention * (layout.recompute == "full")
    attention = m * layers * (layer.attention + again + layer.attention_backward)
    each = layout.zero == 3 and not memory.gathers_once(job, layout)
    several = m if layout.zero == 2 and not memory.gradients_stay_whole(job, layout) else 1
    once = several * own.backward * layout.overlap_dp
    return {
        "tp": m * (own.forward + own.backward) * layout.overlap_tp,
        "cp": attention * (layout.cp_kind == "ring"),
        "ep": 0.0,
        "dp": m * (own.forward + own.backward) if each else once,
        "pp": 0.0,
    }
