"""Published memory beside the model's: training runs, formula tables, fine-tuning.

Two numbers are fitted, on the rows that `held_out` does not keep: RESERVED (memory.py) and LOGIT
(finetune.py). All else are formulas of papers and facts of the libraries' code (stacks.py), which
were read there and compared with all rows while they were written.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from pathlib import Path
from statistics import median

from planner import memory, models, names, published
from planner.compute import layer_seconds
from planner.finetune import memory_of_finetune
from planner.hardware import GPUS, Cluster
from planner.job import Job, Layout, Model
from planner.plan_text import table
from planner.published import number, read_table, whole
from planner.rates import RATES
from planner.step import tensor_seconds

GIB = 2**30
BYTES_OF_UNIT = {"GiB": GIB, "GB(1e9)": 1e9}


def held_out(group: str) -> bool:
    """Tell whether a family of rows is kept for judging: its SHA-256 is odd.

    A family is the first two parts of `group`: a table, or a configuration with all its rows.
    """
    family = "|".join(group.split("|")[:2])
    return hashlib.sha256(family.encode()).digest()[-1] % 2 == 1


def published_bytes(row: dict[str, str]) -> float | None:
    """Return a row's measured bytes, or None where it has none (OOM, not said, not measured)."""
    value = number(row, "mem_value")
    if value is None or row.get("kind") != "measured":
        return None
    return value * BYTES_OF_UNIT[row["mem_unit"]]


# --- Training runs: runs.csv ---


def run_of(row: dict[str, str]) -> tuple[Job, Layout]:
    """Return a row of runs.csv as published.py does, with what only memory depends on.

    SimuMax fuses the loss and sends sequences by all-to-all; torchtitan compiles its loss since
    2025 (its H200 row); KempnerForge's pipelines have no sequence parallelism; of Thunder's
    executors only torchcompile recomputes what it fused.
    """
    found = published.read_row(row)
    job, layout = found.job, found.layout
    text = f"{row.get('notes')} {row.get('source')}"
    fused = "cross-entropy fusion" in text or "torchtitan benchmarks/llama3-8b_h200" in text
    compiled = job.compiled
    if job.stack == "thunder":
        compiled = "torchcompile" in row["compile"]
    job = replace(job, fused_loss=fused, compiled=compiled)
    if "SimuMax" in text:
        layout = replace(layout, cp_kind="ulysses")
    if job.stack == "kempnerforge" and layout.pp > 1:
        layout = replace(layout, sequence_parallel=False)
    return job, layout


def predicted_bytes(row: dict[str, str]) -> float:
    """Return the bytes that the model predicts for a row of runs.csv, as its mem_kind counts.

    A peak that is not said to be the largest of all ranks was logged by rank 0: the first stage.
    Raises: ValueError where a row says too little.
    """
    job, layout = run_of(row)
    kind = row.get("mem_kind") or ""
    parts = memory.memory_of(job, layout)
    if kind and "max_over_ranks" not in kind:
        parts = memory.memory_of_stage(job, layout, 0)
    total = sum(parts.values())
    return memory.reserved(total) if "reserved" in kind else total


# --- Formula tables: memory_components.csv ---

# DeepSpeed's examples: t5-3b's largest module is its table of 32,128 x 1,024.
LARGEST = {"t5-3b": 32_128 * 1_024}
ZERO_STAGES = {"zero0": 0, "zero1": 1, "zero2": 2, "zero3": 3}
LAYER_TIMES = {"layer_forward_ms", "layer_backward_ms", "layer_combined_ms"}


def gpt_of(row: dict[str, str]) -> Model:
    """Return the GPT of a row of Korthikanti's figures."""
    hidden, heads = whole(row, "hidden"), whole(row, "heads")
    more = {"gated": False, "biases": True, "tied_embeddings": True}
    vocab = whole(row, "vocab", 51_200)
    return Model(whole(row, "layers"), hidden, heads, heads, 4 * hidden, vocab, **more)


def korthikanti_of(row: dict[str, str], recompute: str, sequence_parallel: bool) -> float:
    """Return figure 1's or 7's bytes of activations on the first stage, embeddings left out."""
    model = gpt_of(row)
    tp, pp = whole(row, "tp", 1), whole(row, "pp", 1)
    micro = whole(row, "micro_batch", 1)
    # Section 6: 175B and 530B interleave three stages, 1T has too few layers on a stage.
    virtual = 3 if pp > 1 and model.layers // pp % 3 == 0 else 1
    layout = Layout(
        tp=tp,
        pp=pp,
        micro_batch=micro,
        recompute=recompute,
        sequence_parallel=sequence_parallel,
        virtual_stages=virtual,
    )
    batch = micro * pp * virtual
    job = Job(model, whole(row, "seq"), batch, flash=False, dropout=True, stack="megatron")
    flying = memory.in_flight(pp, 0, batch, virtual)
    kept = memory.kept_bytes(job, layout, 0) * model.layers / pp * flying
    if "pct" in row["quantity"] and pp == 1:
        kept += memory.edge_bytes(job, layout)
    return memory.tokens_of(job, layout) * kept


