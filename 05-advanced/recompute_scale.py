"""The ways of activation_checkpointing.py at full size, on tensors without memory; its pictures."""

import math
from dataclasses import replace

import torch

from cp_memory import LiveBytes, storages
from dist_common import models
from dist_common.measure import GIB
from dist_common.report import figure
from layout_counts import fuse_norms
from layout_model import BF16, activation_bytes
from recompute_checks import (
    flops_of_blocks,
    forward_flops,
    kept_bytes,
    memory_of_blocks,
    repeated_flops,
    run_blocks,
)


def flash_attention(q, k, v):
    """Call a GPU's kernel by name: on `meta` it has shapes, and `scaled_dot_product` no choice."""
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]


def on_meta(config, tokens: tuple[int, int], layers: int, way):
    """Return a model of some layers in bfloat16, checkpointed, and what its blocks are called on.

    Shapes: tokens (B, T); x (B, T, D), tables (T, head_dim / 2) twice. Nothing has memory.
    """
    B, T = tokens
    with torch.device("meta"):
        model = models.Transformer(replace(config, num_layers=layers)).to(torch.bfloat16)
        x = torch.empty(B, T, config.dim, dtype=torch.bfloat16, requires_grad=True)
        head_dim = config.dim // config.num_heads
        tables = models.rotary_tables(torch.arange(T), head_dim, config.rope_theta)
    for block in model.blocks:
        block.attention.attend = flash_attention
        fuse_norms(block)
    way(model)
    return model, x, tables


def check_scale(report, config, tokens, name, way, segment) -> dict:
    """Measure 2 and 4 blocks, check both, and return what all the preset's blocks need."""
    two, four = (
        memory_of_blocks(model.blocks, x, tables, LiveBytes())
        for model, x, tables in (on_meta(config, tokens, blocks, way) for blocks in (2, 4))
    )
    model, x, tables = on_meta(config, tokens, 2, way)
    _, step = flops_of_blocks(model.blocks, x, tables)

    count = math.prod(tokens)
    whole = activation_bytes(config) + BF16 * config.dim  # and the heads, copied side by side
    expected = count * kept_bytes(config, name, BF16, whole, segment)
    for blocks, (kept, _) in ((2, two), (4, four)):
        check = f"{name}, {blocks} blocks: bytes kept, full size"
        # 64: the state of a kernel's random numbers.
        report.check(check, kept, int(blocks * expected), 64 * blocks, "kept_bytes")
    grown = four[1] - two[1]
    check = f"{name}: bytes that 2 more blocks add to the peak"
    report.check(check, grown, int(2 * expected), 64 * 2, "what they keep: all blocks are alike")
    once = count * forward_flops(config, tokens[1])
    repeated = count * repeated_flops(config, tokens[1], name, segment)
    check = f"{name}: operations, full size"
    report.check(check, step, int(2 * (3 * once + repeated)), 0, "repeated_flops")
    per_block = two[0] / 2
    return {
        "way": name,
        "kept_gib": config.num_layers * per_block / GIB,
        "peak_gib": (two[1] + (config.num_layers - 2) * per_block) / GIB,
        "extra": step / (2 * 3 * once) - 1,
    }


def at_scale(report, config, tokens: tuple[int, int], ways: dict, segment: int) -> list[dict]:
    """Check a preset's blocks in each way, and print all of them; return a row for each way."""
    (B, T), lines = tokens, []
    rows = [check_scale(report, config, tokens, name, way, segment) for name, way in ways.items()]
    for row in rows:
        row["saved_gib"] = rows[0]["peak_gib"] - row["peak_gib"]
        sizes = [f"{row[key]:.1f}" for key in ("kept_gib", "peak_gib", "saved_gib")]
        rate = f"{row['saved_gib'] / row['extra'] / 100:.1f}" if row["extra"] else "-"
        lines.append([row["way"], *sizes, f"{row['extra']:.1%}", rate])
    size = f"{config.num_layers} blocks, {B} x {T:,} tokens"
    report.say(f"{report.args.preset}: {size}, bfloat16, in GiB:")
    headers = ("way", "kept", "peak", "saved", "extra operations", "saved per 1%")
    report.table(lines, headers)
    report.metrics["at scale"] = rows
    return rows


def choose(report, rows: list[dict], room_gib: float) -> None:
    """Print the way with the fewest extra operations whose peak fits."""
    fit = [row for row in rows if row["peak_gib"] <= room_gib]
    chosen = min(fit, key=lambda row: (row["extra"], rows.index(row)), default=None)
    report.metrics["chosen"] = chosen and chosen["way"]
    if chosen:
        extra = f"{chosen['peak_gib']:.1f} GiB, {chosen['extra']:.1%} more operations"
        report.say(
            f"fewest extra operations that fit in {room_gib:g} GiB: {chosen['way']}, {extra}"
        )
    else:
        cure = "a smaller --micro-batch-size, or split sequences (cp) or matrices (tp)"
        report.say(f"nothing fits in {room_gib:g} GiB: {cure}")


# pictures

# What a block makes, by module and operation, without float32 pieces of the rotation, which are
# freed at once, and numbers per head.
TENSORS = {
    "attention_norm empty_like 0": "norm",
    "wq mm 0": "queries",
    "wk mm 0": "keys",
    "wv mm 0": "values",
    "attention _to_copy 1": "queries, rotated",
    "attention _to_copy 3": "keys, rotated",
    "attention _scaled_dot_product_flash_attention 0": "attention",
    "attention clone 0": "heads side by side",
    "wo mm 0": "output product",
    "block add 0": "sum with the input",
    "ffn_norm empty_like 0": "norm",
    "gate mm 0": "gate",
    "block silu 0": "SiLU of gate",
    "up mm 0": "up",
    "block mul 0": "SiLU x up",
    "down mm 0": "down",
    "block add 1": "sum: the next block's input",
}


