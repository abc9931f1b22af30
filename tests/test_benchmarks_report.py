"""The report of benchmarks/: nothing is ranked inside the noise, nothing wrong is ranked at all."""

import csv
import html.parser
import json
import random
import re
from pathlib import Path

import pytest
from conftest import assert_one_line

import bench_html
import bench_tables
import bench_words
from bench_analysis import analyse, leaders
from bench_baseline import beyond_noise, compare
from bench_store import load

SCRIPT = "benchmarks/distributed_benchmarks.py"


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
    line = {
        "id": f"{strategy}.w{ranks}#{repeat}", "point": point, "repeat": repeat, "status": "ok",
        "reason": None, "seconds": 8.1, "started": "2026-03-01T10:00:00+00:00",
        "launcher": "fork", "command": f"torchrun {strategy}", "results": results,
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
    return analyse([load(write(tmp_path / "sweep", list(records), **settings))])


def report(run_script, *argv):
    return run_script(SCRIPT, "report", *argv, environ={})


REFERENCE = repeated("single", 100, 100)


def ranks_of(analysis) -> dict[str, str]:
    return {row.label: row.rank for row in analysis.rows if row.group.world_size == 2}


def verdicts_of(analysis) -> dict[str, tuple[str, str]]:
    return {row.label: (row.verdict.kind, row.verdict.words) for row in analysis.rows}


# noise and ranks


def test_strategies_that_differ_by_less_than_the_noise_share_a_rank(tmp_path):
    """Repeats of a differ by 10%: b is within it of a, c is beyond it of both."""
    analysis = analysis_of(
        tmp_path, *REFERENCE, *repeated("a", 100, 110), *repeated("b", 112, 112),
        *repeated("c", 130, 130),
    )  # fmt: skip
    assert analysis.noise.width == pytest.approx(0.10)
    assert (analysis.noise.row.label, analysis.noise.row.timed_repeats) == ("a", 2)
    assert ranks_of(analysis) == {"a": "1=", "b": "1=", "c": "3"}
    said = bench_tables.text(analysis)
    assert "fastest, and not told apart: a and b" in said
    assert "noise: 10%, the spread of 2 repeats of a on 2 ranks" in said


@pytest.mark.parametrize("seed", range(20))
def test_no_order_is_claimed_inside_the_noise(tmp_path, seed):
    """Of any two strategies that are closer than the noise, none stands before the other."""
    draw = random.Random(seed)
    names = "abcdefgh"
    lines = [repeated(name, *(draw.uniform(100, 130) for _ in range(2))) for name in names]
    analysis = analysis_of(tmp_path, *REFERENCE, *sum(lines, []))
    rows = [row for row in analysis.rows if row.label in names]
    width = analysis.noise.width
    for one in rows:
        for two in rows:
            slow, fast = sorted((one.step_time_ms, two.step_time_ms), reverse=True)
            assert slow > fast * (1 + width) or one.rank == two.rank
    assert {row.label for row in leaders(rows, width)} <= {
        row.label for row in rows if row.rank.startswith("1")
    }


def test_nothing_is_ranked_without_repeats(tmp_path):
    analysis = analysis_of(tmp_path, record("single", 100), record("a", 50), record("b", 500))
    assert analysis.noise.width is None and set(ranks_of(analysis).values()) == {""}
    said = bench_tables.text(analysis)
    assert "noise: unknown" in said and "fastest" not in said


def test_a_strategy_that_ran_once_is_not_ranked_among_those_that_were_repeated(tmp_path):
    analysis = analysis_of(
        tmp_path, *REFERENCE, *repeated("a", 90, 91), *repeated("b", 120, 121), record("c", 50)
    )
    assert ranks_of(analysis) == {"a": "1", "b": "2", "c": ""}


def test_warm_up_is_left_out(tmp_path):
    row = analysis_of(tmp_path, record("single", 100)).rows[0]
    assert row.step_time_ms == 100 and row.percentile_ms(90) < 110
    whole = analysis_of(tmp_path, record("single", 100), untimed_steps=0).rows[0]
    assert whole.percentile_ms(90) > 900


# losses


def test_a_wrong_loss_is_marked_and_not_ranked(run_script, tmp_path):
    """The fastest of all has trained something else."""
    folder = write(tmp_path / "sweep", [
        *REFERENCE, *repeated("ddp", 80, 81), *repeated("fsdp", 90, 91),
        *repeated("sabotaged", 10, 11, final_loss=3.2521),
    ])  # fmt: skip
    analysis = analyse([load(folder)])
    assert verdicts_of(analysis)["sabotaged"][0] == "wrong"
    assert ranks_of(analysis) == {"ddp": "1", "fsdp": "2", "sabotaged": ""}
    assert [row.label for row in analysis.groups[-1]][-1] == "sabotaged"
    ended = report(run_script, folder)
    assert ended.codes == [1], ended.stderr
    assert re.search(r"^- +sabotaged .*WRONG \+0\.0021$", ended.stdout, re.M)
    assert "sabotaged: WRONG: loss +0.0021 from one process, 0.0001 allowed" in ended.stdout
    assert "fastest beyond the noise: ddp" in ended.stdout
    assert '<tr class="wrong">' in (folder / "report.html").read_text()


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"final_loss": 3.25008}, "ok"),
        ({"final_loss": 3.25012}, "wrong"),
        ({"final_loss": float("nan")}, "wrong"),
        ({"final_loss": None}, "wrong"),
        ({"final_loss": 3.4, "exact": False}, "lossy"),
        ({"final_loss": float("nan"), "exact": False}, "wrong"),
        ({"preset": "small"}, "no reference"),
        ({"global_batch_size": 32}, "no reference"),
        ({"link": "100mbit"}, "ok"),
        ({"status": "timeout", "reason": "timeout after 600 s"}, "timeout"),
        ({"status": "skipped", "reason": "2 layers for 3 stages"}, "skipped"),
    ],
)
def test_verdicts(tmp_path, changes, kind):
    analysis = analysis_of(tmp_path, *REFERENCE, *repeated("ddp", 80, 81, **changes))
    assert verdicts_of(analysis)["ddp"][0] == kind
    bench_tables.text(analysis)


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
    assert ranks_of(analysis) == {"ddp": "1", "fsdp": "2", "zero": "3", "sabotaged": ""}
    text = bench_tables.text(analysis)
    assert "losses compared with the median of 4 strategies: no single process" in text
    assert "from the median of 4 strategies, 0.0001 allowed" in text
    few = analysis_of(tmp_path, *lines[:4])
    assert {kind for kind, _ in verdicts_of(few).values()} == {"no reference"}


