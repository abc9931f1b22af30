"""Module 02, fsdp_qlora.py: adapters beside frozen weights in 4 bits, and 8-bit moments."""

import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_one_line, load_script
from test_02_fsdp_lora import (
    LORA,
    QLORA,
    SMALL,
    TINY,
    checks_in,
    narrow,
    two_layers,
)  # fmt: skip
from torch import nn

from fsdp_parts import fsdp_qlora as part

full = pytest.mark.full
in_4_bits = pytest.mark.xdist_group("bitsandbytes")  # one worker imports it


@pytest.fixture
def four_bits(on_ranks):
    """Skip with the reason where 4 bits do not run.

    Import here what every fork would have to, but run nothing of it here: a fork of a process in
    which its kernels ran may abort ("Invalid thread pool").
    """
    pytest.importorskip("bitsandbytes", reason="pip install bitsandbytes")

    def why_not(rank, world_size):
        try:
            part.refuse_without_nf4(torch.device("cpu"))
        except Exception as error:
            return str(error)

    if reason := on_ranks(why_not, 1, timeout_s=180)[0]:
        pytest.skip(f"bitsandbytes does not run here: {reason}")


@pytest.mark.full
@in_4_bits
def test_qlora_trains_as_one_process(run_script, tmp_path, four_bits):
    """As LoRA; the frozen layers take 4 bits and 1/64 of a float32 for each weight."""
    flags = (*SMALL, "--output-dir", tmp_path / "run")
    ended = run_script(QLORA, *flags, world_size=2, before=two_layers)
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    checks = checks_in(tmp_path / "run")
    assert len(checks) == 62
    in_blocks = 2 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 352 * 128)
    spared = (4 - 0.5 - 4 / 64) * in_blocks / 2
    held = [checks[f"{way}: bytes of parameters"]["measured"] for way in ("LoRA", "QLoRA")]
    assert held[0] - held[1] == spared
    for way in ("QLoRA", "QLoRA-bf16"):
        assert checks[f"{way}: bytes of a frozen weight"]["measured"] == 0.5 + 4 / 64


def kept_for_backward(rank, world_size):
    """Return the bytes that the 4-bit layer keeps, those that F.linear keeps, and a gradient."""
    script = load_script(QLORA)
    layer = script.NF4Linear(nn.Linear(96, 160, bias=False))
    weight = 0.1 * torch.randn(160, 96)
    with torch.no_grad():
        for parameter, numbers in zip(layer.parameters(), part.encode(weight), strict=True):
            parameter.copy_(numbers)
    inputs = torch.randn(2, 96, requires_grad=True)

    def kept(forward) -> int:
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: sizes.append(tensor.nbytes) or tensor, lambda tensor: tensor
        ):
            forward(inputs)
        return sum(sizes)

    gradient = torch.autograd.grad(layer(inputs).sum(), inputs)[0]
    right = part.rows_of(layer).sum(0).expand(2, -1)
    plain = kept(lambda x: F.linear(x, part.rows_of(layer)))
    return kept(layer), plain, (gradient - right).abs().max().item()


@in_4_bits
def test_a_4_bit_layer_keeps_no_float_copy_for_backward(on_ranks, four_bits):
    """The trap that MultiplyNF4 is there for."""
    kept, plain, error = on_ranks(kept_for_backward, 1)[0]
    assert kept == 96 * 160 * (0.5 + 4 / 64)
    assert plain >= 96 * 160 * 4
    assert error < 1e-5


def paged(rank, world_size):
    """Return a parameter's error after steps of AdamW8bit on shards against one on the whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(0)
    whole = torch.randn(70, 64)  # 35 rows a rank: 2,240 weights, 8.75 blocks of 256
    gradients = torch.randn(3, 70, 64)
    weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    plain = nn.Parameter(whole.clone())
    sharded = load_script(QLORA).AdamW8bit([weight], 0.01, 1024)
    adamw = torch.optim.AdamW([plain], lr=0.01)
    for gradient in gradients:
        weight.grad = distribute_tensor(gradient, mesh, [Shard(0)])
        plain.grad = gradient
        sharded.step()
        adamw.step()
    moved = (weight.full_tensor() - whole).abs().max().item()
    return (weight.full_tensor() - plain).abs().max().item(), moved


@full
@in_4_bits
def test_8_bit_steps_on_shards_change_the_model_itself(on_ranks, four_bits):
    """The optimizer's parameters are views: the sharded model moves, about as AdamW moves it."""
    for error, moved in on_ranks(paged, 2):
        assert moved > 0.02 and 0 < error < 0.2 * moved


def without_bitsandbytes(script):
    sys.modules.update(dict.fromkeys(("bitsandbytes", "bitsandbytes.functional")))


def with_a_broken_bitsandbytes(script):
    sys.modules["bitsandbytes"] = fake = ModuleType("bitsandbytes")
    sys.modules["bitsandbytes.functional"] = fake.functional = ModuleType("functional")


@full
def test_without_bitsandbytes_it_says_what_to_install(run_script):
    for before in (without_bitsandbytes, with_a_broken_bitsandbytes):
        ended = run_script(QLORA, world_size=2, before=before)
        says = "4-bit weights need bitsandbytes, which does not run on cpu here: pip install"
        assert_one_line(ended, says, "fsdp_qlora.py")


@full
def test_lora_needs_no_bitsandbytes(run_script):
    def before(script):
        narrow(script)
        without_bitsandbytes(script)

    ended = run_script(LORA, *TINY, "--ways", "LoRA", before=before)
    assert ended.codes == [0], ended.stdout + ended.stderr


def scale_by_the_wrong_block(script):
    unpacked = part.decode
    broken = lambda codes, scales, rows: unpacked(codes, scales.roll(1, 0), rows)  # noqa: E731
    script.decode = part.decode = broken


def forget_small_shards(script):
    """Keep all moments in 8 bits, whatever --min-shard-size says."""
    made = script.AdamW8bit
    script.AdamW8bit = lambda parameters, lr, min_8bit_size: made(parameters, lr, 1)


@in_4_bits
@pytest.mark.full
@pytest.mark.parametrize(
    ("sabotage", "options", "failing"),
    [
        (scale_by_the_wrong_block, ("--ways", "QLoRA"),
         {"QLoRA: error of a weight, of its block's largest"}),
        pytest.param(forget_small_shards, ("--ways", "LoRA", "--optimizer", "adamw8bit"),
                     {"LoRA: bytes of Adam moments"}, marks=full),
    ],
)  # fmt: skip
def test_sabotage_of_qlora_fails_a_check(
    run_script, tmp_path, four_bits, sabotage, options, failing
):
    def before(script):
        narrow(script)
        sabotage(script)

    ended = run_script(QLORA, *TINY, *options, "--output-dir", tmp_path / "run", before=before)
    assert ended.codes == [1], ended.stdout + ended.stderr
    failed = {name for name, check in checks_in(tmp_path / "run").items() if not check["ok"]}
    assert failed == failing, ended.stdout
