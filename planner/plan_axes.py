"""`plan.py predict`: what each axis splits and sends, over which link, and what hides it."""

from __future__ import annotations

from dataclasses import asdict

from planner.axes import Axis, axes_of, bytes_per_weight
from planner.collectives import bus_factor
from planner.hardware import Cluster
from planner.job import Job, Layout
from planner.plan_text import table
from planner.sent import passes_of_activations

SPLITS = {
    "tp": "matrices; tokens in between",
    "cp": "each sequence",
    "ep": "experts",
    "dp": "batch (and states)",
    "pp": "layers",
}
# What an axis sends from a GPU: the formulas of planner, in words.
SENDS = {
    "tp": "{calls} all-gathers and reduce-scatters of (tp-1)/tp x tokens x D x 2 bytes,"
    " per layer and micro-batch",
    "ring": "(cp-1) hops of keys and values, tokens x 2 kv_dim / tp x {width} bytes in all"
    " passes, per layer and micro-batch",
    "ulysses": "all-to-alls of queries, keys, values and outputs, {passes} times,"
    " per layer and micro-batch",
    "gather": "all-gathers of keys and values, and a reduce-scatter of their gradients,"
    " per layer and micro-batch",
    "ep": "{routed} all-to-alls of (ep-1)/ep x tokens x top-k x D x 2 bytes,"
    " per layer and micro-batch",
    "dp": "(n-1)/n x {per_weight} bytes per weight on the GPU, n = dp x cp = {n}, per step",
    "hsdp": "{per_weight} bytes per weight on the GPU, in groups of {shards} and between {copies}"
    " copies, per step",
    "pp": "activations and their gradient, tokens x D / tp x 2 bytes each way,"
    " per border of stages and micro-batch",
}


def axes_lines(job: Job, layout: Layout, cluster: Cluster) -> list[str]:
    """Return a table of the axes that are larger than 1, and what each sends, in words."""
    axes = axes_of(job, layout, cluster)
    if not axes:
        return []
    rows = []
    for name, axis in axes.items():
        sizes = f"{axis.layer_bytes / 1e6:,.1f} MB", f"{axis.step_bytes / 1e9:,.1f} GB"
        times = (f"{seconds:.3f} s" for seconds in (axis.seconds, axis.beside, axis.exposed))
        rows.append((f"{name} {axis.ranks}", SPLITS[name], link(axis), *sizes, *times))
    headers = ("axis", "splits", "link", "per layer", "per step", "takes", "beside", "exposed")
    return [table(rows, headers, 3), "", *(words(job, layout, name) for name in axes)]


def axes_json(job: Job, layout: Layout, cluster: Cluster) -> dict[str, dict]:
    """Return the same for --json: an axis' numbers in bytes and seconds, and the words."""
    return {
        name: {
            **asdict(axis),
            "link": link(axis),
            "splits": SPLITS[name],
            "sends": words(job, layout, name),
        }
        for name, axis in axes_of(job, layout, cluster).items()
    }


def link(axis: Axis) -> str:
    """Name what a group's traffic crosses: the links of a node, or so many of its cards."""
    rate = f"{axis.gb_s:g} GB/s"
    return f"network x{axis.cards}, {rate}" if axis.cards else f"node, {rate}"


def words(job: Job, layout: Layout, name: str) -> str:
    """Say what an axis sends, with the numbers of this layout."""
    passes = passes_of_activations(layout.recompute)
    kind = {"cp": layout.cp_kind}.get(name, name)
    of_ring = bus_factor("all_gather", layout.replicas) or 1
    if name == "dp" and layout.shards < layout.replicas:
        kind, of_ring = "hsdp", 1
    return f"{name}: " + SENDS[kind].format(
        calls=4 * passes,
        passes=passes,
        routed=2 * passes,
        width=2 * (passes + 1),
        per_weight=f"{bytes_per_weight(job, layout) / of_ring:.4g}",
        n=layout.replicas,
        shards=layout.shards,
        copies=layout.replicas // layout.shards,
    )
