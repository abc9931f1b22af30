"""Compare predicted step times, collectives and memory with published figures.

    all figures of planner/data    python planner/validate.py
    runs of your own               add --rows FILE.csv --predictions OUT.csv
    collectives of your own        add --collectives FILE.csv
    cells of formula tables        add --components FILE.csv
    memory of fine-tuning          add --finetune FILE.csv

Constants were fitted on half of the rows (calibrate.py); the errors are of the other half. Look
for: the errors by source next to one MFU per GPU type and other models, and where they are
largest. The exit code is 1 if an error leaves its band.
"""

import csv
import io
import sys
from pathlib import Path

from planner import (
    cli,
    collectives,
    errors,
    finetune_times,
    memory,
    published,
    validate_memory,
    validate_show,
)
from planner.errors import Compared
from planner.plan_text import table
from planner.step import predict, step_seconds

COLUMNS = {
    "rows": ("id", "step_time_s", "tokens_per_s_per_gpu", "memory_bytes_total", "error"),
    "collectives": ("id", "time_us", "busbw_gb_s", "error"),
    "components": ("id", "value", "error"),
    "finetune": ("id", "memory_bytes", "error"),
}
# Targets on the half that is shown: name, statistic, at most.
TARGETS = (
    ("step time, all but vTrain's single node", "median", 0.07),
    ("step time, all but vTrain's single node", "p95", 0.25),
    ("step time, vTrain's single node", "mean", 0.15),
    ("collectives", "median", 0.08),
    ("collectives", "p95", 0.25),
)
RANKED_RIGHT = 0.90
# Bands of the median signed error of all rows that have a feature, or of a source: what the model
# has now, and how far it may move. A term that is lost, or counted twice, moves one of them.
BANDS: dict[str, tuple[float, float]] = {
    "FSDP": (0.00, 0.02),
    "FSDP across nodes": (0.00, 0.02),
    "full recomputation": (0.00, 0.02),
    "sequences of 16k and longer": (-0.01, 0.02),
    "8 or 4 bits": (0.00, 0.02),
    "large vocabulary": (-0.02, 0.02),
    "context parallel": (-0.03, 0.02),
    "tensor parallel": (0.00, 0.02),
    "tensor parallel across nodes": (0.09, 0.03),
    "pipeline": (0.00, 0.02),
    "pipeline, interleaved": (0.01, 0.02),
    "ZeRO-3, tensor by tensor": (-0.03, 0.03),
    "experts": (-0.05, 0.03),
    "KempnerForge": (0.02, 0.03),
    "Megatron-LM README": (0.08, 0.04),
    "vTrain multi": (0.00, 0.02),
    published.SINGLE_NODE: (0.01, 0.03),
    "vtrain-a100-8": (0.02, 0.03),
    "H200x8": (0.02, 0.03),
}


def predict_row(row: dict) -> dict:
    """Return the prediction of a row of runs.csv; what could not be predicted is in `error`."""
    out = dict.fromkeys(COLUMNS["rows"], "")
    out["id"] = row.get("id") or ""
    try:
        read = published.read_row(row)
    except ValueError as error:
        return out | {"error": str(error)}
    found = predict(read.job, read.layout, read.cluster)
    out["step_time_s"] = f"{found.step_time_s:.6g}"
    out["tokens_per_s_per_gpu"] = f"{found.tokens_per_s_per_gpu:.6g}"
    out["memory_bytes_total"] = memory_of_row(row, read)
    return out


def memory_of_row(row: dict, read: published.Row) -> str:
    """Return bytes as the row counts them (allocated or reserved, which rank); else the fullest."""
    try:
        return f"{validate_memory.predicted_bytes(row):.6g}"
    except (ValueError, KeyError):
        held = memory.memory_of(read.job, read.layout, read.cluster.gpus_per_node)
        return f"{sum(held.values()):.6g}"


def predict_collective(row: dict) -> dict:
    """Return the prediction of a row of collectives.csv."""
    out = dict.fromkeys(COLUMNS["collectives"], "")
    out["id"] = row.get("id") or ""
    try:
        transfer = published.read_transfer(row)
    except ValueError as error:
        return out | {"error": str(error)}
    time_us = transfer.predicted_us()
    carried = transfer.size_bytes * collectives.bus_factor(transfer.kind, transfer.ranks)
    out["time_us"] = f"{time_us:.6g}"
    out["busbw_gb_s"] = f"{carried / time_us / 1e3:.6g}"
    return out


def predictions(kind: str, path: str) -> list[dict]:
    """Return the predictions of a file's rows.

    Raises: UsageError for a file that is no such table.
    """
    try:
        rows = published.read_table(Path(path))
    except (OSError, ValueError, csv.Error) as error:
        raise cli.UsageError(f"--{kind} {path}: {error}") from None
    if kind == "components":
        return validate_memory.predict_components(rows)
    if kind == "finetune":
        return validate_memory.predict_finetune(rows)
    predict_one = predict_row if kind == "rows" else predict_collective
    return [predict_one(row) for row in rows]


