"""Cut every matrix of a transformer over the ranks, with two autograd functions called f and g.

    CPU   torchrun --standalone --nproc-per-node=2 05-advanced/tensor_parallel.py
    GPU   torchrun --standalone --nproc-per-node=gpu 05-advanced/tensor_parallel.py

tiny has two heads of keys and values; for 4 ranks add `--num-kv-heads 4`. Look for: the first
table's wrong gradients; losses of one process in all steps; sequence parallelism sends as much as
tensor parallelism and keeps less for backward. --output-dir draws how each matrix is cut.

Sources: Shoeybi et al., Megatron-LM (2019), section 3; Korthikanti et al., Reducing Activation
Recomputation (2022), section 4.2.
"""

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from advanced_parts import tensor_job
from advanced_parts import tensor_parallel as part
from legacy_common import cli, runtime
from legacy_common.models import rotary_tables
from legacy_common.report import Report


def same(x):
    return x.view_as(x)


def all_reduced(x, op=dist.ReduceOp.SUM):
    """Return the sum over the ranks, and leave x as it is."""
    total = x.clone()
    dist.all_reduce(total, op=op)
    return total


def gather_tokens(x):
    """Join the ranks' tokens. Shapes: local (B, T/tp, D) in, (B, T, D) out."""
    B, T, D = x.shape
    tp = dist.get_world_size()
    parts = x.new_empty(tp * B, T, D)
    runtime.all_gather_single(parts, x.contiguous())
    return torch.cat(parts.chunk(tp), dim=1)


def scatter_tokens(x):
    """Sum over the ranks, each rank its own tokens. Shapes: (B, T, D) in, (B, T/tp, D) out."""
    parts = torch.cat(x.chunk(dist.get_world_size(), dim=1))  # (tp * B, T/tp, D)
    own = torch.empty_like(parts[: len(x)])
    runtime.reduce_scatter_single(own, parts)
    return own


def conjugate(in_forward, in_backward):
    """Make one function for autograd of two: backward sends the gradient the other way."""

    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            # lab: hole conjugate
            return in_forward(x)
            # lab: end

        @staticmethod
        def backward(ctx, gradient):
            # lab: hole conjugate
            return in_backward(gradient)
            # lab: end

    return Pair.apply


f = conjugate(same, all_reduced)
g = conjugate(all_reduced, same)
f_tokens = conjugate(gather_tokens, scatter_tokens)
g_tokens = conjugate(scatter_tokens, gather_tokens)


def keep_part(layer, dim):
    """Keep this rank's part of a weight (out, in): dim 0 cuts the layer's columns, 1 its rows."""
    # lab: hole cut
    whole = layer.weight.detach()
    own = whole.chunk(dist.get_world_size(), dim)[dist.get_rank()]
    layer.weight = nn.Parameter(own.clone())
    return layer
    # lab: end


class ParallelBlock(nn.Module):
    """A block of which this rank computes H/tp heads and F/tp columns of the feed-forward."""

    def __init__(self, block, f, g):
        super().__init__()
        self.f, self.g = f, g
        self.attention_norm = block.attention_norm
        self.attention = block.attention
        for layer in (block.attention.wq, block.attention.wk, block.attention.wv):
            keep_part(layer, dim=0)  # column-parallel: (D, D) to (D, D/tp), whole heads
        keep_part(block.attention.wo, dim=1)  # row-parallel: (D, D) to (D/tp, D)
        self.ffn_norm = block.ffn_norm
        self.gate = keep_part(block.gate, dim=0)
        self.up = keep_part(block.up, dim=0)
        self.down = keep_part(block.down, dim=1)

    def forward(self, x, cos, sin):
        # lab: hole block
        h = self.f(self.attention_norm(x))
        x = x + self.g(self.attention(h, cos, sin))
        h = self.f(self.ffn_norm(x))
        return x + self.g(self.down(F.silu(self.gate(h)) * self.up(h)))
        # lab: end


