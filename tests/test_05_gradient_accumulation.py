"""Gradient accumulation: one step in many micro-batches, with the result of one large batch."""

import dataclasses

import pytest
import torch
from conftest import load_script, results_of

from legacy_common import data

SCRIPT = "05-advanced/gradient_accumulation.py"
SMALL = ("--global-batch-size", 12, "--seq-len", 8)
FULL = pytest.mark.full


def shrink(part):
    """One layer, width 32: the checks are the same."""
    small = {"num_layers": 1, "dim": 32, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 64}
    part.MODEL = dataclasses.replace(part.MODEL, **small)
    part.BUCKET_MIB = 0.03


def run_small(run_script, folder, world_size, sabotage=lambda script: None, *argv):
    def before(script):
        shrink(script.part)
        sabotage(script)

    arguments = (*SMALL, *argv, "--output-dir", folder)
    return run_script(SCRIPT, *arguments, world_size=world_size, before=before)


PARTS = ("check_factorizations", "check_sending", "check_weighings", "check_optimizers",
         "check_remainder")  # fmt: skip


def leave_out(script, parts):
    for part in set(PARTS) - set(parts):
        setattr(script.part, part, lambda *_: None)


def measured(folder) -> dict:
    return {check["name"]: check["measured"] for check in results_of(folder)["checks"]}


# the script


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=FULL)])
def test_every_factorization_is_one_process(run_script, tmp_path, world_size):
    """Tolerance 1e-5: float32 keeps 1.2e-7 of a number; SGD enlarges no rounding."""
    folder = tmp_path / "run"
    ended = run_small(run_script, folder, world_size)
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    content = results_of(folder)
    assert all(check["ok"] for check in content["checks"])
    share = 12 // world_size
    sizes = [size for size in range(1, share + 1) if share % size == 0]
    found = measured(folder)
    for size in sizes:
        name = f"{size} x {share // size} x {world_size}"
        assert found[f"{name}: weights, relative error"] < 1e-5
        assert found[f"{name}: largest error of a loss"] < 1e-5
    metrics = content["metrics"]
    assert len(metrics["losses"]) == 3
    # Embedding and head, a block of 2 x 32 x 16 x (2 + 1) + 3 x 32 x 64 + 2 x 32, a norm.
    weights = 2 * 256 * 32 + 2 * 32 * 16 * 3 + 3 * 32 * 64 + 2 * 32 + 32
    steps = max(n for n in range(1, 5) if share % n == 0)
    ways = "no_sync", "send each", "forward outside", "forward inside"
    sent = [found[f"{way}, a step: bytes all-reduced"] for way in ways]
    assert sent == [4 * weights, 4 * weights * steps, 4 * weights * steps, 0]
    assert metrics["buckets"] > 1
    check_wrong_divisors(metrics, found, steps)


def check_wrong_divisors(metrics, found, steps):
    """What the page says of means, of Adam, and of the last step of an epoch."""
    # The script checks the right ones: all three means on full sequences.
    for name in ("mean of micro-batch means", "mean of rank means"):
        assert metrics[f"{name}, 1 to T tokens"] > 1e-3
    hidden = [metrics[f"unscaled: AdamW, {name}"] for name in ("eps 1e-8", "weight decay 0.1")]
    assert max(hidden) < 0.05 < metrics["unscaled: Adam, L2 weight decay 0.1"]
    assert metrics["unscaled: SGD"] == pytest.approx(steps - 1, abs=1e-3)
    assert metrics["unscaled: AdamW, norm clipped"] > 1e-3
    last = {"a step, divided by what it holds": 0, "a step, divided by a whole step": 1 - 1 / steps,
            "carried into the next epoch": 1 / steps}  # fmt: skip
    for name, error in last.items():
        assert found[f"{name}: distance from the right one"] == pytest.approx(error, abs=1e-5)


# sabotage: one per kind of check


def forget_to_scale(script):
    script.by_tokens = script.sum_of_means


def skip_the_last_all_reduce(script):
    script.accumulate = lambda model, batches, factors: sum_quietly(script, model, batches, factors)


def sum_quietly(script, model, batches, factors):
    total = 0.0
    with model.no_sync():
        for number, batch in enumerate(batches):
            loss = factors[number] * script.summed_loss(model, *batch)
            loss.backward()
            total += loss.detach()
    return total


