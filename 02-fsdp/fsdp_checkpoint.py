"""Save a sharded model in four ways, and see how long training stands still for each.

    CPU   torchrun --standalone --nproc-per-node=2 02-fsdp/fsdp_checkpoint.py
    GPU   torchrun --standalone --nproc-per-node=gpu 02-fsdp/fsdp_checkpoint.py --preset 124m

`compare` saves in each way while it trains, and resumes from each. `save` trains and saves. Look
for: who writes how many bytes; how long training stands still; after each restore the losses of a
run that never stopped; the previous checkpoint, where a save was killed or a file is damaged.

Sources: docs.pytorch.org, "Getting Started with Distributed Checkpoint (DCP)" and "Asynchronous
Saving with Distributed Checkpoint (DCP)".
"""

import contextlib
import functools
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import fully_shard

from fsdp_parts import checkpoint_job
from fsdp_parts.checkpoint_job import (
    FULL,
    KEPT,
    LOSS_TOLERANCE,
    TO_RANK0,
    newest,
    set_state,
    state_of,
    train,
)
from fsdp_parts.fsdp_checkpoint import HEADERS, SavedRun, check_bytes
from legacy_common import checkpoint, cli
from legacy_common.lab import proofs


def sharded(state, folder, files):
    """Each rank writes its shards; rank 0 also writes which rows stand in which file."""

    dcp.save(state, checkpoint_id=folder, process_group=files)


def full(state, folder, files):
    """Rank 0 writes the whole state, which all ranks have gathered there."""
    checkpoint_job.write_file(state, folder)


@functools.cache
def stager():
    """Return what copies the shards to host memory; one for all saves allocates that memory once.

    A GPU copies to pinned memory by itself, at the speed of its bus; for any other memory the
    driver copies piece by piece through a pinned buffer. PyTorch's own choice is not pinned.
    """
    gpu = torch.cuda.is_available()
    options = StagingOptions(
        use_pinned_memory=gpu,
        use_non_blocking_copy=gpu,
        use_shared_memory=False,
        use_async_staging=False,
    )
    return DefaultStager(options)


def by_thread(state, folder, files):
    """Copy the shards in host memory and return; a thread of this process writes the copy."""
    if torch.__version__ < checkpoint.KEEPS_STAGER:
        stager.cache_clear()
    return dcp.async_save(state, checkpoint_id=folder, process_group=files, async_stager=stager())


def by_process(state, folder, files):
    """The same, but a process of its own writes: it takes no Python time from the training."""
    options = {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}
    return dcp.async_save(state, checkpoint_id=folder, process_group=files, **options)


KINDS = {"sharded": sharded, "full": full, "async": by_thread, "async-process": by_process}


def save(kind, directory, job, run):
    """Write a checkpoint; return a future, done when it is whole. A collective.

    All goes to a folder under another name, which `sealed` hashes and renames when it is left.
    """
    # To gather a state on rank 0 takes all ranks: under `if rank == 0` it would wait for ever.
    state = state_of(run, **(TO_RANK0 if kind == "full" else {}))
    with contextlib.ExitStack() as stack:
        facts = checkpoint_job.facts_of(job, run)
        sealed = checkpoint.sealed(Path(directory), run.progress["step"], facts, KEPT, run.files)
        partial = stack.enter_context(sealed)
        writing = KINDS[kind](state, partial, run.files)
        rest = stack.pop_all()  # to leave the folder, in a thread

    def finish():
        with rest:
            if writing:
                writing.result()
        return time.perf_counter()

    thread = ThreadPoolExecutor(1)
    done = thread.submit(finish)
    thread.shutdown(wait=False)
    if not writing:  # one that writes has copied the state: training may go on and change it
        done.result()
    return done


def restore(found, run):
    """Load a checkpoint of either format into a run. A collective."""
    if FULL in found.files:
        checkpoint_job.load_file(run, found.folder)
    else:
        state = state_of(run)  # what this rank holds, it reads, whoever wrote it

        dcp.load(state, checkpoint_id=found.folder, process_group=run.files)

        set_state(run, state)
    run.progress = found.progress


