"""Start a script on N ranks, and end them: as forks, with torchrun, srun, or by a template."""

import atexit
import contextlib
import faulthandler
import importlib
import math
import os
import re
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import guard, template
from bench.strategies import REPOSITORY
from bench.template import Template
from dist_common import ranks
from legacy_common import cli, measure
from legacy_common.lab import namespaces

AUTO, FORK, TORCHRUN, SRUN = LAUNCHERS = ("auto", "fork", "torchrun", "srun")
GRACE_S = 1.0  # from a rank's failure to the end of the others: it may have more to say
# What scripts import, so that a fork finds it: seconds for each of them otherwise.
PRELOADED = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining",
             "torch.distributed.tensor.parallel", "torch.utils.data")  # fmt: skip
# What a launcher sets, and what ranks must not have from this process.
LAUNCHED = re.compile(r"(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_\w+|TORCHELASTIC_\w+)$")


def parse(text: str) -> str:
    """Parse --launcher: a name, or a line with placeholders."""
    return text if text in LAUNCHERS else template.checked(text, LAUNCHERS)


@dataclass
class Outcome:
    """How a launch ended; the code is that of the first rank that failed, None if it was late."""

    code: int | None
    seconds: float
    out: str
    err: str


def resolve(launcher: str, device: str) -> tuple[str, str]:
    """Return launcher and device with "auto" decided. Raises: UsageError for forks with GPUs."""
    gpus = visible_gpus() if device != "cpu" else 0
    if launcher == AUTO:
        launcher = TORCHRUN if gpus or device == "cuda" else FORK
        launcher = SRUN if "SLURM_JOB_ID" in os.environ else launcher
    if launcher == FORK and device == "cuda":
        raise cli.UsageError("--launcher fork is for the CPU: use torchrun for --device cuda")
    if device == "auto" and not elsewhere(launcher):  # other machines than this one may have GPUs
        device = "cuda" if gpus and launcher == TORCHRUN else "cpu"
    return launcher, device


def elsewhere(launcher: str) -> bool:
    """Say whether ranks may run on other machines than this one."""
    return launcher == SRUN or isinstance(launcher, Template)


def require(launcher: str, device: str) -> None:
    """Raise UsageError if this machine lacks the launcher, or all GPUs."""
    if launcher == SRUN:
        if "SLURM_JOB_ID" not in os.environ or not shutil.which("srun"):
            raise cli.UsageError("--launcher srun works inside a SLURM job: see salloc and sbatch")
    elif isinstance(launcher, Template):
        if not shutil.which(program := shlex.split(launcher)[0]):
            raise cli.UsageError(f"--launcher {launcher}: there is no {program} here")
    elif device == "cuda" and not visible_gpus():
        raise cli.UsageError("--device cuda: nvidia-smi lists no GPU here: use --device cpu")


