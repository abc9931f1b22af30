"""Module 02: whoever loads a checkpoint, on whatever ranks, trains the same."""

from pathlib import Path

import pytest
import torch
from conftest import REPO, assert_one_line, load_script, results_of
from helpers_02 import (
    LOAD,
    NEWEST,
    RESHARD,
    SAVE,
    assert_ok,
    quick,
    runner,
    saved_copy,
    tensors_of,
)  # fmt: skip

from legacy_common import models

NARROW = models.TransformerConfig(256, 32, 2, 4, 2, 64, 64)
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


@pytest.mark.full
@pytest.mark.parametrize(
    ("world_size", "kind", "loads"),
    [
        (2, "sharded", [(3, "fsdp")]),
        *(pytest.param(*case, marks=full) for case in ((2, "full", [(1, "ddp"), (4, "tp-fsdp")]),)),
    ],
)
def test_other_ranks_and_strategies_train_as_one_process(run, tmp_path, world_size, kind, loads):
    """The script compares with a process that ran from the first step; tolerance 1e-5."""
    assert_ok(run(*SAVE, "--dir", tmp_path / "run", "--kind", kind, world_size=world_size))
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == ["step-00000001", NEWEST]
    for ranks, strategy in loads:
        ended = run(*LOAD, "--dir", tmp_path / "run", "--strategy", strategy, world_size=ranks)
        assert_ok(ended, f"resuming from {tmp_path}/run/{NEWEST}")
        assert ended.stdout.splitlines()[-1].endswith("after step 4")


@full
def test_shards_to_one_file_and_back(run, saved, tmp_path):
    """The script compares bitwise, with PyTorch's own readers; the last one can be resumed."""
    kinds = ("2 shard(s)", "one file", "3 shard(s)")
    for number, ranks in ((1, 2), (2, 3)):
        folders = ("--dir", tmp_path / f"{number}", "--to", tmp_path / f"{number + 1}")
        if number == 1:
            saved.rename(tmp_path / "1")
        ended = run(RESHARD, "convert", *folders, world_size=ranks)
        for folder in (number, number + 1):
            line = f"{folder}/{NEWEST}\n{NEWEST} holds {kinds[folder - 1]}\n"
            assert_ok(ended, line)
    assert_ok(run(*LOAD, "--dir", tmp_path / "3"), "after step 4")
    one, three = (tensors_of(tmp_path / number / NEWEST) for number in "13")
    assert one.keys() == three.keys() and all(one[name].equal(three[name]) for name in one)


def clipping_says(rank, world_size):
    """Return how clip_grad_norm_ fails on gradients under FSDP and tensor parallelism."""
    model = models.Transformer(NARROW)
    load_script(RESHARD).shard_by("tp-fsdp", torch.device("cpu"))(model)
    model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    with pytest.raises(RuntimeError) as refused:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return str(refused.value)


@full
def test_pytorch_does_not_clip_over_two_meshes(on_ranks):
    """As the page says; when this turns red, it does, and the page can say so."""
    symptom = "All operands in aten.stack.default must have the same mesh"
    assert symptom in (REPO / "02-fsdp" / "fsdp_reshard.md").read_text()
    assert all(symptom in said for said in on_ranks(clipping_says, 2))


# Sabotage


def forget_the_moments(script):
    load = script.load

    def forgetting(found, run):
        load(found, run)
        for kept in run.optimizer.state.values():
            kept["exp_avg"].zero_()

    script.load = forgetting


def read_a_shard_shifted(script):
    load = script.dcp.load

    def shifted(state, **options):
        load(state, **options)
        if "model" in state:  # not when the check reads tensors alone
            local = state["model"]["blocks.1.up.weight"].to_local()
            local.copy_(local.roll(1, 0))

    script.dcp.load = shifted


@pytest.mark.parametrize(
    "sabotage",
    [
        forget_the_moments,
        pytest.param(read_a_shard_shifted, marks=full),
    ],
)
def test_sabotage_of_loading_fails_the_check(run, saved, sabotage):
    ended = run(*LOAD, "--dir", saved, before=sabotage)
    assert ended.codes == [1], ended.stderr
    assert ended.stdout.splitlines()[-1] == "FAILED: largest error of a loss"


@full
def test_sabotage_of_converting_fails_the_check(run, saved, tmp_path):
    flags = ("--dir", saved, "--to", tmp_path / "to", "--output-dir", tmp_path / "run")
    ended = run(RESHARD, "convert", *flags, before=read_a_shard_shifted)
    assert ended.codes == [1], ended.stdout + ended.stderr
    failed = [c["name"] for c in results_of(tmp_path / "run")["checks"] if not c["ok"]]
    assert failed == ["tensors equal, bitwise"]


# Bad input


@pytest.mark.parametrize(
    ("world_size", "argv", "says"),
    quick(
        2,
        [
            (1, ("load",), "load needs --dir"),
            (2, ("--dir", "nowhere"), "there is no checkpoint in nowhere"),
            (1, ("--dir", "SAVED", "--strategy", "tp-fsdp"), "needs an even number of ranks"),
            (2, ("--dir", "SAVED", "--preset", "124m"), "wk.weight is [64, 128] there, [768,"),
        ],
    ),
)
def test_bad_input_is_one_line(run, saved, monkeypatch, world_size, argv, says):
    monkeypatch.chdir(Path(__file__).parent.parent)
    argv = [saved if word == "SAVED" else word for word in argv]
    ended = run(RESHARD, *argv, world_size=world_size)
    assert_one_line(ended, says, "fsdp_reshard.py")
