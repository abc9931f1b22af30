"""Which layouts a job can have, what the module's cheaper steps would change, and published runs.

The published numbers and their sources are in combining_published.json.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

from advanced_parts import layout_memory as memory
from advanced_parts import layout_traffic as traffic
from advanced_parts.layout_memory import RECOMPUTE, SHARDINGS, Cluster, Job, Layout
from advanced_parts.layout_traffic import Prediction, predict
from dist_common.models import Transformer, TransformerConfig
from dist_common.report import Report


def refusal(job: Job, layout: Layout, gpus: int) -> str | None:
    """Say in one line why a layout cannot be, None where it can."""
    config, tp, cp, pp = job.config, layout.tp, layout.cp, layout.pp
    chunks = pp * job.virtual_stages
    replica = layout.dp * job.micro_batch_size
    if layout.gpus != gpus:
        return f"{layout} is {layout.gpus} GPUs, but --gpus is {gpus}: make them equal"
    for count, name in ((config.num_heads, "heads"), (config.num_kv_heads, "key-value heads")):
        if count % tp:
            return f"--tp {tp} must divide the model's {count} {name}"
    if config.num_layers % chunks and (pp < 2 or (config.num_layers + 2) % chunks):
        stages = f"--pp {pp}" + f" x --virtual-stages {job.virtual_stages}" * (chunks != pp)
        least = f"{stages} must divide the model's {config.num_layers} layers"
        return f"{least}, or {config.num_layers + 2} where first and last stage have one less"
    if min(memory.layers_of_stages(config.num_layers, pp)) < 1:
        return f"--pp {pp} leaves a stage without a layer: the model has {config.num_layers}"
    if job.seq_len % (2 * cp if cp > 1 else 1) or job.seq_len // cp % tp:
        parts = f"--cp {cp}" + f" (zig-zag: {2 * cp} chunks)" * (cp > 1) + f" and --tp {tp}"
        return f"--seq-len {job.seq_len} must be divisible by {parts}"
    if job.global_batch_size % replica:
        parts = f"--dp {layout.dp} x --micro-batch-size {job.micro_batch_size} = {replica}"
        return f"--global-batch-size {job.global_batch_size} must be divisible by {parts}"
    if job.schedule == "interleaved" and job.micro_batches(layout) < pp:
        few = f"--schedule interleaved needs at least --pp {pp} micro-batches"
        return f"{few}, this layout has {job.micro_batches(layout)}: use 1f1b"
    return None


def layouts_of(job: Job, gpus: int, shardings=SHARDINGS, recompute=RECOMPUTE) -> Iterator[Layout]:
    """Yield each layout whose axes multiply to `gpus` and divide what they split."""
    divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
    for tp, cp, pp in product(divisors, repeat=3):
        dp, rest = divmod(gpus, tp * cp * pp)
        if rest or refusal(job, Layout(tp, cp, dp, pp), gpus):
            continue
        # One replica has nobody to share with: one entry, not three.
        for sharding, again in product(shardings if dp * cp > 1 else ("none",), recompute):
            yield Layout(tp, cp, dp, pp, sharding, again)


# the module's cheaper steps

# Tokens/s of MPT-3B with FP8 over BF16, 8 H100, 2,048 tokens: 30,587 / 24,143. With 512 tokens it
# is 1.31, with 8,192 1.15, with 32,768 1.00. Source: llm-foundry, scripts/train/benchmarking.
FP8_SPEEDUP = 30_587 / 24_143
POWERSGD_RANK = 4
TOPK_SHARE = 0.01
TOPK_ENTRY = 8  # bytes: a float32 value and an int32 index
LOCAL_STEPS = 50


def changes(job: Job, cluster: Cluster, layout: Layout) -> list[tuple[str, Prediction, str]]:
    """Return name, prediction and price of the layout as it is, and of each change it allows."""
    base = predict(job, cluster, layout)
    dp, m = base.traffic["dp"], job.micro_batches(layout)
    rows = [("as above", base, "")]

    def add_sender(name: str, sent: float, hidden: float, more: float, price: str) -> None:
        """Add what sends so much, `hidden` seconds of it beside backward, with more memory."""
        takes = sent / dp.rate_gb_s / 1e9
        own = replace(dp, step_bytes=sent, seconds=takes, exposed_s=max(0.0, takes - hidden))
        seconds, held = base.seconds | {"dp": own.exposed_s}, base.memory | {"copies": more}
        sends = base.traffic | {"dp": own}
        rows.append((name, replace(base, traffic=sends, seconds=seconds, memory=held), price))

    for kind in RECOMPUTE:
        if kind != layout.recompute:
            other = predict(job, cluster, replace(layout, recompute=kind))
            share = other.executed_flops / base.executed_flops - 1
            rows.append((f"recompute {kind}", other, f"{share:+.0%} operations"))
    for size in (job.micro_batch_size // 2, job.micro_batch_size * 2):
        if size and job.global_batch_size % (size * layout.dp) == 0:
            other = replace(job, micro_batch_size=size)
            name = f"{other.micro_batches(layout)} micro-batches of {size}"
            rows.append((name, predict(other, cluster, layout), "none"))
    faster = replace(cluster, gpu_tflops=cluster.gpu_tflops * FP8_SPEEDUP)
    rows.append(("fp8 matmuls", predict(job, faster, layout), "rounding"))
    if layout.replicas == 1:
        return rows
    add_sender("without overlap", dp.step_bytes, 0, 0, "none")  # what buckets and prefetch save
    halved = replace(job, reduce_bytes=memory.BF16)
    rows.append(("bf16 gradients", predict(halved, cluster, layout), "rounding"))
    if layout.gpus > layout.replicas or layout.sharding != "none":
        return rows
    # Only replicas that hold all weights can do the rest. Backward waits in the hooks of PowerSGD
    # and top-k, which hide nothing. Their computing is left out: their steps are lower bounds.
    weights = memory.weights_of_stage(job.config, layout, 0)
    copy = memory.FP32 * weights  # what error feedback did not send yet, or a set of weights
    with torch.device("meta"):
        numbers = traffic.powersgd_numbers(Transformer(job.config).parameters(), POWERSGD_RANK)
    low_rank = dp.step_bytes * numbers / weights
    # An all-gather of what each rank chose: it grows with the ranks.
    chosen = (layout.replicas - 1) * TOPK_SHARE * weights * TOPK_ENTRY
    if m > 1:
        add_sender("without no_sync", dp.step_bytes * m, dp.behind_s * m, 0, "none")
    add_sender(f"PowerSGD, rank {POWERSGD_RANK}", low_rank, 0, copy, "loss, two passes")
    add_sender(f"top {TOPK_SHARE:.0%}", chosen, 0, copy, "loss")
    add_sender(f"DiLoCo, {LOCAL_STEPS} steps", dp.step_bytes / LOCAL_STEPS, 0, 2 * copy, "loss")
    return rows


def list_changes(report: Report, job: Job, cluster: Cluster, layout: Layout) -> None:
    """Print the changes beside the layout as it is."""
    found, rows = changes(job, cluster, layout), []
    for name, changed, price in found:
        dp = changed.traffic["dp"]
        sent = f"{dp.step_bytes / 1e9:.2f} GB", f"{dp.seconds:.3f} s", f"{dp.exposed_s:.3f} s"
        held = "too much: " * (not changed.fits) + f"{changed.memory_gib:.1f} GiB"
        rows.append((name, *sent, held, f"{changed.step_s:.3f} s", price))
    report.table(rows, ("change", "dp sends", "takes", "exposed", "memory", "step", "price"))
    report.metrics["step_time_s_by_change"] = {name: changed.step_s for name, changed, _ in found}


# published runs

# Matmuls at 0.6 of the data sheet's peak: between the 0.80 (H100) and 0.86 (A100) that one large
# matmul reaches (ml-engineering) and the 0.43 and 0.52 of the best whole runs below.
OF_PEAK = 0.6
H100 = Cluster(8, round(OF_PEAK * 989.4), 350, 45, 20, 80)  # sources: combining.py --help
# NVLink: all-reduce of 1 GiB on 8 A100s (vTrain, MICRO 2024). Network: 0.9 of 200 Gb/s (Selene).
A100 = Cluster(8, round(OF_PEAK * 312), 229, 22.5, 20, 80)
# One rate for all sizes: matrices of width 20,480 run faster than 0.6, those of width 2,304 slower;
# what the formulas leave out makes a prediction high. Operations counted twice leave the band;
# smaller terms are held by pairs of runs, and by the tests' counts.
PUBLISHED = json.loads(Path(__file__).with_name("combining_published.json").read_text())
BAND = 1.125, 0.275  # predicted over published: from 0.85 to 1.4


def gpt(layers: int, dim: int, heads: int, vocab_size: int = 51_200) -> TransformerConfig:
    """Return GPT's shape: its two matrices of 4 D hold what SwiGLU's three of 8/3 D do."""
    sizes = dim, layers, heads, heads, round(8 / 3 * dim), 2048
    return TransformerConfig(vocab_size, *sizes, tied_embeddings=True)


def compare(report: Report) -> list[tuple[str, Layout, float, float]]:
    """Check all published runs; return name, layout, TFLOP/s per GPU, published and predicted."""
    rows = []
    for run in PUBLISHED["runs"]:
        config = gpt(*run["gpt"]) if "gpt" in run else memory.LLAMA3_405B
        share = 1.0 if "gpt" in run else 0.5  # of the scores: Llama 3 was trained with flash
        job, layout = Job(config, *run["job"], causal_share=share), Layout(*run["layout"])
        prediction = predict(job, A100 if "gpt" in run else H100, layout)
        flops = prediction.model_flops
        name, paper = run["name"], f"published, {run['name']}"
        if run["counts_recompute"]:
            flops = prediction.executed_flops
        predicted = flops / prediction.step_s / 1e12
        # Where a step's time was published, it gets the same operations.
        measured = run.get("tflops") or flops / run["step_s"] / 1e12
        weights, rounding = config.num_parameters() / 1e9, 0.05 + 0.003 * run["billions"]
        report.check(f"{name}: weights, 1e9", weights, run["billions"], rounding, paper)
        report.check(f"{name}: predicted over published", predicted / measured, *BAND, paper)
        rows.append((name, layout, measured, predicted))
        for axis, each in prediction.traffic.items():
            if axis != "dp" and each.size > 1:
                groups = torch.arange(layout.gpus).view(layout.pp, layout.dp, layout.cp, layout.tp)
                group = groups.movedim(("pp", "dp", "cp", "tp").index(axis), 0).flatten(1)[:, 0]
                nodes = len(set((group // 8).tolist()))
                measured_link = f"{name}: {axis}'s links that are NVLink"
                report.check(measured_link, int(each.link == "NVLink"), int(nodes == 1), 0, "nodes")
    check_ratios(report, rows)
    check_by_hand(report)
    return rows


def check_by_hand(report: Report) -> None:
    """Check what no published run shows: Llama 3 70B, worked out from combining.md's table."""
    width, kv_dim, ffn, words, heads, layers = 8192, 1024, 28_672, 128_256, 64, 80
    tokens = 8192
    job = Job(memory.MODELS["llama3-70b"], tokens, 512, 1)
    split = predict(job, H100, Layout(8, 1, 8, 1, "full", "full"))
    tp, dp = split.traffic["tp"], split.traffic["dp"]
    ring = predict(job, H100, Layout(1, 4, 16, 1, "full", "swiglu")).traffic["cp"]
    one_layer = 2 * (6 * width + 2 * kv_dim + 4 * ffn) + 4 * (heads + 2)
    for name, found, expected, tolerance in (
        ("tp 8: exposed, of its time; 12 of 14 at least", tp.exposed_s / tp.seconds, 13 / 14, 0.08),
        ("cp 4: bytes per layer", ring.layer_bytes, 8 * 3 * tokens / 4 * 2 * kv_dim, 0),
        ("dp 8, full: bytes of 64 micro-batches", dp.step_bytes, 64 * 7 / 8 * 70.55e9, 1e-3),
        ("dp 8, full: GB/s of one card a node", dp.rate_gb_s, H100.network_gb_s, 0),
        ("recompute full: bytes kept", split.memory["activations"],
         tokens / 8 * (layers * 2 * width + one_layer), 0),
        ("logits: bytes", split.memory["logits"], tokens / 8 * (10 * words + 4 * width), 0),
    ):  # fmt: skip
        report.check(f"70B: {name}", found, expected, tolerance * expected, "combining.md's table")


def check_ratios(report: Report, rows) -> None:
    """Two runs that differ in one thing: rates cancel, so the band is narrow."""
    table_5 = "recomputation, Korthikanti, table 5"
    pairs = (  # without a bubble the prediction of the first would be 1.01
        ("Llama 3: 32 over 16 micro-batches", 0, 1, 0.03, "bubble, table 4"),
        ("175B: recompute none over full", 10, 9, 0.1, table_5),
        ("530B: recompute none over full", 12, 11, 0.1, table_5),
    )
    for name, one, other, tolerance, source in pairs:
        measured, predicted = (rows[one][side] / rows[other][side] for side in (2, 3))
        report.check(name, predicted, measured, tolerance, source)
