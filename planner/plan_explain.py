"""`--explain`: formulas of a plan with their numbers, and the function of each."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from planner import activations, communication, compute, finetune, memory, models, step
from planner.hardware import Cluster
from planner.job import Layout, Prediction, TrainingJob
from planner.memory import GIB

UNITS = {"GiB": GIB, "s": 1.0, "1e15": 1e15}


@dataclass(frozen=True)
class Formula:
    """A value as a product of named numbers, and the function that computes it."""

    name: str
    factors: list[tuple[float, str]]
    unit: str
    function: object
    divided_by: float = 1.0

    @property
    def value(self) -> float:
        return prod(number for number, _ in self.factors) / self.divided_by

    def __str__(self) -> str:
        texts = [f"{short(number)} {name}".strip() for number, name in self.factors]
        over = f" / {short(self.divided_by)}" if self.divided_by != 1 else ""
        value = f"{self.value / UNITS[self.unit]:.5g} {self.unit}"
        return f"{self.name}: {' x '.join(texts)}{over} = {value}"


def short(number: float) -> str:
    """Return a number as short text: 4096, 6.74e9, 0.62."""
    if abs(number) >= 1e6:
        power = 3 * ((len(f"{abs(number):.0f}") - 1) // 3)
        return f"{number / 10**power:.4g}e{power}"
    return f"{number:.6g}"


def source_of(function) -> str:
    """Return the file and name of a function, and its docstring."""
    place = f"{function.__module__.replace('.', '/')}.py, {function.__name__}"
    return f"{place}: {' '.join(function.__doc__.split())}"


def fullest_stage(job: TrainingJob, layout: Layout) -> int:
    """Return the stage with the largest memory on a GPU."""
    stages = memory.distinct_stages(layout)
    held = {s: sum(memory.memory_of_stage(job, layout, s).values()) for s in stages}
    return max(held, key=held.get)


def memory_formulas(job: TrainingJob, plan: Prediction) -> list[Formula]:
    """Return formulas of states, activations, logits and gathered weights."""
    layout = plan.layout
    stage = fullest_stage(job, layout)
    weights = sum(memory.weights_of_stage(job, layout, stage))
    bytes_of = memory.state_bytes_per_weight(job, layout.zero)
    if memory.gradients_stay_whole(job, layout):
        bytes_of["gradients"] = memory.FP32
    parts = memory.memory_of_stage(job, layout, stage)
    formulas = []
    for part, size in bytes_of.items():
        if parts[part]:
            factors = [(size, "bytes"), (weights, "weights before sharding")]
            over = size * weights / parts[part]
            formulas.append(Formula(part, factors, "GiB", memory.states, over))
    kept = activations.kept_by_stage(job, layout, stage)
    layers = activations.layers_of_stages(job.model.layers, layout.pp)[stage]
    flying = activations.in_flight(
        layout.pp, stage, layout.micro_batches(job), layout.virtual_stages
    )
    tokens = activations.tokens_of(job, layout)
    factors = [
        (flying, "micro-batches in flight"),
        (layers, "layers"),
        (tokens, "tokens"),
        (kept / (flying * layers * tokens), "bytes"),
    ]
    layer = activations.layer_bytes
    formulas.append(Formula("activations kept", factors, "GiB", layer))
    more = parts["activations"] - kept
    others = {
        "activations of one backward": (more, activations.backward_of_layer),
        "logits": (parts["logits"], activations.logits),
        "gathered": (parts["gathered"], memory.gathered),
    }
    for name, (size, function) in others.items():
        if size > 0:
            factors = [(tokens, "tokens"), (size / tokens, "bytes")]
            formulas.append(Formula(name, factors, "GiB", function))
    return formulas


def adapter_formulas(job: TrainingJob, plan: Prediction) -> list[Formula]:
    """Return formulas of frozen matrices, and of adapters with their states."""
    layout = plan.layout
    shards = layout.shards if layout.zero == 3 else 1
    states = layout.shards if layout.zero >= 2 else 1
    size = finetune.frozen_weight_bytes(job.quant)
    matrices = finetune.matrix_parameters(job.model)
    trained = finetune.trained_parameters(
        job.model, "lora", job.adapter_rank, job.adapter_targets
    )
    frozen = [(size, "bytes"), (matrices, "weights of frozen matrices")]
    held = [(16, "bytes of weight, gradient and moments"), (trained, "weights")]
    one, other = finetune.frozen_weight_bytes, finetune.trained_parameters
    return [
        Formula("frozen matrices", frozen, "GiB", one, shards * layout.tp),
        Formula("adapters", held, "GiB", other, states * layout.tp),
    ]


def step_formulas(
    job: TrainingJob, cluster: Cluster, plan: Prediction
) -> list[Formula]:
    """Return formulas of FLOPs, compute, tp and the bubble."""
    layout, m = plan.layout, plan.layout.micro_batches(job)
    peak = cluster.gpu.tflops[job.precision] * 1e12
    tokens = job.global_batch * job.seq_len
    share = plan.model_flops / layout.gpus / peak / plan.step["compute"]
    operations = [(tokens, "tokens"), (plan.model_flops / tokens, "FLOPs")]
    formulas = [
        Formula("model FLOPs", operations, "1e15", compute.flops_per_token),
        Formula(
            f"compute, at {share:.1%} of {peak / 1e12:g} TFLOP/s",
            [(plan.model_flops, "FLOPs")],
            "s",
            compute.layer_seconds,
            layout.gpus * peak * share,
        ),
    ]
    layers = max(activations.layers_of_stages(job.model.layers, layout.pp))
    if plan.step["tp"]:
        one = plan.step["tp"] / m / layers
        factors = [(m, "micro-batches"), (layers, "layers"), (one, "s")]
        formulas.append(Formula("tp", factors, "s", communication.tensor_calls))
    if plan.step["bubble"]:
        idle = (layout.pp - 1) / layout.virtual_stages
        one = plan.step["bubble"] / idle
        factors = [(idle, "(pp - 1) / v micro-batches"), (one, "s")]
        formulas.append(Formula("bubble", factors, "s", step.step_parts))
    return formulas


def explain(job: TrainingJob, cluster: Cluster, plan: Prediction) -> list[str]:
    """Return lines with each formula, its numbers and its function."""
    held = adapter_formulas if job.frozen else memory_formulas
    weights = models.parameters(job.model)
    lines = [f"weights: {weights:,}", f"  {source_of(models.parameters)}"]
    for formula in held(job, plan) + step_formulas(job, cluster, plan):
        lines += [str(formula), f"  {source_of(formula.function)}"]
    gpu = cluster.gpu
    usable = f"{plan.memory_limit / GIB:.1f} of {gpu.memory_gib:g} GiB"
    lines += [f"memory that a job may fill: {usable}"]
    lines += [f"  {source_of(memory.memory_limit)}"]
    return [*lines, f"rates of a {gpu.name}: {gpu.source}"]
