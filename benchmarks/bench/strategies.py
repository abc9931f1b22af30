"""The strategies that can be compared: read from strategies.toml, and what each can run on."""

import difflib
import itertools
import math
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from dist_common.model import PRESETS
from legacy_common import cli

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

REPOSITORY = Path(__file__).resolve().parents[2]
TABLE = REPOSITORY / "benchmarks" / "strategies.toml"
REFERENCE = "single"  # the strategy whose loss the exact ones must have
PRECISIONS = [FLOAT := "32-true", "bf16-mixed", "16-mixed"]
ALL = "all"
MOST_RANKS = 1_000_000
KINDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


@dataclass(frozen=True)
class Strategy:
    """A row of strategies.toml, which says what its keys mean."""

    name: str
    folder: Path  # of the file that it is from
    does: str
    script: str
    flags: str = ""
    exact: bool = True
    least_ranks: int = 1
    most_ranks: int = MOST_RANKS
    multiple_of: int = 1
    why: str = ""
    tp: int | str = 1
    pp: int | str = 1
    micro_batches: int = 1
    stages: int = 1
    untied: bool = False
    precisions: list[str] = field(default_factory=PRECISIONS.copy)
    recompute_flags: str = ""
    compile_flags: str = ""
    micro_batch_size: int = 0

    @property
    def path(self) -> Path:
        """Return where its script is: beside the file that names it, or in the repository."""
        beside = self.folder / self.script
        return beside if beside.is_file() else REPOSITORY / self.script

    @property
    def world_sizes(self) -> str:
        """Say in a few words which world sizes it can use."""
        if self._multiple() == 1 and self.most_ranks == MOST_RANKS:
            return f"{self.least_ranks} or more"
        sizes = filter(self.takes, range(1, self.most_ranks + 1))
        shown = list(map(str, itertools.islice(sizes, 4)))
        return ", ".join(shown[:3] + ["..."] * (len(shown) > 3))

    def ranks_of(self, axis: str, world_size: int) -> int:
        """Return how many ranks `tp` or `pp` has."""
        value = getattr(self, axis)
        return world_size if value == ALL else value

    def data_parallel_ranks(self, world_size: int) -> int:
        """Return how many ranks take samples of their own."""
        return world_size // (self.ranks_of("tp", world_size) * self.ranks_of("pp", world_size))

    def script_flags(self, world_size: int) -> list[str]:
        """Return the script's own flags for a world size."""
        values = {"world_size": world_size, "half": world_size // 2}
        return [word.format(**values) for word in shlex.split(self.flags)]

    def why_not(self, world_size: int, preset: str, precision: str) -> str | None:
        """Say in one line why it cannot train this model on so many ranks; None if it can."""
        if not self.takes(world_size):
            ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
            can = f"{self.name} cannot use {ranks}, it needs {self.world_sizes}"
            return f"{can}: {self.why}" if self.why else can
        if precision not in self.precisions:
            return f"{self.name} cannot train in {precision}, only in {', '.join(self.precisions)}"
        return self._why_not_this_model(world_size, preset)

    def takes(self, world_size: int) -> bool:
        """Say whether it can use a world size."""
        within = self.least_ranks <= world_size <= self.most_ranks
        return within and world_size % self._multiple() == 0

    def _multiple(self) -> int:
        fixed = [ranks for ranks in (self.tp, self.pp) if ranks != ALL]
        return math.lcm(self.multiple_of, math.prod(fixed))

    def _why_not_this_model(self, world_size: int, preset: str) -> str | None:
        config = PRESETS[preset]
        if self.untied and config.tied_embeddings:
            return f"{self.name} cannot split {preset}: its embedding is the output layer too"
        tp, stages = self.ranks_of("tp", world_size), self.ranks_of("pp", world_size) * self.stages
        cuts = [
            (tp, config.num_heads, "attention heads"),
            (tp, config.num_kv_heads, "key and value heads"),
            (tp, config.ffn_dim, "columns of the feed-forward"),
            (tp, config.vocab_size, "words of the vocabulary"),
            (stages, config.num_layers, "layers"),
        ]
        uneven = (f"{self.name} cannot cut the {whole} {what} of {preset} into {parts} parts"
                  for parts, whole, what in cuts if whole % parts)  # fmt: skip
        return next(uneven, None)


def from_repository(path: str | Path) -> str:
    """Return a path relative to the repository if it is inside, as whole otherwise."""
    path = Path(path).resolve()
    return str(path.relative_to(REPOSITORY) if path.is_relative_to(REPOSITORY) else path)


def load(own: str | Path | None = None) -> dict[str, Strategy]:
    """Return all strategies by name, with those of the file `own` added.

    Raises: UsageError for a file that is missing or wrong, and for a name that is taken.
    """
    table = _read(TABLE)
    for name, strategy in _read(Path(own)).items() if own else ():
        if name in table:
            raise cli.UsageError(f"{own}: the name {name} is taken: give your strategy another")
        table[name] = strategy
    return table


def choose(names: list[str], table: dict[str, Strategy]) -> list[Strategy]:
    """Return the strategies of these names. Raises: UsageError naming the nearest, and all."""
    for name in names:
        if name not in table:
            hint = nearest(name, table)
            raise cli.UsageError(f"unknown strategy {name}{hint} There are {', '.join(table)}")
    return [table[name] for name in dict.fromkeys(names)]


def _read(path: Path) -> dict[str, Strategy]:
    found = {}
    for name, row in load_toml(path).items():
        where = f"{path} [{name}]"
        if not isinstance(row, dict):
            raise cli.UsageError(f"{path}: {name} must be a table, [NAME] and its keys below")
        _check(row, where)
        found[name] = strategy = Strategy(name, path.resolve().parent, **row)
        if not strategy.path.is_file():
            raise cli.UsageError(f"{where}: there is no script {strategy.script}")
        try:
            strategy.script_flags(2)
        except (KeyError, IndexError, ValueError) as error:
            said = f"flags can have {{world_size}} and {{half}}, not {strategy.flags}"
            raise cli.UsageError(f"{where}: {said}") from error
    return found


def _check(row: dict[str, Any], where: str) -> None:
    """Refuse what would fail in the middle of a sweep only."""
    needed = {"does": "", "script": ""}
    known = {option.name: option.default for option in fields(Strategy)[2:]} | needed
    for key, value in row.items():
        if key not in ("tp", "pp"):
            check_kind(where, key, value, known | {"precisions": PRECISIONS})
        elif value != ALL and not (type(value) is int and value > 0):
            raise cli.UsageError(f'{where}: {key} must be at least 1, or "{ALL}", not {value!r}')
        if type(value) is int and value < 1:
            raise cli.UsageError(f"{where}: {key} must be at least 1")
    for key in needed:
        if key not in row:
            raise cli.UsageError(f"{where}: {key} is missing")


def load_toml(path: str | Path) -> dict[str, Any]:
    """Read a TOML file. Raises: UsageError naming the file, and line and column of a mistake."""
    try:
        return tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise cli.UsageError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise cli.UsageError(f"{path} is not valid TOML: {error}") from error


def check_kind(where: str, key: str, value: Any, known: dict[str, Any]) -> None:
    """Raise UsageError for an unknown key, or a value of another kind than the one in `known`."""
    if key not in known:
        raise cli.UsageError(f"{where}: unknown key {key}{nearest(key, known)}".rstrip("."))
    several = isinstance(known[key], list)
    kind = type(known[key][0] if several else known[key])
    allowed = (int, float) if kind is float else (kind,)
    values = value if isinstance(value, list) else [value]
    if isinstance(value, list) != several or any(type(one) not in allowed for one in values):
        said = "a list, each " * several + KINDS[kind]
        raise cli.UsageError(f"{where}: {key} must be {said}, not {value!r}")


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the end of a sentence: ": did you mean X?", or "." if nothing known is like it."""
    close = difflib.get_close_matches(str(word), list(known), 1, cutoff=0.5)
    return f": did you mean {close[0]}?" if close else "."
