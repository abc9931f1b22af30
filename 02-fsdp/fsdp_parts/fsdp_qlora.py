"""bitsandbytes beside FSDP: NF4 codes of a weight, cut by ranks, and how far off they are."""

import functools
import logging
from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp_parts.lora_layers import LAYERS, layers_of
from fsdp_parts.sharding import gathered, put
from legacy_common import cli
from legacy_common.models import local

NF4_BLOCK = 64  # weights that share a scale (Dettmers et al., 2023, section 3)
NF4_HALF_GAP = 0.152  # of a block's largest weight: the widest gap is from -1 to -0.696


@functools.cache
def bitsandbytes():
    """Import the library, which takes seconds; its advice to install a faster kernel is muted."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import bitsandbytes
    import bitsandbytes.functional

    return bitsandbytes


def encode(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight's codes (out * in / 2, 1) and its blocks' scales (blocks, 4), as bytes.

    Bytes, because a MixedPrecisionPolicy rounds every parameter that is a float when it gathers.
    """
    quantize = bitsandbytes().functional.quantize_4bit
    codes, state = quantize(weight.float(), blocksize=NF4_BLOCK, quant_type="nf4")
    return codes, state.absmax.view(-1, 1).view(torch.uint8)


def decode(codes: torch.Tensor, scales: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the float32 weight that codes and scales stand for. Shape: (rows, in)."""
    # On the CPU, bitsandbytes 0.50 mixes up the scales of a weight whose rows are no multiple of a
    # block, and says nothing. So it is asked for a single row.
    functional = bitsandbytes().functional
    state = functional.QuantState(
        scales.contiguous().view(torch.float32).flatten(), torch.Size([2 * codes.numel()]),
        blocksize=NF4_BLOCK, quant_type="nf4", dtype=torch.float32,
    )  # fmt: skip
    return functional.dequantize_4bit(codes, state).view(rows, -1)


def refuse_without_nf4(device: torch.device) -> None:
    """Raise UsageError where bitsandbytes is missing or does not run, or FSDP takes no bytes."""
    if torch.__version__ < "2.12":  # the string compares as a version
        raise cli.UsageError(
            f"FSDP of torch {torch.__version__} shards no bytes: 4-bit weights need 2.12"
        )
    try:
        decode(*encode(torch.ones(64, 64, device=device)), 64)
    except Exception as error:  # not there, or not for this machine: each fails in its own way
        raise cli.UsageError(
            f"4-bit weights need bitsandbytes, which does not run on {device.type} here: "
            f"pip install bitsandbytes ({type(error).__name__}: {error})"
        ) from error


@torch.no_grad()
def fill_4bit(model: nn.Module, base: Mapping[str, torch.Tensor]) -> None:
    """Quantize the base's weights into a model's 4-bit layers: one at a time is whole, on a rank.

    A block of 64 weights may lie on two ranks' rows, so each weight is gathered before it is cut
    into blocks; the codes are then cut again by ranks.
    """
    for path, layer in layers_of(model, (*LAYERS, "base_layer"), having="codes"):
        weight = base[path.removesuffix(".base_layer") + ".weight"]
        codes, scales = encode(gathered(weight))
        put(layer.codes, codes)
        put(layer.scales, scales)


@torch.no_grad()
def rows_of(layer: nn.Module) -> torch.Tensor:
    """Return this rank's rows of what a frozen layer's codes stand for. Shape: (out/N, in)."""
    if not hasattr(layer, "codes"):
        return local(layer.weight)
    weight = decode(gathered(layer.codes), gathered(layer.scales), layer.out_features)
    if not isinstance(layer.codes, DTensor):
        return weight
    mesh = layer.codes.device_mesh
    return local(distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None))


@torch.no_grad()
def rounding_of(model: nn.Module, base: Mapping[str, torch.Tensor]) -> float:
    """Return the largest error of a weight in 4 bits, relative to the largest of its block."""
    worst = 0.0
    for path, layer in layers_of(model, (*LAYERS, "base_layer"), having="codes"):
        weight = gathered(base[path.removesuffix(".base_layer") + ".weight"])
        scales = gathered(layer.scales).contiguous().view(torch.float32)
        found = decode(gathered(layer.codes), gathered(layer.scales), layer.out_features)
        errors = (found - weight).abs().flatten() / scales.repeat_interleave(NF4_BLOCK)
        worst = max(worst, errors.max().item())
    return worst