def shard(model):
    for module in (*model.blocks, model):
        fully_shard(module)


def start(job, seed):
    """Return a sharded run before its first step."""
    model = checkpoint_job.build(job, seed, shard)
    return checkpoint_job.start(job, model, seed, (job.world.rank, job.world.world_size))


def compare(job, folder):
    """Save in each way while training goes on; then resume from each."""
    run = start(job, job.args.seed)
    begin = run.progress.copy()
    first = train(job, run, 1)
    for kind in KINDS:  # the first of a kind is slower: by_process starts its process
        save(kind, folder / "warm-up" / kind, job, run).result()
    saved = {}
    for kind in KINDS:
        saved[kind] = SavedRun(kind)
        saved[kind].train_and_save(job, run, lambda k=kind: save(k, folder / k, job, run))
    losses = torch.cat([first, *(times.losses for times in saved.values())])
    name = "never stopped: largest error of a loss"
    checkpoint_job.check_never_stopped(job, begin, losses, name=name)
    rows = [resume(job, kind, folder / kind, saved[kind]) for kind in KINDS]
    job.report.table(rows, HEADERS)
    return f"loss {losses[-1]:.4f} after step {run.progress['step']}, stopped or not"


def resume(job, kind, folder, saved):
    """Resume from a checkpoint, compare with the run that went on; return its row of the table."""
    found = newest(job, folder)
    run = start(job, job.args.seed + 1)  # another seed, so that nothing is right by itself
    dist.barrier(job.files)
    begun = time.perf_counter()
    restore(found, run)
    saved.load_s = time.perf_counter() - begun

    losses = train(job, run, job.args.max_steps)
    # The first loss of the other run is of the step before the save. GPUs add in any order.
    tolerance = 0 if job.device.type == "cpu" else LOSS_TOLERANCE
    name = f"{kind}: largest error of a loss"
    proofs.same_losses(job.report, losses, saved.losses[1:], tolerance, name, "never stopped")
    sizes = check_bytes(job, kind, found)
    columns = saved.columns(job.report)
    return [kind, *columns, f"{sum(sizes) / 1e6:.2f}", f"{max(sizes) / 1e6:.2f}"]


def train_and_save(job):
    """Train on from the newest whole checkpoint, if there is one, and save now and then."""
    args = job.args
    losses = []
    saved = None
    found = newest(job, args.dir, may_be_none=True)
    run = start(job, args.seed + bool(found))
    if found:
        restore(found, run)
    begin = run.progress.copy()
    for number in range(1, args.max_steps + 1):
        losses.append(train(job, run, 1))
        if number % args.save_every == 0 or number == args.max_steps:
            if saved:
                saved.result()  # one at a time
            saved = save(args.kind, args.dir, job, run)
    saved.result()  # a process that ends earlier has saved nothing
    name = f"loss, fsdp on {job.world.world_size} rank(s)"
    checkpoint_job.compare_losses(job, name, begin, torch.cat(losses), found)
    return f"loss {losses[-1].item():.4f} after step {run.progress['step']}"


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    add("action", nargs="?", choices=("compare", "save"), default="compare", help="(compare)")
    checkpoint_job.add_flags(parser, "; compare: empty (a temporary one)")
    checkpoint_job.add_training_flags(parser)
    add("--kind", choices=KINDS, default="sharded", help="how `save` saves (sharded)")
    add("--save-every", type=cli.positive_int, default=2, help="steps from save to save (2)")
    add("--global-batch-size", type=cli.positive_int, default=16, help="of a new run (16)")
    args = parser.parse_args()
    if args.action == "save" and not args.dir:
        parser.error("save needs --dir")
    return args


def main():
    args = parse_args()
    compares = args.action == "compare"
    to_fill = "dir" if compares else None
    with checkpoint_job.opened("02-fsdp/fsdp_checkpoint.py", args, to_fill) as job:
        with checkpoint_job.folder_of(job) as folder:
            summary = compare(job, folder) if compares else train_and_save(job)
        return job.report.finish(summary)


if __name__ == "__mp_main__":  # the process that by_process starts imports this script
    logging.disable(logging.INFO)
if __name__ == "__main__":
    cli.run(main)
