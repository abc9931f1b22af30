"""Local SGD and DiLoCo: each equals itself in one process, DDP with its loss off, and its bytes."""

import argparse
import math

import pytest
import torch
import torch.distributed as dist
from conftest import REPO, load_script, results_of

from legacy_common import models
from legacy_common.lab import proofs

LOCAL = "05-advanced/local_sgd.py"
SMALL = ("--max-steps", 6, "--seq-len", 16, "--micro-batch-size", 1)
ONE = (*SMALL, "--every", 2)
FULL = pytest.mark.full


def no_link(script):
    script.part.ROUNDS = 2  # fewer than a reader's run has
    script.slow_group = lambda rate: (dist.group.WORLD, "link: none emulated")


# the script


def test_each_method_equals_itself_in_one_process(run_script, tmp_path):
    world_size, every = 2, [2]
    """Within 1e-5 of the way that the weights went; float32 keeps 1.2e-7 of a weight."""
    folder = tmp_path / "run"
    arguments = (*SMALL, "--every", *every, "--output-dir", folder)
    ended = run_script(LOCAL, *arguments, world_size=world_size, before=no_link)
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    content = results_of(folder)
    assert all(check["ok"] for check in content["checks"])
    kinds = [check["name"].rpartition(": ")[2] for check in content["checks"]]
    assert kinds.count("weights, relative error") == 4
    assert kinds.count(f"bytes in {math.lcm(*every)} steps") == 4 + 4 * len(every)
    metrics = content["metrics"]
    # Embedding and head; q and out, k and v of half the width; three matrices; three norms.
    weights = 2 * 256 * 32 + 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 88 + 3 * 32
    h, longest = every[0], every[-1]
    per_step = {name: metrics[f"{name}: bytes per step"] / 4 / weights for name in (
        "alone", "DDP", f"DDP, accumulating {longest}", f"averaging, H = {h}",
        f"DiLoCo, H = {longest}, momentum 0.9", f"averaging, H = {longest}, moments averaged",
        f"averaging, H = {longest}, moments reset",
    )}  # fmt: skip
    right = [0, 1, 1 / longest, 1 / h, 1 / longest, 3 / longest, 1 / longest]
    assert list(per_step.values()) == pytest.approx(right)


def lossless(rank: int, world_size: int) -> list[float]:
    """Return how far methods are apart whose loss is switched off, as a part of the way gone."""
    script = load_script(LOCAL)
    args = argparse.Namespace(seed=0, seq_len=64, micro_batch_size=2, lr=3e-3)
    world = argparse.Namespace(world_size=world_size, rank=rank)
    task = script.part.Task(args, world, torch.device("cpu"))

    def run(inner, method, every=1, moments="kept", steps=8):
        setting = script.Setting(method, method, every, moments, outer_lr=1.0, outer_momentum=0.0)
        model, optimizer = task.build(setting, inner)
        script.train(setting, model, optimizer, task.batches(steps, setting), steps)
        return proofs.flat(model.parameters())

    start = run("SGD", "alone", steps=0)
    ddp, with_adamw = run("SGD", "DDP"), run("AdamW", "DDP")
    pairs = [
        (run("SGD", "averaging"), ddp),
        (run("SGD", "DiLoCo"), ddp),
        (run("SGD", "DiLoCo", 4), run("SGD", "averaging", 4)),
        (run("AdamW", "averaging"), with_adamw),
        (run("AdamW", "averaging", 1, "averaged"), with_adamw),
    ]
    return [script.part.relative_error(ours, theirs, start) for ours, theirs in pairs]


def test_lossless_settings_equal_ddp_and_averaging(on_ranks):
    """With SGD; AdamW divides each rank's gradient before the mean is taken."""
    for *equal, kept, averaged in on_ranks(lossless, 2):
        assert max(equal) < 1e-5
        assert kept > averaged > 0.1
        # As the page says; on the text of another Python half as much again.
        assert (kept, averaged) == pytest.approx((0.31, 0.28), abs=0.2)


# sabotage: one per kind of check


