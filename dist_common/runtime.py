"""Who am I, which device is mine, and how a script starts, fails and ends."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import os
import random
import re
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

# A launcher ends the whole job when its first process exits. A rank that leaves the telling to
# another one waits this long, so that its own exit cannot cut the other one's line short.
GRACE_S = 3.0

BAD_INPUT, FAILED, INTERRUPTED = 2, 1, 130  # exit codes


class UsageError(Exception):
    """Bad input or a machine that lacks what the script needs: one line, exit code 2."""


class ArgumentParser(argparse.ArgumentParser):
    """argparse with the flags that every script has, and errors that one rank tells for all.

    The first line of `doc` becomes the description. With `resumes`, there is --resume too.
    """

    def __init__(self, doc: str, resumes: bool = False) -> None:
        super().__init__(description=doc.splitlines()[0])
        add = self.add_argument
        add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(auto)")
        add("--seed", type=whole_number, default=0, help="of weights and order of samples (0)")
        add("--timeout", type=positive_float, default=600, metavar="SECONDS",
            help="how long a collective waits for the other ranks (600)")  # fmt: skip
        add("--output-dir", metavar="DIR", help="write results.json and the like to this folder")
        if resumes:
            add("--resume", action="store_true", help="go on from --output-dir's checkpoint")

    def error(self, message: str) -> None:
        raise UsageError(message)

    def parse_args(self, *args, **kwargs) -> argparse.Namespace:
        parsed = super().parse_args(*args, **kwargs)
        if getattr(parsed, "resume", False) and not parsed.output_dir:
            self.error("--resume needs --output-dir, the folder of the run to go on with")
        return parsed


def whole_number(text: str, low: int = 0) -> int:
    """Parse a flag's value that must be a whole number from `low` to 2**31 - 1."""
    if not (text.isdecimal() and low <= int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {low}, not {text!r}")
    return int(text)


def positive_int(text: str) -> int:
    """Parse a flag's value that must be a whole number of at least 1."""
    return whole_number(text, low=1)


def positive_float(text: str) -> float:
    """Parse a flag's value that must be a number above 0, and at most 1e9."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) <= 1e9:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")


def link_rate(text: str) -> float:
    """Parse a flag's value that is the speed of a link, such as 100mbit; return bytes/s."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(m|g)bit", text)
    if not match or not float(match[1]):
        raise argparse.ArgumentTypeError(f"must be like 100mbit or 1gbit, not {text!r}")
    return float(match[1]) * {"m": 1e6, "g": 1e9}[match[2]] / 8


@dataclass(frozen=True)
class World:
    """This process's place among all processes of the job.

    rank: 0 .. world_size - 1, over all machines. local_rank: 0 .. local_world_size - 1, on this
    machine; it picks the GPU. launcher: who started the process.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    launcher: str

    @property
    def is_rank0(self) -> bool:
        return self.rank == 0


def discover() -> World:
    """Read rank and world size from whatever started this process, and export them for PyTorch.

    Knows torchrun (or RANK and WORLD_SIZE set by hand), the deepspeed launcher, SLURM's srun, Open
    MPI's mpirun, and no launcher at all. Afterwards RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT are set, so that `init_process_group(init_method="env://")` works
    under each of them.

    Raises: UsageError when the variables are incomplete or contradict each other.
    Source: torchrun, "Environment Variables"; srun(1), "OUTPUT ENVIRONMENT VARIABLES"; Open MPI
    FAQ, "What environment variables does mpirun set".
    """
    env = os.environ
    if "RANK" in env or "WORLD_SIZE" in env:
        for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
            if name not in env:
                raise UsageError(
                    f"{other} is set but {name} is not: start with torchrun, which sets both, "
                    f"or unset {other}"
                )
        launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in env else "environment"
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        if "LOCAL_SIZE" in env and "LOCAL_WORLD_SIZE" not in env:
            launcher, names = "deepspeed", (*names[:3], "LOCAL_SIZE")
    elif "OMPI_COMM_WORLD_RANK" in env:  # before SLURM, under which mpirun may run
        launcher = "mpirun"
        places = ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE")
        names = tuple(f"OMPI_COMM_WORLD_{place}" for place in places)
    elif "SLURM_PROCID" in env and not (
        # The one process of a batch script, which srun did not start, has SLURM_PROCID=0 too.
        env.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in env
    ):
        launcher = "srun"
        total = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
        names = ("SLURM_PROCID", "SLURM_LOCALID", total, "SLURM_STEP_TASKS_PER_NODE")
    else:
        launcher, names = "python", ()

    def number(name: str, default: int) -> int:
        # SLURM writes "4(x2),3": 4 tasks on each of the first two nodes. Nodes are filled alike
        # in every launch line of this guide, so the first number stands for all.
        digits = re.fullmatch(r"(\d+)((\(x\d+\))?(,.*)?)", env.get(name, str(default)))
        if digits is None or (digits[2] and not name.endswith("PER_NODE")):
            raise UsageError(f"{name}={env[name]!r} is not a number")
        return int(digits[1])

    rank = number(names[0], 0) if names else 0
    world_size = number(names[2], 1) if names else 1
    local_rank = number(names[1], rank) if names else 0
    local_world_size = number(names[3], world_size) if names else 1
    if rank >= world_size:
        raise UsageError(f"{names[0]}={rank} must be below {names[2]}={world_size}")
    world = World(rank, local_rank, world_size, local_world_size, launcher)
    exports = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": local_world_size,
        "MASTER_ADDR": _master_address(world),
        "MASTER_PORT": _master_port(world),
    }
    for name, value in exports.items():
        env.setdefault(name, str(value))
    return world


def _master_address(world: World) -> str:
    env = os.environ
    if "MASTER_ADDR" in env:
        return env["MASTER_ADDR"]
    if world.launcher == "srun" and world.local_world_size < world.world_size:
        nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", ""))
        first = re.match(r"([^\[,]+)(?:\[(\d+))?", nodes)  # gpu[03-06,09] -> gpu03
        if first:
            return first[1] + (first[2] or "")
    if world.local_world_size < world.world_size:
        raise UsageError(
            "MASTER_ADDR is not set: export the name of the machine that runs rank 0 "
            "(mpirun -x MASTER_ADDR=...), or start with torchrun"
        )
    return "127.0.0.1"


def _master_port(world: World) -> int:
    if world.world_size == 1:
        return 0  # any free one: nobody else has to find it
    # The same for all ranks of a job, another one for the next job, below the ephemeral range.
    names = {
        "srun": ("SLURM_JOB_ID", "SLURM_STEP_ID"),
        "mpirun": ("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"),
    }.get(world.launcher, ())
    job = " ".join(os.environ[name] for name in names if name in os.environ)
    return 15000 + zlib.crc32(job.encode()) % 16000 if job else 29500


def pick_device(name: str, world: World) -> torch.device:
    """Give this rank its device: its own GPU, or the CPU.

    name: auto | cpu | cuda. auto takes the GPUs when there is one for each rank of this machine.

    Raises: UsageError when `cuda` is asked for and there is no GPU for this rank.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # With one GPU bound to each task, srun shows every task its own GPU as number 0.
    bound = gpus == 1 and world.launcher == "srun" and os.environ.get("SLURM_GPUS_PER_TASK") == "1"
    index = 0 if bound else world.local_rank
    needed = 1 if bound else world.local_world_size
    if name == "cpu" or (name == "auto" and gpus < needed):
        return torch.device("cpu")
    if gpus == 0:
        raise UsageError(
            "--device cuda: PyTorch finds no GPU on this machine; use --device cpu, or see "
            "whether nvidia-smi lists one and torch.version.cuda is not None"
        )
    if gpus < needed:
        raise UsageError(
            f"--device cuda: {needed} ranks on this machine but {gpus} GPU(s): start at most "
            f"{gpus} here (torchrun --nproc-per-node={gpus}), or use --device cpu"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    # Convolutions would otherwise round to TF32, and the answer depend on the batch per rank.
    torch.backends.cudnn.allow_tf32 = False
    return device


def backend_for(device: torch.device) -> str:
    """Name the communication library for a device: NCCL between GPUs, gloo between CPUs."""
    return "nccl" if device.type == "cuda" else "gloo"


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and PyTorch (CPU and every GPU) alike."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextlib.contextmanager
def init(device: str = "auto", timeout_s: float = 600.0) -> Iterator[tuple[World, torch.device]]:
    """Join the process group for the length of a `with` block.

    On an exception the error is told, then the group is torn down at once, so that ranks which
    wait for this one fail too instead of waiting out the timeout.

    Units: timeout_s in seconds, for every collective.
    """
    world = discover()
    own = pick_device(device, world)
    dist.init_process_group(
        backend_for(own),
        timeout=timedelta(seconds=timeout_s),
        device_id=own if own.type == "cuda" else None,
    )
    try:
        yield world, own
    except BaseException as error:
        tell(error)
        _tear_down()
        raise
    dist.barrier()  # a launcher that sees one rank fail ends the others: let them finish first
    dist.destroy_process_group()


def run(main: Callable[[], int]) -> None:
    """Run a script's main and leave with an exit code: its own, or 2 bad input, 1 failed.

    Whatever main raises is told by `tell`; set DIST_COMMON_TRACEBACK=1 for the whole traceback.
    """
    code = FAILED
    try:
        code = main()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as error:
        code = BAD_INPUT if isinstance(_explain(error), UsageError) else FAILED
        tell(error)
        _tear_down()
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):  # nobody reads any more, as under `| head`
        sys.stdout.flush()
        sys.stderr.flush()
    # Not sys.exit: a DDP object keeps gloo's threads alive, and if one of them releases its last
    # tensor while the interpreter shuts down, the process aborts although all went well.
    os._exit(code)


def tell(error: BaseException) -> None:
    """Say on stderr, in one line from one rank, what ended the run; call it as often as you like.

    The first rank to claim the word in the group's store speaks; the others, which mostly fail
    because the first one did, keep quiet. Without a group every rank meets the same error, and
    rank 0 speaks.
    """
    if isinstance(error, (KeyboardInterrupt, SystemExit)) or hasattr(error, "told"):
        return
    error.told = True
    names = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
    numbers = [os.environ[name] for name in names if os.environ.get(name, "").isdecimal()]
    rank = int(numbers[0]) if numbers else 0
    if dist.is_initialized():
        try:
            first = dist.group.WORLD.get_group_store().add("dist_common/told", 1) == 1
        except RuntimeError:  # the store went down with the rank that held it
            first = True
        if not first:
            time.sleep(GRACE_S)
            return
    elif rank != 0:
        # Not ended meanwhile: then rank 0 did not meet this error, and one of us has to speak.
        time.sleep(GRACE_S + 0.5 * (rank % 64))

    cause = _explain(error)
    name = Path(sys.argv[0]).name
    if os.environ.get("DIST_COMMON_TRACEBACK"):
        traceback.print_exception(error)
    if isinstance(cause, UsageError):
        line = f"{name}: error: {cause}"
    elif isinstance(cause, LostRank):
        line = f"{name}: rank {rank}: {cause}"
    elif isinstance(cause, FloatingPointError):  # all ranks found it together
        line = f"{name}: {cause}"
    else:
        frames = traceback.extract_tb(error.__traceback__)
        frame = [f for f in frames if "site-packages" not in f.filename][-1]
        line = (
            f"{name}: rank {rank}: {type(error).__name__}: {error} "
            f"({Path(frame.filename).name}:{frame.lineno} in {frame.name}; "
            "DIST_COMMON_TRACEBACK=1 shows the traceback)"
        )
    print(" ".join(line.split()), file=sys.stderr, flush=True)


class LostRank(Exception):
    """Another rank died or stopped answering."""


def _explain(error: BaseException) -> BaseException:
    """Put a communication library's error in the words of somebody who can act on it."""
    text = str(error)
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return UsageError(
            f"MASTER_PORT={os.environ.get('MASTER_PORT')} is already taken on this machine: "
            "choose another, or let torchrun --standalone pick a free one"
        )
    lost = re.search(r"Connection (closed|reset) by peer|Broken pipe|[Tt]imed out|[Tt]imeout", text)
    ours = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in text)
    if ours and lost:
        if not dist.is_initialized():
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            return LostRank(
                f"waited in vain for all {os.environ.get('WORLD_SIZE')} ranks to meet at {where}: "
                "was each of them started, and does it reach that address?"
            )
        return LostRank(
            f"lost contact with another rank ({lost[0]}): it died or stopped answering. Look for "
            "the rank that failed first: killed, out of memory, or an error of its own"
        )
    return error


def _tear_down() -> None:
    if not dist.is_initialized():
        return
    store = dist.group.WORLD.get_group_store()
    if dist.get_backend() == "nccl":
        dist.group.WORLD.abort()  # destroying would wait for collectives that never complete
    else:
        dist.destroy_process_group()
    if os.environ["RANK"] == "0" and "TORCHELASTIC_RUN_ID" not in os.environ:
        time.sleep(1.0)  # the store in which the others look who told lives in this process
    del store
