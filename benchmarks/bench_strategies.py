"""The strategies that can be compared: read from strategies.toml, and what each can run on."""

import math
import os
import shlex
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import bench_toml
from dist_common import cli, models

REPOSITORY = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).with_name("strategies.toml")
REFERENCE = "single"  # the strategy whose loss the exact ones must have
ALL = "all"


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
    most_ranks: int | None = None
    multiple_of: int = 1
    why: str = ""
    tp: int | str = 1
    pp: int | str = 1
    micro_batches: int = 1
    stages: int = 1
    untied: bool = False
    precisions: list[str] = field(default_factory=list)
    compiles: bool = False

    @property
    def path(self) -> Path:
        """Return where its script is: beside the file that names it, or in the repository."""
        beside = self.folder / self.script
        return beside if beside.is_file() else REPOSITORY / self.script

    @property
    def world_sizes(self) -> str:
        """Say in a few words which world sizes it can use."""
        if self.most_ranks == self.least_ranks:
            return str(self.least_ranks)
        step = self._multiple()
        if step == 1:
            most = f" to {self.most_ranks}" if self.most_ranks else " or more"
            return f"{self.least_ranks}{most}"
        first = math.ceil(self.least_ranks / step) * step
        sizes = [size for size in range(first, first + 3 * step, step) if not self._above(size)]
        return ", ".join([*map(str, sizes), *["..."] * (len(sizes) == 3)])

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
        below = world_size < self.least_ranks
        if below or self._above(world_size) or world_size % self._multiple():
            ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
            can = f"{self.name} cannot use {ranks}, it needs {self.world_sizes}"
            return f"{can}: {self.why}" if self.why else can
        if self.precisions and precision not in self.precisions:
            return f"{self.name} cannot train in {precision}, only in {', '.join(self.precisions)}"
        compiler = os.environ.get("CXX", "c++")
        if self.compiles and shutil.which(compiler) is None:
            return f"{self.name} needs a C++ compiler, and there is no {compiler} here"
        return self._why_not_this_model(world_size, preset)

    def _above(self, world_size: int) -> bool:
        return self.most_ranks is not None and world_size > self.most_ranks

    def _multiple(self) -> int:
        fixed = [ranks for ranks in (self.tp, self.pp) if ranks != ALL]
        return math.lcm(self.multiple_of, math.prod(fixed))

    def _why_not_this_model(self, world_size: int, preset: str) -> str | None:
        config = models.PRESETS[preset]
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
        for parts, whole, what in cuts:
            if whole % parts:
                return f"{self.name} cannot cut the {whole} {what} of {preset} into {parts} parts"
        return None


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
            hint = bench_toml.nearest(name, table)
            raise cli.UsageError(f"unknown strategy {name}{hint} There are {', '.join(table)}")
    return [table[name] for name in dict.fromkeys(names)]


def _read(path: Path) -> dict[str, Strategy]:
    found = {}
    for name, row in bench_toml.load(path).items():
        where = f"{path} [{name}]"
        if not isinstance(row, dict):
            raise cli.UsageError(f"{path}: {name} must be a table, [NAME] and its keys below")
        strategy = bench_toml.fill(Strategy, row, where, name=name, folder=path.resolve().parent)
        if not strategy.path.is_file():
            raise cli.UsageError(f"{where}: there is no script {strategy.script}")
        _check(strategy, where)
        found[name] = strategy
    return found


def _check(strategy: Strategy, where: str) -> None:
    """Refuse what would fail in the middle of a sweep only."""
    for axis in ("tp", "pp"):
        ranks = getattr(strategy, axis)
        if not (ranks == ALL or (isinstance(ranks, int) and ranks > 0)):
            raise cli.UsageError(f'{where}: {axis} must be at least 1, or "{ALL}", not {ranks!r}')
    for name in ("least_ranks", "multiple_of", "micro_batches", "stages"):
        if getattr(strategy, name) < 1:
            raise cli.UsageError(f"{where}: {name} must be at least 1")
    try:
        strategy.script_flags(2)
    except (KeyError, IndexError, ValueError) as error:
        known = "{world_size} and {half}"
        raise cli.UsageError(f"{where}: flags can have {known}, not {strategy.flags}") from error