class ParallelTransformer(nn.Module):
    """A Transformer cut over all ranks. Shapes: tokens (B, T) in, local logits (B, T, V/tp) out."""

    def __init__(self, model, sequence_parallel):
        super().__init__()
        self.config, self.sequence_parallel = model.config, sequence_parallel
        self.f, self.g = (f_tokens, g_tokens) if sequence_parallel else (f, g)
        self.embedding = keep_part(model.embedding, dim=0)  # (V/tp, D)
        self.blocks = nn.ModuleList(ParallelBlock(block, self.f, self.g) for block in model.blocks)
        self.norm = model.norm
        self.head = keep_part(model.head, dim=0)

    def forward(self, tokens):
        head_dim = self.config.dim // self.config.num_heads
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        cos, sin = rotary_tables(positions, head_dim, self.config.rope_theta)
        here, row = rows_here(tokens, len(self.embedding.weight))
        x = self.g(self.embedding(row) * here[..., None])  # zeros where another rank has the row
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.f(self.norm(x)))

    def sum_norm_gradients(self):
        """After backward: with sequence parallelism a rank's norms saw its own tokens only."""
        # lab: hole norms
        gradients = [weight.grad for weight in self.parameters() if weight.dim() == 1]
        total = all_reduced(torch.cat(gradients))
        for gradient, own in zip(gradients, total.split(self.config.dim), strict=True):
            gradient.copy_(own)
        # lab: end


def rows_here(tokens, rows):
    """Say which tokens are among this rank's rows of the vocabulary, and at which row."""
    row = tokens - dist.get_rank() * rows
    return (row >= 0) & (row < rows), row.clamp(0, rows - 1)


def vocabulary_parallel_loss(logits, targets):
    """Return the mean cross-entropy. Shapes: local logits (B, T, V/tp), targets (B, T)."""
    # lab: hole loss
    largest = all_reduced(logits.detach().amax(dim=-1), dist.ReduceOp.MAX)  # (B, T)
    logits = logits - largest[..., None]  # or exp would overflow
    total = g(logits.exp().sum(dim=-1))  # (B, T)
    here, row = rows_here(targets, logits.shape[-1])
    target = g(logits.gather(-1, row[..., None])[..., 0] * here)  # (B, T)
    return (total.log() - target).mean()
    # lab: end


def compute_gradient(model, batch):
    """Take forward and backward; return the loss, the same on every rank."""
    inputs, targets = batch
    loss = vocabulary_parallel_loss(model(inputs), targets)
    loss.backward()
    if model.sequence_parallel:
        model.sum_norm_gradients()
    return loss.detach()


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    tensor_job.add_flags(parser)
    return parser.parse_args()


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("05-advanced/tensor_parallel.py", args, world, device)
        config = tensor_job.config_of(args, world.world_size)
        batches = tensor_job.batches_of(args, device)
        report.start(f"{config.num_parameters():,} weights, tp = {world.world_size}")
        part.check_ways(report, f)

        whole = tensor_job.whole_model(args, config, device)
        blocks = {"one process": part.run_block(whole.blocks[0], args, config, device)}
        alone = tensor_job.train_alone(args, whole, batches)
        step_of = functools.partial(
            tensor_job.traffic_of_step, config, args.batch_size * args.seq_len
        )
        for name, sequence_parallel in (("tensor parallel", False), ("sequence parallel", True)):
            model = ParallelTransformer(
                tensor_job.whole_model(args, config, device), sequence_parallel
            )
            tensor_job.check_model(
                report, name, model, compute_gradient, batches, alone, step_of(sequence_parallel)
            )
            parts = world.world_size if sequence_parallel else 1
            blocks[name] = part.run_block(model.blocks[0], args, config, device, parts)
        part.check_blocks(report, blocks, args, config)
        if report.output and world.is_rank0:
            cuts = report.output / "tensor_parallel_cuts.png"
            part.draw(cuts, whole.blocks[0], model.blocks[0])
        return report.finish(f"the losses of {args.max_steps} steps are those of one process")


if __name__ == "__main__":
    cli.run(main)
