"""The timeline: drawn from a trace that has every all-reduce, at its place."""

import json

import pytest
from conftest import load_script, results_of
from helpers_01 import skip_all_reduce

TIMELINE = "01-ddp-basics/ddp_timeline.py"
SMALL = ("--seq-len", 32, "--micro-batch-size", 2)


@pytest.mark.full
def test_timeline_is_drawn_from_a_trace_that_has_every_all_reduce(run_script, tmp_path):
    folder = tmp_path / "run"
    ended = run_script(TIMELINE, *SMALL, "--output-dir", folder, world_size=2)
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    checks = {check["name"]: check["measured"] for check in results_of(folder)["checks"]}
    for name, buckets in (("one bucket", 1), ("0.5 MiB", 6)):
        assert checks[f"{name}: numbers all-reduced"] == 803_968
        assert checks[f"{name}: spans of all-reduce"] == buckets
        assert checks[f"{name}: begun before the last gradient"] == buckets - 1
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((folder / "trace-0.5.json").read_text())["traceEvents"]
    assert sum(event["name"] == "gloo:all_reduce" for event in events) == 6


@pytest.mark.full
def test_sabotage_fails_a_check(run_script, tmp_path):
    folder = tmp_path / "run"
    run_script(TIMELINE, *SMALL, "--output-dir", folder, world_size=2, before=skip_all_reduce)
    bad = {check["name"] for check in results_of(folder)["checks"] if not check["ok"]}
    assert {"one bucket: numbers all-reduced", "0.5 MiB: numbers all-reduced"} <= bad


def event(name: str, ts: float, dur: float, kind: str = "cpu_op") -> dict:
    return {"name": name, "ts": ts, "dur": dur, "cat": kind}


def test_spans_are_those_of_the_trace():
    """A trace in which every time is known, in µs: the last gradient is there at 9,000."""
    script = load_script(TIMELINE)
    function = "autograd::engine::evaluate_function: "
    events = [
        event("forward", 1000, 2000, "user_annotation"),
        event("backward", 3000, 8000, "user_annotation"),
        event(f"{function}MmBackward0", 3000, 2000),
        event("c10d::allreduce_", 4500, 100),
        event("gloo:all_reduce", 5000, 1500),
        event(f"{function}AccumulateGrad", 8000, 1000),
        event("c10d::allreduce_", 8500, 100),
        event("gloo:all_reduce", 9000, 1500),
    ]
    assert script.spans_of(events) == {
        "forward": [(0.0, 2.0)],
        "backward": [(2.0, 6.0)],
        "all-reduce": [(4.0, 1.5), (8.0, 1.5)],
        "DDP waits": [(8.0, 2.0)],
    }
    assert script.begun_early(events) == 1
