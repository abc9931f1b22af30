"""Checkpoints that are written whole or not at all, and proved whole before they are loaded.

One folder a checkpoint, `step-00000220/`, holding `state.pt` and `manifest.json` (the checksum of
the one, and the model's tensors by name and shape). `torch.load` alone takes a file with flipped
bits without a word.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from dist_common.console import Console
from dist_common.runtime import UsageError

STEP = re.compile(r"step-\d{8}")


def save(directory: str | Path, step: int, model: nn.Module, state: dict, keep: int = 2) -> Path:
    """Write `state` and the model's weights as the checkpoint of `step`; drop all but `keep`.

    Call it on one rank. Everything goes to a folder under another name first, is flushed to the
    disk, and gets its real name last: a crash at any moment leaves the previous checkpoint.

    Raises: UsageError when the folder cannot be written, with the operating system's reason.
    """
    directory = Path(directory)
    final = directory / f"step-{step:08d}"
    partial = directory / f".partial-{step:08d}"
    weights = model.state_dict()
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        with open(partial / "state.pt", "wb") as file:
            torch.save({"model": weights, **state}, file)
        manifest = {
            "step": step,
            "sha256": sha256(partial / "state.pt"),
            "tensors": _shapes(weights),
        }
        (partial / "manifest.json").write_text(json.dumps(manifest, indent=1))
        for path in (partial / "state.pt", partial / "manifest.json", partial):
            flush(path)
        # Only a damaged one can stand here: a resumed run goes on from the newest that is whole.
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        flush(directory)
    except (OSError, RuntimeError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        # torch.save covers up what the operating system said: "unexpected pos 704 vs 598".
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        why = getattr(cause, "strerror", None) or cause
        raise UsageError(f"cannot write the checkpoint {final}: {why}") from error
    older = [path for path in _found(directory) if path.name < final.name]
    for path in older[: len(older) + 1 - keep]:
        shutil.rmtree(path, ignore_errors=True)
    return final


def load_newest(directory: str | Path, model: nn.Module, console: Console) -> dict | None:
    """Return the newest checkpoint that is whole and fits `model`; name those passed over.

    A collective: rank 0 reads and decides, and sends the state to the others, so that all go on
    from the same step without a shared file system. None when there is no checkpoint yet. The
    model is not changed: load `state["model"]` into it. Tensors come back on the CPU.

    Raises: UsageError when there are checkpoints but none can be used.
    """
    state, skipped = None, []
    if dist.get_rank() == 0:
        for path in reversed(_found(Path(directory))):
            problem = _problem(path, model)
            if problem is None:
                state = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
                break
            skipped.append(f"{path}: {problem}")
        if skipped and state is None:
            raise UsageError(f"no checkpoint can be used: {'; '.join(skipped)}")
        for line in skipped:
            console.warn(f"skipped {line}")
        console.say(f"resuming from {path}" if state else f"no checkpoint in {directory} yet")
    box = [state]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _found(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("step-*") if STEP.fullmatch(path.name))


def _problem(path: Path, model: nn.Module) -> str | None:
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        expected, tensors = manifest["sha256"], dict(manifest["tensors"])
        actual = sha256(path / "state.pt")
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"incomplete or damaged ({type(error).__name__}: {error})"
    if actual != expected:
        return "truncated or altered (state.pt does not match its checksum)"
    own = _shapes(model.state_dict())
    for name in sorted(own.keys() | tensors.keys()):
        if own.get(name) != tensors.get(name):
            here, there = own.get(name, "missing"), tensors.get(name, "missing")
            return f"of another model ({name} is {there} there, {here} here)"
    return None


def _shapes(weights: dict[str, torch.Tensor]) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in weights.items()}


def sha256(path: Path) -> str:
    """Return the checksum of a file, as hexadecimal digits."""
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def flush(path: Path) -> None:
    """Have the disk hold what was written to a file, or which names a folder has."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fresh_folder(directory: Path, step: int) -> Path:
    """Return an empty folder for all ranks to write to, and remove what killed saves left.

    A collective; all ranks must see the same directory.
    """
    partial = directory / f".partial-{step:08d}"
    if dist.get_rank() == 0:
        for old in directory.glob(".partial-*"):
            shutil.rmtree(old)
        partial.mkdir(parents=True)
    dist.barrier()
    return partial


def seal(partial: Path, facts: dict[str, Any], keep: int = 2) -> Path:
    """Make the checkpoint `step-...` of a folder that all ranks wrote to; drop all but `keep`.

    A collective: ranks share out the hashing. `facts` and the hashes go to manifest.json, and the
    folder gets its name last: a crash at any moment leaves the previous checkpoint.
    """
    dist.barrier()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own, parts = {}, [None] * ranks
    for path in sorted(path for path in partial.rglob("*") if path.is_file())[rank::ranks]:
        flush(path)
        own[str(path.relative_to(partial))] = sha256(path)
    dist.all_gather_object(parts, own)
    final = partial.with_name(partial.name.replace(".partial", "step"))
    if rank == 0:
        files = {name: digest for part in parts for name, digest in part.items()}
        (partial / "manifest.json").write_text(json.dumps({**facts, "files": files}, indent=1))
        for path in (partial / "manifest.json", partial):
            flush(path)
        shutil.rmtree(final, ignore_errors=True)  # only a damaged one can be there
        partial.rename(final)
        for old in _found(final.parent)[:-keep]:
            shutil.rmtree(old)
    dist.barrier()
    return final


def newest_sealed(directory: Path, console: Console) -> tuple[str, dict[str, Any]] | None:
    """Return name and facts of the newest whole checkpoint of `seal`; name those passed over.

    A collective: rank 0 looks. None when there is no checkpoint yet.
    Raises: UsageError when there are checkpoints but none can be used.
    """
    box, skipped = [None], []
    if dist.get_rank() == 0:
        for path in reversed(_found(directory)):
            try:
                facts = json.loads((path / "manifest.json").read_text())
                wrong = [name for name, digest in facts["files"].items()
                         if sha256(path / name) != digest]  # fmt: skip
            except (OSError, ValueError, KeyError) as error:
                wrong = [f"{type(error).__name__}: {error}"]
            if not wrong:
                box = [(path.name, facts)]
                break
            skipped.append(f"{path}: {wrong[0]} is not what was written")
        if skipped and not box[0]:
            raise UsageError(f"no checkpoint can be used: {'; '.join(skipped)}")
        for line in skipped:
            console.warn(f"skipped {line}")
    dist.broadcast_object_list(box, src=0)
    return box[0]


def gather_rng_states() -> list[dict[str, Any]]:
    """Return the random state of every rank, indexed by rank. A collective: all ranks call it."""
    kind, keys, *rest = np.random.get_state()
    own = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, own)
    return states


def restore_rng_state(states: list[dict[str, Any]], rank: int) -> bool:
    """Set this rank's random state; False when the run had fewer ranks, and nothing is set."""
    if rank >= len(states):
        return False
    own = states[rank]
    random.setstate(own["python"])
    kind, keys, *rest = own["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(own["torch"])
    if own["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(own["cuda"])
    return True
