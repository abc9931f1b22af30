"""ddp_training.py: the losses of one process, checks that can fail, a run that survives its end."""

import argparse
import functools
import importlib.util
import json
import os
import re
import shutil
import signal
import sys
import types
from pathlib import Path

import psutil
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
    at_random_step,
    deal_all_ranks_the_same,
    die_in,
    largest_difference,
    newest_state,
    skip_all_reduce,
    small_job,
    steps_in,
    with_a_small_model,
)
from helpers_04 import first_is_quick
from torch.nn.parallel import DistributedDataParallel

from dist_common.lab import proofs

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


@pytest.mark.parametrize(("ranks", "micro_batch"), [(2, 4), pytest.param(3, 8, marks=full)])
def test_training_gives_the_losses_of_one_process(train, tmp_path, ranks, micro_batch):
    """24 sequences a step in micro-batches of unequal token counts, over the end of an epoch.

    Tolerance: summing fp32 terms in another order changes a loss near 5 in its last bits. The model
    is smooth, so the difference stays small over 24 steps.
    """
    for world_size, size in ((1, 8), (ranks, micro_batch)):
        ended = train(
            "--global-batch-size", 24, "--micro-batch-size", size,
            "--output-dir", tmp_path / str(world_size), ranks=world_size,
        )  # fmt: skip
        assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
        assert ended.stdout.splitlines()[-1].startswith("OK: 5 checks passed, loss ")
    alone, together = tmp_path / "1", tmp_path / str(ranks)
    losses = steps_in(alone)
    assert losses[24] < 0.8 * losses[1], "a loss that does not fall would prove little"
    assert newest_state(alone)["sampler"]["epoch"] == 1, "the end of an epoch is in it"
    assert largest_difference(alone, together) < 2e-5
    assert newest_state(alone)["trained_tokens"] == newest_state(together)["trained_tokens"]


@full
def test_how_often_results_are_read_does_not_change_them(train, tmp_path):
    for every in (1, 7):
        ended = train("--log-every", every, "--output-dir", tmp_path / str(every), "--max-steps", 9)
        assert ended.codes == [0, 0], ended.stdout + ended.stderr
    assert largest_difference(tmp_path / "1", tmp_path / "7") == 0.0
    # It looks at steps 5 (saves), 7 and 9 (the last).
    assert re.findall(r"^step (\d+) \| loss", ended.stdout, re.M) == ["5", "7", "9"]


@full
def test_the_model_is_evaluated_in_eval_mode_and_trained_in_train_mode(train):
    seen = []

    def watch(script):
        summed = script.summed_loss

        def watched(model, *rest, **options):
            evaluating = sys._getframe(1).f_code.co_name == "evaluate"
            assert model.training != evaluating
            seen.append(evaluating)
            return summed(model, *rest, **options)

        script.summed_loss = watched

    def say_what_was_seen(script):
        evaluate = script.job.Job.evaluate

        def told(job, *args):
            value = evaluate(job, *args)
            job.report.say(f"evaluated {sum(seen)} of {len(seen)} times")
            return value

        script.job.Job.evaluate = told

    arguments = ("--max-steps", 4, "--eval-every", 2)
    ended = train(*arguments, changes=[watch, say_what_was_seen])
    assert ended.codes == [0, 0], ended.stderr
    first, second = re.findall(r"^evaluated (\d+) of (\d+) times$", ended.stdout, re.M)
    assert 0 < int(first[0]) < int(first[1]) and 2 * int(first[0]) == int(second[0])


@full
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_mixed_precisions_learn_and_resume_bitwise(train, tmp_path, precision):
    arguments = ("--max-steps", 8, "--precision", precision, "--resume", "--output-dir")
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    train(*arguments, straight)
    train(*arguments, stopped, changes=[ask_to_stop_in(4)])
    ended = train(*arguments, stopped)
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    losses = steps_in(straight)
    assert losses[8] < 0.95 * losses[1]
    assert largest_difference(straight, stopped) == 0.0
    assert results_of(stopped)["checks"][0]["measured"] > 1e-5, "fp32 would be more exact"
    if precision == "16-mixed":
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


