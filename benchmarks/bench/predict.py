"""What the guide's own tools predict of the strategies of a sweep, beside what was measured.

Each tool is started as a script, once for each strategy; DIR/predictions.json keeps what it said.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench import launch
from bench.analysis import Analysis, Row
from bench.answer import STATE
from bench.store import OK
from bench.strategies import REFERENCE, REPOSITORY
from legacy_common.measure import GIB

KEPT = "predictions.json"
MEMORY, PLANNER = "02-fsdp/fsdp_memory.py", "planner/plan.py"
DDP, FSDP = "01-ddp-basics/ddp_training.py", "02-fsdp/fsdp_transformer.py"
HYBRID = "05-advanced/hybrid_parallelism.py"
PLANNED_PRECISION = "bf16-mixed"
# How far a measurement may be from its prediction. Of a peak kernels and buckets take a part; a
# step has launches and waits that the planner leaves out.
FAR = {"state": 0.02, "peak": 0.1, "sent": 0.05, "step": 0.5}


@dataclass
class Prediction:
    """One number of a strategy. Units: GiB, bytes or ms, as its name in FAR has them."""

    row: Row
    name: str
    measured: float
    predicted: float

    @property
    def ratio(self) -> float:
        return self.measured / self.predicted

    @property
    def far(self) -> bool:
        return abs(self.ratio - 1) > FAR[self.name]


def read(folder: Path) -> dict[str, dict[str, float]]:
    """Return what was predicted, by point: its id without the repeat. Nothing where nobody did."""
    path = folder / KEPT
    return json.loads(path.read_text()) if path.exists() else {}


def fill(analysis: Analysis) -> None:
    """Predict what has no prediction yet, and keep it in the sweep's folder."""
    folder = analysis.sweep.folder
    kept = read(folder)
    rows = [row for row in analysis.rows if row.label != REFERENCE and row.verdict.kind == OK]
    left = {name: row for row in rows if (name := name_of(row)) not in kept}
    hidden = not sys.stderr.isatty()
    for name, row in tqdm(left.items(), "predicting", disable=hidden, leave=False):
        kept[name] = predict(row.runs[0].record["point"], gpu_of(row))
        (folder / KEPT).write_text(json.dumps(kept, indent=2) + "\n")


def compared(rows: Sequence[Row], kept: dict[str, dict[str, float]]) -> list[Prediction]:
    """Return what was measured beside what was predicted: like with like.

    Of memory on a GPU the peak of the tensors. Older sweeps on the CPU have predictions of weights,
    gradients and optimizer state.
    """
    found = []
    for row in rows:
        before, peak = row.memory("before") or 0.0, row.median("peak_memory_gib")
        measured = {
            "state": row.memory(*STATE),
            "peak": peak and peak - before,
            "sent": row.median("bytes_sent_per_step"),
            "step": row.step_time_ms,
        }
        for name, value in kept.get(name_of(row), {}).items():
            if measured[name] is not None and value:
                found.append(Prediction(row, name, measured[name], value))
    return found


def name_of(row: Row) -> str:
    return row.runs[0].record["id"].partition("#")[0]


def gpu_of(row: Row) -> str:
    """Return the name of the GPU that measured a row; nothing where it was a CPU."""
    machine = (row.runs[0].record.get("results") or {}).get("machine") or {}
    return machine.get("gpu") or ""


def predict(point: dict[str, Any], gpu: str) -> dict[str, float]:
    """Return what the tools predict of a point, by name in FAR; what they cannot is not there."""
    flags = flags_of(point)
    if flags is None:
        return {}
    return of_memory_tool(point, flags, gpu) | of_planner(point, flags, gpu)


def flags_of(point: dict[str, Any]) -> argparse.Namespace | None:
    """Return a strategy's own flags; None where there is one that the tools do not know."""
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    add = parser.add_argument
    add("--sharding")
    add("--shard-group-size")
    add("--activation-checkpointing", choices=("none", "full"), default="none")
    add("--schedule", choices=("1f1b", "interleaved", "gpipe"), default="1f1b")
    for axis in ("--tp", "--pp"):
        add(axis, type=int, default=1)
    try:
        flags, others = parser.parse_known_args([str(word) for word in point.get("flags") or ()])
    except argparse.ArgumentError:
        return None
    return None if others else flags


def of_memory_tool(point: dict[str, Any], flags, gpu: str) -> dict[str, float]:
    """Return GiB of the peak of full sharding's tensors on a GPU, in bf16-mixed."""
    if not gpu or point["script"] != FSDP or point["precision"] != PLANNED_PRECISION:
        return {}
    if flags.sharding not in (None, "full"):
        return {}
    job = ("precision", "seq_len", "micro_batch_size", "world_size")
    words = ["--preset", point["preset"]]
    words += ["--activation-checkpointing", flags.activation_checkpointing]
    words += [word for name in job for word in (f"--{name.replace('_', '-')}", point[name])]
    metrics = run(MEMORY, words)
    return {"peak": metrics["predicted_peak_gib"]} if metrics else {}


def of_planner(point: dict[str, Any], flags, gpu: str) -> dict[str, float]:
    """Return the bytes of a step, and on a GPU that it knows its ms and the template's peak."""
    script, ranks = point["script"], point["world_size"]
    # hybrid_parallelism.py's grad-op gathers and reduces once a step.
    of_fsdp, of_hybrid = {"grad-op": 2, "full": 3}, {"replicate": 0, "grad-op": 1, "full": 3}
    zero = {
        DDP: 0, FSDP: of_fsdp.get(flags.sharding or "full"),
        HYBRID: of_hybrid.get(flags.sharding or "grad-op"),
    }.get(script)  # fmt: skip
    # Asked about bfloat16 alone; DDP sends float32 gradients in either precision.
    if zero is None or (point["precision"] != PLANNED_PRECISION and script != DDP):
        return {}
    words = ["--model", point["preset"], "--gpus", ranks]
    words += ["--tp", flags.tp, "--pp", flags.pp, "--dp", ranks // (flags.tp * flags.pp)]
    words += ["--zero", zero, "--recompute", flags.activation_checkpointing]
    words += ["--interleave", 2] * (flags.schedule == "interleaved")
    job = ("seq_len", "global_batch_size", "micro_batch_size")
    words += [word for name in job for word in (f"--{name.replace('_', '-')}", point[name])]
    on_gpu = run(PLANNER, ["predict", "--json", *words, "--gpu", gpu]) if gpu else {}
    plan = on_gpu or run(PLANNER, ["predict", "--json", *words])  # it may not know this GPU
    found = {"sent": sum(axis["step_bytes"] for axis in plan.get("axes", {}).values())}
    if on_gpu and point["precision"] == PLANNED_PRECISION:
        if script == HYBRID and flags.schedule != "gpipe":  # which keeps all micro-batches
            found["peak"] = plan["memory_bytes"]["total"] / GIB
        found["step"] = plan["step_time_s"] * 1e3
    return found


def run(script: str, words: Sequence[Any]) -> dict[str, Any]:
    """Start a tool; return its JSON, or results.json's metrics; nothing where it refuses."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "tool")
        command = [sys.executable, script, *map(str, words)]
        if script != PLANNER:
            command += ["--output-dir", str(output), "--device", "cpu"]
        how = {"cwd": REPOSITORY, "env": launch.clean_environ(launch.TORCHRUN, 1)}
        ended = subprocess.run(command, capture_output=True, check=False, **how)
        if script == PLANNER:
            return {} if ended.returncode else json.loads(ended.stdout)
        results = output / "results.json"
        return json.loads(results.read_text())["metrics"] if results.exists() else {}
