"""The templates: one process's training, stops, kills and resumes, clear errors."""

import argparse
import json
import math
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import helpers_templates as broken
import pytest
import torch
from conftest import GPUS, REPO, assert_one_line, results_of, run_command
from helpers_01 import wait_for
from helpers_templates import (
    DDP,
    FSDP,
    SMALL_JOB,
    checkpoints_in,
    kill_in,
    kill_in_save,
    loop_of,
    rows_of,
    small_model,
    stop_in,
    write_text,
)

from dist_common import checkpoint, data, model, train

TEMPLATES = [DDP, FSDP]
full = pytest.mark.full
QUICK_DDP = [DDP, pytest.param(FSDP, marks=full)]


@pytest.fixture
def run_template(run_script, tmp_path):
    """Run a template on the small job; return how it ended."""
    text = write_text(tmp_path)

    def run(script, *argv, ranks=2, changes=(), **options):
        options.setdefault("before", small_model(*changes))
        words = ("--text-file", text, *SMALL_JOB, *argv)
        return run_script(script, *words, world_size=ranks, **options)

    return run


def assert_ok(ended):
    assert not any(ended.codes), ended.stdout + ended.stderr
    return ended


# The same training as one process


def in_full(*rows):
    """Mark rows for `make test-all` only."""
    return [pytest.param(*row, marks=full) for row in rows]


ROWS = [
    (DDP, broken.clip_nothing, "", "clipped gradient"),
    (DDP, broken.count_local_tokens, "", "loss"),
    (DDP, broken.synchronise_nothing, "", "gradient norm"),
    (DDP, broken.drop_a_micro_batch, "--global-batch-size 8", "loss"),
    (FSDP, broken.clip_by_the_local_norm, "", "clipped gradient"),
    *in_full(
        (DDP, broken.optimize_a_copy, "", "weight change"),
        (DDP, broken.forget_zero_grad, "", "gradient norm"),
        (DDP, broken.decay_weights_by_10, "", "weight change"),
        (DDP, broken.clip_before_unscaling, "--precision 16-mixed", "clipped gradient"),
        (DDP, broken.count_the_schedule_by_micro_batches, "", "weight change"),
        (DDP, broken.set_the_rate_after_the_step, "", "weight change"),
        (DDP, broken.shift_no_targets, "", "loss"),
        (DDP, broken.average_the_averages, "--global-batch-size 3", "gradient norm"),
        (DDP, broken.deal_rank_0_s_samples_to_all, "", "loss"),
        (
            FSDP,
            broken.all_reduce_nothing_between_replicas,
            "--sharding hybrid --shard-group-size 1",
            "gradient norm",
        ),
    ),
]


@pytest.mark.parametrize(("script", "change", "flags", "error"), ROWS)
def test_sabotage_fails_the_self_check(
    run_template, tmp_path, script, change, flags, error
):
    words = ("--max-steps", 2, *flags.split(), "--output-dir", tmp_path / "run")
    ended = run_template(script, *words, changes=[change])
    assert 1 in ended.codes, ended.stdout + ended.stderr
    line = f"{Path(script).name}: error: self-check failed"
    assert ended.stderr.startswith(line), ended.stderr
    match = re.search(rf"\b{error} ([\d.e+-]+)", ended.stderr)
    tolerances = {"loss": 1e-5, "gradient norm": 1e-4, "clipped gradient": 1e-3}
    assert float(match[1]) > 10 * tolerances.get(error, 0.01), ended.stderr


WAYS = [
    (DDP, 3, "--global-batch-size 7 --seed 3"),
    (FSDP, 2, "--activation-checkpointing full --precision bf16-mixed"),
    *in_full(
        (DDP, 2, "--precision 16-mixed"),
        (DDP, 6, "--global-batch-size 16 --lr 0.1"),
        (FSDP, 3, "--global-batch-size 7 --seed 3"),
        (FSDP, 4, "--sharding hybrid --shard-group-size 2 --global-batch-size 15"),
    ),
]


@pytest.mark.parametrize(("script", "ranks", "flags"), WAYS)
def test_a_correct_run_passes(run_template, script, ranks, flags):
    """Also where ranks divide nothing evenly, and where a rank has no sample."""
    ended = assert_ok(
        run_template(script, "--max-steps", 3, *flags.split(), ranks=ranks)
    )
    assert not ended.stderr
    assert re.search(r"^OK: [45] checks passed, loss ", ended.stdout, re.M)


