"""distributed_benchmarks.py report and compare: who is right, and who is faster."""

import random
from html.parser import HTMLParser

import pytest
from conftest import REPO, load_script
from helpers_benchmarks import TOOL, bench, make_record, make_sweep  # noqa: F401

ROUNDS = range(1, 6)


@pytest.fixture
def report(bench, tmp_path, capsys):  # noqa: F811
    """Show a sweep of these records; return the exit code and the output."""

    def run(records, *words, **settings):
        path = make_sweep(tmp_path / "sweep.json", records, **settings)
        code = bench("report", path, *words)
        return code, capsys.readouterr().out

    return run


def rounds(strategy, ms, spread=0.0, **changes):
    """Return five rounds of a strategy; round n takes `spread` n ms more."""
    return [
        make_record(strategy, n, step_time_ms=ms + spread * n, **changes)
        for n in ROUNDS
    ]


def one_process():
    return rounds("single", 100.0)


# The verdict: who trained the same model?


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "ok"),
        ({"losses": [5.0, 4.9, 4.8, 4.7, 4.60019]}, "ok"),
        ({"losses": [5.0, 4.9003, 4.8, 4.7, 4.6]}, "WRONG: loss +0.0003 in the first"),
        ({"final_loss": 3.01}, "WRONG: loss +0.01 after the last step"),
        ({"final_loss": 2.9}, "WRONG: loss -0.1 after the last step"),
        ({"first_norm": 0.5}, "WRONG: the first gradient's norm is 0.5 times"),
        ({"first_norm": float("nan")}, "WRONG: the first gradient's norm is nan"),
        ({"ranks_started": 1}, "WRONG: 1 ranks, not 2"),
        ({"exact": False, "final_loss": 3.1}, "lossy: loss +0.1000"),
        ({"status": "failed", "reason": "no luck"}, "failed: no luck"),
    ],
)
def test_a_wrong_loss_has_no_place(report, changes, verdict):
    records = [*one_process(), *rounds("tp", 200.0), *rounds("ddp", 50.0, **changes)]
    code, printed = report(records)
    if verdict == "ok":
        assert code == 0 and printed.startswith("take ddp: the fastest")
        return
    assert f"\nddp: {verdict}" in printed
    assert printed.startswith("take tp, the only one with the right loss")
    assert code == (0 if verdict.startswith("lossy") else 1)
    assert ("not ddp: the loss is wrong" in printed) == verdict.startswith("WRONG")


def test_one_wrong_round_is_enough(report):
    records = [*one_process(), *rounds("tp", 200.0), *rounds("ddp", 50.0)]
    records[-1]["final_loss"] = 4.0
    assert "\nddp: WRONG" in report(records)[1]


def test_what_float32_shows_counts_in_16_bits(report):
    records = []
    for strategy, norm in (("single", 1.0), ("ddp", 1.0), ("tp", 0.5)):
        records += rounds(strategy, 100.0, precision="bf16-mixed")
        records.append(make_record(strategy, kind="check", max_steps=5))
        records[-1] |= {"id": f"{strategy}.check", "first_norm": norm}
    printed = report(records)[1]
    assert "\ntp: WRONG: in float32: the first gradient's norm is 0.5" in printed
    assert "ddp: " not in printed.split("\n", 1)[1]


def test_three_exact_strategies_replace_one_process(report):
    records = [*rounds("ddp", 100.0), *rounds("tp", 200.0)]
    assert "no strategy has the right loss" in report(records)[1]
    records += rounds("fsdp-full", 50.0, final_loss=3.5)
    printed = report(records)[1]
    assert "\nfsdp-full: WRONG: loss +0.5" in printed
    assert printed.startswith("take ddp: the fastest beyond the noise")


# The answer: who is faster?


@pytest.mark.parametrize(
    ("rows", "answer", "places"),
    [
        ({"ddp": (100, 0), "tp": (120, 0)}, "ddp: the fastest", "1 2"),
        ({"ddp": (120, 0), "tp": (100, 0)}, "tp: the fastest", "1 2"),
        # The same order in each round is a difference; a spread is none.
        ({"tp": (100, 20), "ddp": (110, 22)}, "tp: the fastest", "1 2"),
        ({"tp": (100, 30), "ddp": (195, 0)}, "ddp: the simplest of ddp, tp", "1-2 1-2"),
        (
            {"tp": (100, 8), "zero-2": (125, 0), "ddp": (300, 0)},
            "zero-2: the simplest of zero-2, tp",
            "1-2 1-2 3",
        ),
    ],
)
def test_the_answer_is_the_fastest_or_the_simplest(report, rows, answer, places):
    records = [*one_process()]
    for name, (ms, spread) in rows.items():
        records += rounds(name, ms, spread)
    _, printed = report(records)
    assert printed.startswith(f"take {answer}"), printed
    table = printed.split("---\n", 1)[1].splitlines()
    assert [line.split()[0] for line in table[: len(rows)]] == places.split()


