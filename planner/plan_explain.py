"""`--explain`: each formula of a plan with its numbers, the value, and where it stands.

A row multiplies numbers that a reader can check; a test multiplies them too, and compares the
product with the part of the prediction that it explains.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from planner import adapters, compute, finetune, memory, models, plan_finetune, step
from planner.hardware import Cluster
from planner.job import Job, Layout, Prediction
from planner.memory import GIB
from planner.rates import RATES

UNITS = {"GiB": GIB, "s": 1.0, "1e15": 1e15, "1e9": 1e9, "": 1.0}


@dataclass(frozen=True)
class Row:
    """A value as a product of numbers with names, and the function that computes it."""

    name: str
    factors: list[tuple[float, str]]
    unit: str
    function: object = None
    divided_by: float = 1.0

    @property
    def value(self) -> float:
        return prod(number for number, _ in self.factors) / self.divided_by

    def __str__(self) -> str:
        factors = " x ".join(f"{short(number)} {name}".strip() for number, name in self.factors)
        over = f" / {short(self.divided_by)}" if self.divided_by != 1 else ""
        return f"{self.name}: {factors}{over} = {self.value / UNITS[self.unit]:.5g} {self.unit}"


def short(number: float) -> str:
    """Write a number as a page would: 4096, 6.74e9, 0.62."""
    if abs(number) >= 1e6:
        power = 3 * ((len(f"{abs(number):.0f}") - 1) // 3)
        return f"{number / 10**power:.4g}e{power}"
    return f"{number:.6g}"


def source_of(function) -> str:
    """Return where a formula stands, and what its docstring says first."""
    place = f"{function.__module__.replace('.', '/')}.py, {function.__name__}"
    paragraph = " ".join(function.__doc__.split("\n\n")[0].split())
    cited = [text for text in function.__doc__.split("\n\n") if "Source:" in text]
    return f"{place}: {paragraph}" + "".join(f" {' '.join(text.split())}" for text in cited)


def fullest_stage(job: Job, layout: Layout) -> int:
    """Return the stage whose GPU holds most, as memory_of finds it."""
    stages = sorted({0, min(1, layout.pp - 1), layout.pp - 1})
    return max(stages, key=lambda s: sum(memory.memory_of_stage(job, layout, s).values()))


def state_rows(job: Job, plan: Prediction, stage: int) -> list[Row]:
    """Return rows for parameters, gradients and optimizer."""
    layout, held = plan.layout, plan.memory
    dense, experts = memory.weights_of_stage(job, layout, stage)
    bytes_of = memory.state_bytes_per_weight(job, layout.zero)
    if memory.gradients_stay_whole(job, layout):
        bytes_of["gradients"] = memory.FP32
    rows = []
    for part, size in bytes_of.items():
        over = (dense + experts) * size / held[part] if held[part] else 0
        if over:
            factors = [(size, "bytes"), (dense + experts, "weights on the GPU before sharding")]
            rows.append(Row(part, factors, "GiB", memory.states, over))
    return rows


def activation_rows(job: Job, layout: Layout, stage: int) -> list[Row]:
    """Return rows for what layers keep, what one layer's backward adds, and logits."""
    model = job.model
    kept = memory.kept_by_stage(job, layout, stage)
    layers = memory.layers_of_stages(model.layers, layout.pp)[stage]
    m = layout.micro_batches(job)
    flying = memory.in_flight(layout.pp, stage, m, layout.virtual_stages)
    tokens = memory.tokens_of(job, layout)
    factors = [(flying, "micro-batches in flight"), (layers, "layers"), (tokens, "tokens"),
               (kept / (flying * layers * tokens), "bytes")]  # fmt: skip
    rows = [Row("activations kept", factors, "GiB", memory.layer_bytes)]
    parts = memory.memory_of_stage(job, layout, stage)
    if parts["activations"] > kept:
        more = parts["activations"] - kept
        factors = [(tokens, "tokens"), (more / tokens, "bytes")]
        rows.append(Row("activations of one backward", factors, "GiB", memory.backward_of_layer))
    if parts["logits"]:
        factors = [(tokens, "tokens"), (model.vocab, "words"),
                   (parts["logits"] / tokens / model.vocab, "bytes")]  # fmt: skip
        rows.append(Row("logits", factors, "GiB", memory.logits))
    if parts["gathered"]:
        layer = memory.layer_weights(job, layout)
        factors = [(layer, "weights of a layer"), (parts["gathered"] / layer, "bytes")]
        rows.append(Row("gathered", factors, "GiB", memory.gathered))
    return rows


