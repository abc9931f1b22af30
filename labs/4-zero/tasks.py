"""Lab 4, ZeRO stages 1 and 2: how an answer is looked at, and which mistake a wrong one
shows.
"""

import itertools
from functools import partial

import torch
import torch._dynamo  # an optimizer imports it: once here, not for seconds in each rank
from torch import nn

from dist_common.check import CollectiveCounter
from dist_common.runtime import gather
from lab_parts.judging import Question, named, numbers, same
from lab_parts.running import OTHER_FORM, Setting, Task
from lab_parts.shards import judge_reduce, kept, padded, set_gradients, tensors

LESSONS = {
    "03-deepspeed/zero_from_scratch.py": (
        "MIB",
        "all_gather_single",
        "reduce_scatter_single",
        "flatten",
        "part_of",
        "group_parameters",
        "Bucket",
        "Zero",
    ),
}
NORM = 0.05  # to clip to: smaller than the norm of any gradient here
LARGER = 10  # makes the norm of the gradient in `clip` more than 1
MIB = 2**20


def bucket_of(answer, setting):
    parameters = [nn.Parameter(tensor) for tensor in tensors(setting, 0)]
    return answer.Bucket(parameters, torch.float32, torch.float32), parameters


# reduce: this rank's part of the mean gradient


def see_reduce(answer, setting):
    bucket, parameters = bucket_of(answer, setting)
    ends = []
    with CollectiveCounter() as counter:
        for micro in (0, 1, 2):
            set_gradients(parameters, setting, micro)
            bucket.reduce()
            ends.append(kept(parameters, bucket.gradient))
    low = answer.Bucket(
        [nn.Parameter(t) for t in tensors(setting, 0)], torch.bfloat16, torch.float32
    )
    for parameter, gradient in zip(low.parameters, tensors(setting, 1), strict=True):
        parameter.grad = gradient.bfloat16()
    with CollectiveCounter() as low_counter:
        low.reduce()
    return {
        "ends": ends,
        "numbers": len(low.flat),
        "all-reduces": counter.calls["all_reduce"],
        "low": low_counter.bytes_sent["reduce_scatter"],
    }


def judge_bucket(seen, setting):
    n = setting.world_size
    if wrong := judge_reduce([own["ends"] for own in seen], setting, "bucket.gradient"):
        return wrong
    for rank, ends in enumerate(seen):
        if ends["all-reduces"]:
            return f"rank {rank}: an all-reduce sends twice as much as a reduce-scatter"
        if ends["low"] < 4 * ends["numbers"] * (n - 1) / n:
            return (
                f"rank {rank}: bfloat16 gradients are sent as bfloat16: send them in "
                "self.reduce_dtype"
            )
    return None


# gather: the parts that the ranks have updated, to all of them


def see_gather(answer, setting):
    bucket, parameters = bucket_of(answer, setting)
    with torch.no_grad():
        bucket.part += 1 + setting.rank  # as an optimizer's step would
    bucket.gather()
    low = answer.Bucket(
        [nn.Parameter(t) for t in tensors(setting, 0)], torch.bfloat16, torch.float32
    )
    low.gather()
    return {
        "got": numbers(dict(enumerate_names(parameters))),
        "low": str(low.flat.dtype),
    }


def enumerate_names(values):
    return [(f"parameter {n}", value) for n, value in enumerate(values)]


def judge_gather(seen, setting):
    ranks, start = setting.world_size, tensors(setting, 0)
    whole = padded(start, ranks)
    parts = [part + 1 + rank for rank, part in enumerate(whole.chunk(ranks))]

    def cut(vector):
        sizes = [tensor.numel() for tensor in start]
        return numbers(dict(enumerate_names(vector[: sum(sizes)].split(sizes))))

    right, mistakes = cut(torch.cat(parts)), {}
    for rank in range(ranks):
        own = [p if r == rank else p - 1 - r for r, p in enumerate(parts)]
        only = (
            f"only rank {rank}'s part is new: no gather into bucket.flat, which the "
            "parameters view"
        )
        mistakes[only] = cut(torch.cat(own))
        mistakes[f"rank {rank}'s part stands everywhere"] = cut(
            parts[rank].repeat(ranks)
        )
    mistakes["the parts stand in another order"] = cut(torch.cat(parts[::-1]))
    mistakes["nothing is new: the parameters are as before the step"] = cut(whole)
    for rank, own in enumerate(seen):
        if not same(own["got"], right):
            return f"rank {rank}: {named(own['got'], right, mistakes)}"
    return None


# optimizer, clip, step: a small model in both stages


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


def see_optimizer(answer, setting):
    given = []

    def make(parameters):
        given.extend(parameters)
        return make_adam(given)

    _, zero = zero_of(answer, setting, 1, make)
    parts = {id(bucket.part) for bucket in zero.buckets}
    optimizer = getattr(zero, "optimizer", None)
    return {
        "numbers": sum(t.numel() for t in given),
        "parts": [id(t) in parts for t in given],
        "buckets": len(zero.buckets),
        "kept": isinstance(optimizer, torch.optim.Adam),
    }


