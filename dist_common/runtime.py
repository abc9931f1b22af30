"""Start and end a distributed run: ranks, devices, process groups, random numbers."""

import os
import random
import re
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from dist_common.cli import UsageError, print_error

# The variables of rank, local rank, world size and local world size, by launcher.
# Sources: torchrun's page, srun(1), Open MPI's FAQ.
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
DEEPSPEED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE")
SRUN = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_STEP_TASKS_PER_NODE")
MPIRUN = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)


@dataclass(frozen=True)
class Run:
    """This process's place in the job, its device and its groups."""

    rank: int  # 0 .. world_size - 1, over all machines
    local_rank: int  # on this machine
    world_size: int
    local_world_size: int
    launcher: str
    device: torch.device
    cpu_group: dist.ProcessGroup  # gloo: small messages that no GPU work waits for

    def print0(self, line):
        """Print a line on rank 0 of the job."""
        if dist.get_rank() == 0:
            print(line, flush=True)


@contextmanager
def init(device="auto", timeout_s=600.0):
    """Join the job that a launcher started, and leave it at the end of the block.

    timeout_s: how long a rank waits for the others in a collective before it fails.
    Yields: Run. Raises: UsageError when variables or GPUs are missing.
    """
    launcher, rank, local_rank, world_size, local_world_size = find_ranks()
    chosen = choose_device(device, launcher, local_rank, local_world_size)
    timeout = timedelta(seconds=timeout_s)
    gpu = chosen if chosen.type == "cuda" else None
    # gloo serves CPU tensors next to NCCL: messages, checkpoints, gradients in RAM.
    backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
    dist.init_process_group(backend, timeout=timeout, device_id=gpu)
    try:
        cpu_group = dist.new_group(backend="gloo", timeout=timeout)
        # gloo connects in pairs: a rank that fails early would disturb the others.
        dist.barrier()
        dist.barrier(cpu_group)
        yield Run(
            rank,
            local_rank,
            world_size,
            local_world_size,
            launcher,
            chosen,
            cpu_group,
        )
    except BaseException as error:
        print_error(error)
        raise
    dist.barrier()  # a launcher that sees one rank end early would end the others
    dist.destroy_process_group()


def find_ranks():
    """Read the variables of torchrun, deepspeed, srun or mpirun; export torchrun's.

    Returns: launcher, rank, local rank, world size, local world size.
    Raises: UsageError when variables are missing or contradict each other.
    """
    launcher, names = find_launcher()
    rank = read_number(names[0])
    world_size = read_number(names[2])
    if rank >= world_size:
        raise UsageError(f"{names[0]}={rank} must be below {names[2]}={world_size}")
    local_rank = read_number(names[1], rank)
    local_world_size = read_number(names[3], world_size)
    numbers = (rank, local_rank, world_size, local_world_size)
    for name, number in zip(TORCHRUN, numbers, strict=True):
        os.environ.setdefault(name, str(number))
    if "MASTER_ADDR" not in os.environ:
        os.environ["MASTER_ADDR"] = find_master(local_world_size == world_size)
    # The jobs of a cluster have numbers of their own; one process takes any free port.
    number = 29500 + int(os.environ.get("SLURM_JOB_ID", "0")) % 1000
    os.environ.setdefault("MASTER_PORT", str(number if world_size > 1 else 0))
    read_number("MASTER_PORT")  # Kubernetes sets it for a service called "master"
    return launcher, *numbers


def find_launcher():
    """Return the launcher's name and the names of its four variables."""
    env = os.environ
    if "RANK" in env or "WORLD_SIZE" in env:
        if "LOCAL_SIZE" in env and "LOCAL_WORLD_SIZE" not in env:
            return "deepspeed", DEEPSPEED
        started_by_torchrun = "TORCHELASTIC_RUN_ID" in env
        return "torchrun" if started_by_torchrun else "environment", TORCHRUN
    if "OMPI_COMM_WORLD_RANK" in env:  # before SLURM: mpirun may run under it
        return "mpirun", MPIRUN
    # A batch script's own process has SLURM_PROCID=0 too, but no step.
    if "SLURM_PROCID" in env and "SLURM_STEP_ID" in env:
        return "srun", SRUN
    env.update(RANK="0", WORLD_SIZE="1")
    return "python", TORCHRUN


def read_number(name, default=""):
    """Return a variable as a number. SLURM writes 4(x2) for 4 tasks on 2 nodes."""
    text = os.environ.get(name, str(default))
    match = re.fullmatch(r"(\d+)(\(x\d+\))?", text)
    if not match or (match[2] and not name.endswith("PER_NODE")):
        raise UsageError(f"{name}={text!r} is not a number: start with torchrun")
    return int(match[1])


def find_master(one_machine):
    """Return the address of rank 0's machine."""
    nodes = os.environ.get("SLURM_STEP_NODELIST", "")
    if one_machine:
        return "127.0.0.1"
    if nodes:  # r[1-2,4]n7,... -> r1n7
        first = re.match(r"([^\[,]|\[[^\]]*\])+", nodes)[0]
        return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first)
    raise UsageError(
        "MASTER_ADDR is not set: export the name of rank 0's machine "
        "(mpirun -x MASTER_ADDR=...), or start with torchrun"
    )


def choose_device(name, launcher, local_rank, local_world_size):
    """Give each rank its own GPU, or the CPU; all ranks of a machine do the same.

    Raises: UsageError if `cuda` is asked for and there are fewer GPUs than ranks.
    """
    gpus = torch.cuda.device_count()
    # With --gpus-per-task=1, srun shows each task its own GPU as number 0.
    own_gpu = launcher == "srun" and os.environ.get("SLURM_GPUS_PER_TASK") == "1"
    needed = 1 if own_gpu else local_world_size
    if name == "cuda" and gpus < needed:
        raise UsageError(
            f"--device cuda: {needed} ranks on this machine but {gpus} GPUs: start "
            "fewer ranks, or use --device cpu"
        )
    if name == "cpu" or gpus < needed:
        # Some libraries would take a GPU unasked: FSDP's mesh is one.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return torch.device("cpu")
    device = torch.device("cuda", 0 if own_gpu and gpus == 1 else local_rank)
    torch.cuda.set_device(device)
    # float32 means float32. TF32 rounds to 10 bits, and the error would depend on
    # the layout.
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    return device


def default_precision(device):
    """Return bf16-mixed on a GPU with bfloat16 units, else 32-true."""
    gpu = device.type == "cuda"
    has_bf16 = gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16-mixed" if has_bf16 else "32-true"


def seed_everything(seed, rank=0):
    """Seed Python, NumPy and PyTorch.

    Data-parallel ranks pass their rank, so that dropout draws other masks on each;
    ranks that hold parts of the same layer (tensor parallelism) pass the same number.
    """
    number = seed + 1_000_003 * rank
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def rng_state():
    """Return this rank's random state."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def set_rng_state(state):
    """Restore what `rng_state` returned."""
    python, numpy, cpu, cuda = state
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if cuda is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(cuda)


def gather(value, group=None):
    """Return every rank's value on every rank, in the order of ranks. A collective."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def from_rank0(value, group=None):
    """Return rank 0's value on every rank. A collective."""
    box = [value]
    dist.broadcast_object_list(box, src=0, group=group)
    return box[0]


def sync_buffers(model):
    """Give every rank rank 0's buffers, such as BatchNorm's running means.

    Each rank updates them with its own samples, so an evaluation would mix models.
    """
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