def test_each_link_has_a_noise_of_its_own(tmp_path):
    """A noisy single process and a fast network say nothing about times behind a slow link."""
    slow = {"link": "100mbit"}
    lines = [
        *repeated("single", 50, 150), *repeated("ddp", 60, 70), *repeated("fsdp", 61, 71),
        *repeated("ddp", 300, 306, **slow), *repeated("fsdp", 600, 606, **slow),
    ]  # fmt: skip
    analysis = analysis_of(tmp_path, *lines)
    assert analysis.noise.width == pytest.approx(2.0)
    assert analysis.noise_of_link["100mbit"].width == pytest.approx(0.02)
    behind = [rows for rows in analysis.groups if rows[0].group.link == "100mbit"]
    assert [[row.rank for row in rows] for rows in behind] == [["1", "2"]]
    text = bench_tables.text(analysis)
    assert "noise: 200%" in text and "noise over 100mbit: 2%" in text
    assert "fastest beyond the noise: ddp" in text


def test_in_16_bits_a_loss_may_differ_more(tmp_path):
    half = {"precision": "bf16-mixed"}
    lines = [record("single", 100, **half), record("ddp", 80, final_loss=3.258, **half)]
    assert verdicts_of(analysis_of(tmp_path, *lines))["ddp"][0] == "ok"


def test_one_wrong_repeat_is_enough(tmp_path):
    lines = [record("ddp", 80), record("ddp", 80, 2, final_loss=9.0)]
    kind, words = verdicts_of(analysis_of(tmp_path, *REFERENCE, *lines))["ddp"]
    assert kind == "wrong" and words.endswith("(1 of 2 repeats)")


