"""What the installed DeepSpeed knows of a config: its keys, its values, and where "auto" may stand.

DeepSpeed keeps no list of its keys, so it is asked: it reads a config that notes what is looked up.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch

AUTO = "auto"  # in a config: "the script shall say"; Hugging Face's Trainer reads it alike
WRONG, SCRIPT, MACHINE, HINT = "wrong for DeepSpeed", "not in deepspeed_train.py", "machine", "hint"
# What DeepSpeed takes from an Adam's parameters before PyTorch's own class sees them.
ADAM_EXTRAS = {"torch_adam", "adam_w_mode", "bias_correction", "fp32_optimizer_states"}
SIZES = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
# Keys that may be "auto", each with a value for the time of the check.
AUTO_KEYS = {
    **dict.fromkeys(SIZES[:2], 1),
    "train_batch_size": 1,
    "gradient_clipping": 1.0,
    "bf16.enabled": False,
    "fp16.enabled": False,
    "optimizer.params.lr": 1e-3,
    "optimizer.params.betas": [0.9, 0.95],
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.1,
    "scheduler.params.warmup_min_lr": 0,
    "scheduler.params.warmup_max_lr": 1e-3,
    "scheduler.params.warmup_num_steps": 1,
    "scheduler.params.total_num_steps": 2,
    "zero_optimization.reduce_bucket_size": 1,
    "zero_optimization.stage3_prefetch_bucket_size": 1,
    "zero_optimization.stage3_param_persistence_threshold": 1,
    "zero_optimization.offload_optimizer.nvme_path": ".",
    "zero_optimization.offload_param.nvme_path": ".",
}
TOLD_ELSEWHERE = ("zero_optimization.stage", "tensor_parallel.autotp_size")
IGNORED = "DeepSpeed passes over it: what it should do is not done"
STOPS = "DeepSpeed stops at its start"


@dataclass(frozen=True)
class Finding:
    """One thing to know about a config; `text` names the key, `cost` says what follows."""

    kind: str
    text: str
    cost: str


def part_of(config: dict[str, Any], place: str) -> dict[str, Any]:
    """Return a section; an empty one where there is none."""
    for name in place.split(".") if place else ():
        config = config.get(name)
        if not isinstance(config, dict):
            return {}
    return config


def leaves(part: dict[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in part.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{place}{name}.")
        else:
            yield f"{place}{name}", value


def filled(config: dict[str, Any]) -> dict[str, Any]:
    """Return a copy with values in place of each "auto" that scripts and Trainer fill in."""
    config = copy.deepcopy(config)
    for key, value in AUTO_KEYS.items():
        *sections, name = key.split(".")
        part = part_of(config, ".".join(sections))
        if part.get(name) == AUTO:
            part[name] = value
    return config


def left_open(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield place and value of each "auto" that nobody fills in."""
    yield from ((place, v) for place, v in leaves(filled(config)) if v == AUTO)


class _Asked(dict):
    """A config that notes which keys it was asked for: DeepSpeed keeps no list of what it reads."""

    def __init__(self, **config: Any) -> None:
        super().__init__(config)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.names.add(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)

    def keys(self):
        return self  # `name in config.keys()` shall be noted too

    def __copy__(self) -> _Asked:
        return self


def _unknown(name: str, known: Collection[str], place: str = "", cost: str = IGNORED) -> Finding:
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]}?" if near else "DeepSpeed knows no such key"
    return Finding(WRONG, f"unknown key {place}{name}: {hint}", cost)