@full
def test_both_have_the_losses_of_one_process(run_template, tmp_path):
    """Over 20 steps and the end of an epoch."""
    losses = []
    for script, ranks in ((DDP, 1), (DDP, 3), (FSDP, 3)):
        folder = tmp_path / f"{Path(script).stem}-{ranks}"
        words = ("--global-batch-size", 12, "--max-steps", 20, "--output-dir", folder)
        assert_ok(run_template(script, *words, ranks=ranks))
        losses.append(rows_of(folder))
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], abs=1e-5)
    assert losses[0][20] < 0.7 * losses[0][1]


@full
def test_the_self_check_leaves_the_random_state(run_template, tmp_path):
    """With dropout on, a check that drew numbers would change the later losses."""

    def add_dropout(script):
        model.Transformer.forward = with_dropout(model.Transformer.forward)

    def with_dropout(forward):
        def dropped(self, tokens):
            logits = forward(self, tokens)
            if train_step[0] > 2:
                logits = torch.nn.functional.dropout(logits, 0.1)
            return logits

        return dropped

    train_step = [0]

    def count_steps(script):
        step = train.Log.step

        def counted(self, number):
            train_step[0] = number
            return step(self, number)

        train.Log.step = counted

    for flag in ("--self-check", "--no-self-check"):
        words = ("--max-steps", 5, flag, "--output-dir", tmp_path / flag)
        assert_ok(run_template(DDP, *words, changes=[add_dropout, count_steps]))
    checked, unchecked = (
        rows_of(tmp_path / flag) for flag in ("--self-check", "--no-self-check")
    )
    assert checked == unchecked


def test_all_loops_have_the_same_skeleton():
    first = {"step", "next", "accumulate_gradient", "clip_grad_norm_", "set_lr"}
    then = {"zero_grad", "add", "first_two_steps", "evaluation", "requested"}
    shared = first | then | {"flush", "save"}
    loops = [[name for name in loop_of(path) if name in shared] for path in TEMPLATES]
    scaled = [name for name in loop_of(DDP) if name in ("unscale_", "update")]
    assert loops[0] == loops[1] and scaled == ["unscale_", "update"]
    assert set(loops[0]) == shared


