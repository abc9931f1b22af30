"""Start the same four-line job in six ways, and show which variables each way gives a process.

    CPU   python 01-ddp-basics/launchers.py
    GPU   the same: the job adds up rank numbers, which needs no GPU

It starts the processes itself. Look for: the same sum each time, from quite different variables.

Sources: docs.pytorch.org, torchrun (Elastic Launch) and torch.multiprocessing; srun(1), output
environment variables; Open MPI documentation, environment variables that mpirun sets.
"""

import argparse
import json
import os
import re
import socket
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dist_common import ranks
from legacy_common import cli, runtime
from legacy_common.report import Report

WAYS = ("python", "mp.spawn", "torchrun", "torchrun on each node", "as srun does", "as mpirun does")
PLACES = re.compile(r"(LOCAL_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_\w+|SLURM_\w+|OMPI_\w+")
GRACE_S = 1.0  # after one process failed, until the others are told to end


def job():
    """Join the group, add up the numbers of all ranks, leave: the same under each launcher."""
    variables = {name: value for name, value in os.environ.items() if PLACES.fullmatch(name)}

    runtime.discover()  # whatever the launcher calls them: from here on RANK, WORLD_SIZE, ...
    dist.init_process_group("gloo")
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)

    dist.destroy_process_group()
    answer = {"rank": int(os.environ["RANK"]), "variables": variables, "sum": int(total)}
    print(f"{json.dumps(answer)}\n", end="", flush=True)  # one write: ranks share a file


def spawned(rank, world_size, port):
    """Do what mp.spawn leaves to its caller: it passes the rank as an argument, and no more."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    job()


def processes_of(way, world_size):
    """Return the processes to start for one way: (arguments of Python, variables to set).

    Without arguments the process is the job itself, as a scheduler would start it.
    """
    here = str(Path(__file__).resolve())
    torchrun = ["-m", "torch.distributed.run"]
    if way == "python":
        return [([], {})]
    if way == "mp.spawn":
        return [([here, "--role", "spawn", "--nproc-per-node", str(world_size)], {})]
    if way == "torchrun":
        one_machine = ["--standalone", f"--nproc-per-node={world_size}"]
        return [([*torchrun, *one_machine, here, "--role", "job"], {})]
    if way == "torchrun on each node":  # here each node is this machine, under another torchrun
        nodes = [f"--nnodes={world_size}", "--nproc-per-node=1", "--rdzv-backend=c10d"]
        nodes += [f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--local-addr=127.0.0.1"]
        return [([*torchrun, *nodes, here, "--role", "job"], {})] * world_size
    # SLURM and Open MPI need not be installed: these are the variables that they would set.
    names = {
        "as srun does": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_JOB_ID"),
        "as mpirun does": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
                           "OMPI_COMM_WORLD_SIZE", "OMPI_MCA_ess_base_jobid"),
    }[way]  # fmt: skip
    places = [(rank, rank, world_size, os.getpid()) for rank in range(world_size)]
    return [([], dict(zip(names, map(str, place), strict=True))) for place in places]


def start(way, world_size, timeout_s):
    """Run the job in one way; return what each rank answered, by rank."""
    processes = processes_of(way, world_size)

    def become(number):
        arguments, variables = processes[number]
        for name in [n for n in os.environ if PLACES.fullmatch(n) or n.startswith("TORCHELASTIC")]:
            del os.environ[name]  # what started this script is not what starts the job
        os.environ.update(variables, OMP_NUM_THREADS="1")
        if arguments:
            os.execv(sys.executable, [sys.executable, *arguments])
        job()

    with tempfile.TemporaryDirectory() as folder:
        ended = ranks.fork(become, len(processes), Path(folder), timeout_s, GRACE_S)
    failed = [process for process in ended if process.code != 0]
    if failed:
        raise RuntimeError(
            f"the job failed when started by {way}: {failed[0].ended}: {failed[0].err[-500:]}"
        )
    lines = [line for process in ended for line in process.out.splitlines() if line[:1] == "{"]
    return sorted(map(json.loads, lines), key=lambda answer: answer["rank"])


def as_text(variables):
    """Write variables as NAME=value; addresses and job numbers, which change, by name alone."""
    changing = re.compile(r"MASTER_\w+|SLURM_JOB_ID|OMPI_MCA_\w+")
    words = [
        name if changing.match(name) else f"{name}={value}" for name, value in variables.items()
    ]
    return " ".join(sorted(words)) or "nothing"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    parser.add_argument(
        "--nproc-per-node", type=cli.positive_int, default=2, help="processes of each way (2)"
    )
    parser.add_argument("--role", choices=("job", "spawn"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    args = parse_args()
    if args.role == "job":
        job()
        return 0
    if args.role == "spawn":
        # The function has to be at the top of a module: each process imports this file anew.
        mp.spawn(spawned, args=(args.nproc_per_node, free_port()), nprocs=args.nproc_per_node)
        return 0

    world = runtime.discover()
    if not world.is_rank0:
        return 0  # started by a launcher itself: one process is enough to start all others
    report = Report("01-ddp-basics/launchers.py", args, world, torch.device("cpu"))
    report.start()
    rows = []
    for way in report.progress(WAYS, "starting"):
        world_size = 1 if way == "python" else args.nproc_per_node
        last = start(way, world_size, args.timeout)[-1]
        by_hand = "set by hand: " * (way == "mp.spawn")
        rows.append((way, str(world_size), str(last["sum"]), by_hand + as_text(last["variables"])))
        name, source = f"{way}: sum of the ranks", "0 + 1 + ... + (N - 1)"
        report.check(name, last["sum"], world_size * (world_size - 1) // 2, 0, source)
    report.say("what the last rank finds in its environment:")
    report.table(rows, ("started", "ranks", "sum", "variables"), names=4)
    return report.finish(f"one job, {len(WAYS)} ways to start it")


if __name__ == "__main__":
    cli.run(main)
