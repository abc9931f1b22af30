"""Matrix products in float8, by torchao: on a GPU that has them, or rounded as they round."""

import importlib.util
import logging

import torch
from torch import nn

from legacy_common.cli import UsageError

CAPABILITY = (8, 9)  # of a GPU: Ada, Hopper and later
TILE = 16  # which its kernel needs to divide every side of a matrix


def add_flag(parser) -> None:
    parser.add_argument("--float8", nargs="?", const="gpu", choices=("gpu", "emulated"),
        help="multiply in float8 by torchao, on a GPU; emulated: round as it does")  # fmt: skip


def refuse(args, config, device: torch.device, tp: int = 1, cp: int = 1) -> None:
    """Stop where nothing can multiply in float8. Raises: UsageError with what is missing."""
    if args.float8 == "gpu":
        if device.type != "cuda":
            missing = "needs an NVIDIA GPU of Ada, Hopper or later; this is a CPU: use emulated"
            raise UsageError(f"--float8 {missing}")
        capability = torch.cuda.get_device_capability(device)
        if capability < CAPABILITY:
            number = ".".join(map(str, capability))
            raise UsageError(f"--float8 needs a GPU of compute capability 8.9; this has {number}")
        kv_dim = config.dim // config.num_heads * config.num_kv_heads
        sides = (config.dim // tp, kv_dim // tp, config.ffn_dim // tp)
        sides += (args.micro_batch_size * args.seq_len // cp,)
        if odd := [side for side in sides if side % TILE]:
            what = "columns of a matrix, or tokens of a micro-batch, on a rank"
            raise UsageError(
                f"--float8 multiplies in tiles of {TILE}: no multiple is {odd}, {what}"
            )
    if args.float8 and importlib.util.find_spec("torchao") is None:
        raise UsageError("--float8 needs torchao: pip install torchao")


def convert(model: nn.Module, how: str) -> None:
    """Have linear layers multiply in float8; the head, which tells near logits apart, does not.

    Scales are powers of two: a number then rounds alike on all ranks, whichever others it shares
    its scale with. `how` is --float8's value.
    """
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # of torchao's registrations
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(emulate=how == "emulated", round_scales_to_power_of_2=True)

    def wanted(_: nn.Module, name: str) -> bool:
        return name not in ("head", "lm_head")

    convert_to_float8_training(model, config=config, module_filter_fn=wanted)
    torch.set_autocast_dtype("cuda", torch.bfloat16)  # which torchao reads on a CPU, too
