"""Which layouts a job can have: what is refused, and why, and all that are left, best first."""

from collections.abc import Iterator
from itertools import product

from dist_common.cli import UsageError
from layout_model import RECOMPUTE, SHARDINGS, Cluster, Job, Layout, layers_of_stages
from layout_traffic import Prediction, predict


def refusal(job: Job, layout: Layout, gpus: int) -> str | None:
    """Say in one line why a layout cannot be, None where it can."""
    config, tp, cp, pp = job.config, layout.tp, layout.cp, layout.pp
    chunks = pp * job.virtual_stages
    replica = layout.dp * job.micro_batch_size
    if layout.gpus != gpus:
        return f"{layout} is {layout.gpus} GPUs, but --gpus is {gpus}: make them equal"
    for count, name in ((config.num_heads, "heads"), (config.num_kv_heads, "key-value heads")):
        if count % tp:
            return f"--tp {tp} must divide the model's {count} {name}"
    if config.num_layers % chunks and (pp < 2 or (config.num_layers + 2) % chunks):
        stages = f"--pp {pp}" + f" x --virtual-stages {job.virtual_stages}" * (chunks != pp)
        least = f"{stages} must divide the model's {config.num_layers} layers"
        return f"{least}, or {config.num_layers + 2} where first and last stage have one less"
    if min(layers_of_stages(config.num_layers, pp)) < 1:
        return f"--pp {pp} leaves a stage without a layer: the model has {config.num_layers}"
    if job.seq_len % (2 * cp if cp > 1 else 1) or job.seq_len // cp % tp:
        parts = f"--cp {cp}" + f" (zig-zag: {2 * cp} chunks)" * (cp > 1) + f" and --tp {tp}"
        return f"--seq-len {job.seq_len} must be divisible by {parts}"
    if job.global_batch_size % replica:
        parts = f"--dp {layout.dp} x --micro-batch-size {job.micro_batch_size} = {replica}"
        return f"--global-batch-size {job.global_batch_size} must be divisible by {parts}"
    if job.schedule == "interleaved" and job.micro_batches(layout) < pp:
        few = f"--schedule interleaved needs at least --pp {pp} micro-batches"
        return f"{few}, this layout has {job.micro_batches(layout)}: use 1f1b"
    return None


def checked(job: Job, layout: Layout, gpus: int) -> Layout:
    """Return the layout. Raises: UsageError when it cannot be."""
    why = refusal(job, layout, gpus)
    if why:
        raise UsageError(why)
    return layout


def factors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def layouts_of(
    job: Job, gpus: int, shardings=SHARDINGS, recompute=RECOMPUTE
) -> Iterator[Layout]:  # fmt: skip
    """Yield each layout whose axes multiply to `gpus` and divide what they split."""
    for tp, cp, pp in product(factors(gpus), repeat=3):
        if gpus % (tp * cp * pp) or refusal_of_axes(job, tp, cp, pp):
            continue
        dp = gpus // (tp * cp * pp)
        if refusal(job, Layout(tp, cp, dp, pp), gpus):
            continue
        # One replica has nobody to share with: one entry, not three.
        for sharding in shardings if dp * cp > 1 else ("none",):
            for again in recompute:
                yield Layout(tp, cp, dp, pp, sharding, again)


def refusal_of_axes(job: Job, tp: int, cp: int, pp: int) -> bool:
    """Rule out axes that no dp can save: cheap, since 16,384 GPUs have thousands of triples."""
    config = job.config
    return tp > config.num_kv_heads or pp > config.num_layers + 2 or job.seq_len < 2 * cp


def ranked(
    job: Job, cluster: Cluster, gpus: int, shardings=SHARDINGS, recompute=RECOMPUTE
) -> list[Prediction]:  # fmt: skip
    """Return all predictions: those that fit by step time, then the others by memory.

    Raises: UsageError when no layout divides the job.
    """
    found = [predict(job, cluster, each) for each in layouts_of(job, gpus, shardings, recompute)]
    if not found:
        batch = f"--global-batch-size {job.global_batch_size} in sequences"
        hint = f"change --gpus, {batch}, or --virtual-stages"
        raise UsageError(f"no layout of {gpus} GPUs divides heads, layers and batch: {hint}")
    return sorted(found, key=lambda p: (not p.fits, p.step_s if p.fits else p.memory_gib))
