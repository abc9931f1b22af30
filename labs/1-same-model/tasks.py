"""Lab 1, the same model: what the grader runs, and which mistakes it names."""

import random
from itertools import chain, islice, pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from lab_parts.holes import import_lesson
from lab_parts.judging import (
    Question,
    compare_gradients,
    judge_each_rank,
    named,
    numbers,
    same,
)
from lab_parts.running import Setting, Task

LESSONS = {
    "labs/1-same-model/sampler.py": ("ShardedSampler",),
    "01-ddp-basics/ddp_from_scratch.py": (
        "trainable",
        "gradient_or_zeros",
        "average_each",
    ),
    "01-ddp-basics/ddp_mnist.py": ("evaluate",),
}


def samples(setting: Setting) -> int:
    """Return a number of samples that the ranks do not divide."""
    return setting.world_size * (6 + setting.draw(9)[0]) + 1


def samplers(kind, setting, rank):
    """Yield a sampler of the second epoch at its start and at three later positions.

    A job with another number of ranks may have saved a position: 2n + 1 is not a
    multiple of n. At the last one, too few samples are left.
    """
    n, number = setting.world_size, samples(setting)
    for position in (0, 2 * n, 2 * n + 1, number - 1):
        sampler = kind(number, rank, n, 1 + setting.seed)
        sampler.set_epoch(1)
        sampler.position = position
        yield str(position), sampler


# sampler: each rank takes every N-th index of the order, equally many


def see_sampler(answer, setting):
    mine = samplers(answer.ShardedSampler, setting, setting.rank)
    most = samples(setting) + 1
    return {
        name: [int(index) for index in islice(sampler, most)] for name, sampler in mine
    }


def judge_sampler(seen, setting):
    lesson = import_lesson("labs/1-same-model/sampler.py").ShardedSampler
    judged = set()
    for rank in range(setting.world_size):
        for position, sampler in samplers(lesson, setting, rank):
            parts = [ranks[position] for ranks in seen]
            if parts[rank] != list(sampler) and position not in judged:
                judged.add(position)  # one mistake looks different on other ranks
                fault = explain_part(parts, rank, sampler)
                yield f"position {position}, rank {rank}: {fault}"


