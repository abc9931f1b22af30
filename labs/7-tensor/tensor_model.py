"""The small model of lab 7, its tokens, and its conjugate functions."""

import torch
from torch import nn

from dist_common.model import Config, Transformer
from lab_parts.running import Setting

BATCH, HEAD_DIM = 2, 4


def conjugates(answer) -> None:
    """Make f and g again with the answer's `conjugate`."""
    answer.f = answer.conjugate(answer.identity, answer.all_reduce)
    answer.g = answer.conjugate(answer.all_reduce, answer.identity)
    answer.f_tokens = answer.conjugate(answer.gather_tokens, answer.scatter_tokens)
    answer.g_tokens = answer.conjugate(answer.scatter_tokens, answer.gather_tokens)


def whole_model(setting: Setting) -> Transformer:
    """Return a small model whose heads, columns and words the ranks divide."""
    n, times = setting.world_size, setting.draw(3)[0]
    config = Config(
        6 * n, HEAD_DIM * 2 * n, 2, 2 * n, n, 4 * n * times, max_seq_len=4 * n
    )
    torch.manual_seed(setting.seed)
    model = Transformer(config)
    # At first norms are 1 and blocks add little, which would hide mistakes.
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.5)
    return model.double()  # or sums in another order would differ


def tokens_of(setting: Setting) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets, the same on all ranks. Shapes: (B, T)."""
    generator, n = setting.generator(), setting.world_size
    drawn = torch.randint(6 * n, (BATCH, 4 * n + 1), generator=generator)
    return drawn[:, :-1], drawn[:, 1:]
