"""The collectives of each axis of a layout, with their bytes, links and seconds.

A collective takes a start and its bytes over the rate of the slowest link. Axes lie on
ranks in the layout's order: tp next to each other, then cp, dp and pp (Megatron-LM's).

Source: alpha-beta model (Thakur, Rabenseifner, Gropp, 2005); the bytes of a collective
as NCCL's tests count them (nccl-tests, doc/PERFORMANCE.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

from planner import finetune, memory, models
from planner.activations import tokens_of
from planner.hardware import LATENCY_US, Cluster
from planner.job import Layout, TrainingJob

WIDTH = 2  # bytes of a number that is sent: bfloat16 or float16
REPLICAS = ("cp", "dp")  # axes whose ranks hold the same weights
# Shares of the data sheets' rates that large messages reach (data/collectives.csv).
RING = 0.77  # of NVLink's rate
SWITCH = {"hopper": 0.58, "blackwell": 0.50}  # NVLS: the switch adds, each sends once
NETWORK = 0.90  # of the cards' rate
START_US = 20.0  # of a collective inside a node


def bus_factor(kind: str, ranks: int) -> float:
    """Return the share of a tensor that each link carries."""
    if ranks <= 1:
        return 0.0
    if kind == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return 1.0 if kind == "send" else (ranks - 1) / ranks


class Call(NamedTuple):
    """A number of equal collectives.

    size: bytes of the whole tensor; for an all-gather, of the gathered tensor.
    """

    kind: str
    size: float
    ranks: int
    nodes: int  # of the ranks
    times: float = 1.0

    @property
    def sent(self) -> float:
        """Return the bytes that a rank sends, in rings."""
        return self.times * self.size * bus_factor(self.kind, self.ranks)

    def seconds(self, cluster: Cluster) -> float:
        """Return the seconds of all these collectives, one after the other.

        With NVLS a GPU sends a tensor once and receives the sum once.
        """
        if self.ranks <= 1 or not self.times:
            return 0.0
        gpu, factor = cluster.gpu, bus_factor(self.kind, self.ranks)
        local = -(-self.ranks // self.nodes)
        adds = gpu.switch_reduces and self.kind == "all_reduce"
        inside = gpu.link_gb_s * RING
        if adds and local > 4:
            family = gpu.family.partition("-")[0]
            inside = max(
                inside, gpu.link_gb_s * SWITCH[family] * bus_factor(self.kind, local)
            )
        seconds = self.size * factor / inside
        start = START_US
        if self.nodes > 1:
            # A node's ranks send through all their cards. If the switch adds, each node
            # sends a sum once (NVLS tree, NCCL 2.18).
            cards = 1 if self.kind == "send" else max(1, self.ranks // self.nodes)
            between = min(cards * cluster.network_gb_s * NETWORK, inside)
            over = bus_factor(self.kind, self.nodes) if adds else factor
            within = seconds if self.ranks > self.nodes else 0.0
            seconds = max(within, self.size * over / between)
            start += LATENCY_US[cluster.network]
        return self.times * (start * 1e-6 + seconds / 1e9 / cluster.network_scale)


def bytes_of(calls: list[Call]) -> float:
    """Return the bytes that a rank sends in some calls."""
    return sum(call.sent for call in calls)


def seconds_of(calls: list[Call], cluster: Cluster) -> float:
    """Return the seconds of some calls, one after the other."""
    return sum(call.seconds(cluster) for call in calls)


# Ranks and nodes


def strides_of(layout: Layout, axes: tuple[str, ...]) -> list[list[int]]:
    """Return (stride, size) of axes on ranks, innermost first.

    Neighbouring axes are joined.
    """
    strides, stride, before = [], 1, ""
    for axis in layout.order:
        size = getattr(layout, axis)
        if axis in axes and before in axes:
            strides[-1][1] *= size
        elif axis in axes:
            strides.append([stride, size])
        stride *= size
        before = axis
    return strides


def nodes_of(
    layout: Layout, axes: tuple[str, ...], ranks: int, cluster: Cluster, every: int = 1
) -> int:
    """Return the number of nodes of a group of ranks.

    The ranks differ in `axes`, and stand `every` ranks apart on them.
    """
    inside, rest = 1, ranks
    for stride, size in strides_of(layout, axes):
        if every >= size > 1:
            every //= size
            continue
        take = min(rest, size // every)
        inside *= max(1, min(take, cluster.gpus_per_node // (stride * every)))
        rest, every = -(-rest // max(1, take)), 1
    return -(-ranks // inside)


# The calls of each axis


def passes_of(layout: Layout) -> int:
    """Return the passes with a layer's collectives: 3 with full recomputation."""
    return 3 if layout.recompute == "full" else 2


