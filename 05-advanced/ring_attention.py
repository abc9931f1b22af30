"""Ring attention: each rank holds a part of the sequence; keys and values travel past all ranks.

    CPU   torchrun --standalone --nproc-per-node=4 05-advanced/ring_attention.py
    GPU   torchrun --standalone --nproc-per-node=gpu 05-advanced/ring_attention.py

Look for: output and gradients of full attention, although no rank ever holds all keys; the work per
rank, contiguous against zig-zag; the memory of a rank, which stays flat when ranks grow with the
sequence. Sources: Liu et al., Ring Attention with Blockwise Transformers (2023); Milakov and
Gimelshein, Online normalizer calculation for softmax (2018), for the merge.
"""

from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from advanced_parts import context_job
from advanced_parts import ring_attention as part
from legacy_common import cli, runtime
from legacy_common.report import Report

aten = torch.ops.aten
ALIGNMENT = 32  # the CUDA kernel rounds the length of its log-sum-exp up to a multiple
LAYOUTS = {"contiguous": 1, "zig-zag": 2}  # chunks of the sequence per rank


def merge(out, lse, part_out, part_lse):
    """Add attention to one more block, in place. Shapes: out (B, heads, T, d), lse without d."""
    total = torch.logaddexp(lse, part_lse)

    out.mul_((lse - total).exp()[..., None])  # the sum below the fraction has grown
    out.add_((part_lse - total).exp()[..., None] * part_out)

    lse.copy_(total)


def attend_block(q, k, v, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention to one block of keys, and each query's log-sum-exp over this block.

    SDPA computes the log-sum-exp but keeps it to itself; the kernels beneath it return it.
    Shapes: q (B, heads, Tq, head_dim); k and v (B, kv heads, Tk, head_dim); (B, heads, Tq) float32.
    """
    k, v = (share(x, q.shape[1]) for x in (k, v))
    if q.device.type == "cuda":
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, causal
        )
        return out, lse[..., : q.shape[2]]
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)


def attend_block_backward(grad_out, q, out, lse, k, v, causal: bool) -> list[torch.Tensor]:
    """Return what one block adds to the gradients of q, k and v.

    `out` and `lse` are of the whole sequence: with them the kernel finds the block's share of the
    whole softmax. Shapes: as in attend_block, gradients as q, k and v.
    """
    kv_heads = k.shape[1]
    k, v = (share(x, q.shape[1]) for x in (k, v))
    lse = lse.contiguous()
    if q.device.type == "cuda":
        lse = F.pad(lse, (0, -lse.shape[2] % ALIGNMENT), value=torch.inf)
        unused = torch.zeros((), dtype=torch.int64)  # seed and offset of a dropout that is 0
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad_out, q, k, v, None, out, lse, unused, unused, 0.0, [True] * 3 + [False], causal
        )
    else:
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q, k, v, out, lse, 0.0, causal
        )
    # A key that several query heads share gets the sum of their gradients.
    return [dq, *(x.unflatten(1, (kv_heads, -1)).sum(dim=2) for x in (dk, dv))]


def share(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat key or value heads to `heads`: the CUDA kernel has no grouped-query attention."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


class Block(NamedTuple):
    """A square of the attention matrix: a chunk of queries by a chunk of keys."""

    query: int  # number of the chunk, in the order of the sequence
    key: int
    rows: slice  # where these queries are among this rank's
    columns: slice  # where these keys are among those that visit

    @property
    def causal(self):
        return self.query == self.key


class Ring:
    """The ranks that share a sequence: who holds which chunk, and who sends to whom."""

    def __init__(self, layout, group=None):
        self.layout, self.group = layout, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.record = []  # (step, query chunk, key chunk) of each block computed in forward

    def chunks_of(self, rank):
        """Return the numbers of a rank's chunks; zig-zag pairs an early one with a late one."""
        return [rank, 2 * self.size - 1 - rank] if self.layout == "zig-zag" else [rank]

    def positions(self, seq_len, device=None):
        """Return the places of this rank's tokens in the sequence. Shape: (seq_len / size,)."""
        chunks = torch.arange(seq_len, device=device).chunk(self.size * LAYOUTS[self.layout])
        return torch.cat([chunks[number] for number in self.chunks_of(self.rank)])

    def blocks(self, step, length):
        """Yield the blocks to compute in a step; `length` is the number of tokens per rank."""
        owner = (self.rank - step) % self.size  # whose keys are here now
        own, visiting = self.chunks_of(self.rank), self.chunks_of(owner)
        size = length // len(own)
        for i, query in enumerate(own):
            for j, key in enumerate(visiting):
                if key <= query:  # otherwise all of its keys are in the future of its queries
                    rows, columns = (slice(n * size, (n + 1) * size) for n in (i, j))
                    yield Block(query, key, rows, columns)

    def neighbours(self):
        """Return whom this rank sends to and whom it receives from."""
        return (self.rank + 1) % self.size, (self.rank - 1) % self.size

    def pass_on(self, tensor):
        """Start sending to the next rank and receiving; return what waits for the received one."""
        received = torch.empty_like(tensor)
        to_rank, from_rank = self.neighbours()
        send = dist.P2POp(dist.isend, tensor, group=self.group, group_peer=to_rank)
        receive = dist.P2POp(dist.irecv, received, group=self.group, group_peer=from_rank)
        handles = dist.batch_isend_irecv([send, receive])

        def wait():
            for handle in handles:
                handle.wait()
            return received

        return wait


class RingAttention(torch.autograd.Function):
    """Causal attention to the whole sequence; each rank has its own tokens' q, k and v."""

    @staticmethod
    def forward(ctx, q, k, v, ring):
        out = torch.zeros_like(q, dtype=torch.float32)
        lse = torch.full(q.shape[:3], -torch.inf, device=q.device)
        kv = torch.stack((k, v))  # (2, B, kv heads, T/N, head_dim): one message
        for step in range(ring.size):
            last = step == ring.size - 1
            wait = None if last else ring.pass_on(kv)  # travels while this rank computes
            for block in ring.blocks(step, q.shape[2]):
                keys, values = kv[..., block.columns, :]
                queries = q[:, :, block.rows]
                partial_out = attend_block(queries, keys, values, block.causal)
                merge(out[:, :, block.rows], lse[:, :, block.rows], *partial_out)
                ring.record.append((step, block.query, block.key))
            kv = kv if last else wait()
        out = out.to(q.dtype)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, lse)  # this rank's tokens only, on any number of ranks
        return out

    @staticmethod
    def backward(ctx, grad_out):
        q, k, v, out, lse = ctx.saved_tensors
        ring = ctx.ring
        dq = torch.zeros_like(q, dtype=torch.float32)
        kv = torch.stack((k, v))
        returning = None
        for step in range(ring.size):
            last = step == ring.size - 1
            wait = None if last else ring.pass_on(kv)
            dkv = torch.zeros_like(kv, dtype=torch.float32)
            for block in ring.blocks(step, q.shape[2]):
                keys, values = kv[..., block.columns, :]
                own = (x[:, :, block.rows] for x in (grad_out, q, out, lse))
                parts = attend_block_backward(*own, keys, values, block.causal)
                dq[:, :, block.rows] += parts[0]
                dkv[..., block.columns, :] += torch.stack(parts[1:])
            if step == 0:
                own_dkv = dkv  # of this rank's own keys: they stay at home
            else:
                if returning:
                    dkv += returning()
                returning = ring.pass_on(dkv)  # follows its keys round the ring
            kv = kv if last else wait()
        if returning:
            own_dkv += returning()  # what all other ranks added: its last hop is home
        return dq.to(q.dtype), *own_dkv.to(k.dtype), None


