"""Four axes in one job: it trains like one process, and resumes in any layout."""

import json
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import helpers_templates as broken
import pytest
import torch
import torch.distributed as dist
from conftest import assert_one_line, load_script, results_of
from helpers_01 import trace_without_a_compiler
from helpers_templates import (
    DDP,
    FSDP,
    SMALL_JOB,
    checkpoints_in,
    in_step,
    kill_in,
    kill_in_save,
    rows_of,
    small_model,
    stop_in,
    write_text,
)
from torch.distributed.tensor.parallel import ParallelStyle
from torch.testing._internal.distributed.fake_pg import FakeStore

from dist_common import check, model, train

HYBRID = "05-advanced/hybrid_parallelism.py"
full = pytest.mark.full
FOUR_LAYERS = model.Config(256, 32, 4, 4, 2, 64, 256)


@pytest.fixture
def run_template(run_script, tmp_path):
    """Run a template on the small job, with a model of four layers."""
    text = write_text(tmp_path)

    def run(*argv, ranks=2, changes=(), script=HYBRID, **options):
        def use_four_layers(_):
            model.PRESETS["tiny"] = FOUR_LAYERS

        words = ("--text-file", text, *SMALL_JOB, *argv)
        before = small_model(use_four_layers, *changes)
        return run_script(script, *words, world_size=ranks, before=before, **options)

    return run


def assert_ok(ended):
    assert not any(ended.codes), ended.stdout + ended.stderr
    return ended


def use_machines_of_two_ranks(script):
    os.environ["LOCAL_WORLD_SIZE"] = "2"


# The same training as one process

LAYOUTS = [
    (2, "--pp 2 --schedule interleaved --precision bf16-mixed"),
    *(
        pytest.param(*row, marks=full)
        for row in (
            (4, "--tp 2 --sharding full"),
            (3, "--sharding full --global-batch-size 7 --seed 3"),
            (2, "--cp 2 --activation-checkpointing full --sharding replicate"),
            (4, "--tp 2 --pp 2 --schedule zero-bubble"),
            (4, "--pp 4 --schedule gpipe --global-batch-size 6"),
            (4, "--sharding hybrid --global-batch-size 15"),
            (8, "--tp 2 --cp 2 --pp 2 --global-batch-size 9"),
        )
    ),
]


@pytest.mark.parametrize(("ranks", "flags"), LAYOUTS)
def test_every_layout_trains_like_one_process(run_template, ranks, flags):
    """Also where micro-batches are short: the global batch divides by no layout."""
    changes = [use_machines_of_two_ranks] if "hybrid" in flags else []
    words = ("--max-steps", 3, *flags.split())
    ended = assert_ok(run_template(*words, ranks=ranks, changes=changes))
    assert not ended.stderr
    assert "OK: 4 checks passed, loss " in ended.stdout


@full
def test_20_steps_have_the_losses_of_ddp_training(run_template, tmp_path):
    words = ("--global-batch-size", 8, "--max-steps", 20, "--eval-every", 20)
    folder = tmp_path / "ddp"
    assert_ok(run_template(*words, "--output-dir", folder, ranks=1, script=DDP))
    expected, tested = rows_of(folder), rows_of(folder, "test_loss")
    assert expected[20] < 0.7 * expected[1]
    for ranks, layout in (
        (2, "--cp 2 --sharding replicate"),
        (4, "--tp 2 --pp 2 --schedule zero-bubble"),
    ):
        folder = tmp_path / layout.replace(" ", "")
        flags = (*layout.split(), "--output-dir", folder)
        assert_ok(run_template(*words, *flags, ranks=ranks))
        losses = rows_of(folder)
        assert losses.keys() == expected.keys()
        for step, loss in losses.items():
            assert loss == pytest.approx(expected[step], rel=1e-5), (layout, step)
        test_losses = rows_of(folder, "test_loss")
        assert test_losses[20] == pytest.approx(tested[20], rel=1e-5), layout


