"""Fine-tune a Hugging Face model on chats with FSDP2, in full or with LoRA: a template.

Copy this file and dist_common, then change both.

    CPU   torchrun --standalone --nproc-per-node=2 02-fsdp/fsdp_finetune.py \
              --init-from runs/tiny-llama --data runs/tiny-llama/chats.jsonl
    GPU   torchrun --standalone --nproc-per-node=gpu 02-fsdp/fsdp_finetune.py \
              --init-from DIR --data chats.jsonl --seq-len 2048 --lr 2e-5 \
              --activation-checkpointing full --export runs/tuned

make_tiny_llama.py writes runs/tiny-llama. DIR holds config.json, a tokenizer and
safetensors files; each rank reads only its shards. Only the tokens of answers
count in the loss. --lora-rank trains adapters next to the frozen model. With
--output-dir and --resume the run can be killed at any moment and started again, on any
number of ranks. --self-check compares two steps with one process.

Sources: Zhao et al., PyTorch FSDP (VLDB 2023); Hu et al., LoRA (2022), section 4.
"""

import hashlib
import json
import os
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import init_empty_weights
from jinja2 import TemplateError
from peft import LoraConfig, get_peft_model
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM

from dist_common import check, cli, data, hf, runtime, train
from dist_common.checkpoint import Checkpoints
from dist_common.report import Report
from dist_common.train import build_optimizer, every, lr_at, set_lr

warnings.filterwarnings("ignore", "`is_gradient_checkpointing`")  # peft reads it
FORMATS = '{"prompt": "...", "answer": "..."} or {"messages": [...]}'

# Model


def build_model(config, args, run):
    """Build the model without memory, shard it, then read each rank's shards."""
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.tie_weights()  # each is now two tensors
    if args.activation_checkpointing == "full":
        model.activation_checkpointing_enable({"use_reentrant": False})
    base = model
    if args.lora_rank:
        model = add_adapters(model, args)
    # to_empty loses what no file holds, such as the frequencies of rotary embeddings.
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    shard_model(model, base, args)
    model.to_empty(device=run.device)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    base.tie_weights()  # to_empty separated them again
    hf.read(run, args.init_from, base)
    init_adapters(model, args.seed)
    return model


def shard_model(model, base, args):
    """Shard the embedding, each layer, and norm and head as units of their own."""
    policy = MixedPrecisionPolicy()
    if args.precision == "bf16-mixed":
        # Gather and compute in bfloat16, add up gradients in float32.
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    units = list(base.get_decoder().layers)
    embedding = base.get_input_embeddings()
    if args.compile:
        for layer in units:
            layer.compile()  # all layers share the compiled code of the first
    if embedding.weight is not base.get_output_embeddings().weight:
        units.append(embedding)  # else it stays with the head: they share a weight
    for unit in units:
        # grad-op (ZeRO-2) keeps the gathered weights from forward to backward.
        reshard = args.sharding == "full"
        fully_shard(unit, mp_policy=policy, reshard_after_forward=reshard)
    # The root holds norm and head. It stays gathered, because backward starts there.
    fully_shard(model, mp_policy=policy)