def step_rows(job: Job, cluster: Cluster, plan: Prediction) -> list[Row]:
    """Return rows for operations, compute, what axes send, and the bubble."""
    layout, m = plan.layout, plan.layout.micro_batches(job)
    peak = cluster.gpu.tflops[job.precision] * 1e12
    tokens = job.global_batch * job.seq_len
    per_token = plan.model_flops / tokens
    share = plan.model_flops / layout.gpus / peak / plan.step["compute"]
    seconds = [(plan.model_flops, "FLOPs")]
    counted = plan_finetune.model_flops if job.frozen else compute.flops_per_token
    rows = [
        Row("model FLOPs", [(tokens, "tokens"), (per_token, "")], "1e15", counted),
        Row(
            f"compute, at {share:.1%} of {peak / 1e12:g} TFLOP/s",
            seconds, "s", compute.layer_seconds, layout.gpus * peak * share,
        ),
    ]  # fmt: skip
    layers = max(memory.layers_of_stages(job.model.layers, layout.pp))
    if job.frozen:
        rows += adapter_rows(job, cluster, plan)
    if plan.step["tp"]:
        one = step.tensor_seconds(job, layout, cluster, RATES)
        factors = [(m, "micro-batches"), (layers, "layers"), (one, "s")]
        rows.append(Row("tp", factors, "s", step.tensor_seconds))
    if plan.step["pp"]:
        sends = 2 * layout.virtual_stages * m
        factors = [(sends, "sends"), (plan.step["pp"] / sends, "s")]
        rows.append(Row("pp", factors, "s", step.pipeline_seconds))
    if plan.step["bubble"]:
        idle = (layout.pp - 1) / layout.virtual_stages
        factors = [(idle, "(pp - 1) / v micro-batches"), (plan.step["bubble"] / idle, "s")]
        rows.append(Row("bubble", factors, "s", step.step_parts))
    sent = {"cp": step.context_seconds, "ep": step.expert_seconds, "dp": step.gradient_seconds}
    for part, function in sent.items():
        if plan.step[part]:
            each = layout.zero == 3 and not memory.gathers_once(job, layout)
            times = m if part != "dp" or each else 1
            factors = [(times, "times"), (plan.step[part] / times, "s that nothing hides")]
            sharded = step.fsdp_seconds if part == "dp" and each else function
            rows.append(Row(part, factors, "s", sharded))
    return rows


def frozen_rows(job: Job, plan: Prediction) -> list[Row]:
    """Return rows for frozen matrices, and for adapters with their gradients and moments."""
    shards = plan.layout.shards if plan.layout.zero == 3 else 1
    size = finetune.frozen_weight_bytes(job.quant)
    matrices = finetune.matrix_parameters(job.model)
    trained = finetune.trained_parameters(job.model, "lora", job.adapter_rank, job.adapter_targets)
    frozen = [(size, "bytes"), (matrices, "weights of frozen matrices")]
    states = [(4 * memory.FP32, "bytes of weight, gradient and moments"), (trained, "weights")]
    return [
        Row("frozen matrices", frozen, "GiB", finetune.frozen_weight_bytes, shards),
        Row("adapters", states, "GiB", finetune.trained_parameters, shards),
    ]


def adapter_rows(job: Job, cluster: Cluster, plan: Prediction) -> list[Row]:
    """Return rows for the seconds of adapters, and of unpacking 4-bit weights."""
    layout, layers = plan.layout, job.model.layers
    m, again = layout.micro_batches(job), layout.recompute == "full"
    forward, backward = adapters.adapter_seconds(job, layout, cluster, RATES)
    each = forward * (1 + again) + backward
    one = adapters.unpack_seconds(job, cluster, RATES, not job.model.experts)
    often = [(m, "micro-batches"), (layers, "layers")]
    rows = [Row("adapters", [*often, (each, "s")], "s", adapters.adapter_seconds)]
    if one:
        times = [*often, (2 + again, "times"), (one, "s")]
        rows.append(Row("unpacking", times, "s", adapters.unpack_seconds))
    return rows


def explain(job: Job, cluster: Cluster, plan: Prediction) -> list[str]:
    """Return lines: a formula with numbers, and under it where it stands with its source."""
    stage = fullest_stage(job, plan.layout)
    rows = frozen_rows(job, plan) if job.frozen else state_rows(job, plan, stage)
    rows += [] if job.frozen else activation_rows(job, plan.layout, stage)
    rows += step_rows(job, cluster, plan)
    weights = models.parameters(job.model)
    lines = [f"weights: {weights:,}", f"  {source_of(models.parameters)}"]
    for row in rows:
        lines += [str(row), f"  {source_of(row.function)}"]
    gpu = cluster.gpu
    usable = f"{plan.memory_limit / GIB:.1f} of {gpu.memory_gib:g} GiB"
    lines += [f"memory that a job may fill: {usable}", f"  {source_of(memory.memory_limit)}"]
    return [*lines, f"rates of a {gpu.name}: {gpu.source}"]
