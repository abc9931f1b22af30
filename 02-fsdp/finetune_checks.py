"""What fsdp_finetune.py starts from, refuses and proves."""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tabulate import tabulate
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader

from chat_data import generate
from dist_common import checkpoint, cli, data, proofs, runtime
from dist_common.cli import UsageError
from dist_common.measure import GIB
from dist_common.report import figure
from hf_names import count_equal_in_files
from memory_tools import require_memory
from shard_tools import held_bytes

with contextlib.suppress(ImportError):  # need_transformers says what to install
    import huggingface_hub
    import tokenizers
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    transformers.logging.disable_progress_bar()

SMALL = 50_000_000  # weights: one process can hold a smaller model whole beside the shards
MORE = 8  # tokens of padding
TINY_FILE = "200KB"  # so that even the tiny model has several files
OTHER_FILES = (".json", ".txt", ".model", ".jinja", ".py")
# float32 sums in another order differ in the last bits; bfloat16 keeps 8 bits.
TOLERANCE = {"32-true": 1e-5, "bf16-mixed": 5e-2}
NOT_SETTINGS = ("model", "export", "kill_at_step", "make_tiny", "ask", "max_new_tokens", "dry_run")

# what is started from


@dataclass(frozen=True)
class Stored:
    """A tensor of a folder: number of its file, from 1 on, shape and data type there."""

    file: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def need_transformers() -> None:
    """Raise UsageError, which names what to install, where Hugging Face's libraries are missing."""
    for name in ("transformers", "safetensors"):
        try:
            __import__(name)
        except ImportError as error:
            raise UsageError(f"{error}: pip install transformers safetensors") from error


def make_tiny(folder: str, seed: int, tied: bool = False) -> None:
    """Write a Llama of 0.1 million random weights, in several files, whose tokens are bytes."""
    claim_folder(folder, "--make-tiny")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    ids = {letter: number for number, letter in enumerate(letters)}
    by_byte = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=ids, merges=[]))
    by_byte.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    by_byte.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=by_byte, eos_token="</s>")
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=176, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=tied,
        initializer_range=0.1,  # not 0.02, which is for wide layers: it learns sooner
    )  # fmt: skip
    torch.manual_seed(seed)
    # As save_pretrained would, which imports DeepSpeed where it is installed. Tied weights once.
    weights = dict(LlamaForCausalLM(config).named_parameters())
    huggingface_hub.save_torch_state_dict(weights, folder, max_shard_size=TINY_FILE)
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = "float32"
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def tensors_of(model: nn.Module, folder: str) -> dict[str, Stored]:
    """Return where each weight of a model is in a folder's safetensors files. A collective.

    Raises: UsageError for files that cannot be read, or a weight missing or of another shape.
    """
    found = runtime.from_rank0(_headers(folder) if dist.get_rank() == 0 else None)
    if isinstance(found, str):
        raise UsageError(f"--model {folder}: {found}")
    weights = dict(model.named_parameters())
    for name, weight in weights.items():
        there = list(found[name][1]) if name in found else "missing"
        if there != list(weight.shape):
            raise UsageError(
                f"--model {folder}: {name} is {there} in its safetensors files and "
                f"{list(weight.shape)} by its config.json"
            )
    files = sorted({found[name][0] for name in weights})
    return {name: Stored(files.index(found[name][0]) + 1, *found[name][1:]) for name in weights}


def _headers(folder: str) -> dict[str, tuple] | str:
    """Return (file, shape, data type) by name, from the files' headers; or why it cannot."""
    try:
        metadata = HuggingFaceStorageReader(folder).read_metadata()
    except Exception as error:  # safetensors has kinds of its own
        return f"a safetensors file is damaged ({error})"
    stored = metadata.storage_data.items()
    return {index.fqn: (i.relative_path, tuple(i.shape), i.dtype) for index, i in stored} or (
        "no *.safetensors in it (older models have *.bin: load one with transformers and call "
        "save_pretrained)"
    )


def copy_other_files(source: Path, folder: Path) -> None:
    """Copy what transformers needs beside the weights: configuration and tokenizer."""
    for path in source.iterdir():
        if path.suffix in OTHER_FILES and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)


# what is refused


def claim_folder(folder: str | None, flag: str) -> None:
    """Make the empty folder that `flag` names. Raises: UsageError if it is used or unwritable."""
    if not folder:
        return
    path = Path(folder)
    try:  # now, and not after days of training
        path.mkdir(parents=True, exist_ok=True)
        used = any(path.iterdir())
    except OSError as error:
        raise UsageError(f"{flag} {folder} cannot be written: {error.strerror}") from error
    if used:
        raise UsageError(f"{flag} {folder} is not empty: name another folder")


