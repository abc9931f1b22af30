"""Simulated steps: the papers' formulas, rules that no timeline may break, and what-ifs."""

import itertools
import json
from collections import Counter, defaultdict
from dataclasses import replace
from graphlib import TopologicalSorter

import pytest
from conftest import assert_one_line, results_of

from advanced_parts import simulate as part
from advanced_parts import simulate_measured
from advanced_parts.across_nodes import Link
from dist_common import models
from dist_common.costs.hardware import Cluster, find_gpu
from dist_common.costs.job import Job, Layout
from dist_common.costs.models import MODELS
from dist_common.costs.stages import stages_of
from dist_common.costs.step import predict
from dist_common.costs.timeline import Place, Stage, Task, makespan, run, tasks_of, waits
from pipeline_schedules import bubble, build, durations, simulate

FORWARD, BACKWARD = 1.0, 2.0
# All that a stage can do at once: tp and cp inside layers, messages, ZeRO-3, an optimizer.
BUSY = Stage(
    1.0, 2.0, {"tp": (0.2, 0.3), "cp": (0.1, 0.1)}, 0.05, 0.4, 0.6, True, True, 0.5, layers=5
)
ONCE = Stage(1.0, 2.0, {"tp": (0.2, 0.3)}, 0.05, 0.4, 0.6, optimizer=0.5, layers=5)
PIPELINES = [(name, p, m) for name in ("naive", "gpipe", "1f1b", "interleaved", "zb-h1")
             for p, m in ((1, 3), (2, 4), (4, 8))]  # fmt: skip


def step_of(name, p, m, stage=None, v=1, **options):
    """Return a step's events; `stage` of each rank, cut into v where interleaved."""
    whole = stage or Stage(FORWARD / v, BACKWARD / v)
    return run(tasks_of(build(name, p, m, v), [whole] * (p * v), **options))


def v_of(name):
    return 2 if name == "interleaved" else 1


# the papers' formulas


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 2), (4, 8), (8, 32)])
def test_1f1b_takes_its_papers_time(p, m):
    assert makespan(step_of("1f1b", p, m)) == pytest.approx((m + p - 1) * (FORWARD + BACKWARD))


@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 8, 2), (4, 8, 4), (8, 16, 3)])
def test_interleaving_divides_the_bubble(p, m, v):
    events = step_of("interleaved", p, m, v=v)
    busy = m * (FORWARD + BACKWARD)
    assert makespan(events) / busy - 1 == pytest.approx((p - 1) / (v * m))
    assert waits(events)[Place(0, 0)]["bubble"] == pytest.approx(busy * (p - 1) / (v * m))


def test_zero_bubble_idles_a_third_of_1f1b():
    p, m = 4, 8
    faster, slower = (makespan(step_of(name, p, m)) for name in ("zb-h1", "1f1b"))
    busy = m * (FORWARD + BACKWARD)
    assert faster - busy == pytest.approx((p - 1) * FORWARD)
    assert slower - busy == pytest.approx((p - 1) * (FORWARD + BACKWARD))


@pytest.mark.parametrize(("name", "p", "m"), PIPELINES)
def test_it_is_the_lessons_pipeline(name, p, m):
    """Where nothing is sent, each instruction runs when pipeline_schedules.py says."""
    v = v_of(name)
    events = step_of(name, p, m, v=v)
    lesson = simulate(build(name, p, m, v), durations(name, v))
    computed = [event for event in events.values() if event.task.stream == "compute"]
    found = {event.task.key[1:4]: (event.start, event.end) for event in computed}
    expected = {span.instruction: (span.start, span.end) for rank in lesson for span in rank}
    assert found == pytest.approx(expected)
    idle = sum(parts["bubble"] for parts in waits(events).values())
    assert idle / makespan(events) / p == pytest.approx(bubble(lesson))


# rules that no timeline may break


def critical_path_s(tasks) -> float:
    """Return the longest chain of needs, by itself: no stream, no order."""
    longest: dict = {}
    of = {task.key: task for task in tasks}
    for key in TopologicalSorter({task.key: task.needs for task in tasks}).static_order():
        longest[key] = of[key].seconds + max((longest[need] for need in of[key].needs), default=0)
    return max(longest.values())


