"""The rules for comparing pages with the output of commands: each passes and fails."""

import json

import pages
import pytest
from conftest import find_leftovers, run_command
from outputs import Line, difference, differing_words, shown_like
from recording import record

HEADER = "check                        measured    expected    tolerance    ok"
DASHES = "------------------------  -----------  ----------  -----------  ----"
CLOSE = "largest error of a loss   4.76837e-07           0        1e-05   yes"
EXACT = "bytes (worst of 4)            605,224     605,224            0   yes"
TABLE = f"{HEADER}\n{DASHES}\n{CLOSE}\n{EXACT}\nOK: 2 checks passed\n"


def same_line(
    expected: str, printed: str, header: str = "", on_text: bool = True
) -> bool:
    return not differing_words(expected, Line(printed, header, on_text))


def shows(expected: list[str], printed: list[str]) -> bool:
    return difference("\n".join(expected), "\n".join(printed)) is None


def test_output_comparison_can_fail():
    line = "epoch  1 | loss 1.2345 | test accuracy 90.3% | 8.1 ms/step"
    near = "epoch 1 | loss 1.2344 | test accuracy 91.6% | 1,111.7 ms/step"
    assert same_line(line, near, on_text=False)
    for old, new in (("epoch  1", "epoch  2"), ("90.3%", "80.3%"), ("loss", "Loss")):
        assert not same_line(line, line.replace(old, new), on_text=False)
    on_text = "step 10 | loss 3.7535 | 251.2 ms | 16,304 tok/s | mem 0.76 GiB"
    assert same_line(on_text, "step 10 | loss 3.9 | 11.2 ms | 99 tok/s | mem 1.76 GiB")
    assert not same_line(on_text, on_text.replace("3.7535", "4.7535"))
    assert not same_line(on_text, on_text.replace("3.7535", "3.9"), on_text=False)
    assert same_line("step 10 | test loss 3.7", "step 10 | test loss 4.7")
    assert same_line("bytes  605,224  605,224   0  yes", "bytes 605,224 605,224 0 yes")
    assert not same_line(
        "bytes  605,224  605,224   0  yes", "bytes 605,225 605,224 0 yes"
    )
    row = "    8    2    float     sum      -1   3.82   0.1   0.1       0   5.0"
    row += "   0.1   2e+05       0"
    assert same_line(row, row.replace("3.82", "12.1"))
    assert not same_line(row, row[:-1] + "1")
    assert not same_line(row, row.replace("sum", "max"))
    assert shows(["a", "...", "c"], ["a", "b", "b", "c"])
    assert shows(["...", "b", "...", "d"], ["a", "b", "c", "b", "d"])
    assert not shows(["a", "...", "c"], ["a", "b"])
    assert not shows(["a", "...", "c"], ["a", "c", "b"])
    assert not shows(["a"], ["a", "b"])
    assert not shows(["a", "b"], ["a"])
    assert not shows([], ["a"]) and not shows(["a"], [])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("4.76837e-07", "0"),  # within a tolerance
        ("1e-05", "1.2e-05"),
        ("  4.76837e-07  ", "    0.00024714  "),
        (f"{DASHES}\n", f"{DASHES.replace('-  ', '------  ')}\n"),  # another width
    ],
)
def test_a_check_with_a_tolerance_is_compared_by_its_verdict(old, new):
    assert old in TABLE
    assert difference(TABLE, TABLE.replace(old, new)) is None
    assert difference("...\n" + CLOSE + "\n...", TABLE.replace(old, new)) is None


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("1e-05   yes", "1e-05    NO", "yes | NO"),
        ("605,224     605,224", "605,224     605,225", "605,224 | 605,225"),
        ("          0   yes\nOK", "          0    NO\nOK", "yes | NO"),
        ("error of a loss", "error of a step", "loss | step"),
        ("OK: 2", "OK: 3", "2 | 3"),
    ],
)
def test_a_changed_claim_is_found(old, new, words):
    assert old in TABLE
    assert f"differs: {words}" in difference(TABLE, TABLE.replace(old, new))