def load(args, kind, what: str):
    """Return what transformers' `kind` reads from --model. Raises: UsageError when it cannot."""
    if not Path(args.model, "config.json").is_file():  # else transformers would ask its hub
        raise UsageError(f"--model {args.model}: no config.json in it: is it a model's folder?")
    try:
        return kind.from_pretrained(args.model)
    except Exception as error:  # of transformers' many kinds
        why = " ".join(str(error).split())[:200]
        raise UsageError(f"--model {args.model}: cannot read its {what} ({why})") from error


def refuse(args, model: nn.Module, device: torch.device | None = None) -> None:
    """Stop before anything is allocated. A collective where a device is given.

    Raises: UsageError for a model whose units the template would not find, for sequences too long
    for it, or when weights, gradients and Adam's moments do not fit into the ranks' memory.
    """
    decoder, kind = model.get_decoder(), type(model).__name__
    if not (hasattr(decoder, "layers") and hasattr(decoder, "norm")):
        raise UsageError(f"{kind} has no `layers` and `norm` as Llama has: adapt shard() to it")
    longest = getattr(model.config, "max_position_embeddings", args.seq_len)
    if args.seq_len > longest:
        raise UsageError(f"--seq-len must be at most {longest} for --model {args.model}")
    if device is not None:
        needed, ranks = 16 * weights_of(model), dist.get_world_size()
        require_memory(f"--model {args.model}", needed, ranks, device, runtime.discover())


def weights_of(model: nn.Module) -> int:
    """Return the number of weights, tied ones counted once."""
    return sum(weight.numel() for weight in model.parameters())


# what is said, and what is proved


def alone(args) -> int:
    """Do what --make-tiny, --ask or --dry-run says, in this one process; return the exit code."""
    if runtime.discover().world_size > 1:
        flag = "--make-tiny" if args.make_tiny else "--ask" if args.ask else "--dry-run"
        raise UsageError(f"{flag} is one process: start it with python, not torchrun")
    if args.make_tiny:
        make_tiny(args.make_tiny, args.seed)
        print(*sorted(path.name for path in Path(args.make_tiny).iterdir()))
    elif args.ask:
        load(args, AutoConfig, "config.json")
        print(generate(args.model, args.ask, args.max_new_tokens)[-1])
    else:
        say_needs(args)
    return 0


def start(run: SimpleNamespace, identity: str) -> None:
    """Claim --output-dir, settle --parity-steps, and print what is trained on what."""
    args, train_set, weights = run.args, run.train_set, weights_of(run.model)
    most = min(args.max_steps, math.ceil(len(train_set) / args.global_batch_size))
    if args.parity_steps is None:
        args.parity_steps = 2 if weights < SMALL else 0
    args.parity_steps = min(args.parity_steps, most)  # within the first epoch
    longest = max(len(tokens) for tokens in train_set.tokens) - 1
    run.report.start(
        f"{args.model}: {weights:,} weights in {max(s.file for s in run.source.values())} files",
        f"{len(train_set):,} pairs, {int(train_set.lengths.sum()):,} answer tokens, the longest "
        f"sequence {longest} of {args.seq_len} tokens; {train_set.left_out} too long, left out",
        identity,
    )


def settings_of(run: SimpleNamespace) -> dict:
    """Return what a checkpoint says about its run, but for flags that change no weight."""
    ranks, checksum = run.report.world.world_size, run.train_set.checksum()
    settings = checkpoint.settings_of(run.args, ranks, checksum)
    return {name: value for name, value in settings.items() if name not in NOT_SETTINGS}


@torch.no_grad()
def check_padding(run: SimpleNamespace, trim: Callable, summed_loss: Callable) -> None:
    """Check that a batch has the same loss trimmed, and padded to MORE than --seq-len."""
    args, device = run.args, run.report.device
    first = range(run.sampler.rank, len(run.train_set), run.sampler.world_size)
    items = [run.train_set[index] for index in first[: args.micro_batch_size]]
    inputs, targets = data.collate(args.micro_batch_size, args.seq_len, items)
    longer = (0, MORE)
    more = F.pad(inputs, longer, value=1), F.pad(targets, longer, value=data.IGNORED)
    sums = [
        summed_loss(run.model, batch[0].to(device), batch[1].to(device))
        for batch in (trim(inputs, targets), more)
    ]
    error = (sums[0] - sums[1]).abs() / sums[0]
    dist.all_reduce(error, op=dist.ReduceOp.MAX)
    name = f"relative error of a loss when padded to {args.seq_len + MORE} tokens"
    run.report.check(name, error.item(), 0, TOLERANCE[args.precision], "padding counts nowhere")