def stand_in_for_wandb(script):
    """Have `import wandb` find a module that notes in a file how it is called."""

    class Run:
        step = 0

        def log(self, values, step):
            assert step >= self.step, "wandb leaves it out, and warns"
            self.step = step
            note({"step": step, **values})

        def finish(self):
            note("finish")

    def note(what):
        with open(Path(options["dir"]) / "calls.jsonl", "a") as file:
            file.write(json.dumps(what, default=str) + "\n")

    def init(**given):
        options.update(given)
        note({name: given[name] for name in ("id", "resume", "name", "config")})
        run = Run()
        for line in (Path(given["dir"]) / "calls.jsonl").read_text().splitlines():
            run.step = 1 + json.loads(line).get("step", run.step - 1)  # after what it has
        return run

    options = {}
    module = types.ModuleType("wandb")
    module.init, module.Settings, module.Error = init, lambda console: None, KeyError
    sys.modules["wandb"] = module


def test_wandb_has_one_run_of_a_job_that_resumes(train, tmp_path):
    argv = ("--logger", "wandb", "--save-every", 3, "--resume", "--output-dir", tmp_path / "run")
    killed = train(*argv, "--max-steps", 6, changes=[stand_in_for_wandb, die_in(6)])
    assert killed.codes == [-signal.SIGKILL] * 2, killed.stderr
    ended = train(*argv, "--max-steps", 6, changes=[stand_in_for_wandb])
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    calls = (tmp_path / "run" / "calls.jsonl").read_text().splitlines()
    calls = [json.loads(call) for call in calls]  # of both starts
    first, second = (call for call in calls if "id" in call)
    assert first["id"] == second["id"] and first["resume"] == "allow"
    assert first["name"] == "run" and first["config"]["max_steps"] == 6
    steps = [call["step"] for call in calls if "loss" in call]
    assert steps == [1, 2, 3, 4, 5, 6], "4 and 5, after the checkpoint, once"
    assert calls[-1] == "finish"
    shown = {call["step"]: call["loss"] for call in calls if "loss" in call}
    assert shown == steps_in(tmp_path / "run")


def without_wandb(script):
    sys.modules["wandb"] = None


def refusing_wandb(script):
    stand_in_for_wandb(script)

    def init(**options):
        raise sys.modules["wandb"].Error("no API key configured")

    sys.modules["wandb"].init = init


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without_wandb, "--logger wandb: pip install wandb first"),
        pytest.param(
            refusing_wandb,
            "no API key configured'; WANDB_MODE=offline needs no account",
            marks=full,
        ),
    ],
)
@pytest.mark.full
def test_a_logger_that_cannot_start_ends_the_run(train, tmp_path, change, says):
    ended = train("--logger", "wandb", "--output-dir", tmp_path / "run", changes=[change])
    assert_one_line(ended, says, "ddp_training.py")


@full
@pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None,
    reason="needs wandb: not in requirements.txt",
)
def test_wandb_itself_offline(train, tmp_path):
    """Two starts leave two folders of one run, which `wandb sync` puts together."""
    environ = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    argv = ("--logger", "wandb", "--save-every", 2, "--resume", "--output-dir", tmp_path / "run")

    def offline(script):
        os.environ.update(environ)

    for steps in (3, 5):
        ended = train(*argv, "--max-steps", steps, changes=[offline])
        assert ended.codes == [0, 0], ended.stdout + ended.stderr
    (name,) = {path.name.split("-")[-1] for path in (tmp_path / "run").glob("wandb/offline-run-*")}
    assert name == (tmp_path / "run" / "wandb-id").read_text()
    assert len(list((tmp_path / "run").glob("wandb/offline-run-*/*.wandb"))) == 2


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


@pytest.mark.gpu_ready
@full
def test_compiling_the_model_or_ddp_cuts_the_graph_alike(on_ranks):
    """DDPOptimizer cuts the graph where buckets end, whichever of the two is compiled."""
    graphs = on_ranks(count_graphs, 2)
    assert graphs == [graphs[0]] * 2 and len(set(graphs[0])) == 1 and graphs[0][0] > 1


def count_graphs(rank, world_size):
    from dist_common import models

    counts = []
    for compile_model in (True, False):
        torch._dynamo.reset()
        graphs = []

        def keep(graph, inputs, graphs=graphs):
            graphs.append(graph)
            return graph.forward

        model = models.Transformer(models.PRESETS["tiny"])
        if compile_model:
            compiled = DistributedDataParallel(torch.compile(model, backend=keep))
        else:
            compiled = torch.compile(DistributedDataParallel(model), backend=keep)
        compiled(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()
        counts.append(len(graphs))
    return counts


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
        pytest.param(skip_all_reduce, [GRADIENT, BYTES], marks=full),
        pytest.param(deal_all_ranks_the_same, [GRADIENT], marks=full),
    ],
)
def test_sabotage_fails_a_check(train, sabotage, failing):
    ended = train("--max-steps", 3, "--grad-accum-steps", 2, changes=[sabotage])
    assert 1 in ended.codes and not set(ended.codes) - {1, -signal.SIGTERM}, ended.stderr
    assert ended.stdout.splitlines()[-1] == "FAILED: " + "; ".join(failing)


