"""The job of the three checkpoint lessons: its model, its training, what stands in a file."""

import contextlib
import re
import sys
import tempfile
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.checkpoint.api import CheckpointException

from fsdp_parts.sharding import draw_weights, materialize
from legacy_common import checkpoint, cli, data, models, runtime
from legacy_common.cli import UsageError
from legacy_common.lab import proofs
from legacy_common.models import PRESETS, Transformer
from legacy_common.report import Report
from legacy_common.runtime import from_rank0

FULL = "full.pt"
KEPT = sys.maxsize  # checkpoints in a folder: all
SEQ_LEN = 64  # tokens
LOSS_TOLERANCE = 1e-5  # of losses near 5, whose terms are added in another order
# A rank that writes or hashes a large file alone makes the others wait longer than a step may take.
FILES_TIMEOUT = timedelta(hours=6)
TO_RANK0 = {"full_state_dict": True, "cpu_offload": True}
FROM_RANK0 = {"full_state_dict": True, "broadcast_from_rank0": True}


def add_flags(parser: cli.ArgumentParser, dir_help: str) -> None:
    """Add the flags that all three scripts have."""
    add = parser.add_argument
    add("--dir", help=f"folder of checkpoints, which all machines see{dir_help}")
    add("--preset", choices=PRESETS, default="tiny", help="shape of the model (tiny)")


def add_training_flags(parser: cli.ArgumentParser) -> None:
    """Add the flags of the scripts that train."""
    add, positive = parser.add_argument, cli.positive_int
    add("--max-steps", type=positive, default=4, help="training steps, from where it starts (4)")
    text = "losses to compare with one process, which holds the model (tiny: all, else 0)"
    add("--parity-steps", type=cli.whole_number, metavar="N", help=text)


@contextlib.contextmanager
def opened(script: str, args: Namespace, to_fill: str | None = None) -> Iterator[SimpleNamespace]:
    """Join the ranks for a `with` block and yield the job: world, device, report, config, text.

    `files` is a group on the CPU for what goes to files. `to_fill` names the flag of a folder that
    must be empty. Raises: UsageError for what goes wrong with files inside the block.
    """
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report(script, args, world, device)
        job = SimpleNamespace(args=args, world=world, device=device, report=report)
        job.config = models.preset(args.preset, SEQ_LEN)
        job.text = data.Sequences(data.load_text(), SEQ_LEN)
        # A group of its own: async_save calls collectives from a thread, which on the training's
        # group would get between the training's. And NCCL's cannot be used for it.
        job.files = dist.new_group(backend="gloo", timeout=FILES_TIMEOUT)
        folder = Path(vars(args)[to_fill] or "") if to_fill and vars(args)[to_fill] else None
        try:
            if folder and world.is_rank0 and folder.exists() and any(folder.iterdir()):
                raise UsageError(f"--{to_fill} {folder} is not empty: name another folder")
            report.start(f"{args.preset}: {job.config.num_parameters():,} weights")
            if folder and world.is_rank0:
                folder.mkdir(parents=True, exist_ok=True)
            yield job
        except ImportError as error:
            raise UsageError(f"{args.action}: {error}: pip install transformers") from error
        except (CheckpointException, OSError, RuntimeError) as error:
            # The first is a BaseException: `except Exception` lets it through.
            rank, (cause, *_) = getattr(error, "failures", {world.rank: [error]}).popitem()
            if re.search("unexpected pos|write failed", str(cause)):  # all that torch.save says
                cause = "cannot write a file: is the disk full?"
            elif isinstance(error, RuntimeError):
                raise
            where = vars(args).get("from") or args.dir
            raise UsageError(f"{args.action}, {where}: rank {rank}: {cause}") from error


@contextlib.contextmanager
def folder_of(job: SimpleNamespace) -> Iterator[Path]:
    """Yield --dir, or a temporary folder that goes at the end."""
    with contextlib.ExitStack() as stack:
        folder = job.args.dir
        if not folder and job.world.is_rank0:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
        yield Path(from_rank0(folder, job.files))
        dist.barrier(job.files)  # every rank has read what rank 0 is about to remove


