"""A script's report: a header, a table of checks, a verdict, results.json."""

import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

import torch
import torch.distributed as dist
from filelock import FileLock, Timeout
from tabulate import tabulate

from dist_common import cli
from dist_common.runtime import from_rank0

LOCK_WAIT_S = 10.0  # the loader processes of a killed run hold its lock a little longer


@dataclass
class Check:
    """A measurement next to a value derived independently. Tolerance is absolute."""

    name: str
    measured: float
    expected: float
    tolerance: float

    @property
    def ok(self):
        return abs(self.measured - self.expected) <= self.tolerance  # False for NaN


class Report:
    """Prints from rank 0, collects checks and metrics, writes results.json.

    `script` is the path in the repository. Raises: UsageError if --output-dir is in
    use, or holds a run and --resume is not given.
    """

    def __init__(self, script, args, run):
        self.script = script
        self.args = args
        self.run = run
        self.metrics = {}
        self.checks = []
        self.started = datetime.now(UTC)
        if args.output_dir:
            problem = self.claim_folder(args.output_dir) if run.rank == 0 else None
            if problem := from_rank0(problem, run.cpu_group):
                raise cli.UsageError(f"--output-dir {args.output_dir} {problem}")
        ranks = "1 rank" if run.world_size == 1 else f"{run.world_size} ranks"
        run.print0(
            f"{script}: {ranks} started by {run.launcher}, {run.device.type} with "
            f"{dist.get_backend()}, torch {torch.__version__}"
        )

    def claim_folder(self, folder):
        """Make a folder and lock it until this process ends; return what is wrong."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.lock = FileLock(folder / ".lock")
            self.lock.acquire(timeout=LOCK_WAIT_S)
        except Timeout:
            return "is in use by another run: wait for it, or name another folder"
        except OSError as error:
            return f"cannot be written: {error.strerror}"
        resumes = getattr(self.args, "resume", False)
        if not resumes and {path.name for path in folder.iterdir()} - {".lock"}:
            return (
                "is not empty: name another folder, or continue the run with --resume"
            )
        return None

    def table(self, rows, headers):
        """Print an aligned table; the first column is text."""
        sides = ["left"] + ["right"] * (len(headers) - 1)
        text = tabulate(rows, headers, colalign=sides, disable_numparse=True)
        self.run.print0(text)

    def check(self, name, measured, expected, tolerance):
        """Add a check. The tolerance is absolute, in the unit of the two values."""
        self.checks.append(Check(name, measured, expected, tolerance))

    @property
    def failed(self):
        return [check.name for check in self.checks if not check.ok]

    def finish(self, summary):
        """Write results.json, print the checks and a verdict; return the exit code."""
        self.write()
        if self.checks:
            rows = []
            for check in self.checks:
                numbers = [
                    f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
                    for value in (check.measured, check.expected, check.tolerance)
                ]
                rows.append((check.name, *numbers, "yes" if check.ok else "NO"))
            self.table(rows, ("check", "measured", "expected", "tolerance", "ok"))
        if self.failed:
            self.run.print0(f"FAILED: {'; '.join(self.failed)}")
            return cli.FAILED
        plural = "" if len(self.checks) == 1 else "s"
        passed = f"{len(self.checks)} check{plural} passed, " if self.checks else ""
        self.run.print0(f"OK: {passed}{summary}")
        return 0

    def write(self):
        """Write results.json to --output-dir, if there is one."""
        if not self.args.output_dir or self.run.rank > 0:
            return
        ran_for = datetime.now(UTC) - self.started
        machine = {"cores": os.cpu_count(), "gpu": None}
        if self.run.device.type == "cuda":
            gpu = torch.cuda.get_device_properties(self.run.device)
            memory_gib = round(gpu.total_memory / 2**30, 2)
            machine |= {"gpu": gpu.name, "gpu_memory_gib": memory_gib}
        content = {
            "script": self.script,
            "args": vars(self.args),
            "argv": sys.argv[1:],
            "started": self.started.isoformat(timespec="seconds"),
            "seconds": round(ran_for.total_seconds(), 2),
            "world_size": self.run.world_size,
            "device": self.run.device.type,
            "backend": dist.get_backend(),
            "launcher": self.run.launcher,
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
            },
            "machine": machine,
            "metrics": self.metrics,
            "checks": [{**asdict(check), "ok": check.ok} for check in self.checks],
        }
        partial = self.args.output_dir / "results.partial"  # complete or absent
        partial.write_text(json.dumps(content, indent=2, default=str) + "\n")
        partial.replace(self.args.output_dir / "results.json")
