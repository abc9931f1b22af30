"""Step times of LoRA and QLoRA that others published (data/finetune_times.csv), predicted.

Answer.AI's rows calibrate `matrix.ada-geforce` and `finetune.NF4_RATE`; the others are shown.
Rank and targets are those of the sources' scripts: `train.py`, `recipes/configs/llama3_1`.
"""

from __future__ import annotations

from statistics import median

from planner import models, published
from planner.hardware import Cluster, find_gpu
from planner.job import Job, Layout
from planner.plan_text import table
from planner.rates import RATES
from planner.step import step_of_adapters

FITTED = "AnswerDotAI"
QUANT = {"lora": "", "qlora": "nf4-dq"}


def read_run(row: dict[str, str]) -> tuple[Job, Layout, Cluster, float]:
    """Return what a row trains, how and on what, and the seconds of its micro-batch."""
    gpus, micro_batch, seq_len = (int(row[n]) for n in ("n_gpus", "micro_batch", "seq_len"))
    job = Job(
        models.MODELS[row["model"]],
        seq_len,
        gpus * micro_batch,
        compiled=row["compiled"] == "1",
        frozen=True,
        adapter_rank=int(row["rank"]),
        adapter_targets=tuple(row["targets"].split()),
        quant=QUANT[row["method"]],
        unpacks_slowly=row["kernels"] == "2024",
    )
    layout = Layout(
        dp=gpus, zero=int(row["zero"]), micro_batch=micro_batch, recompute=row["recompute"]
    )
    seconds = job.global_batch * seq_len / float(row["tokens_per_s"])
    return job, layout, Cluster(find_gpu(row["gpu"])), seconds


def time_rows() -> list[dict]:
    """Return id, source and error (predicted over published step time, less 1) of every row."""
    rows = []
    for row in published.read_table(published.ANCHORS / "finetune_times.csv"):
        job, layout, cluster, seconds = read_run(row)
        found = sum(step_of_adapters(job, layout, cluster, RATES).values())
        rows.append({"id": row["id"], "source": row["source"], "error": found / seconds - 1})
    return rows


def summary(fitted: bool) -> dict[str, float]:
    """Return rows, and median, largest and median signed error, of the calibrating rows or not."""
    errors = [row["error"] for row in time_rows() if row["source"].startswith(FITTED) == fitted]
    sizes = [abs(error) for error in errors]
    return {
        "rows": len(errors), "median": median(sizes), "largest": max(sizes), "bias": median(errors),
    }  # fmt: skip


def verdicts() -> list[tuple[str, float, float]]:
    """Return (what, found, at most): how far each source's median may be off."""
    return [
        ("Answer.AI: LoRA and QLoRA, median", summary(True)["median"], 0.11),
        ("the others: LoRA and QLoRA, median", summary(False)["median"], 0.21),
    ]


def show() -> None:
    """Print the errors of both sources."""
    lines = []
    for name, fitted in (("Answer.AI (calibrates)", True), ("torchtune, lightserve", False)):
        own = summary(fitted)
        sizes = (f"{own['median']:.0%}", f"{own['largest']:.0%}", f"{own['bias']:+.0%}")
        lines.append((name, str(own["rows"]), *sizes))
    print("\nStep time of LoRA and QLoRA: size of the error")
    print(table(lines, ("source", "rows", "median", "largest", "bias")))
