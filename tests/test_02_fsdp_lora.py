"""Module 02, fsdp_lora.py: adapters beside frozen weights that FSDP shards."""

import dataclasses
import importlib.util
import json
import re
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import GPUS, REPO, assert_one_line, load_script, results_of, run_command
from helpers_02 import quick
from safetensors.torch import load_file, save_file
from torch import nn

from fsdp_parts import lora_layers
from legacy_common import models

LORA = "02-fsdp/fsdp_lora.py"
QLORA = "02-fsdp/fsdp_qlora.py"
SMALL = ("--seq-len", 32, "--micro-batch-size", 4, "--pretrain-steps", 2, "--max-steps", 2)
TINY = ("--seq-len", 16, "--micro-batch-size", 2, "--pretrain-steps", 1, "--max-steps", 2)
full = pytest.mark.full
# in + out of the seven layers of a block of the preset tiny
SIDES = {"wq": 256, "wk": 192, "wv": 192, "wo": 256, "gate": 480, "up": 480, "down": 480}
WEIGHTS = 434_816  # of tiny with two layers


def checks_in(folder: Path) -> dict[str, dict]:
    return {check["name"]: check for check in results_of(folder)["checks"]}


def adapted(**flags) -> nn.Module:
    """A model with adapters that are not zero, and the flags that made them."""
    script = load_script(LORA)
    given = {"lora_rank": 8, "lora_alpha": 16, "target_modules": list(SIDES), **flags}
    torch.manual_seed(1)
    model = script.Transformer(models.PRESETS["tiny"])
    script.add_adapters(model, Namespace(**given))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.02)
    return model


