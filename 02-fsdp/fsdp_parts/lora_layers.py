"""What the two adapter lessons do beside the lesson: fill, save and load, shard by shard."""

import argparse
import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_parts.sharding import gathered, put
from legacy_common import cli, models
from legacy_common.models import local

LAYERS = ("wq", "wk", "wv", "wo", "gate", "up", "down")  # the linear layers of a block
WEIGHTS_FILE = "adapter_model.safetensors"  # as peft names it
PREFIX = "base_model.model."  # of every name in peft's file


def layers_of(
    model: nn.Module, names: Collection[str] = LAYERS, having: str = "forward"
) -> list[tuple[str, nn.Module]]:
    """List the modules of these names that have an attribute, with their paths in the model."""
    named = [(path, module) for path, module in model.named_modules() if hasattr(module, having)]
    return [(path, module) for path, module in named if path.split(".")[-1] in names]


def refuse_large_rank(args: argparse.Namespace, config: models.TransformerConfig) -> None:
    """Raise UsageError when --lora-rank is above the smallest side of a layer to adapt."""
    with torch.device("meta"):
        block = models.Block(config)
    smallest = min(min(layer.weight.shape) for _, layer in layers_of(block, args.target_modules))
    if args.lora_rank > smallest:
        most = f"must be at most {smallest}, the smallest side of a layer to adapt"
        raise cli.UsageError(f"--lora-rank {most}")


@torch.no_grad()
def fill(model: nn.Module, base: Mapping[str, torch.Tensor], seed: int) -> nn.Module:
    """Put the base's weights and new adapters into a model, one tensor at a time.

    A sharded model copies shard to shard. Adapters are drawn whole, the same on all ranks.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        weight = base.get(name.replace("base_layer.", ""))
        if "lora_A" in name:  # as nn.Linear draws
            bound = 1 / math.sqrt(parameter.shape[1])
            put(parameter, torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
                .to(local(parameter).device))  # fmt: skip
        elif "lora_B" in name:
            local(parameter).zero_()
        elif weight is not None and isinstance(parameter, DTensor):
            local(parameter).copy_(local(weight))
        elif weight is not None:  # others are no weights of the base: 4-bit codes
            parameter.copy_(gathered(weight))
    return model


def save_adapters(folder: Path, model: nn.Module, args: argparse.Namespace) -> None:
    """Write the adapters, and nothing else, as peft does. All ranks call it: it gathers those."""
    adapters = {}
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            whole = gathered(parameter.detach())  # every rank takes part; rank 0 keeps it
            if dist.get_rank() == 0:
                adapters[PREFIX + name] = whole.cpu().contiguous()
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(adapters, folder / WEIGHTS_FILE)
        config = {
            "peft_type": "LORA", "base_model_name_or_path": args.preset, "r": args.lora_rank,
            "lora_alpha": args.lora_alpha, "target_modules": list(args.target_modules),
        }  # fmt: skip
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))


def refuse_unfit(folder: Path, model: nn.Module, args: argparse.Namespace) -> None:
    """Raise UsageError on rank 0 when a folder's adapters fit neither the model nor the flags.

    The model may be on `meta`: names and shapes are compared, no weight is read.
    """
    if dist.get_rank():
        return
    try:
        config = json.loads((folder / "adapter_config.json").read_text())
        found = {name: config[name] for name in ("r", "lora_alpha")}
        with safe_open(folder / WEIGHTS_FILE, "pt") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # each library has its own for a file that is damaged
        raise cli.UsageError(f"--adapter {folder} cannot be read: {error}") from error
    found["use_rslora"] = config.get("use_rslora", False)  # divides by the root of r
    found |= {name.removeprefix(PREFIX): list(shape) for name, shape in shapes.items()}
    needed = {"r": args.lora_rank, "lora_alpha": args.lora_alpha, "use_rslora": False}
    needed |= {n: list(w.shape) for n, w in model.named_parameters() if "lora_" in n}
    for name in (*needed, *found):
        there, here = (side.get(name, "missing") for side in (found, needed))
        if there != here:
            raise cli.UsageError(
                f"--adapter {folder} does not fit --preset, --lora-* and --target-modules: "
                f"{name} is {there} there, {here} here"
            )


@torch.no_grad()
def load_adapters(folder: Path, model: nn.Module) -> None:
    """Put a folder's adapters into a model, sharded or not. Rank 0 reads and broadcasts each."""
    stored = safe_open(folder / WEIGHTS_FILE, "pt") if dist.get_rank() == 0 else None
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            whole = torch.empty(parameter.shape, device=local(parameter).device)
            if stored:
                whole.copy_(stored.get_tensor(PREFIX + name))
            dist.broadcast(whole, src=0)
            put(parameter, whole)