class Ledger(LiveBytes):
    """Note what a block's forwards make: `passes` by name in bytes; `held` is alive, by address."""

    def __init__(self) -> None:
        super().__init__()
        self.passes: list[dict[str, int]] = []
        self.held: dict[int, str] = {}
        self.module: str | None = None  # of the operation that runs; None outside the block

    def watch(self, block) -> None:
        """Note each forward of the block, also one that PyTorch ends early."""
        forward = block.forward

        def noted(*args):
            self.passes.append({})
            self.module = "block"
            try:
                return forward(*args)
            finally:
                self.module = None

        block.forward = noted
        for path, module in block.named_modules():
            parent, _, name = path.rpartition(".")
            if name:
                module.register_forward_pre_hook(lambda *_, name=name: self.enter(name))
                module.register_forward_hook(lambda *_, name=parent or "block": self.enter(name))

    def enter(self, name: str) -> None:
        self.module = name

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = set(self.known)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for address, storage in storages(result).items() if self.module else ():
            if address in self.known - before:
                made, name = self.passes[-1], f"{self.module} {func.overloadpacket.__name__}"
                name += f" {sum(other.rpartition(' ')[0] == name for other in made)}"
                made[name] = storage.nbytes()
                self.held[address] = name
        return result

    def release(self, address: int, size: int) -> None:
        super().release(address, size)
        self.held.pop(address, None)


def states_of_block(config, tokens, way) -> dict[str, tuple[int, str]]:
    """Return (bytes per token, "kept", "recomputed" or "") of what a block makes, by name."""
    ledger = Ledger()

    def watched(model) -> None:
        ledger.watch(model.blocks[0])
        way(model)

    model, x, tables = on_meta(config, tokens, 1, watched)
    with ledger:
        out = run_blocks(model.blocks, x, tables)
        kept = set(ledger.held.values())
        out.sum().backward()
    again = ledger.passes[1] if len(ledger.passes) > 1 else {}
    count = math.prod(tokens)
    states = {}
    for name, size in ledger.passes[0].items():
        state = "kept" if name in kept else "recomputed" if name in again else ""
        states[name] = size // count, state
    return states


def draw_block(report, path, config, tokens: tuple[int, int], ways: dict) -> None:
    """Draw what a block makes: bytes per token, by way, kept or made again in backward.

    Checks the bytes that it draws as kept.
    """
    shown = [way for way in ways if way not in ("2nd block", "segments")]
    styles = {
        "kept": {"color": "C0"},
        "recomputed": {"color": "white", "edgecolor": "C1", "hatch": "////"},
        "": {"color": "0.93"},
    }
    with figure(path, 1, len(shown), figsize=(10, 5.2), sharey=True, sharex=True) as axes:
        for ax, way in zip(axes, shown, strict=True):
            states = states_of_block(config, tokens, ways[way])
            for row, tensor in enumerate(TENSORS):
                size, state = states[tensor]
                ax.barh(row, size / 1024, **styles[state], height=0.75, linewidth=1)
            kept = sum(size for size, state in states.values() if state == "kept")
            whole = activation_bytes(config) + BF16 * config.dim
            expected = kept_bytes(config, way, BF16, whole, 1)
            check = f"{way}, drawn: bytes kept per token, full size"
            report.check(check, kept, expected, 0, "kept_bytes")
            ax.set_title(f"{way}: {kept / 1024:.0f} KiB kept", fontsize=10)
            ax.set_xlabel("KiB per token")
        axes[0].set_yticks(range(len(TENSORS)), TENSORS.values())
        axes[0].invert_yaxis()
        names = {"kept": "kept", "recomputed": "made again in backward", "": "dropped, not needed"}
        bars = [axes[0].barh(0, 0, **styles[state], label=label) for state, label in names.items()]
        figure_ = axes[0].figure
        figure_.legend(handles=bars, loc="outside lower center", ncols=3, frameon=False)
        figure_.suptitle(
            f"One block of {report.args.preset}, bfloat16: what its operations make, in their order"
        )


class Timeline(LiveBytes):
    """Note the bytes that are alive after each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.after: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.after.append(self.alive)
        return result


def draw_step(path, name: str, config, tokens: tuple[int, int], ways: dict, layers=8) -> None:
    """Draw the bytes that are alive during forward and backward of some blocks, by way."""
    shown = [way for way in ("none", "selective", "full", "segments") if way in ways]
    with figure(path, 1, len(shown), figsize=(10, 3.2), sharey=True) as axes:
        for ax, way in zip(axes, shown, strict=True):
            model, x, tables = on_meta(config, tokens, layers, ways[way])
            live = Timeline()
            memory_of_blocks(model.blocks, x, tables, live)
            gib = [size / GIB for size in live.after]
            ax.fill_between(range(len(gib)), gib, step="post", color="C0", lw=0)
            ax.set_title(f"{way}: peak {live.peak / GIB:.1f} GiB", fontsize=10)
            ax.set_xlabel("operations, in order")
        axes[0].set_ylabel("GiB alive")
        axes[0].figure.suptitle(f"Forward and backward of {layers} blocks of {name}")
