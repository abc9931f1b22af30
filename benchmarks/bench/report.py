"""`report`: what a sweep measured, as text, CSV, PNGs and one HTML page."""

import argparse
import base64
import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from bench import figures, tables, words
from bench.analysis import Analysis, Row, analyse
from bench.baseline import Comparison, compare
from bench.comm_tables import comm_table, fit_table, lines_of, wrong_elements
from bench.records import WRONG
from bench.store import SETTINGS, Sweep, load
from dist_common import cli
from dist_common.measure import GIB

PAGE, TRAININGS, COLLECTIVES = "report.html", "results.csv", "collectives.csv"
FILES = (PAGE, TRAININGS, COLLECTIVES, *figures.NAMES)
TITLE = "<title>Benchmark report: "  # by which a page is known as a report's
COLUMNS = ("place", "strategy", "verdict", "step", "p10", "p90", "CPU", "tokens/s", "ddp", "mfu",
           "memory", "state", "sent", "calls", "loss")  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `report`."""
    add = parser.add_argument
    add("folder", metavar="DIR", help="of a sweep, finished or not")
    add("--baseline", metavar="OLD", help="the folder of a sweep to compare with")
    add("--output-dir", metavar="OUT", help="folder of report.html, results.csv, *.png (DIR)")


def run(args: argparse.Namespace) -> int:
    """Print the report and write its files; return 1 if a loss or a collective's data is wrong."""
    analysis = analyse(read(args.folder))
    comparison = compare(analysis, analyse(read(args.baseline))) if args.baseline else None
    folder = Path(args.output_dir or args.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        refuse_files_of_others(folder)
        written = write(folder, analysis, comparison)
    except OSError as error:
        said = f"--output-dir {folder} cannot be written: {error.strerror}"
        raise cli.UsageError(said) from error
    print(tables.text(analysis, comparison))
    print(f"\nwrote {', '.join(path.name for path in written)} to {folder}")
    return cli.FAILED if is_wrong(analysis) else 0


def read(folder: str) -> Sweep:
    """Load a sweep's folder. Raises: UsageError where it has no results."""
    sweep = load(folder)
    if not sweep.records:
        damage = f" ({sweep.warnings[0]})" if sweep.warnings else ""
        raise cli.UsageError(f"{folder} has no results yet: no point has ended{damage}")
    return sweep


def refuse_files_of_others(folder: Path) -> None:
    """Raise UsageError where a file has a name of ours, but neither a sweep nor a report is there.

    So a report is written over an older one, and over nothing else.
    """
    page = folder / PAGE
    text = page.read_text(errors="replace") if page.exists() else ""
    taken = [name for name in FILES if (folder / name).exists()]
    if taken and TITLE not in text and not (folder / SETTINGS).exists():
        said = f"--output-dir {folder} holds {', '.join(taken)}, which no report wrote"
        raise cli.UsageError(f"{said}: name another folder")


def write(folder: Path, analysis: Analysis, comparison: Comparison | None) -> Sequence[Path]:
    """Write the report's files in place of an older one's; return their paths, the page first."""
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
    trainings = [tables.flat(row, run) for row in analysis.rows for run in row.runs]
    written = []
    for name, lines in ((TRAININGS, trainings), (COLLECTIVES, lines_of(analysis.sweep.records))):
        if lines:
            written.append(folder / name)
            with written[-1].open("w", newline="") as file:
                writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
                writer.writeheader()
                writer.writerows(lines)
    pictures = figures.draw_all(analysis, folder)
    page = folder / PAGE
    page.write_text(render(analysis, comparison, pictures))
    return [page, *written, *pictures]


def render(analysis: Analysis, comparison: Comparison | None, pictures: Sequence[Path] = ()) -> str:
    """Return the page, which loads nothing; whatever comes from a file is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    collectives = [make(analysis.sweep.records) for make in (comm_table, fit_table)]
    return environment.get_template("report.html.j2").render(
        analysis=analysis,
        words=words,
        groups=[(rows, *page_table(rows)) for rows in analysis.groups],
        pictures=[(path.stem, base64.b64encode(path.read_bytes()).decode()) for path in pictures],
        collectives=[table for table in collectives if table[1]],
        comparison=comparison,
    )


def page_table(rows: Sequence[Row]) -> tuple[list[str], list[dict[str, Any]]]:
    """Return columns and lines, the verdict beside the name: phones show a few columns."""
    lines = []
    for row in rows:
        gib = row.memory("weights", "gradients", "optimizer")
        state = words.size(None if gib is None else gib * GIB)
        more = {"CPU": words.ms(row.median("cpu_time_per_step_ms")), "state": state}
        line = tables.cells(row) | more
        lines.append({name: line[name] for name in COLUMNS})
    return tables.known(lines), lines


def is_wrong(analysis: Analysis) -> bool:
    """Say whether a strategy's loss, or what a collective delivered, is wrong."""
    wrong = any(run.verdict.kind == WRONG for run in analysis.runs)
    return wrong or wrong_elements(analysis.sweep.records) > 0
