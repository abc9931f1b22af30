"""Lab 4, ZeRO stages 1 and 2: how an answer is looked at, and which mistake a wrong one shows."""

from functools import partial

import torch
import torch._dynamo  # an optimizer imports it: once here, not for seconds in each rank
from torch import nn

from lab_parts.judging import Question, named, numbers, same
from lab_parts.running import Setting, Task
from lab_parts.shards import judge_reduce, kept, padded, set_gradients, tensors
from legacy_common.lab.traffic import TrafficCounter

LESSONS = {
    "03-deepspeed/zero_from_scratch.py": (
        "MIB", "all_gather_single", "reduce_scatter_single", "flatten", "part_of",
        "group_parameters", "Bucket", "Zero",
    ),
}  # fmt: skip
TITLE = "Lab 4: fill the holes until `python labs/grade.py 4` says right everywhere."
NORM = 0.05  # to clip to: less than any gradient here has
MIB = 2**20


def bucket_of(answer, setting):
    parameters = [nn.Parameter(tensor) for tensor in tensors(setting, 0)]
    return answer.Bucket(parameters, torch.float32, torch.float32), parameters


# reduce: this rank's part of the mean gradient


def see_reduce(answer, setting):
    bucket, parameters = bucket_of(answer, setting)
    ends = []
    with TrafficCounter() as traffic:
        for micro in (0, 1):
            set_gradients(parameters, setting, micro)
            bucket.reduce()
            ends.append(kept(parameters, bucket.gradient))
    low = answer.Bucket(
        [nn.Parameter(t) for t in tensors(setting, 0)], torch.bfloat16, torch.float32
    )
    low_gradients = [tensor.bfloat16() for tensor in tensors(setting, 1)]
    for parameter, gradient in zip(low.parameters, low_gradients, strict=True):
        parameter.grad = gradient
    with TrafficCounter() as low_traffic:
        low.reduce()
    sent = {"all-reduces": traffic.calls["all_reduce"], "low": sum(low_traffic.nbytes.values())}
    return {"ends": ends, "numbers": len(low.flat), **sent}


def judge_bucket(seen, setting):
    if wrong := judge_reduce([own["ends"] for own in seen], setting, "bucket.gradient"):
        return wrong
    for rank, own in enumerate(seen):
        if own["all-reduces"]:
            return f"rank {rank}: an all-reduce sends twice as much as a reduce-scatter"
        if own["low"] < 4 * own["numbers"]:
            return f"rank {rank}: bfloat16 gradients are sent as such: send in self.reduce_dtype"
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
    return {"got": numbers(dict(enumerate_names(parameters))), "low": str(low.flat.dtype)}


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
            f"only rank {rank}'s part is new: no gather into bucket.flat, which the parameters view"
        )
        mistakes[only] = cut(torch.cat(own))
        mistakes[f"rank {rank}'s part stands everywhere"] = cut(parts[rank].repeat(ranks))
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
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(),
                         nn.Linear(width, 2))  # fmt: skip


def loss_of(model: nn.Module, setting: Setting, rank: int, step: int) -> torch.Tensor:
    torch.manual_seed(setting.seed + 100 * (step + 1) + rank)
    return model(torch.randn(5, 4)).square().mean()


def make_adam(parameters):
    return torch.optim.Adam(parameters, lr=0.05)


def zero_of(answer, setting, stage, make=make_adam):
    model = model_of(setting)
    options = {"dtype": torch.float32, "bucket_bytes": 200}
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
        "numbers": sum(t.numel() for t in given), "parts": [id(t) in parts for t in given],
        "buckets": len(zero.buckets), "kept": isinstance(optimizer, torch.optim.Adam),
    }  # fmt: skip


