"""What fsdp_finetune.py has beside the job: what proves it, a tiny model, a dry run, a question."""

import contextlib
import inspect
import json
import logging
import math
import os
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import torch
from tabulate import tabulate

from fsdp_parts.sharding import gathered, held_bytes, put
from legacy_common import cli, data, output, runtime
from legacy_common.cli import UsageError
from legacy_common.job import Step
from legacy_common.lab import proofs
from legacy_common.lab.figure import figure
from legacy_common.lab.proofs import TOLERANCE, count_equal_in_files
from legacy_common.measure import GIB

with contextlib.suppress(ImportError):  # fsdp_finetune.py says what to install
    import huggingface_hub
    import tokenizers
    import transformers
    from transformers import AutoModelForCausalLM, LlamaConfig

    transformers.logging.disable_progress_bar()

SMALL = 50_000_000  # weights: one process can hold a smaller model whole beside the shards
TINY_FILE = "200KB"  # so that even the tiny model has several files
TINY_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message.content + (eos_token if message.role == 'assistant' else '\n') }}{% endfor %}"
)


def add_flags(parser: cli.ArgumentParser) -> None:
    """Add the flags of what is no training."""
    add, positive = parser.add_argument, cli.positive_int
    add("--kill-at-step", type=positive, help="end all ranks by SIGKILL: rehearse a failure")
    add("--make-tiny", metavar="DIR", help="write a tiny model, random, pairs and chats; end")
    add("--ask", metavar="PROMPT", help="answer from --model by transformers alone, and end")
    add("--max-new-tokens", type=positive, default=64, help="most tokens of an answer (64)")
    add("--dry-run", action="store_true", help="say what --world-size GPUs would need, and end")
    add("--world-size", type=positive, default=8, help="ranks of a dry run (8)")


def alone(args, load: Callable, prompt_ids: Callable, draft) -> bool:
    """Do what --make-tiny, --ask or --dry-run says, in this one process; return if one did."""
    given = [name for name in ("make_tiny", "ask", "dry_run") if getattr(args, name)]
    if not given:
        return False
    if runtime.discover().world_size > 1:
        flag = "--" + given[0].replace("_", "-")
        raise UsageError(f"{flag} is one process: start it with python, not torchrun")
    if args.make_tiny:
        output.claim_empty(args.make_tiny, "--make-tiny")
        make_tiny(args.make_tiny, args.seed)
        print(*sorted(path.name for path in Path(args.make_tiny).iterdir()))
        return True
    if not args.model:
        raise UsageError("--model is missing: a Hugging Face folder")
    if args.ask:
        asked = prompt_ids(load(args, transformers.AutoTokenizer, "tokenizer"), args.ask)
        print(generate(args.model, asked, args.max_new_tokens)[-1])
    else:
        say_needs(args, draft(args))
    return True


