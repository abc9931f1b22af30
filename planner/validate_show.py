"""What validate.py prints: errors by source and feature, next to simpler models."""

from __future__ import annotations

import textwrap

from planner import errors, published
from planner.errors import Compared
from planner.plan_text import table

# Sources whose error is beyond the targets, and what the model does not know of them.
MISSED = {
    "torchtitan": "8-bit runs: row-wise scales gain less, the 405B pipeline is a quarter slower "
    "and 405B by FSDP alone a fifth faster than what its layers give elsewhere",
    "MT-NLG": "DeepSpeed's pipeline of 2021 gave 126 TFLOP/s where Megatron-LM gave 159 with the "
    "same layout on the same machine (SC21): nothing in a row tells them apart",
    "Megatron-LM README": "micro-batch, schedule and recomputation are not published; with the "
    "defaults the pipeline's bubble is too long",
    "thunder": "eager litgpt loses 50 to 200 ms a step that no shape explains",
    "fms-fsdp": "its network (IBM Vela) is not published; the card usual for an A100 is faster",
}


def percent(value: float) -> str:
    return f"{value:.1%}"


def source_lines(compared: list[Compared], naive: dict[str, float]) -> list[tuple[str, ...]]:
    """Return a line for each source: the shown half, beside the fitted one, naive and peers."""
    others = errors.peers()
    lines = []
    groups = errors.by(compared, lambda row: row.short_source)
    if naive:
        groups["all but vTrain single"] = [e for e in compared if not errors.is_single(e.row)]
    for source, own in groups.items():
        shown = [each for each in own if not each.fitted]
        fitted = [each.error for each in own if each.fitted]
        found = errors.errors_of([each.error for each in shown or own])
        line = [source, str(found.count), percent(found.median), percent(found.p95)]
        line.append(f"{found.bias:+.1%}")
        line.append(percent(errors.errors_of(fitted).median) if fitted else "-")
        if naive:
            simple = errors.errors_of(
                [naive[each.row.id] / each.measured - 1 for each in shown or own]
            )
            line.append(f"{simple.median:.0%}/{simple.p95:.0%}")
            for peer in ("calculon", "llm-analysis(fe=0.5)"):
                theirs = [others[peer][e.row.id] for e in own if e.row.id in others[peer]]
                spread = errors.errors_of(theirs) if theirs else None
                line.append(f"{spread.median:.0%}/{spread.p95:.0%}" if spread else "-")
        lines.append(tuple(line))
    return lines


def show_steps(steps: list[Compared], transfers: list[Compared]) -> None:
    """Print errors by source and feature, ranking, and what the model misses."""
    rows = [each.row for each in steps]
    naive = errors.naive_seconds(rows, {each.row.id for each in steps if each.fitted})
    print(published.DEFAULTS)
    print("\nStep time: size of the error on the half that no constant was fitted on")
    headers = (
        "source",
        "rows",
        "median",
        "p95",
        "bias",
        "fitted",
        "one MFU",
        "Calculon",
        "llm-analysis",
    )
    print(table(source_lines(steps, naive), headers))
    for name, why in MISSED.items():
        own = [each.error for each in steps if each.row.short_source == name]
        found = errors.errors_of(own)
        text = f"{name}: {found.median:.0%} median, {found.bias:+.0%}: {why}"
        print(textwrap.fill(text, 96, subsequent_indent="    "))
    print("\nStep time by what a run has (both halves, without vTrain's single node)")
    rows = [
        (name, str(own.count), percent(own.median), percent(own.p95), f"{own.bias:+.1%}")
        for name, own in errors.feature_biases(steps).items()
    ]
    print(table(rows, ("feature", "rows", "median", "p95", "bias")))
    print("\nCollectives: size to time")
    headers = ("group", "rows", "median", "p95", "bias", "fitted")
    print(table(source_lines(transfers, {}), headers))
    for name, within in (("of one group", True), ("of any layouts", False)):
        ranked, right = errors.strategy_pairs([e for e in steps if not e.fitted], within)
        print(f"pairs {name} ranked right: {right} of {ranked} ({right / ranked:.1%})")


ADDED = "rows added later, never fitted"


def show_added(added: list[Compared]) -> None:
    """Print errors of the rows that were added later, by source and of all, mixtures apart."""
    lines = []
    for name, mixtures in ((ADDED, False), (f"{ADDED}, with experts", True)):
        own = [each for each in added if bool(each.row.job.model.experts) == mixtures]
        lines += [line[:5] for line in source_lines(own, {})]
        found = errors.errors_of([each.error for each in own])
        statistics = percent(found.median), percent(found.p95), f"{found.bias:+.1%}"
        lines.append((name, str(found.count), *statistics))
    print("\nStep time of rows added later (more_runs.csv): no constant was fitted on them")
    print(table(lines, ("source", "rows", "median", "p95", "bias")))