def write_adapters(folder: Path, **flags) -> Path:
    """Write what save_adapters does, without ranks to gather from."""
    model = adapted(**flags)
    weights = {
        lora_layers.PREFIX + name: weight.detach()
        for name, weight in model.named_parameters()
        if "lora_" in name
    }
    folder.mkdir()
    save_file(weights, folder / lora_layers.WEIGHTS_FILE)
    config = {
        "peft_type": "LORA",
        "r": flags.get("lora_rank", 8),
        "lora_alpha": flags.get("lora_alpha", 16),
        "target_modules": flags.get("target_modules", list(SIDES)),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def two_layers(script):
    """Make the model half as deep: a run of four ranks on two cores then takes seconds."""
    models.PRESETS["tiny"] = dataclasses.replace(models.PRESETS["tiny"], num_layers=2)


def narrow(script):
    models.PRESETS["tiny"] = models.TransformerConfig(256, 32, 2, 4, 2, 88, 256)


@pytest.mark.full
def test_lora_trains_as_one_process(run_script, tmp_path):
    """Losses, gradients, bytes held and sent, file, merge; the checks state the tolerances."""
    flags = (*SMALL, "--output-dir", tmp_path / "run")
    ended = run_script(LORA, *flags, world_size=2, before=two_layers)
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    assert not re.search("warn", ended.stderr, re.I), ended.stderr
    checks = checks_in(tmp_path / "run")
    assert len(checks) == 41
    trained = 2 * 8 * sum(SIDES.values())
    for way in ("LoRA", "LoRA-bf16"):
        assert checks[f"{way}: trained weights"]["measured"] == trained
    assert checks["full: trained weights"]["measured"] == WEIGHTS
    for kind, copies in (("gradients", 1), ("Adam moments", 2)):
        assert checks[f"LoRA: bytes of {kind}"]["measured"] == 4 * copies * trained / 2
    assert checks["LoRA: bytes of parameters"]["measured"] == 4 * (WEIGHTS + trained) / 2
    half = checks["LoRA-bf16: bytes of parameters"]["measured"]
    assert half == (2 * WEIGHTS + 4 * trained) / 2
    assert checks["LoRA: bytes sent to save adapters"]["measured"] == 4 * trained / 2
    for way in ("lora", "lora-bf16"):
        written = sorted(path.name for path in (tmp_path / "run" / way).iterdir())
        assert written == ["adapter_config.json", lora_layers.WEIGHTS_FILE]
    metrics = results_of(tmp_path / "run")["metrics"]
    losses = [value for name, value in metrics.items() if name.startswith("loss_")]
    assert max(losses) < 5.4, "it starts at ln 256 = 5.55, and would prove little there"


@full
def test_without_the_reference_no_rank_holds_the_whole_model(run_script, tmp_path):
    """--parity-steps 0 is what presets other than tiny do; --ways leaves full fine-tuning out."""

    def refuse_whole(script):
        def whole(lesson, way):
            raise AssertionError("the whole model was built")

        script.lora_checks.Lesson.one_process = whole
        narrow(script)

    ended = run_script(
        LORA, *TINY, "--parity-steps", 0, "--ways", "LoRA", "--output-dir", tmp_path / "run",
        world_size=2, before=refuse_whole,
    )  # fmt: skip
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    assert "not compared with one process" in ended.stdout
    assert len(checks_in(tmp_path / "run")) == 14


def in_peft(rank, world_size, folder):
    """Return whether peft has the script's logits, with the adapters beside and merged."""
    import peft

    script = load_script(LORA)
    ours = adapted(lora_rank=4, target_modules=["wq", "down"])
    weights = load_file(folder / lora_layers.WEIGHTS_FILE)
    stored = {n.removeprefix(lora_layers.PREFIX): weight for n, weight in weights.items()}
    ours.load_state_dict(stored, strict=False)
    torch.manual_seed(1)
    theirs = peft.PeftModel.from_pretrained(script.Transformer(models.PRESETS["tiny"]), folder)
    tokens = torch.arange(64).view(2, 32)
    with torch.no_grad():
        before = script.Transformer(models.PRESETS["tiny"])(tokens)
        equal = [torch.equal(ours(tokens), theirs(tokens)), not torch.equal(before, ours(tokens))]
        torch.manual_seed(1)
        merged = script.Transformer(models.PRESETS["tiny"]).state_dict()
        merged |= dict(script.merged(ours))
        theirs = theirs.merge_and_unload().state_dict()
    assert merged.keys() == theirs.keys()
    return [*equal, *(torch.equal(merged[name], theirs[name]) for name in merged)]


@full
def test_peft_loads_the_adapters_and_merges_them_alike(run_script, on_ranks, tmp_path):
    if importlib.util.find_spec("peft") is None:
        pytest.skip("pip install peft")
    flags = ("--lora-rank", 4, "--target-modules", "wq", "down")
    ended = run_script(LORA, *TINY, *flags, "--output-dir", tmp_path / "run", world_size=2)
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    assert all(on_ranks(in_peft, 1, tmp_path / "run" / "lora", timeout_s=180)[0])


@full
def test_training_goes_on_from_saved_adapters(run_script, tmp_path):
    losses = []
    for run, options in (("first", ()), ("second", ("--adapter", tmp_path / "first" / "lora"))):
        ended = run_script(
            LORA, *TINY, "--ways", "LoRA", *options, "--output-dir", tmp_path / run,
            world_size=2, before=two_layers,
        )  # fmt: skip
        assert ended.codes == [0, 0], ended.stdout + ended.stderr
        losses.append(results_of(tmp_path / run)["metrics"]["loss_LoRA"])
    assert losses[1] < losses[0] - 0.01


@pytest.mark.parametrize(
    ("argv", "says"),
    quick(
        2,
        [
            (("--lora-rank", "65"), "--lora-rank must be at most 64, the smallest side of a layer"),
            (("--lora-rank", "129", "--target-modules", "wq"), "--lora-rank must be at most 128"),
        ],
    ),
)
def test_bad_input_is_one_line(run_script, argv, says):
    ended = run_script(LORA, *argv)
    assert_one_line(ended, says, "fsdp_lora.py")


def of_another_preset(script):
    config = models.PRESETS["tiny"]
    models.PRESETS["tiny"] = dataclasses.replace(config, ffn_dim=320)


@pytest.mark.parametrize(
    ("stored", "argv", "before", "says"),
    quick(
        2,
        [
            ({"lora_rank": 4}, (), None, "r is 4 there, 8 here"),
            ({}, (), of_another_preset, "gate.lora_B.weight is [352, 8] there, [320, 8] here"),
        ],
    ),
)
def test_adapters_that_do_not_fit_are_refused(run_script, tmp_path, stored, argv, before, says):
    folder = write_adapters(tmp_path / "adapter", **stored)
    ended = run_script(LORA, *TINY, *argv, "--adapter", folder, world_size=2, before=before)
    assert_one_line(ended, says, "fsdp_lora.py")


@full
def test_adapters_that_cannot_be_read_are_refused(run_script, tmp_path):
    folder = write_adapters(tmp_path / "adapter")
    weights = folder / lora_layers.WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes()[:1000])
    for path in (folder, tmp_path / "none"):
        ended = run_script(LORA, *TINY, "--adapter", path, world_size=2)
        assert_one_line(ended, f"--adapter {path} cannot be read: ", "fsdp_lora.py")


def train_the_base_too(script):
    added = script.add_adapters
    script.add_adapters = lambda model, args: (added(model, args), model.requires_grad_(True))


def merge_without_the_scale(script):
    merged = script.merged

    def broken(model, rows_of):
        for _, layer in script.layers_of(model, having="lora_A"):
            layer.scale = 1.0
        return merged(model, rows_of)

    script.merged = broken


