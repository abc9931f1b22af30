"""Who am I: rank, world size, device, backend under any launcher; joining the process group."""

import contextlib
import os
import random
import re
import socket
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import legacy_common
from legacy_common.cli import UsageError, tear_down, tell

# torch 2.13 gave them these names; until then they were all_gather_into_tensor and so on.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Groups that were left. Once a DDP object is the last to hold one, freeing it may wait for ever:
# it joins gloo's threads and keeps the GIL, for which one of them waits to free a tensor.
KEPT = []


@dataclass(frozen=True)
class World:
    """This process's place among all processes of the job."""

    rank: int  # 0 .. world_size - 1, over all machines
    local_rank: int  # 0 .. local_world_size - 1, on this machine: picks the GPU
    world_size: int
    local_world_size: int
    launcher: str  # what started the process

    @property
    def is_rank0(self) -> bool:
        return self.rank == 0


def discover() -> World:
    """Read rank and world size as torchrun, deepspeed, srun or mpirun set them; export them.

    Raises: UsageError when variables are missing or contradict each other. Sources: torchrun's
    page, srun(1), Open MPI's FAQ: environment variables.
    """
    launcher, names = _launcher()
    rank, world_size = _number(names[0], 0), _number(names[2], 1)
    if rank >= world_size:
        raise UsageError(f"{names[0]}={rank} must be below {names[2]}={world_size}")
    local = _number(names[1], rank), _number(names[3], world_size)
    world = World(rank, local[0], world_size, local[1], launcher)
    for name in ("rank", "local_rank", "world_size", "local_world_size"):
        os.environ.setdefault(name.upper(), str(getattr(world, name)))
    os.environ.setdefault("MASTER_ADDR", _master_address(world))
    port = os.environ.setdefault("MASTER_PORT", str(_master_port(world)))
    if not port.isdecimal():  # Kubernetes writes it for a Service that is called master
        raise UsageError(f"MASTER_PORT={port!r} is not a number")
    return world


def _launcher() -> tuple[str, tuple[str, ...]]:
    """Name the launcher and its variables for rank, local rank, world size, local world size."""
    env = os.environ
    if "RANK" in env or "WORLD_SIZE" in env:
        for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
            if name not in env:
                half = f"{other} is set but {name} is not"
                raise UsageError(f"{half}: start with torchrun, which sets both, or unset {other}")
        if "LOCAL_SIZE" in env and "LOCAL_WORLD_SIZE" not in env:
            return "deepspeed", ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE")
        launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in env else "environment"
        return launcher, ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    if "OMPI_COMM_WORLD_RANK" in env:  # before SLURM, under which mpirun may run
        places = ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE")
        return "mpirun", tuple(f"OMPI_COMM_WORLD_{place}" for place in places)
    # The one process of a batch script, which srun did not start, has SLURM_PROCID=0 too.
    in_batch_script = env.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in env
    if "SLURM_PROCID" in env and not in_batch_script:
        total = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
        return "srun", ("SLURM_PROCID", "SLURM_LOCALID", total, "SLURM_STEP_TASKS_PER_NODE")
    return "python", ("",) * 4


def _number(name: str, default: int) -> int:
    # SLURM writes "4(x2)" for 4 tasks on each of two nodes; this guide fills all nodes alike.
    text = os.environ.get(name, str(default))
    digits = re.fullmatch(r"(\d+)((\(x\d+\))?(,.*)?)", text)
    if digits is None or (digits[2] and not name.endswith("PER_NODE")):
        raise UsageError(f"{name}={text!r} is not a number")
    return int(digits[1])


def _master_address(world: World) -> str:
    if "MASTER_ADDR" in os.environ or world.local_world_size == world.world_size:
        return "127.0.0.1"
    nodes = os.environ.get("SLURM_STEP_NODELIST", os.environ.get("SLURM_JOB_NODELIST", ""))
    first = re.match(r"([^\[,]|\[[^\]]*\])+", nodes)
    if world.launcher == "srun" and first:  # as scontrol show hostnames: r[1-2,4]n[07-9]i -> r1n07i
        return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])
    how = "export the name of the machine that runs rank 0 (mpirun -x MASTER_ADDR=...)"
    raise UsageError(f"MASTER_ADDR is not set: {how}, or start with torchrun")


def _master_port(world: World) -> int:
    if world.world_size == 1:
        return 0  # any free one: no other rank has to find it
    # The same for all ranks of a job, another one for the next job, below the ephemeral range.
    slurm, mpi = ("SLURM_JOB_ID", "SLURM_STEP_ID"), ("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE")
    names = {"srun": slurm, "mpirun": mpi}.get(world.launcher, ())
    job = " ".join(os.environ[name] for name in names if name in os.environ)
    return 15000 + zlib.crc32(job.encode()) % 16000 if job else 29500


