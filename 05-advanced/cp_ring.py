"""What ring_attention.py measures beside its answer: work per rank, memory, pictures."""

import matplotlib
import torch
import torch.distributed as dist

from cp_checks import batch_of, build, tiny
from cp_memory import memory_of_step
from cp_training import set_attention, sharded_loss
from dist_common import models, runtime
from dist_common.report import figure

MIB = 2**20  # bytes


def chunk_of(records, seq_len: int) -> int:
    """Return the tokens of a chunk: the ranks' records name every chunk of queries."""
    return seq_len // len({query for record in records for _, query, _ in record})


def pairs_per_step(records, seq_len: int) -> list[list[int]]:
    """Return the (query, key) pairs that each rank attended in each step: [rank][step].

    `records` are the blocks that each rank computed in a forward: (step, query chunk, key chunk).
    """
    chunk = chunk_of(records, seq_len)
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


def check_balance(report, layout: str, records, seq_len: int) -> tuple[str, ...]:
    """Check how many pairs the ranks attended; return the layout's row of the table."""
    pairs = pairs_per_step(records, seq_len)
    totals = [sum(steps) for steps in pairs]
    every, busiest = seq_len * (seq_len + 1) // 2, max(totals)
    expected = busiest_by_formula(layout, seq_len, len(records))
    report.check(f"{layout}: pairs, all ranks", sum(totals), every, 0, "half of T x T")
    report.check(f"{layout}: pairs, busiest rank", busiest, expected, 0, "the last rank's rows")
    # A step ends when its busiest rank has ended: the others wait for keys until then.
    waited_for = sum(max(steps) for steps in zip(*pairs, strict=True))
    busy = every / len(records) / waited_for
    report.metrics[f"{layout} pairs"] = totals
    report.metrics[f"{layout} pairs waited for"] = waited_for
    report.metrics[f"{layout} busy"] = busy
    return layout, f"{min(totals):,}", f"{busiest:,}", f"{waited_for:,}", f"{busy:.0%}"


def print_balance(report, rows) -> None:
    """Print the layouts side by side."""
    headers = ("pairs attended", "idlest rank", "busiest rank", "sum of steps", "ranks busy")
    report.table(rows, headers)


def measure_memory(report, ring_of, ring_attention) -> list[tuple[int, ...]]:
    """Measure a training step on the first 1, 2, 4, ... ranks, as many tokens on each.

    `ring_of(group)` makes a ring. Return rows of (tokens, ranks, peak of one process, a ring rank's
    peak, what it kept for backward), in bytes; check that the last stays flat.
    """
    world, device, own_tokens = report.world, report.device, report.args.memory_tokens
    powers = [2**n for n in range(20) if 2**n < world.world_size]
    rows = []
    for ranks in [*powers, world.world_size]:
        group = dist.new_group(range(ranks))
        config = tiny(ranks * own_tokens)
        model = build(report.args.seed, config, device)
        batch = batch_of(config.max_seq_len, 1, device)

        set_attention(model, models.causal_attention)
        every = torch.arange(config.max_seq_len, device=device)
        full, _ = memory_of_step(model, sharded_loss, batch, every)

        own = (0, 0)
        if world.rank < ranks:
            ring = ring_of(group)
            set_attention(model, lambda q, k, v, ring=ring: ring_attention(q, k, v, ring))
            own = memory_of_step(model, sharded_loss, batch, ring.positions(len(every), device))
        peak, kept = (max(values) for values in zip(*runtime.gather(own), strict=True))
        rows.append((config.max_seq_len, ranks, full, peak, kept))
        if ranks > 1:
            _, _, _, peak_of_1, kept_by_1 = rows[0]
            source = "1 rank, as many tokens per rank"
            report.check(f"{ranks} ranks: bytes kept for backward", kept, kept_by_1, 0, source)
            name, keys_under_way = f"{ranks} ranks: largest bytes alive", peak_of_1 // 10
            report.check(name, peak, peak_of_1, keys_under_way, f"{source}, and keys under way")
    report.metrics["memory"] = rows
    cells = [(f"{tokens:,}", str(ranks), *(f"{n / MIB:.2f} MiB" for n in numbers))
             for tokens, ranks, *numbers in rows]  # fmt: skip
    headers = ("tokens", "ranks", "one process", "a ring rank", "of it kept for backward")
    report.table(cells, headers, names=0)
    return rows


