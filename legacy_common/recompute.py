"""Activation checkpointing of a model's blocks: whole, or all but what takes long to compute."""

import functools
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

# What `selective` keeps: matrix products and attention, which take the time. It computes norms and
# activation functions again, which take memory only.
KEPT = [torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default] + [  # the second: float8
    getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention{where}").default
    for kind, where in (("flash", ""), ("efficient", ""), ("cudnn", ""), ("flash", "_for_cpu"))
]


def checkpoint_activations(blocks: Iterable[nn.Module], kind: str) -> None:
    """Have backward compute blocks' activations again. `kind`: none, full, selective (not KEPT).

    Inside FSDP's unit, not around it: when backward gets there, it has gathered the weights.
    Source: Korthikanti et al., Reducing Activation Recomputation (2022), section 5.
    """
    keep = functools.partial(create_selective_checkpoint_contexts, KEPT)
    options = {"context_fn": keep} if kind == "selective" else {}

    def recomputed(forward: Callable) -> Callable:
        # A plain function: torch.compile translates nothing of a partial, and says nothing.
        return lambda *inputs: checkpoint(forward, *inputs, use_reentrant=False, **options)

    for block in blocks if kind != "none" else ():
        block.forward = recomputed(block.forward)
