"""Task `clip` of lab 4, and the small model that the tasks `optimizer` and `step` train
too.
"""

import torch
from torch import nn

from dist_common.runtime import gather
from lab_parts.judging import named, same
from lab_parts.running import OTHER_FORM, Setting

NORM = 0.05  # to clip to: smaller than the norm of any gradient here
LARGER = 10  # makes the norm of the gradient in `clip` more than 1


def model_of(setting: Setting) -> nn.Module:
    torch.manual_seed(setting.seed)
    width = 6 + setting.draw(5)[0]
    return nn.Sequential(
        nn.Linear(4, width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, 2),
    )


def loss_of(model: nn.Module, setting: Setting, rank: int, step: int) -> torch.Tensor:
    torch.manual_seed(setting.seed + 100 * (step + 1) + rank)
    return model(torch.randn(5, 4).to(model[0].weight.dtype)).square().mean()


def make_adam(parameters):
    return torch.optim.Adam(parameters, lr=0.05)


def zero_of(answer, setting, stage, make=make_adam, dtype=torch.float32):
    model = model_of(setting)
    options = {"dtype": dtype, "bucket_bytes": 200}
    return model, answer.Zero(model.parameters(), make, stage, **options)


def see_clip(answer, setting):
    """Clip to a small norm, to one between the ranks' own norms, and to a large one."""
    model, zero = zero_of(answer, setting, 2)
    loss_of(model, setting, setting.rank, 0).backward()
    first = [LARGER * bucket.gradient for bucket in zero.buckets]
    squares = [gradient.square().sum().item() for gradient in first]
    norms = gather(sum(squares) ** 0.5)
    ends = []
    for bound in (NORM, (min(norms) + max(norms)) / 2, 1e6):
        for bucket, gradient in zip(zero.buckets, first, strict=True):
            bucket.gradient = gradient.clone()
            bucket.part.grad = gradient.clone()
        norm = zero.clip(bound)
        pairs = zip(zero.buckets, first, strict=True)
        factors = [
            (bucket.part.grad.norm() / gradient.norm()).item()
            for bucket, gradient in pairs
            if gradient.norm()
        ]
        norm = None if norm is None else float(norm)
        ends.append({"bound": bound, "norm": norm, "factors": factors})
    return {"squares": squares, "ends": ends}


def judge_clip(seen, setting):
    n, model = setting.world_size, model_of(setting)
    sum(loss_of(model, setting, rank, 0) / n for rank in range(n)).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
    expected *= LARGER
    norms = [sum(got["squares"]) ** 0.5 for got in seen]
    last = sum(got["squares"][-1] for got in seen) ** 0.5
    for rank, got in enumerate(seen):
        where, ends = f"rank {rank}: ", got["ends"]
        if [bool(end["factors"]) for end in ends] != [True] * 3:
            yield OTHER_FORM
            return
        mistakes = {
            "the norm of this rank's parts: add up the squares over ranks": norms[rank],
            "the sum of the ranks' norms: add up squares, not norms": sum(norms),
            "the square of the norm: take the root": expected**2,
            "a norm divided by the ranks": expected / n,
            "the squares are averaged over the ranks: add them up": expected / n**0.5,
            "the norm of the last bucket: one norm for all buckets": last,
        }
        for end in ends:
            if end["norm"] is None:
                yield f"{where}clip returns nothing: return the norm"
            elif same(end["norm"], end["bound"]):
                yield f"{where}the norm after clipping: return the one before"
            elif not same(end["norm"], expected):
                yield where + named(end["norm"], expected, mistakes)
        # A factor that fits a wrong norm is not a second mistake.
        fault = explain_factors(ends, [expected] * 3)
        other = explain_factors(ends, [end["norm"] or 1.0 for end in ends])
        if fault and other:
            yield where + (other if other in FACTORS else fault)


FACTORS = {
    None: lambda bound, norm: min(1, bound / norm),
    "a smaller gradient is scaled up: scale down only": lambda bound, norm: (
        bound / norm
    ),
    "gradients are not scaled: scale part.grad, which the optimizer reads": (
        lambda bound, norm: 1
    ),
    "the factor is 1 / norm: it is max_grad_norm / norm": lambda bound, norm: 1 / norm,
    "the factor is norm / max_grad_norm: it is the inverse": lambda bound, norm: (
        norm / bound
    ),
    "the factor is norm / max_grad_norm, at most 1: it is the inverse": (
        lambda bound, norm: min(1, norm / bound)
    ),
    "the factor is max_grad_norm: divide it by the norm": lambda bound, norm: bound,
}


def explain_factors(ends: list[dict], norms: list[float]) -> str | None:
    """Say what is wrong with the factors of the gradients; None if they are right."""
    scaled = [
        (factor, end["bound"], norm)
        for end, norm in zip(ends, norms, strict=True)
        for factor in end["factors"]
    ]
    for words, factor_of in FACTORS.items():
        if all(abs(f / factor_of(bound, norm) - 1) < 1e-3 for f, bound, norm in scaled):
            return words
    for factor, bound, norm in scaled:
        expected = FACTORS[None](bound, norm)
        if abs(factor / expected - 1) >= 1e-3:
            return (
                f"norm {norm:.3g}, max_grad_norm {bound:.3g}: a gradient is scaled by "
                f"{factor:.3g}, expected {expected:.3g}, the same on all ranks"
            )
    return None
