"""Module 02, fsdp_lora.py: adapters beside frozen weights, whole or in 4 bits."""

import dataclasses
import importlib.util
import json
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_one_line, load_script, results_of
from torch import nn

from dist_common import models

LORA = "02-fsdp/fsdp_lora.py"
SMALL = ("--seq-len", 32, "--micro-batch-size", 4, "--pretrain-steps", 2, "--max-steps", 2)
TINY = ("--seq-len", 16, "--micro-batch-size", 2, "--pretrain-steps", 1, "--max-steps", 2)
full = pytest.mark.full
in_4_bits = pytest.mark.xdist_group("bitsandbytes")  # one worker imports it
# in + out of the seven layers of a block of the preset tiny
SIDES = {"wq": 256, "wk": 192, "wv": 192, "wo": 256, "gate": 480, "up": 480, "down": 480}


@pytest.fixture
def nf4(on_ranks):
    """Skip with the reason where 4 bits do not run.

    Import here what every fork would have to, but run nothing of it here: a fork of a process in
    which its kernels ran may abort ("Invalid thread pool").
    """
    pytest.importorskip("bitsandbytes", reason="pip install bitsandbytes")

    def why_not(rank, world_size):
        try:
            load_script(LORA).NF4Linear(nn.Linear(64, 64))(torch.ones(1, 64))
        except Exception as error:
            return str(error)

    if reason := on_ranks(why_not, 1, timeout_s=180)[0]:
        pytest.skip(f"bitsandbytes does not run here: {reason}")


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
    script, model = load_script(LORA), adapted(**flags)
    weights = {
        script.PREFIX + name: weight.detach()
        for name, weight in model.named_parameters()
        if "lora_" in name
    }
    folder.mkdir()
    script.save_file(weights, folder / script.WEIGHTS_FILE)
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


@pytest.mark.parametrize(
    ("world_size", "options", "per_layer"),
    [
        pytest.param(1, (), 8 * sum(SIDES.values()), marks=full),
        pytest.param(2, (), 8 * sum(SIDES.values()), marks=full),
        # Fewer rows of A than ranks, and a number of ranks that divides no dimension.
        pytest.param(
            4, ("--lora-rank", 2, "--target-modules", "wq", "wv"), 2 * (256 + 192), marks=full
        ),
        (3, ("--lora-alpha", 5), 8 * sum(SIDES.values())),
    ],
)
def test_lora_trains_as_one_process(run_script, tmp_path, world_size, options, per_layer):
    """Losses, bytes held and sent, file, merge; the script's checks state the tolerances."""
    divides = world_size in (1, 2)
    ended = run_script(
        LORA, *SMALL, *options, "--output-dir", tmp_path / "run",
        world_size=world_size, before=None if divides else two_layers,
    )  # fmt: skip
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    checks = checks_in(tmp_path / "run")
    assert len(checks) == 20
    trained = (4 if divides else 2) * per_layer
    assert checks["LoRA: trained weights"]["measured"] == trained
    if divides:  # no part is filled up
        assert checks["full: trained weights"]["measured"] == 803_968
        for kind, copies in (("gradients", 1), ("Adam moments", 2)):
            held = checks[f"LoRA: bytes of {kind}"]["measured"]
            assert held == 4 * copies * trained / world_size
        whole = checks["LoRA: bytes of parameters"]["measured"]
        assert whole == 4 * (803_968 + trained) / world_size
    written = sorted(path.name for path in (tmp_path / "run" / "lora").iterdir())
    assert written == ["adapter_config.json", load_script(LORA).WEIGHTS_FILE]
    metrics = results_of(tmp_path / "run")["metrics"]
    assert max(metrics.values()) < 5.4, "it starts at ln 256 = 5.55, and would prove little there"


@in_4_bits
@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (2, ()),
        pytest.param(1, (), marks=full),
        pytest.param(4, ("--target-modules", "wq", "down"), marks=full),
    ],
)
def test_qlora_trains_as_one_process(run_script, tmp_path, nf4, world_size, options):
    """As above; the frozen layers take 4 bits and 1/64 of a float32 for each weight."""
    ended = run_script(
        LORA, *SMALL, *options, "--quantize", "nf4", "--output-dir", tmp_path / "run",
        world_size=world_size, before=two_layers,
    )  # fmt: skip
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    checks = checks_in(tmp_path / "run")
    assert len(checks) == 35
    in_blocks = 2 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 352 * 128)
    spared = (4 - 0.5 - 4 / 64) * in_blocks / world_size
    held = [checks[f"{way}: bytes of parameters"]["measured"] for way in ("LoRA", "QLoRA")]
    assert held[0] - held[1] == spared


