"""Pipeline schedules as data: complete, without deadlock, with the bubble of their papers."""

import re

import pytest
from conftest import assert_one_line, load_script, results_of

from advanced_parts import pipeline_schedules as formulas
from legacy_common.cli import UsageError

SCRIPT = "05-advanced/pipeline_schedules.py"
FULL = pytest.mark.full
lesson = load_script(SCRIPT)
RANGE = [(p, m) for p in range(1, 9) for m in range(1, 17)]

# the schedules


def works(name: str, p: int, m: int) -> bool:
    return {"interleaved": m % p == 0, "zb-h1": m >= p}.get(name, True)


@pytest.mark.parametrize(
    ("name", "v"), [*((name, 1) for name in ("naive", "gpipe", "1f1b", "zb-h1")),
                    ("interleaved", 1), ("interleaved", 2), ("interleaved", 3)],
)  # fmt: skip
def test_every_schedule_for_all_p_to_8_and_m_to_16(name, v):
    """The formulas stand in the part; idle time and activations are counted from the data."""
    for p, m in (pair for pair in RANGE if works(name, *pair)):
        schedule = lesson.build(name, p, m, v)
        assert lesson.violations(schedule, m) == []
        for backward in (2.0, 1.0):
            times = lesson.durations(name, v, backward)
            idle = lesson.bubble(lesson.simulate(schedule, times))
            expected = formulas.bubble_formula(name, p, m, v, backward)
            assert idle == pytest.approx(expected, abs=1e-9), (p, m, backward)
        for rank, instructions in enumerate(schedule):
            kept = lesson.peak_activations(instructions, v)
            assert kept == pytest.approx(formulas.peak_formula(name, rank, p, m, v)), (p, m)


def test_a_schedule_that_needs_more_micro_batches_refuses_fewer():
    for p, m in RANGE:
        for name in lesson.SCHEDULES:
            if not works(name, p, m):
                with pytest.raises(UsageError, match=f"{name}: {m} micro-batches"):
                    lesson.build(name, p, m, 2)


def test_too_large_a_backward_breaks_the_formula_of_zb_h1_and_is_refused():
    """The paper's schedule assumes that F, I and W take equally long: why --backward ends at 2."""
    schedule = lesson.build("zb-h1", 4, 8)
    spans = lesson.simulate(schedule, lesson.durations("zb-h1", 1, 3.0))
    assert lesson.bubble(spans) > formulas.bubble_formula("zb-h1", 4, 8, 1, 3.0) + 0.01


# what the checks find


def swap(schedule, rank, one, two):
    todo = schedule[rank]
    todo[one], todo[two] = todo[two], todo[one]


def backward_before_its_forward(schedule):
    swap(schedule, 3, 0, 1)  # the last stage starts with F0 B0


def backwards_swapped_on_one_rank(schedule):
    order = schedule[1]
    places = [n for n, i in enumerate(order) if i.kind == "B"]
    swap(schedule, 1, places[0], places[-1])


def forget_a_backward(schedule):
    schedule[2].pop()


def do_a_forward_twice(schedule):
    schedule[0].append(schedule[0][0])


def give_a_stage_to_another_rank(schedule):
    schedule[0], schedule[1] = schedule[1], schedule[0]


@pytest.mark.parametrize(
    ("sabotage", "says"),
    [
        (backward_before_its_forward, "rank 3 waits for ever before B0 of stage 3"),
        (backwards_swapped_on_one_rank, "rank 1 waits for ever before B7 of stage 1"),
        (forget_a_backward, "-1 times too often"),
        (do_a_forward_twice, r"\+1 times too often"),
        (give_a_stage_to_another_rank, "rank 0 does not hold the stage of"),
    ],
)
def test_violations_name_what_is_wrong(sabotage, says):
    schedule = lesson.build("1f1b", 4, 8)
    sabotage(schedule)
    found = lesson.violations(schedule, 8)
    assert any(re.search(says, line) for line in found), found


# the script


