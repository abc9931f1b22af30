"""The report of benchmarks/: nothing is ranked inside the noise, nothing wrong is ranked at all."""

import csv
import html.parser
import json
import math
import random
import re
from pathlib import Path

import pytest
from conftest import REPO, assert_one_line
from helpers_benchmarks import asked_for, bench  # noqa: F401

from bench import predict
from bench import report as bench_report
from bench.analysis import analyse, decided, ratio_of
from bench.baseline import compare
from bench.store import load
from bench.traces import split_of

# ruff: noqa: F811

SCRIPT = "benchmarks/distributed_benchmarks.py"
EARLY = [5.6, 5.0, 4.6, 4.4, 4.1]  # losses of the first steps
NORMS = [8.0, 5.0, 4.0, 3.0, 6.0]  # of their gradients


def record(strategy: str, ms: float, repeat: int = 1, **changes) -> dict:
    """Return a record as a sweep writes it; `ms` is the time of a step, `changes` replace values.

    A change goes to the point, the metrics or the record, whichever has its name.
    """
    ranks = changes.get("world_size", 1 if strategy == "single" else 2)
    point = {
        "kind": "train", "strategy": strategy, "world_size": ranks, "preset": "tiny",
        "precision": "32-true", "link": None, "seq_len": 128, "global_batch_size": 16,
        "max_steps": 8, "seed": 0, "exact": True, "script": "01-ddp-basics/ddp_training.py",
        "flags": [],
    }  # fmt: skip
    metrics = {
        "final_loss": 3.25, "step_times_ms": [9000, 900, 90, *(ms * f for f in FACTORS)],
        "tokens_per_step": 2048, "mfu": None, "cpu_time_per_step_ms": ms,
        "peak_memory_gib": 0.5, "peak_memory_gib_per_rank": [0.5] * ranks,
        "memory_gib": {"before": 0.3, "weights": 0.05, "gradients": 0.05, "optimizer": 0.05},
        "collectives_per_step": {"all-reduce": {"calls": 3, "bytes_sent": 3 * 2**20}},
        "bytes_sent_per_step": 3 * 2**20 if ranks > 1 else 0,
    }  # fmt: skip
    results = {
        "world_size": ranks, "device": "cpu", "backend": "gloo" if ranks > 1 else None,
        "versions": {"python": "3.12.3", "torch": "2.14.1"}, "metrics": metrics,
        "machine": {"cores": 2, "gpu": None, "system": "Linux", "processor": "x86_64"},
    }  # fmt: skip
    own = [changes[name] for name in ("preset", "precision", "link") if name in changes]
    line = {
        "id": f"{'.'.join([strategy, f'w{ranks}', *own])}#{repeat}", "point": point,
        "repeat": repeat, "status": "ok", "reason": None, "seconds": 8.1,
        "started": "2026-03-01T10:00:00+00:00",
        "launcher": "fork", "command": f"torchrun {strategy}", "results": results,
        "losses": EARLY, "norms": NORMS,
    }  # fmt: skip
    for name, value in changes.items():
        places = [place for place in (point, metrics, results, line) if name in place]
        places[0][name] = value
    if line["status"] != "ok":
        line["results"] = None
    return line


FACTORS = (0.98, 1.0, 1.0, 1.0, 1.02)  # of the timed steps around their median


