"""Find the fastest layouts that fit. A lower bound of the step time ends the search.

The bound is the time without dp and optimizer, and with the least recomputation. It
holds because more recomputation never makes a step shorter. The search skips only
layouts that cannot be among the best five, nor first if a rate is a fifth lower.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product

from planner import memory, models
from planner.activations import layers_of_stages
from planner.hardware import Cluster, slower
from planner.job import RECOMPUTE, Layout, Prediction, TrainingJob
from planner.rates import RATES
from planner.step import predict, step_parts

MESH = ("tp", "cp", "pp", "dp", "ep")
SCALES = ("network", "matrix")
FALL = 0.8  # of a rate: the search finds the fastest layout there, too
NEAR = 1.5  # of the memory: layouts for a somewhat larger GPU
MICRO_BATCHES = tuple(2**power for power in range(8))
VIRTUAL = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
SHORTEST_PART = 512  # tokens of a sequence on a rank of cp
SAME = 0.05  # a layout with smaller logits may be slower by this share
LARGE_LOGITS = 0.2  # of the memory that a job may fill


# Which layouts there can be


def divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def layout_error(job: TrainingJob, cluster: Cluster, layout: Layout) -> str:
    """Return the reason why a layout is impossible, or an empty text."""
    checks = (
        tp_error(job, cluster, layout.tp),
        cp_error(job, layout),
        stages_error(job, layout),
        replicas_error(job, layout),
        adapters_error(job, layout),
    )
    return next(filter(None, checks), "")


def tp_error(job: TrainingJob, cluster: Cluster, tp: int) -> str:
    if tp > cluster.gpus_per_node:
        return f"tp {tp} is more than the {cluster.gpus_per_node} GPUs of a node"
    model = job.model
    sizes = {"heads": model.heads, "key-value heads": model.kv_heads}
    for name, whole in (sizes | {"inner width": model.ffn}).items():
        if whole % tp:
            return f"tp {tp} does not divide the {whole} {name}"
    return ""


def cp_error(job: TrainingJob, layout: Layout) -> str:
    """Return why cp is impossible: each rank has two equal parts of a sequence."""
    cp, tp, seq_len = layout.cp, layout.tp, job.seq_len
    if cp > 1 and (seq_len % (2 * cp) or seq_len // cp < SHORTEST_PART):
        least = f"less than {SHORTEST_PART} of {seq_len} tokens"
        return f"cp {cp} leaves {least}, or unequal parts"
    if seq_len % (cp * tp):
        return f"tp {tp} x cp {cp} does not divide {seq_len} tokens"
    if layout.cp_kind == "ulysses" and job.model.kv_heads % (tp * cp):
        heads = job.model.kv_heads
        return f"Ulysses: tp x cp must divide the {heads} key-value heads"
    return ""


def stages_error(job: TrainingJob, layout: Layout) -> str:
    layers, pp, v = job.model.layers, layout.pp, layout.virtual_stages
    if v > 1 and pp == 1:
        return f"{v} virtual stages need a pipeline: pp 2 or more"
    if min(layers_of_stages(layers, pp * v)) < 1:
        chunks = f"pp {pp} x {v} virtual stages" if v > 1 else f"pp {pp}"
        return f"{chunks} leaves a stage without a layer: the model has {layers}"
    if v > 1 and layout.micro_batches(job) % pp:
        number = layout.micro_batches(job)
        return f"interleaving needs a multiple of {pp} micro-batches, not {number}"
    return ""


def replicas_error(job: TrainingJob, layout: Layout) -> str:
    experts = job.model.experts
    together = layout.dp * layout.micro_batch
    if job.global_batch % together:
        text = f"dp {layout.dp} x micro-batch {layout.micro_batch} = {together}"
        return f"{text} does not divide the {job.global_batch} sequences of a step"
    ep = layout.ep
    if ep > 1 and (not experts or experts % ep or layout.replicas % ep):
        return f"ep {ep} must divide the model's {experts} experts and dp x cp"
    if layout.shard and (layout.replicas % layout.shard or layout.shard % ep):
        group = f"{layout.shard} GPUs of a shard group"
        return f"{group} do not divide the {layout.replicas} of dp x cp"
    return ""


def adapters_error(job: TrainingJob, layout: Layout) -> str:
    if not job.adapter_rank:
        return ""
    for axis in ("pp", "cp", "ep"):
        if getattr(layout, axis) > 1:
            size = getattr(layout, axis)
            return f"{axis} {size}: adapters are planned with tp and dp alone"
    if layout.offload != "none":
        return f"--offload {layout.offload}: adapters are planned without offload"
    if job.precision not in ("bf16", "fp16"):
        return f"--precision {job.precision}: adapters compute in bf16 or fp16"
    widest = min(job.model.hidden, models.key_width(job.model))
    if job.adapter_rank >= widest:
        rank = f"--lora-rank {job.adapter_rank}"
        return f"{rank}: an adapter is thinner than its matrix, less than {widest}"
    return ""


def no_layout_error(job: TrainingJob, cluster: Cluster, gpus: int, only: dict) -> str:
    """Return why no layout of a number of GPUs divides the job."""
    others = math.prod(only.get(axis, 1) for axis in ("tp", "cp", "pp"))
    given = replace(Layout(**only), dp=only.get("dp", max(1, gpus // others)))
    if only and given.gpus == gpus and (reason := layout_error(job, cluster, given)):
        return reason
    model = job.model
    heads = math.gcd(model.heads, model.kv_heads, model.ffn)
    sizes = [n for n in divisors(heads) if n <= cluster.gpus_per_node]
    routed = (
        f", and ep the {model.experts} experts and dp x cp" if model.experts else ""
    )
    return (
        f"no layout of {gpus} GPUs divides the job: tp may be"
        f" {' '.join(map(str, sizes))} (heads {model.heads}, key-value heads"
        f" {model.kv_heads}), pp at most {model.layers} (layers), and dp must divide"
        f" the {job.global_batch} sequences of a step{routed}: change --gpus or"
        " --global-batch"
    )


# The search


def mesh_of(layout: Layout) -> tuple[int, ...]:
    """Return the sizes of the axes, without sharding and schedule."""
    return tuple(getattr(layout, axis) for axis in MESH)


@dataclass
class SearchResult:
    """Predictions in the order of their time, and layouts that do not fit."""

    fitting: list[Prediction] = field(default_factory=list)  # fastest first
    near: list[Prediction] = field(default_factory=list)  # faster, but too large
    smallest: Prediction | None = None  # of all tried layouts, if none fits
    tried: int = 0

    def best(self, tie: float = 0.0) -> list[Prediction]:
        """Return one layout for each choice of axes: the simplest, then by time.

        The first is the simplest layout that is slower than the fastest by at most
        `tie`, a share. For each choice of axes, a layout without large logits replaces
        one that is faster by less than SAME.
        """
        by_mesh: dict[tuple, list[Prediction]] = {}
        for plan in self.fitting:
            by_mesh.setdefault(mesh_of(plan.layout), []).append(plan)
        best = []
        for plans in by_mesh.values():
            limit = plans[0].step_time_s * (1 + SAME)
            same = [plan for plan in plans if plan.step_time_s <= limit]
            small = [plan for plan in same if not has_large_logits(plan)]
            best.append(small[0] if tie and small else plans[0])
        best.sort(key=lambda plan: plan.step_time_s)
        limit = best[0].step_time_s * (1 + tie)
        tied = [plan for plan in best if plan.step_time_s <= limit]
        first = min(tied, key=lambda plan: (complexity(plan.layout), plan.step_time_s))
        return [first, *(plan for plan in best if plan is not first)]


def has_large_logits(plan: Prediction) -> bool:
    return plan.memory.get("logits", 0.0) > LARGE_LOGITS * plan.memory_limit


def complexity(layout: Layout) -> int:
    """Return the number of techniques that a layout combines."""
    used = [getattr(layout, axis) > 1 for axis in MESH]
    return sum([*used, layout.virtual_stages > 1, layout.offload != "none"])


def search(
    job: TrainingJob, cluster: Cluster, gpus: int, only: dict | None = None
) -> SearchResult:
    """Return the fastest layouts, with offload only if nothing else fits.

    only: given fields of a Layout. `tried` is 0 if no layout divides the job.
    """
    only = only or {}
    kinds = [only["offload"]] if "offload" in only else ["none", "optimizer", "all"]
    if job.adapter_rank:
        only = dict.fromkeys(("pp", "cp", "ep"), 1) | only
        kinds = kinds[:1]
    result = SearchResult()
    for offload in kinds:
        tried = search_with(job, cluster, gpus, {**only, "offload": offload})
        held = [each.smallest for each in (result, tried) if each.smallest]
        tried.smallest = min(held, key=lambda p: p.memory_total, default=None)
        tried.tried += result.tried
        result = tried
        if result.fitting:
            break
    return result


def search_with(
    job: TrainingJob, cluster: Cluster, gpus: int, only: dict
) -> SearchResult:
    """Search with one kind of offload, in the order of the lower bounds."""
    result = SearchResult()
    bounds = sorted(
        (lower_bound(job, base, cluster, only), number, base)
        for number, base in enumerate(unsharded_layouts(job, cluster, gpus, only))
    )
    slow = {name: slower(cluster, **{name: FALL}) for name in SCALES}
    best_of_mesh: dict[tuple, float] = {}
    # Seconds of the best layout if a rate is a fifth lower.
    needed = dict.fromkeys(SCALES, math.inf)
    for bound, _, base in bounds:
        times = sorted(best_of_mesh.values())[:5]
        fifth = times[-1] if len(times) == 5 else math.inf
        if bound > max(fifth, *needed.values()):
            break
        on_slow = lower_bound(job, base, slow["matrix"], only)
        if bound > max(fifth, needed["network"]) and on_slow > needed["matrix"]:
            continue
        for plan in predictions(job, cluster, base, only, result):
            if plan.step_time_s < min(best_of_mesh.values(), default=math.inf):
                needed = {
                    name: predict(job, plan.layout, slow[name]).step_time_s
                    for name in SCALES
                }
            key = mesh_of(base)
            best_of_mesh[key] = min(best_of_mesh.get(key, math.inf), plan.step_time_s)
    result.fitting.sort(key=lambda p: (p.step_time_s, p.memory_total))
    result.near.sort(key=lambda p: p.step_time_s)
    return result


def lower_bound(job: TrainingJob, base: Layout, cluster: Cluster, only: dict) -> float:
    """Return a step's seconds without dp and optimizer, for any sharding of states."""
    least = replace(base, recompute=only.get("recompute", RECOMPUTE[0]))
    parts = step_parts(job, least, cluster, RATES)
    return sum(parts[part] for part in parts if part not in ("dp", "optimizer"))


