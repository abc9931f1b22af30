"""Exchange weights with Hugging Face: each rank writes and reads its part of safetensors files.

    CPU   torchrun --standalone --nproc-per-node=2 02-fsdp/fsdp_to_hf.py export \
              --dir runs/ckpt --to runs/hf
    GPU   torchrun --standalone --nproc-per-node=gpu 02-fsdp/fsdp_to_hf.py export \
              --preset 124m --dir runs/ckpt --to runs/hf

`export` writes the weights of a checkpoint, `import` makes a checkpoint of such a folder. The model
stays sharded all the way. Look for: equal weights in the files, and equal logits in transformers.

Sources: huggingface.co/docs, "Llama" and "Safetensors"; docs.pytorch.org, "Distributed Checkpoint",
HuggingFaceStorageWriter and HuggingFaceStorageReader.
"""

import argparse
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.fsdp import fully_shard

from fsdp_parts import checkpoint_job
from fsdp_parts import fsdp_to_hf as part
from fsdp_parts.checkpoint_job import FULL, newest
from legacy_common import cli, hf
from legacy_common.lab import proofs


def export(job, model):
    """Write the weights of the newest checkpoint in Hugging Face's format."""
    load_weights(newest(job, job.args.dir), job, model)
    to = Path(job.args.to)
    files = hf.export(model, job.config, to, job.files, job.args.max_shard_size)
    job.report.say(f"{files} file(s) of weights, config.json and an index")
    return to


def import_(job, model):
    """Make a checkpoint to train on from, of weights in Hugging Face's format."""
    source = Path(vars(job.args)["from"])
    hf.config_of(source, job.config)
    hf.load(model, job.config, source, job.files)
    parts = (job.world.rank, job.world.world_size)
    run = checkpoint_job.start(job, model, None, parts)
    # This makes room for moments by a step with gradients 0 and rate 0. Adam has counted it, and
    # would correct the first real step as if it were the second.
    dcp_state.get_optimizer_state_dict(run.model, run.optimizer)
    for kept in run.optimizer.state.values():
        kept["step"].zero_()
    facts = checkpoint_job.facts_of(job, run)
    # What a template says that is to resume from it.
    facts["instead"] = f"of weights alone: start with --init-from {source} instead"
    checkpoint_job.save_shards(run, Path(job.args.dir), 0, facts)
    load_weights(newest(job, job.args.dir), job, model)  # to check what was written
    return source


def load_weights(found, job, model):
    """Read this rank's part of a checkpoint's weights, and nothing of the optimizer's."""
    if FULL in found.files:
        checkpoint_job.load_file(SimpleNamespace(model=model, optimizer=None), found.folder)
    else:
        state = {"model": dcp_state.get_model_state_dict(model)}

        dcp.load(state, checkpoint_id=found.folder, process_group=job.files)

        dcp_state.set_model_state_dict(model, state["model"])


def shard(model):
    for module in (*model.blocks, model):
        fully_shard(module)


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    add("action", choices=("export", "import"), help="write or read Hugging Face's format")
    checkpoint_job.add_flags(parser, "; import: empty")
    add("--to", metavar="DIR", help="empty folder that `export` writes")
    add("--from", metavar="DIR", help="folder that `import` reads")
    add("--max-shard-size", type=part.size_of, default="5GB", metavar="SIZE",
        help="of a file of weights, as 500KB, 200MB, 5GB (5GB)")  # fmt: skip
    add("--check-logits", action=argparse.BooleanOptionalAction,
        help="with transformers, which holds the whole model (tiny: yes, else no)")  # fmt: skip
    args = parser.parse_args()
    for flag in {"export": ("dir", "to"), "import": ("from", "dir")}[args.action]:
        if vars(args)[flag] is None:
            parser.error(f"{args.action} needs --{flag}")
    if args.check_logits is None:
        args.check_logits = args.preset == "tiny"
    return args


def main():
    args = parse_args()
    exports = args.action == "export"
    to_fill = "to" if exports else "dir"
    with checkpoint_job.opened("02-fsdp/fsdp_to_hf.py", args, to_fill) as job:
        model = checkpoint_job.build(job, args.seed + 1, shard)
        theirs = (export if exports else import_)(job, model)
        proofs.same_as_files(job.report, model, job.config, theirs, job.files)
        if args.check_logits:
            tokens = torch.stack([job.text[index][0] for index in range(4)]).to(job.device)
            part.check_logits(job.report, model, theirs, tokens, job.files)
        else:
            job.report.say("logits not compared: --check-logits does, and holds the whole model")
        return job.report.finish(f"written to {args.to if exports else args.dir}")


if __name__ == "__main__":
    cli.run(main)
