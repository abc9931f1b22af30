"""TOML tables read into dataclasses; an unknown key or a value of a wrong type is an error."""

import difflib
import types
from collections.abc import Iterable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from dist_common import cli

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

Table = TypeVar("Table")
KINDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def load(path: str | Path) -> dict[str, Any]:
    """Read a TOML file. Raises: UsageError naming the file, and line and column of a mistake."""
    try:
        return tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise cli.UsageError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise cli.UsageError(f"{path} is not valid TOML: {error}") from error


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the end of a sentence: ": did you mean X?", or "." if nothing known is like it."""
    close = difflib.get_close_matches(str(word), list(known), 1, cutoff=0.5)
    return f": did you mean {close[0]}?" if close else "."


def fill(kind: type[Table], table: dict[str, Any], where: str, **others: Any) -> Table:
    """Return a dataclass made of a table and of `others`, which no table can set.

    Raises: UsageError, beginning with `where`, for an unknown or missing key and for a wrong type.
    """
    hints = get_type_hints(kind)
    known = [field.name for field in fields(kind) if field.name not in others]
    for key, value in table.items():
        if key not in known:
            raise cli.UsageError(f"{where}: unknown key {key}{nearest(key, known)}".rstrip("."))
        if not _fits(value, hints[key]):
            said = f"{where}: {key} must be {describe(hints[key])}, not {value!r}"
            raise cli.UsageError(said)
    for field in fields(kind):
        needed = field.default is MISSING and field.default_factory is MISSING
        if needed and field.name not in table and field.name not in others:
            raise cli.UsageError(f"{where}: {field.name} is missing")
    return kind(**table, **others)


def describe(hint: Any) -> str:
    """Say in words what a type hint allows."""
    if get_origin(hint) is types.UnionType:
        parts = [part for part in get_args(hint) if part is not types.NoneType]
        return " or ".join(map(describe, parts))
    if get_origin(hint) is list:
        return f"a list, each {describe(get_args(hint)[0])}"
    return KINDS[hint]


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) is types.UnionType:
        return any(_fits(value, part) for part in get_args(hint))
    if get_origin(hint) is list:
        part = get_args(hint)[0]
        return isinstance(value, list) and all(_fits(item, part) for item in value)
    if isinstance(value, bool):  # which Python counts as an int
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)