def write(folder: Path, records: list[dict], **settings) -> Path:
    """Write a sweep's folder with these records."""
    folder.mkdir(exist_ok=True)
    content = {"settings": {"untimed_steps": 3} | settings, "started": "2026-03-01T10:00:00+00:00"}
    (folder / "sweep.json").write_text(json.dumps(content))
    (folder / "results.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in records))
    return folder


def repeated(strategy: str, *times: float, **changes) -> list[dict]:
    return [record(strategy, ms, number, **changes) for number, ms in enumerate(times, 1)]


def analysis_of(tmp_path: Path, *records: dict, **settings):
    return analyse(load(write(tmp_path / "sweep", list(records), **settings)))


def report(run_script, *argv):
    return run_script(SCRIPT, "report", *argv, environ={})


REFERENCE = repeated("single", 100, 100)


def places_of(analysis) -> dict[str, str]:
    return {row.label: row.place for row in analysis.rows if row.group.world_size == 2}


def verdicts_of(analysis) -> dict[str, tuple[str, str]]:
    return {row.label: (row.verdict.kind, row.verdict.words) for row in analysis.rows}


# noise and places


def rounds(draw: random.Random, count: int, ratio: float = 1.0) -> list[float]:
    """Return ratios of two strategies in each round, whose runs have a noise of 4%."""
    return [ratio * math.exp(draw.gauss(0, 0.04) - draw.gauss(0, 0.04)) for _ in range(count)]


def told_apart(count: int, ratio: float, odd: float = 1.0) -> float:
    """Return the part of simulated sweeps that tell two strategies apart; one round is odd."""
    draw = random.Random(count)
    sweeps = [rounds(draw, count, ratio) for _ in range(1000)]
    return sum(ratio_of([own[0] * odd, *own[1:]]).differs for own in sweeps) / len(sweeps)


def test_more_rounds_tell_more_apart():
    """The largest spread of any strategy, as the noise was, had it the other way round."""
    found = [told_apart(count, 1.1) for count in (2, 3, 5, 7, 10)]
    assert found == sorted(found) and found[0] < 0.25 and found[-1] > 0.97
    row = " | ".join(f"{part:.0%}" for part in found)
    page = (REPO / "benchmarks/benchmark_method.md").read_text()
    assert f"| sweeps that tell them apart | {row} |" in page


@pytest.mark.parametrize("count", [3, 10])
def test_equal_strategies_are_seldom_told_apart(count):
    assert told_apart(count, 1.0) < 0.07


NOISY = (100, 104, 97, 101, 99)  # ms


def slower(factor: float) -> list[float]:
    """Return the times of another strategy in the same rounds, with a noise of its own."""
    return [factor * ms * own for ms, own in zip(NOISY, (1.01, 0.99, 1.0, 1.02, 0.98), strict=True)]


def test_strategies_are_told_apart_round_by_round(tmp_path):
    """A slow minute that falls on a whole round hides nothing; a wrong row or `single` neither."""
    drift = [ms * factor for ms, factor in zip(NOISY, (1, 1, 2, 3, 1), strict=True)]
    analysis = analysis_of(
        tmp_path, *repeated("single", *(50, 150) * 2), *repeated("ddp", *drift),
        *repeated("b", *(1.1 * ms for ms in drift)), *repeated("c", *(1.1 * ms for ms in drift)),
        *repeated("wrong", 10, 400, 20, 30, 1, final_loss=9.0),
    )  # fmt: skip
    assert places_of(analysis) == {"ddp": "1", "b": "2-3", "c": "2-3", "wrong": ""}
    said = bench_report.text(analysis)
    assert "fastest beyond the noise: ddp" in said
    assert "noise: ± is the 95% interval of a ratio, taken round by round" in said
    assert re.search(r"^2-3 +b .* 0\.91x ±0% ", said, re.M)


def test_places_do_not_chain(tmp_path):
    """Each is told apart from all but its neighbours."""
    times = {"a": slower(1), "b": slower(1.03)[::-1], "c": slower(1.06), "d": slower(2)}
    lines = [line for name, ms in times.items() for line in repeated(name, *ms)]
    analysis = analysis_of(tmp_path, *REFERENCE, *lines)
    assert places_of(analysis) == {"a": "1-2", "b": "1-3", "c": "2-3", "d": "4"}
    said = bench_report.text(analysis)
    assert "fastest, and not told apart: a and b" in said
    assert re.search(r"^5 rounds tell neighbours apart from \d% on \(median\)$", said, re.M)
    assert re.search(r"^place +strategy ", said, re.M) and re.search(r"^1-3 +b ", said, re.M)
    assert not decided(analysis)


def test_nothing_has_a_place_without_repeats(tmp_path):
    analysis = analysis_of(tmp_path, record("single", 100), record("a", 50), record("b", 500))
    assert set(places_of(analysis).values()) == {""}
    said = bench_report.text(analysis)
    assert "noise: unknown" in said and "fastest" not in said


def test_warm_up_is_left_out(tmp_path):
    row = analysis_of(tmp_path, record("single", 100)).rows[0]
    assert row.step_time_ms == 100 and row.percentile_ms(90) < 110
    whole = analysis_of(tmp_path, record("single", 100), untimed_steps=0).rows[0]
    assert whole.percentile_ms(90) > 900


# the answer


GPU = {"device": "cuda", "machine": {"cores": 8, "gpu": "H100", "gpu_memory_gib": 79.11}}


def answer_in(tmp_path, *records, **settings) -> str:
    """Return the first sentence of a report of these records and `single`, in one line."""
    analysis = analysis_of(tmp_path, *REFERENCE, *records, **settings)
    first = first_of(bench_report.text(analysis))
    page = Page(bench_report.render(analysis, None)).text
    assert first[1:] in " ".join(page.split()), "the page says the same"
    return first


def first_of(text: str) -> str:
    """Return the answer at the top of a report without its line ends."""
    answer = text.partition("\n\n")[0]
    assert max(map(len, answer.splitlines())) <= bench_report.WIDTH
    return " ".join(answer.splitlines())


def state(gib: float) -> dict:
    """Return the memory of a strategy whose weights, gradients and optimizer take so much."""
    return {"memory_gib": {"before": 0.3, "weights": gib, "gradients": 0.0, "optimizer": 0.0}}


def test_the_fastest_is_taken_where_it_is_told_apart(tmp_path):
    lines = [*repeated("zero-2", *NOISY), *repeated("ddp", *slower(2))]
    first = answer_in(tmp_path, *lines)
    assert first.startswith("take zero-2 on these CPUs: the fastest beyond the noise; ")


def test_of_the_tied_the_simplest_is_taken(tmp_path):
    """By the order of strategies.toml, whatever their medians are; one's own come after these."""
    times = {"mine": (80, 120, 90), "tp": (120, 80, 95), "fsdp-full": (100, 99, 101)}
    lines = [line for name, own in times.items() for line in repeated(name, *own)]
    lines += repeated("ddp", 900, 901, 902)
    first = answer_in(tmp_path, *lines)
    tied = "the simplest of fsdp-full, tp and mine, of which none is faster beyond the noise; "
    assert first.startswith(f"take fsdp-full on these CPUs: {tied}")


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((4.0, 2.0, 1.0), "tp if memory is short (1.00 GiB instead of 4.00 GiB of weights, "),
        ((4.0, 3.9, 3.7), "none needs clearly less memory; "),
    ],
)
def test_the_leanest_is_named_if_it_takes_clearly_less(tmp_path, sizes, said):
    """Of those that take as little the simplest; what is wrong is never named."""
    times = {"ddp": 1, "fsdp-full": 2, "tp": 3}
    lines = [line for (name, factor), gib in zip(times.items(), sizes, strict=True)
             for line in repeated(name, *slower(factor), **state(gib))]  # fmt: skip
    lines += repeated("fsdp-hybrid", *NOISY, final_loss=9.0, **state(0.1))
    first = answer_in(tmp_path, *lines)
    assert first.startswith("take ddp ") and f"; {said}" in first