def test_learning_rates_warm_up_and_decay():
    args = argparse.Namespace(lr=1.0, warmup_steps=4, max_steps=12)
    rates = [train.lr_at(step, args) for step in range(1, 13)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[7] == pytest.approx(0.55) and rates[11] == pytest.approx(0.1)


# Stop, kill, resume


def straight_run(run_template, script, folder, *flags):
    words = ("--global-batch-size", 12, "--eval-every", 4, "--save-every", 2)
    return assert_ok(run_template(script, *words, *flags, "--output-dir", folder))


@pytest.mark.parametrize("script", QUICK_DDP)
def test_a_run_that_is_stopped_or_killed_resumes_bitwise(
    run_template, tmp_path, script
):
    """Three signals to one rank; kills in a step, in a save, and twice in a row."""
    straight, stopped, killed = (tmp_path / name for name in ("a", "b", "c"))
    straight_run(run_template, script, straight, "--num-workers", 1)
    words = ("--global-batch-size", 12, "--eval-every", 4, "--resume")
    background = ("--async-save",) if script == FSDP else ()
    signals = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    for step, number in zip((1, 3, 6), signals, strict=True):
        flags = (*words, *background, "--log-every", 50, "--save-every", 5000)
        ended = assert_ok(
            run_template(
                script, *flags, "--output-dir", stopped, changes=[stop_in(step, number)]
            )
        )
        assert f"after step {step}, stopped" in ended.stdout
        assert max(rows_of(stopped)) == step, "the last steps are logged"
    assert_ok(run_template(script, *words, "--output-dir", stopped))
    flags = (*words, "--save-every", 2, *background, "--output-dir", killed)
    for change in (kill_in(1), kill_in(5), kill_in_save(6), kill_in_save(6)):
        ended = run_template(script, *flags, changes=[change])
        assert set(ended.codes) <= {-signal.SIGKILL, -signal.SIGTERM}, ended.stderr
    assert checkpoints_in(killed)[-1] == "step-00000004"
    ended = assert_ok(run_template(script, *flags))
    assert f"resuming from {killed}/checkpoints/step-00000004" in ended.stdout
    assert checkpoints_in(killed) == ["step-00000006", "step-00000008"]
    for folder in (stopped, killed):
        assert rows_of(folder) == rows_of(straight), "bitwise"
        assert rows_of(folder, "test_loss") == rows_of(straight, "test_loss")
    ended = assert_ok(run_template(script, *flags))
    assert "nothing to do: the checkpoint has step 8" in ended.stdout


@full
@pytest.mark.parametrize("script", QUICK_DDP)
def test_forgotten_moments_change_the_losses_of_a_resumed_run(
    run_template, tmp_path, script
):
    straight, stopped = tmp_path / "a", tmp_path / "b"
    straight_run(run_template, script, straight)
    words = ("--global-batch-size", 12, "--save-every", 2, "--resume")
    words += ("--output-dir", stopped)
    assert_ok(run_template(script, *words, changes=[stop_in(4)]))
    assert_ok(run_template(script, *words, changes=[broken.forget_the_moments]))
    assert rows_of(stopped)[8] != rows_of(straight)[8]


@full
@pytest.mark.parametrize("script", [DDP, FSDP])
def test_another_number_of_ranks_resumes_with_the_same_batch(
    run_template, tmp_path, script
):
    straight, moved = tmp_path / "a", tmp_path / "b"
    straight_run(run_template, script, straight)
    words = ("--save-every", 2, "--resume", "--output-dir", moved)
    given = ("--global-batch-size", 12)
    assert_ok(run_template(script, *words, *given, changes=[stop_in(2)]))
    ended = assert_ok(run_template(script, *words, ranks=1, changes=[stop_in(5)]))
    assert "global batch 12 = 2 per micro-batch x 6 micro-batches x 1 rank" in (
        ended.stdout
    )
    assert_ok(run_template(script, *words, ranks=3))
    for step, loss in rows_of(straight).items():
        assert rows_of(moved)[step] == pytest.approx(loss, rel=1e-5)


def test_a_longer_run_says_how_the_learning_rate_changes(run_template, tmp_path):
    words = ("--save-every", 2, "--resume", "--output-dir", tmp_path / "run")
    assert_ok(run_template(DDP, *words, "--max-steps", 4))
    ended = assert_ok(run_template(DDP, *words, "--max-steps", 6))
    assert "changed since the checkpoint: max_steps 4 -> 6" in ended.stdout
    line = "warning: the learning rate of step 5 changes from 0.001 to 0.0033"
    assert line in ended.stdout, ended.stdout


@full
def test_going_back_to_a_step_replaces_what_came_after(run_template, tmp_path):
    folder = tmp_path / "run"
    words = ("--save-every", 2, "--keep", 3, "--output-dir", folder)
    assert_ok(run_template(DDP, *words))
    names = ["step-00000004", "step-00000006", "step-00000008"]
    assert checkpoints_in(folder) == names
    before = rows_of(folder)
    back = ("--resume-step", 4, "--max-steps", 6, "--lr", 1e-3)
    assert_ok(run_template(DDP, *words, *back))
    assert checkpoints_in(folder) == names[:2]
    after = rows_of(folder)
    assert [step for step in after if after[step] != before[step]] == [6]
    ended = run_template(DDP, *words, "--resume-step", 5)
    assert_one_line(ended, "cannot use steps [5]: ", "ddp_training.py")
    assert "has [4, 6]" in ended.stderr


@full
@pytest.mark.parametrize("script", TEMPLATES)
def test_a_copy_with_dist_common_trains_is_killed_and_resumes(tmp_path, script):
    """In an empty folder, in a fresh interpreter."""
    shutil.copytree(
        REPO / "dist_common",
        tmp_path / "dist_common",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    shutil.copy(REPO / script, tmp_path)
    words = ["--max-steps", "6", "--save-every", "2", "--eval-every", "0", "--resume"]
    words += ["--output-dir", "run", "--micro-batch-size", "2", "--seq-len", "16"]
    copied = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    copied += ["--nproc-per-node=2", Path(script).name, *words]
    kill = f"""
import os, signal, sys
from dist_common import train
add = train.Log.add
def add_and_die(self, step, *results):
    add(self, step, *results)
    if step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
train.Log.add = add_and_die
import runpy
runpy.run_path("{Path(script).name}", run_name="__main__")
"""
    (tmp_path / "killed.py").write_text(kill)
    killed = [word.replace(Path(script).name, "killed.py") for word in copied]
    path = {"PYTHONPATH": str(tmp_path)}
    ended = run_command(killed, tmp_path, 300, **path)
    assert ended.codes != [0]
    assert checkpoints_in(tmp_path / "run") == ["step-00000002", "step-00000004"]
    ended = run_command(copied, tmp_path, 300, **path)
    assert ended.codes == [0], ended.stdout + ended.stderr
    assert "resuming from run/checkpoints/step-00000004" in ended.stdout
    assert list(rows_of(tmp_path / "run")) == list(range(1, 7))


# Checkpoints


@pytest.fixture
def stopped_run(run_template, tmp_path):
    """Return a function that trains 4 steps and returns its folder."""

    def run(script):
        folder = tmp_path / "run"
        words = ("--save-every", 2, "--max-steps", 4, "--output-dir", folder)
        assert_ok(run_template(script, *words))
        return folder

    return run


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = [
    ("__1_0.distcp", Path.unlink, "__1_0.distcp is missing or damaged"),
    ("__0_0.distcp", flip_a_bit, "__0_0.distcp is missing or damaged"),
    ("manifest.json", flip_a_bit, "manifest.json is missing or damaged"),
    ("manifest.json", Path.unlink, "manifest.json is missing or damaged"),
]


@pytest.mark.parametrize("script", QUICK_DDP)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    run_template, stopped_run, tmp_path, script
):
    folder = stopped_run(script)
    checkpoints = folder / "checkpoints"
    shutil.copytree(checkpoints, tmp_path / "whole")
    words = ("--max-steps", 4, "--resume", "--output-dir", folder)
    for file, damage, says in DAMAGES if script == FSDP else DAMAGES[:1]:
        shutil.rmtree(checkpoints)
        shutil.copytree(tmp_path / "whole", checkpoints)
        damage(checkpoints / "step-00000004" / file)
        ended = assert_ok(run_template(script, *words))
        assert f"step-00000004 is skipped: {says}" in ended.stdout
        assert "resuming from" in ended.stdout and list(rows_of(folder)) == [1, 2, 3, 4]
    for path in checkpoints.iterdir():
        (path / ".metadata").unlink()
    ended = run_template(script, *words)
    assert_one_line(ended, "cannot use steps [2, 4]: ", Path(script).name)


def test_disks_that_are_not_shared_are_refused(run_template, tmp_path):
    def set_rank_folder(script):
        parse = script.parse_args

        def parse_for_rank():
            args = parse()
            args.output_dir = tmp_path / f"disk-{os.environ['RANK']}"
            args.output_dir.mkdir()
            (args.output_dir / "checkpoints").mkdir()
            return args

        script.parse_args = parse_for_rank

    words = ("--resume", "--output-dir", tmp_path / "run")
    ended = run_template(DDP, *words, changes=[set_rank_folder])
    assert_one_line(
        ended, "which needs a disk that all ranks share (rank 1)", "ddp_training.py"
    )


@pytest.mark.parametrize(("script", "flags"), [(DDP, ()), (FSDP, ("--async-save",))])
def test_a_full_disk_ends_the_run_in_one_line(run_template, tmp_path, script, flags):
    """Rank 1 cannot write more than 20 kB. Rank 0 does not wait for rank 1."""
    folder = tmp_path / "run"
    words = ("--save-every", 2, "--output-dir", folder, *flags)
    ended = run_template(script, *words, changes=[broken.fill_the_disk])
    says = "checkpoints/step-00000004 (rank 1): File too large"
    assert_one_line(ended, says, Path(script).name)
    assert checkpoints_in(folder) == ["step-00000002"]


def test_a_failing_write_on_rank_0_ends_all_ranks(run_template, tmp_path):
    def fail(script):
        def publish(self, *given):
            raise OSError(5, "Input/output error")

        checkpoint.Checkpoints.publish = publish

    words = ("--save-every", 2, "--output-dir", tmp_path / "run")
    ended = run_template(DDP, *words, changes=[fail])
    assert_one_line(ended, "(rank 0): Input/output error", "ddp_training.py")
    assert checkpoints_in(tmp_path / "run") == []


@full
def test_training_goes_on_while_a_checkpoint_is_written(run_template, tmp_path):
    """The write of step 2 ends only after step 3, and holds the weights of step 2."""
    straight, folder = tmp_path / "straight", tmp_path / "run"
    straight_run(run_template, FSDP, straight)

    def write_late(script):
        write, steps = checkpoint.Checkpoints.write, []

        def late(self, step, *parts):
            wait_for(lambda: step == 8 or step + 1 in steps)
            write(self, step, *parts)

        def note(self, step, *results):
            add(self, step, *results)
            steps.append(step)

        add = train.Log.add
        checkpoint.Checkpoints.write, train.Log.add = late, note

    words = ("--global-batch-size", 12, "--save-every", 2, "--resume")
    words += ("--output-dir", folder, "--async-save")
    ended = run_template(FSDP, *words, changes=[write_late, kill_in(5)])
    assert set(ended.codes) == {-signal.SIGKILL}, ended.stderr
    assert_ok(run_template(FSDP, *words))
    assert rows_of(folder) == rows_of(straight), "bitwise"


# Clear errors

USAGE = [
    (["--resume"], "--resume needs --output-dir"),
    (["--profile", "4-5"], "must be a whole number of at least 1, not '4-5'"),
    (["--seq-len", "512"], "--seq-len must be at most 256"),
    (["--text-file", "none"], "--text-file none: No such file"),
    (["--tokens", "none"], "--tokens none: cannot be used ([Errno 2] No such file"),
    (["--preset", "huge"], "invalid choice: 'huge' (choose from 'tiny', '124m'"),
]


@pytest.mark.parametrize(("argv", "says"), USAGE)
def test_wrong_usage_gets_one_line(run_script, argv, says):
    ended = run_script(DDP, *argv, world_size=2)
    assert_one_line(ended, says, "ddp_training.py")


@pytest.mark.full  # the silent rank waits for its launcher
def test_one_rank_prints_the_error_of_all(run_script):
    words, says = USAGE[0]
    ended = run_script(DDP, *words, world_size=2, end_job_on_failure=False)
    assert_one_line(ended, says, "ddp_training.py")


@pytest.mark.parametrize(
    ("script", "argv", "says"),
    [
        (FSDP, ["--precision", "16-mixed"], "invalid choice: '16-mixed'"),
        (
            FSDP,
            ["--sharding", "hybrid", "--shard-group-size", "3"],
            "--shard-group-size 3 does not divide 2 ranks",
        ),
        (DDP, ["--seq-len", "200"], "3000 tokens are too few to train and test on"),
    ],
)
def test_a_job_that_cannot_run_is_refused(run_template, script, argv, says):
    assert_one_line(run_template(script, *argv), says, Path(script).name)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "is not empty: name another folder, or continue the run with --resume"),
        (["--resume", "--seq-len", 16], "seq_len 32 -> 16: the run cannot continue"),
        (["--resume", "--seed", 1], "seed 0 -> 1: the run cannot continue"),
    ],
)
def test_a_folder_of_another_run_is_refused(run_template, stopped_run, argv, says):
    folder = stopped_run(DDP)
    ended = run_template(DDP, "--output-dir", folder, *argv)
    assert_one_line(ended, says, "ddp_training.py")