def test_the_script_prints_counts_and_draws(run_script, tmp_path):
    folder = tmp_path / "run"
    ended = run_script(SCRIPT, "--output-dir", folder, world_size=2)
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    content = results_of(folder)
    assert len(content["checks"]) == 15 and all(check["ok"] for check in content["checks"])
    # p = 4, m = 8, v = 2; written out by hand
    idle = {name: content["metrics"][name]["bubble"] for name in lesson.SCHEDULES}
    expected = {"naive": 3 / 4, "gpipe": 3 / 11, "1f1b": 3 / 11, "interleaved": 3 / 19,
                "zb-h1": 3 / 27}  # fmt: skip
    assert idle == pytest.approx(expected)
    assert content["metrics"]["1f1b"]["held"] == [4, 3, 2, 1]
    assert (folder / "schedules.png").stat().st_size > 10_000


@FULL
def test_one_schedule_is_printed_in_order(run_script):
    ended = run_script(SCRIPT, "--schedule", "1f1b", "--stages", 2, "--micro-batches", 3)
    assert "rank 0: F0 F1 B0 F2 B1 B2\nrank 1: F0 B0 F1 B1 F2 B2\n" in ended.stdout
    ended = run_script(SCRIPT, "--schedule", "interleaved", "-p", 1, "-m", 2, "-v", 2)
    assert "rank 0: F0 F0.1 B0.1 F1 B0 F1.1 B1.1 B1\n" in ended.stdout


def replaced(name, broken):
    def sabotage(script):
        script.SCHEDULES[name] = broken

    return sabotage


def one_f_one_b_with_a_swapped_backward(rank, p, m):
    order = list(lesson.one_f_one_b(rank, p, m))
    if rank == 1:
        backwards_swapped_on_one_rank([[], order])
    return order


def one_f_one_b_that_starts_late(rank, p, m):
    """Complete and without deadlock, but no forward runs ahead: it idles like the naive one."""
    return lesson.naive(rank, p, m)


@pytest.mark.full
@pytest.mark.parametrize(
    ("broken", "failing"),
    [
        (one_f_one_b_with_a_swapped_backward, {"1f1b: broken rules"}),
        (one_f_one_b_that_starts_late, {"1f1b: bubble", "1f1b: error of micro-batches kept"}),
    ],
)
def test_sabotage_of_a_schedule_fails_a_check(run_script, tmp_path, broken, failing):
    folder = tmp_path / "run"
    arguments = ("--schedule", "1f1b", "gpipe", "--output-dir", folder)
    ended = run_script(SCRIPT, *arguments, before=replaced("1f1b", broken))
    assert ended.codes == [1], ended.stdout + ended.stderr
    bad = {check["name"] for check in results_of(folder)["checks"] if not check["ok"]}
    assert failing <= bad and all(name.startswith("1f1b: ") for name in bad)


def test_a_schedule_that_these_numbers_refuse_is_left_out_of_all(run_script):
    ended = run_script(SCRIPT, "--stages", 5, "--micro-batches", 7)
    assert ended.codes == [0], ended.stdout + ended.stderr
    assert "left out: interleaved: 7 micro-batches must be a multiple of 5 ranks" in ended.stdout
    shown = [name for name in lesson.SCHEDULES if f"\n{name}  " in ended.stdout]
    assert shown == ["naive", "gpipe", "1f1b", "zb-h1"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("-m", 6, "--schedule", "interleaved"), "6 micro-batches must be a multiple of 4 ranks"),
        *(pytest.param(*row, marks=FULL) for row in (
            (("-m", 3, "--schedule", "zb-h1"), "zb-h1: 3 micro-batches are fewer than 4 stages"),
            (("--schedule", "zb-h1", "--backward", 3), "zb-h1 fits --backward of at most 2"),
        )),
    ],
)  # fmt: skip
def test_bad_input_gets_one_line(run_script, argv, says):
    assert_one_line(run_script(SCRIPT, *argv), says, "pipeline_schedules.py")
