"""Published training runs as jobs, layouts and clusters; what a row leaves out is completed here.

Each completion is a default that `DEFAULTS` states, or a fact about a source in `SOURCES`.
"""

from __future__ import annotations

import csv
import math
import re
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

from planner import memory
from planner.collectives import seconds_of
from planner.compute import model_flops
from planner.hardware import GPUS, Cluster, Gpu, find_gpu
from planner.job import Job, Layout, Model
from planner.names import known_gpu, known_model
from planner.rates import RATES

ANCHORS = Path(__file__).parent / "data"

SINGLE_NODE = "vTrain single"  # 860 rows of small models on up to 8 GPUs: judged apart

DEFAULTS = """\
What a row leaves out: micro-batch: 1 with a pipeline, otherwise a rank's whole batch if it fits;
virtual stages 1, "interleaved" 2; recomputation: none, full if nothing else fits; dp: GPUs over
tp, cp and pp; network: the card usual for the GPU; attention: flash, causal; experts: a rank each;
ZeRO-1 and DDP: gradients reduced behind backward; Megatron-LM, NeMo: fused kernels."""


@dataclass(frozen=True)
class Source:
    """What is known of a source and stands in no column of its rows."""

    pattern: str
    stack: str = "torch"
    network_gb_s: float = 0.0
    flash: bool = True
    dropout: bool = False
    overlap_dp: bool = True
    overlap_tp: bool = False
    overlap_pp: bool = False
    learned_positions: bool = False
    cp_kind: str = "ring"
    reduce_bytes: int = 4
    recompute: str = ""  # where rows do not say
    keeps_gathered: bool = False  # FSDP under a pipeline gathers weights once a step, as ZeRO-2


SOURCES = (
    Source("llm-foundry", learned_positions=True),
    Source("torchtitan", stack="torchtitan", keeps_gathered=True),
    Source("SC21", stack="megatron", flash=False, dropout=True, overlap_dp=False, reduce_bytes=2),
    Source("Korthikanti", stack="megatron", flash=False, dropout=True),
    Source("MT-NLG", stack="megatron", flash=False, dropout=True, overlap_dp=False, reduce_bytes=2),
    Source(
        "vTrain", stack="megatron", flash=False, overlap_dp=False, reduce_bytes=2, network_gb_s=12.5
    ),
    Source("Megatron-LM README", stack="megatron", overlap_tp=True, recompute="none"),
    Source("Llama 3 Herd", stack="megatron", cp_kind="gather"),
    Source("fms-fsdp", reduce_bytes=2),
    Source("KempnerForge", stack="kempnerforge"),
    Source("SimuMax", stack="megatron", overlap_dp=False),
    Source("NVIDIA/NeMo", stack="megatron", overlap_tp=True, recompute="none"),
    Source("Megatron-Bridge", stack="megatron", overlap_tp=True, reduce_bytes=2, recompute="none"),
    Source("thunder", stack="litgpt"),
    Source("NVIDIA", stack="megatron", overlap_tp=True, recompute="none"),  # its other recipes
    Source("Megatron", stack="megatron"),
)

YES = ("yes", "true", "on", "enabled")
NO = ("no", "false", "off", "disabled")
# Attention that does not store its scores has many names (sdpa, cudnn, FA3, splash): these do.
STORES_SCORES = (
    r"unfused|no[nt]?.?flash|^(?!.*flash).*(softmax|eager|math|naive|dot_product|torch$)"
)


class Unpredictable(ValueError):
    """A row that says too little."""


@dataclass(frozen=True)
class Row:
    """One published run: what was measured and what is predicted from."""

    id: str
    source: str
    group: str
    job: Job
    layout: Layout
    cluster: Cluster
    step_time_s: float | None
    gpu_name: str
    weak: bool = False  # recalled, not read again

    @property
    def short_source(self) -> str:
        return short_source(self.source, self.gpu_name)

    @property
    def stratum(self) -> tuple[str, ...]:
        return self.short_source, self.cluster.gpu.name, self.job.precision


def short_source(source: str, gpu: str = "") -> str:
    """Return the name under which a source's errors are printed."""
    for name in (
        "llm-foundry", "torchtitan", "SC21", "Korthikanti", "MT-NLG",
        "vTrain data/ground_truth_single", "vTrain data/ground_truth_multi",
        "Megatron-LM README", "Llama 3 Herd", "fms-fsdp", "KempnerForge", "SimuMax",
        "NVIDIA/NeMo", "Megatron-Bridge", "thunder",
        "InternEvo", "dgxc-benchmarking", "maxtext", "TinyLlama", "torchtune",
    ):  # fmt: skip
        if name in source:
            short = name.split("/")[-1].replace("ground_truth_", "vTrain ")
            return f"{short} {gpu.split('-')[0]}" if name == "llm-foundry" else short
    return source.split("(")[0].strip()[:24] or "unnamed"


