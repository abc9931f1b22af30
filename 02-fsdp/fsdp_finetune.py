"""Fine-tune a Hugging Face model under FSDP2, from its files back into such files: a template.

    CPU   torchrun --standalone --nproc-per-node=2 02-fsdp/fsdp_finetune.py \
              --model runs/tiny-llama --data runs/tiny-llama/pairs.jsonl
    GPU   torchrun --standalone --nproc-per-node=gpu 02-fsdp/fsdp_finetune.py --model DIR \
              --data pairs.jsonl --precision bf16-mixed --output-dir runs/7b --export runs/7b-tuned

`--make-tiny DIR` writes a tiny model and pairs to start from. A real model's DIR holds config.json,
tokenizer and *.safetensors of Llama, Gemma, Mixtral or others (a table on the page); no rank ever
holds it whole.
`--lora-rank 8` freezes it and trains adapters, which peft loads beside the exported model.
`--packing` puts several chats into a row, each attending to itself alone.
Look for: loss and gradient of one plain process, on any number of ranks; the same logits from the
exported files as from the shards; 16 bytes per weight, divided by the ranks.

To copy: take this file and legacy_common/ without lab/; delete the lines from "proofs" to "end of
proofs". Delete what you do not need (`proofs`, `evaluate`, `export`, `add_adapters`), each with
what uses it.

Sources: PyTorch documentation, fully_shard and torch.distributed.checkpoint; Taori et al., Stanford
Alpaca (2023), for learning rate and global batch of a 7B model; Hu et al., LoRA (2022), section 4.
"""

import bisect
import functools
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from legacy_common import checkpoint as checkpoints
from legacy_common import cli, data, hf, job, measure, models, runtime
from legacy_common.report import Report

try:
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers import core_model_loading as tables
    from transformers.conversion_mapping import get_model_conversion_mapping
except ImportError:  # parse_args says what to install
    AutoConfig = None

HELD_OUT = 20  # each twentieth chat is not trained on, but tested on
MARKS = re.compile(r"\{%-?\s*generation\b")  # of answers, in a chat template
ROLES = ("system", "user", "assistant")
# Types of models that keep packed chats apart by their positions: a test holds each. gpt_oss has
# transformers make its mask without them.
PACKED = {"deepseek_v3", "gemma2", "gemma3_text", "gpt2", "granite", "llama", "mistral", "mixtral",
          "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3"}  # fmt: skip
# What turns experts that files hold one by one into one weight of all
ONE_BY_ONE = ("[MergeModulelist(dim=0)]", "[MergeModulelist(dim=0), Concatenate(dim=1)]")


@dataclass
class Run:
    """What the functions of this script share."""

    job: job.Job  # flags, data, and the place in them
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    names: dict  # of each weight in the files of --model; of experts, a list: those of their parts
    source: dict  # what the files say of each name: relative_path, shape, dtype

    def weights(self):
        return weights_of(self.model)

    def by_file_names(self, weights):
        return as_in_files(weights, self.names)


def prompt_ids(tokenizer, prompt):
    """Return the tokens up to an answer, in the chat format of the model. Ask it by these too."""
    if tokenizer.chat_template:
        return rendered(
            tokenizer, [{"role": "user", "content": prompt}], add_generation_prompt=True
        )
    return tokenizer(f"{prompt}\n").input_ids