def judge_optimizer(seen, setting):
    whole = sum(p.numel() for p in model_of(setting).parameters())
    for rank, own in enumerate(seen):
        where, enough = f"rank {rank}: ", -(-whole // setting.world_size)
        if own["numbers"] >= whole:
            return (
                f"{where}the optimizer gets {own['numbers']} numbers: its state is "
                "not sharded; "
                f"with this rank's parts it is {enough} or a few more"
            )
        if not all(own["parts"]):
            return (
                f"{where}the optimizer gets copies: what it updates is not bucket.part"
            )
        if len(own["parts"]) < own["buckets"]:
            return (
                f"{where}{len(own['parts'])} parts of {own['buckets']} buckets: some "
                "never move"
            )
        if not own["kept"]:
            return (
                f"{where}self.optimizer is not what one call of make_optimizer returns"
            )
    return None


def alone(setting: Setting, *clips: float | None) -> list[dict]:
    """Return the weights after each step of one process, by name; each clips to its
    norm.
    """
    model, ends = model_of(setting), []
    optimizer = make_adam(model.parameters())
    for step, clip in enumerate(clips):
        optimizer.zero_grad()
        n = setting.world_size
        sum(loss_of(model, setting, rank, step) / n for rank in range(n)).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        ends.append(numbers(dict(model.named_parameters())))
    return ends


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
    n = setting.world_size
    model = model_of(setting)
    sum(loss_of(model, setting, rank, 0) / n for rank in range(n)).backward()
    right = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
    right *= LARGER
    norms = [sum(own["squares"]) ** 0.5 for own in seen]
    for rank, own in enumerate(seen):
        if [bool(end["factors"]) for end in own["ends"]] != [True] * 3:
            return OTHER_FORM
        for end in own["ends"]:
            if end["norm"] is None:
                return f"rank {rank}: clip returns nothing: return the norm"
            mistakes = {
                "the norm of this rank's parts: add up the squares over ranks": norms[
                    rank
                ],
                "the sum of the ranks' norms: add up squares, not norms": sum(norms),
                "the square of the norm: take the root": right**2,
                "a norm divided by the ranks": right / n,
                "the squares are averaged over the ranks: add them up": right / n**0.5,
                "the norm after clipping: return the one before": end["bound"],
                "the norm of the last bucket: one norm for all buckets": sum(
                    own["squares"][-1] for own in seen
                )
                ** 0.5,
            }
            if not same(end["norm"], right):
                return f"rank {rank}: {named(end['norm'], right, mistakes)}"
        if wrong := explain_factors(own["ends"], right):
            return f"rank {rank}: {wrong}"
    return None


def explain_factors(ends: list[dict], norm: float) -> str | None:
    """Say what is wrong with the factors of the gradients; None if they are right."""
    expected = {
        None: lambda bound: min(1, bound / norm),
        "a smaller gradient is scaled up: scale down only": lambda bound: bound / norm,
        "gradients are not scaled: scale part.grad, which the optimizer reads": (
            lambda bound: 1
        ),
        "the factor is 1 / norm: it is max_grad_norm / norm": lambda bound: 1 / norm,
        "the factor is norm / max_grad_norm: it is the inverse": (
            lambda bound: norm / bound
        ),
        "the factor is norm / max_grad_norm, at most 1: it is the inverse": (
            lambda bound: min(1, norm / bound)
        ),
        "the factor is max_grad_norm: divide it by the norm": lambda bound: bound,
    }
    for words, factor in expected.items():
        factors = [abs(f / factor(e["bound"]) - 1) for e in ends for f in e["factors"]]
        if all(distance < 1e-3 for distance in factors):
            return words
    for end in ends:
        for factor in end["factors"]:
            right = min(1, end["bound"] / norm)
            if abs(factor / right - 1) >= 1e-3:
                return (
                    f"norm {norm:.3g}, max_grad_norm {end['bound']:.3g}: a gradient is "
                    f"scaled by {factor:.3g}, expected {right:.3g}, the same on all "
                    "ranks"
                )
    return None


def see_step(answer, setting):
    ends, dtypes = {}, []

    def make(parameters):
        optimizer = make_adam(parameters)
        optimizer.register_step_pre_hook(note)
        return optimizer

    def note(optimizer, args, kwargs):
        parts = optimizer.param_groups[0]["params"]
        dtypes.append([str(part.grad.dtype) for part in parts if part.grad is not None])

    for stage in (1, 2):
        model, zero = zero_of(answer, setting, stage, make)
        ends[str(stage)] = []
        for step in (0, 1):
            loss_of(model, setting, setting.rank, step).backward()
            with CollectiveCounter() as counter:
                zero.step(NORM if step else None)
            ends[str(stage)].append(numbers(dict(model.named_parameters())))
        low, zero = zero_of(answer, setting, stage, make, torch.bfloat16)
        loss_of(low, setting, setting.rank, 0).backward()
        zero.step()
    return ends | {"reduced": counter.calls["reduce_scatter"], "dtypes": dtypes}


def judge_step(seen, setting):
    start = numbers(dict(model_of(setting).named_parameters()))
    right, unclipped = alone(setting, None, NORM), alone(setting, None, None)
    for rank, ends in enumerate(seen):
        steps = ends["dtypes"]
        if len(steps) != 6:  # of two stages: two in float32, one in bfloat16
            return f"rank {rank}: the optimizer takes {len(steps)} steps instead of 6"
        if not all(steps):
            return f"rank {rank}: no part.grad is set when the optimizer steps"
    for rank, own in enumerate(seen):
        for stage in ("1", "2"):
            firsts = [other[stage][0] for other in seen]
            if wrong := explain_steps(*own[stage], firsts, start, right, unclipped):
                return f"stage {stage}, rank {rank}: {wrong}"
        if own["reduced"]:
            return (
                f"stage 2, rank {rank}: backward has reduced all buckets: step sends "
                "them again"
            )
        if any(dtype != "torch.float32" for dtype in itertools.chain(*own["dtypes"])):
            return f"rank {rank}: part.grad has another type than the float32 part"
    return None


def explain_steps(first, second, firsts, start, right, unclipped):
    """Judge the weights after two steps. firsts: all ranks' weights after the first."""
    if same(first, start):
        return "no weight has changed after a step: gather the updated parts"
    if not same(first, right[0]):
        if any(not same(first, other) for other in firsts):
            return (
                "the ranks have different weights after a step: each has updated its "
                "part and does not have the other ranks' parts"
            )
        still = [name for name in first if same(first[name], start[name])]
        if still:
            return f"{still[0]} has not changed: a bucket is left out"
        return f"after a step, {named(first, right[0], {})}"
    if same(second, right[1]):
        return None
    if same(second, unclipped[1]):
        return "max_grad_norm changes nothing: clip before the optimizer's step"
    return (
        f"the second step differs: {named(second, right[1], {})}: do the first step's "
        "gradients stay?"
    )


TASKS = {
    "optimizer": Task(see_optimizer, judge_optimizer),
    "reduce": Task(see_reduce, judge_bucket),
    "gather": Task(see_gather, judge_gather),
    "clip": Task(see_clip, judge_clip),
    "step": Task(see_step, judge_step),
}
WHOLE = TASKS["step"]


# What is to be predicted: 12,000 weights and Adam in float32, 4 ranks, 5 micro-batches
# a step.

WEIGHTS, RANKS, MICRO = 12_000, 4, 5


def measure(kind, answer, setting):
    """Return bytes: of Adam's state on this rank, or of a step's collectives."""
    model = nn.Linear(WEIGHTS, 1, bias=False)
    stage = 1 if kind == "stage_1" else 2
    zero = answer.Zero(model.parameters(), make_adam, stage, dtype=torch.float32)
    with CollectiveCounter() as counter:
        for _ in range(MICRO):
            model(torch.ones(1, WEIGHTS)).sum().backward()
        zero.step()
    if kind == "state":
        states = zero.optimizer.state.values()
        return sum(t.nbytes for state in states for t in state.values() if t.dim())
    return sum(counter.bytes_sent.values()) * RANKS / (RANKS - 1)


BYTES = 4 * WEIGHTS
QUESTIONS = {
    "state": Question(
        "bytes",
        partial(measure, "state"),
        lambda right: {
            "that of all weights, as DDP holds it": 2 * BYTES,
            "one moment: Adam has two": right / 2,
            "with the weights: these are no optimizer state": right + BYTES / RANKS,
        },
        RANKS,
    ),
    "stage_1": Question(
        "bytes",
        partial(measure, "stage_1"),
        lambda right: {
            "gradients alone: the updated weights are gathered": BYTES,
            "what a rank sends, (N - 1)/N of it: asked are whole vectors": right
            * (RANKS - 1)
            / RANKS,
            "that is stage 2, which reduces in each micro-batch": (MICRO + 1) * BYTES,
        },
        RANKS,
    ),
    "stage_2": Question(
        "bytes",
        partial(measure, "stage_2"),
        lambda right: {
            "that is stage 1, which reduces once a step": 2 * BYTES,
            "without the all-gather after the step": MICRO * BYTES,
            "what a rank sends, (N - 1)/N of it: asked are whole vectors": right
            * (RANKS - 1)
            / RANKS,
            "weights are gathered once a step, not in each micro-batch": 2
            * MICRO
            * BYTES,
        },
        RANKS,
    ),
}