def judge_optimizer(seen, setting):
    whole = sum(p.numel() for p in model_of(setting).parameters())
    for rank, own in enumerate(seen):
        where, enough = f"rank {rank}: ", -(-whole // setting.world_size)
        if own["numbers"] >= whole:
            return (
                f"{where}the optimizer gets {own['numbers']} numbers: its state is not sharded; "
                f"with this rank's parts it is {enough} or a few more"
            )
        if not all(own["parts"]):
            return f"{where}the optimizer gets copies: what it updates is not bucket.part"
        if len(own["parts"]) < own["buckets"]:
            return f"{where}{len(own['parts'])} parts of {own['buckets']} buckets: some never move"
        if not own["kept"]:
            return f"{where}self.optimizer is not what one call of make_optimizer returns"
    return None


def alone(setting: Setting, *clips: float | None) -> list[dict]:
    """Return the weights after each step of one process, by name; each clips to its norm."""
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
    model, zero = zero_of(answer, setting, 2)
    loss_of(model, setting, setting.rank, 0).backward()
    for bucket in zero.buckets:
        bucket.part.grad = bucket.gradient.clone()
    before = [bucket.part.grad.clone() for bucket in zero.buckets]
    norm = zero.clip(NORM)
    ratios = [(b.part.grad.norm() / old.norm()).item() if old.norm() else 1.0
              for b, old in zip(zero.buckets, before, strict=True)]  # fmt: skip
    again = [bucket.part.grad.clone() for bucket in zero.buckets]
    zero.clip(1e6)  # far above: nothing is to change
    same_again = all(torch.equal(a, b.part.grad) for a, b in zip(again, zero.buckets, strict=True))
    squares = [old.square().sum().item() for old in before]
    said = None if norm is None else float(norm)
    return {"norm": said, "ratios": ratios, "squares": squares, "untouched": same_again}


def judge_clip(seen, setting):
    n = setting.world_size
    model = model_of(setting)
    sum(loss_of(model, setting, rank, 0) / n for rank in range(n)).backward()
    right = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
    norms = [sum(own["squares"]) ** 0.5 for own in seen]
    for rank, own in enumerate(seen):
        where = f"rank {rank}: "
        if own["norm"] is None:
            return f"{where}clip returns nothing: return the norm of the whole gradient"
        mistakes = {
            "the norm of this rank's own parts: add up squares over ranks": norms[rank],
            "the sum of the ranks' norms: squares add up, norms do not": sum(norms),
            "the square of the norm: take the root": right**2,
            "a norm divided by the ranks": right / n,
            "squares are averaged over the ranks: they add up": right / n**0.5,
            "the norm after clipping: return the one before": NORM,
            "the norm of the last bucket alone: one norm for all buckets": (
                sum(own["squares"][-1] for own in seen) ** 0.5
            ),
        }
        if not same(own["norm"], right):
            return where + named(own["norm"], right, mistakes)
        if not own["untouched"]:
            return f"{where}a gradient with a smaller norm was scaled up to it: only ever down"
        factors = [ratio for ratio, _ in zip(own["ratios"], own["squares"], strict=True)]
        if not factors or any(abs(factor / (NORM / right) - 1) >= 1e-3 for factor in factors):
            got = f"gradients are scaled by {own['ratios'][0]:.3g}, expected {NORM / right:.3g}"
            if all(ratio == 1 for ratio in own["ratios"]):
                return f"{where}{got}: scale part.grad, which the optimizer reads"
            return f"{where}{got}: by max_grad_norm / norm, all alike"
    return None


def see_step(answer, setting):
    ends, calls, collective = {}, [], answer.reduce_scatter_single

    def counted(part, whole):
        calls.append(len(whole))
        return collective(part, whole)

    answer.reduce_scatter_single = counted
    for stage in (1, 2):
        model, zero = zero_of(answer, setting, stage)
        ends[str(stage)] = []
        for step in (0, 1):
            loss_of(model, setting, setting.rank, step).backward()
            calls.clear()
            zero.step(NORM if step else None)
            ends[str(stage)].append(numbers(dict(model.named_parameters())))
    return ends | {"reduced": len(calls)}  # in stage 2


def judge_step(seen, setting):
    start = numbers(dict(model_of(setting).named_parameters()))
    right, unclipped = alone(setting, None, NORM), alone(setting, None, None)
    for rank, own in enumerate(seen):
        for stage in ("1", "2"):
            where = f"stage {stage}, rank {rank}: "
            first, second = own[stage]
            if same(first, start):
                return f"{where}no weight has changed after a step: gather what was updated"
            if not same(first, right[0]):
                still = [name for name in first if same(first[name], start[name])]
                if any(not same(first, other[stage][0]) for other in seen):
                    return (
                        f"{where}ranks have different weights after a step: each has updated its "
                        "own part and not got the others'"
                    )
                if still:
                    return f"{where}{still[0]} has not changed: a bucket is left out"
                return f"{where}after a step {named(first, right[0], {})}"
            if not same(second, right[1]):
                if same(second, unclipped[1]):
                    return f"{where}max_grad_norm changes nothing: clip before the optimizer's step"
                return (
                    f"{where}the second step differs: {named(second, right[1], {})}; are the first "
                    "step's gradients gone?"
                )
        if own["reduced"]:
            return f"stage 2, rank {rank}: backward has reduced all buckets: step sends them again"
    return None


TASKS = {
    "optimizer": Task(see_optimizer, judge_optimizer),
    "reduce": Task(see_reduce, judge_bucket),
    "gather": Task(see_gather, judge_gather),
    "clip": Task(see_clip, judge_clip),
    "step": Task(see_step, judge_step),
}
WHOLE = TASKS["step"]


# What is to be predicted: 12,000 weights and Adam in float32, 4 ranks, 5 micro-batches a step.

WEIGHTS, RANKS, MICRO = 12_000, 4, 5


def measure(kind, answer, setting):
    """Return bytes: of Adam's state on this rank, or handed to collectives in a step of stage 2."""
    sent = []

    def counted(collective, whole_of):
        def call(out, part):
            sent.append(whole_of(out, part).nbytes)
            return collective(out, part)

        return call

    scatter, gather = answer.reduce_scatter_single, answer.all_gather_single
    answer.reduce_scatter_single = counted(scatter, lambda out, whole: whole)
    answer.all_gather_single = counted(gather, lambda whole, part: whole)
    model = nn.Linear(WEIGHTS, 1, bias=False)
    stage = 1 if kind == "stage_1" else 2
    zero = answer.Zero(model.parameters(), make_adam, stage, dtype=torch.float32)
    for _ in range(MICRO):
        model(torch.ones(1, WEIGHTS)).sum().backward()
    zero.step()
    state = sum(t.nbytes for s in zero.optimizer.state.values() for t in s.values() if t.dim())
    return state if kind == "state" else sum(sent)


BYTES = 4 * WEIGHTS
QUESTIONS = {
    "state": Question("bytes", partial(measure, "state"), lambda right: {
        "that of all weights, as DDP holds it": 2 * BYTES,
        "one moment: Adam has two": right / 2,
        "with the weights: these are no optimizer state": right + BYTES / RANKS,
    }, RANKS),
    "stage_1": Question("bytes", partial(measure, "stage_1"), lambda right: {
        "gradients alone: the updated weights are gathered": BYTES,
        "what a rank sends, (N - 1)/N of it: asked are whole vectors": right * (RANKS - 1) / RANKS,
        "that is stage 2, which reduces in each micro-batch": (MICRO + 1) * BYTES,
    }, RANKS),
    "stage_2": Question("bytes", partial(measure, "stage_2"), lambda right: {
        "that is stage 1, which reduces once a step": 2 * BYTES,
        "without the all-gather after the step": MICRO * BYTES,
        "what a rank sends, (N - 1)/N of it: asked are whole vectors": right * (RANKS - 1) / RANKS,
        "weights are gathered once a step, not in each micro-batch": 2 * MICRO * BYTES,
    }, RANKS),
}  # fmt: skip
