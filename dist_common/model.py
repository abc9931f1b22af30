"""The transformer that the scripts train: Llama-style, five presets from 1M to 70B."""

import math
import zlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from dist_common.cli import UsageError


@dataclass(frozen=True)
class Config:
    """The shape of a Llama-style decoder."""

    vocab_size: int  # V
    dim: int  # D, the width
    num_layers: int  # L
    num_heads: int  # H, each D / H wide
    num_kv_heads: int  # H / num_kv_heads query heads share a key and a value head
    ffn_dim: int  # hidden width of the feed-forward
    max_seq_len: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tied_embeddings: bool = False  # the output layer is the embedding, transposed

    def num_parameters(self):
        """Return the number of weights."""
        with torch.device("meta"):  # allocates nothing
            return sum(weight.numel() for weight in Transformer(self).parameters())

    def flops_per_token(self, seq_len):
        """Return the FLOPs of forward and backward per token (PaLM, 2022, appendix B).

        6 per weight of a matrix product, and 12 T D per layer for attention.
        """
        lookups = 0 if self.tied_embeddings else self.vocab_size * self.dim
        attention = 12 * self.num_layers * self.dim * seq_len
        return 6 * (self.num_parameters() - lookups) + attention


# Sources: Grattafiori et al., The Llama 3 Herd of Models (2024), table 3, and each
# model's config.json. 1b is Llama 3.2 1B; 124m has the shape of GPT-2 small.
PRESETS = {
    "tiny": Config(256, 128, 4, 4, 2, 352, 256),
    "124m": Config(50_257, 768, 12, 12, 12, 2048, 1024, tied_embeddings=True),
    "1b": Config(128_256, 2048, 16, 32, 8, 8192, 131_072, 5e5, tied_embeddings=True),
    "llama2-7b": Config(32_000, 4096, 32, 32, 32, 11_008, 4096),
    "llama3-8b": Config(128_256, 4096, 32, 32, 8, 14_336, 8192, 5e5),
    "llama3-70b": Config(128_256, 8192, 80, 64, 8, 28_672, 8192, 5e5),
}


def load_config(name, seq_len, vocab_size):
    """Return the shape of a preset.

    Raises: UsageError when it cannot read --seq-len tokens or lacks tokens of the data.
    """
    config = PRESETS[name]
    if seq_len > config.max_seq_len:
        raise UsageError(f"--seq-len must be at most {config.max_seq_len}")
    if vocab_size > config.vocab_size:
        raise UsageError(
            f"--preset {name} has {config.vocab_size} tokens, the data {vocab_size}"
        )
    return config


def rotary_tables(positions, head_dim, theta):
    """Return cosines and sines. Shapes: positions (T,) -> (T, head_dim / 2) each."""
    pairs = torch.arange(0, head_dim, 2, device=positions.device).float()
    angles = torch.outer(positions.float(), theta ** (-pairs / head_dim))
    return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    """Rotate dims i and i + head_dim / 2 (Su et al., 2021). x: (B, H, T, head_dim)."""
    first, second = x.float().chunk(2, dim=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(rotated, dim=-1).type_as(x)


def attend_causally(q, k, v):
    """Shapes: q (B, H, T, D/H), k and v with fewer heads -> (B, H, T, D/H)."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Attention(nn.Module):
    """Causal attention; several query heads share a key and value head.

    attend: the function of q, k and v; context parallelism has its own.
    """

    attend = staticmethod(attend_causally)

    def __init__(self, config):
        super().__init__()
        self.head_dim = config.dim // config.num_heads
        kv_dim = config.num_kv_heads * self.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x, cos, sin):
        heads = (-1, self.head_dim)
        q, k, v = (  # (B, H, T, D/H), k and v with fewer heads
            project(x).unflatten(-1, heads).transpose(1, 2)
            for project in (self.wq, self.wk, self.wv)
        )
        q = rotate(q, cos, sin)
        k = rotate(k, cos, sin)
        attended = self.attend(q, k, v)
        return self.wo(attended.transpose(1, 2).flatten(2))  # (B, T, D)


class Block(nn.Module):
    """Attention, then a SwiGLU feed-forward, each on an RMSNorm of its input.

    activation_checkpointing: backward computes nothing (none) or all (full) again.
    """

    activation_checkpointing = "none"

    def __init__(self, config):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.gate = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.up = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x, cos, sin):
        """Shapes: x (B, T, D) -> (B, T, D)."""
        if self.activation_checkpointing == "none":
            return self.compute(x, cos, sin)
        # Inside the FSDP unit: when backward gets here, its weights are gathered.
        return checkpoint(self.compute, x, cos, sin, use_reentrant=False)

    def compute(self, x, cos, sin):
        x = x + self.attention(self.attention_norm(x), cos, sin)
        h = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))  # (B, T, D)


class Transformer(nn.Module):
    """A Llama-style decoder without buffers. Build it on any device, `meta` too.

    Shapes: tokens (B, T) int64 -> logits (B, T, V); T is at most max_seq_len.
    positions: of the tokens, 0 to T - 1 if None; context parallelism has others.
    """

    positions = None

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tied_embeddings:
            self.head.weight = self.embedding.weight
        for name, weight in self.named_parameters():
            init_weight(name, weight, config.num_layers)

    def forward(self, tokens):
        positions = self.positions
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        head_dim = self.config.dim // self.config.num_heads
        cos, sin = rotary_tables(positions, head_dim, self.config.rope_theta)
        x = self.embedding(tokens)  # (B, T, D)
        for block in self.blocks.children():
            x = block(x, cos, sin)
        return self.head(self.norm(x))  # (B, T, V)


@torch.no_grad()
def init_weight(name, weight, num_layers, generator=None):
    """Fill a weight: norms with 1, matrices from a normal (GPT-2, section 2.3)."""
    if weight.dim() == 1:
        weight.fill_(1.0)
        return
    into_residual = name.endswith(("wo.weight", "down.weight"))
    scale = 1 / math.sqrt(2 * num_layers) if into_residual else 1.0
    weight.normal_(std=0.02 * scale, generator=generator)


@torch.no_grad()
def init_weights(model, seed):
    """Give a model, sharded or not, the weights that one process would draw.

    On a CPU each rank draws the whole model. On a GPU it draws one tensor at a time, so
    it needs memory for its own shards and one whole tensor.
    """
    config = model.config
    weights = dict(model.named_parameters())
    device = next(iter(weights.values())).device
    if device.type == "cpu":
        torch.manual_seed(seed)
        drawn = dict(Transformer(config).named_parameters())
    for name, weight in weights.items():
        if device.type == "cpu":
            whole = drawn[name]
        else:
            generator = torch.Generator(device)
            generator.manual_seed(seed + zlib.crc32(name.encode()))
            whole = torch.empty(weight.shape, device=device)
            init_weight(name, whole, config.num_layers, generator)
        if isinstance(weight, DTensor):  # keep this rank's shard; nothing is sent
            whole = distribute_tensor(
                whole, weight.device_mesh, weight.placements, src_data_rank=None
            )
        weight.copy_(whole)


def build_transformer(config, seed, device):
    """Return the whole model with its first weights, the same ones on every rank."""
    with torch.device(device):
        model = Transformer(config)
    init_weights(model, seed)
    return model
