"""Shapes of published models, and the weights that a shape has."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

from planner.job import Model


def _model(name, layers, hidden, heads, kv_heads, ffn, vocab, **more) -> Model:
    return Model(layers, hidden, heads, kv_heads, ffn, vocab, name=name, **more)


def _gpt(name, layers, hidden, heads, vocab=51_200, positions=2_048) -> Model:
    """GPT: two matrices of 4 h, biases, learned positions, one table for tokens and logits."""
    more = {"gated": False, "tied_embeddings": True, "biases": True, "learned_positions": positions}
    return _model(name, layers, hidden, heads, heads, 4 * hidden, vocab, **more)


def _deepseek(name, layers, hidden, dense_ffn, ffn, vocab, experts, **more) -> Model:
    """DeepSeek-V2 and V3: latent attention of 128 heads, fine-grained and shared experts."""
    latent = {"head_dim": 128, "q_rank": 1_536, "kv_rank": 512, "rope_dim": 64}
    more = {"dense_ffn": dense_ffn, "experts": experts, **latent, **more}
    more["dense_layers"] = 1 if name.endswith("v2") else 3
    return _model(name, layers, hidden, 128, 128, ffn, vocab, **more)


_PHI = {"gated": False, "biases": True, "norms": 1}
_GEMMA2 = {"head_dim": 256, "tied_embeddings": True, "norms": 4, "softcap": True}
_ALL = [
    _model("tiny", 4, 128, 4, 2, 352, 256),  # the templates' own, as 124m and 1b
    _model("124m", 12, 768, 12, 12, 2_048, 50_257, tied_embeddings=True),
    _model("1b", 16, 2_048, 32, 8, 8_192, 128_256, tied_embeddings=True),
    _gpt("gpt2-124m", 12, 768, 12, 50_257, 1_024),
    _gpt("gpt2-350m", 24, 1_024, 16, 50_257, 1_024),
    _gpt("gpt2-774m", 36, 1_280, 20, 50_257, 1_024),
    _gpt("gpt2-1.5b", 48, 1_600, 25, 50_257, 1_024),
    _gpt("gpt-22b", 48, 6_144, 64),
    _gpt("gpt3-175b", 96, 12_288, 96),
    _gpt("gpt-530b", 105, 20_480, 128),
    _gpt("gpt-1t", 128, 25_600, 160),
    _model("llama2-7b", 32, 4_096, 32, 32, 11_008, 32_000),
    _model("llama2-13b", 40, 5_120, 40, 40, 13_824, 32_000),
    _model("llama2-70b", 80, 8_192, 64, 8, 28_672, 32_000),
    _model("llama3-8b", 32, 4_096, 32, 8, 14_336, 128_256),
    _model("llama3-70b", 80, 8_192, 64, 8, 28_672, 128_256),
    _model("llama3-405b", 126, 16_384, 128, 8, 53_248, 128_256),
    _model("llama3.2-1b", 16, 2_048, 32, 8, 8_192, 128_256, tied_embeddings=True),
    _model("yi-34b", 60, 7_168, 56, 8, 20_480, 64_000),
    _model("tinyllama-1.1b", 22, 2_048, 32, 4, 5_632, 32_000),
    _model("mistral-7b", 32, 4_096, 32, 8, 14_336, 32_000),
    _model("mixtral-8x7b", 32, 4_096, 32, 8, 14_336, 32_000, experts=8, top_k=2),
    _model("mixtral-8x22b", 56, 6_144, 48, 8, 16_384, 32_768, experts=8, top_k=2),
    _model("gemma-2b", 18, 2_048, 8, 1, 16_384, 256_000, head_dim=256, tied_embeddings=True),
    _model("gemma-7b", 28, 3_072, 16, 16, 24_576, 256_000, head_dim=256, tied_embeddings=True),
    _model("gemma-2-2b", 26, 2_304, 8, 4, 9_216, 256_000, **_GEMMA2),
    _model("gemma-2-9b", 42, 3_584, 16, 8, 14_336, 256_000, **_GEMMA2),
    _model("llama3.2-3b", 28, 3_072, 24, 8, 8_192, 128_256, tied_embeddings=True),
    _model("phi-3-mini", 32, 3_072, 32, 32, 8_192, 32_064),
    _model("phi-1.5", 24, 2_048, 32, 32, 8_192, 51_200, **_PHI),
    _model("phi-2", 32, 2_560, 32, 32, 10_240, 51_200, **_PHI),
    _model("stablelm-alpha-3b", 16, 4_096, 32, 32, 16_384, 50_688, gated=False, biases=True),
    _model("falcon-7b", 32, 4_544, 71, 1, 18_176, 65_024, gated=False, tied_embeddings=True),
    _model("falcon-40b", 60, 8_192, 128, 8, 32_768, 65_024, gated=False, tied_embeddings=True),
    _deepseek("deepseek-v2", 60, 5_120, 12_288, 1_536, 102_400, 160, top_k=6, shared_experts=2),
    _deepseek("deepseek-v3", 61, 7_168, 18_432, 2_048, 129_280, 256, top_k=8, shared_experts=1),
]
MODELS: dict[str, Model] = {model.name: model for model in _ALL}


def head_width(model: Model) -> int:
    """Return the numbers of one head."""
    return model.head_dim or model.hidden // model.heads


def key_width(model: Model) -> int:
    """Return the width of keys, and of values: groups of queries share them (GQA)."""
    return head_width(model) * model.kv_heads


def query_width(model: Model) -> int:
    """Return the width of queries and of attention's output."""
    return head_width(model) * model.heads


