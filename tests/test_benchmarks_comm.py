"""comm: its tables say what the script measured, wrong data is never fast data, bad input."""

import csv
import json
import re

import pytest
from conftest import REPO, load_script

from bench import comm as bench_comm
from bench import comm_tables as bench_comm_tables
from bench import launch as bench_launch
from bench import settings as bench_settings
from bench.comm_tables import WRONG, comm_table, fit_table, wrong_elements
from bench.store import load
from legacy_common import cli

full = pytest.mark.full
QUICK = ("--collectives", "all_reduce", "-b", "8", "-e", "4K", "-f", "64", "-n", "2")


def figures(size, us, wrong=0, bus=1.0):
    rate = size / us / 1e3
    keys = {"time_us": us, "p50_us": us - 1, "p95_us": 2 * us}
    return keys | {"size": size, "wrong": wrong, "algbw_gb_s": rate, "busbw_gb_s": bus * rate}


def record(name="all_reduce", ranks=2, repeat=1, sizes=((8, 10.0), (8192, 20.0)), wrong=0, **more):
    """What the store holds of a run, with times that are easy to check."""
    sweep = [figures(size, us, wrong) for size, us in sizes]
    fitted = {
        "alpha_us": 9.0,
        "busbw_gb_s": 0.5,
        "crossover_bytes": 4500.0,
        "best_busbw_gb_s": 20.0,
    }
    metrics = {f"{name} {key}": value for key, value in fitted.items()} | {"sweeps": {name: sweep}}
    point = {"kind": "comm", "collectives": [name], "world_size": ranks, "link": None}
    found = {"id": f"comm.w{ranks}#{repeat}", "point": point, "repeat": repeat}
    return found | {"status": "ok", "reason": None, "results": {"metrics": metrics}} | more


def rows_of(table):
    headers, rows = table
    assert all(len(row) == len(headers) for row in rows)
    return rows


# tables


def test_the_tables_hold_what_the_script_wrote():
    names = ("all_reduce", "2", "-")
    assert rows_of(comm_table([record()])) == [
        (*names, "8", "10.0 us", "-", "9.0 us", "20.0 us", "0.0008 GB/s", "0.0008 GB/s", "0"),
        (*names, "8,192", "20.0 us", "-", "19.0 us", "40.0 us", "0.4096 GB/s", "0.4096 GB/s", "0"),
    ]
    assert rows_of(fit_table([record()])) == [
        (*names, "9.0 us", "0.5000 GB/s", "4.5 KB", "20.00 GB/s")
    ]


def test_repeats_are_one_row_with_their_median_in_any_order():
    runs = [record(repeat=n, sizes=((8, us),)) for n, us in ((1, 10.0), (2, 500.0), (3, 12.0))]
    assert [row[4:6] for row in rows_of(comm_table(runs))] == [("12.0 us", "4900%")]
    assert comm_table(runs) == comm_table(runs[::-1])
    assert len(rows_of(fit_table(runs))) == 1


def test_wrong_data_is_marked_whatever_its_speed():
    """Wrong in one repeat is enough: sums over repeats, not medians."""
    runs = [record(repeat=1), record(repeat=2, wrong=3), record(repeat=3)]
    assert [row[-1] for row in rows_of(comm_table(runs))] == ["3 WRONG", "3 WRONG"]
    assert wrong_elements(runs) == 6 and wrong_elements(runs[::2]) == 0


def test_what_a_run_did_not_come_to_has_its_reason_beside_what_it_measured():
    """The second collective hung: the figures of the first are kept."""
    hung = record(status="timeout", reason="timeout after 600 s")
    hung["point"]["collectives"] = ["all_reduce", "broadcast"]
    assert [row[:1] + row[3:5] for row in rows_of(comm_table([hung]))] == [
        ("all_reduce", "8", "10.0 us"), ("all_reduce", "8,192", "20.0 us"),
        ("broadcast", "timeout: timeout after 600 s", ""),
    ]  # fmt: skip


def test_the_collectives_are_those_of_the_script():
    script = load_script(bench_comm.SCRIPT)
    assert set(bench_comm_tables.COLLECTIVES) == set(script.COLLECTIVES)


# runs


def parsed(*words):
    parser = bench_settings.Parser()
    bench_comm.add_arguments(parser)
    return parser.parse_args([*map(str, words)])


def comm(*words):
    return bench_comm.run(parsed("--launcher", "fork", *words))


@pytest.fixture
def fake(monkeypatch):
    """Stand in for the launcher: `ends(ranks)` says a script's exit code and what it wrote."""

    def install(ends):
        started = []

        def start(launcher, script, arguments, world_size, folder, timeout_s, link):
            names = arguments[arguments.index("--collective") + 1 : arguments.index("-b")]
            output = REPO / arguments[arguments.index("--output-dir") + 1]
            started.append(f"{' '.join(names)}.{world_size}")
            folder.mkdir(parents=True)
            code, results = ends(world_size)
            if results is not None:
                output.mkdir()
                (output / "results.json").write_text(json.dumps(results))
            verdict = f"FAILED: {names[-1]}: wrong elements\n" if code == 1 else ""
            return bench_launch.Outcome(code, 0.1, verdict, "")

        monkeypatch.setattr(bench_launch, "start", start)
        return started

    return install