def number(row: dict, key: str, default: float | None = None) -> float | None:
    """Return a column's number, `1,024`, `8k`, `64 GPUs`, yes or no among them; else `default`."""
    text = (row.get(key) or "").strip().replace(",", "").lower()
    if text in YES or text in NO:
        return float(text in YES)
    found = re.fullmatch(r"(\S*?\d\.?)(k?) ?(?:gpus?|tokens?|sequences?|gib|gb(?:/s)?)?", text)
    try:
        return float(found[1]) * (1024 if found[2] else 1) if found else default
    except ValueError:
        return default


def whole(row: dict, key: str, default: int = 0) -> int:
    value = number(row, key)
    return default if value is None else int(value)


def facts_of(source: str) -> Source:
    return next((each for each in SOURCES if each.pattern in source), Source(""))


def model_of(row: dict, facts: Source) -> Model:
    """Return the shape in a row, or that of the model it names.

    A named mixture's experts stand in no column of runs.csv: its shape is the known one.
    """
    name = (row.get("model") or "").lower()
    layers, hidden, heads = (whole(row, key) for key in ("layers", "hidden", "heads"))
    model = known_model(name)
    mixture = model and model.experts and model.hidden == hidden and not whole(row, "experts")
    if hidden and heads and layers and not mixture:
        gated = whole(row, "gated_mlp", 1) == 1
        ffn = whole(row, "ffn") or (round(hidden * 8 / 3) if gated else 4 * hidden)
        return Model(
            layers,
            hidden,
            heads,
            whole(row, "kv_heads") or heads,
            ffn,
            whole(row, "vocab") or 32_000,
            gated=gated,
            experts=whole(row, "experts"),
            top_k=whole(row, "top_k"),
            tied_embeddings=not gated,
            biases=not gated and "mpt" not in name,
            learned_positions=whole(row, "seq") if not gated else 0,
            name=name,
        )
    if not model:
        raise Unpredictable(
            f"no shape: neither layers, hidden and heads nor a known model ({name})"
        )
    if layers and layers < model.layers and model.dense_layers:
        model = replace(model, dense_layers=1)  # a cut model's launcher leaves one (SimuMax)
    return replace(model, layers=layers or model.layers, name=name)


def precision_of(text: str) -> str:
    """Return what the products compute in."""
    text = text.lower()
    if "fp4" in text:
        return "fp4"
    if "rowwise" in text:
        return "fp8-rows"
    if "fp8" in text or "float8" in text:
        return "fp8"
    if "fp16" in text or "float16" in text.replace("bfloat16", "") or text.startswith("16"):
        return "fp16"
    if "tf32" in text:
        return "tf32"
    if "32" in text and "bf16" not in text and "mixed" not in text:
        return "fp32"
    return "bf16"


def job_of(row: dict, facts: Source, model: Model, global_batch: int) -> Job:
    precision = (row.get("precision") or "").lower()
    pure = "pure" in precision or "true" in precision
    compiled = (row.get("compile") or "").lower() not in ("", "0", "n/a", "no", "false")
    attention = (row.get("attn") or "").lower()
    stack = facts.stack
    if stage_name(row.get("sharding") or "").startswith("zero3"):
        stack = "deepspeed"
    elif "thunder" in (row.get("compile") or ""):
        stack = "thunder"
    flash = not re.search(STORES_SCORES, attention) if attention else facts.flash
    frozen = "lora" in f"{row.get('model')} {row.get('group')}".lower()
    reduce_bytes = 2 if "bf16/pure" in precision or precision == "bf16-true" else facts.reduce_bytes
    return Job(
        model,
        whole(row, "seq") or 2048,
        global_batch,
        precision=precision_of(precision),
        compiled=compiled,
        stack=stack,
        flash=flash,
        dropout=facts.dropout,
        reduce_bytes=reduce_bytes,
        optimizer_bytes=0 if frozen else 4 if pure else 12,
        gradient_bytes=0 if frozen else 2 if pure else 4,
        frozen=frozen,
    )


