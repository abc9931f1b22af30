"""What settings of a ds_config.json cost that are not wrong: check_config.py prints it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ds_rules import offloads
from ds_schema import AUTO, HINT, Finding, part_of


def hints(config: dict[str, Any]) -> Iterator[Finding]:
    """Say what settings cost that are not wrong."""
    zero = part_of(config, "zero_optimization")
    stage = zero.get("stage", 0)
    to_disk = part_of(zero, "offload_param").get("device") == "nvme"
    cpu_step = any(
        name == "offload_optimizer" and part.get("device", "none") != "none"
        for name, part in offloads(config)
    )
    rules = [
        ("gradient_clipping" not in config, "no gradient_clipping",
         "DeepSpeed clips gradients at a norm of 1; write 0 for none"),
        (stage == 3 and zero.get("stage3_max_live_parameters") == 0,
         "stage3_max_live_parameters 0",
         "no prefetch: each layer is gathered when it is needed, and computing waits"),
        (to_disk and zero.get("stage3_max_reuse_distance") != 0,
         "offload_param to nvme without stage3_max_reuse_distance 0",
         "a weight that stays gathered keeps its buffer: DeepSpeed stops when all are taken"),
        (cpu_step and part_of(config, "optimizer.params").get("torch_adam") is True,
         "torch_adam with offload_optimizer",
         "the step runs on the CPU with PyTorch's AdamW; DeepSpeedCPUAdam, the default, is faster"),
        (stage in (1, 2) and zero.get("overlap_comm") is not True, "no overlap_comm",
         "in stages 1 and 2 backward waits for each bucket to be reduced"),
        (stage in (1, 2) and zero.get("use_multi_rank_bucket_allreduce", True) is not False,
         "no use_multi_rank_bucket_allreduce: false",
         "gradients are all-reduced, twice the bytes of a reduction to their owner"),
        (stage in (1, 2, 3) and "reduce_bucket_size" not in zero, "no reduce_bucket_size",
         "5e8 elements, 1 GB in bf16, which stage 3 holds from the start"),
        (stage == 3 and zero.get("stage3_gather_16bit_weights_on_model_save") is not True,
         "no stage3_gather_16bit_weights_on_model_save",
         "save_16bit_model writes nothing, and says so only in its log"),
        (part_of(config, "bf16").get("enabled") in (True, AUTO) and stage in (1, 2, 3)
         and "communication_data_type" not in config and "data_types" not in config,
         "no communication_data_type and no data_types.grad_accum_dtype",
         "with bf16, gradients are summed over ranks and micro-batches in bf16"),
        (part_of(config, "bf16").get("enabled") is True and stage == 0, "bf16 in stage 0",
         "to make Adam's moments DeepSpeed takes a step on zero gradients: weights decay once"),
        (str(part_of(config, "scheduler").get("type")).startswith("Warmup")
         and "warmup_type" not in part_of(config, "scheduler.params"),
         "no scheduler.params.warmup_type", 'the warm-up is logarithmic; write "linear" for that'),
    ]  # fmt: skip
    for applies, text, cost in rules:
        if applies:
            yield Finding(HINT, text, cost)
