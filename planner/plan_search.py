"""Find the fastest layouts that fit, by a lower bound of their time, memory before
time.

No layout is left out that could be among the best five, or first where a rate is a
fifth lower, on two conditions: more recomputation never makes a step shorter, and what
a layout does besides sharding states takes at least as long as without recomputation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product

from planner import memory, models
from planner.activations import layers_of_stages
from planner.hardware import Cluster
from planner.job import RECOMPUTE, Layout, Prediction, TrainingJob
from planner.rates import RATES as REACHED
from planner.step import predict, slower, step_parts

CUT = ("tp", "cp", "pp", "dp", "ep")
RATES = ("network", "matrix")
FALL = 0.8  # of a rate: the search finds the fastest layout there, too
NEAR = 1.5  # of the memory: layouts for a somewhat larger GPU
MICRO_BATCHES = tuple(2**power for power in range(8))
VIRTUAL = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
SHORTEST_PART = 512  # tokens of a sequence on a rank of cp
SAME = 0.05  # layouts of one cut that are as fast: large logits are avoided
LARGE_LOGITS = 0.2  # of the memory that a job may fill


# Which layouts there can be


def divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def why_not(job: TrainingJob, cluster: Cluster, layout: Layout) -> str:
    """Say in a line why a layout cannot be; nothing where it can."""
    checks = (
        why_not_tp(job, cluster, layout.tp),
        why_not_cp(job, layout),
        why_not_stages(job, layout),
        why_not_replicas(job, layout),
        why_not_adapters(job, layout),
    )
    return next(filter(None, checks), "")


def why_not_tp(job: TrainingJob, cluster: Cluster, tp: int) -> str:
    if tp > cluster.gpus_per_node:
        return f"tp {tp} is more than the {cluster.gpus_per_node} GPUs of a node"
    model = job.model
    sizes = {"heads": model.heads, "key-value heads": model.kv_heads}
    for name, whole in (sizes | {"inner width": model.ffn}).items():
        if whole % tp:
            return f"tp {tp} does not divide the {whole} {name}"
    return ""


def why_not_cp(job: TrainingJob, layout: Layout) -> str:
    """Each rank has a part from the front of a sequence and one from its end."""
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


def why_not_stages(job: TrainingJob, layout: Layout) -> str:
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


def why_not_replicas(job: TrainingJob, layout: Layout) -> str:
    experts = job.model.experts
    together = layout.dp * layout.micro_batch
    if job.global_batch % together:
        cut = f"dp {layout.dp} x micro-batch {layout.micro_batch} = {together}"
        return f"{cut} does not divide the {job.global_batch} sequences of a step"
    ep = layout.ep
    if ep > 1 and (not experts or experts % ep or layout.replicas % ep):
        return f"ep {ep} must divide the model's {experts} experts and dp x cp"
    if layout.shard and (layout.replicas % layout.shard or layout.shard % ep):
        group = f"{layout.shard} GPUs of a shard group"
        return f"{group} do not divide the {layout.replicas} of dp x cp"
    return ""


def why_not_adapters(job: TrainingJob, layout: Layout) -> str:
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


def none_divides(job: TrainingJob, cluster: Cluster, gpus: int, only: dict) -> str:
    """Say why no layout of so many GPUs divides the job."""
    others = math.prod(only.get(axis, 1) for axis in ("tp", "cp", "pp"))
    given = replace(Layout(**only), dp=only.get("dp", max(1, gpus // others)))
    if only and given.gpus == gpus and (reason := why_not(job, cluster, given)):
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


def cut_of(layout: Layout) -> tuple[int, ...]:
    return tuple(getattr(layout, axis) for axis in CUT)


@dataclass
class SearchResult:
    """Results of a search: predictions by time, and layouts that do not fit."""

    fitting: list[Prediction] = field(default_factory=list)  # fastest first
    near: list[Prediction] = field(default_factory=list)  # faster, but too large
    smallest: Prediction | None = None  # of all that were tried, where none fits
    tried: int = 0

    def best(self, tie: float = 0.0) -> list[Prediction]:
        """Return a layout of each way to cut the axes: the simplest, then by time.

        The first is the simplest of those that are slower than the fastest by at most
        `tie`, a share. Of one cut, an equally fast layout without large logits.
        """
        cuts: dict[tuple, list[Prediction]] = {}
        for plan in self.fitting:
            cuts.setdefault(cut_of(plan.layout), []).append(plan)
        best = []
        for plans in cuts.values():
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
    """Return how many techniques a layout combines."""
    axes = sum(getattr(layout, axis) > 1 for axis in CUT)
    return axes + (layout.virtual_stages > 1) + (layout.offload != "none")


def search(
    job: TrainingJob, cluster: Cluster, gpus: int, only: dict | None = None
) -> SearchResult:
    """Return the fastest layouts; with offload only where nothing fits without.

    `only` holds fields of a Layout that are given. A search without a cut tried 0.
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
    """Search with one kind of offload: the cuts with the lowest bounds come first."""
    result = SearchResult()
    bounds = sorted(
        (lower_bound(job, cut, cluster, only), number, cut)
        for number, cut in enumerate(cuts(job, cluster, gpus, only))
    )
    slow = {name: slower(cluster, **{name: FALL}) for name in RATES}
    best_of_cut: dict[tuple, float] = {}
    # Seconds of the best layout where a rate is a fifth lower.
    needed = dict.fromkeys(RATES, math.inf)
    for bound, _, cut in bounds:
        times = sorted(best_of_cut.values())[:5]
        fifth = times[-1] if len(times) == 5 else math.inf
        if bound > max(fifth, *needed.values()):
            break
        on_slow = lower_bound(job, cut, slow["matrix"], only)
        if bound > max(fifth, needed["network"]) and on_slow > needed["matrix"]:
            continue
        for plan in predictions(job, cluster, cut, only, result):
            if plan.step_time_s < min(best_of_cut.values(), default=math.inf):
                needed = {
                    name: predict(job, plan.layout, slow[name]).step_time_s
                    for name in RATES
                }
            key = cut_of(cut)
            best_of_cut[key] = min(best_of_cut.get(key, math.inf), plan.step_time_s)
    result.fitting.sort(key=lambda p: (p.step_time_s, p.memory_total))
    result.near.sort(key=lambda p: p.step_time_s)
    return result


