"""Checkpoints that are complete or absent, of replicated and of sharded models.

Each is a folder step-00000020 that gets its name last. Every rank writes its part and
its checksum; a manifest lists them. torch.distributed.checkpoint writes the tensors, so
any number of ranks can load them.
"""

import hashlib
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from dist_common import runtime
from dist_common.cli import UsageError
from dist_common.runtime import from_rank0, gather


class Checkpoints:
    """Saves and loads a model, its optimizer and every rank's random state.

    All ranks call every method. `folder` is on a disk that all ranks share. The newest
    `keep` checkpoints stay. Raises: UsageError if the disk is not shared.
    """

    def __init__(self, run, folder, model, optimizer, keep=2, timeout_s=600.0):
        self.run = run
        self.folder = folder
        self.model = model
        self.optimizer = optimizer
        self.keep = keep
        self.pending = None  # the save that runs in the background
        # A group of its own: a save in the background must not meet other collectives.
        self.group = dist.new_group(
            backend="gloo", timeout=timedelta(seconds=timeout_s)
        )
        self.require_shared_disk()

    def require_shared_disk(self):
        """Raise UsageError unless all ranks see a file that rank 0 writes.

        On separate disks, half a checkpoint would look complete.
        """
        token = f".token-{from_rank0(os.urandom(8).hex(), self.group)}"
        self.agree(self.folder, lambda: self.write_token(token), only_rank0=True)
        seen = gather((self.folder / token).exists(), self.group)
        if self.run.rank == 0:
            (self.folder / token).unlink()
        if not all(seen):
            ranks = [str(rank) for rank, exists in enumerate(seen) if not exists]
            raise UsageError(
                f"{self.folder} is not on a shared disk: ranks {', '.join(ranks)} do "
                "not see what rank 0 writes"
            )

    def write_token(self, token):
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / token).touch()

    def agree(self, what, action, only_rank0=False, clean=None):
        """Run an action; if it fails on any rank, raise UsageError on every rank.

        Returns: every rank's value. `clean` is a folder that rank 0 then removes.
        """
        value, problem = None, None
        try:
            if self.run.rank == 0 or not only_rank0:
                value = action()
        except (Exception, CheckpointException) as error:
            problem = find_reason(error, self.run.rank)
        results = gather((value, problem), self.group)
        for _, problem in results:
            if problem:
                if clean and self.run.rank == 0:
                    shutil.rmtree(clean, ignore_errors=True)
                raise UsageError(f"cannot write {what} {problem}")
        return [value for value, _ in results]

    def state(self, offload=False):
        """Return the tensors by name: each rank's shards, or the whole model."""
        options = StateDictOptions(
            flatten_optimizer_state_dict=True, cpu_offload=offload
        )
        weights, moments = get_state_dict(self.model, self.optimizer, options=options)
        return {"model": weights, "optimizer": moments}

    def save(self, step, facts, background=False):
        """Write a checkpoint; `facts` are other values that a resumed run needs.

        In the background, training continues while a thread writes a copy. The next
        save, or `wait`, raises what the thread met. Raises: UsageError.
        """
        self.wait()
        runtime.sync_buffers(self.model)
        is_gpu = self.run.device.type == "cuda"
        state = self.state(offload=background and is_gpu)
        if background and not is_gpu:  # offloading has copied a GPU's tensors
            state = {name: clone_tensors(part) for name, part in state.items()}
        facts = {"step": step, "world_size": self.run.world_size, **facts}
        work = (step, state, runtime.rng_state(), facts)
        if not background:
            self.write(*work)
            return
        thread = ThreadPoolExecutor(1)
        self.pending = thread.submit(self.write, *work)
        thread.shutdown(wait=False)

    def wait(self):
        """Wait until the save in the background is complete."""
        if self.pending:
            self.pending.result()
            self.pending = None

    def write(self, step, state, rng_state, facts):
        """Write all parts to a temporary folder, then give it its name."""
        final = self.folder / f"step-{step:08}"
        partial = self.folder / f".partial-{step:08}"
        if self.run.device.type == "cuda":  # a new thread starts with GPU 0
            torch.cuda.set_device(self.run.device)
        self.agree(final, lambda: self.make_empty(partial), only_rank0=True)
        checksums = self.agree(
            final, lambda: self.write_part(partial, state, rng_state), clean=partial
        )
        files = {name: digest for part in checksums for name, digest in part.items()}
        manifest = {**facts, "files": files}
        self.agree(
            final,
            lambda: self.publish(partial, final, manifest),
            only_rank0=True,
            clean=partial,
        )

    def make_empty(self, partial):
        for old in self.folder.glob(".partial-*"):  # of saves that were killed
            shutil.rmtree(old)
        partial.mkdir()

    def write_part(self, partial, state, rng_state):
        """Write this rank's tensors and random state; return the checksums by file."""
        rank = self.run.rank
        dcp.save(
            state,
            storage_writer=dcp.FileSystemWriter(partial),
            process_group=self.group,
        )
        with (partial / f"rng-{rank}.pt").open("wb") as file:
            torch.save(rng_state, file)
        names = [f"__{rank}_0.distcp", f"rng-{rank}.pt"]
        names += [".metadata"] if rank == 0 else []
        paths = [partial / name for name in names]
        return {path.name: hash_file(path) for path in paths if path.exists()}

    def publish(self, partial, final, manifest):
        """Write the manifest, rename the folder, remove old checkpoints."""
        text = json.dumps(manifest)
        digest = hashlib.sha256(text.encode()).hexdigest()
        (partial / "manifest.json").write_text(f"{digest}\n{text}\n")
        for path in partial.iterdir():
            sync_to_disk(path)
        shutil.rmtree(final, ignore_errors=True)  # of a run that went back
        partial.rename(final)
        sync_to_disk(self.folder)
        steps = self.list_steps()
        later = [step for step in steps if step > manifest["step"]]  # before going back
        earlier = [step for step in steps if step <= manifest["step"]]
        for step in later + earlier[: -self.keep]:
            shutil.rmtree(self.folder / f"step-{step:08}", ignore_errors=True)

    def list_steps(self):
        """Return the steps of all checkpoints, the oldest first."""
        return sorted(int(path.name[5:]) for path in self.folder.glob("step-*"))

    def find(self, step=None):
        """Return what `save` was given of the newest complete checkpoint, or None.

        It names the damaged ones. With `step` it takes this one. Raises: UsageError
        when there are checkpoints and none can be used.
        """
        steps = from_rank0(self.list_steps(), self.group)
        if step is not None:
            if step not in steps:
                known = ", ".join(map(str, steps)) or "none"
                raise UsageError(f"--resume-step {step}: {self.folder} has {known}")
            steps = [step]
        for candidate in reversed(steps):
            folder = self.folder / f"step-{candidate:08}"
            problem, facts = from_rank0(
                read_manifest(folder) if self.run.rank == 0 else None, self.group
            )
            if not problem:
                names = sorted(facts["files"])[self.run.rank :: self.run.world_size]
                mine = [n for n in names if is_damaged(folder / n, facts["files"][n])]
                damaged = sum(gather(mine, self.group), [])
                problem = f"{', '.join(damaged)} is missing or damaged"
                if not damaged:
                    self.run.print0(f"resuming from {folder}")
                    return facts
            self.run.print0(f"warning: {folder} is skipped: {problem}")
        if steps:
            raise UsageError(f"no checkpoint in {self.folder} can be used")
        self.run.print0(f"no checkpoint in {self.folder} yet")
        return None

    def load(self, facts):
        """Load the checkpoint that `find` returned; restore this rank's random state.

        A rank that did not exist before keeps its own random state.
        """
        folder = self.folder / f"step-{facts['step']:08}"
        try:
            self.load_state(folder, facts)
        except CheckpointException as error:  # not an Exception
            reason = find_reason(error, self.run.rank)
            raise UsageError(f"{folder} is of another model {reason}") from error
        path = folder / f"rng-{self.run.rank}.pt"
        if path.exists():
            runtime.set_rng_state(torch.load(path, weights_only=False))

    def load_state(self, folder, facts):
        """Give the model and the optimizer the tensors of a checkpoint."""
        state = self.state()
        self.read(folder, state)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(flatten_optimizer_state_dict=True),
        )

    def read(self, folder, state):
        """Fill the tensors of `state`, a dict by name. Raises: CheckpointException."""
        reader = dcp.FileSystemReader(folder)
        dcp.load(state, storage_reader=reader, process_group=self.group)


def find_reason(error, rank):
    """Return the rank and the cause of a failed save, such as a full disk."""
    if isinstance(error, CheckpointException):  # all ranks get those of all ranks
        rank, (error, _) = next(iter(error.failures.items()))
    cause = error
    while cause and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    reason = cause.strerror if cause else f"{type(error).__name__}: {error}"
    return f"(rank {rank}): {reason}"


def clone_tensors(named):
    return {k: v.clone() if torch.is_tensor(v) else v for k, v in named.items()}


def read_manifest(folder):
    """Return (problem or None, content) of a checkpoint's manifest."""
    try:
        digest, text = (folder / "manifest.json").read_text().splitlines()
    except (OSError, ValueError):
        return "its manifest is missing or damaged", None
    if hashlib.sha256(text.encode()).hexdigest() != digest:
        return "its manifest does not match its own checksum", None
    return None, json.loads(text)


def is_damaged(path, digest):
    return not path.exists() or hash_file(path) != digest


def hash_file(path):
    """Return the SHA-256 checksum of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def sync_to_disk(path):
    """Wait until the disk holds a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
