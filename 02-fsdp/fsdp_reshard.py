"""Load a sharded checkpoint on other ranks and under other strategies; into one file and back.

    CPU   torchrun --standalone --nproc-per-node=2 02-fsdp/fsdp_reshard.py load --dir runs/ckpt
    GPU   torchrun --standalone --nproc-per-node=gpu 02-fsdp/fsdp_reshard.py load --dir runs/ckpt

fsdp_checkpoint.py writes the checkpoint: `save --dir runs/ckpt`. `load` trains on from it under
--strategy fsdp, ddp or tp-fsdp. `convert` makes one file of shards, or shards of one file. Look
for: the losses of a run that never stopped, whoever saved and whoever loads.

Source: docs.pytorch.org, "Getting Started with Distributed Checkpoint (DCP)".
"""

from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

from fsdp_parts import checkpoint_job
from fsdp_parts import fsdp_reshard as part
from fsdp_parts.checkpoint_job import FULL, KEPT, TO_RANK0, newest, set_state, state_of
from legacy_common import checkpoint, cli
from legacy_common.cli import UsageError

TP = {"fsdp": 1, "ddp": 1, "tp-fsdp": 2}  # strategy: ranks that share a layer's rows and columns
PLAN = {
    **{name: ColwiseParallel() for name in ("gate", "up")},
    **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
    "attention.wo": RowwiseParallel(),
    "down": RowwiseParallel(),
}


def load(found, run):
    """Fill a run, sharded in whatever way, from a checkpoint that any ranks wrote. A collective."""
    if FULL in found.files:
        checkpoint_job.load_file(run, found.folder)
    else:
        state = state_of(run)  # each tensor: this rank's part, and its place in the whole

        dcp.load(state, checkpoint_id=found.folder, process_group=run.files)

        set_state(run, state)
    run.progress = getattr(found, "progress", None)  # of a job of this lesson


def shard_by(strategy, device):
    """Return what shards a model on meta: FSDP, FSDP after tensor parallelism, or nothing."""
    tp = TP[strategy]
    if dist.get_world_size() % tp:
        raise UsageError(f"--strategy {strategy} needs an even number of ranks")
    shape = (dist.get_world_size() // tp, tp)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "tp"))

    def shard(model):
        for block in model.blocks if tp > 1 else ():
            parallelize_module(block, mesh["tp"], PLAN)
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh["dp"])

    return shard if strategy != "ddp" else lambda model: model


def start(job, strategy):
    """Return a run before its first step, with other weights than the run that was saved."""
    seed = job.args.seed + 1
    model = checkpoint_job.build(job, seed, shard_by(strategy, job.device))
    if strategy == "ddp":
        model = DDP(model, device_ids=[job.device.index] if job.device.type == "cuda" else None)
    tp = TP[strategy]
    parts = (job.world.rank // tp, job.world.world_size // tp)
    return checkpoint_job.start(job, model, seed, parts)


def train_on(job):
    """Train on from the newest whole checkpoint; compare with one process that never stopped."""
    args = job.args
    found = newest(job, args.dir)
    if not hasattr(found, "progress"):
        raise UsageError(f"{found.folder} is of another script's run: resume it there, or convert")
    run = start(job, args.strategy)
    load(found, run)
    begin = run.progress.copy()
    losses = checkpoint_job.train(job, run, args.max_steps)
    step = run.progress["step"]
    if args.save:
        facts = checkpoint_job.facts_of(job, run)
        checkpoint_job.save_shards(run, Path(args.dir), step, facts)
    name = f"loss, {args.strategy} on {job.world.world_size} rank(s)"
    checkpoint_job.compare_losses(job, name, begin, losses, found)
    return f"loss {losses[-1]:.4f} after step {step}"


def convert(job):
    """Make one file of shards, or shards of one file, by loading it and saving it."""
    found = newest(job, job.args.dir)
    run = start(job, "fsdp")
    load(found, run)
    kept = {k: v for k, v in vars(found).items() if k not in ("folder", "step", "files")}
    to = Path(job.args.to)
    if FULL in found.files:
        checkpoint_job.save_shards(run, to, found.step, kept)
    else:
        with checkpoint.sealed(to, found.step, kept, KEPT, run.files) as partial:
            checkpoint_job.write_file(state_of(run, **TO_RANK0), partial)
    made = newest(job, to)
    expected = len(found.tensors) + 3 * len(list(run.model.parameters()))
    equal = part.count_equal(job, found, made)
    job.report.check("tensors equal, bitwise", equal, expected, 0, "weights, and 3 of Adam each")
    return f"written to {to}"


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    add("action", nargs="?", choices=("load", "convert"), default="load", help="(load)")
    checkpoint_job.add_flags(parser, "")
    checkpoint_job.add_training_flags(parser)
    add("--strategy", choices=TP, default="fsdp", help="under which `load` trains (fsdp)")
    add("--save", action="store_true", help="`load` saves a sharded checkpoint at the end (no)")
    add("--to", metavar="DIR", help="empty folder that `convert` writes")
    args = parser.parse_args()
    for flag in ("dir", "to")[: 1 + (args.action == "convert")]:
        if vars(args)[flag] is None:
            parser.error(f"{args.action} needs --{flag}")
    return args


def main():
    args = parse_args()
    converts = args.action == "convert"
    to_fill = "to" if converts else None
    with checkpoint_job.opened("02-fsdp/fsdp_reshard.py", args, to_fill) as job:
        return job.report.finish(convert(job) if converts else train_on(job))


if __name__ == "__main__":
    cli.run(main)