def add_adapters(model, args):
    """Freeze a model; put adapters next to its linear layers, except for the head."""
    config = LoraConfig(
        r=args.lora_rank,
        lora_alpha=2 * args.lora_rank,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


def init_adapters(model, seed):
    """Draw each A as peft does, the same on any number of ranks; each B is 0."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {}
    for name, weight in model.named_parameters():
        if "lora_" in name:
            drawn[name] = torch.zeros(weight.shape)
        if "lora_A" in name:
            torch.nn.init.kaiming_uniform_(drawn[name], 5**0.5, generator=generator)
    set_model_state_dict(
        model, drawn, options=StateDictOptions(full_state_dict=True, strict=False)
    )


def trained_weights(model):
    """Return a module of the weights that are optimized and saved: no frozen ones."""
    return torch.nn.ParameterDict(
        {
            name.replace(".", "/"): weight
            for name, weight in model.named_parameters()
            if weight.requires_grad
        }
    )


def build_reference(args):
    """Return the model of one process, as transformers and peft load it."""
    model = AutoModelForCausalLM.from_pretrained(args.init_from, dtype=torch.float32)
    if args.lora_rank:
        model = add_adapters(model, args)
        init_adapters(model, args.seed)
    return model


# Chats


def parse_line(line):
    """Return the messages of a line. A pair is a chat of two messages."""
    record = json.loads(line)
    if "messages" in record:
        return record["messages"]
    return [
        {"role": "user", "content": record["prompt"]},
        {"role": "assistant", "content": record["answer"]},
    ]


def render(tokenizer, messages):
    """Return inputs and targets of a chat of T + 1 tokens. Shape: (2, T) int32.

    Targets are the answers that the chat template marks; without marks, the last
    message. Raises: ValueError when they cannot be told from the rest.
    """
    for token in tokenizer.added_tokens_decoder.values():
        if token.special and any(str(token) in m["content"] for m in messages):
            raise ValueError(f"a message contains the special token {token}")
    if "endgeneration" in tokenizer.chat_template:
        chat = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        tokens, counted = chat["input_ids"], torch.tensor(chat["assistant_masks"])
    else:
        asked = tokenizer.apply_chat_template(
            messages[:-1], add_generation_prompt=True, return_dict=False
        )
        tokens = tokenizer.apply_chat_template(messages, return_dict=False)
        if tokens[: len(asked)] != asked:
            raise ValueError(
                "the chat template changes the question when the answer follows: "
                "mark the answers in it with {% generation %}"
            )
        counted = torch.arange(len(tokens)) >= len(asked)
    if not counted[1:].any():
        raise ValueError("the chat has no answer")
    chat = torch.tensor([tokens[:-1], tokens[1:]], dtype=torch.int32)
    chat[1, ~counted[1:].bool()] = data.IGNORED
    return chat


def render_file(path, tokenizer, target):
    """Write the rendered chats of a file. Raises: UsageError, naming a line."""
    chats = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            chats.append(render(tokenizer, parse_line(line)))
        except (LookupError, TypeError, ValueError, TemplateError) as error:
            raise cli.UsageError(
                f"--data {path}, line {number}: {error!r}; a line is {FORMATS}"
            ) from error
    partial = target.with_suffix(f".{os.getpid()}")
    torch.save(chats, partial)
    partial.rename(target)


class Chats(Dataset):
    """Rendered chats, padded on the right. Shapes: item -> inputs, targets (T,)."""

    def __init__(self, chats, seq_len):
        self.chats = chats
        self.seq_len = seq_len

    def __len__(self):
        return len(self.chats)

    def __getitem__(self, index):
        chat = self.chats[index].long()
        padding = (0, self.seq_len - chat.shape[1])
        inputs, targets = F.pad(chat, padding, value=data.IGNORED)
        return inputs.clamp(min=0), targets


def load_chats(args, tokenizer, run):
    """Return the training set, the test set and a checksum. A collective.

    One rank of each machine renders the chats to a file. The others, and later runs,
    map this file into memory. Raises: UsageError.
    """
    with hf.one_line_errors("read --data"):
        digest = hashlib.sha256(args.data.read_bytes())
    for path in sorted(args.init_from.glob("*.j*")):  # configuration and tokenizer
        digest.update(path.read_bytes())
    checksum = digest.hexdigest()[:16]
    folder = args.output_dir or Path(tempfile.gettempdir())
    path = folder / f"chats-{checksum}.pt"
    if run.local_rank == 0 and not path.exists():
        render_file(args.data, tokenizer, path)
    dist.barrier(run.cpu_group)
    chats = torch.load(path, mmap=True)
    fitting = [chat for chat in chats if chat.shape[1] <= args.seq_len]
    fit = f"{len(fitting):,} of {len(chats):,} chats fit into --seq-len {args.seq_len}"
    if len(fitting) < 2:
        raise cli.UsageError(f"{fit}: raise it, or add chats")
    run.print0(fit)
    test_set = Chats(fitting[::20], args.seq_len)  # every twentieth chat
    del fitting[::20]
    return Chats(fitting, args.seq_len), test_set, checksum


def trim(inputs, targets, device):
    """Move a batch to the device without the columns that no row needs.

    Shapes: (B, T) -> (B, up to T), at least one column.
    """
    columns = (targets != data.IGNORED).any(dim=0)
    length = int((columns * torch.arange(len(columns))).max()) + 1
    return [part[:, :length].to(device) for part in (inputs, targets)]


# Training


def summed_loss(model, inputs, targets):
    """Return the cross-entropy summed over tokens. Shapes: inputs, targets (B, T).

    Padding is on the right and attention looks to the left, so it needs no mask.
    """
    logits = model(input_ids=inputs, use_cache=False).logits  # (B, T, V)
    return F.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), reduction="sum"
    )


def accumulate_gradient(model, micro_batches, device):
    """Leave the shards of the mean gradient over all answer tokens of the global batch.

    Returns: this rank's sum of losses, and the number of answer tokens of all ranks.
    """
    counts = [(targets != data.IGNORED).sum() for _, targets in micro_batches]
    num_tokens = sum(counts).to(device, non_blocking=True)
    dist.all_reduce(num_tokens)
    loss_sum = torch.zeros((), device=device)
    for batch in micro_batches:
        # Each backward reduce-scatters, so that gradients stay sharded.
        loss = summed_loss(model, *trim(*batch, device))
        # FSDP averages over ranks, but we divide by the tokens of all ranks: undo the
        # average.
        (loss * dist.get_world_size() / num_tokens).backward()
        loss_sum += loss.detach()
    return loss_sum, num_tokens


@torch.no_grad()
def evaluate(model, test_set, args, run):
    """Yield the answer tokens and the summed loss of this rank's test batches."""
    model.eval()
    for batch in data.evaluation_batches(test_set, args, run):
        inputs, targets = trim(*batch, run.device)
        yield (targets != data.IGNORED).sum(), summed_loss(model, inputs, targets)
    model.train()
    model.reshard()  # the root keeps its weights for a backward


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    replaced = ("--preset", "--text-file", "--tokens")
    cli.add_training_flags(parser, (), ("32-true", "bf16-mixed"), replaced)
    parser.set_defaults(self_check=False)
    add = parser.add_argument
    add("--init-from", type=Path, required=True, metavar="DIR", help="model to tune")
    add("--data", type=Path, required=True, metavar="FILE", help=f"lines of {FORMATS}")
    add("--export", type=Path, metavar="DIR", help="write the model for transformers")
    add("--sharding", choices=("full", "grad-op"), default="full", help="(full)")
    add("--lora-rank", type=cli.positive_int, help="train adapters, freeze the model")
    args = parser.parse_args()
    cli.validate_training_args(args)
    return args


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as run:
        args.precision = args.precision or runtime.default_precision(run.device)
        config, tokenizer = hf.load_config(args.init_from, args.seq_len)
        report = Report("02-fsdp/fsdp_finetune.py", args, run)
        model = build_model(config, args, run)
        trained = trained_weights(model)
        number = model.num_parameters(only_trainable=True)
        run.print0(f"{config.model_type}: {number:,} weights are trained")
        train_set, test_set, args.data = load_chats(args, tokenizer, run)
        optimizer = build_optimizer(trained, args)
        runtime.seed_everything(args.seed, run.rank)

        checkpoints = Checkpoints(run, args, trained, optimizer)
        saved = checkpoints.resume()
        first_step = saved["step"] + 1
        train.settle_batch_size(args, run)
        batches = data.GlobalBatches(train_set, args, run, saved["samples_seen"])
        if args.export and args.export.exists() and first_step <= args.max_steps:
            raise cli.UsageError(f"--export {args.export} exists: name another folder")

        counter = check.CollectiveCounter()
        log = train.Log(run, args, first_step, counter=counter)
        stop = train.StopSignal(run.cpu_group)
        stopping = False

        for step in range(first_step, args.max_steps + 1):
            with log.step(step):
                loss_sum, num_tokens = accumulate_gradient(
                    model, next(batches), run.device
                )
                grad_norm = torch.nn.utils.clip_grad_norm_(
                    model.parameters(), args.max_grad_norm
                )
                set_lr(optimizer, lr_at(step, args))
                optimizer.step()
                optimizer.zero_grad()
            log.add(step, loss_sum, num_tokens, check.whole(grad_norm))
            if args.self_check and step == 2 and first_step == 1:
                check.first_two_steps(
                    report,
                    log,
                    model,
                    optimizer,
                    train_set,
                    lambda: build_reference(args),
                )
            if every(step, args.eval_every, args.max_steps):
                log.evaluation(step, evaluate(model, test_set, args, run))
            stopping = stop.requested()
            if stopping or every(step, args.save_every, args.max_steps):
                log.flush()  # stops the run if the loss is not a number
                checkpoints.save(step, {"samples_seen": batches.samples_seen})
            if stopping:
                run.print0(f"stopped by a signal after step {step}")
                break

        checkpoints.wait()
        report.metrics |= log.finish()
        if args.export and not stopping and not args.export.exists():
            if args.lora_rank:
                model.merge_adapter()  # adds B x A to the weights
            hf.write(run, args.export, model, args.init_from)
            run.print0(f"exported to {args.export}")
        return report.finish(log.summary())


if __name__ == "__main__":
    cli.run(main)
