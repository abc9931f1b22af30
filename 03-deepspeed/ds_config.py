"""Read a ds_config.json for a run: refuse what is wrong, and settle it with the flags.

`findings` of ds_rules.py say what is wrong; here a config and flags come to one value for each key.
"""

from __future__ import annotations

import argparse
import atexit
import json
import subprocess
import tempfile
from collections.abc import Collection, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import torch

import ds_rules
from dist_common.cli import UsageError
from dist_common.models import Transformer, TransformerConfig
from dist_common.runtime import World
from ds_schema import AUTO, SIZES, Finding
from ds_setup import PRECISIONS

# What holds where neither the config nor a flag says it, nor the script has a default.
DEFAULTS = {"micro_batch_size": 8, "max_steps": 20, "lr": 2e-3, "warmup_steps": 4,
            "max_grad_norm": 1.0}  # fmt: skip
# A key of the config and the flag that it must agree with, as in Hugging Face's Trainer.
FLAG_OF = {
    "optimizer.params.lr": "lr",
    "scheduler.params.warmup_max_lr": "lr",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "scheduler.params.total_num_steps": "max_steps",
    "gradient_clipping": "max_grad_norm",
}
# "auto" without a flag: what the other templates take.
CONSTANTS = {
    "optimizer.params.betas": [0.9, 0.95],
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.1,
    "scheduler.params.warmup_min_lr": 0,
}


