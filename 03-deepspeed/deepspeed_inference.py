"""Generate with a Hugging Face model whose layers DeepSpeed divides over the ranks.

    CPU   torchrun --standalone --nproc-per-node=2 03-deepspeed/deepspeed_inference.py
    GPU   torchrun --standalone --nproc-per-node=2 03-deepspeed/deepspeed_inference.py

Look for: 1/N of each linear layer and of the KV cache on a rank; two all-reduces per
layer and one for the logits, whatever the number of tokens; the tokens of the whole
model. This is AutoTP. To serve users, take vLLM or SGLang: see the page.

Sources: Shoeybi et al., Megatron-LM (2019), section 3; deepspeed.ai, "Automatic Tensor
Parallelism for Hugging Face Models".
"""

import contextlib
import io

import torch
from torch import nn

from dist_common import cli, runtime
from dist_common.check import CollectiveCounter
from dist_common.deepspeed import import_deepspeed
from dist_common.model import PRESETS
from dist_common.report import Report

# The type of weights, and the tolerance of logits, relative to the largest: sums over N
# parts round differently.
PRECISIONS = {"32-true": (torch.float32, 1e-5), "bf16-true": (torch.bfloat16, 5e-2)}
PROMPT_TOKENS = 64


def build_model(seed, dtype):
    """Return a small Llama with random weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    shape = PRESETS["tiny"]
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.dim,
        intermediate_size=shape.ffn_dim,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def divide_layers(deepspeed, model, ranks, dtype):
    """Return the model, with this rank's part of each linear layer."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with contextlib.redirect_stdout(io.StringIO()):  # each rank would print its plan
        engine = deepspeed.init_inference(
            model,
            # Widths are multiples of the grain. The default is 64: 352 would become
            # 192 and 160.
            tensor_parallel={"tp_size": ranks, "tp_grain_size": 1},
            dtype=dtype,
            replace_with_kernel_inject=False,  # fused kernels, on CUDA only
        )
    # It has cast the rotary frequencies too: far tokens would get wrong positions.
    for name, buffer in engine.module.named_buffers():
        buffer.data = buffers[name].to(buffer.device)
    return engine.module


def generate(model, prompt, new_tokens):
    """Take the likeliest token each time; return all tokens and the KV cache.

    Shapes: prompt (B, T) -> tokens (B, T + new_tokens).
    """
    tokens, unread, cache = prompt, prompt, None
    for _ in range(new_tokens):
        # The cache holds the keys and values of earlier tokens. Only the last token's
        # logits are needed, and the ranks add up all that are asked for.
        output = model(unread, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        unread = output.logits[:, -1:].argmax(-1)  # (B, 1)
        tokens = torch.cat([tokens, unread], dim=1)
    return tokens, cache


def bytes_of(tensors):
    return sum(tensor.nbytes for tensor in tensors)


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    count = cli.positive_int
    add("--max-new-tokens", type=count, default=32, help="to generate (32)")
    add("--precision", choices=PRECISIONS, default="32-true", help="(32-true)")
    return parser.parse_args()


@torch.no_grad()
def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as run:
        report = Report("03-deepspeed/deepspeed_inference.py", args, run)
        deepspeed = import_deepspeed(run, {"train_micro_batch_size_per_gpu": 1})
        dtype, tolerance = PRECISIONS[args.precision]
        model = build_model(args.seed, dtype).to(run.device)
        config, ranks = model.config, run.world_size
        heads = config.num_key_value_heads
        if heads % ranks:
            raise cli.UsageError(
                f"{ranks} ranks cannot share {heads} key-value heads: start 1 or 2"
            )
        prompt = torch.arange(PROMPT_TOKENS, device=run.device)[None]  # (1, T)
        shapes = {name: weight.shape for name, weight in model.named_parameters()}
        linear = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
        whole_bytes = bytes_of(model.parameters()) - bytes_of(linear)
        weight_bytes = whole_bytes + bytes_of(linear) // ranks
        expected_tokens, _ = generate(model, prompt, args.max_new_tokens)
        expected_logits = model(expected_tokens).logits  # (1, T, V)

        model = divide_layers(deepspeed, model, ranks, dtype)
        with CollectiveCounter() as counter:
            tokens, cache = generate(model, prompt, args.max_new_tokens)
        logits = model(expected_tokens).logits

        rows = [
            (name, str(tuple(shapes[name])), str(tuple(weight.shape)))
            for name, weight in model.named_parameters()
            if ".layers." not in name or ".layers.0." in name
        ]
        report.table(rows, ("weight", "whole", "rank 0"))
        # Megatron-LM, section 3, and one per token: the last layer is divided too.
        num_layers, new_tokens = config.num_hidden_layers, args.max_new_tokens
        calls = (2 * num_layers + 1) * new_tokens if ranks > 1 else 0
        num_read = PROMPT_TOKENS + new_tokens - 1  # it does not read the last one
        kv_dim = heads // ranks * config.head_dim
        kv_bytes = 2 * num_layers * num_read * kv_dim * dtype.itemsize
        kept = [t for layer in cache.layers for t in (layer.keys, layer.values)]
        report.check("bytes of weights", bytes_of(model.parameters()), weight_bytes, 0)
        report.check("bytes of KV cache", bytes_of(kept), kv_bytes, 0)
        report.check("all-reduces", counter.calls["all_reduce"], calls, 0)
        error = (logits - expected_logits).abs().max() / expected_logits.abs().max()
        report.check("relative error of a logit", error.item(), 0, tolerance)
        if args.precision == "32-true":  # rounded to bf16, two logits may be equal
            differ = (tokens != expected_tokens).sum().item()
            report.check("tokens that differ", differ, 0, 0)
        return report.finish(f"{new_tokens} tokens generated")


if __name__ == "__main__":
    cli.run(main)
