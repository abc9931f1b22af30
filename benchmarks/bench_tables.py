"""A report as text: the terminal's tables, CSV."""

import csv
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

import bench_words as words
from bench_analysis import Analysis, Row
from bench_baseline import COMPARED, Comparison, beyond_noise
from bench_comm_tables import comm_table, fit_table
from bench_records import COMMIT, PARTS, Run
from bench_words import DASH


def cells(row: Row) -> dict[str, str]:
    """Return what a row says, by column."""
    return {
        "place": row.place or DASH,
        "strategy": row.label,
        "step": words.ms(row.step_time_ms),
        "p10": words.ms(row.percentile_ms(10)),
        "p90": words.ms(row.percentile_ms(90)),
        "tokens/s": words.speed(row.median("tokens_per_second")),
        "ddp": words.times(row.against_ddp),
        "mfu": words.percent(row.median("mfu")),
        "memory": words.gib(row.median("peak_memory_gib")),
        "sent": words.size(row.median("bytes_sent_per_step")),
        "calls": words.count(row.median("calls_per_step")),
        "loss": words.loss(row.median("final_loss")),
        "verdict": words.verdict(row),
    }


def table(rows: Sequence[Row]) -> str:
    """Return a group's table; columns of which nothing is known are left out."""
    lines = [cells(row) for row in rows]
    heads = [name for name in lines[0] if any(line[name] != DASH for line in lines)]
    sides = ["left" if name in ("place", "strategy", "verdict") else "right" for name in heads]
    body = [[line[name] for name in heads] for line in lines]
    return tabulate(body, heads, "simple", colalign=sides, disable_numparse=True)


def scaling_table(analysis: Analysis) -> list[str]:
    """Return a table of efficiencies for each job that ran on several world sizes."""
    found = []
    for lines in analysis.scaling:
        sizes = sorted({ranks for line in lines for ranks in line.times_ms})
        link = lines[0].row.group.link
        head = f"efficiency over {link}" if link else "efficiency of"
        heads = [head, *map(words.ranks, sizes)]
        body = [[line.row.label, *(words.percent(line.efficiency.get(ranks)) for ranks in sizes)]
                for line in lines]  # fmt: skip
        found.append(aligned(body, heads, names=1))
    return found


def text(analysis: Analysis) -> str:
    """Return the whole report of training points, as the terminal shows it."""
    blocks = ["\n".join([*words.progress(analysis), words.environment(analysis)])]
    for rows in analysis.groups:
        lines = [words.title(rows[0].group), table(rows), words.winners(rows)]
        lines += [words.witnesses(rows), *map(words.trouble, words.unfit(rows))]
        blocks.append("\n".join(line for line in lines if line))
    blocks += scaling_table(analysis)
    records = [record for sweep in analysis.sweeps for record in sweep.records]
    for heads, body in (comm_table(records), fit_table(records)):
        blocks += [aligned(body, heads, names=1)] if body else []
    if analysis.groups:
        blocks.append("\n".join([words.noise(analysis), words.conclusion(analysis)]))
    return "\n\n".join(blocks)


def aligned(body: Sequence[Sequence[str]], heads: Sequence[str], names: int) -> str:
    """Return a table with the first `names` columns to the left, values to the right."""
    sides = [*["left"] * names, *["right"] * (len(heads) - names)]
    return tabulate(body, heads, "simple", colalign=sides, disable_numparse=True)


def comparison_text(comparison: Comparison) -> str:
    """Return what a baseline has to say: what differs, what changed beyond the noise."""
    lines = [f"against {comparison.folder} (new / old; a mark ! is beyond the noise of both)"]
    lines += [f"differs: {name}: {old} -> {new}" for name, old, new in comparison.conditions]
    if any(name != COMMIT for name, *_ in comparison.conditions):
        lines.append("so times are those of another setting: a change need not be the code's")
    body = []
    for pair in comparison.pairs:
        changes = [*map(pair.changes.get, COMPARED), pair.loss]
        body.append([words.title(pair.row.group), pair.row.label, *map(words.change, changes)])
    heads = ("points", "strategy", "step", "memory", "sent", "loss")
    lines.append(aligned(body, heads, names=2))
    for pair in comparison.pairs:
        lines += [f"{pair.row.label}: {name} {old} -> {new}" for name, (old, new) in
                  (("flags", pair.flags or ("", "")), ("verdict", pair.verdict or ("", "")))
                  if old != new]  # fmt: skip
    lines += [f"only in the {kind} one: {words.listed(labels)} ({title})"
              for kind, title, labels in words.only_in_one(comparison)]  # fmt: skip
    found = len(beyond_noise(comparison))
    lines.append(f"{found or 'nothing'} changed beyond the noise")
    return "\n".join(lines)


# CSV


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write a line for each point and repeat, with units in the names of the columns."""
    write_lines(path, [{**flat(run), "place": row.place} for row in rows for run in row.runs])


def write_lines(path: Path, lines: Sequence[dict[str, object]]) -> None:
    """Write dictionaries with the same keys as CSV."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def flat(run: Run) -> dict[str, object]:
    """Return a run's numbers by column."""
    group = {name: value for name, value in vars(run.group).items() if name != "scope"}
    names = ("step_time_ms", "p10_ms", "p90_ms", "tokens_per_second", "mfu",
             "cpu_time_per_step_ms", "peak_memory_gib")  # fmt: skip
    results = run.record.get("results") or {}
    return {
        "folder": run.folder, "id": run.record["id"], "strategy": run.strategy, **group,
        "repeat": run.record.get("repeat"), "status": run.record["status"],
        "reason": run.record.get("reason"), "verdict": run.verdict.kind,
        **{name: getattr(run, name) for name in names},
        **{f"memory_{part}_gib": run.memory_gib.get(part) for part in PARTS},
        "bytes_sent_per_step": run.bytes_sent_per_step, "calls_per_step": run.calls_per_step,
        "final_loss": run.final_loss, "loss_difference": run.loss_difference,
        "early_loss_difference": run.early_difference,
        "seconds": run.record.get("seconds"), "started": run.record.get("started"),
        "launcher": run.record.get("launcher"), "device": results.get("device"),
        "torch": (results.get("versions") or {}).get("torch"),
        "command": run.record.get("command"),
    }  # fmt: skip
