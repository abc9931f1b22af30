"""How tests start ranks: as forks of this process (fast), or as a reader would, with
torchrun.

A fork inherits the imported torch, so two ranks cost 0.2 s where a torchrun launch
costs 5 to 9 s. Whatever starts a process here also ends it: by its own pid, at a
deadline.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from site_browser import at, browser, built, tab  # noqa: F401  fixtures
from torch.utils._pytree import tree_leaves

from dist_common import cli, ranks

REPO = Path(__file__).resolve().parent.parent
# A script finds the helper files of its folder there; their names are unique in the
# repository.
sys.path += [
    str(folder)
    for folder in [*sorted(REPO.glob("0*-*")), REPO / "cluster", REPO / "benchmarks"]
]
os.environ["OMP_NUM_THREADS"] = "1"  # ranks share the cores
# With it print writes a line's end apart from the line, and another rank's line comes
# between.
os.environ.pop("PYTHONUNBUFFERED", None)
# Pages show the CPU's output, and CUDA survives no fork: a test that wants GPUs starts
# a command with CUDA_VISIBLE_DEVICES=GPUS.
_listed = shutil.which("nvidia-smi") and subprocess.run(
    ["nvidia-smi", "-L"], capture_output=True
)
GPUS = (
    ",".join(str(number) for number in range(_listed.stdout.count(b"GPU ")))
    if _listed
    else ""
)
os.environ["CUDA_VISIBLE_DEVICES"] = ""
torch.set_num_threads(1)
# A test decides what its processes see of a launcher, not the shell that started
# pytest.
LAUNCHER_VARIABLES = re.compile(
    r"(RANK|LOCAL_RANK|WORLD_SIZE|MASTER_|SLURM_|OMPI_|TORCHELASTIC)"
)
for name in [name for name in os.environ if LAUNCHER_VARIABLES.match(name)]:
    del os.environ[name]

PYTEST_PID = os.getpid()
PYTEST_STARTED = psutil.Process().create_time()
MARK = "DISTRIBUTED_TRAINING_GUIDE_TEST"  # in the environment of all that a test starts
os.environ[MARK] = f"{PYTEST_PID} {time.time()}"
TEST_DEADLINE_S = (
    1200  # of one test, for a hang: the longest takes two minutes when quiet
)
HANG_S = 300  # of one launch: ten times what the slowest takes on a quiet machine
run_backward = torch.autograd._engine_run_backward


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Any:
    """Freeze the collected objects, so that no test searches them for garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


