"""Lab 2, DistributedDataParallel: what the grader runs, and which mistakes it names.

A judge compares a wrong result with the results of known mistakes.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace

import torch
from mean_gradients import (
    batch,
    bucket_bytes,
    judge_pack,
    judge_wait,
    mean_of,
    net,
    see_pack,
    see_wait,
)
from torch import nn

from dist_common.model import PRESETS, Transformer
from lab_parts.judging import (
    Question,
    describe_difference,
    judge_each_rank,
    numbers,
    same,
)
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


# start: every rank takes rank 0's weights and buffers


def see_start(answer, setting):
    model = net(setting, setting.rank)
    answer.start_equal(model)
    return numbers(model.state_dict())


def judge_start(seen, setting):
    drawn = [
        numbers(net(setting, rank).state_dict()) for rank in range(setting.world_size)
    ]
    sums = (mean_of(drawn), mean_of(drawn, setting.world_size))
    if all(same(got, drawn[0]) for got in seen):
        return
    if all(same(got, drawn[-1]) for got in seen):
        yield f"all ranks have rank {setting.world_size - 1}'s weights, not rank 0's"
        return
    if all(same(got, sums[0]) or same(got, sums[1]) for got in seen):
        yield (
            "the ranks' weights were added up or averaged: send rank 0's, by a "
            "broadcast"
        )
        return
    if not same(seen[0], drawn[0]):
        yield (
            "rank 0's own weights have changed: "
            f"{describe_difference(seen[0], drawn[0])}"
        )
        return
    rank, got = next((n, got) for n, got in enumerate(seen) if not same(got, drawn[0]))
    left = [name for name in got if not same(got[name], drawn[0][name])]
    if len(left) == len(got):
        yield f"rank {rank} keeps all of its own weights: no rank got rank 0's"
        return
    kinds = {"shift": "the buffer `shift`", "frozen.weight": "the frozen weights"}
    for what in [kinds[name] for name in left if name in kinds] or left[:1]:
        yield (
            f"rank {rank} keeps its own values of {what}: all parameters and buffers "
            "are sent"
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


def buckets_by(names, nbytes, size, closes=lambda bucket, more, size: bucket >= size):
    buckets, filled = [], 0
    for name in names:
        if not buckets or closes(filled, nbytes[name], size):
            buckets.append([])
            filled = 0
        buckets[-1].append(name)
        filled += nbytes[name]
    return buckets


@judge_each_rank
def judge_buckets(got, rank, setting):
    weights = dict(mixed_net(setting).named_parameters())
    last_first = [name for name, p in weights.items() if p.requires_grad][::-1]
    flat = {kind: list(itertools.chain(*buckets)) for kind, buckets in got.items()}
    sizes = bucket_sizes(setting)
    if wrong := [flat[kind] for kind in sizes if flat[kind] != last_first]:
        yield from explain_order(wrong[0], last_first)
    if fault := explain_closing(got, flat, weights, sizes):
        yield fault


def explain_order(flat: list[str], last_first: list[str]) -> Iterator[str]:
    """Yield what is wrong with the parameters in the buckets, and with their order."""
    if missing := [name for name in last_first if name not in flat]:
        yield f"{missing[0]} is in no bucket: its gradient would never be averaged"
    if twice := [name for name in flat if flat.count(name) > 1]:
        yield f"{twice[0]} is in the buckets twice: two modules share it, send it once"
    if frozen := [name for name in flat if name not in last_first]:
        yield f"{frozen[0]} gets no gradient: put trainable parameters in buckets only"
    known = [name for name in flat if name in last_first]
    places = [last_first.index(name) for name in dict.fromkeys(known)]
    if len(places) > 1 and places == sorted(places, reverse=True):
        yield "the first bucket has the first layer: backward completes the last first"
    elif places != sorted(places) and not twice:
        yield f"parameters are in the order {flat}, expected {last_first}"


def explain_closing(got, flat, weights, sizes) -> str | None:
    """Say why buckets of these parameters in this order are not closed at `sizes`."""
    nbytes = {name: weight.nbytes for name, weight in weights.items()}
    counts = {name: weight.numel() for name, weight in weights.items()}
    four = {name: 4 * count for name, count in counts.items()}
    rules = {
        None: lambda names, size: buckets_by(names, nbytes, size),
        "each parameter has a bucket of its own, whatever bucket_bytes is": (
            lambda names, size: [[name] for name in names]
        ),
        "one bucket holds everything: it is never closed at bucket_bytes": (
            lambda names, size: [names]
        ),
        "a bucket of exactly bucket_bytes has enough: close it": lambda names, size: (
            buckets_by(names, nbytes, size, lambda b, more, most: b > most)
        ),
        "buckets are closed before bucket_bytes: each has at least as many": (
            lambda names, size: buckets_by(
                names, nbytes, size, lambda b, more, most: b + more > most
            )
        ),
        "buckets are closed at bucket_bytes numbers, not bytes: use nbytes": (
            lambda names, size: buckets_by(names, counts, size)
        ),
        "not every number has 4 bytes: use nbytes": (
            lambda names, size: buckets_by(names, four, size)
        ),
    }
    for words, rule in rules.items():
        if all(got[kind] == rule(flat[kind], size) for kind, size in sizes.items()):
            return words
    for kind, size in sizes.items():
        pairs = zip(got[kind], rules[None](flat[kind], size), strict=False)
        for number, (came, expected) in enumerate(pairs):
            if came != expected:
                return f"bucket {number} of {size} bytes is {came}, expected {expected}"
    return OTHER_FORM


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
    if not all(all(got["buckets"]) for got in seen):
        yield OTHER_FORM
        return
    if any(got["waits"] for got in seen):
        yield (
            "the hook waits for a sum, and backward stops meanwhile: wait after "
            "backward"
        )
    for rank, got in enumerate(seen):
        if fault := explain_starts(got, expected_starts(got)):
            yield f"rank {rank}: {fault}"
            return  # ranks that use other weights show one mistake in other words


def explain_starts(ends: dict, expected: list[int]) -> str | None:
    """Say what is wrong with the starts of the buckets; None if they are right."""
    sizes, total = ends["sizes"], len(ends["complete"])
    started = [size for size, _ in ends["calls"]]
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


TASKS = {
    "start": Task(see_start, judge_start),
    "buckets": Task(see_buckets, judge_buckets),
    "pack": Task(see_pack, judge_pack),
    "hook": Task(see_hook, judge_hook),
    "wait": Task(see_wait, judge_wait),
}
WHOLE = TASKS["wait"]


# Predictions: the preset `tiny` in buckets of 0.25 MiB.


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


def mistakes_of_calls(measured):
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


def mistakes_of_bytes(measured):
    return {
        "weights, not bytes: a float32 has 4": measured / 4,
        "twice: that is what a ring of many ranks sends; one gradient is handed over": 2
        * measured,
        "half: gradients are float32 here, not bfloat16": measured / 2,
    }


QUESTIONS = {
    "calls": Question(
        "all-reduces", functools.partial(measure, "calls"), mistakes_of_calls
    ),
    "bytes": Question("bytes", functools.partial(measure, "bytes"), mistakes_of_bytes),
}
