"""What tensor parallelism sends and keeps: counted from the calls, and by formula.

B sequences of T tokens, D numbers per token, L blocks, n ranks, float32. `payload` is the whole
tensor that a collective sums, gathers or scatters; a ring sends it times measure.RING_FACTOR.
"""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

from dist_common import measure, models
from dist_common.report import Report
from dist_common.steps import TrafficCounter

RING_KINDS = ("all_reduce", "all_gather", "reduce_scatter")
HEADERS = ("all-reduces", "all-gathers", "reduce-scatters", "bytes sent")
FLOAT = 4  # bytes of a float32


class Traffic:
    """Collectives by kind: how many `calls`, and the bytes of their `payload`."""

    def __init__(self, **each: tuple[int, int]) -> None:
        self.calls = Counter({kind: calls for kind, (calls, _) in each.items()})
        self.payload = Counter({kind: calls * size for kind, (calls, size) in each.items()})

    def __add__(self, other: "Traffic") -> "Traffic":
        total = Traffic()
        total.calls, total.payload = self.calls + other.calls, self.payload + other.payload
        return total

    def sent(self, ranks: int) -> int:
        """Return the bytes that a rank sends in a ring."""
        return round(sum(measure.RING_FACTOR[k](ranks) * size for k, size in self.payload.items()))


def traffic_of(counter: TrafficCounter) -> Traffic:
    """Return what was counted."""
    total = Traffic()
    for call in counter.collectives:
        total += Traffic(**{call.kind: (1, call.nbytes)})
    return total


def traffic_of_block(tokens: int, dim: int, sequence_parallel: bool, fs: int = 2) -> Traffic:
    """Return what forward and backward of a block send, with two g and `fs` f. Tokens: B * T."""
    size = tokens * dim * FLOAT
    if sequence_parallel:
        return Traffic(all_gather=(fs + 2, size), reduce_scatter=(fs + 2, size))
    return Traffic(all_reduce=(fs + 2, size))


def traffic_of_loss(tokens: int) -> Traffic:
    """Return what the loss sends: the maximum, the sum of exponentials, the target's logit."""
    return Traffic(all_reduce=(3, tokens * FLOAT))


def traffic_of_step(
    config: models.TransformerConfig, tokens: int, sequence_parallel: bool,
    fs: int = 2, norms_apart: bool = False,
) -> Traffic:  # fmt: skip
    """Return what a step sends: blocks, the g of the embedding, the f of the head, the loss.

    `norms_apart`: the gradient of each norm is summed by a collective of its own.
    """
    total = traffic_of_loss(tokens)
    for _ in range(config.num_layers):
        total += traffic_of_block(tokens, config.dim, sequence_parallel, fs)
    size = tokens * config.dim * FLOAT
    if not sequence_parallel:
        return total + Traffic(all_reduce=(2, size))
    norms, norm = 2 * config.num_layers + 1, config.dim * FLOAT
    sums = Traffic(all_reduce=(norms, norm) if norms_apart else (1, norms * norm))
    return total + sums + Traffic(all_gather=(2, size), reduce_scatter=(2, size))


def check_traffic(report: Report, name: str, measured: Traffic, expected: Traffic) -> None:
    """Check the calls of each kind, and the bytes that a rank sends for them in a ring."""
    source = "Shoeybi 2019, section 3; Korthikanti 2022, section 4.2.2"
    for kind in sorted({*measured.calls, *expected.calls}):
        calls = measured.calls[kind], expected.calls[kind]
        report.check(f"{name}: {kind.replace('_', '-')}s", *calls, 0, source)
    ranks = report.world.world_size
    report.check(f"{name}: bytes sent", measured.sent(ranks), expected.sent(ranks), 0, source)


def check_step(report: Report, name: str, measured: Traffic, expected: Traffic) -> None:
    """Check what forward and backward of a step sent, and keep it in the metrics."""
    check_traffic(report, f"{name}, a step", measured, expected)
    report.metrics[f"calls of a step, {name}"] = dict(measured.calls)
    report.metrics[f"bytes sent in a step, {name}"] = measured.sent(report.world.world_size)


