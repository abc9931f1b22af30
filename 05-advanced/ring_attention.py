"""Ring attention: each rank has a part of the sequence; keys travel past all ranks.

    CPU   torchrun --standalone --nproc-per-node=4 05-advanced/ring_attention.py
    GPU   the same, with one GPU per rank

Look for: the loss and the gradient of one process; equal work per rank in the zigzag
layout; the bytes that a rank sends and the bytes that it keeps for backward.

Sources: Liu et al., Ring Attention with Blockwise Transformers (2023); Milakov and
Gimelshein, Online normalizer calculation for softmax (2018); Dao et al.,
FlashAttention (NeurIPS 2022), appendix B.2, for backward.
"""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

from dist_common import check, cli, data, runtime
from dist_common.model import PRESETS, build_transformer
from dist_common.report import Report

CONFIG = PRESETS["tiny"]
BATCH_SIZE = 2  # B, sequences
SEQ_LEN = 240  # T, tokens
LAYOUTS = {"contiguous": 1, "zigzag": 2}  # chunks of the sequence per rank
FLOAT32 = 4  # bytes of a number
TOLERANCE = 1e-5  # float32 sums in another order differ in the last bits

# Attention to one block of keys


def attend_block(q, k, v, is_diagonal):
    """Return attention to one block of keys, and the log-sum-exp of its scores.

    H is the number of query heads, d the width of a head. Shapes: q (B, H, Tq, d),
    k and v (B, H, Tk, d) -> (B, H, Tq, d) and (B, H, Tq, 1).
    """
    scores = masked_scores(q, k, is_diagonal)
    lse = scores.logsumexp(-1, keepdim=True)
    return (scores - lse).exp() @ v, lse


def masked_scores(q, k, is_diagonal):
    """Return the products of queries and keys. Shape: (B, H, Tq, Tk).

    On the diagonal, queries and keys are the same tokens: later keys are hidden.
    """
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if is_diagonal:
        scores += torch.full_like(scores, -torch.inf).triu(1)
    return scores


def merge(out, lse, block_out, block_lse):
    """Add attention to one more block, in place: the online softmax."""
    total = torch.logaddexp(lse, block_lse)
    out.mul_((lse - total).exp())  # out was divided by exp(lse), not by exp(total)
    out.add_(block_out * (block_lse - total).exp())
    lse.copy_(total)


def attend_block_backward(q, lse, delta, grad_out, k, v, is_diagonal):
    """Return what one block adds to the gradients of q, and of k and v, stacked.

    lse is the log-sum-exp over all keys, delta the sum of grad_out * out over d.
    Shapes: lse and delta (B, H, Tq, 1), the others as in attend_block.
    """
    weights = (masked_scores(q, k, is_diagonal) - lse).exp()  # of the whole softmax
    grad_weights = grad_out @ v.transpose(-2, -1)
    grad_scores = weights * (grad_weights - delta) / math.sqrt(q.shape[-1])
    dk = grad_scores.transpose(-2, -1) @ q
    dv = weights.transpose(-2, -1) @ grad_out
    return grad_scores @ k, torch.stack((dk, dv))


# The ring


