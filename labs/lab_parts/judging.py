"""Compare a result with the right one, and with the results of known mistakes."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dist_common.cli import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TOLERANCE = 1e-4  # relative; a hundredth of it absolute


def numbers(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, list | None]:
    """Return tensors by name as flat lists, which JSON can hold."""
    return {
        name: None if t is None else t.detach().double().flatten().tolist()
        for name, t in tensors.items()
    }


def same(got: Any, right: Any) -> bool:
    """Say whether numbers, lists or dicts of them are equal up to rounding."""
    if isinstance(right, Mapping):
        equal_keys = got.keys() == right.keys()
        return equal_keys and all(same(got[name], right[name]) for name in right)
    if got is None or right is None:
        return got is right
    got = torch.tensor(got, dtype=torch.double)
    right = torch.tensor(right, dtype=torch.double)
    if got.shape != right.shape:
        return False
    return torch.allclose(got, right, rtol=TOLERANCE, atol=TOLERANCE / 100)


def describe_difference(got: Any, right: Any) -> str:
    """Say where two values differ first, with both numbers."""
    if isinstance(right, Mapping):
        name = next(name for name in right if not same(got.get(name), right[name]))
        return f"{name}: {describe_difference(got.get(name), right[name])}"
    if not isinstance(right, list) or not isinstance(got, list):
        return f"{short(got)} came, {short(right)} was expected"
    if len(got) != len(right):
        return f"{len(got)} numbers came, {len(right)} were expected"
    pairs = enumerate(zip(got, right, strict=True))
    place, pair = next((n, pair) for n, pair in pairs if not same(*pair))
    return f"number {place} is {short(pair[0])}, {short(pair[1])} was expected"


def short(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def named(got: Any, right: Any, mistakes: Mapping[str, Any]) -> str:
    """Name the mistake that gives this result; else say where it differs.

    A mistake may be in some entries of a dict only; the other entries are right.
    """
    for words, wrong in mistakes.items():
        if same(got, wrong):
            return words
    if isinstance(right, Mapping) and got.keys() == right.keys():
        off = [name for name in right if not same(got[name], right[name])]
        for words, wrong in mistakes.items():
            if all(same(got[name], wrong[name]) for name in off):
                return f"{', '.join(off)}: {words}"
    return describe_difference(got, right)


@dataclass
class Question:
    """A number to predict: `measure(lesson, setting)` of rank 0 on `ranks` ranks.

    `mistakes(right)` gives the numbers of known misconceptions, by their words.
    """

    unit: str
    measure: Callable[[Any, Any], float]
    mistakes: Callable[[float], Mapping[str, float]] = lambda right: {}
    ranks: int = 2
    tolerance: float = 0.005  # relative


def judge_number(question: Question, said: float, right: float) -> str | None:
    """Name the misconception behind a wrong prediction; None if it is right.

    It never says how far off the number is: that would give the answer away.
    """
    if abs(said - right) <= question.tolerance * abs(right):
        return None
    text = f"{said:g} {question.unit} is not what was measured"
    for words, wrong in question.mistakes(right).items():
        if abs(said - wrong) <= question.tolerance * abs(wrong):
            return f"{text}: {words}"
    return text


def read_predictions(path: Path, questions: Mapping[str, Question]) -> dict[str, Any]:
    """Return the answers in answers.toml, "" for a question without one.

    Raises: UsageError for a file that is not TOML and for an unknown question.
    """
    try:
        said = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path.name}: {error}: write a line like calls = 12"
        ) from error
    if unknown := said.keys() - questions.keys():
        known = ", ".join(questions)
        raise UsageError(
            f"{path.name}: there is no question {min(unknown)}: choose from {known}"
        )
    return {name: said.get(name, "") for name in questions}
