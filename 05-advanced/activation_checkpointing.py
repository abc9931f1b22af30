"""Keep fewer activations and compute them again in backward: five ways, beside keeping all.

    CPU   torchrun --standalone --nproc-per-node=2 05-advanced/activation_checkpointing.py
    GPU   torchrun --standalone --nproc-per-node=gpu 05-advanced/activation_checkpointing.py

Look for: the gradient of one process in each way; the first table, what is kept, the peak and the
operations of one step; the last table, the same for a model of full size, on tensors without
memory. Sources: Chen et al., Training Deep Nets with Sublinear Memory Cost (2016); Korthikanti et
al., Reducing Activation Recomputation in Large Transformer Models (2022).
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from advanced_parts import activation_checkpointing as part
from legacy_common import cli, models, runtime
from legacy_common.report import Report

PRODUCT = torch.ops.aten.mm.default
ATTENTION = [
    getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention{where}").default
    for kind, where in (("flash", ""), ("efficient", ""), ("cudnn", ""), ("flash", "_for_cpu"))
]


def checkpoint_each(blocks, **options):
    """Keep a block's inputs; in backward, run its forward again before its own backward."""

    def recomputed(forward):
        return lambda *inputs: checkpoint(forward, *inputs, use_reentrant=False, **options)

    for block in blocks:
        block.forward = recomputed(block.forward)


def keep_products(ctx, op, *args, **kwargs):
    """Keep what takes operations to compute; norms, rotations and SiLU are computed again."""
    kept = op == PRODUCT or op in ATTENTION
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class KeepSecondProducts:
    """Keep attention, and the 1st, 3rd, 5th ... product of a block."""

    def __init__(self):
        self.products = {False: 0, True: 0}  # in the forward, in the recomputation

    def __call__(self, ctx, op, *args, **kwargs):
        if op == PRODUCT:
            self.products[ctx.is_recompute] += 1
            if self.products[ctx.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return keep_products(ctx, op, *args, **kwargs)


def checkpoint_but(blocks, new_policy):
    """Keep what a policy says besides the block's inputs; each forward gets a policy of its own."""

    def contexts():
        return create_selective_checkpoint_contexts(new_policy())

    checkpoint_each(blocks, context_fn=contexts)


class Segment(nn.Module):
    """Consecutive blocks under one checkpoint, which keeps the first one's input only."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x, cos, sin):
        for block in self.blocks:
            x = block(x, cos, sin)
        return x


def checkpoint_segments(model, size):
    """Replace the model's blocks by segments of `size` blocks, each of which is a checkpoint."""
    blocks = list(model.blocks)
    model.blocks = nn.ModuleList(
        Segment(blocks[start : start + size]) for start in range(0, len(blocks), size)
    )
    checkpoint_each(model.blocks)


SEGMENT = 2  # blocks

# Each way, to be applied to a model before DDP or fully_shard; `model.blocks` is its stack.
WAYS = {
    "none": lambda model: None,
    "selective": lambda model: checkpoint_but(model.blocks, lambda: keep_products),
    "2nd product": lambda model: checkpoint_but(model.blocks, KeepSecondProducts),
    "2nd block": lambda model: checkpoint_each(model.blocks[::2]),
    "segments": lambda model: checkpoint_segments(model, SEGMENT),
    "full": lambda model: checkpoint_each(model.blocks),
}


def drop(forward, *args):
    """Run a block's forward, and drop a tenth of what it returns."""
    return F.dropout(forward(*args), 0.1)


def add_dropout(model):
    for block in model.blocks:
        block.forward = partial(drop, block.forward)


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add, positive = parser.add_argument, cli.positive_int
    add("--train-seq-len", type=positive, default=64, help="tokens of the real steps (64)")
    big = [name for name in models.PRESETS if name != "tiny"]
    add("--preset", choices=big, default="llama3-8b", help="of the last table (llama3-8b)")
    add("--seq-len", type=positive, help="tokens per sequence there (8192, or what it can read)")
    add("--micro-batch-size", type=positive, default=1, help="sequences per GPU there (1)")
    add("--activation-gib", type=cli.positive_float, default=24,
        help="what a GPU has left for the blocks' activations, in GiB (24)")  # fmt: skip
    return parser.parse_args()


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("05-advanced/activation_checkpointing.py", args, world, device)
        config = part.small(args.train_seq_len)
        length = args.seq_len or min(8192, models.PRESETS[args.preset].max_seq_len)
        large, tokens = models.preset(args.preset, length), (args.micro_batch_size, length)
        report.start(f"{config.num_layers} blocks, {args.train_seq_len} tokens per sequence")

        def build():
            runtime.seed_everything(args.seed)
            return models.Transformer(config).to(device)

        reference = part.Reference(build, args.train_seq_len, device)
        for name, way in WAYS.items():
            part.check_exact(report, name, build, way, reference)
        part.check_dropout(report, build, add_dropout, checkpoint_each, reference)

        if world.is_rank0:  # without collectives from here on
            part.check_steps(report, config, args.train_seq_len, WAYS, SEGMENT)
            part.at_scale(report, large, tokens, WAYS, SEGMENT)
            if report.output:
                part.draw_step(report.output / "step.png", args.preset, large, tokens, WAYS)
        return report.finish("what backward computes again is what forward computed")


if __name__ == "__main__":
    cli.run(main)