def predictions(job, cluster, base: Layout, only: dict, result: SearchResult):
    """Yield the predictions that fit for one choice of axes.

    Each sharding has the least recomputation that fits.
    """
    limit = memory.memory_limit(cluster.gpu)
    kinds = [only["recompute"]] if "recompute" in only else RECOMPUTE
    for zero, shard in shardings(job, base, cluster, only):
        layouts = [
            replace(base, zero=zero, shard=shard, recompute=kind) for kind in kinds
        ]
        sizes = [sum(memory.memory_of(job, layout).values()) for layout in layouts]
        result.tried += len(sizes)
        if not result.fitting and (
            not result.smallest or sizes[-1] < result.smallest.memory_total
        ):
            result.smallest = predict(job, layouts[-1], cluster)
        held = list(zip(layouts, sizes, strict=True))
        nearly = [layout for layout, size in held if size <= NEAR * limit]
        fits = [layout for layout, size in held if size <= limit]
        if nearly[:1] != fits[:1]:
            result.near.append(predict(job, nearly[0], cluster))
        if fits:
            plan = predict(job, fits[0], cluster)
            result.fitting.append(plan)
            yield plan


def shardings(job: TrainingJob, base: Layout, cluster: Cluster, only: dict):
    """Yield (zero, shard): stages of ZeRO, and HSDP within one node or eight."""
    least = {"none": 0, "optimizer": 1, "all": 3}[base.offload]
    stages = [0, 2, 3] if job.adapter_rank else list(range(least, 4))
    if base.replicas == 1:
        stages = [least]
    if "zero" in only:
        stages = [only["zero"]]
    inside = cluster.gpus_per_node // base.tp
    groups = [only["shard"]] if "shard" in only else [0, inside, 8 * inside]
    for zero, shard in product(stages, groups):
        usual = "shard" in only or (zero == 3 and 1 < shard < base.replicas)
        divides = shard and base.replicas % shard == 0 and shard % base.ep == 0
        if not shard or (usual and divides):
            yield zero, shard


