"""What is wrong with a config: what DeepSpeed itself refuses, and what it takes without a word.

The judge is the installed DeepSpeed, which reads the config, or trains with it (config_judge.py).
DeepSpeed keeps no list of its keys: a config that notes what is looked up tells which it knows.
What passes it silently stands in config_rules.toml.
"""

from __future__ import annotations

import argparse
import copy
import difflib
import json
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed_parts.setup import ADAMS
from dist_common.cli import UsageError

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

UNFILLED = "auto!"  # what stands for an "auto" that nobody fills in
AUTO = "auto"  # in a config: "the script shall say"; Hugging Face's Trainer reads it alike
WRONG, SCRIPT, MACHINE, HINT = "wrong for DeepSpeed", "not in deepspeed_train.py", "machine", "hint"
RULES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
SIZES = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
SWITCHES = ("stage", "type")  # what another key is wrong for: seldom at fault themselves
IGNORED = "DeepSpeed passes over it: what it should do is not done"
STOPS = "DeepSpeed stops at its start"
Refusal = Callable[[dict[str, Any]], Exception | None]  # what DeepSpeed raises for a config
# Who reads a config, and fills in what is "auto" there.
READERS = {"template": "this script", "trainer": "the Trainer", "own": "DeepSpeed"}


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


def _unknown(names: Iterable, known: Collection[str], section: str, cost: str) -> Iterator[Finding]:
    for name in map(str, names):
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else "DeepSpeed knows no such key"
            yield Finding(WRONG, f"unknown key {section}{name}: {hint}", cost)


def unknown_names(config: dict[str, Any], refusal: Refusal) -> Iterator[Finding]:
    """Find names that DeepSpeed would pass over."""
    sizes = {SIZES[0]: 1, SIZES[1]: 1}
    asked = _Asked(**sizes, **{key: 1 for key in RULES["of_many_ranks"] if "." not in key})
    refusal(asked)
    yield from _unknown(config, asked.names, "", IGNORED)
    plain = ("aio", "activation_checkpointing", "flops_profiler", "checkpoint", "data_types",
             "torch_autocast")  # fmt: skip
    inside = {name: _Asked(**config[name]) for name in plain if isinstance(config.get(name), dict)}
    if refusal(_Asked(**sizes, **inside)) is None:  # else a value of these is told elsewhere
        for section, part in inside.items():
            yield from _unknown(part, part.names, f"{section}.", IGNORED)
    for section in ("optimizer", "scheduler"):
        known = {"type", "params", "legacy_fusion"}
        yield from _unknown(part_of(config, section), known, f"{section}.", IGNORED)


def refusal_by_reading(config: dict[str, Any]) -> Exception | None:
    """Have DeepSpeed read a config; return what it raises."""
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        DeepSpeedConfig(config)
    except Exception as error:
        return error
    return None


def refused(config: dict[str, Any], reader: str, refusal: Refusal) -> Iterator[Finding]:
    """Have DeepSpeed judge; what it does not like is left out, and it judges the rest."""
    sized = reader == "template" or {SIZES[0], SIZES[2]} & set(config)
    # DeepSpeed drops what is "auto" before it looks at the name, and so would miss a wrong one.
    config = json.loads(json.dumps(filled(config)).replace(f'"{AUTO}"', f'"{UNFILLED}"'))
    for key, rule in list(out_of_range(config)):
        if rule["kind"] == WRONG:  # told elsewhere
            drop(config, key)
    put(config, RULES["of_many_ranks"])
    for _, part in offloads(config) if reader == "template" else ():
        part.setdefault("nvme_path", ".")  # by a flag
    if sized:  # held against a group that may not exist yet
        config.pop(SIZES[2], None)
        config |= {SIZES[0]: 1, SIZES[1]: 1}
    yield from _refusals(config, refusal_by_reading)
    for place in list(places(config)):
        if value_of(config, place) == UNFILLED:
            drop(config, place)
    if refusal is not refusal_by_reading:
        yield from _refusals(config, refusal)


def _refusals(config: dict[str, Any], refusal: Refusal) -> Iterator[Finding]:
    place: str | None = ""
    while place is not None and (error := refusal(copy.deepcopy(config))):
        place = _culprit(config, str(error), refusal)
        value = None if place is None else drop(config, place)
        yield from _told(error, place, value)


def _culprit(config: dict[str, Any], said: str, refusal: Refusal) -> str | None:
    """Return the key without which DeepSpeed takes the config, or else says something else."""
    elsewhere = None

    def order(place: str) -> tuple[bool, ...]:
        name = place.rpartition(".")[2]
        value = value_of(config, place)
        named = name in said or (isinstance(value, str) and value in said)
        first = place.startswith(("optimizer", "scheduler"))
        return isinstance(value, dict), not named, not first, name in SWITCHES

    for place in sorted((p for p in places(config) if p not in SIZES), key=order):
        without = copy.deepcopy(config)
        drop(without, place)
        error = refusal(without)
        if error is None:  # a whole section only where no key of it does
            return (elsewhere or place) if isinstance(value_of(config, place), dict) else place
        if str(error) != said:
            elsewhere = elsewhere or place
    return elsewhere


def _told(error: Any, place: str | None, value: Any) -> Iterator[Finding]:
    """Say what DeepSpeed raised for the value of a key."""
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    said = " ".join(str(error).split()) or type(error).__name__
    kind = MACHINE if any(words in said for words in RULES["of_machine"]) else WRONG
    section, _, name = (place or "").rpartition(".")
    for each in error.errors() if hasattr(error, "errors") else ():  # pydantic's: of many keys
        if name in map(str, each["loc"]) and each["type"] == "extra_forbidden":
            models = [DeepSpeedConfigModel]
            for model in models:
                models += model.__subclasses__()
            fields = {f.alias or n for model in models for n, f in model.model_fields.items()}
            yield from _unknown([name], fields - {name}, f"{section}.", STOPS)
            return
        if name in map(str, each["loc"]):
            said = each["msg"]
    if value == UNFILLED or (kind == MACHINE and "fp16" in said):  # told elsewhere
        return
    shown = "" if isinstance(value, dict) else f" {json.dumps(value)}"
    yield Finding(kind, f"{place}{shown}: {said}" if place else said, STOPS)


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


def of_deepspeed(
    config: dict[str, Any], ranks: int | None = None, reader: str = "template",
    refusal: Refusal = refusal_by_reading,
) -> Iterator[Finding]:  # fmt: skip
    """Find what DeepSpeed would take without a word, or refuse in many.

    Call `prepare` first, and this only for a config in which `wrong_shapes` found nothing.
    """
    yield from unknown_names(config, refusal)
    yield from by_the_table(config, WRONG)
    yield from _wrong_sizes(config, ranks)
    yield from refused(config, reader, refusal)
    yield from _wrong_offload(config)


def of_reader(config: dict[str, Any], reader: str = "template") -> Iterator[Finding]:
    """Find what DeepSpeed can do and its reader cannot, deepspeed_train.py or another of READERS.

    Call `prepare` first.
    """
    kind = WRONG
    if reader == "template":
        kind = SCRIPT
        yield from by_the_table(config, SCRIPT)
    unknown = {finding.text.split(":")[0] for finding in unknown_names(config, refusal_by_reading)}
    for place in left_open(config if reader == "own" else filled(config, reader)):
        if f"unknown key {place.split('.')[0]}" not in unknown:  # one finding is enough
            text = f'{place} is "{AUTO}", which {READERS[reader]} cannot fill in'
            yield Finding(kind, text, "DeepSpeed takes its default, or stops")


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
