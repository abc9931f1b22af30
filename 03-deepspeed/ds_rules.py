"""What is wrong with a ds_config.json, as findings: `load_config` refuses the first of them.

Three kinds are kept apart: wrong for DeepSpeed, what deepspeed_train.py cannot do, and what this
machine lacks. `ds_hints.py` says what a setting costs, and refuses nothing.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ds_schema import (
    AUTO,
    IGNORED,
    MACHINE,
    SCRIPT,
    SIZES,
    STOPS,
    WRONG,
    Finding,
    left_open,
    part_of,
    unknown_names,
    wrong_values,
)
from ds_setup import ADAMS, missing_for, ops_needed

OBJECTS = (
    "zero_optimization", "optimizer", "optimizer.params", "scheduler", "scheduler.params", "bf16",
    "fp16", "torch_autocast", "zero_optimization.offload_optimizer",
    "zero_optimization.offload_param", "tensor_parallel", "data_types", "aio",
    "activation_checkpointing", "checkpoint",
)  # fmt: skip
BUFFER_SIZE = 100_000_000  # elements: DeepSpeed's default
MAY_BE_NULL = ("zero_optimization.offload_optimizer", "zero_optimization.offload_param")
DTYPES = ("fp32", "float32", "float", "torch.float32", "bf16", "bfloat16", "torch.bfloat16",
          "fp16", "float16", "half", "torch.float16")  # fmt: skip
PLACES_OF_DTYPES = (
    "communication_data_type", "data_types.grad_accum_dtype", "data_types.param_dtype"
)  # fmt: skip
NUMBERS = {  # by key: may it be 0?
    "gradient_clipping": True,
    "optimizer.params.lr": False,
    "optimizer.params.eps": False,
    "optimizer.params.weight_decay": True,
    "scheduler.params.warmup_min_lr": True,
    "scheduler.params.warmup_max_lr": False,
    "scheduler.params.warmup_num_steps": False,
    "scheduler.params.total_num_steps": False,
}


def read(path: Path) -> tuple[dict[str, Any] | None, list[Finding]]:
    """Parse a config; None for what is not a JSON object. Raises: OSError when there is no file."""
    findings = []

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        for name in sorted({name for name in names if names.count(name) > 1}):
            findings.append(Finding(WRONG, f"{name} is there twice", STOPS))
        return dict(pairs)

    def refuse(name: str) -> None:
        findings.append(Finding(WRONG, f"{name} is no number that JSON has", "other readers stop"))

    try:
        text = path.read_text(encoding="utf-8-sig")
        config = json.loads(text, object_pairs_hook=once, parse_constant=refuse)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        return None, [Finding(WRONG, f"is not JSON: {place}: {error.msg}", STOPS)]
    except UnicodeDecodeError:
        return None, [Finding(WRONG, "is not text", STOPS)]
    if not isinstance(config, dict):
        return None, [Finding(WRONG, "must hold an object, {...}", STOPS)]
    return config, findings


def of_deepspeed(config: dict[str, Any], ranks: int | None = None) -> Iterator[Finding]:
    """Find what DeepSpeed would take without a word, or refuse in many.

    Call `prepare` first, and this only for a config in which `wrong_shapes` found nothing.
    """
    yield from unknown_names(config)
    yield from _wrong_stage(config)
    yield from _wrong_numbers(config)
    yield from _wrong_sizes(config, ranks)
    yield from _wrong_precision(config)
    yield from _wrong_types(config)
    yield from wrong_values(config)
    yield from _wrong_offload(config)


def of_script(config: dict[str, Any]) -> Iterator[Finding]:
    """Find what DeepSpeed can do and deepspeed_train.py cannot. Call `prepare` first."""
    optimizer = part_of(config, "optimizer")
    kind = optimizer.get("type")
    if "type" not in optimizer:
        text = 'no optimizer: add "optimizer": {"type": "AdamW", ...}'
        yield Finding(SCRIPT, text, "a script has to hand DeepSpeed an optimizer of its own")
    elif str(kind).lower() not in ADAMS:
        text = f"optimizer.type must be Adam or AdamW here, not {kind!r}"
        yield Finding(SCRIPT, text, "the other templates train with AdamW: nothing to compare with")
    unknown = {finding.text.split(":")[0] for finding in unknown_names(config)}
    for place, _ in left_open(config):
        if f"unknown key {place.split('.')[0]}" in unknown:
            continue  # one finding for the section is enough
        text = f'{place} is "{AUTO}", which this script cannot fill in'
        yield Finding(SCRIPT, text, "nor can Hugging Face's Trainer: DeepSpeed takes its default")
    if config.get("gradient_allreduce_op", "mean") != "mean":
        text = "gradient_allreduce_op must be mean"
        yield Finding(SCRIPT, text, "the script's loss counts on the mean over ranks")
    if config.get("managed_gradient_accumulation", True) is not True:
        text = "managed_gradient_accumulation must be true"
        yield Finding(SCRIPT, text, "the script calls step() after each micro-batch")
    size = part_of(config, "tensor_parallel").get("autotp_size")
    if type(size) is int and size > 1:
        text = "tensor_parallel.autotp_size must be 0 or 1"
        yield Finding(SCRIPT, text, "the script deals other samples to every rank")


def of_model(config: dict[str, Any], largest: int, ranks: int) -> Iterator[Finding]:
    """Find what a model's largest weight, so many elements, does not fit into."""
    offload = part_of(config, "zero_optimization.offload_param")
    size, part = offload.get("buffer_size", BUFFER_SIZE), -(-largest // ranks)
    if offload.get("device") == "nvme" and size < part:
        text = (
            f"offload_param.buffer_size {size:,} is below {part:,} elements, a rank's part of the "
            "largest weight"
        )
        yield Finding(WRONG, text, "an assertion ends the run while the model is built")


def of_machine(config: dict[str, Any]) -> Iterator[Finding]:
    """Find what this machine lacks for a config: float16, or a disk."""
    from deepspeed.accelerator import get_accelerator

    fp16 = part_of(config, "fp16").get("enabled") is True
    if fp16 and not get_accelerator().is_fp16_supported():
        text = "DeepSpeed cannot train in float16 on this device: use a GPU or bf16-mixed"
        yield Finding(MACHINE, text, STOPS)
    for name, part in offloads(config):
        folder = part.get("nvme_path")
        if part.get("device") == "nvme" and folder != AUTO and isinstance(folder, str):
            yield from _unwritable(f"{name}: nvme_path {folder}", Path(folder))


def of_ops(config: dict[str, Any]) -> Iterator[Finding]:
    """Find what this machine lacks to compile the ops that a config makes DeepSpeed load."""
    for op in ops_needed(config):
        if lack := missing_for(op):
            other = ' or set "torch_adam": true, PyTorch\'s own' if op.endswith("_adam") else ""
            yield Finding(MACHINE, f"{lack}{other}", "the run ends when DeepSpeed loads the op")


def offloads(config: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return what is offloaded, by the names of its sections."""
    zero = part_of(config, "zero_optimization")
    found = [(name, zero.get(name)) for name in ("offload_optimizer", "offload_param")]
    return [(name, part) for name, part in found if isinstance(part, dict)]


def wrong_shapes(config: dict[str, Any]) -> Iterator[Finding]:
    """Find sections that are no objects; the other rules cannot read such a config."""
    for place in OBJECTS:
        *sections, name = place.split(".")
        value = part_of(config, ".".join(sections)).get(name, {})
        if not isinstance(value, dict) and not (value is None and place in MAY_BE_NULL):
            yield Finding(WRONG, f"{place} must be an object, {{...}}", STOPS)


def _wrong_stage(config: dict[str, Any]) -> Iterator[Finding]:
    stage = part_of(config, "zero_optimization").get("stage", 0)
    if type(stage) is not int or stage not in range(4):
        text = f"zero_optimization.stage must be 0, 1, 2 or 3, not {stage!r}"
        taken = "DeepSpeed reads the number; Hugging Face, which compares with 3, does not"
        yield Finding(WRONG, text, taken if str(stage) in ("0", "1", "2", "3") else STOPS)


def _wrong_numbers(config: dict[str, Any]) -> Iterator[Finding]:
    for key, zero_too in NUMBERS.items():
        *sections, name = key.split(".")
        value = part_of(config, ".".join(sections)).get(name, AUTO)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value != AUTO and not (number and (value > 0 or zero_too and value == 0)):
            least = "of at least 0" if zero_too else "above 0"
            text = f"{key} must be a number {least}, not {json.dumps(value)}"
            yield Finding(WRONG, text, "DeepSpeed does not look: it stops later, or steps wrongly")
    betas = part_of(config, "optimizer.params").get("betas", AUTO)
    two = isinstance(betas, list) and len(betas) == 2
    if betas != AUTO and not (two and all(type(b) in (int, float) and 0 <= b < 1 for b in betas)):
        text = f"optimizer.params.betas must be two numbers below 1, not {json.dumps(betas)}"
        yield Finding(WRONG, text, STOPS)


def _wrong_sizes(config: dict[str, Any], ranks: int | None) -> Iterator[Finding]:
    micro, steps, total = (config.get(name, AUTO) for name in SIZES)
    for name in SIZES:
        size = config.get(name, AUTO)
        if size != AUTO and (type(size) is not int or size < 1):
            text = f"{name} must be a whole number of at least 1, not {size!r}"
            yield Finding(WRONG, text, STOPS)
            return
    if AUTO in (micro, steps, total):
        return
    if ranks and total != micro * steps * ranks:
        yield Finding(WRONG, identity(total, micro, steps, ranks), STOPS)
    elif total % (micro * steps):
        yield Finding(WRONG, identity(total, micro, steps, "N"), f"{STOPS}, on any number of ranks")


def identity(total: int, micro: int, steps: int, ranks: int | str) -> str:
    """Say how batch sizes fail to multiply."""
    product = f" = {micro * steps * ranks}" if isinstance(ranks, int) else " for no N"
    return (
        f"train_batch_size {total} is not train_micro_batch_size_per_gpu {micro} x "
        f"gradient_accumulation_steps {steps} x {ranks} ranks{product}"
    )


def _wrong_precision(config: dict[str, Any]) -> Iterator[Finding]:
    stated = {name: part_of(config, name).get("enabled", False) for name in ("bf16", "fp16")}
    for name, value in stated.items():
        if value not in (True, False, AUTO):
            text = f'{name}.enabled must be true, false or "{AUTO}"'
            yield Finding(WRONG, text, "DeepSpeed reads a text as it pleases")
    if all(value is True for value in stated.values()):
        yield Finding(WRONG, "bf16 and fp16 are both enabled: one of them", STOPS)
    autocast = part_of(config, "torch_autocast")
    if autocast.get("enabled", False) not in (True, False):
        yield Finding(WRONG, "torch_autocast.enabled must be true or false", IGNORED)
    elif autocast.get("enabled") and "dtype" not in autocast:
        text = "torch_autocast needs a dtype, bfloat16 or float16"
        yield Finding(WRONG, text, "the device's default: float16 on a GPU, bfloat16 on a CPU")
    elif autocast.get("enabled") and True in stated.values():
        text = "torch_autocast beside bf16 or fp16: one of them"
        yield Finding(WRONG, text, "autocast is for weights in float32; DeepSpeed stops")


def _wrong_types(config: dict[str, Any]) -> Iterator[Finding]:
    size = part_of(config, "tensor_parallel").get("autotp_size", 0)
    if type(size) is not int and size != AUTO:
        text = f"tensor_parallel.autotp_size must be a whole number, not {json.dumps(size)}"
        yield Finding(WRONG, text, "DeepSpeed reads a text as a number, or stops")
    for place in PLACES_OF_DTYPES:
        section, _, name = place.rpartition(".")
        dtype = part_of(config, section).get(name)
        # Of a text for the first DeepSpeed says so itself.
        if dtype not in (None, AUTO, *DTYPES) and not (isinstance(dtype, str) and not section):
            text = f"{place} must be fp32, bf16 or fp16, not {json.dumps(dtype)}"
            yield Finding(WRONG, text, "DeepSpeed stops, perhaps once the model is built")


def _wrong_offload(config: dict[str, Any]) -> Iterator[Finding]:
    stage = part_of(config, "zero_optimization").get("stage", 0)
    for name, part in offloads(config):
        target = part.get("device", "none")
        least = {"offload_optimizer": 1, "offload_param": 3}[name]
        if target in ("none", "nvme"):
            least = 3 if target == "nvme" else 0
        if isinstance(stage, int) and stage < least:
            text = (
                f"{name} to {target} needs stage {least}, not {stage}: DeepSpeed would offload "
                "nothing, and say nothing"
            )
            yield Finding(WRONG, text, "the memory you meant to free stays taken")
        if target == "nvme" and not isinstance(part.get("nvme_path", AUTO), str):
            yield Finding(WRONG, f"{name}.nvme_path must be a folder's name", STOPS)


def _unwritable(what: str, folder: Path) -> Iterator[Finding]:
    if not folder.is_dir():
        yield Finding(MACHINE, f"{what} is not a folder: make it first", STOPS)
        return
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        yield Finding(MACHINE, f"{what} cannot be written: {error.strerror}", STOPS)