def test_only_a_table_of_checks_has_verdicts():
    plan = (
        "plan    gpus    hours    nodes    ok\n----  ------  -------  -------  ----\n"
    )
    plan += "one        8      1.5        2   yes\n"
    assert difference(plan, plan) is None
    assert "8 | 16" in difference(plan, plan.replace(" 8 ", "16 "))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1,123 ms", "3.5 ms"),
        ("12,345 tok/s", "9 tok/s"),
        ("a rank has 1,051.3 GiB", "a rank has 10.5 GiB"),
        ("rank 1's pid 4242", "rank 1's pid 77"),
        (
            "listens on port 29500 at 127.0.0.1:40123",
            "listens on port 1 at 127.0.0.1:9",
        ),
        ("started 2025-11-22T04:30:01+00:00", "started 2026-01-02T00:00:00+00:00"),
        ("runs/tmpab12_x/log", "runs/tmpzz/log"),
        ("torch 2.14.1+cu130", "torch 2.15.0"),
        ("b'def' goes on", "b'abc def' goes on"),
        ("largest error 0.000247", "largest error 0"),
        ("off by 4.8e-07", "off by 0"),
        ("96% of it", "81% of it"),
    ],
)
def test_what_is_only_measured_is_not_compared(one, other):
    assert same_line(one, other) and same_line(other, one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1,123 ms and 4 ranks", "1,123 ms and 5 ranks"),
        ("largest error 0.000247", "largest error 0.25"),
        ("supports 2 ranks", "supports 3 ranks"),
        ("64.2% right", "60.9% right"),
        ("off by 4.8e-07", "off by 1"),
    ],
)
def test_what_is_claimed_is_compared(one, other):
    assert not same_line(one, other) and not same_line(other, one)


def test_a_small_number_below_a_header_about_an_error_is_rounding():
    table = "way    weights    loss error\n---  ---------  ------------\n"
    table += "ddp       2.00        0.0003"
    assert difference(table, table.replace("0.0003", "     0")) is None
    assert difference(table, table.replace("2.00", "3.00"))


def test_ranks_print_in_any_order():
    assert shows(
        ["rank 0 a", "rank 0 b", "rank 1 a", "end"],
        ["rank 1 a", "rank 0 a", "rank 0 b", "end"],
    )
    assert not shows(["rank 0 a", "rank 0 b", "end"], ["rank 0 b", "rank 0 a", "end"])
    assert "line 12 of" in difference(
        "x\nrank 1 a\nrank 0 b", "x\nrank 0 c\nrank 1 a", first_line=10
    )


def test_a_difference_names_the_first_line_that_was_not_printed():
    shown, printed = (
        "start\n...\nloss 1.5 after 3 ranks\nend",
        "start\nb\nloss 1.5 after 4 ranks\nend",
    )
    assert difference(shown, printed, first_line=40) == (
        "line 42 of the page was not printed:\n"
        "  page:    loss 1.5 after 3 ranks\n"
        "  printed: loss 1.5 after 4 ranks\n"
        "  differs: 3 | 4\n"
    )
    assert "(nothing more)" in difference("a\nb", "a")
    assert "shows no more, but printed was\n  b" in difference("a", "a\nb")
    assert difference("warning: x\na", "a\nwarning: x", "warning: x\na") is None
    assert "line 2" in difference("warning: x\na", "a\nwarning: x", "warning: x\nb")


def test_elisions_are_kept_where_their_neighbours_are_still_printed():
    assert shown_like("a 1 ms\n...\nd", "a 2 ms\nb\nc\nd") == (
        ["a 2 ms", "...", "d"],
        True,
    )
    assert shown_like("...\nd", "a\nd") == (["...", "d"], True)
    assert shown_like("a\n...", "a\nb") == (["a", "..."], True)
    assert shown_like("a\nx\n...\nd", "a\nb\nc\nd") == (["a", "b", "c", "d"], False)
    both = shown_like("a\nold\nb\n...\nd\nx\n...\n", "a\nnew\nb\nc\nd\ny\nz")
    assert both == (["a", "new", "b", "...", "d", "y", "z"], False)
    assert shown_like("", "a\nb") == (["a", "b"], True)


