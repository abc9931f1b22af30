"""`combining.py predict --cheaper`: what the module's cheaper steps change of a layout, each alone.

They change no axis, but what a step keeps, computes or sends between replicas.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from advanced_parts.plan_rules import why_not
from advanced_parts.plan_text import GIB, table
from dist_common.costs import memory
from dist_common.costs.axes import axes_of
from dist_common.costs.collectives import bus_factor
from dist_common.costs.hardware import Cluster
from dist_common.costs.job import RECOMPUTE, Job, Layout, Prediction
from dist_common.costs.memory import BF16, FP32
from dist_common.costs.rates import RATES
from dist_common.costs.sent import powersgd_numbers
from dist_common.costs.step import gradient_seconds, predict, shard_seconds

POWERSGD_RANK = 4
TOPK_SHARE = 0.01
TOPK_ENTRY = 8  # bytes: a float32 value and an int32 index
LOCAL_STEPS = 50  # of DiLoCo, between two averages of the weights


@dataclass(frozen=True)
class Change:
    """A change of a layout's step: what replicas send, what it holds and takes, what else it costs.

    `sends` in bytes of a GPU and step, `takes` in seconds of sending alone.
    """

    name: str
    plan: Prediction
    sends: float
    takes: float
    price: str

    @property
    def exposed(self) -> float:
        return self.plan.step["dp"]

    def as_json(self) -> dict:
        """Return what the table shows, in bytes and seconds."""
        plan = self.plan
        sent = {"dp_bytes": self.sends, "dp_takes_s": self.takes, "dp_exposed_s": self.exposed}
        held = {"memory_bytes": plan.memory_total, "fits": plan.fits}
        return {"change": self.name, **sent, **held, "step_time_s": plan.step_time_s,
                "price": self.price}  # fmt: skip


def changes(job: Job, layout: Layout, cluster: Cluster) -> list[Change]:
    """Return the layout as it is, and with each change that it allows."""
    base = changed("as above", job, layout, cluster, "")
    found = [base, *in_a_replica(job, layout, cluster, base.plan)]
    if layout.replicas == 1:
        return found
    found += between_replicas(job, layout, cluster)
    # What changes DDP's gradients needs replicas that hold all weights.
    if layout.replicas == layout.gpus and layout.zero == 0 and layout.ep == 1:
        found += instead_of_gradients(job, layout, cluster, base)
    return found


def changed(name: str, job: Job, layout: Layout, cluster: Cluster, price: str = "none") -> Change:
    dp = axes_of(job, layout, cluster).get("dp")
    sent = (dp.step_bytes, dp.seconds) if dp else (0.0, 0.0)
    return Change(name, predict(job, layout, cluster), *sent, price)


def in_a_replica(job, layout: Layout, cluster: Cluster, base: Prediction) -> Iterator[Change]:
    """Yield other recomputation, other micro-batches, and products of 8 bits."""
    for kind in RECOMPUTE:
        if kind != layout.recompute:
            again = replace(layout, recompute=kind)
            compute = predict(job, again, cluster).step["compute"]
            price = f"{compute / base.step['compute'] - 1:+.0%} compute"
            yield changed(f"recompute {kind}", job, again, cluster, price)
    for size in (layout.micro_batch // 2, layout.micro_batch * 2):
        other = replace(layout, micro_batch=size)
        if size and not why_not(job, cluster, other):
            yield changed(
                f"{other.micro_batches(job)} micro-batches of {size}", job, other, cluster
            )
    if job.precision in ("bf16", "fp16") and "fp8" in cluster.gpu.tflops:
        yield changed("fp8 products", replace(job, precision="fp8"), layout, cluster, "rounding")


def between_replicas(job: Job, layout: Layout, cluster: Cluster) -> Iterator[Change]:
    """Yield gradients that are reduced after backward, and gradients of 16 bits."""
    each_time = layout.zero == 3 and not memory.gathers_once(job, layout)
    if layout.overlap_dp and not each_time:
        yield changed("without overlap", job, replace(layout, overlap_dp=False), cluster)
    if job.reduce_bytes > BF16:
        halved = replace(job, reduce_bytes=BF16)
        yield changed("bf16 gradients", halved, layout, cluster, "rounding")


def instead_of_gradients(job, layout: Layout, cluster: Cluster, base: Change) -> Iterator[Change]:
    """Yield what DDP may send: more often, compressed, or weights once in many steps.

    Backward waits in the hooks of PowerSGD and top-k, so nothing hides what these send. Their own
    computing is left out: lower bounds. A copy is what error feedback did not send yet, or weights.
    """
    n, m = layout.replicas, layout.micro_batches(job)
    weights = sum(memory.weights_of_stage(job, layout, 0))

    def sender(name, sends, takes, copies: int, price: str) -> Change:
        plan = replace(
            base.plan,
            step=base.plan.step | {"dp": takes},
            memory=base.plan.memory | {"copies": copies * FP32 * weights},
        )
        return Change(name, plan, sends, takes, price)

    def all_reduced(numbers: float) -> tuple[float, float]:
        whole, after = replace(job, reduce_bytes=FP32), replace(layout, overlap_dp=False)
        takes = gradient_seconds(whole, after, cluster, numbers, 0.0, RATES)
        return bus_factor("all_reduce", n) * FP32 * numbers, takes

    if m > 1:
        often = replace(base.plan, step=base.plan.step | {"dp": m * base.exposed})
        yield Change("without no_sync", often, m * base.sends, m * base.takes, "none")
    low_rank = all_reduced(low_rank_numbers(job, layout))
    yield sender(f"PowerSGD, rank {POWERSGD_RANK}", *low_rank, 1, "loss, two passes")
    # Each rank chose others: all-gathered, it grows with the ranks.
    chosen = n * TOPK_SHARE * weights
    takes = shard_seconds(layout, cluster, chosen, TOPK_ENTRY, "all_gather", RATES)
    sends = bus_factor("all_gather", n) * TOPK_ENTRY * chosen
    yield sender(f"top {TOPK_SHARE:.0%}", sends, takes, 1, "loss")
    averaged = (value / LOCAL_STEPS for value in all_reduced(weights))
    yield sender(f"DiLoCo, {LOCAL_STEPS} steps", *averaged, 2, "loss")


def low_rank_numbers(job: Job, layout: Layout) -> float:
    """Return what PowerSGD sends in place of a GPU's gradients; vectors are whole."""
    tensors = memory.tensors_of_stage(job, layout, 0)
    shapes = [((rows,) if columns == 1 else (rows, columns), count)
              for rows, columns, _, count in tensors]  # fmt: skip
    return sum(count * powersgd_numbers([shape], POWERSGD_RANK) for shape, count in shapes)


def table_of(found: list[Change]) -> str:
    """Return one row for each change: what dp sends, memory, step and price."""
    rows = []
    for each in found:
        sent = f"{each.sends / 1e9:.2f} GB", f"{each.takes:.3f} s", f"{each.exposed:.3f} s"
        held = "too much: " * (not each.plan.fits) + f"{each.plan.memory_total / GIB:.1f} GiB"
        rows.append((each.name, *sent, held, f"{each.plan.step_time_s:.3f} s", each.price))
    headers = ("change", "dp sends", "takes", "exposed", "memory", "step", "price")
    return table(rows, headers)
