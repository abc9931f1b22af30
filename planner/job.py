"""The model that is trained, its job, and its layout over GPUs."""

from __future__ import annotations

from dataclasses import dataclass

AXES = ("tp", "cp", "dp", "pp")
RECOMPUTE = ("none", "selective", "full")
CP_KINDS = ("ring", "ulysses", "gather")
ATTENTION = ("flash2", "flash3", "stored")
LOSSES = ("whole", "chunked", "fused")


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder. `ffn` is the inner width of the feed-forward."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    gated: bool = True  # SwiGLU with three matrices; otherwise two matrices
    experts: int = 0  # of each layer; 0: dense
    top_k: int = 0
    tied_embeddings: bool = False
    head_dim: int = 0  # 0: hidden / heads
    learned_positions: int = 0  # rows of GPT's table of positions
    biases: bool = False  # GPT: of each matrix, and of each norm
    dense_layers: int = 0  # the first layers without experts
    shared_experts: int = 0
    dense_ffn: int = 0  # inner width of layers without experts; 0: ffn
    # Norms of a layer. Gemma has four: it also normalizes the outputs of attention and
    # feed-forward.
    norms: int = 2
    # Scores pass a tanh (Gemma 2), for which eager PyTorch has no flash kernel.
    softcap: bool = False
    # Multi-head latent attention (DeepSeek-V2): ranks of queries and of keys and
    # values. 0: queries are not compressed, or attention is plain.
    q_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0  # of a latent head, next to head_dim: the rotated numbers
    name: str = ""


@dataclass(frozen=True)
class TrainingJob:
    """A model, its batch, and its numeric formats."""

    model: ModelShape
    seq_len: int
    global_batch: int  # sequences per step
    precision: str = "bf16"  # of products: bf16, fp16, fp8, fp8-rows, fp4, fp32, tf32
    gradient_bytes: int = 4  # of a gradient while it is accumulated and reduced
    parameter_bytes: int = 2  # of a weight in forward and backward
    optimizer_bytes: int = 12  # per weight: float32 master copy and Adam's two moments
    attention: str = "flash2"  # FlashAttention 2; flash3: 3 or cuDNN; stored scores
    compiled: bool = False
    updates_in_backward: bool = False  # the optimizer runs when a gradient is ready
    frozen: bool = False  # LoRA: only the adapters get gradients
    adapter_rank: int = 0  # LoRA's; 0: no adapters
    adapter_targets: tuple[str, ...] = ()  # names of finetune.TARGETS
    quant: str = ""  # of frozen matrices: nf4, nf4-dq, or 16 bits
    unpacks_slowly: bool = False  # by the kernels of 2024 (finetune.NF4_RATE)
    dropout: bool = False  # its masks are kept (Korthikanti et al., 2022)
    loss: str = "whole"  # logits at once, in chunks of the tokens, or in a fused kernel
    stack: str = "torch"  # the library whose code runs (stacks.py)
    reduce_bytes: int = 4  # of a gradient on its way between replicas

    @property
    def flash(self) -> bool:
        """Tell whether attention stores no scores and skips the masked half."""
        return self.attention != "stored"


@dataclass(frozen=True)
class Layout:
    """The number of ranks of each axis, and how states and activations are kept.

    tp x cp x pp x dp is the number of GPUs; ep divides dp x cp.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    zero: int = 0  # 0: DDP; 1: optimizer; 2: and gradients; 3: and parameters (FSDP)
    shard: int = 0  # HSDP: GPUs of a group that shards the states; 0: all of dp x cp
    micro_batch: int = 1  # sequences
    recompute: str = "none"
    sequence_parallel: bool = True
    virtual_stages: int = 1  # of each rank of the pipeline
    cp_kind: str = "ring"
    offload: str = "none"  # none, optimizer, all (ZeRO-3)
    overlap_tp: bool = False  # tp's collectives run during products (async TP)
    overlap_dp: bool = True  # gradients are reduced during backward
    order: tuple[str, ...] = AXES  # of ranks, innermost first

    @property
    def gpus(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def replicas(self) -> int:
        """Ranks that average gradients: dp, and cp, whose ranks see other tokens."""
        return self.dp * self.cp

    @property
    def shards(self) -> int:
        """Ranks that share the sharded states."""
        return self.shard or self.replicas

    def micro_batches(self, job: TrainingJob) -> int:
        """Return the micro-batches of a step on each replica."""
        return max(1, job.global_batch // (self.dp * self.micro_batch))


@dataclass(frozen=True)
class Prediction:
    """Memory of a layout on its fullest GPU, and the time of a step."""

    layout: Layout
    memory: dict[str, float]  # bytes: parameters, gradients, optimizer, activations
    # Seconds: compute, exposed tp, cp, ep, dp and pp, bubble, optimizer, other.
    step: dict[str, float]
    model_flops: float  # of a step on all GPUs, without recomputation
    tokens: int  # of a step
    memory_limit: float  # bytes that a job may fill

    @property
    def memory_total(self) -> float:
        return sum(self.memory.values())

    @property
    def step_time_s(self) -> float:
        return sum(self.step.values())

    @property
    def fits(self) -> bool:
        return self.memory_total <= self.memory_limit

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens / self.step_time_s / self.layout.gpus

    @property
    def model_tflops_per_gpu(self) -> float:
        return self.model_flops / self.step_time_s / self.layout.gpus / 1e12
