"""Attention of one block with its log-sum-exp, and its backward: the kernels beneath SDPA.

F.scaled_dot_product_attention computes the log-sum-exp but keeps it to itself. The functions that
it calls return it; PyTorch's own context_parallel calls them too.
"""

import torch
import torch.nn.functional as F

aten = torch.ops.aten
ALIGNMENT = 32  # the CUDA kernel rounds the length of its log-sum-exp up to a multiple


def attend_block(q, k, v, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention to one block of keys, and each query's log-sum-exp over this block.

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