def visible_gpus() -> int:
    """Count GPUs by nvidia-smi: asked itself, CUDA would start here, and survives no fork."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not shutil.which("nvidia-smi") or visible in ("", "-1"):
        return 0
    if visible:
        return len(visible.split(","))
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, check=False)
    return listed.stdout.count(b"GPU ")


def why_not(launcher: str, device: str, world_size: int) -> str | None:
    """Say in one line why a launcher cannot start so many ranks here; None if it can."""
    if launcher == TORCHRUN and device == "cuda" and world_size > visible_gpus():
        return f"{world_size} ranks need as many GPUs, and this machine has {visible_gpus()}"
    if launcher == SRUN:
        tasks, nodes = int(os.environ.get("SLURM_NTASKS", world_size)), _nodes(world_size)
        if world_size > tasks:
            return f"{world_size} ranks need as many tasks, and this SLURM job has {tasks}"
        if world_size % nodes:
            return f"{world_size} ranks cannot be dealt to {nodes} nodes alike"
    if isinstance(launcher, Template) and world_size % (nodes := launcher.nodes(world_size)):
        return f"{world_size} ranks cannot be dealt to {nodes} nodes alike"
    return None


def command(
    launcher: str, script: str, arguments: Sequence[str], world_size: int, python: str = "python"
) -> list[str]:
    """Return the words that start a script; for forks those that a reader would type instead."""
    if isinstance(launcher, Template):
        return launcher.words([script, *arguments], world_size, python)
    if launcher == SRUN:
        nodes = _nodes(world_size)
        words = [f"--nodes={nodes}", f"--ntasks={world_size}"]
        words += [f"--ntasks-per-node={world_size // nodes}", "--kill-on-bad-exit=1"]
        if cores := os.environ.get("SLURM_CPUS_PER_TASK"):  # which srun itself does not read
            words.append(f"--cpus-per-task={cores}")
        return ["srun", *words, python, script, *arguments]
    if world_size == 1:
        return [python, script, *arguments]
    torchrun = ["torchrun"] if python == "python" else [python, "-m", "torch.distributed.run"]
    return [*torchrun, "--standalone", f"--nproc-per-node={world_size}", script, *arguments]


def threads(launcher: str, world_size: int) -> str:
    """Return OMP_NUM_THREADS of each rank: its share of the cores, if this process has no say."""
    if launcher == FORK:  # has one thread, whatever is set (dist_common.ranks)
        return "1"
    per_task = os.environ.get("SLURM_CPUS_PER_TASK") if launcher == SRUN else None
    if asked := os.environ.get("OMP_NUM_THREADS") or per_task:
        return asked
    nodes = launcher.nodes(world_size) if isinstance(launcher, Template) else 1
    per_node = math.ceil(world_size / (_nodes(world_size) if launcher == SRUN else nodes))
    return str(max(1, (measure.core_count() or 1) // per_node))


def prepare(launcher: str) -> None:
    """Import what forks need. Nothing may be computed here: forks could not run backward then."""
    for name in PRELOADED if launcher == FORK else ():
        importlib.import_module(name)


def start(
    launcher: str, script: str, arguments: Sequence[str], world_size: int, folder: Path,
    timeout_s: float, link: str | None = None,
) -> Outcome:  # fmt: skip
    """Run a script from the top of the repository and wait for it; `folder` gets its output.

    At the deadline, and if this process dies, the ranks are killed with all that they started.
    """
    started = time.monotonic()
    folder.mkdir(parents=True)
    if launcher == FORK:
        code = _fork(script, arguments, world_size, folder, timeout_s, link)
    else:
        python = sys.executable  # whatever PATH says
        words = command(launcher, script, arguments, world_size, python)
        environ = clean_environ(launcher, world_size)
        with (folder / "job.out").open("w") as out, (folder / "job.err").open("w") as err:
            how = {"cwd": REPOSITORY, "env": environ, "stdout": out, "stderr": err}
            code = guard.run(words, timeout_s, gently=elsewhere(launcher), **how)
    seconds = time.monotonic() - started
    out, err = ("".join(path.read_text(errors="replace") for path in sorted(folder.glob(kind)))
                for kind in ("*.out", "*.err"))  # fmt: skip
    return Outcome(code, seconds, out, err)


def _fork(script, arguments, world_size, folder, timeout_s, link) -> int | None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]

    def body(rank: int) -> None:
        atexit._clear()  # of this process, whose temporary folders a rank's end would remove
        environ = clean_environ(FORK, world_size) | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }  # fmt: skip
        os.environ.clear()
        os.environ.update(environ)
        # A rank that is ended because another one failed says where it was: it may be the cause.
        faulthandler.register(signal.SIGTERM, sys.stderr, chain=True)
        if network:
            network.enter(rank)
        os.chdir(REPOSITORY)
        sys.argv = [script, *arguments]
        sys.path.insert(0, str(Path(script).resolve().parent))
        runpy.run_path(script, run_name="__main__")

    with contextlib.ExitStack() as stack:
        rates = [cli.link_rate(link)] * world_size if link else []
        network = stack.enter_context(namespaces.hosts(rates)) if link else None
        ended = ranks.fork(
            body, world_size, folder, timeout_s, GRACE_S,
            during=lambda pids: stack.enter_context(guard.guarded(pids)),
        )  # fmt: skip
    # A rank that was ended because another one failed has a signal's code, below 0.
    codes = [rank.code for rank in ended if rank.code]
    late = any(rank.code is None for rank in ended)
    return next((code for code in codes if code > 0), None if late else next(iter(codes), 0))


def clean_environ(launcher: str, world_size: int) -> dict[str, str]:
    """Return this process's environment without a launcher's variables, with a rank's threads."""
    kept = {name: value for name, value in os.environ.items() if not LAUNCHED.match(name)}
    return kept | {"OMP_NUM_THREADS": threads(launcher, world_size)}


def _nodes(world_size: int) -> int:
    """Return how few nodes of the SLURM job hold so many tasks; "8(x2)" is 8 on each of two."""
    digits = re.match(r"\d+", os.environ.get("SLURM_TASKS_PER_NODE", ""))
    return math.ceil(world_size / int(digits[0])) if digits else 1
