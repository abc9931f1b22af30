"""Count what the formulas of layout_model and layout_traffic claim, on one layer without storage.

The layer is dist_common's own, at full size on the device `meta`: shapes and bytes, no memory.
"""

from dataclasses import replace
from functools import partial

import torch
from torch.utils.flop_counter import FlopCounterMode

from dist_common.models import Block, Transformer, TransformerConfig, rotary_tables
from dist_common.report import Report
from layout_model import (
    BF16,
    Job,
    Layout,
    activation_bytes,
    forward_flops,
    layer_matrices,
    layers_of_stages,
    weights_of_stage,
)  # fmt: skip
from layout_traffic import Prediction, place

SEQ_LEN = 64  # tokens that are counted; everything but attention's scores grows with them


class Flash(torch.autograd.Function):
    """What flash attention keeps for backward: its inputs, its output, a number per row."""

    @staticmethod
    def forward(ctx, q, k, v):
        B, H, T, head_dim = q.shape
        # The kernel writes (B, T, H, head_dim): the reshape after it copies nothing.
        out = q.new_empty(B, T, H, head_dim).transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, q.new_empty(B, H, T, dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx, _):
        raise NotImplementedError("only what is kept is counted")


class FusedNorm(torch.autograd.Function):
    """What the fused RMSNorm of a GPU keeps; `meta` has only the unfused one, which keeps more."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad):
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def fuse_norms(block: Block) -> None:
    """Have a block on `meta` keep of its norms what a GPU would."""
    for norm in (block.attention_norm, block.ffn_norm):
        norm.forward = partial(lambda norm, x: FusedNorm.apply(x, norm.weight), norm)


def layer_on_meta(config: TransformerConfig) -> tuple[Block, tuple[torch.Tensor, ...]]:
    """Return a layer in bfloat16 with a GPU's fused kernels, and the tensors that it is called on.

    Shapes: x (1, SEQ_LEN, D), cosines and sines (SEQ_LEN, head_dim / 2).
    """
    with torch.device("meta"):
        block = Block(config).to(torch.bfloat16)
        x = torch.empty(1, SEQ_LEN, config.dim, dtype=torch.bfloat16, requires_grad=True)
        head_dim = config.dim // config.num_heads
        tables = rotary_tables(torch.empty(SEQ_LEN), head_dim, config.rope_theta)
    block.attention.attend = Flash.apply
    fuse_norms(block)
    return block, (x, *tables)


def kept_by_a_layer(config: TransformerConfig) -> int:
    """Return the bytes that autograd keeps of one layer's forward, per token, without weights."""
    block, (x, *tables) = layer_on_meta(config)
    storages = {}  # each counts once, and stays alive so that its address is not given twice

    def keep(tensor):
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(x, *tables)
    for tensor in (*block.parameters(), *tables):
        storages.pop(tensor.untyped_storage()._cdata, None)
    return sum(storage.nbytes() for storage in storages.values()) // SEQ_LEN


def handed_over_by_tp(config: TransformerConfig) -> int:
    """Return the bytes per token that tp gathers and scatters in one layer's forward.

    Gathered are the inputs of the column-parallel matrices, once for those that share one;
    scattered the outputs of the row-parallel ones (Korthikanti, 2022, figure 5).
    """
    block, (x, *tables) = layer_on_meta(config)
    gathered, scattered = {}, []
    attention = block.attention
    for column in (attention.wq, attention.wk, attention.wv, block.gate, block.up):
        column.register_forward_hook(lambda _, i, o: gathered.update({id(i[0]): i[0]}))
    for row in (attention.wo, block.down):
        row.register_forward_hook(lambda _, i, o: scattered.append(o))
    block(x, *tables)
    return sum(tensor.nbytes for tensor in (*gathered.values(), *scattered)) // SEQ_LEN


def counted_flops(config: TransformerConfig) -> int:
    """Return the operations of forward and backward of SEQ_LEN tokens through one layer and head.

    Scores are counted whole: the counted attention skips none.
    """
    with torch.device("meta"):
        model = Transformer(replace(config, num_layers=1, max_seq_len=SEQ_LEN))
        with FlopCounterMode(display=False) as counter:
            tokens = torch.empty(1, SEQ_LEN, dtype=torch.int64)
            model(tokens).sum().backward()
    return counter.get_total_flops()


def check_layout(report: Report, job: Job, gpus: int, prediction: Prediction) -> None:
    """Check a prediction's formulas against counts on the model's own layer."""
    layout, config, check = prediction.layout, job.config, report.check
    places = {tuple(place(rank, layout, job.order).values()) for rank in range(gpus)}
    check("ranks with a place of their own", len(places), gpus, 0, "--gpus")

    whole = replace(layout, tp=1)
    weights = sum(weights_of_stage(config, whole, stage) for stage in range(layout.pp))
    tied_twice = config.vocab_size * config.dim * (config.tied_embeddings and layout.pp > 1)
    formula = config.num_parameters() + tied_twice
    check("weights of all stages", int(weights), formula, 0, "TransformerConfig.num_parameters")
    layers = sum(layers_of_stages(config.num_layers, layout.pp))
    check("layers of all stages", layers, config.num_layers, 0, "the model")

    block, _ = layer_on_meta(config)
    layer = sum(weight.numel() for weight in block.parameters())
    check("weights of a layer", layer_matrices(config) + 2 * config.dim, layer, 0, "Block on meta")

    short = replace(job, seq_len=SEQ_LEN, micro_batch_size=1, causal_share=1.0)
    formula = 3 * sum(forward_flops(short, Layout()).values())
    check(
        "operations, one layer and head", int(formula), counted_flops(config), 0, "FlopCounterMode"
    )
    kept = kept_by_a_layer(config)
    check("bytes kept per token and layer", activation_bytes(config), kept, 0, "saved tensors")

    tp, _, _, pp = prediction.traffic
    tokens, t = job.tokens(layout), layout.tp
    # Forward hands over as much as backward, which gathers the two inputs again.
    passes = 2.5 + (layout.recompute == "full")
    sent = passes * (t - 1) / t * handed_over_by_tp(config) * tokens
    check("bytes tp sends per layer", int(tp.layer_bytes), int(sent), 1, "hooks on a layer")
    with torch.device("meta"):
        x = torch.empty(job.micro_batch_size, job.seq_len // layout.cp, config.dim // t)
    sent = 2 * x.numel() * BF16 * (pp.size > 1)
    check("bytes pp sends per boundary", int(pp.layer_bytes), sent, 1, "a slice on meta")