def chat_ids(tokenizer, messages):
    """Return a chat's tokens up to its last answer's end, and which of them are an answer's.

    Shapes: (T,) both. Each answer ends with the token that says so. Raises: ValueError where the
    template loses text, or hides what is an answer.
    """
    if not tokenizer.chat_template:
        if [message["role"] for message in messages] != ["user", "assistant"]:
            raise ValueError("the tokenizer of --model has no chat template: give pairs")
        tokens = prompt_ids(tokenizer, messages[0]["content"])
        start = len(tokens)
        tokens += tokenizer(messages[1]["content"], add_special_tokens=False).input_ids
        tokens.append(tokenizer.eos_token_id)
        return tokens, [place >= start for place in range(len(tokens))]
    text = rendered(tokenizer, messages, tokenize=False)
    for number, message in enumerate(messages, 1):
        if message["content"].strip() not in text:
            raise ValueError(f"the chat template leaves out or rewrites message {number}")
    if MARKS.search(tokenizer.get_chat_template()):
        marked = rendered(tokenizer, messages, return_assistant_tokens_mask=True, return_dict=True)
        tokens, counted = marked["input_ids"], [bool(mark) for mark in marked["assistant_masks"]]
    else:
        tokens = rendered(tokenizer, messages)
        counted = [False] * len(tokens)
        for turn in [n for n, message in enumerate(messages) if message["role"] == "assistant"]:
            start, end = answer_in(tokens, tokenizer, messages[:turn], messages[: turn + 1])
            counted[start:end] = [True] * (end - start)
    if not any(counted[1:]):
        raise ValueError("the chat template marks no answer in it")
    end = len(tokens) - counted[::-1].index(True)
    return tokens[:end], counted[:end]


def answer_in(tokens, tokenizer, before, after):
    """Return where an answer's tokens begin and end: what the messages after it have more.

    Raises: ValueError where the model, asked with those before it, would not read the same.
    """
    asked = rendered(tokenizer, before, add_generation_prompt=True)
    answered = rendered(tokenizer, after)
    start, end = len(asked), len(answered)
    if tokens[:start] != asked or tokens[:end] != answered:
        why = f"the chat template writes message {len(after)}, or those before it, otherwise"
        raise ValueError(f"{why} when more follows: mark answers in it by {{% generation %}}")

    while not tokenizer.decode(tokens[end - 1]).strip():
        end -= 1  # a line's end belongs to the next turn

    if tokenizer.decode(tokens[end - 1], skip_special_tokens=True):
        raise ValueError("no special token ends an answer in the chat template")
    return start, end


def rendered(tokenizer, messages, return_dict=False, **options):
    """Return what a chat template makes of messages. Raises: ValueError where it refuses them."""
    try:
        return tokenizer.apply_chat_template(messages, return_dict=return_dict, **options)
    except Exception as error:  # jinja2's, which the template raises
        raise ValueError(f"the chat template refuses it ({error})") from error


class Answers:
    """Inputs and targets of each row, (T,) each; the answers' tokens alone count, `lengths`.

    A row is a chat, or with `packing` as many as fit, and their positions: each begins at 0.
    Chats of more than T + 1 tokens are left out: an answer without its end would teach to go on.
    """

    def __init__(self, chats, tokenizer, seq_len, ranks, packing=False):
        self.seq_len, self.packing = seq_len, packing
        self.tokens = []
        self.counted = []
        for where, messages in chats:
            try:
                tokens, counted = chat_ids(tokenizer, messages)
            except ValueError as error:
                raise cli.UsageError(f"{where}: {error}") from error
            if len(tokens) <= seq_len + 1:
                self.tokens.append(tokens)
                self.counted.append(torch.tensor(counted))
        self.sizes = [len(tokens) - 1 for tokens in self.tokens]
        self.rows = pack(self.sizes, seq_len) if packing else [[n] for n in range(len(self.sizes))]
        answers = [int(counted[1:].sum()) for counted in self.counted]
        self.lengths = torch.tensor([sum(answers[chat] for chat in row) for row in self.rows])
        if len(self) < ranks:
            fit = f"{len(self.tokens)} of {len(chats)} {kind_of(chats)} fit into --seq-len"
            fit += f" {seq_len}, in {len(self)} rows" if packing else f" {seq_len}"
            raise cli.UsageError(f"{fit}, fewer than the {ranks} ranks: raise it, or add data")

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.row(self.rows[index])

    def row(self, chats):
        """Return one row of these chats: each of its tokens has the next one as its target."""
        tokens = [torch.tensor(self.tokens[chat]) for chat in chats]
        inputs = torch.cat([chat[:-1] for chat in tokens])
        targets = torch.cat([chat[1:] for chat in tokens])
        counted = torch.cat([self.counted[chat][1:] for chat in chats])

        targets[~counted] = data.IGNORED  # what is no answer
        positions = torch.cat([torch.arange(self.sizes[chat]) for chat in chats])

        padding = (0, self.seq_len - len(inputs))  # on the right, by any token: none is counted
        row = [F.pad(inputs, padding), F.pad(targets, padding, value=data.IGNORED)]
        return [*row, F.pad(positions, padding)] if self.packing else row


