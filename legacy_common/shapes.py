"""A Llama's shape from a Hugging Face config.json, or from the five sizes that have no default.

transformers is not needed for it.
"""

import difflib
import json
from pathlib import Path
from typing import Any

from legacy_common.cli import UsageError

HF_SHAPE = {
    "vocab_size": "vocab_size", "hidden_size": "dim", "intermediate_size": "ffn_dim",
    "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads", "max_position_embeddings": "max_seq_len",
    "rope_theta": "rope_theta", "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied_embeddings",
}  # fmt: skip
# Where a file leaves them out, as LlamaConfig of transformers has them; heads share no keys.
DEFAULTS = {"max_position_embeddings": 2048, "rope_theta": 1e4, "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False}  # fmt: skip
# What our model has no field for, and how it computes.
FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0,
         "sliding_window": None, "quantization_config": None}  # fmt: skip
KINDS = ("llama", "mistral")  # the same model, where a Mistral has no sliding window


def read(path: str | Path, kinds: tuple[str, ...] = KINDS) -> dict[str, Any]:
    """Return a shape by the names of `TransformerConfig`.

    Raises: UsageError, naming one field, for what is missing or wrong or not in our model.
    """
    try:
        given = json.loads(Path(path).read_text())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path} is no JSON: {error}") from error
    if not isinstance(given, dict):
        raise UsageError(f"{path} describes no Llama: it has to be an object, {{...}}")
    refuse_other_models(path, given, kinds)
    rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
    found = DEFAULTS | given | {k: v for k, v in rope.items() if k == "rope_theta"}
    heads = found.get("num_attention_heads")
    found["num_key_value_heads"] = found.get("num_key_value_heads") or heads
    for name in HF_SHAPE:
        check_kind(path, name, found)
    refuse_uneven(path, found)
    return {ours: found[theirs] for theirs, ours in HF_SHAPE.items()}


def refuse_other_models(path: str | Path, given: dict[str, Any], kinds: tuple[str, ...]) -> None:
    """Raise UsageError for a field that is not as in our model, and for one that is misspelt."""
    kind, rope = given.get("model_type", kinds[0]), {"rope_type": "default"}
    checks = [("model_type", kind, kind if kind in kinds else " or ".join(kinds))]
    checks += [(name, given.get(name, right), right) for name, right in FIXED.items()]
    for name in ("rope_scaling", "rope_parameters"):
        value = given.get(name) or {}
        known = value if isinstance(value, dict) else {"type": value}
        kind = known.get("rope_type", known.get("type", "default"))
        checks.append((name, value, value if kind == "default" else rope))
    for name, there, here in checks:
        if there != here:
            raise UsageError(f"{path}: {name} is {there}, not {here} as our model has it")
    known = [*HF_SHAPE, *FIXED]
    for name in set(given) - set(known):
        if close := difflib.get_close_matches(name, set(known) - set(given), 1, cutoff=0.9):
            raise UsageError(f"{path}: unknown field {name}: did you mean {close[0]}?")


def check_kind(path: str | Path, name: str, found: dict[str, Any]) -> None:
    """Raise UsageError unless a field is there, and of its kind."""
    value, default = found.get(name), DEFAULTS.get(name, 1)
    if value is None:
        raise UsageError(f"{path}: {name} is missing")
    if isinstance(default, bool):
        right, kind = isinstance(value, bool), "true or false"
    elif isinstance(default, float):
        right, kind = type(value) in (int, float) and value > 0, "a number above 0"
    else:
        right, kind = type(value) is int and value > 0, "a whole number of at least 1"
    if not right:
        raise UsageError(f"{path}: {name} must be {kind}, not {value!r}")


def refuse_uneven(path: str | Path, found: dict[str, Any]) -> None:
    """Raise UsageError for sizes that do not divide, and for heads of another width."""
    heads = found["num_attention_heads"]
    for whole, parts in (
        ("hidden_size", "num_attention_heads"),
        ("num_attention_heads", "num_key_value_heads"),
    ):
        if found[whole] % found[parts]:
            sizes = f"{whole} is {found[whole]}, no multiple of {parts}, {found[parts]}"
            raise UsageError(f"{path}: {sizes}")
    width = found["hidden_size"] // heads
    own = found.get("head_dim") or width
    if own != width:
        raise UsageError(f"{path}: head_dim is {own}, not {width} as our model has it")
    if width % 2:
        raise UsageError(f"{path}: heads are {width} wide: rotary embeddings need an even number")