# pictures


def draw(folder, records_of: dict, seq_len: int, memory) -> None:
    """Draw all three pictures; `records_of` are the layouts' records."""
    draw_steps(folder / "ring_attention_steps.png", records_of, seq_len)
    draw_blocks(folder / "ring_attention_blocks.png", records_of)
    draw_memory(folder / "ring_attention_memory.png", memory)


def colours(ranks: int):
    """Return a colour per rank."""
    if ranks <= 10:
        return [matplotlib.colormaps["Set3"](n) for n in range(ranks)]
    return [matplotlib.colormaps["viridis"](n / ranks) for n in range(ranks)]


def draw_steps(path, records_of: dict, seq_len: int) -> None:
    """Draw what each rank computed in each step; a pair takes as long everywhere."""
    ranks = len(next(iter(records_of.values())))
    size = (0.5 + 0.45 * ranks) * len(records_of)
    with figure(
        path, len(records_of), 1, figsize=(9, 1 + size), sharex=True, squeeze=False
    ) as axes:
        for (layout, records), ax in zip(records_of.items(), axes[:, 0], strict=True):
            pairs = pairs_per_step(records, seq_len)
            start = 0.0
            for step in range(ranks):
                longest = max(steps[step] for steps in pairs)
                for rank in range(ranks):
                    owner = (rank - step) % ranks
                    ax.barh(rank, longest, left=start, color="0.93")
                    ax.barh(rank, pairs[rank][step], left=start, color=colours(ranks)[owner])
                    if pairs[rank][step] and ranks <= 8:
                        middle = start + pairs[rank][step] / 2
                        ax.text(middle, rank, f"keys of {owner}", ha="center", va="center", size=8)
                start += longest
                ax.axvline(start, color="0.3", linewidth=1, linestyle=":")
            ax.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
            ax.invert_yaxis()
            ax.set_title(f"{layout}: {ranks} steps, each as long as its busiest rank", loc="left")
        axes[-1, 0].set_xlabel("pairs of query and key attended, one after the other (grey: waits)")


def draw_blocks(path, records_of: dict) -> None:
    """Draw the attention matrix: the rank that computed each block, and in which step."""
    ranks = len(next(iter(records_of.values())))
    with figure(
        path, 1, len(records_of), figsize=(5 * len(records_of), 5.2), squeeze=False
    ) as axes:
        for (layout, records), ax in zip(records_of.items(), axes[0], strict=True):
            chunks = 1 + max(query for record in records for _, query, _ in record)
            for rank, record in enumerate(records):
                for step, query, key in record:
                    corner = (key - 0.5, query - 0.5)
                    square = matplotlib.patches.Rectangle(
                        corner, 1, 1, facecolor=colours(ranks)[rank], edgecolor="white"
                    )
                    ax.add_patch(square)
                    if chunks <= 16:
                        ax.text(key, query, f"{step}", ha="center", va="center", size=9)
            ax.set(xlim=(-0.5, chunks - 0.5), ylim=(chunks - 0.5, -0.5), aspect="equal")
            owner = {query: rank for rank, record in enumerate(records) for _, query, _ in record}
            ax.set_yticks(range(chunks), [f"{n} (rank {owner[n]})" for n in range(chunks)])
            ax.set_xticks(range(chunks))
            ax.set(xlabel="chunk of keys", ylabel="chunk of queries", title=layout)


def draw_memory(path, rows) -> None:
    """Draw the memory of a step against the tokens per sequence."""
    tokens, ranks, full, peak, _ = zip(*rows, strict=True)
    with figure(path, figsize=(7, 4)) as ax:
        ax.plot(tokens, [n / MIB for n in full], "o-", label="full attention, one process")
        ax.plot(tokens, [n / MIB for n in peak], "s-", label="ring attention, a rank")
        labels = [
            f"{n:,}\n{count} rank{'s' * (count > 1)}"
            for n, count in zip(tokens, ranks, strict=True)
        ]
        ax.set_xticks(tokens, labels)
        ax.set(xlabel="tokens per sequence", ylabel="largest bytes alive (MiB)", ylim=(0, None))
        ax.legend()
