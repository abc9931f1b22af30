"""Checkpoints that are complete or absent, of replicated and of sharded models.

Each is a folder step-00000020 that gets its name last. torch.distributed.checkpoint
writes one file per rank, so any number of ranks can load them. A manifest lists the
files with the checksums of the ranks that wrote them.
"""

import hashlib
import json
import os
import pickle
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

from dist_common import runtime, train
from dist_common.cli import UsageError
from dist_common.runtime import from_rank0, gather

OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


class Checkpoints:
    """Saves and loads a model, its optimizer and every rank's random state.

    All ranks call every method. The folder is on a disk that all ranks share. The
    newest `args.keep` checkpoints stay. Without --output-dir nothing is saved.
    """

    def __init__(self, run, args, model, optimizer):
        """Raises: UsageError if the folder cannot be written or is not shared."""
        self.run = run
        self.args = args
        self.model = model
        self.optimizer = optimizer
        self.pending = None  # the save that runs in the background
        if not args.output_dir:
            return
        self.folder = args.output_dir / "checkpoints"
        # A group of its own: a save in the background must not meet other collectives.
        timeout = timedelta(seconds=args.timeout)
        self.group = dist.new_group(backend="gloo", timeout=timeout)
        # On separate disks, half a checkpoint would look complete.
        token = self.folder / f".token-{from_rank0(os.urandom(8).hex(), self.group)}"
        self.agree(f"write {self.folder}", lambda: self.prepare_folder(token))
        self.agree(
            f"use {self.folder}, which needs a disk that all ranks share", token.stat
        )
        if run.rank == 0:
            token.unlink()

    def prepare_folder(self, token):
        """Make the folder, without the partial checkpoints of killed runs."""
        if self.run.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            for partial in self.folder.glob(".partial-*"):
                shutil.rmtree(partial)
            token.touch()

    def agree(self, goal, action):
        """Run an action; if it fails on any rank, raise UsageError on every rank.

        Returns: every rank's value.
        """
        value, problem = None, None
        try:
            value = action()
        except (Exception, CheckpointException) as error:
            problem = find_reason(error, self.run.rank)
        results = gather((value, problem), self.group)
        for _, problem in results:
            if problem:
                raise UsageError(f"cannot {goal} {problem}")
        return [value for value, _ in results]

    def state(self):
        """Return the tensors by name: each rank's shards, or the whole model."""
        weights, moments = get_state_dict(self.model, self.optimizer, options=OPTIONS)
        return {"model": weights, "optimizer": moments}

    def save(self, step, facts):
        """Write a checkpoint; `facts` are other values that a resumed run needs.

        With --async-save, training continues while a thread writes a copy. The next
        save, or `wait`, raises what the thread met. Raises: UsageError.
        """
        if not self.args.output_dir:
            return
        self.wait()
        runtime.sync_buffers(self.model)
        state = self.state()
        if self.args.async_save:
            state = {name: copy_to_host(named) for name, named in state.items()}
        state["rng"] = {str(self.run.rank): pickle.dumps(runtime.rng_state())}
        facts = {"step": step, "settings": train.settings_of(self.args), **facts}
        thread = ThreadPoolExecutor(1)
        self.pending = thread.submit(self.write, step, state, facts)
        thread.shutdown(wait=False)
        if not self.args.async_save:
            self.wait()

    def wait(self):
        """Wait until the save in the background is complete."""
        if self.pending:
            self.pending.result()
            self.pending = None

    def write(self, step, state, facts):
        """Write all files to a temporary folder, then give it its name."""
        if self.run.device.type == "cuda":  # a new thread starts with GPU 0
            torch.cuda.set_device(self.run.device)
        final = self.folder / f"step-{step:08}"
        partial = self.folder / f".partial-{step:08}"
        goal = f"write {final}"
        try:
            digests = self.agree(goal, lambda: self.write_part(partial, state))
            self.agree(goal, lambda: self.publish(partial, final, facts, digests))
        except UsageError:
            if self.run.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise

    def write_part(self, partial, state):
        """Write this rank's tensors and random state in one file; return its digest."""
        writer = dcp.FileSystemWriter(partial)
        dcp.save(state, storage_writer=writer, process_group=self.group)
        return hash_file(partial / f"__{self.run.rank}_0.distcp")

    def publish(self, partial, final, facts, digests):
        """On rank 0, write the manifest, rename the folder, remove old checkpoints."""
        if self.run.rank > 0:
            return
        files = {f"__{rank}_0.distcp": digest for rank, digest in enumerate(digests)}
        files[".metadata"] = hash_file(partial / ".metadata")
        text = json.dumps({**facts, "files": files})
        digest = hashlib.sha256(text.encode()).hexdigest()
        (partial / "manifest.json").write_text(f"{digest}\n{text}\n")
        shutil.rmtree(final, ignore_errors=True)  # of a run that went back
        partial.rename(final)
        steps = self.list_steps()
        earlier = [step for step in steps if step <= facts["step"]]
        # Also the later steps, if the run went back.
        for step in set(steps) - set(earlier[-self.args.keep :]):
            shutil.rmtree(self.folder / f"step-{step:08}", ignore_errors=True)

    def list_steps(self):
        """Return the steps of all checkpoints, the oldest first."""
        return sorted(int(path.name[5:]) for path in self.folder.glob("step-*"))

    def resume(self):
        """With --resume, load the newest complete checkpoint; return its facts.

        Without a checkpoint the step is 0. Raises: UsageError when there are
        checkpoints and none can be used, or when the run had other data.
        """
        facts = self.find() if self.args.resume else None
        if facts is None:
            return {"step": 0, "samples_seen": 0}
        train.compare_settings(self.args, self.run, facts)
        self.load(facts)
        return facts

    def find(self):
        """Return the facts of the newest complete checkpoint, or of --resume-step.

        It names the damaged ones. Returns None if there are no checkpoints.
        """
        steps = from_rank0(self.list_steps(), self.group)
        wanted = [self.args.resume_step] if self.args.resume_step else steps
        for step in reversed(wanted):
            folder = self.folder / f"step-{step:08}"
            facts, problem = self.inspect(folder)
            problems = [p for p in gather(problem, self.group) if p]
            if not problems:
                self.run.print0(f"resuming from {folder}")
                return facts
            self.run.print0(f"warning: {folder} is skipped: {problems[0]}")
        if wanted:
            raise UsageError(f"cannot use steps {wanted}: {self.folder} has {steps}")
        return None

    def inspect(self, folder):
        """Return a checkpoint's facts, and the fault in this rank's share of its files.

        The ranks share the work of reading all files.
        """
        try:
            digest, text = (folder / "manifest.json").read_text().splitlines()
        except (OSError, ValueError):
            digest = text = ""
        if hashlib.sha256(text.encode()).hexdigest() != digest:
            return None, "manifest.json is missing or damaged"
        facts = json.loads(text)
        for name in sorted(facts["files"])[self.run.rank :: self.run.world_size]:
            path = folder / name
            if not path.exists() or hash_file(path) != facts["files"][name]:
                return None, f"{name} is missing or damaged"
        return facts, None

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
        rank = str(self.run.rank)
        existed = f"__{rank}_0.distcp" in facts["files"]
        state = {"rng": {rank: b""} if existed else {}}
        self.read(folder, state)
        if existed:
            runtime.set_rng_state(pickle.loads(state["rng"][rank]))

    def load_state(self, folder, facts):
        """Give the model and the optimizer the tensors of a checkpoint."""
        state = self.state()
        self.read(folder, state)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=OPTIONS,
        )

    def read(self, folder, state):
        """Fill the tensors of `state`, a dict by name. Raises: CheckpointException."""
        reader = dcp.FileSystemReader(folder)
        dcp.load(state, storage_reader=reader, process_group=self.group)


def find_reason(error, rank):
    """Return the rank and the cause of a failed save, such as a full disk."""
    if isinstance(error, CheckpointException):  # every rank gets all ranks' errors
        rank, (error, _) = next(iter(error.failures.items()))
    cause = error
    while cause and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    reason = cause.strerror if cause else f"{type(error).__name__}: {error}"
    return f"(rank {rank}): {reason}"


def copy_to_host(named):
    """Copy tensors to CPU memory, also those that are there already."""
    return {
        name: value.to("cpu", copy=True) if torch.is_tensor(value) else value
        for name, value in named.items()
    }


def hash_file(path):
    """Return the SHA-256 checksum of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()
