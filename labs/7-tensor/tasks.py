"""Lab 7, tensor parallelism: what the grader runs, and which mistakes it names."""

import itertools
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tensor_model import (
    BATCH,
    HEAD_DIM,
    conjugates,
    tokens_of,
    whole_model,
)
from torch import nn
from vocabulary_loss import judge_loss, see_loss

from dist_common.check import CollectiveCounter
from dist_common.model import rotary_tables
from lab_parts.judging import Question, judge_each_rank, named, numbers, same
from lab_parts.running import Setting, Task, times

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
    whole = torch.arange(24.0 * setting.world_size**2).view(6 * setting.world_size, -1)
    for rank, ends in enumerate(seen):
        for dim in (0, 1):
            for fault in explain_cut(ends[f"dim {dim}"], whole, dim, rank, setting):
                yield f"dim {dim}, rank {rank}: {fault}"


def explain_cut(got, whole, dim, rank, setting) -> Iterator[str]:
    """Yield what is wrong with a layer whose weight `whole` was divided along `dim`."""
    n = setting.world_size
    expected = whole.chunk(n, dim)[rank]
    mistakes = {
        "every n-th row or column: that splits inside heads, whose dims belong "
        "together": whole[rank::n] if dim == 0 else whole[:, rank::n],
        "the other dimension is cut": whole.chunk(n, 1 - dim)[rank],
    }
    for other in range(n):
        mistakes[f"the part of rank {other}"] = whole.chunk(n, dim)[other]
    if not got["layer"]:
        yield "return the layer: a block is made of what keep_part returns"
    if got["shape"] == list(whole.shape):
        yield f"the whole weight is kept: shape {got['shape']}"
        return
    flat = expected.flatten().tolist()
    if not same(got["values"], flat):
        cases = {words: wrong.flatten().tolist() for words, wrong in mistakes.items()}
        yield named(got["values"], flat, cases)
    elif got["shape"] != list(expected.shape):
        yield f"the part has shape {got['shape']}, expected {list(expected.shape)}"
    if not got["trained"]:
        yield (
            "the part is not an nn.Parameter that requires a gradient: the optimizer "
            "would not train it"
        )
    if not got["alone"]:
        yield "the part is a view: the whole weight stays in memory behind it"


# conjugate: one function forward, the other one backward


def see_conjugate(answer, setting):
    conjugates(answer)
    ends = {}
    for name in ("f", "g"):
        x = torch.arange(3.0) + 10 * setting.rank
        x.requires_grad_()
        out = getattr(answer, name)(x)
        out.backward(torch.ones(3) * (1 + setting.rank) ** 2)
        ends[name] = {
            "out": out.tolist(),
            "grad": None if x.grad is None else x.grad.tolist(),
        }
    return ends


def judge_conjugate(seen, setting):
    n = setting.world_size
    inputs = [torch.arange(3.0) + 10 * rank for rank in range(n)]
    total, both = sum(inputs).tolist(), [sum((1 + r) ** 2 for r in range(n))] * 3
    for rank, ends in enumerate(seen):
        x, gradient, swapped = inputs[rank].tolist(), [(1 + rank) ** 2] * 3, False
        for name, expected in (("f", x), ("g", total)):
            got = ends[name]["out"]
            if not same(got, expected) and not swapped:
                swapped = name == "f" and same(got, total)
                mistakes = {
                    "forward returns x itself: return in_forward(x)": x,
                    "the backward function runs in forward": total,
                    "a sum of sums: it is reduced twice": [n * v for v in total],
                }
                said = named(got, expected, mistakes)
                yield f"rank {rank}: {name} in forward: {said}"
        for name, expected in (("f", both), ("g", gradient)):
            got, where = ends[name]["grad"], f"rank {rank}: {name}"
            if got is None:
                yield f"{where} passes no gradient on"
                break
            if not same(got, expected) and not swapped:
                mistakes = {
                    "does nothing in backward: the ranks' parts of the gradient are "
                    "not added up": gradient,
                    "reduces twice: each rank has the whole gradient already": both,
                    "averaged: the ranks' parts of the gradient are summed": [
                        value / n for value in both
                    ],
                }
                yield f"{where} in backward: {named(got, expected, mistakes)}"
                break  # one line of backward serves both


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


