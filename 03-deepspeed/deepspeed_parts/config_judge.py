"""DeepSpeed as the judge of a config: what it refuses, told once, by the key that is at fault.

DeepSpeed keeps no list of its keys: a config that notes what is looked up tells which it knows.
"""

import copy
import difflib
import json
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from deepspeed_parts import config_rules as rules
from deepspeed_parts.config_rules import AUTO, IGNORED, RULES, SIZES, STOPS, WRONG, Finding
from legacy_common.cli import UsageError

UNFILLED = "auto!"  # what stands for an "auto" that nobody fills in
SWITCHES = ("stage", "type")  # what another key is wrong for: seldom at fault themselves
# Who reads a config, and fills in what is "auto" there.
READERS = {"template": "this script", "trainer": "the Trainer", "own": "DeepSpeed"}
Refusal = Callable[[dict[str, Any]], Exception | None]  # what DeepSpeed raises for a config


def refusal_by_reading(config: dict[str, Any]) -> Exception | None:
    """Have DeepSpeed read a config; return what it raises."""
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        DeepSpeedConfig(config)
    except Exception as error:
        return error
    return None


def of_deepspeed(
    config: dict[str, Any], ranks: int | None = None, reader: str = "template",
    refusal: Refusal = refusal_by_reading,
) -> Iterator[Finding]:  # fmt: skip
    """Find what DeepSpeed would take without a word, or refuse in many.

    Call `prepare` first, and this only for a config in which `wrong_shapes` found nothing.
    """
    yield from unknown_names(config, refusal)
    yield from rules.by_the_table(config, WRONG)
    yield from rules.wrong_sizes(config, ranks)
    yield from refused(config, reader, refusal)
    yield from rules.wrong_offload(config)


def of_reader(config: dict[str, Any], reader: str = "template") -> Iterator[Finding]:
    """Find what DeepSpeed can do and its reader, of READERS, cannot. Call `prepare` first."""
    kind = WRONG
    if reader == "template":
        kind = rules.SCRIPT
        yield from rules.by_the_table(config, rules.SCRIPT)
    unknown = {finding.text.split(":")[0] for finding in unknown_names(config, refusal_by_reading)}
    for place in rules.left_open(config if reader == "own" else rules.filled(config, reader)):
        if f"unknown key {place.split('.')[0]}" not in unknown:  # one finding is enough
            text = f'{place} is "{AUTO}", which {READERS[reader]} cannot fill in'
            yield Finding(kind, text, "DeepSpeed takes its default, or stops")


def read_right(path: Path) -> dict[str, Any]:
    """Read a config that DeepSpeed takes. Call `prepare` first. Raises: UsageError in one line."""
    try:
        config, findings = rules.read(path)
    except OSError as error:
        raise UsageError(f"--deepspeed_config {path}: {error.strerror}") from error
    rules.refuse(path, chain(findings, rules.wrong_shapes(config), of_deepspeed(config)))
    return config


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
        yield from _unknown(rules.part_of(config, section), known, f"{section}.", IGNORED)


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

    def __copy__(self):
        return self


def _unknown(names: Iterable, known: Collection[str], section: str, cost: str) -> Iterator[Finding]:
    for name in map(str, names):
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else "DeepSpeed knows no such key"
            yield Finding(WRONG, f"unknown key {section}{name}: {hint}", cost)


def refused(config: dict[str, Any], reader: str, refusal: Refusal) -> Iterator[Finding]:
    """Have DeepSpeed judge; what it does not like is left out, and it judges the rest."""
    sized = reader == "template" or {SIZES[0], SIZES[2]} & set(config)
    # DeepSpeed drops what is "auto" before it looks at the name, and so would miss a wrong one.
    config = json.loads(json.dumps(rules.filled(config)).replace(f'"{AUTO}"', f'"{UNFILLED}"'))
    for key, rule in list(rules.out_of_range(config)):
        if rule["kind"] == WRONG:  # told elsewhere
            rules.drop(config, key)
    rules.put(config, RULES["of_many_ranks"])
    for _, part in rules.offloads(config) if reader == "template" else ():
        part.setdefault("nvme_path", ".")  # by a flag
    if sized:  # held against a group that may not exist yet
        config.pop(SIZES[2], None)
        config |= {SIZES[0]: 1, SIZES[1]: 1}
    yield from _refusals(config, refusal_by_reading)
    for place in list(rules.places(config)):
        if rules.value_of(config, place) == UNFILLED:
            rules.drop(config, place)
    if refusal is not refusal_by_reading:
        yield from _refusals(config, refusal)


def _refusals(config: dict[str, Any], refusal: Refusal) -> Iterator[Finding]:
    place: str | None = ""
    while place is not None and (error := refusal(copy.deepcopy(config))):
        place = _culprit(config, error, refusal)
        value = None if place is None else rules.drop(config, place)
        yield from _told(error, place, value)


def _complaints(error: Any) -> list[tuple]:
    """Return what an exception complains of: pydantic's may do so of many keys."""
    if hasattr(error, "errors"):
        return [(each["loc"][-1], each["type"], each["msg"]) for each in error.errors()]
    if isinstance(error, AttributeError):  # what Python says of a type
        return [("", "", "DeepSpeed takes no such value")]
    return [("", "", " ".join(str(error).split()) or type(error).__name__)]


def _culprit(config: dict[str, Any], error: Exception, refusal: Refusal) -> str | None:
    """Return the key without which DeepSpeed takes the config, or else says something else."""
    elsewhere = None
    said = str(error)

    def order(place: str) -> tuple[bool, ...]:
        name = place.rpartition(".")[2]
        value = rules.value_of(config, place)
        named = name in said or (isinstance(value, str) and value in said)
        first = place.startswith(("optimizer", "scheduler"))
        return isinstance(value, dict), not named, not first, name in SWITCHES

    for place in sorted((p for p in rules.places(config) if p not in SIZES), key=order):
        without = copy.deepcopy(config)
        rules.drop(without, place)
        other = refusal(without)
        if other is None:  # a whole section only where no key of it does
            section = isinstance(rules.value_of(config, place), dict)
            return (elsewhere or place) if section else place
        if _complaints(other) != _complaints(error):
            elsewhere = elsewhere or place
    return elsewhere


def _told(error: Exception, place: str | None, value: Any) -> Iterator[Finding]:
    """Say what DeepSpeed raised for the value of a key."""
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    section, _, name = (place or "").rpartition(".")
    complaints = _complaints(error)
    _, kind, said = next((one for one in complaints if one[0] == name), complaints[0])
    machine = any(words in said for words in RULES["of_machine"])
    if kind == "extra_forbidden":
        models = [DeepSpeedConfigModel]
        for model in models:
            models += model.__subclasses__()
        fields = {f.alias or n for model in models for n, f in model.model_fields.items()}
        yield from _unknown([name], fields - {name}, f"{section}.", STOPS)
    elif value != UNFILLED and not (machine and "fp16" in said):  # told elsewhere
        shown = "" if isinstance(value, dict) else f" {json.dumps(value)}"
        text = f"{place}{shown}: {said}" if place else said
        yield Finding(rules.MACHINE if machine else WRONG, text, STOPS)
