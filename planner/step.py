"""What a step takes: compute, communication that nothing hides, bubble, optimizer.

All times are of one GPU in seconds. Axes lie on ranks in the layout's order, where none is given
in Megatron-LM's: tp next to each other, then cp, dp, pp.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner import adapters, compute, finetune, memory, models
from planner.collectives import seconds_of
from planner.hardware import Cluster
from planner.job import Job, Layout, Prediction
from planner.rates import RATES
from planner.sent import (
    passes_of_activations,
    passes_of_weights,
    ring_of_keys,
    ulysses_numbers,
)

WIDTH = compute.WIDTH
REPLICAS = ("cp", "dp")  # axes whose ranks hold the same weights
NOTHING = compute.Seconds(0.0, 0.0, 0.0, 0.0)  # computes while something is sent


@dataclass(frozen=True, slots=True)
class Stage:
    """Seconds that one micro-batch takes on one stage, by part."""

    forward: float
    backward: float
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    dp: float = 0.0
    gaps: float = 0.0  # the GPU waits for launches

    def __add__(self, other: Stage) -> Stage:
        return Stage(*(getattr(self, part) + getattr(other, part) for part in self.__slots__))

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.tp + self.cp + self.ep + self.dp + self.gaps


def strides_of(layout: Layout, axes: tuple[str, ...]) -> list[list[int]]:
    """Return the (stride, size) of axes on ranks, innermost first; neighbours are one."""
    found, stride, before = [], 1, ""
    for axis in layout.order:
        size = getattr(layout, axis)
        if axis in axes and before in axes:
            found[-1][1] *= size
        elif axis in axes:
            found.append([stride, size])
        stride *= size
        before = axis
    return found


def nodes_of(
    layout: Layout, axes: tuple[str, ...], ranks: int, cluster: Cluster, every: int = 1
) -> int:
    """Return the nodes on which so many ranks stand that differ in `axes`, `every` apart there."""
    inside, rest = 1, ranks
    for stride, size in strides_of(layout, axes):
        if every >= size > 1:
            every //= size
            continue
        take = min(rest, size // every)
        inside *= max(1, min(take, cluster.gpus_per_node // (stride * every)))
        rest, every = -(-rest // max(1, take)), 1
    return -(-ranks // inside)


def exposed(communication: float, behind: float, rates) -> float:
    """Return what communication adds to the compute it runs beside: the rest, and what it takes."""
    hidden = min(communication, behind)
    return communication - hidden + rates["overlap.leak"] * hidden


def tensor_seconds(job: Job, layout: Layout, cluster: Cluster, rates) -> float:
    """Return seconds per layer and micro-batch of tensor parallelism's collectives.

    Two all-reduces forward and two backward (Shoeybi et al., 2019, section 3); with sequence
    parallelism each is an all-gather and a reduce-scatter (Korthikanti et al., 2022, section
    4.2.2), and backward gathers two inputs again. Recomputation repeats forward's.
    """
    t = layout.tp
    if t == 1:
        return 0.0
    size = WIDTH * layout.micro_batch * job.seq_len / layout.cp * job.model.hidden
    nodes = nodes_of(layout, ("tp",), t, cluster)
    repeats = passes_of_activations(layout.recompute)
    if layout.sequence_parallel:
        gather = seconds_of("all_gather", size, t, cluster, nodes, rates)
        scatter = seconds_of("reduce_scatter", size, t, cluster, nodes, rates)
        one = 2 * (gather + scatter)
    else:
        one = 2 * seconds_of("all_reduce", size, t, cluster, nodes, rates)
    shown = 1 - rates["overlap.tp"] if layout.overlap_tp else 1.0
    return one * repeats * shown


def context_seconds(job, layout, cluster, layer: compute.Seconds, rates) -> float:
    """Return seconds per layer and micro-batch that context parallelism adds.

    Ring: keys and values go around behind attention (Liu et al., 2023), backward with their
    gradients. Ulysses: all-to-all of queries, keys, values and output (Jacobs et al., 2023).
    Gather: keys and values of all (Llama 3, section 3.3.2).
    """
    c = layout.cp
    if c == 1:
        return 0.0
    model = job.model
    tokens = layout.micro_batch * job.seq_len / c
    nodes = nodes_of(layout, ("cp",), c, cluster)
    keys = WIDTH * 2 * tokens * models.key_width(model) / layout.tp
    again = layout.recompute == "full"
    if layout.cp_kind == "ring":
        hop = seconds_of("send", keys, 2, cluster, min(nodes, 2), rates)
        forward, backward = ring_of_keys(c, hop, hop)  # gradients of 16 bits too
        forward = exposed(forward, layer.attention, rates)
        backward = exposed(backward, layer.attention_backward, rates)
    elif layout.cp_kind == "ulysses":
        size = WIDTH * tokens * ulysses_numbers(model, c) / layout.tp
        forward = seconds_of("all_to_all", size, c, cluster, nodes, rates)
        backward = forward
    else:
        forward = seconds_of("all_gather", keys * c, c, cluster, nodes, rates)
        backward = seconds_of("reduce_scatter", keys * c, c, cluster, nodes, rates)
    return forward * (1 + again) + backward


def expert_seconds(job: Job, layout: Layout, cluster: Cluster, rates) -> float:
    """Return seconds per layer and micro-batch of tokens sent to experts and back.

    Source: GShard (Lepikhin et al., 2020), section 3.2.
    """
    if layout.ep == 1 or not job.model.experts:
        return 0.0
    tokens = layout.micro_batch * job.seq_len / layout.cp
    size = WIDTH * tokens * job.model.top_k * job.model.hidden
    if layout.sequence_parallel:
        size /= layout.tp
    nodes = nodes_of(layout, REPLICAS, layout.ep, cluster)
    one = seconds_of("all_to_all", size, layout.ep, cluster, nodes, rates)
    return 2 * one * passes_of_activations(layout.recompute)


def shard_seconds(layout: Layout, cluster: Cluster, weights: float, width: int, kind, rates):
    """Return seconds to gather, or reduce and scatter, weights over the ranks that shard them."""
    shards = layout.shards
    nodes = nodes_of(layout, REPLICAS, shards, cluster)
    return seconds_of(kind, weights * width, shards, cluster, nodes, rates)


def copies_seconds(layout: Layout, cluster: Cluster, weights: float, width: int, rates) -> float:
    """Return seconds in which HSDP's copies average the gradients of a shard."""
    copies = layout.replicas // layout.shards
    nodes = nodes_of(layout, REPLICAS, copies, cluster, every=layout.shards)
    return seconds_of("all_reduce", weights / layout.shards * width, copies, cluster, nodes, rates)