def layer_ms_of(row: dict[str, str]) -> float:
    """Return table 4's milliseconds of a layer, of the model of times: measured on A100s.

    Recomputation is part of backward: forward again, or attention's core alone.
    """
    tp, kind = whole(row, "tp", 1), row["act_ckpt"].split("_")[0]
    layout = Layout(
        tp=tp,
        micro_batch=whole(row, "micro_batch", 1),
        sequence_parallel=row["seq_parallel"] == "1",
    )
    model, seq_len = gpt_of(row), whole(row, "seq")
    job = Job(model, seq_len, layout.micro_batch, "fp16", flash=False, dropout=True)
    job = replace(job, stack="megatron")
    cluster = Cluster(GPUS["a100"])
    layer = layer_seconds(job, layout, cluster, RATES)
    sent = tensor_seconds(job, layout, cluster, RATES) / 2
    forward = layer.forward + sent
    again = {"none": 0.0, "full": forward, "selective": layer.core}[kind]
    backward = layer.backward + sent + again
    total = {"forward": forward, "backward": backward, "combined": forward + backward}
    return 1e3 * total[row["quantity"].split("_")[1]]


def component_of(row: dict[str, str]) -> float | None:
    """Return what the models say for a row of memory_components.csv, in the row's unit.

    None where they say nothing of its quantity.
    """
    quantity = row["quantity"]
    weights = (number(row, "params_b") or 0) * 1e9
    unit = 1e9 if row["unit"].startswith("GB") else GIB
    sharding = published.stage_name(row["sharding"])
    if row["group"].startswith("zero"):
        job = Job(gpt_of(row), 1, 1, gradient_bytes=2, stack="deepspeed")
        ranks = whole(row, "dp") or whole(row, "n_gpus")
        layout = Layout(dp=ranks, zero=ZERO_STAGES[sharding])
        return sum(memory.states(job, layout, (weights, 0.0)).values()) / unit
    if row["group"].startswith("ds-"):
        largest = LARGEST.get(row["model"], 0)
        if row["group"].startswith("ds-z3"):
            weights = memory.T5_3B
        gpu, host = memory.deepspeed_estimate(
            weights,
            largest,
            whole(row, "n_gpus"),
            stage=3 if "zero3" in sharding else 2,
            parameters_on_host="param=cpu" in sharding,
            optimizer_on_host="opt=cpu" in sharding or "offload_optimizer=cpu" in sharding,
            sharded_at_start="zero_init=1" in sharding,
        )
        return (host if quantity == "host_ram" else gpu) / unit
    if quantity.startswith("params+optimizer"):
        model = gpt_of(row)
        share = (
            models.matrix_parameters(model, 0)
            * model.layers
            / whole(row, "tp", 1)
            / whole(row, "pp", 1)
        )
        job = Job(model, 1, 1, stack="megatron")
        return sum(memory.states(job, Layout(), (share, 0.0)).values()) / unit
    if quantity.startswith("activation"):
        kind = {"selective_attention": "selective"}.get(row["act_ckpt"], row["act_ckpt"])
        value = korthikanti_of(row, kind, row["seq_parallel"] == "1")
        if "pct" in quantity:
            return 100 * value / korthikanti_of(row, "none", False)
        return value / unit
    return layer_ms_of(row) if quantity in LAYER_TIMES else None


# --- Fine-tuning: finetune_memory.csv ---

FINETUNED = {
    "llama 2 7": "llama2-7b", "llama-2-7b": "llama2-7b", "llama 2 13": "llama2-13b",
    "llama 2 70": "llama2-70b", "llama-3.1-8b": "llama3-8b", "llama-3-8b": "llama3-8b",
    "llama-3.2-1b": "llama3.2-1b", "llama-3.2-3b": "llama3.2-3b", "mistral-7b": "mistral-7b",
    "tiny": "tinyllama-1.1b", "gemma2-2b": "gemma-2-2b", "gemma-2-2b": "gemma-2-2b",
    "gemma2-9b": "gemma-2-9b", "gemma-2-9b": "gemma-2-9b", "gemma-2b": "gemma-2b",
    "gemma-7b": "gemma-7b", "phi-3": "phi-3-mini", "phi-1.5": "phi-1.5", "phi-2": "phi-2",
    "falcon 40": "falcon-40b", "falcon-40b": "falcon-40b", "falcon-7b": "falcon-7b",
    "falcon 7": "falcon-7b", "stablelm": "stablelm-alpha-3b",
}  # fmt: skip
# The source's lines of these rows say gemma2-2b/lora.yaml and gemma2b/qlora.yaml of Gemma 2.
RENAMED = {"F055": "gemma-2-2b", "F056": "gemma-2-2b"}
EVERYWHERE = ("query", "key", "value", "projection", "mlp", "head")
DEVICES = {"stablelm-alpha-3b": 2}  # of full.yaml, on a machine of four
STATES = 8  # bytes a weight of full training in 16 bits
LONGEST = {"stablelm": 1_034}  # tokens, where a row says nothing (resource-tables.md)


