"""ddp_training.py: the losses of one process, checks that can fail, a run that survives its end."""

import argparse
import functools
import re
import shutil
import signal
import sys

import pytest
import torch
from conftest import GPUS, REPO, assert_one_line, load_script, results_of, run_command
from helpers_01 import (
    BYTES,
    GRADIENT,
    MNIST,
    TESTED,
    TRAINED,
    TRAINING,
    WEIGHTS,
    ask_to_stop_in,
    largest_difference,
    newest_state,
    small_job,
    steps_in,
    with_a_small_model,
)
from helpers_04 import first_is_quick
from torch.nn.parallel import DistributedDataParallel

from legacy_common.lab import proofs

full = pytest.mark.full


@pytest.fixture
def small(tmp_path):
    return small_job(tmp_path)


@pytest.fixture
def train(run_script, small):
    """Run the template on the small job and a small model, with more arguments and changes."""

    def run(*argv, ranks=2, changes=(), **options):
        before = with_a_small_model(*changes)
        return run_script(TRAINING, *small, *argv, world_size=ranks, before=before, **options)

    return run


@pytest.fixture
def straight(train, tmp_path):
    """A run that is never stopped, as the others are to be."""
    ended = train("--output-dir", tmp_path / "straight")
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    return tmp_path / "straight"


# the same answer


def test_training_gives_the_losses_of_one_process(train, tmp_path):
    """24 sequences a step in micro-batches of unequal token counts, over the end of an epoch.

    Tolerance: summing fp32 terms in another order changes a loss near 5 in its last bits. The model
    is smooth, so the difference stays small over 24 steps.
    """
    for world_size, size in ((1, 8), (2, 4)):
        ended = train(
            "--global-batch-size", 24, "--micro-batch-size", size,
            "--output-dir", tmp_path / str(world_size), ranks=world_size,
        )  # fmt: skip
        assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
        assert ended.stdout.splitlines()[-1].startswith("OK: 5 checks passed, loss ")
    alone, together = tmp_path / "1", tmp_path / "2"
    losses = steps_in(alone)
    assert losses[24] < 0.8 * losses[1], "a loss that does not fall would prove little"
    assert newest_state(alone)["sampler"]["epoch"] == 1, "the end of an epoch is in it"
    assert largest_difference(alone, together) < 2e-5
    assert newest_state(alone)["trained_tokens"] == newest_state(together)["trained_tokens"]


@full
def test_mixed_precision_learns_and_resumes_bitwise(train, tmp_path):
    arguments = ("--max-steps", 8, "--precision", "16-mixed", "--resume", "--output-dir")
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    train(*arguments, straight)
    train(*arguments, stopped, changes=[ask_to_stop_in(4)])
    ended = train(*arguments, stopped)
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    losses = steps_in(straight)
    assert losses[8] < 0.95 * losses[1]
    assert largest_difference(straight, stopped) == 0.0
    assert results_of(stopped)["checks"][0]["measured"] > 1e-5, "fp32 would be more exact"
    assert newest_state(stopped)["scaler"] == newest_state(straight)["scaler"]