@pytest.mark.parametrize("stage", [BUSY, ONCE], ids=["zero-3", "once a step"])
@pytest.mark.parametrize(("name", "p", "m"), PIPELINES)
def test_no_timeline_breaks_the_rules(name, p, m, stage):
    v = v_of(name)
    slow = {Place(1, p - 1): 1.5}
    tasks = tasks_of(build(name, p, m, v), [stage] * (p * v), slow, replicas=(0, 1))
    events = run(tasks)
    assert set(events) == {task.key for task in tasks}, "each task runs, once"
    whole = makespan(events)
    assert whole >= critical_path_s(tasks) - 1e-9

    streams, groups = defaultdict(list), defaultdict(list)
    for event in events.values():
        streams[event.task.place, event.task.stream].append(event)
        groups[event.task.group].append(event)
        assert event.end - event.start == pytest.approx(event.task.seconds)
        assert all(events[key].end <= event.start + 1e-9 for key in event.task.needs)
    for own in streams.values():
        assert whole >= sum(event.task.seconds for event in own) - 1e-9
        own.sort(key=lambda event: (event.start, event.end))
        assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(own)), "no overlap"
    shared = [members for members in groups.values() if len(members) > 1]
    assert {members[0].task.stream for members in shared} == {"dp"}
    assert all(len(members) == 2 and len({m.start for m in members}) == 1 for members in shared)
    for parts in waits(events).values():
        assert sum(parts.values()) == pytest.approx(whole) and min(parts.values()) >= -1e-9


def test_a_collective_starts_when_all_of_its_members_are_there():
    early, late = Place(0, 0), Place(1, 0)
    tasks = [
        Task("a", "a", early, "compute", 1.0, (), "a"),
        Task("sum of a", "sum", early, "dp", 2.0, ("a",), "sum"),
        Task("b", "b", late, "compute", 5.0, (), "b"),
        Task("sum of b", "sum", late, "dp", 2.0, ("b",), "sum"),
    ]
    events = run(tasks)
    assert {(events[key].start, events[key].end) for key in ("sum of a", "sum of b")} == {(5, 7)}


def test_tasks_that_wait_for_each_other_are_named():
    here = Place(0, 0)
    tasks = [Task("a", "first", here, "compute", 1.0, ("b",), "a"),
             Task("b", "second", here, "dp", 1.0, ("a",), "b")]  # fmt: skip
    with pytest.raises(ValueError, match="waits for ever: first, second"):
        run(tasks)


# what-ifs


def test_a_stragglers_delay_reaches_all_replicas():
    """Replica 1 is slow: what replica 0 waits for is its gradient, and both end together."""
    p, m = 2, 4
    options = {"stage": ONCE, "replicas": (0, 1)}
    even, late = (step_of("1f1b", p, m, slow=slow, **options)
                  for slow in (None, {Place(1, 0): 1.3}))  # fmt: skip
    delay = 0.3 * m * (ONCE.forward + ONCE.backward)
    gained = makespan(late) - makespan(even)
    assert 0.5 * delay < gained <= delay + 1e-9
    before, after = waits(even)[Place(0, 0)], waits(late)[Place(0, 0)]
    waited = {part: after[part] - before[part] for part in after}
    assert waited["dp"] > 0.9 * gained and sum(waited.values()) == pytest.approx(gained)
    assert after["compute"] == pytest.approx(before["compute"])


def test_one_slow_stage_sets_the_pace_of_a_long_pipeline():
    p, m = 4, 64
    even, late = (makespan(step_of("1f1b", p, m, slow=slow)) for slow in (None, {Place(0, 2): 1.3}))
    assert late - even == pytest.approx(0.3 * m * (FORWARD + BACKWARD), rel=0.05)


def test_gradients_are_hidden_behind_backward_but_for_the_last_ones():
    """DDP: of a step's reduction in five pieces, what is exposed is one, or what backward lacks."""

    def exposed(reduce):
        stage = Stage(1.0, 2.0, reduce=reduce, layers=5)
        return waits(step_of("1f1b", 1, 3, stage))[Place(0, 0)]["dp"]

    assert exposed(1.0) == pytest.approx(1.0 / 5)
    assert exposed(10.0) == pytest.approx(10.0 - 2.0 * 4 / 5)