def fsdp_seconds(job, layout, cluster, weights, layer: compute.Seconds, rates) -> float:
    """Return seconds per layer and micro-batch that sharded parameters add (ZeRO-3, section 5.3).

    Gathered forward and again backward, gradients reduced and scattered; each runs behind the
    products of the layer before.
    """
    width = finetune.frozen_weight_bytes(job.quant) if job.frozen else WIDTH
    gather = shard_seconds(layout, cluster, weights, width, "all_gather", rates)
    again = layer.forward if layout.recompute == "full" else 0.0
    if job.frozen:
        backward = layer.backward + again
        return exposed(gather, layer.forward, rates) + exposed(gather, backward, rates)
    reduce = shard_seconds(layout, cluster, weights, job.reduce_bytes, "reduce_scatter", rates)
    reduce += copies_seconds(layout, cluster, weights, job.reduce_bytes, rates)
    forward, backward, reduced = passes_of_weights(3, gather, reduce)
    if job.stack == "deepspeed":
        return (forward + backward + reduced) / rates["zero3.tensors"]
    return exposed(forward, layer.forward, rates) + exposed(
        backward + reduced, layer.backward + again, rates
    )


def gradient_seconds(job, layout, cluster, weights, backward: float, rates) -> float:
    """Return seconds per step of averaging gradients, and of gathering what ZeRO-1 updated.

    ZeRO-2 holds a shard of the gradient alone, so each micro-batch reduces its own (section 5.2).
    ZeRO-3 with a pipeline gathers and reduces once too (memory.py, gathers_once).
    """
    each = layout.zero == 3 and not memory.gathers_once(job, layout)
    if layout.replicas == 1 or each or job.frozen:
        return 0.0
    n, earlier = layout.replicas, 0.0
    nodes = nodes_of(layout, REPLICAS, n, cluster)
    if layout.zero == 0:
        time = seconds_of("all_reduce", weights * job.reduce_bytes, n, cluster, nodes, rates)
    else:
        time = shard_seconds(layout, cluster, weights, job.reduce_bytes, "reduce_scatter", rates)
        time += copies_seconds(layout, cluster, weights, job.reduce_bytes, rates)
        if layout.zero == 2 and not memory.gradients_stay_whole(job, layout):
            shown = exposed(time, backward, rates) if layout.overlap_dp else time
            earlier = (layout.micro_batches(job) - 1) * shown
        time += shard_seconds(layout, cluster, weights, WIDTH, "all_gather", rates)
    return earlier + (exposed(time, backward, rates) if layout.overlap_dp else time)