def test_a_bug_shows_its_traceback(run_template):
    def fail(script):
        def broken_loss(*given):
            raise KeyError("a bug of the user")

        script.summed_loss = broken_loss

    ended = run_template(DDP, changes=[fail])
    assert 1 in ended.codes
    assert "Traceback (most recent call last)" in ended.stderr
    assert "broken_loss" in ended.stderr and "KeyError" in ended.stderr


def test_a_loss_that_is_not_a_number_stops_all_ranks_before_a_save(
    run_template, tmp_path
):
    """Lines are due every 10 steps, but a save reads the losses first."""

    def poison(script):
        loss, calls = script.summed_loss, []

        def poisoned(*given):
            calls.append(given)
            bad = script.dist.get_rank() == 1 and len(calls) == 3
            return loss(*given) * (math.nan if bad else 1.0)

        script.summed_loss = poisoned

    words = ("--no-self-check", "--save-every", 2, "--log-every", 10)
    ended = run_template(
        DDP, *words, "--output-dir", tmp_path / "run", changes=[poison]
    )
    line = "ddp_training.py: error: stopped: in step 3 the loss is nan, "
    line += "the gradient norm nan"
    assert ended.stderr.startswith(line), ended.stderr
    assert checkpoints_in(tmp_path / "run") == ["step-00000002"]


