"""Tables and sentences of plan.py: layouts, and the reasons for the first."""

from __future__ import annotations

from dataclasses import replace

from tabulate import tabulate

from planner import errors, models
from planner.hardware import Cluster, slower
from planner.job import Layout, Prediction, TrainingJob
from planner.memory import GIB
from planner.plan_search import FALL, SCALES, SearchResult, mesh_of
from planner.step import axes_of, predict

SHOWN = 5
SHARDING = ("DDP", "ZeRO-1", "ZeRO-2", "FSDP")
KEPT = 60  # layouts that are compared again when a rate changes
# Rows within the median error of similar runs are a tie. These are the limits.
TIE_LEAST, TIE_MOST = 0.02, 0.10


def axes_name(layout: Layout) -> str:
    """Return the axes of a layout as text."""
    names = ("tp", "cp", "pp", "dp")
    sizes = [f"{name} {getattr(layout, name)}" for name in names]
    used = [size for size in sizes if not size.endswith(" 1")]
    inside = f" (ep {layout.ep})" if layout.ep > 1 else ""
    return (" x ".join(used) or "1 GPU") + inside


def sharding_of(layout: Layout) -> str:
    """Return the name of the sharding, for HSDP with the GPUs of a group."""
    kind = SHARDING[layout.zero]
    if layout.replicas == 1:
        kind = "none"
    elif layout.zero == 3 and layout.shards < layout.replicas:
        kind = f"HSDP {layout.shards}"
    offloads = {"none": "", "optimizer": ", offload", "all": ", all offloaded"}
    return kind + offloads[layout.offload]


def name_of(layout: Layout) -> str:
    """Return a layout as one phrase."""
    words = [axes_name(layout), sharding_of(layout), f"recompute {layout.recompute}"]
    words.append(f"micro-batch {layout.micro_batch}")
    if layout.virtual_stages > 1:
        words.append(f"{layout.virtual_stages} virtual stages")
    if layout.cp > 1:
        words.append(layout.cp_kind)
    return ", ".join(words)


def table(rows, headers, names: int = 1) -> str:
    """Return a table with `names` left-aligned columns, and right-aligned values."""
    sides = (*["left"] * names, *["right"] * (len(headers) - names))
    return tabulate(rows, headers, "simple", colalign=sides, disable_numparse=True)


def head_lines(job: TrainingJob, cluster: Cluster, gpus: int) -> list[str]:
    """Return lines about the model, the GPUs and the batch."""
    model = job.model
    weights = f"{models.parameters(model) / 1e9:.2f}e9 weights"
    if model.experts:
        weights += f", {models.active_parameters(model) / 1e9:.2f}e9 for a token"
    node = f"{min(gpus, cluster.gpus_per_node)} a node"
    rates = f"{cluster.gpu.link_gb_s:g} GB/s in a node"
    rates += f", {cluster.network_gb_s:g} between"
    tokens = f"{job.global_batch * job.seq_len / 1e6:.2f}e6 tokens a step"
    sequences = f"{job.global_batch:,} sequences of {job.seq_len:,}"
    return [
        f"{model.name or 'model'}: {weights}; {gpus:,} {cluster.gpu.name}, {node}",
        f"{sequences}: {tokens}, {job.precision}; {rates}",
    ]


def layouts_table(job: TrainingJob, cluster: Cluster, plans: list[Prediction]) -> str:
    """Return a table with the layout, memory and speed of each plan."""
    rows = []
    for number, plan in enumerate(plans, 1):
        layout = plan.layout
        name = axes_name(layout)
        if layout.cp > 1:
            name += f", {layout.cp_kind}"
        if layout.virtual_stages > 1:
            name += f", v {layout.virtual_stages}"
        rows.append(
            (
                str(number),
                name,
                sharding_of(layout),
                layout.recompute,
                f"{layout.micro_batch} x {layout.micro_batches(job)}",
                f"{plan.memory_total / GIB:.1f} GiB",
                f"{plan.step_time_s:.3f} s",
                f"{plan.tokens_per_s_per_gpu:,.0f}",
                f"{mfu_of(plan, job, cluster):.1%}",
            )
        )
    headers = ("", "layout", "states", "recompute", "micro")
    return table(rows, (*headers, "memory", "step", "tokens/s", "MFU"), 5)