class Ring:
    """A rank's place in the ring: which chunks it has, and which blocks it computes.

    In step s, a rank has the keys of rank - s.
    """

    def __init__(self, layout, rank, size):
        self.layout = layout
        self.rank = rank
        self.size = size  # n

    def chunks(self, step=0):
        """Return the numbers of the chunks that visit this rank in a step."""
        owner = (self.rank - step) % self.size
        if self.layout == "zigzag":  # an early chunk and a late one
            return [owner, 2 * self.size - 1 - owner]
        return [owner]

    def blocks(self, step):
        """Return the blocks to compute in a step, as (query chunk, key chunk)."""
        return [(q, k) for q in self.chunks() for k in self.chunks(step) if k <= q]

    def positions(self, device):
        """Return the places of this rank's tokens in the sequence. Shape: (T/n,)."""
        places = torch.arange(SEQ_LEN, device=device)
        chunks = places.chunk(self.size * LAYOUTS[self.layout])
        return torch.cat([chunks[number] for number in self.chunks()])

    def split(self, x, step=0):
        """Return views of a step's chunks by number. Shapes: (..., T/n, d)."""
        numbers = self.chunks(step)
        return dict(zip(numbers, x.chunk(len(numbers), dim=-2), strict=True))

    def pass_on(self, x):
        """Start to send to the next rank; return what arrives, and the requests."""
        arriving = torch.empty_like(x)
        send = dist.P2POp(dist.isend, x, (self.rank + 1) % self.size)
        receive = dist.P2POp(dist.irecv, arriving, (self.rank - 1) % self.size)
        return arriving, dist.batch_isend_irecv([send, receive])

    def attend(self, q, k, v):
        """Shapes: q (B, H, T/n, d), k and v with fewer heads -> (B, H, T/n, d)."""
        return RingAttention.apply(q, k, v, self)

    def visits(self, kv):
        """Yield each step and its keys and values, while the next ones travel."""
        for step in range(self.size - 1):
            arriving, requests = self.pass_on(kv)
            yield step, kv
            wait_for(requests)
            kv = arriving
        yield self.size - 1, kv


def wait_for(requests):
    for request in requests:
        request.wait()


def repeat_heads(kv, q):
    """Copy heads, one for each query head. Shape: kv (2, B, kv heads, T/n, d)."""
    return kv.repeat_interleave(q.shape[1] // kv.shape[2], dim=2)


class RingAttention(torch.autograd.Function):
    """Causal attention to the whole sequence; each rank has its own tokens' q, k, v."""

    @staticmethod
    def forward(ctx, q, k, v, ring):
        out = torch.zeros_like(q)
        lse = torch.full_like(q[..., :1], -torch.inf)
        queries, outs, lses = ring.split(q), ring.split(out), ring.split(lse)
        for step, kv in ring.visits(torch.stack((k, v))):  # k and v are one message
            visiting = ring.split(repeat_heads(kv, q), step)
            for query, key in ring.blocks(step):
                block = attend_block(queries[query], *visiting[key], query == key)
                merge(outs[query], lses[query], *block)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, lse)  # of this rank's tokens only
        return out

    @staticmethod
    def backward(ctx, grad_out):
        q, k, v, out, lse = ctx.saved_tensors
        ring = ctx.ring
        delta = (grad_out * out).sum(-1, keepdim=True)
        dq = torch.zeros_like(q)
        dqs = ring.split(dq)
        rows = [ring.split(x) for x in (q, lse, delta, grad_out)]
        home_kv = torch.stack((k, v))
        dkv, requests = torch.zeros_like(home_kv), []  # a sum that follows its keys
        for step, kv in ring.visits(home_kv):
            repeated = repeat_heads(kv, q)
            added = torch.zeros_like(repeated)
            visiting, dkvs = ring.split(repeated, step), ring.split(added, step)
            for query, key in ring.blocks(step):
                row = [x[query] for x in rows]
                grads = attend_block_backward(*row, *visiting[key], query == key)
                dqs[query] += grads[0]
                dkvs[key] += grads[1]
            added = added.unflatten(2, (kv.shape[2], -1)).sum(dim=3)  # over the copies
            if step == 0:
                home_dkv = added  # of this rank's keys: it need not travel
            else:
                wait_for(requests)
                dkv, requests = ring.pass_on(dkv + added)
        wait_for(requests)  # the other ranks' sum is back at the keys' owner
        return dq, *(home_dkv + dkv), None


# One step of training on a divided sequence, which ulysses.py uses as well


def load_batch(device):
    """Return inputs and targets, the same on all ranks. Shapes: (B, T) each."""
    text = torch.tensor(data.load_text()[: BATCH_SIZE * SEQ_LEN + 1], device=device)
    shape = (BATCH_SIZE, SEQ_LEN)
    return text[:-1].long().view(shape), text[1:].long().view(shape)


