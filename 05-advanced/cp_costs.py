"""What context parallelism sends per layer: formulas that the scripts compare with their counts."""

import math

from dist_common.models import PRESETS, TransformerConfig

BF16 = 2  # bytes per number
FP32 = 4
# NVIDIA's data sheets, H100 SXM: NVLink 900 GB/s in both directions together, dense bfloat16; a
# 400 Gbit/s InfiniBand adapter per GPU.
LINKS_GB_S = {"NVLink": 450.0, "InfiniBand": 50.0}
PEAK_FLOPS = 989.4e12


def kv_dim(config: TransformerConfig) -> int:
    """Return the width of one token's keys: kv heads x head_dim."""
    return config.num_kv_heads * config.dim // config.num_heads


def ring_bytes(config, tokens: int, ranks: int, width: int = FP32) -> tuple[int, int]:
    """Return the bytes that a rank sends per layer in (forward, backward) of ring attention.

    `tokens` are the whole batch's, `width` the bytes per number of k and v. Forward: k and v make
    ranks - 1 hops. Backward: again, and dk and dv, float32, as many.
    """
    block = 2 * tokens // ranks * kv_dim(config)  # numbers in one rank's k and v
    hops = ranks - 1
    return hops * block * width, hops * block * (width + FP32)


def all_gather_bytes(config, tokens: int, ranks: int, width: int = FP32) -> tuple[int, int]:
    """Return the same for k and v gathered once and kept, dk and dv reduce-scattered."""
    block = 2 * tokens // ranks * kv_dim(config)
    return (ranks - 1) * block * width, (ranks - 1) * block * FP32


def ulysses_bytes(config, tokens: int, ranks: int, width: int = FP32) -> tuple[int, int]:
    """Return the same for Ulysses: an all-to-all each of q, k, v and out; the same ones backward.

    A rank keeps one of `ranks` parts. Key and value heads are repeated until each rank gets one.
    """
    heads = math.lcm(config.num_kv_heads, ranks)
    widths = 2 * config.dim + 2 * heads * config.dim // config.num_heads  # q, out; k, v
    one_way = tokens // ranks * widths * width * (ranks - 1) // ranks
    return one_way, one_way


def tokens_to_hide(config, link_gb_s: float) -> int:
    """Return the tokens per rank from which the ring's forward computes longer than it sends.

    With c tokens per rank, half of a block's pairs are attended: 2 products of c x c / 2 x D, 2
    operations each; 2 x c x kv_dim bfloat16 numbers are sent meanwhile. Source: Liu et al. (2023),
    section 3, without the causal half and grouped-query attention.
    """
    seconds_computing = 2 * config.dim / PEAK_FLOPS  # times c * c
    seconds_sending = 2 * kv_dim(config) * BF16 / (link_gb_s * 1e9)  # times c
    return math.ceil(seconds_sending / seconds_computing)


def comparison(presets, ranks, tokens: int) -> list[tuple[str, ...]]:
    """Return rows of MiB that a rank sends per layer, forward and backward, in bfloat16."""
    rows = []
    for name in presets:
        config = PRESETS[name]
        for count in ranks:
            ring, gather = (
                sum(formula(config, tokens, count, BF16)) / 2**20
                for formula in (ring_bytes, all_gather_bytes)
            )
            fits = config.num_heads % count == 0
            ulysses = sum(ulysses_bytes(config, tokens, count, BF16)) / 2**20
            heads = f"{config.num_heads} / {config.num_kv_heads}"
            sent = f"{ulysses:,.0f}" if fits else f"{config.num_heads} heads"
            rows.append((name, heads, str(count), f"{ring:,.0f}", f"{gather:,.0f}", sent))
    return rows
