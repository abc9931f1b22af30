"""What each axis of a layout sends, what hides it, and how long a step takes: formulas only."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

import torch

from advanced_parts import layout_memory as memory
from advanced_parts.layout_memory import Cluster, Job, Layout, compute_seconds, forward_flops
from dist_common.costs import sent as costs_sent
from dist_common.costs.memory import BF16, FP32
from dist_common.costs.sent import passes_of_activations, passes_of_weights, ring_of_keys
from dist_common.measure import GIB

RESERVE = 0.1  # of a GPU's memory: CUDA context, NCCL's buffers, fragmentation


@dataclass(frozen=True)
class Traffic:
    """What one axis sends from each GPU, and how much of that time nothing hides."""

    size: int
    link: str
    rate_gb_s: float
    layer_bytes: float  # per layer; pp: per boundary of two stages. Micro-batch, weights: step
    step_bytes: float
    seconds: float  # per step, at the link's rate
    behind_s: float  # seconds of compute per step that run at the same time
    exposed_s: float


@dataclass(frozen=True)
class Prediction:
    layout: Layout
    traffic: dict[str, Traffic]  # by axis
    memory: dict[str, float]  # bytes, of the stage that holds most
    stage: int
    in_flight: float  # micro-batches whose activations that stage holds
    seconds: dict[str, float]  # parts of a step
    model_flops: float  # per step and GPU, without recomputation
    executed_flops: float
    memory_limit: float  # bytes

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def memory_gib(self) -> float:
        return sum(self.memory.values()) / GIB

    @property
    def fits(self) -> bool:
        return sum(self.memory.values()) <= self.memory_limit

    @property
    def tflops(self) -> float:
        return self.model_flops / self.step_s / 1e12


def place(rank: int, layout: Layout, order: tuple[str, ...]) -> dict[str, int]:
    """Return a rank's coordinate on each axis; the first axis of `order` counts fastest."""
    where = {}
    for axis in order:
        rank, where[axis] = divmod(rank, getattr(layout, axis))
    return where


def link_of(job: Job, cluster: Cluster, layout: Layout, axes: tuple[str, ...], hops: bool = False):
    """Return (name, GB/s) of the slowest link in a group of ranks that differ in `axes` only.

    A collective of a whole node's ranks uses all their network cards at once; what a rank sends to
    its neighbour only (`hops`) leaves through its own.
    """
    ranks = range(min(cluster.gpus_per_node, layout.gpus))
    others = [axis for axis in job.order if axis not in axes]
    inside = sum(not any(place(r, layout, job.order)[a] for a in others) for r in ranks)
    if inside == prod(getattr(layout, axis) for axis in axes):
        return "NVLink", cluster.nvlink_gb_s
    cards = 1 if hops else inside
    return f"network x{cards}", min(cluster.nvlink_gb_s, cards * cluster.network_gb_s)


def tensor_traffic(job: Job, cluster: Cluster, layout: Layout, times: int) -> Traffic:
    """Two all-gathers and two reduce-scatters each way; two all-gathers more in backward, hidden.

    Source: Korthikanti et al. (2022), section 4.2.2: sequence parallel keeps slices only.
    """
    t = layout.tp
    link, rate = link_of(job, cluster, layout, ("tp",))
    one = (t - 1) / t * job.tokens(layout) * job.config.dim * BF16
    one_s = cluster.seconds(one, rate, t > 1)
    awaited = 4 * passes_of_activations(layout.recompute)
    behind = forward_flops(job, layout)["matrices"] / cluster.gpu_tflops / 1e12
    exposed = awaited * one_s + max(0, 2 * one_s - behind)
    sent = (awaited + 2) * one
    seconds = (awaited + 2) * one_s * times
    return Traffic(t, link, rate, sent, sent * times, seconds, behind * times, exposed * times)


def context_traffic(job: Job, cluster: Cluster, layout: Layout, times: int) -> Traffic:
    """A ring of keys and values in forward, of them and their float32 gradients in backward."""
    c = layout.cp
    link, rate = link_of(job, cluster, layout, ("cp",), hops=True)
    passes = 1 + passes_of_activations(layout.recompute)
    keys = 2 * job.tokens(layout) * memory.key_width(job.config)  # numbers of keys and values
    forward, backward = ring_of_keys(c, BF16 * keys, FP32 * keys)
    sent = ((passes - 2) * forward + backward) / layout.tp
    seconds = cluster.seconds(sent, rate, passes * (c - 1))
    behind = passes * forward_flops(job, layout)["attention"] / cluster.gpu_tflops / 1e12
    exposed = max(0, seconds - behind) * times
    return Traffic(c, link, rate, sent, sent * times, seconds * times, behind * times, exposed)


