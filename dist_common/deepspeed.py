"""Start DeepSpeed's engine from a config, for the scripts of module 03.

Its import takes seconds, so it happens in `import_deepspeed`.
"""

import json
import os
import warnings
from datetime import timedelta

import torch.distributed as dist
import torch.nn.functional as F

from dist_common.cli import UsageError

MOMENTS = ("exp_avg", "exp_avg_sq")  # Adam's, of the gradient and of its square


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
    dist.set_timeout(timedelta(seconds=timeout_s), engine.data_parallel_group)
    return engine


def gather_whole(weight):
    """Return a weight and Adam's moments, whole and in float32. A collective."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    moments = [safe_get_full_optimizer_state(weight, key) for key in MOMENTS]
    return [safe_get_full_fp32_param(weight), *moments]


def set_whole(weight, value, moment=None):
    """Give this rank its part of a whole float32 weight, or of one of its moments."""
    from deepspeed import utils

    set_weight = utils.safe_set_full_fp32_param
    set_moment = utils.safe_set_full_optimizer_state
    if hasattr(weight, "ds_id"):  # stage 3: those fail where ranks divide unevenly
        set_weight = utils.safe_set_local_fp32_param
        set_moment = utils.safe_set_local_optimizer_state
        ranks = dist.get_world_size()
        padded = F.pad(value.flatten(), (0, -value.numel() % ranks))
        value = padded.chunk(ranks)[dist.get_rank()]
    if moment:
        set_moment(weight, value, moment)
    else:
        set_weight(weight, value)