def ring_attention(q, k, v, ring):
    """Replace causal_attention. Shapes: (B, heads, T/N, head_dim); k and v with their own heads."""
    return RingAttention.apply(q, k, v, ring)


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add, positive = parser.add_argument, cli.positive_int
    add("--seq-len", type=positive, default=256, help="tokens per sequence, over all ranks (256)")
    parts = "sequences, of which each rank has a part (2)"
    add("--batch-size", type=positive, default=2, help=parts)
    add("--layout", choices=("both", *LAYOUTS), default="both", help="of tokens on ranks (both)")
    add("--memory-tokens", type=positive, default=256, help="per rank, to measure memory (256)")
    return parser.parse_args()


def refuse_uneven(args, layouts, ranks):
    """Refuse sequences that cannot be cut. Raises: UsageError."""
    for layout in reversed(layouts):  # zig-zag, which needs more, first
        chunks, why = LAYOUTS[layout], f"{layout} on {ranks} ranks"
        context_job.refuse_uneven("--seq-len", args.seq_len, ranks * chunks, why)
        context_job.refuse_uneven("--memory-tokens", args.memory_tokens, chunks, layout)


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("05-advanced/ring_attention.py", args, world, device)
        layouts = list(LAYOUTS) if args.layout == "both" else [args.layout]
        refuse_uneven(args, layouts, world.world_size)
        model = context_job.build(args.seed, args.seq_len, device)
        config = model.config
        batch = context_job.batch_of(args.seq_len, args.batch_size, device)
        tokens = args.seq_len // world.world_size
        report.start(f"{args.seq_len} tokens per sequence, {tokens} per rank")

        records = {}
        expected = part.ring_bytes(config, args.batch_size * args.seq_len, world.world_size)
        for layout in layouts:
            ring = Ring(layout)
            attend = partial(ring_attention, ring=ring)
            positions = ring.positions(args.seq_len, device)
            with part.Hops() as hops:
                counted = context_job.check_transformer(
                    report, layout, model, attend, positions, batch
                )
            one_layer = ring.record[: len(ring.record) // config.num_layers]
            records[layout] = runtime.gather(one_layer)
            source = "hops of k, v, dk, dv"
            context_job.check_bytes(report, layout, counted, config.num_layers, expected, source)
            part.check_hops(report, layout, ring, hops, tokens, config.num_layers)
        part.check_balance(report, records, args.seq_len)

        ring_of = partial(Ring, layouts[-1])
        part.measure_memory(report, ring_of, lambda ring: partial(ring_attention, ring=ring))
        if report.output and world.is_rank0:
            part.draw(report.output / "ring_attention_blocks.png", records)
        return report.finish("full attention, and no rank held all keys")


if __name__ == "__main__":
    cli.run(main)