def tensor_calls(job: TrainingJob, layout: Layout, cluster: Cluster) -> list[Call]:
    """Return the collectives of tensor parallelism in a layer, for one micro-batch.

    Two all-reduces forward and two backward (Shoeybi et al., 2019, section 3). With
    sequence parallelism each is an all-gather and a reduce-scatter (Korthikanti et
    al., 2022, section 4.2.2).
    """
    size = WIDTH * tokens_of(job, layout) * job.model.hidden
    nodes = nodes_of(layout, ("tp",), layout.tp, cluster)
    kinds = ("all_gather", "reduce_scatter")
    if not layout.sequence_parallel:
        kinds = ("all_reduce",)
    times = 2 * passes_of(layout)
    return [Call(kind, size, layout.tp, nodes, times) for kind in kinds]


def context_calls(job: TrainingJob, layout: Layout, cluster: Cluster):
    """Return the collectives of context parallelism in a layer, forward and backward.

    Ring: keys and values go around, backward with their gradients (Liu et al., 2023).
    Ulysses: all-to-all of queries, keys, values and output; each rank gets a key head
    (Jacobs et al., 2023). Gather: all keys and values (Llama 3, section 3.3.2).
    """
    model, c = job.model, layout.cp
    tokens = tokens_of(job, layout)
    nodes = nodes_of(layout, ("cp",), c, cluster)
    keys = WIDTH * 2 * tokens * models.key_width(model) / layout.tp
    again = passes_of(layout) - 1
    if layout.cp_kind == "ring":
        hop = Call("send", keys, 2, min(nodes, 2), c - 1)
        return [hop._replace(times=again * (c - 1))], [hop._replace(times=2 * (c - 1))]
    if layout.cp_kind == "ulysses":
        heads = 2 * lcm(model.kv_heads, c) * models.head_width(model)
        numbers = 2 * models.query_width(model) + heads
        call = Call("all_to_all", WIDTH * tokens * numbers / layout.tp, c, nodes)
        return [call._replace(times=again)], [call]
    gather = Call("all_gather", keys * c, c, nodes, again)
    return [gather], [gather._replace(kind="reduce_scatter", times=1.0)]


def expert_calls(job: TrainingJob, layout: Layout, cluster: Cluster) -> list[Call]:
    """Return the all-to-alls of an expert layer: tokens there and back in each pass.

    Source: GShard (Lepikhin et al., 2020), section 3.2.
    """
    size = WIDTH * tokens_of(job, layout) * job.model.top_k * job.model.hidden
    if layout.sequence_parallel:
        size /= layout.tp
    nodes = nodes_of(layout, REPLICAS, layout.ep, cluster)
    return [Call("all_to_all", size, layout.ep, nodes, 2 * passes_of(layout))]


def pipeline_calls(job: TrainingJob, layout: Layout, cluster: Cluster) -> list[Call]:
    """Return the activations and gradients that a stage sends in a step."""
    size = WIDTH * tokens_of(job, layout) * job.model.hidden / layout.tp
    ((stride, _),) = strides_of(layout, ("pp",))
    node = cluster.gpus_per_node
    nodes = 1 if layout.gpus <= node or stride < node else 2
    times = 2 * layout.virtual_stages * layout.micro_batches(job)
    return [Call("send", size, min(layout.pp, 2), nodes, times)]


