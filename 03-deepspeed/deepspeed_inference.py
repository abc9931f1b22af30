"""Generate with a model that DeepSpeed cuts between all ranks, and hold it against the whole one.

    CPU   torchrun --standalone --nproc-per-node=2 03-deepspeed/deepspeed_inference.py
    GPU   torchrun --standalone --nproc-per-node=gpu 03-deepspeed/deepspeed_inference.py --preset 1b

Try `--model DIR`, a Hugging Face folder such as 02-fsdp/fsdp_checkpoint.py exports, and
`--precision bf16-true`. Look for: a rank that holds 1/N of each linear layer, and of the KV cache;
2 all-reduces a layer and one for the logits, whatever the number of tokens; the whole model's
tokens; the times, where what a rank saves in arithmetic has to pay for the all-reduces.

This is AutoTP: transformers' own code, its linear layers exchanged. DeepSpeed's fused kernels
(kernel injection) are CUDA only, and not used. Each rank first loads the whole model to cut it.

Sources: Shoeybi et al., Megatron-LM (2019), section 3; Aminabadi et al., DeepSpeed-Inference
(SC 2022), section IV; deepspeed.ai, "Automatic Tensor Parallelism for Hugging Face Models".
"""

import argparse
import contextlib
import copy
import functools
import io
import statistics
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from dist_common import data, measure, runtime, zero
from dist_common.console import Console
from dist_common.models import PRESETS
from dist_common.runtime import UsageError

DTYPES = {"32-true": torch.float32, "bf16-true": torch.bfloat16}
# Of the largest logit. Partial sums are added in another order, and in bf16, which keeps 8 bits,
# each is rounded before the all-reduce adds it: 1/256 a time, in two places of every layer.
LOGIT_TOLERANCE = {"32-true": 1e-5, "bf16-true": 5e-2}
REPEATS = 5  # generations that are timed, after one that is not
ROWS = ("o_proj", "down_proj", "lm_head")  # input dim cut; the others' output dim
LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"}


def cut(model, ranks, dtype):
    """Return DeepSpeed's engine, in whose model each linear layer holds this rank's part."""
    import deepspeed

    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    # A grain is what parts are multiples of: with the default, 64, 352 would become 192 and 160.
    split = {"tp_size": ranks, "tp_grain_size": 1}
    with contextlib.redirect_stdout(io.StringIO()):  # each rank would print its plan
        engine = deepspeed.init_inference(
            model, tensor_parallel=split, dtype=dtype, replace_with_kernel_inject=False
        )

    # It casts buffers too, and rotary frequencies in bf16 are wrong angles far from the start.
    for name, buffer in engine.module.named_buffers():
        buffer.data = buffers[name].to(buffer.device)
    return engine


def generate(model, prompt, new_tokens, first, further):
    """Take the likeliest token each time, timed; return all tokens and the KV cache.

    Shapes: prompt (B, T), tokens (B, T + new_tokens).
    """
    with first:  # the prompt at once; logits of its last token only, or T times as many are summed
        out = model(prompt, use_cache=True, logits_to_keep=1)
        tokens = [prompt, out.logits[:, -1:].argmax(-1)]  # (B, T), (B, 1)

    for _ in range(new_tokens - 1):
        with further:  # one token at a time: keys and values of those before are in the cache
            out = model(tokens[-1], past_key_values=out.past_key_values, use_cache=True)
            tokens.append(out.logits[:, -1:].argmax(-1))  # (B, 1)
    return torch.cat(tokens, dim=1), out.past_key_values


def how_cut(skeleton, engine):
    """Return rows that set the shapes of whole weights beside rank 0's: one layer, and the rest."""
    rows, here = [], dict(engine.module.named_parameters(remove_duplicate=False))
    for name, weight in skeleton.named_parameters(remove_duplicate=False):
        whole, part = tuple(weight.shape), tuple(here[name].shape)
        if ".layers." in name and ".layers.0." not in name:
            continue
        how = "whole on each rank"
        if whole != part:
            how = "outputs" if whole[1:] == part[1:] else "inputs, then an all-reduce"
        shapes = (" x ".join(map(str, shape)) for shape in (whole, part))
        rows.append((name.removesuffix(".weight"), how, *shapes))
    return rows


