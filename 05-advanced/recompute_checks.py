"""What activation_checkpointing.py checks on real tensors: results, bytes, operations."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.flop_counter import FlopCounterMode

from cp_memory import LiveBytes, kept_for_backward, storages
from dist_common import data, models, proofs
from dist_common.cli import UsageError
from dist_common.measure import CollectiveCounter

# float32 keeps 1.2e-7 of a number; sums of a few hundred terms, in another order.
TOLERANCE = 1e-5
FP32 = 4  # bytes of a number
BATCH = 2  # sequences of each rank's micro-batch
KIB = 2**10  # bytes


# what each way computes


def small(seq_len: int) -> models.TransformerConfig:
    """Return the preset `tiny` with as many key heads as query heads.

    A GPU has no fused attention in float32 for shared ones. Raises: UsageError for long sequences.
    """
    config = models.PRESETS["tiny"]
    if seq_len > config.max_seq_len:
        raise UsageError(f"--train-seq-len must be at most {config.max_seq_len}")
    return replace(config, num_kv_heads=config.num_heads)


def micro_batch(rank: int, seq_len: int, device) -> list[torch.Tensor]:
    """Return a rank's tokens and targets. Shapes: (BATCH, T) each."""
    text = data.Sequences(data.load_text(max_bytes=1_000_000), seq_len)
    return next(data.batches_of(text, 1, BATCH, rank * BATCH, BATCH, device))


def loss_of(model, batch) -> torch.Tensor:
    """Return the mean loss. Shapes: batch (B, T) twice."""
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def exactness(report) -> float:
    """Return the tolerance of the same sums on one device: a GPU may add in another order."""
    return TOLERANCE if report.device.type == "cuda" else 0


class Reference:
    """Loss and gradient of a rank's own micro-batch, and of all ranks', without checkpoints."""

    def __init__(self, build, batches) -> None:
        self.batch = batches[dist.get_rank()]
        model = build()
        loss = loss_of(model, self.batch)
        self.own = loss.item(), proofs.gradient_of_one_process(model, [loss])
        losses = [loss_of(model, batch) / len(batches) for batch in batches]
        mean = sum(loss.item() for loss in losses)
        self.all = mean, proofs.gradient_of_one_process(model, losses)


def check_exact(report, name, build, way, reference: Reference) -> None:
    """Check loss, gradients and collectives of a way: alone, under DDP, under fully_shard.

    `build()` draws the same model each time; `way(model)` checkpoints it.
    """
    model = build()
    way(model)
    loss = loss_of(model, reference.batch)
    loss.backward()
    exact, source = exactness(report), "no checkpointing"
    expected, gradient = reference.own
    report.check(f"{name}, alone: loss against none", loss.item(), expected, exact, source)
    check = f"{name}, alone: gradient against none"
    proofs.same_gradient(report, model, gradient, exact, check, source)

    for wrapper, wrap in (("DDP", DDP), ("FSDP", shard)):
        model = build()
        way(model)
        counted = check_wrapped(report, f"{name}, {wrapper}", model, wrap, reference)
        check_collectives(report, f"{name}, {wrapper}", model, counted)


def shard(model):
    """Make each block, or segment, a unit of FSDP: its checkpoint is inside the unit."""
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    for unit in model.blocks:
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
    return fully_shard(model, mesh=mesh)


def check_wrapped(report, name, model, wrap, reference) -> CollectiveCounter:
    """Check one step against one process; return the collectives that it called."""
    wrapped = wrap(model)
    with CollectiveCounter() as counter:
        loss = loss_of(wrapped, reference.batch)
        loss.backward()
    mean, gradient = reference.all
    total = loss.detach() / dist.get_world_size()
    dist.all_reduce(total)
    source = "one process, the sequences of all ranks"
    report.check(f"{name}: loss against one process", total.item(), mean, TOLERANCE * mean, source)
    gradients = (weight.grad for weight in model.parameters())
    own = proofs.flat(g.full_tensor() if isinstance(g, DTensor) else g for g in gradients)
    error = (own - gradient).abs().max() / gradient.abs().max()
    dist.all_reduce(error, op=dist.ReduceOp.MAX)
    check = f"{name}: gradient against one process"
    report.check(check, error.item(), 0, TOLERANCE, source)
    return counter


