"""Module 01, uneven data: each sabotage has to fail the check that guards it."""

import pytest
from conftest import results_of

UNEVEN = "01-ddp-basics/uneven_data.py"
ONCE = "samples not trained exactly once"
WEIGHTS = "weights: relative error against one process"
RESUME = "ranks whose batches differ after a resume"
full = pytest.mark.full


def change_steps(change):
    """Return a sabotage that changes each (batch, weight, samples of all ranks)."""

    def before(script):
        share = script.share_steps
        script.share_steps = lambda *args: (change(*step) for step in share(*args))

    return before


def ignore_workers(script):
    """Each worker reads all files of its rank."""
    script.get_worker_info = lambda: None


def ignore_ranks(script):
    """Each rank reads all files."""
    init = script.FileStream.__init__

    def read_all(self, *args):
        init(self, *args)
        self.rank, self.world_size = 0, 1

    script.FileStream.__init__ = read_all


def forget_the_position(script):
    script.FileStream.load_state_dict = lambda self, state: None


average_ranks = change_steps(
    lambda batch, weight, _: (batch, weight, 2 * len(batch[0]))
)


def run_broken(run_script, tmp_path, flags, before):
    words = (*flags.split(), "--output-dir", tmp_path / "run")
    ended = run_script(UNEVEN, *words, world_size=2, before=before)
    assert ended.codes == [1, 1], ended.stdout + ended.stderr
    checks = results_of(tmp_path / "run")["checks"]
    return [check["name"] for check in checks if not check["ok"]]


@pytest.mark.parametrize(
    ("flags", "before", "check"),
    [
        pytest.param("", ignore_workers, ONCE, marks=full),
        pytest.param("", ignore_ranks, ONCE, marks=full),
        ("", average_ranks, WEIGHTS),
        pytest.param("", forget_the_position, RESUME, marks=full),
        pytest.param("--end first", None, ONCE, marks=full),
    ],
)
def test_sabotage_fails_its_check(run_script, tmp_path, flags, before, check):
    assert check in run_broken(run_script, tmp_path, flags, before)


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        pytest.param("--strategy fsdp", 2, marks=full),
        pytest.param("--seed 7", 3, marks=full),
        pytest.param("", 13, marks=full),  # 26 workers read 24 files
    ],
)
def test_it_passes_on_other_ranks_and_seeds(run_script, flags, ranks):
    ended = run_script(UNEVEN, *flags.split(), world_size=ranks)
    assert ended.codes == [0] * ranks, ended.stdout + ended.stderr


@pytest.mark.full
def test_ranks_that_end_by_themselves_hang_the_others(run_script):
    ended = run_script(UNEVEN, "--end", "own", "--timeout", 5, world_size=2)
    assert 1 in ended.codes
    assert "lost contact with another rank" in ended.stderr