def one_process(run: SimpleNamespace, adamw: Callable) -> SimpleNamespace | None:
    """Train the plain model for --parity-steps, whole batches at once, and with attention masks.

    Return losses and norms (steps,), and the weights by name; None for no steps.
    """
    args, device = run.args, run.report.device
    if args.parity_steps == 0:
        run.report.say("not compared with one process (--parity-steps 0)")
        return None
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device)
    optimizer = adamw(model, args)
    order, expected = run.sampler.global_order(), SimpleNamespace(losses=[], norms=[])
    for step in range(1, args.parity_steps + 1):
        indices = order[(step - 1) * args.global_batch_size : step * args.global_batch_size]
        batch = [run.train_set[index] for index in indices]
        inputs, targets = (torch.stack(part).to(device) for part in zip(*batch, strict=True))
        used = torch.tensor([len(run.train_set.tokens[index]) - 1 for index in indices])
        mask = (torch.arange(args.seq_len) < used[:, None]).long().to(device)
        logits = model(input_ids=inputs, attention_mask=mask).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())  # the mean over answers
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = cli.lr_at(step, args)
        optimizer.step()
        expected.losses.append(loss.item())
        expected.norms.append(norm.item())
    expected.weights = {name: weight.detach() for name, weight in model.named_parameters()}
    return expected


@torch.no_grad()
def check_parity(run: SimpleNamespace, expected: SimpleNamespace | None) -> None:
    """Compare the steps so far with one process: losses, gradient norms, updated weights."""
    if expected is None:
        return
    report, tolerance = run.report, TOLERANCE[run.args.precision]
    losses, norms = (torch.tensor(column) for column in zip(*run.history, strict=True))
    proofs.same_losses(report, losses, torch.tensor(expected.losses), tolerance)
    error = (norms / torch.tensor(expected.norms) - 1).abs().max().item()
    # Adam undoes any factor of a gradient: weights alone would not show a wrong one.
    report.check("relative error of a gradient norm", error, 0, tolerance, "one process")
    if run.args.precision != "32-true":  # Adam takes a step of --lr, however small the gradient
        return
    errors = [
        (weight.full_tensor() - expected.weights[name]).abs().max().item()
        for name, weight in run.model.named_parameters()
    ]
    report.check("largest error of an updated weight", max(errors), 0, tolerance, "one process")


def check_tokens(run: SimpleNamespace, start: dict[str, int]) -> None:
    """Check that every answer token since `start`, a sampler's state, was trained on once."""
    lengths, now = run.train_set.lengths, run.sampler.state_dict()

    def up_to(state: dict[str, int]) -> int:
        sampler = data.ShardedSampler(len(lengths), 0, 1)
        sampler.load_state_dict(state)
        part = sampler.global_order()[: state["position"]]
        return int(state["epoch"] * lengths.sum() + lengths[part].sum())

    counted = up_to(now) - up_to(start)
    run.report.check("answer tokens trained on", run.trained_tokens, counted, 0, "each once")


def check_bytes(run: SimpleNamespace) -> None:
    """Check the bytes that the fullest rank holds: 4 + 4 + 8 per weight, cut by rows."""
    ranks = run.report.world.world_size
    shapes = [stored.shape for stored in run.source.values()]
    rows = sum(math.ceil(shape[0] / ranks) * math.prod(shape[1:]) for shape in shapes)
    kinds = (("weights", 4), ("gradients", 4), ("Adam's moments", 8))
    held = held_bytes(run.model, run.optimizer)
    for (kind, size), measured in zip(kinds, held, strict=True):
        source = "ZeRO paper, section 3.1"
        run.report.check(f"{kind}: bytes on the fullest rank", measured, size * rows, 0, source)


@torch.no_grad()
def check_export(run: SimpleNamespace) -> None:
    """Check an export's files against the shards; of a small model also what transformers computes.

    Each rank reads its own rows again, so that this serves for a model of any size.
    """
    report, folder = run.report, run.args.export
    found = tensors_of(run.model, folder)
    differing = sum(found[name] != stored for name, stored in run.source.items())
    report.check("tensors of another file, shape or type", differing, 0, 0, "--model")
    exported = {
        name: weight.to(run.source[name].dtype) for name, weight in run.model.named_parameters()
    }
    equal = count_equal_in_files(exported, folder, run.files)
    report.check("weights equal in the files", equal, len(run.source), 0, "the shards")
    if run.args.parity_steps:  # rank 0 alone holds the whole model
        check_generated(run)


