"""What activation_checkpointing.py proves: results, bytes, operations; at full size on `meta`."""

import math
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.flop_counter import FlopCounterMode

from advanced_parts.kept_bytes import LiveBytes, as_on_a_gpu, kept_for_backward
from legacy_common import data, models, runtime
from legacy_common.cli import UsageError
from legacy_common.lab import proofs
from legacy_common.lab.figure import figure
from legacy_common.lab.traffic import TrafficCounter
from legacy_common.measure import GIB
from legacy_common.models import cut_like

# float32 keeps 1.2e-7 of a number; sums of a few hundred terms, in another order.
TOLERANCE = 1e-5
BATCH = 2  # sequences of each rank's micro-batch


def small(seq_len: int) -> models.TransformerConfig:
    """Return the preset `tiny` with as many key heads as query heads.

    A GPU has no fused attention in float32 for shared ones. Raises: UsageError for long sequences.
    """
    config = models.PRESETS["tiny"]
    if seq_len > config.max_seq_len:
        raise UsageError(f"--train-seq-len must be at most {config.max_seq_len}")
    return replace(config, num_kv_heads=config.num_heads)


def loss_of(model, batch) -> torch.Tensor:
    """Return the mean loss. Shapes: batch (B, T) twice."""
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


class Reference:
    """Loss and gradient of a rank's own micro-batch, and of all ranks', without checkpoints."""

    def __init__(self, build, seq_len: int, device) -> None:
        ranks = dist.get_world_size()
        text = data.Sequences(data.load_text(max_bytes=1_000_000), seq_len)
        batches = list(data.batches_of(text, ranks, BATCH, 0, BATCH, device))  # one for each rank
        self.batch = batches[dist.get_rank()]
        # The same sums on one device: a GPU may add in another order.
        self.exact = TOLERANCE if device.type == "cuda" else 0
        model = build()
        loss = loss_of(model, self.batch)
        self.own = loss.item(), proofs.gradient_of_one_process(model, [loss])
        losses = [loss_of(model, batch) / ranks for batch in batches]
        mean = sum(loss.item() for loss in losses)
        self.all = mean, proofs.gradient_of_one_process(model, losses)


def shard(model):
    """Make each block, or segment, a unit of FSDP: its checkpoint is inside the unit."""
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh)
    return model


def check_exact(report, name, build, way, reference: Reference) -> None:
    """Check loss, gradients and collectives of a way: alone, under DDP, under fully_shard.

    `build()` draws the same model each time; `way(model)` checkpoints it. Recomputation repeats no
    collective of data parallelism.
    """
    model = build()
    way(model)
    loss = loss_of(model, reference.batch)
    loss.backward()
    (expected, gradient), source = reference.own, "no checkpointing"
    check, exact = f"{name}, alone: loss against none", reference.exact
    report.check(check, loss.item(), expected, exact, source)
    check = f"{name}, alone: gradient against none"
    proofs.same_gradient(report, model, gradient, exact, check, source)

    (expected, gradient), source = reference.all, "one process, the sequences of all ranks"
    for wrapper, wrap in (("DDP", DDP), ("FSDP", shard)):
        model = build()
        way(model)
        wrapped = wrap(model)
        with TrafficCounter() as counter:
            loss = loss_of(wrapped, reference.batch)
            loss.backward()
        mean = sum(runtime.gather(loss.item())) / dist.get_world_size()
        check = f"{name}, {wrapper}: loss against one process"
        report.check(check, mean, expected, TOLERANCE * expected, source)
        weights = list(model.parameters())
        parts = zip(gradient.split([weight.numel() for weight in weights]), weights, strict=True)
        own = proofs.flat(cut_like(part.view(weight.shape), weight) for part, weight in parts)
        check = f"{name}, {wrapper}: gradient against one process"
        proofs.same_gradient(report, model, own, TOLERANCE, check, source)
        if wrapper == "DDP":
            proofs.one_gradient_sent(report, model, counter, name=f"{name}, DDP: bytes all-reduced")
        elif dist.get_world_size() > 1:  # on one rank PyTorch has nothing to gather
            check, units = f"{name}, FSDP: all-gathers, no more than without", len(model.blocks)
            gathers, each = counter.calls["all_gather"], "each unit in forward and in backward"
            report.check(check, gathers, 2 * units + 1, 0, f"{each}, the root once")
            report.metrics[f"{name}, FSDP all-gathers"] = gathers


def check_dropout(report, build, add_dropout, checkpoint_each, reference: Reference) -> None:
    """Check that a recomputed dropout draws the same numbers again, and show what happens if not.

    `add_dropout(model)` gives the blocks dropout, `checkpoint_each(blocks, **options)` recomputes.
    """

    def gradient(recompute) -> torch.Tensor:
        model = build()
        add_dropout(model)
        recompute(model.blocks)
        torch.manual_seed(report.args.seed + dist.get_rank())  # each rank drops other numbers
        return proofs.gradient_of_one_process(model, [loss_of(model, reference.batch)])

    expected = gradient(lambda blocks: None)
    recomputed = checkpoint_each, partial(checkpoint_each, preserve_rng_state=False)
    errors = ((gradient(way) - expected).abs().max() / expected.abs().max() for way in recomputed)
    right, wrong = (error.item() for error in errors)
    source = "the same seed, no checkpointing"
    report.check("full: gradient with dropout", right, 0, reference.exact, source)
    report.metrics["dropout error without RNG state"] = wrong
    report.say(f"dropout with preserve_rng_state=False: no error, and a gradient {wrong:.0%} off")


