"""PyTorch alone behind the three calls of a DeepSpeed engine: one process, and FSDP."""

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class OneProcess:
    """A plain model and AdamW; `step` updates after every `accumulate`-th micro-batch."""

    def __init__(self, model: nn.Module, lr: float, accumulate: int) -> None:
        self.model, self.accumulate, self.calls = model, accumulate, 0
        self.optimizer = torch.optim.AdamW(model.parameters(), lr, (0.9, 0.95), weight_decay=0.1)

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens)

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self.accumulate).backward()

    def step(self) -> None:
        self.calls += 1
        if self.calls % self.accumulate == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()


def shard_with_fsdp(model: nn.Module, lr: float, accumulate: int, bf16: bool) -> OneProcess:
    """Shard a Transformer fully: float32 weights, cast where they are used, reduced in float32."""
    policy = MixedPrecisionPolicy()
    if bf16:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for module in (*model.blocks, model):
        # The root too, which would otherwise stay whole from forward to backward.
        fully_shard(module, mp_policy=policy, reshard_after_forward=True)
    return OneProcess(model, lr, accumulate)