# How tensor parallelism cuts a matrix (Shoeybi et al., 2019, section 3), or who has it.
COLUMN, ROW, WHOLE, EXPERT = "column", "row", "whole", "expert"
Shape = tuple[int, int, str]  # outputs, inputs, how it is cut


def attention_shapes(model: Model) -> list[Shape]:
    """Return a layer's attention: queries, keys, values, output.

    Latent attention (DeepSeek-V2, section 2.1): down to a rank, a norm, and up for each head.
    """
    h, queries, keys = model.hidden, query_width(model), key_width(model)
    if not model.kv_rank:
        return [(queries, h, COLUMN), (keys, h, COLUMN), (keys, h, COLUMN), (h, queries, ROW)]
    turned = queries + model.heads * model.rope_dim
    down = [(model.kv_rank + model.rope_dim, h, WHOLE), (model.kv_rank, 1, WHOLE)]
    up = [(2 * queries, model.kv_rank, COLUMN), (h, queries, ROW)]
    if not model.q_rank:
        return [*down, (turned, h, COLUMN), *up]
    queries_down = [(model.q_rank, h, WHOLE), (model.q_rank, 1, WHOLE)]
    return [*queries_down, (turned, model.q_rank, COLUMN), *down, *up]


def mlp_shapes(model: Model, width: int, copies: int = 0) -> list[Shape]:
    """Return a feed-forward: three matrices where gated (SwiGLU), else two; or `copies` of it."""
    up = 2 if model.gated else 1
    if copies:
        one = [(width, model.hidden, EXPERT)] * up + [(model.hidden, width, EXPERT)]
        return one * copies
    return [(width, model.hidden, COLUMN)] * up + [(model.hidden, width, ROW)]


def dense_width(model: Model) -> int:
    """Return the inner width that every token passes in a layer without experts."""
    return model.dense_ffn or model.ffn


def is_dense(model: Model, layer: int) -> bool:
    """Tell whether a layer (from 0) has no experts."""
    return not model.experts or layer < model.dense_layers


@cache
def shapes_of_kind(model: Model, dense: bool) -> tuple[Shape, ...]:
    """Return all weights of a layer of a kind; a vector is a column.

    Biases of a matrix cut by its inputs (output, second of the feed-forward) stay whole.
    """
    h = model.hidden
    width = dense_width(model) if dense else model.shared_experts * model.ffn
    shapes = attention_shapes(model) + [(h, 1, WHOLE)] * model.norms
    if width:
        shapes += mlp_shapes(model, width)
    if not dense:
        shapes += [(model.experts, h, WHOLE), *mlp_shapes(model, model.ffn, model.experts)]
    if model.biases:
        cut = [query_width(model), key_width(model), key_width(model)]
        cut += [width] * (2 if model.gated else 1)
        shapes += [(size, 1, COLUMN) for size in cut] + [(h, 1, WHOLE)] * (2 + model.norms)
    return tuple(shapes)


@cache
def _sum(model: Model, dense: bool, kinds: tuple[str, ...]) -> int:
    shapes = shapes_of_kind(model, dense)
    return sum(outputs * inputs for outputs, inputs, kind in shapes if kind in kinds)


def whole_parameters(model: Model, layer: int) -> int:
    """Return a layer's weights that tensor parallelism does not split: norms, router, ..."""
    return _sum(model, is_dense(model, layer), (WHOLE,))


