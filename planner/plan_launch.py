"""The command that runs a layout on one of this repository's templates.

If no template can run a layout, `launch_of` returns the reasons.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from planner import memory, models
from planner.job import AXES, Layout, ModelShape, TrainingJob

# The templates' names for shapes of planner/models.py.
SAME_NAMES = ("tiny", "124m", "1b", "llama2-7b", "llama3-8b", "llama3-70b")
PRESETS = {name: name for name in (*SAME_NAMES, "mixtral-8x7b")}
PRESETS |= {"gpt2-124m": "124m", "llama3.2-1b": "1b"}
ZERO_CONFIGS = {
    (1, "none"): "zero1_config.json",
    (2, "optimizer"): "zero2_offload_cpu_config.json",
    (3, "optimizer"): "zero3_offload_cpu_config.json",
}


@dataclass(frozen=True)
class Launch:
    """Commands in their order, and their differences from the plan."""

    commands: list[str]
    remarks: list[str]

    @property
    def script(self) -> str:
        """Return the template's path, or nothing."""
        words = self.commands[-1].split() if self.commands else []
        return next((word for word in words if word.endswith(".py")), "")


def launch_of(
    job: TrainingJob,
    layout: Layout,
    gpus_per_node: int,
    finetune: str = "none",
    limit: float = math.inf,
) -> Launch:
    """Return the commands that run a layout, and their differences from the plan.

    limit: the bytes that a GPU may hold.
    """
    if finetune != "none":
        return finetune_launch(job, layout, gpus_per_node, finetune, limit)
    script, flags, remarks = template_of(job, layout)
    if not script:
        return Launch([], remarks)
    shape, written, about = shape_of(job.model)
    remarks += [about] if about else []
    if not shape:
        return Launch([], remarks)
    start = torchrun(layout.gpus, gpus_per_node)
    line = [start, script, shape, batch_flags(job, layout), *flags]
    return Launch([*written, " ".join(line)], remarks)


def batch_flags(job: TrainingJob, layout: Layout) -> str:
    """Return the flags of a batch that all templates have."""
    batch = f"--global-batch-size {job.global_batch}"
    batch += f" --micro-batch-size {layout.micro_batch}"
    return f"--seq-len {job.seq_len} {batch} --precision {precision_of(job)}"