def build(job: SimpleNamespace, seed: int, shard: Callable[[nn.Module], object]) -> nn.Module:
    """Build the model on meta, `shard` it, and only then give this rank's part memory and weights.

    The weights are the same however the model is sharded.
    """
    with torch.device("meta"):
        model = Transformer(job.config)
    shard(model)
    draw_weights(materialize(model, job.device), job.device, seed)
    return model


def start(
    job: SimpleNamespace, model: nn.Module, seed: int | None, parts: tuple[int, int] | None
) -> SimpleNamespace:
    """Return a run before its first step: model, optimizer, progress, files.

    `parts` are (this rank's part, number of parts) of a global batch; None: one process has it all.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = getattr(job.args, "global_batch_size", 16)
    progress = {"step": 0, "seed": seed, "global_batch_size": batch}
    return SimpleNamespace(
        model=model, optimizer=optimizer, parts=parts, progress=progress, files=job.files
    )


def train(job: SimpleNamespace, run: SimpleNamespace, steps: int) -> torch.Tensor:
    """Take steps; return the losses of the global batches. A batch follows from its step.

    Shapes: (steps,), on the CPU. Raises: UsageError when the ranks cannot share a batch evenly.
    """
    part, parts = run.parts or (0, 1)
    batch = run.progress["global_batch_size"]
    size = batch // parts
    if batch % parts:
        raise UsageError(f"--global-batch-size {batch} cannot be dealt evenly to {parts} ranks")
    losses = []
    for _ in range(steps):
        first = run.progress["step"] * batch + part * size
        inputs, targets = next(data.batches_of(job.text, 1, batch, first, size, job.device))
        run.optimizer.zero_grad()
        loss = F.cross_entropy(run.model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        run.optimizer.step()
        run.progress["step"] += 1
        losses.append(loss.detach())
    losses = torch.stack(losses)
    if run.parts:
        dist.all_reduce(losses)
        losses /= job.world.world_size
    return losses.cpu()


def state_of(run: SimpleNamespace, **options: bool) -> dict[str, dict]:
    """Return weights and moments by the names of the whole model. A collective.

    Without options each tensor stays a DTensor: this rank's part, and its place in the whole.
    """
    options = _by_name(options)
    weights, moments = dcp_state.get_state_dict(run.model, run.optimizer, options=options)
    return {"model": weights, "optimizer": moments}


def set_state(run: SimpleNamespace, state: dict[str, dict], **options: bool) -> None:
    """Put weights and moments back, the inverse of `state_of`. A collective."""
    options = _by_name(options)
    # Not both by set_state_dict: a rank that brings {} would skip the weights, and rank 0 wait.
    dcp_state.set_model_state_dict(run.model, state["model"], options=options)
    if run.optimizer is None:  # who exports needs the weights alone
        return
    moments = state["optimizer"]
    dcp_state.set_optimizer_state_dict(run.model, run.optimizer, moments, options=options)


def _by_name(options: dict[str, bool]) -> dcp_state.StateDictOptions:
    # Shards: each moment by its weight's name. A whole state that is so named cannot be loaded.
    flat = "full_state_dict" not in options
    return dcp_state.StateDictOptions(flatten_optimizer_state_dict=flat, **options)


def save_shards(run: SimpleNamespace, directory: Path, step: int, facts: dict) -> None:
    """Write a sealed checkpoint of a run, a file of shards for each rank. A collective."""
    with checkpoint.sealed(directory, step, facts, KEPT, run.files) as partial:
        dcp.save(state_of(run), checkpoint_id=partial, process_group=run.files)


def write_file(state: dict[str, dict], folder: Path) -> None:
    """Write a state that was gathered TO_RANK0 to one file, on rank 0."""
    if dist.get_rank() == 0:
        with open(folder / FULL, "wb") as file:  # a path would lose the reason of a failure
            torch.save(state, file)


def load_file(run: SimpleNamespace, folder: Path) -> None:
    """Fill a run, however it is sharded, from the one file that rank 0 reads. A collective."""
    state = {"model": {}, "optimizer": {}}
    if dist.get_rank() == 0:
        state = torch.load(folder / FULL, "cpu", weights_only=True, mmap=True)
    set_state(run, state, **FROM_RANK0)


def facts_of(job: SimpleNamespace, run: SimpleNamespace) -> dict:
    """Return what a manifest says: the shapes of the whole model, and where the run stands."""
    return {"tensors": checkpoint.shapes_of(shapes_of(job)), "progress": run.progress.copy()}


def shapes_of(job: SimpleNamespace) -> dict[str, torch.Tensor]:
    """Return the whole model's tensors by name, without memory."""
    with torch.device("meta"):
        return Transformer(job.config).state_dict()