MEAN_OF_MEANS = (
    "mean_loss = loss * dist.get_world_size() / tokens",
    "mean_loss = loss / (targets != data.IGNORED).sum() / len(micro_batches)",
)
SYNC_ALWAYS = (
    "contextlib.nullcontext() if last else ddp_model.no_sync()",
    "contextlib.nullcontext()",
)
NO_FACTOR = ("loss * dist.get_world_size() / tokens", "loss / tokens")


@pytest.mark.parametrize(
    ("change", "flags", "ranks", "failing"),
    [
        (MEAN_OF_MEANS, ["--whole-lines"], 2, GRADIENT),
        pytest.param(MEAN_OF_MEANS, [], 2, None, marks=full),
        pytest.param(SYNC_ALWAYS, [], 2, BYTES, marks=full),
        pytest.param(NO_FACTOR, [], 2, GRADIENT, marks=full),
        pytest.param(NO_FACTOR, [], 1, None, marks=full),
    ],
)
def test_the_exercises_of_the_page_turn_their_checks_red(
    run_script, tmp_path, change, flags, ranks, failing
):
    """Edits as the page asks for; the text is its default one, in sequences of equal length."""
    source = (REPO / TRAINING).read_text()
    assert source.count(change[0]) == 1
    (tmp_path / "edited.py").write_text(source.replace(*change))
    ended = run_script(
        str(tmp_path / "edited.py"), *flags, "--max-steps", 1, "--seq-len", 32,
        world_size=ranks, before=with_a_small_model(),
    )  # fmt: skip
    last = ended.stdout.splitlines()[-1]
    assert last == f"FAILED: {failing}" if failing else last.startswith("OK: 5 checks passed")


# a run that is stopped


@full
def test_sigterm_to_a_rank_and_its_data_workers_saves_too(train, tmp_path):
    """torchrun and SLURM signal a rank's whole process group, or all of its processes."""
    folder = tmp_path / "run"

    def act(pids):
        for pid in pids:
            for process in (*psutil.Process(pid).children(), psutil.Process(pid)):
                process.terminate()

    during = at_random_step(folder, act)
    ended = train("--num-workers", 2, "--output-dir", folder, during=during)
    assert ended.codes == [0, 0], ended.stderr
    assert newest_state(folder)["step"] == max(steps_in(folder)) < 24


@full
def test_a_signal_is_noticed_at_the_next_look_and_saves(train, tmp_path):
    folder = tmp_path / "run"
    arguments = ("--log-every", 4, "--save-every", 100, "--output-dir", folder)
    ended = train(*arguments, changes=[ask_to_stop_in(5)])
    assert ended.codes == [0, 0], ended.stderr
    assert newest_state(folder)["step"] == 8
    assert ended.stdout.splitlines()[-1].endswith("after step 8, asked to stop, saved")


@full
def test_a_signal_in_the_last_step_still_evaluates_and_ends_well(train, tmp_path):
    ended = train("--max-steps", 3, changes=[ask_to_stop_in(3)])
    assert ended.codes == [0, 0], ended.stderr
    assert re.fullmatch(
        r"OK: 5 checks passed, loss \S+ after step 3, trained to the end",
        ended.stdout.splitlines()[-1],
    )


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
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_a_loss_that_is_no_number_stops_the_run_and_names_step_and_rank(train, tmp_path, precision):
    """It is found some steps later, at the next look; no checkpoint is written in between."""

    def poison(script):
        summed, calls = script.summed_loss, []

        def poisoned(*args):
            calls.append(args)
            # Two calls check the gradient, one more alone; then there is one in each step.
            bad = torch.distributed.get_rank() == 1 and len(calls) == 3 + 4
            return summed(*args) * (float("nan") if bad else 1.0)

        script.summed_loss = poisoned

    ended = train(
        "--precision", precision, "--save-every", 3, "--log-every", 10,
        "--output-dir", tmp_path / "run", changes=[poison],
    )  # fmt: skip
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