# Labs, the site and the programs: `make test` leaves their tests to `make test-all`.
NOT_LESSONS = ("lab", "site", "benchmarks", "cluster", "planner")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of everything that is not a lesson as full."""
    for item in items:
        if item.path.name.removeprefix("test_").startswith(NOT_LESSONS):
            item.add_marker(pytest.mark.full)


def pytest_collection_finish() -> None:
    """Import in each worker what every fork would import otherwise."""
    for name in ("sklearn.datasets", "torchvision.datasets", "matplotlib.pyplot"):
        importlib.import_module(name)


def run_backward_in_forks(*args: Any, **kwargs: Any) -> Any:
    """Refuse a backward pass in pytest's own process: later forks could not run one.

    Which tests come after it differs from run to run, so the test that is wrong has to
    say so.
    """
    if os.getpid() == PYTEST_PID:
        raise RuntimeError(
            "a backward pass in pytest's own process: run it by in_a_fork"
        )
    return run_backward(*args, **kwargs)


torch.autograd._engine_run_backward = run_backward_in_forks


def take_contiguous_tensors_only(name: str) -> None:
    """Have a call of torch.distributed refuse what NCCL refuses, and gloo takes."""
    call = getattr(dist, name)

    @functools.wraps(call)
    def checked(*args: Any, **kwargs: Any) -> Any:
        tensors = [
            leaf
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        ]
        if not all(tensor.is_contiguous() for tensor in tensors):
            raise ValueError(f"{name}: on NCCL tensors must be contiguous")
        return call(*args, **kwargs)

    checked.__code__ = checked.__code__.replace(
        co_name=name
    )  # stacks are read by tests too
    setattr(dist, name, checked)
    setattr(dist.distributed_c10d, name, checked)  # P2POp reads it there


for call in (
    "all_reduce",
    "broadcast",
    "reduce",
    "send",
    "recv",
    "isend",
    "irecv",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "all_to_all",
    "gather",
    "scatter",
    "reduce_scatter",
):
    take_contiguous_tensors_only(call)


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


@functools.cache
def keeper_of_stores() -> socket.socket:
    """Start a process that keeps the ranks' stores, as torchrun's agent does; return
    its line.

    It has to be a process of its own: it outlives every rank, and a store cannot be
    forked. One for all tests, as each fork of this process costs 40 ms; and no child,
    which tests look for.
    """
    ours, its = socket.socketpair()
    if child := os.fork():
        os.waitpid(child, 0)
        its.close()
        return ours
    try:
        ours.close()
        if os.fork() == 0:
            signal.signal(
                signal.SIGINT, signal.SIG_IGN
            )  # ends with pytest, which Ctrl-C ends
            let_go_of_all_files_but(its.fileno())
            store = None
            while its.recv(1):  # until pytest has ended
                store = None  # the one before
                store = dist.TCPStore(
                    "127.0.0.1", 0, is_master=True, wait_for_workers=False
                )
                its.send(str(store.port).encode())
    finally:
        os._exit(0)


def let_go_of_all_files_but(kept: int) -> None:
    """Close the files that a fork has inherited: whoever reads one of their pipes would
    wait for this fork.
    """
    for number in range(3):  # later files must not get these numbers
        os.dup2(os.open(os.devnull, os.O_RDWR), number)
    for number in map(int, os.listdir("/dev/fd")):
        if number > 2 and number != kept:
            with contextlib.suppress(OSError):  # the listing's own descriptor
                os.close(number)


def new_store() -> int:
    """Return the port of an empty store; the earlier store ends."""
    keeper = keeper_of_stores()
    keeper.send(b"+")
    return int(keeper.recv(8))


def load_script(path: str) -> ModuleType:
    """Import a script of the repository by its path. Folder names like 02-fsdp cannot
    be imported.
    """
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
    during: Callable[[list[int]], None] = lambda pids: None,
) -> Ended:
    """Run body(rank) in forks; a rank that hangs fails the test, with the place where
    it hangs.

    With end_job_on_failure the first failure ends the other ranks by SIGTERM 0.3 s
    later, as launchers do: their codes are then -SIGTERM or their own, whichever comes
    first.
    """
    started, before = time.monotonic(), os.times()
    grace_s = 0.3 if end_job_on_failure else None
    ended = ranks.fork(body, world_size, folder, timeout_s, grace_s, during)
    late = [number for number, rank in enumerate(ended) if rank.code is None]
    if late:
        # faulthandler ends with the names of all extension modules: the stacks stand
        # before them.
        stacks = [
            re.sub(r"\n\s*Extension modules: .*", "", ended[n].err, flags=re.S)
            for n in late
        ]
        # The innermost call comes first.
        said = "".join(text[text.rfind("Current thread") :][:2000] for text in stacks)
        now = os.times()
        computed_s = sum(now[2:4]) - sum(
            before[2:4]
        )  # of children: a hang takes none, load does
        all_took = f"all ranks together computed for {computed_s:.0f} s"
        pytest.fail(f"ranks {late} hung for {timeout_s} s; {all_took}: {said}")
    return Ended(
        [rank.code for rank in ended],
        "".join(rank.out for rank in ended),
        "".join(rank.err for rank in ended),
        time.monotonic() - started,
        [rank.value for rank in ended],
    )


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
    """Call function(rank, world_size, *args) on N gloo ranks; return what each
    returned.
    """

    def run(
        function: Callable, world_size: int, *args: Any, timeout_s: float = HANG_S
    ) -> list[Any]:
        folder = tmp_path / f"ranks-{time.monotonic_ns()}"

        def body(rank: int) -> Any:
            store = dist.FileStore(str(folder / "store"), world_size)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world_size
            )
            # A rank that ends at once would disturb how gloo connects the others.
            dist.barrier()
            value = function(rank, world_size, *args)
            dist.destroy_process_group()
            return value

        ended = fork_ranks(body, world_size, folder, timeout_s, end_job_on_failure=True)
        assert not any(ended.codes), ended.stderr
        return ended.returned

    return run


@pytest.fixture
def in_a_fork(on_ranks: Callable) -> Callable[[Callable[[], Any]], Any]:
    """Call function() in a process of its own, as a backward pass has to be; return its
    value.
    """
    return lambda function: on_ranks(lambda rank, world_size: function(), 1)[0]


def timeouts_of_groups() -> set[float]:
    """Return the timeouts, in s, of all of this process's groups that gloo serves."""
    made = dist.distributed_c10d._world.pg_map
    groups = [group._get_backend(torch.device("cpu")) for group in made]
    return {
        group.options._timeout.total_seconds()
        for group in groups
        if group.name() == "gloo"
    }


def check_timeouts_before(destroy: Callable) -> Callable:
    """Return a destroy_process_group that fails if a group has not got the script's
    --timeout.

    A script without runtime.init has no --timeout.
    """

    def destroy_all() -> None:
        default_s = dist.constants.default_pg_timeout.total_seconds()
        current_s = dist.distributed_c10d.default_pg_timeout.total_seconds()
        assert current_s == default_s or default_s not in timeouts_of_groups(), (
            "a group without it"
        )
        destroy()

    return destroy_all


