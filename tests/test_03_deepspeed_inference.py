"""deepspeed_inference.py: cut or whole, the same logits, and no more held or sent than said."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from conftest import assert_one_line, fork_ranks, results_of
from helpers_03 import deepspeed_in_the_parent, first_is_quick

# One worker imports transformers, which takes seconds, and not each of them.
pytestmark = pytest.mark.xdist_group("transformers")

SCRIPT = "03-deepspeed/deepspeed_inference.py"
CHECKPOINT, TO_HF = "02-fsdp/fsdp_checkpoint.py", "02-fsdp/fsdp_to_hf.py"
SMALL = ("--prompt-tokens", 16, "--max-new-tokens", 6)
SHAPE = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
UNEVEN = {
    "hidden_size": 96, "intermediate_size": 101, "num_attention_heads": 6, "vocab_size": 77,
    "num_key_value_heads": 3, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def imported():
    families = (f"transformers.models.{name}.modeling_{name}" for name in ("llama", "gpt2"))
    with deepspeed_in_the_parent("transformers.models.auto.modeling_auto", *families):
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """Return a folder of Hugging Face folders with random weights."""
    root = tmp_path_factory.mktemp("models")

    def body(rank: int) -> None:
        import transformers

        transformers.utils.logging.disable_progress_bar()

        def write(name, config, model, **changes):
            torch.manual_seed(7)
            made = getattr(transformers, model)(getattr(transformers, config)(**changes))
            for parameter_name, parameter in made.named_parameters():
                if parameter_name.endswith("bias"):  # which are drawn as zeros
                    torch.nn.init.normal_(parameter, std=0.1)
            made.save_pretrained(root / name)

        llama = "LlamaConfig", "LlamaForCausalLM"
        write("llama", *llama, **SHAPE)
        write("uneven", *llama, **SHAPE | UNEVEN)
        long = {"max_position_embeddings": 4096, "initializer_range": 0.2}  # it looks far
        write("long", *llama, **SHAPE | long)
        write("gpt2", "GPT2Config", "GPT2LMHeadModel", n_layer=1, n_embd=48)

    ended = fork_ranks(body, 1, root / "made", 60, True)
    assert ended.codes == [0], ended.stderr
    return root


def once(script):
    script.REPEATS = 1


def measured_in(folder: Path) -> dict[str, float]:
    return {check["name"]: check["measured"] for check in results_of(folder)["checks"]}


def run_quietly(run_script, *argv, world_size=2, before=once):
    """Run, and see that it succeeds, says nothing else and leaves nothing in shared memory."""
    there = set(os.listdir("/dev/shm"))
    ended = run_script(SCRIPT, *argv, world_size=world_size, before=before)
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    assert ended.stderr == ""
    assert "AutoTP" not in ended.stdout
    left = set(os.listdir("/dev/shm")) - there
    assert not [name for name in left if "deepspeed" in name]
    return ended


@pytest.mark.parametrize(
    ("precision", "world_size"), first_is_quick(("32-true", 2), ("bf16-true", 2))
)
def test_cut_or_whole_the_same_logits(run_script, tmp_path, world_size, precision):
    run = tmp_path / "run"
    ended = run_quietly(
        run_script, *SMALL, "--batch-size", 2, "--precision", precision, "--output-dir", run,
        world_size=world_size,
    )  # fmt: skip
    results, measured = results_of(run), measured_in(run)
    bits = {"32-true": 4, "bf16-true": 2}[precision]
    # Of the preset tiny: 256 x 128 embedding, 9 norms of 128; 4 layers and the head are cut.
    whole, linear = 256 * 128 + 9 * 128, 803_968 - 256 * 128 - 9 * 128
    assert measured["bytes of weights"] == bits * (whole + linear // world_size)
    # 4 layers, 2 prompts, 16 + 5 tokens read, 2 heads of 32 for keys and for values
    assert measured["bytes of KV cache"] == bits * 4 * 2 * 21 * 2 * 2 * 32 // world_size
    several = world_size > 1
    assert measured["collectives"] == several * 6 * (2 * 4 + 1)
    assert measured["bytes all-reduced"] == several * bits * 2 * (8 * 21 * 128 + 6 * 256)
    kinds = ("time_to_first_token_ms", "time_per_token_ms", "tokens_per_second")
    metrics = {f"{prefix}{kind}" for prefix in ("", "plain_") for kind in kinds}
    assert set(results["metrics"]) == metrics | {"tokens_that_differ"}
    assert all(results["metrics"][name] > 0 for name in metrics)
    assert len(results["checks"]) == 6 - (precision == "bf16-true")
    row = next(line for line in ended.stdout.splitlines() if "layers.0.mlp.down_proj" in line)
    cut = "inputs, then all-reduce  128 x 352  128 x 176" if several else "-  128 x 352  128 x 352"
    assert " ".join(row.split()[1:]) == " ".join(cut.split())


@pytest.mark.full
def test_a_model_that_module_02_exports(run_script, tmp_path):
    """It goes on from a prompt as its text goes: bytes are tokens there."""
    for script, *argv in (
        (CHECKPOINT, "save", "--dir", tmp_path / "run", "--max-steps", 12, "--save-every", 12),
        (TO_HF, "export", "--dir", tmp_path / "run", "--to", tmp_path / "exported"),
    ):
        ended = run_script(script, *argv, world_size=2)
        assert ended.codes == [0, 0], ended.stdout + ended.stderr
    ended = run_quietly(
        run_script, "--model", tmp_path / "exported", "--prompt", "import os", "--max-new-tokens", 9
    )
    assert "b'import os' goes on\n" in ended.stdout
    assert f"--model {tmp_path / 'exported'}: 803,968 weights" in ended.stdout


@pytest.mark.full
def test_sizes_that_the_ranks_do_not_divide(run_script, folders):
    """Heads and widths that the ranks do not divide, biases, a head tied to the embedding."""
    run_quietly(run_script, "--model", folders / "uneven", *SMALL, world_size=3)


@pytest.mark.full
def test_a_tokenizer_in_the_folder_is_used(run_script, folders, tmp_path):
    folder = tmp_path / "words"
    shutil.copytree(folders / "llama", folder)
    words = {"<unk>": 0, "to": 1, "be": 2, "or": 3, "not": 4}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "normalizer": None, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None,
        "decoder": None, "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))
    ended = run_quietly(run_script, "--model", folder, "--prompt", "to be or not to be")
    assert "1 prompt(s) of 6 tokens" in ended.stdout
    assert "'to be or not to be' goes on" in ended.stdout


# Sabotage


def after_cut(change):
    """Return a sabotage that changes the engine on rank 1, or on all ranks."""

    def sabotage(script):
        cut = script.cut

        def broken(model, ranks, dtype):
            engine = cut(model, ranks, dtype)
            change(engine)
            return engine

        script.cut = broken

    return sabotage


def on_rank1(change):
    return lambda thing: change(thing) if os.environ["RANK"] == "1" else None


def shift_a_shard(engine):
    weight = engine.module.model.layers[1].self_attn.o_proj.weight
    weight.copy_(weight.roll(1, 1))


def cast_buffers(engine):
    for buffer in engine.module.buffers():
        buffer.data = buffer.bfloat16()


def leave_the_head_whole(script):
    from deepspeed.module_inject.auto_tp import AutoTP

    AutoTP._replace_last_linear_module = lambda self, module: module


def after_generating(change):
    def sabotage(script):
        generate = script.generate

        def broken(*arguments):
            tokens, cache = generate(*arguments)
            change(tokens, cache)
            return tokens, cache

        script.generate = broken

    return sabotage


def another_last_token(tokens, cache):
    if os.environ["RANK"] == "1":
        tokens[:, -1] += 1


def keep_twice_the_values(tokens, cache):
    cache.layers[0].values = cache.layers[0].values.repeat(2, 1, 1, 1)


WEIGHTS, CACHE, CALLS, SUMMED = (
    "bytes of weights", "bytes of KV cache", "collectives", "bytes all-reduced",
)  # fmt: skip
LOGITS, TOKENS = "largest difference of a logit", "tokens that differ"


@pytest.mark.full
@pytest.mark.parametrize(
    ("sabotage", "failing"),
    [
        (after_cut(on_rank1(shift_a_shard)), [LOGITS]),
        (leave_the_head_whole, [WEIGHTS, CALLS, SUMMED]),
        (after_generating(keep_twice_the_values), [CACHE]),
    ]
    + [
        pytest.param(*case, marks=pytest.mark.full)
        for case in ((after_generating(another_last_token), [TOKENS]),)
    ],
)
def test_sabotage_fails_a_check(run_script, tmp_path, sabotage, failing):
    def before(script):
        once(script)
        sabotage(script)

    ended = run_script(
        SCRIPT, *SMALL, "--output-dir", tmp_path / "run", world_size=2, before=before
    )
    assert 1 in ended.codes, ended.stdout + ended.stderr
    checks = results_of(tmp_path / "run")["checks"]
    wrong = [check["name"] for check in checks if not check["ok"]]
    assert wrong == failing or wrong == [*failing, TOKENS]


@pytest.mark.full
def test_rounded_rotary_frequencies_fail_a_check_far_from_the_start(run_script, folders, tmp_path):
    """As DeepSpeed leaves them in bf16. Near the start they would pass."""
    argv = ("--model", folders / "long", "--precision", "bf16-true", "--max-new-tokens", 2)
    differences = []
    for name, change in (("kept", lambda engine: None), ("cast", cast_buffers)):
        ended = run_script(
            SCRIPT, *argv, "--prompt-tokens", 2000, "--output-dir", tmp_path / name, world_size=2,
            before=lambda script, change=change: (once(script), after_cut(change)(script)),
            end_job_on_failure=False,
        )  # fmt: skip
        differences.append(measured_in(tmp_path / name)[LOGITS])
        assert ended.codes[0] == (name == "cast"), ended.stdout + ended.stderr
    assert differences[1] > 3 * differences[0], differences


# Bad input


@pytest.mark.parametrize(
    ("world_size", "argv", "says"),
    first_is_quick(
        (3, (), "--preset tiny has 2 key-value head(s) for 3 ranks"),
        (1, ("--max-new-tokens", 193), "193 after 64 of the prompt are more than the 256"),
        (1, ("--model", "nowhere"), "--model nowhere: no config.json there"),
    ),
)
def test_bad_flags_are_refused(run_script, world_size, argv, says):
    ended = run_script(SCRIPT, *argv, world_size=world_size)
    assert_one_line(ended, says, "deepspeed_inference.py")


def without_a_weight(folder):
    change_weights(folder, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))


def of_another_width(folder):
    change_weights(folder, lambda weights: weights.update({"lm_head.weight": torch.zeros(9, 9)}))


def change_weights(folder, change):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def cut_short(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def change_config(**changes):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    first_is_quick(
        ("gpt2", None, "is of type gpt2: this script knows how AutoTP cuts llama, mistral, "),
        ("llama", without_a_weight, "1 weight(s) missing: model.layers.1.mlp.up_proj.weight"),
        ("llama", of_another_width, "1 weight(s) mismatched: ('lm_head.weight', "),
        ("llama", cut_short, "incomplete"),
        ("llama", change_config(quantization_config={"quant_method": "gptq"}), "unquantised"),
    ),
)
def test_bad_folders_are_refused(run_script, folders, tmp_path, name, damage, says):
    folder = tmp_path / "copy"
    shutil.copytree(folders / name, folder)
    if damage:
        damage(folder)
    ended = run_script(SCRIPT, "--model", folder, *SMALL)
    assert_one_line(ended, says, "deepspeed_inference.py")