@full
def test_tensorboard_shows_the_numbers_of_metrics_jsonl(train, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "run"
    ended = train("--max-steps", 4, "--logger", "tensorboard", "--output-dir", folder)
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    written = EventAccumulator(str(folder / "tensorboard")).Reload()
    for name in ("loss", "grad_norm", "test_loss"):
        shown = {event.step: event.value for event in written.Scalars(name)}
        assert shown == pytest.approx(steps_in(folder, name), rel=1e-6)


def without_wandb(script):
    sys.modules["wandb"] = None


@full
def test_a_logger_that_cannot_start_ends_the_run(train, tmp_path):
    ended = train("--logger", "wandb", "--output-dir", tmp_path / "run", changes=[without_wandb])
    assert_one_line(ended, "--logger wandb: pip install wandb first", "ddp_training.py")


def without_cpp(script):
    # The default back end works too, and takes half a minute.
    torch.compile = functools.partial(torch.compile, backend="aot_eager")


@full
def test_compiling_does_not_change_the_training(train, tmp_path):
    plain, folder = tmp_path / "plain", tmp_path / "run"
    arguments = ("--max-steps", 8, "--grad-accum-steps", 2, "--output-dir")
    train(*arguments, plain)
    ended = train(*arguments, folder, "--compile", changes=[without_cpp])
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    assert largest_difference(plain, folder) < 2e-5


def test_learning_rates_scale_warm_up_and_decay():
    script = load_script(TRAINING)
    args = argparse.Namespace(
        lr=1.0, lr_scaling="none", global_batch_size=128, base_batch_size=32,
        warmup_steps=4, max_steps=12,
    )  # fmt: skip
    rates = [script.job.lr_at(step, args) for step in range(1, 13)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[7] == pytest.approx(0.55) and rates[11] == pytest.approx(0.1)
    for scaling, factor in (("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)):
        args.lr_scaling = scaling
        assert script.scaled_lr(0.5, args) == factor / 2
    args.warmup_steps, args.max_steps = 0, 1
    assert script.job.lr_at(1, args) == pytest.approx(0.1)


# checks that can fail


def average_the_averages(script):
    """Do what most loops do: mean over each micro-batch, then over micro-batches and ranks."""
    summed = script.summed_loss

    def scaled(model, inputs, targets, precision):
        loss = summed(model, inputs, targets, precision)
        if not isinstance(model, DistributedDataParallel):
            return loss
        counted = (targets != -100).sum()
        everywhere = counted.clone()
        torch.distributed.all_reduce(everywhere)
        return loss / counted * everywhere / torch.distributed.get_world_size()

    script.summed_loss = scaled


def drop_a_micro_batch(script):
    deal = script.data.job_batches

    def short(sequences, sampler, args, *rest):
        for number, step in enumerate(deal(sequences, sampler, args, *rest)):
            if number == 1:
                step[-1] = script.data.collate(args.micro_batch_size, args.seq_len, [])
            yield step

    script.data.job_batches = short


def evaluate_without_the_last_batch(script):
    batches = script.job.Job.test_batches
    script.job.Job.test_batches = lambda self, rows: list(batches(self, rows))[:-1]


def train_rank_1_further(script):
    original = proofs.same_weights

    def drifted(report, model):
        with torch.no_grad():
            next(model.parameters()).add_(1e-7 * torch.distributed.get_rank())
        original(report, model)

    proofs.same_weights = drifted


@pytest.mark.parametrize(
    ("sabotage", "failing"),
    [
        (average_the_averages, [GRADIENT, BYTES]),
        (train_rank_1_further, [WEIGHTS]),
        (drop_a_micro_batch, [TRAINED]),
        (evaluate_without_the_last_batch, [TESTED]),
    ],
)
def test_sabotage_fails_a_check(train, sabotage, failing):
    ended = train("--max-steps", 3, "--grad-accum-steps", 2, changes=[sabotage])
    assert 1 in ended.codes and not set(ended.codes) - {1, -signal.SIGTERM}, ended.stderr
    assert ended.stdout.splitlines()[-1] == "FAILED: " + "; ".join(failing)


# a run that is stopped


@full
def test_a_signal_without_a_folder_says_that_nothing_is_saved(train):
    ended = train(ranks=1, changes=[ask_to_stop_in(2)])
    assert ended.codes == [0]
    assert ended.stdout.splitlines()[-1].endswith("asked to stop, not saved")


@full
def test_resuming_on_other_ranks_keeps_the_data_order_and_says_what_changed(train, tmp_path):
    straight, folder = tmp_path / "straight", tmp_path / "moved"
    shared = ("--global-batch-size", 24, "--output-dir")
    assert train(*shared, straight, "--micro-batch-size", 12).codes == [0, 0]
    arguments = (*shared, folder, "--resume", "--micro-batch-size")
    train(*arguments, 12, changes=[ask_to_stop_in(7)])
    one = train(*arguments, 8, ranks=1, changes=[ask_to_stop_in(12)])
    assert "at step 7, sample 168 of epoch 1; changed since then: " in one.stdout
    assert "micro_batch_size 12 -> 8" in one.stdout and "ranks 2 -> 1" in one.stdout
    assert "grad_accum_steps 1 -> 3" in one.stdout
    assert "global_batch" not in one.stdout, "what has not changed"
    more = train(*arguments, 2, ranks=3)
    assert more.codes == [0] * 3, more.stdout + more.stderr
    assert re.search(r"at step 12, sample \d+ of epoch \d; changed since then: ", more.stdout)
    assert "ranks 1 -> 3" in more.stdout
    assert largest_difference(straight, folder) < 2e-5
    assert results_of(folder)["checks"][3]["ok"], "no token twice, none left out"


@full
def test_a_loss_that_is_no_number_stops_the_run_and_names_step_and_rank(train, tmp_path):
    """It is found some steps later, at the next look; no checkpoint is written in between."""

    def poison(script):
        summed, calls = script.summed_loss, []

        def poisoned(*args):
            calls.append(args)
            # Two calls check the gradient, one more alone; then there is one in each step.
            bad = torch.distributed.get_rank() == 1 and len(calls) == 3 + 4
            return summed(*args) * (float("nan") if bad else 1.0)

        script.summed_loss = poisoned

    arguments = ("--save-every", 3, "--log-every", 10, "--output-dir", tmp_path / "run")
    ended = train(*arguments, changes=[poison])
    assert 1 in ended.codes
    (line,) = ended.stderr.splitlines()
    assert line.startswith(
        "ddp_training.py: stopped: in step 4 the loss is nan on rank 1 of 2, gradient norm"
    )
    assert newest_state(tmp_path / "run")["step"] == 3, "no checkpoint of what is lost"
    assert list(steps_in(tmp_path / "run")) == [1, 2, 3]


def flip_a_bit_in(step):
    """Flip the lowest bit of a weight of rank 1, after that step."""

    def before(script):
        trained = script.train_step

        def flipped(run, taken):
            trained(run, taken)
            if taken.number == step and torch.distributed.get_rank() == 1:
                weight = next(run.ddp_model.parameters()).data.view(-1)
                weight.view(torch.int32)[-1] ^= 1

        script.train_step = flipped

    return before


def test_a_bit_flipped_in_one_replica_is_found_and_not_saved(train, tmp_path):
    """In step 4: the losses do not show it."""
    argv = ("--check-replicas-every", 3, "--save-every", 3, "--output-dir", tmp_path / "run")
    ended = train(*argv, changes=[flip_a_bit_in(4)])
    found = "ddp_training.py: stopped: after step 6 ranks 0, 1 hold different weights, and no "
    assert found in ended.stderr, ended.stdout + ended.stderr
    assert newest_state(tmp_path / "run")["step"] == 3


# what it trains on


def test_whole_lines_fill_sequences_unequally_and_lose_nothing():
    script = load_script(TRAINING)
    content = b"one\ntwo\n\na line of more than 12 bytes\nthe end"
    text = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    sequences = script.WholeLines(text, seq_len=12)
    predicted, lengths = b"", []
    for inputs, targets in sequences:
        counted = targets != script.data.IGNORED
        lengths.append(int(counted.sum()))
        assert counted[: lengths[-1]].all(), "filled up at the end"
        assert torch.equal(inputs[1 : lengths[-1]], targets[: lengths[-1] - 1])
        predicted += bytes(targets[counted].tolist())
    assert predicted == content[1:], "every byte but the first is predicted exactly once"
    assert sequences.lengths.tolist() == lengths == [9, 12, 12, 5, 6]


# bad input


@pytest.mark.parametrize(
    ("argv", "says"),
    first_is_quick([
        (["--global-batch-size", 24], "24 must be --micro-batch-size 8 x 2 ranks x --grad-accum"),
        (["--text-file", "{tmp}/none"], "--text-file {tmp}/none: No such file"),
        (["--text-file", "{tmp}/short"], "are fewer than one sequence of 128 tokens for each of 2"),
        (["--text-file", "{tmp}/lines"], "the test text's 15 bytes are fewer than one"),
        (["--logger", "tensorboard"], "--logger needs --output-dir"),
        (["--profile", "4-3"], "must be steps like 5-7 or 5, not '4-3'"),
    ]),
)  # fmt: skip
def test_bad_input_gets_one_line_and_writes_nothing(run_script, tmp_path, argv, says):
    (tmp_path / "short").write_text("x" * 2000)
    (tmp_path / "lines").write_text("a line of text\n" * 21)
    filled = [str(word).format(tmp=tmp_path) for word in argv]
    if "--output-dir" not in argv and "needs --output-dir" not in says:
        filled += ["--output-dir", str(tmp_path / "new")]
    ended = run_script(TRAINING, *filled, world_size=2)
    assert_one_line(ended, says.format(tmp=tmp_path), "ddp_training.py")
    assert not (tmp_path / "new").exists(), "nothing written"


@pytest.fixture
def stopped_early(train, tmp_path):
    folder = tmp_path / "run"
    assert train("--max-steps", 1, "--output-dir", folder, ranks=1).codes == [0]
    return folder


def replace_by_another_script(folder, run_script):
    shutil.rmtree(folder)
    assert run_script(MNIST, "--epochs", 1, "--output-dir", folder).codes == [0]


@full
@pytest.mark.parametrize(
    ("argv", "damage", "says"),
    [
        ([], None, "is not empty: name another folder, or add --resume"),
        (["--resume", "--seq-len", 64], None, "--seq-len is 64 here and 32 in the checkpoint"),
        (["--resume"], replace_by_another_script, "of another model (blocks.0.attention"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_and_left_alone(
    train, run_script, stopped_early, argv, damage, says
):
    if damage:
        damage(*(stopped_early, run_script)[: damage.__code__.co_argcount])
    before = times_of(stopped_early)
    ended = train("--output-dir", stopped_early, *argv, end_job_on_failure=False)
    assert_one_line(ended, says, "ddp_training.py")
    assert before == times_of(stopped_early)


def times_of(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("[!.]*")}


# on a GPU


@full
@pytest.mark.skipif(not GPUS, reason="needs a GPU")
def test_it_runs_on_a_gpu():
    command = ["python", TRAINING, "--precision", "16-mixed", "--compile", "--device", "cuda"]
    ended = run_command(command, REPO, 300, CUDA_VISIBLE_DEVICES=GPUS)
    assert ended.codes == [0], ended.stdout + ended.stderr
    assert " cuda with nccl" in ended.stdout