@full
@pytest.mark.parametrize("script", TEMPLATES)
def test_the_time_of_a_step_leaves_out_evaluation_saving_and_the_check(
    run_template, tmp_path, script
):
    """On a clock that only a batch, evaluation, saving and the check move."""

    def stop_the_clock(script):
        now = [0.0]
        train.time.perf_counter = lambda: now[0]

        def takes_an_hour(function):
            def slow(*given, **more):
                now[0] += 3600.0
                return function(*given, **more)

            return slow

        script.evaluate = takes_an_hour(script.evaluate)
        script.check.first_two_steps = takes_an_hour(script.check.first_two_steps)
        save = checkpoint.Checkpoints.save
        checkpoint.Checkpoints.save = takes_an_hour(save)
        next_batch = data.GlobalBatches.__next__

        def take_a_second(self):
            now[0] += 1.0
            return next_batch(self)

        data.GlobalBatches.__next__ = take_a_second

    folder = tmp_path / "run"
    words = ("--save-every", 2, "--eval-every", 2, "--output-dir", folder)
    assert_ok(run_template(script, *words, changes=[stop_the_clock]))
    assert results_of(folder)["metrics"]["step_times_ms"] == [1000.0] * 8


def test_a_run_leaves_what_the_page_says(run_template, tmp_path):
    folder = tmp_path / "run"
    words = ("--tensorboard", "--profile", 3, "--save-every", 4, "--eval-every", 4)
    assert_ok(run_template(FSDP, *words, "--output-dir", folder))
    names = ["checkpoints", "metrics.jsonl", "profile", "results.json", "tensorboard"]
    assert sorted(path.name for path in folder.glob("[!.]*")) == names
    traces = sorted((folder / "profile").iterdir())
    assert [path.name[:6] for path in traces] == ["rank0.", "rank1."]
    for path in traces:
        events = json.loads(path.read_text())["traceEvents"]
        steps = [e for e in events if e["name"] == "Optimizer.step#AdamW.step"]
        assert len(steps) == 1
    metrics = results_of(folder)["metrics"]
    assert metrics["peak_memory_gib"] > 0 and metrics["mfu"] is None
    counted = metrics["collectives_per_step"]
    # Two blocks, the embedding, and norm with head: gathered for forward, and all but
    # the last again for backward.
    assert counted["all_gather"]["calls"] == 4 + 3
    assert counted["reduce_scatter"]["calls"] == 4


