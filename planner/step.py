"""The time of a step: compute, exposed communication, bubble, optimizer.

All times are seconds of one GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from planner import (
    activations,
    adapters,
    communication,
    compute,
    finetune,
    memory,
    models,
)
from planner.communication import Axis, Call, axis_of, bytes_of, seconds_of
from planner.compute import HBM
from planner.hardware import Cluster
from planner.job import Layout, Prediction, TrainingJob
from planner.rates import RATES

TP_EXPOSED = 0.2  # of tp's communication with asynchronous tp
OPTIMIZER_BYTES = 36.0  # read and written per weight: gradient, master, moments, weight
FIXED_S = 5e-3  # of a step: its loop, clipping, logging
# DeepSpeed's ZeRO-3 gathers one tensor at a time, reaches this share of the links, and
# hides nothing.
ONE_TENSOR_AT_A_TIME = 0.2


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds of one micro-batch on one stage, by part."""

    forward: float
    backward: float
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    dp: float = 0.0
    gaps: float = 0.0  # the GPU waits for launches

    def __add__(self, other: StageSeconds) -> StageSeconds:
        return StageSeconds(
            *(getattr(self, part) + getattr(other, part) for part in self.__slots__)
        )

    @property
    def total(self) -> float:
        sent = self.tp + self.cp + self.ep + self.dp
        return self.forward + self.backward + sent + self.gaps


def exposed(calls: list[Call], behind: float, cluster: Cluster, rates) -> float:
    """Return the seconds that calls add to the computation that hides them.

    Calls that take longer are exposed in part. Hidden calls take multiprocessors from
    the computation.
    """
    seconds = seconds_of(calls, cluster)
    hidden = min(seconds, behind)
    return seconds - hidden + rates["overlap.leak"] * hidden


def context_seconds(job, layout, cluster, layer: compute.LayerSeconds, rates) -> float:
    """Return seconds per layer and micro-batch that context parallelism adds.

    A ring overlaps with attention. The other kinds send before attention can start.
    """
    forward, backward = communication.context_calls(job, layout, cluster)
    if layout.cp_kind != "ring":
        return seconds_of(forward + backward, cluster)
    repeats = communication.passes_of(layout) - 1
    return exposed(forward, repeats * layer.attention, cluster, rates) + exposed(
        backward, layer.attention_backward, cluster, rates
    )


def layer_weights(job: TrainingJob, layout: Layout, dense: bool) -> float:
    """Return the weights of a layer on a GPU before ZeRO."""
    number = 0 if dense else job.model.layers - 1
    routed = models.expert_parameters(job.model, number)
    whole = models.layer_parameters(job.model, number) - routed
    return (whole + routed / layout.ep) / layout.tp


def fsdp_seconds(job, layout, cluster, dense: bool, layer, rates) -> float:
    """Return seconds per layer and micro-batch that sharded parameters add.

    FSDP gathers weights in forward and in backward and reduce-scatters gradients. Each
    call overlaps with the products of the previous layer (ZeRO, section 5.3).
    """
    weights = layer_weights(job, layout, dense)
    forward, backward, gradients = communication.weight_calls(
        job, layout, cluster, weights
    )
    if job.stack == "deepspeed":
        sent = seconds_of(forward + backward + gradients, cluster)
        return sent / ONE_TENSOR_AT_A_TIME
    again = layer.forward if layout.recompute == "full" else 0.0
    return exposed(forward, layer.forward, cluster, rates) + exposed(
        backward + gradients, layer.backward + again, cluster, rates
    )


def gradient_seconds(job, layout, cluster, weights, backward: float, rates) -> float:
    """Return seconds per step to average gradients and to gather updated weights.

    fsdp_seconds counts the calls of each micro-batch (ZeRO-3).
    """
    if layout.replicas == 1 or job.frozen or communication.gathers_each(job, layout):
        return 0.0
    calls = communication.weight_calls(job, layout, cluster, weights)
    behind = backward if layout.overlap_dp else 0.0
    earlier = 0.0
    if communication.reduces_each(job, layout):
        one = exposed(calls.gradients, behind, cluster, rates)
        earlier = (layout.micro_batches(job) - 1) * one
    return earlier + exposed(calls.gradients + calls.forward, behind, cluster, rates)


