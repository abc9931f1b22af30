"""Activation checkpointing: keep fewer activations, compute the rest again in backward.

    CPU   torchrun --standalone --nproc-per-node=2 \
              05-advanced/activation_checkpointing.py
    GPU   the same, with one GPU per rank

Look for: the gradient of one process with every choice, also with dropout; the bytes
that a block keeps and the FLOPs that it repeats, next to their formulas.

Sources: Chen et al., Training Deep Nets with Sublinear Memory Cost (2016); Korthikanti
et al., Reducing Activation Recomputation in Large Transformer Models (2022).
"""

import weakref
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode  # documented, not yet public
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from dist_common import check, cli, runtime
from dist_common.model import PRESETS, build_transformer, rotary_tables
from dist_common.report import Report

# As many key heads as query heads: in float32 no fused attention of a GPU shares them.
CONFIG = replace(PRESETS["tiny"], num_kv_heads=4)
BATCH = 2  # B, sequences of each rank
SEQ_LEN = 64  # T, tokens
TOLERANCE = 1e-5  # float32 sums in another order differ in the last bits
PRODUCT = torch.ops.aten.mm.default
ATTENTION = [
    getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default
    for name in (
        "flash_attention",
        "efficient_attention",
        "cudnn_attention",
        "flash_attention_for_cpu",
    )
]


class Checkpointed(nn.Module):
    """A block that keeps only its inputs; backward first runs its forward again."""

    def __init__(self, block, **options):
        super().__init__()
        self.block = block
        self.options = options

    def forward(self, x, cos, sin):
        return checkpoint(self.block, x, cos, sin, use_reentrant=False, **self.options)


# Choices: each takes a model's blocks, and returns those that replace them.


def keep_all(blocks):
    return list(blocks)


def checkpoint_all(blocks):
    return [Checkpointed(block) for block in blocks]


def checkpoint_every_second(blocks):
    return [
        Checkpointed(block) if number % 2 else block
        for number, block in enumerate(blocks)
    ]


def policy(ctx, op, *args, **kwargs):
    """Keep the outputs of matrix products and of attention; repeat everything else."""
    if op == PRODUCT or op in ATTENTION:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint_selectively(blocks):
    contexts = partial(create_selective_checkpoint_contexts, policy)
    return [Checkpointed(block, context_fn=contexts) for block in blocks]


CHOICES = {
    "none": keep_all,
    "selective": checkpoint_selectively,
    "every second block": checkpoint_every_second,
    "full": checkpoint_all,
}


# Formulas: D is the width of the model, F of the feed-forward


def count_kept_numbers(config, on_cpu=False):
    """Return the numbers per token that a block keeps for backward, by choice.

    Without one number per attention head and per norm: less than 1%.
    """
    D, F = config.dim, config.ffn_dim
    # Input and output of two norms, q, k, v, attention's output and its copy in the
    # order (B, T, D); four of the feed-forward.
    none = 9 * D + 4 * F
    if on_cpu:
        none += 2 * D  # one more for each norm
    return {
        "none": none,
        "selective": 2 * D + (5 * D + 2 * F),  # input, attention; outputs of products
        "every second block": (none + D) / 2,
        "full": D,
    }


def count_repeated_flops(config, seq_len):
    """Return the FLOPs per token that full checkpointing repeats in a block.

    2 per weight of the products, and 4 T D for attention. PyTorch stops when backward
    has all that it needs: before the last of seven products.
    """
    D, F = config.dim, config.ffn_dim
    return 2 * (4 * D * D + 2 * D * F) + 4 * seq_len * D


# Measurement


class StepMeter(TorchDispatchMode):
    """Count the bytes of the tensors that a step makes and still holds, and some FLOPs.

    history: the bytes after each operation. flops: of matrix products and of
    attention's forward.
    """

    def __init__(self, others):
        """`others` are tensors that do not count: weights, their gradients, inputs."""
        super().__init__()
        self.ignored = {tensor.untyped_storage()._cdata for tensor in others}
        self.storages = weakref.WeakValueDictionary()
        self.history = []
        self.flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func == PRODUCT:
            self.flops += 2 * args[0].numel() * args[1].shape[1]
        elif func in ATTENTION:  # all queries times all keys, and scores times values
            self.flops += 4 * args[0].numel() * args[1].shape[2]
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.ignored:
                self.storages[storage._cdata] = storage
        self.history.append(self.count_bytes())
        return result

    def count_bytes(self):
        return sum(storage.nbytes() for storage in self.storages.values())