def row(name: str, traffic: Traffic, ranks: int) -> list[str]:
    """Return a table's row for HEADERS."""
    calls = [str(traffic.calls[kind]) for kind in RING_KINDS]
    return [name, *calls, f"{traffic.sent(ranks):,}"]


@dataclass
class BlockRun:
    """What one block did: its traffic, the bytes it kept for backward, the shapes inside it."""

    traffic: Traffic
    kept: int
    tensors: dict[str, tuple[int, ...]]  # in the order of the computation
    weights: dict[str, tuple[int, ...]]


def run_block(block: nn.Module, args, config, device, parts: int = 1) -> BlockRun:
    """Take forward and backward of one block, on random input of T / `parts` tokens.

    Kept is what autograd saves, each storage once, without the weights and the rotary tables.
    """
    B, T, D = args.batch_size, args.seq_len, config.dim
    positions = torch.arange(T, device=device)
    tables = models.rotary_tables(positions, D // config.num_heads, config.rope_theta)
    x = torch.randn(B, T // parts, D, device=device, requires_grad=True)
    not_counted = {t.untyped_storage().data_ptr() for t in (*block.parameters(), *tables)}
    kept = {}
    tensors = {"x": tuple(x.shape)}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in not_counted:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def note(name: str, module: nn.Module) -> None:
        def hook(_, inputs, output) -> None:
            tensors[f"{name} in"] = tuple(inputs[0].shape)
            tensors[f"{name} out"] = tuple(output.shape)

        handles.append(module.register_forward_hook(hook))

    handles = []
    for name, module in block.named_modules():
        if isinstance(module, (nn.Linear, nn.RMSNorm)):
            note(name.split(".")[-1], module)
    with TrafficCounter() as counter:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = block(x, *tables)
        out.sum().backward()
    tensors["out"] = tuple(out.shape)
    for handle in handles:
        handle.remove()
    block.zero_grad()
    weights = {name.split(".")[-2]: tuple(w.shape) for name, w in block.named_parameters()}
    return BlockRun(traffic_of(counter), sum(kept.values()), tensors, weights)


def check_blocks(report: Report, blocks: dict[str, BlockRun], args, config) -> None:
    """Print what a block sends and keeps each way; check both against the formulas."""
    ranks, tokens = report.world.world_size, args.batch_size * args.seq_len
    alone = blocks["one process"].kept
    rows = []
    for number, (name, run) in enumerate(blocks.items()):
        kept = f"{run.kept:,}", f"{run.kept / alone:.2f}"
        rows.append([*row(name, run.traffic, ranks), *kept])
        report.metrics[f"bytes kept by a block, {name}"] = run.kept
        if number:
            expected = traffic_of_block(tokens, config.dim, sequence_parallel=number == 2)
            check_traffic(report, f"{name}, a block", run.traffic, expected)
    report.table(rows, ("a block", *HEADERS, "bytes kept", "of one process"))
    expected = kept_with_sequence_parallel(alone, tokens, config.dim, ranks)
    claim = f"{name}, a block: bytes kept for backward"
    # CUDA's kernels keep a few bytes more; of a single head, attention's output is not copied.
    copied = tokens * config.dim * FLOAT / ranks if config.num_heads == ranks else 0
    source = "1/n of one process, and two inputs whole"
    report.check(claim, run.kept, expected, 0.01 * expected + copied, source)


def kept_with_sequence_parallel(alone: int, tokens: int, dim: int, ranks: int) -> int:
    """Return the bytes that a block keeps: 1/n of one process's, and what f gathers, twice whole.

    What f gathers is one process's input of the matrices, so 1/n of it is counted already.
    """
    whole = 2 * tokens * dim * FLOAT
    return round(alone / ranks + whole * (1 - 1 / ranks))
