"""Tasks `pack` and `wait` of lab 2: the model, the ranks' mean gradients, and the
results of mistakes.
"""

import itertools
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from dist_common.check import CollectiveCounter
from lab_parts.judging import compare_gradients, judge_each_rank, numbers
from lab_parts.running import Setting


class Net(nn.Module):
    """A model with a frozen weight, a weight used twice, a buffer and a branch.

    `early` is registered late but used first, so its bucket is complete last.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.frozen = nn.Linear(8, width).requires_grad_(False)
        self.shared = nn.Linear(width, width)
        self.odd = nn.Linear(width, width)
        self.early = nn.Linear(8, 8)
        self.last = nn.Linear(width, 16)  # a bucket of its own
        self.register_buffer("shift", torch.randn(width))

    def forward(self, x: torch.Tensor, odd: bool) -> torch.Tensor:
        x = torch.tanh(self.early(x))
        h = torch.tanh(self.first(x) + self.frozen(x) + self.shift)
        h = torch.tanh(self.shared(self.shared(h)))
        h = torch.tanh(self.odd(h)) if odd else h
        return self.last(h).square().mean()


def net(setting: Setting, rank: int = 0) -> Net:
    """Return the model, in a width drawn from the seed, with weights of this rank's
    own.
    """
    torch.manual_seed(setting.seed + rank)
    return Net(8 + setting.draw(6)[0])


def batch(setting: Setting, rank: int, step: int = 0) -> torch.Tensor:
    torch.manual_seed(setting.seed + 1000 * (step + 1) + rank)
    return torch.randn(4, 8)


def bucket_bytes(setting: Setting) -> int:
    return 300 + 10 * setting.draw(6, 20)[1]


# pack and unpack: gradients to one vector, and their mean back


def see_pack(answer, setting):
    model = net(setting)
    bucket = [p for p in model.parameters() if p.requires_grad][::-1]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    model(batch(setting, setting.rank), odd=setting.rank == 0).backward()
    weights = [parameter.detach().clone() for parameter in bucket]
    with CollectiveCounter() as counter:
        flat = answer.pack(bucket)
    sent, whole = len(flat), sum(parameter.numel() for parameter in bucket)
    summed = setting.all_agree(sent == whole)
    if summed:
        dist.all_reduce(flat)
        with counter:
            answer.unpack(flat, bucket)
    changed = zip(bucket, weights, strict=True)
    return {
        "sent": sent,
        "summed": summed,
        "got": numbers({names[id(p)]: p.grad for p in bucket}),
        "moved": any(not torch.equal(p, weight) for p, weight in changed),
        "calls": sum(counter.calls.values()),
    }


def gradients_of(setting: Setting, rank: int, step: int = 0) -> dict[str, list]:
    """Return a rank's gradients by name, zeros for weights that it does not use."""
    model = net(setting)
    model(
        batch(setting, rank, step), odd=(rank + step) % 2 == 0 if step else rank == 0
    ).backward()
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    zeros = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in weights.items()
    }
    return numbers(zeros)


def mean_of(of_ranks: list[dict[str, list]], factor: float = 1.0) -> dict[str, list]:
    return {
        name: (factor * torch.tensor([one[name] for one in of_ranks]).mean(0)).tolist()
        for name in of_ranks[0]
    }


def of_gradients(setting: Setting, step: int = 0) -> tuple[dict, dict]:
    """Return the mean gradient, and the results of mistakes by their words."""
    each = [gradients_of(setting, rank, step) for rank in range(setting.world_size)]
    n = setting.world_size
    mistakes = {
        f"gradients are {n} times too large: summed, not divided by the ranks": mean_of(
            each, n
        ),
        f"gradients are {n} times too small: divided by the ranks twice": mean_of(
            each, 1 / n
        ),
        f"gradients are {n * n} times too large: multiplied by the ranks": mean_of(
            each, n * n
        ),
    }
    for rank in range(n):
        mistakes[f"rank {rank}'s own gradients, not averaged"] = each[rank]
        unsummed = (
            f"rank {rank}'s own gradients, divided by {n}: no sum has come yet: wait "
            "for it"
        )
        mistakes[unsummed] = mean_of([each[rank]], 1 / n)
        added = f"the mean is added to rank {rank}'s own gradients: it replaces them"
        mistakes[added] = mean_of([mean_of(each), each[rank]], 2)
    return mean_of(each), mistakes