def keep_more_of_each_sequence(script):
    """Keep for backward what the loss does not need, in proportion to the micro-batch."""
    right = script.summed_loss

    def greedy(model, inputs, targets):
        more = torch.zeros(len(inputs), 100, requires_grad=True, device=inputs.device)
        return right(model, inputs, targets) + 0 * more.exp().sum()

    script.summed_loss = greedy


def start_an_epoch_clean(script):
    """The carried micro-batch is lost instead: another bug, with another gradient."""
    right = script.carry_over

    def clean(model, optimizer, epochs, steps):
        for micro_batches in epochs:
            right(model, optimizer, [micro_batches], steps)
            optimizer.zero_grad()

    script.carry_over = clean


WEIGHTS = ": weights, relative error"
SENT = ": bytes all-reduced"
SABOTAGES = [
    (forget_to_scale, PARTS[:1], {"2 x 3 x 2: largest error of a loss", f"2 x 3 x 2{WEIGHTS}"}, ()),
    (skip_the_last_all_reduce, PARTS[:2],
     {"no_sync: all-reduces per step", f"no_sync, a step{SENT}", f"6 x 1 x 2, an epoch{SENT}",
      f"6 x 1 x 2{WEIGHTS}", "no_sync: gradient, relative error"}, ()),
    (keep_more_of_each_sequence, PARTS,
     {f"{name} x 2: bytes kept for backward" for name in ("1 x 6", "2 x 3")}, FULL),
    (start_an_epoch_clean, PARTS,
     {"carried into the next epoch: distance from the right one"}, FULL),
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(
    ("sabotage", "parts", "failing"),
    [pytest.param(*case[:3], marks=case[3]) for case in SABOTAGES],
)
def test_sabotage_of_accumulation_fails_a_check(run_script, tmp_path, sabotage, parts, failing):
    folder = tmp_path / "run"

    def before(script):
        leave_out(script, parts)
        sabotage(script)

    ended = run_small(run_script, folder, 2, before, "--grad-accum-steps", 3)
    assert 1 in ended.codes, ended.stdout + ended.stderr
    bad = {check["name"] for check in results_of(folder)["checks"] if not check["ok"]}
    assert failing <= bad, bad
    if sabotage in (keep_more_of_each_sequence, start_an_epoch_clean):
        kind = next(iter(failing)).rpartition(": ")[2]
        assert all(name.endswith(kind) for name in bad), "nothing else is wrong"


# bad input


@pytest.mark.parametrize(
    ("world_size", "argv", "says"),
    [
        (3, ("--global-batch-size", 16), "--global-batch-size 16 must be --micro-batch-size 1 x 3 "
                                         "ranks x --grad-accum-steps N, a multiple of 3"),
        (2, ("--micro-batch-size", 4, "--grad-accum-steps", 2),
         "is not --micro-batch-size 4 x 2 ranks x --grad-accum-steps 2 = 16: take that, or 3"),
        (2, ("--grad-accum-steps", 5), "is not --micro-batch-size 2 x 2 ranks x "
                                       "--grad-accum-steps 5 = 20: take that, or 6 steps"),
        (1, ("--seq-len", 4_000_001), "fewer than one sequence of 4000001 tokens"),
    ],
)  # fmt: skip
def test_accumulation_refuses_bad_input(run_script, world_size, argv, says):
    ended = run_script(SCRIPT, *argv, world_size=world_size)
    (line,) = ended.stderr.splitlines()
    assert line.startswith("gradient_accumulation.py: error: ") and says in line
    assert 2 in ended.codes


# its parts


def test_an_empty_micro_batch_has_a_sum_but_no_mean(in_a_fork):
    """A rank whose part of the last step is short gets such: 0/0 is no number, 0/tokens is 0."""
    script = load_script(SCRIPT)
    targets = torch.full((2, 4), data.IGNORED)
    model = torch.nn.Embedding(8, 8)

    def loss_and_gradient():
        loss = script.summed_loss(model, torch.zeros(2, 4, dtype=torch.int64), targets)
        loss.backward()
        return loss.detach(), model.weight.grad

    loss, gradient = in_a_fork(loss_and_gradient)
    assert loss.item() == 0 and not gradient.any()
    assert script.counted(targets).item() == 0
    assert torch.isnan(loss / script.counted(targets))
