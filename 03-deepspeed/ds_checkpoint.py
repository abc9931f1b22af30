"""DeepSpeed's checkpoints: saved, resumed on other ranks, and made one file of plain weights."""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
import torch.distributed as dist

import ds_setup
from dist_common import checkpoint
from dist_common.cli import UsageError

PATIENCE = timedelta(days=7)  # for what rank 0 does alone: no timeout of a collective ends it
PARALLEL_FROM = 2**30  # bytes: a smaller checkpoint is converted before processes have started
CALLS = itertools.count()  # equal on all ranks: each call of `on_rank0` has a key of its own
# What a run may not change when it is resumed, beside what `changed_settings` refuses.
SAME = ("preset", "precision")
CONVERTS = ({1}, {2}, {1, 2}, {3})  # stages between which the universal format goes


def refuse(run: SimpleNamespace) -> None:
    """Raise UsageError for what this config could not save, or not resume from."""
    args, zero = run.args, run.config["zero_optimization"]
    gathers = zero.get("stage3_gather_16bit_weights_on_model_save")
    if args.save_16bit_model and run.stage == 3 and not gathers:
        raise UsageError(
            f"--save-16bit-model in stage 3 needs stage3_gather_16bit_weights_on_model_save in "
            f"{args.deepspeed_config}: DeepSpeed would write nothing"
        )
    if args.output_dir and "async_io" in ds_setup.ops_needed(run.config):
        raise UsageError(
            f"{args.deepspeed_config}: a run that DeepSpeed resumes with an optimizer on nvme "
            "takes other losses than one that never stopped, so none is saved here: offload "
            "to cpu, or leave out --output-dir"
        )


def settings_of(args: argparse.Namespace, ranks: int, text_checksum: str) -> dict[str, Any]:
    """Return what a manifest says about its run, as JSON has it."""
    settings = checkpoint.settings_of(args, ranks, text_checksum)
    ours = ("local_rank", "consolidate", "save_16bit_model")  # these change no weight
    kept = {name: value for name, value in settings.items() if name not in ours}
    return {name: str(v) if isinstance(v, Path) else v for name, v in kept.items()}


def save(run: SimpleNamespace) -> None:
    """Write a checkpoint. All ranks call it, and see the same folder."""
    folder = run.report.output / "checkpoints"
    facts = {
        "ranks": dist.get_world_size(),
        "stage": run.stage,
        "settings": run.settings,
        "sampler": run.sampler.state_dict(),
    }
    with checkpoint.sealed(folder, run.step, facts) as partial:  # killed within, it leaves none
        run.engine.save_checkpoint(
            str(folder), tag=partial.name, client_state=facts, save_latest=False
        )

    if dist.get_rank() == 0:
        (folder / "latest").write_text(f"step-{run.step:08d}")  # where DeepSpeed's own tools look


def find(run: SimpleNamespace) -> None:
    """Choose the newest checkpoint and put its step into `run`; convert it for other ranks.

    A collective, before the engine is made: it may set config["checkpoint"]. Raises: UsageError for
    a checkpoint of another model, precision or data, or of a stage that cannot be converted.
    """
    folder = run.report.output / "checkpoints"
    run.found = checkpoint.newest(folder, run.report)
    if run.found is None:
        return
    path, facts = run.found
    run.step = facts["step"]
    for name in SAME:
        if facts["settings"][name] != run.settings[name]:
            raise UsageError(f"{path} was saved with another --{name}: take that")
    run.report.say(checkpoint.changed_settings(facts["settings"], run.settings))
    # A run that has all its steps loads nothing.
    run.tag = path.name if run.step >= run.args.max_steps else fit(run, path, facts)


def fit(run: SimpleNamespace, path: Path, facts: dict) -> str:
    """Return the name of a checkpoint that this number of ranks can load: converted, if need be.

    DeepSpeed's files hold what each rank had; its universal format holds whole tensors, which any
    number of ranks cuts up anew, in stages 1 and 2 or in stage 3.
    """
    ranks = dist.get_world_size()
    if run.stage == facts["stage"] == 0 and run.args.precision == "32-true":
        return path.name  # the whole state, in one file
    if (run.stage, ranks) == (facts["stage"], facts["ranks"]):
        return path.name
    if {run.stage, facts["stage"]} not in CONVERTS:
        raise UsageError(
            f"{path} was saved by {facts['ranks']} ranks in stage {facts['stage']}: "
            f"{ranks} ranks in stage {run.stage} cannot resume from it. DeepSpeed converts "
            "between numbers of ranks in stages 1 to 3, and between stages 1 and 2"
        )
    universal = path.with_name(f".universal-{path.name}")
    on_rank0(f"{path} cannot be converted", lambda: _convert(path, universal))
    run.config["checkpoint"] = {**run.config.get("checkpoint", {}), "load_universal": True}
    return universal.name