def mfu_of(plan: Prediction, job: TrainingJob, cluster: Cluster) -> float:
    """Return model FLOP/s over the GPU's peak in the job's precision."""
    return plan.model_tflops_per_gpu / cluster.gpu.tflops[job.precision]


def parts_table(plans: list[Prediction], of: str, unit: float, digits: int) -> str:
    """Return a table with the parts of memory or step of each plan."""
    values = [getattr(plan, of) for plan in plans]
    names = [name for name in values[0] if any(each.get(name) for each in values)]
    rows = []
    for number, each in enumerate(values, 1):
        numbers = [*(each.get(name, 0) for name in names), sum(each.values())]
        rows.append((str(number), *(f"{n / unit:.{digits}f}" for n in numbers)))
    return table(rows, (f"{of}, {'GiB' if unit > 1 else 's'}", *names, "sum"))


def days_of(plan: Prediction, tokens: float) -> float:
    """Return the days to train on a number of tokens, without failures."""
    return tokens / (plan.tokens_per_s_per_gpu * plan.layout.gpus) / 86_400


def money_line(plan: Prediction, tokens: float, price: float | None) -> str:
    """Return the days and the price of a number of tokens as text."""
    days = days_of(plan, tokens)
    text = f"{tokens / 1e9:,.4g}e9 tokens take {days:,.1f} days"
    if price:
        dollars = days * 24 * plan.layout.gpus * price
        text += f" and {dollars:,.0f} dollars at {price:g} a GPU-hour"
    return text


# Certainty


def certainty_of(job: TrainingJob, layout: Layout, cluster: Cluster) -> dict | None:
    """Return the errors of the most similar published runs, or None."""
    traits, similar = errors.closest(job, layout, cluster)
    if not similar:
        return None
    return {
        "like": traits,
        "runs": similar.count,
        "median": similar.median,
        "p95": similar.p95,
        "bias": similar.bias,
    }


def certainty_line(certainty: dict | None, job: TrainingJob, layout, cluster) -> str:
    """Return the errors of similar published runs as text."""
    if not certainty:
        traits = ", ".join(errors.traits_of(job, layout, cluster))
        return f"certainty: no published run like this ({traits}): measure it"
    bias = certainty["bias"]
    leans = f"predicted {abs(bias):.0%} too {'slow' if bias > 0 else 'fast'}"
    return (
        f"certainty: {certainty['runs']} published runs like this"
        f" ({', '.join(certainty['like'])}): error {certainty['median']:.0%} in the"
        f" median, {certainty['p95']:.0%} at the 95th percentile, {leans}"
    )


def tie_of(certainty: dict | None) -> float:
    """Return the difference below which two layouts are a tie, as a share."""
    if not certainty:
        return TIE_MOST
    return min(TIE_MOST, max(TIE_LEAST, certainty["median"]))


# Reasons


def why_first(best: list[Prediction], tie: float) -> list[str]:
    """Return why the first row is first, and how many rows are a tie."""
    if len(best) < 2:
        return ["no other kind of layout fits"]
    first, second = best[:2]
    gap = second.step_time_s - first.step_time_s
    less, more = differences(first, second)
    if gap >= 0:
        text = f"1 beats 2 by {gap:.3f} s ({gap / first.step_time_s:.1%})"
    else:
        text = f"1 is simpler than 2, which is {-gap:.3f} s"
        text += f" ({-gap / second.step_time_s:.1%}) faster"
    if less:
        text += f": 1 takes {' and '.join(less)} less"
    if more:
        text += f"{', but' if less else ': 1 takes'} {' and '.join(more)} more"
    limit = min(plan.step_time_s for plan in best) * (1 + tie)
    close = sum(plan.step_time_s <= limit for plan in best)
    if close < 2:
        return [text]
    tied = (
        f"{close} rows are within {tie:.0%} of the fastest, less than the usual error"
    )
    return [text, f"{tied}: 1 is the simplest; measure them"]