def torchrun(gpus: int, gpus_per_node: int) -> str:
    """Return torchrun and its flags. With several nodes, each node runs the line."""
    nodes = -(-gpus // gpus_per_node)
    if nodes == 1:
        return f"torchrun --standalone --nproc-per-node={gpus}"
    meet = "--rdzv-id=plan --rdzv-backend=c10d --rdzv-endpoint=$HEAD_NODE:29500"
    return f"torchrun --nnodes={nodes} --nproc-per-node={gpus_per_node} {meet}"


def precision_of(job: TrainingJob) -> str:
    """Return the templates' name of a precision."""
    return {"fp32": "32-true", "tf32": "32-true", "fp16": "16-mixed"}.get(
        job.precision, "bf16-mixed"
    )


def template_of(job: TrainingJob, layout: Layout) -> tuple[str, list[str], list[str]]:
    """Return a template, the flags of the layout's axes, and remarks.

    Without a template, the remarks are the reasons.
    """
    plain = (
        layout.tp == layout.cp == layout.pp == layout.ep == 1 and not job.model.experts
    )
    if job.precision == "fp8":
        return (
            "",
            [],
            ["no template multiplies in float8: see 05-advanced/low_precision.py"],
        )
    template = find_module_template(job, layout) if plain else None
    return template or find_hybrid_template(job, layout)


def find_module_template(
    job: TrainingJob, layout: Layout
) -> tuple[str, list[str], list[str]] | None:
    """Return the template of module 01, 02 or 03 for a layout without other axes."""
    again = layout.recompute
    if layout.zero == 0 and again == "none":
        return "01-ddp-basics/ddp_training.py", [], []
    config = ZERO_CONFIGS.get((layout.zero, layout.offload))
    if config and job.precision != "fp16":
        flags = [f"--deepspeed_config 03-deepspeed/configs/{config}"]
        if again != "none":
            flags.append(f"--activation-checkpointing {again}")
        return "03-deepspeed/deepspeed_train.py", flags, []
    if layout.zero >= 2 and job.precision != "fp16" and layout.offload == "none":
        flags = [f"--sharding {'grad-op' if layout.zero == 2 else 'full'}"]
        if layout.zero == 3 and 0 < layout.shard < layout.replicas:
            flags = [f"--sharding hybrid --shard-group-size {layout.shard}"]
        if again != "none":
            flags.append(f"--activation-checkpointing {again}")
        return "02-fsdp/fsdp_transformer.py", flags, []
    return None


def find_hybrid_template(
    job: TrainingJob, layout: Layout
) -> tuple[str, list[str], list[str]]:
    """Return hybrid_parallelism.py, its flags, and its differences from the plan."""
    model, stages, refused, remarks = job.model, layout.virtual_stages, [], []
    parts = layout.pp * stages
    if parts > 1 and model.layers % parts:
        refused.append(f"{model.layers} layers in {parts} unequal stages")
    if model.tied_embeddings:
        refused.append(
            "one table for tokens and logits, which pp and FSDP's units would split"
        )
    if model.experts:
        refused.append("experts (05-advanced/expert_parallel.py is the lesson)")
    if stages > 2:
        refused.append(f"{stages} stages per rank")
    if layout.offload != "none":
        refused.append(f"--offload {layout.offload} with these axes")
    if refused:
        return "", [], [f"none has {' or '.join(refused)}"]
    if layout.zero == 1:
        remarks.append(
            "its grad-op stands for ZeRO-1: FSDP that gathers weights once a step"
        )
    if layout.cp > 1 and layout.cp_kind != "gather":
        remarks.append(f"its cp gathers keys and values; the plan has {layout.cp_kind}")
    if layout.order != AXES:
        remarks.append(f"its ranks are in the order {'-'.join(AXES)}")
    kind = ("replicate", "grad-op", "grad-op", "full")[layout.zero]
    if memory.gathers_once(job, layout):
        kind = "grad-op"  # its full frees a stage's weights in each micro-batch
    if layout.zero == 3 and 0 < layout.shard < layout.replicas:
        kind = "hybrid"
        remarks.append(
            f"its hybrid shards inside a machine; the plan over {layout.shard} ranks"
        )
    sizes = {axis: getattr(layout, axis) for axis in ("tp", "cp", "pp")}
    axes = [f"--{axis} {size}" for axis, size in sizes.items() if size > 1]
    flags = [*axes, f"--sharding {kind}"]
    if layout.pp > 1:
        flags.append(f"--schedule {'1f1b' if stages == 1 else 'interleaved'}")
    if layout.recompute != "none":
        flags.append(f"--activation-checkpointing {layout.recompute}")
    return "05-advanced/hybrid_parallelism.py", flags, remarks


def shape_of(model: ModelShape) -> tuple[str, list[str], str]:
    """Return the flag for the model's shape, a preparing command, and a remark."""
    llama = model.gated and not model.biases and not model.dense_layers
    about = (
        "" if llama else "the templates train a Llama of these widths, not this block"
    )
    if model.name in PRESETS:
        return f"--preset {PRESETS[model.name]}", [], about
    if model.experts:
        return "", [], "the templates know no mixture of experts but mixtral-8x7b"
    if model.head_dim and model.head_dim * model.heads != model.hidden:
        return "", [], "the templates' heads are hidden / heads wide"
    ffn = model.ffn if model.gated else round(2 / 3 * model.ffn)
    shape = (
        model.vocab,
        model.hidden,
        model.layers,
        model.heads,
        model.kv_heads,
        ffn,
        131_072,
    )
    tied = ", tied_embeddings=True" if model.tied_embeddings else ""
    # "7b (a mistral-7b of 31 layers)": the first word is the preset.
    name = (model.name or "model").split(" ")[0].replace("/", "-")
    row = f'"{name}": Config({", ".join(map(str, shape))}{tied})'
    return (
        f"--preset {name}",
        [f"# first add {row} to PRESETS in dist_common/model.py"],
        about,
    )


FSDP_ALONE = "--zero 3 --tp 1 --cp 1 --pp 1 --ep 1 --offload none"


def finetune_launch(
    job: TrainingJob, layout: Layout, gpus_per_node: int, finetune: str, limit: float
) -> Launch:
    """Return the line of fsdp_finetune.py, which has FSDP and no other axis."""
    if finetune == "qlora":
        text = (
            "no template reads a model into 4 bits; 02-fsdp/fsdp_lora.py has the layer"
        )
        return Launch([], [text])
    plain = layout.tp == layout.cp == layout.pp == layout.ep == 1
    whole = layout.shard in (0, layout.replicas)
    if not plain or not whole or layout.offload != "none":
        return Launch([], [f"02-fsdp/fsdp_finetune.py has FSDP alone: {FSDP_ALONE}"])
    remarks = []
    if layout.zero != 3 and layout.gpus > 1:
        remarks.append("it shards as ZeRO-3 does")
    if layout.recompute != "full":
        remarks.append("it recomputes every layer: fewer bytes, a longer step")
    adapters = ""
    if job.adapter_rank:
        remarks.append("its frozen weights are float32, 4 bytes each")
        adapters = f" --lora-rank {job.adapter_rank}"
        sharded = replace(layout, zero=3, recompute="full")
        held = sum(memory.memory_of(job, sharded).values())
        frozen = models.parameters(job.model) / layout.gpus
        held += (memory.FP32 - memory.BF16) * frozen
        if held > limit:
            lacks = (held - limit) / memory.GIB
            text = "02-fsdp/fsdp_finetune.py keeps frozen weights in float32"
            return Launch([], [f"{text}: it lacks {lacks:.1f} GiB on each GPU"])
    start = f"{torchrun(layout.gpus, gpus_per_node)} 02-fsdp/fsdp_finetune.py"
    data = "--init-from MODEL_DIR --data chats.jsonl"
    line = f"{start} {data} {batch_flags(job, layout)}"
    return Launch([f"{line} --activation-checkpointing full{adapters}"], remarks)
