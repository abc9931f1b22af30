"""Activation checkpointing of a model's blocks: whole, or all but what takes long to compute."""

import torch

# What `selective` keeps: matrix products and attention, which take the time. It computes norms and
# activation functions again, which take memory only.
KEPT = [torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default] + [  # the second: float8
    getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention{where}").default
    for kind, where in (("flash", ""), ("efficient", ""), ("cudnn", ""), ("flash", "_for_cpu"))
]
