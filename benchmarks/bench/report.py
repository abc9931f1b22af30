"""Show a sweep: text for the terminal, one HTML page, a CSV file with all points."""

import csv
import json
import shlex
import subprocess
import sys
from pathlib import Path

import jinja2
from tabulate import tabulate

from bench.analysis import OK, WRONG
from bench.store import FAILED, TIMEOUT
from bench.strategies import REFERENCE, REPO

PAGE = Path(__file__).with_name("report.html.j2")
CSV_FIELDS = (
    *("id", "strategy", "kind", "world_size", "preset", "precision", "repeat"),
    *("status", "reason", "step_time_ms", "tokens_per_step", "mfu", "final_loss"),
    *("peak_memory_gib", "bytes_sent_per_step", "calls_per_step", "cores_of_others"),
)
EFFICIENCY = "speed per rank, of that on the fewest ranks"


def columns_of(analysis, predictions):
    """Return (title, function of a row) for the columns that this report needs."""
    columns = [
        ("place", lambda row: row.place or "-"),
        ("strategy", label_of),
        ("step", lambda row: format_number(row.step_time_ms, ".1f", " ms")),
        ("to the first", lambda row: str(row.slower) if row.slower else "-"),
        ("tokens/s", lambda row: format_number(row.tokens_per_second, ",.0f")),
    ]
    if any(row.median("mfu") for row in analysis.rows):
        columns.append(("mfu", lambda row: format_number(row.median("mfu"), ".1%")))
    columns += [
        (
            "memory",
            lambda row: format_number(row.median("peak_memory_gib"), ".2f", " GiB"),
        ),
        ("sent", lambda row: format_number(in_mib(row), ",.2f", " MiB")),
        ("loss", lambda row: format_number(row.median("final_loss"), ".4f")),
    ]
    if predictions:
        columns.append(("planner", lambda row: predictions.get(id(row), "-")))
    columns.append(("verdict", lambda row: row.verdict))
    return columns


def label_of(row):
    """Return a row's name; the reference shows that it ran on one rank."""
    return f"{REFERENCE} (1 rank)" if row.strategy == REFERENCE else row.strategy


def format_number(value, form, unit=""):
    return "-" if value is None else f"{value:{form}}{unit}"


def in_mib(row):
    sent = row.median("bytes_sent_per_step")
    return None if sent is None else sent / 2**20


def cells_of(analysis, predictions=None):
    """Return the headers, and the rows of each table with the reference last."""
    columns = columns_of(analysis, predictions)
    tables = []
    for table in analysis.tables:
        rows = [*table.rows, table.reference] if table.reference else table.rows
        tables.append([[cell(row) for _, cell in columns] for row in rows])
    return [title for title, _ in columns], tables


def list_reasons(table):
    """Return a line for each strategy whose verdict is not ok."""
    return [
        f"{row.strategy}: {row.verdict}: {row.reason}"
        for row in table.rows
        if row.verdict != OK
    ]


def compute_efficiency(analysis):
    """Return the headers and rows of the table of speed per rank, on GPUs only.

    CPU ranks share cores, so more ranks have fewer cores each.
    """
    speeds = {}
    for table in analysis.tables:
        for row in table.rows:
            speed = row.tokens_per_second
            if speed and row.verdict == OK and row.median("gpu_memory_gib"):
                preset, precision, *_ = table.title.split(", ")
                label = f"{row.strategy} {preset} {precision}"
                speeds.setdefault(label, {})[table.world_size] = (
                    speed / table.world_size
                )
    ranks = sorted({ranks for by_ranks in speeds.values() for ranks in by_ranks})
    rows = []
    for label, by_ranks in speeds.items():
        if len(by_ranks) > 1:
            base = by_ranks[min(by_ranks)]
            cells = (
                f"{by_ranks[n] / base:.0%}" if n in by_ranks else "-" for n in ranks
            )
            rows.append([label, *cells])
    return [EFFICIENCY, *map(str, ranks)], rows


def render_text(analysis, predictions=None):
    """Return the report for a terminal: the answer, its condition, the tables."""
    several = len(analysis.tables) > 1
    answers = [
        f"{table.title}: {table.answer}" if several else table.answer
        for table in analysis.tables
    ] or ["no answer yet: no strategy has run"]
    lines = [*answers, f"measured on {analysis.condition}", *analysis.warnings]
    headers, tables = cells_of(analysis, predictions)
    align = ["left" if title == "strategy" else "right" for title in headers]
    align[-1] = "left"
    for table, rows in zip(analysis.tables, tables, strict=True):
        lines += ["", table.title]
        lines += [tabulate(rows, headers, colalign=align, disable_numparse=True)]
        lines += list_reasons(table)
    headers, rows = compute_efficiency(analysis)
    if rows:
        lines += ["", tabulate(rows, headers, disable_numparse=True)]
    return "\n".join(lines)


def write(analysis, folder, predictions=None):
    """Write report.html and results.csv; return their names."""
    folder.mkdir(parents=True, exist_ok=True)
    headers, tables = cells_of(analysis, predictions)
    page = jinja2.Template(PAGE.read_text(), autoescape=True, trim_blocks=True)
    html = page.render(
        analysis=analysis,
        headers=headers,
        tables=list(zip(analysis.tables, tables, strict=True)),
        reasons=list_reasons,
        efficiency=compute_efficiency(analysis),
        commands=collect_commands(analysis),
    )
    (folder / "report.html").write_text(html)
    with (folder / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, CSV_FIELDS, restval="", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(analysis.sweep.records)
    return "report.html, results.csv"


def collect_commands(analysis):
    """Return the command of each strategy of each table."""
    commands = {}
    for row in analysis.rows:
        first = row.records[0]
        commands[f"{row.strategy}, {first['world_size']} ranks"] = first["command"]
    return commands


def is_wrong(analysis):
    """Say whether a point failed, or a strategy has a wrong loss."""
    return any(row.verdict in (WRONG, FAILED, TIMEOUT) for row in analysis.rows)


def predict(analysis):
    """Return id(row) -> planner/plan.py's step time, or its bytes without a GPU.

    Only correct rows in bf16-mixed whose strategy has planner flags get a prediction.
    """
    predictions = {}
    for row in analysis.rows:
        flags = row.records[0].get("planner")
        if flags and row.verdict == OK:
            gpu = row.records[0]["where"].get("gpu")
            if plan := ask_planner(flags, gpu) or ask_planner(flags, None):
                sent = sum(axis["step_bytes"] for axis in plan["axes"].values())
                predictions[id(row)] = f"{sent / 2**20:,.2f} MiB"
                if gpu and plan.get("gpu_is_known"):
                    predictions[id(row)] = f"{plan['step_time_s'] * 1e3:.1f} ms"
    return predictions


def ask_planner(flags, gpu):
    """Return the JSON of `plan.py predict`; None if it fails, as for an unknown GPU."""
    words = [
        sys.executable,
        "planner/plan.py",
        "predict",
        "--json",
        *shlex.split(flags),
    ]
    if gpu:
        words += ["--gpu", gpu]
    ended = subprocess.run(words, cwd=REPO, capture_output=True, check=False)
    if ended.returncode:
        return None
    return json.loads(ended.stdout) | {"gpu_is_known": bool(gpu)}
