"""`report`: what one sweep or several measured, as text, CSV, PNGs and one HTML page."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import bench_figures
import bench_html
import bench_tables
from bench_analysis import Analysis, analyse
from bench_baseline import Comparison, compare
from bench_comm_tables import wrong_elements
from bench_records import WRONG
from bench_store import Sweep, load
from dist_common import cli


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
        files = write(folder, analysis, comparison)
    except OSError as error:
        raise cli.UsageError(
            f"--output-dir {folder} cannot be written: {error.strerror}"
        ) from error
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
    warnings = [f"warning: {line}" for sweep in analysis.sweeps for line in sweep.warnings]
    blocks = ["\n".join(warnings)] if warnings else []
    blocks.append(bench_tables.text(analysis))
    if comparison:
        blocks.append(bench_tables.comparison_text(comparison))
    return "\n\n".join(blocks)


def write(folder: Path, analysis: Analysis, comparison: Comparison | None) -> Sequence[Path]:
    """Write the report's files; return their paths, the page first."""
    page, table = folder / "report.html", folder / "results.csv"
    page.write_text(bench_html.render(analysis, comparison))
    if not analysis.runs:  # collectives alone: their script's folders have the curves
        return [page]
    bench_tables.write_csv(table, analysis.runs)
    return [page, table, *bench_figures.draw_all(analysis, folder)]


def is_wrong(analysis: Analysis) -> bool:
    """Say whether a strategy's loss, or what a collective delivered, is wrong."""
    records = [record for sweep in analysis.sweeps for record in sweep.records]
    return any(run.verdict.kind == WRONG for run in analysis.runs) or wrong_elements(records) > 0