def step_along_ones_own_gradient(script):
    """Send the same bytes, and use none of what came."""
    right = script.mean_over_ranks
    script.mean_over_ranks = lambda tensors, group: right([t.clone() for t in tensors], group)


def skip_rounds_of_the_table(script):
    """Send nothing where bytes are counted; the proofs before are right."""
    count = script.run_setting

    def run_setting(*args):
        script.mean_over_ranks = lambda tensors, group: None
        return count(*args)

    script.run_setting = run_setting


WEIGHTS, AFTER = "weights, relative error", "sets of weights after a round"
SABOTAGES = [
    (step_along_ones_own_gradient, {f"averaging: {WEIGHTS}", f"DiLoCo: {WEIGHTS}",
                                    f"averaging: {AFTER}", f"DiLoCo: {AFTER}"}, ()),
    (skip_rounds_of_the_table, {"averaging, H = 2: bytes in 2 steps"}, FULL),
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(
    ("sabotage", "failing"),
    [pytest.param(*case[:2], marks=case[2]) for case in SABOTAGES],
)
def test_sabotage_of_local_sgd_fails_a_check(run_script, tmp_path, sabotage, failing):
    folder = tmp_path / "run"

    def before(script):
        no_link(script)
        right = script.settings_of  # DDP's and one of averaging
        script.settings_of = lambda args: [right(args)[1], right(args)[3]]
        sabotage(script)

    ended = run_script(LOCAL, *ONE, "--output-dir", folder, world_size=2, before=before)
    assert 1 in ended.codes, ended.stdout + ended.stderr
    bad = {check["name"] for check in results_of(folder)["checks"] if not check["ok"]}
    assert failing <= bad
    if sabotage is skip_rounds_of_the_table:
        assert bad == failing, "nothing else is wrong"


# bad input


@pytest.mark.full
@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--every", 7), "--max-steps 400 is not a multiple of --every 7: take 399 or 406"),
        (("--outer-momentum", 1), "--outer-momentum 1 must be from 0 to below 1"),
        (("--seq-len", 30_000), "--seq-len 30000 cuts the text into 33 sequences, 2 ranks need 40"),
        (("--micro-batch-size", 10**6), "--micro-batch-size must be at most 7421"),
    ],
)
def test_local_sgd_refuses_bad_input(run_script, argv, says):
    ended = run_script(LOCAL, *argv, world_size=2)
    (line,) = ended.stderr.splitlines()
    assert line.startswith("local_sgd.py: error: ") and says in line and 2 in ended.codes


# its parts


def two_outer_steps(rank: int, world_size: int) -> list[float]:
    """Return one weight after each of two rounds in which rank r moved it by -(1 + r)."""
    script = load_script(LOCAL)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 10.0)
    outer = script.make_outer(model, 0.7, 0.9)
    weights = []
    for _ in range(2):
        with torch.no_grad():
            model.weight -= 1 + rank
        script.outer_step(model, outer, None)
        weights.append(model.weight.item())
    return weights


def test_outer_steps_by_hand(on_ranks):
    """The outer gradient is 1.5, the velocity 1.5 and then 0.9 x 1.5 + 1.5 = 2.85."""
    first = 10 - 0.7 * (1.5 + 0.9 * 1.5)
    second = first - 0.7 * (1.5 + 0.9 * 2.85)
    assert on_ranks(two_outer_steps, 2) == [pytest.approx([first, second])] * 2


def test_the_page_says_how_many_steps_a_round_needs():
    """Float32 weights there and back; backward, two thirds of a step, hides DDP's sending."""
    page = (REPO / "05-advanced/local_sgd.md").read_text()
    parameters = models.PRESETS["llama3-8b"].num_parameters()
    step = 6 * parameters * 524_288 / (0.4 * 8 * 989e12)
    links = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10, "400 Gbit/s": 4e11}
    for link, bits_per_second in links.items():
        sending = 2 * 4 * parameters * 8 / bits_per_second
        slower = (step / 3 + max(2 / 3 * step, sending)) / step
        rounds = math.ceil(sending / (0.05 * step))
        times = f"{sending:,.1f} s | {step:.1f} s | {slower:,.1f}x"
        assert f"| {link} | {times} | {rounds:,} |" in page