def products(config) -> list[int]:
    """Return the weights of a block's seven products, in the order of its forward."""
    D, F_, kv_dim = config.dim, config.ffn_dim, kv_width(config)
    return [D * D, D * kv_dim, D * kv_dim, D * D, D * F_, D * F_, F_ * D]


def kv_width(config) -> int:
    """Return the width of all heads of keys."""
    return config.num_kv_heads * (config.dim // config.num_heads)


def step_flops(config, seq_len: int, name: str, segment: int) -> float:
    """Return a step's operations per block and token: 3 forwards', and those that backward repeats.

    Forward has 2 per weight, and attention's. PyTorch ends a recomputation when backward has all it
    needs: before a checkpoint's last product.
    """
    weights = products(config)
    whole = 2 * sum(weights) + 4 * seq_len * config.dim  # scores, and their sum of values
    last = 2 * weights[-1]
    repeated = {
        "2nd product": 2 * sum(weights[1::2]),
        "2nd block": (whole - last) / 2,
        "segments": whole - last / segment,
        "full": whole - last,
    }
    return 3 * whole + repeated.get(name, 0)


def kept_bytes(config, name: str, number: int, block: float, segment: int) -> float:
    """Return the bytes kept per block and token; `number` bytes each, `block` without checkpoint.

    Selective: the block's input (D), what its products return (3 D + 2 kv + 2 F), attention's
    output (D), and for each head a float32. 2nd product: of the products queries, values, gate and
    the last alone.
    """
    D, F_, kv_dim = config.dim, config.ffn_dim, kv_width(config)
    heads = 4 * config.num_heads
    return {
        "none": block,
        "selective": number * (5 * D + 2 * kv_dim + 2 * F_) + heads,
        "2nd product": number * (4 * D + kv_dim + F_) + heads,
        "2nd block": (block + number * D) / 2,
        "segments": number * D / segment,
        "full": number * D,
    }[name]


def _attention(query, key, *args, **kwargs) -> int:
    return 4 * math.prod(query) * key[2]  # all queries times all keys, and all scores times v


# PyTorch counts nothing for the CPU's kernel, and the scores that a GPU's computes twice.
KERNELS = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
BACKWARD = ("_backward", lambda grad, *args, **kwargs: 2 * _attention(*args))
COUNTED = {
    getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}{way}"): count
    for kernel in KERNELS
    for way, count in (("", _attention), BACKWARD)
}


