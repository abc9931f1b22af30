"""Read a Hugging Face folder into shards, and write one from shards."""

import contextlib
import json
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.api import CheckpointException
from transformers import AutoConfig, AutoTokenizer

from dist_common.checkpoint import find_reason
from dist_common.cli import UsageError

INDEX = "model.safetensors.index.json"
COPIED = (".json", ".txt", ".model", ".jinja")  # configuration and tokenizer
# Of tokenizers without a chat template: the prompt, a line's end, the answer.
PLAIN_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + eos_token }}{% endgeneration %}{% else %}{{ m.content + '\n' }}"
    "{% endif %}{% endfor %}"
)


def load_pretrained(folder, kind):
    """Return what a class of transformers reads from a folder. Raises: UsageError."""
    if not (folder / "config.json").is_file():  # transformers would ask its hub
        raise UsageError(f"{folder} has no config.json: is it the folder of a model?")
    try:
        return kind.from_pretrained(folder)
    except (ImportError, KeyError, OSError, ValueError) as error:
        raise UsageError(f"{folder}: {error}") from error


def load_config(folder, seq_len):
    """Return a model's configuration and its tokenizer, with a chat template.

    Raises: UsageError when they do not fit together or cannot read `seq_len` tokens.
    """
    config = load_pretrained(folder, AutoConfig)
    tokenizer = load_pretrained(folder, AutoTokenizer)
    if seq_len > config.max_position_embeddings:
        raise UsageError(f"--seq-len must be at most {config.max_position_embeddings}")
    if tokenizer.eos_token_id is None:
        raise UsageError(
            f"{folder}: the tokenizer has no token that ends an answer: set eos_token "
            "in tokenizer_config.json"
        )
    if len(tokenizer) > config.vocab_size:
        raise UsageError(
            f"{folder}: the tokenizer has {len(tokenizer)} tokens, but vocab_size in "
            f"config.json is {config.vocab_size}: call "
            "model.resize_token_embeddings and save_pretrained"
        )
    if tokenizer.chat_template is None:
        adds_bos = tokenizer.bos_token_id in tokenizer("").input_ids
        bos = "{{ bos_token }}" if adds_bos else ""
        tokenizer.chat_template = bos + PLAIN_TEMPLATE
    return config, tokenizer


def named_as_in_files(model):
    """Return the tensors of a model that files hold, sharded or not, by name.

    The names are the same if peft has wrapped the model.
    """
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    return {
        name.replace(".base_layer", ""): tensor
        for name, tensor in model.state_dict().items()
        if "lora_" not in name and name not in model.all_tied_weights_keys
    }


@contextlib.contextmanager
def one_line_errors(what):
    """Raise UsageError for files that cannot be read or written."""
    try:
        yield
    except (OSError, KeyError, ValueError, SafetensorError, CheckpointException) as e:
        raise UsageError(f"cannot {what} {find_reason(e, dist.get_rank())}") from e


def find_weights(folder):
    """Return the file of each tensor, by name: the files that transformers takes.

    These are model.safetensors, else the files that the index lists. Raises: UsageError
    when neither can be read.
    """
    single = folder / "model.safetensors"
    if not single.exists() and not (folder / INDEX).exists():
        raise UsageError(
            f"{folder} has neither model.safetensors nor {INDEX}: load other formats "
            "with transformers and call save_pretrained"
        )
    with one_line_errors(f"read {folder}"):
        if not single.exists():
            return json.loads((folder / INDEX).read_text())["weight_map"]
        with safe_open(single, "pt") as file:
            return dict.fromkeys(file.keys(), single.name)


@contextlib.contextmanager
def open_reader(folder, files):
    """Yield PyTorch's reader of these files alone: by itself it takes all it finds."""
    with tempfile.TemporaryDirectory() as links, one_line_errors(f"read {folder}"):
        for name in set(files.values()):
            Path(links, name).symlink_to((folder / name).resolve(strict=True))
        yield dcp.HuggingFaceStorageReader(links)


def read(run, folder, model):
    """Fill a model from a folder; each rank reads only its shards. A collective.

    Raises: UsageError, naming a tensor, when files and model differ.
    """
    weights, files = named_as_in_files(model), find_weights(folder)
    tied = model.all_tied_weights_keys
    copies = {n: torch.empty_like(weights[tied[n]]) for n in tied if n in files}
    both = {**weights, **copies}
    with open_reader(folder, files) as reader:
        dcp.load(both, storage_reader=reader, process_group=run.cpu_group)
    for name, copy in copies.items():
        if not torch.equal(copy, weights[tied[name]]):  # on all ranks, if sharded
            raise UsageError(
                f"{folder}: config.json ties {name} to {tied[name]}, but the files "
                "hold two different tensors: set tie_word_embeddings to false"
            )
    unused = {path.name for path in folder.glob("*.safetensors")} - {*files.values()}
    unused |= files.keys() - both.keys()
    if unused:
        run.print0(f"ignored in {folder}, as transformers does: {sorted(unused)}")


def write(run, folder, model, like):
    """Write a model for transformers, with files and type as in `like`. A collective.

    Configuration and tokenizer are copied from `like`. The folder gets its name when it
    is complete. Raises: UsageError when it cannot be written.
    """
    weights, files = named_as_in_files(model), find_weights(like)
    names = sorted({files[name] for name in weights})
    dtype = load_pretrained(like, AutoConfig).dtype or torch.float32
    weights = {name: weight.to(dtype) for name, weight in weights.items()}
    partial = folder.with_name(f"{folder.name}.partial")
    if run.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
    dist.barrier(run.cpu_group)
    # Each rank writes its shards; then rank 0 joins them in files for transformers.
    writer = dcp.HuggingFaceStorageWriter(
        str(partial),
        {name: names.index(files[name]) + 1 for name in weights},
        save_distributed=True,
        enable_consolidation=True,
    )
    with one_line_errors(f"write {folder}"):
        dcp.save(weights, storage_writer=writer, process_group=run.cpu_group)
    if run.rank == 0:
        shutil.rmtree(partial / "sharded")
        for path in like.iterdir():
            if path.suffix in COPIED and path.name != INDEX:
                shutil.copyfile(path, partial / path.name)
        partial.rename(folder)
    dist.barrier(run.cpu_group)
