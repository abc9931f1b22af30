"""Lab 2, DistributedDataParallel: how an answer is looked at, and which mistake a wrong
one shows.

A mistake is what it would give: a judge compares what came with what is right, and then
with that.
"""

import functools
import itertools
from collections import Counter
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from dist_common.check import CollectiveCounter
from dist_common.model import PRESETS, Transformer
from lab_parts.judging import Question, describe_difference, named, numbers, same
from lab_parts.running import OTHER_FORM, Setting, Task

LESSONS = {
    "01-ddp-basics/ddp_from_scratch.py": (
        "MIB",
        "start_equal",
        "trainable",
        "gradient_or_zeros",
        "buckets_of",
        "pack",
        "unpack",
        "Overlapped",
        "start_sum",
        "wrap",
    ),
}


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


# start: every rank takes rank 0's weights and buffers


def see_start(answer, setting):
    model = net(setting, setting.rank)
    answer.start_equal(model)
    return numbers(model.state_dict())


def judge_start(seen, setting):
    drawn = [
        numbers(net(setting, rank).state_dict()) for rank in range(setting.world_size)
    ]
    if all(same(own, drawn[0]) for own in seen):
        return None
    if all(same(own, drawn[-1]) for own in seen):
        return f"all ranks have rank {setting.world_size - 1}'s weights, not rank 0's"
    mean = {
        name: torch.tensor([own[name] for own in drawn]).mean(0).tolist()
        for name in drawn[0]
    }
    total = {
        name: torch.tensor([own[name] for own in drawn]).sum(0).tolist()
        for name in drawn[0]
    }
    if all(same(own, mean) or same(own, total) for own in seen):
        return (
            "the ranks' weights were added up or averaged: send rank 0's, by a "
            "broadcast"
        )
    if not same(seen[0], drawn[0]):
        return (
            "rank 0's own weights have changed: "
            f"{describe_difference(seen[0], drawn[0])}"
        )
    rank, own = next((n, own) for n, own in enumerate(seen) if not same(own, drawn[0]))
    left = [name for name in own if not same(own[name], drawn[0][name])]
    kinds = {"shift": "the buffer `shift`", "frozen.weight": "the frozen weights"}
    if len(left) == len(own):
        return f"rank {rank} keeps all of its own weights: no rank got rank 0's"
    what = kinds.get(left[0], left[0])
    return (
        f"rank {rank} keeps its own values of {what}: all parameters and buffers are "
        "sent"
    )


# buckets: from the last layer on, each closed once it has bucket_bytes


def mixed_net(setting: Setting) -> nn.Module:
    """Return a model with two types of numbers and a weight that two modules share."""
    model = net(setting)
    model.tied = nn.Linear(1, 1, bias=False)
    model.tied.weight = model.shared.weight
    model.early.double()
    return model


def bucket_sizes(setting: Setting) -> dict[str, int]:
    """Return the sizes in bytes; `exactly` is the size of the first two parameters."""
    last = net(setting).last
    return {
        "everything": 2**20,
        "each": 1,
        "some": bucket_bytes(setting),
        "exactly": last.weight.nbytes + last.bias.nbytes,
    }


def see_buckets(answer, setting):
    model = mixed_net(setting)
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        kind: [
            [names[parameter] for parameter in bucket]
            for bucket in answer.buckets_of(model, size)
        ]
        for kind, size in bucket_sizes(setting).items()
    }


def bucket_bytes(setting: Setting) -> int:
    return 300 + 10 * setting.draw(6, 20)[1]


def buckets_by(names, nbytes, size, closes=lambda bucket, more, size: bucket >= size):
    found, filled = [], 0
    for name in names:
        if not found or closes(filled, nbytes[name], size):
            found.append([])
            filled = 0
        found[-1].append(name)
        filled += nbytes[name]
    return found


def judge_buckets(seen, setting):
    weights = dict(mixed_net(setting).named_parameters())
    trained = [name for name, weight in weights.items() if weight.requires_grad]
    for rank, kinds in enumerate(seen):
        for kind, size in bucket_sizes(setting).items():
            if wrong := explain_buckets(kinds[kind], trained[::-1], weights, size):
                return f"rank {rank}: {wrong}"
    return None


