"""Checkpoints that are written whole or not at all, and proved whole before they are loaded.

One folder each, `step-00000220/`: what one rank or all ranks wrote, and manifest.json with the
checksum of every file. `torch.load` and DCP alone accept a file with flipped bits.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from dist_common.cli import UsageError
from dist_common.report import Report
from dist_common.runtime import from_rank0, gather


@contextlib.contextmanager
def sealed(
    directory: Path, step: int, facts: dict[str, Any], keep: int = 2, group=None, alone=False
) -> Iterator[Path]:
    """Yield an empty folder to write to; afterwards hash it, flush it and give it its name.

    A collective that needs a disk shared by all ranks, which split the hashing; with `alone`, one
    rank's own affair. The name comes last: a crash at any moment leaves the checkpoint before. Of
    this one and older ones the newest `keep` stay. `facts` go to the manifest, as JSON; `group` is
    for the collectives (None: all ranks).
    Raises: UsageError with the operating system's reason when it cannot be written.
    """
    rank, ranks = (0, 1) if alone else (dist.get_rank(group), dist.get_world_size(group))
    meet = (lambda: None) if alone else (lambda: dist.barrier(group))
    partial, final = directory / f".partial-{step:08d}", directory / f"step-{step:08d}"
    try:
        if rank == 0:
            for old in directory.glob(".partial-*"):  # of saves that were killed
                shutil.rmtree(old)
            partial.mkdir(parents=True)
        meet()
        yield partial
        meet()
        files = sorted(path for path in partial.rglob("*") if path.is_file())
        digests = {str(path.relative_to(partial)): _flushed(path) for path in files[rank::ranks]}
        parts = [digests] if alone else gather(digests, group)
        if rank == 0:
            listed = {name: digest for part in parts for name, digest in sorted(part.items())}
            manifest = json.dumps({"step": step, **facts, "files": listed}, indent=1)
            (partial / "manifest.json").write_text(manifest)
            for path in (partial / "manifest.json", partial):
                flush(path)
            # Only a damaged one can stand here: a run resumes from the newest that is whole.
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            flush(directory)
            older = [path for path in found(directory) if path.name < final.name]
            for path in older[: len(older) + 1 - keep]:
                shutil.rmtree(path, ignore_errors=True)
        meet()
    except (OSError, RuntimeError) as error:
        # torch.save covers up what the operating system said: "unexpected pos 704 vs 598".
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        shutil.rmtree(partial, ignore_errors=True)
        raise UsageError(f"cannot write the checkpoint {final}: {cause.strerror}") from error


def newest(
    directory: Path,
    report: Report,
    problem: Callable[[dict], str | None] = lambda facts: None,
    group=None,
    alone=False,
) -> tuple[Path, dict[str, Any]] | None:
    """Return folder and manifest of the newest usable checkpoint, or None; name those passed over.

    A collective: ranks split the checksums of a disk that they share; with `alone`, rank 0 reads.
    `problem(manifest)` may refuse a whole one: it says why, or None.
    Raises: UsageError when there are checkpoints and none can be used.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    names = from_rank0([path.name for path in found(directory)], group)
    skipped = []
    for path in (directory / name for name in reversed(names)):
        facts, why = {}, None
        if rank == 0 or not alone:
            facts, why = _examine(path, slice(0, None) if alone else slice(rank, None, ranks))
            why = why or problem(facts)
        why = next(filter(None, gather(why, group)), None)
        if why is None:
            for line in skipped:
                report.warn(f"skipped {line}")
            report.say(f"resuming from {path}")
            return path, from_rank0(facts, group)
        skipped.append(f"{path}: {why}")
    if skipped:
        raise UsageError(f"no checkpoint can be used: {'; '.join(skipped)}")
    report.say(f"no checkpoint in {directory} yet")
    return None


def _examine(path: Path, part: slice) -> tuple[dict[str, Any], str | None]:
    try:
        facts = json.loads((path / "manifest.json").read_text())
        if "sha256" in facts or "files" not in facts:
            return facts, "in the format of an older version of this guide: start anew"
        for name in sorted(facts["files"])[part]:
            if sha256(path / name) != facts["files"][name]:
                return facts, f"truncated or altered ({name} does not match its checksum)"
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return {}, f"incomplete or damaged ({type(error).__name__}: {error})"
    return facts, None


def save(directory: Path, step: int, model: nn.Module, state: dict, keep: int = 2) -> None:
    """Write `state` and the weights of a replicated model. Call it on one rank."""
    weights = model.state_dict()
    facts = {"tensors": shapes_of(weights)}
    with (
        sealed(directory, step, facts, keep, alone=True) as folder,
        open(folder / "state.pt", "wb") as file,  # a path would lose the reason of a failure
    ):
        torch.save({"model": weights, **state}, file)


def load(directory: Path, model: nn.Module, report: Report) -> dict[str, Any] | None:
    """Return what `save` wrote last and fits `model`; None when there is no checkpoint yet.

    A collective: rank 0 reads and sends, so no shared disk is needed. The model is not changed.
    """
    own = model.state_dict()
    chosen = newest(directory, report, lambda facts: other_model(facts, own), alone=True)
    state = None
    if chosen and dist.get_rank() == 0:
        state = torch.load(chosen[0] / "state.pt", map_location="cpu", weights_only=True)
    return from_rank0(state)


def other_model(facts: dict[str, Any], weights: dict[str, torch.Tensor]) -> str | None:
    """Say where the tensors of a manifest differ from a model's in name or shape; None if not."""
    theirs, ours = facts.get("tensors") or {}, shapes_of(weights)
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            there, here = theirs.get(name, "missing"), ours.get(name, "missing")
            return f"of another model ({name} is {there} there, {here} here)"
    return None


def shapes_of(weights: dict[str, torch.Tensor]) -> dict[str, list[int]]:
    """Return each tensor's shape by name, as a manifest keeps it."""
    return {name: list(tensor.shape) for name, tensor in weights.items()}


def found(directory: Path) -> list[Path]:
    """List a folder's checkpoints, the oldest first, whole or not."""
    return sorted(
        path for path in directory.glob("step-*") if re.fullmatch(r"step-\d{8}", path.name)
    )


def sha256(path: Path) -> str:
    """Return the checksum of a file, as hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
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


def _flushed(path: Path) -> str:
    flush(path)
    return sha256(path)


def rng_state() -> dict[str, Any]:
    """Return this rank's random state, in a form that torch.load takes with weights_only."""
    kind, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


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
