"""Lab 2, DistributedDataParallel: how an answer is looked at, and which mistake a wrong one shows.

A mistake is what it would give: a judge compares what came with what is right, and then with that.
"""

import functools
import itertools
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from dist_common.model import PRESETS, Transformer
from lab_parts.judging import Question, differs, named, numbers, same
from lab_parts.running import OTHER_FORM, Setting, Task

LESSONS = {
    "01-ddp-basics/ddp_from_scratch.py": (
        "MIB", "start_equal", "trainable", "gradient_or_zeros", "buckets_of", "pack", "unpack",
        "Overlapped", "start_sum", "wrap",
    ),
}  # fmt: skip
TITLE = "Lab 2: fill the holes until `python labs/grade.py 2` says right everywhere."


class Net(nn.Module):
    """What a real model has: a frozen weight, a shared one, a buffer, a branch taken at times."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.frozen = nn.Linear(8, width).requires_grad_(False)
        self.shared = nn.Linear(width, width)
        self.odd = nn.Linear(width, width)
        self.last = nn.Linear(width, 4)
        self.register_buffer("shift", torch.randn(width))

    def forward(self, x: torch.Tensor, odd: bool) -> torch.Tensor:
        h = torch.tanh(self.first(x) + self.frozen(x) + self.shift)
        h = torch.tanh(self.shared(self.shared(h)))
        h = torch.tanh(self.odd(h)) if odd else h
        return self.last(h).square().mean()


def net(setting: Setting, rank: int = 0) -> Net:
    """Return the model, in a width drawn from the seed, with weights of this rank's own."""
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
    drawn = [numbers(net(setting, rank).state_dict()) for rank in range(setting.world_size)]
    if all(same(own, drawn[0]) for own in seen):
        return None
    if all(same(own, drawn[-1]) for own in seen):
        return f"all ranks have rank {setting.world_size - 1}'s weights, not rank 0's"
    mean = {name: torch.tensor([own[name] for own in drawn]).mean(0).tolist() for name in drawn[0]}
    total = {name: torch.tensor([own[name] for own in drawn]).sum(0).tolist() for name in drawn[0]}
    if all(same(own, mean) or same(own, total) for own in seen):
        return "the ranks' weights were added up or averaged: send rank 0's, by a broadcast"
    if not same(seen[0], drawn[0]):
        return f"rank 0's own weights have changed: {differs(seen[0], drawn[0])}"
    rank, own = next((n, own) for n, own in enumerate(seen) if not same(own, drawn[0]))
    left = [name for name in own if not same(own[name], drawn[0][name])]
    kinds = {"shift": "the buffer `shift`", "frozen.weight": "the frozen weights"}
    if len(left) == len(own):
        return f"rank {rank} keeps all of its own weights: no rank got rank 0's"
    what = kinds.get(left[0], left[0])
    return f"rank {rank} keeps its own values of {what}: all parameters and buffers are sent"


# buckets: from the last layer on, each closed once it has bucket_bytes


def see_buckets(answer, setting):
    model = net(setting)
    names = {parameter: name for name, parameter in model.named_parameters()}
    sizes = {"everything": 2**20, "each": 1, "some": bucket_bytes(setting)}
    return {
        kind: [[names[parameter] for parameter in bucket]
               for bucket in answer.buckets_of(model, size)]
        for kind, size in sizes.items()
    }  # fmt: skip


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
    model, size = net(setting), bucket_bytes(setting)
    weights = {n: p for n, p in model.named_parameters() if p.requires_grad}
    nbytes, last_first = {n: p.nbytes for n, p in model.named_parameters()}, [*weights][::-1]
    right = buckets_by(last_first, nbytes, size)
    for rank, own in enumerate(seen):
        got, each = own["some"], [[name] for name in last_first]
        flat = list(itertools.chain(*got))
        if got == right and own["each"] == each and own["everything"] == [last_first]:
            continue
        where = f"rank {rank}: "
        if missing := [name for name in last_first if name not in flat]:
            return f"{where}{missing[0]} is in no bucket: its gradient would never be averaged"
        if twice := [name for name in flat if flat.count(name) > 1]:
            return f"{where}{twice[0]} is in two buckets: its gradient would be sent twice"
        if frozen := [name for name in flat if name not in weights]:
            return f"{where}{frozen[0]} gets no gradient: only trainable parameters are in buckets"
        if flat == last_first[::-1]:
            return f"{where}the first bucket has the first layer: backward completes the last first"
        if all(len(bucket) == 1 for bucket in got):
            return f"{where}each parameter has a bucket of its own, whatever bucket_bytes is"
        if len(own["each"]) == 1:
            return f"{where}one bucket holds everything: it is never closed at bucket_bytes"
        if got == buckets_by(last_first, nbytes, 4 * size):
            return f"{where}buckets are closed at {size} numbers, not bytes: a float32 has 4 bytes"
        below = buckets_by(last_first, nbytes, size, lambda b, more, most: b + more > most)
        if got == below:
            return f"{where}buckets are closed before {size} bytes: they are of at least as many"
        return f"{where}buckets for {size} bytes are {got}, expected {right}"
    return None