@judge_each_rank
def judge_pack(got, rank, setting):
    expected, mistakes = of_gradients(setting)
    vector = list(itertools.chain(*[expected[name] for name in [*expected][::-1]]))
    mistakes[
        "each parameter gets the first numbers of the vector: cut it in pieces"
    ] = {name: vector[: len(values)] for name, values in expected.items()}
    mistakes["the pieces are in the opposite order of the bucket's parameters"] = cut(
        vector, expected
    )
    mistakes["each parameter gets the last numbers of the vector: cut it in pieces"] = {
        name: vector[-len(values) :] for name, values in expected.items()
    }
    if got["calls"]:
        yield (
            "pack or unpack calls a collective: Overlapped.start sums the vector "
            "between the two"
        )
    if got["moved"]:
        yield "the weights changed: the means belong in parameter.grad"
    if got["sent"] != len(vector):
        yield (
            f"the vector has {got['sent']} numbers, the bucket {len(vector)}: put "
            "zeros in place of a gradient that is missing"
        )
    elif got["summed"] and not got["calls"] and not got["moved"]:
        missing = "this rank needs the mean too"
        yield from compare_gradients(got["got"], expected, mistakes, missing)


def cut(vector: list, like: dict[str, list]) -> dict[str, list]:
    """Cut a vector into pieces as long as the lists."""
    pieces = torch.tensor(vector, dtype=torch.double).split([*map(len, like.values())])
    return numbers(dict(zip(like, pieces, strict=True)))


# wait: the rest is started, all are waited for, means are put back; and again in the
# next step


class Lazy:
    """Stand in for an all-reduce: it happens in `wait`."""

    def __init__(self, all_reduce) -> None:
        self.all_reduce, self.numbers = all_reduce, 0

    def __call__(self, flat: torch.Tensor) -> SimpleNamespace:
        self.numbers += flat.numel()
        return SimpleNamespace(wait=lambda: self.all_reduce(flat))


def see_wait(answer, setting):
    silent = two_steps(answer, setting, lambda flat: None)
    total = sum(p.numel() for p in net(setting).parameters() if p.requires_grad)
    if not setting.all_agree(all(step["sent"] == total for step in silent)):
        return silent  # the sizes may differ, and a real all-reduce would hang
    return two_steps(answer, setting, dist.all_reduce)


def two_steps(answer, setting, all_reduce):
    model, seen = net(setting), []
    lazy = Lazy(all_reduce)
    overlapped = answer.wrap(model, bucket_bytes(setting), lazy)
    for step in (0, 1):
        for parameter in model.parameters():
            parameter.grad = None
        before, rank = lazy.numbers, setting.rank
        odd = (rank + step) % 2 == 0 if step else rank == 0
        model(batch(setting, rank, step), odd=odd).backward()
        overlapped.wait()
        gradients = {
            name: p.grad for name, p in model.named_parameters() if p.requires_grad
        }
        seen.append({"got": numbers(gradients), "sent": lazy.numbers - before})
    return seen


def judge_wait(seen, setting):
    total = sum(map(len, gradients_of(setting, 0).values()))
    steps = [(step, rank) for step in (0, 1) for rank in range(setting.world_size)]
    sent = [seen[rank][step]["sent"] for step, rank in steps]
    for step, rank in steps:
        got, where = seen[rank][step], f"step {step + 1}, rank {rank}: "
        none = [name for name, value in got["got"].items() if value is None]
        if none:
            yield (
                f"{where}{none[0]} has no gradient: this rank's loss did not use it, "
                "and its bucket was never started: the other ranks would wait for it"
            )
        elif got["sent"] < total:
            yield (
                f"{where}{got['sent']} of {total} gradients were all-reduced: buckets "
                "with a parameter that is not used never complete: start them after "
                "backward"
            )
        elif got["sent"] > total:
            yield (
                f"{where}{got['sent']} numbers all-reduced for {total} weights: "
                "sent twice"
            )
        elif set(sent) == {total}:  # or the all-reduces sent nothing
            for fault in compare_gradients(
                got["got"], *of_gradients(setting, step), ""
            ):
                yield where + fault
