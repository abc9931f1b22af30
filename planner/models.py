"""Shapes of published models (data/models.csv), and the weights that a shape has."""

from __future__ import annotations

import csv
import difflib
import json
import math
import re
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

from planner.hardware import DATA
from planner.job import ModelShape


def read_models() -> tuple[dict[str, ModelShape], dict[str, str]]:
    """Return the shapes of data/models.csv, and the names of each spelling."""
    shapes, spellings = {}, {}
    with (DATA / "models.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            name, others = row["name"], row.pop("also").split()
            shapes[name] = model_of_row(row)
            for spelling in (name, *others):
                spellings[plain(spelling)] = name
    return shapes, spellings


def model_of_row(row: dict[str, str]) -> ModelShape:
    """Return the model whose sizes are columns of a row; empty is the default."""
    flags = ("gated", "tied_embeddings", "biases", "softcap")
    sizes = {}
    for field in fields(ModelShape):
        text = row.get(field.name)
        if text and field.name != "name":
            sizes[field.name] = text == "1" if field.name in flags else int(text)
    return ModelShape(**sizes, name=row.get("name", ""))


def plain(name: str) -> str:
    """Return a name's letters, digits and dots, without the owner on the Hub."""
    return re.sub(r"[^a-z0-9.]", "", name.lower().rpartition("/")[2])


MODELS, SPELLINGS = read_models()


def find_model(name: str) -> ModelShape:
    """Return the shape that a name means: `llama3-8b`, `Qwen/Qwen3-32B`, `7b`.

    The name may have more words, as `Meta-Llama-3.1-8B-Instruct`. A number of weights
    gets the nearest dense shape, with as many layers as make up the number.
    Raises: ValueError with near names.
    """
    short = plain(name)
    if short in SPELLINGS:
        return MODELS[SPELLINGS[short]]
    number = re.fullmatch(r"([\d.]*\d)([mbt])", short)
    if number:
        return model_of_size(
            float(number[1]) * {"m": 1e6, "b": 1e9, "t": 1e12}[number[2]], name
        )
    within = [
        spelling
        for spelling in SPELLINGS
        if len(spelling) > 4 and re.search(rf"(?<![\d.]){re.escape(spelling)}", short)
    ]
    if within:  # a 671B is not a 1B: no digit stands before the spelling
        return MODELS[SPELLINGS[max(within, key=len)]]
    near = [known for known in MODELS if short and short in plain(known)]
    near = near or difflib.get_close_matches(short, MODELS, 3, 0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ValueError(f"{name} is unknown; {hint}known are {', '.join(MODELS)}")


def model_of_size(weights: float, name: str) -> ModelShape:
    """Return a dense shape with about so many weights."""
    dense = [model for model in MODELS.values() if model.gated and not model.experts]
    near = min(dense, key=lambda model: abs(math.log(parameters(model) / weights)))
    tables = parameters(near) - near.layers * layer_parameters(near)
    layers = max(1, round((weights - tables) / layer_parameters(near)))
    return replace(
        near, layers=layers, name=f"{name} (a {near.name} of {layers} layers)"
    )


def head_width(model: ModelShape) -> int:
    """Return the numbers of one head."""
    return model.head_dim or model.hidden // model.heads


def key_width(model: ModelShape) -> int:
    """Return the width of keys, and of values: groups of queries share them (GQA)."""
    return head_width(model) * model.kv_heads


def query_width(model: ModelShape) -> int:
    """Return the width of queries and of attention's output."""
    return head_width(model) * model.heads


def rotated_width(model: ModelShape) -> int:
    """Return the numbers of queries and keys that a rotary embedding turns."""
    if model.kv_rank:
        return (model.heads + 1) * model.rope_dim
    return query_width(model) + key_width(model)


# Tensor parallelism divides a matrix by columns, by rows, or not at all (Shoeybi et
# al., 2019, section 3). Expert parallelism divides experts.
COLUMN, ROW, WHOLE, EXPERT = "column", "row", "whole", "expert"
MatrixShape = tuple[int, int, str]  # outputs, inputs, kind


def attention_shapes(model: ModelShape) -> list[MatrixShape]:
    """Return a layer's matrices of attention: queries, keys, values, output.

    Latent attention (DeepSeek-V2, section 2.1) projects down to a rank, has a norm, and
    projects up to the heads.
    """
    h, queries, keys = model.hidden, query_width(model), key_width(model)
    if not model.kv_rank:
        return [
            (queries, h, COLUMN),
            (keys, h, COLUMN),
            (keys, h, COLUMN),
            (h, queries, ROW),
        ]
    rotated = queries + model.heads * model.rope_dim
    down = [(model.kv_rank + model.rope_dim, h, WHOLE), (model.kv_rank, 1, WHOLE)]
    up = [(2 * queries, model.kv_rank, COLUMN), (h, queries, ROW)]
    if not model.q_rank:
        return [*down, (rotated, h, COLUMN), *up]
    queries_down = [(model.q_rank, h, WHOLE), (model.q_rank, 1, WHOLE)]
    return [*queries_down, (rotated, model.q_rank, COLUMN), *down, *up]


def mlp_shapes(model: ModelShape, width: int, copies: int = 0) -> list[MatrixShape]:
    """Return a feed-forward: three matrices if gated (SwiGLU), else two.

    copies: a number of experts, each with these matrices.
    """
    up = 2 if model.gated else 1
    if copies:
        one = [(width, model.hidden, EXPERT)] * up + [(model.hidden, width, EXPERT)]
        return one * copies
    return [(width, model.hidden, COLUMN)] * up + [(model.hidden, width, ROW)]


def dense_width(model: ModelShape) -> int:
    """Return the inner width that every token passes in a layer without experts."""
    return model.dense_ffn or model.ffn


def is_dense(model: ModelShape, layer: int) -> bool:
    """Tell whether a layer (from 0) has no experts."""
    return not model.experts or layer < model.dense_layers


@cache
def shapes_of_kind(model: ModelShape, dense: bool) -> tuple[MatrixShape, ...]:
    """Return all tensors of a layer, dense or with experts. A vector is a column.

    The biases of a matrix that is divided by rows stay whole.
    """
    h = model.hidden
    width = dense_width(model) if dense else model.shared_experts * model.ffn
    shapes = attention_shapes(model) + [(h, 1, WHOLE)] * model.norms
    if width:
        shapes += mlp_shapes(model, width)
    if not dense:
        shapes += [
            (model.experts, h, WHOLE),
            *mlp_shapes(model, model.ffn, model.experts),
        ]
    if model.biases:
        columns = [query_width(model), key_width(model), key_width(model)]
        columns += [width] * (2 if model.gated else 1)
        shapes += [(size, 1, COLUMN) for size in columns] + [(h, 1, WHOLE)] * (
            2 + model.norms
        )
    return tuple(shapes)


@cache
def _sum(model: ModelShape, dense: bool, kinds: tuple[str, ...]) -> int:
    shapes = shapes_of_kind(model, dense)
    return sum(outputs * inputs for outputs, inputs, kind in shapes if kind in kinds)


def whole_parameters(model: ModelShape, layer: int) -> int:
    """Return a layer's weights that tensor parallelism leaves whole: norms, router."""
    return _sum(model, is_dense(model, layer), (WHOLE,))


def split_parameters(model: ModelShape, layer: int) -> int:
    """Return a layer's weights that tensor parallelism splits, without experts."""
    return _sum(model, is_dense(model, layer), (COLUMN, ROW))


def expert_parameters(model: ModelShape, layer: int) -> int:
    """Return the weights of all routed experts of a layer."""
    return _sum(model, is_dense(model, layer), (EXPERT,))


def matrix_parameters(model: ModelShape, layer: int) -> int:
    """Return the weights of a layer's matrices: no norms and no biases."""
    shapes = shapes_of_kind(model, is_dense(model, layer))
    return sum(outputs * inputs for outputs, inputs, _ in shapes if inputs > 1)


def layer_parameters(model: ModelShape, layer: int = -1) -> int:
    """Return the weights of a layer, counted from 0. The default is the last one."""
    return _sum(
        model, is_dense(model, layer % model.layers), (COLUMN, ROW, WHOLE, EXPERT)
    )


def table_parameters(model: ModelShape) -> int:
    """Return the weights of one table: a row of `hidden` numbers for each token."""
    return model.vocab * model.hidden


def parameters(model: ModelShape) -> int:
    """Return all weights: layers, embeddings, positions, output layer, last norm."""
    layers = sum(layer_parameters(model, layer) for layer in range(model.layers))
    tables = table_parameters(model) * (1 if model.tied_embeddings else 2)
    positions = model.learned_positions * model.hidden
    return layers + tables + positions + model.hidden * (2 if model.biases else 1)


def active_parameters(model: ModelShape) -> int:
    """Return the weights that compute one token, with top_k of the routed experts."""
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
_UNGATED = {
    "gpt2",
    "gpt_neox",
    "gptj",
    "opt",
    "falcon",
    "mpt",
    "bloom",
    "phi",
    "gpt_bigcode",
}
_NORMS = {"gemma2": 4, "gemma3": 4, "phi": 1, "falcon": 1, "gptj": 1}  # of a layer
_TIED = {
    "gpt2",
    "gemma",
    "gemma2",
    "gemma3",
    "opt",
    "bloom",
    "gpt_bigcode",
    "mpt",
    "falcon",
}


def from_hf_config(config: str | Path | dict) -> ModelShape:
    """Return the shape in a Hugging Face `config.json`: a file, its folder, or a dict.

    Raises: ValueError with the missing fields.
    """
    if not isinstance(config, dict):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        config = json.loads(path.read_text())
    values = {}
    for field, names in _FIELDS.items():
        values[field] = next(
            (config[n] for n in names if config.get(n) is not None), None
        )
    kind = config.get("model_type", "")
    if values["ffn"] is None and values["hidden"] and kind in _UNGATED:
        values["ffn"] = 4 * values["hidden"]
    missing = [names[0] for field, names in _FIELDS.items() if values[field] is None]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}")
    experts = config.get("num_local_experts") or config.get("n_routed_experts") or 0
    experts = experts or config.get("num_experts") or 0
    kv_heads = config.get("num_key_value_heads") or config.get("num_kv_heads")
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        kv_heads = 1  # Falcon
    latent = config.get("kv_lora_rank")
    model = ModelShape(
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
        norms=_NORMS.get(kind, 2),
        softcap=bool(config.get("attn_logit_softcapping")),
        q_rank=(config.get("q_lora_rank") or 0) if latent else 0,
        kv_rank=latent or 0,
        rope_dim=(config.get("qk_rope_head_dim") or 0) if latent else 0,
        name=config.get("_name_or_path") or kind,
        **values,
    )
    if experts and config.get("moe_intermediate_size"):
        wide = {"ffn": config["moe_intermediate_size"], "dense_ffn": model.ffn}
        model = replace(model, **wide)
    return model