def share_of_loss(model, batch, positions):
    """Return the loss of this rank's tokens, divided by the tokens of all ranks."""
    inputs, targets = (x[:, positions] for x in batch)
    model.positions = positions  # the rotation depends on the place in the sequence
    logits = model(inputs)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return loss / batch[1].numel()


def sum_gradients(model):
    """Sum over ranks: each rank's gradient comes from its own tokens."""
    for weight in model.parameters():
        dist.all_reduce(weight.grad)


def check_step(report, name, attend, positions):
    """Compare a step with one process: its loss and its gradient.

    Returns: the bytes that this rank sends per layer, without the sum of gradients.
    """
    seed, device = report.args.seed, report.run.device
    batch = load_batch(device)
    alone = build_transformer(CONFIG, seed, device)
    expected = share_of_loss(alone, batch, torch.arange(SEQ_LEN, device=device))
    expected.backward()

    model = build_transformer(CONFIG, seed, device)
    for block in model.blocks:
        block.attention.attend = attend
    with check.CollectiveCounter() as counter:
        loss = share_of_loss(model, batch, positions)
        loss.backward()
    sum_gradients(model)

    error = abs(sum(runtime.gather(loss.item())) / expected.item() - 1)
    report.check(f"{name}: relative error of the loss", error, 0, TOLERANCE)
    grads = [dict(enumerate(w.grad for w in m.parameters())) for m in (model, alone)]
    error = check.relative_error(*grads)
    report.check(f"{name}: relative error of the gradient", error, 0, TOLERANCE)
    return int(counter.bytes_sent.total()) // CONFIG.num_layers


# Costs


def ring_bytes(config, num_tokens, size, width):
    """Return the bytes that a rank sends per layer in forward, for k and v.

    Backward sends twice as many: k and v again, and their gradients. num_tokens counts
    the tokens of all ranks; width is the bytes of a number.
    """
    kv_dim = config.num_kv_heads * config.dim // config.num_heads
    return (size - 1) * 2 * num_tokens // size * kv_dim * width


def count_pairs(ring):
    """Return the pairs of a query and a visible key that a rank computes."""
    length = SEQ_LEN // ring.size // LAYOUTS[ring.layout]
    triangle = length * (length + 1) // 2  # visible in a block of the diagonal
    blocks = [block for step in range(ring.size) for block in ring.blocks(step)]
    return sum(triangle if query == key else length**2 for query, key in blocks)


def main():
    args = cli.ArgumentParser(__doc__).parse_args()
    with runtime.init(args.device, args.timeout) as run:
        size = run.world_size
        if SEQ_LEN % (2 * size):
            raise cli.UsageError(f"{size} ranks: start 1, 2, 3, 4, 5, 6 or 8")
        report = Report("05-advanced/ring_attention.py", args, run)
        rows = []
        for layout in LAYOUTS:
            ring = Ring(layout, run.rank, size)
            sent = check_step(report, layout, ring.attend, ring.positions(run.device))
            pairs = [count_pairs(Ring(layout, rank, size)) for rank in range(size)]
            busy = sum(pairs) / size / max(pairs)
            rows.append((layout, f"{max(pairs):,}", f"{busy:.0%}", f"{sent:,}"))
        headers = ("layout", "pairs, busiest rank", "ranks busy", "bytes per layer")
        report.table(rows, headers)
        expected = SEQ_LEN * (SEQ_LEN + 1) // 2 // size
        report.check("zigzag: pairs of the busiest rank", max(pairs), expected, 0)
        expected = 3 * ring_bytes(CONFIG, BATCH_SIZE * SEQ_LEN, size, FLOAT32)
        report.check("zigzag: bytes sent per layer", sent, expected, 0)
        return report.finish("attention to the whole sequence on divided tokens")


if __name__ == "__main__":
    cli.run(main)