def test_on_gpus_the_answer_says_the_peak_of_how_much(tmp_path):
    peaks = {"peak_memory_gib": 61.0, "peak_memory_gib_per_rank": [60.0, 61.0]}
    lines = repeated("ddp", *NOISY, **GPU, **peaks)
    lines += repeated("fsdp-full", *slower(2), **GPU, peak_memory_gib=23.0)
    lines += [line | {"results": line["results"] | GPU} for line in REFERENCE]
    analysis = analysis_of(tmp_path, *lines)
    text = bench_report.text(analysis)
    assert first_of(text).startswith(
        "take ddp: fits (61.0 of 79.1 GiB, rank 1), the fastest beyond the noise; fsdp-full if "
        "memory is short (23.00 GiB at the peak instead of 61.00 GiB)"
    )
    bench_report.write(tmp_path, analysis, None)
    with (tmp_path / "results.csv").open() as file:
        ddp = next(row for row in csv.DictReader(file) if row["strategy"] == "ddp")
    assert ddp["peak_memory_gib"] == "61.0" and ddp["gpu_memory_gib"] == "79.11"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "nothing ran twice, so noise is not known: use --repeats 3"),
        ({"final_loss": 9.0}, "no exact strategy has the right loss: wrong"),
        ({"preset": "small"}, "no loss to compare with: run single too, or three exact strategies"),
    ],
)
def test_without_an_answer_the_first_line_says_what_is_missing(tmp_path, changes, said):
    assert answer_in(tmp_path, record("ddp", 80, **changes)) == f"no answer yet: {said}"