def pick_device(name: str, world: World) -> torch.device:
    """Give this rank its own GPU or the CPU; `auto` takes GPUs if there is one for each rank here.

    Raises: UsageError when `cuda` is asked for and there is no GPU for this rank.
    """
    gpus = torch.cuda.device_count()
    # With one GPU bound to each task, srun shows every task its own GPU as number 0.
    bound = gpus == 1 and world.launcher == "srun" and os.environ.get("SLURM_GPUS_PER_TASK") == "1"
    shared = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"  # NCCL 2.30 and later
    needed = 1 if bound or shared else world.local_world_size
    if name == "auto" and gpus < needed:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")  # on purpose
        there = gpus or (any(Path("/dev").glob("nvidia[0-9]*")) and not hidden)
        if world.local_rank == 0 and there:
            found = f"PyTorch can use {gpus} GPU(s) of this machine, for {needed} ranks"
            why = f"{found}; --device cuda says what to do"
            print(f"warning: computing on the CPU: {why}", file=sys.stderr)
        name = "cpu"
    if name == "cpu":
        # From libraries that would take a GPU unasked: FSDP's own mesh is one of GPUs.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return torch.device("cpu")
    if gpus == 0:
        see = "see whether nvidia-smi lists one and torch.version.cuda is not None"
        raise UsageError(f"--device cuda: PyTorch finds no GPU here: use --device cpu, or {see}")
    if gpus < needed:
        least = f"start at most {gpus} here (torchrun --nproc-per-node={gpus})"
        ranks = f"{needed} ranks on this machine but {gpus} GPU(s)"
        share = "to let ranks share a GPU, set NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30 or later)"
        raise UsageError(f"--device cuda: {ranks}: {least}, or use --device cpu; {share}")
    device = torch.device("cuda", 0 if bound else world.local_rank % gpus)
    torch.cuda.set_device(device)
    # float32 is float32. Else convolutions would round to TF32, 10 bits of 23, and matrix products
    # where an image sets TORCH_ALLOW_TF32_CUBLAS_OVERRIDE: the answer would depend on the layout.
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    return device


def default_precision(device: torch.device) -> str:
    """Return what a template computes in unless it is told: bfloat16 on a GPU that has it."""
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16-mixed" if has_bf16 else "32-true"


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and PyTorch (CPU and every GPU) alike."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextlib.contextmanager
def init(
    device: str = "auto", timeout_s: float = 600.0, cpu_tensors: bool = False
) -> Iterator[tuple[World, torch.device]]:
    """Join the process group for a `with` block; an error tears it down, so that no rank waits.

    With `cpu_tensors` gloo serves tensors in host memory beside NCCL.
    """
    world = discover()
    own = pick_device(device, world)
    timeout, gpu = timedelta(seconds=timeout_s), own if own.type == "cuda" else None
    backend = "cpu:gloo,cuda:nccl" if cpu_tensors else "nccl"
    began = time.monotonic()
    try:
        dist.init_process_group(backend if gpu else "gloo", timeout=timeout, device_id=gpu)
    except Exception as error:
        error.after_s = time.monotonic() - began  # for cli.explain
        raise
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):  # of groups and meshes to come
        setattr(dist.distributed_c10d, name, timeout)
    try:
        dist.barrier()  # a rank that failed right away would cut short how gloo connects the rest
        introduce(world)
        yield world, own
    except BaseException as error:
        tell(error)
        tear_down()
        raise
    dist.barrier()  # a launcher that sees one rank fail ends the others: let them finish first
    KEPT.append(dist.group.WORLD)
    dist.destroy_process_group()


def introduce(world: World) -> None:
    """Leave this rank's machine in the store, for messages.

    Raises: UsageError on a rank whose versions are not rank 0's, naming both machines.
    """
    store, key = dist.group.WORLD.get_group_store(), "legacy_common/versions"
    own = socket.gethostname()
    store.set(f"legacy_common/node/{world.rank}", own)
    versions = f"torch {torch.__version__}, legacy_common {legacy_common.__version__}"
    if world.is_rank0:
        store.set(key, f"{versions} on {own}")
    others, _, node = store.get(key).decode().rpartition(" on ")
    if others != versions:
        both = f"{versions} on {own}, but {others} on {node}, rank 0's"
        raise UsageError(f"{both}: install the same on all machines")


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