def test_equal_strategies_are_seldom_told_apart():
    """A 95% interval is wrong in 5% of cases; 400 trials of 5 rounds vary by 2%."""
    compute_interval = (
        load_script(TOOL).runner.sys.modules["bench.analysis"].compute_interval
    )
    random.seed(0)
    trials = [
        compute_interval([random.lognormvariate(0.0, 0.1) for _ in ROUNDS])
        for _ in range(400)
    ]
    assert 0.01 < sum(ratio.differs for ratio in trials) / 400 < 0.09
    faster = [
        compute_interval([random.lognormvariate(0.2, 0.1) for _ in ROUNDS])
        for _ in range(400)
    ]
    assert sum(ratio.differs for ratio in faster) / 400 > 0.8


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ([make_record("ddp"), make_record("tp"), *one_process()], "nothing ran twice"),
        ([*one_process(), *rounds("ddp", 10.0)], "name another strategy"),
        (
            [
                *one_process(),
                *rounds("ddp", 10.0),
                *rounds("tp", 9.0, where={"cpu": "another", "cores": 2}),
            ],
            "points of several machines or versions do not compare",
        ),
        ([], "no strategy has run"),
    ],
)
def test_without_an_answer_the_first_line_says_what_is_missing(report, records, says):
    first = report(records)[1].splitlines()[0]
    assert first.startswith("no answer yet: ") and says in first


def test_gpu_memory_is_part_of_the_answer(report):
    memory = {"gpu_memory_gib": 80.0}
    records = [*one_process(), *rounds("ddp", 50.0, peak_memory_gib=40.0, **memory)]
    records += rounds("fsdp-full", 60.0, peak_memory_gib=20.0, **memory)
    first = report(records)[1].splitlines()[0]
    assert first.endswith("it allocates 40.0 of 80 GiB, fsdp-full 20.0 GiB")


@pytest.mark.parametrize(("others", "busy"), [(0.1, False), (0.6, True), (None, False)])
def test_a_busy_machine_is_named_with_repeat(report, others, busy):
    records = [*one_process(), *rounds("ddp", 10.0), *rounds("tp", 20.0)]
    for record in records:
        record["cores_of_others"] = others
        if others is None:
            del record["cores_of_others"]  # ranks ran on other machines
    second = report(records)[1].splitlines()[1]
    assert ("BUSY: other work used 0.6 cores: repeat" in second) == busy
    assert second.startswith("measured on 2 cores of a CPU, torch 2.14.1, 15 of 15")


def test_speed_per_rank_is_shown_for_gpus_only(report):
    records = []
    for ranks, tokens in ((2, 200), (4, 300)):
        for strategy in ("ddp", "tp", "zero-2"):
            fields = {"world_size": ranks, "ranks_started": ranks}
            fields |= {"tokens_per_step": tokens, "gpu_memory_gib": 80.0}
            fields["id"] = f"{strategy}.w{ranks}#1"
            records.append(make_record(strategy, **fields))
    _, printed = report(records)
    assert "ddp tiny 32-true" in printed and "100%  75%" in printed
    assert printed.startswith("tiny, 32-true, 2 ranks, 16 x 64 tokens: no answer yet")
    for record in records:
        record["gpu_memory_gib"] = None
    assert "75%" not in report(records)[1]


def test_an_incomplete_sweep_says_how_to_resume(report):
    printed = report([*one_process(), *rounds("ddp", 10.0)], points=40)[1]
    assert "10 of 40 points" in printed
    assert printed.endswith("not complete; resume: python sweep\n")


def test_the_planner_has_a_column(report):
    records = rounds("single", 10.0, precision="bf16-mixed")
    sizes = "--global-batch-size 16 --micro-batch-size 8 --seq-len 64"
    flags = f"--model tiny --gpus 2 --tp 1 --pp 1 --dp 2 {sizes} --zero 0"
    for name in ("ddp", "tp"):
        records += rounds(name, 20.0, precision="bf16-mixed", planner=flags)
    printed = report(records, "--predict")[1]
    assert "planner" in printed and "3.07 MiB" in printed


