"""Module 02: a checkpoint is whole or it is not there, however it was written."""

import os
import random
import resource
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import assert_one_line, load_script, results_of
from helpers_02 import (
    ALTERED,
    BATCH,
    CHECKPOINT,
    INCOMPLETE,
    LOAD,
    NEWEST,
    SAVE,
    assert_ok,
    flip_a_bit,
    quick,
    remove_half,
    runner,
    saved_copy,
)  # fmt: skip

full = pytest.mark.full


@pytest.fixture
def run(run_script):
    return runner(run_script)


@pytest.fixture(scope="module")
def once():
    return {}


@pytest.fixture
def saved(run, once, tmp_path, tmp_path_factory):
    return saved_copy(run, once, tmp_path, tmp_path_factory)


# Four ways to save


def but_not_by_process(script):
    """Starting the processes that write takes seconds."""
    del script.KINDS["async-process"]


@full
def test_compare_on_three_ranks(run):
    options = ("--max-steps", 1, "--parity-steps", 4, *BATCH, "--preset", "tied")
    ended = run(CHECKPOINT, *options, world_size=3, before=but_not_by_process)
    assert_ok(ended, "OK: 10 checks passed")


@full
def test_no_rank_builds_the_whole_model(run, tmp_path):
    """Sharded, all weights and moments of a rank are half of the model's, and none was larger."""

    def before(script):
        build = script.checkpoint_job.build

        def checked(job, seed, shard):
            model = build(job, seed, shard)
            if shard is script.shard:
                held = sum(p.to_local().numel() for p in model.parameters())
                assert held <= job.config.num_parameters() / 2 + 1000
            return model

        script.checkpoint_job.build = checked
        script.checkpoint_job.Transformer = on_meta(script.checkpoint_job.Transformer)

    def on_meta(whole):
        def build(config):
            model = whole(config)
            in_a_reference = not next(model.parameters()).is_meta
            assert not in_a_reference, "the whole model was built in memory"
            return model

        return build

    options = ("--max-steps", 1, "--parity-steps", 0, "--dir", tmp_path / "run")
    ended = run(CHECKPOINT, "save", *options, world_size=2, before=before)
    assert_ok(ended, "not compared with one process")
    assert "not run" in ended.stdout


# Killed in the middle of the second save


def end_process(*_):
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(10)


def kill_in_a_shard(script, armed):
    from torch.distributed.checkpoint import filesystem

    write, calls = filesystem._write_item, []

    def killing(*args, **kwargs):
        calls.extend(armed)
        return end_process() if len(calls) == 20 else write(*args, **kwargs)

    filesystem._write_item = killing


def kill_in_the_file(script, armed):
    write = torch.save

    def killing(state, file):
        write(state, file)
        if armed:
            file.truncate(100_000)
            end_process()

    torch.save = killing


def kill_before_the_rename(script, armed):
    rename = Path.rename
    Path.rename = lambda *args: end_process() if armed else rename(*args)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "kill", "ranks", "left"),
    [
        ("sharded", kill_before_the_rename, "0", 1),
        *(
            pytest.param(*case, marks=full)
            for case in (
                ("sharded", kill_in_a_shard, "1", 1),
                ("full", kill_in_the_file, "0", 1),
                ("async", kill_in_a_shard, "01", 1),
            )
        ),
    ],
)
def test_a_save_that_is_killed_leaves_the_previous_checkpoint(
    run, tmp_path, kind, kill, ranks, left
):
    folder = tmp_path / "run"

    def before(script):
        armed = []
        sealed = script.checkpoint.sealed

        def arm(directory, step, *args):
            armed.extend([1] * (step == 2))
            return sealed(directory, step, *args)

        script.checkpoint.sealed = arm
        if os.environ["RANK"] in ranks:
            kill(script, armed)

    ended = run(*SAVE, "--kind", kind, "--dir", folder, world_size=2, before=before)
    assert -signal.SIGKILL in ended.codes and 0 not in ended.codes, ended.stdout + ended.stderr
    assert (folder / ".partial-00000002").exists() == (left == 1)
    ended = run(*LOAD, "--dir", folder)
    assert_ok(ended, f"resuming from {folder}/step-0000000{left}")
    assert ended.stderr == ""
    if kill == kill_before_the_rename:  # and the same command once more goes on
        assert_ok(run(*SAVE, "--dir", folder, world_size=2), "after step 3")
        names = sorted(path.name for path in folder.iterdir())
        assert names == ["step-00000001", NEWEST, "step-00000003"]


@full
def test_a_run_killed_at_any_moment_goes_on(run, tmp_path):
    folder, delay = tmp_path / "run", random.uniform(0, 0.5)
    print(f"killed {delay:.3f} s after the first checkpoint")

    def kill(pids):
        deadline = time.monotonic() + 60
        while not (folder / "step-00000001").exists() and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(delay)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    ended = run(
        CHECKPOINT, "save", *BATCH, "--kind", "async", "--dir", folder, "--max-steps", 500,
        "--save-every", 1, world_size=2, during=kill,
    )  # fmt: skip
    assert ended.codes == [-signal.SIGKILL] * 2, ended.stderr
    newest = max(path.name for path in folder.glob("step-*"))
    assert_ok(run(*LOAD, "--dir", folder), f"resuming from {folder}/{newest}")


