"""The bytes of fine-tuning on a GPU: frozen weights, adapters, activations.

A frozen matrix keeps no input for backward, because its weight has no gradient, so LoRA
keeps fewer activations than full training. A 4-bit matrix keeps its input, because the
kernel saves it. The formulas follow litgpt's eager code line by line, and litgpt's
tables check them.
"""

from __future__ import annotations

from dataclasses import replace

from planner import activations, models
from planner.activations import BF16, FP32, logit_bytes, tokens_of
from planner.job import Layout, ModelShape, TrainingJob

QUANT = {"lora": "", "qlora": "nf4-dq"}  # of a method's frozen matrices
METHODS = ("full", "lora", "adapter", "adapter_v2")
TARGETS = ("query", "key", "value", "projection", "mlp", "head")
NF4_BLOCK = 64  # weights that share a scale (Dettmers et al., 2023, section 3)
SCALE_BLOCK = 256  # scales that share a scale: double quantization
PROMPT = 10  # learned rows of LLaMA-Adapter's prefix (Zhang et al., 2023)
# Bytes per logit, fitted on the `fit` rows of finetune_memory.csv: 2 for the logit, 4
# for its log-probability, and the rest for the backward of litgpt's loss in chunks.
LOGIT = 10
# Kernels of 2024 unpacked 4-bit weights at this share of the memory's rate, fitted on
# Answer.AI's rows of runs.csv. Kernels of 2026 reach the whole rate.
NF4_RATE = 0.2


def frozen_weight_bytes(quant: str = "") -> float:
    """Return the bytes of a frozen weight of a matrix: 16 bits, or NF4 with its scales.

    NF4: half a byte, a float32 scale for 64; with double quantization ("nf4-dq") the
    scales are 8 bits each, with a float32 scale for 256 of them (QLoRA, section 3).
    """
    if quant == "nf4":
        return 0.5 + FP32 / NF4_BLOCK
    if quant == "nf4-dq":
        return 0.5 + (1 + FP32 / SCALE_BLOCK) / NF4_BLOCK
    if quant:
        raise ValueError(f"quant must be nf4 or nf4-dq, not {quant!r}")
    return BF16


def adapter_shapes(
    model: ModelShape, targets: tuple[str, ...]
) -> list[tuple[int, int]]:
    """Return inputs and outputs of a layer's matrices that LoRA is added to."""
    h, q, kv, wide = (
        model.hidden,
        models.query_width(model),
        models.key_width(model),
        model.ffn,
    )
    inner = [(h, wide)] * (2 if model.gated else 1) + [(wide, h)]
    shapes = {
        "query": [(h, q)],
        "key": [(h, kv)],
        "value": [(h, kv)],
        "projection": [(q, h)],
    }
    shapes["mlp"] = inner
    return [
        shape for name, pairs in shapes.items() if name in targets for shape in pairs
    ]


def lora_shapes(outputs: int, inputs: int, rank: int) -> list[tuple[int, int]]:
    """Return the shapes (rows, columns) of A and B of a matrix (Hu et al., 2021)."""
    return [(rank, inputs), (outputs, rank)]


def trained_parameters(
    model: ModelShape,
    method: str,
    rank: int = 8,
    targets: tuple[str, ...] = ("query", "value"),
) -> int:
    """Return the number of trained weights.

    LoRA trains A and B of each matrix. LLaMA-Adapter trains a prefix and a gate per
    head in all layers but the first two. Adapter v2 also trains the norms, and a scale
    and a bias of each output.
    """
    h, q, kv = model.hidden, models.query_width(model), models.key_width(model)
    if method == "full":
        return finetuned_parameters(model)
    if method == "lora":
        shapes = adapter_shapes(model, targets) * model.layers
        shapes += [(h, model.vocab)] if "head" in targets else []
        pairs = (lora_shapes(outputs, inputs, rank) for inputs, outputs in shapes)
        return sum(rows * columns for pair in pairs for rows, columns in pair)
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, not {method!r}")
    prefixed = model.layers - 2
    prompts = prefixed * (PROMPT * h + model.heads)
    if method == "adapter":
        return prompts
    outputs = q + 2 * kv + 2 * h + model.ffn * (2 if model.gated else 1)
    norms = (2 * model.layers + 1) * h * (1 if model.gated else 2)
    return prompts + norms + 2 * (outputs * model.layers + model.vocab)


def finetuned_parameters(model: ModelShape) -> int:
    """Return all weights with an untied output layer, as libraries load it."""
    tied = models.table_parameters(model) if model.tied_embeddings else 0
    return models.parameters(model) + tied


def matrix_parameters(model: ModelShape) -> int:
    """Return the weights that are quantized: the matrices of layers and output."""
    layers = sum(
        models.matrix_parameters(model, layer) for layer in range(model.layers)
    )
    return layers + models.table_parameters(model)


