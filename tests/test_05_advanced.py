"""Module 05: what breaks a lesson has to fail the check that guards it."""

import pytest
import torch
from conftest import assert_one_line, results_of

ACCUMULATION = "05-advanced/gradient_accumulation.py"
WEIGHT_SYNC = "05-advanced/weight_sync.py"


def ignore_other_ranks(script):
    script.mean_of_tokens = script.mean_of_rank_means


def drop_a_micro_batch(script):
    divide = script.divide
    script.divide = lambda *args: divide(*args)[:-1] or divide(*args)


def send_every_micro_batch(script):
    script.accumulate = script.send_each


def keep_a_copy(script):
    """Keep for backward what does not grow with the micro-batch."""
    right = script.summed_loss

    def greedy(model, inputs, targets):
        more = torch.ones(10**6, requires_grad=True)
        return right(model, inputs, targets) + 0 * more.exp().sum()

    script.summed_loss = greedy


def skip_the_last_bucket(script):
    divide = script.divide_into_buckets
    script.divide_into_buckets = lambda model: divide(model)[:-1]


def never_wait(script):
    pending = script.Requests.pending
    script.Requests.pending = lambda self, oldest: pending(self, min(oldest, -1))


GRADIENT = "gradient: relative error, every division"
SABOTAGE = [
    (ACCUMULATION, 2, "", ignore_other_ranks, GRADIENT),
    (ACCUMULATION, 2, "", drop_a_micro_batch, GRADIENT),
    (ACCUMULATION, 2, "", send_every_micro_batch, "bytes sent with no_sync"),
    (ACCUMULATION, 2, "", keep_a_copy, "largest / smallest bytes kept"),
    (WEIGHT_SYNC, 3, "", skip_the_last_bucket, "largest difference of logits"),
    (WEIGHT_SYNC, 2, "--rollout-ms 2000", never_wait, "steps beyond --max-staleness"),
]


@pytest.mark.full
@pytest.mark.parametrize(("script", "ranks", "flags", "before", "check"), SABOTAGE)
def test_sabotage_fails_its_check(
    run_script, tmp_path, script, ranks, flags, before, check
):
    words = (*flags.split(), "--output-dir", tmp_path / "run")
    ended = run_script(script, *words, world_size=ranks, before=before)
    assert ended.codes == [1] * ranks, ended.stdout + ended.stderr
    failed = [c["name"] for c in results_of(tmp_path / "run")["checks"] if not c["ok"]]
    assert check in failed


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "ranks"),
    [(ACCUMULATION, ranks) for ranks in (1, 3, 4)] + [(WEIGHT_SYNC, 4)],
)
def test_a_lesson_passes_on_other_ranks_and_seeds(run_script, script, ranks):
    ended = run_script(script, "--seed", 7, world_size=ranks)
    assert ended.codes == [0] * ranks, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("script", "ranks", "message"),
    [
        (ACCUMULATION, 5, "5 ranks: start 1, 2, 3, 4, 6 or 12"),
        (WEIGHT_SYNC, 1, "1 ranks: start 2, 3, 4, 5, 7 or 13; one samples"),
    ],
)
def test_a_wrong_number_of_ranks_is_refused(run_script, script, ranks, message):
    ended = run_script(script, world_size=ranks)
    assert_one_line(ended, message, script.split("/")[1])