@full
@pytest.mark.parametrize("axis", ["--tp", "--cp"])
def test_compiled_blocks_train_like_one_process(run_template, axis):
    """Each block is one graph, with the axis's collectives inside."""
    words = (axis, 2, "--compile", "--max-steps", 2)
    words += ("--activation-checkpointing", "full")
    changes = [trace_without_a_compiler]
    ended = assert_ok(run_template(*words, changes=changes))
    assert "OK: 4 checks passed" in ended.stdout
    graphs = {line for line in ended.stderr.splitlines() if "graph with" in line}
    assert graphs == {"graph with 7 products"}, ended.stderr


# Sabotage: each change breaks one thing, and the self-check must fail


def sum_no_gradients(script):
    """Each rank shards its weights over itself alone."""
    script.build_mesh = lambda args, run: script.init_device_mesh(
        run.device.type, (run.world_size, 1), mesh_dim_names=("other", "shard")
    )


def step_further_on_rank_1(script):
    rate = script.lr_at
    script.lr_at = lambda step, args: rate(step, args) * (1 + dist.get_rank())


def take_ten_times_the_rate(script):
    set_lr = script.set_lr
    script.set_lr = lambda optimizer, rate: set_lr(optimizer, 10 * rate)


def count_a_token_less(script):
    accumulate = script.accumulate_gradient

    def accumulate_and_miscount(*given):
        loss_sum, num_tokens = accumulate(*given)
        return loss_sum, num_tokens - 1

    script.accumulate_gradient = accumulate_and_miscount


def ignore_a_micro_batch(script):
    accumulate = script.accumulate_gradient

    def accumulate_less(stages, schedule, micro_batches, args):
        inputs, targets = micro_batches[0]
        first = inputs, torch.full_like(targets, -100)
        return accumulate(stages, schedule, [first, *micro_batches[1:]], args)

    script.accumulate_gradient = accumulate_less


def keep_the_norm_of_a_stage(script):
    """Each stage clips by the norm of its own gradients."""
    clip = script.clip_grad_norm_

    def clip_alone(model, args):
        real, script.dist = (
            script.dist,
            SimpleNamespace(
                all_reduce=lambda square: square.mul_(dist.get_world_size() / args.pp),
                get_world_size=dist.get_world_size,
            ),
        )
        norm = clip(model, args)
        script.dist = real
        return norm

    script.clip_grad_norm_ = clip_alone


def clip_nothing(script):
    torch.nn.utils.clip_grads_with_norm_ = lambda *_: None


def divide_by_micro_batches(script):
    build = script.pipelining.Schedule1F1B

    def build_scaled(*given, scale_grads, **more):
        return build(*given, scale_grads=True, **more)

    script.SCHEDULES["1f1b"] = build_scaled


def keep_the_gradients_of_keys(script):
    """Each rank keeps its queries' part of the gradient of its keys and values."""
    script.Partial = script.Replicate


def give_all_ranks_the_same_tokens(script):
    build = script.build_model

    def build_without_positions(*given):
        model, stages = build(*given)
        for stage in stages:
            stage.positions = torch.arange(len(stage.positions))
        return model, stages

    script.build_model = build_without_positions


def shift_no_targets(script):
    accumulate = script.accumulate_gradient

    def accumulate_unshifted(stages, schedule, micro_batches, args):
        same = [(inputs, inputs) for inputs, _ in micro_batches]
        return accumulate(stages, schedule, same, args)

    script.accumulate_gradient = accumulate_unshifted


def give_tensor_ranks_other_samples(script):
    make = script.data.GlobalBatches

    class Dealt(make):
        def __init__(self, dataset, args, run, seen=0):
            run = script.replace(run, rank=dist.get_rank(), world_size=2)
            super().__init__(dataset, args, run, seen)

    script.data.GlobalBatches = Dealt


