"""What the tests of module 03 share: DeepSpeed imported once, and a model that trains quickly."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from conftest import REPO, results_of

import ds_config
from dist_common import models, runtime

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


def failed_checks(folder: Path) -> list[str]:
    return [check["name"] for check in results_of(folder)["checks"] if not check["ok"]]


def losses_of(folder: Path) -> dict[int, float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def settled(
    path: Path, ranks: int = 2, given: set[str] | None = None, **flags
) -> tuple[dict, Namespace]:
    """Load a config as a script does, in a fork: it changes the environment."""
    args = Namespace(deepspeed_config=path, micro_batch_size=None, grad_accum_steps=None, lr=None,
                     max_steps=None, precision=None, nvme_path=path.parent)  # fmt: skip
    vars(args).update(flags)
    world = runtime.World(0, 0, ranks, ranks, "python")
    return ds_config.load_config(args, world, models.PRESETS["tiny"], given), args


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
