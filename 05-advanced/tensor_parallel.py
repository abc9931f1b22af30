"""Divide every matrix of a transformer over the ranks, with two autograd functions.

    CPU   torchrun --standalone --nproc-per-node=2 05-advanced/tensor_parallel.py
    GPU   torchrun --standalone --nproc-per-node=4 05-advanced/tensor_parallel.py

Look for: the losses of one process in every step; sequence parallelism sends as much as
tensor parallelism, and keeps fewer activations.

Sources: Shoeybi et al., Megatron-LM (2019), section 3; Korthikanti et al., Reducing
Activation Recomputation (2022), section 4.2.
"""

import itertools
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.data import DataLoader

from dist_common import check, cli, data, runtime
from dist_common.model import PRESETS, build_transformer, rotary_tables
from dist_common.report import Report

# Each rank gets whole heads, so the number of heads limits the number of ranks.
CONFIG = replace(PRESETS["tiny"], num_layers=2, num_heads=8, num_kv_heads=8)
BATCH_SIZE = 4  # B
SEQ_LEN = 64  # T
MAX_STEPS = 3
NUM_NORMS = 2 * CONFIG.num_layers + 1  # an f follows each of them
WHOLE = BATCH_SIZE * SEQ_LEN * CONFIG.dim  # numbers of a tensor (B, T, D)
TOLERANCE = 1e-5  # float32 sums in another order differ in the last bits


def identity(x):
    return x.view_as(x)


def all_reduce(x, op=dist.ReduceOp.SUM):
    """Return the sum over the ranks; x does not change."""
    total = x.clone()
    dist.all_reduce(total, op=op)
    return total


def gather_tokens(x):
    """Join the ranks' tokens. Shapes: local (B, T/n, D) -> global (B, T, D)."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim=1)


def scatter_tokens(x):
    """Sum over the ranks; keep this rank's tokens. Shapes: (B, T, D) -> (B, T/n, D)."""
    parts = [part.contiguous() for part in x.chunk(dist.get_world_size(), dim=1)]
    total = torch.empty_like(parts[0])
    dist.reduce_scatter(total, parts)
    return total


def conjugate(in_forward, in_backward):
    """Make an autograd function: the first acts on x, the second on its gradient."""

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


f = conjugate(identity, all_reduce)
g = conjugate(all_reduce, identity)
f_tokens = conjugate(gather_tokens, scatter_tokens)
g_tokens = conjugate(scatter_tokens, gather_tokens)


def keep_part(layer, dim):
    """Keep 1/n of a layer's weight (out, in): columns with dim 0, rows with dim 1.

    Papers write x W, so the columns of their W are the outputs.
    """
    # lab: hole cut
    parts = layer.weight.detach().chunk(dist.get_world_size(), dim)
    layer.weight = nn.Parameter(parts[dist.get_rank()].clone())
    return layer
    # lab: end


class ParallelBlock(nn.Module):
    """This rank's 1/n of a block: some heads, some columns of the feed-forward."""

    def __init__(self, block, f, g):
        super().__init__()
        self.f = f
        self.g = g
        self.attention_norm = block.attention_norm
        attention = block.attention
        for layer in (attention.wq, attention.wk, attention.wv):
            keep_part(layer, dim=0)  # column-parallel: (D, D) -> (D/n, D), whole heads
        keep_part(attention.wo, dim=1)  # row-parallel: (D, D) -> (D, D/n)
        self.attention = attention
        self.ffn_norm = block.ffn_norm
        self.gate = keep_part(block.gate, dim=0)
        self.up = keep_part(block.up, dim=0)
        self.down = keep_part(block.down, dim=1)

    def forward(self, x, cos, sin):
        """Shapes: x (B, T, D) -> (B, T, D); with sequence parallelism T/n tokens."""
        # lab: hole block
        h = self.f(self.attention_norm(x))
        x = x + self.g(self.attention(h, cos, sin))
        h = self.f(self.ffn_norm(x))
        return x + self.g(self.down(F.silu(self.gate(h)) * self.up(h)))
        # lab: end


