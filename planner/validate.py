"""Compare predicted step times and memory with published figures, source by source.

    all figures of planner/data    python planner/validate.py
    your runs                      add --rows FILE.csv --predictions OUT.csv

Constants were fitted on half of the rows (calibrate.py). Look for the errors of the
other half, and of the rows that were collected later. The exit code is 1 if an error
exceeds its limit.
"""

import csv
import io
import sys
from pathlib import Path

from planner import cli, errors, memory, published
from planner.errors import Compared
from planner.finetune import memory_of_finetune
from planner.hardware import DATA
from planner.memory import GIB
from planner.models import MODELS
from planner.plan_text import table
from planner.published import SINGLE_NODE, PublishedRun, read_table
from planner.step import predict

COLUMNS = (
    "id",
    "step_time_s",
    "tokens_per_s_per_gpu",
    "memory_bytes_total",
    "error",
)
# Limits of the errors of rows that no constant was fitted on.
LIMITS = (
    ("step time, training of all weights", "median", 0.05),
    ("step time, training of all weights", "p95", 0.22),
    ("step time, vTrain single", "median", 0.10),
    ("step time, adapters", "median", 0.15),
    ("rows of 2026", "median", 0.15),
    ("memory", "median", 0.02),
    ("memory", "p95", 0.15),
    ("collectives", "median", 0.10),
)
MOST_WRONG = 0.15  # of pairs of layouts: ranked the wrong way round
# Sources with large errors, and facts that the model does not know.
MISSED = {
    "torchtitan": "405B in a pipeline takes 1.4 times the predicted time",
    "Megatron-LM README": "micro-batch, schedule and recomputation are not published",
    "MT-NLG": "DeepSpeed's pipeline of 2021 gave 126 TFLOP/s, Megatron-LM 159 (SC21)",
    "fms-fsdp": "its network is not published; the usual card of an A100 is faster",
    "InternEvo": "ZeRO-1 over 256 GPUs and more loses time that no byte explains",
    "TinyLlama": "its fused kernels count as eager PyTorch",
    "Transformer Engine": "one GPU, micro-batch not published; one row sets MI300X",
}


# Step times


def lines_of(groups: dict[str, list[Compared]], shown: str) -> list[tuple]:
    """Return a line for each source: the errors of the rows of a set."""
    peers = {row["id"]: row for row in peer_rows()}
    lines = []
    for name, rows in groups.items():
        unseen = [row.error for row in rows if row.run.set == shown]
        fitted = [row.error for row in rows if row.run.set == "fit"]
        if not unseen:
            continue
        line = (name, *statistics(unseen))
        if shown == "shown":
            median = f"{errors.errors_of(fitted).median:.1%}" if fitted else "-"
            row = peers.get(name, {})
            others = (row.get(c, "-") for c in ("one_mfu", "calculon", "llm_analysis"))
            line = (*line, median, *others)
        lines.append(line)
    return lines


def statistics(values) -> tuple[str, ...]:
    """Return the number of rows, median, 95th percentile and median sign as text."""
    summary = errors.errors_of(values)
    sizes = f"{summary.median:.1%}", f"{summary.p95:.1%}", f"{summary.bias:+.1%}"
    return str(summary.count), *sizes


def peer_rows() -> list[dict[str, str]]:
    """Return median/p95 errors of other models on these sources (data/peers.csv)."""
    return read_table(DATA / "peers.csv")


