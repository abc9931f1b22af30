"""How a config is read, what is "auto" in it, and rules for what DeepSpeed passes over.

DeepSpeed itself judges the rest (config_judge.py). Rules on values stand in config_rules.toml.
"""

import argparse
import copy
import json
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed_parts.setup import ADAMS
from legacy_common.cli import UsageError

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

AUTO = "auto"  # in a config: "the script shall say"; Hugging Face's Trainer reads it alike
WRONG, SCRIPT, MACHINE, HINT = "wrong for DeepSpeed", "not in zero_offload.py", "machine", "hint"
RULES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
SIZES = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
IGNORED = "DeepSpeed passes over it: what it should do is not done"
STOPS = "DeepSpeed stops at its start"


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


MUST_BE: dict[str, Callable[[Any], bool]] = {
    "0, 1, 2 or 3": lambda value: is_number(value) and value in range(4),
    "0 or 1": lambda value: value in (0, 1),
    "a whole number": lambda value: type(value) is int,
    "a whole number of at least 1": lambda value: type(value) is int and value > 0,
    "a number above 0": lambda value: is_number(value) and value > 0,
    "a number of at least 0": lambda value: is_number(value) and value >= 0,
    "true": lambda value: value is True,
    "true or false": lambda value: value in (True, False),
    'true, false or "auto"': lambda value: value in (True, False),
    "mean": lambda value: value == "mean",
    "Adam or AdamW here": lambda value: str(value).lower() in ADAMS,
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


def put(config: dict[str, Any], values: dict[str, Any]) -> None:
    """Put values in place of those that a config has for such keys."""
    for key, value in values.items():
        place, _, name = key.rpartition(".")
        if name in part_of(config, place):
            part_of(config, place)[name] = value


def filled(config: dict[str, Any], reader: str = "template") -> dict[str, Any]:
    """Return a copy with values in place of each "auto" that a reader of configs fills in."""
    config = copy.deepcopy(config)
    values = RULES["auto"] | (RULES["auto_in_template"] if reader == "template" else {})
    put(config, {key: one for key, one in values.items() if value_of(config, key) == AUTO})
    return config


def places(part: dict[str, Any], above: str = "") -> Iterator[str]:
    """Yield all keys, such as optimizer.params.lr; those of a section before the section."""
    for name, value in part.items():
        if isinstance(value, dict):
            yield from places(value, f"{above}{name}.")
        yield f"{above}{name}"


def left_open(config: dict[str, Any]) -> list[str]:
    """Return the place of each "auto"."""
    return [place for place in places(config) if value_of(config, place) == AUTO]


def drop(config: dict[str, Any], key: str) -> Any:
    """Take a key out; return its value."""
    place, _, name = key.rpartition(".")
    return part_of(config, place).pop(name)


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
    zero = config.get("zero_optimization")
    if isinstance(zero, bool):  # an old way to write stage 1 or 0, which DeepSpeed still reads
        config["zero_optimization"] = {"stage": int(zero)}
    return config, findings


def refuse(path: Path, findings: Iterable[Finding]) -> None:
    """Raise UsageError for the first of some findings."""
    for finding in findings:
        raise UsageError(f"{path}: {finding.text}")


def fill_disk(config: dict[str, Any], args: argparse.Namespace, given: Collection[str]) -> None:
    """Have offload to a disk go to --nvme-path. Raises: UsageError when it is missing, or another.

    `given` names the flags on the command line.
    """
    for name, part in offloads(config):
        if part.get("device") != "nvme":
            continue
        stated = part.get("nvme_path", AUTO)
        if stated == AUTO:
            if not args.nvme_path:
                why = f"{name} to nvme needs --nvme-path, a folder on the disk"
                raise UsageError(f"{args.deepspeed_config}: {why}")
            part["nvme_path"] = str(args.nvme_path)
        elif "nvme_path" in given and stated != str(args.nvme_path):
            other = f"{args.deepspeed_config} has {name}.nvme_path {stated}"
            cure = f'change one, or write "{AUTO}" there'
            raise UsageError(f"--nvme-path {args.nvme_path}, but {other}: {cure}")


def wrong_shapes(config: dict[str, Any]) -> Iterator[Finding]:
    """Find sections that are no objects; the other rules cannot read such a config."""
    for place in RULES["sections"]:
        value = value_of(config, place, {})
        if not isinstance(value, dict) and not (value is None and "offload" in place):
            yield Finding(WRONG, f"{place} must be an object, {{...}}", STOPS)


def out_of_range(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each key whose value config_rules.toml refuses, and the rule."""
    for rule in RULES["value"]:
        for key in rule["keys"]:
            value = value_of(config, key, AUTO)
            if value != AUTO and not MUST_BE[rule["what"]](value):
                yield key, rule


def by_the_table(config: dict[str, Any], kind: str) -> Iterator[Finding]:
    """Find what breaks rules of a kind in config_rules.toml."""
    for key, rule in out_of_range(config):
        if rule["kind"] == kind:
            text = f"{key} must be {rule['what']}, not {json.dumps(value_of(config, key))}"
            yield Finding(kind, text, rule["cost"])

    def met(rows: dict[str, list]) -> list[bool]:
        return [value_of(config, key, "absent") in values for key, values in rows.items()]

    for rule in RULES["together"]:
        applies = all(met(rule["when"])) and not any(met(rule.get("unless", {})))
        if rule["kind"] == kind and applies:
            yield Finding(kind, rule["text"], rule["cost"])


def wrong_sizes(config: dict[str, Any], ranks: int | None) -> Iterator[Finding]:
    sizes = [config.get(name) for name in SIZES]
    if not all(map(MUST_BE["a whole number of at least 1"], sizes)):  # "auto" or told elsewhere
        return
    micro, steps, total = sizes
    if total % (micro * steps) if ranks is None else total != micro * steps * ranks:
        product = f"{ranks} ranks = {micro * steps * ranks}" if ranks else "N ranks for no N"
        one_rank = f"{SIZES[0]} {micro} x {SIZES[1]} {steps}"
        text = f"{SIZES[2]} {total} is not {one_rank} x {product}"
        yield Finding(WRONG, text, STOPS if ranks else f"{STOPS}, on any number of ranks")


def wrong_offload(config: dict[str, Any]) -> Iterator[Finding]:
    stage = value_of(config, "zero_optimization.stage", 0)
    for name, part in offloads(config):
        target = part.get("device", "none")
        least = 3 if target == "nvme" or name == "offload_param" else 1
        if target != "none" and is_number(stage) and stage < least:
            text = f"{name} to {target} needs stage {least}, not {stage}"
            text += ": DeepSpeed would offload nothing, and say nothing"
            yield Finding(WRONG, text, "the memory you meant to free stays taken")
        if target == "nvme" and not isinstance(part.get("nvme_path", AUTO), str):
            yield Finding(WRONG, f"{name}.nvme_path must be a folder's name", STOPS)
