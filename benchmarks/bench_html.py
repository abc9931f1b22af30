"""A report as one self-contained HTML page: what report.html.j2 shows, computed here."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

import bench_words as words
from bench_analysis import Analysis, Row
from bench_baseline import COMPARED, Comparison, beyond_noise
from bench_comm_tables import comm_table, fit_table
from bench_records import LOSSY, PARTS, UNCOMPARED, WRONG
from bench_store import OK
from bench_tables import cells
from dist_common.measure import GIB

TEMPLATE = "report.html.j2"
# What a process held before it built the model, libraries mostly, says nothing of a strategy.
DRAWN_PARTS = PARTS[1:]
COLUMNS = ("place", "strategy", "verdict", "step", "p10", "p90", "CPU", "tokens/s", "ddp", "mfu",
           "memory", "state", "sent", "calls", "loss")  # fmt: skip
DRAWN = (OK, LOSSY, UNCOMPARED, WRONG)  # verdicts of rows that have numbers


def render(analysis: Analysis, comparison: Comparison | None) -> str:
    """Return the page; whatever comes from a file is escaped."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    records = [record for sweep in analysis.sweeps for record in sweep.records]
    collectives = [table for table in (comm_table(records), fit_table(records)) if table[1]]
    return environment.get_template(TEMPLATE).render(
        progress=words.progress(analysis),
        warnings=analysis.warnings,
        conditions=analysis.conditions,
        sweeps=[(str(sweep.folder), settings_of(sweep.settings)) for sweep in analysis.sweeps],
        verdicts=verdicts(analysis),
        noise=words.noise(analysis),
        conclusion=words.conclusion(analysis),
        groups=[group(rows) for rows in analysis.groups],
        parts=DRAWN_PARTS,
        scaling=[scaling(lines) for lines in analysis.scaling],
        collectives=collectives,
        comparison=comparison and compared(comparison),
        points=points(records),
    )


def settings_of(settings: dict[str, Any]) -> dict[str, str]:
    """Return what a sweep was asked for, as text; the points and their commands stand below."""
    return {
        name: " ".join(map(str, value)) if isinstance(value, list) else str(value)
        for name, value in settings.items() if name not in ("commands", "points")
    }  # fmt: skip


def verdicts(analysis: Analysis) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Return for each group its title, what is fastest, and what must not be compared."""
    found = []
    for rows in analysis.groups:
        fastest = words.winners(rows) or ""
        fastest = "; ".join(filter(None, (fastest, words.witnesses(rows))))
        troubles = [(css_class(row), words.trouble(row)) for row in words.unfit(rows)]
        found.append((words.title(rows[0].group), fastest, troubles))
    return [entry for entry in found if entry[1] or entry[2]]


def group(rows: Sequence[Row]) -> dict[str, Any]:
    """Return a group's charts and table."""
    lines = [(css_class(row), in_columns(row)) for row in rows]
    heads = [name for name in lines[0][1] if any(line[name] != words.DASH for _, line in lines)]
    return {
        "title": words.title(rows[0].group),
        "heads": heads,
        "rows": lines,
        "placed": any(row.place for row in rows),
        "bars": bars([row for row in rows if row.verdict.kind in DRAWN]),
    }


def css_class(row: Row) -> str:
    return row.verdict.kind.replace(" ", "-")


def in_columns(row: Row) -> dict[str, str]:
    """Return a row's cells, the verdict beside the name: a phone shows the first columns."""
    line = cells(row)
    line["CPU"] = words.ms(row.median("cpu_time_per_step_ms"))
    line["state"] = in_bytes(row.state_gib)
    return {name: line[name] for name in COLUMNS}


def in_bytes(gib: float | None) -> str:
    return words.size(None if gib is None else gib * GIB)


def bars(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return a row's bars: widths in percent of the longest one of a chart."""
    slowest = max((max(row.percentile_ms(90), row.step_time_ms) for row in rows
                   if row.step_time_ms), default=1)  # fmt: skip
    most = max((trained_in(row) or 0.0 for row in rows), default=0) or 1
    busiest = max((row.median("bytes_sent_per_step") or 0 for row in rows), default=0) or 1
    found = []
    for row in rows:
        sent = row.median("bytes_sent_per_step")
        found.append({
            "label": row.label,
            "place": row.place,
            "kind": css_class(row),
            "note": "" if row.verdict.kind == OK else words.verdict(row),
            "step": words.ms(row.step_time_ms),
            "time": time_bar(row, slowest) if row.step_time_ms else None,
            "memory": in_bytes(trained_in(row)),
            "peak": words.gib(row.median("peak_memory_gib")),
            "parts": [(part, in_bytes(gib), f"{100 * gib / most:.2f}") for part in DRAWN_PARTS
                      if (gib := row.memory(part)) is not None],
            "sent": words.size(sent),
            "sent_width": f"{100 * (sent or 0) / busiest:.2f}",
            "calls": words.count(row.median("calls_per_step")),
        })  # fmt: skip
    return found


def trained_in(row: Row) -> float | None:
    """Return the GiB of all parts that are drawn."""
    parts = [row.memory(part) for part in DRAWN_PARTS]
    return None if None in parts else sum(parts)


def time_bar(row: Row, slowest: float) -> dict[str, str]:
    """Return a bar from 0 to the median and its whisker, in percent of `slowest`."""
    low, high = row.percentile_ms(10), row.percentile_ms(90)
    ends = {"width": row.step_time_ms, "low": low, "long": high - low}
    return {name: f"{100 * value / slowest:.2f}" for name, value in ends.items()}


def scaling(lines: Sequence[Any]) -> dict[str, Any]:
    """Return a job's efficiencies: strategies by world sizes, with bars that end at the ideal."""
    sizes = sorted({ranks for line in lines for ranks in line.times_ms})
    rows = []
    for line in lines:
        values = [(words.percent(line.efficiency.get(n)), words.ms(line.times_ms.get(n)),
                   f"{min(100, 100 * line.efficiency.get(n, 0)):.1f}") for n in sizes]  # fmt: skip
        rows.append((line.row.label, values))
    group = lines[0].row.group
    job = f"{group.preset}, {group.precision}" + f", link {group.link}" * bool(group.link)
    return {"title": job, "sizes": sizes, "rows": rows}


def compared(comparison: Comparison) -> dict[str, Any]:
    """Return new / old for each point, and what else differs."""
    rows = []
    for pair in comparison.pairs:
        changes = [*map(pair.changes.get, COMPARED), pair.loss]
        marked = [(words.change(change), bool(change and change.beyond)) for change in changes]
        said = [(name, both) for name, both in (("flags", pair.flags), ("verdict", pair.verdict))
                if both]  # fmt: skip
        rows.append((words.title(pair.row.group), pair.row.label, marked, said))
    return {
        "folder": comparison.folder,
        "conditions": comparison.conditions,
        "rows": rows,
        "only": [(kind, words.listed(labels), title)
                 for kind, title, labels in words.only_in_one(comparison)],
        "changed": len(beyond_noise(comparison)),
    }  # fmt: skip


def points(records: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Return how each point was started and how it ended."""
    found = []
    for record in sorted(records, key=lambda record: str(record["id"])):
        seconds = record.get("seconds")
        took = f"{seconds:.0f} s" if isinstance(seconds, (int, float)) else ""
        found.append({
            "id": str(record["id"]), "status": str(record["status"]), "seconds": took,
            "reason": str(record.get("reason") or ""), "command": str(record.get("command") or ""),
        })  # fmt: skip
    return found