def pipeline_seconds(job: Job, layout: Layout, cluster: Cluster, rates) -> float:
    """Return seconds per step of sending activations and gradients between stages."""
    if layout.pp == 1:
        return 0.0
    size = WIDTH * layout.micro_batch * job.seq_len / layout.cp * job.model.hidden
    size /= layout.tp
    ((stride, _),) = strides_of(layout, ("pp",))
    nodes = 1 if layout.gpus <= cluster.gpus_per_node or stride < cluster.gpus_per_node else 2
    one = seconds_of("send", size, 2, cluster, nodes, rates)
    return 2 * layout.virtual_stages * layout.micro_batches(job) * one


def optimizer_seconds(job: Job, layout: Layout, cluster: Cluster, weights, rates) -> float:
    """Return seconds of the update: memory-bound, or the way to the host's memory and back."""
    if job.frozen:
        return 0.0  # LoRA trains a percent of the weights
    mine = weights / layout.shards if layout.zero >= 1 else weights
    if layout.offload != "none":
        return 2 * 4 * mine / (cluster.gpu.host_gb_s * 1e9)
    return mine * rates["optimizer.bytes"] / (cluster.gpu.hbm_gb_s * 1e9 * rates["hbm"])


def layers_seconds(
    job, layout, cluster, layers: int, dense: bool, rates, alone: bool = False
) -> Stage:
    """Return what one micro-batch takes in so many layers of a kind (alone: stage_seconds)."""
    if not layers:
        return Stage(0.0, 0.0)
    model = job.model
    layer = compute.layer_seconds(job, layout, cluster, rates, dense)
    if job.adapter_rank or job.quant:
        layer = adapters.with_adapters(layer, job, layout, cluster, rates, dense)
    passes = 2.5  # forward, and backward that launches one and a half times as much
    backward = layer.backward
    if layout.recompute == "full":
        backward += layer.forward
        passes += 1
    elif layout.recompute == "selective":
        backward += layer.core
    elif layout.recompute == "operators":
        backward += layer.half
    tp = tensor_seconds(job, layout, cluster, rates)
    beside = NOTHING if alone else layer
    dp = 0.0
    if layout.zero == 3 and layout.replicas > 1 and not memory.gathers_once(job, layout):
        number = 0 if dense else model.layers - 1
        routed = models.expert_parameters(model, number)
        weights = models.layer_parameters(model, number) - routed + routed / layout.ep
        dp = fsdp_seconds(job, layout, cluster, weights / layout.tp, beside, rates)
    launch = passes * compute.launch_seconds(job, rates) * adapters.launch_factor(job)
    return Stage(
        layers * layer.forward,
        layers * backward,
        layers * tp,
        layers * context_seconds(job, layout, cluster, beside, rates),
        0.0 if dense else layers * expert_seconds(job, layout, cluster, rates),
        layers * dp,
        layers * max(0.0, launch - layer.forward - backward - tp),
    )


def stage_seconds(
    job, layout, cluster, layers: int, head: bool, rates, alone: bool = False
) -> Stage:
    """Return what one micro-batch takes on a stage; `alone`: nothing hides what is sent."""
    model = job.model
    plain = layers
    if model.experts:
        plain = min(layers, model.dense_layers) if layout.pp == 1 or not head else 0
    one = layers_seconds(job, layout, cluster, plain, True, rates, alone)
    two = layers_seconds(job, layout, cluster, layers - plain, False, rates, alone)
    stage = one + two
    if head:
        own = compute.head_seconds(job, layout, cluster, rates)
        stage += Stage(own.forward, own.backward)
    return stage + Stage(0.0, 0.0, gaps=rates["step.micro_ms"] / 1e3)