@torch.no_grad()
def check_generated(run: SimpleNamespace) -> None:
    """Check that transformers computes the shards' logits and tokens from the exported files."""
    args, report, folder = run.args, run.report, run.args.export
    by_transformers = None
    if report.world.is_rank0:
        model, tokens, start, answer = generate(folder, run.pairs[0][0], args.max_new_tokens)
        by_transformers = tokens, start, answer, model(tokens[None]).logits[0]
    tokens, start, answer, expected = runtime.from_rank0(by_transformers)
    ids = tokens[None].to(report.device)
    logits = run.model(input_ids=ids, use_cache=False).logits[0].float().cpu()  # (T, V)
    error = ((logits - expected).abs().max() / expected.abs().max()).item()
    exact = {stored.dtype for stored in run.source.values()} == {torch.float32}
    exact &= args.precision == "32-true"
    tolerance = TOLERANCE["32-true" if exact else "bf16-mixed"]
    name = "relative error of an exported model's logit"
    report.check(name, error, 0, tolerance, "the sharded model")
    if exact:  # in 16 bits two tokens may be equally likely
        same = int((logits.argmax(dim=-1)[start - 1 : -1] == tokens[start:]).sum())
        name = "tokens generated by transformers"
        report.check(name, same, len(tokens) - start, 0, "the sharded model's likeliest")
    report.say(f"{run.pairs[0][0]!r} -> {answer!r}")


# what a large model needs


def say_needs(args) -> None:
    """Print what each of --world-size ranks needs for --model: state exactly, the rest about."""
    config = load(args, AutoConfig, "config.json")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    refuse(args, model)
    weights = weights_of(model)
    layer = sum(weight.numel() for weight in model.get_decoder().layers[0].parameters())
    tokens = args.micro_batch_size * args.seq_len
    compute = 2 if args.precision == "bf16-mixed" else 4
    shard = weights / args.world_size
    held = [
        ("weights, float32", 4 * shard),
        ("gradients, float32", 4 * shard),
        ("Adam's two moments, float32", 8 * shard),
        ("two layers gathered to compute with", 2 * compute * layer),
        ("a layer's gradient before it is sharded", (compute + 4) * layer),
        ("activations kept: one per layer", compute * len(model.get_decoder().layers)
         * tokens * config.hidden_size),
        ("logits, their float32 copy and gradient", (compute + 8) * tokens * config.vocab_size),
    ]  # fmt: skip
    largest, _ = max(held, key=lambda row: row[1])
    held.append(("all of it at once", sum(size for _, size in held)))
    rows = [(name, f"{size / GIB:.2f}") for name, size in held]
    print(f"{args.model}: {weights:,} weights on {args.world_size} ranks, {args.precision}, "
          f"{args.micro_batch_size} x {args.seq_len} tokens")  # fmt: skip
    sides = ("left", "right")
    print(tabulate(rows, ("one rank", "GiB"), "simple", colalign=sides, disable_numparse=True))
    if largest.startswith("logits"):
        print("the logits are the largest: lower --micro-batch-size or --seq-len, or compute the "
              "loss in slices as summed_loss of fsdp_transformer.py does")  # fmt: skip
    print(f"on disk: {12 * weights / GIB:.1f} GiB for a checkpoint")


def draw_batch(run: SimpleNamespace) -> None:
    """Draw which tokens of the first global batch count, to batch.png."""
    if not (run.report.output and run.report.world.is_rank0):
        return
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    args, ranks = run.args, run.report.world.world_size
    first = run.sampler.global_order()[: args.global_batch_size]
    colors = ListedColormap(["white", "#bbbbbb", "#4477aa"])
    size = {"figsize": (8, 1 + 1.1 * ranks), "sharex": True, "squeeze": False}
    with figure(run.report.output / "batch.png", ranks, 1, **size) as axes:
        for rank, axis in enumerate(axes[:, 0]):
            rows = [run.train_set[index] for index in first[rank::ranks]]
            inputs, targets = (torch.stack(part) for part in zip(*rows, strict=True))
            used = [len(run.train_set.tokens[index]) - 1 for index in first[rank::ranks]]
            real = torch.arange(inputs.shape[1]) < torch.tensor(used)[:, None]
            kinds = real.int() + (targets != data.IGNORED).int()
            axis.imshow(kinds, colors, vmin=0, vmax=2, aspect="auto", interpolation="none")
            axis.set_yticks([])
            axis.set_ylabel(f"rank {rank}")
            axis.set_title(f"{int((kinds == 2).sum())} tokens count", fontsize=9, loc="right")
            for row in range(args.micro_batch_size, len(rows), args.micro_batch_size):
                axis.axhline(row - 0.5, color="black", linewidth=1)
        axes[-1, 0].set_xlabel("position in the sequence (lines between micro-batches)")
        names = zip(("padding", "prompt", "answer"), colors.colors, strict=True)
        boxes = [Patch(facecolor=color, edgecolor="black", label=name) for name, color in names]
        axes[0, 0].legend(handles=boxes, ncols=3, fontsize=8, loc="lower left",
                          bbox_to_anchor=(0, 1), borderaxespad=0.2)  # fmt: skip
