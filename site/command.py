"""Run the planner's command line, or a pipeline schedule, for the calculator."""

import contextlib
import io
import json
import runpy
import sys

sys.path[:0] = ["."]


def run(script: str, argv: list[str]) -> tuple[int, str, str]:
    """Return a script's exit code, and what it printed to stdout and to stderr."""
    sys.argv = [script, *argv]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
    return code, out.getvalue(), err.getvalue()


def timeline(name: str, stages: int, micro_batches: int) -> str:
    """Return a schedule of the lesson as JSON: who does what when, and the bubble."""
    import pipeline_schedules as lesson

    if name == "interleaved" and micro_batches % stages:
        return json.dumps(
            {"error": "Interleaved needs a multiple of the stages as micro-batches."}
        )
    if name == "zb-h1" and micro_batches < stages:
        return json.dumps({"error": "ZB-H1 needs a micro-batch for each stage."})
    v = lesson.STAGES_PER_RANK.get(name, 1)
    schedule = lesson.build(name, stages, micro_batches, v)
    spans = lesson.simulate(schedule)
    rows = [
        [
            [i.kind, i.stage // stages, i.micro_batch, start, end]
            for i, start, end in row
        ]
        for row in spans
    ]
    kept = [lesson.peak_activations(instructions, v) for instructions in schedule]
    results = {"rows": rows, "bubble": lesson.bubble(spans), "kept": kept}
    return json.dumps(results | {"duration": lesson.duration(spans)})