def norm_bytes(model: ModelShape, method: str, mixed: bool = False) -> float:
    """Return bytes per token of a norm's input: float32 (RMSNorm) or 16 bits
    (LayerNorm).

    A trained RMSNorm also keeps its float32 result before the weight.
    """
    kept = BF16 if not model.gated and not mixed else FP32
    if model.gated and method in ("full", "adapter_v2"):
        kept += FP32
    return kept * model.hidden


def input_bytes(model: ModelShape) -> float:
    """Return bytes per token of matrices' inputs that only these matrices keep.

    These are the outputs of both norms and the last matrix' input. Trained and 4-bit
    matrices keep them.
    """
    return BF16 * (2 * model.hidden + model.ffn)


def attention_bytes(model: ModelShape, method: str, seq_len: int) -> float:
    """Return bytes per token of attention: queries, keys, values, output, log-sum-exp.

    Values are a view of the fused product of queries, keys and values, which stays. If
    query heads share keys (GQA), keys and values are copied for each head instead.
    """
    q, kv = models.query_width(model), models.key_width(model)
    values = q if model.kv_heads < model.heads else q + 2 * kv
    kept = BF16 * (3 * q + values) + FP32 * model.heads
    if model.softcap:  # no flash kernel: tanh, float32 probabilities, 16-bit ones
        kept += (BF16 + FP32 + BF16) * model.heads * seq_len
    return kept + (BF16 * q if method.startswith("adapter") else 0)


def mlp_bytes(model: ModelShape) -> float:
    """Return bytes per token of a feed-forward: gate, its activation, up; or GeLU's
    input.

    With experts, each of top_k experts gets a copy of the token and returns a copy.
    """
    one = BF16 * (3 if model.gated else 1) * model.ffn
    return one if not model.experts else model.top_k * (one + 2 * BF16 * model.hidden)


def adapter_bytes(model: ModelShape, method: str, targets: tuple[str, ...]) -> float:
    """Return bytes per token that a layer's adapters keep.

    LoRA keeps its input after dropout, and the mask: 3 bytes a number. If only some of
    queries, keys and values are adapted, their outputs are copied into a padded tensor.
    Adapter v2 keeps each matrix' output before its scale.
    """
    h, q, kv = model.hidden, models.query_width(model), models.key_width(model)
    if method == "adapter_v2":
        return BF16 * (q + 2 * kv + 2 * h + model.ffn * (2 if model.gated else 1))
    if method != "lora":
        return 0.0
    mask = 1
    fused = [name for name in ("query", "key", "value") if name in targets]
    kept = (BF16 + mask) * h if fused else 0
    if 0 < len(fused) < 3:
        kept += BF16 * sum(q if name == "query" else kv for name in fused)
    rest = tuple(name for name in targets if name in ("projection", "mlp"))
    return kept + (BF16 + mask) * sum(
        inputs for inputs, _ in adapter_shapes(model, rest)
    )


def layer_bytes(
    model: ModelShape,
    method: str,
    seq_len: int,
    quant: str,
    targets: tuple[str, ...],
    mixed: bool,
) -> float:
    """Return bytes per token that a layer keeps for backward."""
    kept = model.norms * norm_bytes(model, method, mixed)
    kept += attention_bytes(model, method, seq_len) + mlp_bytes(model)
    if method == "full" or quant:
        kept += input_bytes(model)
    return kept + adapter_bytes(model, method, targets)


def frozen_bytes(model: ModelShape, method: str, quant: str, mixed: bool) -> float:
    """Return the bytes of frozen weights.

    Under autocast (`mixed`) they are float32, and autograd keeps a 16-bit cast of each
    frozen matrix for the gradient of its input.
    """
    if method == "full":
        return 0.0
    matrices = matrix_parameters(model)
    rest = finetuned_parameters(model) - matrices
    if mixed:
        return FP32 * rest + (FP32 + BF16) * matrices
    return BF16 * rest + frozen_weight_bytes(quant) * matrices