CALLS = {
    "g": "adds up what the second matrix's parts give",
    "f": "adds up their gradients, before the first matrix",
}


@judge_each_rank
def judge_block(got, rank, setting):
    block, (x, tables) = whole_model(setting).blocks[0], block_input(setting)
    out = block(x, *tables)
    out.square().sum().backward()
    calls, expected = got["calls"], out.flatten().tolist()
    if strange := [name for name in calls if name not in CALLS]:
        yield (
            f"it calls {strange[0]} instead of self.{strange[0][-1]}: with sequence "
            "parallelism they differ"
        )
        return
    wrong = [name for name in CALLS if calls.count(name) != 2]
    for name in wrong:
        yield (
            f"{name} is called {times(calls.count(name))} in a block, 2 are needed, "
            f"one for attention and one for the feed-forward: it {CALLS[name]}"
        )
    if not wrong and calls != ["f", "g", "f", "g"]:
        yield (
            f"called in the order {', '.join(calls)}: f before, g after each pair of "
            "matrices"
        )
        return
    if "g" not in wrong and not same(got["out"], expected):
        mistakes = wrong_residuals(block, x, tables, setting.world_size)
        yield f"the output: {named(got['out'], expected, mistakes)}"
    elif wrong:
        return
    elif not same(got["grad"], x.grad.flatten().tolist()):
        yield "the input's gradient is wrong: where f stands, its gradient is summed"
    elif not same(got["norm"], block.attention_norm.weight.grad.tolist()):
        yield "the norm's gradient is not whole: f takes what the norm returns"


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
    n, weights = setting.world_size, whole_model(setting).named_parameters()
    norms = [name for name, weight in weights if weight.dim() == 1]
    before = [{name: got["before"][name] for name in norms} for got in seen]
    total = {name: torch.tensor([one[name] for one in before]).sum(0) for name in norms}
    for rank, got in enumerate(seen):
        where, after = f"rank {rank}: ", {name: got["after"][name] for name in norms}
        mistakes = {
            "as they were: each rank's norms saw its own tokens alone": before[rank],
            f"{n} times too small: the tokens' gradients are summed, not "
            "averaged": numbers({name: value / n for name, value in total.items()}),
        }
        if not same(after, numbers(total)):
            yield where + named(after, numbers(total), mistakes)
        others = got["before"].keys() - set(norms)
        changed = [n for n in others if not same(got["after"][n], got["before"][n])]
        if changed:
            yield (
                f"{where}the gradient of {min(changed)} has changed: f and g have it "
                "right already"
            )
        elif got["calls"] > 1:
            yield (
                f"{where}{got['calls']} all-reduces of a few numbers: join them, and "
                "make one"
            )


TASKS = {
    "cut": Task(see_cut, judge_cut),
    "conjugate": Task(see_conjugate, judge_conjugate),
    "block": Task(see_block, judge_block),
    "loss": Task(see_loss, judge_loss),
    "norms": Task(see_norms, judge_norms),
}


# Predictions: the all-reduces of a model of 2 blocks.

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
        lambda measured: {
            "those of the blocks: the embedding's rows are on several ranks too": 2
            * LAYERS,
            "one for each matrix: the first of a pair needs none after it": 7 * LAYERS,
            "those of backward too: f does nothing in forward": 2 * measured,
        },
        RANKS,
    ),
    "both": Question(
        "all-reduces",
        partial(measure, "both"),
        lambda measured: {
            "those of forward: f reduces in backward": 2 * LAYERS + 1,
            "those of the blocks": 4 * LAYERS,
            "those of the blocks and the embedding: before the head stands an f": 4
            * LAYERS
            + 1,
        },
        RANKS,
    ),
}
