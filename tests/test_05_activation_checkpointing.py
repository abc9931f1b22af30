"""Activation checkpointing: the same gradients, fewer bytes, and the operations that it repeats."""

import dataclasses

import pytest
import torch
from conftest import REPO, load_script, results_of
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from legacy_common import models

SCRIPT = "05-advanced/activation_checkpointing.py"
SMALL = ("--train-seq-len", 16)
FULL = pytest.mark.full
WAYS = ("none", "selective", "2nd product", "2nd block", "segments", "full")


def two_narrow_blocks(script):
    tiny = models.PRESETS["tiny"]
    narrow = dataclasses.replace(tiny, dim=32, ffn_dim=88, num_layers=2)
    models.PRESETS["tiny"] = narrow


def skip_full_size(script):
    """Leave out what this test does not look at."""
    script.part.at_scale = script.part.draw_step = lambda *args: None


def failed_checks(folder) -> set[str]:
    return {check["name"] for check in results_of(folder)["checks"] if not check["ok"]}


# the script


def per_token(metrics, tokens: int) -> dict[str, float]:
    """Return the bytes kept per token and block, as the last table has them."""
    return {row["way"]: row["kept_gib"] * 2**30 / 32 / tokens for row in metrics["at scale"]}


@pytest.mark.full
def test_each_way_gives_the_gradient_of_no_checkpointing(run_script, tmp_path):
    """Bit by bit alone; 1e-5 on ranks: float32 sums of a few hundred terms, in another order."""
    folder = tmp_path / "run"
    arguments = (*SMALL, "--output-dir", folder)
    ended = run_script(SCRIPT, *arguments, world_size=2, before=two_narrow_blocks)
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    content = results_of(folder)
    assert all(check["ok"] for check in content["checks"])
    names = {check["name"] for check in content["checks"]}
    for way in WAYS:
        assert f"{way}, alone: gradient against none" in names
        for wrapper in ("DDP", "FSDP"):
            assert f"{way}, {wrapper}: gradient against one process" in names
            assert f"{way}, {wrapper}: loss against one process" in names
    metrics = content["metrics"]
    assert metrics["full, FSDP all-gathers"] == metrics["none, FSDP all-gathers"] == 2 * 2 + 1
    assert metrics["dropout error without RNG state"] > 0.01

    # Llama 3 8B by hand, bfloat16: D 4096, keys 1024, F 14336, 32 heads. Without checkpoints 7 D
    # (two norms, their inputs, queries, attention's output twice), keys, values, 4 F, float32.
    D, kv, F, heads = 4096, 1024, 14336, 4 * 32
    kept = per_token(metrics, 8192)
    none = 2 * (7 * D + 2 * kv + 4 * F) + heads + 2 * 4
    assert kept["none"] == pytest.approx(none, abs=0.1)
    assert kept["selective"] == pytest.approx(2 * (5 * D + 2 * kv + 2 * F) + heads, abs=0.1)
    assert kept["2nd product"] == pytest.approx(2 * (4 * D + kv + F) + heads, abs=0.1)
    assert kept["2nd block"] == pytest.approx((none + 2 * D) / 2, abs=0.1)
    assert kept["full"] == 2 * D and kept["segments"] == D
    # Full: all operations of forward once more, but for the last product, of 3 forwards.
    forward = 2 * (2 * D * D + 2 * D * kv + 3 * D * F) + 4 * 8192 * D
    extra = {row["way"]: row["extra"] for row in metrics["at scale"]}
    assert extra["none"] == extra["selective"] == 0
    assert extra["full"] == pytest.approx((forward - 2 * D * F) / (3 * forward))
    assert extra["2nd product"] == pytest.approx(2 * D * (kv + D + F) / (3 * forward))
    assert metrics["chosen"] == "2nd product"
    assert (folder / "step.png").exists()
    float32 = {"none": heads + 2 * 4, "selective": heads, "2nd product": heads, "full": 0}
    for way, numbers in numbers_that_the_page_calls_kept({"D": D, "kv": kv, "F": F}).items():
        assert kept[way] == pytest.approx(2 * numbers + float32[way], abs=0.1), way


def numbers_that_the_page_calls_kept(sizes: dict[str, int]) -> dict[str, int]:
    """Return each way's sum over the tensors that the page's table marks as kept."""
    page = (REPO / "05-advanced/activation_checkpointing.md").read_text()
    head, _, *rows = page.partition("| tensor | ")[2].partition("\n\n")[0].splitlines()
    kept = dict.fromkeys(head.strip(" |").split(" | ")[1:], 0)
    for row in rows:
        _, size, *states = row.strip(" |").split(" | ")
        for way, state in zip(kept, states, strict=True):
            kept[way] += sizes[size] * (state == "kept")
    return kept


