"""How tests start ranks: as forks of this process (fast), or as a reader would, with torchrun.

A fork inherits the imported torch, so two ranks cost 0.2 s where a torchrun launch costs 5 to 9 s.
Whatever starts a process here also ends it: by its own pid, at a deadline.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import io
import json
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import sklearn.datasets  # noqa: F401  imported here so that no fork has to
import torch
import torch._dynamo
import torch.distributed as dist
import torchvision.datasets  # noqa: F401
from matplotlib import pyplot  # noqa: F401

REPO = Path(__file__).resolve().parent.parent
os.environ["OMP_NUM_THREADS"] = "1"  # ranks share the cores
# Pages show the CPU's output, and CUDA survives no fork: a test that wants GPUs starts a command
# with CUDA_VISIBLE_DEVICES=GPUS.
_listed = shutil.which("nvidia-smi") and subprocess.run(["nvidia-smi", "-L"], capture_output=True)
GPUS = ",".join(str(number) for number in range(_listed.stdout.count(b"GPU "))) if _listed else ""
os.environ["CUDA_VISIBLE_DEVICES"] = ""
torch.set_num_threads(1)
# A test decides what its processes see of a launcher, not the shell that started pytest.
LAUNCHER_VARIABLES = re.compile(r"(RANK|LOCAL_RANK|WORLD_SIZE|MASTER_|SLURM_|OMPI_|TORCHELASTIC)")
for name in [name for name in os.environ if LAUNCHER_VARIABLES.match(name)]:
    del os.environ[name]


@dataclass
class Ended:
    """How a launch ended. Codes are indexed by rank; torchrun has one code for all."""

    codes: list[int]
    stdout: str
    stderr: str
    seconds: float
    returned: list[Any]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_store() -> tuple[int, int]:
    """Start a process that holds the ranks' store, as torchrun's agent does; return pid and port.

    It has to be a process of its own: it outlives every rank, and a store cannot be forked.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writer, str(store.port).encode())
        while os.getppid() != 1:  # until it is ended, or pytest was
            time.sleep(0.5)
        os._exit(0)
    os.close(writer)
    port = int(os.read(reader, 8))
    os.close(reader)
    return pid, port


def load_script(path: str) -> ModuleType:
    """Import a script of the repository by its path; the folder names are no module names."""
    name = re.sub(r"\W", "_", path)
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, REPO / path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]


def fork_ranks(
    body: Callable[[int], Any],
    world_size: int,
    folder: Path,
    timeout_s: float,
    end_job_on_failure: bool,
    during: Callable[[list[int]], None] | None = None,
) -> Ended:
    """Run body(rank) in forks, output captured; `during` gets their pids once they run.

    With end_job_on_failure the first failure ends the other ranks by SIGTERM, as launchers do.
    """
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    pids = []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            _child(body, rank, folder)
        pids.append(pid)
    codes: dict[int, int] = {}
    ended_job = False
    try:
        if during:
            during(pids)
        while len(codes) < world_size:
            for rank, pid in enumerate(pids):
                if rank not in codes:
                    done, status = os.waitpid(pid, os.WNOHANG)
                    if done:
                        codes[rank] = os.waitstatus_to_exitcode(status)
            if time.monotonic() - started > timeout_s:
                for rank, pid in enumerate(pids):
                    if rank not in codes:
                        os.kill(pid, signal.SIGUSR1)  # have it write where it stands
                time.sleep(1)
                said = (folder / "stderr").read_text()[-4000:]
                pytest.fail(
                    f"ranks {set(range(world_size)) - set(codes)} hung {timeout_s} s: {said}"
                )
            if end_job_on_failure and any(codes.values()) and not ended_job:
                time.sleep(0.3)  # torchrun looks every 0.1 s; others may be about to end
                ended_job = True
                for rank, pid in enumerate(pids):
                    if rank not in codes:
                        os.kill(pid, signal.SIGTERM)
            time.sleep(0.005)
    finally:
        for rank, pid in enumerate(pids):
            if rank not in codes:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    returned = [
        pickle.loads(file.read_bytes()) if (file := folder / f"returned-{rank}").exists() else None
        for rank in range(world_size)
    ]
    return Ended(
        [codes[rank] for rank in range(world_size)],
        (folder / "stdout").read_text(),
        (folder / "stderr").read_text(),
        time.monotonic() - started,
        returned,
    )