# pack and unpack: gradients to one vector, and their mean back


def see_pack(answer, setting):
    model = net(setting)
    bucket = [p for p in model.parameters() if p.requires_grad][::-1]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    model(batch(setting, setting.rank), odd=setting.rank == 0).backward()
    weights = [parameter.detach().clone() for parameter in bucket]
    flat = answer.pack(bucket)
    sent = len(flat)
    if setting.all_agree(sent == sum(parameter.numel() for parameter in bucket)):
        dist.all_reduce(flat)
        answer.unpack(flat, bucket)
    moved = any(not torch.equal(p, w) for p, w in zip(bucket, weights, strict=True))
    gradients = {names[id(p)]: None if p.grad is None else p.grad for p in bucket}
    return {"sent": sent, "got": numbers(gradients), "moved": moved}


def gradients_of(setting: Setting, rank: int, step: int = 0) -> dict[str, list]:
    """Return a rank's own gradients by name, zeros where its loss used no such weight."""
    model = net(setting)
    model(batch(setting, rank, step), odd=(rank + step) % 2 == 0 if step else rank == 0).backward()
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    zeros = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in weights.items()}
    return numbers(zeros)


def mean_of(of_ranks: list[dict[str, list]], factor: float = 1.0) -> dict[str, list]:
    return {name: (factor * torch.tensor([own[name] for own in of_ranks]).mean(0)).tolist()
            for name in of_ranks[0]}  # fmt: skip


def of_gradients(setting: Setting, step: int = 0) -> tuple[dict, dict]:
    """Return the mean gradient, and what mistakes give: by the words that name them."""
    own = [gradients_of(setting, rank, step) for rank in range(setting.world_size)]
    n = setting.world_size
    mistakes = {
        f"gradients are {n} times too large: summed, not divided by the ranks": mean_of(own, n),
        f"gradients are {n} times too small: divided by the ranks twice": mean_of(own, 1 / n),
        f"gradients are {n * n} times too large: multiplied by the ranks": mean_of(own, n * n),
    }
    for rank in range(n):
        mistakes[f"rank {rank}'s own gradients, not averaged"] = own[rank]
        unsummed = f"rank {rank}'s own gradients, divided by {n}: no sum has come yet: wait for it"
        mistakes[unsummed] = mean_of([own[rank]], 1 / n)
        added = f"the mean is added to rank {rank}'s own gradients: it replaces them"
        mistakes[added] = mean_of([mean_of(own), own[rank]], 2)
    return mean_of(own), mistakes


def judge_pack(seen, setting):
    right, mistakes = of_gradients(setting)
    total = sum(len(values) for values in right.values())
    for rank, own in enumerate(seen):
        if own["moved"]:
            return f"rank {rank}: the weights have changed: gradients belong in parameter.grad"
        if own["sent"] != total:
            return (
                f"rank {rank}: the vector has {own['sent']} numbers, the bucket {total}: zeros "
                "stand in for a gradient that is not there"
            )
    for rank, own in enumerate(seen):
        if None in own["got"].values():
            none = next(name for name, value in own["got"].items() if value is None)
            return f"rank {rank}: {none} has no gradient: a rank without one gets the mean too"
        if not same(own["got"], right):
            return f"rank {rank}: {named(own['got'], right, mistakes)}"
    return None


# hook: a bucket's all-reduce starts during backward, in order


class Noted:
    """Stand-in for an all-reduce: it notes what is handed to it, and sends nothing."""

    def __init__(self, model: nn.Module) -> None:
        self.there, self.calls, self.waits = 0, [], 0
        for parameter in filter(lambda p: p.requires_grad, model.parameters()):
            parameter.register_post_accumulate_grad_hook(self.count)

    def count(self, parameter: torch.Tensor) -> None:
        self.there += 1

    def __call__(self, flat: torch.Tensor) -> SimpleNamespace:
        self.calls.append((flat.numel(), self.there))
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
    # On rank 0 a middle branch is not used: the buckets after its own have to wait for it.
    model(batch(setting, setting.rank), odd=setting.rank != 0).backward()
    return {"calls": note.calls, "waits": note.waits, "sizes": sizes, "buckets": buckets}


