"""The transformer around a mixture of experts, and what an expert computes."""

import torch
import torch.nn.functional as F
from torch import nn

from dist_common import models, runtime


class Experts(nn.Module):
    """Several SwiGLU feed-forwards (Shazeer, 2020), weights stacked: the experts of one rank."""

    def __init__(self, config, num_experts):
        super().__init__()
        E, D, hidden = num_experts, config.dim, config.ffn_dim
        self.gate = nn.Parameter(torch.empty(E, D, hidden))
        self.up = nn.Parameter(torch.empty(E, D, hidden))
        self.down = nn.Parameter(torch.empty(E, hidden, D))

    def forward(self, rows, counts):
        """Compute rows (R, D), sorted by source rank, then expert; counts are (ranks, E).

        An expert without a row takes part with none, so that its gradient is zeros and not None.
        """
        experts = torch.arange(counts.shape[1], device=rows.device).repeat(counts.shape[0])
        by_expert = experts.repeat_interleave(counts.flatten()).argsort(stable=True)
        parts = rows[by_expert].split(counts.sum(0).tolist())
        weights = zip(parts, self.gate, self.up, self.down, strict=True)
        done = [(F.silu(part @ gate) * (part @ up)) @ down for part, gate, up, down in weights]
        return torch.cat(done)[by_expert.argsort()]  # (R, D), in the order of arrival


class MoEBlock(models.Block):
    """A block whose feed-forward is a mixture of experts; a token that it drops stays as it is."""

    def __init__(self, config, moe):
        super().__init__(config)
        del self.gate, self.up, self.down
        self.moe = moe

    def forward(self, x, cos, sin):
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.moe(self.ffn_norm(x))  # (B, T, D)


def build_model(config, layer, seed, device):
    """Draw a transformer from a seed, the same on all ranks; layer() is a block's feed-forward."""
    runtime.seed_everything(seed)
    model = models.Transformer(config)
    for index in range(config.num_layers):
        model.blocks[index] = MoEBlock(config, layer())
    model.reset_parameters()
    return model.to(device)


def keep_own_experts(model, mesh):
    """Leave a rank E / ep of the experts; all ranks drew all of them from one seed."""
    for block in model.blocks:
        for name, weight in block.moe.experts.named_parameters():
            own = weight.detach().chunk(mesh["ep"].size())[mesh.get_local_rank("ep")]
            setattr(block.moe.experts, name, nn.Parameter(own.clone()))
    return model