# Pages


class Tags(HTMLParser):
    VOID = ("meta", "br")

    def __init__(self):
        super().__init__()
        self.open, self.loaded = [], []

    def handle_starttag(self, tag, attributes):
        self.loaded += [value for name, value in attributes if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_html_page_is_whole_and_loads_nothing(report, tmp_path):
    records = [
        *one_process(),
        *rounds("ddp", 10.0),
        *rounds("<b>", 20.0, final_loss=9.0),
    ]
    report(records, "--output-dir", tmp_path / "page")
    html = (tmp_path / "page/report.html").read_text()
    tags = Tags()
    tags.feed(html)
    assert not tags.open and not tags.loaded
    assert "&lt;b&gt;: WRONG" in html and "<b>" not in html
    assert "take ddp, the only one" in html.split("</h1>")[0]
    assert len((tmp_path / "page/results.csv").read_text().splitlines()) == 16


@pytest.mark.parametrize(
    "path", sorted((REPO / "benchmarks/results").glob("*.json")), ids=lambda p: p.stem
)
def test_a_page_of_the_gallery_is_made_of_its_json(path):
    gallery = load_script(TOOL).gallery
    assert path.with_suffix(".md").read_text() == gallery.render_page(path)


def test_a_submission_can_be_reported_and_compared(
    report,
    bench,  # noqa: F811
    tmp_path,
    monkeypatch,
    capsys,
):
    monkeypatch.setattr(load_script(TOOL).gallery, "FOLDER", tmp_path / "results")
    records = [*one_process(), *rounds("ddp", 10.0), *rounds("tp", 20.0)]
    words = ("--submit", "tiny_2xcpu_me", "--note", "NVLink 4, me")
    first = report(records, *words)[1]
    path = tmp_path / "results/tiny_2xcpu_me.json"
    page = path.with_suffix(".md").read_text()
    assert "take ddp: the fastest" in page and "NVLink 4, me" in page
    assert bench("report", path) == 0
    assert capsys.readouterr().out.splitlines()[:8] == first.splitlines()[:8]


# compare


@pytest.mark.parametrize(
    ("ms", "spread", "says"),
    [
        (20.0, 0.0, "1 slower, 1 within the noise"),
        (5.0, 0.0, "1 faster, 1 within the noise"),
        (6.0, 1.5, "2 within the noise"),
    ],
)
def test_two_sweeps_differ_only_beyond_the_noise(
    bench,  # noqa: F811
    tmp_path,
    capsys,
    ms,
    spread,
    says,
):
    old = [*one_process(), *rounds("ddp", 10.0, 0.1), *rounds("tp", 20.0, 0.1)]
    new = [*one_process(), *rounds("ddp", ms, spread), *rounds("tp", 20.0, 0.1)]
    for record in new:
        record["where"] = record["where"] | {"torch": "2.15.0"}
    paths = [
        make_sweep(tmp_path / "a.json", old),
        make_sweep(tmp_path / "b.json", new, seed=1),
    ]
    assert bench("compare", *paths) is None
    printed = capsys.readouterr().out
    assert printed.startswith(f"2 strategies, B against A: {says}\nA: ")
    assert "seed            0       1" in printed
    assert "torch           2.14.1  2.15.0" in printed


def test_a_comparison_names_a_strategy_that_became_wrong(bench, tmp_path, capsys):  # noqa: F811
    new = rounds("ddp", 5.0, final_loss=9.0)
    a = make_sweep(tmp_path / "a.json", [*one_process(), *rounds("ddp", 10.0)])
    b = make_sweep(tmp_path / "b.json", [*one_process(), *new])
    bench("compare", a, b)
    assert "ok -> WRONG" in capsys.readouterr().out
    c = make_sweep(tmp_path / "c.json", [*one_process(), *rounds("tp", 1.0)])
    bench("compare", a, c)
    assert "no strategy trained the same job in both" in capsys.readouterr().out
    (tmp_path / "d.json").write_text("{")
    assert "d.json cannot be read" in bench("compare", a, tmp_path / "d.json")
    assert "is not a sweep" in bench("report", tmp_path / "nowhere")
