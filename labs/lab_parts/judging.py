"""Compare a result with the right one, and with the results of known mistakes."""

import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dist_common.cli import UsageError

TOLERANCE = 1e-4  # relative; a hundredth of it absolute
NUMBERS = re.compile(r"\[.*\]|-?\d[\d.e+-]*")


def numbers(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, list | None]:
    """Return tensors by name as flat lists, which JSON can hold."""
    return {
        name: None if t is None else t.detach().double().flatten().tolist()
        for name, t in tensors.items()
    }


def same(got: Any, expected: Any) -> bool:
    """Say whether numbers, lists or dicts of them are equal up to rounding."""
    if isinstance(expected, Mapping):
        equal_keys = got.keys() == expected.keys()
        return equal_keys and all(same(got[name], expected[name]) for name in expected)
    if got is None or expected is None:
        return got is expected
    got = torch.tensor(got, dtype=torch.double)
    expected = torch.tensor(expected, dtype=torch.double)
    if got.shape != expected.shape:
        return False
    return torch.allclose(got, expected, rtol=TOLERANCE, atol=TOLERANCE / 100)


def describe_difference(got: Any, expected: Any) -> str:
    """Say where two values differ first, with both numbers."""
    if isinstance(expected, Mapping):
        name = next(n for n in expected if not same(got.get(n), expected[n]))
        return f"{name}: {describe_difference(got.get(name), expected[name])}"
    if not isinstance(expected, list) or not isinstance(got, list):
        return f"{short(got)} came, {short(expected)} was expected"
    if len(got) != len(expected):
        return f"{len(got)} numbers came, {len(expected)} were expected"
    pairs = enumerate(zip(got, expected, strict=True))
    place, pair = next((n, pair) for n, pair in pairs if not same(*pair))
    return f"number {place} is {short(pair[0])}, {short(pair[1])} was expected"


def short(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def named(got: Any, expected: Any, mistakes: Mapping[str, Any]) -> str:
    """Name the mistake that gives this result; else say where it differs.

    A mistake may be in some entries of a dict only; the other entries are right.
    """
    for words, wrong in mistakes.items():
        if same(got, wrong):
            return words
    if isinstance(expected, Mapping) and got.keys() == expected.keys():
        off = [name for name in expected if not same(got[name], expected[name])]
        for words, wrong in mistakes.items():
            if all(same(got[name], wrong[name]) for name in off):
                return f"{', '.join(off)}: {words}"
    return describe_difference(got, expected)


def compare_gradients(
    got: dict, expected: dict, mistakes: Mapping[str, dict], missing: str
) -> Iterator[str]:
    """Yield a fault if a gradient is None, and one if the other gradients differ.

    `missing` explains what a gradient that is None lacks.
    """
    none = [name for name in expected if got[name] is None]
    if none:
        yield f"{none[0]} has no gradient: {missing}"

    def select(values: dict) -> dict:
        return {name: value for name, value in values.items() if name not in none}

    if not same(select(got), select(expected)):
        cases = {words: select(wrong) for words, wrong in mistakes.items()}
        yield named(select(got), select(expected), cases)


def judge_each_rank(explain: Callable) -> Callable:
    """Make a judge of `explain(got, rank, setting)`, which yields one rank's faults."""

    def judge(seen: list, setting: Any) -> Iterator[str]:
        for rank, got in enumerate(seen):
            for fault in explain(got, rank, setting):
                yield f"rank {rank}: {fault}"

    return judge


def distinct(faults: Iterable[str]) -> list[str]:
    """Return each fault once. Faults that differ only in numbers are the same fault."""
    first: dict[str, str] = {}
    for fault in faults:
        first.setdefault(without_numbers(fault), fault)
    return list(first.values())


def without_numbers(text: str) -> str:
    return NUMBERS.sub("", text)


@dataclass
class Question:
    """A number to predict: `measure(lesson, setting)` of rank 0 on `ranks` ranks.

    `mistakes(measured)` gives the numbers of known misconceptions, by their words.
    """

    unit: str
    measure: Callable[[Any, Any], float]
    mistakes: Callable[[float], Mapping[str, float]] = lambda measured: {}
    ranks: int = 2
    tolerance: float = 0.005  # relative


def judge_number(question: Question, said: float, measured: float) -> str | None:
    """Name the misconception behind a wrong prediction; None if it is right.

    It never says how far off the number is: that would give the answer away.
    """
    if abs(said - measured) <= question.tolerance * abs(measured):
        return None
    text = f"{said:g} {question.unit} is not what was measured"
    for words, wrong in question.mistakes(measured).items():
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