def pack(sizes, seq_len):
    """Return which chats share a row of seq_len tokens: the longest first, where it fits best."""
    rows = []
    space = []  # (tokens that are left, row), the fullest first
    for chat in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        place = bisect.bisect_left(space, (sizes[chat],))
        if place == len(space):
            space.append((seq_len, len(rows)))
            rows.append([])
        left, row = space.pop(place)
        rows[row].append(chat)
        bisect.insort(space, (left - sizes[chat], row))
    return rows


def trim(device, inputs, targets, *positions):
    """Move a batch, cut off columns that are padding in every row. Shapes: (B, T) -> (B, up to T).

    It moves as it is, from pinned memory without a wait: a part of its columns would be copied.
    """
    counted = (targets != data.IGNORED).any(dim=0).nonzero()
    end = int(counted[-1]) + 1 if len(counted) else 1
    return [part.to(device, non_blocking=True)[:, :end] for part in (inputs, targets, *positions)]


def build(args, mesh, device):
    """Return the model sharded over a mesh, with memory for this rank's shards, still unfilled.

    And where the files of --model hold its weights: `names` and `source` of Run.
    """
    model = draft(args)
    refuse(args, model, device)
    names, source = find_weights(model, args.model)
    for layer in layers_and_norm(model)[0]:
        # Backward computes a layer again instead of keeping its activations. Inside the unit:
        # when backward gets there, its weights have been gathered.
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    shard(model, mesh, args.precision)
    model.to_empty(device=device)
    model.tie_weights()  # to_empty has made two of a shared weight
    fill_buffers(model)
    fill_adapters(model, args.seed)
    return model, names, source


def draft(args):
    """Return the model as shapes without memory, with adapters. Raises: UsageError, by family."""
    config = load(args, AutoConfig, "config.json")
    refuse_family(args, config)
    for name, value in vars(config).items():
        if isinstance(value, float) and ("drop" in name or "jitter" in name):
            setattr(config, name, 0.0)  # noise that no other run would draw: off, also GPT-2's
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except ValueError as error:  # such as T5's
        why = "is no causal language model of transformers: take one of those"
        raise cli.UsageError(f"--model {args.model}: {config.model_type} {why}") from error
    layers_and_norm(model)
    if args.lora_rank:
        add_adapters(model, args)
    return model


def layers_and_norm(model):
    """Return a decoder's layers and its last norm. Raises: UsageError where it has none."""
    parts = list(model.get_decoder().children())
    layers = [part for part in parts if isinstance(part, torch.nn.ModuleList)]
    norms = [part for part in parts if "norm" in type(part).__name__.lower()]
    if len(layers) != 1 or not norms:
        has_none = "has no one list of layers and a norm after them, as Llama has"
        raise cli.UsageError(f"{type(model).__name__} {has_none}: adapt layers_and_norm() to it")
    return layers[0], norms[-1]


def shard(model, mesh, precision):
    """Make units of the embedding, each layer, and the last norm with the output layer."""
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mesh": mesh} | ({"mp_policy": bf16} if precision == "bf16-mixed" else {})
    layers, norm = layers_and_norm(model)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    for layer in layers:
        fully_shard(layer, **options)
    last = [norm, head]
    if head.weight is embedding.weight:  # tied weights have to be in one unit
        last.append(embedding)
    else:
        fully_shard(embedding, **options)
    fully_shard(last, reshard_after_forward=False, **options)  # backward begins with these
    fully_shard(model, **options)
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            # Add up gradients over ranks instead of their mean: the loss is divided already, by
            # the tokens of all ranks. As a plain sum, which every backend has.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)


def fill_buffers(model):
    """Have the model compute what no file holds, such as the frequencies of rotary embeddings."""
    for weight in model.parameters():
        weight._is_hf_initialized = True  # else transformers would draw it
    model.initialize_weights()