def narrow_and_real_only(script):
    two_narrow_blocks(script)
    skip_full_size(script)


# sabotage: one per kind of check


def forget_a_block(script):
    script.WAYS["full"] = lambda model: script.checkpoint_each(model.blocks[1:])


def keep_all_products(script):
    script.KeepSecondProducts.__call__ = lambda self, *args, **kwargs: script.keep_products(
        *args, **kwargs
    )


def change_what_is_recomputed(script):
    """Compute something else in backward than in forward, with the same shapes."""
    right = script.checkpoint_each

    def wrong(blocks, **options):
        for block in blocks:
            block.forward = fading(block.forward)
        right(blocks, **options)

    script.checkpoint_each = wrong


def fading(forward):
    calls = []

    def faded(x, *tables):
        calls.append(None)
        return forward(x * (1.0 if len(calls) % 2 else 0.9), *tables)

    return faded


@pytest.mark.full
@pytest.mark.parametrize(
    ("sabotage", "failing", "right"),
    [
        (
            keep_all_products,
            {"2nd product: bytes kept", "2nd product: operations"},
            "full: bytes kept",
        ),
        pytest.param(
            forget_a_block, {"full: bytes kept", "full: operations"}, "selective: operations",
            marks=FULL,
        ),
        pytest.param(
            change_what_is_recomputed,
            {
                "full, alone: gradient against none",
                "full, DDP: gradient against one process",
                "full, FSDP: gradient against one process",
            },
            "full, DDP: loss against one process",
            marks=FULL,
        ),
    ],
)  # fmt: skip
def test_sabotage_of_a_checkpoint_fails_a_check(run_script, tmp_path, sabotage, failing, right):
    folder = tmp_path / "run"

    def before(script):
        narrow_and_real_only(script)
        sabotage(script)

    ended = run_script(SCRIPT, *SMALL, "--output-dir", folder, world_size=2, before=before)
    assert 1 in ended.codes, ended.stdout + ended.stderr
    bad = failed_checks(folder)
    assert failing <= bad and right not in bad
    assert not any(name.startswith("none") for name in bad)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--train-seq-len", 257), "--train-seq-len must be at most 256"),
        (("--preset", "llama2-7b", "--seq-len", 4097), "--seq-len must be at most 4096"),
    ],
)
def test_bad_input_gets_one_line(run_script, argv, says):
    ended = run_script(SCRIPT, *argv)
    (line,) = ended.stderr.splitlines()
    assert line.startswith("activation_checkpointing.py: error: ") and says in line
    assert ended.codes == [2]


# what the page says of pitfalls


def test_reentrant_checkpoints_lose_gradients_where_no_input_needs_one(in_a_fork):
    def gradient():
        layer, x = nn.Linear(4, 4), torch.ones(2, 4)
        with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
            out = checkpoint(layer, x, use_reentrant=True)
        assert not out.requires_grad
        checkpoint(layer, x, use_reentrant=False).sum().backward()
        return layer.weight.grad

    assert in_a_fork(gradient) is not None


def test_a_recomputation_of_other_shapes_is_refused_and_of_other_values_is_not(in_a_fork):
    def gradient_is_finite():
        layer, calls = nn.Linear(4, 4), []

        def fickle(x, shorter):
            calls.append(None)
            again = len(calls) == 2
            return layer(x[1:] if again and shorter else x * (1 + again)).exp()

        x = torch.ones(2, 4, requires_grad=True)
        with pytest.raises(CheckpointError, match="different metadata"):
            checkpoint(fickle, x, True, use_reentrant=False).sum().backward()
        calls.clear()
        checkpoint(fickle, x, False, use_reentrant=False).sum().backward()
        return torch.isfinite(layer.weight.grad).all().item()

    assert in_a_fork(gradient_is_finite)


def test_a_checkpoint_around_the_loss_saves_nothing_at_the_peak(in_a_fork):
    """Its tensors come back at once: backward begins there."""
    live = load_script("05-advanced/advanced_parts/kept_bytes.py").LiveBytes
    head = nn.Linear(8, 1000, bias=False)

    def loss(x):
        return nn.functional.cross_entropy(head(x), torch.zeros(64, dtype=torch.int64))

    def peak(around):
        head.weight.grad = torch.zeros_like(head.weight)
        x = torch.ones(64, 8, requires_grad=True)
        with live() as counted:
            (checkpoint(loss, x, use_reentrant=False) if around else loss(x)).backward()
        return counted.peak

    without, around = in_a_fork(lambda: [peak(False), peak(True)])
    assert around >= without
