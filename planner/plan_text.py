"""What planner.py prints: tables of layouts, and in words why the first one is first."""

from __future__ import annotations

from dataclasses import replace

from tabulate import tabulate

from planner.hardware import Cluster
from planner.job import Job, Layout, Prediction
from planner.memory import GIB
from planner.plan_search import FALL, RATES, Found
from planner.step import slower

SHOWN = 5
SHARDING = ("DDP", "ZeRO-1", "ZeRO-2", "FSDP")
CLOSE = 0.07  # median error of a step's time on published runs: planner/validate.py
KEPT = 60  # layouts that are looked at again when a rate changes


def axes_of(layout: Layout) -> str:
    """Name the axes that a layout has."""
    names = ("tp", "cp", "pp", "dp")
    cut = [f"{name} {getattr(layout, name)}" for name in names if getattr(layout, name) > 1]
    inside = f" (ep {layout.ep})" if layout.ep > 1 else ""
    return (" x ".join(cut) or "1 GPU") + inside


def sharding_of(layout: Layout) -> str:
    """Name what the replicas share: HSDP with the GPUs of a shard."""
    kind = SHARDING[layout.zero]
    if layout.replicas == 1:
        kind = "none"
    elif layout.zero == 3 and layout.shards < layout.replicas:
        kind = f"HSDP {layout.shards}"
    return kind + {"none": "", "optimizer": ", offload", "all": ", all offloaded"}[layout.offload]


def name_of(layout: Layout) -> str:
    """Name all of a layout in one phrase."""
    words = [axes_of(layout), sharding_of(layout), f"recompute {layout.recompute}"]
    words.append(f"micro-batch {layout.micro_batch}")
    if layout.virtual_stages > 1:
        words.append(f"{layout.virtual_stages} virtual stages")
    if layout.cp > 1:
        words.append(layout.cp_kind)
    return ", ".join(words)


def table(rows, headers, names: int = 1) -> str:
    """Return an aligned table: the first `names` columns to the left, values to the right."""
    sides = (*["left"] * names, *["right"] * (len(headers) - names))
    return tabulate(rows, headers, "simple", colalign=sides, disable_numparse=True)


def layouts_table(job: Job, plans: list[Prediction], mfus: list[float]) -> str:
    """Return one row for each plan: what it is, holds and takes."""
    rows = []
    for number, (plan, mfu) in enumerate(zip(plans, mfus, strict=True), 1):
        layout = plan.layout
        again = layout.recompute
        batch = f"{layout.micro_batch} x {layout.micro_batches(job)}"
        kind = f", {layout.cp_kind}" if layout.cp > 1 else ""
        stages = f", v {layout.virtual_stages}" if layout.virtual_stages > 1 else ""
        what = (str(number), axes_of(layout) + kind + stages, sharding_of(layout), again, batch)
        held = f"{plan.memory_total / GIB:.1f} GiB"
        speed = f"{plan.tokens_per_s_per_gpu:,.0f}", f"{mfu:.1%}"
        rows.append((*what, held, f"{plan.step_time_s:.3f} s", *speed))
    headers = ("", "layout", "states", "recompute", "micro", "memory", "step", "tokens/s", "MFU")
    return table(rows, headers, 5)


def parts_shown(values: list[dict[str, float]]) -> list[str]:
    """Return the parts that are not zero in all of some layouts' memory or step."""
    return [name for name in values[0] if any(each.get(name) for each in values)]


def parts_table(plans: list[Prediction], of: str, unit: float, digits: int) -> str:
    """Return one row for each plan, one column for each part of its memory or step."""
    values = [getattr(plan, of) for plan in plans]
    names = parts_shown(values)
    rows = []
    for number, each in enumerate(values, 1):
        cells = [f"{each.get(name, 0) / unit:.{digits}f}" for name in names]
        rows.append((str(number), *cells, f"{sum(each.values()) / unit:.{digits}f}"))
    return table(rows, (f"{of}, {'GiB' if unit > 1 else 's'}", *names, "sum"))


def money(plan: Prediction, tokens: float | None, dollars: float | None) -> str:
    """Say how long a budget of tokens takes, and what it costs."""
    if not tokens:
        return ""
    days = days_of(plan, tokens)
    text = f"{tokens / 1e9:,.4g}e9 tokens take {days:,.1f} days"
    if dollars:
        text += f" and {dollars_of(plan, tokens, dollars):,.0f} dollars at {dollars:g} a GPU-hour"
    return text


def days_of(plan: Prediction, tokens: float) -> float:
    """Return the days in which a layout reads so many tokens, without failures or restarts."""
    return tokens / (plan.tokens_per_s_per_gpu * plan.layout.gpus) / 86_400


def dollars_of(plan: Prediction, tokens: float, dollars: float) -> float:
    return days_of(plan, tokens) * 24 * plan.layout.gpus * dollars


# why


