"""Module 02: weights go to Hugging Face's format and back, and no rank holds all of them."""

import json
import sys
from pathlib import Path

import pytest
import torch
from conftest import assert_one_line, load_script, results_of
from helpers_02 import (
    LOAD,
    NEWEST,
    SAVE,
    TO_HF,
    assert_ok,
    quick,
    remove_half,
    runner,
    saved_copy,
    tensors_of,
)  # fmt: skip

from legacy_common import hf, models

pytestmark = pytest.mark.xdist_group("transformers")  # one worker imports it

full = pytest.mark.full


@pytest.fixture
def run(run_script):
    return runner(run_script)


@pytest.fixture(scope="module")
def once():
    return {}


@pytest.fixture
def saved(run, once, tmp_path, tmp_path_factory):
    return saved_copy(run, once, tmp_path, tmp_path_factory)


@pytest.fixture(autouse=True)
def transformers():
    module = pytest.importorskip("transformers")
    assert module.LlamaForCausalLM  # imported now, so that no fork has to
    return module


@pytest.mark.full
def test_hugging_face_there_and_back(run, tmp_path):
    """To the same logits, and back to the same bits and to a fresh Adam."""
    theirs, back, ours = tmp_path / "theirs", tmp_path / "back", tmp_path / "ours"
    chosen = ("--preset", "tied")
    options = ("--parity-steps", 0, "--kind", "full", "--dir", ours)
    assert_ok(run(*SAVE, *chosen, *options, world_size=2))
    check = ("--check-logits", *chosen)
    files = ("--to", theirs, "--max-shard-size", "500KB")
    assert_ok(run(TO_HF, "export", *check, "--dir", ours, *files, world_size=2))
    names = sorted(path.name for path in theirs.iterdir())
    count = len(names) - 2
    parts = [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    assert names == ["config.json", *parts, "model.safetensors.index.json"] and count > 2
    sizes = [(theirs / name).stat().st_size for name in parts]
    assert max(sizes) < 600_000  # a header, and one weight of 180,224 bytes at most
    config = json.loads((theirs / "config.json").read_text())
    assert config["tie_word_embeddings"]
    ended = run(TO_HF, "import", *check, "--from", theirs, "--dir", back, world_size=3)
    assert_ok(ended)
    before, after = tensors_of(ours / NEWEST), tensors_of(back / "step-00000000")
    weights = [name for name in before if name.startswith("model.")]
    assert len(weights) == 21 and all(torch.equal(before[name], after[name]) for name in weights)
    assert {after[name].item() for name in after if name.endswith(".step")} == {0.0}
    options = ("--dir", back, "--strategy", "ddp", "--parity-steps", 2)
    assert_ok(run(*LOAD, *chosen, *options), "OK: 1 check passed, ")


@full
def test_one_file_of_transformers_own_is_imported(run, transformers, tmp_path):
    """Weights that transformers drew and wrote, in bfloat16 and one file."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        tiny = models.PRESETS["tiny"]
        config = hf.hf_config(models.TransformerConfig(256, 128, 2, 4, 2, 352, 256))
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    assert tiny.dim == config.hidden_size
    model.save_pretrained(tmp_path / "theirs")
    assert (tmp_path / "theirs" / "model.safetensors").exists()
    flags = ("--from", tmp_path / "theirs", "--dir", tmp_path / "back")
    assert_ok(run(TO_HF, "import", *flags, world_size=2), "OK: 3 checks passed")


def test_names_and_config_go_there_and_back(tmp_path):
    for config in models.PRESETS.values():
        with torch.device("meta"):
            ours = models.Transformer(models.TransformerConfig(**vars(config) | {"num_layers": 2}))
        weights = ours.state_dict()
        again = hf.from_hf(hf.to_hf(weights, config), config)
        assert {name: tensor.shape for name, tensor in again.items()} == {
            name: tensor.shape for name, tensor in weights.items()
        }
        hf.hf_config(config).save_pretrained(tmp_path)
        assert hf.config_of(tmp_path, config) == hf.config_of(tmp_path) == config


def test_an_export_is_told_from_another_folder(tmp_path):
    """By its mark, and by its files: a run whose export is there has nothing to do."""
    assert hf.exported(None) and not hf.exported(tmp_path)
    index = {"metadata": {"total_size": 4}, "weight_map": {"w": "model.safetensors"}}
    for files, metadata, right in (
        (["config.json", "model.safetensors"], {}, False),  # of somebody else
        (["config.json"], hf.MARK, False),
        (["config.json", "model.safetensors"], hf.MARK, True),
    ):
        folder = tmp_path / f"{len(files)}-{right}"
        folder.mkdir()
        for name in files:
            (folder / name).touch()
        content = index | {"metadata": index["metadata"] | metadata}
        (folder / hf.INDEX).write_text(json.dumps(content))
        assert hf.exported(folder) == right


@pytest.mark.parametrize(
    ("text", "size"), [("500KB", 500_000), ("0.5GB", 5 * 10**8), ("0MB", None), ("5", None)]
)
def test_sizes(run, text, size):
    if size:
        assert load_script(TO_HF).part.size_of(text) == size
    else:
        flags = ("export", "--dir", "x", "--to", "y", "--max-shard-size", text)
        assert_one_line(run(TO_HF, *flags), "500KB, 200MB or 5GB", "fsdp_to_hf.py")


# Sabotage


def permute_for_interleaved_rotation(script):
    """As the conversion of Meta's own files has to."""
    to_hf = hf.to_hf

    def permuting(weights, config):
        named, heads = to_hf(weights, config), config.num_heads
        name = "model.layers.0.self_attn.q_proj.weight"
        if named[name].is_meta:  # the whole model, whose sizes alone count
            return named
        named[name] = named[name].clone()
        local = named[name].to_local()
        rows = local.view(heads, -1, 2, local.shape[1])
        local.copy_(rows.transpose(1, 2).reshape(local.shape).clone())
        return named

    hf.to_hf = permuting


def write_zeros(script):
    save = hf.dcp.save

    def zeroed(named, **options):
        save({name: torch.zeros_like(tensor) for name, tensor in named.items()}, **options)

    hf.dcp.save = zeroed


def lose_a_weight(script):
    to_hf = hf.to_hf
    hf.to_hf = lambda *args: {k: v for k, v in to_hf(*args).items() if k != "lm_head.weight"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("action", "sabotage", "failing"),
    [
        ("export", permute_for_interleaved_rotation, "largest difference of a logit"),
        *(
            pytest.param(*case, marks=full)
            for case in (("export", lose_a_weight, "weights missing or not expected"),)
        ),
    ],
)
def test_sabotage_fails_a_check(run, saved, tmp_path, action, sabotage, failing):
    flags = ("--dir", saved, "--to", tmp_path / "to")
    ended = run(TO_HF, action, *flags, "--output-dir", tmp_path / "run", before=sabotage)
    assert ended.codes == [1], ended.stdout + ended.stderr
    failed = [c["name"] for c in results_of(tmp_path / "run")["checks"] if not c["ok"]]
    assert failing in failed, ended.stdout


def test_sabotage_of_a_model_that_no_process_can_hold_fails_a_check(run, saved, tmp_path):
    flags = ("--dir", saved, "--to", tmp_path / "to", "--no-check-logits")
    flags = (*flags, "--output-dir", tmp_path / "run")
    ended = run(TO_HF, "export", *flags, world_size=2, before=write_zeros)
    assert 1 in ended.codes, ended.stdout + ended.stderr
    failed = [c["name"] for c in results_of(tmp_path / "run")["checks"] if not c["ok"]]
    assert failed == ["weights equal in the files"]


# Bad input


@pytest.mark.parametrize(
    ("argv", "says"),
    quick(
        2,
        [
            (("export", "--dir", "x"), "export needs --to"),
            (("import", "--dir", "x"), "import needs --from"),
        ],
    ),
)
def test_bad_input_is_one_line(run, tmp_path, monkeypatch, argv, says):
    monkeypatch.chdir(Path(__file__).parent.parent)
    ended = run(TO_HF, *argv)
    assert_one_line(ended, says, "fsdp_to_hf.py")


@full
def test_an_export_that_cannot_be_imported_says_why(run, saved, tmp_path):
    theirs, back = tmp_path / "theirs", tmp_path / "back"
    assert_ok(run(TO_HF, "export", "--dir", saved, "--to", theirs))
    flags = (TO_HF, "import", "--from", theirs, "--dir", back)

    def says(text, *more, **options):
        ended = run(*flags, *more, world_size=2, **options)
        assert_one_line(ended, text, "fsdp_to_hf.py")

    says("config.json: vocab_size is 256, not 50257 as --preset has it", "--preset", "124m")
    config, weights = theirs / "config.json", theirs / "model-00001-of-00001.safetensors"
    content = config.read_text()
    config.write_text(content.replace('"default"', '"linear", "factor": 2.0'))
    says("'factor': 2.0}, not {'rope_type': 'default'} as our model has it")
    config.write_text(content.replace('"llama"', '"mistral"'))
    says("config.json: model_type is mistral, not llama as our model has it")
    remove_half(config)
    says("config.json is no JSON: ")
    config.write_text(content.replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    says("config.json: num_hidden_layers is 3, not 2 as --preset has it")
    config.write_text(content)
    remove_half(weights)
    says(f"{theirs}: rank ")
    weights.unlink()
    says("lm_head.weight")
    config.unlink()
    says("config.json: No such file or directory")

    def without_transformers(script):
        sys.modules["transformers"] = None

    ended = run(TO_HF, "export", "--dir", saved, "--to", back, before=without_transformers)
    assert_one_line(ended, "pip install transformers", "fsdp_to_hf.py")