def lower_bound(job: TrainingJob, cut: Layout, cluster: Cluster, only: dict) -> float:
    """Return what a step takes however states are sharded: no dp and no optimizer."""
    least = replace(cut, recompute=only.get("recompute", RECOMPUTE[0]))
    parts = step_parts(job, least, cluster, REACHED)
    return sum(parts[part] for part in parts if part not in ("dp", "optimizer"))


def predictions(job, cluster, cut: Layout, only: dict, result: SearchResult):
    """Yield the predictions of a cut that fit, with the least recomputation."""
    limit = memory.memory_limit(cluster.gpu)
    kinds = [only["recompute"]] if "recompute" in only else RECOMPUTE
    for zero, shard in shardings(job, cut, cluster, only):
        layouts = [
            replace(cut, zero=zero, shard=shard, recompute=kind) for kind in kinds
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


def shardings(job: TrainingJob, cut: Layout, cluster: Cluster, only: dict):
    """Yield (zero, shard): stages of ZeRO, and HSDP within one node or eight."""
    least = {"none": 0, "optimizer": 1, "all": 3}[cut.offload]
    stages = [0, 2, 3] if job.adapter_rank else list(range(least, 4))
    if cut.replicas == 1:
        stages = [least]
    if "zero" in only:
        stages = [only["zero"]]
    inside = cluster.gpus_per_node // cut.tp
    groups = [only["shard"]] if "shard" in only else [0, inside, 8 * inside]
    for zero, shard in product(stages, groups):
        usual = "shard" in only or (zero == 3 and 1 < shard < cut.replicas)
        divides = shard and cut.replicas % shard == 0 and shard % cut.ep == 0
        if not shard or (usual and divides):
            yield zero, shard


def cuts(job: TrainingJob, cluster: Cluster, gpus: int, only: dict) -> Iterator[Layout]:
    """Yield layouts without sharding and recomputation; given values stay."""

    def values(name: str, usual) -> list:
        return [only[name]] if name in only else list(usual)

    fixed = ("offload", "order", "sequence_parallel")
    given = {name: only[name] for name in fixed if name in only}
    for tp, pp in product(values("tp", divisors(gpus)), values("pp", divisors(gpus))):
        if gpus % (tp * pp) or why_not_tp(job, cluster, tp) or pp > job.model.layers:
            continue
        for cp in values("cp", divisors(gpus // (tp * pp))):
            dp, rest = divmod(gpus, tp * pp * cp)
            if rest or job.global_batch % dp or only.get("dp", dp) != dp:
                continue
            ways = divisors(math.gcd(job.model.experts, dp * cp) or 1)
            kinds = ("ring", "ulysses") if cp > 1 else ("ring",)
            for ep, kind in product(values("ep", ways), values("cp_kind", kinds)):
                base = Layout(tp, cp, pp, dp, ep, cp_kind=kind, **given)
                if not why_not_cp(job, base):
                    yield from scheduled(job, base, values, "virtual_stages" in only)


def scheduled(job: TrainingJob, base: Layout, values, uneven: bool) -> Iterator[Layout]:
    """Yield a cut with each micro-batch and number of virtual stages that it allows.

    Only a given number of virtual stages makes chunks of unequal layers.
    """
    layers = job.model.layers
    sizes = values("micro_batch", MICRO_BATCHES)
    for size, v in product(sizes, values("virtual_stages", VIRTUAL)):
        layout = replace(base, micro_batch=size, virtual_stages=v)
        chunks = base.pp * v
        equal = v == 1 or layers % chunks == 0 or (layers + 2) % chunks == 0
        if (equal or uneven) and not (
            why_not_replicas(job, layout) or why_not_stages(job, layout)
        ):
            yield layout