def summed_loss(model, inputs, targets, *positions):
    """Return the cross-entropy, summed over the answers' tokens. Shapes: (B, T) each."""
    # Padding is on the right, and attention looks to the left: it needs no mask. Of packed chats
    # transformers makes one from positions that begin again.
    packed = {"position_ids": positions[0]} if positions else {}
    logits = model(input_ids=inputs, use_cache=False, **packed).logits  # (B, T, V)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")


def accumulate_gradient(model, micro_batches, device):
    """Leave the mean gradient over all answer tokens of the global batch in the shards.

    Return this rank's sum of losses, and all ranks' number of tokens, both still on the device.
    """
    own = sum(int((targets != data.IGNORED).sum()) for _, targets, *_ in micro_batches)
    tokens = torch.full((), own, device=device)
    dist.all_reduce(tokens)
    loss_sum = torch.zeros((), device=device)
    for batch in micro_batches:
        loss = summed_loss(model, *trim(device, *batch))

        (loss / tokens).backward()  # by the tokens of all ranks: each counts alike

        loss_sum += loss.detach()
    return loss_sum, tokens


def train(run):
    """Take the steps that are left. The job evaluates, saves and stops between them."""
    steps = run.job.steps(evaluate=evaluate(run))
    max_norm = run.job.args.max_grad_norm
    if part := proofs():
        steps = part.proven_steps(run, steps, accumulate_gradient)
    for step in steps:
        run.optimizer.zero_grad()
        loss_sum, tokens = accumulate_gradient(run.model, step.micro_batches, run.job.device)
        for group in run.optimizer.param_groups:
            group["lr"] = step.lr
        norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), max_norm)
        run.optimizer.step()
        step.record(loss_sum, tokens, norm.full_tensor())  # nothing here waits for the device


def evaluate(run):
    """Return what measures the test loss, or None where no pair is held out."""

    def loss_of(*batch):
        return summed_loss(run.model, *trim(run.job.device, *batch))

    def test_loss():
        loss = run.job.evaluate(run.model, loss_of)
        layers_and_norm(run.model)[1].reshard()  # which forward keeps: no backward comes here
        return loss

    return test_loss if len(run.job.test_set) else None


def export(run, folder):
    """Write the weights as safetensors, named, cut and typed as --model's; adapters beside them."""
    files = sorted({stored.relative_path for stored in run.source.values()})
    file_of = {n: files.index(stored.relative_path) + 1 for n, stored in run.source.items()}
    weights = run.by_file_names(run.weights())
    weights = {name: w.to(run.source[name].dtype) for name, w in weights.items()}
    adapters = functools.partial(save_adapters, run.model, run.job.args)
    hf.write(weights, file_of, folder, run.job.store.group, run.job.args.model, adapters)


def proofs():
    """Return what proves this script, and has its --make-tiny, --ask and --dry-run: or None."""
    # proofs: a copy deletes these lines
    from fsdp_parts import fsdp_finetune as part

    return part
    # end of proofs


def parse_args():
    parser = cli.ArgumentParser(__doc__, resumes=True)
    add, positive = parser.add_argument, cli.positive_int
    add("--model", metavar="DIR", help="folder of a Hugging Face model with its tokenizer")
    add("--data", dest="text_file", metavar="FILE",
        help='lines of {"prompt": "...", "answer": "..."} or {"messages": [...]}')  # fmt: skip
    add("--seq-len", type=positive, default=128, help="most tokens of a chat or pair (128)")
    add("--packing", action="store_true", help="several chats in a row of --seq-len tokens")
    add("--micro-batch-size", type=positive, default=4, help="rows per rank at a time (4)")
    add("--grad-accum-steps", type=positive, help="micro-batches per rank and step (1)")
    add("--global-batch-size", type=positive, help="rows per step: sets --grad-accum-steps")
    add("--max-steps", type=positive, default=100, help="optimizer steps of the whole run (100)")
    add("--lr", type=cli.positive_float, default=2e-5, help="peak learning rate of AdamW (2e-5)")
    add("--warmup-steps", type=cli.whole_number, default=5, help="steps of linear warmup (5)")
    job.add_precision(parser, ("32-true", "bf16-mixed"))
    job.add_loop_flags(
        parser, sharded=True
    )  # --max-grad-norm, --log-every, --eval-every, --save-every, ...
    add("--export", metavar="DIR", help="write the tuned model for transformers to this folder")
    add("--lora-rank", type=positive, help="freeze the model; train adapters of this rank instead")
    add("--lora-alpha", type=positive, help="an adapter counts alpha / rank times (16)")
    add("--target-modules", nargs="+", metavar="NAME", help="layers with adapters (all linear)")
    if part := proofs():
        part.add_flags(parser)  # --make-tiny, --ask, --dry-run, --kill-at-step
    if AutoConfig is None:
        parser.error("transformers is missing or too old: pip install -U transformers safetensors")
    args = job.parse(parser)
    if not args.lora_rank and (args.lora_alpha or args.target_modules):
        parser.error("--lora-alpha and --target-modules need --lora-rank")
    if args.lora_rank:
        args.lora_alpha = args.lora_alpha or 16
    return args