def optimizer_seconds(
    job: TrainingJob, layout: Layout, cluster: Cluster, weights
) -> float:
    """Return seconds of the update: memory-bound, or bound by the link to the host."""
    if job.frozen:
        return 0.0  # LoRA trains a percent of the weights
    updated = weights / layout.shards if layout.zero >= 1 else weights
    if layout.offload != "none":
        return 2 * 4 * updated / (cluster.gpu.host_gb_s * 1e9)
    return updated * OPTIMIZER_BYTES / (cluster.gpu.hbm_gb_s * 1e9 * HBM)


def layers_seconds(
    job, layout, cluster, layers: int, dense: bool, rates
) -> StageSeconds:
    """Return the seconds of one micro-batch in a number of layers of a kind."""
    if not layers:
        return StageSeconds(0.0, 0.0)
    layer = compute.layer_seconds(job, layout, cluster, rates, dense)
    if job.adapter_rank or job.quant:
        layer = adapters.with_adapters(layer, job, layout, cluster, rates, dense)
    passes = 2.5  # forward, and backward that launches one and a half times as much
    backward = layer.backward
    if layout.recompute == "full":
        backward += layer.forward
        passes += 1
    elif layout.recompute == "selective":
        backward += layer.attention
    elif layout.recompute == "operators":
        backward += layer.half
    tp = seconds_of(communication.tensor_calls(job, layout, cluster), cluster)
    tp *= TP_EXPOSED if layout.overlap_tp else 1.0
    cp = ep = dp = 0.0
    if layout.cp > 1:
        cp = context_seconds(job, layout, cluster, layer, rates)
    if layout.ep > 1 and not dense:
        ep = seconds_of(communication.expert_calls(job, layout, cluster), cluster)
    if layout.replicas > 1 and communication.gathers_each(job, layout):
        dp = fsdp_seconds(job, layout, cluster, dense, layer, rates)
    launch = passes * compute.launch_seconds(job, rates) * adapters.launch_factor(job)
    gaps = max(0.0, launch - layer.forward - backward - tp)
    parts = (layer.forward, backward, tp, cp, ep, dp, gaps)
    return StageSeconds(*(layers * seconds for seconds in parts))


def stage_seconds(job, layout, cluster, layers: int, head: bool, rates) -> StageSeconds:
    """Return the seconds of one micro-batch on a stage."""
    plain = layers
    if job.model.experts:
        first = layout.pp == 1 or not head
        plain = min(layers, job.model.dense_layers) if first else 0
    stage = layers_seconds(job, layout, cluster, plain, True, rates)
    stage += layers_seconds(job, layout, cluster, layers - plain, False, rates)
    if head:
        last = compute.head_seconds(job, layout, cluster, rates)
        stage += StageSeconds(last.forward, last.backward)
    return stage + StageSeconds(0.0, 0.0, gaps=rates["step.micro_ms"] / 1e3)


def kinds_of_stage(job: TrainingJob, layout: Layout) -> list[tuple[int, bool]]:
    """Return (layers, has the head) of the last stage and of the largest other one."""
    counts = activations.layers_of_stages(job.model.layers, layout.pp)
    if layout.pp == 1:
        return [(counts[0], True)]
    return [(counts[-1], True), (max(counts[:-1]), False)]