def unsharded_layouts(
    job: TrainingJob, cluster: Cluster, gpus: int, only: dict
) -> Iterator[Layout]:
    """Yield layouts without sharding and recomputation, with the given values."""

    def values(name: str, usual) -> list:
        return [only[name]] if name in only else list(usual)

    fixed = ("offload", "order", "sequence_parallel")
    given = {name: only[name] for name in fixed if name in only}
    for tp, pp in product(values("tp", divisors(gpus)), values("pp", divisors(gpus))):
        if gpus % (tp * pp) or tp_error(job, cluster, tp) or pp > job.model.layers:
            continue
        for cp in values("cp", divisors(gpus // (tp * pp))):
            dp, rest = divmod(gpus, tp * pp * cp)
            if rest or job.global_batch % dp or only.get("dp", dp) != dp:
                continue
            ways = divisors(math.gcd(job.model.experts, dp * cp) or 1)
            kinds = ("ring", "ulysses") if cp > 1 else ("ring",)
            for ep, kind in product(values("ep", ways), values("cp_kind", kinds)):
                base = Layout(tp, cp, pp, dp, ep, cp_kind=kind, **given)
                if not cp_error(job, base):
                    yield from scheduled(job, base, values, "virtual_stages" in only)


def scheduled(job: TrainingJob, base: Layout, values, uneven: bool) -> Iterator[Layout]:
    """Yield a layout with each allowed micro-batch and number of virtual stages.

    Virtual stages have equal layers, unless their number is given.
    """
    layers = job.model.layers
    sizes = values("micro_batch", MICRO_BATCHES)
    for size, v in product(sizes, values("virtual_stages", VIRTUAL)):
        layout = replace(base, micro_batch=size, virtual_stages=v)
        chunks = base.pp * v
        equal = v == 1 or layers % chunks == 0 or (layers + 2) % chunks == 0
        if (equal or uneven) and not (
            replicas_error(job, layout) or stages_error(job, layout)
        ):
            yield layout