@pytest.mark.parametrize("every", [3, 0])
def test_a_bit_flipped_in_one_replica_is_found_and_not_saved(train, tmp_path, every):
    """In step 4: the losses do not show it."""
    argv = ("--check-replicas-every", every, "--save-every", 3, "--output-dir", tmp_path / "run")
    ended = train(*argv, changes=[flip_a_bit_in(4)])
    found = "ddp_training.py: stopped: after step 6 ranks 0, 1 hold different weights, and no "
    assert (found in ended.stderr) == bool(every), ended.stdout + ended.stderr
    if every:
        assert newest_state(tmp_path / "run")["step"] == 3
    else:
        assert "FAILED: distinct sets of weights over all ranks" in ended.stdout


@full
def test_a_gradient_that_is_no_number_stops_too(train):
    def explode(script):
        clip, calls = torch.nn.utils.clip_grad_norm_, []

        def infinite(*args):
            calls.append(1)
            return clip(*args) * (float("inf") if len(calls) == 3 else 1.0)

        torch.nn.utils.clip_grad_norm_ = infinite

    ended = train(changes=[explode])
    (line,) = ended.stderr.splitlines()
    assert re.search(r"in step 3 the loss is [\d.]+ over all ranks, gradient norm inf", line)


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
        (["--preset", "13b"], "llama3-70b"),  # the list of what there is
        (["--global-batch-size", 24], "24 must be --micro-batch-size 8 x 2 ranks x --grad-accum"),
        (["--global-batch-size", 32, "--grad-accum-steps", 3],
         "x --grad-accum-steps 3 = 48: take that, or 2 steps"),
        (["--text-file", "{tmp}/none"], "--text-file {tmp}/none: No such file"),
        (["--text-file", "{tmp}/empty"], "--text-file {tmp}/empty is empty"),
        (["--text-file", "{tmp}/short"], "are fewer than one sequence of 128 tokens for each of 2"),
        (["--text-file", "{tmp}/lines"], "the test text's 15 bytes are fewer than one"),
        (["--seq-len", 300], "--seq-len must be at most 256"),
        (["--logger", "tensorboard"], "--logger needs --output-dir"),
        (["--profile", "3"], "--profile needs --output-dir"),
        (["--profile", "4-3"], "must be steps like 5-7 or 5, not '4-3'"),
        (["--profile", "4-"], "must be steps like 5-7 or 5, not '4-'"),
        (["--output-dir", "{tmp}/short/x"], "short/x cannot be written: Not a directory"),
    ]),
)  # fmt: skip
def test_bad_input_gets_one_line_and_writes_nothing(run_script, tmp_path, argv, says):
    (tmp_path / "empty").touch()
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


def age(folder):
    """Make a checkpoint look as those of this guide's first version: one checksum for one file."""
    manifest = folder / "checkpoints" / "step-00000001" / "manifest.json"
    facts = json.loads(manifest.read_text())
    del facts["files"]
    manifest.write_text(json.dumps({**facts, "sha256": "0" * 64}))


def age_by_a_version(folder):
    """Make it look as those of the version before: the place in the data stood in another file."""
    manifest = folder / "checkpoints" / "step-00000001" / "manifest.json"
    facts = json.loads(manifest.read_text())
    del facts["trained_tokens"]
    manifest.write_text(json.dumps(facts))


def replace_by_another_script(folder, run_script):
    shutil.rmtree(folder)
    assert run_script(MNIST, "--epochs", 1, "--output-dir", folder).codes == [0]


@full
@pytest.mark.parametrize(
    ("argv", "damage", "says"),
    [
        ([], None, "is not empty: name another folder, or add --resume"),
        (["--resume", "--seq-len", 64], None, "--seq-len is 64 here and 32 in the checkpoint"),
        (["--resume"], age, "in the format of an older version of this guide: start anew"),
        (["--resume"], age_by_a_version, "written by an older version of this guide: start anew"),
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
@pytest.mark.parametrize(
    "flags", [["--precision", "bf16-mixed"], ["--precision", "16-mixed", "--compile"]]
)
def test_it_runs_on_a_gpu(flags):
    command = ["python", TRAINING, *flags, "--device", "cuda"]
    ended = run_command(command, REPO, 300, CUDA_VISIBLE_DEVICES=GPUS)
    assert ended.codes == [0], ended.stdout + ended.stderr
    assert " cuda with nccl" in ended.stdout