# what is refused, before anything is allocated


def load(args, kind, what):
    """Return what transformers' `kind` reads from --model. Raises: UsageError when it cannot."""
    if not Path(args.model, "config.json").is_file():  # else transformers would ask its hub
        raise cli.UsageError(f"--model {args.model}: no config.json in it: is it a model's folder?")
    try:
        return kind.from_pretrained(args.model)
    except Exception as error:  # of transformers' many kinds
        why = " ".join(str(error).split())[:200]
        raise cli.UsageError(f"--model {args.model}: cannot read its {what} ({why})") from error


def refuse_family(args, config):
    """Stop where config.json says that the weights are of another kind. Raises: UsageError."""
    family = f"--model {args.model}: {config.model_type}"
    if getattr(config, "quantization_config", None):
        do = "take its folder in bfloat16, or make one as the page says for MXFP4"
        raise cli.UsageError(f"{family} in quantized files cannot be trained: {do}")
    if config.get_text_config() is not config:
        do = "save its language model alone, as the page says"
        raise cli.UsageError(f"{family} reads more than text, and this trains on text: {do}")
    if args.packing and config.model_type not in PACKED:
        why = "is not known to keep packed chats apart: train without --packing"
        raise cli.UsageError(f"{family} {why}")


def refuse(args, model, device):
    """Stop when this cannot work: UsageError. A collective."""
    longest = getattr(model.config, "max_position_embeddings", args.seq_len)
    if args.seq_len > longest:
        raise cli.UsageError(f"--seq-len must be at most {longest} for --model {args.model}")
    # 4 + 4 + 8 bytes: float32 weight, gradient and Adam's two moments; a frozen weight has none
    world = runtime.discover()
    ranks = world.world_size
    fullest = sum(  # of the rows, which are cut: of 8 experts on 16 ranks, one
        (16 if w.requires_grad else 4) * -(-len(w) // ranks) * (w.numel() // len(w))
        for w in model.parameters()
    )
    measure.require_memory(f"--model {args.model}", fullest * ranks, ranks, device, world)


def load_chats(path):
    """Return (place, messages) of each line of JSON: a chat, or a pair, which is one of two turns.

    Raises: UsageError naming the first bad line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or "not UTF-8 text"
        raise cli.UsageError(f"--data {path}: {cause}") from error
    chats = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"--data {path}, line {number}"
            try:
                chats.append((where, messages_in(json.loads(line))))
            except json.JSONDecodeError as error:
                raise cli.UsageError(f"{where}: not JSON ({error})") from error
            except ValueError as error:
                raise cli.UsageError(f"{where}: {error}") from error
    if not chats:
        raise cli.UsageError(f"--data {path} has no pair of a prompt and an answer, and no chat")
    return chats


def messages_in(line):
    """Return the messages of a line's object. Raises: ValueError, saying what is wrong with it."""

    def text_of(holder, name, of=""):
        if not (isinstance(holder.get(name), str) and holder[name].strip()):
            raise ValueError(f'{of}"{name}" is missing, empty or not text')
        return holder[name]

    if not isinstance(line, dict):
        raise ValueError(
            'not an object like {"prompt": "...", "answer": "..."} or {"messages": []}'
        )
    if "messages" not in line:
        pair = {"user": "prompt", "assistant": "answer"}
        return [{"role": role, "content": text_of(line, name)} for role, name in pair.items()]
    messages = line["messages"]
    if not (isinstance(messages, list) and all(isinstance(each, dict) for each in messages)):
        raise ValueError('"messages" is no list of objects with "role" and "content"')
    for number, message in enumerate(messages, 1):
        if message.get("role") not in ROLES:
            known = f"{', '.join(ROLES)} are known"
            raise ValueError(f'message {number}: "role" is {message.get("role")!r}; {known}')
        text_of(message, "content", f"message {number}: ")
    roles = [message["role"] for message in messages]
    if "user" not in roles or "assistant" not in roles[roles.index("user") :]:
        raise ValueError("no assistant's message after a user's, which could be trained on")
    return messages


def kind_of(chats):
    return "pairs" if all(len(messages) == 2 for _, messages in chats) else "chats"


def weights_of(model):
    """Return what files hold by the model's names: no adapters, tied weights once, few buffers."""
    kept = model.state_dict().keys()
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: w.detach() for name, w in named if name in kept and "lora_" not in name}