def unknown_names(config: dict[str, Any]) -> Iterator[Finding]:
    """Find names that DeepSpeed would pass over, or trip over when the model is built."""
    from deepspeed.runtime import lr_schedules
    from deepspeed.runtime.config import DeepSpeedConfig

    asked = _Asked(train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=1)
    plain = ("aio", "activation_checkpointing", "flops_profiler", "checkpoint", "data_types",
             "torch_autocast")  # fmt: skip
    inside = {name: _Asked(**config[name]) for name in plain if isinstance(config.get(name), dict)}
    asked.update(inside)
    try:
        DeepSpeedConfig(asked)
    except Exception:  # a value of these, which is told elsewhere
        inside = {}
    for name in config:
        if name not in asked.names:
            yield _unknown(name, asked.names)
    for section, part in inside.items():
        for name in part:
            if name not in part.names:
                yield _unknown(name, part.names, f"{section}.")
    for section in ("optimizer", "scheduler"):
        for name in part_of(config, section):
            if name not in ("type", "params", "legacy_fusion"):
                yield _unknown(name, {"type", "params"}, f"{section}.")
    schedule = part_of(config, "scheduler")
    if schedule and schedule.get("type") not in lr_schedules.VALID_LR_SCHEDULES:
        kind = schedule.get("type")
        near = difflib.get_close_matches(str(kind), lr_schedules.VALID_LR_SCHEDULES, 1)
        hint = f": did you mean {near[0]}?" if near else ""
        yield Finding(WRONG, f"unknown scheduler.type {kind!r}{hint}", STOPS)
    for section, module in (("optimizer", torch.optim), ("scheduler", lr_schedules)):
        owner: Callable | None = getattr(module, str(part_of(config, section).get("type")), None)
        if owner:  # not one of DeepSpeed's own optimizers, which say so themselves
            known = ADAM_EXTRAS | set(inspect.signature(owner).parameters)
            for name in part_of(config, f"{section}.params"):
                if name not in known:
                    yield _unknown(name, known, f"{section}.params.", STOPS)


def wrong_values(config: dict[str, Any]) -> Iterator[Finding]:
    """Have DeepSpeed read the config as it will; what it does not like is left out, and again."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel
    from pydantic import ValidationError

    # DeepSpeed drops what is "auto" before it looks at the name, and so would miss a wrong one.
    text = json.dumps(filled(config)).replace(f'"{AUTO}"', f'"{AUTO}!"')
    config = json.loads(text) | {SIZES[0]: 1, SIZES[1]: 1}
    config.pop("train_batch_size", None)  # held against a group that may not exist yet
    for section in ("bf16", "fp16"):  # told elsewhere
        if part_of(config, section).get("enabled", False) not in (True, False):
            config.pop(section, None)
    for place in ("communication_data_type", "optimizer.type"):
        section, _, name = place.rpartition(".")
        if not isinstance(part_of(config, section).get(name, ""), str):
            config.pop(place.split(".")[0])
    for _ in range(20):
        try:
            DeepSpeedConfig(copy.deepcopy(config))
            return
        except ValidationError as error:
            models, fields = [DeepSpeedConfigModel], set()
            for model in models:
                models += model.__subclasses__()
                fields |= {f.alias or name for name, f in model.model_fields.items()}
            for each in error.errors():
                *parts, name = map(str, each["loc"])
                owners = [k for k, v in config.items() if isinstance(v, dict)]
                owner = next((k for k in owners if (*parts, name)[0] in config[k]), "")
                place = "".join(f"{part}." for part in (owner, *parts) if part)
                part = part_of(config, place.rstrip("."))
                if name not in part:
                    return
                value = part.pop(name)
                if each["type"] == "extra_forbidden":
                    yield _unknown(name, fields, place, STOPS)
                elif value != f"{AUTO}!" and place + name not in TOLD_ELSEWHERE:
                    yield Finding(WRONG, f"{place}{name}: {each['msg']}", STOPS)
        except Exception as error:
            said = _said(error)
            if "simultaneously" not in said:  # told elsewhere
                yield Finding(WRONG, said, STOPS)
            # Without the key that it complains of, it says something else, or nothing.
            config = next((c for c in _each_without_one(config) if _complaint(c) != said), None)
            if config is None:
                return


def _said(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _each_without_one(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name in set(config) - set(SIZES):
        yield {key: value for key, value in config.items() if key != name}


def _complaint(config: dict[str, Any]) -> str | None:
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        DeepSpeedConfig(copy.deepcopy(config))
    except Exception as error:
        return _said(error)
    return None