@pytest.fixture
def run_script(tmp_path: Path) -> Callable[..., Ended]:
    """Run a script's main on N forked ranks, with the environment that torchrun would
    set.

    `before(script)` runs in each rank first: it can break the script in order to see a
    check fail. `environ` replaces RANK and so on; None in it unsets a variable.
    """

    def run(
        path: str,
        *argv: str,
        world_size: int = 1,
        before: Callable[[ModuleType], None] | None = None,
        during: Callable[[list[int]], None] = lambda pids: None,
        environ: Callable[[int], dict[str, str]] | dict[str, str] | None = None,
        timeout_s: float = HANG_S,
        end_job_on_failure: bool = True,
    ) -> Ended:
        script = load_script(path)
        port = new_store()

        def body(rank: int) -> None:
            launched = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": world_size,
                "LOCAL_WORLD_SIZE": world_size,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RUN_ID": "test",
            }
            variables = environ(rank) if callable(environ) else environ
            os.environ.update(
                {
                    k: str(v)
                    for k, v in (launched if variables is None else variables).items()
                }
            )
            sys.argv = [path, *map(str, argv)]
            if before:
                before(script)
            dist.destroy_process_group = check_timeouts_before(
                dist.destroy_process_group
            )
            getattr(script, "cli", cli).run(script.main)

        folder = tmp_path / f"launch-{time.monotonic_ns()}"
        return fork_ranks(
            body, world_size, folder, timeout_s, end_job_on_failure, during
        )

    return run


def find_leftovers() -> list[psutil.Process]:
    """Return what commands of this process's tests have started and left running.

    A mark in the environment identifies them: torchrun puts each rank into its own
    session, and a process that outlives its parent has left the tree of processes.
    """
    leftovers = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # another user's, or ended by now
            if (
                process.create_time() < PYTEST_STARTED
            ):  # spares reading most environments
                continue
            marked = process.environ().get(MARK) == os.environ[MARK]
            if marked and "resource_tracker" not in " ".join(process.cmdline()):
                leftovers.append(process)
    return leftovers


def end_what_was_started() -> None:
    """Kill the processes that a test has left: they would slow down later tests.

    Repeat until nothing is left: a new process may not be listed yet, and a killed
    process takes a moment to end.
    """
    deadline = time.monotonic() + 30
    while (left := find_leftovers()) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.05)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    end_what_was_started()
    left = [name for name in os.environ if LAUNCHER_VARIABLES.match(name)]
    for name in left:
        del os.environ[name]
    assert not left, (
        f"it leaves {left}, which ranks of later tests would take for a launcher's"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    """Fail a test that hangs outside of ranks and commands, which have deadlines of
    their own.
    """

    def give_up(*_: Any) -> None:
        pytest.fail(f"ran longer than {TEST_DEADLINE_S} s")

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(TEST_DEADLINE_S)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        if (
            signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        ):  # every fork after it would have it
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            pytest.fail("it leaves pytest's own process a handler of SIGTERM")


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
    started, late = time.monotonic(), False
    # Files: a pipe would be read until the last process that holds it has ended.
    with (
        tempfile.TemporaryFile("w+", errors="replace") as out,
        tempfile.TemporaryFile("w+", errors="replace") as err,
    ):
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env={**os.environ, "PATH": tools, **environ},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            if during:
                during(process.pid)
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            if process.poll() is None:
                end_what_was_started()
                process.wait()
        for file in (out, err):
            file.seek(0)
        stdout, stderr = out.read(), err.read()
    if late:
        printed = f"{stdout[-1000:]} {stderr[-1000:]}"
        pytest.fail(f"{command} ran longer than {timeout_s} s: {printed}")
    return Ended([process.returncode], stdout, stderr, time.monotonic() - started, [])


def compiled(op: str) -> bool:
    """Say whether DeepSpeed's op was compiled for this environment."""
    cache = Path(
        os.environ.get("TORCH_EXTENSIONS_DIR", Path.home() / ".cache/torch_extensions")
    )
    folders = [
        folder for folder in cache.glob(f"**/{op}") if (folder / f"{op}.so").exists()
    ]
    return any(
        f" {sys.prefix}/" in (folder / "build.ninja").read_text() for folder in folders
    )


@pytest.fixture
def torchrun(tmp_path: Path) -> Callable[..., Ended]:
    """Launch a script of the repository with torchrun on N processes."""

    def run(
        path: str, *argv: str, world_size: int = 2, timeout_s: float = HANG_S
    ) -> Ended:
        command = ["torchrun", "--standalone", f"--nproc-per-node={world_size}"]
        return run_command(
            [*command, str(REPO / path), *map(str, argv)], tmp_path, timeout_s
        )

    return run
