"""How these scripts start DeepSpeed: its flags, its import, its compiled ops.

Nothing here is a lesson: `deepspeed.initialize` stands in the scripts.
"""

import argparse
import contextlib
import importlib
import logging
import os
import shutil
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from dist_common import runtime
from dist_common.cli import ArgumentParser, UsageError
from dist_common.models import Transformer
from dist_common.report import Report

PRECISIONS = {"32-true": None, "bf16-mixed": "bf16", "16-mixed": "fp16"}  # a section of the config
ADAMS = {"adam", "adamw"}
# Drawing as one process does is a job of the CPU: beyond this, of more than ten minutes.
DRAWN_AS_ONE_PROCESS = 10e9  # weights
OP_PACKAGES = {"async_io": "libaio-dev (Debian, Ubuntu) or libaio-devel (Red Hat)"}


def add_arguments(parser: ArgumentParser, default: Path) -> None:
    """Give a script the flags that name its config and what a config may leave open."""
    add = parser.add_argument
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    add("--deepspeed_config", "--deepspeed-config", type=Path, default=default, metavar="FILE",
        help=f"({default.name})")  # fmt: skip
    add("--nvme-path", type=Path, metavar="DIR", help="a folder on a fast disk, to offload to")


def given_flags(parser: argparse.ArgumentParser, words: list[str] | None = None) -> set[str]:
    """Return the names of the flags that stand on the command line, as `args` has them."""
    for action in parser._actions:  # no value is then set but by a flag
        action.default = argparse.SUPPRESS
    return set(vars(argparse.ArgumentParser.parse_args(parser, words)))


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
    ops = []
    if any(part.get("device") == "nvme" for part in offload):
        ops.append("async_io")
    adam = str(optimizer.get("type")).lower() in ADAMS
    if adam and not optimizer.get("params", {}).get("torch_adam"):
        on_cpu = offload[0].get("device", "none") != "none"
        ops.append("cpu_adam" if on_cpu else "fused_adam")
    return ops


def op_library(name: str) -> Path:
    """Return where the compiled op lies once it is built. Call `prepare` first."""
    return Path(os.environ["TORCH_EXTENSIONS_DIR"], name, f"{name}.so")


def build_ops(names: list[str], report: Report) -> None:
    """Compile DeepSpeed's ops unless the cache has them; one rank of each machine, with progress.

    Call it on all ranks. Even of what it finds in the cache, DeepSpeed asks for compiler and
    library anew; and after an update of its own, ninja compiles again.

    Raises: UsageError, with what to install, when a compiler or a library is missing.
    """
    store = dist.group.WORLD.get_group_store()
    world = report.world
    for name in names:
        built = f"dist_common/{name}/{world.rank - world.local_rank}"  # on this machine
        if world.local_rank == 0:
            _build_op(name, report)
            store.set(built, "yes")
        # Not a barrier, which would wait no longer than a collective does: --timeout.
        store.wait([built], timedelta(hours=2))


def missing_for(name: str) -> str | None:
    """Say what this machine lacks to compile or load an op, and how to get it; None if nothing."""
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        return (
            f"DeepSpeed's op {name} is compiled on first use, and the compiler {compiler} is "
            "missing: install g++ (Debian, Ubuntu), gcc-c++ (Red Hat) or name one in CXX"
        )
    builder = ALL_OPS[name]
    with _descriptors_to_nowhere():
        fits = builder.is_compatible(verbose=False)
    if fits:
        return None
    what = OP_PACKAGES.get(name)
    why = f"install {what}" if what else builder.error_log or "see ds_report"
    return f"DeepSpeed's op {name} cannot be compiled here: {why}"


def fall_back(config: dict, report: Report) -> None:
    """Have PyTorch's Adam take the steps where DeepSpeed's cannot be compiled. A collective."""
    params = config["optimizer"]["params"]
    for op in ops_needed(config):
        if op.endswith("_adam") and "bias_correction" not in params:  # which PyTorch's has not
            lacks = runtime.gather(missing_for(op))  # all ranks take the same Adam
            if lack := next(filter(None, lacks), None):
                params["torch_adam"] = True
                report.say(f"{lack}; until then PyTorch's Adam takes the steps")


def _build_op(name: str, report: Report) -> None:
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    if lack := missing_for(name):
        raise UsageError(lack)
    builder = ALL_OPS[name]
    folder, files = op_library(name).parent, len(builder.sources())
    compiling = f"compiling DeepSpeed's {name}, {files} files, once and for all: into {folder}"
    started, done, told = time.time(), 0, 0
    if not op_library(name).exists():
        report.say(compiling)
        compiling = None
    failed: list[BaseException] = []

    def build() -> None:
        try:
            builder.load(verbose=False)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=build, daemon=True)
    thread.start()
    while thread.is_alive():
        time.sleep(0.2)
        with contextlib.suppress(FileNotFoundError):  # one that is being replaced
            done = sum(path.stat().st_mtime >= started for path in folder.glob("*.o"))
        if done > told:
            if compiling:
                report.say(compiling)
                compiling = None
            report.say(f"  {done} of {files} files")
            told = done
    if failed:
        lines = [line for line in str(failed[0]).splitlines() if "error" in line.lower()]
        raise UsageError(f"compiling DeepSpeed's op {name} failed: {(lines or failed)[0]}")


@contextlib.contextmanager
def _descriptors_to_nowhere() -> Iterator[None]:
    """Silence what compilers that try things out print to descriptors 1 and 2 themselves."""
    sys.stdout.flush(), sys.stderr.flush()
    kept, nowhere = [os.dup(1), os.dup(2)], os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1), os.dup2(nowhere, 2)
        yield
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        for number, old in enumerate(kept, 1):
            os.dup2(old, number)
            os.close(old)
        os.close(nowhere)


@torch.no_grad()
def draw_weights(model: Transformer, seed: int, device: torch.device) -> None:
    """Draw each weight whole, one at a time, and keep this rank's part: all, or a shard of stage 3.

    So the weights are those of ddp_training.py with the same seed, whatever the stage is, and no
    rank holds more than one of them in float32. A very large model is drawn on the device, with
    other numbers.
    """
    import deepspeed

    with torch.device("meta"):
        whole = Transformer(model.config)
    torch.manual_seed(seed)
    if model.config.num_parameters() <= DRAWN_AS_ONE_PROCESS:
        device = torch.device("cpu")
        for layer in whole.modules():  # PyTorch draws when it makes a layer, before the model does
            if isinstance(layer, (nn.Embedding, nn.Linear)):
                layer.to_empty(device="cpu").reset_parameters()
                layer.to("meta")
    shapes = {name: weight.shape for name, weight in whole.named_parameters()}
    for name, weight in model.named_parameters():
        sharded = hasattr(weight, "ds_id")
        drawn = torch.empty(shapes[name], device=device)
        whole.draw(name, drawn)
        with deepspeed.zero.GatheredParameters(weight, modifier_rank=0, enabled=sharded):
            weight.copy_(drawn)
