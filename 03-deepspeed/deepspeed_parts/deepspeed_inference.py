"""Models for DeepSpeed to cut: a Llama of a preset, or a folder in Hugging Face's format."""

import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from legacy_common import measure, runtime
from legacy_common.cli import UsageError
from legacy_common.models import PRESETS
from legacy_common.report import Report
from legacy_common.runtime import World

DTYPES = {"32-true": torch.float32, "bf16-true": torch.bfloat16}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma")  # whose layers have Llama's names
SHAPE = {
    "vocab_size": "vocab_size", "hidden_size": "dim", "intermediate_size": "ffn_dim",
    "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads", "max_position_embeddings": "max_seq_len",
    "rms_norm_eps": "norm_eps", "tie_word_embeddings": "tied_embeddings",
}  # fmt: skip


def import_transformers():
    """Import transformers and keep it quiet. Raises: UsageError, with what to install."""
    try:
        import transformers
    except ImportError as error:
        raise UsageError(f"{error}: pip install deepspeed transformers") from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def tokenizer_of(args):
    """Return the tokenizer of the model's folder; None without one."""
    from transformers import AutoTokenizer

    if args.model and any(Path(args.model).glob("tokenizer*")):
        return from_folder(AutoTokenizer, args.model)
    return None


def examine(args, world: World, parts: int):
    """Return a model's name, its config and its layers without weights; refuse what is not cut.

    `parts`: over how many ranks each layer is cut. Raises: UsageError.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

    if args.model is None:
        what, preset = f"--preset {args.preset}", PRESETS[args.preset]
        shape = {theirs: getattr(preset, ours) for theirs, ours in SHAPE.items()}
        rotary = {"rope_type": "default", "rope_theta": preset.rope_theta}
        config = LlamaConfig(**shape, rope_parameters=rotary)
    else:
        what = f"--model {args.model}"
        if not Path(args.model, "config.json").is_file():
            cure = "name a folder in Hugging Face's format"
            raise UsageError(f"{what}: no config.json there: {cure}")
        config = from_folder(AutoConfig, args.model)
    if config.model_type not in FAMILIES or hasattr(config, "quantization_config"):
        known = f"this script knows how AutoTP cuts {', '.join(FAMILIES)}, unquantised"
        raise UsageError(f"{what} is of type {config.model_type}: {known}")
    kv_heads = config.num_key_value_heads
    if parts > kv_heads:  # DeepSpeed would go on, and the answer be right
        some = f"some would hold no attention at all; start at most {kv_heads}"
        raise UsageError(f"{what} has {kv_heads} key-value head(s) for {parts} ranks: {some}")
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, dtype=DTYPES[args.precision])
    size = sum(weight.nbytes for weight in skeleton.parameters()) / measure.GIB
    free = measure.available_memory(torch.device("cpu")) / measure.GIB
    needed = size * (world.local_world_size + 2)  # the parts make one more, and rank 0 keeps one
    if needed > free:
        why = f"as each rank loads all {size:,.1f} to cut them, and rank 0 keeps them to compare"
        raise UsageError(f"{what} needs {needed:,.1f} GiB, {why}; this machine has {free:,.1f}")
    return what, config, skeleton


def from_folder(kind, folder: str, **options):
    """Read a config, a tokenizer or a model; nothing is fetched, and no code in the folder run.

    Raises: UsageError, in one line, for whatever transformers says.
    """
    options |= {"local_files_only": True, "trust_remote_code": False}
    try:
        return kind.from_pretrained(folder, **options)
    except Exception as error:  # of transformers' own kinds too; it may be a page long
        why = " ".join(str(error).split())[:200]
        raise UsageError(f"--model {folder}: {why}") from error


def load(args, config, dtype: torch.dtype) -> torch.nn.Module:
    """Return the whole model: from the folder, or with weights that the seed draws.

    Raises: UsageError for weights that are missing, left over or of another shape.
    """
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


# Of the largest logit. A sum over N parts is added in another order; in bf16, which keeps 8 bits,
# parts are also rounded, by up to 1/512, before they are added: in two places of every layer.
LOGIT_TOLERANCE = {"32-true": 1e-5, "bf16-true": 5e-2}
CUT_BY_INPUTS = ("o_proj", "down_proj", "lm_head")


def check_parts(report: Report, skeleton, config, prompt, engine, cache, counter) -> None:
    """Check by formula what the fullest rank holds, and what a generation sums.

    Attention is cut by the heads that share keys and values, another layer by its width. A head
    tied to the embedding is cut, the embedding is not: two tensors, where several ranks share.
    Source: Megatron-LM, section 3; only that the last layer is cut by inputs here.
    """
    ranks = report.world.world_size
    size = DTYPES[report.args.precision].itemsize
    new_tokens = report.args.max_new_tokens
    weights, kv_heads = 0, config.num_key_value_heads
    tied = config.tie_word_embeddings and ranks == 1
    for name, module in skeleton.named_modules():
        if tied and name == "lm_head":
            continue
        by_inputs = name.endswith(CUT_BY_INPUTS)
        for kind, weight in module.named_parameters(recurse=False):
            units = 1  # which each rank has
            if isinstance(module, nn.Linear) and not (by_inputs and kind == "bias"):
                width = module.in_features if by_inputs else module.out_features
                units = kv_heads if ".self_attn." in name else width
            weights += weight.numel() // units * math.ceil(units / ranks)
    L, D, V = config.num_hidden_layers, config.hidden_size, config.vocab_size
    B, T = prompt.shape
    read = T + new_tokens - 1  # the last token is not read any more
    kv_dim = skeleton.get_decoder().layers[0].self_attn.k_proj.out_features
    kv_dim = kv_dim // kv_heads * math.ceil(kv_heads / ranks)
    several = ranks > 1
    kept = [part for layer in cache.layers for part in (layer.keys, layer.values)]
    held = [sum(t.nbytes for t in tensors) for tensors in (engine.module.parameters(), kept)]
    most_weights, most_kept = map(max, zip(*runtime.gather(held), strict=True))
    summed = several * B * (2 * L * read * D + new_tokens * V) * size
    for name, measured, expected in (
        ("bytes of weights", most_weights, weights * size),
        ("bytes of KV cache", most_kept, 2 * L * B * read * kv_dim * size),
        ("collectives", sum(counter.calls.values()), several * (2 * L + 1) * new_tokens),
        ("bytes all-reduced", counter.nbytes["all_reduce"], summed),
    ):
        report.check(name, measured, expected, 0, "Megatron-LM, section 3")


def check_answers(report: Report, engine, plain: nn.Module | None, tokens, right) -> None:
    """Check logits and tokens against the whole model's. Shapes: tokens, right (B, T).

    `plain` is the whole model, on rank 0; None elsewhere.
    """
    ours = engine(right).logits.float()  # (B, T, V)
    found = torch.zeros(2, device=tokens.device)
    if plain:
        theirs = plain(right).logits.float()
        found = torch.stack([(ours - theirs).abs().max(), theirs.abs().max()])
    dist.broadcast(found, 0)
    drift, largest = found.tolist()
    tolerance = LOGIT_TOLERANCE[report.args.precision] * largest
    report.check("largest difference of a logit", drift, 0, tolerance, "plain model")
    differ = max(runtime.gather((tokens != right).sum().item()))
    report.metrics["tokens_that_differ"] = differ
    if report.args.precision == "32-true":  # rounded to bf16, two logits may be equal
        report.check("tokens that differ", differ, 0, 0, "plain model")


def print_speeds(report: Report, pairs, batch_size: int, new_tokens: int) -> None:
    """Print times and speeds, from the medians, and note them as metrics."""
    rows, units = [], ("time_to_first_token_ms", "time_per_token_ms", "tokens_per_second")
    ranks = report.world.world_size
    names = {"plain_": "plain model on rank 0 alone", "": f"DeepSpeed on {ranks} rank(s)"}
    for (prefix, name), pair in zip(names.items(), pairs, strict=True):
        if pair[0].steps_ms:  # the plain one's are on rank 0
            first, further = (timer.median_ms() for timer in pair)
            speed = 1e3 * batch_size * new_tokens / (first + (new_tokens - 1) * further)
            rows.append((name, f"{first:.1f} ms", f"{further:.1f} ms", f"{speed:,.1f} tok/s"))
            values = zip(units, (first, further, speed), strict=True)
            report.metrics |= {f"{prefix}{unit}": value for unit, value in values}
    report.table(rows, ("median", "first token", "each further one", "speed"))
