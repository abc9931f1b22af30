"""Save a sharded model in four ways, and load each on any number of ranks.

    CPU   torchrun --standalone --nproc-per-node=2 02-fsdp/fsdp_checkpoint.py \
              --output-dir runs/saved
    GPU   torchrun --standalone --nproc-per-node=gpu 02-fsdp/fsdp_checkpoint.py \
              --output-dir runs/saved

`--load runs/saved` loads all four, on any number of ranks. Look for: how long training
stands still, who writes how many bytes, and losses after loading that equal the losses
of one process that never stopped.

Sources: docs.pytorch.org, "Getting Started with Distributed Checkpoint (DCP)".
"""

import shutil
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from dist_common import cli, data, runtime
from dist_common.model import (
    PRESETS,
    Transformer,
    build_transformer,
    init_weights,
)
from dist_common.report import Report

SEQ_LEN = 64  # tokens
BATCH = 12  # sequences per step on all ranks together
SAVE_AT = 3  # the step after which all are saved
STEPS = 6
SEQUENCES = data.Sequences(data.load_text(), SEQ_LEN)
LR = 1e-3


def build(config, seed, device):
    """Return a sharded model and its optimizer; a rank allocates only its shards."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    with torch.device("meta"):
        model = Transformer(config)
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh)
    model.to_empty(device=device)
    init_weights(model, seed)
    return model, torch.optim.AdamW(model.parameters(), lr=LR)


def train(model, optimizer, steps, rank=0, world_size=1):
    """Train this rank's share of some steps; return the mean losses of their batches.

    Each step takes the next sequences of the text, whatever the number of ranks.
    Raises: UsageError for more ranks than sequences.
    """
    if world_size > BATCH:
        raise cli.UsageError(f"use at most {BATCH} ranks: a step has {BATCH} sequences")
    device = next(model.parameters()).device
    losses = []
    for step in steps:
        indices = range(step * BATCH + rank, (step + 1) * BATCH, world_size)
        pairs = [SEQUENCES[index] for index in indices]
        inputs, targets = (
            torch.stack(part).to(device) for part in zip(*pairs, strict=True)
        )
        logits = model(inputs)  # (B, T, V)
        loss = F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="sum"
        ) / (BATCH * SEQ_LEN)
        (loss * world_size).backward()  # FSDP averages over ranks: undo it
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    losses = torch.stack(losses)
    if world_size > 1:
        dist.all_reduce(losses)
    return losses.cpu()


# Shards: each rank writes and reads its own part.

BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


def state_of(model, optimizer):
    """Return weights and moments by name, each a DTensor: a shard and its place."""
    weights, moments = get_state_dict(model, optimizer, options=BY_NAME)
    return {"model": weights, "optimizer": moments}


def save_shards(model, optimizer, folder, group):
    """Write one file per rank; rank 0 adds .metadata, which rows are in which file."""
    dcp.save(state_of(model, optimizer), checkpoint_id=folder, process_group=group)


def save_in_background(model, optimizer, folder, group):
    """Copy the shards to host memory; a thread writes them. Returns: a future."""
    state = state_of(model, optimizer)
    return dcp.async_save(state, checkpoint_id=folder, process_group=group)


def load_shards(model, optimizer, folder, group):
    """Fill the shards of this rank, whoever wrote them."""
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder, process_group=group)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=BY_NAME,
    )


# One file: rank 0 writes and reads everything.


def save_file(model, optimizer, folder, group):
    """Gather the whole state on rank 0, which writes it. A collective."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)  # on every rank
    moments = get_optimizer_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        folder.mkdir()
        torch.save({"model": weights, "optimizer": moments}, folder / "whole.pt")
    dist.barrier(group)


def load_file(model, optimizer, folder, group):
    """Rank 0 reads the file and sends tensor by tensor; each rank keeps its shard."""
    state = {"model": {}, "optimizer": {}}
    if dist.get_rank() == 0:
        state = torch.load(folder / "whole.pt", mmap=True, weights_only=True)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    # Two calls: set_state_dict skips the weights on a rank that passes an empty dict.
    set_model_state_dict(model, state["model"], options=options)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)


# Hugging Face: weights only, under the names that transformers uses.

HF_NAMES = {
    "embedding.": "model.embed_tokens.",
    "blocks.": "model.layers.",
    "attention_norm.": "input_layernorm.",
    "ffn_norm.": "post_attention_layernorm.",
    "attention.w": "self_attn.",
    "gate.": "mlp.gate_proj.",
    "up.": "mlp.up_proj.",
    "down.": "mlp.down_proj.",
    "head.": "lm_head.",
}


def hf_name(name):
    """Return the name that transformers gives this weight of a Llama."""
    for ours, theirs in HF_NAMES.items():
        name = name.replace(ours, theirs)
    if name.startswith("norm."):
        return f"model.{name}"
    for letter in "qkvo":
        name = name.replace(f"self_attn.{letter}.", f"self_attn.{letter}_proj.")
    return name


def hf_config(config):
    """Return the same shape as a configuration of transformers."""
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        intermediate_size=config.ffn_dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        max_position_embeddings=config.max_seq_len,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )


