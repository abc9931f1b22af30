"""Low precision: each one trains as one process with the same rounding; formats, bytes, memory."""

import argparse
import math
from functools import reduce

import pytest
import torch
from conftest import load_script, results_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from advanced_parts import low_precision as part
from legacy_common import cli, models
from legacy_common.lab import proofs
from legacy_common.lab.traffic import TrafficCounter

SCRIPT = "05-advanced/low_precision.py"
FULL = pytest.mark.full
SMALL = ("--micro-batch-size", 2, "--seq-len", 32, "--num-layers", 1, "--max-steps", 3)
BF16 = torch.bfloat16


def narrow(script=None):
    models.PRESETS["tiny"] = models.TransformerConfig(256, 32, 1, 4, 2, 64, 256)


def failed_checks(folder) -> set[str]:
    return {check["name"] for check in results_of(folder)["checks"] if not check["ok"]}


def test_each_precision_trains_as_one_process_rounded_alike(run_script, tmp_path):
    """Tolerances: see part.check_parity."""
    folder = tmp_path / "run"
    arguments = (*SMALL, "--output-dir", folder)
    ended = run_script(SCRIPT, *arguments, world_size=2, before=narrow)
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    assert ended.stderr == ""
    assert "skipped: --precision fp8 needs a GPU of compute capability 8.9" in ended.stdout
    content = results_of(folder)
    checks = {check["name"]: check for check in content["checks"]}
    for name in load_script(SCRIPT).HERE:
        kinds = {"gradient", "losses"}
        kinds |= {f"{kind} without rounding" for kind in kinds} if name != "32-true" else set()
        assert {f"{name}: {kind}, relative error" for kind in kinds} <= set(checks)
    # Weights of width 32: two tables of 256 rows, a block of 4 attention matrices (k and v half as
    # wide), 3 of 64 columns, and 3 norms.
    weights = 2 * 256 * 32 + 3 * 32 * 32 + 3 * 32 * 64 + 3 * 32
    names = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "fp8-emulated")
    measured = {name: check["measured"] for name, check in checks.items()}
    sent = [measured[f"{name}: bytes all-reduced by DDP"] / weights for name in names]
    assert sent == [4, 4, 4, 2, 4]
    # 3 x 32 + 64 numbers per token where layers share their input, 6 x 32 + 64 where each casts it.
    # What casts keeps a copy of the matrices; float8 also two float32 scales for each of 7 layers.
    per_token = [4 * 160, 2 * 256, 2 * 256, 2 * 160, 256]
    matrices = 3 * 32 * 32 + 3 * 32 * 64
    copies = [0, 2 * matrices, 2 * matrices, 0, matrices + 7 * 2 * 4]
    what = "bytes kept per token, and of weights cast"
    kept = [content["metrics"][f"{name}: {what}"] for name in names]
    assert kept == [list(pair) for pair in zip(per_token, copies, strict=True)]
    assert (folder / "low_precision_ranges.png").exists()


@pytest.mark.gpu_ready
def test_fsdp2_sends_in_the_dtypes_of_its_policy(on_ranks):
    """Blocks are gathered in forward and in backward, the rest once."""
    policies = [
        (MixedPrecisionPolicy(), 4, 4),
        (MixedPrecisionPolicy(BF16, torch.float32), 2, 4),
        (MixedPrecisionPolicy(BF16, BF16), 2, 2),
    ]

    def sent(rank, ranks):
        def padded(weights):  # rows are filled up to a multiple of the ranks
            return sum(math.ceil(len(w) / ranks) * ranks * w[0].numel() for w in weights)

        mesh, found = init_device_mesh("cpu", (ranks,)), []
        for policy, gather, reduction in policies:
            model = models.Transformer(models.TransformerConfig(256, 128, 2, 4, 2, 352, 64))
            total, blocks = padded(model.parameters()), padded(model.blocks.parameters())
            for unit in (*model.blocks, model):
                fully_shard(unit, mesh=mesh, mp_policy=policy)
            with TrafficCounter() as counter:
                model(torch.zeros(2, 64, dtype=torch.int64)).float().sum().backward()
            sizes = counter.nbytes["all_gather"], counter.nbytes["reduce_scatter"]
            assert sizes == (gather * (blocks + total), reduction * total)
            found.append([round(size / total, 2) for size in sizes])
        return found

    found = on_ranks(sent, 2)
    assert found == 2 * [[[7.4, 4], [3.7, 4], [3.7, 2]]]


