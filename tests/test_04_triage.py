"""triage.py: faults that a seed draws are found from outside; what it cannot tell it says."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from conftest import MARK, REPO, load_script
from helpers_01 import wait_for
from helpers_04 import full
from helpers_triage import BLANK

from dist_common.lab import namespaces
from nccl_parts import failure_gallery, processes
from nccl_parts import triage as part

SCRIPT = "04-nccl-operations/triage.py"
triage = load_script(SCRIPT)
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, which Linux has"),
    pytest.mark.skipif(failure_gallery.py_spy() is None, reason="needs py-spy"),
]
KINDS = ["loader", "order", "send", "stopped", "node"]
CALLS = {"loader": "wait_for_storage", "order": "all_reduce in reduce_layer",
         "send": "all_reduce in reduce_layer", "stopped": "", "node": "all_reduce"}  # fmt: skip
SECONDS = 0.7  # between two looks


@pytest.fixture(scope="module")
def starter():
    """A process that has imported torch, and starts jobs."""
    command = [sys.executable, str(REPO / "tests/helpers_triage.py")]
    environ = {name: value for name, value in os.environ.items() if name != MARK} | BLANK
    process = subprocess.Popen(
        command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def running(starter, folder: Path, seed):
    """Start a job; wait until it has broken, or trains; yield its launcher. End it afterwards."""
    folder.mkdir()
    starter.stdin.write(f"{seed} {folder}\n")
    starter.stdin.flush()
    launcher = psutil.Process(int(starter.stdout.readline()))
    try:
        yield launcher
    finally:
        for one in [*launcher.children(recursive=True), launcher]:
            with contextlib.suppress(psutil.Error):
                one.kill()


def looked_at(launcher, folder, **flags):
    """Return what triage.py finds, and the drawn fault, once it has spread."""
    wait_for(lambda: (folder / "fault.json").exists())
    time.sleep(1.5)
    return verdict(launcher, notes=str(folder / "notes"), **flags), json.loads(
        (folder / "fault.json").read_text()
    )


def verdict(launcher, **flags):
    given = {"pid": launcher.pid, "job": None, "notes": None, "seconds": SECONDS} | flags
    args = argparse.Namespace(**given)
    nodes = [part.read_node(part.select(processes.find_processes(), args), args)]
    return triage.judge(part.job_of(nodes))


@pytest.mark.parametrize("round_", [0, *(pytest.param(n, marks=full) for n in range(1, 5))])
def test_what_a_seed_draws_is_found(starter, tmp_path, round_):
    seeds = [seed for seed in range(5 * round_, 5 * round_ + 5)
             if KINDS[seed % 5] != "node" or namespaces.why_not() is None]  # fmt: skip
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(5) as pool:
        folders = [tmp_path / f"job-{seed}" for seed in seeds]
        jobs = [stack.enter_context(running(starter, folder, seed))
                for folder, seed in zip(folders, seeds, strict=True)]  # fmt: skip
        for found, fault in pool.map(looked_at, jobs, folders):
            assert (found.kind, set(found.ranks)) == (fault["kind"], {fault["rank"]}), (
                found, fault
            )  # fmt: skip
            assert CALLS[fault["kind"]] in found.call, (found, fault)
    if len(seeds) < 5:
        pytest.skip(f"a node could not be unplugged: {namespaces.why_not()}")


def test_nothing_is_wrong_with_a_job_that_trains(starter, tmp_path):
    folder = tmp_path / "job"
    with running(starter, folder, "none") as launcher:
        wait_for(lambda: part.calls_in(str(folder / "notes")) > 40)
        found = verdict(launcher)
        assert (found.kind, found.ranks) == ("training", frozenset())
        first, last = map(int, found.reason.removeprefix("step ").split(" to "))
        assert last > first, found