def differences(first: Prediction, second: Prediction) -> tuple[list[str], list[str]]:
    """Return the parts of a step in which the first plan is faster, and slower.

    Each list has the two largest differences.
    """
    gaps = {part: second.step[part] - first.step[part] for part in first.step}
    size = max(map(abs, gaps.values())) / 20
    ordered = sorted(gaps, key=lambda part: -abs(gaps[part]))
    ordered = [part for part in ordered if abs(gaps[part]) > size]
    less = [f"{gaps[part]:.3f} s of {part}" for part in ordered if gaps[part] > 0][:2]
    more = [f"{-gaps[part]:.3f} s of {part}" for part in ordered if gaps[part] < 0][:2]
    return less, more


def survival(
    job: TrainingJob, cluster: Cluster, plan: Prediction, result: SearchResult
) -> dict:
    """Return for each rate whether a plan stays first if the rate is a fifth lower.

    Times grow by 1 / 0.8 at most, so only layouts that are at most 1.25 times slower
    can overtake.
    """
    limit = plan.step_time_s / FALL
    rivals = [p for p in result.fitting if p.step_time_s <= limit][:KEPT]
    outcomes = {}
    for name in SCALES:
        changed = slower(cluster, **{name: FALL})
        again = predict(job, plan.layout, changed)
        timed = [predict(job, rival.layout, changed) for rival in rivals]
        first = min([again, *timed], key=lambda p: p.step_time_s)
        outcomes[name] = {
            "stays_first": mesh_of(first.layout) == mesh_of(plan.layout),
            "step_time_s": again.step_time_s,
            "first": name_of(first.layout),
            "behind": again.step_time_s / first.step_time_s - 1,
        }
    return outcomes


def survival_lines(plan: Prediction, survives: dict[str, dict]) -> list[str]:
    """Return the effect of a fifth less bandwidth, and of a lower matrix rate."""
    names = {"network": "bandwidth", "matrix": "matrix rate"}
    lines = []
    for kind, each in survives.items():
        slows = each["step_time_s"] / plan.step_time_s - 1
        text = f"{each['first']} is then {each['behind']:.1%} faster"
        if each["stays_first"]:
            text = "no other kind of layout is faster"
        lines.append(f"-20% of {names[kind]}: step {slows:+.1%}, {text}")
    return lines


def larger_memory(first: Prediction, result: SearchResult) -> list[str]:
    """Return the faster layout that a larger GPU would allow as text."""
    for plan in result.near:
        if plan.step_time_s < 0.97 * first.step_time_s:
            lacks = (plan.memory_total - plan.memory_limit) / GIB
            gain = first.step_time_s / plan.step_time_s - 1
            name = name_of(plan.layout)
            return [f"{lacks:.1f} GiB more on each GPU: {name} is {gain:.1%} faster"]
    return []


def batch_twice(job: TrainingJob, cluster: Cluster, first: Prediction) -> str:
    """Return the gain of twice the batch: a smaller bubble, fewer gathers."""
    larger = replace(job, global_batch=2 * job.global_batch)
    twice = predict(larger, first.layout, cluster)
    gain = twice.tokens_per_s_per_gpu / first.tokens_per_s_per_gpu - 1
    return f"twice the batch: {gain:+.1%} tokens/s"


# Traffic of each axis

SPLITS = {
    "tp": "matrices; tokens in between",
    "cp": "each sequence",
    "ep": "experts",
    "dp": "batch (and states)",
    "pp": "layers",
}


def axes_lines(job: TrainingJob, layout: Layout, cluster: Cluster) -> list[str]:
    """Return a table of the axes that are larger than 1, and their collectives."""
    axes = axes_of(job, layout, cluster)
    if not axes:
        return []
    rows = []
    for name, axis in axes.items():
        link = f"network x{axis.cards}" if axis.cards else "node"
        sizes = f"{axis.layer_bytes / 1e6:,.1f} MB", f"{axis.step_bytes / 1e9:,.1f} GB"
        times = (f"{s:.3f} s" for s in (axis.seconds, axis.compute, axis.exposed))
        link = f"{link}, {axis.gb_s:g} GB/s"
        rows.append((f"{name} {axis.ranks}", SPLITS[name], link, *sizes, *times))
    sent = ("per layer", "per step", "takes", "compute", "exposed")
    headers = ("axis", "splits", "link", *sent)
    lines = [f"{name}: {axis.sends}" for name, axis in axes.items()]
    return [table(rows, headers, 3), "", *lines]
