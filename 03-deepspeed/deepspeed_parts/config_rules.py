"""What the installed DeepSpeed knows of a config: its keys, its values, and where "auto" may stand.

DeepSpeed keeps no list of its keys, so it is asked: it reads a config that notes what is looked up.
What it does not say of values stands in config_rules.toml.
"""

from __future__ import annotations

import argparse
import copy
import difflib
import inspect
import json
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

from deepspeed_parts.setup import ADAMS
from dist_common.cli import UsageError

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

AUTO = "auto"  # in a config: "the script shall say"; Hugging Face's Trainer reads it alike
WRONG, SCRIPT, MACHINE, HINT = "wrong for DeepSpeed", "not in deepspeed_train.py", "machine", "hint"
RULES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
# What DeepSpeed takes from an Adam's parameters before PyTorch's own class sees them.
ADAM_EXTRAS = {"torch_adam", "adam_w_mode", "bias_correction", "fp32_optimizer_states"}
SIZES = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
IGNORED = "DeepSpeed passes over it: what it should do is not done"
STOPS = "DeepSpeed stops at its start"
DTYPES = {None, "fp32", "float32", "float", "bf16", "bfloat16", "fp16", "float16", "half"}
DTYPES |= {"torch.float32", "torch.bfloat16", "torch.float16"}


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


MUST_BE: dict[str, Callable[[Any], bool]] = {
    "0, 1, 2 or 3": lambda value: type(value) is int and value in range(4),
    "0 or 1": lambda value: value in (0, 1),
    "a whole number": lambda value: type(value) is int,
    "a whole number of at least 1": lambda value: type(value) is int and value > 0,
    "a number above 0": lambda value: is_number(value) and value > 0,
    "a number of at least 0": lambda value: is_number(value) and value >= 0,
    "two numbers below 1": lambda value: (
        isinstance(value, list) and [is_number(b) and 0 <= b < 1 for b in value] == [True, True]
    ),
    "true": lambda value: value is True,
    "true or false": lambda value: value in (True, False),
    'true, false or "auto"': lambda value: value in (True, False),
    "mean": lambda value: value == "mean",
    "Adam or AdamW here": lambda value: str(value).lower() in ADAMS,
    "a text: fp32, bf16 or fp16": lambda value: value is None or isinstance(value, str),
    "fp32, bf16 or fp16": lambda value: isinstance(value, str | None) and value in DTYPES,
}


class Finding(NamedTuple):
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


def value_of(config: dict[str, Any], key: str, default: Any = None) -> Any:
    """Return the value of a key such as optimizer.params.lr."""
    place, _, name = key.rpartition(".")
    return part_of(config, place).get(name, default)