def test_repeats_alternate_and_a_second_call_runs_what_is_missing(fake, tmp_path, capsys):
    both = record()["results"]
    both["metrics"]["sweeps"] |= record("broadcast")["results"]["metrics"]["sweeps"]
    started = fake(lambda ranks: (0, both))
    words = ("--collectives", "all_reduce", "broadcast", "--world-sizes", 2, 3, "--repeats", 2)
    words += ("--output-dir", tmp_path / "out")
    assert comm(*words) == 0
    once = ["all_reduce broadcast.2", "all_reduce broadcast.3"]
    assert started == once + once[::-1]
    lines = (tmp_path / "out" / "results.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "out" / "results.jsonl").write_text("".join(lines[:3]) + lines[3][:40])
    assert comm(*words) == 0
    assert started[4:] == once[:1]
    printed = capsys.readouterr().out
    assert "3 points have a record already, 1 to go" in printed and "left" in printed
    assert re.search(r"warning: .*results.jsonl line 4 was truncated: cut", printed)
    assert "bytes, calls and losses" not in printed, "there are no losses"
    with (tmp_path / "out/collectives.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8 and rows[0]["collective"] == "all_reduce" and rows[0]["repeats"] == "2"
    assert (float(rows[0]["time_us"]), float(rows[0]["wrong"])) == (10, 0)


def test_wrong_data_fails_and_keeps_what_was_measured(fake, tmp_path, capsys):
    fake(lambda ranks: (1, record("reduce", wrong=7)["results"]))
    assert comm("--collectives", "reduce", "--repeats", 1, "--output-dir", tmp_path / "out") == 1
    kept = load(tmp_path / "out").records[0]
    assert kept["status"] == "failed" and kept["reason"].endswith("reduce: wrong elements")
    assert "7 WRONG" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "results", "says"),
    [
        (None, None, "timeout: timeout after 600 s"),
        (0, {"metrics": {"final_loss": 1.0}}, "failed: exit code 0, but it wrote no results.json"),
    ],
)
def test_a_run_that_fails_is_recorded_and_the_others_run(
    fake, tmp_path, capsys, code, results, says
):
    good = record("reduce")["results"]
    started = fake(lambda ranks: (code, results) if ranks == 2 else (0, good))
    words = ("--collectives", "reduce", "--world-sizes", 2, 3, "--repeats", 1)
    assert comm(*words, "--output-dir", tmp_path / "out") == 1
    assert len(started) == 2 and says in capsys.readouterr().out
    assert comm(*words, "--output-dir", tmp_path / "out") == 1
    assert len(started) == 2, "a failed run is not repeated unasked"
    assert comm(*words, "--output-dir", tmp_path / "out", "--retry-failed") == 1
    assert started[2:] == ["reduce.2"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--world-sizes", 2, 1), "one rank has nobody to talk to: 2 or more"),
        (("-b", 2), "-b 2 is less than a float32 number: 4 or more"),
        (("-b", "1M", "-e", "8K"), "-b 1048576 is above -e 8192, the last size"),
    ],
)
def test_bad_input_is_one_line(words, says):
    with pytest.raises(cli.UsageError) as error:
        comm(*words)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_dry_run_prints_commands_and_starts_nothing(fake, tmp_path, capsys):
    started = fake(lambda ranks: (0, None))
    assert comm(*QUICK, "--repeats", 1, "--output-dir", tmp_path / "out", "--dry-run") == 0
    line = capsys.readouterr().out
    typed = "OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=2"
    words = f"{typed} {bench_comm.SCRIPT} --collective all_reduce -b 8 "
    assert line.startswith(f"comm.w2#1: {words}") and line.count("\n") == 2
    assert not started and not (tmp_path / "out").exists()


# the script itself


@full
def test_it_measures_on_any_number_of_ranks(tmp_path, capsys):
    words = ("--collectives", "all_reduce", "gather", "--world-sizes", 2, 3)
    assert comm(*words, *QUICK[2:], "--repeats", 1, "--output-dir", tmp_path / "out") == 0
    rows = rows_of(comm_table(load(tmp_path / "out").records))
    assert [row[:4] for row in rows] == [
        (name, ranks, "-", size)  # a multiple of the ranks
        for name in ("all_reduce", "gather")
        for ranks, size in (("2", "8"), ("2", "512"), ("3", "504"))
    ]
    assert all(float(row[4].split()[0].replace(",", "")) > 0 and row[-1] == "0" for row in rows)
    assert "best busbw" in capsys.readouterr().out


@full
def test_a_script_that_is_broken_is_told(monkeypatch, tmp_path, capsys):
    text = (REPO / bench_comm.SCRIPT).read_text()
    correct = "dist.all_reduce(received)"
    assert text.count(correct) == 1
    script = tmp_path / "bandwidth_test.py"
    script.write_text(text.replace(correct, "pass"))
    monkeypatch.setattr(bench_comm, "SCRIPT", str(script))
    words = ("--collectives", "broadcast", *QUICK[1:], "--repeats", 1)
    assert comm(*words, "--output-dir", tmp_path / "out") == 1
    printed = capsys.readouterr().out
    assert WRONG in printed
    assert re.search(r"broadcast +2 +- +8 .* 0$", printed, re.M), "what came before it is kept"
