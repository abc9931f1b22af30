"""What a rank sends along each axis: bytes that lessons count and step.py turns into time."""

from __future__ import annotations

from math import lcm

from planner import models
from planner.collectives import bus_factor
from planner.job import Model


def passes_of_activations(recompute: str) -> int:
    """Return how often a layer's collectives run: forward, backward, and forward again if full.

    Of tp each has two all-gathers and two reduce-scatters (Korthikanti et al., 2022, section
    4.2.2), of experts two all-to-alls (Lepikhin et al., 2020, section 3.2).
    """
    return 3 if recompute == "full" else 2


def ring_of_keys(ranks: int, keys: float, gradients: float) -> tuple[float, float]:
    """Return what forward and backward of ring attention cost (Liu et al., 2023).

    In the unit of one hop of a rank's keys and values, and of their gradients: these go around
    in backward, beside keys and values again.
    """
    hops = ranks - 1
    return hops * keys, hops * (keys + gradients)


def ulysses_numbers(model: Model, ranks: int) -> int:
    """Return the numbers per token that Ulysses exchanges: queries, output, keys, values.

    Key and value heads are repeated until each rank gets one (Jacobs et al., 2023, section 3).
    """
    heads = lcm(model.kv_heads, ranks)
    return 2 * models.query_width(model) + 2 * heads * models.head_width(model)


def passes_of_weights(
    zero: int, gather: float, reduce: float, again: float = 1.0
) -> tuple[float, float, float]:
    """Return what gathering for forward, gathering for backward, and reducing cost.

    In the unit (bytes or seconds) of one gathering and one reduction of the weights. Without ZeRO
    gradients are all-reduced: reduced and gathered. ZeRO-3 gathers `again`, from 0 to 1, of the
    weights a second time (Rajbhandari et al., 2020, section 7).
    """
    if zero == 0:
        return 0, 0, 2 * reduce
    return gather, gather * again if zero == 3 else 0, reduce


def bytes_of_weights(
    zero: int, ranks: int, micro_batches: int, gather: float, reduce: float, again: float = 1.0
) -> float:
    """Return the bytes that a rank sends for each weight in a step, in rings.

    `gather`, `reduce`: bytes of a weight and of a gradient on their way. In each micro-batch ZeRO-2
    reduces and ZeRO-3 does all (Rajbhandari et al., 2020, section 7, which has one).
    """
    forward, backward, reduced = passes_of_weights(zero, gather, reduce, again)
    if zero == 3:
        sent = micro_batches * (forward + backward + reduced)
    else:
        sent = (micro_batches if zero == 2 else 1) * reduced + forward
    return sent * bus_factor("all_gather", ranks)