def _child(body: Callable[[int], Any], rank: int, folder: Path) -> None:
    code = 1
    try:
        torch.set_num_threads(1)  # autograd's threads, which no fork has, would be asked for
        gc.freeze()  # what pytest holds is no business of this rank's, nor to be copied for it
        for number, name in ((1, "stdout"), (2, "stderr")):
            descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(descriptor, number)
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w"), write_through=True)
        sys.stderr = io.TextIOWrapper(io.FileIO(2, "w"), write_through=True)
        faulthandler.register(signal.SIGUSR1, sys.stderr)
        value = body(rank)
        (folder / f"returned-{rank}").write_bytes(pickle.dumps(value))
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # without pytest's own clean-up, which is the parent's


def results_of(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


def assert_one_line(ended: Ended, says: str, script: str = "ddp_mnist.py") -> None:
    """One line on stderr, from one rank, whose exit code is 2."""
    lines = ended.stderr.splitlines()
    assert len(lines) == 1, ended.stderr
    assert lines[0].startswith(f"{script}: error: ") and says in lines[0]
    assert 2 in ended.codes


@pytest.fixture
def on_ranks(tmp_path: Path) -> Callable[..., list[Any]]:
    """Call function(rank, world_size, *args) on N gloo ranks; return what each returned."""

    def run(function: Callable, world_size: int, *args: Any, timeout_s: float = 60) -> list[Any]:
        folder = tmp_path / f"ranks-{time.monotonic_ns()}"

        def body(rank: int) -> Any:
            store = dist.FileStore(str(folder / "store"), world_size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
            value = function(rank, world_size, *args)
            dist.destroy_process_group()
            return value

        ended = fork_ranks(body, world_size, folder, timeout_s, end_job_on_failure=True)
        assert not any(ended.codes), ended.stderr
        return ended.returned

    return run


@pytest.fixture
def run_script(tmp_path: Path) -> Callable[..., Ended]:
    """Run a script's main on N forked ranks, with the environment that torchrun would set.

    `before(script)` runs in each rank first: it can break the script in order to see a check fail.
    `environ` replaces RANK and so on; None in it unsets a variable.
    """

    def run(
        path: str,
        *argv: str,
        world_size: int = 1,
        before: Callable[[ModuleType], None] | None = None,
        during: Callable[[list[int]], None] | None = None,
        environ: Callable[[int], dict[str, str]] | dict[str, str] | None = None,
        timeout_s: float = 90,
        end_job_on_failure: bool = True,
    ) -> Ended:
        script = load_script(path)
        holder, port = start_store()

        def body(rank: int) -> None:
            launched = {
                "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size,
                "LOCAL_WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RUN_ID": "test",
            }  # fmt: skip
            own = environ(rank) if callable(environ) else environ
            os.environ.update({k: str(v) for k, v in (launched if own is None else own).items()})
            sys.argv = [path, *map(str, argv)]
            if before:
                before(script)
            sys.modules["dist_common.runtime"].run(script.main)

        folder = tmp_path / f"launch-{time.monotonic_ns()}"
        try:
            return fork_ranks(body, world_size, folder, timeout_s, end_job_on_failure, during)
        finally:
            os.kill(holder, signal.SIGKILL)
            os.waitpid(holder, 0)

    return run


def run_command(
    command: list[str],
    cwd: Path,
    timeout_s: float,
    during: Callable[[int], None] | None = None,
    **environ: str,
) -> Ended:
    """Run a command as a reader would; at the deadline end it and all that it started.

    `during` gets the command's pid while it runs.
    """
    tools = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env={**os.environ, "PATH": tools, **environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        if during:
            during(process.pid)
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        pytest.fail(f"{command} ran longer than {timeout_s} s: {stdout[-1000:]} {stderr[-1000:]}")
    return Ended([process.returncode], stdout, stderr, time.monotonic() - started, [])


def compiled(op: str) -> bool:
    """Say whether DeepSpeed's op is in the cache; asked in a process of its own."""
    asked = (
        "import sys, torch; from dist_common import zero; zero.prepare(torch.device('cpu')); "
        f"sys.exit(not zero.op_library('{op}').exists())"
    )
    return run_command(["python", "-c", asked], REPO, 60).codes == [0]


@pytest.fixture
def torchrun(tmp_path: Path) -> Callable[..., Ended]:
    """Launch a script of the repository with torchrun on N processes of this machine."""

    def run(path: str, *argv: str, world_size: int = 2, timeout_s: float = 90) -> Ended:
        command = ["torchrun", "--standalone", f"--nproc-per-node={world_size}"]
        return run_command([*command, str(REPO / path), *map(str, argv)], tmp_path, timeout_s)

    return run