def measure_blocks(choice, args, device):
    """Return the bytes kept when forward ends, and the meter of forward and backward.

    Only of the blocks, and without dropout, which would keep its mask.
    """
    model = build_model(choice, args, device).eval()
    weights = list(model.parameters())
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    others = [*weights, *(weight.grad for weight in weights)]
    inputs = torch.randn(BATCH, SEQ_LEN, CONFIG.dim, device=device)
    x = inputs.requires_grad_()
    head_dim = CONFIG.dim // CONFIG.num_heads
    positions = torch.arange(SEQ_LEN, device=device)
    tables = rotary_tables(positions, head_dim, CONFIG.rope_theta)
    with StepMeter([*others, inputs, *tables]) as meter:
        for block in model.blocks:
            x = block(x, *tables)
        kept = meter.count_bytes()  # the last output stands for the first input
        loss = x.sum()
        del x
        loss.backward()
    return kept, meter


def drop(block, inputs, output):
    """Drop a tenth of a block's output: a forward hook."""
    return F.dropout(output, 0.1, block.training)


def build_model(choice, args, device):
    """Return the model, its blocks with dropout and checkpointed as chosen."""
    model = build_transformer(CONFIG, args.seed, device)
    for block in model.blocks:
        block.register_forward_hook(drop)
    model.blocks = nn.ModuleList(choice(model.blocks))
    return model


def mean_loss(model, tokens):
    """Return the mean cross-entropy. Shape: tokens (B, T + 1)."""
    logits = model(tokens[:, :-1])  # (B, T, V)
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def gradient_of_one_process(batches, args, device):
    """Return the gradient of all ranks' batches, by number of the weight."""
    model = build_model(keep_all, args, device)
    for rank, tokens in enumerate(batches):
        runtime.seed_everything(args.seed, rank)  # each rank drops other numbers
        loss = mean_loss(model, tokens) / len(batches)
        loss.backward()
    return {number: weight.grad for number, weight in enumerate(model.parameters())}


def gradient_with_fsdp(choice, tokens, args, run):
    """Return the mean gradient of all ranks' tokens, gathered."""
    model = build_model(choice, args, run.device)
    for unit in (*model.blocks, model):  # each checkpoint is inside its unit
        fully_shard(unit)
    runtime.seed_everything(args.seed, run.rank)
    mean_loss(model, tokens).backward()
    gradients = [check.whole(weight.grad) for weight in model.parameters()]
    return dict(enumerate(gradients))


def draw_tokens(args, run):
    """Return random tokens, the same ones on each rank. Shape: (ranks, B, T + 1)."""
    torch.manual_seed(args.seed)
    shape = (run.world_size, BATCH, SEQ_LEN + 1)
    return torch.randint(CONFIG.vocab_size, shape, device=run.device)


def main():
    args = cli.ArgumentParser(__doc__).parse_args()
    with runtime.init(args.device, args.timeout) as run:
        report = Report("05-advanced/activation_checkpointing.py", args, run)
        on_cpu = run.device.type == "cpu"
        tolerance = 0.01 if on_cpu else 0.06  # a GPU's kernels choose layouts, and pad
        tokens = CONFIG.num_layers * BATCH * SEQ_LEN  # in all blocks
        per_token = count_kept_numbers(CONFIG, on_cpu)
        batches = draw_tokens(args, run)
        expected = gradient_of_one_process(batches, args, run.device)

        rows, errors, flops = [], [], {}
        for name, choice in CHOICES.items():
            gradient = gradient_with_fsdp(choice, batches[run.rank], args, run)
            errors.append(check.relative_error(gradient, expected))
            kept, meter = measure_blocks(choice, args, run.device)
            flops[name] = meter.flops
            repeated = meter.flops - flops["none"]
            numbers = kept, max(meter.history), repeated
            rows.append((name, *(f"{number:,}" for number in numbers)))
            formula = round(4 * tokens * per_token[name])  # float32 has 4 bytes
            report.check(f"{name}: bytes kept", kept, formula, tolerance * formula)
        report.table(rows, ("choice", "bytes kept", "peak", "FLOPs repeated"))

        formula = tokens * count_repeated_flops(CONFIG, SEQ_LEN)
        report.check("full: FLOPs repeated", repeated, formula, 0)
        report.check("gradient with dropout: sum of errors", sum(errors), 0, TOLERANCE)
        return report.finish("backward computed again what forward had computed")


if __name__ == "__main__":
    cli.run(main)
