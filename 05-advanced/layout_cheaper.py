"""What the cheaper steps of this module would change in a layout: bytes, seconds, memory."""

from dataclasses import dataclass, replace

from dist_common.measure import GIB
from dist_common.models import TransformerConfig
from dist_common.report import Report
from layout_counts import layer_on_meta
from layout_model import BF16, FP32, RECOMPUTE, Cluster, Job, Layout, weights_of_stage
from layout_traffic import Prediction, predict

# Tokens/s of MPT-3B with FP8 over BF16, 8 H100, 2,048 tokens: 30,587 / 24,143. With 512 tokens it
# is 1.31, with 8,192 1.15, with 32,768 1.00. Source: llm-foundry, scripts/train/benchmarking.
FP8_SPEEDUP = 30_587 / 24_143
POWERSGD_RANK = 4
TOPK_SHARE = 0.01
TOPK_ENTRY = 8  # bytes: a float32 value and an int32 index
LOCAL_STEPS = 50


@dataclass(frozen=True)
class Change:
    """One change to a layout, and what becomes of its step. Units: bytes and seconds per step."""

    name: str
    sent: float  # by the dp axis, from each GPU
    takes: float
    exposed: float
    memory: float  # bytes on the fullest GPU
    limit: float  # bytes
    step: float
    price: str


def powersgd_numbers(config: TransformerConfig, rank: int) -> int:
    """Return the numbers that PowerSGD all-reduces in place of all gradients.

    A matrix (n, m) becomes P (n, r) and Q (m, r); vectors are sent whole. Source: Vogels et al.
    (2019), algorithm 1.
    """
    kv_dim = config.dim // config.num_heads * config.num_kv_heads

    def factors(n: int, m: int) -> int:
        return min(rank, n, m) * (n + m)

    D, F, V = config.dim, config.ffn_dim, config.vocab_size
    layer = 2 * factors(D, D) + 2 * factors(kv_dim, D) + 3 * factors(F, D) + 2 * D
    tables = 1 if config.tied_embeddings else 2
    return config.num_layers * layer + tables * factors(V, D) + D


def changes(job: Job, cluster: Cluster, layout: Layout) -> list[Change]:
    """Return the layout as it is, and after each change that it allows."""
    base = predict(job, cluster, layout)
    rows = [as_change("as above", base, "")]
    for kind in RECOMPUTE:
        if kind != layout.recompute:
            other = predict(job, cluster, replace(layout, recompute=kind))
            share = other.executed_flops / base.executed_flops - 1
            rows.append(as_change(f"recompute {kind}", other, f"{share:+.0%} operations"))
    for size in (job.micro_batch_size // 2, job.micro_batch_size * 2):
        if size and job.global_batch_size % (size * layout.dp) == 0:
            other = replace(job, micro_batch_size=size)
            name = f"{other.micro_batches(layout)} micro-batches of {size}"
            rows.append(as_change(name, predict(other, cluster, layout), "none"))
    faster = replace(cluster, gpu_tflops=cluster.gpu_tflops * FP8_SPEEDUP)
    rows.append(as_change("fp8 matmuls", predict(job, faster, layout), "rounding"))
    if layout.replicas == 1:
        return rows
    rows.append(without_overlap(base))
    halved = predict(replace(job, reduce_bytes=BF16), cluster, layout)
    rows.append(as_change("bf16 gradients", halved, "rounding"))
    if layout.gpus == layout.replicas and layout.sharding == "none":
        rows += changes_of_ddp(job, cluster, layout, base)
    return rows


def as_change(name: str, prediction: Prediction, price: str) -> Change:
    dp = prediction.traffic[2]
    times = dp.step_bytes, dp.seconds, dp.exposed_s
    memory = sum(prediction.memory.values()), prediction.memory_limit
    return Change(name, *times, *memory, prediction.step_s, price)


def without_overlap(base: Prediction) -> Change:
    """Wait for every byte of dp: what buckets and prefetch save."""
    plain, dp = as_change("without overlap", base, "none"), base.traffic[2]
    return replace(plain, exposed=dp.seconds, step=base.step_s - dp.exposed_s + dp.seconds)


def changes_of_ddp(job: Job, cluster: Cluster, layout: Layout, base: Prediction) -> list[Change]:
    """Return what only replicas that hold all weights can do.

    Backward waits in the hooks of PowerSGD and top-k, which hide nothing. Their computing is left
    out: their steps are lower bounds.
    """
    dp, n = base.traffic[2], layout.replicas
    weights = weights_of_stage(job.config, layout, 0)
    kept, limit = sum(base.memory.values()), base.memory_limit
    copy = FP32 * weights  # what error feedback did not send yet, or a set of weights

    def sending(name: str, sent: float, hidden: float, memory: float, price: str) -> Change:
        takes = sent / dp.rate_gb_s / 1e9
        exposed = max(0.0, takes - hidden)
        step = base.step_s - dp.exposed_s + exposed
        return Change(name, sent, takes, exposed, kept + memory, limit, step, price)

    m = job.micro_batches(layout)
    low_rank = dp.step_bytes * powersgd_numbers(job.config, POWERSGD_RANK) / weights
    # An all-gather of what each rank chose: it grows with the ranks.
    chosen = (n - 1) * TOPK_SHARE * weights * TOPK_ENTRY
    rows = [
        sending("without no_sync", dp.step_bytes * m, dp.behind_s * m, 0, "none"),
        sending(f"PowerSGD, rank {POWERSGD_RANK}", low_rank, 0, copy, "loss, two passes"),
        sending(f"top {TOPK_SHARE:.0%}", chosen, 0, copy, "loss"),
        sending(f"DiLoCo, {LOCAL_STEPS} steps", dp.step_bytes / LOCAL_STEPS, 0, 2 * copy, "loss"),
    ]  # fmt: skip
    return rows if m > 1 else rows[1:]


def list_changes(report: Report, job: Job, cluster: Cluster, layout: Layout) -> None:
    """Print the changes, and check PowerSGD's formula on the tensors of a layer."""
    found = changes(job, cluster, layout)
    rows = []
    for each in found:
        sizes = f"{each.sent / 1e9:.2f} GB", f"{each.takes:.3f} s", f"{each.exposed:.3f} s"
        over = "too much: " * (each.memory > found[0].limit)
        whole = f"{over}{each.memory / GIB:.1f} GiB", f"{each.step:.3f} s"
        rows.append((each.name, *sizes, *whole, each.price))
    headers = ("change", "dp sends", "takes", "exposed", "memory", "step", "price")
    report.table(rows, headers)
    block, _ = layer_on_meta(job.config)
    one = replace(job.config, num_layers=job.config.num_layers + 1)
    layer = powersgd_numbers(one, POWERSGD_RANK) - powersgd_numbers(job.config, POWERSGD_RANK)
    sent = sum(
        POWERSGD_RANK * sum(weight.shape) if weight.dim() == 2 else weight.numel()
        for weight in block.parameters()
    )
    report.check("numbers PowerSGD sends per layer", layer, sent, 0, "Block on meta")
    report.metrics["step_time_s_by_change"] = {each.name: each.step for each in found}
