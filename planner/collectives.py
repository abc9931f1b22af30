"""The time of a collective: start-up, and bytes over what the slowest link gives.

Source: alpha-beta model (Thakur, Rabenseifner, Gropp, 2005); bytes of each collective as NCCL's
tests count them (nccl-tests, doc/PERFORMANCE.md).
"""

from __future__ import annotations

from math import log2

from planner.hardware import Cluster
from planner.rates import RATES, rate_of

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
MIB = 2**20
FULL_BYTES = 64 * MIB  # from here on a message keeps all channels of a link busy
# GPUs of a DGX-1 are joined by single links; NCCL finds so many rings among so many of them.
MESH_LINK_GB_S = 25.0
MESH_RINGS = {2: 1.0, 3: 2.0, 4: 4.0, 5: 1.65, 6: 2.0, 7: 2.0, 8: 6.0}


def bus_factor(kind: str, ranks: int) -> float:
    """Return the share of a tensor that each link carries (nccl-tests, doc/PERFORMANCE.md)."""
    if ranks <= 1:
        return 0.0
    if kind == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if kind in ("all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) / ranks
    return 1.0


def inside_gb_s(kind: str, ranks: int, cluster: Cluster, rates) -> float:
    """Return the bus bandwidth inside a node: of rings, or of a switch that adds.

    With NVLS a GPU sends a tensor once and receives the sum once, however many ranks there are;
    a ring carries it 2 (n - 1) / n times.
    """
    gpu = cluster.gpu
    if gpu.mesh:
        return MESH_LINK_GB_S * MESH_RINGS.get(ranks, 2.0) * rates["link.mesh"]
    ring = gpu.link_gb_s * rates["link.ring"]
    if gpu.switch_reduces and kind == "all_reduce" and ranks > 4:
        once = gpu.link_gb_s * rate_of(rates, "link.switch", gpu.family)
        return max(ring, once * bus_factor(kind, ranks))
    return ring


def start_us(kind: str, ranks: int, nodes: int, cluster: Cluster, rates) -> float:
    """Return the microseconds before the first byte arrives: hops of a ring, or of a tree."""
    local = -(-ranks // nodes)
    hop = rates["link.hop_switch_us" if cluster.gpu.switch_reduces else "link.hop_us"]
    start = rates["link.start_us"] + hop * (local - 1)
    if nodes > 1:
        # A ring passes through every node; an all-reduce may take a tree (NCCL 2.4 and later).
        hops = log2(nodes) if kind in ("all_reduce", "send", "broadcast") else nodes - 1
        start += rates[f"network.{cluster.network}.start_us"] + rates["network.node_us"] * hops
    return start


def seconds_of(
    kind: str,
    size_bytes: float,
    ranks: int,
    cluster: Cluster,
    nodes: int | None = None,
    rates: dict[str, float] | None = None,
) -> float:
    """Return the seconds of one collective of `ranks` ranks on `nodes` nodes.

    size_bytes: the whole tensor (of an all-gather: gathered; of a send: what is sent).
    nodes: how many nodes the ranks stand on; left out: as few as hold them.
    """
    rates = rates or RATES
    if ranks <= 1 or size_bytes <= 0:
        return 0.0
    if nodes is None:
        nodes = -(-ranks // cluster.gpus_per_node)
    inside = inside_gb_s(kind, max(2, -(-ranks // nodes)), cluster, rates)
    seconds = size_bytes * bus_factor(kind, ranks) / inside
    ramp = rates["link.ramp_us"]
    if nodes > 1:
        # A node's ranks send through all their cards. Where the switch adds, a node sends each
        # sum once (NVLS tree, NCCL 2.18 and later).
        cards = 1 if kind == "send" else max(1, ranks // nodes)
        between = min(cards * cluster.network_gb_s * rates["network.rate"], inside)
        tree = kind == "all_reduce" and cluster.gpu.switch_reduces
        factor = bus_factor(kind, nodes if tree else ranks)
        seconds = max(seconds * (ranks > nodes), size_bytes * factor / between)
        ramp = rates[f"network.{cluster.network}.ramp_us"]
    ramp *= log2(1 + min(size_bytes, FULL_BYTES) / MIB)
    start = start_us(kind, ranks, nodes, cluster, rates)
    return (start + ramp) * 1e-6 + seconds / 1e9 / cluster.network_scale