class ParallelTransformer(nn.Module):
    """A Transformer divided over all ranks.

    Shapes: tokens (B, T) -> local logits (B, T, V/n).
    """

    def __init__(self, model, f, g):
        super().__init__()
        self.config = model.config
        self.f = f
        self.g = g
        self.embedding = keep_part(model.embedding, dim=0)  # (V, D) -> (V/n, D)
        blocks = [ParallelBlock(block, f, g) for block in model.blocks]
        self.blocks = nn.ModuleList(blocks)
        self.norm = model.norm
        self.head = keep_part(model.head, dim=0)  # (V, D) -> (V/n, D)

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        head_dim = self.config.dim // self.config.num_heads
        cos, sin = rotary_tables(positions, head_dim, self.config.rope_theta)
        is_local, rows = find_rows(tokens, len(self.embedding.weight))
        # Zeros for the words of other ranks, so that the sum is the right row.
        x = self.g(self.embedding(rows) * is_local[..., None])
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.f(self.norm(x)))

    def sum_norm_gradients(self):
        """Add up the gradients of the norms, which saw only this rank's tokens."""
        # lab: hole norms
        gradients = [weight.grad for weight in self.parameters() if weight.dim() == 1]
        total = all_reduce(torch.cat(gradients))
        sums = total.split(self.config.dim)
        for gradient, summed in zip(gradients, sums, strict=True):
            gradient.copy_(summed)
        # lab: end


def find_rows(tokens, num_rows):
    """Say which tokens this rank has among its words, and in which row."""
    rows = tokens - dist.get_rank() * num_rows
    is_local = (rows >= 0) & (rows < num_rows)
    return is_local, rows.clamp(0, num_rows - 1)


def vocabulary_parallel_loss(logits, targets):
    """Return the mean cross-entropy of divided logits.

    Shapes: local logits (B, T, V/n), targets (B, T) -> (), the same on every rank.
    """
    # lab: hole loss
    largest = all_reduce(logits.detach().amax(dim=-1), dist.ReduceOp.MAX)  # (B, T)
    logits = logits - largest[..., None]  # or exp would overflow
    total = g(logits.exp().sum(dim=-1))  # (B, T)
    is_local, rows = find_rows(targets, logits.shape[-1])
    target = g(logits.gather(-1, rows[..., None])[..., 0] * is_local)  # (B, T)
    return (total.log() - target).mean()
    # lab: end


def compute_gradient(model, inputs, targets):
    """Run forward and backward; return the loss, which every rank has."""
    loss = vocabulary_parallel_loss(model(inputs), targets)
    loss.backward()
    if model.f is f_tokens:
        model.sum_norm_gradients()
    return loss


# Comparison with one process


def compute_gradient_alone(model, inputs, targets):
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    return loss


def train(model, compute_gradient, batches):
    """Take a step of AdamW on each batch.

    Returns: the losses by step, and of the first step the gradients by name and the
    counter of collectives.
    """
    # One tensor at a time: a fused update refuses plain tensors next to DTensors.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    losses, gradients = {}, {}
    for step, (inputs, targets) in enumerate(batches, 1):
        optimizer.zero_grad()
        with check.CollectiveCounter() as counter:
            losses[step] = compute_gradient(model, inputs, targets).item()
        for name, weight in model.named_parameters():
            gradients.setdefault(name, check.whole(weight.grad))
        optimizer.step()
    return losses, gradients, counter


def take_part(whole, shape):
    """Return this rank's part of a tensor, divided where `shape` is smaller."""
    for dim, size in enumerate(shape):
        if size < whole.shape[dim]:
            whole = whole.chunk(dist.get_world_size(), dim)[dist.get_rank()]
    return whole


