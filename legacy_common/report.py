"""What a script says and leaves: lines from rank 0, checks and a verdict, results.json."""

import argparse
import json
import platform
import sys
import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from tqdm import tqdm

import legacy_common
from legacy_common import cli, measure, output
from legacy_common.runtime import World, default_precision

ROWS = 8  # of checks on the screen; results.json has them all
# tqdm's own lock is one semaphore for a process and all of its forks: a rank that is killed while
# it prints leaves it taken, and whoever is forked later waits for ever with its first line.
tqdm.set_lock(threading.RLock())


@dataclass
class Check:
    """Something measured beside what it must be, derived independently of it."""

    name: str
    measured: float
    expected: float
    tolerance: float  # absolute
    source: str

    @property
    def error(self) -> float:
        return abs(self.measured - self.expected)

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance  # False for NaN


class Report:
    """Print from rank 0, collect checks and `metrics`, write results.json to `output`, if any.

    A --precision that was not given becomes the device's: no flag of `args` stays open.
    """

    def __init__(self, script: str, args: argparse.Namespace, world: World, device) -> None:
        self.script, self.args, self.world, self.device = script, args, world, device
        if getattr(args, "precision", "") is None:
            args.precision = default_precision(device)
        self.metrics: dict[str, Any] = {}
        self.checks: list[Check] = []
        self.started = datetime.now(timezone.utc)
        self.output = Path(args.output_dir) if args.output_dir else None

    def start(self, *lines: str) -> None:
        """Claim --output-dir; print what runs where, and the lines only this script can say."""
        if self.output and self.world.is_rank0:
            output.claim(self.output, getattr(self.args, "resume", None))
        ranks = "1 rank" if self.world.world_size == 1 else f"{self.world.world_size} ranks"
        backend = dist.get_backend() if dist.is_initialized() else "no backend"
        where = f"{self.device.type} with {backend}, torch {torch.__version__}"
        for line in (f"{self.script}: {ranks} started by {self.world.launcher}, {where}", *lines):
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

    def step(self, step: int, loss: float, ms: float, tokens_per_second: float, mfu=None) -> None:
        """Print the one line that every training script has for a step; no MFU where it is None."""
        memory = measure.peak_memory_gib(self.device)
        line = f"step {step} | loss {loss:.4f} | {ms:.1f} ms | "
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

    def check(self, name: str, measured, expected, tolerance: float, source: str) -> None:
        """Add a check. Tolerance is absolute, in the unit of the two values."""
        self.checks.append(Check(name, measured, expected, tolerance, source))

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if not check.ok]

    def finish(self, summary: str) -> int:
        """Write results.json, print all checks and a verdict; return the script's exit code."""
        self.save()
        rows = []
        for name, check in folded(self.checks):
            values = (check.measured, check.expected, check.tolerance)
            numbers = [f"{v:,}" if isinstance(v, int) else f"{v:.6g}" for v in values]
            rows.append((name, *numbers, "yes" if check.ok else "NO"))
        if rows:
            self.table(rows, ("check", "measured", "expected", "tolerance", "ok"))
        if self.failed:
            self.say("FAILED: " + "; ".join(check.name for check in self.failed))
            return cli.FAILED
        passed = f"{len(self.checks)} check{'s' * (len(self.checks) != 1)} passed, " * bool(rows)
        self.say(f"OK: {passed}{summary}")
        return 0

    def save(self) -> None:
        """Write results.json as it stands: what is known survives a crash or a hang."""
        if self.output and self.world.is_rank0:
            self._write(self.output / "results.json")

    def _write(self, path: Path) -> None:
        now = datetime.now(timezone.utc)
        machine = {"gpu": None, "system": platform.system(), "processor": platform.machine()}
        if self.device.type == "cuda":
            gpu = torch.cuda.get_device_properties(self.device)
            machine |= {"gpu": gpu.name, "gpu_memory_gib": round(gpu.total_memory / measure.GIB, 2)}
        loaded = {"legacy_common": legacy_common, **sys.modules}
        names = [name for name in ("torch", "legacy_common", "deepspeed") if name in loaded]
        content = {
            "script": self.script,
            "args": vars(self.args),
            "argv": sys.argv[1:],  # what was given, where args have the defaults too
            "started": self.started.isoformat(timespec="seconds"),
            "seconds": round((now - self.started).total_seconds(), 2),
            "world_size": self.world.world_size,
            "device": self.device.type,
            "backend": dist.get_backend() if dist.is_initialized() else None,
            "launcher": self.world.launcher,
            "versions": {"python": platform.python_version()}
            | {name: loaded[name].__version__ for name in names},
            "machine": {"cores": measure.core_count(), **machine},
            "metrics": self.metrics,
            "checks": [{**asdict(check), "ok": check.ok} for check in self.checks],
        }
        partial = path.with_suffix(".partial")  # whole or not at all
        partial.write_text(json.dumps(content, indent=2, default=str) + "\n")
        partial.replace(path)


def folded(checks: Sequence[Check]) -> list[tuple[str, Check]]:
    """Return (name, check) to print; of more than ROWS the worst of those alike after a colon."""
    kinds: dict[str, list[Check]] = {}
    for check in checks:
        kind = check.name.rpartition(": ")[2] if len(checks) > ROWS else check.name
        kinds.setdefault(kind, []).append(check)
    rows = []
    for kind, alike in kinds.items():
        worst = max(alike, key=lambda check: (not check.ok, check.error / (check.tolerance or 1)))
        name = f"{kind} (worst of {len(alike)})" if len(alike) > 1 and worst.ok else worst.name
        rows.append((name, worst))
    return rows
