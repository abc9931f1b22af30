"""Start DeepSpeed's engine from a config, for the scripts of module 03.

Its import takes seconds, so it happens in `import_deepspeed`.
"""

import json
import os
import warnings
from datetime import timedelta

import torch.distributed as dist

from dist_common.cli import UsageError


def import_deepspeed(run, config):
    """Return the package, set up for this rank's device; call it before other imports.

    It prints errors and no warnings. Raises: UsageError for a config that it refuses.
    """
    os.environ["DS_ACCELERATOR"] = run.device.type  # it would take any GPU it finds
    if run.device.index is not None:  # srun may show each rank one GPU
        os.environ["LOCAL_RANK"] = str(run.device.index)
    os.environ.setdefault("LOCAL_SIZE", str(run.local_world_size))
    warnings.filterwarnings("ignore", module=r"(deepspeed|torch)\b")

    import deepspeed

    deepspeed.logger.setLevel("ERROR")
    # On a CPU it would compile an all-reduce for a minute, which training never calls.
    # No public setting turns this off.
    vars(deepspeed.ops)["__compatible_ops__"] = {}
    deepspeed.init_distributed()
    try:
        deepspeed.DeepSpeedConfig(config)
    except Exception as error:
        raise UsageError(f"DeepSpeed refuses the config: {error}") from error
    return deepspeed


def read_config(path, defaults, fixed):
    """Read a config and fill in values, by names such as `bf16.enabled`.

    A value of `defaults` replaces "auto". A value of `fixed` also replaces a missing
    one. Raises: UsageError when the file states another value than `fixed`.
    """
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {error}") from error
    for name, value in (defaults | fixed).items():
        part, _, key = name.rpartition(".")
        section = config.setdefault(part, {}) if part else config
        stated = section.get(key, "auto" if name in fixed else None)
        if stated == "auto":
            section[key] = value
        elif name in fixed and stated != value:
            raise UsageError(
                f'{path}: {name} must be {value} here, or "auto", not {stated}'
            )
    return config


def start_engine(deepspeed, model, optimizer, config, timeout_s):
    """Return an engine whose collectives wait for the other ranks for timeout_s."""
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    # It makes a group of its own, with PyTorch's default of half an hour.
    if hasattr(dist, "set_timeout"):  # from torch 2.14 on
        dist.set_timeout(timedelta(seconds=timeout_s), engine.data_parallel_group)
    return engine