def part_of(whole, ranks):
    """Return the most units that one of the ranks gets when they are dealt out."""
    return -(-whole // ranks)


def expected_of(skeleton, config, ranks, batch_size, length, new_tokens):
    """Return by formula what the fullest rank holds and what a generation sums, in numbers of
    values: weights, KV cache, all-reduces, and what is handed to them.

    Attention is cut by heads that share keys and values, the other layers by the dim itself.
    Source: Megatron-LM, section 3; here the last layer is cut by inputs, not by vocabulary.
    """
    heads, weights = config.num_key_value_heads, 0
    for name, module in skeleton.named_modules():
        for kind, weight in module.named_parameters(recurse=False):
            cut_by_inputs, units = name.endswith(ROWS), 1
            if isinstance(module, nn.Linear) and not (cut_by_inputs and kind == "bias"):
                units = module.in_features if cut_by_inputs else module.out_features
                units = heads if ".self_attn." in name else units
            weights += weight.numel() // units * part_of(units, ranks if units > 1 else 1)
    L, D, V = config.num_hidden_layers, config.hidden_size, config.vocab_size
    layer = skeleton.get_decoder().layers[0].self_attn
    kv_dim = layer.k_proj.out_features // heads * part_of(heads, ranks)
    read = length + new_tokens - 1  # the last token is not read
    sums, summed = new_tokens * (2 * L + 1), 2 * L * D * read + V * new_tokens
    several = ranks > 1
    return weights, 2 * L * batch_size * read * kv_dim, several * sums, several * batch_size * summed


def largest_difference(engine, plain, tokens):
    """Return the largest difference of a logit from the whole model's, and their largest."""
    ours, found = engine(tokens).logits.float(), torch.zeros(2, device=tokens.device)  # (B, T, V)
    if plain:
        theirs = plain(tokens).logits.float()
        found = torch.stack([(ours - theirs).abs().max(), theirs.abs().max()])
    dist.broadcast(found, 0)
    return found.tolist()


def speed_of(timers, batch_size, new_tokens):
    """Return ms to the first token, ms for each further one, and tokens/s of the generation."""
    first, further = (timer.median_ms() for timer in timers)
    return first, further, 1e3 * batch_size * new_tokens / (first + (new_tokens - 1) * further)


def look_at(args, ranks):
    """Return a model's config, and the model without weights; refuse what cannot be cut."""
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

    what = f"--model {args.model}" if args.model else f"--preset {args.preset}"
    if args.model and not (args.model / "config.json").is_file():
        raise UsageError(f"{what}: there is no config.json: name a folder in Hugging Face's format")
    shape = PRESETS[args.preset]
    try:
        if args.model:
            config = AutoConfig.from_pretrained(args.model, trust_remote_code=False)
        else:
            config = LlamaConfig(
                vocab_size=shape.vocab_size,
                hidden_size=shape.dim,
                intermediate_size=shape.ffn_dim,
                num_hidden_layers=shape.num_layers,
                num_attention_heads=shape.num_heads,
                num_key_value_heads=shape.num_kv_heads,
                max_position_embeddings=shape.max_seq_len,
                rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
                rms_norm_eps=shape.norm_eps,
                tie_word_embeddings=shape.tied_embeddings,
            )
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # of transformers' own kinds too
        raise UsageError(f"{what} is no causal language model: {said_by(error)}") from error
    linear = {n.split(".")[-1] for n, m in skeleton.named_modules() if isinstance(m, nn.Linear)}
    if linear != LINEAR:
        raise UsageError(
            f"{what} is a {type(skeleton).__name__}: AutoTP is known here to cut models with the "
            "layers of a Llama, as Llama, Mistral, Qwen2, Qwen3 and Gemma have them"
        )
    if config.num_key_value_heads < ranks:
        raise UsageError(
            f"{what} has {config.num_key_value_heads} key-value heads, and {ranks} ranks would "
            f"share them: some would hold no attention. Start at most {config.num_key_value_heads}"
        )
    return config, skeleton


def said_by(error):
    """Return the first sentence of an error that may be a page long."""
    return " ".join(str(error).split()).split(". ")[0][:200]


def load(args, config, dtype):
    """Return the whole model: from the folder, or with weights that the seed draws."""
    from transformers import AutoModelForCausalLM

    if args.model is None:
        runtime.seed_everything(args.seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    options = {"dtype": dtype, "local_files_only": True, "trust_remote_code": False}
    try:
        model, said = AutoModelForCausalLM.from_pretrained(
            args.model, output_loading_info=True, **options
        )
    except Exception as error:
        raise UsageError(f"--model {args.model} cannot be loaded: {said_by(error)}") from error
    for kind in ("missing", "unexpected"):  # transformers draws what is missing, and goes on
        if names := sorted(said[f"{kind}_keys"]):
            raise UsageError(f"--model {args.model}: {len(names)} weights {kind}: {names[0]}, ...")
    return model


def tokens_of(args, config, tokenizer):
    """Return the prompts: the text of --prompt, or as many bytes of a text as asked. (B, T)"""
    if args.prompt is None:
        text = data.load_text()
        tokens = text[torch.arange(args.batch_size * args.prompt_tokens) % len(text)]
        tokens = tokens.view(args.batch_size, args.prompt_tokens)
    else:
        ids = tokenizer(args.prompt).input_ids if tokenizer else list(args.prompt.encode())
        tokens = torch.tensor([ids] * args.batch_size)
    length, most = tokens.shape[1] + args.max_new_tokens, config.max_position_embeddings
    if not tokens.shape[1]:
        raise UsageError("--prompt is empty")
    if length > most:
        raise UsageError(
            f"{tokens.shape[1]} tokens of prompt and --max-new-tokens {args.max_new_tokens} are "
            f"{length}: the model's positions end at {most}"
        )
    return tokens.long() % config.vocab_size


def parse_args():
    parser = runtime.ArgumentParser(__doc__)
    add, positive = parser.add_argument, runtime.positive_int
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    add("--model", type=Path, metavar="DIR", help="a Hugging Face folder (weights drawn at random)")
    add("--preset", choices=PRESETS, default="tiny", help="shape without --model (tiny)")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--prompt", metavar="TEXT", help="to go on from")
    tokens = "bytes of a text to go on from, without --prompt (64)"
    group.add_argument("--prompt-tokens", type=positive, default=64, help=tokens)
    at_least_2 = functools.partial(runtime.whole_number, low=2)
    add("--max-new-tokens", type=at_least_2, default=32, help="to generate (32)")
    add("--batch-size", type=positive, default=1, help="prompts at a time (1)")
    add("--precision", choices=DTYPES, default="32-true", help="(32-true)")
    return parser.parse_args()


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device), torch.no_grad():
        console, ranks = Console(world.is_rank0), world.world_size
        results = measure.Results("03-deepspeed/deepspeed_inference.py", args, world, device)
        output = measure.claim_output_dir(args, world)
        try:
            zero.prepare(device)
            from transformers import AutoTokenizer
            from transformers.utils import logging
        except ImportError as error:
            raise UsageError(f"{error}: pip install deepspeed transformers") from error
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        ...


if __name__ == "__main__":
    runtime.run(main)