def kinds_of_stage(job: Job, layout: Layout) -> list[tuple[int, bool]]:
    """Return (layers, has the head) of the last stage, and of the fullest of the others."""
    counts = memory.layers_of_stages(job.model.layers, layout.pp)
    if layout.pp == 1:
        return [(counts[0], True)]
    return [(counts[-1], True), (max(counts[:-1]), False)]


def step_parts(job: Job, layout: Layout, cluster: Cluster, rates) -> dict[str, float]:
    """Return the seconds of a step by part."""
    m = layout.micro_batches(job)
    kinds = kinds_of_stage(job, layout)
    stages = [stage_seconds(job, layout, cluster, *kind, rates) for kind in kinds]
    last, inner = stages[0], stages[-1]
    slowest = max(last, inner, key=lambda stage: stage.total)
    # 1F1B: the slowest stage is busy all the time; filling and draining takes the others once.
    whole = (layout.pp - 1) * inner.total + last.total
    dense, experts = memory.weights_of_stage(job, layout, layout.pp - 1)
    weights = dense + experts
    gradients = gradient_seconds(job, layout, cluster, weights, slowest.backward, rates)
    return {
        "compute": m * (slowest.forward + slowest.backward),
        "tp": m * slowest.tp,
        "cp": m * slowest.cp,
        "ep": m * slowest.ep,
        "dp": m * slowest.dp + gradients,
        "pp": pipeline_seconds(job, layout, cluster, rates),
        "bubble": (whole - slowest.total) / layout.virtual_stages,
        "optimizer": optimizer_seconds(job, layout, cluster, weights, rates),
        "other": m * slowest.gaps + rates["step.fixed_ms"] / 1e3,
    }


def step_of_adapters(job: Job, layout: Layout, cluster: Cluster, rates) -> dict[str, float]:
    """Return the seconds of a step that trains adapters, by part: `adapters` and `unpacking` too.

    Each is what compute takes longer with it. Gradients and moments are the adapters' alone.
    """
    step = step_parts(job, layout, cluster, rates)
    frozen = replace(job, adapter_rank=0)
    packed = step_parts(frozen, layout, cluster, rates)["compute"]
    compute_alone = step_parts(replace(frozen, quant=""), layout, cluster, rates)["compute"]
    parts = {"compute": compute_alone, "adapters": step["compute"] - packed}
    parts |= {"unpacking": packed - compute_alone}
    parts |= {name: seconds for name, seconds in step.items() if name not in parts}
    targets = job.adapter_targets
    trained = finetune.trained_parameters(job.model, "lora", job.adapter_rank, targets)
    update = replace(job, frozen=False, reduce_bytes=memory.FP32)
    averaged = replace(layout, zero=0)  # once a step; scattered and gathered again costs the same
    parts["dp"] += gradient_seconds(update, averaged, cluster, trained, step["compute"], rates)
    parts["optimizer"] = optimizer_seconds(update, layout, cluster, trained, rates)
    return parts


def step_seconds(job: Job, layout: Layout, cluster: Cluster, rates=None) -> float:
    """Return the seconds of a step."""
    return sum(step_parts(job, layout, cluster, rates or RATES).values())


def predict(
    job: Job, layout: Layout, cluster: Cluster, rates: dict[str, float] | None = None
) -> Prediction:
    """Return what a layout holds, and what a step takes."""
    return Prediction(
        layout,
        memory.memory_of(job, layout, cluster.gpus_per_node),
        step_parts(job, layout, cluster, rates or RATES),
        compute.model_flops(job),
        job.global_batch * job.seq_len,
        memory.memory_limit(cluster.gpu),
    )


def slower(cluster: Cluster, network: float = 1.0, matrix: float = 1.0) -> Cluster:
    """Return a cluster whose links, or matrix units, give only a share of their rate."""
    return replace(
        cluster,
        network_scale=cluster.network_scale * network,
        matrix_scale=cluster.matrix_scale * matrix,
    )