def test_zero_3_gathers_one_piece_ahead():
    """Each pass waits for the first piece; then compute hides the others, or waits for the wire."""

    def step_s(gather):
        stage = Stage(1.0, 1.0, gather=gather, gathers_each=True, layers=5)
        return makespan(step_of("1f1b", 1, 4, stage))

    assert step_s(1.0) == pytest.approx(4 * 2 * (1.0 / 5 + 1.0))
    assert step_s(3.0) == pytest.approx(4 * 2 * (3.0 + 1.0 / 5))


# the seconds of a layout


H100 = Cluster(find_gpu("h100"))
LLAMA = Job(MODELS["llama3-8b"], 4096, 32)


def seconds_of(layout, job=LLAMA, send=True):
    stages = stages_of(job, layout, H100)
    if not send:
        stages = [replace(stage, send=0.0) for stage in stages]
    name = "interleaved" if layout.virtual_stages > 1 else "1f1b"
    m = layout.micro_batches(job)
    return makespan(run(tasks_of(build(name, layout.pp, m, layout.virtual_stages), stages)))


@pytest.mark.parametrize("layout", [
    Layout(),
    Layout(tp=8, recompute="full"),
    Layout(tp=4, cp=2, dp=2, zero=1, overlap_dp=False),
    Layout(tp=4, dp=2, zero=2, overlap_dp=False),
    Layout(tp=2, dp=8, overlap_dp=False),
    Layout(pp=4, tp=2),
    Layout(pp=4, tp=2, dp=4, zero=1, recompute="selective", overlap_dp=False),
], ids=str)  # fmt: skip
def test_without_overlap_a_step_is_predicts_sum(layout):
    """But for messages between stages: predict() adds all of them up, here each has a place."""
    predicted = predict(LLAMA, layout, H100)
    expected = predicted.step_time_s - predicted.step["pp"]
    assert seconds_of(layout, send=False) == pytest.approx(expected, rel=1e-6)
    assert seconds_of(layout) <= predicted.step_time_s * (1 + 1e-9)


@pytest.mark.parametrize("layout", [
    Layout(dp=8), Layout(dp=8, zero=3), Layout(dp=64, zero=3, shard=8, recompute="full"),
    Layout(pp=4, dp=2, virtual_stages=2), Layout(pp=2, dp=8, tp=2, zero=1),
    Layout(pp=2, dp=8, tp=2, zero=3),
], ids=str)  # fmt: skip
def test_with_overlap_it_is_near_predicts_sum(layout):
    job = replace(LLAMA, global_batch=8 * layout.dp)
    assert seconds_of(layout, job) == pytest.approx(
        predict(job, layout, H100).step_time_s, rel=0.05
    )


def test_a_step_of_many_micro_batches_is_its_steady_state_prolonged():
    job = replace(LLAMA, global_batch=40)
    case = part.Case("", job, Layout(pp=2, tp=2), H100, "1f1b")
    assert case.step_s() == pytest.approx(makespan(case.events()), rel=1e-9)
    tokens, mfu = case.speeds(2.0)
    assert tokens == 40 * 4096 / 2.0 / 4, "of a GPU of four, in a second"
    predicted = predict(job, case.layout, H100)
    flops = predicted.model_tflops_per_gpu * predicted.step_time_s / 2.0
    assert mfu == pytest.approx(flops / H100.gpu.tflops["bf16"])


# the tool

SIMULATE = "05-advanced/combining.py"
SMALL = ("simulate", "--model", "llama3-8b", "--tp", 2, "--pp", 2, "--dp", 4, "--zero", 1,
         "--seq-len", 4096, "--global-batch", 16)  # fmt: skip