def test_a_script_that_ran_on_other_ranks_is_wrong(tmp_path):
    line = record("ddp", 80)
    line["results"]["world_size"] = 1
    verdict = verdicts_of(analysis_of(tmp_path, *REFERENCE, line))["ddp"]
    assert verdict == ("wrong", "its world size was 1 instead of 2")


def test_failures_are_shown_with_their_reasons(tmp_path):
    reason = "fsdp.py: rank 0: not enough memory"
    analysis = analysis_of(
        tmp_path, *REFERENCE, record("fsdp", 1, status="failed", reason=reason),
        record("ddp", 80), record("pp", 1, status="skipped", reason="2 layers for 3 stages"),
        points=[*range(9)],
    )  # fmt: skip
    said = bench_tables.text(analysis)
    assert f"fsdp: failed: {reason}" in said and "pp: skipped: 2 layers for 3 stages" in said
    assert "5 of 9 points, 1 failed, 1 skipped" in said


def test_a_sweep_of_failures_is_reported(tmp_path):
    failed = {"status": "failed", "reason": "no network"}
    analysis = analysis_of(tmp_path, record("single", 1, **failed), record("ddp", 1, **failed))
    assert "ddp: failed: no network" in bench_tables.text(analysis)
    assert "None" not in bench_tables.text(analysis)
    assert "no network" in bench_html.render(analysis, None)


def test_collectives_have_tables_of_their_own(run_script, tmp_path):
    side = {"size": 8, "time_us": 12.5, "p50_us": 12, "p95_us": 14, "algbw_gb_s": 0.1,
            "busbw_gb_s": 0.1, "wrong": 0}  # fmt: skip
    metrics = {"sweeps": {"all_reduce": [{"out_of_place": side, "in_place": side}]}}
    line = record("comm", 1, results={"metrics": metrics, "device": "cpu"})
    line["point"] = {"kind": "comm", "collective": "all_reduce", "world_size": 2, "link": None}
    folder = write(tmp_path / "sweep", [line])
    ended = report(run_script, folder)
    assert ended.codes == [0], ended.stderr
    assert re.search(r"^all_reduce +2 .* 12\.5 ", ended.stdout, re.M)
    assert re.search(r">12\.5[^<]*</td>", (folder / "report.html").read_text())
    side["wrong"] = 3
    ended = report(run_script, write(tmp_path / "wrong", [line]))
    assert ended.codes == [1] and "WRONG" in ended.stdout


# what the numbers are made of


def test_scaling_is_relative_to_one_process(tmp_path):
    lines = [record("ddp", ms, world_size=ranks) for ranks, ms in ((2, 60), (4, 50))]
    ((scaling,),) = analysis_of(tmp_path, record("single", 100), *lines).scaling
    assert scaling.efficiency == pytest.approx({1: 1.0, 2: 100 / 120, 4: 100 / 200})
    ((alone,),) = analysis_of(tmp_path, *lines).scaling
    assert alone.efficiency == pytest.approx({2: 1.0, 4: 60 * 2 / (50 * 4)})


def test_weak_scaling_keeps_the_batch_of_a_rank(tmp_path):
    more = {"global_batch_size": 32, "tokens_per_step": 4096, "world_size": 2}
    lines = [record("single", 100), record("ddp", 125, **more)]
    ((scaling,),) = analysis_of(tmp_path, *lines, scaling="weak").scaling
    assert scaling.efficiency == pytest.approx({1: 1.0, 2: 0.8})


def test_memory_is_the_sum_of_its_parts(tmp_path):
    row = analysis_of(tmp_path, record("single", 100)).rows[0]
    assert row.memory("rest") == pytest.approx(0.05) and row.state_gib == pytest.approx(0.15)


def test_a_script_of_ones_own_may_write_less(tmp_path):
    line = record("own", 80)
    line["results"]["metrics"] = {"final_loss": 3.25, "step_time_ms": 80.0}
    row = analysis_of(tmp_path, *REFERENCE, line).rows[-1]
    assert row.step_time_ms == 80 and row.memory("rest") is None and row.verdict.kind == "ok"