def draw_apart(script):
    """Let ranks begin with adapters of their own, which sharding mixes."""
    filled = script.lora_checks.fill

    def broken(model, base, seed):
        return filled(model, base, seed + dist.get_rank())

    script.lora_checks.fill = broken


def save_in_float64(script):
    saved = lora_layers.save_file
    lora_layers.save_file = lambda weights, path: saved(
        {name: weight.double() for name, weight in weights.items()}, path
    )


def gather_all_to_save(script):
    """Gather the frozen model too, as a full state dict would."""
    saved = script.lora_checks.save_adapters

    def broken(folder, model, args):
        for weight in model.parameters():
            lora_layers.gathered(weight.detach())
        saved(folder, model, args)

    script.lora_checks.save_adapters = broken


def gather_to_load(script):
    loaded = script.lora_checks.load_adapters

    def broken(folder, model):
        for weight in model.parameters():
            lora_layers.gathered(weight.detach())
        loaded(folder, model)

    script.lora_checks.load_adapters = broken


def lose_an_adapter(script):
    stored = lora_layers.safe_open

    class Broken:
        def __init__(self, path, framework):
            self.file = stored(path, framework)

        def get_tensor(self, name):
            whole = self.file.get_tensor(name)
            return whole.zero_() if name.endswith("blocks.1.up.lora_B.weight") else whole

    lora_layers.safe_open = Broken


def one_unit_for_all(script):
    sharded = script.fully_shard
    script.fully_shard = lambda module, **options: (
        sharded(module, **options) if isinstance(module, script.Transformer) else module
    )


def keep_float32(script):
    """Let -bf16 store its frozen weights in float32, as without to(bfloat16)."""
    built = script.build

    def broken(config, way, args):
        return built(config, way.removesuffix("-bf16"), args)

    script.build = broken


TRAINED = ["trained weights", "bytes of gradients", "bytes of Adam moments"]
REDUCED = ["bytes sent in reduce-scatters"]
STEPS = ["largest error of a loss", "relative error of a norm"]
LOADED = ["error of logits, loaded into a fresh base"]
MERGED = [
    "error of logits, merged",
    "merged weights unlike W + alpha/r B A",
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("sabotage", "world_size", "failing"),
    quick(2, [
        (draw_apart, 2, {*STEPS}),
        (gather_all_to_save, 2, {"bytes sent to save adapters"}),
        (merge_without_the_scale, 1, {*MERGED}),
        (train_the_base_too, 2,
         {*TRAINED, *REDUCED, "frozen weights that changed", *LOADED, *MERGED}),
        (one_unit_for_all, 2, {"bytes sent in all-gathers"}),
        (save_in_float64, 1, {"bytes of the adapters' file"}),
        (gather_to_load, 2, {"bytes gathered to load adapters"}),
        (lose_an_adapter, 1, {*LOADED, MERGED[1]}),
    ]),
)  # fmt: skip
def test_sabotage_of_lora_fails_a_check(run_script, tmp_path, sabotage, world_size, failing):
    def before(script):
        narrow(script)
        sabotage(script)

    ended = run_script(
        LORA, *TINY, "--ways", "LoRA", "--output-dir", tmp_path / "run",
        world_size=world_size, before=before,
    )  # fmt: skip
    assert ended.codes[0] == 1, ended.stdout + ended.stderr
    checks = checks_in(tmp_path / "run").items()
    failed = {name.removeprefix("LoRA: ") for name, check in checks if not check["ok"]}
    assert failed == failing, ended.stdout


@full
def test_frozen_weights_left_in_float32_are_noticed(run_script, tmp_path):
    def before(script):
        narrow(script)
        keep_float32(script)

    ended = run_script(
        LORA, *TINY, "--ways", "LoRA-bf16", "--output-dir", tmp_path / "run",
        world_size=2, before=before,
    )  # fmt: skip
    assert ended.codes[0] == 1, ended.stdout + ended.stderr
    failed = {name for name, check in checks_in(tmp_path / "run").items() if not check["ok"]}
    expected = {"bytes of parameters", "bytes of a frozen weight"}
    assert failed == {f"LoRA-bf16: {name}" for name in expected}


@full
@pytest.mark.skipif(not GPUS, reason="needs a GPU")
@pytest.mark.parametrize("script", [LORA, QLORA])
def test_scripts_run_on_a_gpu(script):
    command = ["python", script, "--device", "cuda"]
    ended = run_command(command, REPO, 300, CUDA_VISIBLE_DEVICES=GPUS)
    assert ended.codes == [0], ended.stdout + ended.stderr
    assert " cuda with nccl" in ended.stdout
