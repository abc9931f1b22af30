"""Generate with a model that DeepSpeed cuts between all ranks, and hold it against the whole one.

    CPU   torchrun --standalone --nproc-per-node=2 03-deepspeed/deepspeed_inference.py
    GPU   torchrun --standalone --nproc-per-node=gpu 03-deepspeed/deepspeed_inference.py --preset 1b

Try `--model DIR`, a Hugging Face folder such as 02-fsdp/fsdp_to_hf.py exports, and `--precision
bf16-true`. Look for: a rank that holds 1/N of each linear layer and of the KV cache; 2 all-reduces
a layer and one for the logits, however many tokens go through; the whole model's tokens.

This is AutoTP: transformers' own code with its linear layers exchanged. DeepSpeed's fused kernels
(kernel injection) are CUDA only, and not used. Serving belongs to vLLM or SGLang: see the page.

Sources: Shoeybi et al., Megatron-LM (2019), section 3; Aminabadi et al., DeepSpeed-Inference
(SC 2022); deepspeed.ai, "Automatic Tensor Parallelism for Hugging Face Models".
"""

import argparse
import contextlib
import copy
import functools
import io

import torch
import torch.distributed as dist

from deepspeed_parts import deepspeed_inference as part
from deepspeed_parts import setup
from deepspeed_parts.deepspeed_inference import DTYPES
from legacy_common import cli, data, measure, runtime
from legacy_common.lab import traffic
from legacy_common.models import PRESETS
from legacy_common.report import Report

REPEATS = 5  # generations that are timed, after a first one that is not


def cut(model, ranks, dtype):
    """Return DeepSpeed's engine, in whose model each linear layer is this rank's part of it."""
    import deepspeed  # only after setup.prepare has said for which device

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


def take_turns(engine, plain, prompt, new_tokens, device):
    """Generate with both, in turn, so that a busy machine slows down both.

    Return the tokens of both, the engine's cache and collectives, and two timers of each.
    """
    pairs = [[measure.StepTimer(device, n) for n in (1, new_tokens - 1)] for _ in range(2)]
    counter, right = traffic.TrafficCounter(), None
    for number in range(1 + REPEATS):  # the first warms up, and is counted
        if plain:
            right, _ = generate(plain, prompt, new_tokens, *pairs[0])
        dist.barrier()
        with contextlib.nullcontext() if number else counter:
            tokens, cache = generate(engine, prompt, new_tokens, *pairs[1])
    right = right if plain else torch.empty_like(tokens)
    dist.broadcast(right, 0)
    return tokens, right, cache, counter, pairs


def how_cut(skeleton, engine):
    """Return rows that set whole weights beside rank 0's parts: of layer 0, and of no layer."""
    rows, parts = [], dict(engine.module.named_parameters(remove_duplicate=False))
    for name, weight in skeleton.named_parameters(remove_duplicate=False):
        if ".layers." in name and ".layers.0." not in name:
            continue
        whole, local = weight.shape, parts[name].shape
        by = "outputs" if whole[1:] == local[1:] else "inputs, then all-reduce"
        by = "-" if whole == local else by
        rows.append((name, by, *(" x ".join(map(str, shape)) for shape in (whole, local))))
    return rows


def prompts_of(args, config, tokenizer):
    """Return B prompts of T tokens, (B, T): --prompt in each, or parts of a text.

    Without a tokenizer a byte is a token. Raises: UsageError when they do not fit the model.
    """
    B, T = args.batch_size, args.prompt_tokens
    given = args.prompt is not None
    text = args.prompt.encode() if given else data.load_text()[: 16 * B * T].numpy().tobytes()
    ids = tokenizer(text.decode(errors="replace")).input_ids if tokenizer else list(text)
    if not ids:
        raise cli.UsageError("--prompt is empty")
    T, most = len(ids) if given else T, config.max_position_embeddings
    if T + args.max_new_tokens > most:
        raise cli.UsageError(
            f"--max-new-tokens {args.max_new_tokens} after {T} of the prompt are more than the "
            f"{most} positions of the model"
        )
    tokens = torch.tensor(ids)[torch.arange(T if given else B * T) % len(ids)]
    return tokens.view(-1, T).expand(B, T) % config.vocab_size


def text_of(ids, tokenizer):
    """Return tokens as text, as bytes, or as numbers where they are neither."""
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
        setup.prepare(device)
        part.import_transformers()
        what, config, skeleton = part.examine(args, world, ranks)
        tokenizer = part.tokenizer_of(args)
        prompt = prompts_of(args, config, tokenizer).to(device)
        B, T = prompt.shape
        model = part.load(args, config, dtype)
        report.start(
            f"{what}: {skeleton.num_parameters():,} weights, {args.precision}",
            f"{B} prompt(s) of {T} tokens, {new} new ones each",
        )
        plain = copy.deepcopy(model).to(device) if world.is_rank0 else None
        engine = cut(model, ranks, dtype)
        report.table(how_cut(skeleton, engine), ("weight", "cut by", "whole", "rank 0"), names=2)
        tokens, right, cache, counter, pairs = take_turns(engine, plain, prompt, new, device)

        part.check_parts(report, skeleton, config, prompt, engine, cache, counter)
        part.check_answers(report, engine, plain, tokens, right)
        part.print_speeds(report, pairs, B, new)
        report.say(f"{text_of(prompt[0, -64:].tolist(), tokenizer)} goes on")
        report.say(text_of(tokens[0, T:].tolist(), tokenizer))
        return report.finish(f"{B * new} tokens generated")


if __name__ == "__main__":
    cli.run(main)