def explain_buckets(got, last_first, weights, size):
    """Say what is wrong with the buckets of `size` bytes; None if they are right."""
    nbytes = {name: weight.nbytes for name, weight in weights.items()}
    counts = {name: weight.numel() for name, weight in weights.items()}
    flat = list(itertools.chain(*got))
    if got == buckets_by(last_first, nbytes, size):
        return None
    if missing := [name for name in last_first if name not in flat]:
        return f"{missing[0]} is in no bucket: its gradient would never be averaged"
    if twice := [name for name in flat if flat.count(name) > 1]:
        return f"{twice[0]} is in the buckets twice: two modules share it, send it once"
    if frozen := [name for name in flat if name not in last_first]:
        return f"{frozen[0]} gets no gradient: put trainable parameters in buckets only"
    if flat == last_first[::-1]:
        return "the first bucket has the first layer: backward completes the last first"
    if all(len(bucket) == 1 for bucket in got):
        return "each parameter has a bucket of its own, whatever bucket_bytes is"
    if flat != last_first:
        return f"parameters are in the order {flat}, expected {last_first}"
    if len(got) == 1:
        return "one bucket holds everything: it is never closed at bucket_bytes"
    if got == buckets_by(last_first, counts, size):
        return f"buckets are closed at {size} numbers, not bytes: use nbytes"
    if got == buckets_by(last_first, {n: 4 * counts[n] for n in counts}, size):
        return "not every number has 4 bytes: use nbytes"
    below = buckets_by(last_first, nbytes, size, lambda b, more, most: b + more > most)
    if got == below:
        return f"buckets are closed before {size} bytes: each has at least as many"
    late = buckets_by(last_first, nbytes, size, lambda b, more, most: b > most)
    if got == late:
        return f"a bucket of exactly {size} bytes has enough: close it"
    right = buckets_by(last_first, nbytes, size)
    place = next(
        n for n, pair in enumerate(zip(got, right, strict=False)) if pair[0] != pair[1]
    )
    return f"bucket {place} of {size} bytes is {got[place]}, expected {right[place]}"


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
    if setting.all_agree(sent == whole):
        dist.all_reduce(flat)
        with counter:
            answer.unpack(flat, bucket)
    changed = zip(bucket, weights, strict=True)
    return {
        "sent": sent,
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
        name: (factor * torch.tensor([own[name] for own in of_ranks]).mean(0)).tolist()
        for name in of_ranks[0]
    }


def of_gradients(setting: Setting, step: int = 0) -> tuple[dict, dict]:
    """Return the mean gradient, and what mistakes give: by the words that name them."""
    own = [gradients_of(setting, rank, step) for rank in range(setting.world_size)]
    n = setting.world_size
    mistakes = {
        f"gradients are {n} times too large: summed, not divided by the ranks": mean_of(
            own, n
        ),
        f"gradients are {n} times too small: divided by the ranks twice": mean_of(
            own, 1 / n
        ),
        f"gradients are {n * n} times too large: multiplied by the ranks": mean_of(
            own, n * n
        ),
    }
    for rank in range(n):
        mistakes[f"rank {rank}'s own gradients, not averaged"] = own[rank]
        unsummed = (
            f"rank {rank}'s own gradients, divided by {n}: no sum has come yet: wait "
            "for it"
        )
        mistakes[unsummed] = mean_of([own[rank]], 1 / n)
        added = f"the mean is added to rank {rank}'s own gradients: it replaces them"
        mistakes[added] = mean_of([mean_of(own), own[rank]], 2)
    return mean_of(own), mistakes