def export_hf(model, optimizer, folder, group):
    """Write safetensors: each rank its shards, then rank 0 joins them."""
    weights = {hf_name(n): w for n, w in get_model_state_dict(model).items()}
    writer = dcp.HuggingFaceStorageWriter(
        str(folder),
        dict.fromkeys(weights, 1),  # all in file 1
        save_distributed=True,
        enable_consolidation=True,
    )
    dcp.save(weights, storage_writer=writer, process_group=group)
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "sharded")
        hf_config(model.config).save_pretrained(folder)
    dist.barrier(group)


def import_hf(model, optimizer, folder, group):
    """Fill this rank's shards from safetensors files; the moments stay new."""
    weights = {hf_name(n): w for n, w in get_model_state_dict(model).items()}
    reader = dcp.HuggingFaceStorageReader(str(folder))
    dcp.load(weights, storage_reader=reader, process_group=group)


LOADERS = {
    "shards": load_shards,
    "background": load_shards,
    "one-file": load_file,
    "hugging-face": import_hf,
}


def save_all(args, run, config):
    """Train, save in each way, train on; return the ms that training stood still."""
    model, optimizer = build(config, args.seed, run.device)
    ranks = run.rank, run.world_size
    train(model, optimizer, range(SAVE_AT), *ranks)
    stall_ms = {}
    for way, save in (
        ("shards", save_shards),
        ("one-file", save_file),
        ("hugging-face", export_hf),
        ("background", save_in_background),
    ):
        started = time.perf_counter()
        writing = save(model, optimizer, args.folder / way, run.cpu_group)
        stall_ms[way] = (time.perf_counter() - started) * 1e3
    # The weights change while the thread writes its copy.
    train(model, optimizer, range(SAVE_AT, STEPS), *ranks)
    writing.result()  # a script that ends earlier has saved nothing
    return stall_ms


def losses_after(way, args, run, config):
    """Load a checkpoint into a model with other weights; return its next losses."""
    model, optimizer = build(config, args.seed + 1, run.device)
    LOADERS[way](model, optimizer, args.folder / way, run.cpu_group)
    # Without moments only the first loss can agree: it depends on the weights alone.
    end = SAVE_AT + 1 if way == "hugging-face" else STEPS
    steps = range(SAVE_AT, end)
    return train(model, optimizer, steps, run.rank, run.world_size)


@torch.no_grad()
def loss_in_transformers(folder):
    """Return the loss of the first batch after saving, as transformers computes it."""
    logging.disable_progress_bar()
    model = LlamaForCausalLM.from_pretrained(folder)
    first = SAVE_AT * BATCH
    pairs = [SEQUENCES[index] for index in range(first, first + BATCH)]
    inputs, targets = (torch.stack(part) for part in zip(*pairs, strict=True))
    logits = model(inputs).logits  # (B, T, V)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()


def print_files(report, folder, stall_ms):
    """Print who wrote how much; return the bytes of the one file."""
    rows = []
    for way in LOADERS:
        files = [path for path in (folder / way).iterdir() if path.suffix != ".json"]
        sizes = [path.stat().st_size for path in files]
        still = f"{stall_ms[way]:.0f} ms" if way in stall_ms else "-"
        megabytes = (f"{size / 1e6:.2f}" for size in (sum(sizes), max(sizes)))
        rows.append((way, still, len(files), *megabytes))
    report.table(rows, ("way", "stands still", "files", "MB in all", "largest file"))
    return (folder / "one-file" / "whole.pt").stat().st_size


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    parser.add_argument(
        "--load", type=Path, metavar="DIR", help="save nothing, load what is there"
    )
    args = parser.parse_args()
    args.folder = args.load or args.output_dir
    if not args.folder:
        raise cli.UsageError("name a folder: --output-dir to save, --load to load")
    if args.load and not args.load.is_dir():
        raise cli.UsageError(f"--load {args.load}: no such folder")
    return args


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as run:
        report = Report("02-fsdp/fsdp_checkpoint.py", args, run)
        config = PRESETS["tiny"]
        stall_ms = {} if args.load else save_all(args, run, config)
        expected = None
        if run.rank == 0:  # one process that never stops
            model = build_transformer(config, args.seed, run.device)
            optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
            losses = train(model, optimizer, range(STEPS))
            in_transformers = loss_in_transformers(args.folder / "hugging-face")
            size = print_files(report, args.folder, stall_ms)
            expected = losses, in_transformers, size
        losses, in_transformers, size = runtime.from_rank0(expected, run.cpu_group)
        for way in LOADERS:
            after = losses_after(way, args, run, config)
            errors = after - losses[SAVE_AT : SAVE_AT + len(after)]
            error = errors.abs().max().item()
            report.check(f"largest error of a loss, {way}", error, 0, 1e-5)
        after_saving = losses[SAVE_AT].item()
        report.check("loss in transformers", in_transformers, after_saving, 1e-5)
        # 12 bytes per weight in float32: the weight and Adam's two moments.
        bytes_of_state = 12 * config.num_parameters()
        report.check("bytes of one-file", size, bytes_of_state, bytes_of_state // 50)
        return report.finish(f"loss {losses[-1]:.4f} after step {STEPS}, saved or not")


if __name__ == "__main__":
    cli.run(main)
