"""What tests of module 02 share: tables with quick rows, a small model saved once, and damage."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from conftest import load_script

from legacy_common import models

CHECKPOINT = "02-fsdp/fsdp_checkpoint.py"
RESHARD = "02-fsdp/fsdp_reshard.py"
TO_HF = "02-fsdp/fsdp_to_hf.py"
BATCH = ("--global-batch-size", 12)  # which 1, 2, 3 and 4 ranks can deal
SAVE = (CHECKPOINT, "save", *BATCH, "--max-steps", 2, "--save-every", 1)
LOAD = (RESHARD, "load", "--max-steps", 2)
NEWEST = "step-00000002"
ALTERED = "truncated or altered"
INCOMPLETE = "incomplete or damaged"


def quick(count: int, rows: list) -> list:
    """Return a table of which the first rows are quick, and the others only in the whole set."""
    return [*rows[:count], *(pytest.param(*row, marks=pytest.mark.full) for row in rows[count:])]


def small(script: ModuleType) -> None:
    """Take a model of two layers and sequences of half the length."""
    two_layers = replace(models.PRESETS["tiny"], num_layers=2)
    models.PRESETS["tiny"] = two_layers
    models.PRESETS["tied"] = replace(two_layers, tied_embeddings=True)
    models.PRESETS["four"] = replace(two_layers, num_layers=4)
    script.checkpoint_job.SEQ_LEN = 32


def runner(run_script: Callable) -> Callable:
    """Return what runs a script, named first, on the small model."""

    def run(path, *argv, before=lambda script: None, **options):
        def change(script):
            small(script)
            before(script)

        return run_script(path, *argv, before=change, **options)

    return run


def saved_copy(run: Callable, once: dict, tmp_path: Path, tmp_path_factory) -> Path:
    """Return a copy of a folder with two checkpoints, which two ranks have saved as shards."""
    if not once:
        once["folder"] = tmp_path_factory.mktemp("once") / "saved"
        assert_ok(run(*SAVE, "--dir", once["folder"], world_size=2))
    return shutil.copytree(once["folder"], tmp_path / "saved")


def assert_ok(ended, says=""):
    assert set(ended.codes) == {0}, ended.stdout + ended.stderr
    assert says in ended.stdout, ended.stdout


def tensors_of(folder: Path) -> dict:
    """Return all tensors of a checkpoint by name."""
    tensors = load_script(RESHARD).part
    found = SimpleNamespace(folder=folder, files=[path.name for path in folder.iterdir()])
    return tensors.tensors_of(found, tensors.names_of(found))


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def remove_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)
