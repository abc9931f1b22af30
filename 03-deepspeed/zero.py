"""How these scripts start DeepSpeed: configs checked, ops built once, noise kept away.

Nothing here is a lesson: `deepspeed.initialize` stands in the scripts.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import difflib
import importlib
import inspect
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import zlib
from collections.abc import Collection, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from dist_common.cli import ArgumentParser, UsageError, positive_float, positive_int
from dist_common.models import TransformerConfig
from dist_common.report import Report
from dist_common.runtime import World

AUTO = "auto"  # in a config: "the script shall say"; Hugging Face's Trainer reads it alike
PRECISIONS = {"32-true": None, "bf16-mixed": "bf16", "16-mixed": "fp16"}  # a section of the config
ADAMS = {"adam", "adamw"}
# What DeepSpeed takes from an Adam's parameters before PyTorch's own class sees them.
ADAM_EXTRAS = {"torch_adam", "adam_w_mode", "bias_correction", "fp32_optimizer_states"}
OP_PACKAGES = {"async_io": "libaio-dev (Debian, Ubuntu) or libaio-devel (Red Hat)"}


def add_arguments(parser: ArgumentParser, default_config: Path | None = None) -> None:
    """Give a script the flags that may stand for a config's "auto" values, and one for the config.

    Without `default_config` the script sets args.deepspeed_config itself.
    """
    add = parser.add_argument
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    add("--micro-batch-size", type=positive_int, help="per rank, at a time (the config's, or 8)")
    add("--grad-accum-steps", type=positive_int, help="micro-batches a step (the config's, or 2)")
    add("--max-steps", type=positive_int, help="steps of the run (the config's, or 20)")
    add("--lr", type=positive_float, help="peak learning rate (the config's, or 0.002)")
    add("--precision", choices=PRECISIONS, help="(the config's, or bf16-mixed)")
    if default_config:
        add("--deepspeed_config", "--deepspeed-config", type=Path, default=default_config,
            metavar="FILE", help=f"({default_config.name})")  # fmt: skip
        add("--nvme-path", type=Path, metavar="DIR", help="a folder on a fast disk, to offload to")


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


def load_config(args: argparse.Namespace, world: World, model: TransformerConfig) -> dict[str, Any]:
    """Read --deepspeed_config, check it, and settle what it leaves to the flags, and they to it.

    Afterwards args has the batch sizes, learning rate and precision that hold. "auto" is filled in
    as Hugging Face's Trainer does; nvme_path becomes a folder of this rank's own in it, which is
    removed when the rank ends. Call `prepare` first.

    Raises: UsageError in one line for all that DeepSpeed would take without a word (an unknown
    section, a stage or a learning rate as text, offload in a stage that has none), or refuse in
    many: no JSON, unknown keys, sizes that do not multiply, a disk that cannot be written.
    """
    path = args.deepspeed_config
    config = _parse(path)
    _check_names(path, config)
    zero = config.setdefault("zero_optimization", {})
    stage = zero.get("stage", 0)
    if type(stage) is not int or stage not in range(4):
        raise UsageError(f"{path}: zero_optimization.stage must be 0, 1, 2 or 3, not {stage!r}")
    if "type" not in config.get("optimizer", {}):
        raise UsageError(f'{path}: no optimizer: add "optimizer": {{"type": "AdamW", ...}}')
    _settle_precision(path, config, args)
    _settle_batch(path, config, args, world)
    _settle(path, config, "optimizer.params.lr", args, "lr", 2e-3)
    _settle(path, config, "scheduler.params.warmup_max_lr", args, "lr", 2e-3)
    _settle(path, config, "scheduler.params.total_num_steps", args, "max_steps", 20)
    args.max_steps = args.max_steps or 20
    D = model.dim
    for key, value in (
        ("reduce_bucket_size", D * D),
        ("stage3_prefetch_bucket_size", int(0.9 * D * D)),
        ("stage3_param_persistence_threshold", 10 * D),
    ):
        if zero.get(key) == AUTO:
            zero[key] = value
    _fill_nvme_path(path, zero, args)
    _check_values(path, config)
    _check_offload(path, zero, stage)
    return config


def _parse(path: Path) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise UsageError(f"{path}: {twice[0]} is there twice")
        return dict(pairs)

    def refuse(name: str) -> None:
        raise UsageError(f"{path}: {name} is no number that JSON has")

    try:
        text = path.read_text(encoding="utf-8-sig")
        config = json.loads(text, object_pairs_hook=once, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{path} is not JSON: line {error.lineno}, column {error.colno}: {error.msg}"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not text"
        raise UsageError(f"--deepspeed_config {path}: {why}") from error
    sections = ("zero_optimization", "optimizer", "scheduler", "bf16", "fp16")
    if not isinstance(config, dict):
        raise UsageError(f"{path} must hold an object, {{...}}")
    for name in sections:
        if not isinstance(config.get(name, {}), dict):
            raise UsageError(f"{path}: {name} must be an object, {{...}}")
        if not isinstance(config.get(name, {}).get("params", {}), dict):
            raise UsageError(f"{path}: {name}.params must be an object, {{...}}")
    kind, clip = config.get("optimizer", {}).get("type"), config.get("gradient_clipping", 0)
    if kind is not None and str(kind).lower() not in ADAMS:
        raise UsageError(f"{path}: optimizer.type must be Adam or AdamW here, not {kind!r}")
    if clip != AUTO and (isinstance(clip, bool) or not isinstance(clip, int | float) or clip < 0):
        why = f"gradient_clipping must be a number of at least 0, not {json.dumps(clip)}"
        raise UsageError(f"{path}: {why}")
    return config


def _settle_precision(path: Path, config: dict, args: argparse.Namespace) -> None:
    sections = {name: section for name, section in PRECISIONS.items() if section}
    stated = {name: config.get(part, {}).get("enabled", False) for name, part in sections.items()}
    on = [name for name, value in stated.items() if value is True]
    if len(on) > 1:
        raise UsageError(f"{path}: bf16 and fp16 are both enabled: one of them")
    for name, part in sections.items():
        if stated[name] not in (True, False, AUTO):
            raise UsageError(f'{path}: {part}.enabled must be true, false or "{AUTO}"')
    # In stage 0, bf16 would not train as elsewhere: to make Adam's moments DeepSpeed takes a step.
    left_open = stated["bf16-mixed"] == AUTO and config["zero_optimization"].get("stage", 0) > 0
    default = on[0] if on else "bf16-mixed" if left_open else "32-true"
    args.precision = args.precision or default
    if args.precision == "16-mixed":
        from deepspeed.accelerator import get_accelerator

        if not get_accelerator().is_fp16_supported():
            raise UsageError(
                "DeepSpeed cannot train in float16 on this device: use a GPU or bf16-mixed"
            )
    for name, part in sections.items():
        want, has = name == args.precision, stated[name]
        if has not in (AUTO, want):
            raise UsageError(
                f"--precision {args.precision}, but {path} has {part}.enabled {json.dumps(has)}: "
                f'change one, or write "{AUTO}" there'
            )
        if part in config:
            config[part]["enabled"] = want


def _settle_batch(path: Path, config: dict, args: argparse.Namespace, world: World) -> None:
    names = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    total, ranks = config.get("train_batch_size", AUTO), world.world_size
    for name in (*names, "train_batch_size"):
        size = config.setdefault(name, AUTO)
        if size != AUTO and (type(size) is not int or size < 1):
            raise UsageError(f"{path}: {name} must be a whole number of at least 1, not {size!r}")
    _settle(path, config, names[0], args, "micro_batch_size", 8)
    accumulated = 2
    if total != AUTO:  # the one that is left to say follows from it, if it is a whole number
        accumulated = max(1, total // (args.micro_batch_size * ranks))
    _settle(path, config, names[1], args, "grad_accum_steps", accumulated)
    product = args.micro_batch_size * args.grad_accum_steps * ranks
    if total not in (AUTO, product):
        raise UsageError(
            f"{path}: train_batch_size {total} is not train_micro_batch_size_per_gpu "
            f"{args.micro_batch_size} x gradient_accumulation_steps {args.grad_accum_steps} x "
            f"{ranks} ranks = {product}"
        )
    config["train_batch_size"] = product


def _settle(
    path: Path, config: dict, key: str, args: argparse.Namespace, flag: str, default: Any
) -> None:
    """Bring a key of the config and a flag to one value: one may leave it to the other, or both."""
    *sections, name = key.split(".")
    part = config
    for section in sections:
        part = part.get(section, {})
    if name not in part:
        return  # DeepSpeed's own default holds
    given, stated = getattr(args, flag), part[name]
    number = isinstance(stated, int | float) and not isinstance(stated, bool) and stated > 0
    if stated != AUTO and not number:
        raise UsageError(f"{path}: {key} must be a number above 0, not {json.dumps(stated)}")
    if given is not None and stated not in (AUTO, given):
        raise UsageError(
            f"--{flag.replace('_', '-')} {given}, but {path} has {key} {stated}: change one, or "
            f'write "{AUTO}" there'
        )
    part[name] = stated if stated != AUTO else default if given is None else given
    setattr(args, flag, part[name])


def _fill_nvme_path(path: Path, zero: dict, args: argparse.Namespace) -> None:
    for name in ("offload_optimizer", "offload_param"):
        part = zero.get(name)
        if isinstance(part, dict) and part.get("device") == "nvme":
            given = getattr(args, "nvme_path", None)
            if part.setdefault("nvme_path", AUTO) == AUTO:
                if given is None:
                    why = f"{path}: {name} to nvme needs --nvme-path, a folder on the disk"
                    raise UsageError(why)
                part["nvme_path"] = str(given)
            elif not isinstance(part["nvme_path"], str):
                raise UsageError(f"{path}: {name}.nvme_path must be a folder's name")
            elif given is not None and part["nvme_path"] != str(given):
                raise UsageError(
                    f"--nvme-path {given}, but {path} has {name}.nvme_path {part['nvme_path']}: "
                    f'change one, or write "{AUTO}" there'
                )


def _check_offload(path: Path, zero: dict, stage: int) -> None:
    swaps = []
    for name, least in (("offload_optimizer", 1), ("offload_param", 3)):
        part = zero.get(name) or {"device": "none"}
        target = part.get("device", "none")
        least = {"none": 0, "nvme": 3}.get(target, least)
        if stage < least:
            raise UsageError(
                f"{path}: {name} to {target} needs stage {least}, not {stage}: DeepSpeed would "
                "offload nothing, and say nothing"
            )
        if target == "nvme":
            folder = Path(part["nvme_path"])
            if not folder.is_dir():
                raise UsageError(f"{name}: nvme_path {folder} is not a folder: make it first")
            try:
                with tempfile.TemporaryFile(dir=folder):
                    pass
            except OSError as error:
                why = f"{name}: nvme_path {folder} cannot be written: {error.strerror}"
                raise UsageError(why) from error
            swaps.append(part)
    own = {parent: _swap_folder(Path(parent)) for parent in {p["nvme_path"] for p in swaps}}
    for part in swaps:
        part["nvme_path"] = str(own[part["nvme_path"]])


def _swap_folder(parent: Path) -> Path:
    """Make this rank's own folder in `parent`; it goes when the rank does, even if that is killed.

    Not where the whole job is killed at one blow, as SLURM may do after a time limit.
    """
    folder = tempfile.mkdtemp(prefix="zero-", dir=parent)
    # Its input ends with this process. DeepSpeed itself removes nothing.
    sweeper = subprocess.Popen(
        ["sh", "-c", 'cat; rm -rf -- "$0"', folder], stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    atexit.register(sweeper.communicate)
    return Path(folder)


class _Asked(dict):
    """A config that notes which keys it was asked for: DeepSpeed keeps no list of what it reads."""

    def __init__(self, **config: Any) -> None:
        super().__init__(config)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.names.add(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)

    def keys(self):
        return self  # `name in config.keys()` shall be noted too

    def __copy__(self) -> _Asked:
        return self


def _unknown(path: Path, name: str, known: Collection[str], place: str = "") -> UsageError:
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]}?" if near else "DeepSpeed knows no such key"
    return UsageError(f"{path}: unknown key {place}{name}: {hint}")


def _check_names(path: Path, config: dict) -> None:
    """Refuse names that DeepSpeed would pass over, or trip over when the model is built."""
    from deepspeed.runtime import lr_schedules
    from deepspeed.runtime.config import DeepSpeedConfig

    asked = _Asked(train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=1)
    plain = ("aio", "activation_checkpointing", "flops_profiler", "checkpoint", "data_types")
    inside = {name: _Asked(**config[name]) for name in plain if isinstance(config.get(name), dict)}
    asked.update(inside)
    try:
        DeepSpeedConfig(asked)
    except Exception:  # a value of these, which is told below
        inside = {}
    for name in config:
        if name not in asked.names:
            raise _unknown(path, name, asked.names)
    for section, part in inside.items():
        for name in part:
            if name not in part.names:
                raise _unknown(path, name, part.names, f"{section}.")
    for section, module in (("optimizer", torch.optim), ("scheduler", lr_schedules)):
        part = config.get(section, {})
        for name in part:
            if name not in ("type", "params", "legacy_fusion"):
                raise _unknown(path, name, {"type", "params"}, f"{section}.")
        kind = part.get("type")
        if section == "scheduler" and part and kind not in lr_schedules.VALID_LR_SCHEDULES:
            near = difflib.get_close_matches(str(kind), lr_schedules.VALID_LR_SCHEDULES, 1)
            hint = f": did you mean {near[0]}?" if near else ""
            raise UsageError(f"{path}: unknown scheduler.type {kind!r}{hint}")
        owner = getattr(module, str(kind), None)
        if owner:  # not one of DeepSpeed's own optimizers, which say so themselves
            known = ADAM_EXTRAS | set(inspect.signature(owner).parameters)
            for name in part.get("params", {}):
                if name not in known:
                    raise _unknown(path, name, known, f"{section}.params.")


def _check_values(path: Path, config: dict) -> None:
    """Have DeepSpeed read the config as it will, and say in one line what it does not like."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel
    from pydantic import ValidationError

    # DeepSpeed drops what is "auto" before it looks at the name, and so would miss a wrong one.
    config = json.loads(json.dumps(config).replace(f'"{AUTO}"', f'"{AUTO}!"'))
    del config["train_batch_size"]  # which it would hold against a group that may not exist yet
    left = [place for place, value in _leaves(config) if value == f"{AUTO}!"]
    try:
        DeepSpeedConfig(config)
    except ValidationError as error:
        errors = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
        models, fields = [DeepSpeedConfigModel], set()
        for model in models:
            models += model.__subclasses__()
            fields |= {f.alias or name for name, f in model.model_fields.items()}
        *parts, name = map(str, errors[0]["loc"])
        owners = [k for k, v in config.items() if isinstance(v, dict) and (*parts, name)[0] in v]
        place = "".join(f"{part}." for part in (*owners[:1], *parts))
        if errors[0]["type"] == "extra_forbidden":
            raise _unknown(path, name, fields, place) from error
        if not left:
            raise UsageError(f"{path}: {place}{name}: {errors[0]['msg']}") from error
    except Exception as error:
        if not left:
            raise UsageError(f"{path}: {error or type(error).__name__}") from error
    if left:
        raise UsageError(f'{path}: {left[0]} is "{AUTO}", which this script cannot fill in')