def explain_part(parts, rank, sampler):
    """Say what is wrong with a rank's samples. parts: all ranks' samples."""
    got, expected, n = parts[rank], list(sampler), sampler.world_size
    order, position = sampler.global_order().tolist(), sampler.position
    rest = order[position:]
    dealt = list(chain(*parts))
    lengths = [len(part) for part in parts]
    most, least = lengths.index(max(lengths)), lengths.index(min(lengths))
    later = [order[rank::n][start:] for start in (position, position // n)]
    file = list(range(len(order)))[position:]
    twice = [index for index in dealt if dealt.count(index) > 1]
    if len(got) > sampler.num_samples:
        return "the samples do not end"
    if expected and all(part == got for part in parts):
        return f"all ranks take the same samples: each takes every {n}th"
    if got[: len(expected)] != expected and any(got == p[: len(got)] for p in later):
        return "`position` counts the samples of all ranks, not of this rank"
    if lengths[most] != lengths[least]:
        return (
            f"rank {most} has {lengths[most]} samples, rank {least} has "
            f"{lengths[least]}: rank {most} would take one more step, call its "
            "collective alone, and hang"
        )
    if twice:
        return f"sample {twice[0]} is dealt twice: leave the rest out"
    if expected and got == file[rank::n][: len(expected)]:
        return "it deals the samples in the order of the file: deal global_order()"
    if set(dealt) & set(order[:position]):
        return "samples before `position` come again: start at `position`"
    if got == rest[rank * len(expected) : (rank + 1) * len(expected)]:
        return (
            f"a block of the order, not every {n}th index: with another number of "
            "ranks, a global batch would have other samples"
        )
    if got[:4] == expected[:4]:
        return f"{len(got)} samples came, {len(expected)} were expected"
    return f"{got[:4]}, ... came, {expected[:4]}, ... was expected"


# epoch: one order for all ranks, another one in each epoch


def see_epoch(answer, setting):
    torch.manual_seed(
        100 * setting.rank
    )  # of the model: other on each rank, as dropout's may be
    state, plain, orders = torch.get_rng_state(), random.getstate(), {}
    first = 1 + setting.seed  # a product of 0 and the epoch would forget the epoch
    for seed in (first, first + 7):
        sampler = answer.ShardedSampler(
            samples(setting), setting.rank, setting.world_size, seed
        )
        for epoch in (0, 1):
            sampler.set_epoch(epoch)
            orders[f"{seed - first} {epoch}"] = sampler.global_order().tolist()
    again = sampler.global_order().tolist()
    untouched = torch.equal(state, torch.get_rng_state()) and plain == random.getstate()
    return {"orders": orders, "again": again, "untouched": untouched}


def judge_epoch(seen, setting):
    for rank, got in enumerate(seen):
        where, orders = f"rank {rank}: ", got["orders"]
        first = orders["0 0"]
        if any(
            sorted(order) != list(range(samples(setting))) for order in orders.values()
        ):
            yield f"{where}the order has not each of {samples(setting)} samples once"
        steps = {after - before for before, after in pairwise(first)}
        if len(steps) < 4:  # also of the order rotated or reversed
            yield f"{where}the order is that of the file: shuffle it"
            continue  # the same order in each epoch is a consequence
        repeated = orders["7 1"] == got["again"]
        if not repeated:
            yield (
                f"{where}asked twice in an epoch, the order differs: make the "
                "generator anew"
            )
        if first == orders["0 1"]:
            yield (
                f"{where}epochs 0 and 1 have the same order: the epoch is not in the "
                "seed"
            )
        if first == orders["7 0"]:
            yield f"{where}another --seed gives the same order"
        if repeated and orders != seen[0]["orders"]:
            yield (
                f"{where}another order than rank 0's: ranks that shuffle by numbers "
                "of their own take some samples twice and others never"
            )
        if repeated and not got["untouched"]:
            yield (
                f"{where}torch's or Python's own random numbers were drawn from: use "
                "a Generator"
            )


# mean: after backward, each gradient is the mean over ranks


def net(setting: Setting) -> nn.Module:
    torch.manual_seed(setting.seed)
    model = nn.ModuleDict(
        {
            "body": nn.Linear(5, 7),
            "frozen": nn.Linear(7, 7),
            "odd": nn.Linear(7, 7),
            "head": nn.Linear(7, 2),
        }
    )
    model["frozen"].requires_grad_(False)
    return model


def backward(model: nn.Module, setting: Setting, rank: int) -> None:
    torch.manual_seed(setting.seed + 1000 + rank)
    h = model["frozen"](torch.tanh(model["body"](torch.randn(4, 5))))
    h = model["odd"](h) if rank == 0 else h  # the other ranks do not use it
    model["head"](h).square().mean().backward()


class Handle:
    """Stand in for an all-reduce: the sum is in the tensor only after `wait`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.total, self.waited = tensor, tensor.detach().clone(), False
        dist.all_reduce(self.total)

    def wait(self) -> None:
        if not self.waited:
            self.tensor.detach().copy_(self.total)
        self.waited = True


def see_mean(answer, setting):
    model = net(setting)
    backward(model, setting, setting.rank)
    before = numbers(model.state_dict())
    handles = []

    def all_reduce(tensor):
        handles.append(Handle(tensor))
        return handles[-1]

    answer.average_each(model, all_reduce)
    gradients = {
        name: p.grad for name, p in model.named_parameters() if p.requires_grad
    }
    moved = not same(numbers(model.state_dict()), before)
    return {
        "got": numbers(gradients),
        "moved": moved,
        "early": sum(not handle.waited for handle in handles),
    }


@judge_each_rank
def judge_mean(got, rank, setting):
    expected, mistakes = mean_gradients(setting)
    if got["moved"]:
        yield "the weights have changed: it is gradients that are averaged"
    if got["early"]:
        yield (
            f"{got['early']} all-reduces are not waited for: the sum is in the tensor "
            "only after `.wait()` on the handle"
        )
    if not (got["moved"] or got["early"]):
        missing = "this rank did not use it: give it zeros"
        yield from compare_gradients(got["got"], expected, mistakes, missing)


def mean_gradients(setting: Setting) -> tuple[dict, dict]:
    """Return the mean gradient by name, and the results of mistakes by their words."""
    n, each = setting.world_size, []
    for rank in range(n):
        model = net(setting)
        backward(model, setting, rank)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        each.append(
            {
                name: torch.zeros_like(p) if p.grad is None else p.grad
                for name, p in trained.items()
            }
        )
    total = {name: sum(one[name] for one in each) for name in each[0]}

    def divided(gradients, by):
        return numbers({name: value / by for name, value in gradients.items()})

    mistakes = {
        f"gradients are {n} times too large: the sum over ranks, not the mean": divided(
            total, 1
        ),
        f"gradients are {n} times too small: divided by the ranks twice": divided(
            total, n**2
        ),
    }
    for rank, one in enumerate(each):
        words = f"rank {rank}'s own gradients"
        mistakes[f"{words}: no averaging"] = divided(one, 1)
        mistakes[f"{words}, divided by {n}: nothing was added up"] = divided(one, n)
    return divided(total, n), mistakes


# test: each test sample counts once, on whatever rank


def test_set(setting: Setting) -> TensorDataset:
    generator = setting.generator()
    # A thousand at a time: rank 0 has one chunk more than the other ranks.
    size = 2000 * setting.world_size + 1
    images = torch.randn(size, 6, generator=generator)
    labels = torch.randint(3, (size,), generator=generator)
    # The model gets the first sample right, so that repeating it counts.
    labels[:1] = classifier(setting)(images[:1]).argmax(dim=1)
    return TensorDataset(images, labels)


def classifier(setting: Setting) -> nn.Module:
    torch.manual_seed(setting.seed)
    return nn.Linear(6, 3)


def hits(setting: Setting) -> torch.Tensor:
    """Return which test samples the model gets right."""
    images, labels = test_set(setting).tensors
    with torch.no_grad():
        return classifier(setting)(images).argmax(dim=1) == labels


def see_test(answer, setting):
    model, rows = classifier(setting), []
    model.register_forward_hook(
        lambda _, images, scores: rows.append(scores[..., 0].numel())
    )
    accuracy, once = answer.evaluate(model, test_set(setting), torch.device("cpu"))
    return [float(accuracy), int(once), sum(rows)]


def judge_test(seen, setting):
    n, correct = setting.world_size, hits(setting)
    size, longest = len(correct), -(-len(correct) // n)
    accuracy = correct.double().mean().item()
    padded = torch.arange(n * longest) % size  # as DistributedSampler repeats samples
    whole = correct[: size // n * n]
    mistakes = {
        "some samples are repeated, to make parts equally long": correct[padded].sum()
        / (n * longest),
        "repeated samples are counted, and divided by the size of the set": correct[
            padded
        ].sum()
        / size,
        "every rank counts all samples: each takes a part": n * accuracy,
        "in percent: the accuracy is a number from 0 to 1": 100 * accuracy,
        "the wrong answers are counted": 1 - accuracy,
        "only the last chunk counts: add up over chunks": sum(
            correct[rank::n].split(1000)[-1].sum() for rank in range(n)
        )
        / size,
        "only the first chunk counts: add up over chunks": sum(
            correct[rank::n][:1000].sum() for rank in range(n)
        )
        / size,
        "the number of right answers: divide by the size of the set": accuracy * size,
        "divided by the ranks too: the sum is of all ranks already": accuracy / n,
        "the tail that does not fill all ranks is left out": whole.sum() / size,
        "the tail is left out, and is not in the divisor either": whole.double().mean(),
    }
    for rank in range(n):
        part = correct[rank::n]
        mistakes[f"only rank {rank}'s samples are counted: add up over ranks"] = (
            part.sum() / size
        )
        mistakes[f"rank {rank}'s own accuracy: add up what is right, then divide"] = (
            part.double().mean()
        )
    means = torch.stack([correct[rank::n].double().mean() for rank in range(n)]).mean()
    mistakes[
        "the mean of the ranks' accuracies: parts differ in length: add up, then divide"
    ] = means
    mistakes = {words: float(wrong) for words, wrong in mistakes.items()}
    exact = True
    for rank, (got, once, _) in enumerate(seen):
        if not abs(got - accuracy) < 1e-6:
            exact = False
            close = {w: m for w, m in mistakes.items() if abs(got - m) < 1e-6}
            yield f"rank {rank}: {named(got, accuracy, close)}"
        text = f"rank {rank}: {once} of {size} samples are counted just once"
        if once == len(correct[rank::n]):
            yield f"{text}: these are this rank's samples: add up the counts over ranks"
        elif once != size and exact:
            exact = False
            yield text
    if exact and (images := sum(each for _, _, each in seen)) > size:
        yield (
            f"the ranks' models saw {images} images, the set has {size}: each rank "
            "takes a part"
        )


TASKS = {
    "sampler": Task(see_sampler, judge_sampler),
    "epoch": Task(see_epoch, judge_epoch),
    "mean": Task(see_mean, judge_mean),
    "test": Task(see_test, judge_test),
}


# Predictions: 1,437 samples in micro-batches of 32 on 3 ranks, and of 48 on 2 ranks.

SAMPLES, MICRO, RANKS = 1437, 32, 3


def steps_of_an_epoch(answer, setting):
    sampler = answer.ShardedSampler(SAMPLES, setting.rank, RANKS)
    return len(sampler) // MICRO


def same_batch(answer, setting):
    """Return the micro-batch on 3 ranks that makes the global batch of 2 ranks."""
    orders = {
        ranks: [answer.ShardedSampler(SAMPLES, rank, ranks) for rank in range(ranks)]
        for ranks in (2, RANKS)
    }
    wanted = {index for one in orders[2] for index in list(one)[:48]}
    fits = (
        size
        for size in range(1, 97)
        if {i for one in orders[RANKS] for i in list(one)[:size]} == wanted
    )
    return next(fits)


QUESTIONS = {
    "steps": Question(
        "steps",
        steps_of_an_epoch,
        lambda measured: {
            "of one process: three ranks take three micro-batches a step": SAMPLES
            // MICRO,
            "rounded up: a last batch that is not full is left out": measured + 1,
        },
        RANKS,
    ),
    "micro": Question(
        "samples",
        same_batch,
        lambda measured: {
            "the global batch would grow with the ranks": 48,
            "that is the global batch: it is dealt to the ranks": 96,
            "the global batch gets smaller: divide by ranks, do not multiply": 72,
        },
        RANKS,
    ),
}