def judge_pack(seen, setting):
    right, mistakes = of_gradients(setting)
    vector = list(itertools.chain(*[right[name] for name in [*right][::-1]]))
    total = len(vector)
    mistakes[
        "each parameter gets the first numbers of the vector: cut it in pieces"
    ] = {name: vector[: len(values)] for name, values in right.items()}
    mistakes["the pieces are in the opposite order of the bucket's parameters"] = cut(
        vector, right
    )
    mistakes["each parameter gets the last numbers of the vector: cut it in pieces"] = {
        name: vector[-len(values) :] for name, values in right.items()
    }
    for rank, ends in enumerate(seen):
        where = f"rank {rank}: "
        if ends["calls"]:
            return (
                f"{where}pack or unpack calls a collective: Overlapped.start sums the "
                "vector between the two"
            )
        if ends["moved"]:
            return f"{where}the weights changed: the means belong in parameter.grad"
        if ends["sent"] != total:
            return (
                f"{where}the vector has {ends['sent']} numbers, the bucket {total}: "
                "put "
                "zeros in place of a gradient that is missing"
            )
    for rank, ends in enumerate(seen):
        if None in ends["got"].values():
            name = next(name for name, value in ends["got"].items() if value is None)
            return f"rank {rank}: {name} has no gradient: this rank needs the mean too"
        if not same(ends["got"], right):
            return f"rank {rank}: {named(ends['got'], right, mistakes)}"
    return None


def cut(vector: list, like: dict[str, list]) -> dict[str, list]:
    """Cut a vector into pieces as long as the lists."""
    pieces = torch.tensor(vector, dtype=torch.double).split([*map(len, like.values())])
    return numbers(dict(zip(like, pieces, strict=True)))


# hook: a bucket's all-reduce starts during backward, in order


class Noted:
    """Stand in for an all-reduce: note the buckets that start, and send nothing."""

    def __init__(self, model: nn.Module) -> None:
        self.complete = []  # parameters whose gradient is complete, in order
        self.calls = []  # numbers in the bucket, and gradients that are complete
        self.waits = 0
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                hook = functools.partial(self.note, name)
                parameter.register_post_accumulate_grad_hook(hook)

    def note(self, name: str, parameter: torch.Tensor) -> None:
        self.complete.append(name)

    def __call__(self, flat: torch.Tensor) -> SimpleNamespace:
        self.calls.append((flat.numel(), len(self.complete)))
        return SimpleNamespace(wait=self.wait)

    def wait(self) -> None:
        self.waits += 1


def see_hook(answer, setting):
    model = net(setting)
    note = Noted(model)
    overlapped = answer.Overlapped(model, bucket_bytes(setting), note)
    sizes = [sum(p.numel() for p in bucket) for bucket in overlapped.buckets]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    buckets = [[names[id(p)] for p in bucket] for bucket in overlapped.buckets]
    # Rank 0 does not use the branch: the buckets after its bucket have to wait for it.
    model(batch(setting, setting.rank), odd=setting.rank != 0).backward()
    return {
        "calls": note.calls,
        "complete": note.complete,
        "waits": note.waits,
        "sizes": sizes,
        "buckets": buckets,
    }


def expected_starts(ends: dict) -> list[int]:
    """Return how many gradients are complete when each bucket can start, in order."""
    starts, latest = [], 0
    for bucket in ends["buckets"]:
        if not set(bucket) <= set(ends["complete"]):
            break
        latest = max(latest, *(1 + ends["complete"].index(name) for name in bucket))
        starts.append(latest)
    return starts


def judge_hook(seen, setting):
    for rank, ends in enumerate(seen):
        if not all(ends["buckets"]):
            return OTHER_FORM
        if wrong := explain_starts(ends, expected_starts(ends)):
            return f"rank {rank}: {wrong}"
    return None