def _convert(path: Path, universal: Path) -> None:
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    workers = _workers_for([file.stat().st_size for file in path.glob("*optim_states.pt")])
    command += [f"--num_extract_workers={workers}", f"--num_merge_workers={workers}"]
    command += ["--inject_missing_state"]
    command += [f"--input_folder={path}", f"--output_folder={universal}"]
    for stale in path.parent.glob(".universal-*"):  # of a run that was killed
        shutil.rmtree(stale)
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError((ended.stderr.strip().splitlines() or ["it was killed"])[-1])


def _workers_for(sizes: list[int]) -> int:
    """Return how many processes convert files of these sizes: each has one, twice, in memory."""
    if sum(sizes) < PARALLEL_FROM:
        return 1
    fitting = psutil.virtual_memory().available // (2 * max(sizes))
    return max(1, min(fitting, os.cpu_count() // 2))


def load(run: SimpleNamespace) -> None:
    """Load what `find` chose into the engine and the sampler. A collective."""
    folder = run.report.output / "checkpoints"
    path, facts = run.found
    # The script's own schedule follows the flags of this run; a config's has a state.
    run.engine.load_checkpoint(
        str(folder), tag=run.tag, load_lr_scheduler_states="scheduler" in run.config
    )
    run.sampler.load_state_dict(facts["sampler"])
    dist.barrier()  # all have read it
    if run.tag != path.name and dist.get_rank() == 0:
        shutil.rmtree(folder / run.tag)
        (folder / "latest_universal").unlink()
    run.report.say(f"loaded {path.name}, saved by {facts['ranks']} ranks in stage {facts['stage']}")


def consolidate(run: SimpleNamespace) -> None:
    """Write the float32 weights of the newest checkpoint to weights-fp32/, for a plain model.

    In files of 5 GB at most, one file in memory after the other. All ranks call it; rank 0
    writes, and the others wait. In stage 0 it writes the model's own weights, whole in its memory,
    to one file.
    """
    folder = run.report.output / "weights-fp32"

    def write() -> None:
        from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        if run.stage == 0:
            weights = run.engine.module.state_dict()
            whole = {name: tensor.float().cpu() for name, tensor in weights.items()}
            torch.save(whole, partial / "pytorch_model.bin")
        else:
            # safetensors holds no tied weights.
            options = {"max_shard_size": "5GB", "safe_serialization": not run.shape.tied_embeddings}
            told = io.StringIO()  # what it says of each file
            with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
                checkpoints = str(run.report.output / "checkpoints")
                convert_zero_checkpoint_to_fp32_state_dict(checkpoints, str(partial), **options)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)

    on_rank0("the weights cannot be written", write)


def save_16bit_model(run: SimpleNamespace) -> None:
    """Write the weights that the ranks compute with to weights-16bit/. All ranks call it.

    In stage 3 they gather, and rank 0 holds the whole model: for models that fit on one machine.
    """
    run.engine.save_16bit_model(str(run.report.output / "weights-16bit"))
    on_rank0("", lambda: None)  # rank 0 writes: the others must not read before


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Read the weights of a folder that `consolidate` or save_16bit_model wrote."""
    from safetensors.torch import load_file

    weights = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= load_file(path)
    for path in sorted(folder.glob("*.bin")):
        weights |= torch.load(path, map_location="cpu", weights_only=True)
    return weights


def on_rank0(what: str, work: Callable[[], None]) -> None:
    """Have rank 0 do `work` while the others wait on the store, and not in a collective.

    Raises: UsageError on all ranks, starting with `what`, when it fails.
    """
    store = dist.group.WORLD.get_group_store()
    key = f"ds_checkpoint/{next(CALLS)}"
    if dist.get_rank() == 0:
        failure = None
        try:
            work()
        except Exception as error:
            failure = str(error) or type(error).__name__
        store.set(key, json.dumps(failure))
    store.wait([key], PATIENCE)
    failure = json.loads(store.get(key))
    if failure:
        raise UsageError(f"{what}: {failure}")
