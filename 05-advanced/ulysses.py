"""Ulysses: all heads of some tokens become, by an all-to-all, all tokens of some heads.

    CPU   torchrun --standalone --nproc-per-node=4 05-advanced/ulysses.py
    GPU   torchrun --standalone --nproc-per-node=gpu 05-advanced/ulysses.py

Look for: output and gradients of full attention; four all-to-alls per layer and direction; the last
table, which sets the bytes of Ulysses beside those of ring attention. Source: Jacobs et al.,
DeepSpeed Ulysses (2023).
"""

import math

import torch
import torch.distributed as dist

from advanced_parts import context_job
from advanced_parts import ulysses as part
from legacy_common import cli, models, runtime
from legacy_common.report import Report

HEADS, TOKENS = 1, 2  # dims of q, k and v: (B, heads, tokens, head_dim)


def exchange(x, cut, join, group):
    """Cut dim `cut` into a part for each rank, and join the parts that come along dim `join`."""
    parts = torch.stack(x.chunk(dist.get_world_size(group), dim=cut))  # part r goes to rank r
    received = torch.empty_like(parts)

    dist.all_to_all_single(received, parts, group=group)

    return torch.cat(received.unbind(), dim=join)


class AllToAll(torch.autograd.Function):
    """exchange, with a gradient: each number's gradient goes back to the rank it came from."""

    @staticmethod
    def forward(ctx, x, cut, join, group):
        ctx.way_back = join, cut, group
        return exchange(x, cut, join, group)

    @staticmethod
    def backward(ctx, grad):
        return exchange(grad, *ctx.way_back), None, None, None


def to_heads(x, group):
    """Shapes: (B, heads, T/N, head_dim) -> (B, heads/N, T, head_dim)."""
    return AllToAll.apply(x, HEADS, TOKENS, group)


def to_tokens(x, group):
    """Shapes: (B, heads/N, T, head_dim) -> (B, heads, T/N, head_dim)."""
    return AllToAll.apply(x, TOKENS, HEADS, group)


def repeat_heads(x, ranks):
    """Repeat key or value heads until every rank gets one, and no more often than that."""
    heads = x.shape[HEADS]
    return x.repeat_interleave(math.lcm(heads, ranks) // heads, dim=HEADS)


def ulysses_attention(q, k, v, group=None):
    """Replace causal_attention. Shapes: (B, heads, T/N, head_dim); k and v with their own heads."""
    k, v = (repeat_heads(x, dist.get_world_size(group)) for x in (k, v))
    q, k, v = (to_heads(x, group) for x in (q, k, v))

    out = models.causal_attention(q, k, v)  # the whole sequence, some of the heads

    return to_tokens(out, group)


def refuse_uneven(args, heads, ranks):
    """Refuse tokens or heads that the ranks cannot have as many of. Raises: UsageError."""
    context_job.refuse_uneven("--seq-len", args.seq_len, ranks, f"tokens on {ranks} ranks")
    if heads % ranks:
        fits = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        some = f"{heads} heads cannot be dealt to {ranks} ranks alike"
        raise cli.UsageError(f"{some}: start {fits}, or take ring_attention.py")


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add, positive = parser.add_argument, cli.positive_int
    add("--seq-len", type=positive, default=256, help="tokens per sequence, over all ranks (256)")
    add("--batch-size", type=positive, default=2, help="sequences, each cut over all ranks (2)")
    add("--compare-tokens", type=positive, default=131_072, help="of the last table (131072)")
    return parser.parse_args()


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("05-advanced/ulysses.py", args, world, device)
        ranks = world.world_size
        model = context_job.build(args.seed, args.seq_len, device)
        config = model.config
        refuse_uneven(args, config.num_heads, ranks)
        report.start(f"{args.seq_len} tokens per sequence, {args.seq_len // ranks} per rank")

        positions = torch.arange(args.seq_len, device=device).chunk(ranks)[world.rank]
        batch = context_job.batch_of(args.seq_len, args.batch_size, device)
        counted = context_job.check_transformer(
            report, "ulysses", model, ulysses_attention, positions, batch
        )
        for way, counter in zip(("forward", "backward"), counted, strict=True):
            calls = counter.calls["all_to_all"] / config.num_layers
            report.check(f"{way}: all-to-alls per layer", calls, 4, 0, "q, k, v and out")
        expected = part.ulysses_bytes(config, args.batch_size * args.seq_len, ranks)
        source = "q, out, k, v: what is not one's own part"
        context_job.check_bytes(report, "ulysses", counted, config.num_layers, expected, source)

        part.print_comparison(report, args.compare_tokens)
        return report.finish("full attention, and each rank computed its own heads")


if __name__ == "__main__":
    cli.run(main)
