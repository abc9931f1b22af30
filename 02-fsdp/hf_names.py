"""Weights of dist_common's Transformer in Hugging Face's format: names, config.json, files.

No row moves: both turn dim i of a head with dim i + head_dim / 2. `export_sharded` and `load_hf`
work on a model sharded in any way, and no rank holds more of it than one weight beside its shards.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.checkpoint._consolidate_hf_safetensors import (
    consolidate_safetensors_files_on_every_rank,
)

from dist_common.cli import UsageError
from dist_common.models import TransformerConfig
from dist_common.report import Report
from dist_common.runtime import from_rank0
from shard_tools import local

HF_NAMES = {
    "embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head",
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip
HF_SHAPE = {
    "vocab_size": "vocab_size", "hidden_size": "dim", "intermediate_size": "ffn_dim",
    "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads", "max_position_embeddings": "max_seq_len",
    "rms_norm_eps": "norm_eps", "tie_word_embeddings": "tied_embeddings",
}  # fmt: skip
# What our model has no field for: only what a Llama of version 1 to 3 has can be read.
VARIANTS = ("model_type", "hidden_act", "rope_parameters", "attention_bias", "mlp_bias")
MAX_SHARD_BYTES = 5 * 10**9  # of a file, as transformers 4 writes them


def hf_name(name: str) -> str:
    """Return Hugging Face's name of one of our weights: "blocks.3.up.weight" and the like."""
    _, layer, part = re.fullmatch(r"(blocks\.(\d+)\.)?(.+)\.weight", name).groups()
    prefix = f"model.layers.{layer}." if layer else ""
    return f"{prefix}{HF_NAMES[part]}.weight"


def to_hf(weights: Mapping[str, torch.Tensor], config: TransformerConfig) -> dict:
    """Return weights, sharded or not, under Hugging Face's names; a tied head is left out."""
    tied = {"head.weight"} if config.tied_embeddings else set()
    return {hf_name(name): tensor for name, tensor in weights.items() if name not in tied}


def from_hf(named: Mapping[str, torch.Tensor], config: TransformerConfig) -> dict:
    """Return weights under our names, the inverse of `to_hf`: a tied head is the embedding."""
    parts = {theirs: ours for ours, theirs in HF_NAMES.items()}
    weights = {}
    for name, tensor in named.items():
        _, layer, part = re.fullmatch(r"(model\.layers\.(\d+)\.)?(.+)\.weight", name).groups()
        prefix = f"blocks.{layer}." if layer else ""
        weights[f"{prefix}{parts[part]}.weight"] = tensor
    if config.tied_embeddings:
        weights["head.weight"] = weights["embedding.weight"]
    return weights


def hf_config(config: TransformerConfig, dtype: torch.dtype = torch.float32) -> Any:
    """Return transformers' LlamaConfig of our config. Raises: ImportError without transformers."""
    from transformers import LlamaConfig

    return LlamaConfig(
        **{theirs: getattr(config, ours) for theirs, ours in HF_SHAPE.items()},
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        architectures=["LlamaForCausalLM"],
        dtype=str(dtype).removeprefix("torch."),
    )


def read_config(folder: Path) -> TransformerConfig:
    """Return our config of the Llama that a folder's config.json describes.

    Raises: UsageError for a file that describes no Llama, or one that our model does not compute
    (another activation, scaled rotations, biases, heads of another width).
    """
    theirs = _llama_of(folder)
    fields = {ours: getattr(theirs, name) for name, ours in HF_SHAPE.items()}
    config = TransformerConfig(**fields, rope_theta=theirs.rope_parameters["rope_theta"])
    _refuse_difference(folder, config, theirs, (*VARIANTS, "head_dim"), "as our model has it")
    return config


def refuse_other_config(folder: Path, config: TransformerConfig, wanted="as --preset has it"):
    """Refuse a folder whose config.json differs from our config. Raises: UsageError, one field."""
    names = (*VARIANTS, *HF_SHAPE, "head_dim")
    _refuse_difference(folder, config, _llama_of(folder), names, wanted)


def _llama_of(folder: Path) -> Any:
    from transformers import LlamaConfig

    path = Path(folder) / "config.json"
    content = path.read_text()
    try:
        return LlamaConfig(**json.loads(content))
    except Exception as error:  # of transformers' own kinds too
        raise UsageError(f"{path} describes no Llama: {error}") from error


def _refuse_difference(folder: Path, config, theirs: Any, names, wanted: str) -> None:
    ours = hf_config(config)
    for name in names:
        here, there = getattr(ours, name), getattr(theirs, name)
        if here != there:
            path = Path(folder) / "config.json"
            raise UsageError(f"{path}: {name} is {there}, not {here} {wanted}")


def size_of(text: str) -> int:
    """Turn "5GB" into bytes, for argparse. Units: KB, MB, GB, decimal as transformers has them."""
    size = re.fullmatch(r"(\d*\.?\d+)([KMG])B", text)
    size_bytes = int(float(size[1]) * 1000 ** (1 + "KMG".index(size[2]))) if size else 0
    if not size_bytes:
        raise argparse.ArgumentTypeError(f"{text!r} must be a size like 500KB, 200MB or 5GB")
    return size_bytes