def memory_of_finetune(
    model: ModelShape,
    method: str = "lora",
    seq_len: int = 512,
    micro_batch: int = 1,
    quant: str = "",
    rank: int = 8,
    targets: tuple[str, ...] = ("query", "value"),
    gpus: int = 1,
    mixed: bool = False,
    equal_steps: bool = True,
    recompute: bool | None = None,
    frees_frozen: bool = True,
) -> dict[str, float]:
    """Return bytes by part on a GPU, as torch.cuda.max_memory_allocated would count.

    Weights, gradients and both of Adam's moments are 16 bits (bf16-true), float32 with
    `mixed`.

    gpus: FSDP shards everything over them.
    equal_steps: all steps have the same length, so a 4-bit matrix still holds the last
        step's input at the peak (bitsandbytes' MatMul4Bit keeps it outside autograd).
    recompute: each block keeps only its input (None: if FSDP is used).
    frees_frozen: frozen weights are freed after a block's backward, as FSDP2 does.
        FSDP1 keeps them, because they have no gradient hook.

    Raises: ValueError for an unknown method or quant.
    """
    tokens = seq_len * micro_batch
    trained = trained_parameters(model, method, rank, targets)
    number = FP32 if mixed else BF16
    frozen = frozen_bytes(model, method, quant, mixed)
    kept = tokens * layer_bytes(model, method, seq_len, quant, targets, mixed)
    activations = model.layers * kept
    if recompute or (recompute is None and gpus > 1):
        activations = kept + tokens * model.layers * number * model.hidden
    elif quant and equal_steps:
        inputs = input_bytes(model) + BF16 * models.query_width(model)
        activations += tokens * model.layers * inputs
    head = (
        number * model.hidden * tokens * (1 + ("head" in targets and method == "lora"))
    )
    held = {
        "frozen": frozen / gpus,
        "parameters": number * trained / gpus,
        "gradients": number * trained / gpus,
        "optimizer": 2 * number * trained / gpus,
        "activations": activations + head,
        "logits": LOGIT * tokens * model.vocab,
        "gathered": 0.0,
        "buffers": number * models.table_parameters(model) if quant else 0.0,
    }
    if gpus == 1:
        return held
    held["gathered"] = gathered_bytes(model, frozen, number, frees_frozen)
    if method == "full":  # several micro-batches add them up whole (no_sync)
        held["gradients"] = number * trained
    if frozen and not frees_frozen:
        # The peak is at the end of backward, when only the logits' values are left.
        held["logits"] = number * tokens * model.vocab
    return held


def gathered_bytes(
    model: ModelShape, frozen: float, number: int, frees_frozen: bool
) -> float:
    """Return the bytes of gathered weights at the peak of FSDP.

    FSDP holds both tables from forward to backward, a block, and the next block. Full
    training adds the gradients of a block and of the tables. FSDP1 holds all frozen
    weights late in backward, with room for the gradients of one block.
    """
    layer = number * models.layer_parameters(model)
    tables = 2 * number * models.table_parameters(model)
    if not frozen:
        return 2 * tables + 3 * layer
    if not frees_frozen:
        return frozen + 2 * layer
    return tables + 2 * max(0.0, frozen - tables) / model.layers


# A plan of adapters


def every_target(model: ModelShape) -> tuple[str, ...]:
    """Return the names of all matrices that get adapters: all but the experts'."""
    return TARGETS[:4] if model.experts else TARGETS[:5]


def with_adapters(job: TrainingJob, method: str, rank: int) -> TrainingJob:
    """Freeze a job's weights, in 4 bits for qlora, and add trained adapters."""
    return replace(
        job,
        frozen=True,
        adapter_rank=rank,
        adapter_targets=every_target(job.model),
        quant=QUANT[method],
    )


def memory_of_adapters(job: TrainingJob, layout: Layout) -> dict[str, float]:
    """Return bytes by part on a GPU that trains adapters next to frozen weights.

    Adapters, their gradients and Adam's moments are float32. tp divides matrices and
    their activations. FSDP (ZeRO-3) shards all weights, ZeRO-2 only the adapters'
    states. With recomputation a block keeps only its input (Chen et al., 2016). The
    peak is at the loss, or in the backward of a block.
    """
    model, t = job.model, layout.tp
    shards = layout.shards if layout.zero == 3 else 1
    states = layout.shards if layout.zero >= 2 else 1
    targets = job.adapter_targets
    trained = trained_parameters(model, "lora", job.adapter_rank, targets) / t
    tokens = tokens_of(job, layout)
    layer = layer_bytes(model, "lora", job.seq_len, job.quant, targets, False) / t
    if job.compiled:  # Fused kernels keep no inputs of frozen matrices.
        layer = activations.layer_bytes(job, layout)
    kept = model.layers * layer
    if layout.recompute == "full":
        kept = model.layers * BF16 * model.hidden / t
    weights = models.layer_parameters(model) / t
    block = 2 * weights * frozen_weight_bytes(job.quant) if shards > 1 else 0.0
    largest = model.hidden * models.dense_width(model) / t
    unpacked = BF16 * largest if job.quant else 0.0  # one matrix at a time
    frozen = frozen_bytes(model, "lora", job.quant, False) / t
    held = {
        "parameters": frozen / shards + FP32 * trained / states,
        "gradients": FP32 * trained / states,
        "optimizer": 2 * FP32 * trained / states,
        "gathered": block + unpacked,
    }
    at_loss = tokens * logit_bytes(job) * model.vocab / t
    in_backward = tokens * layer if layout.recompute == "full" else 0.0
    if at_loss > in_backward:
        return held | {"activations": tokens * kept, "logits": at_loss}
    return held | {"activations": tokens * kept + in_backward, "logits": 0.0}