def recompute_of(text: str) -> str | None:
    """Return what a row says of recomputation, None if it says nothing.

    A bare yes is full: a library's switch has no finer choice. Every second layer (torchtitan's
    selective layer) is nearest to its choice of operators: about half of forward again.
    """
    text = re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")
    if "unstated" in text or not text:
        return None
    if text.startswith(("selective_op", "selective_layer")):
        return "operators"
    if text.startswith(("no", "off", "false", "0", "disabled", "without")):
        return "none"
    if re.search("select|attn|attention|minimal", text):
        return "selective"
    if text in (*YES, "1") or re.search("full|uniform|block|every|all|checkpoint|remat", text):
        return "full"
    return None


def stage_name(text: str) -> str:
    """Return `sharding` with one name for a stage: `ZeRO stage 3`, `zero-3` are `zero3`."""
    return re.sub(r"(zero|stage)[ _-]*(stage)?[ _-]*(?=\d)", "zero", text.lower())


def zero_of(text: str) -> int:
    """Return the ZeRO stage that a row's `sharding` means."""
    text = stage_name(text or "ddp")
    if "zero2" in text or "shard_grad_op" in text:
        return 2
    if re.search(r"zero3|[fh]sdp|(full|hybrid)_shard|infinity|zero\+\+", text):
        return 3
    return 1 if "zero1" in text or re.search(r"dist\w*[ _-]?opt", text) else 0


