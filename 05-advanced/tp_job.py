"""What both lessons of tensor parallelism train, how one process trains it, and bad input.

How a weight is cut is written here a second time, by name, for the checks: the lessons cut by
themselves.
"""

import dataclasses
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from dist_common import cli, data, models, proofs, runtime

# The dim that is cut of a weight, by the module's name; norms are whole on each rank.
CUT_DIM = {"embedding": 0, "head": 0, "wq": 0, "wk": 0, "wv": 0, "gate": 0, "up": 0,
           "wo": 1, "down": 1}  # fmt: skip


def add_flags(parser: cli.ArgumentParser) -> None:
    """Add the flags of the model, the batch and the few steps of training."""
    add = parser.add_argument
    add("--num-layers", type=cli.positive_int, default=4, help="blocks of the model (4)")
    add("--num-kv-heads", type=cli.positive_int, default=2, help="heads of keys and values (2)")
    add("--seq-len", type=cli.positive_int, default=64, help="tokens per sequence (64)")
    add("--batch-size", type=cli.positive_int, default=4, help="sequences per step (4)")
    add("--max-steps", type=cli.positive_int, default=5, help="steps of AdamW (5)")
    add("--lr", type=cli.positive_float, default=1e-3, help="learning rate (0.001)")


def config_of(args, ranks: int) -> models.TransformerConfig:
    """Return the tiny model with the flags' layers. Raises: UsageError when it cannot be cut."""
    config = dataclasses.replace(
        models.preset("tiny", args.seq_len),
        num_layers=args.num_layers, num_kv_heads=args.num_kv_heads,
    )  # fmt: skip
    if config.num_heads % config.num_kv_heads:
        many = f"the model's {config.num_heads} heads"
        raise cli.UsageError(f"--num-kv-heads {config.num_kv_heads} does not divide {many}")
    check_sizes(config, args.seq_len, ranks)
    return config


def check_sizes(config: models.TransformerConfig, seq_len: int, ranks: int) -> None:
    """Refuse sizes of which the ranks would get unequal parts. Raises: UsageError."""
    sizes = {
        "heads": config.num_heads,
        "key and value heads (--num-kv-heads)": config.num_kv_heads,
        "ffn_dim": config.ffn_dim,
        "vocab_size": config.vocab_size,
        "tokens of a sequence (--seq-len), which sequence parallelism cuts": seq_len,
    }
    for name, size in sizes.items():
        if size % ranks:
            raise cli.UsageError(f"{size} {name} cannot be cut into {ranks} equal parts")


def batches_of(args, device: torch.device) -> list[list[torch.Tensor]]:
    """Return the (inputs, targets) of each step, (B, T) each: every rank reads the same."""
    text = data.load_text()
    sequences = data.Sequences(text[: len(text) // args.seq_len * args.seq_len], args.seq_len)
    if args.max_steps * args.batch_size >= len(sequences):
        have = f"the text has {len(sequences)} sequences"
        raise cli.UsageError(f"--max-steps times --batch-size must be less: {have}")
    return list(
        data.batches_of(sequences, args.max_steps, args.batch_size, 0, args.batch_size, device)
    )


def whole_model(args, config: models.TransformerConfig, device: torch.device) -> nn.Module:
    """Draw the model of one process: the same weights on every rank and in each call."""
    runtime.seed_everything(args.seed)
    return models.Transformer(config).to(device)


def train(model: nn.Module, compute_gradient: Callable, batches: list, lr: float) -> torch.Tensor:
    """Take a step of AdamW on each batch; return the losses. Shape: (steps,)."""
    # One tensor at a time: the kernels for many refuse a list of plain tensors and DTensors.
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, foreach=False)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        losses.append(compute_gradient(model, batch))
        optimizer.step()
    return torch.stack(losses)


def train_alone(args, model: nn.Module, batches: list) -> tuple[torch.Tensor, torch.Tensor]:
    """Train in one process; return its losses and this rank's part of the first gradient.

    Shapes: (steps,), and a vector in the order of the model's parameters.
    """
    parts = []

    def compute_gradient(model, batch):
        inputs, targets = batch
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        parts.append(proofs.flat(cut(name, p.grad) for name, p in model.named_parameters()))
        return loss.detach()

    losses = train(model, compute_gradient, batches, args.lr)
    return losses, parts[0]


def cut(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter's tensor, by the parameter's name."""
    dim = CUT_DIM.get(name.split(".")[-2])
    return tensor if dim is None else tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def on_this_rank(model: nn.Module) -> nn.ParameterList:
    """Return a model's parameters with their gradients as plain tensors: DTensors' local parts."""
    held = nn.ParameterList()
    for parameter in model.parameters():
        plain = nn.Parameter(local(parameter.detach()))
        plain.grad = local(parameter.grad)
        held.append(plain)
    return held


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