# formats, without ranks


def spacing(x, dtype):
    """Return the distance from each number to the next one away from 0, as float64."""
    info = torch.finfo(dtype)
    power = torch.exp2(torch.frexp(x.double())[1].double() - 1)
    return power.clamp(min=info.tiny) * info.eps


@pytest.mark.parametrize("dtype", [form[0] for form in part.FORMATS.values()], ids=part.FORMATS)
def test_a_cast_is_rounding_by_arithmetic(dtype):
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(20_000, generator=generator).double()
    # Magnitudes from 1e-6 to 1e6: subnormal and overflowing ones of the small formats too.
    numbers = (numbers * 10 ** (4 * torch.randn(20_000, generator=generator).double())).float()
    numbers = numbers.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    step = spacing(numbers, dtype)
    rounded = ((numbers / step).round() * step).float()  # torch.round rounds half to even
    assert torch.equal(rounded, numbers.to(dtype).float())


@pytest.mark.parametrize(("dtype", "exponent", "mantissa"), part.FORMATS.values(), ids=part.FORMATS)
def test_a_format_holds_what_its_bits_say(dtype, exponent, mantissa):
    bias, spacing = 2 ** (exponent - 1) - 1, 2.0**-mantissa
    largest, normal = 2.0**bias * (2 - spacing), 2.0 ** (1 - bias)
    if dtype == torch.float8_e4m3fn:  # the last binade holds numbers too, but for one NaN
        largest = 2.0 ** (bias + 1) * (2 - 2 * spacing)
    info = torch.finfo(dtype)
    assert (info.max, info.tiny, info.eps) == (largest, normal, spacing)
    assert part.smallest(dtype) == normal * spacing


