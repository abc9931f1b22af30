"""Break a job on purpose, read what its ranks say, then run the cured script.

    CPU   python 04-nccl-operations/failure_gallery.py batch-skipped
    GPU   torchrun --standalone --nproc-per-node=2 \\
            04-nccl-operations/failures/batch-skipped/broken.py

Each case is a folder in failures/ with an ordinary torchrun script, broken.py, and the
same script without the mistake, cured.py. This runner starts both on ranks of this
machine's CPU. Without a name it lists the cases. Look for: which rank reports an error,
and which rank is at fault.

Source: docs.pytorch.org, "Distributed communication package", section "Debugging".
"""

import contextlib
import faulthandler
import functools
import importlib
import json
import os
import re
import runpy
import signal
import socket
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from dist_common import cli, ranks, runtime
from dist_common.report import Report

FAILURES = Path(__file__).resolve().parent / "failures"
DEADLINE_S = 15.0  # of a job: the slowest takes 5 s
GRACE_S = 3.0  # between the first failure and the end of the ranks that still run


@dataclass
class Failure:
    """A case of failures/cases.toml, which explains the fields."""

    name: str
    group: str
    symptom: str
    cause: str
    cure: str
    nccl: str
    says: str
    ends: str
    last_line: str

    def script(self, name):
        return FAILURES / self.name / name

    def result(self, n):
        """Return the last line of each of n ranks of the cured job."""
        return self.last_line.format(n=n, others=n - 1, mean=(n - 1) / 2)


TABLE = tomllib.loads((FAILURES / "cases.toml").read_text())
CASES = {name: Failure(name, **fields) for name, fields in TABLE.items()}


def run_job(
    script,
    world_size,
    folder,
    around=contextlib.nullcontext,
    during=None,
    deadline_s=DEADLINE_S,
):
    """Run a script on forked ranks with torchrun's variables; return their ends.

    Each rank runs it inside the context manager around(rank).
    """
    if "DistributedDataParallel" in script.read_text():
        importlib.import_module("torch._dynamo")  # once, instead of in each fork
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    launched = {
        "WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "CUDA_VISIBLE_DEVICES": "",
    }
    body = functools.partial(run_rank, script, folder, launched, around)
    return ranks.fork(
        body, world_size, folder / script.stem, deadline_s, GRACE_S, during, json
    )


def run_rank(script, folder, launched, around, rank):
    """Be a rank of a job: run the script as its launcher would."""
    faulthandler.disable()  # the log shall end with the rank's own words
    variables = {**launched, "RANK": rank, "LOCAL_RANK": rank}
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.chdir(folder)
    dist.set_debug_level_from_env()
    with around(rank):
        runpy.run_path(str(script), run_name="__main__")


def log_lines(rank):
    """Return the lines of a rank's log without source positions and addresses."""
    lines = []
    for line in f"{rank.out}\n{rank.err}".splitlines():
        line = re.sub(
            r"^(\[rank\d\]:)?\[[EWI]\d+ [^]]+\] |what\(\): ", "", line.strip()
        )
        line = re.sub(r"\[(enforce fail at )?/[^]]+\] ", "", line)
        line = re.sub(r"\[[\da-f.:]+\]:\d+", "PEER", line)
        line = line.split(". This is typically caused by ")[0]  # from torch 2.14 on
        if line:
            lines.append(line)
    return lines


def find_line(rank):
    """Return the last error of a rank that failed, else its last line."""
    lines = log_lines(rank) if rank.code else rank.out.splitlines()
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception):", line)]
    return (errors or lines or ["says nothing"])[-1]


def describe_end(rank):
    """Return how a rank ended; a rank that was stopped from outside hung."""
    return "hangs" if rank.code in (None, -signal.SIGTERM) else rank.ended


def print_ends(title, ended):
    print(f"\n{title}")
    for number, rank in enumerate(ended):
        print(f"  rank {number}, {describe_end(rank)}: {find_line(rank)[:170]}")


def check_ends(report, failure, broken, cured):
    """Compare both jobs with cases.toml."""
    n = len(broken)
    logs = [line for rank in broken for line in log_lines(rank)]
    said = any(re.search(failure.says, line) for line in logs)
    ends = re.fullmatch(failure.ends, ", ".join(map(describe_end, broken)))
    well = sum(rank.code == 0 for rank in cured)
    correct = sum(rank.out.splitlines()[-1:] == [failure.result(n)] for rank in cured)
    report.check("broken: a rank says the words", int(said), 1, 0)
    report.check("broken: all ranks end as described", int(bool(ends)), 1, 0)
    report.check("cured: ranks that end with exit code 0", well, n, 0)
    report.check("cured: ranks with the right result", correct, n, 0)


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    parser.add_argument(
        "name", nargs="?", choices=CASES, metavar="NAME", help="a case (all: list them)"
    )
    parser.add_argument("--ranks", type=cli.positive_int, default=2, help="(2)")
    args = parser.parse_args()
    if args.ranks < 2:
        raise cli.UsageError("--ranks must be at least 2")
    if "RANK" in os.environ:
        raise cli.UsageError("start it with python; torchrun can start each broken.py")
    return args


def main():
    args = parse_args()
    if args.name is None:
        for failure in CASES.values():
            print(f"{failure.name:22} {failure.cause}")
        return 0
    failure = CASES[args.name]
    print(f"{failure.name}: {failure.cause}")
    with tempfile.TemporaryDirectory() as folder:
        broken, cured = (
            run_job(failure.script(name), args.ranks, Path(folder))
            for name in ("broken.py", "cured.py")
        )
    print_ends("broken:", broken)
    print_ends(f"cured: {failure.cure}", cured)
    with runtime.init("cpu", args.timeout) as run:
        report = Report("04-nccl-operations/failure_gallery.py", args, run)
        check_ends(report, failure, broken, cured)
        return report.finish(f"{failure.name} was broken and cured")


if __name__ == "__main__":
    cli.run(main)
