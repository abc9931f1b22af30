"""Generate with a model that DeepSpeed cuts between all ranks, and hold it against the whole one.

    CPU   torchrun --standalone --nproc-per-node=2 03-deepspeed/deepspeed_inference.py
    GPU   torchrun --standalone --nproc-per-node=gpu 03-deepspeed/deepspeed_inference.py --preset 1b

Try `--model DIR`, a Hugging Face folder such as 02-fsdp/fsdp_checkpoint.py exports, and
`--precision bf16-true`. Look for: a rank that holds 1/N of each linear layer and of the KV cache; 2
all-reduces a layer and one for the logits, however many tokens go through; the whole model's
tokens; the times, in which smaller layers have to save what the all-reduces cost.

This is AutoTP: transformers' own code with its linear layers exchanged. DeepSpeed's fused kernels
(kernel injection) are CUDA only, and not used.

Sources: Shoeybi et al., Megatron-LM (2019), section 3; Aminabadi et al., DeepSpeed-Inference
(SC 2022); deepspeed.ai, "Automatic Tensor Parallelism for Hugging Face Models".
"""

import argparse
import contextlib
import copy
import functools
import io
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import zero
from dist_common import cli, data, measure, runtime
from dist_common.cli import UsageError
from dist_common.models import PRESETS
from dist_common.report import Report

DTYPES = {"32-true": torch.float32, "bf16-true": torch.bfloat16}
# Of the largest logit. A sum over N parts is added in another order; in bf16, which keeps 8 bits,
# parts are also rounded, by up to 1/512, before they are added: in two places of every layer.
LOGIT_TOLERANCE = {"32-true": 1e-5, "bf16-true": 5e-2}
REPEATS = 5  # generations that are timed, after a first one that is not
CUT_BY_INPUTS = ("o_proj", "down_proj", "lm_head")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma")  # whose layers have these names
SHAPE = {
    "vocab_size": "vocab_size", "hidden_size": "dim", "intermediate_size": "ffn_dim",
    "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads", "max_position_embeddings": "max_seq_len",
    "rms_norm_eps": "norm_eps", "tie_word_embeddings": "tied_embeddings",
}  # fmt: skip


def cut(model, ranks, dtype):
    """Return DeepSpeed's engine, in whose model each linear layer is this rank's part of it."""
    import deepspeed

    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    # Parts are multiples of a grain. With the default, 64, a width of 352 becomes 192 and 160.
    split = {"tp_size": ranks, "tp_grain_size": 1}
    with contextlib.redirect_stdout(io.StringIO()):  # each rank would print its plan
        engine = deepspeed.init_inference(
            model, tensor_parallel=split, dtype=dtype, replace_with_kernel_inject=False
        )

    # It has cast buffers, too: rotary frequencies in bf16 turn far tokens by wrong angles.
    for name, buffer in engine.module.named_buffers():
        buffer.data = buffers[name].to(buffer.device)
    return engine


def generate(model, prompt, new_tokens, first, further):
    """Take the likeliest token each time, timed; return all tokens and the KV cache.

    Shapes: prompt (B, T), all tokens (B, T + new_tokens).
    """
    with first:  # the whole prompt; logits of its last token only: ranks sum all that are asked for
        out = model(prompt, use_cache=True, logits_to_keep=1)
        tokens = [prompt, out.logits[:, -1:].argmax(-1)]  # (B, T), (B, 1)
    for _ in range(new_tokens - 1):
        with further:  # one token: the keys and values of those before are in the cache
            out = model(tokens[-1], past_key_values=out.past_key_values, use_cache=True)
            tokens.append(out.logits[:, -1:].argmax(-1))  # (B, 1)
    return torch.cat(tokens, dim=1), out.past_key_values