def load_config(
    args: argparse.Namespace, world: World, model: TransformerConfig,
    given: Collection[str] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Read --deepspeed_config, check it, and settle what it leaves to the flags, and they to it.

    Afterwards args has the batch sizes, learning rate and precision that hold. "auto" is filled in
    as Hugging Face's Trainer does; nvme_path becomes a folder of this rank's own in it, which is
    removed when the rank ends. `given` names the flags on the command line, which a value of the
    config may not contradict; without it, those that are not None. Call `prepare` first.

    Raises: UsageError in one line for all that DeepSpeed would take without a word (an unknown
    section, a stage or a learning rate as text, offload in a stage that has none), or refuse in
    many: no JSON, unknown keys, sizes that do not multiply, a disk that cannot be written.
    """
    path = args.deepspeed_config
    try:
        config, findings = ds_rules.read(path)
    except OSError as error:
        raise UsageError(f"--deepspeed_config {path}: {error.strerror}") from error
    _refuse(path, findings)
    _refuse(path, ds_rules.wrong_shapes(config))
    _refuse(path, chain(ds_rules.of_deepspeed(config), ds_rules.of_script(config)))
    flags = _Flags(path, args, given)
    zero = config.setdefault("zero_optimization", {})
    _settle_precision(config, flags)
    _settle_batch(config, flags, world.world_size)
    config.setdefault("gradient_clipping", AUTO if flags.given("max_grad_norm") else 1.0)
    params = config["optimizer"].setdefault("params", {})
    params.setdefault("lr", AUTO if flags.given("lr") else 1e-3)  # DeepSpeed's own default
    for key, flag in FLAG_OF.items():
        flags.settle(config, key, flag)
    for key, value in CONSTANTS.items():
        part, name = _place(config, key)
        if part.get(name) == AUTO:
            part[name] = list(value) if isinstance(value, list) else value
    args.max_steps = flags.value("max_steps")
    D = model.dim
    for key, value in (
        ("reduce_bucket_size", D * D),
        ("stage3_prefetch_bucket_size", int(0.9 * D * D)),
        ("stage3_param_persistence_threshold", 10 * D),
    ):
        if zero.get(key) == AUTO:
            zero[key] = value
    _fill_nvme_path(config, flags)
    _refuse(path, ds_rules.of_machine(config))
    _make_swap_folders(config)
    return config


def require_buffers(
    config: dict[str, Any], path: Path, model: TransformerConfig, ranks: int
) -> None:
    """Refuse buffers for weights on a disk that the largest weight does not fit into.

    Raises: UsageError.
    """
    with torch.device("meta"):
        largest = max(weight.numel() for weight in Transformer(model).parameters())
    _refuse(path, ds_rules.of_model(config, largest, ranks))


def types_of(config: dict[str, Any]) -> tuple[torch.dtype, torch.dtype | None]:
    """Return the type of a settled config's weights, and that of autocast, if it is on."""
    halves = {"bf16": torch.bfloat16, "fp16": torch.float16}
    for name, dtype in halves.items():
        if config.get(name, {}).get("enabled"):
            return dtype, None
    autocast = config.get("torch_autocast", {})
    if not autocast.get("enabled"):
        return torch.float32, None
    return torch.float32, halves["bf16" if "b" in str(autocast.get("dtype")) else "fp16"]


def _refuse(path: Path, findings: Iterable[Finding]) -> None:
    for finding in findings:
        raise UsageError(f"{path}: {finding.text}")


def _place(config: dict, key: str) -> tuple[dict, str]:
    *sections, name = key.split(".")
    for section in sections:
        config = config.get(section, {})
    return config, name


class _Flags:
    """The flags of a run, and which of them a config may not contradict."""

    def __init__(self, path: Path, args: argparse.Namespace, given: Collection[str] | None) -> None:
        self.path, self.args = path, args
        self.names = {n for n, v in vars(args).items() if v is not None} if given is None else given

    def given(self, flag: str) -> bool:
        return flag in self.names

    def value(self, flag: str) -> Any:
        value = getattr(self.args, flag, None)
        return DEFAULTS.get(flag) if value is None else value

    def contradiction(self, flag: str, has: str) -> UsageError:
        dashed = flag.replace("_", "-")
        value = getattr(self.args, flag)
        change = f'change one, or write "{AUTO}" there'
        return UsageError(f"--{dashed} {value}, but {self.path} has {has}: {change}")

    def settle(self, config: dict, key: str, flag: str) -> None:
        """Bring a key of the config and a flag to one value, if the key is there."""
        part, name = _place(config, key)
        if name not in part:
            return
        stated = part[name]
        if key.endswith("warmup_num_steps") and stated == AUTO:
            stated = max(1, self.value(flag))  # DeepSpeed takes no 0
        elif stated == AUTO:
            stated = self.value(flag)
        elif self.given(flag) and stated != getattr(self.args, flag):
            raise self.contradiction(flag, f"{key} {stated}")
        part[name] = stated
        if hasattr(self.args, flag):
            setattr(self.args, flag, stated)


def _settle_precision(config: dict, flags: _Flags) -> None:
    args = flags.args
    sections = {name: section for name, section in PRECISIONS.items() if section}
    stated = {name: config.get(part, {}).get("enabled", False) for name, part in sections.items()}
    autocast = config.get("torch_autocast", {})
    if autocast.get("enabled"):
        name = "bf16-mixed" if "b" in str(autocast.get("dtype")) else "16-mixed"
        if flags.given("precision") and args.precision != name:
            raise flags.contradiction("precision", f"torch_autocast.dtype {autocast.get('dtype')}")
        args.precision = name
        for part in sections.values():
            if part in config:
                config[part]["enabled"] = False
        return
    on = [name for name, value in stated.items() if value is True]
    if on and not flags.given("precision"):
        args.precision = on[0]
    elif args.precision is None:
        # In stage 0, bf16 would not train as elsewhere: to make Adam's moments DeepSpeed takes a
        # step.
        left_open = stated["bf16-mixed"] == AUTO and config["zero_optimization"].get("stage", 0) > 0
        args.precision = "bf16-mixed" if left_open else "32-true"
    for name, part in sections.items():
        want = name == args.precision
        if stated[name] not in (AUTO, want):
            raise flags.contradiction("precision", f"{part}.enabled {json.dumps(stated[name])}")
        if part in config:
            config[part]["enabled"] = want


def _settle_batch(config: dict, flags: _Flags, ranks: int) -> None:
    args = flags.args
    micro, steps, total = SIZES
    for name in SIZES:
        config.setdefault(name, AUTO)
    whole = config[total]
    if flags.given("global_batch_size"):
        if whole not in (AUTO, args.global_batch_size):
            raise flags.contradiction("global_batch_size", f"{total} {whole}")
        whole = args.global_batch_size
    flags.settle(config, micro, "micro_batch_size")
    args.micro_batch_size = config[micro]
    # The job of all templates has one micro-batch in a step; the stages' lessons have two.
    accumulated = 1 if hasattr(args, "global_batch_size") else 2
    if whole != AUTO:  # what is left to say follows from it, if it is a whole number
        accumulated = max(1, whole // (args.micro_batch_size * ranks))
    if args.grad_accum_steps is None:
        args.grad_accum_steps = accumulated if config[steps] == AUTO else config[steps]
    flags.settle(config, steps, "grad_accum_steps")
    product = args.micro_batch_size * args.grad_accum_steps * ranks
    if whole not in (AUTO, product):
        sizes = (args.micro_batch_size, args.grad_accum_steps, ranks)
        raise UsageError(f"{flags.path}: {ds_rules.identity(whole, *sizes)}")
    config[total] = product
    if hasattr(args, "global_batch_size"):
        args.global_batch_size = product


def _fill_nvme_path(config: dict, flags: _Flags) -> None:
    given = getattr(flags.args, "nvme_path", None)
    for name, part in ds_rules.offloads(config):
        if part.get("device") != "nvme":
            continue
        if part.setdefault("nvme_path", AUTO) == AUTO:
            if given is None:
                why = f"{name} to nvme needs --nvme-path, a folder on the disk"
                raise UsageError(f"{flags.path}: {why}")
            part["nvme_path"] = str(given)
        elif given is not None and part["nvme_path"] != str(given):
            raise flags.contradiction("nvme_path", f"{name}.nvme_path {part['nvme_path']}")


def _make_swap_folders(config: dict) -> None:
    swaps = [part for _, part in ds_rules.offloads(config) if part.get("device") == "nvme"]
    own = {parent: _swap_folder(Path(parent)) for parent in {p["nvme_path"] for p in swaps}}
    for part in swaps:
        part["nvme_path"] = str(own[part["nvme_path"]])


def _swap_folder(parent: Path) -> Path:
    """Make this rank's own folder in `parent`; it goes when the rank does, even if that is killed.

    Not where the whole job is killed at one blow, as SLURM may do after a time limit.
    """
    folder = tempfile.mkdtemp(prefix="zero-", dir=parent)
    # Its input ends with this process. DeepSpeed itself removes nothing.
    sweeper = subprocess.Popen(
        ["sh", "-c", 'cat; rm -rf -- "$0"', folder], stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    atexit.register(sweeper.communicate)
    return Path(folder)
