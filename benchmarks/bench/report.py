"""`report`: what a sweep measured, as text, CSV, PNGs and one HTML page."""

import argparse
import base64
import csv
import textwrap
from collections.abc import Sequence
from pathlib import Path

import jinja2
from tabulate import tabulate

from bench import bare, figures, predict, words
from bench.analysis import Analysis, Row, analyse
from bench.answer import answers
from bench.baseline import Comparison, compare
from bench.comm_tables import Table, comm_table, fit_table, lines_of, wrong_elements
from bench.records import PARTS, WRONG, Run
from bench.store import SETTINGS, Sweep, load
from legacy_common import cli

PAGE, TRAININGS, COLLECTIVES = "report.html", "results.csv", "collectives.csv"
FILES = (PAGE, TRAININGS, COLLECTIVES, *figures.NAMES)
WIDTH = 118  # characters of an answer's lines
TITLE = "<title>Benchmark report: "  # by which a page is known as a report's
COLUMNS = ("place", "strategy", "step", "p10", "p90", "tokens/s", "ddp", "mfu", "compute",
           "exposed", "memory", "sent", "calls", "loss", "verdict")  # fmt: skip
# Of the page: the verdict beside the name, since phones show a few columns.
PAGE_COLUMNS = ("place", "strategy", "verdict", "step", "p10", "p90", "CPU", "tokens/s",
                "ddp", "mfu", "compute", "exposed", "memory", "state", "sent", "calls",
                "loss")  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `report`."""
    add = parser.add_argument
    add("folder", metavar="DIR",
        help="of a sweep, finished or not; or with folders in it that templates wrote")  # fmt: skip
    add("--baseline", metavar="OLD", help="the folder of a sweep to compare with")
    add("--predict", action="store_true",
        help="ask the memory tool and the planner first: once, 10 s a strategy")  # fmt: skip
    add("--output-dir", metavar="OUT", help="folder of report.html, results.csv, *.png (DIR)")


def run(args: argparse.Namespace) -> int:
    """Print the report and write its files; return 1 if a loss or a collective's data is wrong."""
    analysis = analyse(read(args.folder))
    if args.predict:
        predict.fill(analysis)
    comparison = compare(analysis, analyse(read(args.baseline))) if args.baseline else None
    folder = Path(args.output_dir or args.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        refuse_files_of_others(folder)
        written = write(folder, analysis, comparison)
    except OSError as error:
        said = f"--output-dir {folder} cannot be written: {error.strerror}"
        raise cli.UsageError(said) from error
    print(text(analysis, comparison))
    print(f"\nwrote {', '.join(path.name for path in written)} to {folder}")
    return cli.FAILED if is_wrong(analysis) else 0


def read(folder: str) -> Sweep:
    """Load a sweep's folder. Raises: UsageError where it has no results."""
    sweep = load(folder) if Path(folder, SETTINGS).exists() else bare.gather(folder)
    if not sweep.records:
        damage = f" ({sweep.warnings[0]})" if sweep.warnings else ""
        raise cli.UsageError(f"{folder} has no results yet: no point has ended{damage}")
    return sweep


def refuse_files_of_others(folder: Path) -> None:
    """Raise UsageError where a file has a name of ours, but neither a sweep nor a report is there.

    So a report is written over an older one, and over nothing else.
    """
    page = folder / PAGE
    source = page.read_text(errors="replace") if page.exists() else ""
    taken = [name for name in FILES if (folder / name).exists()]
    if taken and TITLE not in source and not (folder / SETTINGS).exists():
        said = f"--output-dir {folder} holds {', '.join(taken)}, which no report wrote"
        raise cli.UsageError(f"{said}: name another folder")


def is_wrong(analysis: Analysis) -> bool:
    """Say whether a strategy's loss, or what a collective delivered, is wrong."""
    wrong = any(run.verdict.kind == WRONG for run in analysis.runs)
    return wrong or wrong_elements(analysis.sweep.records) > 0


def text(analysis: Analysis, comparison: Comparison | None = None) -> str:
    """Return all that a report prints: warnings, training, collectives, the baseline."""
    sweep = analysis.sweep
    filled = (textwrap.fill(line, WIDTH, break_on_hyphens=False) for line in answered(analysis))
    blocks = ["\n".join(filled)]
    blocks.append("\n".join(f"warning: {line}" for line in analysis.warnings))
    blocks.append(f"{words.progress(sweep)}\n{words.environment(analysis)}")
    kept = predict.read(sweep.folder)
    for rows in analysis.groups:
        table = aligned(*training_table(rows, COLUMNS), "strategy", "verdict")
        said = [words.title(rows[0].group), table, *words.outcome(rows)]
        said += map(words.trouble, words.unfit(rows))
        blocks.append("\n".join(said))
        if found := predict.compared(rows, kept):
            predicted = aligned(*words.predictions(found), "what")
            blocks.append("\n".join([predicted, *words.remarks(found, rows)]))
    for lines in analysis.scaling:
        sizes = sorted({ranks for line in lines for ranks in line.times_ms})
        link = lines[0].row.group.link
        heads = [f"efficiency over {link}" if link else "efficiency of", *map(words.ranks, sizes)]
        body = [[line.row.label, *(words.percent(line.efficiency.get(ranks)) for ranks in sizes)]
                for line in lines]  # fmt: skip
        blocks.append(aligned(heads, body))
    blocks += [aligned(*table) for table in collectives(sweep)]
    if analysis.groups:
        blocks.append(f"{words.noise(analysis)}\n{words.conclusion(analysis)}")
    if comparison:
        blocks.append(comparison_text(comparison))
    return "\n\n".join(filter(None, blocks))


def answered(analysis: Analysis) -> list[str]:
    """Return the answer of each group in words, after the group's title where there are several."""
    found = answers(analysis)
    titles = [f"{words.title(each.group[0].group)}: " * (len(found) > 1) for each in found]
    return [title + words.answer(each, analysis)
            for title, each in zip(titles, found, strict=True)]  # fmt: skip


def training_table(rows: Sequence[Row], columns: Sequence[str]) -> Table:
    """Return those of the columns of which something is known, and what the rows say in them."""
    lines = [cells(row) for row in rows]
    heads = [name for name in columns if any(line[name] != words.DASH for line in lines)]
    return heads, [[line[name] for name in heads] for line in lines]


def cells(row: Row) -> dict[str, str]:
    """Return what a row says, by column."""
    state = row.memory("weights", "gradients", "optimizer")
    return {
        "place": row.place or words.DASH,
        "strategy": row.label,
        "step": words.ms(row.step_time_ms),
        "p10": words.ms(row.percentile_ms(10)),
        "p90": words.ms(row.percentile_ms(90)),
        "CPU": words.ms(row.median("cpu_time_per_step_ms")),
        "tokens/s": words.speed(row.median("tokens_per_second")),
        "ddp": words.ratio(row.against_ddp),
        "mfu": words.percent(row.median("mfu")),
        "compute": words.percent(row.share("compute")),
        "exposed": words.percent(row.share("exposed")),
        "memory": words.gib(row.median("peak_memory_gib")),
        "state": words.tensors(state),
        "sent": words.size(row.median("bytes_sent_per_step")),
        "calls": words.count(row.median("calls_per_step")),
        "loss": words.loss(row.median("final_loss")),
        "verdict": words.verdict(row),
    }


def collectives(sweep: Sweep) -> list[Table]:
    """Return the tables of what `comm` measured, those that have rows."""
    return [table for make in (comm_table, fit_table) if (table := make(sweep.records))[1]]


def aligned(heads: Sequence[str], body: Sequence[Sequence[str]], *left: str) -> str:
    """Return a table, aligned to the left in the first column and in those of `left`."""
    sides = ["left" if name in (heads[0], *left) else "right" for name in heads]
    return tabulate(body, heads, "simple", colalign=sides, disable_numparse=True)


def comparison_text(comparison: Comparison) -> str:
    """Return what a baseline has to say: what differs, what changed beyond the noise."""
    lines = [f"against {comparison.folder} (new / old; a mark ! is beyond the noise of both)"]
    lines += [f"differs: {name}: {old} -> {new}" for name, old, new in comparison.conditions]
    if any(name != "commit" for name, *_ in comparison.conditions):
        lines.append("so times are those of another setting: a change need not be the code's")
    body = [(words.title(row.group), row.label, *map(words.change, changes))
            for row, changes, _ in comparison.pairs]  # fmt: skip
    heads = "points", "strategy", "step", "memory", "sent", "loss"
    lines.append(aligned(heads, body, "strategy"))
    lines += [f"{row.label}: {name} {old} -> {new}" for row, _, other in comparison.pairs
              for name, (old, new) in other.items()]  # fmt: skip
    lines += [f"only in the {kind} one: {words.listed(labels)} ({words.title(group)})"
              for kind, group, labels in comparison.only]  # fmt: skip
    lines.append(f"{len(comparison.beyond_noise) or 'nothing'} changed beyond the noise")
    return "\n".join(lines)


def write(folder: Path, analysis: Analysis, comparison: Comparison | None) -> Sequence[Path]:
    """Write the report's files in place of an older one's; return their paths, the page first."""
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
    trainings = [flat(row, run) for row in analysis.rows for run in row.runs]
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
        **{f"traced_{part}_ms": row.trace.get(part) for part in ("step", "compute", "exposed")},
        **{name: record.get(name) for name in ("seconds", "started", "launcher", "command")},
        "device": results.get("device"), "torch": (results.get("versions") or {}).get("torch"),
    }  # fmt: skip


def render(analysis: Analysis, comparison: Comparison | None, pictures: Sequence[Path] = ()) -> str:
    """Return the page, which loads nothing; whatever comes from a file is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    return environment.get_template("report.html.j2").render(
        analysis=analysis,
        words=words,
        answered=answered(analysis),
        groups=[(rows, *training_table(rows, PAGE_COLUMNS)) for rows in analysis.groups],
        predicted=[
            predict.compared(rows, predict.read(analysis.sweep.folder)) for rows in analysis.groups
        ],
        pictures=[(path.stem, base64.b64encode(path.read_bytes()).decode()) for path in pictures],
        collectives=collectives(analysis.sweep),
        comparison=comparison,
    )
