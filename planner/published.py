"""Published training runs (data/runs.csv) as jobs, layouts and clusters.

The columns are the fields of planner/job.py, and an empty cell stands for the default.
Some sources leave values out, and the table has assumptions instead. The column
`assumed` names these for the newest rows, and validate.md lists the others.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, fields
from pathlib import Path

from planner import models
from planner.communication import Call
from planner.hardware import DATA, Cluster, cluster_of, find_gpu
from planner.job import Layout, ModelShape, TrainingJob

SINGLE_NODE = "vTrain single"  # 860 rows of small models on up to 8 GPUs
# Other names of columns and values, as published tables spell them.
COLUMNS = {
    "seq": "seq_len",
    "n_gpus": "gpus",
    "vpp": "virtual_stages",
    "act_ckpt": "recompute",
    "sharding": "zero",
    "seq_parallel": "sequence_parallel",
    "compile": "compiled",
    "gated_mlp": "gated",
}
VALUES = {
    "zero": {"ddp": "0", "zero1": "1", "zero2": "2", "zero3": "3", "fsdp": "3"}
    | {"distributed_optimizer": "1", "fsdp_zero3": "3", "fsdp_zero2": "2"}
    | {"full_shard": "3", "shard_grad_op": "2"},
    "recompute": {"true": "full", "1": "full", "false": "none", "0": "none"}
    | {"selective_op": "operators", "selective_attention": "selective"},
}
YES, NO = ("1", "true", "yes"), ("0", "false", "no")


@dataclass(frozen=True)
class PublishedRun:
    """One published run: its job and layout, and the measured values."""

    id: str
    set: str  # fit: constants are fitted on it; shown, later, 2026: they are not
    source_name: str
    group: str
    job: TrainingJob
    layout: Layout
    cluster: Cluster
    step_time_s: float
    memory_gib: float
    memory_kind: str  # allocated or reserved; of all ranks, or of rank 0


def typed(cls, row: dict[str, str]) -> dict:
    """Return the cells of a row that are fields of a dataclass, in their types.

    Raises: ValueError naming the column.
    """
    values = {}
    for field in fields(cls):
        text = row.get(field.name, "")
        if not text:
            continue
        if field.type == "bool":
            if text.lower() not in YES + NO:
                raise ValueError(f"{field.name} must be 1 or 0, not {text!r}")
            values[field.name] = text.lower() in YES
        elif field.type == "int":
            if not text.isdecimal():
                raise ValueError(f"{field.name} must be a whole number, not {text!r}")
            values[field.name] = int(text)
        elif field.type == "str":
            values[field.name] = text
        elif field.type.startswith("tuple"):
            values[field.name] = tuple(text.split())
    return values


def model_of(row: dict[str, str]) -> ModelShape:
    """Return the shape of a row's sizes, or of its model's name. Raises: ValueError."""
    name = row.get("model", "")
    sizes = typed(ModelShape, row | {"name": name})
    if "hidden" not in sizes:
        return models.find_model(name)
    sizes.setdefault("kv_heads", sizes.get("heads"))
    missing = [
        field.name for field in fields(ModelShape)[:6] if sizes.get(field.name) is None
    ]
    if missing:
        raise ValueError(f"the model lacks {', '.join(missing)}")
    return ModelShape(**sizes)


def read_run(row: dict[str, str]) -> PublishedRun:
    """Return a row of runs.csv as job, layout and cluster.

    Raises: ValueError for a column that is missing or wrong, an unknown model or GPU.
    """
    row = {COLUMNS.get(name, name): text for name, text in row.items()}
    for column, values in VALUES.items():
        text = row.get(column, "").lower()
        row[column] = values.get(text, text)
    model = model_of(row)
    gpu = find_gpu(row.get("gpu", ""))
    layout = typed(Layout, row)
    others = 1
    for axis in ("tp", "cp", "pp"):
        others *= layout.get(axis, 1)
    if "dp" not in layout and row.get("gpus"):
        layout["dp"] = max(1, int(row["gpus"]) // others)
    layout = Layout(**layout)
    job = {"seq_len": 2048, "global_batch": layout.dp * layout.micro_batch}
    job |= typed(TrainingJob, row)
    if gpu.family == "volta" and "precision" not in job:
        job["precision"] = "fp16"
    cluster = cluster_of(
        gpu,
        gpus_per_node=int(number(row, "gpus_per_node")) or None,
        network_gb_s=number(row, "network_gb_s") or None,
    )
    texts = [row.get(name, "") for name in ("id", "set", "source_name", "group")]
    measured = number(row, "step_time_s"), number(row, "memory_gib")
    kind = row.get("memory_kind", "")
    return PublishedRun(
        *texts, TrainingJob(model, **job), layout, cluster, *measured, kind
    )


def number(row: dict[str, str], column: str) -> float:
    """Return a column's number, or 0 for an empty cell. Raises: ValueError."""
    text = row.get(column) or "0"
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{column} must be a number, not {text!r}") from None


def read_table(path: Path) -> list[dict[str, str]]:
    """Return a CSV file's rows. Missing cells of a short line are empty.

    Raises: ValueError if it has no rows or no `id`.
    """
    with Path(path).open(newline="", encoding="utf-8-sig") as file:
        rows = [
            {name.strip(): (value or "").strip() for name, value in row.items() if name}
            for row in csv.DictReader(file)
        ]
    if not rows:
        raise ValueError(f"{path}: no rows")
    if "id" not in rows[0]:
        raise ValueError(f"{path}: no column `id`")
    return rows


def read_runs(single_node: bool = True) -> list[PublishedRun]:
    """Return all published runs of the repository."""
    names = ("runs.csv", "runs_single_node.csv")
    tables = [read_table(DATA / name) for name in names[: 1 + single_node]]
    return [read_run(row) for table in tables for row in table]


def read_collectives() -> list[tuple[dict[str, str], Call, Cluster]]:
    """Return the rows of collectives.csv, of messages from 64 MiB on."""
    calls = []
    for row in read_table(DATA / "collectives.csv"):
        gpu = find_gpu(row["gpu"])
        ranks, nodes = int(row["ranks"]), int(row["nodes"])
        cluster = cluster_of(gpu, network_gb_s=float(row["network_gb_s"]))
        call = Call(row["kind"], float(row["size_bytes"]), ranks, nodes)
        calls.append((row, call, cluster))
    return calls