PAGE = """# Page

```bash
printf 'took 12 ms\\nmiddle\\nend\\n'
```
```text
took 99 ms
...
end
```

It ends with exit code 3.

```bash
# a comment
mkdir -p runs/x && \\
  echo 'page.sh: error: no' >&2 && exit 3
```
```text
```
"""


def test_recording_writes_what_commands_print(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "TRACKED", [])
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert record(page) == []
    written = PAGE.replace("99 ms", "12 ms").replace(
        "```text\n```", "```text\npage.sh: error: no\n```"
    )
    assert page.read_text() == written
    page.write_text(PAGE.replace("exit code 3", "no error"))
    (left,) = record(page)
    assert f"{page}:16: mkdir" in left and "failed" in left
    assert [step.fails() for step in pages.steps(pages.read(page))] == [False, False]


def test_a_page_is_taken_apart(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    first, second = pages.steps(pages.read(page))
    assert (first.fails(), second.fails()) == (False, True)
    assert pages.commands(second.commands)[0][0] == 16
    assert pages.folders("echo a >> runs/x/y; python b.py --output-dir=runs/z") == {
        "runs/x",
        "runs/z",
    }
    script = "01-ddp-basics/ddp_mnist.py"
    launch = "OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=4"
    ranks, path, arguments = pages.plain(f"{launch} {script} --op 'a b'")
    assert (ranks, path, arguments) == (4, script, ["--op", "a b"])
    assert pages.plain(f"python {script}") == (None, script, [])
    assert not pages.plain(f"python {script} > runs/log") and not pages.plain(
        "python no_such.py"
    )


def test_what_is_run_in_place_of_a_command():
    for command in (
        "cd x",
        "python3 -m venv .venv",
        "pip install x",
        ".venv/bin/uv pip install x",
    ):
        assert pages.runnable(command) is None
    for command in (
        ".venv/bin/python -m pytest -k x",
        "python tests/test_guides.py --record x",
    ):
        assert pages.runnable(command) is None
    assert pages.runnable("make test") == "make test --dry-run"
    assert (
        pages.runnable("bash x/launch_ddp.sh slurm")
        == "bash x/launch_ddp.sh slurm --dry-run"
    )
    assert pages.runnable("bash x/launch_ddp.sh local") == "bash x/launch_ddp.sh local"
    assert (
        pages.runnable("torchrun --nproc-per-node=gpu x")
        == "torchrun --nproc-per-node=2 x"
    )


def test_a_recorded_output_is_compared_with_its_file(tmp_path):
    file = tmp_path / "h200.json"
    assert "is not there" in pages.fault_of_record("a\n", file)
    content = {
        "machine": "H200",
        "versions": {},
        "date": "2025-11-22",
        "output": ["a", "1.5 ms"],
    }
    file.write_text(json.dumps(content))
    assert pages.fault_of_record("a\n1.5 ms\n", file) is None
    assert pages.fault_of_record("a\n1.6 ms\n", file) and pages.fault_of_record(
        "b\n1.5 ms\n", file
    )
    file.write_text(json.dumps({"output": ["a"]}))
    assert "machine" in pages.fault_of_record("a\n", file)


def test_a_command_at_its_deadline_leaves_nothing_behind(tmp_path):
    """Not even a process with its own session, like torchrun's ranks, that outlives its
    parent.
    """
    command = ["bash", "-c", "setsid --fork sleep 300; echo begun; sleep 300"]
    with pytest.raises(pytest.fail.Exception, match="begun"):
        run_command(command, tmp_path, 1)
    assert not find_leftovers()