def step_parts(
    job: TrainingJob, layout: Layout, cluster: Cluster, rates
) -> dict[str, float]:
    """Return the seconds of a step by part."""
    if job.adapter_rank:
        return step_of_adapters(job, layout, cluster, rates)
    m = layout.micro_batches(job)
    kinds = kinds_of_stage(job, layout)
    stages = [stage_seconds(job, layout, cluster, *kind, rates) for kind in kinds]
    last, inner = stages[0], stages[-1]
    slowest = max(last, inner, key=lambda stage: stage.total)
    # 1F1B: the slowest stage is busy all the time, the others fill and drain once.
    whole = (layout.pp - 1) * inner.total + last.total
    weights = sum(memory.weights_of_stage(job, layout, layout.pp - 1))
    gradients = gradient_seconds(job, layout, cluster, weights, slowest.backward, rates)
    pp = 0.0
    if layout.pp > 1:
        pp = seconds_of(communication.pipeline_calls(job, layout, cluster), cluster)
    return {
        "compute": m * (slowest.forward + slowest.backward),
        "tp": m * slowest.tp,
        "cp": m * slowest.cp,
        "ep": m * slowest.ep,
        "dp": m * slowest.dp + gradients,
        "pp": pp,
        "bubble": (whole - slowest.total) / layout.virtual_stages,
        "optimizer": optimizer_seconds(job, layout, cluster, weights),
        "other": m * slowest.gaps + FIXED_S,
    }


def step_of_adapters(job: TrainingJob, layout: Layout, cluster: Cluster, rates):
    """Return the seconds of a step that trains adapters, with two more parts.

    Adapters and the unpacking of 4-bit weights make compute longer, by the seconds in
    `adapters` and `unpacking`. Only adapters have gradients and moments.
    """
    frozen = replace(job, adapter_rank=0)
    packed = step_parts(frozen, layout, cluster, rates)
    plain = step_parts(replace(frozen, quant=""), layout, cluster, rates)["compute"]
    m = layout.micro_batches(job)
    kind = max(kinds_of_stage(job, layout))
    with_all = stage_seconds(job, layout, cluster, *kind, rates)
    compute_s = m * (with_all.forward + with_all.backward)
    parts = {"compute": plain, "adapters": compute_s - packed["compute"]}
    parts |= {"unpacking": packed["compute"] - plain}
    parts |= {name: value for name, value in packed.items() if name not in parts}
    parts["other"] = m * with_all.gaps + FIXED_S
    trained = finetune.trained_parameters(
        job.model, "lora", job.adapter_rank, job.adapter_targets
    )
    trained /= layout.tp
    update = replace(frozen, frozen=False, quant="", reduce_bytes=memory.FP32)
    averaged = replace(layout, zero=0)  # to scatter and gather costs the same
    parts["dp"] += gradient_seconds(
        update, averaged, cluster, trained, compute_s, rates
    )
    parts["optimizer"] = optimizer_seconds(update, layout, cluster, trained)
    return parts


def step_seconds(
    job: TrainingJob, layout: Layout, cluster: Cluster, rates=None
) -> float:
    """Return the seconds of a step."""
    return sum(step_parts(job, layout, cluster, rates or RATES).values())


# The table of axes


class Traffic(NamedTuple):
    """The calls of an axis in a step, on a GPU of the slowest stage."""

    calls: list[Call]
    times: float  # that the calls repeat in a step
    layer_bytes: float  # per layer and micro-batch; dp: per step; pp: per stage
    compute: float = 0.0  # seconds of computation at the same time


def tensor_traffic(job, layout, cluster, layers: int, head: bool, stage) -> Traffic:
    """Return the traffic of tp. Embedding and head add a collective in each pass."""
    calls = communication.tensor_calls(job, layout, cluster)
    ends = (1 if head else 0) + (1 if layout.pp == 1 else 0)
    m = layout.micro_batches(job)
    times = m * (layers + ends / (2 * communication.passes_of(layout)))
    compute_s = m * (stage.forward + stage.backward) if layout.overlap_tp else 0.0
    return Traffic(calls, times, bytes_of(calls), compute_s)


