"""Start one small job in five ways, and show the variables that each way sets.

    CPU   python 01-ddp-basics/launchers.py
    GPU   the same: the job adds up rank numbers, which needs no GPU

The script starts all processes itself. SLURM and Open MPI need not be installed: for
them it sets the variables that srun and mpirun would set. Look for: the same sum each
time, from different variables.

Sources: docs.pytorch.org, torchrun (Elastic Launch); srun(1), output environment
variables; Open MPI documentation, environment variables.
"""

import json
import os
import re
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from dist_common import cli, ranks, runtime
from dist_common.report import Report

WAYS = ("python", "torchrun", "torchrun on each node", "as srun", "as mpirun")
SET_BY_LAUNCHERS = re.compile(
    r"(GROUP_|LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_\w+|OMPI_COMM_\w+"
    r"|SLURM_(PROCID|LOCALID|NTASKS|STEP_\w+)"
)


def run_job():
    """Join the group, add up the ranks' numbers, print rank, sum and variables."""
    names = filter(SET_BY_LAUNCHERS.fullmatch, os.environ)
    variables = {name: os.environ[name] for name in names}
    runtime.find_ranks()  # sets RANK, WORLD_SIZE, MASTER_ADDR, ... for all launchers
    dist.init_process_group("gloo")
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    line = json.dumps([dist.get_rank(), total.item(), variables])
    print(f"{line}\n", end="", flush=True)  # one write: ranks share a file
    dist.destroy_process_group()


def find_variables(way, rank, n, port):
    """Return the variables that srun, or Open MPI's mpirun, sets for a rank."""
    if way == "as srun":
        return {
            "SLURM_PROCID": rank,
            "SLURM_LOCALID": rank,
            "SLURM_NTASKS": n,
            "SLURM_STEP_TASKS_PER_NODE": n,
            "SLURM_STEP_ID": 0,
            "SLURM_JOB_ID": port,
        }
    return {
        "OMPI_COMM_WORLD_RANK": rank,
        "OMPI_COMM_WORLD_LOCAL_RANK": rank,
        "OMPI_COMM_WORLD_SIZE": n,
        "OMPI_COMM_WORLD_LOCAL_SIZE": n,
        "MASTER_PORT": port,  # of the caller: mpirun -x MASTER_PORT
    }


def start(way, n, timeout_s):
    """Start the job in one way; return the last rank's sum and variables."""
    port = 29500 + os.getpid() % 1000
    command = None  # the process is the job itself
    num_processes = n
    if way.startswith("torchrun"):
        command = [sys.executable, "-m", "torch.distributed.run"]
        nodes = n if way == "torchrun on each node" else 1  # all are this machine
        num_processes = nodes
        command += [f"--nnodes={nodes}", f"--nproc-per-node={n // nodes}"]
        command += ["--master-addr=127.0.0.1", f"--master-port={port}"]

    def run_process(number):
        for name in filter(SET_BY_LAUNCHERS.fullmatch, list(os.environ)):
            del os.environ[name]  # set by the launcher of this script
        if command:
            words = [*command, f"--node-rank={number}", __file__]
            os.execv(sys.executable, words)
        if way != "python":
            variables = find_variables(way, number, n, port)
            os.environ.update({name: str(v) for name, v in variables.items()})
        run_job()

    with tempfile.TemporaryDirectory() as folder:
        ended = ranks.fork(run_process, num_processes, Path(folder), timeout_s, 1.0)
    lines = "".join(process.out for process in ended).splitlines()
    if len(lines) != n:
        errors = "".join(process.err for process in ended)
        raise RuntimeError(f"{way}: {len(lines)} of {n} ranks answered: {errors}")
    _, total, variables = max(map(json.loads, lines), key=lambda answer: answer[0])
    return total, variables


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    parser.add_argument(
        "--nproc-per-node", type=cli.positive_int, default=2, help="ranks (2)"
    )
    return parser.parse_args()


def main():
    if "TORCHELASTIC_RUN_ID" in os.environ:  # started by a torchrun of `start`
        run_job()
        return 0
    args = parse_args()
    sizes = {way: 1 if way == "python" else args.nproc_per_node for way in WAYS}
    # Before this process joins a group: a fork would inherit the group.
    answers = [start(way, n, args.timeout) for way, n in sizes.items()]
    with runtime.init(args.device, args.timeout) as run:
        report = Report("01-ddp-basics/launchers.py", args, run)
        run.print0("variables of the last rank:")
        for (way, n), (total, variables) in zip(sizes.items(), answers, strict=True):
            words = sorted(f"{name}={value}" for name, value in variables.items())
            run.print0(f"  {way}: {' '.join(words) or 'nothing'}")
            report.check(f"{way}: sum of the ranks", total, n * (n - 1) // 2, 0)
        return report.finish(f"one job, {len(WAYS)} ways to start it")


if __name__ == "__main__":
    cli.run(main)
