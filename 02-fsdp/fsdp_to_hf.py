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
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.checkpoint._consolidate_hf_safetensors import (
    consolidate_safetensors_files_on_every_rank,
)
from torch.distributed.fsdp import fully_shard

from dist_common import cli
from fsdp_parts import checkpoint_job
from fsdp_parts import fsdp_to_hf as part
from fsdp_parts.checkpoint_job import FULL, newest

HF_NAMES = {
    "embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head",
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip


def hf_name(name):
    """Return Hugging Face's name of one of our weights: "blocks.3.up.weight" and the like."""
    _, layer, part = re.fullmatch(r"(blocks\.(\d+)\.)?(.+)\.weight", name).groups()
    prefix = f"model.layers.{layer}." if layer else ""
    return f"{prefix}{HF_NAMES[part]}.weight"


def to_hf(weights, config):
    """Return weights, sharded or not, under Hugging Face's names; a tied head is left out.

    No row moves: both turn dim i of a head with dim i + head_dim / 2.
    """
    tied = {"head.weight"} if config.tied_embeddings else set()
    return {hf_name(name): tensor for name, tensor in weights.items() if name not in tied}


def from_hf(named, config):
    """Return weights under our names, the inverse of `to_hf`: a tied head is the embedding."""
    parts = {theirs: ours for ours, theirs in HF_NAMES.items()}
    weights = {}
    for name, tensor in named.items():
        _, layer, part = re.fullmatch(r"(model\.layers\.(\d+)\.)?(.+)\.weight", name).groups()
        prefix = f"blocks.{layer}." if layer else ""
        weights[f"{prefix}{parts[part]}.weight"] = tensor
    if config.tied_embeddings:
        weights["head.weight"] = weights["embedding.weight"]
    return weights


def export(job, model):
    """Write the weights of the newest checkpoint in Hugging Face's format."""
    load_weights(newest(job, job.args.dir), job, model)
    to = Path(job.args.to)
    files = export_sharded(model, job.config, to, job.files, job.args.max_shard_size)
    job.report.say(f"{files} file(s) of weights, config.json and an index")
    return to


def export_sharded(model, config, folder, group, max_shard_bytes):
    """Write config.json, safetensors files and their index for transformers; return the files.

    A collective of all ranks that hold `model` (FSDP, tensor parallelism, DDP or plain), on a disk
    that they share; `group` is a gloo group of them. Each byte is written twice and read once.
    """
    parts = folder / "sharded"
    named = to_hf(dcp_state.get_model_state_dict(model), config)
    named = {name: tensor.detach().float() for name, tensor in named.items()}
    files = part.file_of_each(named, max_shard_bytes)
    if dist.get_rank(group) == 0:
        parts.mkdir(parents=True)
    dist.barrier(group)
    writer = dcp.HuggingFaceStorageWriter(str(parts), files, save_distributed=True)

    dcp.save(named, storage_writer=writer, process_group=group)

    # Not the writer's own enable_consolidation: rank 0 would do it all, the others wait for it.
    consolidate_safetensors_files_on_every_rank(str(parts), str(folder), files, process_group=group)
    if dist.get_rank(group) == 0:
        shutil.rmtree(parts)
        part.hf_config(config).save_pretrained(folder)
    dist.barrier(group)
    return max(files.values())


def import_(job, model):
    """Make a checkpoint to train on from, of weights in Hugging Face's format."""
    source = Path(vars(job.args)["from"])
    part.refuse_other_config(source, job.config)
    load_hf(model, job.config, source, job.files)
    parts = (job.world.rank, job.world.world_size)
    run = checkpoint_job.start(job, model, None, parts)
    # This makes room for moments by a step with gradients 0 and rate 0. Adam has counted it, and
    # would correct the first real step as if it were the second.
    dcp_state.get_optimizer_state_dict(run.model, run.optimizer)
    for kept in run.optimizer.state.values():
        kept["step"].zero_()
    facts = checkpoint_job.facts_of(job, run)
    checkpoint_job.save_shards(run, Path(job.args.dir), 0, facts)
    load_weights(newest(job, job.args.dir), job, model)  # to check what was written
    return source


def load_hf(model, config, folder, group):
    """Fill a model from a folder's safetensors files, each rank its own shards. A collective.

    Raises: CheckpointException (no Exception) for a weight that is missing or of another shape.
    """
    named = to_hf(dcp_state.get_model_state_dict(model), config)
    reader = dcp.HuggingFaceStorageReader(str(folder))

    dcp.load(named, storage_reader=reader, process_group=group)

    dcp_state.set_model_state_dict(model, from_hf(named, config))


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
        named = to_hf(dcp_state.get_model_state_dict(model), job.config)
        equal = part.count_equal_in_files(named, theirs, job.files)  # each rank its own
        weights = len(list(model.parameters()))  # tied ones once
        job.report.check("weights equal in the files", equal, weights, 0, "the sharded model")
        if args.check_logits:
            tokens = torch.stack([job.text[index][0] for index in range(4)]).to(job.device)
            part.check_logits(job.report, model, theirs, tokens, job.files)
        else:
            job.report.say("logits not compared: --check-logits does, and holds the whole model")
        return job.report.finish(f"written to {args.to if exports else args.dir}")


if __name__ == "__main__":
    cli.run(main)
