"""Models for DeepSpeed to cut: a Llama of a preset, or a folder in Hugging Face's format."""

from pathlib import Path

import torch

from dist_common import data, measure, runtime
from dist_common.cli import UsageError
from dist_common.models import PRESETS
from dist_common.runtime import World

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


def text_of(ids: list[int], tokenizer) -> str:
    """Return tokens as text, as bytes, or as numbers where they are neither."""
    if tokenizer:
        return repr(tokenizer.decode(ids))
    return repr(bytes(ids)) if max(ids) < 256 else str(ids)


def examine(args, world: World, parts: int):
    """Return a model's name, its config and its layers without weights; refuse what is not cut.

    `parts`: over how many ranks each layer is cut.
    Raises: UsageError.
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
    if parts > kv_heads:  # DeepSpeed would go on, and the answer be right
        raise UsageError(
            f"{what} has {kv_heads} key-value head(s) for {parts} ranks: some would "
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


def prompts_of(args, config, tokenizer) -> torch.Tensor:
    """Return B prompts of T tokens, (B, T): --prompt in each, or parts of a text.

    Without a tokenizer a byte is a token. Raises: UsageError when they do not fit the model.
    """
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
