"""Compute attention over a sequence of which every process has a part: gather keys and values.

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
gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])  # one for each rank here
device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo")

torch.manual_seed(0)
tokens, width = 24, 16  # of the whole sequence; of a query, a key, a value
whole = torch.randn(3, tokens, width).to(device).requires_grad_()  # queries, keys, values
here = slice(rank * tokens // world_size, (rank + 1) * tokens // world_size)  # our tokens


class Gather(torch.autograd.Function):
    """All-gather; `dist.all_gather` alone has no gradient."""

    @staticmethod
    def forward(ctx, rows):
        parts = [torch.empty_like(rows) for _ in range(world_size)]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)  # (tokens, width), in the order of the ranks

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone(memory_format=torch.contiguous_format)  # NCCL asks for that
        dist.all_reduce(gradient)  # every process's queries have looked at our keys
        return gradient[here]


part = whole.detach()[:, here].clone().requires_grad_()  # all that this process has
query, key, value = part

keys = Gather.apply(key)
values = Gather.apply(value)

place = torch.arange(tokens, device=device)
visible = place[here, None] >= place  # a token sees itself and those before it
output = F.scaled_dot_product_attention(query[None], keys[None], values[None], visible)[0]
output.sum().backward()

expected = F.scaled_dot_product_attention(*whole[:, None], is_causal=True)[0]  # one process
expected.sum().backward()

error = (output - expected[here]).abs().max().item()
gradient_error = (part.grad - whole.grad[:, here]).abs().max().item()
line = f"rank {rank}, tokens {here.start} to {here.stop - 1}: "
line += f"error {error:.0e}, of the gradient {gradient_error:.0e}\n"
print(line, end="")  # in one piece: the processes share a terminal
dist.destroy_process_group()
