"""`report`: what one sweep or several measured, as text, CSV, PNGs and one HTML page."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import bench_figures
import bench_html
import bench_tables
from bench_analysis import Analysis, analyse
from bench_baseline import Comparison, compare
from bench_comm_tables import comm_lines, wrong_elements
from bench_records import WRONG
from bench_store import SETTINGS, Sweep, load
from dist_common import cli

PAGE, TRAININGS, COLLECTIVES = "report.html", "results.csv", "collectives.csv"
FILES = (PAGE, TRAININGS, COLLECTIVES, *bench_figures.NAMES)
TITLE = "<title>Benchmark report: "  # by which a page is known as a report's


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `report`."""
    add = parser.add_argument
    add("folders", nargs="+", metavar="DIR", help="of sweeps, finished or not")
    add("--baseline", metavar="OLD", help="the folder of a sweep to compare with")
    add("--output-dir", metavar="OUT", help="folder of report.html, results.csv, *.png (first DIR)")


def run(args: argparse.Namespace) -> int:
    """Print the report and write its files; return 1 if a loss or a collective's data is wrong."""
    sweeps = [read(folder) for folder in dict.fromkeys(args.folders)]
    analysis = analyse(sweeps)
    comparison = compare(analysis, analyse([read(args.baseline)])) if args.baseline else None
    folder = Path(args.output_dir or args.folders[0])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        refuse_files_of_others(folder)
        files = write(folder, analysis, comparison)
    except OSError as error:
        said = f"--output-dir {folder} cannot be written: {error.strerror}"
        raise cli.UsageError(said) from error
    print(text(analysis, comparison))
    print(f"\nwrote {', '.join(path.name for path in files)} to {folder}")
    return cli.FAILED if is_wrong(analysis) else 0


def read(folder: str) -> Sweep:
    """Load a sweep's folder. Raises: UsageError where it has no results."""
    sweep = load(folder)
    if not sweep.records:
        damage = f" ({sweep.warnings[0]})" if sweep.warnings else ""
        raise cli.UsageError(f"{folder} has no results yet: no point has ended{damage}")
    return sweep


def text(analysis: Analysis, comparison: Comparison | None) -> str:
    """Return all that a report prints: warnings, training, collectives, the baseline."""
    warnings = [f"warning: {line}" for line in analysis.warnings]
    blocks = ["\n".join(warnings)] if warnings else []
    blocks.append(bench_tables.text(analysis))
    if comparison:
        blocks.append(bench_tables.comparison_text(comparison))
    return "\n\n".join(blocks)


def refuse_files_of_others(folder: Path) -> None:
    """Raise UsageError where a file has a name of ours, but neither a sweep nor a report is there.

    So a report is written over an older one, and over nothing else.
    """
    page = folder / PAGE
    text = page.read_text(errors="replace") if page.exists() else ""
    ours = (folder / SETTINGS).exists() or TITLE in text
    taken = [name for name in FILES if (folder / name).exists()]
    if taken and not ours:
        said = f"--output-dir {folder} holds {', '.join(taken)}, which no report wrote"
        raise cli.UsageError(f"{said}: name another folder")


def write(folder: Path, analysis: Analysis, comparison: Comparison | None) -> Sequence[Path]:
    """Write the report's files in place of an older one's; return their paths, the page first."""
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
    page, trainings, collectives = folder / PAGE, folder / TRAININGS, folder / COLLECTIVES
    page.write_text(bench_html.render(analysis, comparison))
    written = [page]
    if analysis.rows:
        bench_tables.write_csv(trainings, analysis.rows)
        written.append(trainings)
    if lines := comm_lines(record for sweep in analysis.sweeps for record in sweep.records):
        bench_tables.write_lines(collectives, lines)
        written.append(collectives)
    return [*written, *bench_figures.draw_all(analysis, folder)]


def is_wrong(analysis: Analysis) -> bool:
    """Say whether a strategy's loss, or what a collective delivered, is wrong."""
    records = [record for sweep in analysis.sweeps for record in sweep.records]
    return any(run.verdict.kind == WRONG for run in analysis.runs) or wrong_elements(records) > 0