def show_steps(steps: list[Compared]) -> None:
    """Print errors by source and by feature."""
    statistic = ("rows", "median", "p95", "bias")
    groups = errors.group_by(steps, lambda run: run.source_name)
    groups["all but vTrain single"] = dense_steps(steps)
    print("Step time: errors of the half that no constant was fitted on")
    others = ("fitted", "one MFU", "Calculon", "llm-analysis")
    print(table(lines_of(groups, "shown"), ("source", *statistic, *others)))
    print("\nStep time: rows that were collected after the fit")
    later = [row for row in steps if row.run.set == "later"]
    groups = errors.group_by(later, lambda run: kind_and_source(run))
    print(table(lines_of(groups, "later"), ("source", *statistic)))
    print("\nStep time: rows of 2026")
    rows = [
        (row.run.id, f"{row.measured:.3f}", f"{row.predicted:.3f}", f"{row.error:+.1%}")
        for row in steps
        if row.run.set == "2026"
    ]
    print(table(rows, ("run", "published, s", "predicted, s", "error")))
    print("\nStep time: all rows by what a run has, without vTrain single")
    others = [row for row in steps if row.run.source_name != SINGLE_NODE]
    rows = [
        (name, str(e.count), f"{e.median:.1%}", f"{e.p95:.1%}", f"{e.bias:+.1%}")
        for name, e in errors.by_feature(others).items()
    ]
    print(table(rows, ("feature", *statistic)))
    for name, why in MISSED.items():
        print(f"{name}: {why}")


def kind_and_source(run: PublishedRun) -> str:
    experts = ", experts" if run.job.model.experts else ""
    return f"{run.source_name}{experts}"


def dense_steps(steps: list[Compared]) -> list[Compared]:
    """Return the runs that train all weights, without vTrain's single node."""
    return [
        row
        for row in steps
        if row.run.source_name != SINGLE_NODE and not row.run.job.adapter_rank
    ]


# Memory and collectives


def predicted_bytes(run: PublishedRun) -> float:
    """Return the predicted peak in the way in which a run's source counts it.

    Rank 0 is on the first stage. Reserved memory includes the allocator's waste.
    """
    if "rank 0" in run.memory_kind:
        parts = memory.memory_of_stage(run.job, run.layout, 0)
    else:
        parts = memory.memory_of(run.job, run.layout)
    total = sum(parts.values())
    return memory.reserved(total) if "reserved" in run.memory_kind else total


def finetune_arguments(row: dict[str, str]) -> dict:
    """Return the arguments of memory_of_finetune in a row of finetune_memory.csv."""
    numbers = {name: int(row[name]) for name in ("seq_len", "micro_batch", "rank")}
    flags = {
        name: row[name] == "1" for name in ("mixed", "equal_steps", "frees_frozen")
    }
    return (
        numbers
        | flags
        | {
            "model": MODELS[row["model"]],
            "method": row["method"],
            "quant": row["quant"],
            "targets": tuple(row["targets"].split()),
            "gpus": int(row["gpus"]),
            "recompute": row["recompute"] == "1" if row["recompute"] else None,
        }
    )


def memory_errors(runs: list[PublishedRun]) -> dict[str, list[float]]:
    """Return the signed errors of published peaks of memory, by source."""
    by_source: dict[str, list[float]] = {}
    for run in runs:
        if run.memory_gib:
            error = predicted_bytes(run) / run.memory_gib / GIB - 1
            by_source.setdefault(f"{run.source_name} {run.set}", []).append(error)
    for row in read_table(DATA / "finetune_memory.csv"):
        if row["memory_gib"] not in ("", "OOM"):
            held = sum(memory_of_finetune(**finetune_arguments(row)).values())
            error = held / float(row["memory_gib"]) / GIB - 1
            by_source.setdefault(f"litgpt {row['set']}", []).append(error)
    return by_source


def collective_errors() -> dict[str, list[float]]:
    """Return the signed errors of published times of collectives, by source."""
    by_source: dict[str, list[float]] = {}
    for row, call, cluster in published.read_collectives():
        error = call.seconds(cluster) * 1e6 / float(row["time_us"]) - 1
        by_source.setdefault(row["source_name"], []).append(error)
    return by_source


# Runs of a user


def predict_row(row: dict[str, str]) -> dict[str, str]:
    """Return the prediction of a row; `error` says why there is none."""
    out = dict.fromkeys(COLUMNS, "") | {"id": row["id"]}
    try:
        run = published.read_run(row)
        plan = predict(run.job, run.layout, run.cluster)
    except ValueError as error:
        return out | {"error": str(error)}
    return out | {
        "step_time_s": f"{plan.step_time_s:.6g}",
        "tokens_per_s_per_gpu": f"{plan.tokens_per_s_per_gpu:.6g}",
        "memory_bytes_total": f"{plan.memory_total:.6g}",
    }