def kept_for_backward(rank, world_size):
    """Return the bytes that the 4-bit layer keeps, those that F.linear keeps, and a gradient."""
    script = load_script(LORA)
    layer = script.NF4Linear(nn.Linear(96, 160, bias=False))
    inputs = torch.randn(2, 96, requires_grad=True)

    def kept(forward) -> int:
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: sizes.append(tensor.nbytes) or tensor, lambda tensor: tensor
        ):
            forward(inputs)
        return sum(sizes)

    gradient = torch.autograd.grad(layer(inputs).sum(), inputs)[0]
    right = script.weight_of(layer).detach().sum(0).expand(2, -1)
    plain = kept(lambda x: F.linear(x, script.weight_of(layer)))
    return kept(layer), plain, (gradient - right).abs().max().item()


@in_4_bits
def test_a_4_bit_layer_keeps_no_float_copy_for_backward(on_ranks, nf4):
    """The trap that MultiplyNF4 is there for."""
    kept, plain, error = on_ranks(kept_for_backward, 1)[0]
    assert kept == 96 * 160 * (0.5 + 4 / 64)
    assert plain >= 96 * 160 * 4
    assert error < 1e-5


def in_peft(rank, world_size, folder):
    """Return whether peft has the script's logits, with the adapters beside and merged."""
    import peft

    script = load_script(LORA)
    ours = adapted(lora_rank=4, target_modules=["wq", "down"])
    weights = script.load_file(folder / script.WEIGHTS_FILE)
    ours.load_state_dict(
        {name.removeprefix(script.PREFIX): weight for name, weight in weights.items()}, strict=False
    )
    torch.manual_seed(1)
    theirs = peft.PeftModel.from_pretrained(script.Transformer(models.PRESETS["tiny"]), folder)
    tokens = torch.arange(64).view(2, 32)
    with torch.no_grad():
        before = script.Transformer(models.PRESETS["tiny"])(tokens)
        equal = [torch.equal(ours(tokens), theirs(tokens)), not torch.equal(before, ours(tokens))]
        script.merge(ours)
        theirs = theirs.merge_and_unload().state_dict()
    merged = ours.state_dict()
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


def test_training_goes_on_from_saved_adapters(run_script, tmp_path):
    losses = []
    for run, options in (("first", ()), ("second", ("--adapter", tmp_path / "first" / "lora"))):
        ended = run_script(
            LORA, *TINY, *options, "--output-dir", tmp_path / run, world_size=2, before=two_layers
        )
        assert ended.codes == [0, 0], ended.stdout + ended.stderr
        losses.append(results_of(tmp_path / run)["metrics"]["loss_LoRA"])
    assert losses[1] < losses[0] - 0.01


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--lora-rank", "0"), "argument --lora-rank: must be a whole number of at least 1"),
        (("--lora-rank", "65"), "--lora-rank must be at most 64, the smallest side of a layer"),
        (("--lora-rank", "129", "--target-modules", "wq"), "--lora-rank must be at most 128"),
        (
            ("--target-modules", "q_proj"),
            "argument --target-modules: invalid choice: 'q_proj' (choose from ",
        ),
        (("--quantize", "int8"), "argument --quantize: invalid choice: 'int8'"),
        (("--seq-len", "257"), "--seq-len must be at most 256"),
    ],
)
def test_bad_input_is_one_line(run_script, argv, says):
    ended = run_script(LORA, *argv)
    assert_one_line(ended, says, "fsdp_lora.py")


def of_another_preset(script):
    config = models.PRESETS["tiny"]
    models.PRESETS["tiny"] = dataclasses.replace(config, ffn_dim=320)


