"""What the tests of module 03 share: DeepSpeed imported once, and a model that trains quickly."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from conftest import REPO

from legacy_common import models

# Two layers, so that two ranks' parts meet between them: in stage 2 DeepSpeed keeps the whole
# gradient of a weight that lies in both parts, which a model as small as this would show.
SMALL_MODEL = models.TransformerConfig(256, 32, 2, 2, 1, 88, 256)
SMALL = ("--micro-batch-size", 2, "--seq-len", 32)


@contextlib.contextmanager
def deepspeed_in_the_parent(*names: str) -> Iterator[None]:
    """Import here what each fork would import otherwise: seconds. Nothing of it computes here."""
    before = os.environ.get("DS_ACCELERATOR")
    os.environ["DS_ACCELERATOR"] = "cpu"  # read by the import
    for name in ("deepspeed", "deepspeed.module_inject.auto_ep_layer", *names):
        importlib.import_module(name)
    yield
    if before is None:
        del os.environ["DS_ACCELERATOR"]


def first_is_quick(*cases: tuple) -> list:
    """Return a table's rows, of which all but the first need time: `full`."""
    return [cases[0], *(pytest.param(*case, marks=pytest.mark.full) for case in cases[1:])]


def small(script: ModuleType) -> None:
    """Make the preset tiny a smaller one still."""
    models.PRESETS["tiny"] = SMALL_MODEL


def on_small(change: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    """Return what makes the model small and the change too."""

    def before(script: ModuleType) -> None:
        small(script)
        change(script)

    return before


CONFIGS = sorted((REPO / "03-deepspeed/configs").glob("*.json"))


def config_of(stage: int) -> Path:
    """Return the shipped config of a stage without offload."""
    return REPO / f"03-deepspeed/configs/zero{stage}_config.json"


def places(part: dict, above: tuple = ()) -> list[tuple]:
    """List the keys of a config, each with those above it."""
    found = []
    for name, value in part.items():
        found.append((*above, name))
        if isinstance(value, dict):
            found += places(value, (*above, name))
    return found


def changed(**sections) -> dict:
    """Return zero2_config.json with other keys and sections."""
    own = json.loads(config_of(2).read_text())
    for name, value in sections.items():
        merged = isinstance(value, dict) and name in own
        own[name] = own[name] | value if merged else value
    return own


# Hugging Face's examples, written from the keys that their DeepSpeed page documents.
FROM_THE_TRAINER_S_PAGE = {
    "zero2": {
        "fp16": {
            "enabled": "auto",
            "loss_scale": 0,
            "loss_scale_window": 1000,
            "initial_scale_power": 16,
            "hysteresis": 2,
            "min_loss_scale": 1,
        },
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
            },
        },
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "allgather_partitions": True,
            "allgather_bucket_size": 2e8,
            "overlap_comm": True,
            "reduce_scatter": True,
            "reduce_bucket_size": 2e8,
            "contiguous_gradients": True,
            "round_robin_gradients": True,
        },
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": 2000,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "wall_clock_breakdown": False,
    },
    "zero3": {
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "total_num_steps": "auto",
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
            },
        },
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 1e9,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    },
}


# A config, flags, and what is said about them.
MISREAD = [
    ('{\n  "bf16": {"enabled": true},\n  "zero_optimization": {"stage" 2}\n}', (),
     "is not JSON: line 3, column 33: Expecting ':' delimiter"),
    (changed(zero_optimisation={"stage": 3}), (),
     "unknown key zero_optimisation: did you mean zero_optimization?"),
    (changed(zero_optimization={"overlap_com": True}), (),
     "unknown key zero_optimization.overlap_com: did you mean overlap_comm?"),
    (changed(zero_optimization={"stage": 5}), (), "stage must be 0, 1, 2 or 3, not 5"),
    (changed(train_batch_size=32, train_micro_batch_size_per_gpu=4), ("--grad-accum-steps", 2),
     "--global-batch-size 32 is not --micro-batch-size 4 x 1 ranks x --grad-accum-steps 2 = 8"),
    (changed(train_micro_batch_size_per_gpu=4), ("--micro-batch-size", 2),
     "--micro-batch-size 2, but"),
    (changed(bf16={"enabled": True}), ("--precision", "32-true"),
     "has bf16.enabled true: change one, or write \"auto\" there"),
    (changed(bf16={"enabled": True}, fp16={"enabled": True}), (), "simultaneously enabled"),
    (changed(zero_optimization={"contiguous_gradients": "auto"}), (),
     'contiguous_gradients is "auto", which this script'),
    (changed(optimizer={"params": {"lr": "1e-3"}}), (), 'must be a number above 0, not "1e-3"'),
    (changed(optimizer={"type": "AdamWw"}), (), 'must be Adam or AdamW here, not "AdamWw"'),
    (changed(bf16={"enabled": "true"}), (), 'bf16.enabled must be true, false or "auto"'),
    (changed(torch_autocast={"enabled": True, "dtype": "float16"}, bf16={"enabled": True}),
     ("--precision", "bf16-mixed"), "has torch_autocast.dtype float16: change one"),
    (changed(torch_autocast={"enabled": True}), (), "torch_autocast needs a dtype"),
    (changed(gradient_clipping="1.0"), (), "gradient_clipping must be a number of at least 0"),
    (changed(zero_optimization={"stage": 3, "offload_param": {"device": "nvme",
     "nvme_path": "/a"}}), ("--nvme-path", "/b"), "has offload_param.nvme_path /a: change one"),
    (changed(gradient_allreduce_op="sum"), (), "gradient_allreduce_op must be mean"),
    (changed(tensor_parallel={"autotp_size": 2}), (), "autotp_size must be 0 or 1"),
    (changed(amp={"enabled": True}), (), "Apex AMP integration has been removed"),
    ({"zero_optimization": {"stage": 1}}, (), "no optimizer: add"),
    (changed(zero_optimization={"offload_param": {"device": "cpu"}}), (),
     "offload_param to cpu needs stage 3, not 2"),
    (changed(zero_optimization={"offload_optimizer": {"device": "disk"}}), (),
     "Input should be 'none', 'cpu' or 'nvme'"),
    (None, (), "No such file or directory"),
]  # fmt: skip


def write_config(path: Path, config: dict | str | None) -> None:
    path.unlink(missing_ok=True)
    if config is not None:
        path.write_text(config if isinstance(config, str) else json.dumps(config))
