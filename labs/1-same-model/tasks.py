"""Lab 1, the same model: how an answer is looked at, and which mistake a wrong one
shows.
"""

import random
from itertools import chain, islice, pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from lab_parts.holes import import_lesson
from lab_parts.judging import Question, named, numbers, same
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
    for rank in range(setting.world_size):
        for position, sampler in samplers(lesson, setting, rank):
            parts = [ranks[position] for ranks in seen]
            if parts[rank] == list(sampler):
                continue
            where = f"position {position}, rank {rank}: "
            return where + explain_part(parts, rank, sampler)
    return None


def explain_part(parts, rank, sampler):
    """Say what is wrong with the samples of a rank. parts: those of all ranks."""
    got, right, n = parts[rank], list(sampler), sampler.world_size
    order, position = sampler.global_order().tolist(), sampler.position
    rest = order[position:]
    dealt = list(chain(*parts))
    lengths = [len(part) for part in parts]
    most, least = lengths.index(max(lengths)), lengths.index(min(lengths))
    later = [order[rank::n][start:] for start in (position, position // n)]
    twice = [index for index in dealt if dealt.count(index) > 1]
    if len(got) > sampler.num_samples:
        return "the samples do not end"
    if got and all(part == got for part in parts):
        return f"all ranks take the same samples: each takes every {n}th"
    if position and got and any(got == part[: len(got)] for part in later):
        return "`position` counts the samples of all ranks, not of this rank"
    if lengths[most] != lengths[least]:
        return (
            f"rank {most} has {lengths[most]} samples, rank {least} has "
            f"{lengths[least]}: rank {most} would take one more step, call its "
            "collective alone, and hang"
        )
    if twice:
        return f"sample {twice[0]} is dealt twice: leave the rest out"
    if set(dealt) & set(order[:position]):
        return "samples before `position` come again: start at `position`"
    if got == list(range(len(order)))[rank::n][: len(right)]:
        return "it deals the samples in the order of the file: deal global_order()"
    if got == rest[rank * len(right) : (rank + 1) * len(right)]:
        return (
            f"a block of the order, not every {n}th index: with another number of "
            "ranks, a global batch would have other samples"
        )
    if got[:4] == right[:4]:
        return f"{len(got)} samples came, {len(right)} were expected"
    return f"{got[:4]}, ... came, {right[:4]}, ... was expected"


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
    for rank, own in enumerate(seen):
        where, orders = f"rank {rank}: ", own["orders"]
        first = orders["0 0"]
        if any(
            sorted(order) != list(range(samples(setting))) for order in orders.values()
        ):
            return f"{where}the order has not each of {samples(setting)} samples once"
        steps = {after - before for before, after in pairwise(first)}
        if len(steps) < 4:  # also of the order rotated or reversed
            return f"{where}the order is that of the file: shuffle it"
        if orders["7 1"] != own["again"]:
            return (
                f"{where}asked twice in an epoch, the order differs: make the "
                "generator anew"
            )
        if first == orders["0 1"]:
            return (
                f"{where}epochs 0 and 1 have the same order: the epoch is not in the "
                "seed"
            )
        if first == orders["7 0"]:
            return f"{where}another --seed gives the same order"
        if orders != seen[0]["orders"]:
            return (
                f"{where}another order than rank 0's: ranks that shuffle by numbers "
                "of their own "
                "take some samples twice and others never"
            )
        if not own["untouched"]:
            return (
                f"{where}torch's or Python's own random numbers were drawn from: use "
                "a Generator"
            )
    return None


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


def judge_mean(seen, setting):
    n, own_gradients = setting.world_size, []
    for rank in range(n):
        model = net(setting)
        backward(model, setting, rank)
        own_gradients.append(
            {
                name: torch.zeros_like(p) if p.grad is None else p.grad
                for name, p in model.named_parameters()
                if p.requires_grad
            }
        )
    total = {name: sum(own[name] for own in own_gradients) for name in own_gradients[0]}
    right = numbers({name: value / n for name, value in total.items()})
    mistakes = {
        f"gradients are {n} times too large: the sum over ranks, not the mean": numbers(
            total
        ),
        f"gradients are {n} times too small: divided by the ranks twice": numbers(
            {name: value / n**2 for name, value in total.items()}
        ),
    }
    for rank, own in enumerate(own_gradients):
        mistakes[f"rank {rank}'s own gradients: no averaging"] = numbers(own)
        mistakes[
            f"rank {rank}'s own gradients, divided by {n}: nothing was added up"
        ] = numbers({name: value / n for name, value in own.items()})
    for rank, own in enumerate(seen):
        if own["moved"]:
            return (
                f"rank {rank}: the weights have changed: it is gradients that are "
                "averaged"
            )
        if own["early"]:
            return (
                f"rank {rank}: {own['early']} all-reduces are not waited for: the sum "
                "is in the "
                "tensor only after `.wait()` on the handle"
            )
        if None in own["got"].values():
            return (
                f"rank {rank}: a parameter that this rank did not use has no "
                "gradient: zeros"
            )
        if not same(own["got"], right):
            return f"rank {rank}: {named(own['got'], right, mistakes)}"
    return None


# test: each test sample counts once, on whatever rank


def test_set(setting: Setting) -> TensorDataset:
    generator = setting.generator()
    size = (
        1000 * setting.world_size + 1
    )  # a thousand at a time, rank 0 has one piece more
    images = torch.randn(size, 6, generator=generator)
    return TensorDataset(images, torch.randint(3, (len(images),), generator=generator))


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
    n, right = setting.world_size, hits(setting)
    size, longest = len(right), -(-len(right) // n)
    accuracy = right.double().mean().item()
    padded = torch.arange(n * longest) % size  # as DistributedSampler repeats samples
    whole = right[: size // n * n]
    mistakes = {
        "some samples are repeated, to make parts equally long": right[padded].sum()
        / (n * longest),
        "repeated samples are counted, and divided by the size of the set": right[
            padded
        ].sum()
        / size,
        "every rank counts all samples: each takes a part": n * accuracy,
        "in percent: the accuracy is a number from 0 to 1": 100 * accuracy,
        "the wrong answers are counted": 1 - accuracy,
        "only the last chunk counts: add up over chunks": sum(
            right[rank::n].split(1000)[-1].sum() for rank in range(n)
        )
        / size,
        "only the first chunk counts: add up over chunks": sum(
            right[rank::n][:1000].sum() for rank in range(n)
        )
        / size,
        "the number of right answers: divide by the size of the set": accuracy * size,
        "divided by the ranks too: the sum is of all ranks already": accuracy / n,
        "the tail that does not fill all ranks is left out": whole.sum() / size,
        "the tail is left out, and is not in the divisor either": whole.double().mean(),
    }
    for rank in range(n):
        part = right[rank::n]
        mistakes[f"only rank {rank}'s samples are counted: add up over ranks"] = (
            part.sum() / size
        )
        mistakes[f"rank {rank}'s own accuracy: add up what is right, then divide"] = (
            part.double().mean()
        )
    means = torch.stack([right[rank::n].double().mean() for rank in range(n)]).mean()
    mistakes[
        "the mean of the ranks' accuracies: parts differ in length: add up, then divide"
    ] = means
    mistakes = {words: float(wrong) for words, wrong in mistakes.items()}
    for rank, (got, once, _) in enumerate(seen):
        if not abs(got - accuracy) < 1e-6:
            said = named(
                got,
                accuracy,
                {w: m for w, m in mistakes.items() if abs(got - m) < 1e-6},
            )
            return f"rank {rank}: {said}"
        if once != size:
            text = f"rank {rank}: {once} of {size} samples are counted just once"
            if once == len(right[rank::n]):
                text += ": these are this rank's samples: add up the counts over ranks"
            return text
    if (images := sum(each for _, _, each in seen)) > size:
        return (
            f"the ranks' models saw {images} images, the set has {size}: each rank "
            "takes a part"
        )
    return None


TASKS = {
    "sampler": Task(see_sampler, judge_sampler),
    "epoch": Task(see_epoch, judge_epoch),
    "mean": Task(see_mean, judge_mean),
    "test": Task(see_test, judge_test),
}


# What is to be predicted: 1,437 samples in micro-batches of 32 on 3 ranks; and of 48 on
# 2.

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
        lambda right: {
            "of one process: three ranks take three micro-batches a step": SAMPLES
            // MICRO,
            "rounded up: a last batch that is not full is left out": right + 1,
        },
        RANKS,
    ),
    "micro": Question(
        "samples",
        same_batch,
        lambda right: {
            "the global batch would grow with the ranks": 48,
            "that is the global batch: it is dealt to the ranks": 96,
            "the global batch gets smaller: divide by ranks, do not multiply": 72,
        },
        RANKS,
    ),
}