def check_collectives(report, name, model, counted) -> None:
    """Check that recomputation repeats no collective of data parallelism."""
    if name.endswith("DDP"):
        gradient = sum(weight.nbytes for weight in model.parameters())
        sent = counted.bytes["allreduce_"]
        report.check(f"{name}: bytes all-reduced", sent, gradient, 0, "one gradient per weight")
        return
    if dist.get_world_size() == 1:
        return  # PyTorch has nothing to gather
    gathers = sum(calls for op, calls in counted.calls.items() if "allgather" in op)
    expected = 2 * len(model.blocks) + 1
    source = "each unit in forward and in backward, the root once"
    report.check(f"{name}: all-gathers, no more than without", gathers, expected, 0, source)
    report.metrics[f"{name} all-gathers"] = gathers


def check_dropout(report, build, add_dropout, checkpoint_each, batch) -> None:
    """Check that a recomputed dropout draws the same numbers again, and show what happens if not.

    `add_dropout(model)` gives the blocks dropout, `checkpoint_each(blocks, **options)` recomputes.
    """

    def gradient(recompute: Callable) -> torch.Tensor:
        model = build()
        add_dropout(model)
        recompute(model.blocks)
        torch.manual_seed(report.args.seed + dist.get_rank())  # each rank drops other numbers
        return proofs.gradient_of_one_process(model, [loss_of(model, batch)])

    expected = gradient(lambda blocks: None)

    def error(**options) -> float:
        measured = gradient(lambda blocks: checkpoint_each(blocks, **options))
        return ((measured - expected).abs().max() / expected.abs().max()).item()

    source = "the same seed, no checkpointing"
    report.check("full: gradient with dropout", error(), 0, exactness(report), source)
    wrong = error(preserve_rng_state=False)
    report.metrics["dropout error without RNG state"] = wrong
    report.say(f"dropout with preserve_rng_state=False: no error, and a gradient {wrong:.0%} off")


# what each way keeps and computes


def products(config: models.TransformerConfig) -> list[int]:
    """Return the weights of a block's products, in the order of its forward."""
    D, F_ = config.dim, config.ffn_dim
    kv_dim = D // config.num_heads * config.num_kv_heads
    return [D * D, D * kv_dim, D * kv_dim, D * D, D * F_, D * F_, F_ * D]


def forward_flops(config: models.TransformerConfig, seq_len: int) -> int:
    """Return a block's operations per token: 2 per weight, and attention to seq_len tokens."""
    return 2 * sum(products(config)) + 4 * seq_len * config.dim


def repeated_flops(config, seq_len: int, name: str, segment: int) -> float:
    """Return the operations that backward repeats, per block and token.

    PyTorch ends a recomputation when backward has all it needs: before a checkpoint's last product.
    """
    whole, last = forward_flops(config, seq_len), 2 * products(config)[-1]
    repeated = {"2nd product": 2 * sum(products(config)[1::2]), "2nd block": (whole - last) / 2}
    repeated |= {"segments": whole - last / segment, "full": whole - last}
    return repeated.get(name, 0)


def kept_bytes(config, name: str, number: int, block: float, segment: int) -> float:
    """Return the bytes kept per block and token; `number` bytes each, `block` without checkpoint.

    Selective: the block's input (D), what its products return (3 D + 2 kv + 2 F), attention's
    output (D), and for each head a float32.
    """
    D, F_, heads = config.dim, config.ffn_dim, FP32 * config.num_heads
    kv_dim = D // config.num_heads * config.num_kv_heads
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


def _attention_backward(grad, query, key, *args, **kwargs) -> int:
    return 2 * _attention(query, key)


KINDS = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
KERNELS = {way: [getattr(torch.ops.aten, f"_scaled_dot_product_{kind}{way}") for kind in KINDS]
           for way in ("", "_backward")}  # fmt: skip
# PyTorch counts nothing for the CPU's kernel, and the scores that a GPU's computes twice.
COUNTED = dict.fromkeys(KERNELS[""], _attention)
COUNTED |= dict.fromkeys(KERNELS["_backward"], _attention_backward)


