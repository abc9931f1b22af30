"""What a layer, and a layout of GPUs, computes and holds: formulas only.

A layout is tp x cp x dp x pp GPUs. bfloat16 computes, float32 keeps master weights, gradients and
Adam's moments. Letters as in TransformerConfig: V, D, L, F; b sequences of T tokens a micro-batch.
"""

from dataclasses import dataclass, replace

from advanced_parts.kept_bytes import as_on_a_gpu  # noqa: F401
from advanced_parts.pipeline_schedules import peak_formula
from dist_common.costs import compute
from dist_common.costs import job as costs
from dist_common.costs import memory as costs_memory
from dist_common.costs import models as costs_models
from dist_common.costs.memory import BF16, FP32, layers_of_stages
from dist_common.costs.models import of_config as shape_of
from dist_common.models import PRESETS, TransformerConfig

# Grattafiori et al., The Llama 3 Herd of Models (2024), table 3.
LLAMA3_405B = TransformerConfig(128_256, 16_384, 126, 128, 8, 53_248, 131_072, rope_theta=5e5)
MODELS = {**PRESETS, "llama3-405b": LLAMA3_405B}

OPTIMIZER = costs_memory.adam_bytes(master=True)["optimizer"]  # bytes per weight: 12
LOGITS = 10  # bytes per logit: bfloat16, float32 probabilities, float32 gradient
SHARDINGS = ("none", "grad-op", "full")
RECOMPUTE = ("none", "swiglu", "full")


@dataclass(frozen=True)
class Layout:
    """How many ways each axis splits the job, what replicas shard, what backward recomputes."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    sharding: str = "full"
    recompute: str = "none"

    @property
    def gpus(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def replicas(self) -> int:
        """Ranks that hold the same weights: those of cp see other tokens, so they average too."""
        return self.dp * self.cp

    def __str__(self) -> str:
        return f"tp {self.tp} x cp {self.cp} x dp {self.dp} x pp {self.pp}"


@dataclass(frozen=True)
class Job:
    """What is trained, and in what order its axes number the ranks (innermost first)."""

    config: TransformerConfig
    seq_len: int
    global_batch_size: int  # sequences
    micro_batch_size: int  # sequences
    schedule: str = "1f1b"
    virtual_stages: int = 1
    order: tuple[str, ...] = ("tp", "cp", "dp", "pp")
    causal_share: float = 0.5  # of the scores that attention computes: flash skips the others
    reduce_bytes: float = FP32  # of a gradient on its way

    def micro_batches(self, layout: Layout) -> int:
        return self.global_batch_size // (layout.dp * self.micro_batch_size)

    def tokens(self, layout: Layout) -> int:
        """Tokens of a micro-batch on one rank of cp: b T / cp."""
        return self.micro_batch_size * self.seq_len // layout.cp


@dataclass(frozen=True)
class Cluster:
    """Rates that are reached, not those of a data sheet."""

    gpus_per_node: int
    gpu_tflops: float
    nvlink_gb_s: float
    network_gb_s: float  # of each GPU's own network card
    latency_us: float  # of a collective of few bytes, or of a hop to the neighbour
    gpu_memory_gib: float

    def seconds(self, sent: float, rate_gb_s: float, calls: float) -> float:
        """Return the time of `calls` that send `sent` bytes from each GPU in all."""
        return sent / rate_gb_s / 1e9 + calls * self.latency_us / 1e6


def key_width(config: TransformerConfig) -> int:
    """Return the width of keys and of values: query heads may share them."""
    return costs_models.key_width(shape_of(config))


def products(config: TransformerConfig) -> list[int]:
    """Return the weights of a layer's seven products, in the order of its forward."""
    shapes = costs_models.shapes_of_kind(shape_of(config), dense=True)
    return [outputs * inputs for outputs, inputs, _ in shapes if inputs > 1]


def layer_matrices(config: TransformerConfig) -> int:
    """Return the weights of a layer's matrices, which tp splits."""
    return costs_models.matrix_parameters(shape_of(config), 0)


def attention_flops(config: TransformerConfig, seq_len: int) -> int:
    """Return attention's operations per token: scores with seq_len tokens, and their values."""
    return compute.attention_flops(shape_of(config), seq_len)


def activation_bytes(config: TransformerConfig, recompute: str = "none", number: int = BF16) -> int:
    """Return the bytes that backward needs of one token and layer (after Korthikanti, 2022).

    bfloat16: the inputs of both norms and what they return, queries, the attention's output (6 D),
    keys, values, and four times F: gate, its SiLU, up, and their product. float32: a number per
    head for flash attention, one per norm. No dropout, so no masks; flash keeps no scores. With
    `swiglu` a fused kernel keeps gate and up, and computes SiLU and product again. `number` are the
    bytes of what is bfloat16 here.
    """
    job = costs.Job(shape_of(config), 1, 1, precision="bf16" if number == BF16 else "fp32")
    kept = costs_memory.layer_bytes(job, costs.Layout())
    return round(kept) - (2 * number * config.ffn_dim if recompute == "swiglu" else 0)