def offloads(config: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return what is offloaded, by the names of its sections."""
    names = ("offload_optimizer", "offload_param")
    found = [(name, value_of(config, f"zero_optimization.{name}")) for name in names]
    return [(name, part) for name, part in found if isinstance(part, dict)]


def filled(config: dict[str, Any]) -> dict[str, Any]:
    """Return a copy with values in place of each "auto" that scripts and Trainer fill in."""
    config = copy.deepcopy(config)
    for key, value in RULES["auto"].items():
        place, _, name = key.rpartition(".")
        if value_of(config, key) == AUTO:
            part_of(config, place)[name] = value
    return config


def left_open(part: dict[str, Any], place: str = "") -> Iterator[str]:
    """Yield the place of each "auto"."""
    for name, value in part.items():
        if isinstance(value, dict):
            yield from left_open(value, f"{place}{name}.")
        elif value == AUTO:
            yield f"{place}{name}"


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


def _unknown(names: Iterable, known: Collection[str], kind: str, cost: str) -> Iterator[Finding]:
    for name in map(str, names):
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            no_such = f"DeepSpeed knows no such {kind.split()[0]}"
            hint = f"did you mean {near[0]}?" if near else no_such
            yield Finding(WRONG, f"unknown {kind}{name}: {hint}", cost)


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
    yield from _unknown(config, asked.names, "key ", IGNORED)
    for section, part in inside.items():
        yield from _unknown(part, part.names, f"key {section}.", IGNORED)
    if config.get("scheduler"):
        kind = value_of(config, "scheduler.type")
        yield from _unknown([kind], lr_schedules.VALID_LR_SCHEDULES, "scheduler.type ", STOPS)
    for section, module in (("optimizer", torch.optim), ("scheduler", lr_schedules)):
        known = {"type", "params", "legacy_fusion"}
        yield from _unknown(part_of(config, section), known, f"key {section}.", IGNORED)
        owner: Callable | None = getattr(module, str(value_of(config, f"{section}.type")), None)
        if owner:  # not one of DeepSpeed's own optimizers, which say so themselves
            known = ADAM_EXTRAS | set(inspect.signature(owner).parameters)
            part = part_of(config, f"{section}.params")
            yield from _unknown(part, known, f"key {section}.params.", STOPS)


def _complaint(config: dict[str, Any]) -> Exception | None:
    """Have DeepSpeed read a config; return what it raises."""
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        DeepSpeedConfig(copy.deepcopy(config))
    except Exception as error:
        return error
    return None


def _said(error: Exception | None) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def wrong_values(config: dict[str, Any]) -> Iterator[Finding]:
    """Have DeepSpeed read the config as it will; what it does not like is left out, and again."""
    from pydantic import ValidationError

    # DeepSpeed drops what is "auto" before it looks at the name, and so would miss a wrong one.
    text = json.dumps(filled(config)).replace(f'"{AUTO}"', f'"{AUTO}!"')
    config = json.loads(text) | {SIZES[0]: 1, SIZES[1]: 1}
    config.pop("train_batch_size", None)  # held against a group that may not exist yet
    for key, rule in refused(config):
        if rule["kind"] == WRONG or key == "optimizer.type":  # told elsewhere
            place, _, name = key.rpartition(".")
            part_of(config, place).pop(name)
    for _ in range(20):
        error = _complaint(config)
        if error is None:
            return
        if isinstance(error, ValidationError):
            for each in error.errors():
                found = _left_out(config, each)
                if found is None:
                    return
                yield from found
            continue
        said = _said(error)
        if "simultaneously" not in said:  # told elsewhere
            yield Finding(WRONG, said, STOPS)
        # Without the key that it complains of, it says something else, or nothing.
        names = set(config) - set(SIZES)
        smaller = ({k: v for k, v in config.items() if k != name} for name in names)
        config = next((one for one in smaller if _said(_complaint(one)) != said), None)
        if config is None:
            return


def _left_out(config: dict[str, Any], error: dict[str, Any]) -> list[Finding] | None:
    """Take out what pydantic complains of; return what there is to say. None: it is not found."""
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    *parts, name = map(str, error["loc"])
    owners = [section for section, part in config.items() if isinstance(part, dict)]
    owner = next((one for one in owners if (*parts, name)[0] in config[one]), "")
    place = ".".join(part for part in (owner, *parts) if part)
    part = part_of(config, place)
    if name not in part:
        return None
    value = part.pop(name)
    if error["type"] == "extra_forbidden":
        models = [DeepSpeedConfigModel]
        for model in models:
            models += model.__subclasses__()
        fields = {f.alias or n for model in models for n, f in model.model_fields.items()}
        return list(_unknown([name], fields - {name}, f"key {place}.", STOPS))
    said = Finding(WRONG, f"{place}.{name}: {error['msg']}", STOPS)
    return [] if value == f"{AUTO}!" else [said]


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


def refuse(path: Path, findings: Iterable[Finding]) -> None:
    """Raise UsageError for the first of some findings."""
    for finding in findings:
        raise UsageError(f"{path}: {finding.text}")


def read_right(path: Path) -> dict[str, Any]:
    """Read a config in which DeepSpeed finds nothing wrong. Call `prepare` first.

    Raises: UsageError in one line for anything else.
    """
    try:
        config, findings = read(path)
    except OSError as error:
        raise UsageError(f"--deepspeed_config {path}: {error.strerror}") from error
    refuse(path, chain(findings, wrong_shapes(config), of_deepspeed(config)))
    return config


def fill_disk(config: dict[str, Any], args: argparse.Namespace, given: Collection[str]) -> None:
    """Have offload to a disk go to --nvme-path. Raises: UsageError when it is missing, or another.

    `given` names the flags on the command line.
    """
    for name, part in offloads(config):
        if part.get("device") != "nvme":
            continue
        stated = part.get("nvme_path", AUTO)
        if stated == AUTO and not args.nvme_path:
            why = f"{name} to nvme needs --nvme-path, a folder on the disk"
            raise UsageError(f"{args.deepspeed_config}: {why}")
        if stated == AUTO:
            part["nvme_path"] = str(args.nvme_path)
        elif "nvme_path" in given and stated != str(args.nvme_path):
            raise UsageError(
                f"--nvme-path {args.nvme_path}, but {args.deepspeed_config} has {name}.nvme_path "
                f'{stated}: change one, or write "{AUTO}" there'
            )


def wrong_shapes(config: dict[str, Any]) -> Iterator[Finding]:
    """Find sections that are no objects; the other rules cannot read such a config."""
    for place in RULES["sections"]:
        value = value_of(config, place, {})
        if not isinstance(value, dict) and not (value is None and "offload" in place):
            yield Finding(WRONG, f"{place} must be an object, {{...}}", STOPS)


def refused(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each key whose value config_rules.toml refuses, and the rule."""
    for rule in RULES["value"]:
        for key in rule["keys"]:
            value = value_of(config, key, AUTO)
            if value != AUTO and not MUST_BE[rule["what"]](value):
                yield key, rule


def by_the_table(config: dict[str, Any], kind: str) -> Iterator[Finding]:
    """Find what breaks rules of a kind in config_rules.toml."""
    for key, rule in refused(config):
        if rule["kind"] == kind:
            text = f"{key} must be {rule['what']}, not {json.dumps(value_of(config, key))}"
            yield Finding(kind, text, rule["cost"])

    def met(rows: dict[str, list]) -> list[bool]:
        return [value_of(config, key, "absent") in values for key, values in rows.items()]

    for rule in RULES["together"]:
        applies = all(met(rule["when"])) and not any(met(rule.get("unless", {})))
        if rule["kind"] == kind and applies:
            yield Finding(kind, rule["text"], rule["cost"])


def of_deepspeed(config: dict[str, Any], ranks: int | None = None) -> Iterator[Finding]:
    """Find what DeepSpeed would take without a word, or refuse in many.

    Call `prepare` first, and this only for a config in which `wrong_shapes` found nothing.
    """
    yield from unknown_names(config)
    yield from by_the_table(config, WRONG)
    yield from _wrong_sizes(config, ranks)
    yield from wrong_values(config)
    yield from _wrong_offload(config)


def of_script(config: dict[str, Any]) -> Iterator[Finding]:
    """Find what DeepSpeed can do and deepspeed_train.py cannot. Call `prepare` first."""
    yield from by_the_table(config, SCRIPT)
    unknown = {finding.text.split(":")[0] for finding in unknown_names(config)}
    for place in left_open(filled(config)):
        if f"unknown key {place.split('.')[0]}" not in unknown:  # one finding is enough
            text = f'{place} is "{AUTO}", which this script cannot fill in'
            cost = "nor can Hugging Face's Trainer: DeepSpeed takes its default"
            yield Finding(SCRIPT, text, cost)


def _wrong_sizes(config: dict[str, Any], ranks: int | None) -> Iterator[Finding]:
    sizes = [config.get(name) for name in SIZES]
    if not all(map(MUST_BE["a whole number of at least 1"], sizes)):  # "auto" or told elsewhere
        return
    micro, steps, total = sizes
    if total % (micro * steps) if ranks is None else total != micro * steps * ranks:
        product = f"{ranks} ranks = {micro * steps * ranks}" if ranks else "N ranks for no N"
        text = (
            f"train_batch_size {total} is not train_micro_batch_size_per_gpu {micro} x "
            f"gradient_accumulation_steps {steps} x {product}"
        )
        yield Finding(WRONG, text, STOPS if ranks else f"{STOPS}, on any number of ranks")


def _wrong_offload(config: dict[str, Any]) -> Iterator[Finding]:
    stage = value_of(config, "zero_optimization.stage", 0)
    for name, part in offloads(config):
        target = part.get("device", "none")
        least = 3 if target == "nvme" or name == "offload_param" else 1
        if target != "none" and isinstance(stage, int) and stage < least:
            text = (
                f"{name} to {target} needs stage {least}, not {stage}: DeepSpeed would offload "
                "nothing, and say nothing"
            )
            yield Finding(WRONG, text, "the memory you meant to free stays taken")
        if target == "nvme" and not isinstance(part.get("nvme_path", AUTO), str):
            yield Finding(WRONG, f"{name}.nvme_path must be a folder's name", STOPS)