def names_in_files(model, weights, files):
    """Return by which of the files' names each weight is there, by transformers' own tables.

    Experts that files hold one by one have a list instead: the names of each expert's parts, which
    the weight has one below the other. Raises: UsageError where files hold it in another form.
    """
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, tables.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, tables.WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    rename = functools.partial(
        tables.rename_source_key, weight_renamings=renamings, weight_converters=converters,
        base_model_prefix=model.base_model_prefix, meta_state_dict=model.state_dict(),
    )  # fmt: skip
    names = {name: name for name in weights}
    for file_name in sorted(files, key=tables.dot_natural_key):  # expert 10 after expert 9
        name, pattern = rename(file_name)
        if name in weights and pattern is None:
            names[name] = file_name
        elif name in weights:
            if str(by_pattern[pattern].operations) not in ONE_BY_ONE:
                do = "load it by transformers, save_pretrained(DIR, save_original_format=False)"
                raise cli.UsageError(f"{name} has another form in the files ({file_name}): {do}")
            if isinstance(names[name], str):
                names[name] = {part: [] for part in by_pattern[pattern].source_patterns}
            names[name][pattern].append(file_name)
    for name, parts in names.items():
        if isinstance(parts, dict):
            if {len(part) for part in parts.values()} != {len(weights[name])}:
                raise cli.UsageError(f"{name} has experts of which the files miss some")
            names[name] = list(zip(*parts.values(), strict=True))
    return names


def as_in_files(weights, names):
    """Return weights by their names in files; of experts, views of those that this rank has."""
    found = {}
    for name, weight in weights.items():
        if isinstance(names[name], str):
            found[names[name]] = weight
            continue
        experts = models.cut_like(torch.arange(len(weight)), weight).tolist()
        for expert, own in zip(experts, models.local(weight), strict=True):
            parts = names[name][expert]  # such as gate and up
            found |= zip(parts, own.chunk(len(parts)), strict=True)
    return found


def stored_in(folder):
    """Return path, shape and dtype of each tensor in a folder's safetensors files."""
    try:
        metadata = dcp.HuggingFaceStorageReader(folder).read_metadata()
    except Exception as error:  # safetensors has kinds of its own
        why = f"a safetensors file is damaged ({error})"
        raise cli.UsageError(f"--model {folder}: {why}") from error
    return {index.fqn: stored for index, stored in metadata.storage_data.items()}


def find_weights(model, folder):
    """Return by which names a folder's files hold a model's weights, and what they say of each."""
    stored, weights = stored_in(folder), weights_of(model)
    if not stored:
        why = "older models have *.bin: load one with transformers and call save_pretrained"
        raise cli.UsageError(f"--model {folder}: no *.safetensors in it ({why})")
    names = names_in_files(model, weights, stored)
    weights = as_in_files(weights, names)
    source = {name: stored[name] for name in weights if name in stored}
    if problem := checkpoints.other_model({"tensors": checkpoints.shapes_of(source)}, weights):
        raise cli.UsageError(f"--model {folder}: its safetensors files are {problem}")
    return names, source