BATCH = "--global-batch-size 8"
SABOTAGES = [
    (keep_the_norm_of_a_stage, "--pp 2", "gradient norm"),
    *(
        pytest.param(*row, marks=full)
        for row in (
            (sum_no_gradients, "--sharding full", "gradient norm"),
            (keep_the_gradients_of_keys, "--cp 2", "gradient norm"),
            (step_further_on_rank_1, "--pp 2", "weight change"),
            (take_ten_times_the_rate, "--tp 2", "weight change"),
            (count_a_token_less, "--pp 2", "loss"),
            (ignore_a_micro_batch, "--pp 2", "loss"),
            (clip_nothing, "--tp 2", "clipped gradient"),
            (divide_by_micro_batches, "--pp 2", "gradient norm"),
            (give_all_ranks_the_same_tokens, "--cp 2", "loss"),
            (shift_no_targets, "--tp 2", "loss"),
            (give_tensor_ranks_other_samples, "--tp 2", "loss"),
            (broken.count_local_tokens, "", "loss"),
            (broken.drop_a_micro_batch, f"--tp 2 {BATCH}", "loss"),
        )
    ),
]


@pytest.mark.parametrize(("sabotage", "flags", "error"), SABOTAGES)
def test_a_broken_axis_is_seen(run_template, sabotage, flags, error):
    words = ("--max-steps", 2, *flags.split())
    ended = run_template(*words, changes=[sabotage])
    assert 1 in ended.codes, ended.stdout + ended.stderr
    line = ended.stderr.splitlines()[-1]
    assert line.startswith("hybrid_parallelism.py: error: self-check failed"), (
        ended.stderr
    )
    names = "loss|gradient norm|clipped gradient|weight change"
    errors = dict(re.findall(rf"({names}) ([\d.e+-]+|nan|inf)", line))
    tolerances = zip(errors, check.TOLERANCES["32-true"], strict=True)
    failing = [name for name, least in tolerances if float(errors[name]) > 10 * least]
    assert any(error in name for name in failing), line


class Untouched(ParallelStyle):
    def __init__(self, **options):
        pass

    def _apply(self, module, mesh):
        return module


def gather_for_each_matrix(script):
    """The gradient stays right; q, k and v then gather their input once each."""
    columns = script.ColwiseParallel
    script.PrepareModuleOutput = Untouched
    script.ColwiseParallel = lambda **layouts: columns(
        **{"input_layouts": script.Shard(1), **layouts}
    )


@full
@pytest.mark.parametrize("change", [None, gather_for_each_matrix])
def test_a_norm_is_gathered_once_for_all_its_readers(run_template, tmp_path, change):
    """Of tensor parallelism: two gathers and two scatters in a block, each way."""
    changes = [change] if change else []
    words = ("--tp", 2, "--max-steps", 2, "--output-dir", tmp_path / "run")
    assert_ok(run_template(*words, changes=changes))
    calls = results_of(tmp_path / "run")["metrics"]["collectives_per_step"]
    # The embedding scatters and the head gathers, and each does the other backward.
    expected = 4 * FOUR_LAYERS.num_layers + 2
    gathered_once = calls["all_gather"]["calls"] == expected
    assert gathered_once == (change is None), calls
    if not change:
        assert calls["reduce_scatter"]["calls"] == expected


# Stop, kill, resume


def straight_run(run_template, folder, *flags, **options):
    words = ("--global-batch-size", 12, "--eval-every", 4, "--save-every", 2)
    words += (*flags, "--output-dir", folder)
    return assert_ok(run_template(*words, **options))


def resumed(folder, *flags):
    words = ("--global-batch-size", 12, "--eval-every", 4, "--resume")
    return (*words, "--save-every", 2, "--output-dir", folder, *flags)