def method_of(row: dict[str, str]) -> tuple[str, str]:
    """Return what is trained and the frozen weights' quantization, however they are spelled.

    QLoRA that names no quantization has NF4 with double quantization (Dettmers et al., 2023).
    """
    said = re.sub(r"[^a-z0-9]+", "_", (row.get("method") or "").lower())
    method = "lora" if "lora" in said else "full" if said[:4] in ("full", "sft") else said
    told = (row.get("quant") or "").lower().replace("bnb.", "")
    quant = "" if told in ("", "none", *published.NO) else told
    if re.search(r"nf4|int4|4.?bit", quant):
        quant = "nf4-dq" if re.search("dq|double", quant) else "nf4"
    return method, "nf4-dq" if "qlora" in said and not quant else quant


def finetune_arguments(row: dict[str, str]) -> dict:
    """Return what a row of finetune_memory.csv trains, as arguments of memory_of_finetune.

    Defaults of litgpt's files (config_hub): rank 32 on queries and values; Gemma and Phi adapt
    every matrix (rank 16 in 4 bits, else 8). LoRA's files say `devices: 1` whatever the machine
    has. Full training whose states exceed the GPU ran on the tables' other machine, of four.
    Samples are cut at 512 tokens. Its tables of 2023: rank 8 on queries and values, the
    longest sample first. Other sources: what their notes say of checkpointing and sharding.

    Raises: ValueError for a model without a shape.
    """
    name = row["model"].lower()
    known = RENAMED.get(row["id"])
    known = known or next((v for k, v in FINETUNED.items() if name.startswith(k)), name)
    model = models.MODELS.get(known) or names.known_model(known)
    if model is None:
        raise ValueError(f"no shape of {row['model']!r}")
    hub = (row.get("group") or "").startswith("hub")
    everywhere = hub and known.startswith(("gemma", "phi"))
    method, quant = method_of(row)
    rank = 8
    if hub and not everywhere:
        rank = 32
    elif everywhere and quant and known.startswith("gemma"):
        rank = 16
    gpus = whole(row, "n_gpus") or 1
    text = f"{row.get('source')} {row.get('notes')} {row.get('sharding')}".lower()
    stage = published.stage_name(text)
    if method != "full" and re.search(r"\bddp\b|zero[012]", stage):
        gpus = 1  # each has all that is frozen
    recompute = True if "checkpointing" in text else None
    if re.search(r"(no|without)( \w+)? checkpointing", text):
        recompute = False
    if hub and gpus > 1:
        gpus = DEVICES.get(known, gpus) if method == "full" else 1
    room = 24e9 if "24GB" in (row.get("gpu") or "") else 0
    if gpus == 1 and hub and method == "full" and STATES * models.parameters(model) > room > 0:
        gpus = 4
    longest = next((v for k, v in LONGEST.items() if name.startswith(k)), 512)
    return {
        "model": model,
        "method": method,
        "seq_len": whole(row, "max_seq_tokens") or longest,
        "micro_batch": whole(row, "micro_batch") or 1,
        "quant": quant,
        "rank": rank,
        "targets": EVERYWHERE if everywhere else ("query", "value"),
        "gpus": gpus,
        "mixed": "mixed" in (row.get("precision") or ""),
        "alike": hub,
        "recompute": recompute,
        "frees_frozen": bool(re.search("fsdp2|torchtune|zero3", stage)),  # litgpt's is FSDP1
    }


# --- Tables of results ---


def predict_components(rows: list[dict]) -> list[dict]:
    """Return id, value and error (why there is none) of rows of formula tables."""
    found = []
    for row in rows:
        try:
            value = component_of(row)
            why = "" if value is not None else "no formula of memory"
        except (ValueError, KeyError, ZeroDivisionError) as error:
            value, why = None, f"not predicted: {error}"
        found.append({"id": row.get("id"), "value": "" if value is None else value, "error": why})
    return found


