"""A report as text: the terminal's tables, and the lines of the CSV."""

from collections.abc import Sequence

from tabulate import tabulate

from bench import words
from bench.analysis import Analysis, Row
from bench.baseline import Comparison
from bench.comm_tables import comm_table, fit_table
from bench.records import PARTS, Run
from bench.words import DASH


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


def known(lines: Sequence[dict[str, str]]) -> list[str]:
    """Return the columns of which something is known."""
    return [name for name in lines[0] if any(line[name] != DASH for line in lines)]


def aligned(body: Sequence[Sequence[str]], heads: Sequence[str], *left: str) -> str:
    """Return a table, aligned to the left in the first column and in those of `left`."""
    sides = ["left" if name in (heads[0], *left) else "right" for name in heads]
    return tabulate(body, heads, "simple", colalign=sides, disable_numparse=True)


def text(analysis: Analysis, comparison: Comparison | None = None) -> str:
    """Return all that a report prints: warnings, training, collectives, the baseline."""
    sweep = analysis.sweep
    blocks = ["\n".join(f"warning: {line}" for line in analysis.warnings)]
    blocks.append(f"{words.progress(sweep)}\n{words.environment(analysis)}")
    for rows in analysis.groups:
        lines = [cells(row) for row in rows]
        heads = known(lines)
        body = [[line[name] for name in heads] for line in lines]
        said = [words.title(rows[0].group), aligned(body, heads, "strategy", "verdict")]
        said += [*words.outcome(rows), *map(words.trouble, words.unfit(rows))]
        blocks.append("\n".join(said))
    for lines in analysis.scaling:
        sizes = sorted({ranks for line in lines for ranks in line.times_ms})
        link = lines[0].row.group.link
        heads = [f"efficiency over {link}" if link else "efficiency of", *map(words.ranks, sizes)]
        body = [[line.row.label, *(words.percent(line.efficiency.get(ranks)) for ranks in sizes)]
                for line in lines]  # fmt: skip
        blocks.append(aligned(body, heads))
    for heads, body in (comm_table(sweep.records), fit_table(sweep.records)):
        blocks.append(aligned(body, heads) if body else "")
    if analysis.groups:
        blocks.append(f"{words.noise(analysis)}\n{words.conclusion(analysis)}")
    if comparison:
        blocks.append(comparison_text(comparison))
    return "\n\n".join(filter(None, blocks))


def comparison_text(comparison: Comparison) -> str:
    """Return what a baseline has to say: what differs, what changed beyond the noise."""
    lines = [f"against {comparison.folder} (new / old; a mark ! is beyond the noise of both)"]
    lines += [f"differs: {name}: {old} -> {new}" for name, old, new in comparison.conditions]
    if any(name != "commit" for name, *_ in comparison.conditions):
        lines.append("so times are those of another setting: a change need not be the code's")
    body = [(words.title(pair.row.group), pair.row.label, *map(words.change, pair.changes))
            for pair in comparison.pairs]  # fmt: skip
    heads = ("points", "strategy", "step", "memory", "sent", "loss")
    lines.append(aligned(body, heads, "strategy"))
    lines += [f"{pair.row.label}: {name} {old} -> {new}" for pair in comparison.pairs
              for name, (old, new) in pair.other.items()]  # fmt: skip
    lines += [f"only in the {kind} one: {words.listed(labels)} ({title})"
              for kind, title, labels in words.only_in_one(comparison)]  # fmt: skip
    lines.append(f"{len(comparison.beyond_noise) or 'nothing'} changed beyond the noise")
    return "\n".join(lines)


def flat(row: Row, run: Run) -> dict[str, object]:
    """Return all that is known of a run, by column of results.csv."""
    record, results = run.record, run.record.get("results") or {}
    numbers = {name: value for name, value in vars(run).items()
               if value is None or isinstance(value, (int, float))}  # fmt: skip
    return {
        "id": record["id"], "strategy": run.strategy, **run.group._asdict(),
        **{name: record.get(name) for name in ("repeat", "status", "reason")},
        "verdict": run.verdict.kind, "place": row.place, **numbers,
        **{f"memory_{part}_gib": run.memory_gib.get(part) for part in PARTS},
        **{name: record.get(name) for name in ("seconds", "started", "launcher", "command")},
        "device": results.get("device"), "torch": (results.get("versions") or {}).get("torch"),
    }  # fmt: skip
