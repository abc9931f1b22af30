"""Ulysses: an all-to-all turns some tokens of all heads into all tokens of some heads.

    CPU   torchrun --standalone --nproc-per-node=4 05-advanced/ulysses.py
    GPU   the same, with one GPU per rank

Look for: the loss and the gradient of one process; two all-to-alls per layer in each
pass; the table that compares the bytes with ring attention.

Source: Jacobs et al., DeepSpeed Ulysses (2023), section 3.
"""

import math

import torch
import torch.distributed as dist

from dist_common import cli, runtime
from dist_common.model import PRESETS, attend_causally
from dist_common.report import Report
from ring_attention import BATCH_SIZE, CONFIG, FLOAT32, SEQ_LEN, check_step, ring_bytes

LONG = 131_072  # tokens of the sequence in the table


class AllToAll(torch.autograd.Function):
    """Send part r of dim 0 to rank r; part r of the result is from rank r.

    The gradient of each number goes back to the rank that sent the number. That is
    the same exchange.
    """

    @staticmethod
    def forward(ctx, parts):
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts)
        return received

    @staticmethod
    def backward(ctx, gradient):
        return AllToAll.apply(gradient.contiguous())


def ulysses_attention(q, k, v):
    """Attend to the whole sequence with 1/n of the heads.

    H is the number of query heads. Shapes: q (B, H, T/n, d), k and v with fewer heads
    -> (B, H, T/n, d).
    """
    n = dist.get_world_size()
    k, v = repeat_heads(k, n), repeat_heads(v, n)
    # Part r is for rank r: its heads of q, k and v. (n, B, heads, T/n, d)
    parts = [x.unflatten(1, (n, -1)).movedim(1, 0) for x in (q, k, v)]
    received = AllToAll.apply(torch.cat(parts, dim=2))
    tokens = received.movedim(0, 2).flatten(2, 3)  # (B, heads, T, d)
    q, k, v = tokens.split([x.shape[2] for x in parts], dim=1)

    out = attend_causally(q, k, v)  # (B, H/n, T, d)

    tokens = out.unflatten(2, (n, -1)).movedim(2, 0)  # (n, B, H/n, T/n, d)
    received = AllToAll.apply(tokens.contiguous())
    return received.movedim(0, 1).flatten(1, 2)  # (B, H, T/n, d)


def repeat_heads(x, n):
    """Repeat key or value heads just often enough for each rank to get one."""
    heads = x.shape[1]
    return x.repeat_interleave(math.lcm(heads, n) // heads, dim=1)


def ulysses_bytes(config, num_tokens, n, width):
    """Return the bytes that a rank sends per layer in forward; backward sends as many.

    num_tokens counts the tokens of all ranks; width is the bytes of a number.
    """
    heads = 2 * config.num_heads + 2 * math.lcm(config.num_kv_heads, n)  # q, out, k, v
    numbers = num_tokens // n * heads * config.dim // config.num_heads
    return (n - 1) * numbers // n * width


def compare_bytes():
    """Return rows: model, ranks, MiB per layer of ring attention and of Ulysses."""
    rows = []
    for name in ("llama2-7b", "llama3-8b", "llama3-70b"):
        config = PRESETS[name]
        for n in (2, 8, 32, 64):
            shape = (config, LONG, n, 2)  # 2 bytes of a number in bfloat16
            ring = f"{3 * ring_bytes(*shape) / 2**20:,.0f}"
            ulysses = f"{2 * ulysses_bytes(*shape) / 2**20:,.0f}"
            divides = config.num_heads % n == 0
            rows.append((name, n, ring, ulysses if divides else "-"))
    return rows


def main():
    args = cli.ArgumentParser(__doc__).parse_args()
    with runtime.init(args.device, args.timeout) as run:
        n = run.world_size
        if CONFIG.num_heads % n:
            raise cli.UsageError(
                f"{n} ranks: start 1, 2 or 4, to divide {CONFIG.num_heads} heads"
            )
        report = Report("05-advanced/ulysses.py", args, run)
        positions = torch.arange(SEQ_LEN, device=run.device).chunk(n)[run.rank]
        sent = check_step(report, "ulysses", ulysses_attention, positions)
        run.print0("MiB that a rank sends per layer, bfloat16, 131,072 tokens:")
        report.table(compare_bytes(), ("model", "ranks", "ring", "Ulysses"))
        expected = 2 * ulysses_bytes(CONFIG, BATCH_SIZE * SEQ_LEN, n, FLOAT32)
        report.check("ulysses: bytes sent per layer", sent, expected, 0)
        return report.finish("each rank attended to all tokens with its own heads")


if __name__ == "__main__":
    cli.run(main)