def why_first(found: Found) -> list[str]:
    """Say by which parts of a step the first beats the second."""
    best = found.best
    if len(best) < 2:
        return ["no other kind of layout fits"]
    first, second = best[:2]
    gap = second.step_time_s - first.step_time_s
    less, more = differences(first, second)
    text = f"1 beats 2 by {gap:.3f} s ({gap / first.step_time_s:.1%})"
    text += f": it takes {' and '.join(less)} less" * bool(less)
    text += f", but {' and '.join(more)} more" * bool(more)
    lines = [text]
    close = sum(p.step_time_s <= (1 + CLOSE) * first.step_time_s for p in best)
    if close > 1:
        lines.append(
            f"{close} rows lie within {CLOSE:.0%}, less than these formulas can tell apart:"
            " measure them"
        )
    return lines


def differences(first: Prediction, second: Prediction) -> tuple[list[str], list[str]]:
    """Return the two largest parts of a step that the first has less of, and more of."""
    gaps = {part: second.step[part] - first.step[part] for part in first.step}
    size = max(map(abs, gaps.values())) / 20
    ordered = sorted(gaps, key=lambda part: -abs(gaps[part]))
    ordered = [part for part in ordered if abs(gaps[part]) > size]
    less = [f"{gaps[part]:.3f} s of {part}" for part in ordered if gaps[part] > 0][:2]
    more = [f"{-gaps[part]:.3f} s of {part}" for part in ordered if gaps[part] < 0][:2]
    return less, more


def rivals(job: Job, found: Found, cluster: Cluster, count: int | None = None) -> list[Prediction]:
    """Return what may be first where a rate is a fifth lower, timed on another cluster.

    Times grow by 1 / 0.8 at most and none falls: a layout that is 1.25 times slower cannot win.
    """
    limit = found.fitting[0].step_time_s / FALL
    kept = [p for p in found.fitting if p.step_time_s <= limit][:count]
    again = (found.timed(job, p.layout, cluster) for p in kept)
    return sorted(again, key=lambda p: p.step_time_s)


def survival(job: Job, cluster: Cluster, found: Found) -> dict[str, dict]:
    """Return what is first, and how much slower the plan is, where a rate is a fifth lower."""
    result = {}
    for name in RATES:
        changed = slower(cluster, **{name: FALL})
        plan = found.timed(job, found.fitting[0].layout, changed)
        first = rivals(job, found, changed, 400)[0]
        stays = found.row_of(first.layout) == found.row_of(plan.layout)
        result[name] = {
            "stays_first": stays,
            "step_time_s": plan.step_time_s,
            "first": name_of(first.layout),
            "behind": plan.step_time_s / first.step_time_s - 1,
            "until": None if stays else turning_point(job, cluster, found, name),
        }
    return result


def turning_point(job: Job, cluster: Cluster, found: Found, name: str) -> float:
    """Return the share of a rate down to which the plan stays first, to a percent."""
    for percent in range(99, round(100 * FALL) - 1, -1):
        changed = slower(cluster, **{name: percent / 100})
        first = rivals(job, found, changed, KEPT)[0]
        if found.row_of(first.layout) != found.row_of(found.fitting[0].layout):
            return (percent + 1) / 100
    return FALL


def survival_lines(found: Found, survives: dict[str, dict]) -> list[str]:
    """Say in words what a fifth less of bandwidth, and of the matrix rate, would change."""
    names = {"network": "bandwidth", "matrix": "matrix rate"}
    now, lines = found.fitting[0].step_time_s, []
    for kind, each in survives.items():
        text = f"-20% of {names[kind]}: step {each['step_time_s'] / now - 1:+.1%}, "
        if each["stays_first"]:
            text += "1 stays first"
        else:
            text += f"{each['first']} is then {each['behind']:.1%} faster;"
            lost = each["until"] - 1
            text += f" 1 is first down to {lost:.0%}" if lost else " 1 is first at full rate alone"
        lines.append(text)
    return lines


def larger_memory(cluster: Cluster, found: Found) -> str:
    """Say which faster layout a larger GPU would allow; "" if none."""
    first = found.fitting[0]
    for plan in found.near:
        if plan.step_time_s < 0.99 * first.step_time_s:
            lacks = (plan.memory_total - plan.memory_limit) / GIB
            gain = first.step_time_s / plan.step_time_s - 1
            return f"{lacks:.1f} GiB more on each GPU: {name_of(plan.layout)} is {gain:.1%} faster"
    return ""


def batch_twice(job: Job, cluster: Cluster, found: Found) -> str:
    """Say what twice the batch would give the first layout: a smaller bubble, fewer gathers."""
    first = found.fitting[0]
    twice = found.timed(replace(job, global_batch=2 * job.global_batch), first.layout, cluster)
    gain = twice.tokens_per_s_per_gpu / first.tokens_per_s_per_gpu - 1
    return f"twice the batch: {gain:+.1%} tokens/s"