# where the time goes


def traced(strategy: str, **ms) -> dict:
    """Return the record of a strategy's trace; it has other steps than what is timed."""
    line = record(strategy, 500, kind="trace", max_steps=6)
    return line | {"id": f"{line['id']}.trace", "trace": ms}


def test_the_answer_says_where_the_time_goes(tmp_path):
    lines = [*repeated("ddp", *NOISY), *repeated("tp", *slower(2))]
    lines.append(traced("ddp", step=100.0, compute=30, exposed=60))
    said = "communication that nothing hides (60%), computing (30%), the rest: Python, "
    assert f"; time goes to {said}" in answer_in(tmp_path, *lines)
    analysis = analysis_of(tmp_path, *REFERENCE, *lines)
    assert len(analysis.runs) == len(lines) + 1, "a trace is no repeat"
    assert re.search(r"^1 +ddp .* 30% +60% ", bench_report.text(analysis), re.M)
    assert re.search(r"^2 +tp .* - +- +0\.50 GiB ", bench_report.text(analysis), re.M)


def events(*spans: tuple[str, str, int, int]) -> list[dict]:
    """Return a trace's events: (category, name, start, end in us); the step lasts 200 us."""
    step = [("cpu_op", "start", 390, 391), ("cpu_op", "stop", 589, 590)]
    whole = [{"cat": cat, "name": name, "ts": start, "dur": end - start}
             for cat, name, start, end in [*step, *spans]]  # fmt: skip
    return [*whole, {"name": "process_name", "ph": "M"}]


@pytest.mark.parametrize(
    ("spans", "compute", "exposed"),
    [
        ([("cpu_op", "aten::mm", 400, 430)], 30, 0),
        (
            [("user_annotation", "gloo:all_reduce", 420, 450), ("cpu_op", "aten::mm", 400, 430)],
            30, 20,
        ),
        ([("cpu_op", "c10d::allreduce_", 400, 450)], 0, 0),  # a call that waits is no computing
        (
            [("kernel", "gemm", 400, 430), ("kernel", "ncclDevKernel_AllReduce_Sum_f32", 420, 460),
             ("kernel", "ncclKernel_Broadcast", 455, 470)],
            30, 40,
        ),
    ],
)  # fmt: skip
def test_a_trace_is_split_into_computing_and_exposed_communication(
    tmp_path, spans, compute, exposed
):
    for rank in (0, 1):
        path = tmp_path / f"rank{rank}.17.pt.trace.json"
        path.write_text(json.dumps({"traceEvents": events(*spans)}))
    expected = {"step": 0.2, "compute": compute / 1e3, "exposed": exposed / 1e3}
    assert split_of(tmp_path) == pytest.approx(expected)


@pytest.mark.full
def test_a_sweep_traces_each_strategy_once(bench, tmp_path, capsys):
    """With a real script, in a sweep that had ended without traces."""
    words = ["--strategies", "ddp", "--seq-len", 16, "--max-steps", 4, "--repeats", 1]
    words += ["--launcher", "fork", "--output-dir", tmp_path / "sweep"]
    assert bench("sweep", *words) == 0
    assert bench("sweep", *words, "--trace") == 0
    ids = [line["id"] for line in load(tmp_path / "sweep").records]
    assert ids == ["single.w1#1", "ddp.w2#1", "single.w1.trace#1", "ddp.w2.trace#1"]
    assert "4 of 4 points" in capsys.readouterr().out
    _, ddp = analyse(load(tmp_path / "sweep")).rows
    assert 0 < ddp.share("exposed") < 1 and 0 < ddp.share("compute") < 1


