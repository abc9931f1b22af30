"""Published memory beside the model's: rows of runs.csv, formula tables, fine-tuning."""

from __future__ import annotations

import csv
import hashlib
from dataclasses import replace
from pathlib import Path

from dist_common.costs import memory, models
from dist_common.costs.job import Job, Layout, Model

GIB = 2**30
ANCHORS = Path(__file__).resolve().parents[1] / "anchors"
BYTES_OF_UNIT = {"GiB": GIB, "GB(1e9)": 1e9}


def read_rows(path: str | Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def held_out(source: str) -> bool:
    """Tell whether a source's rows are kept for judging: its SHA-256 is odd.

    A source is the text before its first space: a repository or the first word of a paper.
    """
    return hashlib.sha256(source.split(" ")[0].encode()).digest()[-1] % 2 == 1


def published_bytes(row: dict[str, str]) -> float | None:
    """Return a row's measured bytes, or None where it has none."""
    try:
        return float(row["mem_value"]) * BYTES_OF_UNIT[row["mem_unit"]]
    except (ValueError, KeyError):
        return None


def number(row: dict[str, str], field: str, default: int = 0) -> int:
    """Return a field's whole number, or the default where the row says nothing."""
    try:
        return int(float(row.get(field) or default))
    except ValueError:
        return default


def model_of(row: dict[str, str]) -> Model:
    """Return a row's shape; a DeepSeek is known by its name, other rows say all fields.

    Default: keys and values of their own for each head, ffn 4 h.
    """
    name = row["model"]
    layers = number(row, "layers")
    for known in ("deepseek-v2", "deepseek-v3", "mixtral-8x7b", "mixtral-8x22b"):
        if name.startswith(known.replace("deepseek-", "deepseek")):
            model = models.MODELS[known]
            if layers and layers < model.layers:  # cut: SimuMax' launcher leaves one dense layer
                model = replace(model, dense_layers=min(1, model.dense_layers))
            return replace(model, layers=layers or model.layers)
    hidden = number(row, "hidden")
    heads = number(row, "heads")
    gated = row["gated_mlp"] == "1"
    return Model(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=number(row, "kv_heads", heads),
        ffn=number(row, "ffn", 4 * hidden),
        vocab=number(row, "vocab", 51_200),
        gated=gated,
        biases=not gated,
        learned_positions=0 if gated else number(row, "seq"),
        tied_embeddings=not gated,
        name=name,
    )


SHARDINGS = {"ddp": 0, "none": 0, "zero1": 1, "distributed_optimizer": 1, "distributed": 1,
             "zero2": 2, "fsdp_zero2": 2, "zero3": 3, "fsdp_zero3": 3, "fsdp": 3, "hsdp": 3}  # fmt: skip
RECOMPUTE_OF = {"none": "none", "selective_op": "operators", "full": "full"}


def stack_of_row(row: dict[str, str]) -> str:
    """Return whose code a row ran: by its source, and Megatron's where it says nothing."""
    source = row["source"].lower()
    if "thunder" in row["compile"]:
        return "thunder"
    for stack in ("torchtitan", "kempnerforge", "litgpt", "deepspeed"):
        if stack in source:
            return stack
    if row["sharding"].startswith(("fsdp", "hsdp")):
        return "torch"
    return "megatron"


def job_of(row: dict[str, str]) -> tuple[Job, Layout]:
    """Return what a row of runs.csv trains, and its layout.

    Defaults where a row says nothing: 18 bytes a weight (16 with FSDP, 8 where the row says pure
    bf16), flash attention, no recomputation, sequence parallelism with tp, 1F1B, micro-batches of
    one sequence; a torchtitan pipeline has as many micro-batches as stages.
    """
    model = model_of(row)
    stack = stack_of_row(row)
    notes, said = row["notes"], row["precision"].lower()
    sharding = row["sharding"].split("_offload")[0]
    zero = next((z for name, z in SHARDINGS.items() if sharding.startswith(name)), 0)
    zero = SHARDINGS.get(sharding, zero)
    pure = "pure" in said or "true" in said
    tp, pp, dp, cp = (number(row, axis, 1) for axis in ("tp", "pp", "dp", "cp"))
    micro = number(row, "micro_batch", 1)
    batch = number(row, "global_batch", dp * micro * number(row, "grad_accum", 1))
    if stack == "torchtitan" and pp > 1 and not row["micro_batch"]:
        micro = max(1, batch // dp // pp)
    virtual = 2 if row["vpp"] == "interleaved" else number(row, "vpp", 1)
    compiled = row["compile"] == "1" or "torchcompile" in row["compile"]
    job = Job(
        model=model,
        seq_len=number(row, "seq", 2048),
        global_batch=batch,
        precision="fp8" if "float8" in said or "fp8" in said else "bf16",
        gradient_bytes=2 if pure else 4,
        optimizer_bytes=4 if pure else 12,
        compiled=compiled,
        fused_loss="cross-entropy fusion" in notes
        or (stack == "torchtitan" and "H200" in row["gpu"]),
        stack=stack,
    )
    layout = Layout(
        tp=tp,
        cp=cp,
        pp=pp,
        dp=dp,
        ep=dp if "ep=8" in notes else 1,
        zero=zero,
        micro_batch=micro,
        recompute=RECOMPUTE_OF.get(row["act_ckpt"].split("(")[0].strip(), "none"),
        sequence_parallel=row["seq_parallel"] != "0" and not (stack == "kempnerforge" and pp > 1),
        virtual_stages=virtual,
        cp_kind="ulysses" if stack == "megatron" else "ring",
    )
    return job, layout


def predicted_bytes(row: dict[str, str]) -> float:
    """Return what the model predicts for a row, as its mem_kind counts.

    A peak that is not said to be the largest of all ranks was logged by rank 0: the first stage.
    """
    job, layout = job_of(row)
    parts = memory.memory_of(job, layout)
    if "max_over_ranks" not in row["mem_kind"]:
        parts = memory.memory_of_stage(job, layout, 0)
    total = sum(parts.values())
    return memory.reserved(total) if "reserved" in row["mem_kind"] else total


# Rows name models as their tables do; the source's line says gemma2-2b for the last two.
FINETUNED = {
    "llama 2 7": "llama2-7b", "llama-2-7b": "llama2-7b", "llama 2 13": "llama2-13b",
    "llama-3.1-8b": "llama3-8b", "llama-3-8b": "llama3-8b", "llama-3.2-1b": "llama3.2-1b",
    "llama-3.2-3b": "llama3.2-3b", "mistral-7b": "mistral-7b", "tiny": "tinyllama-1.1b",
    "gemma-2-9b": "gemma-2-9b", "gemma-2b": "gemma-2b", "gemma-7b": "gemma-7b",
    "phi-3": "phi-3-mini", "phi-1.5": "phi-1.5", "phi-2": "phi-2", "falcon 40": "falcon-40b",
    "falcon-7b": "falcon-7b", "stablelm": "stablelm-alpha-3b",
}  # fmt: skip
RENAMED = {"F055": "gemma-2-2b", "F056": "gemma-2-2b"}
EVERYWHERE = ("query", "key", "value", "projection", "mlp", "head")
DEVICES = {"stablelm-alpha-3b": 2}  # of full.yaml, on a machine of four
SAMPLE = {"stablelm": 1034}  # tokens of the longest sample where a row says nothing


def finetune_arguments(row: dict[str, str]) -> dict:
    """Return what a row of finetune_memory.csv trains, as arguments of memory_of_finetune.

    Defaults of litgpt's files (config_hub): rank 32 on queries and values; Gemma and Phi adapt
    every matrix (rank 16, 8). LoRA's files say `devices: 1` whatever the machine has. Samples are
    cut at 512 tokens. Its tables of 2023: rank 8 on queries and values, the longest sample first.
    """
    name = row["model"].lower()
    known = RENAMED.get(row["id"]) or next(v for k, v in FINETUNED.items() if name.startswith(k))
    hub = row["group"].startswith("hub")
    everywhere = hub and known.startswith(("gemma", "phi"))
    method = "lora" if row["method"] == "qlora" else row["method"].replace(" ", "_")
    rank = 8
    if hub:
        rank = (
            (16 if known.startswith("gemma") and row["quant"] != "None" else 8)
            if everywhere
            else 32
        )
    longest = next((v for k, v in SAMPLE.items() if name.startswith(k)), 512)
    gpus = number(row, "n_gpus", 1)
    if hub and gpus > 1:
        gpus = DEVICES.get(known, gpus) if method == "full" else 1
    return {
        "model": models.MODELS[known],
        "method": method,
        "seq_len": number(row, "max_seq_tokens", longest),
        "micro_batch": number(row, "micro_batch", 1),
        "quant": row["quant"].replace("bnb.", "").replace("None", ""),
        "rank": rank,
        "targets": EVERYWHERE if everywhere else ("query", "value"),
        "gpus": gpus,
        "mixed": "mixed" in row["precision"],
        "alike": hub,
    }
