"""Find the fastest layouts that fit: cuts in the order of a lower bound, memory before time.

Nothing is left out that could be among the best five, or first where a rate is a fifth lower, on
two conditions of planner: more recomputation never makes a step shorter, and what a
layout does besides sharding states and stepping takes at least as long as it would without
recomputation. Tests try all layouts instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product

from planner import memory
from planner.hardware import Cluster
from planner.job import RECOMPUTE, Job, Layout, Prediction
from planner.plan_rules import divisors, why_not_cp, why_not_stages, why_not_tp
from planner.rates import RATES as REACHED
from planner.step import predict, slower, step_parts

CUT = ("tp", "cp", "pp", "dp", "ep")
STATES = ("zero", "shard")
RATES = ("network", "matrix")
FALL = 0.8  # of a rate: what is first there is looked for, too
NEAR = 1.5  # of the memory: what would fit on a somewhat larger GPU
MICRO_BATCHES = tuple(2**power for power in range(8))
VIRTUAL = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)


def cut_of(layout: Layout) -> tuple[int, ...]:
    return tuple(getattr(layout, axis) for axis in CUT)


@dataclass
class Found:
    """What a search has: predictions by time, and what does not fit.

    `row_of` names what the best differ in; `timed` predicts a layout on another cluster.
    """

    fitting: list[Prediction] = field(default_factory=list)  # best first
    near: list[Prediction] = field(default_factory=list)  # faster, but too large
    smallest: Prediction | None = None  # of all that were tried, where none fits
    tried: int = 0
    row_of: Callable = cut_of
    timed: Callable = predict

    @property
    def best(self) -> list[Prediction]:
        """Return the fastest layout of each way to cut the axes, best first."""
        first = {}
        for prediction in self.fitting:
            first.setdefault(self.row_of(prediction.layout), prediction)
        return list(first.values())


def search(job: Job, cluster: Cluster, gpus: int, only: dict | None = None) -> Found:
    """Return the fastest layouts of `gpus` GPUs; with offload only where nothing fits without.

    `only` holds fields of a Layout that are given. A search that finds no cut has tried 0.
    """
    only = only or {}
    kinds = [only["offload"]] if "offload" in only else ["none", "optimizer", "all"]
    found = Found()
    for offload in kinds:
        tried = search_with(job, cluster, gpus, {**only, "offload": offload})
        held = [f.smallest for f in (found, tried) if f.smallest]
        tried.smallest = min(held, key=lambda p: p.memory_total, default=None)
        tried.tried += found.tried
        found = tried
        if found.fitting:
            break
    return found


def search_with(job: Job, cluster: Cluster, gpus: int, only: dict) -> Found:
    """Search with one kind of offload: the cuts whose lower bound is lowest come first."""
    found, bounds = Found(), []
    for cut in cuts(job, cluster, gpus, only):
        bounds.append((lower_bound(job, cut, cluster, only), len(bounds), cut))
    slow = {name: slower(cluster, **{name: FALL}) for name in RATES}
    best_of_cut: dict[tuple, float] = {}
    needed = dict.fromkeys(RATES, math.inf)  # what the best takes where a rate is a fifth lower
    for bound, _, cut in sorted(bounds):
        times = sorted(best_of_cut.values())[:5]
        fifth = times[-1] if len(times) == 5 else math.inf
        if bound > max(fifth, *needed.values()):
            break
        on_slow = lower_bound(job, cut, slow["matrix"], only)
        if bound > max(fifth, needed["network"]) and on_slow > needed["matrix"]:
            continue
        for plan in predictions(job, cluster, cut, only, found):
            if plan.step_time_s < min(best_of_cut.values(), default=math.inf):
                needed = {name: predict(job, plan.layout, slow[name]).step_time_s for name in RATES}
            key = cut_of(cut)
            best_of_cut[key] = min(best_of_cut.get(key, math.inf), plan.step_time_s)
    found.fitting.sort(key=lambda p: (p.step_time_s, p.memory_total))
    found.near.sort(key=lambda p: p.step_time_s)
    return found


def lower_bound(job: Job, cut: Layout, cluster: Cluster, only: dict) -> float:
    """Return what a step takes whatever the states' sharding is: without dp and optimizer."""
    least = replace(cut, recompute=only.get("recompute", RECOMPUTE[0]))
    parts = step_parts(job, least, cluster, REACHED)
    return sum(seconds for part, seconds in parts.items() if part not in ("dp", "optimizer"))