def test_the_order_of_records_never_matters(run_script, tmp_path):
    lines = [
        *REFERENCE, *repeated("ddp", 80, 81), *repeated("ddp", 50, 51, world_size=4),
        *repeated("fsdp", 90, 88, link="100mbit"), record("tp", 1, status="failed", reason="x"),
        *repeated("lossy", 70, 71, exact=False, final_loss=3.3),
    ]  # fmt: skip
    seen = set()
    for seed in range(5):
        random.Random(seed).shuffle(lines)
        folder = write(tmp_path / "sweep", lines)
        analysis = analyse([load(folder)])
        seen.add((bench_tables.text(analysis), bench_html.render(analysis, None)))
    assert len(seen) == 1


# several sweeps, and a baseline


def test_sweeps_of_one_machine_stand_side_by_side(tmp_path):
    sweeps = [load(write(tmp_path / name, [*REFERENCE, *repeated("ddp", 80, 81)])) for name in "ab"]
    rows = [row.label for row in analyse(sweeps).groups[-1]]
    assert rows == [f"ddp ({tmp_path}/a)", f"ddp ({tmp_path}/b)"]


def test_sweeps_of_other_machines_are_not_compared(tmp_path):
    one = write(tmp_path / "one", [*REFERENCE, *repeated("ddp", 80, 81)])
    other = repeated("ddp", 70, 71, versions={"python": "3.12.3", "torch": "2.11.0"})
    two = write(tmp_path / "two", other)
    analysis = analyse([load(one), load(two)])
    assert [[row.label for row in rows] for rows in analysis.groups] == [
        ["single"],
        ["ddp"],
        ["ddp"],
    ]
    assert verdicts_of(analysis)["ddp"][0] == "no reference", "of the folder two"
    assert analysis.conditions["torch"] == "2.14.1 | 2.11.0"


def test_a_baseline_flags_only_what_is_beyond_the_noise_of_both(tmp_path):
    """Old repeats differ by 20%, new ones by 1%: 15% more is nothing, 30% more is a change."""
    old = [*REFERENCE, *repeated("a", 100, 120), *repeated("b", 100, 100), *repeated("gone", 9, 9)]
    new = [
        *REFERENCE, *repeated("a", 126, 127), *repeated("b", 130, 131), *repeated("new", 9, 9),
    ]  # fmt: skip
    sweeps = [load(write(tmp_path / name, own)) for name, own in (("new", new), ("old", old))]
    comparison = compare(*(analyse([sweep]) for sweep in sweeps))
    changes = [(pair.row.label, change.name) for pair, change in beyond_noise(comparison)]
    assert changes == [("b", "step time")]
    said = bench_tables.comparison_text(comparison)
    assert re.search(r" a +1\.15x +1\.00x +1\.00x +1\.00x$", said, re.M)
    assert re.search(r" b +1\.3\dx ! +1\.00x +1\.00x +1\.00x$", said, re.M)
    assert "only in the new one: new" in said and "only in the old one: gone" in said


def test_a_baseline_names_other_flags_versions_bytes_and_losses(tmp_path):
    old = write(tmp_path / "old", [*REFERENCE, *repeated("ddp", 80, 81)])
    other = {
        "flags": ["--compile"], "final_loss": 3.5, "bytes_sent_per_step": 2**20,
        "machine": {"cores": 64, "gpu": None, "system": "Linux", "processor": "x86_64"},
    }  # fmt: skip
    new = write(tmp_path / "new", [*REFERENCE, *repeated("ddp", 80, 81, **other)])
    comparison = compare(*(analyse([load(folder)]) for folder in (new, old)))
    said = bench_tables.comparison_text(comparison)
    assert "differs: cores: 2 -> 2, 64" in said
    assert "ddp: verdict ok -> wrong" in said
    assert re.search(r"ddp: flags \S+ -> \S+ --compile", said)
    assert {change.name for _, change in beyond_noise(comparison)} == {"sent", "loss"}


