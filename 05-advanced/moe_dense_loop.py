"""The same mixture of experts on one process: a loop over experts, and a queue for each of them.

Every expert computes every token, and what the router did not choose counts 0: wasteful, but
nothing is sorted, sent or gathered, so that nothing of it can hide a mistake of the parallel layer.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn


class DenseLoop(nn.Module):
    """Replace a parallel layer: all experts, all ranks' tokens.

    Shapes: x (B, T, D) in and out. After it `load` and `dropped` hold numbers of choices by
    expert, and `decisions` every choice that was kept, as (token, expert).
    """

    def __init__(self, router, gate, up, down, bias, top_k, capacity_factor):
        super().__init__()
        self.top_k, self.capacity_factor = top_k, capacity_factor
        self.router = router  # (E, D)
        self.gate, self.up, self.down = gate, up, down  # (E, D, F), (E, D, F), (E, F, D)
        self.bias = bias

    def forward(self, x):
        tokens = x.flatten(0, 1)
        logits = tokens @ self.router.T
        self.probabilities = logits.exp() / logits.exp().sum(1, keepdim=True)  # (tokens, E)
        scores = (self.probabilities + self.bias).detach()
        chosen = torch.zeros_like(scores, dtype=torch.bool)
        for _ in range(self.top_k):
            best = scores.masked_fill(chosen, -math.inf).argmax(1)
            chosen[torch.arange(len(tokens)), best] = True
        weights = self.probabilities * chosen
        weights = weights / weights.sum(1, keepdim=True)
        stays = self.queue(chosen)
        out = torch.zeros_like(tokens)
        for expert in range(len(self.router)):
            gate, up, down = self.gate[expert], self.up[expert], self.down[expert]
            weight = (weights * stays)[:, expert, None]
            out = out + weight * ((F.silu(tokens @ gate) * (tokens @ up)) @ down)
        return out.view_as(x)

    def queue(self, chosen):
        """Let tokens queue at their experts, in order; return who gets in. Shapes: (tokens, E)."""
        tokens, experts = chosen.shape
        capacity = math.ceil(self.capacity_factor * self.top_k * tokens / experts)
        self.load, self.dropped = [0] * experts, [0] * experts
        self.decisions = []
        stays = torch.zeros_like(chosen)
        for token, expert in chosen.nonzero().tolist():
            self.load[expert] += 1
            if self.load[expert] > capacity:
                self.dropped[expert] += 1
            else:
                stays[token, expert] = True
                self.decisions.append((token, expert))
        return stays

    def auxiliary_loss(self):
        """Return the loss of Switch Transformers' equations 4 to 6, from the queues."""
        fractions = torch.tensor(self.load, device=self.bias.device) / sum(self.load)
        return len(self.load) * fractions @ self.probabilities.mean(0)

    def nudge_bias(self, rate):
        """Add the sign of the mean load less the expert's own, times a rate."""
        mean = sum(self.load) / len(self.load)
        for expert, load in enumerate(self.load):
            self.bias[expert] += rate * ((load < mean) - (load > mean))


def to_dense_loop(model):
    """Replace the layers of a model that still has all experts; their weights stay."""
    for block in model.blocks:
        moe = block.moe
        weights = (moe.router.weight, moe.experts.gate, moe.experts.up, moe.experts.down)
        block.moe = DenseLoop(*weights, moe.bias, moe.top_k, moe.capacity_factor)
    return model