def write(lines: list[dict], columns: tuple[str, ...], path: str | None) -> None:
    """Write lines as CSV to a file, or to the screen."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    if not path:
        sys.stdout.write(text.getvalue())
        return
    try:
        Path(path).write_text(text.getvalue(), encoding="utf-8")
    except OSError as error:
        raise cli.UsageError(f"--predictions {path}: {error.strerror}") from None


def compare_steps(rows=None) -> list[Compared]:
    """Return all published runs with predicted step times, in seconds."""
    rows = published.read_all_runs() if rows is None else rows
    half = published.calibration_half(rows)
    return [
        Compared(
            row, row.step_time_s, step_seconds(row.job, row.layout, row.cluster), row.id in half
        )
        for row in rows
    ]


def compare_added() -> list[Compared]:
    """Return the runs added after the fit with predicted step times, in seconds."""
    return [
        Compared(row, row.step_time_s, step_seconds(row.job, row.layout, row.cluster), False)
        for row in published.read_added_runs()
    ]


def compare_collectives() -> list[Compared]:
    """Return all published collectives with predicted times, in us."""
    transfers = published.read_transfers(published.ANCHORS / "collectives.csv")
    half = published.calibration_half(transfers)
    return [
        Compared(each, each.time_us, each.predicted_us(), each.id in half) for each in transfers
    ]


def judged(steps: list[Compared], transfers: list[Compared]) -> dict[str, errors.Errors]:
    """Return the errors that targets are set for: of the shown half."""
    shown = [each for each in steps if not each.fitted]
    return {
        "step time, all but vTrain's single node": errors.errors_of(
            [each.error for each in shown if not errors.is_single(each.row)]
        ),
        "step time, vTrain's single node": errors.errors_of(
            [each.error for each in shown if errors.is_single(each.row)]
        ),
        "collectives": errors.errors_of([each.error for each in transfers if not each.fitted]),
    }


def verdicts(steps: list[Compared], transfers: list[Compared]) -> list[tuple[str, float, float]]:
    """Return (what, found, at most) of every target and band; a test asks for these alone."""
    found = judged(steps, transfers)
    lines = [
        (f"{name}: {part}", getattr(found[name], part), limit) for name, part, limit in TARGETS
    ]
    ranked, right = errors.strategy_pairs([e for e in steps if not e.fitted], within_group=True)
    lines.append(("pairs ranked wrongly", 1 - right / ranked, 1 - RANKED_RIGHT))
    lines += validate_memory.verdicts()
    lines += finetune_times.verdicts()
    biases = {name: own.bias for name, own in errors.feature_biases(steps).items()}
    for source, own in errors.by(transfers + steps, lambda row: row.short_source).items():
        biases[source] = errors.errors_of([each.error for each in own]).bias
    for name, (middle, room) in BANDS.items():
        lines.append((f"{name}: median signed error", abs(biases[name] - middle), room))
    return lines


def parse_args():
    parser = cli.Parser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    file = {"metavar": "FILE.csv"}
    add("--rows", **file, help="predict training runs: columns of data/runs.csv")
    add("--collectives", **file, help="predict times: columns of data/collectives.csv")
    add("--components", **file, help="formula tables: columns of data/memory_components.csv")
    add("--finetune", **file, help="fine-tuning: columns of data/finetune_memory.csv")
    add("--predictions", metavar="OUT.csv", help="where to write what is predicted (the screen)")
    args = parser.parse_args()
    args.kinds = [kind for kind in COLUMNS if getattr(args, kind)]
    if len(args.kinds) > 1:
        parser.error(f"one of --{', --'.join(args.kinds)} at a time")
    if args.predictions and not args.kinds:
        parser.error("--predictions needs --rows, --collectives, --components or --finetune")
    return args


def validate() -> int:
    """Compare every published figure, print the errors and judge them; return the exit code."""
    steps, transfers = compare_steps(), compare_collectives()
    validate_show.show_steps(steps, transfers)
    validate_show.show_added(compare_added())
    validate_memory.show()
    finetune_times.show()
    found = verdicts(steps, transfers)
    rows = [
        (name, f"{value:.4f}", f"{limit:g}", "yes" if value <= limit else "NO")
        for name, value, limit in found
    ]
    print(f"\n{table(rows, ('check', 'found', 'at most', 'ok'))}")
    failed = [name for name, value, limit in found if not value <= limit]
    if failed:
        print(f"FAILED: {'; '.join(failed)}")
        return 1
    print(f"OK: {len(found)} checks passed, published figures are predicted within their bands")
    return 0


def main() -> int:
    args = parse_args()
    if args.kinds:
        kind = args.kinds[0]
        lines = predictions(kind, getattr(args, kind))
        write(lines, COLUMNS[kind], args.predictions)
        if args.predictions:
            missed = sum(bool(line.get("error")) for line in lines)
            print(f"{args.predictions}: {len(lines)} rows, {missed} not predicted")
        return 0
    return validate()


if __name__ == "__main__":
    cli.run(main)
