"""Lab 6, pipelines: what the grader runs, and which mistakes it names."""

import functools
import itertools
from collections import Counter

import torch
import torch.nn.functional as F
from torch import nn

from lab_parts.holes import import_lesson
from lab_parts.judging import Question, compare_gradients, named, numbers, same
from lab_parts.running import Setting, Task

SCHEDULES, RUNNING = (
    "05-advanced/pipeline_schedules.py",
    "05-advanced/pipeline_parallel.py",
)
LESSONS = {
    SCHEDULES: ("Instruction", "gpipe", "one_f_one_b", "interleaved"),
    RUNNING: (
        "loss_of",
        "Pipeline",
        "-Pipeline.backward_input",
        "-Pipeline.backward_weights",
        "-Pipeline.execute",
    ),
}
V = 2  # stages on each rank of `interleaved`


# one_f_one_b, interleaved: what each rank does, in order


def pipelines(name: str, setting: Setting) -> list[tuple[int, int]]:
    """Return (ranks, micro-batches): from 1 micro-batch on; interleaved, multiples."""
    p = 2 + setting.draw(3)[0]
    if name == "interleaved":
        return [(ranks, k * ranks) for ranks in (2, p) for k in (1, 2, 3)]
    return [(ranks, m) for ranks in (2, p) for m in range(1, 2 * p + 1)]


def see_schedule(name, answer, setting):
    # The same on each rank: no rank has to talk to another.
    def orders(p, m):
        make = getattr(answer, name)
        more = (V,) if name == "interleaved" else ()
        most = 2 * m * V + 9  # one that does not end is cut
        return [
            [tuple(i) for i in itertools.islice(make(rank, p, m, *more), most)]
            for rank in range(p)
        ]

    return [orders(p, m) for p, m in pipelines(name, setting)]


def judge_schedule(name, seen, setting):
    lesson, v = import_lesson(SCHEDULES), V if name == "interleaved" else 1
    too_many = False
    for (p, m), orders in zip(pipelines(name, setting), seen[0], strict=True):
        schedule = [[lesson.Instruction(*i) for i in rank] for rank in orders]
        where = f"{p} ranks, {m} micro-batches: "
        if not all(schedule):
            yield f"{where}rank {schedule.index([])} does nothing"
            continue
        if wrong := explain_order(lesson, schedule, m, p * v):
            yield where + wrong
            continue
        best = lesson.build(name.replace("one_f_one_b", "1f1b"), p, m, v)
        for rank in range(p):
            kept, enough = (lesson.peak_activations(s[rank]) for s in (schedule, best))
            if kept > enough:
                too_many = True
                yield (
                    f"{where}rank {rank} keeps the activations of {kept:g} forwards, "
                    f"{enough:g} are enough: a backward comes as soon as it can"
                )
        idle, least = (lesson.bubble(lesson.simulate(s)) for s in (schedule, best))
        if idle > least + 1e-9 and not too_many:
            yield f"{where}ranks idle {idle:.1%} of the time, {least:.1%} is possible"


def explain_order(lesson, schedule, m, stages) -> str | None:
    """Say what is wrong with a schedule: strange work, missing work, or a deadlock."""
    times = Counter(i for rank in schedule for i in rank)
    for rank, orders in enumerate(schedule):
        for i in orders:
            if not (i.kind in "FB" and 0 <= i.micro_batch < m):
                return (
                    f"rank {rank}: {i} is no micro-batch of this step, which has 0 to "
                    f"{m - 1}"
                )
            if not 0 <= i.stage < stages or i.stage % len(schedule) != rank:
                return f"rank {rank} does not hold the stage of {i}"
    for stage, k, kind in itertools.product(range(stages), range(m), "FB"):
        i = lesson.Instruction(kind, stage, k)
        if times[i] != 1:
            off = abs(times[i] - 1)
            often = "too often" if times[i] > 1 else "too seldom"
            times = "times" if off > 1 else "time"
            return f"{i} is in the schedule {off} {times} {often}"
    spans = lesson.simulate(schedule)
    done = {span.instruction for rank in spans for span in rank}
    waits = []
    for rank, (orders, ended) in enumerate(zip(schedule, spans, strict=True)):
        if len(ended) < len(orders):
            blocked = orders[len(ended)]
            missing = next(
                i for i in lesson.needs(blocked, stages - 1) if i not in done
            )
            holder = missing.stage % len(schedule)
            where = f"is rank {holder}'s"
            if holder == rank:
                where = "comes later in its own order"
            sentence = (
                f"rank {rank} waits for ever before {blocked}: it needs {missing}, "
                f"which {where}"
            )
            # A rank that blocks itself blocks the others.
            waits.append((holder != rank, sentence))
    return min(waits)[1] if waits else None


# step: forward and backward of a micro-batch


def model_of(setting: Setting) -> nn.ModuleList:
    torch.manual_seed(setting.seed)
    width = 5 + setting.draw(4)[0]
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3)]
    return nn.ModuleList([*layers[:2], nn.Sequential(layers[2], nn.Linear(width, 7))])


def micro_batches(setting: Setting) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator, width = setting.generator(), 5 + setting.draw(4)[0]
    m = 2 + setting.draw(1, 3)[1]
    inputs = [torch.randn(2, 3, width, generator=generator) for _ in range(m)]
    return inputs, [torch.randint(7, (2, 3), generator=generator) for _ in range(m)]


