"""The strategies that can be compared: the rows of strategies.toml."""

import difflib
import shlex
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

from dist_common.cli import UsageError

REPO = Path(__file__).resolve().parents[2]
TABLE = REPO / "benchmarks" / "strategies.toml"
REFERENCE = "single"  # one process: exact strategies must have its losses


@dataclass(frozen=True)
class Strategy:
    """A row of strategies.toml; the head of that file explains the keys."""

    name: str
    script: Path
    does: str
    flags: str = ""
    exact: bool = True
    least_ranks: int = 1
    multiple_of: int = 1  # divides the number of ranks
    tp: int | str = 1
    pp: int | str = 1
    micro_batches: int = 1
    planner: str = ""

    def flags_for(self, world_size):
        """Return the script's own flags for a number of ranks."""
        values = {"world_size": world_size, "half": world_size // 2}
        return [word.format(**values) for word in shlex.split(self.flags)]

    def axis(self, name, world_size):
        """Return the number of ranks of `tp` or `pp`."""
        size = getattr(self, name)
        return world_size if size == "all" else size

    def micro_batch_size(self, world_size, global_batch_size, limit):
        """Return the largest micro-batch that divides a data-parallel rank's share.

        Raises: ValueError when the global batch cannot be divided.
        """
        pp = self.axis("pp", world_size)
        data_ranks = world_size // (self.axis("tp", world_size) * pp)
        least = self.micro_batches * pp
        share, rest = divmod(global_batch_size, data_ranks)
        if rest or share % least:
            raise ValueError(
                f"{global_batch_size} sequences cannot be divided by {data_ranks} "
                f"data-parallel ranks x {least} micro-batches"
            )
        largest = min(share // least, limit or share)
        sizes = range(largest, 0, -1)
        return next(size for size in sizes if share // least % size == 0)

    def reason_not_to_run(self, world_size):
        """Say why it cannot use this number of ranks; None if it can."""
        if world_size < self.least_ranks:
            return f"needs {self.least_ranks} ranks or more"
        if world_size % self.multiple_of:
            return f"needs a multiple of {self.multiple_of} ranks"
        return None


def load(path=None):
    """Return all strategies by name; `path` names a TOML file with more."""
    table = read_table(TABLE)
    for name, strategy in (read_table(Path(path)) if path else {}).items():
        if name in table:
            raise UsageError(f"{path}: there is already a strategy {name}: rename it")
        table[name] = strategy
    return table


def read_table(path):
    """Read a file of strategies. Raises: UsageError naming the row and the mistake."""
    known = {field.name for field in fields(Strategy)} - {"name"}
    table = {}
    for name, row in load_toml(path).items():
        where = f"{path} [{name}]"
        if not isinstance(row, dict) or not {"does", "script"} <= row.keys():
            raise UsageError(f"{where}: a strategy needs the keys does and script")
        if unknown := row.keys() - known:
            raise UsageError(f"{where}: unknown key {', '.join(sorted(unknown))}")
        # A script stands next to the file that names it, or in the repository.
        places = (path.resolve().parent / row["script"], REPO / row["script"])
        script = next((place for place in places if place.is_file()), None)
        if script is None:
            raise UsageError(f"{where}: there is no script {row['script']}")
        strategy = Strategy(name, **{**row, "script": script})
        try:
            strategy.flags_for(2)
        except (KeyError, IndexError, ValueError) as error:
            raise UsageError(
                f"{where}: flags may hold {{world_size}} and {{half}}"
            ) from error
        table[name] = strategy
    return table


def load_toml(path):
    """Read a TOML file. Raises: UsageError naming the file and the mistake."""
    try:
        return tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from error


def choose(names, table):
    """Return the strategies of these names. Raises: UsageError with the nearest."""
    for name in names:
        if name not in table:
            near = difflib.get_close_matches(name, table, 1)
            hint = f"did you mean {near[0]}?" if near else "`list` prints all"
            raise UsageError(f"--strategies: there is no strategy {name}: {hint}")
    return [table[name] for name in dict.fromkeys(names)]
