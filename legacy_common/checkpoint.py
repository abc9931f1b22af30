"""Checkpoints that are written whole or not at all, and proved whole before they are loaded.

One folder each, `step-00000220/`, with a manifest of checksums: PyTorch accepts flipped bits. A
folder that gets its name last; in an object store, which has no rename, its manifest.
"""

import argparse
import contextlib
import functools
import hashlib
import json
import os
import random
import re
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from legacy_common.cli import UsageError, node
from legacy_common.report import Report
from legacy_common.runtime import from_rank0, gather
from legacy_common.stores import AnyPath, remove, sizes_in

# What the order of the data depends on, and what counts of it.
KEEPS_STAGER = "2.13"  # of torch: until then a stager can copy once
SAME_DATA = ("text_file", "seq_len", "seed", "document_attention")
OLD_FORMAT = "in the format of an older version of this guide: start anew"
NO_TEMPLATE = "of another script, or of an older version of this guide: start anew"
# Flags that do not change the weights: a resumed run may change them without a word. (Of the last
# two what they lead to is compared.)
FREE = {"device", "timeout", "output_dir", "resume", "num_workers", "logger", "log_every",
        "eval_every", "save_every", "parity_steps", "export_to", "profile", "async_save",
        "checkpoints", "tokens", "document_attention"}  # fmt: skip


@contextlib.contextmanager
def sealed(
    directory: AnyPath, step: int, facts: dict[str, Any], keep=2, group=None, alone=False
) -> Iterator[AnyPath]:
    """Yield an empty folder to write to; then hash it, and seal it last of all.

    A collective. All ranks share the disk and the hashing, but for `alone`: then rank 0 has both.
    The newest `keep` of this and older ones stay. Raises: UsageError when it cannot be written.
    """
    rank = dist.get_rank(group)
    final, local = directory / f"step-{step:08d}", isinstance(directory, Path)
    partial = directory / f".partial-{step:08d}" if local else final  # a store renames nothing
    try:
        if rank == 0:
            older = [path for path in found(directory) if path.name < final.name]
            for old in found(directory, sealed=False):  # of saves that were killed
                remove(old)
            remove(partial, ignore_errors=True)  # of a store: damaged
            partial.mkdir(parents=True)
        dist.barrier(group)
        yield partial
        dist.barrier(group)
        names = _part_of(sizes_in(partial), group, alone)
        own = {name: sha256(partial / name, flushed=local) for name in names}
        parts = gather(own, group)
        if rank == 0:
            listed = {name: digest for part in parts for name, digest in part.items()}
            manifest = json.dumps({"step": step, **facts, "files": listed}, indent=1)
            with (partial / "manifest.json").open("w") as file:
                file.write(manifest)
            if local:
                flush(partial / "manifest.json")
                flush(partial)
                # Only a damaged one can stand here: a run resumes from the newest that is whole.
                remove(final, ignore_errors=True)
                partial.rename(final)
                flush(directory)
            for path in older[: len(older) + 1 - keep]:
                remove(path, ignore_errors=True)
        dist.barrier(group)
    except Exception as error:
        # torch.save covers up what the operating system said: "unexpected pos 704 vs 598".
        cause = error.__context__ if isinstance(error, RuntimeError) else error
        # A store's driver has errors of its own; one of this package's is told as it is.
        if isinstance(error, UsageError) or (local and not isinstance(cause, OSError)):
            raise
        remove(partial, ignore_errors=True)
        why = getattr(cause, "strerror", None) or cause or error
        what = f"cannot write the checkpoint {final}{node()}: {why}"
        raise UsageError(what) from error


def _part_of(names: Collection[str], group, alone: bool) -> list[str]:
    """Return which of a checkpoint's files this rank hashes."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if alone:
        return list(names) if rank == 0 else []
    return sorted(names)[rank::ranks]


def newest(
    directory: AnyPath, report: Report, problem: Callable[[dict], str | None] = lambda facts: None,
    group=None, alone=False,
) -> tuple[AnyPath, dict[str, Any]] | None:  # fmt: skip
    """Return folder and manifest of the newest usable checkpoint, or None; name those passed over.

    A collective. `problem(manifest)` says why to refuse one, or None: the same on all ranks.
    Raises: UsageError when there are checkpoints and none can be used.
    """
    skipped = []
    for name in reversed(from_rank0([path.name for path in found(directory)], group)):
        path = directory / name
        facts = from_rank0(_manifest_of(path) if dist.get_rank(group) == 0 else None, group)
        why = facts  # what is wrong with the manifest
        if isinstance(facts, dict):
            why = problem(facts) or _altered(path, facts["files"], group, alone)
        if why is None:
            for line in skipped:
                report.warn(f"skipped {line}")
            report.say(f"resuming from {path}")
            return path, facts
        skipped.append(f"{path}: {why}")
    if skipped:
        raise UsageError(f"no checkpoint can be used: {'; '.join(skipped)}")
    report.say(f"no checkpoint in {directory} yet")
    return None


def _manifest_of(path: AnyPath) -> dict[str, Any] | str:
    """Read a checkpoint's manifest; or say why it cannot be used."""
    try:
        with (path / "manifest.json").open() as file:
            facts = json.load(file)
        if "sha256" in facts or "files" not in facts:
            return OLD_FORMAT
        return facts | {"files": dict(facts["files"])}
    except (OSError, ValueError, TypeError) as error:
        return f"incomplete or damaged ({type(error).__name__}: {error})"