# adapters, for --lora-rank


class LoRA(torch.nn.Linear):
    """A frozen layer W, and beside it the thin A and B that are trained: W x + alpha/r B A x.

    W keeps its name, by which the files hold it. Shapes: W (out, in), A (r, in), B (out, r).
    """

    def __init__(self, layer, rank, alpha):
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None)
        self.requires_grad_(False)
        self.scale = alpha / rank
        self.lora_A = torch.nn.Linear(layer.in_features, rank, bias=False)
        self.lora_B = torch.nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x):
        return super().forward(x) + self.scale * self.lora_B(self.lora_A(x))


def add_adapters(model, args):
    """Freeze a model on meta, and add adapters to the layers that --target-modules names."""
    model.requires_grad_(False)
    decoder = model.get_decoder()  # without the output layer
    layers = [(n, m) for n, m in decoder.named_modules() if isinstance(m, torch.nn.Linear)]
    names = {path.split(".")[-1] for path, _ in layers}
    if not names:
        why = f"{type(model).__name__} has no linear layers that adapters could stand beside"
        raise cli.UsageError(f"--lora-rank: {why}: train it whole")
    args.target_modules = sorted(args.target_modules or names)
    if unknown := ", ".join(sorted(set(args.target_modules) - names)):
        has = f"--model {args.model} has {', '.join(sorted(names))}"
        raise cli.UsageError(f"--target-modules: {has}, not {unknown}")
    for path, layer in layers:
        if path.split(".")[-1] in args.target_modules:
            with torch.device("meta"):
                decoder.set_submodule(path, LoRA(layer, args.lora_rank, args.lora_alpha))


@torch.no_grad()
def fill_adapters(model, seed):
    """Draw each A whole, the same on any number of ranks. B is zero: it changes no answer yet."""
    generator = torch.Generator().manual_seed(seed)
    for layer in model.modules():
        if isinstance(layer, LoRA):
            A = layer.lora_A.weight
            whole = torch.empty(A.shape)
            torch.nn.init.kaiming_uniform_(whole, a=5**0.5, generator=generator)  # as peft does
            models.local(A).copy_(models.cut_like(whole, A))
            layer.lora_B.weight.zero_()


def save_adapters(model, args, folder):
    """Write the adapters as peft does, beside an exported base. A collective."""
    whole = {}
    for name, weight in model.named_parameters():
        if "lora_" in name:
            gathered = weight.detach().full_tensor()
            whole |= {} if dist.get_rank() else {f"base_model.model.{name}": gathered.cpu()}
    if whole:
        folder = folder / "adapter"
        folder.mkdir()
        save_file(whole, folder / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": args.lora_rank,
                  "lora_alpha": args.lora_alpha, "target_modules": args.target_modules,
                  "base_model_name_or_path": args.model}  # fmt: skip
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=1))


def refuse_other_base(the_job, args):
    """Stop where adapters of a checkpoint would meet another base or scale: it holds neither."""
    then = the_job.found[1]["settings"]
    for flag in ("lora_alpha", "base"):
        if then.get(flag) != the_job.settings[flag]:
            what = "--lora-alpha is" if flag == "lora_alpha" else f"--model {args.model} has files"
            was = f"{what} {the_job.settings[flag]} here and {then.get(flag)} in the checkpoint"
            raise cli.UsageError(f"{was}: its adapters fit that one alone")