def run_blocks(blocks, x, tables) -> torch.Tensor:
    """Return the blocks' output. Shapes: x (B, T, D), tables (T, head_dim / 2) twice."""
    for block in blocks:
        x = block(x, *tables)
    return x


def memory_of_blocks(blocks, x, tables, live: LiveBytes) -> tuple[int, int]:
    """Return (kept, peak) bytes of forward and backward, without weights and their gradients."""
    for tensor in (x, *blocks.parameters()):
        tensor.grad = torch.zeros_like(tensor)  # there already: backward adds to it
    with live:
        out = run_blocks(blocks, x, tables)
        kept = live.alive
        loss = out.sum()
        del out
        loss.backward()
    return kept, live.peak


def flops_of_blocks(blocks, x, tables) -> tuple[int, int]:
    """Return the operations of forward, and of forward and backward."""
    with FlopCounterMode(display=False, custom_mapping=COUNTED) as counter:
        out = run_blocks(blocks, x, tables)
        forward = counter.get_total_flops()
        out.sum().backward()
    return forward, counter.get_total_flops()


class Bench:
    """A model's blocks on real tensors, and what one block needs without checkpoints."""

    def __init__(self, build, seq_len: int, device) -> None:
        self.build, self.seq_len = build, seq_len
        self.config = build().config
        head_dim = self.config.dim // self.config.num_heads
        places = torch.arange(seq_len, device=device)
        self.tables = models.rotary_tables(places, head_dim, self.config.rope_theta)
        self.x = torch.randn(BATCH, seq_len, self.config.dim, device=device, requires_grad=True)
        self.tokens = BATCH * seq_len
        block = build().blocks[:1]
        with kept_for_backward(block) as kept:
            run_blocks(block, self.x, self.tables)
        # By saved-tensor hooks; `memory_of_blocks` looks at what is alive.
        self.block = sum(size for at, size in kept.items() if at not in storages(self.tables))
        _, peak = memory_of_blocks(build().blocks[:1], self.x, self.tables, LiveBytes())
        self.in_backward = peak - self.block  # gradients, while one block's backward runs

    def peak(self, name: str, segment: int) -> float | None:
        """Return the peak that a way should have, in bytes; None where no formula is given."""
        L, block, x = self.config.num_layers, self.block, self.x.nbytes
        held = {"none": L * block, "full": L * x + block - x, "2nd block": L * (block + x) / 2}
        held["segments"] = L * x / segment + segment * block - x
        return held[name] + self.in_backward if name in held else None


def check_step(report, name, way, bench: Bench, segment: int) -> list[str]:
    """Check memory and operations of a way on real blocks; return a row of the table."""
    config, tokens = bench.config, bench.tokens
    model = bench.build()
    way(model)
    kept, peak = memory_of_blocks(model.blocks, bench.x, bench.tables, LiveBytes())
    forward, step = flops_of_blocks(model.blocks, bench.x, bench.tables)

    L = config.num_layers
    block = bench.block / tokens
    expected = L * tokens * kept_bytes(config, name, FP32, block, segment)
    # A GPU's kernels pad, and keep the state of their random numbers.
    source = "kept_bytes; of a block without checkpoint: saved-tensor hooks"
    report.check(f"{name}: bytes kept", kept, int(expected), 0.01 * expected, source)
    expected = bench.peak(name, segment)
    if expected:
        source = "what is kept, and one checkpoint's tensors again"
        report.check(f"{name}: bytes at the peak", peak, int(expected), 0.01 * expected, source)
    once = L * tokens * forward_flops(config, bench.seq_len)
    repeated = L * tokens * repeated_flops(config, bench.seq_len, name, segment)
    source = "2 per weight and token forward, 4 backward"
    report.check(f"{name}: operations", step, int(3 * once + repeated), 0, source)
    report.metrics[f"{name} step"] = {"kept": kept, "peak": peak, "operations": step / forward}
    return [name, f"{kept / KIB:,.0f} KiB", f"{peak / KIB:,.0f} KiB", f"{step / forward:.2f}"]
