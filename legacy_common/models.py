"""The model that most scripts train: one Llama-style decoder, with presets from 1M to 70B."""

import math
from argparse import ArgumentTypeError
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from legacy_common import shapes
from legacy_common.cli import UsageError

# Drawing as one process does is a job of the CPU: beyond this, of more than ten minutes.
DRAWN_AS_ONE_PROCESS = 10e9  # weights


@dataclass(frozen=True)
class TransformerConfig:
    """Shape of a Llama-style decoder, as its letters in the literature stand behind each line."""

    vocab_size: int  # V
    dim: int  # D
    num_layers: int  # L
    num_heads: int  # H; each is D / H wide
    num_kv_heads: int  # keys and values are shared by H / num_kv_heads heads
    ffn_dim: int  # F
    max_seq_len: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tied_embeddings: bool = False  # the output layer is the embedding, transposed
    document_end: int | None = None  # the token at which attention ends; None: it sees them all
    num_experts: int = 0  # E: feed-forwards of a block, each F wide; 0: one, for all tokens
    top_k: int = 1  # experts that compute a token

    def num_parameters(self) -> int:
        """Return the number of parameters by formula, without building the model."""
        D, kv_dim = self.dim, self.num_kv_heads * (self.dim // self.num_heads)
        ffn, router = 3 * D * self.ffn_dim * max(1, self.num_experts), D * self.num_experts
        block = 2 * D * D + 2 * D * kv_dim + ffn + router + 2 * D
        tables = self.vocab_size * D * (1 if self.tied_embeddings else 2)
        return self.num_layers * block + tables + D


# Sources: Touvron et al., Llama 2 (2023); Grattafiori et al., The Llama 3 Herd of Models (2024),
# table 3; each model's config.json. 1b is Llama 3.2 1B; 124m has the shape of GPT-2 small.
PRESETS = {
    "tiny": TransformerConfig(256, 128, 4, 4, 2, 352, 256),
    "124m": TransformerConfig(50_257, 768, 12, 12, 12, 2048, 1024, tied_embeddings=True),
    "1b": TransformerConfig(128_256, 2048, 16, 32, 8, 8192, 131_072, 5e5, tied_embeddings=True),
    "llama2-7b": TransformerConfig(32_000, 4096, 32, 32, 32, 11_008, 4096),
    "llama3-8b": TransformerConfig(128_256, 4096, 32, 32, 8, 14_336, 8192, rope_theta=5e5),
    "llama3-70b": TransformerConfig(128_256, 8192, 80, 64, 8, 28_672, 8192, rope_theta=5e5),
}
# Mixtures of experts, apart: most scripts and formulas know one feed-forward alone. Source of the
# second: Jiang et al., Mixtral of Experts (2024), table 1; its config.json.
MIXTURES = {
    "tiny-moe": TransformerConfig(256, 128, 4, 4, 2, 176, 256, num_experts=8, top_k=2),
    "mixtral-8x7b": TransformerConfig(
        32_000, 4096, 32, 32, 8, 14_336, 32_768, rope_theta=1e6, num_experts=8, top_k=2
    ),
}


def preset(name: str, seq_len: int) -> TransformerConfig:
    """Return a shape that can read --seq-len tokens. Raises: UsageError when it cannot."""
    return able_to_read(shape_of(name), seq_len)


def shape_of(name: str) -> TransformerConfig:
    """Return the shape of a preset, or of a JSON file (`shapes`). Raises: UsageError."""
    known = {**PRESETS, **MIXTURES}
    return known[name] if name in known else TransformerConfig(**shapes.read(name))


def facts_of(config: TransformerConfig) -> dict[str, Any]:
    """Return what results.json and checkpoints say of a shape that is no preset."""
    of_data = ("document_end", "num_experts", "top_k")  # and of no file
    return {name: value for name, value in vars(config).items() if name not in of_data}


def preset_or_file(presets: Collection[str], text: str) -> str:
    """Parse --preset: one of the `presets`, or the path of a JSON file that can be read."""
    if text not in presets:
        if Path(text).suffix != ".json":
            known = ", ".join(presets)
            raise ArgumentTypeError(f"must be {known}, or a config.json of a Llama, not {text!r}")
        shape_of(text)
    return text


def able_to_read(config: TransformerConfig, seq_len: int) -> TransformerConfig:
    """Return a config that can read --seq-len tokens. Raises: UsageError when it cannot."""
    if seq_len > config.max_seq_len:
        raise UsageError(f"--seq-len must be at most {config.max_seq_len}")
    return config


def rotary_tables(positions: torch.Tensor, head_dim: int, theta: float) -> tuple[torch.Tensor, ...]:
    """Return cosines and sines of positions (T,), (T, head_dim / 2) each (Su et al., 2021)."""
    pairs = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = torch.outer(positions.float(), theta ** (-pairs / head_dim))
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn dims i and i + head_dim / 2 by the angle of a position. Shape: x (B, H, T, head_dim)."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)


def causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Attend to this token and those before it, or to those of a `mask`.

    Shapes: (B, heads, T, head_dim), mask (B, 1, T, T).
    """
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    shared_by = q.shape[1] // k.shape[1]  # GPU kernels that take a mask want equal heads
    k, v = (x.repeat_interleave(shared_by, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def document_of_each(tokens: torch.Tensor, end: int) -> torch.Tensor:
    """Number each row's documents from 0; the token `end` is its document's. Shapes: (B, T)."""
    ended = tokens == end
    return ended.cumsum(1) - ended.long()


def document_mask(documents: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return which tokens each of those at `positions` attends to: of its document, and not later.

    Shapes: documents (B, T), positions (Q,) -> (B, 1, Q, T).
    """
    past = positions[:, None] >= torch.arange(documents.shape[1], device=documents.device)
    same = documents[:, positions, None] == documents[:, None, :]
    return (same & past)[:, None]


def as_they_are(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return k, v


class Attention(nn.Module):
    """Several query heads share one key and value head (Ainslie et al., 2023)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.num_heads
        kv_dim = config.num_kv_heads * self.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)
        # Context parallelism puts its own in their places: it sends keys and values, and attends.
        self.share, self.attend = as_they_are, causal_attention

    def forward(self, x, cos, sin, mask=None) -> torch.Tensor:
        B, T, _ = x.shape

        def heads(weight):
            return weight(x).view(B, T, -1, self.head_dim).transpose(1, 2)

        k, v = self.share(rotate(heads(self.wk), cos, sin), heads(self.wv))
        q = rotate(heads(self.wq), cos, sin)  # (B, heads, T, head_dim), while keys are on their way
        out = self.attend(q, k, v) if mask is None else self.attend(q, k, v, mask)
        return self.wo(out.transpose(1, 2).reshape(B, T, -1))  # (B, T, D)


class Experts(nn.Module):
    """SwiGLU feed-forwards, stacked: matrix i of each is expert i's."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        E, D, hidden = config.num_experts, config.dim, config.ffn_dim
        self.gate = nn.Parameter(torch.empty(E, hidden, D))
        self.up = nn.Parameter(torch.empty(E, hidden, D))
        self.down = nn.Parameter(torch.empty(E, D, hidden))

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Compute rows (R, D), sorted by expert; counts (E,) has how many each gets, maybe none."""
        parts, weights = rows.split(counts.tolist()), (self.gate, self.up, self.down)
        own = zip(parts, *map(local, weights), strict=True)  # a rank may have some of the experts
        return torch.cat(
            [
                F.linear(F.silu(F.linear(part, gate)) * F.linear(part, up), down)
                for part, gate, up, down in own
            ]
        )


def compute_here(rows: torch.Tensor, counts: torch.Tensor, experts: Experts) -> torch.Tensor:
    return experts(rows, counts)


class MoE(nn.Module):
    """A router has top_k of the experts compute each token (Shazeer et al., 2017)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.router = nn.Linear(config.dim, config.num_experts, bias=False)
        self.experts = Experts(config)
        # Expert parallelism puts its own in its place: it sends rows to the ranks of their experts.
        self.exchange = compute_here

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens, E = x.flatten(0, 1), self.router.out_features
        with torch.autocast(x.device.type, enabled=False):  # close scores need float32's digits
            scores = F.linear(tokens.float(), self.router.weight.float())  # (tokens, E)
        best, chosen = scores.topk(self.top_k)
        by_expert = chosen.flatten().argsort(stable=True)  # of all choices, token by token
        counts = (chosen.flatten() == torch.arange(E, device=x.device)[:, None]).sum(1)

        computed = self.exchange(tokens[by_expert // self.top_k], counts, self.experts)

        of_token = computed[by_expert.argsort()].unflatten(0, chosen.shape)  # (tokens, k, D)
        return (of_token * best.softmax(-1)[..., None]).sum(1).type_as(x).view_as(x)


class Block(nn.Module):
    """Attention, then a SwiGLU feed-forward (Shazeer, 2020), each on an RMSNorm of its input.

    Or a mixture of these feed-forwards, where the config has experts.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.moe = MoE(config) if config.num_experts else None
        if self.moe:
            return
        self.gate = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.up = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), *tables)  # cosines, sines, a mask if any
        h = self.ffn_norm(x)
        if self.moe:
            return x + self.moe(h)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))  # (B, T, D)


class LookUp(torch.autograd.Function):
    """An embedding whose backward adds up a word's gradients in float32.

    PyTorch's does so on a GPU; on the CPU it adds in bfloat16, where a sum stops growing at some
    hundred parts.
    """

    @staticmethod
    def forward(ctx, weight, tokens):
        ctx.words = len(weight)
        ctx.save_for_backward(tokens)
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx, grad):
        (tokens,), add_up = ctx.saved_tensors, torch.ops.aten.embedding_dense_backward
        return add_up(grad.float(), tokens, ctx.words, -1, False).to(grad.dtype), None


class Embedding(nn.Embedding):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if (self.weight.device.type, self.weight.dtype) == ("cpu", torch.bfloat16):
            return LookUp.apply(self.weight, tokens)
        return super().forward(tokens)


class FusedNorm(torch.autograd.Function):
    """What a GPU's RMSNorm keeps, without content: the CPU's keeps a float32 input and more."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, torch.empty_like(x[..., :1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def norms_of_a_gpu(model: nn.Module) -> None:
    """Have the norms of a model without content keep for backward what they would on a GPU."""
    for norm in model.modules():
        if isinstance(norm, nn.RMSNorm):
            norm.forward = partial(lambda norm, x: FusedNorm.apply(x, norm.weight), norm)


class Transformer(nn.Module):
    """A Llama-style decoder without buffers: from `meta`, to_empty() and reset_parameters() do.

    Shapes: tokens (B, T) int64 in, logits (B, T, V) out; T at most max_seq_len. `positions` (T,)
    are the tokens' places in their sequence where they are not 0 .. T-1.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tied_embeddings:
            self.head.weight = self.embedding.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights anew, in the order of `named_parameters`."""
        for name, parameter in self.named_parameters():
            self.draw(name, parameter)

    def draw(self, name: str, weight: torch.Tensor) -> None:
        """Fill a tensor as the parameter `name`: norms 1, others normal (GPT-2, section 2.3)."""
        if weight.dim() == 1:
            nn.init.ones_(weight)
        else:
            into_residual = name.endswith(("wo.weight", "down.weight", "experts.down"))
            scale = 1 / math.sqrt(2 * self.config.num_layers) if into_residual else 1.0
            nn.init.normal_(weight, std=0.02 * scale)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        T, config = tokens.shape[1], self.config
        if config.max_seq_len < T:
            raise ValueError(f"{T} tokens are more than the model's {config.max_seq_len}")
        head_dim = config.dim // config.num_heads
        places = torch.arange(T, device=tokens.device) if positions is None else positions
        tables = rotary_tables(places, head_dim, config.rope_theta)
        if config.document_end is not None:  # one mask for all layers
            tables += (document_mask(document_of_each(tokens, config.document_end), places),)
        x = self.embedding(tokens)  # (B, T, D)
        for block in self.blocks:
            x = block(x, *tables)
        return self.head(self.norm(x))  # (B, T, V)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor: its part of a DTensor, any other as it is."""
    return tensor.to_local() if hasattr(tensor, "placements") else tensor