def predict_file(rows_path: str, out_path: str | None) -> None:
    """Write the predictions of a file's rows.

    Raises: CommandLineError if the file cannot be read or is not such a table.
    """
    try:
        rows = read_table(Path(rows_path))
    except (OSError, ValueError, csv.Error) as error:
        raise cli.CommandLineError(f"--rows {rows_path}: {error}") from None
    lines = [predict_row(row) for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    if not out_path:
        sys.stdout.write(text.getvalue())
        return
    try:
        Path(out_path).write_text(text.getvalue(), encoding="utf-8")
    except OSError as error:
        raise cli.CommandLineError(
            f"--predictions {out_path}: {error.strerror}"
        ) from None
    missed = sum(bool(line["error"]) for line in lines)
    print(f"{out_path}: {len(lines)} rows, {missed} not predicted")


# The verdict


def unseen_errors(runs: list[PublishedRun]) -> dict[str, list[float]]:
    """Return the errors with a limit: only of rows that no constant was fitted on."""
    steps = errors.compare_steps(run for run in runs if run.set != "fit")
    dense = [row for row in dense_steps(steps) if row.run.set == "shown"]
    single = [row for row in steps if row.run.source_name == SINGLE_NODE]
    tuned = [row for row in steps if row.run.job.adapter_rank]
    new = [row for row in steps if row.run.set == "2026"]
    held = memory_errors(runs)
    peaks = [e for name, each in held.items() if "fit" not in name for e in each]
    links = [e for each in collective_errors().values() for e in each]
    named = zip(
        ("training of all weights", "vTrain single", "adapters"),
        (dense, single, tuned),
        strict=True,
    )
    unseen = {f"step time, {name}": [row.error for row in rows] for name, rows in named}
    unseen["rows of 2026"] = [row.error for row in new]
    return unseen | {"memory": peaks, "collectives": links}


def verdicts(runs: list[PublishedRun]) -> list[tuple[str, float, float]]:
    """Return (name, error, limit) of each check."""
    unseen = unseen_errors(runs)
    lines = []
    for name, part, limit in LIMITS:
        value = getattr(errors.errors_of(unseen[name]), part)
        lines.append((f"{name}: {part}", value, limit))
    steps = errors.compare_steps(run for run in runs if run.set == "shown")
    ranked, correct = errors.strategy_pairs(steps)
    lines.append(("pairs ranked wrongly", 1 - correct / ranked, MOST_WRONG))
    return lines


def validate() -> int:
    """Compare every published figure, print the errors, return the exit code."""
    runs = published.read_runs()
    show_steps(errors.compare_steps(runs))
    statistic = ("source", "rows", "median", "p95", "bias")
    print("\nMemory: errors of rows that were fitted on (fit) and of others")
    rows = [(name, *statistics(values)) for name, values in memory_errors(runs).items()]
    print(table(rows, statistic))
    print("\nCollectives of 64 MiB and more")
    rows = [(name, *statistics(values)) for name, values in collective_errors().items()]
    print(table(rows, statistic))
    checks = verdicts(runs)
    rows = [
        (name, f"{value:.4f}", f"{limit:.2f}", "yes" if value <= limit else "NO")
        for name, value, limit in checks
    ]
    print(f"\n{table(rows, ('check', 'value', 'at most', 'ok'))}")
    failed = [name for name, value, limit in checks if not value <= limit]
    if failed:
        print(f"FAILED: {'; '.join(failed)}")
        return 1
    print(f"OK: {len(checks)} checks passed")
    return 0


def main() -> int:
    parser = cli.PlannerParser(description=__doc__.splitlines()[0])
    file = {"metavar": "FILE.csv"}
    parser.add_argument("--rows", **file, help="predict runs: columns of data/runs.csv")
    parser.add_argument(
        "--predictions", **file, help="where to write predictions (the screen)"
    )
    args = parser.parse_args()
    if args.predictions and not args.rows:
        parser.error("--predictions needs --rows")
    if args.rows:
        predict_file(args.rows, args.predictions)
        return 0
    return validate()


if __name__ == "__main__":
    cli.run(main)