def judge_hook(seen, setting):
    waiting = next(n for n, bucket in enumerate(seen[0]["buckets"])
                   if any(name.startswith("odd") for name in bucket))  # fmt: skip
    if not all(bucket for own in seen for bucket in own["buckets"]):
        return OTHER_FORM
    for rank, own in enumerate(seen):
        sizes, started = own["sizes"], [size for size, _ in own["calls"]]
        may = sizes[:waiting] if rank == 0 else sizes  # where the branch is not used
        if own["waits"]:
            return (
                f"rank {rank}: the hook waits for a sum: backward stands still meanwhile, and "
                "nothing overlaps: wait after backward"
            )
        if len(started) > len(sizes):
            return f"rank {rank}: {len(started)} all-reduces of {len(sizes)} buckets: sent twice"
        if not started and may:
            return (
                f"rank {rank}: no all-reduce starts during backward: start a bucket in the hook, "
                "once none of its gradients is missing"
            )
        if started == may and complete(own, started):
            continue
        if started != sizes[: len(started)]:
            return (
                f"rank {rank} starts its buckets in another order than they are in, as they are "
                "complete: another rank, which uses other weights, would call them in another order"
            )
        if not complete(own, started):
            return f"rank {rank}: a bucket starts before all of its gradients are there"
        if len(started) > len(may):
            return f"rank {rank}: a bucket starts whose gradient is not there on this rank"
        return (
            f"rank {rank}: {len(started)} buckets start during backward, {len(may)} are complete: "
            "after one starts, the next may be complete too"
        )
    return None


def complete(own, started) -> bool:
    """Say whether each bucket had its gradients when it started: so many tensors at least."""
    needed = itertools.accumulate(len(bucket) for bucket in own["buckets"])
    return all(there >= least for (_, there), least in zip(own["calls"], needed, strict=False))


# wait: the rest is started, all are waited for, means are put back; and again in the next step


class Lazy:
    """An all-reduce that happens when it is waited for: who does not wait, has no sum."""

    def __init__(self, all_reduce) -> None:
        self.all_reduce, self.numbers = all_reduce, 0

    def __call__(self, flat: torch.Tensor) -> SimpleNamespace:
        self.numbers += flat.numel()
        return SimpleNamespace(wait=lambda: self.all_reduce(flat))


def see_wait(answer, setting):
    silent = two_steps(answer, setting, lambda flat: None)
    total = sum(p.numel() for p in net(setting).parameters() if p.requires_grad)
    if not setting.all_agree(all(step["sent"] == total for step in silent)):
        return silent  # the ranks' all-reduces might not fit: which are missing is seen without
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
        gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        seen.append({"got": numbers(gradients), "sent": lazy.numbers - before})
    return seen


def judge_wait(seen, setting):
    total = sum(map(len, gradients_of(setting, 0).values()))

    def of_step(step):
        return [(f"step {step + 1}, rank {n}: ", own[step]) for n, own in enumerate(seen)]

    for step in (0, 1):
        for where, own in of_step(step):
            if None in own["got"].values():
                none = next(name for name, value in own["got"].items() if value is None)
                return (
                    f"{where}{none} has no gradient: this rank's loss did not use it, and its "
                    "bucket was never started: the other ranks would wait for it"
                )
            if own["sent"] < total:
                return (
                    f"{where}{own['sent']} of {total} gradients were all-reduced: buckets with a "
                    "parameter that is not used never complete: start them after backward"
                )
            if own["sent"] > total:
                return f"{where}{own['sent']} numbers all-reduced for {total} weights: sent twice"
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
        "bytes / bucket size: a bucket is closed once it has 0.25 MiB or more": nbytes // BUCKET,
        "bytes / bucket size, rounded up: a bucket has 0.25 MiB or more": -(-nbytes // BUCKET),
        "one for everything: 0.25 MiB is less than the model": 1,
    }


def mistakes_of_bytes(right):
    return {
        "weights, not bytes: a float32 has 4": right / 4,
        "twice: that is what a ring of many ranks sends; one gradient is handed over": 2 * right,
        "half: gradients are float32 here, not bfloat16": right / 2,
    }


QUESTIONS = {
    "calls": Question("all-reduces", functools.partial(measure, "calls"), mistakes_of_calls),
    "bytes": Question("bytes", functools.partial(measure, "bytes"), mistakes_of_bytes),
}
