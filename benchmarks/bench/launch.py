"""Start a script on N ranks: as forks, with torchrun, srun or a command line."""

import contextlib
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
from dataclasses import dataclass
from pathlib import Path

from bench import guard
from bench.strategies import REPO
from dist_common import ranks
from dist_common.cli import UsageError

FORK, TORCHRUN, SRUN = "fork", "torchrun", "srun"
GRACE_S = 1.0  # from a rank's failure to the end of the others
# Modules that the scripts import. Forks inherit them, which saves seconds per rank.
PRELOADED = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.utils.data",
)
OF_A_LAUNCHER = re.compile(
    r"(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_\w+|TORCHELASTIC_\w+)$"
)


@dataclass
class LaunchResult:
    """The first failed rank's exit code (None at the deadline), and the output."""

    code: int | None
    out: str
    err: str


def resolve(launcher, device):
    """Return launcher and device without "auto". Raises: UsageError if one is missing.

    srun and a command line may start ranks elsewhere: their scripts choose the device.
    """
    gpus = visible_gpus() if device != "cpu" else 0
    if launcher == "auto":
        launcher = TORCHRUN if gpus or device == "cuda" else FORK
        launcher = SRUN if "SLURM_JOB_ID" in os.environ else launcher
    if launcher in (FORK, TORCHRUN):
        device = (
            "cuda" if device == "cuda" or (gpus and launcher == TORCHRUN) else "cpu"
        )
        if device == "cuda" and launcher == FORK:
            raise UsageError("--launcher fork is for the CPU: use torchrun on GPUs")
        if device == "cuda" and not gpus:
            raise UsageError("--device cuda: nvidia-smi lists no GPU: use --device cpu")
        return launcher, device
    program = shlex.split(launcher)[0]
    if not shutil.which(program):
        raise UsageError(f"--launcher {launcher}: there is no program {program}")
    if launcher == SRUN and "SLURM_JOB_ID" not in os.environ:
        raise UsageError("--launcher srun works inside a SLURM job: use sbatch")
    if launcher != SRUN and "{command}" not in launcher:
        raise UsageError("--launcher: a line has to contain {command}")
    return launcher, device


def visible_gpus():
    """Count GPUs with nvidia-smi, as CUDA must not start in a process that forks."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not shutil.which("nvidia-smi") or visible in ("", "-1"):
        return 0
    if visible:
        return len(visible.split(","))
    listed = subprocess.run(
        ["nvidia-smi", "--list-gpus"], capture_output=True, check=False
    )
    return listed.stdout.count(b"GPU ")


def reason_not_to_start(launcher, device, world_size):
    """Say why this machine cannot start so many ranks; None if it can."""
    if launcher == TORCHRUN and device == "cuda" and world_size > visible_gpus():
        return f"needs {world_size} GPUs, there are {visible_gpus()}"
    tasks = int(os.environ.get("SLURM_NTASKS", world_size))
    if launcher == SRUN and world_size > tasks:
        return f"needs {world_size} tasks, this SLURM job has {tasks}"
    return None


def build_command(launcher, script, arguments, world_size, python="python"):
    """Return the command that starts a script; for forks, the one for torchrun."""
    words = [python, str(script), *map(str, arguments)]
    if launcher == SRUN:
        # "8(x2)" is 8 tasks on each of two nodes.
        per_node = re.match(r"\d+", os.environ.get("SLURM_TASKS_PER_NODE", ""))
        nodes = math.ceil(world_size / int(per_node[0])) if per_node else 1
        srun = ["srun", f"--nodes={nodes}", f"--ntasks={world_size}"]
        if cores := os.environ.get("SLURM_CPUS_PER_TASK"):  # srun does not read it
            srun.append(f"--cpus-per-task={cores}")
        return [*srun, "--kill-on-bad-exit=1", *words]
    if launcher not in (FORK, TORCHRUN):
        filled = []
        for word in shlex.split(launcher):
            if word == "{command}":
                filled += words
            else:  # inside a longer word, quoted for the shell that reads it
                word = word.replace("{ranks}", str(world_size))
                filled.append(word.replace("{command}", shlex.join(words)))
        return filled
    if world_size == 1:
        return words
    start = ["torchrun"]
    if python != "python":
        start = [python, "-m", "torch.distributed.run"]
    return [*start, "--standalone", f"--nproc-per-node={world_size}", *words[1:]]


def build_environment(launcher, world_size):
    """Return this process's variables without a launcher's, with OMP_NUM_THREADS."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not OF_A_LAUNCHER.match(name)
    }
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    threads = os.environ.get("SLURM_CPUS_PER_TASK", max(1, cores // world_size))
    if launcher == FORK:  # a fork has one thread on any number of ranks
        return kept | {"OMP_NUM_THREADS": "1"}
    return {"OMP_NUM_THREADS": str(threads)} | kept


def preload(launcher):
    """Import modules for the forks. A computation would break their backward pass."""
    if launcher == FORK:
        for name in PRELOADED:
            importlib.import_module(name)


def start(launcher, script, arguments, world_size, folder, timeout_s):
    """Run a script until it ends; write its output to `folder`. Returns: LaunchResult.

    At the deadline, or if this process dies, the ranks and their children are killed.
    """
    folder.mkdir(parents=True)
    if launcher == FORK:
        return fork(script, arguments, world_size, folder, timeout_s)
    words = build_command(launcher, script, arguments, world_size, sys.executable)
    variables = build_environment(launcher, world_size)
    out, err = folder / "out", folder / "err"
    with out.open("w") as stdout, err.open("w") as stderr:
        code = guard.run(
            words, timeout_s, cwd=REPO, env=variables, stdout=stdout, stderr=stderr
        )
    return LaunchResult(
        code, out.read_text(errors="replace"), err.read_text(errors="replace")
    )


def fork(script, arguments, world_size, folder, timeout_s):
    """Run a script's main on forks of this process."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]

    def body(rank):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not this process's handler
        place = (rank, rank, world_size, world_size)
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        variables = build_environment(FORK, world_size)
        variables |= {
            name: str(value) for name, value in zip(names, place, strict=True)
        }
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ.clear()
        os.environ.update(variables)
        os.chdir(REPO)
        sys.argv = [str(script), *map(str, arguments)]
        sys.path.insert(0, str(Path(script).parent))
        runpy.run_path(str(script), run_name="__main__")

    with contextlib.ExitStack() as stack:
        ended = ranks.fork(
            body,
            world_size,
            folder,
            timeout_s,
            GRACE_S,
            during=lambda pids: stack.enter_context(guard.guarded(pids)),
        )
    # A rank that was killed after another one failed has a signal's code, below 0.
    codes = [rank.code for rank in ended if rank.code]
    hung = any(rank.code is None for rank in ended)
    code = next((code for code in codes if code > 0), None)
    if code is None and not hung:
        code = next(iter(codes), 0)
    out = "".join(rank.out for rank in ended)
    return LaunchResult(code, out, "".join(rank.err for rank in ended))