def layout_of(row: dict, facts: Source, gpus: int, model: Model) -> Layout:
    tp, pp, cp = (whole(row, key, 1) or 1 for key in ("tp", "pp", "cp"))
    dp, rest = divmod(gpus, tp * pp * cp)
    if rest or not dp:
        raise Unpredictable(f"tp {tp} x cp {cp} x pp {pp} does not divide {gpus} GPUs")
    sharding = stage_name(row.get("sharding") or "")
    notes = f"{row.get('sharding')} {row.get('notes')}".lower()
    zero = zero_of(sharding)
    if facts.keeps_gathered and pp > 1 and zero == 3:
        zero = 2
    virtual = max(1, whole(row, "vpp", 1))
    if "interleaved" in (row.get("vpp") or "").lower():
        virtual = 2
    elif "interleaved schedule" in notes and pp > 1:
        virtual = -(-model.layers // pp)
    experts = model.experts
    told = re.search(r"\bep ?[=:]? ?(\d+)\b", notes)
    ep = whole(row, "ep") or (int(told[1]) if told else 0) or dp * cp
    return Layout(
        tp=tp,
        cp=cp,
        pp=pp,
        dp=dp,
        ep=min(ep, dp * cp * tp, experts) if experts else 1,
        zero=zero,
        shard=whole(row, "gpus_per_node", 8)
        if "hsdp" in sharding or "hybrid_shard" in sharding
        else 0,
        virtual_stages=virtual if pp > 1 else 1,
        sequence_parallel=whole(row, "seq_parallel", 0) == 1 or tp == 1,
        cp_kind=facts.cp_kind,
        offload="all" if "offload" in notes and "zero3" in sharding else "none",
        overlap_tp=facts.overlap_tp or "async tp" in notes or "asynctp" in notes,
        overlap_dp=facts.overlap_dp,
    )


def completed(row: dict, facts: Source, job: Job, layout: Layout, cluster: Cluster) -> Layout:
    """Return the layout with micro-batch and recomputation, as `DEFAULTS` says."""
    said = recompute_of(row.get("act_ckpt") or "") or facts.recompute
    layout = replace(layout, recompute=said or "none")
    batch = max(1, job.global_batch // layout.dp)
    micro = whole(row, "micro_batch")
    if not micro and whole(row, "grad_accum"):
        micro = max(1, batch // whole(row, "grad_accum"))
    limit = memory.memory_limit(cluster.gpu)
    if facts.stack == "torchtitan" and layout.pp > 1 and not micro:
        micro = max(1, batch // layout.pp)  # its default: as many micro-batches as stages
    sizes = [micro] if micro else [1] if layout.pp > 1 else [batch, 4, 2, 1]
    options = [said] if said else ["none", "full"]
    for size in sizes:
        for recompute in options:
            tried = replace(layout, micro_batch=size, recompute=recompute)
            if sum(memory.memory_of(job, tried, cluster.gpus_per_node).values()) <= limit:
                return tried
    return replace(layout, micro_batch=sizes[-1], recompute=said or "full")


def cluster_of(row: dict, facts: Source) -> Cluster:
    gpu = gpu_of(row)
    per_node = whole(row, "gpus_per_node") or gpu.gpus_per_node
    network = number(row, "network_gb_s") or told_network(row, per_node) or facts.network_gb_s
    if gpu.gpus_per_node > 8:
        per_node = max(per_node, gpu.gpus_per_node)  # a tray of 4 is no end of NVLink (NVL72)
    return Cluster(gpu, per_node, network or gpu.network_gb_s)


def gpu_of(row: dict) -> Gpu:
    """Return a row's GPU; one that is not known is the known one nearest in peak, scaled to it.

    Raises: ValueError of an unknown GPU without a peak.
    """
    memory_gib, peak = number(row, "gpu_mem_gib"), number(row, "peak_tflops")
    try:
        return known_gpu(row.get("gpu") or "", memory_gib)
    except ValueError:
        if not peak:
            raise
    kind = precision_of(row.get("precision") or "").split("-")[0]
    known = [gpu for gpu in GPUS.values() if kind in gpu.tflops]
    near = min(known, key=lambda gpu: abs(math.log(gpu.tflops[kind] / peak)))
    tflops = {name: rate * peak / near.tflops[kind] for name, rate in near.tflops.items()}
    return replace(near, tflops=tflops, memory_gib=memory_gib or near.memory_gib)


def told_network(row: dict, per_node: int) -> float | None:
    """Return GB/s of a GPU's share of its node's cards (`4 x 100 Gb RoCE a node`), if told.

    `GB` a second are bytes; `8 x 80 GB` is memory.
    """
    cards = r"(\d+) ?[x*] ?(\d+) ?(?:(GB)(?:ps|/s)|Gb|[Gg]b(?:ps|/s|it/s))\b"
    found = re.search(cards, row.get("notes") or "")
    return int(found[1]) * int(found[2]) / (1 if found[3] else 8) / per_node if found else None


def read_row(row: dict) -> Row:
    """Return a row of runs.csv as job, layout and cluster.

    Raises: Unpredictable, or ValueError of an unknown GPU.
    """
    source = row.get("source") or ""
    facts = facts_of(source)
    if not facts.pattern and re.search(
        r"distributed.optimizer|megatron", row.get("sharding") or ""
    ):
        facts = facts_of("Megatron")  # its names for what it shards
    model = model_of(row, facts)
    cluster = cluster_of(row, facts)
    gpus = whole(row, "n_gpus")
    if not gpus:
        gpus = whole(row, "dp", 1) * whole(row, "tp", 1) * whole(row, "pp", 1) * whole(row, "cp", 1)
    layout = layout_of(row, facts, gpus, model)
    micro, accumulated = whole(row, "micro_batch"), whole(row, "grad_accum", 1) or 1
    global_batch = whole(row, "global_batch") or layout.dp * max(1, micro) * accumulated
    job = job_of(row, facts, model, global_batch)
    if cluster.gpu.family == "volta" and "bf" not in (row.get("precision") or "").lower():
        job = replace(job, precision="fp16" if job.precision == "bf16" else job.precision)
    layout = completed(row, facts, job, layout, cluster)
    return Row(
        row.get("id") or "",
        source,
        row.get("group") or "",
        job,
        layout,
        cluster,
        measured_seconds(row, job, layout),
        row.get("gpu") or "",
        weak=(row.get("provenance") or "").startswith("recalled"),
    )


def measured_seconds(row: dict, job: Job, layout: Layout) -> float | None:
    """Return a row's step time: as published, or from tokens/s, or from model TFLOP/s."""
    seconds = number(row, "step_time_s")
    if seconds:
        return seconds
    rate = number(row, "tokens_per_s_per_gpu")
    if rate:
        return job.global_batch * job.seq_len / rate / layout.gpus
    tflops = number(row, "tflops_per_gpu")
    if tflops and number(row, "global_batch"):
        return model_flops(job) / tflops / 1e12 / layout.gpus
    return None


def read_table(path: Path) -> list[dict]:
    """Return a CSV file's rows; where a line is short, with nothing in the rest.

    Raises: ValueError if it has no rows or no `id`.
    """
    with Path(path).open(newline="", encoding="utf-8-sig") as file:
        rows = [
            {name.strip(): value or "" for name, value in row.items() if name}
            for row in csv.DictReader(file)
        ]
    if not rows:
        raise ValueError(f"{path}: no rows")
    if "id" not in rows[0]:
        raise ValueError(f"{path}: no column `id`")
    return rows


def read_runs(path: Path) -> list[Row]:
    """Return the rows of a file that can be predicted and say what was measured."""
    rows = []
    for row in read_table(path):
        try:
            rows.append(read_row(row))
        except ValueError:
            continue
    return [row for row in rows if row.step_time_s and not row.weak]


def calibration_half(rows: list) -> set[str]:
    """Return the ids of the rows that constants are fitted on: half of each source.

    Rows of one source, GPU and precision are ordered by the CRC-32 of their ids; every other one
    is taken, the first of an even number, and of a single row by whether its CRC-32 is even.
    """
    kinds: dict[tuple, list] = {}
    for row in rows:
        kinds.setdefault(row.stratum, []).append(row.id)
    taken = set()
    for own in kinds.values():
        order = sorted(own, key=lambda name: zlib.crc32(name.encode()))
        start = zlib.crc32(order[0].encode()) % 2 if len(order) % 2 else 0
        taken |= set(order[start::2])
    return taken


@dataclass(frozen=True)
class Transfer:
    """One published time of a collective."""

    id: str
    source: str
    group: str
    kind: str
    size_bytes: float
    ranks: int
    nodes: int
    cluster: Cluster
    time_us: float | None
    from_python: bool = False

    @property
    def short_source(self) -> str:
        return self.group

    @property
    def stratum(self) -> tuple[str, ...]:
        return (self.group,)

    def predicted_us(self, rates: dict[str, float] | None = None) -> float:
        """Return the microseconds that the model of collectives gives."""
        seconds = seconds_of(
            self.kind, self.size_bytes, self.ranks, self.cluster, self.nodes, rates
        )
        return seconds * 1e6 + self.from_python * (rates or RATES)["link.python_us"]


KINDS = {
    "allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all", "sendrecv": "send", "send": "send", "p2p": "send",
    "broadcast": "broadcast", "reduce": "broadcast",
}  # fmt: skip


def bytes_of(row: dict, key: str) -> float | None:
    """Return a column's bytes; with a letter as nccl-tests reads it: `1G` is 1 GiB."""
    text = (row.get(key) or "").strip().lower()
    found = re.fullmatch(r"([\d.]+) ?([kmg])(?:i?b)?", text)
    if found:
        return float(found[1]) * 1024 ** (1 + "kmg".index(found[2]))
    return number(row, key)


def read_transfer(row: dict) -> Transfer:
    """Return a row of collectives.csv.

    The rate that a row gives is a GPU's NVLink on one node, and its network card on several.
    Raises: Unpredictable.
    """
    name = row.get("gpu") or ""
    rate = number(row, "link_spec_GBps_unidir")
    ranks = whole(row, "n_gpus")
    size = bytes_of(row, "size_bytes")
    if ranks < 2 or not size:
        raise Unpredictable("needs n_gpus, two or more, and size_bytes")
    try:
        gpu = known_gpu(name)
    except ValueError:
        if not rate and "nvlink" not in name.lower():
            raise
        gpu = replace(find_gpu("h100"), link_gb_s=rate or 450.0)  # an NVLink of that rate
    nodes = whole(row, "n_nodes") or -(-ranks // gpu.gpus_per_node)
    network = told_network(row, -(-ranks // nodes)) or gpu.network_gb_s
    if rate and nodes > 1:
        network = rate
    elif rate and not gpu.mesh:
        gpu = replace(gpu, link_gb_s=rate)
    algorithm = (row.get("algo") or "").lower()
    if "nvls off" in algorithm or algorithm.startswith(("ring", "tree")):
        gpu = replace(gpu, switch_reduces=False)
    said = (row.get("collective") or "all_reduce").lower()
    kind = KINDS.get(re.sub(r"nccl|_perf|_single|[^a-z0-9]", "", said))
    if not kind:
        raise Unpredictable(f"unknown collective {said!r}")
    text = f"{name} {row.get('notes')} {row.get('group')}".lower()
    kind_of_network = "cloud" if any(word in text for word in ("efa", "tcpx", "a3")) else "rdma"
    cluster = Cluster(gpu, -(-ranks // nodes), network, kind_of_network)
    id_, source, group = (row.get(key) or "" for key in ("id", "source", "group"))
    time_us = number(row, "time_us")
    python = "stas00" in source or "torch" in (row.get("notes") or "").lower()
    return Transfer(id_, source, group, kind, size, ranks, nodes, cluster, time_us, python)


def read_transfers(path: Path) -> list[Transfer]:
    """Return the rows of a file of collectives that can be predicted and say what was measured."""
    transfers = []
    for row in read_table(path):
        try:
            transfers.append(read_transfer(row))
        except ValueError:
            continue
    return [each for each in transfers if each.time_us]


def read_added_runs() -> list[Row]:
    """Return the runs that were found after the fit: no constant was fitted on them."""
    return read_runs(ANCHORS / "more_runs.csv")


def read_all_runs() -> list[Row]:
    """Return all published runs of the repository that can be compared."""
    names = ("runs.csv", "runs_vtrain_a100.csv")
    return [row for name in names for row in read_runs(ANCHORS / name)]