# predictions


def test_predictions_stand_beside_measurements(tmp_path):
    """State and bytes on the CPU, the peak beyond what was there before on a GPU."""
    lines = [*repeated("ddp", *NOISY), *repeated("fsdp", *slower(2)), *repeated("tp", *slower(3))]
    folder = write(tmp_path / "sweep", [*REFERENCE, *lines])
    kept = {"ddp.w2": {"state": 0.15, "sent": 2 * 2**20},
            "fsdp.w2": {"peak": 0.2, "step": 100.0}, "tp.w2": {}}  # fmt: skip
    (folder / predict.KEPT).write_text(json.dumps(kept))
    analysis = analyse(load(folder))
    text = bench_report.text(analysis)
    state = r"^ddp +weights, gradients, optimizer +153\.60 MiB +153\.60 MiB +1\.00x$"
    assert re.search(state, text, re.M)
    assert re.search(r"^ddp +sent +3\.00 MiB +2\.00 MiB +1\.50x !$", text, re.M)
    assert re.search(r"^fsdp +peak of tensors +0\.20 GiB +0\.20 GiB +1\.00x$", text, re.M)
    assert re.search(r"^fsdp +step +\d+ ms +100 ms +[12]\.\d+x !$", text, re.M)
    said = "ddp: sent is 1.50x of the prediction, where 5% more or less is usual"
    page = " ".join(Page(bench_report.render(analysis, None)).text.split())
    for line in (said, "not predicted: tp"):
        assert line in text.splitlines() and line in page
    assert "153.60 MiB 153.60 MiB 1.00x" in page


# losses


def test_a_wrong_loss_is_marked_and_not_ranked(run_script, tmp_path):
    """The fastest of all has trained something else."""
    folder = write(tmp_path / "sweep", [
        *REFERENCE, *repeated("ddp", 80, 81), *repeated("fsdp", 90, 91),
        *repeated("sabotaged", 10, 11, final_loss=3.2721),
    ])  # fmt: skip
    analysis = analyse(load(folder))
    assert verdicts_of(analysis)["sabotaged"][0] == "wrong"
    assert places_of(analysis) == {"ddp": "1", "fsdp": "2", "sabotaged": ""}
    assert [row.label for row in analysis.groups[-1]][-1] == "sabotaged"
    ended = report(run_script, folder)
    assert ended.codes == [1], ended.stderr
    assert re.search(r"^- +sabotaged .*WRONG \+0\.022$", ended.stdout, re.M)
    assert "sabotaged: WRONG: loss +0.022 from one process, 0.005 allowed" in ended.stdout
    assert "fastest beyond the noise: ddp" in ended.stdout
    assert '<tr class="wrong">' in (folder / "report.html").read_text()


def early(apart: float, step: int = 3) -> list[float]:
    return [loss + apart * (place == step) for place, loss in enumerate(EARLY)]


HALF = {"precision": "bf16-mixed"}


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"losses": early(1.9e-4)}, "ok"),
        ({"losses": early(-2.1e-4)}, "wrong"),
        ({"losses": early(0.1), "exact": False}, "lossy"),
        ({"losses": early(0.0091), **HALF}, "wrong"),
        ({"norms": [8.0007, *NORMS[1:]]}, "ok"),
        ({"norms": [8.0009, *NORMS[1:]]}, "wrong"),
        ({"norms": [7.91, *NORMS[1:]], **HALF}, "wrong"),
        ({"final_loss": 3.2549}, "ok"),
        ({"final_loss": 3.2551}, "wrong"),
        ({"final_loss": 3.56, **HALF}, "wrong"),
        ({"final_loss": float("nan")}, "wrong"),
        ({"global_batch_size": 32}, "no reference"),
        ({"link": "100mbit"}, "ok"),
        ({"status": "skipped", "reason": "2 layers for 3 stages"}, "skipped"),
    ],
)
def test_verdicts(tmp_path, changes, kind):
    halves = repeated("single", 100, 100, **HALF)
    analysis = analysis_of(tmp_path, *REFERENCE, *halves, *repeated("ddp", 80, 81, **changes))
    assert verdicts_of(analysis)["ddp"][0] == kind
    bench_report.text(analysis)


