"""Lab 4, ZeRO stages 1 and 2: what the grader runs, and which mistakes it names."""

import itertools
from functools import partial

import torch
import torch._dynamo  # an optimizer imports it: once here, not for seconds in each rank
from clipping import NORM, judge_clip, loss_of, make_adam, model_of, see_clip, zero_of
from torch import nn

from dist_common.check import CollectiveCounter
from lab_parts.judging import Question, judge_each_rank, named, numbers, same
from lab_parts.running import Setting, Task
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


@judge_each_rank
def judge_bucket(got, rank, setting):
    n = setting.world_size
    yield from judge_reduce(got["ends"], rank, setting, "bucket.gradient")
    keeps_all = len(got["ends"][0]["part"] or []) == got["numbers"]
    if got["all-reduces"] and not keeps_all:
        yield "an all-reduce sends twice as much as a reduce-scatter"
    if not got["all-reduces"] and got["low"] < 4 * got["numbers"] * (n - 1) / n:
        yield (
            "bfloat16 gradients are sent as bfloat16: send them in self.reduce_dtype"
        )


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


@judge_each_rank
def judge_gather(got, rank, setting):
    ranks, start = setting.world_size, tensors(setting, 0)
    whole = padded(start, ranks)
    parts = [part + 1 + r for r, part in enumerate(whole.chunk(ranks))]

    def cut(vector):
        sizes = [tensor.numel() for tensor in start]
        return numbers(dict(enumerate_names(vector[: sum(sizes)].split(sizes))))

    mistakes = {}
    for r in range(ranks):
        only = [part if n == r else part - 1 - n for n, part in enumerate(parts)]
        mistakes[
            f"only rank {r}'s part is new: no gather into bucket.flat, which the "
            "parameters view"
        ] = cut(torch.cat(only))
        mistakes[f"rank {r}'s part stands everywhere"] = cut(parts[r].repeat(ranks))
    mistakes["the parts stand in another order"] = cut(torch.cat(parts[::-1]))
    mistakes["nothing is new: the parameters are as before the step"] = cut(whole)
    expected = cut(torch.cat(parts))
    if not same(got["got"], expected):
        yield named(got["got"], expected, mistakes)


# optimizer, step: a small model in both stages; clip is in clipping.py


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


@judge_each_rank
def judge_optimizer(got, rank, setting):
    whole = sum(p.numel() for p in model_of(setting).parameters())
    enough = -(-whole // setting.world_size)
    if got["numbers"] >= whole:
        yield (
            f"the optimizer gets {got['numbers']} numbers: its state is not sharded; "
            f"with this rank's parts it is {enough} or a few more"
        )
    elif not all(got["parts"]):
        yield "the optimizer gets copies: what it updates is not bucket.part"
    if len(got["parts"]) < got["buckets"]:
        yield f"{len(got['parts'])} parts of {got['buckets']} buckets: some never move"
    if not got["kept"]:
        yield "self.optimizer is not what one call of make_optimizer returns"


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
    expected, unclipped = alone(setting, None, NORM), alone(setting, None, None)
    for rank, got in enumerate(seen):
        where, steps = f"rank {rank}: ", got["dtypes"]
        if len(steps) != 6:  # of two stages: two in float32, one in bfloat16
            yield f"{where}the optimizer takes {len(steps)} steps instead of 6"
        elif not all(steps):
            yield f"{where}no part.grad is set when the optimizer steps"
        elif any(dtype != "torch.float32" for dtype in itertools.chain(*steps)):
            yield f"{where}part.grad has another type than the float32 part"
    if any(len(got["dtypes"]) != 6 or not all(got["dtypes"]) for got in seen):
        return
    for rank, got in enumerate(seen):
        for stage in ("1", "2"):
            firsts = [other[stage][0] for other in seen]
            if wrong := explain_steps(*got[stage], firsts, start, expected, unclipped):
                yield f"stage {stage}, rank {rank}: {wrong}"
        if got["reduced"]:
            yield (
                f"stage 2, rank {rank}: backward has reduced all buckets: step sends "
                "them again"
            )


def explain_steps(first, second, firsts, start, expected, unclipped):
    """Judge the weights after two steps. firsts: all ranks' weights after the first."""
    if same(first, start):
        return "no weight has changed after a step: gather the updated parts"
    if not same(first, expected[0]):
        if any(not same(first, other) for other in firsts):
            return (
                "the ranks have different weights after a step: each has updated its "
                "part and does not have the other ranks' parts"
            )
        still = [name for name in first if same(first[name], start[name])]
        if still:
            return f"{still[0]} has not changed: a bucket is left out"
        return f"after a step, {named(first, expected[0], {})}"
    if same(second, expected[1]):
        return None
    if same(second, unclipped[1]):
        return "max_grad_norm changes nothing: clip before the optimizer's step"
    return (
        f"the second step differs: {named(second, expected[1], {})}: do the first "
        "step's gradients stay?"
    )


TASKS = {
    "optimizer": Task(see_optimizer, judge_optimizer),
    "reduce": Task(see_reduce, judge_bucket),
    "gather": Task(see_gather, judge_gather),
    "clip": Task(see_clip, judge_clip),
    "step": Task(see_step, judge_step),
}
WHOLE = TASKS["step"]


# Predictions: 12,000 weights and Adam in float32, 4 ranks, 5 micro-batches
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
        lambda measured: {
            "that of all weights, as DDP holds it": 2 * BYTES,
            "one moment: Adam has two": measured / 2,
            "with the weights: these are no optimizer state": measured + BYTES / RANKS,
        },
        RANKS,
    ),
    "stage_1": Question(
        "bytes",
        partial(measure, "stage_1"),
        lambda measured: {
            "gradients alone: the updated weights are gathered": BYTES,
            "what a rank sends, (N - 1)/N of it: asked are whole vectors": measured
            * (RANKS - 1)
            / RANKS,
            "that is stage 2, which reduces in each micro-batch": (MICRO + 1) * BYTES,
        },
        RANKS,
    ),
    "stage_2": Question(
        "bytes",
        partial(measure, "stage_2"),
        lambda measured: {
            "that is stage 1, which reduces once a step": 2 * BYTES,
            "without the all-gather after the step": MICRO * BYTES,
            "what a rank sends, (N - 1)/N of it: asked are whole vectors": measured
            * (RANKS - 1)
            / RANKS,
            "weights are gathered once a step, not in each micro-batch": 2
            * MICRO
            * BYTES,
        },
        RANKS,
    ),
}
