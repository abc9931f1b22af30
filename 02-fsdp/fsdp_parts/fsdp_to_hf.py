"""What a folder in Hugging Face's format has beside weights, and whether it holds our model."""

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from dist_common.cli import UsageError
from dist_common.models import TransformerConfig, local
from dist_common.report import Report
from dist_common.runtime import from_rank0

HF_SHAPE = {
    "vocab_size": "vocab_size", "hidden_size": "dim", "intermediate_size": "ffn_dim",
    "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads", "max_position_embeddings": "max_seq_len",
    "rms_norm_eps": "norm_eps", "tie_word_embeddings": "tied_embeddings",
}  # fmt: skip
# What our model has no field for: only what a Llama of version 1 to 3 has can be read.
VARIANTS = ("model_type", "hidden_act", "rope_parameters", "attention_bias", "mlp_bias")


def hf_config(config: TransformerConfig) -> Any:
    """Return transformers' LlamaConfig of our config. Raises: ImportError without transformers."""
    from transformers import LlamaConfig

    return LlamaConfig(
        **{theirs: getattr(config, ours) for theirs, ours in HF_SHAPE.items()},
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )


def refuse_other_config(folder: Path, config: TransformerConfig) -> None:
    """Refuse a folder whose config.json differs from our config. Raises: UsageError, one field."""
    from transformers import LlamaConfig

    path = Path(folder) / "config.json"
    content = path.read_text()
    try:
        theirs = LlamaConfig(**json.loads(content))
    except Exception as error:  # of transformers' own kinds too
        raise UsageError(f"{path} describes no Llama: {error}") from error
    ours = hf_config(config)
    for name in (*VARIANTS, *HF_SHAPE, "head_dim"):
        here, there = getattr(ours, name), getattr(theirs, name)
        if here != there:
            raise UsageError(f"{path}: {name} is {there}, not {here} as --preset has it")


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