@full
def test_a_run_that_is_stopped_or_killed_resumes_bitwise(run_template, tmp_path):
    """Three signals to one rank; kills in a step, in a save, and twice in a row."""
    straight, stopped, killed = (tmp_path / name for name in ("a", "b", "c"))
    ranks, layout = 2, ["--pp", "2", "--schedule", "interleaved", "--async-save"]
    straight_run(run_template, straight, *layout, ranks=ranks)
    signals = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    for step, number in zip((1, 3, 6), signals, strict=True):
        flags = (*resumed(stopped, *layout), "--log-every", 50)
        change = stop_in(step, number)
        ended = assert_ok(run_template(*flags, ranks=ranks, changes=[change]))
        assert f"after step {step}, stopped" in ended.stdout
    assert_ok(run_template(*resumed(stopped, *layout), ranks=ranks))
    flags = resumed(killed, *layout)
    for change in (kill_in(1), kill_in(5), kill_in_save(6), kill_in_save(6)):
        ended = run_template(*flags, ranks=ranks, changes=[change])
        assert set(ended.codes) <= {-signal.SIGKILL, -signal.SIGTERM}, ended.stderr
    assert checkpoints_in(killed)[-1] == "step-00000004"
    ended = assert_ok(run_template(*flags, ranks=ranks))
    assert f"resuming from {killed}/checkpoints/step-00000004" in ended.stdout
    for folder in (stopped, killed):
        assert rows_of(folder) == rows_of(straight), "bitwise"
        assert rows_of(folder, "test_loss") == rows_of(straight, "test_loss")


@full
def test_other_layouts_resume_the_run(run_template, tmp_path):
    """From tp 2 to pp 2, to another template, to cp 2."""
    straight, moved = tmp_path / "a", tmp_path / "b"
    straight_run(run_template, straight, ranks=1, script=DDP)
    for step, script, flags in (
        (2, HYBRID, "--tp 2"),
        (4, HYBRID, "--pp 2 --schedule interleaved"),
        (6, FSDP, ""),
        (8, HYBRID, "--cp 2 --sharding replicate"),
    ):
        changes = [stop_in(step)] if step < 8 else []
        words = resumed(moved, *flags.split())
        assert_ok(run_template(*words, script=script, changes=changes))
    losses = rows_of(moved)
    for step, loss in rows_of(straight).items():
        assert losses[step] == pytest.approx(loss, rel=1e-5)


def write_random_state(folder: Path):
    """Return a change: each rank writes what it would draw after step 4."""

    def draw():
        (folder / f"draws-{dist.get_rank()}").write_text(str(torch.rand(1).item()))

    return in_step(4, draw)


@full
def test_ranks_of_tp_share_random_numbers_and_the_others_do_not(run_template, tmp_path):
    change = write_random_state(tmp_path)
    words = ("--tp", 2, "--max-steps", 4, "--no-self-check")
    assert_ok(run_template(*words, ranks=4, changes=[change]))
    draws = [(tmp_path / f"draws-{rank}").read_text() for rank in range(4)]
    assert draws[0] == draws[1] != draws[2] == draws[3], draws


# Process groups and buffers


def test_an_axis_of_size_1_makes_no_groups(in_a_fork):
    """On 64 ranks: 32 groups of tp, 16 of the rest, and none of one rank."""

    def count_groups():
        dist.destroy_process_group()  # the fork's own, of one rank
        dist.init_process_group("fake", rank=0, world_size=64, store=FakeStore())
        script = load_script(HYBRID)
        made = []
        new_group = torch.distributed.device_mesh.new_group

        def note(ranks, **options):
            made.append(len(ranks))
            return new_group(ranks, **options)

        torch.distributed.device_mesh.new_group = note
        args = SimpleNamespace(tp=2, pp=4, cp=1, dp=8, sharding="grad-op")
        run = SimpleNamespace(
            world_size=64, local_world_size=8, device=torch.device("cpu")
        )
        mesh = script.build_mesh(args, run)
        return made, mesh.mesh_dim_names

    made, axes = in_a_fork(count_groups)
    assert axes == ("pp", "shard", "tp")
    assert sorted(made) == [2] * 32 + [4] * 16 + [8] * 8


def test_hybrid_sharding_divides_a_replica_over_a_machine(in_a_fork):
    """Two machines of 4 ranks, tp 2: shards of one machine, replicas on two."""

    def replicas():
        dist.destroy_process_group()
        dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
        script = load_script(HYBRID)
        args = SimpleNamespace(tp=2, pp=1, cp=1, dp=4, sharding="hybrid")
        run = SimpleNamespace(
            world_size=8, local_world_size=4, device=torch.device("cpu")
        )
        mesh = script.build_mesh(args, run)
        return mesh["shard"].mesh.tolist(), mesh["replicate"].mesh.tolist()

    assert in_a_fork(replicas) == ([0, 2], [0, 4])


