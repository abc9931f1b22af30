"""Compare what came with what is right, and with what known mistakes would give."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from legacy_common.cli import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TOLERANCE = 1e-4  # relative, and a hundredth of it absolute: sums in another order are right


def numbers(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, list | None]:
    """Return tensors by name as flat lists, which JSON can hold."""
    return {name: None if t is None else t.detach().double().flatten().tolist()
            for name, t in tensors.items()}  # fmt: skip


def same(got: Any, right: Any) -> bool:
    """Say whether numbers, lists or dicts of them are equal up to rounding."""
    if isinstance(right, Mapping):
        return got.keys() == right.keys() and all(same(got[name], right[name]) for name in right)
    if got is None or right is None:
        return got is right
    got, right = torch.tensor(got, dtype=torch.double), torch.tensor(right, dtype=torch.double)
    if got.shape != right.shape:
        return False
    return torch.allclose(got, right, rtol=TOLERANCE, atol=TOLERANCE / 100)


def differs(got: Mapping[str, Any], right: Mapping[str, Any]) -> str:
    """Say where two differ first: name and both numbers."""
    name = next(name for name in right if not same(got.get(name), right[name]))
    mine, expected, first = got.get(name), right[name], 0
    if isinstance(mine, list) and len(mine) == len(expected):
        first = next(n for n, value in enumerate(mine) if not same(value, expected[n]))
    if first:
        mine, expected = mine[first:], expected[first:]
        name = f"{name}, from its number {first} on,"
    return f"{name} is {short(mine)}, expected {short(expected)}"


def short(values: Any) -> str:
    """Print a number or the first ones of a list."""
    if isinstance(values, list):
        more = ", ..." if len(values) > 3 else ""
        return f"[{', '.join(map(short, values[:3]))}{more}]"
    return f"{values:.4g}" if isinstance(values, float) else str(values)


def named(got: Any, right: Any, mistakes: Mapping[str, Any]) -> str:
    """Say which mistake gives what came; or what came and what was expected.

    Of dicts, a mistake may be in some entries only: the others are right.
    """
    for words, wrong in mistakes.items():
        if same(got, wrong):
            return words
    if isinstance(right, Mapping) and got.keys() == right.keys():
        off = [name for name in right if not same(got[name], right[name])]
        for words, wrong in mistakes.items():
            if all(same(got[name], wrong[name]) for name in off):
                return f"{', '.join(off)}: {words}"
        return differs(got, right)
    return f"{short(got)} came, {short(right)} was expected"


@dataclass
class Question:
    """A number to predict: rank 0's, of `measure(lesson, setting)` on `ranks` ranks.

    `mistakes(right)` are the numbers that known misconceptions give, by the words that name them.
    """

    unit: str
    measure: Callable[[Any, Any], float]
    mistakes: Callable[[float], Mapping[str, float]] = lambda right: {}
    ranks: int = 2
    tolerance: float = 0.005  # relative


def judge_number(question: Question, said: float, right: float) -> str | None:
    """Say how far off a predicted number is, and by which misconception; None where it is right."""
    if abs(said - right) <= question.tolerance * abs(right):
        return None
    times = f", {said / right:.3g} times the right one" if right else ""
    text = f"{said:g} {question.unit} is not what was measured{times}"
    known = {**question.mistakes(right), "twice as much": 2 * right, "half of it": right / 2}
    for words, wrong in known.items():
        if abs(said - wrong) <= question.tolerance * abs(wrong):
            return f"{text}: {words}"
    return text


def read_predictions(path: Path, questions: Mapping[str, Question]) -> dict[str, Any]:
    """Return what answers.toml says to each question, "" where nothing yet.

    Raises: UsageError for what is no TOML, with the line, and for a question that there is not.
    """
    try:
        said = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path.name}: {error}: a line is like  calls = 12") from error
    if unknown := said.keys() - questions.keys():
        known = ", ".join(questions)
        raise UsageError(f"{path.name}: there is no question {min(unknown)}: they are {known}")
    return {name: said.get(name, "") for name in questions}
