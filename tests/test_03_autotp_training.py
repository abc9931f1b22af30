"""autotp_training.py: cut by DeepSpeed or whole, the same gradient and losses, and the bytes."""

import dataclasses
import importlib
import os
import sys

import pytest
import torch
from conftest import GPUS, REPO, assert_one_line, free_port, results_of, run_command
from helpers_03 import deepspeed_in_the_parent, first_is_quick, small

pytestmark = pytest.mark.xdist_group("transformers")  # which takes seconds to import

SCRIPT = "03-deepspeed/autotp_training.py"
SMALL = ("--micro-batch-size", 2, "--seq-len", 16, "--max-steps", 3)
KV_HEADS = 2  # the smallest Llama here must have one for each part


@pytest.fixture(scope="module", autouse=True)
def imported():
    names = "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama"
    with deepspeed_in_the_parent(*names):
        yield


def two_heads(script):
    """Make the preset tiny a smaller one, with a key-value head for each of two parts.

    Its head is tied, as 1b's is: the script has to untie it.
    """
    small(script)
    presets = script.PRESETS
    changes = {"num_kv_heads": KV_HEADS, "tied_embeddings": True}
    presets["tiny"] = dataclasses.replace(presets["tiny"], **changes)


@pytest.mark.parametrize(
    ("world_size", "tp", "stage"),
    [(2, 2, 1)]
    + [pytest.param(*case, marks=pytest.mark.full)
       for case in [(2, 1, 2), (2, 2, 0), (4, 2, 1)]],
)  # fmt: skip
def test_parts_and_replicas_train_as_one_process(run_script, tmp_path, world_size, tp, stage):
    ended = run_script(
        SCRIPT, *SMALL, "--tp", tp, "--zero-stage", stage, "--output-dir", tmp_path / "run",
        world_size=world_size, before=two_heads,
    )  # fmt: skip
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    assert ended.stderr == "" and "AutoTP" not in ended.stdout
    measured = {
        check["name"]: check["measured"] for check in results_of(tmp_path / "run")["checks"]
    }
    # 2 layers of width 32, feed-forward 88, vocabulary 256, 2 key-value heads of 16
    linear = 2 * (4 * 32 * 32 + 3 * 32 * 88) + 256 * 32
    assert measured["bytes of weights"] == 4 * (256 * 32 + 5 * 32 + linear // tp)
    assert measured["all-reduces in forward"] == (tp > 1) * 2 * 2
    assert measured["all-reduces in backward"] == (tp > 1) * (5 * 2 + 1)


def on_the_engine(change):
    def sabotage(script):
        start = script.start_engine

        def broken(model, args):
            engine = start(model, args)
            change(engine)
            return engine

        script.start_engine = broken

    return sabotage


def shift_a_weight(engine):
    weight = engine.module.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data.roll(1, 0)


def keep_a_weight_more(script):
    train = script.train

    def broken(engine, batches):
        losses = train(engine, batches)
        if hasattr(engine, "module"):  # not the one process
            engine.module.kept = torch.nn.Parameter(torch.zeros(8))
        return losses

    script.train = broken


def sum_no_input_gradient(script):
    layers = importlib.import_module("deepspeed.module_inject.layers")
    layers.ColumnParallel.backward = staticmethod(lambda ctx, grad: (None, grad))


def other_data_on_rank_1(script):
    """Which DeepSpeed itself refuses, in the first forward."""
    batches_of = script.data.batches_of

    def broken(text, steps, size, first, count, device):
        shift = int(os.environ["RANK"]) if count < size or size == 2 else 0
        return batches_of(text, steps, size, first + shift, count, device)

    script.data.batches_of = broken


GRADIENT, LOSS = "gradient, relative error", "largest error of a loss"
WEIGHTS, BACKWARD = "bytes of weights", "all-reduces in backward"


@pytest.mark.parametrize(
    ("sabotage", "failing"),
    [
        (on_the_engine(shift_a_weight), [GRADIENT, LOSS]),
        pytest.param(sum_no_input_gradient, [GRADIENT, LOSS, BACKWARD], marks=pytest.mark.full),
        pytest.param(keep_a_weight_more, [WEIGHTS], marks=pytest.mark.full),
    ],
)
def test_sabotage_fails_a_check(run_script, tmp_path, sabotage, failing):
    def before(script):
        two_heads(script)
        sabotage(script)

    ended = run_script(
        SCRIPT, *SMALL, "--output-dir", tmp_path / "run", world_size=2, before=before,
        end_job_on_failure=False,
    )  # fmt: skip
    assert ended.codes == [1, 1], ended.stdout + ended.stderr
    checks = results_of(tmp_path / "run")["checks"]
    assert [check["name"] for check in checks if not check["ok"]] == failing


@pytest.mark.full
def test_deepspeed_refuses_other_data_in_another_part(run_script):
    def before(script):
        two_heads(script)
        other_data_on_rank_1(script)

    ended = run_script(SCRIPT, *SMALL, world_size=2, before=before)
    assert any(ended.codes) and "Data inconsistency within the TP group" in ended.stderr, (
        ended.stderr
    )


@pytest.mark.parametrize(
    ("world_size", "argv", "says"),
    first_is_quick(
        (1, (), "--tp 2 does not divide 1 ranks"),
        (1, ("--tp", 3), "--preset tiny has 2 key-value head(s) for 3 ranks"),
        (1, ("--tp", 1, "--seq-len", 257), "--seq-len must be at most 256"),
        (1, ("--zero-stage", 3), "--zero-stage: invalid choice: 3"),
        (1, ("--preset", "llama3-70b"), "--preset llama3-70b needs "),
    ),
)
def test_bad_flags_are_refused(run_script, world_size, argv, says):
    ended = run_script(SCRIPT, *argv, world_size=world_size)
    assert_one_line(ended, says, "autotp_training.py")


@pytest.mark.full
def test_without_transformers_it_says_what_to_install(run_script):
    def before(script):
        sys.modules["transformers"] = None

    ended = run_script(SCRIPT, before=before)
    assert_one_line(ended, "pip install deepspeed transformers", "autotp_training.py")


@pytest.mark.skipif(not GPUS, reason="no GPU on this machine")
def test_autotp_training_on_a_gpu(tmp_path):
    command = [
        "deepspeed",
        "--num_gpus=1",
        f"--master_port={free_port()}",
        str(REPO / SCRIPT),
        "--tp",
        "1",
        "--output-dir",
        "run",
    ]
    ended = run_command(command, tmp_path, 300, CUDA_VISIBLE_DEVICES=GPUS.split(",")[0])
    assert ended.codes == [0], ended.stdout + ended.stderr
