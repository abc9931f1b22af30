"""Goodput: formulas beside a search and beside simulated months, published runs, bad input."""

import json
import math

import pytest
from conftest import assert_one_line, load_script, results_of

from advanced_parts import goodput as part

SCRIPT = "05-advanced/goodput.py"
DAY_S = 86_400


@pytest.fixture(scope="module")
def lesson():
    return load_script(SCRIPT)


def run(run_script, tmp_path, *flags, before=None):
    folder = tmp_path / "run"
    ended = run_script(SCRIPT, *flags, "--output-dir", folder, before=before)
    return ended, results_of(folder)


def failing(content):
    return {check["name"].split(": ")[-1] for check in content["checks"] if not check["ok"]}


def test_formulas_agree_with_simulated_months(run_script, tmp_path):
    ended, content = run(run_script, tmp_path, "--months", 12, "--seed", 3)
    assert ended.codes == [0], ended.stdout + ended.stderr
    assert not failing(content) and len(content["checks"]) == 19
    goodput = content["metrics"]["goodput"]
    assert goodput["disk"] < goodput["background"] < goodput["memory"]
    assert (tmp_path / "run/goodput.png").exists()


def test_published_runs_lie_in_their_bounds(run_script, tmp_path):
    ended, content = run(run_script, tmp_path, "--published")
    assert ended.codes == [0], ended.stdout + ended.stderr
    assert len(content["checks"]) == 10 and not failing(content)
    # Llama 3 by hand: 54 days, 466 stops, 90%. Each may cost -ln(0.9) of 2.78 hours.
    assert "2.78 h        > 90%   17.6 min" in ended.stdout


def test_one_long_month_by_hand(lesson):
    """Without failures a month holds whole cycles of training and saving, to the second."""
    job = lesson.Job(1, 1e-9, stall_s=100, down_s=50)
    clock = lesson.simulate(job, 900, days=10)
    assert clock.spent["kept"] == pytest.approx(0.9 * 10 * DAY_S)
    assert clock.spent["saving"] == pytest.approx(0.1 * 10 * DAY_S) and clock.failures == 0


class Failures:
    """Fail after these times of running, each drawn from the last failure's end."""

    def __init__(self, *times):
        self.times = list(times)

    def expovariate(self, rate):
        return self.times.pop(0) if self.times else math.inf


@pytest.mark.parametrize(
    ("write_s", "kept", "lost"),
    [
        # Saves end at 1,000 and 2,000; the failure at 2,050 undoes 50 s, 50 s are left over.
        (0, 1850, 50),
        # The save of 2,000 is safe at 2,100 only: 900 s more are undone.
        (100, 950, 950),
    ],
)
def test_a_failure_undoes_what_is_not_safe(lesson, monkeypatch, write_s, kept, lost):
    monkeypatch.setattr(lesson.random, "Random", lambda seed: Failures(2050))
    job = lesson.Job(1, 1.0, stall_s=100, down_s=400, write_s=write_s)
    clock = lesson.simulate(job, 900, days=2500 / DAY_S)
    expected = {"kept": kept, "saving": 200, "lost": lost, "down": 400}
    assert dict(clock.spent) == pytest.approx(expected)
    assert clock.failures == 1


def test_a_failure_in_a_restart_begins_it_again(lesson, monkeypatch):
    monkeypatch.setattr(lesson.random, "Random", lambda seed: Failures(1000, 300))
    job = lesson.Job(1, 1.0, stall_s=100, down_s=400)
    clock = lesson.simulate(job, 900, days=2000 / DAY_S)
    assert clock.failures == 2 and clock.spent["down"] == pytest.approx(700)


def test_a_job_without_a_spare_waits_for_the_first_repaired_node(lesson, monkeypatch):
    """Nodes fail at 100 and 250 s; the spare of the first comes back at 100 + 1,000."""
    monkeypatch.setattr(lesson.random, "Random", lambda seed: Failures(100, 150))
    job = lesson.Job(1, 1.0, stall_s=100, down_s=50)
    clock = lesson.simulate(job, 900, days=2000 / DAY_S, spares=1, repair_s=1000)
    assert clock.spent["waiting for a spare"] == pytest.approx(1100 - 250)