def make_tiny(folder: str, seed: int) -> None:
    """Write a Llama of 0.1 million random weights, in several files, whose tokens are bytes.

    And pairs.jsonl: a question about each method of `str`, and the first line of its documentation.
    In chats.jsonl a second question follows.
    """
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    ids = {letter: number for number, letter in enumerate(letters)}
    by_byte = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=ids, merges=[]))
    by_byte.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    by_byte.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=by_byte, eos_token="</s>")
    tokenizer.chat_template = TINY_TEMPLATE
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=176, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"], dtype="float32",
        initializer_range=0.1,  # not 0.02, which is for wide layers: it learns sooner
    )  # fmt: skip
    torch.manual_seed(seed)
    # As save_pretrained would, which imports DeepSpeed where it is installed. Tied weights once.
    weights = dict(transformers.LlamaForCausalLM(config).named_parameters())
    huggingface_hub.save_torch_state_dict(weights, folder, max_shard_size=TINY_FILE)
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    methods = {name: inspect.getdoc(getattr(str, name)) for name in dir(str) if name[0] != "_"}
    pairs = [
        {"prompt": f"What does str.{name} do?", "answer": text.splitlines()[0]}
        for name, text in methods.items() if text
    ]  # fmt: skip
    Path(folder, "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    chats = [
        {"messages": [
            {"role": "system", "content": "Python's text."},
            {"role": "user", "content": pair["prompt"]},
            {"role": "assistant", "content": pair["answer"]},
            {"role": "user", "content": "Say its name."},
            {"role": "assistant", "content": pair["prompt"].split()[2]},
        ]}
        for pair in pairs
    ]  # fmt: skip
    Path(folder, "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))


def generate(folder: str, asked: list[int], max_new_tokens: int) -> tuple:
    """Have transformers alone answer a prompt's tokens, greedily: the likeliest token each time.

    With peft, where it has an adapter. Return the model, all tokens (T,), and both texts.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    if Path(folder, "adapter").is_dir():
        model = peft().PeftModel.from_pretrained(model, Path(folder, "adapter"))
    prompt = torch.tensor([asked])
    tokens = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
        max_new_tokens=max_new_tokens, pad_token_id=tokenizer.eos_token_id,
    )[0]  # fmt: skip
    texts = (tokens[: len(asked)], tokens[len(asked) :])
    return model, tokens, *(tokenizer.decode(text, skip_special_tokens=True) for text in texts)


def peft():
    """Return Hugging Face's library of adapters. Raises: UsageError where it is missing."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # which peft imports
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
    try:
        import peft
    except ImportError as error:
        do = "pip install peft (or train with --parity-steps 0)"
        raise UsageError(f"peft is missing: {do}") from error
    return peft


def of_fullest(shapes: Iterable, ranks: int) -> int:
    """Return how many numbers the fullest rank holds of weights cut by rows, experts by expert."""
    return sum(-(-shape[0] // ranks) * math.prod(shape[1:]) for shape in shapes)


def say_needs(args, model) -> None:
    """Print what each of --world-size ranks needs for a model: state exactly, the rest about."""
    config = model.config
    ranks = args.world_size
    number, trained = model.num_parameters(), model.num_parameters(only_trainable=True)
    layers = max(model.get_decoder().children(), key=lambda child: len(list(child.modules())))
    first = list(layers[0].parameters())
    layer = sum(weight.numel() for weight in first)
    trained_there = sum(weight.numel() for weight in first if weight.requires_grad)
    tokens = args.micro_batch_size * args.seq_len
    args.precision = args.precision or "bf16-mixed"  # as on the GPUs that it asks about
    compute = 2 if args.precision == "bf16-mixed" else 4
    shard = of_fullest((w.shape for w in model.parameters() if w.requires_grad), ranks)
    held = [
        ("weights, float32", 4 * of_fullest((w.shape for w in model.parameters()), ranks)),
        ("gradients, float32", 4 * shard),
        ("Adam's two moments, float32", 8 * shard),
        ("two layers gathered to compute with", 2 * compute * layer),
        ("a layer's gradient before it is sharded", (compute + 4) * trained_there),
        ("activations kept: one per layer", compute * len(layers)
         * tokens * config.hidden_size),
        # In backward: what log_softmax kept, nll_loss's gradient and its own, in float32.
        ("three of the logits' size, float32", 3 * 4 * tokens * config.vocab_size),
    ]  # fmt: skip
    rows = [(name, size / GIB) for name, size in held]
    rows.append(("all of it at once", sum(size for _, size in rows)))
    print(f"{args.model}: {number:,} weights on {ranks} ranks, {args.precision}, "
          f"{args.micro_batch_size} x {args.seq_len} tokens")  # fmt: skip
    print(tabulate(rows, ("one rank", "GiB"), floatfmt=".2f"))
    if max(held, key=lambda row: row[1]) == held[-1]:
        print("the logits are the largest: lower --micro-batch-size or --seq-len, or compute the "
              "loss in slices as summed_loss of fsdp_parts/fsdp_memory.py does")  # fmt: skip
    print(f"on disk: {12 * trained / GIB:.1f} GiB for a checkpoint")


def proven_steps(run, steps: Iterable[Step], accumulate_gradient: Callable) -> Iterator[Step]:
    """Yield the run's steps between the proofs; --kill-at-step ends the run after one of them."""
    args = run.job.args

    def before():
        check_gradient(run, accumulate_gradient)
        draw_batch(run)

    def until_killed():
        for step in steps:
            if args.kill_at_step and step.number > args.kill_at_step:
                os.kill(os.getpid(), signal.SIGKILL)  # as when a machine fails: nothing is tidied
            yield step

    after = partial(check_bytes, run)
    yield from proofs.proven_steps(run.job, until_killed(), run.model, run.optimizer, before, after)


def check_gradient(run, accumulate_gradient: Callable) -> None:
    """Hold the first --parity-steps global batches against a plain model: loss, gradient, norm.

    By default one of a small model; none after a resume.
    """
    job, args = run.job, run.job.args
    if args.parity_steps is None:
        args.parity_steps = int(run.model.num_parameters() < SMALL)
    if args.lora_rank and args.parity_steps:
        peft()  # missing, it is to stop the run now, and not when it has trained
    if job.found or not args.parity_steps:
        why = "the first weights are gone" if job.found else "--parity-steps 0"
        job.report.say(f"not compared with one process ({why})")
        return
    alone = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(job.device)
    if args.lora_rank:
        fill_b(run.model, 0.02)  # at the zeros that training starts from, A has no gradient
        alone = with_adapters(alone, run)
    forward = alone.forward
    alone.forward = lambda inputs: forward(input_ids=inputs).logits
    batches = job.sampler.global_order().split(args.global_batch_size)
    for indices in batches[: min(args.parity_steps, args.max_steps)]:
        rows = indices.tolist()
        micro_batches = micro_batches_of(job, [job.train_set[row] for row in rows])
        chats = [chat for row in rows for chat in job.train_set.rows[row]]
        items = [job.train_set.row([chat])[:2] for chat in chats]  # each alone, if packed or not
        loss_sum, tokens = accumulate_gradient(run.model, micro_batches, job.device)
        compare_with_one_process(job, run.model, alone, items, tokens, loss_sum)
        run.optimizer.zero_grad()
    fill_b(run.model, 0.0)


@torch.no_grad()
def fill_b(model, std: float) -> None:
    """Draw each adapter's B, the same on any number of ranks."""
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            put(weight, std * torch.randn(weight.shape, generator=generator))


def with_adapters(alone, run):
    """Put peft's adapters beside a plain model, with our values and names; peft computes."""
    ours, args = run.job.store.whole, run.job.args
    options = {"lora_alpha": args.lora_alpha, "target_modules": args.target_modules}
    alone = peft().get_peft_model(alone, peft().LoraConfig(r=args.lora_rank, **options))
    theirs = [weight for weight in alone.parameters() if weight.requires_grad]
    for mine, weight in zip(ours.values(), theirs, strict=True):
        put(weight, gathered(mine.detach()))
    alone.named_parameters = lambda **_: zip(ours, theirs, strict=True)  # what is trained
    return alone


def check_bytes(run) -> None:
    """Check the bytes that the fullest rank holds: 4 + 4 + 8 per weight, cut by rows.

    Frozen weights take 4, and are those of the files. Of an adapter, A has r rows and B r columns.
    """
    job, args = run.job, run.job.args

    def shape_of(names) -> tuple:
        if isinstance(names, str):
            return tuple(run.source[names].shape)
        return len(names), sum(run.source[part].shape.numel() for part in names[0])  # experts

    shapes = {n: shape_of(run.names[n]) for n, _ in run.model.named_parameters() if n in run.names}
    trained = list(shapes.values())
    frozen = trained if args.lora_rank else []
    if args.lora_rank:
        weights = [s for n, s in shapes.items() if n.split(".")[-2] in args.target_modules]
        sides = [shape for shape in weights if len(shape) == 2]  # no bias
        rank = args.lora_rank
        trained = [side for out, ins in sides for side in ((rank, ins), (out, rank))]  # A and B
        measured = sum(weight.numel() for weight in run.optimizer.state)
        number = sum(map(math.prod, trained))
        job.report.check("weights that are trained", measured, number, 0, "LoRA, section 4.1")
        if job.done:  # a run that was asked to stop has no time to read the files again
            parts = (run.by_file_names({n: w}) for n, w in run.weights().items())  # in turn
            equal = sum(count_equal_in_files(one, args.model, job.store.group) for one in parts)
            number = len(run.source)
            job.report.check("frozen weights equal in the files", equal, number, 0, "--model")
    rows, beside = (of_fullest(part, job.dp_ranks) for part in (trained, frozen))
    kinds = {"weights": 4 * (rows + beside), "gradients": 4 * rows, "Adam's moments": 8 * rows}
    held = held_bytes(run.model.parameters(), run.optimizer)
    for (kind, size), measured in zip(kinds.items(), held, strict=True):
        source = "ZeRO paper, section 3.1"
        job.report.check(f"{kind}: bytes on the fullest rank", measured, size, 0, source)


@torch.no_grad()
def check_export(run, found: dict) -> None:
    """Check an export's files against the shards; of a small model also what transformers computes.

    `found` are its tensors by name. Each rank reads its own rows again: of a model of any size.
    """
    report, args = run.job.report, run.job.args

    def layout(tensors):
        files = sorted({stored.relative_path for stored in tensors.values()})
        return {(n, files.index(t.relative_path), t.shape, t.dtype) for n, t in tensors.items()}

    differing = len(layout(run.source) - layout(found))
    report.check("tensors of another file, shape or type", differing, 0, 0, "--model")
    weights = run.by_file_names(run.weights())
    exported = {name: weight.to(run.source[name].dtype) for name, weight in weights.items()}
    equal = count_equal_in_files(exported, args.export, run.job.store.group)
    report.check("weights equal in the files", equal, len(run.source), 0, "the shards")
    if args.lora_rank:
        ours = {f"base_model.model.{n}": weight for n, weight in run.job.store.whole.items()}
        equal = count_equal_in_files(ours, f"{args.export}/adapter", run.job.store.group)
        report.check("A and B equal in the adapter's file", equal, len(ours), 0, "the shards")
    if args.parity_steps:  # rank 0 alone holds the whole model
        check_generated(run)


@torch.no_grad()
def check_generated(run) -> None:
    """Check that transformers computes the shards' logits and tokens from the exported files."""
    args, report, train_set = run.job.args, run.job.report, run.job.train_set
    first = int(train_set.counted[0][1:].int().argmax()) + 1  # of the first answer
    asked = train_set.tokens[0][:first]
    by_transformers = None
    if report.world.is_rank0:
        model, tokens, *texts = generate(args.export, asked, args.max_new_tokens)
        by_transformers = tokens, texts, model(tokens[None]).logits[0]
    tokens, (prompt, answer), expected = runtime.from_rank0(by_transformers)
    ids = tokens[None].to(report.device)
    logits = run.model(input_ids=ids, use_cache=False).logits[0].float().cpu()  # (T, V)
    error = ((logits - expected).abs().max() / expected.abs().max()).item()
    types = {stored.dtype for stored in run.source.values()}
    exact = args.precision == "32-true" and types == {torch.float32}
    tolerance = TOLERANCE["32-true" if exact else "bf16-mixed"]
    name = "relative error of an exported model's logit"
    report.check(name, error, 0, tolerance, "the sharded model")
    if exact:  # in 16 bits two tokens may be equally likely
        same = int((logits.argmax(dim=-1)[len(asked) - 1 : -1] == tokens[len(asked) :]).sum())
        name = "tokens generated by transformers"
        report.check(name, same, len(tokens) - len(asked), 0, "the sharded model's likeliest")
    report.say(f"{prompt.strip()!r} -> {answer!r}")


def draw_batch(run) -> None:
    """Draw which tokens of the first global batch count, rank after rank, to batch.png."""
    report, train_set, ranks = run.job.report, run.job.train_set, run.job.dp_ranks
    if not (report.output and report.world.is_rank0):
        return
    first = run.job.sampler.global_order()[: run.job.args.global_batch_size].tolist()
    rows, labels = [], []
    for rank in range(ranks):
        kinds = []  # of each token: 0 padding, 1 prompt, 2 answer
        for index in first[rank::ranks]:
            targets = train_set[index][1]
            real = torch.arange(len(targets)) < sum(
                train_set.sizes[c] for c in train_set.rows[index]
            )
            kinds.append(real.int() + (targets != data.IGNORED).int())
        rows += kinds
        labels.append(f"rank {rank}: {int((torch.stack(kinds) == 2).sum())} tokens count")
    per_rank = len(rows) / ranks
    with figure(report.output / "batch.png", figsize=(9, 3)) as axes:
        axes.imshow(torch.stack(rows), "Blues", aspect="auto", interpolation="none")
        axes.set_yticks([per_rank * (rank + 0.5) - 0.5 for rank in range(ranks)], labels)
        axes.hlines([per_rank * rank - 0.5 for rank in range(1, ranks)], *axes.get_xlim(), "black")
        axes.set_xlabel("position in the sequence")
        axes.set_title("light blue: a prompt; dark: its answer, which counts; white: padding")


def micro_batches_of(job, items: list) -> list:
    """Deal a global batch to this rank as data.job_batches does."""
    size, length = job.args.micro_batch_size, job.args.seq_len
    own = items[job.sampler.rank :: job.sampler.world_size]
    starts = range(0, size * job.args.grad_accum_steps, size)
    return [data.collate(size, length, own[start : start + size]) for start in starts]


def compare_with_one_process(job, model, alone, items, tokens, loss: torch.Tensor) -> None:
    """Hold loss, norm and every rank's part of the gradient against a plain model's."""
    gradient = proofs.same_as_one_process(job, model, alone, items, loss, tokens)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")).full_tensor()
    expected = gradient.double().norm().item()  # in float32 it loses four digits
    tolerance, source = proofs.tolerance_of(job.args), "one process on the same global batch"
    job.report.check("gradient norm", norm.item(), expected, tolerance * expected, source)