def check(strategy: str, apart: float = 0.0, **changes) -> dict:
    """Return the record of a strategy's first five steps, all losses so far from EARLY."""
    losses = [loss + apart for loss in EARLY]
    own = {"kind": "check", "max_steps": 5, "precision": "32-true", "losses": losses}
    line = record(strategy, 1, **own | changes)
    return line | {"id": f"{line['id']}.{line['point']['precision']}.check"}


@pytest.mark.parametrize(
    ("rounding", "apart", "kind"),
    [
        (0.01, 0.029, "ok"),
        (0.01, 0.031, "wrong"),
        (0.001, 0.0091, "wrong"),
    ],
)
def test_in_16_bits_losses_may_be_apart_by_what_rounding_moves_one_process(
    tmp_path, rounding, apart, kind
):
    """The tolerance for `tiny` called right strategies of a larger model wrong."""
    checks = [check("single"), check("single", rounding, **HALF), check("ddp")]
    lines = [*repeated("single", 9, 9, **HALF), *repeated("ddp", 8, 8, **HALF, losses=early(apart))]
    analysis = analysis_of(tmp_path, *checks, *lines)
    assert verdicts_of(analysis)["ddp"][0] == kind
    assert len(analysis.groups) == 2 and len(analysis.runs) == 4, "checks have no rows"
    allowed = max(0.009, 3 * abs(rounding))
    said = f"losses of the first steps may be {allowed:.2g} apart in bf16-mixed"
    assert said in bench_report.text(analysis)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"apart": 3e-4}, "in float32: loss +0.0003 from one process in the first 5 steps, "),
        ({"norms": [4.0]}, "in float32: gradient norm 0.5 times that of one process"),
    ],
)
def test_what_is_wrong_in_float32_is_wrong_in_16_bits(tmp_path, changes, said):
    """However near its losses are there, where rounding hides it; also behind a link."""
    checks = [check("single"), check("single", 0.1, **HALF), check("ddp", **changes), check("b")]
    lines = [line for name in ("ddp", "b", "single") for line in repeated(name, 8, 8, **HALF)]
    lines += repeated("ddp", 8, 8, **HALF, link="1gbit")
    found = [row for row in analysis_of(tmp_path, *checks, *lines).rows if row.label != "single"]
    kinds = sorted((row.label, row.group.link or "", row.verdict.kind) for row in found)
    assert kinds == [("b", "", "ok"), ("ddp", "", "wrong"), ("ddp", "1gbit", "wrong")]
    assert all(row.verdict.words.startswith(said) for row in found if row.label == "ddp")


def test_where_one_process_cannot_train_most_strategies_stand_for_it(tmp_path):
    """As for a model that fits on no single device; two strategies alone decide nothing."""
    losses = {"ddp": 3.2500, "fsdp": 3.25001, "zero": 3.25002, "sabotaged": 3.9}
    lines = [
        line
        for number, (name, loss) in enumerate(losses.items())
        for line in repeated(name, 80 + 20 * number, 81 + 20 * number, final_loss=loss)
    ]
    analysis = analysis_of(tmp_path, *lines)
    kinds = {name: kind for name, (kind, _) in verdicts_of(analysis).items()}
    assert kinds == {"ddp": "ok", "fsdp": "ok", "zero": "ok", "sabotaged": "wrong"}
    assert places_of(analysis) == {"ddp": "1", "fsdp": "2", "zero": "3", "sabotaged": ""}
    text = bench_report.text(analysis)
    assert "losses compared with the median of 4 strategies: no single process" in text
    assert "from the median of 4 strategies, 0.005 allowed" in text
    few = analysis_of(tmp_path, *lines[:4])
    assert {kind for kind, _ in verdicts_of(few).values()} == {"no reference"}


