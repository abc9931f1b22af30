"""The ports of frameworks/: what starts each, what its run left, how long its file is."""

import ast
import json
import os
import re
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from bench import guard
from bench.strategies import REPOSITORY as REPO
from legacy_common import cli

FOLDER = REPO / "benchmarks" / "frameworks"
ENVIRONMENT = Path(".venv-frameworks", "bin", "python")  # what `make frameworks` installs
JOB_FLAGS = ("preset", "seq_len", "micro_batch_size", "max_steps", "seed", "device")
# The template times the steps between two lines together; its mean leaves out the first 5 steps.
TEMPLATE_FLAGS = (
    "--no-self-check", "--save-every", "0", "--eval-every", "0", "--log-every", "5",
)  # fmt: skip
# Ray would report its use, and Hugging Face's libraries would ask for updates.
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Port:
    """The one job in one framework: its file, and the package that it needs."""

    name: str
    package: str
    base: str = "bare_ddp"  # whose CPU time it is compared with
    script: Path | None = None  # where it is no file of frameworks/
    extra: str = "frameworks"  # of pyproject.toml: what its environment has

    @property
    def path(self) -> Path:
        return self.script or FOLDER / f"{self.name}.py"

    @property
    def to_install(self) -> str:
        """What makes the environment that it runs in."""
        if self.extra == "frameworks":
            return "`make frameworks` installs what can be installed"
        return f"frameworks.md makes .venv-{self.extra} with it, for --python"

    @property
    def starts_ranks(self) -> bool:
        """Whether the framework starts them itself: the file says how to run it on CPUs."""
        return bool(re.search(r"^ +CPU +python ", self.path.read_text(), re.M))


PORTS = {port.name: port for port in (
    Port("bare_ddp", "torch"),
    Port("template", "torch", script=REPO / "01-ddp-basics" / "ddp_training.py"),
    Port("fabric_ddp", "lightning"),
    Port("lightning_ddp", "lightning"),
    Port("accelerate_ddp", "accelerate"),
    Port("ray_train", "ray"),
    Port("deepspeed_engine", "deepspeed"),
    Port("litgpt_fabric", "litgpt", extra="litgpt"),
    Port("thunder_ddp", "lightning-thunder", extra="thunder"),
    Port("horovod_ddp", "horovod"),
    Port("bare_fsdp2", "torch", base="bare_fsdp2"),
    Port("fabric_fsdp2", "lightning", base="bare_fsdp2"),
    Port("lightning_fsdp2", "lightning", base="bare_fsdp2"),
)}  # fmt: skip


@dataclass
class Run:
    """What one run of a port left, and why it failed if it did; losses only if it wrote results."""

    losses: list[float] = field(default_factory=list)
    world_size: int = 0
    cpu_ms: float = float("nan")  # per step, mean over ranks
    outside_s: float = float("nan")  # of the command, outside its steps
    failure: str | None = None


def count_code_lines(source: str) -> int:
    """Count the lines with code on them: no blank ones, comments, docstrings, imports."""
    left_out = set()
    for node in ast.walk(ast.parse(source)):
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if text or isinstance(node, (ast.Import, ast.ImportFrom)):
            left_out |= set(range(node.lineno, node.end_lineno + 1))
    lines = {n: line.strip() for n, line in enumerate(source.splitlines(), 1)}
    return sum(bool(line) and line[0] != "#" for n, line in lines.items() if n not in left_out)


def versions_in(python: Path) -> dict[str, str | None]:
    """Return the version of each port's package in an environment; None where it is missing.

    Raises: UsageError when that environment cannot run a port at all.
    """
    asked = (
        "import importlib.metadata as m, json\n"
        "print(json.dumps({d.metadata['Name'].lower(): d.version for d in m.distributions()}))"
    )
    try:
        answer = subprocess.check_output([python, "-c", asked], stderr=subprocess.PIPE, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise cli.UsageError(f"--python {python} does not run: {error}") from error
    known = json.loads(answer)
    if "torch" not in known:
        raise cli.UsageError(f"--python {python} has no PyTorch: `make frameworks` installs one")
    packages = sorted({port.package for port in PORTS.values()})
    return {name: known[name].partition("+")[0] if name in known else None for name in packages}


def run_port(port: Port, args, folder: Path) -> Run:
    """Train once, in processes of its own; return what was left, or why there is nothing."""
    command = [str(args.python)]
    if not port.starts_ranks:
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={args.world_size}"]
    command += [str(port.path), "--output-dir", str(folder)]
    for name in JOB_FLAGS:
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    own = TEMPLATE_FLAGS if port.name == "template" else ("--world-size", str(args.world_size))
    started = time.monotonic()
    code, printed = run_group([*command, *own], args.limit)
    seconds = time.monotonic() - started
    run, path = Run(), folder / "results.json"
    if written := path.exists():
        results = json.loads(path.read_text())
        metrics = results["metrics"]
        run.losses = metrics.get("losses") or losses_of_template(folder)
        run.world_size = results["world_size"]
        run.cpu_ms = metrics.get("cpu_time_per_step_ms", run.cpu_ms)
        run.outside_s = seconds - sum(metrics["step_times_ms"]) / 1e3
    if code != 0 or not written:
        how = f"no end after {args.limit:g} s" if code is None else f"exit code {code}"
        how += ", results written" if written else ""
        last = next((line for line in reversed(printed.splitlines()) if line.strip()), "silent")
        run.failure = f"FAILED: {how}: {last}"[:170]
    return run


def losses_of_template(folder: Path) -> list[float]:
    """Return what ddp_training.py logs for each step."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [values["loss"] for values in map(json.loads, lines) if "loss" in values]


def run_group(command: list[str], limit_s: float) -> tuple[int | None, str]:
    """Run a command and end all that it started; return its exit code, None at the limit."""
    paths = [str(REPO), str(FOLDER), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, **QUIET, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environ["OMP_NUM_THREADS"] = "1"  # ranks share the cores
    with tempfile.TemporaryFile("w+") as log:
        code = guard.run(command, limit_s, env=environ, stdout=log, stderr=log)
        log.seek(0)
        return code, log.read()