def _leaves(part: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in part.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{place}{name}.")
        else:
            yield f"{place}{name}", value


def ops_needed(config: dict) -> list[str]:
    """Name the compiled ops that a settled config makes DeepSpeed load, by its own names."""
    zero, optimizer, ops = config["zero_optimization"], config["optimizer"], []
    targets = {(zero.get(n) or {}).get("device") for n in ("offload_optimizer", "offload_param")}
    if "nvme" in targets:
        ops.append("async_io")
    if optimizer["type"].lower() in ADAMS and not optimizer.get("params", {}).get("torch_adam"):
        to_cpu = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
        ops.append("cpu_adam" if to_cpu else "fused_adam")
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


def _build_op(name: str, report: Report) -> None:
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise UsageError(
            f"DeepSpeed compiles its op {name} on first use, and the compiler {compiler} is "
            "missing: install g++ (Debian, Ubuntu), gcc-c++ (Red Hat) or name one in CXX"
        )
    builder = ALL_OPS[name]
    with _descriptors_to_nowhere():
        fits = builder.is_compatible(verbose=False)
    if not fits:
        what = OP_PACKAGES.get(name)
        why = f"install {what}" if what else builder.error_log or "see ds_report"
        raise UsageError(f"DeepSpeed's op {name} cannot be compiled here: {why}")
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