@full
def test_receive_buffers_grow_with_the_micro_batches(run_template, tmp_path):
    """As the page says: one of B x T x D numbers per micro-batch and direction."""

    def count(script):
        build = script.build_schedule

        def build_and_keep(*given):
            schedule = build(*given)
            finish = train.Log.finish

            def finish_and_count(log):
                stage = schedule._stage
                infos = [stage.args_recv_info, stage.grad_recv_info]
                buffers = [b for kind in infos for info in kind.values() for b in info]
                sizes = [getattr(info, "buffer", None) for info in buffers]
                total = sum(b.nbytes for b in sizes if b is not None)
                path = tmp_path / f"buffers-{dist.get_rank()}"
                path.write_text(json.dumps(total))
                return finish(log)

            train.Log.finish = finish_and_count
            return schedule

        script.build_schedule = build_and_keep

    words = ("--pp", 2, "--global-batch-size", 8, "--max-steps", 2)
    assert_ok(run_template(*words, changes=[count]))
    for rank in (0, 1):  # rank 0 receives gradients, rank 1 activations
        total = json.loads((tmp_path / f"buffers-{rank}").read_text())
        assert total == 4 * (2 * 32 * 32 * 4)


# Clear errors

ZERO_BUBBLE = "--pp 2 --schedule zero-bubble"
REFUSED = [
    (2, "--tp 4", "4 does not divide the 2 ranks: --tp 4 --pp 1 --cp 1"),
    (2, "--pp 2 --global-batch-size 2", "--schedule 1f1b: Number of microbatches (1)"),
    (
        2,
        "--pp 2 --schedule zero-bubble --sharding full",
        "--schedule zero-bubble divides backward in two: it needs --sharding grad-op",
    ),
    *(
        pytest.param(*row, marks=full)
        for row in (
            (4, "--tp 4", "4 does not divide the 2 key and value heads: --tp 4"),
            (3, "--pp 3", "3 does not divide the 4 layers: --pp 3 --schedule 1f1b"),
            (2, "--cp 2 --seq-len 33", "2 does not divide the 33 tokens of --seq-len"),
            (2, "--precision 16-mixed", "invalid choice: '16-mixed'"),
            (2, "--preset 124m", "invalid choice: '124m'"),
            (2, f"{ZERO_BUBBLE} --sharding hybrid", "divides backward in two: it"),
            (2, f"{ZERO_BUBBLE} --compile", "divides backward in two: it"),
            (
                2,
                f"{ZERO_BUBBLE} --activation-checkpointing full",
                "divides backward in two: it",
            ),
        )
    ),
]


@pytest.mark.parametrize(("ranks", "flags", "says"), REFUSED)
def test_a_layout_that_cannot_train_gets_one_line(run_template, ranks, flags, says):
    words = flags.split()
    ended = run_template(*words, ranks=ranks)
    assert set(ended.codes) <= {2, -signal.SIGTERM}
    assert_one_line(ended, says, "hybrid_parallelism.py")


@full
def test_zero_bubble_over_full_sharding_still_loses_gradients(run_template):
    """When PyTorch corrects this, the refusal above can go."""

    def allow(script):
        script.FREED = ()
        shard = script.fully_shard

        def shard_and_free(unit, **options):
            return shard(unit, **{**options, "reshard_after_forward": True})

        script.fully_shard = shard_and_free

    words = ("--pp", 2, "--schedule", "zero-bubble", "--global-batch-size", 8)
    ended = run_template(*words, "--sharding", "grad-op", changes=[allow])
    assert 1 in ended.codes, ended.stdout


def test_it_has_at_most_30_flags(monkeypatch):
    script, parsers = load_script(HYBRID), []
    monkeypatch.setattr(
        script.cli.ArgumentParser, "parse_args", lambda parser: parsers.append(parser)
    )
    monkeypatch.setattr(script.cli, "validate_training_args", lambda args: None)
    script.parse_args()
    flags = [action for action in parsers[0]._actions if action.dest != "help"]
    assert len(flags) <= 30