def test_what_ifs_are_simulated_alone_and_together(run_script, tmp_path):
    what_ifs = ("--network-gb-s", 2, "--slow-rank", "6:1.5", "--slow-stage", "1:1.2")
    ended = run_script(SIMULATE, *SMALL, *what_ifs, "--output-dir", tmp_path / "run")
    assert ended.codes == [0], ended.stdout + ended.stderr
    steps = results_of(tmp_path / "run")["metrics"]["step_time_s"]
    planned, *alone, together = steps.values()
    assert list(steps)[1:] == ["2 GB/s", "rank 6 x1.5", "stage 1 x1.2", "all of these"]
    assert planned < min(alone) and max(alone) < together

    events = json.loads((tmp_path / "run/trace.json").read_text())["traceEvents"]
    named = {event["pid"]: event["args"]["name"] for event in events
             if event["name"] == "process_name"}  # fmt: skip
    slow, other = "stage 0, replica 3 (ranks 6-7)", "stage 0, replica 0 (ranks 0-1)"
    assert len(named) == 4 and {slow, other} < set(named.values())
    computed = Counter()
    for event in events:
        if event["ph"] == "X" and event["cat"] == "compute" and event["name"][0] in "FB":
            computed[named[event["pid"]]] += event["dur"]
    assert computed[slow] == pytest.approx(1.5 * computed[other])
    assert {event["cat"] for event in events if event["ph"] == "X"} == {"compute", "tp", "dp", "pp"}
    last = max(event["ts"] + event["dur"] for event in events if event["ph"] == "X")
    assert last == pytest.approx(together * 1e6)
    assert (tmp_path / "run/timeline.png").exists()


def test_speed_is_simulated_up_to_100_000_gpus(run_script, tmp_path):
    sizes = ("--scale", "8,64,1024,100000", "--output-dir", tmp_path / "run")
    ended = run_script(SIMULATE, *SMALL, *sizes)
    assert ended.codes == [0], ended.stdout + ended.stderr
    points = results_of(tmp_path / "run")["metrics"]["mfu_by_gpus"]
    assert [point[0] for point in points] == [8, 64, 1024, 100_000]
    weak = [point[1] for point in points]
    assert weak == sorted(weak, reverse=True) and 0 < weak[-1] < weak[0] < 0.7
    assert points[1][2] < points[1][1], "a pipeline of fewer micro-batches idles more"
    assert points[2][2] is None, "16 sequences for 256 replicas"
    assert (tmp_path / "run/scale.png").exists()


BAD_INPUT = [
    (("--slow-rank", "16:1.3"), "--slow-rank 16 must be at most 15"),
    (("--slow-stage", "2:1.3"), "--slow-stage 2 must be at most 1"),
    (("--slow-stage", "1"), "--slow-stage: must be a number above 0"),
    (("--schedule", "interleaved"), "--schedule interleaved and --interleave above 1 go together"),
    (("--scale", "2,64"), "--scale 2 is less than tp 2 x cp 1 x pp 2 = 4 GPUs"),
    (("--gpus", "64"), "64"),
    (
        ("--global-batch", "12", "--interleave", "2"),
        "interleaving needs a multiple of 2 micro-batches: 3",
    ),
]


@pytest.mark.parametrize(("argv", "says"), BAD_INPUT)
def test_bad_input_gets_one_line(run_script, argv, says):
    ended = run_script(SIMULATE, *SMALL, *argv)
    assert_one_line(ended, says, "combining.py")


# what is simulated, run


def test_the_templates_step_is_computed_from_a_link():
    """Two ranks of dp on a link: half of the compute, and 2 (n-1)/n of the gradient, exposed."""
    link = Link(1e-3, 1e6)
    gradient = 4 * models.PRESETS["tiny"].num_parameters() / link.rate
    found = simulate_measured.simulated_s("dp", 0.03, link)
    messages = 5 * 2 * link.alpha  # 4 blocks and the tables
    assert found == pytest.approx(0.03 + 0.01 + 0.02 / 5 + gradient + messages)
    for axis in ("dp", "tp", "cp", "pp"):
        again = simulate_measured.compute_of(
            axis, simulate_measured.simulated_s(axis, 0.03, link), link)  # fmt: skip
        assert simulate_measured.simulated_s(axis, again, link) == pytest.approx(
            simulate_measured.simulated_s(axis, 0.03, link)
        )