def newest(
    job: SimpleNamespace, directory: str | Path, may_be_none: bool = False
) -> SimpleNamespace | None:
    """Return the newest checkpoint that is whole and of our model; name those passed over.

    A collective; the result has folder, step, files, tensors, and progress where our job wrote it.
    Raises: UsageError when there is none that can be used.
    """
    ours = shapes_of(job)

    def problem(facts):
        return checkpoint.other_model(facts, ours)

    chosen = checkpoint.newest(Path(directory), job.report, problem, job.files)
    if chosen:
        folder, facts = chosen
        shards = sum(name.endswith(".distcp") for name in facts["files"])
        job.report.say(f"{folder.name} holds {f'{shards} shard(s)' if shards else 'one file'}")
        return SimpleNamespace(folder=folder, **facts)
    if not may_be_none:
        raise UsageError(f"there is no checkpoint in {directory}")


def losses_alone(
    job: SimpleNamespace, begin: dict, steps: int, found: SimpleNamespace | None = None
) -> torch.Tensor:
    """Return the losses of one process that never stopped, in the steps after `begin`.

    Rank 0 trains it from the first step; from `found` where the first weights were imported.
    """
    losses = None
    if job.world.is_rank0:
        run = start(job, build(job, begin["seed"] or 0, lambda model: model), begin["seed"], None)
        run.progress = begin | {"step": 0}
        if begin["seed"] is None:  # imported: how its weights came about, nobody knows
            if FULL in found.files:
                state = torch.load(found.folder / FULL, "cpu", weights_only=True)
            else:
                state = state_of(run)
                load_alone(state, found.folder)
            set_state(run, state)
            run.progress = begin.copy()
        todo = begin["step"] + steps - run.progress["step"]
        losses = train(job, run, todo)[-steps:]
    return from_rank0(losses, job.files)


def load_alone(state: dict, folder: Path) -> None:
    """Fill plain tensors from a checkpoint's shards, on this rank alone."""
    with warnings.catch_warnings():  # that this is not a collective is what we want
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(state, checkpoint_id=folder, no_dist=True)


def check_never_stopped(
    job: SimpleNamespace, begin: dict, losses: torch.Tensor, found: SimpleNamespace | None = None,
    name: str = "largest error of a loss",
) -> list[float]:  # fmt: skip
    """Check losses against one process that never stopped; return its, as far as --parity-steps."""
    steps = job.args.parity_steps
    if steps is None:
        steps = len(losses) if job.args.preset == "tiny" else 0
    steps = min(steps, len(losses))
    if not steps:
        job.report.say("not compared with one process, which would hold the whole model")
        return []
    alone = losses_alone(job, begin, steps, found)
    proofs.same_losses(job.report, losses[:steps], alone, LOSS_TOLERANCE, name)
    return alone.tolist()


def compare_losses(
    job: SimpleNamespace, name: str, begin: dict, losses: torch.Tensor, found=None
) -> None:
    """Print a run's losses beside those of one process that never stopped, and check them."""
    alone = [f"{loss:.6f}" for loss in check_never_stopped(job, begin, losses, found)]
    alone += ["not run"] * (len(losses) - len(alone))
    steps = map(str, range(begin["step"] + 1, begin["step"] + len(losses) + 1))
    rows = zip(steps, (f"{loss:.6f}" for loss in losses), alone, strict=True)
    job.report.table(rows, ("step", name, "one process that never stopped"))
