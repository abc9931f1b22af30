"""Module 05: what breaks a lesson has to fail the check that guards it."""

import pytest
from conftest import results_of

WEIGHT_SYNC = "05-advanced/weight_sync.py"


def skip_the_last_bucket(script):
    divide = script.divide_into_buckets
    script.divide_into_buckets = lambda model: divide(model)[:-1]


def never_wait(script):
    pending = script.Requests.pending
    script.Requests.pending = lambda self, oldest: pending(self, min(oldest, -1))


SABOTAGE = [
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
    assert failed == [check]