def context_traffic(job, layout, cluster, layers: int) -> Traffic:
    """Return the traffic of cp. A ring overlaps with attention."""
    forward, backward = communication.context_calls(job, layout, cluster)
    calls, times = forward + backward, layout.micro_batches(job) * layers
    attention = 0.0
    if layout.cp_kind == "ring":
        layer = compute.layer_seconds(job, layout, cluster, RATES)
        forwards = communication.passes_of(layout) - 1
        attention = forwards * layer.attention + layer.attention_backward
    return Traffic(calls, times, bytes_of(calls), times * attention)


def replica_traffic(job, layout, cluster, stage) -> Traffic:
    """Return the traffic of dp for the stage with most weights."""
    m = layout.micro_batches(job)
    stages = memory.distinct_stages(layout)
    weights = max(sum(memory.weights_of_stage(job, layout, s)) for s in stages)
    calls = communication.weight_calls(job, layout, cluster, weights)
    gathers = m if communication.gathers_each(job, layout) else 1
    reductions = m if communication.reduces_each(job, layout) else 1
    repeated = [c._replace(times=gathers) for c in calls.forward + calls.backward]
    repeated += [c._replace(times=reductions * c.times) for c in calls.gradients]
    compute_s = 0.0
    if communication.gathers_each(job, layout):
        compute_s = m * (stage.forward + stage.backward)
    elif layout.overlap_dp:
        compute_s = reductions * stage.backward
    layer = models.layer_parameters(job.model) / layout.tp
    sent = bytes_of(repeated) * layer / weights
    return Traffic(repeated, 1, sent, compute_s)


def pipeline_traffic(job, layout, cluster) -> Traffic:
    """Return the traffic of pp between two neighbouring stages."""
    calls = communication.pipeline_calls(job, layout, cluster)
    sent = calls[0].sent / layout.micro_batches(job) / layout.virtual_stages
    # With two ranks, the first and the last chunk have one neighbour.
    share = 1 - 1 / (2 * layout.virtual_stages) if layout.pp == 2 else 1.0
    return Traffic(calls, share, sent)


def axes_of(job: TrainingJob, layout: Layout, cluster: Cluster) -> dict[str, Axis]:
    """Return the traffic of each axis that is larger than 1."""
    kinds = kinds_of_stage(job, layout)
    stages = {k: stage_seconds(job, layout, cluster, *k, RATES) for k in kinds}
    layers, head = max(kinds, key=lambda k: stages[k].total)
    stage = stages[layers, head]
    traffic = {}
    if layout.tp > 1:
        traffic["tp"] = tensor_traffic(job, layout, cluster, layers, head, stage)
    if layout.cp > 1:
        traffic["cp"] = context_traffic(job, layout, cluster, layers)
    if layout.ep > 1:
        calls = communication.expert_calls(job, layout, cluster)
        times = layout.micro_batches(job) * layers
        traffic["ep"] = Traffic(calls, times, bytes_of(calls))
    if layout.replicas > 1 and not (job.frozen and layout.zero < 3):
        traffic["dp"] = replica_traffic(job, layout, cluster, stage)
    if layout.pp > 1:
        traffic["pp"] = pipeline_traffic(job, layout, cluster)
    exposed_s = step_parts(job, layout, cluster, RATES)
    return {
        name: axis_of(
            layout.replicas if name == "dp" else getattr(layout, name),
            axis.calls,
            axis.times,
            cluster,
            layer_bytes=axis.layer_bytes,
            compute=axis.compute,
            exposed=exposed_s[name],
        )
        for name, axis in traffic.items()
    }


# The prediction


def predict(job: TrainingJob, layout: Layout, cluster: Cluster) -> Prediction:
    """Return memory and step time of a layout."""
    return Prediction(
        layout,
        memory.memory_of(job, layout),
        step_parts(job, layout, cluster, RATES),
        compute.model_flops(job),
        job.global_batch * job.seq_len,
        memory.memory_limit(cluster.gpu),
    )