def test_ddp_sends_one_gradient_per_step(run_template, tmp_path):
    """However many micro-batches; 8 more bytes for the number of tokens."""
    folder = tmp_path / "run"
    words = ("--global-batch-size", 12, "--output-dir", folder)
    assert_ok(run_template(DDP, *words))
    sent = results_of(folder)["metrics"]["collectives_per_step"]["all_reduce"]
    extra = sent["bytes_sent"] - 4 * broken.NARROW.num_parameters()
    assert 0 <= extra <= 16, "a ring of two ranks sends what it reduces"


@full
@pytest.mark.skipif(not GPUS, reason="needs a GPU")
@pytest.mark.parametrize("script", TEMPLATES)
def test_it_runs_on_a_gpu(script):
    command = [sys.executable, script, "--compile", "--device", "cuda"]
    ended = run_command(command, REPO, 300, CUDA_VISIBLE_DEVICES=GPUS)
    assert ended.codes == [0], ended.stdout + ended.stderr
    assert "1 rank started by python, cuda with " in ended.stdout


# Your own model


@full
def test_the_diff_of_the_page_trains_another_model(tmp_path):
    page = (REPO / "01-ddp-basics" / "ddp_training.md").read_text()
    diffs = re.findall(r"```diff\n(--- .*?)```", page, re.S)
    assert len(diffs) == 1
    changed = [
        line for line in diffs[0].splitlines() if re.match(r"[+-](?![+-]{2})", line)
    ]
    assert len(changed) <= 40
    shutil.copytree(REPO / "dist_common", tmp_path / "dist_common")
    (tmp_path / "01-ddp-basics").mkdir()
    shutil.copy(REPO / DDP, tmp_path / DDP)
    (tmp_path / "own.patch").write_text(diffs[0])
    patched = run_command(["patch", "-p1", "-i", "own.patch"], tmp_path, 60)
    assert patched.codes == [0], patched.stdout
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", DDP, "--max-steps", "20", "--self-check"]
    ended = run_command(command, tmp_path, 300, PYTHONPATH=str(tmp_path))
    assert ended.codes == [0], ended.stdout + ended.stderr
    assert "relative error of weight change" in ended.stdout
    assert re.search(r"test loss [\d.]+ \| (test )?accuracy [\d.]+", ended.stdout)