@pytest.mark.parametrize(
    ("stored", "argv", "before", "says"),
    [
        ({"lora_rank": 4}, (), None, "r is 4 there, 8 here"),
        ({"lora_alpha": 8}, (), None, "lora_alpha is 8 there, 16 here"),
        ({"target_modules": ["wq"]}, (), None, "blocks.0.attention.wk.lora_A.weight is missing"),
        ({}, ("--target-modules", "wk"), None, "lora_A.weight is [8, 128] there, missing here"),
        ({}, (), of_another_preset, "gate.lora_B.weight is [352, 8] there, [320, 8] here"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(run_script, tmp_path, stored, argv, before, says):
    folder = write_adapters(tmp_path / "adapter", **stored)
    ended = run_script(LORA, *TINY, *argv, "--adapter", folder, world_size=2, before=before)
    assert_one_line(ended, says, "fsdp_lora.py")


def test_adapters_that_cannot_be_read_are_refused(run_script, tmp_path):
    folder = write_adapters(tmp_path / "adapter")
    weights = folder / load_script(LORA).WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes()[:1000])
    for path in (folder, tmp_path / "none"):
        ended = run_script(LORA, *TINY, "--adapter", path, world_size=2)
        assert_one_line(ended, f"--adapter {path} cannot be read: ", "fsdp_lora.py")


def without_bitsandbytes(script):
    sys.modules.update(dict.fromkeys(("bitsandbytes", "bitsandbytes.functional")))


def with_a_broken_bitsandbytes(script):
    sys.modules["bitsandbytes"] = fake = ModuleType("bitsandbytes")
    sys.modules["bitsandbytes.functional"] = fake.functional = ModuleType("functional")


def test_without_bitsandbytes_nf4_says_what_to_install(run_script):
    for before in (without_bitsandbytes, with_a_broken_bitsandbytes):
        ended = run_script(LORA, "--quantize", "nf4", world_size=2, before=before)
        says = "--quantize nf4 needs bitsandbytes, which does not run on cpu here: pip install"
        assert_one_line(ended, says, "fsdp_lora.py")


def train_the_base_too(script):
    added = script.add_adapters
    script.add_adapters = lambda model, args: (added(model, args), model.requires_grad_(True))


def merge_without_the_scale(script):
    merged = script.merge

    def broken(model):
        for _, layer in script.layers_of(model, script.LAYERS, script.LoRA):
            layer.scale = 1.0
        merged(model)

    script.merge = broken


def merge_without_b(script):
    merged = script.merge

    def broken(model):
        for _, layer in script.layers_of(model, script.LAYERS, script.LoRA):
            layer.lora_B.weight.zero_()
        merged(model)

    script.merge = broken


def reduce_nothing(script):
    sharded = script.shard

    def broken(*arguments):
        model = sharded(*arguments)
        model.set_requires_gradient_sync(False)
        return model

    script.shard = broken


def draw_apart(script):
    """Let ranks begin with adapters of their own, which sharding mixes."""
    added = script.add_adapters

    def broken(model, args):
        script.runtime.seed_everything(script.dist.get_rank())
        added(model, args)

    script.add_adapters = broken


def save_in_float64(script):
    saved = script.save_file
    script.save_file = lambda weights, path: saved(
        {name: weight.double() for name, weight in weights.items()}, path
    )


def lose_an_adapter(script):
    loaded = script.load_file

    def broken(path):
        weights = loaded(path)
        weights[script.PREFIX + "blocks.1.up.lora_B.weight"].zero_()
        return weights

    script.load_file = broken


def one_unit_for_all(script):
    sharded = script.fully_shard
    script.fully_shard = lambda module, **options: (
        sharded(module, **options) if isinstance(module, script.Transformer) else module
    )


def scale_by_the_wrong_block(script):
    unpacked = script.dequantize
    script.dequantize = lambda packed, absmax, rows: unpacked(packed, absmax.roll(1), rows)


TRAINED = ["trained weights", "bytes of gradients", "bytes of Adam moments"]
REDUCED = ["bytes sent in reduce-scatters"]
LOADED = ["error of logits, loaded into a fresh base"]
MERGED = [
    "error of logits, merged",
    "merged weights unlike W + alpha/r B A",
    "error of W, unmerged",
]


@pytest.mark.parametrize(
    ("sabotage", "world_size", "failing"),
    [
        (train_the_base_too, 2,
         [*TRAINED, *REDUCED, "frozen weights that changed", *LOADED, MERGED[0]]),
        (draw_apart, 2, ["largest error of a loss"]),
        (one_unit_for_all, 2, ["bytes sent in all-gathers"]),
        (merge_without_the_scale, 1, MERGED),
        (save_in_float64, 1, ["bytes of the adapters' file"]),
        pytest.param(
            reduce_nothing, 2, [*TRAINED, *REDUCED, "largest error of a loss"], marks=full
        ),
        pytest.param(merge_without_b, 1, MERGED, marks=full),
        pytest.param(lose_an_adapter, 1, [*LOADED, *MERGED], marks=full),
    ],
)  # fmt: skip
def test_sabotage_of_lora_fails_a_check(run_script, tmp_path, sabotage, world_size, failing):
    def before(script):
        narrow(script)
        sabotage(script)

    ended = run_script(
        LORA, *TINY, "--output-dir", tmp_path / "run", world_size=world_size, before=before
    )
    assert ended.codes[0] == 1, ended.stdout + ended.stderr
    checks = checks_in(tmp_path / "run").items()
    failed = [n for n, check in checks if not check["ok"] and n.startswith("LoRA")]
    assert failed == [f"LoRA: {name}" for name in failing], ended.stdout


@in_4_bits
def test_sabotage_of_qlora_fails_a_check(run_script, tmp_path, nf4):
    def before(script):
        narrow(script)
        scale_by_the_wrong_block(script)

    ended = run_script(
        LORA, *TINY, "--quantize", "nf4", "--output-dir", tmp_path / "run", before=before
    )
    assert ended.codes == [1], ended.stdout + ended.stderr
    checks = checks_in(tmp_path / "run").items()
    failed = [name for name, check in checks if not check["ok"]]
    assert failed == ["QLoRA: error of a weight, of its block's largest"], ended.stdout
