"""What ring_attention.py measures beside its answer: bytes, work per rank, memory, a picture.

`records` are the blocks that each rank computed in a forward: (step, query chunk, key chunk).
"""

from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from advanced_parts.context_job import batch_of, build, set_attention, sharded_loss
from advanced_parts.kept_bytes import LiveBytes, kept_for_backward
from legacy_common import runtime
from legacy_common.lab.figure import figure

FP32 = 4  # bytes of a number


def ring_bytes(config, tokens: int, ranks: int, width: int = FP32) -> tuple[int, int]:
    """Return the bytes that a rank sends per layer in (forward, backward) of ring attention.

    `tokens` are the whole batch's, `width` the bytes per number of k and v. Forward: k and v make
    ranks - 1 hops. Backward: again, and dk and dv, float32, as many.
    """
    kv_dim = config.num_kv_heads * (config.dim // config.num_heads)
    block = 2 * tokens // ranks * kv_dim  # numbers in one rank's k and v
    return (ranks - 1) * block * width, (ranks - 1) * block * (width + FP32)


class Hops(TorchDispatchMode):
    """Count the kernels of attention between each hop's start and the wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = 0
        self.beside: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.kernels += "attention" in func.name()
        return func(*args, **(kwargs or {}))

    def __enter__(self):
        self.batch = dist.batch_isend_irecv
        dist.batch_isend_irecv = self.start
        return super().__enter__()

    def __exit__(self, *raised):
        dist.batch_isend_irecv = self.batch
        super().__exit__(*raised)

    def start(self, operations):
        handles = self.batch(operations)
        hop, before = len(self.beside), self.kernels
        self.beside.append(0)

        def wait():
            self.beside[hop] = self.kernels - before
            for handle in handles:
                handle.wait()

        return [SimpleNamespace(wait=wait)]


def check_hops(report, layout: str, ring, hops: Hops, tokens: int, layers: int) -> None:
    """Check how many hops travel beside no computation, on all ranks together."""
    idle = [not any(ring.blocks(step, tokens)) for step in range(ring.size)]
    # Forward's and backward's of keys, those of gradients, which are a step late, and the last.
    expected = layers * (2 * sum(idle[:-1]) + sum(idle[2:]) + (ring.size > 1))
    counts = runtime.gather((hops.beside.count(0), expected))
    name, source = f"{layout}: hops that nothing hides", "steps without a block, and the last hop"
    report.check(name, *map(sum, zip(*counts, strict=True)), 0, source)


def pairs_per_step(records, seq_len: int) -> list[list[int]]:
    """Return the (query, key) pairs that each rank attended in each step: [rank][step]."""
    # The ranks' records name every chunk of queries.
    chunk = seq_len // len({query for record in records for _, query, _ in record})
    pairs = [[0] * len(records) for _ in records]
    for rank, record in enumerate(records):
        for step, query, key in record:
            # A block on the diagonal: each query sees the keys up to its own.
            pairs[rank][step] += chunk * (chunk + 1) // 2 if query == key else chunk * chunk
    return pairs


def busiest_by_formula(layout: str, seq_len: int, ranks: int) -> int:
    """Return the pairs of the rank with the most: the last one; with zig-zag all have as many."""
    if layout == "zig-zag":
        return seq_len * (seq_len + 1) // 2 // ranks
    size = seq_len // ranks
    return (ranks - 1) * size * size + size * (size + 1) // 2


def check_balance(report, records_of: dict, seq_len: int) -> None:
    """Check how many pairs the ranks attended; print the layouts of {layout: records}."""
    rows = []
    for layout, records in records_of.items():
        pairs = pairs_per_step(records, seq_len)
        totals = [sum(steps) for steps in pairs]
        every, busiest = seq_len * (seq_len + 1) // 2, max(totals)
        expected = busiest_by_formula(layout, seq_len, len(records))
        report.check(f"{layout}: pairs, all ranks", sum(totals), every, 0, "half of T x T")
        report.check(f"{layout}: pairs, busiest rank", busiest, expected, 0, "the last rank's rows")
        # A step ends when its busiest rank has ended: the others wait for keys until then.
        waited_for = sum(map(max, zip(*pairs, strict=True)))
        busy = every / len(records) / waited_for
        report.metrics |= {f"{layout} pairs": totals, f"{layout} busy": busy}
        numbers = (min(totals), busiest, waited_for)
        rows.append((layout, *(f"{number:,}" for number in numbers), f"{busy:.0%}"))
    work = ("idlest rank", "busiest rank", "sum of steps", "ranks busy")
    report.table(rows, ("pairs attended", *work))


def memory_of_step(model, batch, positions) -> tuple[int, int]:
    """Return (peak, kept) bytes of a forward and backward, without weights and gradients."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # there already: backward adds to it
    with LiveBytes() as live:
        with kept_for_backward(model) as kept:
            loss = sharded_loss(model, batch, positions)
        loss.backward()
    return live.peak, sum(kept.values())


def measure_memory(report, ring_of: Callable, attend_on: Callable) -> None:
    """Check that a rank's bytes stay flat in a step on the first 1, 2, 4, ... ranks.

    Each has as many tokens. `ring_of(group)` makes a ring, `attend_on(ring)` its attention.
    """
    world, device = report.world, report.device
    powers = [2**n for n in range(20) if 2**n < world.world_size]
    report.metrics["memory"] = []
    rows = []
    for ranks in [*powers, world.world_size]:
        group = dist.new_group(range(ranks))
        tokens = ranks * report.args.memory_tokens
        model = build(report.args.seed, tokens, device)
        batch = batch_of(tokens, 1, device)
        full, _ = memory_of_step(model, batch, torch.arange(tokens, device=device))
        own = (0, 0)
        if world.rank < ranks:
            ring = ring_of(group)
            set_attention(model, attend_on(ring))
            own = memory_of_step(model, batch, ring.positions(tokens, device))
        peak, kept = map(max, zip(*runtime.gather(own), strict=True))
        report.metrics["memory"].append((tokens, ranks, full, peak, kept))
        sizes = (f"{size / 2**20:.2f} MiB" for size in (full, peak, kept))
        rows.append((f"{tokens:,}", str(ranks), *sizes))
    (_, _, _, peak_of_1, kept_by_1), *others = report.metrics["memory"]
    source = "1 rank, as many tokens per rank"
    for _, ranks, _, peak, kept in others:
        report.check(f"{ranks} ranks: bytes kept for backward", kept, kept_by_1, 0, source)
        name, keys_under_way = f"{ranks} ranks: largest bytes alive", peak_of_1 // 10
        report.check(name, peak, peak_of_1, keys_under_way, f"{source}, and keys under way")
    headers = ("tokens", "ranks", "one process", "a ring rank", "of it kept for backward")
    report.table(rows, headers, names=0)


def draw(path, records_of: dict) -> None:
    """Draw the attention matrix: the rank that computed each block, and in which step."""
    count = len(records_of)
    with figure(path, 1, count, figsize=(5 * count, 5.2), squeeze=False) as axes:
        for (layout, records), ax in zip(records_of.items(), axes[0], strict=True):
            owner = {query: rank for rank, record in enumerate(records) for _, query, _ in record}
            chunks = len(owner)
            held = torch.full((chunks, chunks), torch.nan)  # a block in nobody's past stays empty
            for rank, record in enumerate(records):
                for step, query, key in record:
                    held[query, key] = rank
                    ax.text(key, query, str(step), ha="center", va="center", size=9)
            ax.imshow(held, cmap="Set3" if len(records) <= 12 else "viridis")
            ax.set_yticks(range(chunks), [f"{n} (rank {owner[n]})" for n in range(chunks)])
            ax.set(xlabel="chunk of keys", xticks=range(chunks), ylabel="chunk of queries")
            ax.set_title(layout)