def _altered(path: AnyPath, digests: dict[str, str], group, alone: bool) -> str | None:
    """Say which file is not the one that was written; None if all are. A collective."""
    why = None
    for name in _part_of(digests, group, alone):
        try:
            if sha256(path / name) != digests[name]:
                why = f"truncated or altered ({name} does not match its checksum)"
        except OSError as error:
            why = f"incomplete or damaged ({type(error).__name__}: {error})"
    return next(filter(None, gather(why, group)), None)


def other_model(facts: dict[str, Any], weights: dict[str, torch.Tensor]) -> str | None:
    """Say where a manifest's "tensors" differ from a model's in name or shape; None if not."""
    theirs, ours = facts.get("tensors") or {}, shapes_of(weights)
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            there, here = theirs.get(name, "missing"), ours.get(name, "missing")
            return f"of another model ({name} is {there} there, {here} here)"
    return None


def shapes_of(weights: dict[str, torch.Tensor]) -> dict[str, list[int]]:
    """Return each tensor's shape by name, for a manifest."""
    return {name: list(tensor.shape) for name, tensor in weights.items()}


def settings_of(args: argparse.Namespace, ranks: int, text_checksum: str) -> dict[str, Any]:
    """Return what a manifest says about its run: the flags that its weights depend on."""
    settings = {name: value for name, value in vars(args).items() if name not in FREE}
    return settings | {"ranks": ranks, "text_file": f"sha256 {text_checksum}"}