def split_parameters(model: Model, layer: int) -> int:
    """Return a layer's weights that tensor parallelism splits, but for routed experts'."""
    return _sum(model, is_dense(model, layer), (COLUMN, ROW))


def expert_parameters(model: Model, layer: int) -> int:
    """Return the weights of all routed experts of a layer."""
    return _sum(model, is_dense(model, layer), (EXPERT,))


def matrix_parameters(model: Model, layer: int) -> int:
    """Return the weights of a layer's matrices: no norms and no biases."""
    shapes = shapes_of_kind(model, is_dense(model, layer))
    return sum(outputs * inputs for outputs, inputs, _ in shapes if inputs > 1)


def layer_parameters(model: Model, layer: int = -1) -> int:
    """Return the weights of a layer (from 0; the last one if not said)."""
    return _sum(model, is_dense(model, layer % model.layers), (COLUMN, ROW, WHOLE, EXPERT))


def table_parameters(model: Model) -> int:
    """Return the weights of one table: a row of `hidden` numbers for each token."""
    return model.vocab * model.hidden


def parameters(model: Model) -> int:
    """Return all weights: layers, tables of tokens, positions and logits, the last norm."""
    layers = sum(layer_parameters(model, layer) for layer in range(model.layers))
    tables = table_parameters(model) * (1 if model.tied_embeddings else 2)
    positions = model.learned_positions * model.hidden
    return layers + tables + positions + model.hidden * (2 if model.biases else 1)


def active_parameters(model: Model) -> int:
    """Return the weights that a token passes: of the routed experts, top_k."""
    if not model.experts:
        return parameters(model)
    one = expert_parameters(model, model.layers - 1) // model.experts
    idle = (model.experts - model.top_k) * one
    return parameters(model) - idle * (model.layers - model.dense_layers)


_FIELDS = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "ffn": ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim"),
    "vocab": ("vocab_size",),
}
_UNGATED = {"gpt2", "gpt_neox", "gptj", "opt", "falcon", "mpt", "bloom", "phi", "gpt_bigcode"}
_TIED = {"gpt2", "gemma", "gemma2", "gemma3", "opt", "bloom", "gpt_bigcode", "mpt", "falcon"}


def from_hf_config(config: str | Path | dict) -> Model:
    """Return the shape in a Hugging Face `config.json` (a file, its folder, or its dict).

    Raises ValueError naming the fields that are missing.
    """
    if not isinstance(config, dict):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        config = json.loads(path.read_text())
    values = {}
    for field, names in _FIELDS.items():
        values[field] = next((config[n] for n in names if config.get(n) is not None), None)
    kind = config.get("model_type", "")
    if values["ffn"] is None and values["hidden"] and kind in _UNGATED:
        values["ffn"] = 4 * values["hidden"]
    missing = [names[0] for field, names in _FIELDS.items() if values[field] is None]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}")
    experts = config.get("num_local_experts") or config.get("n_routed_experts") or 0
    experts = experts or config.get("num_experts") or 0
    kv_heads = config.get("num_key_value_heads") or config.get("num_kv_heads")
    kv_heads = (
        1 if config.get("multi_query") and not config.get("new_decoder_architecture") else kv_heads
    )
    latent = config.get("kv_lora_rank")
    model = Model(
        kv_heads=kv_heads or values["heads"],
        gated=kind not in _UNGATED,
        experts=experts,
        top_k=config.get("num_experts_per_tok") or (1 if experts else 0),
        tied_embeddings=config.get("tie_word_embeddings", kind in _TIED),
        head_dim=config.get("qk_nope_head_dim" if latent else "head_dim") or 0,
        learned_positions=config.get("n_positions", 0) if kind == "gpt2" else 0,
        biases=kind in ("gpt2", "gpt_neox", "opt", "bloom", "phi"),
        dense_layers=config.get("first_k_dense_replace") or 0,
        shared_experts=config.get("n_shared_experts") or 0,
        norms=4 if kind in ("gemma2", "gemma3") else 1 if kind in ("phi", "falcon", "gptj") else 2,
        softcap=bool(config.get("attn_logit_softcapping")),
        q_rank=config.get("q_lora_rank") or 0 if latent else 0,
        kv_rank=latent or 0,
        rope_dim=config.get("qk_rope_head_dim") or 0 if latent else 0,
        name=config.get("_name_or_path") or kind,
        **values,
    )
    if experts and config.get("moe_intermediate_size"):
        wide = {"ffn": config["moe_intermediate_size"], "dense_ffn": model.ffn}
        model = replace(model, **wide)
    return model
