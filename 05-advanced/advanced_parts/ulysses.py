"""What ulysses.py compares beside its answer: the bytes of each way."""

from math import lcm

from advanced_parts.ring_attention import FP32, ring_bytes
from legacy_common.models import PRESETS

BF16 = 2  # bytes of a number
COMPARED = ("llama2-7b", "llama3-8b", "llama3-70b")  # presets
RANKS = (2, 8, 32, 64)


def ulysses_bytes(config, tokens: int, ranks: int, width: int = FP32) -> tuple[int, int]:
    """Return the bytes that a rank sends per layer in (forward, backward), `width` per number.

    An all-to-all each of q, k, v and out, the same backward; a rank keeps one of `ranks` parts.
    Key and value heads are repeated until each rank gets one.
    """
    head_dim = config.dim // config.num_heads
    numbers = 2 * config.dim + 2 * lcm(config.num_kv_heads, ranks) * head_dim
    one_way = tokens // ranks * numbers * width * (ranks - 1) // ranks
    return one_way, one_way


def all_gather_bytes(config, tokens: int, ranks: int, width: int = FP32) -> tuple[int, int]:
    """Return the same for k and v gathered once and kept, dk and dv reduce-scattered."""
    block = 2 * tokens // ranks * config.num_kv_heads * (config.dim // config.num_heads)
    return (ranks - 1) * block * width, (ranks - 1) * block * FP32


WAYS = {"ring": ring_bytes, "all-gather": all_gather_bytes, "Ulysses": ulysses_bytes}


def print_comparison(report, tokens: int) -> None:
    """Print what each way sends."""
    rows = []
    for name in COMPARED:
        config = PRESETS[name]
        heads = f"{config.num_heads} / {config.num_kv_heads}"
        for ranks in RANKS:
            sent = [sum(way(config, tokens, ranks, BF16)) / 2**20 for way in WAYS.values()]
            cells = [f"{mib:,.0f}" for mib in sent]
            if config.num_heads % ranks:
                cells[-1] = f"{config.num_heads} heads"
            rows.append((name, heads, str(ranks), *cells))
    what = "MiB that a rank sends per layer, forward and backward, bf16"
    report.say(f"{what}, one sequence of {tokens:,} tokens:")
    report.table(rows, ("model", "heads / kv", "ranks", *WAYS))