def pipeline_traffic(job: Job, cluster: Cluster, layout: Layout, compute_s: float) -> Traffic:
    """A slice of the activations to the next stage, of their gradient to the one before.

    First and last stage have one of these neighbours: of two ranks each has one such stage.
    """
    link, rate = link_of(job, cluster, layout, ("pp",), hops=True)
    split = layout.pp > 1
    sent = 2 * job.tokens(layout) * job.config.dim * BF16 / layout.tp * split
    times = job.micro_batches(layout) * (job.virtual_stages - (layout.pp == 2) / 2)
    seconds = cluster.seconds(sent, rate, 2 * split) * times
    exposed = max(0, seconds - compute_s)
    return Traffic(layout.pp, link, rate, sent, sent * times, seconds, compute_s, exposed)


def weight_traffic(job: Job, cluster: Cluster, layout: Layout, forward_s: float) -> Traffic:
    """Gradients (float32) to all replicas once a step, or weights (bfloat16) gathered as well.

    `full` gathers twice and reduces once in each micro-batch, the others do it once a step: their
    gradients add up in memory. Hidden behind the forward or backward of those micro-batches.
    """
    n, p, kind = layout.replicas, layout.pp, layout.sharding
    link, rate = link_of(job, cluster, layout, ("cp", "dp"))
    weights = max(memory.weights_of_stage(job.config, layout, s) for s in {0, p // 2, p - 1})
    layer = memory.layer_matrices(job.config) / layout.tp + 2 * job.config.dim
    stage = {"none": 0, "grad-op": 1, "full": 3}[kind]
    in_forward, again, reduced = passes_of_weights(stage, BF16, job.reduce_bytes)
    in_backward = again + reduced  # bytes per weight
    share = (n - 1) / n
    times = job.micro_batches(layout) if kind == "full" else 1
    gather_s = cluster.seconds(share * in_forward * weights, rate, 0)
    reduce_s = cluster.seconds(share * in_backward * weights, rate, 0)
    backward_s = (2 + (layout.recompute == "full")) * forward_s
    behind = (forward_s * (in_forward > 0) + backward_s) * times
    exposed = (max(0, gather_s - forward_s) + max(0, reduce_s - backward_s)) * times
    sent = share * (in_forward + in_backward) * times  # per weight
    seconds = (gather_s + reduce_s) * times
    return Traffic(n, link, rate, sent * layer, sent * weights, seconds, behind, exposed)


def powersgd_numbers(weights: Iterable[torch.Tensor], rank: int) -> int:
    """Return what sent.powersgd_numbers does, of tensors."""
    return costs_sent.powersgd_numbers((w.shape for w in weights), rank)


def bubble_of(job: Job, layout: Layout) -> float:
    """Return idle time over busy time: (p - 1) / (v m) (Narayanan, 2021, sections 2.2.1, 2.2.2)."""
    return (layout.pp - 1) / (job.virtual_stages * job.micro_batches(layout))


def predict(job: Job, cluster: Cluster, layout: Layout) -> Prediction:
    """Return what a layout holds, sends and takes."""
    if layout.replicas == 1:
        layout = replace(layout, sharding="none")  # nobody to share with
    m = job.micro_batches(layout)
    times = m * max(memory.layers_of_stages(job.config.num_layers, layout.pp))
    forward = compute_seconds(job, cluster, layout)
    recomputes = layout.recompute == "full"
    compute = (3 + recomputes) * forward * m
    traffic = {
        "tp": tensor_traffic(job, cluster, layout, times),
        "cp": context_traffic(job, cluster, layout, times),
        "dp": weight_traffic(job, cluster, layout, forward),
        "pp": pipeline_traffic(job, cluster, layout, compute),
    }
    seconds = {"compute": compute} | {axis: each.exposed_s for axis, each in traffic.items()}
    once = seconds["dp"] if layout.sharding != "full" else 0  # outside the pipeline
    seconds["bubble"] = bubble_of(job, layout) * (sum(seconds.values()) - once)
    stages = {stage: memory.memory_of_stage(job, layout, stage) for stage in {0, layout.pp - 1}}
    stage = max(stages, key=lambda s: sum(stages[s].values()))
    flops = forward_flops(job, layout)
    whole = job.config.num_layers * (flops["matrices"] + flops["attention"])
    limit = (1 - RESERVE) * cluster.gpu_memory_gib * GIB
    model_flops = 3 * (whole + flops["head"]) * m / layout.pp
    executed = model_flops + recomputes * whole * m / layout.pp
    held = stages[stage], stage, memory.in_flight(job, layout, stage)
    return Prediction(layout, traffic, *held, seconds, model_flops, executed, limit)