def explain_starts(ends: dict, expected: list[int]) -> str | None:
    """Say what is wrong with the starts of the buckets; None if they are right."""
    sizes, total = ends["sizes"], len(ends["complete"])
    started = [size for size, _ in ends["calls"]]
    if ends["waits"]:
        return (
            "the hook waits for a sum, and backward stops meanwhile: wait after "
            "backward"
        )
    if Counter(started) - Counter(sizes):
        return (
            f"all-reduces of {started} numbers, buckets of {sizes}: one is sent twice"
        )
    if not started and expected:
        return (
            "no all-reduce starts during backward: in the hook, start a bucket when "
            "none of its gradients is missing"
        )
    if started != sizes[: len(started)]:
        return (
            "the buckets start when they are complete, not in their order: another "
            "rank, which uses other weights, would call them in another order"
        )
    for number, (_, complete) in enumerate(ends["calls"]):
        if number >= len(expected):
            return "a bucket starts that lacks a gradient on this rank"
        if complete < expected[number]:
            return f"bucket {number} starts before all of its gradients are complete"
        if complete > expected[number]:
            late = (
                f"{expected[number]} of {total} gradients, and starts after {complete}"
            )
            return f"bucket {number} is complete after {late}: nothing overlaps"
    if len(started) < len(expected):
        return (
            f"{len(started)} buckets start during backward, {len(expected)} are "
            "complete: after one starts, the next may be complete too"
        )
    return None


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

    def of_step(step):
        return [
            (f"step {step + 1}, rank {n}: ", own[step]) for n, own in enumerate(seen)
        ]

    for step in (0, 1):
        for where, own in of_step(step):
            if None in own["got"].values():
                none = next(name for name, value in own["got"].items() if value is None)
                return (
                    f"{where}{none} has no gradient: this rank's loss did not use it, "
                    "and its "
                    "bucket was never started: the other ranks would wait for it"
                )
            if own["sent"] < total:
                return (
                    f"{where}{own['sent']} of {total} gradients were all-reduced: "
                    "buckets with a "
                    "parameter that is not used never complete: start them after "
                    "backward"
                )
            if own["sent"] > total:
                return (
                    f"{where}{own['sent']} numbers all-reduced for {total} weights: "
                    "sent twice"
                )
    for step in (0, 1):
        right, mistakes = of_gradients(setting, step)
        for where, own in of_step(step):
            if not same(own["got"], right):
                return where + named(own["got"], right, mistakes)
    return None


TASKS = {
    "start": Task(see_start, judge_start),
    "buckets": Task(see_buckets, judge_buckets),
    "pack": Task(see_pack, judge_pack),
    "hook": Task(see_hook, judge_hook),
    "wait": Task(see_wait, judge_wait),
}
WHOLE = TASKS["wait"]


# What is to be predicted, of the preset `tiny` in buckets of 0.25 MiB.


BUCKET = 2**18  # bytes


def measure(kind, answer, setting):
    """Return the all-reduces of one step, or the bytes handed to them."""
    model, sizes = Transformer(PRESETS["tiny"]), []

    def all_reduce(flat):
        sizes.append(flat.nbytes)
        return answer.start_sum(flat)

    overlapped = answer.wrap(model, BUCKET, all_reduce)
    tokens = torch.zeros(1, 32, dtype=torch.int64)
    model(tokens).logsumexp(-1).sum().backward()
    overlapped.wait()
    return {"calls": len(sizes), "bytes": sum(sizes)}[kind]


def mistakes_of_calls(right):
    with torch.device("meta"):
        weights = Transformer(PRESETS["tiny"]).named_parameters()
    sizes = {name: weight.nbytes for name, weight in weights}
    tensors, nbytes, last_first = len(sizes), sum(sizes.values()), [*sizes][::-1]
    below = buckets_by(last_first, sizes, BUCKET, lambda b, more, most: b + more > most)
    return {
        "buckets of at most 0.25 MiB: they have at least as much": len(below),
        "that of the page, whose buckets have 0.5 MiB": len(
            buckets_by(last_first, sizes, 2 * BUCKET)
        ),
        "one for each parameter: that is step 1, without buckets": tensors,
        "bytes / bucket size: a bucket is closed once it has 0.25 MiB or more": nbytes
        // BUCKET,
        "bytes / bucket size, rounded up: a bucket has 0.25 MiB or more": -(
            -nbytes // BUCKET
        ),
        "one for everything: 0.25 MiB is less than the model": 1,
    }


def mistakes_of_bytes(right):
    return {
        "weights, not bytes: a float32 has 4": right / 4,
        "twice: that is what a ring of many ranks sends; one gradient is handed over": 2
        * right,
        "half: gradients are float32 here, not bfloat16": right / 2,
    }


QUESTIONS = {
    "calls": Question(
        "all-reduces", functools.partial(measure, "calls"), mistakes_of_calls
    ),
    "bytes": Question("bytes", functools.partial(measure, "bytes"), mistakes_of_bytes),
}