def weights_of_stage(config: TransformerConfig, layout: Layout, stage: int) -> float:
    """Return the weights on a GPU of a stage: norms are whole on each rank of tp."""
    job = costs.Job(shape_of(config), 1, 1)
    return costs_memory.weights_of_stage(job, costs.Layout(tp=layout.tp, pp=layout.pp), stage)[0]


def forward_flops(job: Job, layout: Layout) -> dict[str, float]:
    """Return a micro-batch's operations on one GPU: a layer's matrices, its attention, the head."""
    config, tokens = job.config, job.tokens(layout) / layout.tp
    return {
        "matrices": 2 * layer_matrices(config) * tokens,
        "attention": attention_flops(config, job.seq_len) * tokens * job.causal_share,
        "head": 2 * config.vocab_size * config.dim * tokens,
    }


def compute_seconds(job: Job, cluster: Cluster, layout: Layout) -> float:
    """Return a micro-batch's forward on the slowest stage; backward takes twice as long."""
    flops = forward_flops(job, layout)
    layer = flops["matrices"] + flops["attention"]
    layers = layers_of_stages(job.config.num_layers, layout.pp)
    slowest = max(max(layers) * layer, layers[-1] * layer + flops["head"])
    return slowest / (cluster.gpu_tflops * 1e12)


def in_flight(job: Job, layout: Layout, stage: int) -> float:
    """Return the micro-batches whose activations a stage holds at once."""
    p, m = layout.pp, job.micro_batches(layout)
    return peak_formula(job.schedule, stage, p, m, job.virtual_stages)


def memory_of_stage(job: Job, layout: Layout, stage: int) -> dict[str, float]:
    """Return bytes by part on one GPU of a stage, at the peak."""
    config, n, full = job.config, layout.replicas, layout.sharding == "full"
    weights = weights_of_stage(config, layout, stage)
    layer = layer_matrices(config) / layout.tp + 2 * config.dim
    sharded = layout.sharding != "none"
    reduces_at_once = full or (sharded and job.micro_batches(layout) == 1)
    layers = layers_of_stages(config.num_layers, layout.pp)[stage]
    tokens = job.tokens(layout) / layout.tp  # the rank's slice: sequence parallel
    # Full sharding holds the tables, a layer in use, and the next layer on its way.
    gathered = weights - (layers - 2) * layer if full else weights
    held = layers * in_flight(job, layout, stage)  # layers' tensors, each of a micro-batch
    kept = activation_bytes(config, layout.recompute)
    activations = held * kept
    if layout.recompute == "full":  # each layer's input; one layer whole while it is recomputed
        activations = held * BF16 * config.dim + kept
    head = LOGITS * config.vocab_size + 2 * BF16 * config.dim
    return {
        "weights": BF16 * gathered,
        "gradients": FP32 * (weights / n + layer if reduces_at_once else weights),
        "optimizer": OPTIMIZER * weights / (n if sharded else 1),
        "activations": activations * tokens,
        "logits": head * tokens if stage == layout.pp - 1 else 0,
    }


def kept_by_the_template(config: TransformerConfig, layout: Layout) -> float:
    """Return bytes per layer and token of a rank of cp that hybrid_parallelism.py keeps.

    What the plan has, but for two: its tp keeps whole what norms return, gathered for the matrices
    that read it; its cp keeps all keys and values, and attention's output in parts and joined.
    """
    recompute = "full" if layout.recompute == "full" else "none"
    same = costs.Layout(tp=layout.tp, cp=layout.cp, cp_kind="gather", recompute=recompute)
    return costs_memory.kept_bytes(costs.Job(shape_of(config), 1, 1), same, 0)


def of_the_template(job: Job, layout: Layout, stage: int) -> dict[str, float]:
    """Return bytes by part as memory_of_stage does, but activations as the template keeps them."""
    layers = layers_of_stages(job.config.num_layers, layout.pp)[stage]
    kept = layers * in_flight(job, layout, stage) * kept_by_the_template(job.config, layout)
    if layout.recompute == "full":  # and one layer whole while it is recomputed
        kept += kept_by_the_template(job.config, replace(layout, recompute="none"))
    return memory_of_stage(job, layout, stage) | {"activations": kept * job.tokens(layout)}
