"""What both lessons of tensor parallelism train, what one process trains, and what a step sends."""

import dataclasses
from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from legacy_common import cli, data, models, runtime
from legacy_common.lab import proofs
from legacy_common.lab.traffic import Collective, TrafficCounter
from legacy_common.report import Report

RING_KINDS = ("all_reduce", "all_gather", "reduce_scatter")
HEADERS = ("all-reduces", "all-gathers", "reduce-scatters", "bytes sent")
FLOAT = 4  # bytes of a float32


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
    tiny = models.preset("tiny", args.seq_len)
    config = dataclasses.replace(tiny, num_layers=args.num_layers, num_kv_heads=args.num_kv_heads)
    if config.num_heads % config.num_kv_heads:
        many = f"the model's {config.num_heads} heads"
        raise cli.UsageError(f"--num-kv-heads {config.num_kv_heads} does not divide {many}")
    # What else is cut, the feed-forward and the vocabulary, are multiples of the heads.
    sizes = {
        "heads": config.num_heads,
        "key and value heads (--num-kv-heads)": config.num_kv_heads,
        "tokens of a sequence (--seq-len), which sequence parallelism cuts": args.seq_len,
    }
    for name, size in sizes.items():
        if size % ranks:
            raise cli.UsageError(f"{size} {name} cannot be cut into {ranks} equal parts")
    return config


def batches_of(args, device: torch.device) -> list[list[torch.Tensor]]:
    """Return the (inputs, targets) of each step, (B, T) each: every rank reads the same."""
    sequences = data.Sequences(data.load_text(), args.seq_len)
    if args.max_steps * args.batch_size >= len(sequences):
        have = f"the text has {len(sequences)} sequences"
        raise cli.UsageError(f"--max-steps times --batch-size must be less: {have}")
    size = args.batch_size
    return list(data.batches_of(sequences, args.max_steps, size, 0, size, device))


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


def train_alone(args, model: nn.Module, batches: list) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Train in one process; return its losses (steps,) and the first batch's gradients."""

    def compute_gradient(model, batch):
        inputs, targets = batch
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        return loss.detach()

    compute_gradient(model, batches[0])
    gradients = [weight.grad for weight in model.parameters()]
    return train(model, compute_gradient, batches, args.lr), gradients


def own_part(whole: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return this rank's part of a weight's tensor, cut where `shape` is smaller than it."""
    for dim, size in enumerate(shape):
        if size < whole.shape[dim]:
            whole = whole.chunk(dist.get_world_size(), dim)[dist.get_rank()]
    return whole


# what it sends: B sequences of T tokens, D numbers per token, L blocks, float32


def call(kind: str, numbers: int) -> Collective:
    """Return a collective of all ranks on a tensor of so many numbers, all ranks' parts of it."""
    return Collective(kind, numbers * FLOAT, dist.get_world_size(), "")


def block(tokens: int, dim: int, sequence_parallel: bool, fs: int = 2) -> list[Collective]:
    """Return what forward and backward of a block call, with two g and `fs` f. Tokens: B * T."""
    kinds = ("all_gather", "reduce_scatter") if sequence_parallel else ("all_reduce",)
    return [call(kind, tokens * dim) for kind in kinds * (fs + 2)]


def loss(tokens: int) -> list[Collective]:
    """Return what the loss calls: the maximum, the sum of exponentials, the target's logit."""
    return [call("all_reduce", tokens)] * 3


def traffic_of_step(
    config, tokens: int, sequence_parallel: bool, fs: int = 2, norms_apart: bool = False
) -> list[Collective]:
    """Return what a step calls: blocks, the g of the embedding, the f of the head, the loss.

    `norms_apart`: the gradient of each norm is summed by a collective of its own.
    """
    blocks = config.num_layers * block(tokens, config.dim, sequence_parallel, fs)
    ends = block(tokens, config.dim, sequence_parallel, fs=0)  # one g, one f
    norms = 2 * config.num_layers + 1
    sums = [call("all_reduce", norms * config.dim)]
    if norms_apart:
        sums = [call("all_reduce", config.dim)] * norms
    return blocks + ends + loss(tokens) + sums * sequence_parallel


def calls_and_bytes(traffic: list[Collective]) -> tuple[Counter, int]:
    """Return how many calls there are of each kind, and the bytes that a rank sends in a ring."""
    return Counter(each.kind for each in traffic), round(sum(each.sent for each in traffic))


def check_traffic(report: Report, name: str, measured: list, expected: list) -> None:
    """Check the calls of each kind, and the bytes that a rank sends for them in a ring."""
    source = "Shoeybi 2019, section 3; Korthikanti 2022, section 4.2.2"
    (calls, sent), (wanted, formula) = map(calls_and_bytes, (measured, expected))
    for kind in sorted({*calls, *wanted}):
        report.check(f"{name}: {kind.replace('_', '-')}s", calls[kind], wanted[kind], 0, source)
    report.check(f"{name}: bytes sent", sent, formula, 0, source)


def check_model(
    report: Report, name: str, model: nn.Module, compute_gradient: Callable, batches: list,
    alone: tuple[torch.Tensor, list[torch.Tensor]], expected: list,
) -> list[Collective]:  # fmt: skip
    """Check a cut model's gradient and losses against what `train_alone` returned.

    Return what forward and backward of a step called; check it against the formula's `expected`.
    """
    losses, gradients = alone
    with TrafficCounter() as counter:
        compute_gradient(model, batches[0])
    pairs = zip(gradients, model.parameters(), strict=True)
    gradient = proofs.flat(own_part(whole, models.local(own).shape) for whole, own in pairs)
    proofs.same_gradient(report, model, gradient, 1e-5, f"{name}: gradient error")
    own = train(model, compute_gradient, batches, report.args.lr)
    proofs.same_losses(report, own, losses, 1e-5, f"{name}: largest error of a loss")
    check_traffic(report, f"{name}, a step", counter.collectives, expected)
    report.metrics[f"losses, {name}"] = own.tolist()
    return counter.collectives


def row(name: str, traffic: list[Collective]) -> list[str]:
    """Return a table's row for HEADERS."""
    calls, sent = calls_and_bytes(traffic)
    return [name, *(str(calls[kind]) for kind in RING_KINDS), f"{sent:,}"]