def predictions(job, cluster, cut: Layout, only: dict, found: Found):
    """Yield the predictions of a cut that fit: for each sharding, with the least recomputation."""
    limit = memory.memory_limit(cluster.gpu)
    kinds = [only["recompute"]] if "recompute" in only else RECOMPUTE

    def held_by(layout: Layout) -> float:
        found.tried += 1
        return sum(memory.memory_of(job, layout, cluster.gpus_per_node).values())

    for zero, shard in shardings(cut, cluster, only):
        layouts = [replace(cut, zero=zero, shard=shard, recompute=kind) for kind in kinds]
        least = held_by(layouts[-1])
        if not found.fitting and (not found.smallest or least < found.smallest.memory_total):
            found.smallest = predict(job, layouts[-1], cluster)
        if least > NEAR * limit:
            continue
        held = [*map(held_by, layouts[:-1]), least]
        nearly = [
            layout for layout, size in zip(layouts, held, strict=True) if size <= NEAR * limit
        ]
        fits = [layout for layout, size in zip(layouts, held, strict=True) if size <= limit]
        if nearly[:1] != fits[:1]:
            found.near.append(predict(job, nearly[0], cluster))
        if fits:
            prediction = predict(job, fits[0], cluster)
            found.fitting.append(prediction)
            yield prediction


def shardings(cut: Layout, cluster: Cluster, only: dict) -> Iterator[tuple[int, int]]:
    """Yield (zero, shard): stages of ZeRO, and HSDP within a node and within eight."""
    if cut.replicas == 1:
        stages = [(0, 0)]
    else:
        stages = [(zero, 0) for zero in range(4)]
        inside = cluster.gpus_per_node // cut.tp
        for shard in (inside, 8 * inside):
            if 1 < shard < cut.replicas and cut.replicas % shard == 0 and shard % cut.ep == 0:
                stages.append((3, shard))
    if cut.offload != "none":
        stages = [
            (zero, shard) for zero, shard in stages if zero >= (3 if cut.offload == "all" else 1)
        ]
    for zero, shard in stages:
        if only.get("zero", zero) == zero and only.get("shard", shard) == shard:
            yield zero, shard


def cuts(job: Job, cluster: Cluster, gpus: int, only: dict) -> Iterator[Layout]:
    """Yield layouts without sharding and recomputation: axes, micro-batch, schedule, kind of cp."""

    def allowed(name: str, values) -> list:
        return [value for value in values if only.get(name, value) == value]

    model = job.model
    for tp, pp in product(allowed("tp", divisors(gpus)), allowed("pp", divisors(gpus))):
        if gpus % (tp * pp) or why_not_tp(model, cluster, tp) or pp > model.layers:
            continue
        for cp in allowed("cp", divisors(gpus // (tp * pp))):
            dp = gpus // (tp * pp * cp)
            if why_not_cp(job, cp, tp) or job.global_batch % dp or only.get("dp", dp) != dp:
                continue
            for ep, kind in product(allowed("ep", experts_over(model, dp * cp)),
                                    allowed("cp_kind", kinds_of_cp(job, tp, cp))):  # fmt: skip
                given = {name: only[name] for name in ("offload", "order") if name in only}
                base = Layout(tp, cp, pp, dp, ep, cp_kind=kind, **given)
                yield from scheduled(job, base, allowed)


def scheduled(job: Job, base: Layout, allowed: Callable) -> Iterator[Layout]:
    """Yield a cut with each micro-batch and number of virtual stages that it allows."""
    own = job.global_batch // base.dp
    sizes = [size for size in allowed("micro_batch", MICRO_BATCHES) if own % size == 0]
    for size in sizes:
        for stages in allowed("virtual_stages", VIRTUAL):
            layout = replace(base, micro_batch=size, virtual_stages=stages)
            if not why_not_stages(job, layout):
                yield layout


def experts_over(model, replicas: int) -> list[int]:
    """Return the ways to spread experts: over a divisor of both experts and replicas."""
    return divisors(math.gcd(model.experts, replicas)) if model.experts else [1]


def kinds_of_cp(job: Job, tp: int, cp: int) -> list[str]:
    """Return the kinds of context parallelism: Ulysses needs a key head for each rank."""
    if cp == 1:
        return ["ring"]
    return ["ring", "ulysses"] if job.model.kv_heads % (tp * cp) == 0 else ["ring"]