def see_step(answer, setting):
    stages, (inputs, targets) = model_of(setting), micro_batches(setting)
    pipeline = answer.Pipeline(
        dict(enumerate(stages)), len(stages) - 1, inputs, targets
    )
    for k in range(len(inputs)):
        activations = None
        for stage in range(len(stages)):
            activations = pipeline.forward(stage, k, activations)
            if activations.grad_fn is not None:
                return {"graph": stage}
        gradient = None
        for stage in reversed(range(len(stages))):
            gradient = pipeline.backward(stage, k, gradient)
            if gradient is None and stage > 0:
                return {"none": stage}
    kept = len(pipeline.kept)
    gradients = {name: p.grad for name, p in stages.named_parameters()}
    return {"got": numbers(gradients), "kept": kept, "losses": pipeline.losses}


def judge_step(seen, setting):
    stages, (inputs, targets) = model_of(setting), micro_batches(setting)
    m, each, losses = len(inputs), [], []
    for x, target in zip(inputs, targets, strict=True):
        for stage in stages:
            x = stage(x)
        loss = F.cross_entropy(x.flatten(0, 1), target.flatten())
        each.append(torch.autograd.grad(loss, list(stages.parameters())))
        losses.append(loss.item())
    names = [name for name, _ in stages.named_parameters()]
    total = [sum(of_weight) for of_weight in zip(*each, strict=True)]

    def by_name(values):
        return numbers(dict(zip(names, values, strict=True)))

    expected = by_name([value / m for value in total])
    mistakes = {
        f"gradients are {m} times too large: the loss is not divided by the number of "
        "micro-batches": by_name(total),
        f"gradients are {m} times too small: divided by the micro-batches "
        "twice": by_name([value / m**2 for value in total]),
        "the last micro-batch's gradient alone: gradients of micro-batches add "
        "up": by_name([value / m for value in each[-1]]),
    }
    first_inputs = [torch.zeros_like(value) for value in total]
    for target in targets:
        x = inputs[0]
        for stage in stages:
            x = stage(x)
        loss = F.cross_entropy(x.flatten(0, 1), target.flatten()) / m
        each_first = torch.autograd.grad(loss, list(stages.parameters()))
        first_inputs = [a + b for a, b in zip(first_inputs, each_first, strict=True)]
    mistakes |= {
        "every micro-batch gets the inputs of micro-batch 0": by_name(first_inputs),
        f"divided by the number of stages, {len(stages)}: it is the mean over "
        "micro-batches": by_name([value / len(stages) for value in total]),
    }
    got = seen[0]
    if "graph" in got:
        yield (
            f"forward of stage {got['graph']} returns its graph too: no graph crosses "
            "ranks: detach()"
        )
        return
    if "none" in got:
        yield (
            f"backward of stage {got['none']} returns no gradient, for which the stage "
            "before waits: do activations that arrive require one, and does backward "
            "return it?"
        )
        return
    missing = "does every stage call out.backward?"
    yield from compare_gradients(got["got"], expected, mistakes, missing)
    if got["kept"]:
        yield (
            f"{got['kept']} forwards are still kept after backward: memory grows with "
            "each step"
        )
    mean, noted = sum(losses) / m, sum(got["losses"])
    if len(got["losses"]) != m:
        yield f"{len(got['losses'])} losses noted of {m} micro-batches"
    elif same(got["got"], expected) and not same(noted, mean):
        words = f"{m} times too large: a part is the loss divided by {m}"
        yield f"the sum of losses: {named(noted, mean, {words: sum(losses)})}"


def schedule_task(name):
    judge = functools.partial(judge_schedule, name)
    return Task(functools.partial(see_schedule, name), judge)


TASKS = {
    "one_f_one_b": schedule_task("one_f_one_b"),
    "step": Task(see_step, judge_step),
    "interleaved": schedule_task("interleaved"),
}


# Predictions: 4 ranks, 8 micro-batches, a backward that takes as long as
# two forwards.

RANKS, MICRO = 4, 8
ROUNDED = 0.02  # relative: a percentage without decimals is right
FRACTION = "a part of 1: in percent it is a hundred times as much"


def measure(kind, answer, setting):
    lesson = import_lesson(SCHEDULES)
    name, v = ("interleaved", V) if kind == "bubble_v2" else ("1f1b", 1)
    schedule = lesson.build(name, RANKS, MICRO, v)
    if kind == "kept":
        return lesson.peak_activations(schedule[0])
    return 100 * lesson.bubble(lesson.simulate(schedule))


QUESTIONS = {
    "bubble": Question(
        "percent",
        functools.partial(measure, "1f1b"),
        lambda measured: {
            "idle time over busy time: a bubble is a part of the whole time": 100
            * 3
            / 8,
            "that of one micro-batch: 3 of 4 ranks idle": 75,
            "p ranks wait for p - 1 others": 100 * 4 / 12,
            FRACTION: measured / 100,
        },
        tolerance=ROUNDED,
    ),
    "kept": Question(
        "micro-batches",
        functools.partial(measure, "kept"),
        lambda measured: {"all of them: that is GPipe": MICRO, "the last rank's": 1},
    ),
    "bubble_v2": Question(
        "percent",
        functools.partial(measure, "bubble_v2"),
        lambda measured: {
            "that of one stage per rank: two shorten what a rank waits for": 100
            * 3
            / 11,
            "idle time over busy time: a bubble is a part of the whole time": 100
            * 3
            / 16,
            FRACTION: measured / 100,
        },
        tolerance=ROUNDED,
    ),
}