@pytest.mark.parametrize("ranks", [2, 8, 64, 512])
def test_the_error_of_a_bf16_sum_is_a_random_walk(ranks):
    """Of gradients added one after the other, as ranks are.

    A rounding errs by spacing / sqrt(12), 1 / m^2 of which is left of a mantissa m from 1 to 2:
    3 / (8 ln 2) in the mean. Partial sums of k random terms have length sqrt(k).
    """
    rounding = torch.finfo(BF16).eps / math.sqrt(12) * math.sqrt(3 / (8 * math.log(2)))
    numbers = torch.randn(ranks, 5_000, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = numbers.double().sum(dim=0)
    error = (reduce(torch.add, numbers).double() - exact).norm() / exact.norm()
    expected = rounding * math.sqrt(sum(range(2, ranks + 1)) / ranks)
    assert error.item() == pytest.approx(expected, rel=0.2)
    shown = {8: "0.37%", 512: "2.67%"}  # on the page
    assert f"{error.item():.2%}" == shown.get(ranks, f"{error.item():.2%}")


def test_float8_of_extreme_tensors():
    """One outlier pushes the rest under; zeros and numbers beyond the format stay finite."""
    script = load_script(SCRIPT)
    for numbers in (torch.zeros(4), torch.full((4,), 1e30), torch.tensor([1e-30, -1e-30])):
        rounded = script.dequantize(*script.quantize(numbers, torch.float8_e5m2))
        assert torch.isfinite(rounded).all()
    outlier = torch.tensor([1.0, 1e-3, 1e6])
    rounded = script.dequantize(*script.quantize(outlier, torch.float8_e4m3fn))
    assert rounded[0] == rounded[1] == 0 and rounded[2] == pytest.approx(1e6)


def test_stochastic_rounding_takes_both_neighbours_by_distance():
    generator = torch.Generator().manual_seed(0)
    for sign in (1, -1):
        third = torch.full((20_000,), sign * (1 + 0.25 * 2**-7))  # a quarter of the way up
        rounded = load_script(SCRIPT).round_stochastically(third, generator).float()
        assert rounded.unique().numel() == 2
        # 4 standard deviations of a mean of 20,000 coins: 4 x sqrt(0.1875 / 20000) = 0.012.
        assert (rounded != sign).float().mean().item() == pytest.approx(0.25, abs=0.012)


# float16's loss scale

ARGS = argparse.Namespace(seed=0, seq_len=32, num_layers=1, max_steps=3, micro_batch_size=2,
                          lr=2e-3, loss_scale=65536.0)  # fmt: skip


def job_on(rank: int, ranks: int) -> part.Job:
    narrow()
    return part.Job(ARGS, argparse.Namespace(rank=rank, world_size=ranks), torch.device("cpu"))


def skipped_steps(rank: int, ranks: int) -> tuple[list[int], bytes]:
    """Spoil the last rank's loss in the second step; return what this rank skips, and weights."""
    calls = []

    def spoiled(model, *batch):
        calls.append(0)
        spoil = len(calls) == 2 and rank == ranks - 1
        return part.loss_of(model, *batch) * (float("inf") if spoil else 1.0)

    model, _, _, skipped = load_script(SCRIPT).train(job_on(rank, ranks), "16-mixed", 3, spoiled)
    return skipped, proofs.flat(model.parameters()).numpy().tobytes()


def test_all_ranks_skip_the_step_that_one_rank_spoiled(on_ranks):
    """The overflow is in the average that all ranks hold."""
    (skipped, weights), *others = on_ranks(skipped_steps, 2)
    assert 1 in skipped and others == [(skipped, weights)]


# sabotage: one per kind of check


def forget_to_unscale(script):
    def train_step(model, optimizer, scaler, dtype, loss_of, batch):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = loss_of(model, *batch)
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    script.train_step = train_step


def do_not_scale_float8(script):
    script.quantize = lambda x, dtype: (x.to(dtype), torch.ones(()))


def keep_rounding_copies(script):
    right = script.RoundedAdamW.step

    def step(optimizer):
        right(optimizer)
        for master, weight in zip(optimizer.masters, optimizer.weights, strict=True):
            master.data = weight.detach().float()

    script.RoundedAdamW.step = step


@pytest.mark.full
@pytest.mark.parametrize(
    ("sabotage", "precision", "failing"),
    [
        (forget_to_unscale, "16-mixed",
         {f"16-mixed: {kind}, relative error" for kind in ("gradient", "gradient without rounding",
                                                           "losses without rounding")}),
        pytest.param(do_not_scale_float8, "fp8-emulated",
                     {"fp8-emulated: gradient, relative error"}, marks=FULL),
        pytest.param(keep_rounding_copies, "bf16-stochastic",
                     {"bf16-stochastic, optimizer: bytes held"}, marks=FULL),
    ],
)  # fmt: skip
def test_sabotage_of_a_precision_fails_a_check(
    run_script, tmp_path, sabotage, precision, failing
):  # fmt: skip
    def before(script):
        narrow()
        sabotage(script)

    folder = tmp_path / "run"
    arguments = (*SMALL, "--precision", precision, "--output-dir", folder)
    ended = run_script(SCRIPT, *arguments, world_size=2, before=before)
    assert 1 in ended.codes, ended.stdout + ended.stderr
    bad = failed_checks(folder)
    assert failing <= bad, bad
    assert not any(name.startswith("32-true: gradient, ") for name in bad)


# bad input


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--precision", "fp8"), "compute capability 8.9 or later (L40S, H100), not the CPU"),
        (("--loss-scale", "60000"), "--loss-scale must be a power of two, not 60000"),
    ],
)
def test_low_precision_refuses_bad_input(run_script, argv, says):
    ended = run_script(SCRIPT, *argv)
    assert ended.codes == [2] and ended.stdout == ""
    lines = ended.stderr.splitlines()
    assert len(lines) == 1 and says in lines[0], ended.stderr


def test_fp8_says_which_requirement_is_missing(monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(cli.UsageError, match=r"8\.9 or later \(L40S, H100\): NVIDIA A100 has 8\.0"):
        part.refuse_fp8(device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(part.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(cli.UsageError, match="needs torchao: pip install torchao"):
        part.refuse_fp8(device)
    monkeypatch.setattr(part.importlib.util, "find_spec", lambda name: "found")
    part.refuse_fp8(device)
