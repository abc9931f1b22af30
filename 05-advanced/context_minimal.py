"""Divide a sequence over processes: each attends from its tokens to all tokens.

    CPU   torchrun --standalone --nproc-per-node=2 05-advanced/context_minimal.py
    GPU   torchrun --standalone --nproc-per-node=gpu 05-advanced/context_minimal.py

Look for: the error against one process, in the output and in the gradient.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

rank = int(os.environ["RANK"])
local_rank = int(os.environ["LOCAL_RANK"])
world_size = int(os.environ["WORLD_SIZE"])
gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])  # one each
device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo")

torch.manual_seed(0)
tokens, width = 24, 16  # tokens of the sequence; numbers in a query, key or value
whole = torch.randn(3, tokens, width).to(device).requires_grad_()  # q, k, v
start, stop = rank * tokens // world_size, (rank + 1) * tokens // world_size
mine = slice(start, stop)  # the tokens of this process


class Gather(torch.autograd.Function):
    """All-gather with a gradient; `dist.all_gather` alone has none."""

    @staticmethod
    def forward(ctx, rows):
        parts = [torch.empty_like(rows) for _ in range(world_size)]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)  # (tokens, width), in the order of the ranks

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone(memory_format=torch.contiguous_format)  # for NCCL
        dist.all_reduce(gradient)  # the queries of all processes met these keys
        return gradient[mine]


part = whole.detach()[:, mine].clone().requires_grad_()  # all that this process needs
query, key, value = part

keys = Gather.apply(key)
values = Gather.apply(value)

place = torch.arange(tokens, device=device)
visible = place[mine, None] >= place  # a token sees itself and earlier tokens
output = F.scaled_dot_product_attention(query[None], keys[None], values[None], visible)
output.sum().backward()

# One process with the whole sequence:
expected = F.scaled_dot_product_attention(*whole[:, None], is_causal=True)
expected.sum().backward()

error = (output - expected[:, mine]).abs().max().item()
gradient_error = (part.grad - whole.grad[:, mine]).abs().max().item()
line = f"rank {rank}, tokens {start} to {stop - 1}: "
line += f"error {error:.0e}, of the gradient {gradient_error:.0e}\n"
print(line, end="")  # in one piece: the processes share a terminal
dist.destroy_process_group()
