"""Who am I: rank, world size, device and backend under any launcher; joining the process group."""

from __future__ import annotations

import contextlib
import os
import random
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dist_common.cli import UsageError, tear_down, tell


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
    dist.barrier()  # a rank that fails right away would cut gloo's connecting short for the others
    try:
        yield world, own
    except BaseException as error:
        tell(error)
        tear_down()
        raise
    dist.barrier()  # a launcher that sees one rank fail ends the others: let them finish first
    dist.destroy_process_group()


def gather(value: Any, group=None) -> list[Any]:
    """Return every rank's value, indexed by rank, on every rank. A collective for any object."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def from_rank0(value: Any, group=None) -> Any:
    """Return rank 0's value on every rank. A collective for any object."""
    box = [value]
    dist.broadcast_object_list(box, src=0, group=group)
    return box[0]