def file_of_each(named: Mapping[str, torch.Tensor], max_shard_bytes: int) -> dict[str, int]:
    """Deal weights, in their order, to files of at most that many bytes: name -> 1, 2, 3 ...

    A weight that is larger gets a file of its own. Of a sharded weight the whole counts.
    """
    number, filled, files = 1, 0, {}
    for name, tensor in named.items():
        size = tensor.numel() * tensor.element_size()
        if filled and filled + size > max_shard_bytes:
            number, filled = number + 1, 0
        files[name] = number
        filled += size
    return files


def export_sharded(
    model: nn.Module, config: TransformerConfig, folder: Path, group: dist.ProcessGroup,
    max_shard_bytes: int = MAX_SHARD_BYTES, dtype: torch.dtype = torch.float32,
) -> int:  # fmt: skip
    """Write config.json, safetensors files and their index for transformers; return the files.

    A collective of all ranks that hold `model` (FSDP, tensor parallelism, DDP or plain), on a disk
    that they share. `group` is a gloo group of all ranks (see `sharded_checkpoint.file_group`).
    Each rank writes its shards; then file i is put together by rank i modulo the ranks, one weight
    in memory at a time. Writes each byte twice and reads it once.
    """
    folder = Path(folder)
    parts = folder / "sharded"
    named = to_hf(dcp_state.get_model_state_dict(model), config)
    named = {name: tensor.detach().to(dtype) for name, tensor in named.items()}
    files = file_of_each(named, max_shard_bytes)
    if dist.get_rank(group) == 0:
        parts.mkdir(parents=True)
    dist.barrier(group)
    writer = dcp.HuggingFaceStorageWriter(str(parts), files, save_distributed=True)

    dcp.save(named, storage_writer=writer, process_group=group)

    # Not the writer's own enable_consolidation: rank 0 would do it all, the others wait for it.
    consolidate_safetensors_files_on_every_rank(str(parts), str(folder), files, process_group=group)
    if dist.get_rank(group) == 0:
        shutil.rmtree(parts)
        hf_config(config, dtype).save_pretrained(folder)
    dist.barrier(group)
    return max(files.values())


def load_hf(
    model: nn.Module, config: TransformerConfig, folder: Path, group: dist.ProcessGroup
) -> None:
    """Fill a model's weights from a folder's safetensors files, one or several. A collective.

    Each rank reads its own shards only, and casts them to the precision of the model. Raises:
    CheckpointException (no Exception) for a weight that is missing or of another shape; ask
    `read_config` or `refuse_other_config` first.
    """
    named = to_hf(dcp_state.get_model_state_dict(model), config)
    reader = dcp.HuggingFaceStorageReader(str(folder))

    dcp.load(named, storage_reader=reader, process_group=group)

    dcp_state.set_model_state_dict(model, from_hf(named, config))


@torch.no_grad()
def count_equal_in_files(
    weights: Mapping[str, torch.Tensor], folder: Path, group: dist.ProcessGroup
) -> int:
    """Return how many weights, sharded or not, have these values in safetensors files.

    A collective: each rank reads again what it holds, and needs memory for that.
    """
    read = {name: torch.full_like(weight, torch.nan) for name, weight in weights.items()}

    dcp.load(read, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), process_group=group)

    pairs = [(local(read[name]), local(weight)) for name, weight in weights.items()]
    equal = torch.tensor([torch.equal(one, other) for one, other in pairs], dtype=torch.int)
    dist.all_reduce(equal, op=dist.ReduceOp.MIN, group=group)  # on every rank
    return int(equal.sum())


def check_values(
    report: Report, model: nn.Module, config: TransformerConfig, folder: Path, group
) -> None:
    """Check that a folder's files hold our model's weights, each rank its own. A collective."""
    named = to_hf(dcp_state.get_model_state_dict(model), config)
    equal = count_equal_in_files(named, folder, group)
    weights = len(list(model.parameters()))  # tied ones once
    report.check("weights equal in the files", equal, weights, 0, "the sharded model")


@torch.no_grad()
def check_logits(
    report: Report, model: nn.Module, folder: Path, tokens: torch.Tensor, group: dist.ProcessGroup
) -> None:
    """Check that transformers computes from a folder what our sharded model does. A collective.

    Rank 0 holds transformers' whole model in float32: for models that fit. Shapes: tokens (B, T),
    the same on every rank.
    """
    ours = model(tokens)
    seen = None
    if report.world.is_rank0:
        from transformers import LlamaForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        options = {"dtype": torch.float32, "local_files_only": True, "output_loading_info": True}
        theirs, loading = LlamaForCausalLM.from_pretrained(folder, **options)
        drift = (theirs.to(tokens.device)(tokens).logits - ours).abs().max().item()
        seen = drift, sum(len(names) for names in loading.values())
    drift, strange = from_rank0(seen, group)
    report.check("largest difference of a logit", drift, 0, 1e-5, "transformers")
    report.check("weights missing or not expected", strange, 0, 0, "transformers")
