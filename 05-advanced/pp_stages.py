"""Cut dist_common's Transformer into the stages of a pipeline."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from dist_common import models


class Stage(nn.Module):
    """Some blocks of a Transformer; the first stage has the embedding too, the last the head."""

    def __init__(self, model, index, num_stages):
        super().__init__()
        self.config = model.config
        per_stage = self.config.num_layers // num_stages
        self.embedding = model.embedding if index == 0 else None
        self.blocks = model.blocks[index * per_stage : (index + 1) * per_stage]
        self.norm = model.norm if index == num_stages - 1 else None
        self.head = model.head if index == num_stages - 1 else None

    def forward(self, x):
        """Shapes: tokens (B, T) or activations (B, T, D) in, (B, T, D) or logits (B, T, V) out."""
        config = self.config
        places = torch.arange(x.shape[1], device=x.device)
        cos, sin = models.rotary_tables(places, config.dim // config.num_heads, config.rope_theta)
        x = self.embedding(x) if self.embedding is not None else x
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x)) if self.head is not None else x


def stages_of(model, rank, p, v):
    """Return the stages of this rank, by index, with weights of their own."""
    model = copy.deepcopy(model)  # a real job builds only its own stages: hybrid_parallelism.py
    return {index: Stage(model, index, p * v) for index in range(rank, p * v, p)}


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
