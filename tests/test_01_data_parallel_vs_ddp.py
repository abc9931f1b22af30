"""data_parallel_vs_ddp.py: it needs two GPUs and says so; all but copying is tested on the CPU."""

import pytest
from conftest import GPUS, REPO, assert_one_line, results_of, run_command
from helpers_01 import skip_all_reduce, with_a_small_model

DATA_PARALLEL = "01-ddp-basics/data_parallel_vs_ddp.py"


def test_it_needs_two_gpus_and_says_so(run_script):
    ended = run_script(DATA_PARALLEL, environ={})
    assert ended.codes == [2]
    assert_one_line(ended, "and there are 0 here: run this where", "data_parallel_vs_ddp.py")


def without_gpus(script):
    script.need_two_gpus = lambda device: None


def train_all_on_the_first_part(script):
    """What the page's exercise asks for."""
    deal = script.data.batches_of
    script.data.batches_of = lambda sequences, steps, whole, first, count, device: deal(
        sequences, steps, whole, 0, count, device
    )


@pytest.mark.parametrize(
    "sabotage",
    [None, skip_all_reduce, pytest.param(train_all_on_the_first_part, marks=pytest.mark.full)],
)
def test_data_parallel_and_ddp_train_alike(run_script, tmp_path, sabotage):
    """On the CPU, where DataParallel is the model itself: all but the copying between GPUs."""
    changes = [without_gpus, sabotage] if sabotage else [without_gpus]
    ended = run_script(
        DATA_PARALLEL, "--preset", "tiny", "--seq-len", 32, "--global-batch-size", 4,
        "--max-steps", 20, "--output-dir", tmp_path / "run", world_size=2,
        before=with_a_small_model(*changes),
    )  # fmt: skip
    assert [check["ok"] for check in results_of(tmp_path / "run")["checks"]] == [not sabotage]
    assert ended.codes[0] == bool(sabotage), ended.stdout + ended.stderr


def test_a_batch_that_ranks_cannot_share_is_refused(run_script):
    arguments = ("--global-batch-size", 5, "--preset", "tiny")
    ended = run_script(DATA_PARALLEL, *arguments, world_size=2, before=without_gpus)
    assert_one_line(ended, "--global-batch-size must divide by 2", "data_parallel_vs_ddp.py")


@pytest.mark.full
@pytest.mark.skipif("," not in GPUS, reason="needs two GPUs")
def test_it_runs_on_two_gpus():
    ended = run_command(["python", DATA_PARALLEL], REPO, 300, CUDA_VISIBLE_DEVICES=GPUS)
    assert ended.codes == [0], ended.stdout + ended.stderr