def stack(config, tokens: tuple[int, int], dtype, device, count: int, way):
    """Return `count` blocks, checkpointed, and inputs; on `meta` as a GPU's, without memory.

    Shapes: tokens (B, T), x (B, T, D), tables (T, D / 2H).
    """
    with torch.device(device):
        model = models.Transformer(replace(config, num_layers=count)).to(dtype)
        x = torch.randn(*tokens, config.dim, dtype=dtype, requires_grad=True)
        places = torch.arange(tokens[1])
    for block in model.blocks if x.is_meta else ():
        as_on_a_gpu(block)
    way(model)
    tables = models.rotary_tables(places, config.dim // config.num_heads, config.rope_theta)
    return model.blocks, x, tables


def measure(blocks, x, tables, live: LiveBytes) -> tuple[int, int, int, int]:
    """Return bytes kept and at the peak, no weights or gradients; FLOPs of forward, of all."""
    counter, found = FlopCounterMode(display=False, custom_mapping=COUNTED), []
    for tensor in (x, *blocks.parameters()):
        tensor.grad = torch.zeros_like(tensor)  # there already: backward adds to it
    for mode, count in ((live, lambda: live.alive), (counter, counter.get_total_flops)):
        with mode:
            out = x
            for block in blocks:
                out = block(out, *tables)
            found.append(count())
            loss = out.sum()
            del out
            loss.backward()
        found.append(count())
    kept, _, forward, step = found
    return kept, live.peak, forward, step


def check_stack(report, suffix: str, blocks_of, config, tokens, ways: dict, segment: int) -> dict:
    """Check 2 and 4 blocks in each way: bytes kept and at the peak, operations.

    `blocks_of(count, way)` makes them. Return by way what 4 keep, have at the peak, and compute in
    forward, and in forward and backward.
    """
    count, found = math.prod(tokens), {}
    first, x, tables = blocks_of(1, ways["none"])
    with kept_for_backward(first, tables) as kept:
        first[0](x, *tables)
    block = sum(kept.values())  # by saved-tensor hooks; `measure` looks at what is alive
    inside = measure(*blocks_of(1, ways["none"]), LiveBytes())[1] - block
    peaks = {
        "none": 4 * block,
        "2nd block": 4 * (block + x.nbytes) / 2,
        "segments": 4 * x.nbytes / segment + segment * block - x.nbytes,
        "full": 4 * x.nbytes + block - x.nbytes,
    }  # and the gradients inside one block

    def check(kind: str, measured: int, expected: float, source: str) -> None:
        # A GPU's kernels pad; on `meta` they keep 64 bytes, the state of their random numbers.
        slack = 0.01 * expected if x.is_cuda else 64 * 4
        report.check(f"{name}{suffix}: bytes {kind}", measured, int(expected), slack, source)

    for name, way in ways.items():
        (_, less, *_), four = (measure(*blocks_of(n, way), LiveBytes()) for n in (2, 4))
        kept, peak, _, step = found[name] = four
        expected = 4 * count * kept_bytes(config, name, x.itemsize, block / count, segment)
        check("kept", kept, expected, "kept_bytes; of a block without checkpoint: saved tensors")
        source = "what they keep: all blocks are alike"
        check("that 2 more blocks add to the peak", peak - less, expected / 2, source)
        if name in peaks:
            source = "what is kept, and one checkpoint's tensors again"
            check("at the peak", peak, peaks[name] + inside, source)
        expected = 4 * count * step_flops(config, tokens[1], name, segment)
        source = "2 per weight and token forward, 4 backward"
        report.check(f"{name}{suffix}: operations", step, int(expected), 0, source)
    return found


def check_steps(report, config, seq_len: int, ways: dict, segment: int) -> None:
    """Check memory and operations of each way on real blocks, and print them."""
    tokens = BATCH, seq_len
    blocks_of = partial(stack, config, tokens, torch.float32, report.device)
    found, rows = check_stack(report, "", blocks_of, config, tokens, ways, segment), []
    for name, (kept, peak, forward, step) in found.items():
        sizes = (f"{size / 2**10:,.0f} KiB" for size in (kept, peak))
        rows.append((name, *sizes, f"{step / forward:.2f}"))
    report.table(rows, ("blocks of tiny", "kept", "peak", "operations"))


def at_scale(report, config, tokens: tuple[int, int], ways: dict, segment: int) -> None:
    """Check a preset's blocks in each way; print all, and the one that fits in --activation-gib.

    That is the way with the fewest extra operations, of equal ones the first.
    """
    room, L, rows, lines = report.args.activation_gib, config.num_layers, [], []
    blocks_of = partial(stack, config, tokens, torch.bfloat16, "meta")
    found = check_stack(report, ", full size", blocks_of, config, tokens, ways, segment)
    for name, (kept, peak, forward, step) in found.items():
        row = {
            "way": name,
            "kept_gib": L * kept / 4 / GIB,
            "peak_gib": (peak + (L - 4) * kept / 4) / GIB,
            "extra": step / (3 * forward) - 1,
        }
        rows.append(row)
        saved = rows[0]["peak_gib"] - row["peak_gib"]
        sizes = (f"{size:.1f}" for size in (row["kept_gib"], row["peak_gib"], saved))
        rate = f"{saved / row['extra'] / 100:.1f}" if row["extra"] else "-"
        lines.append((name, *sizes, f"{row['extra']:.1%}", rate))
    size = f"{L} blocks, {tokens[0]} x {tokens[1]:,} tokens"
    report.say(f"{report.args.preset}: {size}, bfloat16, in GiB:")
    report.table(lines, ("way", "kept", "peak", "saved", "extra operations", "saved per 1%"))
    fit = [row for row in rows if row["peak_gib"] <= room]
    chosen = min(fit, key=lambda row: row["extra"], default=None)
    report.metrics |= {"at scale": rows, "chosen": chosen and chosen["way"]}
    if chosen:
        size = f"{chosen['peak_gib']:.1f} GiB, {chosen['extra']:.1%} more operations"
        report.say(f"fewest extra operations that fit in {room:g} GiB: {chosen['way']}, {size}")
    else:
        cure = "a smaller --micro-batch-size, or split sequences (cp) or matrices (tp)"
        report.say(f"nothing fits in {room:g} GiB: {cure}")


def draw_step(path, name: str, config, tokens: tuple[int, int], ways: dict) -> None:
    """Draw the bytes that are alive during forward and backward of 8 blocks, by way."""
    shown = ("none", "selective", "full", "segments")
    with figure(path, 1, len(shown), figsize=(10, 3.2), sharey=True) as axes:
        for ax, way in zip(axes, shown, strict=True):
            live = LiveBytes()
            measure(*stack(config, tokens, torch.bfloat16, "meta", 8, ways[way]), live)
            gib = [size / GIB for size in live.history]
            ax.fill_between(range(len(gib)), gib, step="post", color="C0", lw=0)
            ax.set_title(f"{way}: peak {live.peak / GIB:.1f} GiB", fontsize=10)
            ax.set_xlabel("operations, in order")
        axes[0].set_ylabel("GiB alive")
        axes[0].figure.suptitle(f"Forward and backward of 8 blocks of {name}")
