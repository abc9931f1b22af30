"""What the two adapter lessons do beside the lesson: fill, save, load and merge, shard by shard."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from dist_common import cli, models
from shard_tools import local

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
    kv_dim = config.dim // config.num_heads * config.num_kv_heads
    sides = kv_dim if {"wk", "wv"} & set(args.target_modules) else min(config.dim, config.ffn_dim)
    if args.lora_rank > sides:
        raise cli.UsageError(
            f"--lora-rank must be at most {sides}, the smallest side of a layer to adapt"
        )


def loss_of(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean cross-entropy, in float32. Shapes: batch is inputs and targets, (B, T)."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whole on every rank. A collective where it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def put(parameter: nn.Parameter, whole: torch.Tensor) -> None:
    """Copy a whole tensor into a parameter; a sharded one takes this rank's rows. No collective."""
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        whole = local(distribute_tensor(whole, mesh, parameter.placements, src_data_rank=None))
    local(parameter).copy_(whole)


@torch.no_grad()
def materialize(model: nn.Module, device: torch.device) -> nn.Module:
    """Give a model on `meta` memory for what this rank holds of it; a tied head stays tied."""
    model.to_empty(device=device)
    if model.config.tied_embeddings:
        model.head.weight = model.embedding.weight  # to_empty has made two of it
    return model


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


def frozen_rows(layer: nn.Module) -> torch.Tensor:
    """Return this rank's rows of a frozen linear layer's weight. Shape: (out/N, in)."""
    return local(layer.weight)


@torch.no_grad()
def merged(
    model: nn.Module, rows_of: Callable[[nn.Module], torch.Tensor] = frozen_rows
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name in a plain model, this rank's rows of W + alpha/r B A), one layer at a time.

    W and B are sharded by the same rows, so A alone is gathered. A linear layer without an adapter
    comes too: one in 4 bits is what its codes stand for. Shape: (out/N, in), float32.
    """
    for path, layer in layers_of(model):
        name = f"{path}.weight"
        if not hasattr(layer, "lora_A"):
            yield name, rows_of(layer)
            continue
        update = layer.scale * (local(layer.lora_B.weight) @ gathered(layer.lora_A.weight))

        yield name, rows_of(layer.base_layer) + update
