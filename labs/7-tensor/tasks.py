"""Lab 7, tensor parallelism: how an answer is looked at, and which mistake a wrong one
shows.
"""

import itertools
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dist_common.check import CollectiveCounter
from dist_common.model import Config, Transformer, rotary_tables
from lab_parts.judging import Question, named, numbers, same
from lab_parts.running import Setting, Task

LESSONS = {
    "05-advanced/tensor_parallel.py": (
        "identity",
        "all_reduce",
        "gather_tokens",
        "scatter_tokens",
        "conjugate",
        "f",
        "g",
        "f_tokens",
        "g_tokens",
        "keep_part",
        "ParallelBlock",
        "ParallelTransformer",
        "find_rows",
        "vocabulary_parallel_loss",
    ),
}
BATCH, HEAD_DIM = 2, 4


def conjugates(answer) -> None:
    """Make f and g anew, of what `conjugate` is now."""
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
    for weight in (
        model.parameters()
    ):  # as it starts, norms are 1, and what a block adds is small
        nn.init.normal_(weight, std=0.5)
    return model.double()  # or sums in another order would differ


def tokens_of(setting: Setting) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets, the same on all ranks. Shapes: (B, T)."""
    generator, n = setting.generator(), setting.world_size
    drawn = torch.randint(6 * n, (BATCH, 4 * n + 1), generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


# cut: this rank's rows or columns, next to each other


def see_cut(answer, setting):
    ends = {}
    for dim in (0, 1):
        layer = nn.Linear(4 * setting.world_size, 6 * setting.world_size, bias=False)
        layer.weight.data = torch.arange(float(layer.weight.numel())).view_as(
            layer.weight
        )
        kept = answer.keep_part(layer, dim)
        weight = layer.weight
        ends[f"dim {dim}"] = {
            "shape": list(weight.shape),
            "values": weight.flatten().tolist(),
            "alone": weight.untyped_storage().nbytes() == weight.nbytes,
            "layer": kept is layer,
            "trained": isinstance(weight, nn.Parameter) and weight.requires_grad,
        }
    return ends


def judge_cut(seen, setting):
    n = setting.world_size
    whole = torch.arange(24.0 * n * n).view(6 * n, 4 * n)
    for rank, own in enumerate(seen):
        for dim in (0, 1):
            got, where = own[f"dim {dim}"], f"dim {dim}, rank {rank}: "
            right = whole.chunk(n, dim)[rank]
            strided = whole[rank::n] if dim == 0 else whole[:, rank::n]
            mistakes = {
                "every n-th row or column: that splits inside heads, whose dims "
                "belong together": (strided.flatten().tolist()),
                "the other dimension is cut": whole.chunk(n, 1 - dim)[rank]
                .flatten()
                .tolist(),
            }
            for other in range(n):
                mistakes[f"the part of rank {other}"] = (
                    whole.chunk(n, dim)[other].flatten().tolist()
                )
            if not got["layer"]:
                return (
                    f"{where}return the layer: a block is made of what keep_part "
                    "returns"
                )
            if got["shape"] == list(whole.shape):
                return f"{where}the whole weight is kept: shape {got['shape']}"
            if not same(got["values"], right.flatten().tolist()):
                return where + named(got["values"], right.flatten().tolist(), mistakes)
            if got["shape"] != list(right.shape):
                return (
                    f"{where}the part has shape {got['shape']}, expected "
                    f"{list(right.shape)}"
                )
            if not got["trained"]:
                return (
                    f"{where}the part is not an nn.Parameter that requires a gradient: "
                    "the optimizer would not train it"
                )
            if not got["alone"]:
                return (
                    f"{where}the part is a view: the whole weight stays in memory "
                    "behind it"
                )
    return None


# conjugate: one function forward, the other one backward


def see_conjugate(answer, setting):
    conjugates(answer)
    ends = {}
    for name in ("f", "g"):
        x = torch.arange(3.0) + 10 * setting.rank
        x.requires_grad_()
        out = getattr(answer, name)(x)
        out.backward(torch.ones(3) * (1 + setting.rank))
        ends[name] = {
            "out": out.tolist(),
            "grad": None if x.grad is None else x.grad.tolist(),
        }
    return ends


def judge_conjugate(seen, setting):
    n = setting.world_size
    inputs = [torch.arange(3.0) + 10 * rank for rank in range(n)]
    total, both = sum(inputs).tolist(), float(n * (n + 1) // 2)
    for rank, own in enumerate(seen):
        own_x, own_gradient = inputs[rank].tolist(), [1.0 + rank] * 3
        for name, out, gradient in (
            ("f", own_x, [both] * 3),
            ("g", total, own_gradient),
        ):
            where, got = f"rank {rank}: {name}", own[name]
            if not same(got["out"], out):
                mistakes = {
                    "forward returns x itself: return in_forward(x)": own_x,
                    "the backward function runs in forward": total,
                    "a sum of sums: it is reduced twice": [n * v for v in total],
                }
                return f"{where} in forward: {named(got['out'], out, mistakes)}"
            if got["grad"] is None:
                return f"{where} passes no gradient on"
            mistakes = {
                "does nothing in backward: the ranks' parts of the gradient are not "
                "added up": own_gradient if name == "f" else [],
                "reduces twice: each rank has the whole gradient already": [both] * 3,
                "averaged: the ranks' parts of the gradient are summed": [both / n] * 3,
            }
            if not same(got["grad"], gradient):
                return f"{where} in backward: {named(got['grad'], gradient, mistakes)}"
    return None


# block: f before, g after each pair of matrices


def see_block(answer, setting):
    conjugates(answer)
    whole, calls = whole_model(setting), []

    def counted(name, function):
        def call(x):
            calls.append(name)
            return function(x)

        return call

    given = [counted(name, getattr(answer, name)) for name in ("f", "g")]
    for name in ("f", "g"):  # those of the module, which a block must not call
        setattr(answer, name, counted(f"the module's {name}", getattr(answer, name)))
    block = answer.ParallelBlock(whole.blocks[0], *given)
    x, tables = block_input(setting)
    out = block(x, *tables)
    out.square().sum().backward()
    return {
        "out": out.flatten().tolist(),
        "grad": x.grad.flatten().tolist(),
        "calls": calls,
        "norm": block.attention_norm.weight.grad.tolist(),
    }


def block_input(setting: Setting) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    n, generator = setting.world_size, setting.generator()
    x = (
        torch.randn(BATCH, 4, HEAD_DIM * 2 * n, generator=generator)
        .double()
        .requires_grad_()
    )
    return x, rotary_tables(torch.arange(4), HEAD_DIM, 10_000.0)


def wrong_residuals(block, x, tables, ranks: int) -> dict[str, list[float]]:
    """Return a block's output where x is added 0 times or by each rank, to one layer or
    to both.
    """
    mistakes = {}
    for first, second in itertools.product((0, 1, ranks), repeat=2):
        middle = first * x + block.attention(block.attention_norm(x), *tables)
        h = block.ffn_norm(middle)
        out = second * middle + block.down(F.silu(block.gate(h)) * block.up(h))
        added = (
            f"x is added {first}x after attention and {second}x after the feed-forward"
        )
        mistakes[f"{added}: once each, outside g"] = out.flatten().tolist()
    return mistakes


def judge_block(seen, setting):
    block, (x, tables) = whole_model(setting).blocks[0], block_input(setting)
    right = block(x, *tables)
    right.square().sum().backward()
    for rank, own in enumerate(seen):
        where, calls = f"rank {rank}: ", own["calls"]
        if strange := [name for name in calls if name not in ("f", "g")]:
            return (
                f"{where}it calls {strange[0]} instead of self.{strange[0][-1]}: with "
                "sequence parallelism they differ"
            )
        for name, does in (
            ("g", "adds up what the second matrix's parts give"),
            ("f", "adds up their gradients, before the first matrix"),
        ):
            if (count := calls.count(name)) != 2:
                times = "time" if count == 1 else "times"
                return (
                    f"{where}{name} is called {count} {times} in a "
                    "block, 2 are "
                    f"needed, one for attention and one for the feed-forward: it {does}"
                )
        if calls != ["f", "g", "f", "g"]:
            order = ", ".join(calls)
            return (
                f"{where}called in the order {order}: f before, g after each pair of "
                "matrices"
            )
        if not same(own["out"], right.flatten().tolist()):
            mistakes = wrong_residuals(block, x, tables, setting.world_size)
            return (
                f"{where}the output: "
                f"{named(own['out'], right.flatten().tolist(), mistakes)}"
            )
        if not same(own["grad"], x.grad.flatten().tolist()):
            return (
                f"{where}the input's gradient is wrong: where f stands, its gradient "
                "is summed"
            )
        if not same(own["norm"], block.attention_norm.weight.grad.tolist()):
            return (
                f"{where}the norm's gradient is not whole: f takes what the norm "
                "returns"
            )
    return None


# norms: with sequence parallelism each rank's norms saw other tokens


def see_norms(answer, setting):
    conjugates(answer)
    model = answer.ParallelTransformer(
        whole_model(setting), answer.f_tokens, answer.g_tokens
    )
    inputs, targets = tokens_of(setting)
    answer.vocabulary_parallel_loss(model(inputs), targets).backward()
    before = numbers({name: w.grad.clone() for name, w in model.named_parameters()})
    with CollectiveCounter() as counter:
        model.sum_norm_gradients()
    after = numbers({name: w.grad for name, w in model.named_parameters()})
    return {"before": before, "after": after, "calls": sum(counter.calls.values())}


def judge_norms(seen, setting):
    n = setting.world_size
    norms = [
        name for name, w in whole_model(setting).named_parameters() if w.dim() == 1
    ]
    total = {
        name: torch.tensor([own["before"][name] for own in seen]).sum(0)
        for name in norms
    }
    for rank, own in enumerate(seen):
        where = f"rank {rank}: "
        got = {name: own["after"][name] for name in norms}
        mistakes = {
            "as they were: each rank's norms saw its own tokens alone": {
                name: own["before"][name] for name in norms
            },
            f"{n} times too small: the tokens' gradients are summed, not "
            "averaged": numbers({name: value / n for name, value in total.items()}),
        }
        right = numbers(total)
        if not same(got, right):
            return where + named(got, right, mistakes)
        for name in own["before"].keys() - set(norms):
            if not same(own["after"][name], own["before"][name]):
                return (
                    f"{where}the gradient of {name} has changed: f and g have it "
                    "right already"
                )
        if own["calls"] > 1:
            return (
                f"{where}{own['calls']} all-reduces of a few numbers: join them, and "
                "make one"
            )
    return None


# loss: cross-entropy over words of which each rank has V / n


def logits_of(setting: Setting) -> torch.Tensor:
    """Return logits of which exp overflows, (B, T, V)."""
    n = setting.world_size
    return 120 + 8 * torch.randn(BATCH, 4 * n, 6 * n, generator=setting.generator())


def see_loss(answer, setting):
    conjugates(answer)
    own = logits_of(setting).chunk(setting.world_size, dim=-1)[setting.rank].clone()
    own.requires_grad_()
    loss = answer.vocabulary_parallel_loss(own, tokens_of(setting)[1])
    loss.backward()
    return {
        "loss": loss.item(),
        "grad": None if own.grad is None else own.grad.flatten().tolist(),
    }


def judge_loss(seen, setting):
    logits, targets = logits_of(setting).requires_grad_(), tokens_of(setting)[1]
    right = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    right.backward()
    n, whole = setting.world_size, logits.detach()
    words = whole.shape[-1] // n
    for rank, own in enumerate(seen):
        where, part = f"rank {rank}: ", whole.chunk(n, -1)[rank]
        row = (targets - rank * words).clamp(0, words - 1)
        here = (targets // words) == rank
        picked = part.gather(-1, row[..., None])[..., 0]
        unmasked = sum(
            p.gather(-1, (targets - r * words).clamp(0, words - 1)[..., None])[..., 0]
            - whole.amax(-1)
            for r, p in enumerate(whole.chunk(n, -1))
        )
        log_sum, largest = whole.logsumexp(-1), whole.amax(-1)
        logs = [p.logsumexp(-1) for p in whole.chunk(n, -1)]
        own_off = torch.cat(
            [p - p.amax(-1, keepdim=True) for p in whole.chunk(n, -1)], -1
        )
        target = whole.gather(-1, targets[..., None])[..., 0]
        mistakes = {
            "exp of this rank's words alone is added up": (part.logsumexp(-1) - target)
            .mean()
            .item(),
            "targets that another rank has count too: only those in this rank's rows": (
                log_sum - largest - unmasked
            )
            .mean()
            .item(),
            "a sum over tokens, not their mean": right.item() * targets.numel(),
            "each rank takes its own largest logit off: take the largest of all "
            "ranks": (F.cross_entropy(own_off.flatten(0, 1), targets.flatten()).item()),
            "the largest is taken off the sum's logits, and not off the target's": (
                right - largest.mean()
            ).item(),
            "log of each rank's sum, then added: add up first, then log": (
                sum(log - largest for log in logs) - target + largest
            )
            .mean()
            .item(),
            f"{n} times too large: a sum over the ranks of the same loss": n
            * right.item(),
            f"{n} times too small: every rank has the whole loss already": right.item()
            / n,
            "the sign: it is log(sum) - target": -right.item(),
            "the log of the sum is missing": (
                (log_sum - largest).exp() - target + largest
            )
            .mean()
            .item(),
            "the target's logit is missing": (log_sum - largest).mean().item(),
            "the mean over this rank's targets only": (
                ((log_sum - target) * here).sum() / here.sum().clamp(min=1)
            ).item(),
            "this rank's targets alone: the others' logits never came": (
                log_sum - largest - (picked - largest) * here
            )
            .mean()
            .item(),
        }
        if own["loss"] == float("-inf"):
            return (
                f"{where}the loss is -inf: all exp are 0: more than the largest logit "
                "is taken off"
            )
        if not abs(own["loss"]) < 1e30:
            return (
                f"{where}the loss is {own['loss']}: exp overflows: take the largest "
                "logit off first"
            )
        if not same(own["loss"], right.item()):
            return where + named(own["loss"], right.item(), mistakes)
        gradient = logits.grad.chunk(n, -1)[rank].flatten()
        if own["grad"] is None:
            return f"{where}the loss is right but has no gradient: detach() loses it"
        mistakes = {
            f"{n} times too large: f sums it again: take g": (n * gradient).tolist(),
            f"{n} times too small": (gradient / n).tolist(),
        }
        if not same(own["grad"], gradient.tolist()):
            words = named(own["grad"], gradient.tolist(), mistakes)
            return (
                f"{where}the loss is right, its gradient is not: {words}; detach() "
                "loses "
                "a gradient, f sums it, g passes it on"
            )
    return None


TASKS = {
    "cut": Task(see_cut, judge_cut),
    "conjugate": Task(see_conjugate, judge_conjugate),
    "block": Task(see_block, judge_block),
    "loss": Task(see_loss, judge_loss),
    "norms": Task(see_norms, judge_norms),
}


# What is to be predicted: the all-reduces of a model of 2 blocks.

LAYERS, RANKS = 2, 2


def measure(kind, answer, setting):
    """Return the all-reduces of activations in forward, or in forward and backward."""
    conjugates(answer)
    model, calls = (
        answer.ParallelTransformer(whole_model(setting), answer.f, answer.g),
        [],
    )
    all_reduce = dist.all_reduce

    def counted(tensor, *args, **kwargs):
        calls.append(tensor.dim())
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = counted
    out = model(tokens_of(setting)[0])
    if kind == "both":
        out.sum().backward()
    return sum(dim == 3 for dim in calls)


QUESTIONS = {
    "forward": Question(
        "all-reduces",
        partial(measure, "forward"),
        lambda right: {
            "those of the blocks: the embedding's rows are on several ranks too": 2
            * LAYERS,
            "one for each matrix: the first of a pair needs none after it": 7 * LAYERS,
            "those of backward too: f does nothing in forward": 2 * right,
        },
        RANKS,
    ),
    "both": Question(
        "all-reduces",
        partial(measure, "both"),
        lambda right: {
            "those of forward: f reduces in backward": 2 * LAYERS + 1,
            "those of the blocks": 4 * LAYERS,
            "those of the blocks and the embedding: before the head stands an f": 4
            * LAYERS
            + 1,
        },
        RANKS,
    ),
}