def test_without_repeats_a_baseline_flags_no_time(tmp_path):
    folders = [write(tmp_path / name, [record("ddp", ms)]) for name, ms in (("a", 10), ("b", 99))]
    comparison = compare(*(analyse([load(folder)]) for folder in folders))
    assert not beyond_noise(comparison)


# the command and its files


def test_report_writes_csv_figures_and_a_page(run_script, tmp_path):
    lines = [*REFERENCE, *repeated("ddp", 80, 81), *repeated("fsdp", 90, 91)]
    folder = write(tmp_path / "sweep", lines, points=[*range(6)])
    ended = report(run_script, folder, "--output-dir", tmp_path / "out", "--baseline", folder)
    assert ended.codes == [0] and not ended.stderr, ended.stderr
    assert "6 of 6 points" in ended.stdout and "nothing changed beyond the noise" in ended.stdout
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    figures = ["communication.png", "memory.png", "scaling.png", "speed.png"]
    assert files == sorted(["report.html", "results.csv", *figures])
    for name in figures:
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "out" / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6
    ddp = next(row for row in rows if row["id"] == "ddp.w2#1")
    expected = {
        "strategy": "ddp", "world_size": "2", "repeat": "1", "status": "ok", "verdict": "ok",
        "step_time_ms": "80", "tokens_per_second": "25600.0", "bytes_sent_per_step": "3145728",
        "memory_weights_gib": "0.05", "final_loss": "3.25", "mfu": "", "torch": "2.14.1",
    }  # fmt: skip
    assert {name: ddp[name] for name in expected} | {"step_time_ms": "80"} == expected


def test_a_truncated_file_gives_a_warning_and_the_other_points(run_script, tmp_path):
    folder = write(tmp_path / "sweep", [*REFERENCE, record("ddp", 80)], points=[*range(4)])
    with (folder / "results.jsonl").open("a") as file:
        file.write('{"id": "ddp.w2#2", "po')
    ended = report(run_script, folder)
    assert ended.codes == [0], ended.stderr
    assert f"warning: {folder}/results.jsonl line 4 is truncated" in ended.stdout
    assert "3 of 4 points" in ended.stdout
    assert "line 4 is truncated" in (folder / "report.html").read_text()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["none"], "none holds no sweep"),
        (["empty"], "empty has no results yet"),
        (["full", "--baseline", "none"], "none holds no sweep"),
        (["full", "--output-dir", "full/sweep.json"], "--output-dir full/sweep.json cannot be"),
    ],
)
def test_bad_input_gets_one_line(run_script, tmp_path, monkeypatch, argv, says):
    monkeypatch.chdir(tmp_path)
    write(Path("empty"), [])
    write(Path("full"), REFERENCE)
    assert_one_line(report(run_script, *argv), says, "distributed_benchmarks.py")


# the page


class Page(html.parser.HTMLParser):
    """Check that tags are closed in order, and keep what they are and what they load."""

    EMPTY = {"meta", "br"}

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
    new, old = (analyse([load(folder)]) for folder in folders)
    source = bench_html.render(new, compare(new, old))
    page = Page(source)
    assert not {"script", "img", "link", "iframe", "object"} & set(page.tags)
    assert not {"src", "href", "srcset", "onerror"} & {name for name, _ in page.attributes}
    assert not re.search(r"https?://|url\(|@import", source)
    assert page.text.count(HOSTILE) >= 4, "shown as text"
    assert "prefers-color-scheme: dark" in source and 'name="viewport"' in source


def test_the_page_says_what_the_terminal_says(tmp_path):
    analysis = analysis_of(
        tmp_path, *REFERENCE, *repeated("ddp", 80, 88), *repeated("fsdp", 90, 91),
        *repeated("bad", 10, 10, final_loss=9.0),
    )  # fmt: skip
    page = Page(bench_html.render(analysis, None))
    shown = " ".join(page.text.split()).lower()
    for line in (bench_words.noise(analysis), bench_words.conclusion(analysis),
                 *bench_words.progress(analysis), "no difference beyond the noise: ddp and fsdp",
                 "bad: WRONG: loss +5.8 from one process, 0.0001 allowed"):  # fmt: skip
        assert line.lower() in shown, line