def test_one_wrong_repeat_is_enough(tmp_path):
    lines = [record("ddp", 80), record("ddp", 80, 2, final_loss=9.0)]
    kind, words = verdicts_of(analysis_of(tmp_path, *REFERENCE, *lines))["ddp"]
    assert kind == "wrong" and words.endswith("(1 of 2 repeats)")


def test_failures_are_shown_with_their_reasons(tmp_path):
    reason = "fsdp.py: rank 0: not enough memory"
    analysis = analysis_of(
        tmp_path, *REFERENCE, record("fsdp", 1, status="failed", reason=reason),
        record("ddp", 80), record("pp", 1, status="skipped", reason="2 layers for 3 stages"),
        points=[*range(9)],
    )  # fmt: skip
    said = bench_report.text(analysis)
    assert f"fsdp: failed: {reason}" in said and "pp: skipped: 2 layers for 3 stages" in said
    assert "5 of 9 points, 1 failed, 1 skipped" in said


# what the numbers are made of


def test_scaling_is_relative_to_one_process(tmp_path):
    lines = [record("ddp", ms, world_size=ranks) for ranks, ms in ((2, 60), (4, 50))]
    ((scaling,),) = analysis_of(tmp_path, record("single", 100), *lines).scaling
    assert scaling.efficiency == pytest.approx({1: 1.0, 2: 100 / 120, 4: 100 / 200})
    ((alone,),) = analysis_of(tmp_path, *lines).scaling
    assert alone.efficiency == pytest.approx({2: 1.0, 4: 60 * 2 / (50 * 4)})


def test_a_script_of_ones_own_may_write_less(tmp_path):
    line = record("own", 80)
    line["results"]["metrics"] = {"final_loss": 3.25, "step_time_ms": 80.0}
    row = analysis_of(tmp_path, *REFERENCE, line).rows[-1]
    assert row.step_time_ms == 80 and row.memory("rest") is None and row.verdict.kind == "ok"


# a baseline


def test_a_baseline_flags_only_what_is_beyond_the_noise_of_both(tmp_path):
    """Old repeats differ by 20%, new ones by 1%: 15% more is nothing, 30% more is a change."""
    old = [*REFERENCE, *repeated("a", 100, 120), *repeated("b", 100, 100), *repeated("gone", 9, 9)]
    new = [
        *REFERENCE, *repeated("a", 126, 127), *repeated("b", 130, 131), *repeated("new", 9, 9),
    ]  # fmt: skip
    sweeps = [load(write(tmp_path / name, own)) for name, own in (("new", new), ("old", old))]
    comparison = compare(*(analyse(sweep) for sweep in sweeps))
    assert comparison.beyond_noise == [("b", "step time")]
    said = bench_report.comparison_text(comparison)
    assert re.search(r" a +1\.15x +1\.00x +1\.00x +1\.00x$", said, re.M)
    assert re.search(r" b +1\.3\dx ! +1\.00x +1\.00x +1\.00x$", said, re.M)
    assert "only in the new one: new" in said and "only in the old one: gone" in said


def test_a_sweep_resumed_under_other_conditions_has_no_places(tmp_path):
    other = {"versions": {"python": "3.12.3", "torch": "2.11.0"}}
    lines = [*REFERENCE, *repeated("ddp", 80, 81), *repeated("fsdp", 120, 121, **other)]
    analysis = analysis_of(tmp_path, *lines)
    assert set(places_of(analysis).values()) == {""}
    said = "several machines or versions, so nothing has a place: torch 2.11.0 and 2.14.1"
    assert said in bench_report.render(analysis, None)
    text = bench_report.text(analysis)
    assert re.search(rf"^warning: .*{said}", text, re.M) and "fastest" not in text