def predict_finetune(rows: list[dict]) -> list[dict]:
    """Return id, memory_bytes and error (why there is none) of fine-tuning runs."""
    found = []
    for row in rows:
        try:
            value, why = sum(memory_of_finetune(**finetune_arguments(row)).values()), ""
        except (ValueError, KeyError) as error:
            value, why = "", f"not predicted: {error}"
        found.append({"id": row.get("id"), "memory_bytes": value, "error": why})
    return found


def finetune_rows(path: str | Path) -> list[dict]:
    """Return id, memory_bytes and error of a file of fine-tuning runs.

    A run that ran out of memory has a prediction and no error.
    """
    rows = []
    for row in read_table(Path(path)):
        predicted = sum(memory_of_finetune(**finetune_arguments(row)).values())
        told = published_bytes(row)
        error = predicted / told - 1 if told else None
        rows.append(
            {"id": row["id"], "memory_bytes": predicted, "error": error, "group": row["group"]}
        )
    return rows


def run_rows(path: str | Path) -> list[dict]:
    """Return id, memory_bytes and error of the runs of a file that say what they held."""
    rows = []
    for row in read_table(Path(path)):
        told = published_bytes(row)
        if told:
            predicted = predicted_bytes(row)
            error = predicted / told - 1
            rows.append(
                {"id": row["id"], "memory_bytes": predicted, "error": error, "group": row["group"]}
            )
    return rows


def percentile(values: list[float], share: float) -> float:
    """Return the value that `share` of them do not exceed, interpolated."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def summary(rows: list[dict]) -> dict[str, float]:
    """Return the number of rows with an error, its median and 95th percentile (shares)."""
    errors = [abs(row["error"]) for row in rows if row["error"] is not None]
    return {"rows": len(errors), "median": median(errors), "p95": percentile(errors, 0.95)}


# Published peaks that the model misses by more than a tenth, cells by more than their printing.
MISSED = {
    "R0228-fb6057": "405B in 1F1B on 512 GPUs: 16% too little; the row says no micro-batches",
    "F066": "full training of 1B: 2.1 times; published is less than weights, gradients and Adam",
    "M078": "figure 7, 530B with full recomputation: a bar read as 9.42%, by formula 9.52%",
}


def within_printing(value: float, told: str) -> bool:
    """Tell whether a value is within 0.5% of what was printed, or prints the same, or cut."""
    step = 10.0 ** -len(told.partition(".")[2])
    return abs(value / float(told) - 1) <= 0.005 or abs(value - float(told)) < step


def wrong_cells(rows: list[dict[str, str]]) -> list[str]:
    """Return the ids of the cells of formula tables that the model does not reproduce.

    Korthikanti's table 4 has measured times: no formula's cells.
    """
    cells = [row for row in rows if row["quantity"] not in LAYER_TIMES]
    return [row["id"] for row in cells if not within_printing(component_of(row), row["value"])]


def measured_rows() -> list[dict]:
    """Return all published peaks of training and fine-tuning beside the model's."""
    rows = run_rows(published.ANCHORS / "runs.csv")
    rows += finetune_rows(published.ANCHORS / "finetune_memory.csv")
    return [row for row in rows if row["error"] is not None]


def verdicts() -> list[tuple[str, float, float]]:
    """Return (what, found, at most): targets on the rows held out, and cells that are wrong."""
    found = summary([row for row in measured_rows() if held_out(row["group"])])
    cells = read_table(published.ANCHORS / "memory_components.csv")
    return [
        ("measured memory, held out: median", found["median"], 0.05),
        ("measured memory, held out: p95", found["p95"], 0.12),
        ("cells of formula tables that are wrong (M078)", len(wrong_cells(cells)), 1),
    ]


def show() -> None:
    """Print errors of memory by source: all rows, and those held out; what is missed, and why."""
    print("\nMemory: median and 95th percentile of the error, and of the rows held out")
    rows = measured_rows()
    lines = []
    for name, source in (
        ("Megatron-LM (SimuMax)", "simumax"),
        ("torchtitan", ("torchtitan", "titan")),
        ("KempnerForge", "kf"),
        ("litgpt, pretraining", "thunder"),
        ("litgpt, fine-tuning", ("litgpt", "hub", "flora")),
        ("all", ""),
    ):
        own = [row for row in rows if row["group"].startswith(source)]
        kept = [row for row in own if held_out(row["group"])]
        if not own:
            continue
        found = [summary(part) for part in (own, kept) if part]
        line = [name, *(f"{part['rows']}" for part in found[:1])]
        for part in found:
            line += [f"{part['median']:.1%}", f"{part['p95']:.1%}"]
        lines.append((*line, *["-"] * (6 - len(line))))
    print(table(lines, ("source", "rows", "median", "p95", "held out", "p95")))
    for name, why in MISSED.items():
        print(f"{name}: {why}")