@full
def test_a_full_disk_is_one_line(run, tmp_path):
    def before(script):
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))

    ended = run(*SAVE, "--dir", tmp_path / "run", world_size=2, before=before)
    assert_one_line(ended, "cannot write a file: is the disk", "fsdp_checkpoint.py")
    assert not list((tmp_path / "run").glob("step-*"))


# Damaged


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        ("__1_0.distcp", flip_a_bit, f"{ALTERED} (__1_0.distcp does not match"),
        *(
            pytest.param(*case, marks=full)
            for case in (
                ("manifest.json", remove_half, f"{INCOMPLETE} (JSONDecodeError: "),
                ("__1_0.distcp", Path.unlink, f"{INCOMPLETE} (FileNotFoundError: "),
            )
        ),
    ],
)
def test_a_damaged_file_is_named_and_the_previous_checkpoint_taken(run, saved, name, damage, says):
    damage(saved / NEWEST / name)
    ended = run(*LOAD, "--dir", saved, world_size=2)
    assert_ok(ended, f"resuming from {saved}/step-00000001")
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"warning: skipped {saved}/{NEWEST}: {says}")
    assert name in line or "JSON" in line
    if damage == remove_half:  # saving goes on from there too, and puts a whole one in its place
        assert_ok(run(*SAVE, "--dir", saved, "--max-steps", 1), "after step 2")
        ended = run(*LOAD, "--dir", saved)
        assert_ok(ended, f"{NEWEST} holds 1 shard(s)")
        assert ended.stderr == ""


@full
def test_when_all_are_damaged_each_is_named(run, saved):
    for step, damage in ((1, flip_a_bit), (2, Path.unlink)):
        damage(saved / f"step-0000000{step}" / "__1_0.distcp")
    for action in (LOAD, SAVE):
        ended = run(*action, "--dir", saved, world_size=2)
        assert_one_line(ended, "no checkpoint can be used: ", Path(action[0]).name)
        assert f"{NEWEST}: {INCOMPLETE} (FileNotFoundError: " in ended.stderr
        assert f"step-00000001: {ALTERED} (__1_0.distcp does not match" in ended.stderr


@pytest.mark.gpu_ready
@pytest.mark.parametrize("gpu", [False, True])
def test_an_async_save_copies_to_pinned_memory_where_there_is_a_gpu(monkeypatch, gpu):
    script = load_script(CHECKPOINT)
    monkeypatch.setattr(script.torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(script, "DefaultStager", lambda options: options)  # a real one needs it
    options = script.stager.__wrapped__()
    assert (options.use_pinned_memory, options.use_non_blocking_copy) == (gpu, gpu)


# Sabotage


def copy_nothing(script):
    def late(state, async_stager, **options):
        def write():
            time.sleep(1.5)  # training goes on meanwhile
            script.dcp.save(state, **options)

        return SimpleNamespace(result=write)

    script.dcp.async_save = late


def write_the_weights_twice(script):
    save = script.dcp.save
    script.dcp.save = lambda state, **options: save(state | {"again": state["model"]}, **options)


def let_ranks_train_apart(script):
    script.fully_shard = lambda module: module


@pytest.mark.parametrize(
    ("world_size", "sabotage", "failing"),
    [
        (1, write_the_weights_twice, ["sharded: MB in all", "sharded: MB by one rank"]),
        pytest.param(
            2, let_ranks_train_apart, ["never stopped: largest error of a loss"], marks=full
        ),
        pytest.param(1, copy_nothing, ["async: largest error of a loss"], marks=full),
    ],
)
def test_sabotage_of_compare_fails_a_check(run, tmp_path, world_size, sabotage, failing):
    options = ("--max-steps", 1, *BATCH, "--output-dir", tmp_path / "run")

    def before(script):
        sabotage(script)
        tested = failing[0].partition(":")[0]
        for kind in [kind for kind in script.KINDS if kind not in ("sharded", tested)]:
            del script.KINDS[kind]

    ended = run(CHECKPOINT, *options, world_size=world_size, before=before)
    assert 1 in ended.codes, ended.stdout + ended.stderr
    failed = [c["name"] for c in results_of(tmp_path / "run")["checks"] if not c["ok"]]
    assert set(failing) <= set(failed), ended.stdout


# Bad input


@pytest.mark.parametrize(
    ("world_size", "argv", "says"),
    quick(
        2,
        [
            (1, ("save",), "save needs --dir"),
            (1, ("save", "--dir", "/proc/x"), "/proc/x/step-00000002: No such file or directory"),
            (
                2,
                ("save", "--dir", "x", "--global-batch-size", 5),
                "5 cannot be dealt evenly to 2 ra",
            ),
        ],
    ),
)
def test_bad_input_is_one_line(run, monkeypatch, world_size, argv, says):
    monkeypatch.chdir(Path(__file__).parent.parent)
    ended = run(CHECKPOINT, *argv, world_size=world_size)
    assert_one_line(ended, says, "fsdp_checkpoint.py")