def how_cut(skeleton, engine):
    """Return rows that set whole weights beside rank 0's parts: of layer 0, and of no layer."""
    rows, here = [], dict(engine.module.named_parameters(remove_duplicate=False))
    for name, weight in skeleton.named_parameters(remove_duplicate=False):
        if ".layers." in name and ".layers.0." not in name:
            continue
        whole, part = weight.shape, here[name].shape
        how = "outputs" if whole[1:] == part[1:] else "inputs, then all-reduce"
        how = "-" if whole == part else how
        rows.append((name, how, *(" x ".join(map(str, shape)) for shape in (whole, part))))
    return rows


def expected_of(skeleton, config, ranks, B, T, new_tokens, size):
    """Return by formula what the fullest rank holds, and what is summed; size is bytes of a value.

    Attention is cut by the heads that share keys and values, another layer by its width.
    Source: Megatron-LM, section 3; only that the last layer is cut by inputs here.
    """

    def part_of(units):
        return -(-units // ranks)

    weights, kv_heads = 0, config.num_key_value_heads
    for name, module in skeleton.named_modules():
        by_inputs = name.endswith(CUT_BY_INPUTS)
        for kind, weight in module.named_parameters(recurse=False):
            units = 1  # which each rank has
            if isinstance(module, nn.Linear) and not (by_inputs and kind == "bias"):
                width = module.in_features if by_inputs else module.out_features
                units = kv_heads if ".self_attn." in name else width
            weights += weight.numel() // units * part_of(units)
    L, D, V = config.num_hidden_layers, config.hidden_size, config.vocab_size
    read = T + new_tokens - 1  # the last token is not read any more
    kv_dim = skeleton.get_decoder().layers[0].self_attn.k_proj.out_features
    kv_dim = kv_dim // kv_heads * part_of(kv_heads)
    several = ranks > 1
    return {
        "bytes of weights": weights * size,
        "bytes of KV cache": 2 * L * B * read * kv_dim * size,
        "collectives": several * (2 * L + 1) * new_tokens,
        "bytes all-reduced": several * B * (2 * L * read * D + new_tokens * V) * size,
    }


def measured_of(engine, cache, counter):
    """Return the same from the tensors that are there and the collectives of a generation."""
    kept = [part for layer in cache.layers for part in (layer.keys, layer.values)]
    held = [sum(t.nbytes for t in tensors) for tensors in (engine.module.parameters(), kept)]
    most = torch.tensor(held, device=kept[0].device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return [*most.tolist(), sum(counter.calls.values()), counter.bytes["allreduce_"]]


def take_turns(engine, plain, prompt, new_tokens, device):
    """Generate with both, in turn, so that a busy machine slows down both.

    Return the tokens of both, the engine's cache and collectives, and two timers of each.
    """
    pairs = [[measure.StepTimer(device, n) for n in (1, new_tokens - 1)] for _ in range(2)]
    counter, right = measure.CollectiveCounter(), None
    for number in range(1 + REPEATS):  # the first warms up, and is counted
        if plain:
            right, _ = generate(plain, prompt, new_tokens, *pairs[0])
        dist.barrier()
        with contextlib.nullcontext() if number else counter:
            tokens, cache = generate(engine, prompt, new_tokens, *pairs[1])
    right = right if plain else torch.empty_like(tokens)
    dist.broadcast(right, 0)
    return tokens, right, cache, counter, pairs


def largest_difference(engine, plain, tokens):
    """Return the largest difference of a logit from the whole model's, and the largest of those."""
    ours, found = engine(tokens).logits.float(), torch.zeros(2, device=tokens.device)  # (B, T, V)
    if plain:
        theirs = plain(tokens).logits.float()
        found = torch.stack([(ours - theirs).abs().max(), theirs.abs().max()])
    dist.broadcast(found, 0)
    return found.tolist()


def look_at(args, world):
    """Return a model's name, its config and its layers without weights; refuse what is not cut."""
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

    if args.model is None:
        what, preset = f"--preset {args.preset}", PRESETS[args.preset]
        shape = {theirs: getattr(preset, ours) for theirs, ours in SHAPE.items()}
        rotary = {"rope_type": "default", "rope_theta": preset.rope_theta}
        config = LlamaConfig(**shape, rope_parameters=rotary)
    else:
        what = f"--model {args.model}"
        if not Path(args.model, "config.json").is_file():
            raise UsageError(
                f"{what}: no config.json there: name a folder in Hugging Face's format"
            )
        config = from_folder(AutoConfig, args.model)
    if config.model_type not in FAMILIES or hasattr(config, "quantization_config"):
        raise UsageError(
            f"{what} is of type {config.model_type}: this script knows how AutoTP cuts "
            f"{', '.join(FAMILIES)}, unquantised"
        )
    kv_heads = config.num_key_value_heads
    if world.world_size > kv_heads:  # DeepSpeed would go on, and the answer be right
        raise UsageError(
            f"{what} has {kv_heads} key-value head(s) for {world.world_size} ranks: some would "
            f"hold no attention at all; start at most {kv_heads}"
        )
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, dtype=DTYPES[args.precision])
    size = sum(weight.nbytes for weight in skeleton.parameters()) / measure.GIB
    free = measure.available_memory(torch.device("cpu")) / measure.GIB
    needed = size * (world.local_world_size + 2)  # the parts make one more, and rank 0 keeps one
    if needed > free:
        raise UsageError(
            f"{what} needs {needed:,.1f} GiB, as each rank loads all {size:,.1f} to cut them, and "
            f"rank 0 keeps them to compare; this machine has {free:,.1f}"
        )
    return what, config, skeleton


def from_folder(kind, folder, **options):
    """Read a config, a tokenizer or a model; nothing is fetched, and no code in the folder run."""
    options |= {"local_files_only": True, "trust_remote_code": False}
    try:
        return kind.from_pretrained(folder, **options)
    except Exception as error:  # of transformers' own kinds too; it may be a page long
        why = " ".join(str(error).split())[:200]
        raise UsageError(f"--model {folder}: {why}") from error


def load(args, config, dtype):
    """Return the whole model: from the folder, or with weights that the seed draws."""
    from transformers import AutoModelForCausalLM

    if args.model is None:
        runtime.seed_everything(args.seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    options = {"dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}
    model, said = from_folder(AutoModelForCausalLM, args.model, **options)
    for kind in ("missing", "unexpected", "mismatched"):  # which it would draw, or pass over
        if names := sorted(said[f"{kind}_keys"]):
            raise UsageError(f"--model {args.model}: {len(names)} weight(s) {kind}: {names[0]} ...")
    return model


def prompts_of(args, config, tokenizer):
    """Return B prompts of T tokens, (B, T): --prompt in each, or parts of a text."""
    B, T = args.batch_size, args.prompt_tokens
    given = args.prompt is not None
    text = args.prompt.encode() if given else data.load_text()[: 16 * B * T].numpy().tobytes()
    ids = tokenizer(text.decode(errors="replace")).input_ids if tokenizer else list(text)
    if not ids:
        raise UsageError("--prompt is empty")
    T, most = len(ids) if given else T, config.max_position_embeddings
    if T + args.max_new_tokens > most:
        raise UsageError(
            f"--max-new-tokens {args.max_new_tokens} after {T} of the prompt are more than the "
            f"{most} positions of the model"
        )
    tokens = torch.tensor(ids)[torch.arange(T if given else B * T) % len(ids)]
    return tokens.view(-1, T).expand(B, T) % config.vocab_size


def speeds_of(report, pairs, ranks, batch_size, new_tokens):
    """Return rows of times and speeds, from the medians, and note them as metrics."""
    rows, units = [], ("time_to_first_token_ms", "time_per_token_ms", "tokens_per_second")
    names = {"plain_": "plain model on rank 0 alone", "": f"DeepSpeed on {ranks} rank(s)"}
    for (prefix, name), pair in zip(names.items(), pairs, strict=True):
        if pair[0].steps_ms:  # the plain one's are on rank 0
            first, further = (timer.median_ms() for timer in pair)
            speed = 1e3 * batch_size * new_tokens / (first + (new_tokens - 1) * further)
            rows.append((name, f"{first:.1f} ms", f"{further:.1f} ms", f"{speed:,.1f} tok/s"))
            values = zip(units, (first, further, speed), strict=True)
            report.metrics |= {f"{prefix}{unit}": value for unit, value in values}
    return rows


def text_of(ids, tokenizer):
    if tokenizer:
        return repr(tokenizer.decode(ids))
    return repr(bytes(ids)) if max(ids) < 256 else str(ids)


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    positive = cli.positive_int
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    add("--model", metavar="DIR", help="a Hugging Face folder (a Llama with weights of --seed)")
    add("--preset", choices=PRESETS, default="tiny", help="that Llama's shape (tiny)")
    add("--prompt", metavar="TEXT", help="text to go on from")
    add("--prompt-tokens", type=positive, default=64, help="without --prompt: bytes of one (64)")
    at_least_2 = functools.partial(cli.whole_number, low=2)
    add("--max-new-tokens", type=at_least_2, default=32, help="to generate (32)")
    add("--batch-size", type=positive, default=1, help="prompts at a time (1)")
    add("--precision", choices=DTYPES, default="32-true", help="(32-true)")
    return parser.parse_args()


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device), torch.no_grad():
        report = Report("03-deepspeed/deepspeed_inference.py", args, world, device)
        ranks = world.world_size
        dtype = DTYPES[args.precision]
        new = args.max_new_tokens
        try:
            zero.prepare(device)
            import transformers
        except ImportError as error:
            raise UsageError(f"{error}: pip install deepspeed transformers") from error
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        what, config, skeleton = look_at(args, world)
        tokenizer = None
        if args.model and any(Path(args.model).glob("tokenizer*")):
            tokenizer = from_folder(transformers.AutoTokenizer, args.model)
        prompt = prompts_of(args, config, tokenizer).to(device)
        B, T = prompt.shape

        model = load(args, config, dtype)
        report.start(
            f"{what}: {skeleton.num_parameters():,} weights, {args.precision}",
            f"{B} prompt(s) of {T} tokens, {new} new ones each",
        )
        plain = copy.deepcopy(model).to(device) if world.is_rank0 else None
        engine = cut(model, ranks, dtype)

        report.table(how_cut(skeleton, engine), ("weight", "cut by", "whole", "rank 0"), names=2)
        tokens, right, cache, counter, pairs = take_turns(engine, plain, prompt, new, device)

        expected = expected_of(skeleton, config, ranks, B, T, new, dtype.itemsize).items()
        measured = measured_of(engine, cache, counter)
        for (name, formula), value in zip(expected, measured, strict=True):
            report.check(name, value, formula, 0, "Megatron-LM, section 3")
        drift, largest = largest_difference(engine, plain, right)
        tolerance = LOGIT_TOLERANCE[args.precision] * largest
        report.check("largest difference of a logit", drift, 0, tolerance, "plain model")
        differ = (tokens != right).sum()
        dist.all_reduce(differ, op=dist.ReduceOp.MAX)
        report.metrics["tokens_that_differ"] = differ.item()
        if dtype == torch.float32:  # rounded to bf16, two logits may be equal
            report.check("tokens that differ", differ.item(), 0, 0, "plain model")
        rows = speeds_of(report, pairs, ranks, B, new)
        report.table(rows, ("median", "first token", "each further one", "speed"))
        report.say(f"{text_of(prompt[0, -64:].tolist(), tokenizer)} goes on")
        report.say(text_of(tokens[0, T:].tolist(), tokenizer))
        return report.finish(f"{B * new} tokens generated")


if __name__ == "__main__":
    cli.run(main)