def fingerprint(folder):
    """Return a checksum of the sizes and the first megabyte of a folder's safetensors files."""
    digest = hashlib.sha256()
    for path in sorted(Path(folder).glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(path.stat().st_size.to_bytes(8, "little") + file.read(1 << 20))
    return digest.hexdigest()[:8]


# the run


def set_up(args, report):
    """Return the run: model, optimizer, data and its place in it, ready for the first step."""
    world, device = report.world, report.device
    if not (args.model and args.text_file):
        data_too = "--data is missing: lines of prompts and answers, or of chats"
        missing = data_too if args.model else "--model is missing: a Hugging Face folder"
        raise cli.UsageError(f"{missing}; --make-tiny DIR writes a tiny one")
    runtime.seed_everything(args.seed)
    identity = data.settle_batch_sizes(args, world.world_size)
    chats = load_chats(args.text_file)
    kind = kind_of(chats)
    tokenizer = load(args, AutoTokenizer, "tokenizer")
    held_out = chats[HELD_OUT - 1 :: HELD_OUT]
    del chats[HELD_OUT - 1 :: HELD_OUT]
    train_set = Answers(chats, tokenizer, args.seq_len, world.world_size, args.packing)
    test_set = Answers(held_out, tokenizer, args.seq_len, 0)
    mesh = init_device_mesh(device.type, (world.world_size,))
    model, names, source = build(args, mesh, device)
    args.base = fingerprint(args.model) if args.lora_rank else None
    counted = [places.tolist() for places in train_set.counted]
    # Not the tokens: a chat template may write today's date, and a run resumes tomorrow.
    listed = json.dumps([[messages for _, messages in chats], counted, train_set.rows])
    checksum = hashlib.sha256(listed.encode()).hexdigest()[:8]
    the_job = job.Job(args, report, train_set, test_set, checksum, world.rank, world.world_size)
    files = len({stored.relative_path for stored in source.values()})
    left_out = len(chats) + len(held_out) - len(train_set.tokens) - len(test_set)
    full = sum(train_set.sizes) / (len(train_set) * args.seq_len)
    packed = f" in {len(train_set):,} rows, {full:.0%} full" if args.packing else ""
    answers = int(train_set.lengths.sum())
    trained = {name: w for name, w in model.named_parameters() if w.requires_grad}
    size = f"{sum(s.shape.numel() for s in source.values()):,} weights in {files} files"
    if args.lora_rank:
        number = model.num_parameters(only_trainable=True)
        size += f", frozen; {number:,} adapter weights are trained"
        if any("experts" in name for name, w in model.named_parameters() if w.dim() > 2):
            size += ", none in the experts"  # which are no linear layers
    report.start(
        f"{args.model}: {size}; {args.precision}",
        f"{len(train_set.tokens):,} {kind}{packed}, {answers:,} answer tokens, "
        f"the longest sequence {max(train_set.sizes)} of {args.seq_len} tokens; "
        f"{len(test_set):,} {kind} to test on; {left_out} too long, left out",
        identity,
    )
    # Of this rank's shards. Fused, it needs no memory beside its state.
    options = {"betas": (0.9, 0.95), "weight_decay": 0.0, "fused": True}
    optimizer = torch.optim.AdamW(trained.values(), args.lr, **options)
    the_job.store = checkpoints.Sharded(model, optimizer, trained, args.timeout)
    resumed = the_job.resume()
    hf.claim(the_job, args.export, "--export")
    if resumed and args.lora_rank:
        refuse_other_base(the_job, args)
    weights = weights_of(model)
    if resumed:  # from a checkpoint, which holds what is trained
        weights = {name: w for name, w in weights.items() if name not in trained}
    if weights:
        weights = as_in_files(weights, names)
        reader = dcp.HuggingFaceStorageReader(args.model)

        dcp.load(weights, storage_reader=reader, process_group=the_job.store.group)

    return Run(the_job, model, optimizer, names, source)


def main():
    args = parse_args()
    if (part := proofs()) and part.alone(args, load, prompt_ids, draft):
        return 0
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("02-fsdp/fsdp_finetune.py", args, world, device)
        run = set_up(args, report)
        if run.job.done and hf.exported(args.export):
            report.say(hf.nothing_to_do(run.job, args.export))
            return 0
        train(run)
        if args.export and run.job.done and not report.failed:
            export(run, args.export)
            report.say(f"exported to {args.export}")
            if part := proofs():
                part.check_export(run, stored_in(args.export))
        return report.finish(run.job.summary)


if __name__ == "__main__":
    cli.run(main)
