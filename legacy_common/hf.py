"""Weights to and from a folder in Hugging Face's format: each rank has its shards alone."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.checkpoint._consolidate_hf_safetensors import (
    consolidate_safetensors_files_on_every_rank,
)
from torch.distributed.checkpoint.api import CheckpointException

from legacy_common import models, output, shapes
from legacy_common.cli import UsageError
from legacy_common.job import Job
from legacy_common.models import TransformerConfig

HF_NAMES = {
    "embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head",
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip
OTHER_FILES = (".json", ".txt", ".model", ".jinja", ".py")  # of a folder: the tokenizer's
INDEX = "model.safetensors.index.json"
MARK = {"exported_by": "legacy_common"}  # in the index: of whom the folder is


def hf_name(name: str) -> str:
    """Return Hugging Face's name of one of our weights: "blocks.3.up.weight" and the like."""
    _, layer, part = re.fullmatch(r"(blocks\.(\d+)\.)?(.+)\.weight", name).groups()
    prefix = f"model.layers.{layer}." if layer else ""
    return f"{prefix}{HF_NAMES[part]}.weight"


def to_hf(weights: Mapping[str, torch.Tensor], config: TransformerConfig) -> dict:
    """Return weights, sharded or not, under Hugging Face's names; a tied head is left out.

    No row moves: both turn dim i of a head with dim i + head_dim / 2.
    """
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


def hf_config(config: TransformerConfig) -> Any:
    """Return transformers' LlamaConfig of our config. Raises: UsageError without transformers."""
    return llama_config()(
        **{theirs: getattr(config, ours) for theirs, ours in shapes.HF_SHAPE.items()},
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )


def llama_config() -> type:
    """Return the class of transformers that a config.json is read with."""
    try:
        from transformers import LlamaConfig
    except ImportError as error:
        raise UsageError(f"{error}: pip install transformers") from error
    return LlamaConfig


def config_of(folder: Path, expected: TransformerConfig | None = None) -> TransformerConfig:
    """Return our config of a folder's config.json: `expected`, if it is given.

    Raises: UsageError, naming one field, for what is not so or what our model does not have.
    """
    path = Path(folder) / "config.json"
    config = TransformerConfig(**shapes.read(path, ("llama",)))  # which an export writes too
    for theirs, ours in shapes.HF_SHAPE.items() if expected else ():
        here, there = getattr(expected, ours), getattr(config, ours)
        if here != there:
            raise UsageError(f"{path}: {theirs} is {there}, not {here} as --preset has it")
    return config


def load(model: torch.nn.Module, config: TransformerConfig, folder, group) -> None:
    """Fill a model from a folder's safetensors files, each rank its own shards. A collective.

    Raises: UsageError for a weight that is missing or of another shape, and for a damaged file.
    """
    named = to_hf(dcp_state.get_model_state_dict(model), config)
    reader = dcp.HuggingFaceStorageReader(str(folder))
    try:
        dcp.load(named, storage_reader=reader, process_group=group)
    except CheckpointException as error:  # a BaseException
        rank, (cause, *_) = error.failures.popitem()
        raise UsageError(f"{folder}: rank {rank}: {cause}") from error
    dcp_state.set_model_state_dict(model, from_hf(named, config))


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


def claim(job: Job, folder: str | None, flag: str) -> None:
    """Make the folder to export to, unless the run has ended and filled it. Raises: UsageError."""
    if folder and not (job.done and exported(folder)):
        output.claim_empty(folder, flag)


def exported(folder: str | None) -> bool:
    """Say whether there is nothing to export: no folder, or one that `write` has filled."""
    if not folder:
        return True
    try:
        index = json.loads(Path(folder, INDEX).read_text())
        files = {*index["weight_map"].values(), "config.json"}
        return MARK.items() <= index["metadata"].items() and all(
            Path(folder, file).exists() for file in files
        )
    except (OSError, ValueError, KeyError):
        return False


def export(
    model: torch.nn.Module, config: TransformerConfig, folder, group,
    max_shard_bytes: int = 5 * 10**9, like: str | None = None,
) -> int:  # fmt: skip
    """Write config.json, safetensors files and their index for transformers; return the files.

    A collective of all ranks that hold `model` (FSDP, tensor or pipeline parallelism, DDP or
    plain), on a disk that they share; `group` is a gloo group of them. What the folder `like` has
    beside weights goes with them, as its tokenizer.
    """

    def add_config(partial: Path) -> None:
        if dist.get_rank(group) == 0:
            about = llama_config().from_pretrained(like) if like else hf_config(config)
            about.dtype = "float32"
            about.save_pretrained(partial)

    named = to_hf(dcp_state.get_model_state_dict(model), config)
    named = {name: tensor.detach().float() for name, tensor in named.items()}
    with torch.device("meta"):  # a rank may hold a stage of the model
        whole = to_hf(models.Transformer(config).state_dict(), config)
    files = file_of_each(whole, max_shard_bytes)
    write(named, files, folder, group, like, add_config)
    return max(files.values())


def write(
    weights: Mapping[str, torch.Tensor], files: Mapping[str, int], folder, group,
    like: str | None, add: Callable[[Path], None],
) -> None:  # fmt: skip
    """Write weights, sharded or not, by the number of each one's file; the rest is that of `like`.

    A collective. Each byte is written twice and read once. `add` writes what else belongs there.
    The folder gets its name when it is complete.
    """
    folder = Path(folder)
    partial = folder.with_name(f"{folder.name}.partial")
    shards = partial / "sharded"
    is_first = dist.get_rank(group) == 0
    if is_first:
        shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
        shards.mkdir(parents=True)
    dist.barrier(group)
    writer = dcp.HuggingFaceStorageWriter(str(shards), files, save_distributed=True)

    dcp.save(weights, storage_writer=writer, process_group=group)  # each rank its own rows
    # Not the writer's own enable_consolidation: rank 0 would do it all, the others wait for it.
    consolidate_safetensors_files_on_every_rank(shards, partial, files, process_group=group)

    if is_first:
        shutil.rmtree(shards)
        for path in Path(like).iterdir() if like else []:
            if path.suffix in OTHER_FILES and not path.name.endswith(".index.json"):
                shutil.copyfile(path, partial / path.name)
        index = json.loads((partial / INDEX).read_text())
        index["metadata"] |= MARK
        (partial / INDEX).write_text(json.dumps(index, indent=2))
    add(partial)
    if is_first:
        partial.rename(folder)
    dist.barrier(group)