@pytest.mark.parametrize("stall_s", [1, 3000])
def test_dalys_interval_is_the_best(lesson, stall_s):
    """Beside Lambert's W: t = M (1 + W(-e^(-1 - d/M))), solved by iteration."""
    job = lesson.Job(10, 1.0, stall_s, down_s=500)
    M = job.between_s
    share = 0.5
    for _ in range(10_000):
        share = 1 - math.exp(-share - stall_s / M)  # t / M at the peak
    assert part.best_interval(job, lesson.goodput) == pytest.approx(share * M, rel=1e-3)
    assert lesson.daly(job) == pytest.approx(share * M, rel=0.01)
    assert lesson.young(job) > lesson.daly(job)


# sabotage, one per kind of check


def save_at_youngs_interval(script):
    script.daly = script.young


def forget_the_lost_half_interval(script):
    script.first_order = lambda job, t: 1 - job.stall_s / t - job.down_s / job.between_s


def count_seconds_twice(script):
    idle = script.Clock.spend

    def spend(clock, what, seconds):
        if what == "saving":
            clock.spent["down"] += 1
        return idle(clock, what, seconds)

    script.Clock.spend = spend


def wait_for_no_spare(script):
    script.share_waiting = lambda *_: 0.0


def publish_another_number(script):
    part.PUBLISHED["runs"][4]["goodput"] = 0.90


SABOTAGE = [
    (save_at_youngs_interval, (), "Daly's interval, of the best"),
    (forget_the_lost_half_interval, (), "first order"),
    (count_seconds_twice, (), "time adds up"),
    (wait_for_no_spare, (), "simulated"),
    (publish_another_number, ("--published",), "goodput"),
]


@pytest.mark.full
@pytest.mark.parametrize(("sabotage", "flags", "check"), SABOTAGE)
def test_sabotage_fails_a_check(run_script, tmp_path, sabotage, flags, check):
    ended, content = run(run_script, tmp_path, *flags, "--months", 4, before=sabotage)
    assert ended.codes == [1], ended.stdout + ended.stderr
    assert check in failing(content)


# measured seconds, bad input


def test_measured_seconds_are_read_and_flags_go_first(run_script, tmp_path):
    seconds = {"detect_s": 1.5, "restart_s": 8.5, "other": 3}
    path = tmp_path / "measured.json"
    path.write_text(json.dumps({"metrics": seconds}))
    flags = ("--measured", path, "--months", 2, "--restart-s", 20)
    _, content = run(run_script, tmp_path, *flags)
    assert (content["args"]["detect_s"], content["args"]["restart_s"]) == (1.5, 20)


BAD_FILES = [
    (None, "No such file or directory"),
    ("{", "no JSON (Expecting property name"),
    ('{"metrics": {"loss": 1}}', "has neither detect_s nor restart_s"),
    ('{"detect_s": "soon"}', "detect_s is 'soon', not a time in seconds"),
]


@pytest.mark.parametrize(("content", "says"), BAD_FILES)
def test_a_bad_file_of_measurements_gets_one_line(run_script, tmp_path, content, says):
    path = tmp_path / "measured.json"
    if content:
        path.write_text(content)
    assert_one_line(run_script(SCRIPT, "--measured", path), says, "goodput.py")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--months", 1), "--months 1: two at least"),
    ],
)
def test_bad_input_gets_one_line(run_script, flags, says):
    assert_one_line(run_script(SCRIPT, *flags), says, "goodput.py")


def test_spares_of_the_page(lesson):
    """goodput.md: 8 spares for the 7.8 nodes in repair leave a sixth of the time, 14 leave 0.7%."""
    job = lesson.Job(2048, part.LLAMA3_RATE, 60, 360)
    assert DAY_S / job.between_s == pytest.approx(7.76, abs=0.01)
    waiting = [lesson.share_waiting(job, spares, DAY_S) for spares in (8, 14)]
    assert waiting == pytest.approx([1 / 6, 0.007], abs=0.01)