def test_a_baseline_names_other_flags_versions_bytes_and_losses(tmp_path):
    old = write(tmp_path / "old", [*REFERENCE, *repeated("ddp", 80, 81)])
    other = {
        "flags": ["--compile"], "final_loss": 3.5, "bytes_sent_per_step": 2**20,
        "machine": {"cores": 64, "gpu": None, "system": "Linux", "processor": "x86_64"},
    }  # fmt: skip
    new = write(tmp_path / "new", [*REFERENCE, *repeated("ddp", 80, 81, **other)])
    comparison = compare(*(analyse(load(folder)) for folder in (new, old)))
    said = bench_report.comparison_text(comparison)
    assert "differs: cores: 2 -> 2, 64" in said
    assert "ddp: verdict ok -> wrong" in said
    assert re.search(r"ddp: flags \S+ -> \S+ --compile", said)
    assert {name for _, name in comparison.beyond_noise} == {"sent", "loss"}


# the command and its files


def test_report_writes_csv_figures_and_a_page(run_script, tmp_path):
    lines = [*REFERENCE, *repeated("ddp", 80, 81), *repeated("fsdp", 90, 91)]
    folder = write(tmp_path / "sweep", lines, points=[*range(6)])
    ended = report(run_script, folder, "--output-dir", tmp_path / "out", "--baseline", folder)
    assert ended.codes == [0] and not ended.stderr, ended.stderr
    assert "6 of 6 points" in ended.stdout and "nothing changed beyond the noise" in ended.stdout
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    figures = ["communication.png", "memory.png", "speed.png"]
    assert files == sorted(["report.html", "results.csv", *figures])
    for name in figures:
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "out" / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6
    ddp = next(row for row in rows if row["id"] == "ddp.w2#1")
    expected = {
        "strategy": "ddp", "world_size": "2", "repeat": "1", "status": "ok", "verdict": "ok",
        "step_time_ms": "80.0", "tokens_per_second": "25600.0", "bytes_sent_per_step": "3145728",
        "memory_weights_gib": "0.05", "final_loss": "3.25", "mfu": "", "torch": "2.14.1",
        "place": "1",
    }  # fmt: skip
    assert {name: ddp[name] for name in expected} == expected


def test_a_report_replaces_a_report_and_no_other_file(run_script, tmp_path):
    folder = write(tmp_path / "sweep", [*REFERENCE, *repeated("ddp", 80, 81)])
    out = tmp_path / "thesis"
    out.mkdir()
    (out / "results.csv").write_text("my own")
    refused = report(run_script, folder, "--output-dir", out)
    assert_one_line(
        refused, "holds results.csv, which no report wrote", "distributed_benchmarks.py"
    )
    assert [(path.name, path.read_text()) for path in out.iterdir()] == [("results.csv", "my own")]
    (out / "results.csv").rename(out / "my.csv")
    for _ in range(2):
        assert report(run_script, folder, "--output-dir", out).codes == [0]
    assert (out / "communication.png").exists() and (out / "my.csv").read_text() == "my own"


# the page


class Page(html.parser.HTMLParser):
    """Check that tags are closed in order, and keep what they are and what they load."""

    EMPTY = {"meta", "br", "img"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, self.getpos()

    def handle_data(self, data):
        self.text += data


HOSTILE = "<script>alert(1)</script><img src=//x onerror=y>\"'&"


def test_the_page_is_whole_loads_nothing_and_escapes(tmp_path):
    lines = [
        *REFERENCE, *repeated("ddp", 80, 81), *repeated(HOSTILE, 80, 81, final_loss=9.9),
        record("tp", 1, status="failed", reason=HOSTILE, command=HOSTILE),
    ]  # fmt: skip
    folders = [write(tmp_path / name, lines, links=[HOSTILE]) for name in ("new", HOSTILE[:8])]
    new, old = (analyse(load(folder)) for folder in folders)
    (tmp_path / "speed.png").write_bytes(b"drawn")
    source = bench_report.render(new, compare(new, old), [tmp_path / "speed.png"])
    page = Page(source)
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert not {"href", "srcset", "onerror"} & {name for name, _ in page.attributes}
    sources = [value for name, value in page.attributes if name == "src"]
    assert sources == ["data:image/png;base64,ZHJhd24="] and page.tags.count("img") == 1
    assert not re.search(r"https?://|url\(|@import", source)
    assert page.text.count(HOSTILE) >= 4, "shown as text"
    assert "prefers-color-scheme: dark" in source and 'name="viewport"' in source
