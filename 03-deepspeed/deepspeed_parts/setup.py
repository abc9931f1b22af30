"""How these scripts start DeepSpeed: its flags, its import, its compiled ops.

Nothing here is a lesson: `deepspeed.initialize` stands in the scripts.
"""

import atexit
import contextlib
import importlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings
import zlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from legacy_common import runtime
from legacy_common.cli import UsageError
from legacy_common.report import Report

ADAMS = {"adam", "adamw"}


def prepare(device: torch.device) -> None:
    """Make `import deepspeed` fit the device, and be quiet and quick; call it before that import.

    DeepSpeed takes GPUs where it finds any, warns at length, and at its start compiles an
    all-reduce for ranks of one machine: a minute, for what training never calls. It has torch load
    its compiler, which takes seconds, for Muon, an optimizer that no config here may name. Its own
    log level is the config's `log_level`, or error; set PYTHONWARNINGS to see Python's warnings.
    """
    os.environ["DS_ACCELERATOR"] = device.type
    if device.index is not None:  # DeepSpeed sets the device by it; srun may show each rank one GPU
        os.environ["LOCAL_RANK"] = str(device.index)
    if device.type == "cpu":  # without it, DeepSpeed starts numactl for each gradient of stage 3
        os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
    here = str(Path(sys.executable).parent)  # ninja, which a compiled op needs, is there
    if here not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join((here, os.environ["PATH"]))
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    # An op is compiled against the headers of one environment.
    version = f"torch{torch.__version__}-{zlib.crc32(sys.prefix.encode()):08x}"
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(cache / "deepspeed-ops" / version))
    if "PYTHONWARNINGS" not in os.environ:
        for kind in (FutureWarning, DeprecationWarning, UserWarning):
            warnings.filterwarnings("ignore", category=kind, module=r"(deepspeed|torch)\b")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)

    import deepspeed

    deepspeed.logger.setLevel(logging.ERROR)
    vars(deepspeed.ops)["__compatible_ops__"] = {}  # the table it asks whether to compile at start
    with mock.patch("torch.compile", lambda function: function):
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    if dist.is_initialized():
        deepspeed.init_distributed()


def ops_needed(config: dict) -> list[str]:
    """Name the compiled ops that a config makes DeepSpeed load, by its own names."""
    zero = config.get("zero_optimization", {})
    optimizer = config.get("optimizer", {})
    offload = [zero.get(name) or {} for name in ("offload_optimizer", "offload_param")]
    targets = [part.get("device", "none") for part in offload]
    ops = ["async_io"] if "nvme" in targets else []
    adam = str(optimizer.get("type")).lower() in ADAMS
    if adam and not optimizer.get("params", {}).get("torch_adam"):
        ops.append("fused_adam" if targets[0] == "none" else "cpu_adam")
    return ops


def op_library(name: str) -> Path:
    """Return where the compiled op lies once it is built. Call `prepare` first."""
    return Path(os.environ["TORCH_EXTENSIONS_DIR"], name, f"{name}.so")


def build_ops(names: list[str], report: Report) -> None:
    """Compile DeepSpeed's ops unless the cache has them; one rank of each machine.

    Call it on all ranks. Even of what it finds in the cache, DeepSpeed asks for compiler and
    library anew; and after an update of its own, ninja compiles again.
    Raises: UsageError, with what to install, when a compiler or a library is missing.
    """
    store = dist.group.WORLD.get_group_store()
    world = report.world
    for name in names:
        built = f"legacy_common/{name}/{world.rank - world.local_rank}"  # on this machine
        if world.local_rank == 0:
            _build(name, report)
            store.set(built, "yes")
        # Not a barrier, which would wait no longer than a collective does: --timeout.
        store.wait([built], timedelta(hours=2))


def missing_for(name: str) -> str | None:
    """Say what this machine lacks to compile or load an op, and how to get it; None if nothing."""
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        lack = f"is compiled on first use, and the compiler {compiler} is missing"
        cure = "install g++ (Debian, Ubuntu), gcc-c++ (Red Hat) or name one in CXX"
        return f"DeepSpeed's op {name} {lack}: {cure}"
    with _descriptors_to_nowhere():
        if ALL_OPS[name].is_compatible(verbose=False):
            return None
    why = ALL_OPS[name].error_log or "see ds_report"
    if name == "async_io":
        why = "install libaio-dev (Debian, Ubuntu) or libaio-devel (Red Hat)"
    return f"DeepSpeed's op {name} cannot be compiled here: {why}"


def fall_back(config: dict, report: Report) -> None:
    """Have PyTorch's Adam take the steps where DeepSpeed's cannot be compiled. A collective."""
    params = config["optimizer"].setdefault("params", {})
    for op in ops_needed(config):
        if op.endswith("_adam") and "bias_correction" not in params:  # which PyTorch's has not
            lacks = runtime.gather(missing_for(op))  # all ranks take the same Adam
            if lack := next(filter(None, lacks), None):
                params["torch_adam"] = True
                report.say(f"{lack}; until then PyTorch's Adam takes the steps")


def _build(name: str, report: Report) -> None:
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    if lack := missing_for(name):
        raise UsageError(lack)
    told = f"compiling DeepSpeed's {name}, for minutes, once: into {op_library(name).parent}"
    slow = threading.Timer(5, report.say, [told])  # seconds: loading a compiled one takes less
    slow.start()
    try:
        ALL_OPS[name].load(verbose=False)
    except Exception as error:
        lines = [line for line in str(error).splitlines() if "error" in line.lower()]
        why = (lines or [error])[0]
        raise UsageError(f"compiling DeepSpeed's op {name} failed: {why}") from error
    finally:
        slow.cancel()


@contextlib.contextmanager
def _descriptors_to_nowhere() -> Iterator[None]:
    """Silence what compilers that try things out print to descriptors 1 and 2 themselves."""
    streams = (sys.stdout, sys.stderr)
    kept = [os.dup(1), os.dup(2)]
    with open(os.devnull, "w") as nowhere:
        for number, stream in enumerate(streams, 1):
            stream.flush()
            os.dup2(nowhere.fileno(), number)
        try:
            yield
        finally:
            for number, (stream, old) in enumerate(zip(streams, kept, strict=True), 1):
                stream.flush()
                os.dup2(old, number)
                os.close(old)


def make_swap_folders(offloads: list[dict]) -> None:
    """Put a folder of this rank's own in place of each nvme_path; it goes when the rank does.

    Even if that is killed; not where the whole job is killed at one blow, as SLURM may do after a
    time limit.
    """
    swaps = [part for part in offloads if part.get("device") == "nvme"]
    for parent in {part["nvme_path"] for part in swaps}:
        folder = tempfile.mkdtemp(prefix="zero-", dir=parent)
        # Its input ends with this process. DeepSpeed itself removes nothing.
        sweeper = subprocess.Popen(
            ["sh", "-c", 'cat; rm -rf -- "$0"', folder], stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        atexit.register(sweeper.communicate)
        for part in swaps:
            if part["nvme_path"] == parent:
                part["nvme_path"] = folder