def bytes_of_step(num_f, num_norms):
    """Return the bytes that a rank sends in a step, with `num_f` f in each block.

    `num_norms` is the number of norms whose gradients are summed.
    """
    n = dist.get_world_size()
    # Two g and num_f f in a block; a g after the embedding, an f before the head.
    activations = ((2 + num_f) * CONFIG.num_layers + 2) * WHOLE
    loss = 3 * BATCH_SIZE * SEQ_LEN
    numbers = activations + loss + num_norms * CONFIG.dim
    return 2 * (n - 1) * 4 * numbers // n  # an all-reduce sends 2 (n - 1) / n; 4 bytes


def compare(report, name, model, compute_gradient, batches, alone, expected_bytes):
    """Train a divided model; check it against what `train` returned for one process.

    Returns: a row of the table.
    """
    losses, gradients, counter = train(model, compute_gradient, batches)
    wholes = alone[1]
    parts = {key: take_part(wholes[key], part.shape) for key, part in gradients.items()}
    errors = (
        check.relative_error(losses, alone[0]),
        check.relative_error(gradients, parts),
    )
    error = max(map(max, runtime.gather(errors)))  # of any rank
    report.check(f"{name}: error of losses and gradient", error, 0, TOLERANCE)
    sent = round(counter.bytes_sent.total())
    report.check(f"{name}: bytes sent in a step", sent, expected_bytes, 0)
    return name, format_losses(losses), counter.calls.total(), f"{sent:,}"


def format_losses(losses):
    return "  ".join(f"{loss:.4f}" for loss in losses.values())


def kept_bytes(model, inputs):
    """Return the bytes of the tensors that forward keeps for backward, but weights."""
    weights = {weight.data_ptr() for weight in model.parameters()}
    kept = {}

    def keep(tensor):
        if tensor.data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        model(inputs)
    return sum(tensor.nbytes for tensor in kept.values())


def load_batches(device):
    """Return inputs and targets of each step, equal on every rank. Shapes: (B, T)."""
    text = data.Sequences(data.load_text(), SEQ_LEN)
    batches = itertools.islice(DataLoader(text, BATCH_SIZE), MAX_STEPS)
    return [[tensor.to(device) for tensor in batch] for batch in batches]


def validate_ranks(run):
    if CONFIG.num_heads % run.world_size:
        raise cli.UsageError(f"{run.world_size} ranks: start 1, 2, 4 or 8")


HEADERS = ("", "losses", "collectives", "bytes sent")


def main():
    args = cli.ArgumentParser(__doc__).parse_args()
    with runtime.init(args.device, args.timeout) as run:
        validate_ranks(run)
        report = Report("05-advanced/tensor_parallel.py", args, run)
        batches = load_batches(run.device)
        inputs = batches[0][0]
        model = build_transformer(CONFIG, args.seed, run.device)
        alone = train(model, compute_gradient_alone, batches)
        kept_alone = kept_bytes(model, inputs)
        rows = [("one process", format_losses(alone[0]), 0, 0, f"{kept_alone:,}")]
        ways = {
            "tensor parallel": (f, g, 0),
            "sequence parallel": (f_tokens, g_tokens, NUM_NORMS),
        }
        for name, (enter, leave, num_norms) in ways.items():
            model = build_transformer(CONFIG, args.seed, run.device)
            model = ParallelTransformer(model, enter, leave)
            num_bytes = bytes_of_step(2, num_norms)
            row = compare(
                report, name, model, compute_gradient, batches, alone, num_bytes
            )
            kept = kept_bytes(model, inputs)
            rows.append((*row, f"{kept:,}"))
        report.table(rows, (*HEADERS, "bytes kept"))
        # 1/n of all activations, but what an f returns is whole.
        n = run.world_size
        expected_kept = (kept_alone + NUM_NORMS * 4 * WHOLE * (n - 1)) // n
        report.check(f"{name}: bytes kept", kept, expected_kept, 0.03 * kept)
        return report.finish("gradient and losses are those of one process")


if __name__ == "__main__":
    cli.run(main)
