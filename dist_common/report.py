"""What a script says and leaves: lines from rank 0, checks and a verdict, --output-dir, figures."""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from tqdm import tqdm

import dist_common
from dist_common import cli, folder, measure
from dist_common.runtime import World

ROWS = 8  # of checks on the screen; results.json has them all


@dataclass
class Check:
    """Something measured beside what it must be, derived independently of it."""

    name: str
    measured: float
    expected: float
    tolerance: float  # absolute
    source: str

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance  # False for NaN

    @property
    def error(self) -> float:
        return abs(self.measured - self.expected)


class Report:
    """Print from rank 0, collect metrics and checks, and write results.json to --output-dir.

    `output` is that folder on every rank, or None; `start` claims it. `metrics` is a dict to fill:
    names with their unit, values in it.
    """

    def __init__(
        self, script: str, args: argparse.Namespace, world: World, device: torch.device
    ) -> None:
        self.script, self.args, self.world, self.device = script, args, world, device
        self.metrics: dict[str, Any] = {}
        self.checks: list[Check] = []
        self.started = datetime.now(timezone.utc)
        self.output = Path(args.output_dir) if args.output_dir else None

    def start(self, *lines: str) -> None:
        """Claim --output-dir, then print what runs where and the lines only this script can say.

        Raises: UsageError when the folder cannot be written, is held by another job, or holds an
        earlier run that --resume does not continue.
        """
        if self.output and self.world.is_rank0:
            folder.claim(self.output, getattr(self.args, "resume", None))
        ranks = "1 rank" if self.world.world_size == 1 else f"{self.world.world_size} ranks"
        backend = dist.get_backend() if dist.is_initialized() else "no backend"
        self.say(
            f"{self.script}: {ranks} started by {self.world.launcher}, {self.device.type} with "
            f"{backend}, torch {torch.__version__}"
        )
        for line in lines:
            self.say(line)

    def say(self, line: str = "") -> None:
        """Print one line, above the progress bar if there is one."""
        if self.world.is_rank0:
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()

    def warn(self, line: str) -> None:
        """Print one line to stderr."""
        if self.world.is_rank0:
            tqdm.write(f"warning: {line}", file=sys.stderr)

    def step(self, step: int, loss: float, step_time_ms: float, tokens_per_second: float,
             mfu: float | None = None) -> None:  # fmt: skip
        """Print the one line that every training script has for a step; no MFU where it is None."""
        memory = measure.peak_memory_gib(self.device)
        line = f"step {step} | loss {loss:.4f} | {step_time_ms:.1f} ms | "
        line += f"{tokens_per_second:,.0f} tok/s | mem {memory:.2f} GiB"
        self.say(line if mfu is None else f"{line} | mfu {mfu:.1%}")

    def table(self, rows: Iterable[Sequence[str]], headers: Sequence[str], names: int = 1) -> None:
        """Print an aligned table: the first `names` columns to the left, values to the right."""
        sides = (*["left"] * names, *["right"] * (len(headers) - names))
        self.say(tabulate(rows, headers, "simple", colalign=sides, disable_numparse=True))

    def progress(self, items: Collection, name: str) -> Iterable:
        """Iterate over items, with a progress bar where a person is watching a terminal."""
        hidden = not (self.world.is_rank0 and sys.stderr.isatty())
        return tqdm(items, name, disable=hidden, leave=False)

    def check(
        self, name: str, measured: float, expected: float, tolerance: float, source: str
    ) -> None:
        """Add a check. Tolerance is absolute, in the unit of the two values."""
        self.checks.append(Check(name, measured, expected, tolerance, source))

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if not check.ok]

    def finish(self, summary: str) -> int:
        """Write results.json, print measured beside expected and a verdict; return the exit code.

        More than eight checks are folded: those of one kind, named alike after the last colon,
        into the one with the worst value.
        """
        if self.output and self.world.is_rank0:
            self._write(self.output / "results.json")
        rows = [
            (name, *map(_number, (check.measured, check.expected, check.tolerance)),
             "yes" if check.ok else "NO")
            for name, check in folded(self.checks)
        ]  # fmt: skip
        if rows:
            self.table(rows, ("check", "measured", "expected", "tolerance", "ok"))
        if self.failed:
            self.say("FAILED: " + "; ".join(check.name for check in self.failed))
            return cli.FAILED
        passed = f"{len(self.checks)} check{'s' * (len(self.checks) != 1)} passed, " if rows else ""
        self.say(f"OK: {passed}{summary}")
        return 0

    def _write(self, path: Path) -> None:
        cuda, now = self.device.type == "cuda", datetime.now(timezone.utc)
        loaded = {"dist_common": dist_common, **sys.modules}
        names = ("torch", "dist_common", "deepspeed")
        content = {
            "script": self.script,
            "args": vars(self.args),
            "started": self.started.isoformat(timespec="seconds"),
            "seconds": round((now - self.started).total_seconds(), 2),
            "world_size": self.world.world_size,
            "device": self.device.type,
            "backend": dist.get_backend() if dist.is_initialized() else None,
            "launcher": self.world.launcher,
            "versions": {"python": platform.python_version()}
            | {name: loaded[name].__version__ for name in names if name in loaded},
            "machine": {
                "cores": measure.core_count(),
                "gpu": torch.cuda.get_device_name(self.device) if cuda else None,
                "system": platform.system(),
                "processor": platform.machine(),
            },
            "metrics": self.metrics,
            "checks": [{**asdict(check), "ok": check.ok} for check in self.checks],
        }
        partial = path.with_suffix(".partial")  # whole or not at all
        partial.write_text(json.dumps(content, indent=2, default=str) + "\n")
        partial.replace(path)


def folded(checks: Sequence[Check]) -> list[tuple[str, Check]]:
    """Return (name, check) to print: all, or the worst of each kind if they are more than ROWS."""
    if len(checks) <= ROWS:
        return [(check.name, check) for check in checks]
    kinds: dict[str, list[Check]] = {}
    for check in checks:
        kinds.setdefault(check.name.rpartition(": ")[2], []).append(check)
    rows = []
    for kind, alike in kinds.items():
        # Of those that pass, the one that uses up most of its tolerance; a failure is always worse.
        worst = max(alike, key=lambda c: (not c.ok, c.error / c.tolerance if c.tolerance else 0.0))
        name = alike[0].name if len(alike) == 1 else f"{kind} (worst of {len(alike)})"
        rows.append((name if worst.ok else worst.name, worst))
    return rows


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


@contextlib.contextmanager
def figure(path: str | Path, *shape: int, **options) -> Iterator[Any]:
    """Open matplotlib axes, of `shape` rows and columns, and save them as PNG.

    The same run draws the same file: there is no date or version inside.
    """
    import matplotlib

    matplotlib.use("Agg")  # no display on a cluster
    from matplotlib import pyplot as plt

    canvas, axes = plt.subplots(*shape, layout="constrained", **options)
    yield axes
    canvas.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(canvas)
