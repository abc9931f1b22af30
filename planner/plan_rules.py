"""Which layouts a job can have: why not, in a line, for plan_search.py, predict and planner.md."""

from __future__ import annotations

import math

from planner import memory
from planner.hardware import Cluster
from planner.job import Job, Layout

SHORTEST_PART = 512  # tokens of a sequence on a rank of cp


def divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def why_not_tp(model, cluster: Cluster, tp: int) -> str:
    """Say why tp cannot be; "" where it can. Beyond a node it would wait for the network."""
    if tp > cluster.gpus_per_node:
        return f"tp {tp} is more than the {cluster.gpus_per_node} GPUs of a node"
    cut = {"heads": model.heads, "key-value heads": model.kv_heads, "inner width": model.ffn}
    for name, whole in cut.items():
        if whole % tp:
            return f"tp {tp} does not divide the {whole} {name}"
    return ""


def why_not_cp(job: Job, cp: int, tp: int) -> str:
    """Say why cp cannot be: each rank has a part from the front and one from the end."""
    if cp > 1 and (job.seq_len % (2 * cp) or job.seq_len // cp < SHORTEST_PART):
        return f"cp {cp} leaves less than {SHORTEST_PART} of {job.seq_len} tokens, or unequal parts"
    return (
        f"tp {tp} x cp {cp} does not divide {job.seq_len} tokens" if job.seq_len % (cp * tp) else ""
    )


def why_not_stages(job: Job, layout: Layout) -> str:
    """Say why a pipeline cannot be: stages without a layer, too few micro-batches."""
    layers, pp, v = job.model.layers, layout.pp, layout.virtual_stages
    chunks = pp * v
    if v > 1 and (pp == 1 or (layers % chunks and (layers + 2) % chunks)):
        return f"{layers} layers do not make {pp} x {v} equal stages"
    if min(memory.layers_of_stages(layers, pp)) < 1:
        return f"pp {pp} leaves a stage without a layer: the model has {layers}"
    if v > 1 and layout.micro_batches(job) % pp:
        return f"interleaving needs a multiple of {pp} micro-batches: {layout.micro_batches(job)}"
    return ""


def why_not(job: Job, cluster: Cluster, layout: Layout) -> str:
    """Say in a line why a given layout cannot be; "" where it can."""
    model, experts = job.model, job.model.experts
    reason = (
        why_not_tp(model, cluster, layout.tp)
        or why_not_cp(job, layout.cp, layout.tp)
        or why_not_stages(job, layout)
    )
    if reason:
        return reason
    own = layout.dp * layout.micro_batch
    if job.global_batch % own:
        cut = f"dp {layout.dp} x micro-batch {layout.micro_batch} = {own}"
        return f"{cut} does not divide the {job.global_batch} sequences of a step"
    if layout.ep > 1 and (not experts or experts % layout.ep or layout.replicas % layout.ep):
        return f"ep {layout.ep} must divide the model's {experts} experts and dp x cp"
    if layout.shard and layout.replicas % layout.shard:
        return (
            f"{layout.shard} GPUs of a shard group do not divide the {layout.replicas} of dp x cp"
        )
    if layout.cp_kind == "ulysses" and model.kv_heads % (layout.tp * layout.cp):
        return f"Ulysses: tp x cp must divide the {model.kv_heads} key-value heads"
    return ""


def none_divides(job: Job, cluster: Cluster, gpus: int) -> str:
    """Say why no layout of so many GPUs divides the job: what each axis would have to divide."""
    model = job.model
    heads = math.gcd(math.gcd(model.heads, model.kv_heads), model.ffn)
    sizes = [n for n in divisors(heads) if n <= cluster.gpus_per_node]
    routed = f", and ep the {model.experts} experts and dp x cp" if model.experts else ""
    return (
        f"no layout of {gpus} GPUs divides the job: tp may be {' '.join(map(str, sizes))} (heads"
        f" {model.heads}, key-value heads {model.kv_heads}), pp at most {model.layers} (layers),"
        f" and dp must divide the {job.global_batch} sequences of a step{routed}: change"
        " --gpus or --global-batch"
    )
