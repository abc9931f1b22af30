"""Task `loss` of lab 7: cross-entropy over a vocabulary that n ranks divide."""

import torch
import torch.nn.functional as F
from tensor_model import BATCH, conjugates, tokens_of

from lab_parts.judging import judge_each_rank, named, same
from lab_parts.running import Setting


def logits_of(setting: Setting) -> torch.Tensor:
    """Return logits so large that exp overflows. Shape: (B, T, V)."""
    n = setting.world_size
    return 120 + 8 * torch.randn(BATCH, 4 * n, 6 * n, generator=setting.generator())


def see_loss(answer, setting):
    conjugates(answer)
    logits = logits_of(setting).chunk(setting.world_size, dim=-1)[setting.rank].clone()
    logits.requires_grad_()
    loss = answer.vocabulary_parallel_loss(logits, tokens_of(setting)[1])
    loss.backward()
    gradient = logits.grad
    return {
        "loss": loss.item(),
        "grad": None if gradient is None else gradient.flatten().tolist(),
    }


@judge_each_rank
def judge_loss(got, rank, setting):
    logits, targets = logits_of(setting).requires_grad_(), tokens_of(setting)[1]
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    expected.backward()
    n, loss = setting.world_size, got["loss"]
    if loss == float("-inf"):
        yield (
            "the loss is -inf: all exp are 0: more than the largest logit is taken off"
        )
    elif not abs(loss) < 1e30:
        yield f"the loss is {loss}: exp overflows: take the largest logit off first"
    elif not same(loss, expected.item()):
        mistakes = wrong_losses(logits.detach(), targets, rank, n)
        yield named(loss, expected.item(), mistakes)
    elif got["grad"] is None:
        yield "the loss is right but has no gradient: detach() loses it"
    else:
        gradient = logits.grad.chunk(n, -1)[rank].flatten()
        mistakes = {
            f"{n} times too large: f sums it again: take g": (n * gradient).tolist(),
            f"{n} times too small": (gradient / n).tolist(),
        }
        if not same(got["grad"], gradient.tolist()):
            words = named(got["grad"], gradient.tolist(), mistakes)
            yield (
                f"the loss is right, its gradient is not: {words}; detach() loses a "
                "gradient, f sums it, g passes it on"
            )


def wrong_losses(
    whole: torch.Tensor, targets: torch.Tensor, rank: int, n: int
) -> dict[str, float]:
    """Return the losses of mistakes. Shapes: logits (B, T, V), targets (B, T)."""
    parts = whole.chunk(n, -1)
    words = whole.shape[-1] // n
    largest, log_sum = whole.amax(-1), whole.logsumexp(-1)
    target = whole.gather(-1, targets[..., None])[..., 0]
    is_local = (targets // words) == rank

    def pick(r: int) -> torch.Tensor:
        """Return the logits in rank r's rows nearest to the targets."""
        rows = (targets - r * words).clamp(0, words - 1)
        return parts[r].gather(-1, rows[..., None])[..., 0]

    expected = (log_sum - target).mean()
    unmasked = sum(pick(r) - largest for r in range(n))
    shifted = torch.cat([part - part.amax(-1, keepdim=True) for part in parts], -1)
    sum_of_logs = sum(part.logsumexp(-1) - largest for part in parts)
    losses = {
        "exp of this rank's words alone is added up": (
            parts[rank].logsumexp(-1) - target
        ),
        "targets that another rank has count too: only those in this rank's rows": (
            log_sum - largest - unmasked
        ),
        "a sum over tokens, not their mean": expected * targets.numel(),
        "each rank takes its own largest logit off: take the largest of all ranks": (
            F.cross_entropy(shifted.flatten(0, 1), targets.flatten())
        ),
        "the largest is taken off the sum's logits, and not off the target's": (
            expected - largest.mean()
        ),
        "log of each rank's sum, then added: add up first, then log": (
            sum_of_logs - target + largest
        ),
        f"{n} times too large: a sum over the ranks of the same loss": n * expected,
        f"{n} times too small: every rank has the whole loss already": expected / n,
        "the sign: it is log(sum) - target": -expected,
        "the log of the sum is missing": (log_sum - largest).exp() - target + largest,
        "the target's logit is missing": log_sum - largest,
        "the mean over this rank's targets only": (
            ((log_sum - target) * is_local).sum() / is_local.sum().clamp(min=1)
        ),
        "this rank's targets alone: the others' logits never came": (
            log_sum - largest - (pick(rank) - largest) * is_local
        ),
    }
    return {words: loss.mean().item() for words, loss in losses.items()}