class WeightCalls(NamedTuple):
    """The calls that gather some weights, and that average their gradients."""

    forward: list[Call]
    backward: list[Call]  # gathers
    gradients: list[Call]


def weight_calls(job: TrainingJob, layout: Layout, cluster: Cluster, weights: float):
    """Return the calls for a number of weights: in each micro-batch, or in a step.

    ZeRO-3 gathers in forward and backward, and reduce-scatters gradients. ZeRO-1 and 2
    gather the updated weights, and DDP all-reduces gradients (Rajbhandari et al., 2020,
    section 7). HSDP also averages a shard's gradients over its copies. Frozen weights
    have no gradients.
    """
    n, shards = layout.replicas, layout.shards
    if layout.zero == 0:
        nodes = nodes_of(layout, REPLICAS, n, cluster)
        return WeightCalls(
            [], [], [Call("all_reduce", weights * job.reduce_bytes, n, nodes)]
        )
    nodes = nodes_of(layout, REPLICAS, shards, cluster)
    width = finetune.frozen_weight_bytes(job.quant) if job.frozen else WIDTH
    gather = [Call("all_gather", weights * width, shards, nodes)]
    gradients = [Call("reduce_scatter", weights * job.reduce_bytes, shards, nodes)]
    if n > shards:
        copies = n // shards
        nodes = nodes_of(layout, REPLICAS, copies, cluster, every=shards)
        size = weights / shards * job.reduce_bytes
        gradients.append(Call("all_reduce", size, copies, nodes))
    again = gather if gathers_each(job, layout) else []
    return WeightCalls(gather, again, [] if job.frozen else gradients)


def gathers_each(job: TrainingJob, layout: Layout) -> bool:
    """Tell whether weights are gathered in each micro-batch."""
    return layout.zero == 3 and not memory.gathers_once(job, layout)


def reduces_each(job: TrainingJob, layout: Layout) -> bool:
    """Tell whether each micro-batch reduces its gradients (ZeRO-2, section 5.2)."""
    if layout.zero == 2:
        return not memory.gradients_stay_whole(job, layout)
    return gathers_each(job, layout)


# The table of axes


@dataclass(frozen=True)
class Axis:
    """The traffic of one axis on a GPU of the slowest stage; seconds are of a step."""

    ranks: int  # dp: all replicas, with the ranks of cp
    nodes: int
    cards: int  # network cards of a node that the group uses; 0: it stays in the node
    gb_s: float  # the data sheet's rate of the GPU's link, or of these cards
    layer_bytes: float  # per layer and micro-batch; dp: per step; pp: per stage
    step_bytes: float
    seconds: float  # of the messages alone
    compute: float  # of computation at the same time
    exposed: float  # the rest, which makes the step longer
    sends: str


def axis_of(ranks, calls: list[Call], times: float, cluster: Cluster, **other) -> Axis:
    """Return the traffic of an axis: its calls, repeated `times` times in a step."""
    first = calls[0]
    cards, gb_s = 0, cluster.gpu.link_gb_s
    if first.nodes > 1:
        cards = 1 if first.kind == "send" else max(1, first.ranks // first.nodes)
        gb_s = min(gb_s, cards * cluster.network_gb_s)
    words = [
        f"{call.times:g} {call.kind.replace('_', '-')} of {call.size / 1e6:,.1f} MB"
        for call in calls
    ]
    sent = times * bytes_of(calls)
    seconds = times * seconds_of(calls, cluster)
    text = f"{' and '.join(words)}, {times:g} times in a step"
    return Axis(
        ranks,
        first.nodes,
        cards,
        gb_s,
        step_bytes=sent,
        seconds=seconds,
        sends=text,
        **other,
    )