def changed_settings(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Say which settings differ from the checkpoint's. Raises: UsageError for those of the data."""
    for name in [name for name in SAME_DATA if name in new]:
        if old[name] != new[name]:
            raise UsageError(
                f"--{name.replace('_', '-')} is {new[name]} here and {old[name]} in the "
                "checkpoint: its place in the data would mean nothing"
            )
    if old.get("shape") != new.get("shape"):  # of a folder or a file; of a preset it is None
        here, there = (each.get("init_from") or each.get("preset") for each in (new, old))
        raise UsageError(
            f"--{'init-from' if new.get('init_from') else 'preset'} is {here} here and {there} in "
            "the checkpoint, and their shapes differ"
        )
    changed = [name for name in new if old.get(name) != new[name]]
    changes = [f"{name} {old.get(name)} -> {new[name]}" for name in changed]
    return f"changed since then: {', '.join(changes) or 'nothing'}"


class Store:
    """How a run's state gets into a checkpoint's folder, and out of it again; both collectives."""

    group: dist.ProcessGroup | None = None  # for names and checksums
    alone = False  # rank 0 writes and reads for the others: no disk need be shared

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the weights of the whole model by name: their shapes say whether it is ours."""
        return {}

    def facts(self) -> dict[str, Any]:
        """Return what else the manifest says."""
        return {}

    def problem(self, facts: dict[str, Any]) -> str | None:
        """Say why a checkpoint with this manifest is none for this run; None if it is one."""
        return other_model(facts, self.tensors())

    def write(self, folder: AnyPath) -> None:
        """Write the state to an empty folder."""
        raise NotImplementedError

    def read(self, folder: AnyPath) -> None:
        """Read the state back."""
        raise NotImplementedError

    def staged(self) -> Callable[[AnyPath], None]:
        """Copy the state, and return what writes the copy: training may change the state then."""
        raise NotImplementedError


class Replicated(Store):
    """State that every rank holds whole: rank 0 writes it, and reads it for all."""

    alone = True

    def __init__(self, model: torch.nn.Module, **parts: Any) -> None:
        self.model, self.parts = model, {"model": model, **parts}

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.model.state_dict()

    def write(self, folder: AnyPath) -> None:
        if dist.get_rank() == 0:
            state = {name: part.state_dict() for name, part in self.parts.items()}
            with (folder / "state.pt").open("wb") as file:  # a path would lose a failure's reason
                torch.save(state, file)

    def read(self, folder: AnyPath) -> None:
        state = from_rank0(_loaded(folder / "state.pt") if dist.get_rank() == 0 else None)
        for name in self.parts.keys() & state.keys():  # another precision has no loss scaler
            self.parts[name].load_state_dict(state[name])


class Sharded(Store):
    """State of which each rank holds a part: each writes its own, and any number of ranks reads it.

    `whole` has all weights to save, by name: those of the whole model, on meta, or what is trained.
    """

    def __init__(self, model, optimizer, whole: dict[str, torch.Tensor], timeout_s: float) -> None:
        self.model, self.optimizer, self.whole = model, optimizer, whole
        self.stager = None  # what copies shards, made once: it keeps its room for all saves
        # Names and checksums are no GPU tensors. A save in the background has the group to itself.
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.whole

    def state(self) -> dict[str, Any]:
        """Return weights and moments by the names of the whole model. A collective."""
        from torch.distributed.checkpoint import state_dict as dcp

        # By name of the weight, not by its place in the optimizer. Not strict: frozen ones are not
        # saved.
        options = {"flatten_optimizer_state_dict": True, "ignore_frozen_params": True}
        self.by_name = dcp.StateDictOptions(**options, strict=False)
        weights, moments = dcp.get_state_dict(self.model, self.optimizer, options=self.by_name)
        weights = {name: weights[name] for name in weights if name in self.whole}
        return {"model": weights, "optimizer": moments}

    def write(self, folder: AnyPath, state: dict[str, Any] | None = None) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.api import CheckpointException

        try:
            dcp.save(state or self.state(), checkpoint_id=str(folder), process_group=self.group)
        except CheckpointException as error:  # no Exception, and over what each rank met
            causes = [cause for cause, _ in error.failures.values()]
            of_disk = [cause for cause in causes if isinstance(cause, OSError)]
            raise (of_disk or [RuntimeError(f"not saved: {causes[0]}")])[0] from error

    def staged(self) -> Callable[[AnyPath], None]:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        if self.stager is None or torch.__version__ < KEEPS_STAGER:
            gpu = torch.cuda.is_available()  # which copies to pinned memory by itself
            options = {"use_pinned_memory": gpu, "use_non_blocking_copy": gpu}
            self.stager = DefaultStager(
                StagingOptions(**options, use_shared_memory=False, use_async_staging=False)
            )
        return functools.partial(self.write, state=self.stager.stage(self.state()))

    def read(self, folder: AnyPath) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint import state_dict

        state = self.state()
        dcp.load(state, checkpoint_id=str(folder), process_group=self.group)
        state_dict.set_model_state_dict(self.model, state["model"], options=self.by_name)
        state_dict.set_optimizer_state_dict(
            self.model, self.optimizer, state["optimizer"], options=self.by_name
        )


def save(
    directory: AnyPath, step: int, store: Store, facts: dict[str, Any], keep=2, background=False
) -> Future | None:
    """Write a checkpoint: a store's state, and the random state of every rank. A collective.

    In the `background` a thread writes and seals it, from a copy in host memory. Wait for the
    returned future before anything else uses the store: it raises what the thread met.
    """
    facts = {"tensors": shapes_of(store.tensors()), **store.facts(), **facts}
    random_states = gather(rng_state(), store.group)
    write = store.staged() if background else store.write

    def write_and_seal() -> None:
        with sealed(directory, step, facts, keep, store.group, store.alone) as folder:
            write(folder)
            if dist.get_rank() == 0:
                with (folder / "rng.pt").open("wb") as file:
                    torch.save(random_states, file)

    if not background:
        return write_and_seal()
    gpu = (torch.cuda.current_device(),) if torch.cuda.is_available() else None
    # A new thread's GPU would be number 0, on every rank.
    thread = ThreadPoolExecutor(1, initializer=gpu and torch.cuda.set_device, initargs=gpu or ())
    done = thread.submit(write_and_seal)
    thread.shutdown(wait=False)
    return done


def find(directory: AnyPath, report: Report, store: Store) -> tuple[AnyPath, dict[str, Any]] | None:
    """Return folder and manifest of the newest checkpoint that `store` can read. A collective."""

    def problem(facts: dict[str, Any]) -> str | None:
        if "rng.pt" not in facts["files"]:
            return facts.get("instead", NO_TEMPLATE)
        return store.problem(facts)

    return newest(directory, report, problem, store.group, store.alone)


def load(folder: AnyPath, store: Store) -> dict[str, Any] | None:
    """Read a store's state; return this rank's random state, None on a rank that is new."""
    store.read(folder)
    states = _loaded(folder / "rng.pt") if dist.get_rank() == 0 else None
    return dict(enumerate(from_rank0(states, store.group))).get(dist.get_rank())


def _loaded(path: AnyPath) -> Any:
    with path.open("rb") as file:
        return torch.load(file, map_location="cpu", weights_only=True)


def rng_state() -> dict[str, Any]:
    """Return this rank's random state, in a form that torch.load takes with weights_only."""
    kind, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_rng_state(state: dict[str, Any] | None) -> None:
    """Set this rank's random state to what `rng_state` returned; None leaves it as it is."""
    if state is None:
        return
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def found(directory: AnyPath, sealed: bool = True) -> list[AnyPath]:
    """List a folder's checkpoints, damaged ones too, the oldest first; or those not `sealed`."""
    if isinstance(directory, Path):
        return sorted(directory.glob(("step-" if sealed else ".partial-") + "[0-9]" * 8))
    files = sizes_in(directory)
    begun = {match[0] for name in files if (match := re.match(r"step-\d{8}(?=/)", name))}
    names = sorted(name for name in begun if (f"{name}/manifest.json" in files) == sealed)
    return [directory / name for name in names]


def sha256(path: AnyPath, flushed: bool = False) -> str:
    """Return the checksum of a file as hexadecimal digits; `flushed` to the disk first."""
    if flushed:
        flush(path)
    digest = hashlib.sha256()
    with path.open("rb") as file:
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
