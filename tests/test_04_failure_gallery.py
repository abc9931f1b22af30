"""Module 04: each case breaks as cases.toml says, is cured, and stands on its page.

`python tests/test_04_failure_gallery.py` writes the table of failures/README.md.
"""

import ast
import re
import sys
from pathlib import Path

import pytest
from conftest import REPO, assert_one_line, load_script, results_of, run_command

GALLERY = "04-nccl-operations/failure_gallery.py"
FAILURES = REPO / "04-nccl-operations/failures"
PAGE = FAILURES / "README.md"
gallery = load_script(GALLERY)
CASES = gallery.CASES
full = pytest.mark.full
# One case of each kind that waits for no timeout.
QUICK = [
    "exception-on-one-rank",
    "shapes-differ",
    "batch-skipped",
    "unfrozen-after-ddp",
]


def run_case(run_script, tmp_path, *argv, before=None):
    folder = tmp_path / "run"
    words = (*argv, "--output-dir", folder)
    ended = run_script(GALLERY, *words, environ={}, before=before)
    return ended, results_of(folder)["checks"] if folder.exists() else None


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else full) for name in CASES]
)
def test_a_case_breaks_and_is_cured(run_script, tmp_path, name):
    ended, checks = run_case(run_script, tmp_path, name)
    assert ended.codes == [0], ended.stdout + ended.stderr
    assert ended.stderr == ""
    assert len(checks) == 4


@full
@pytest.mark.parametrize("name", QUICK)
def test_a_case_breaks_and_is_cured_on_three_ranks(run_script, tmp_path, name):
    ended, _ = run_case(run_script, tmp_path, name, "--ranks", 3)
    assert ended.codes == [0], ended.stdout + ended.stderr


# Sabotage: the broken script is not broken, the cured one is not cured.

WORDS, ENDS = "broken: a rank says the words", "broken: all ranks end as described"
WELL = "cured: ranks that end with exit code 0"
CORRECT = "cured: ranks with the right result"


def swap(script, other):
    """Return a sabotage that runs one script in place of another."""

    def sabotage(module):
        find = module.Failure.script

        def swapped(failure, name):
            return find(failure, other if name == script else name)

        module.Failure.script = swapped

    return sabotage


@pytest.mark.parametrize(
    ("name", "sabotage", "red"),
    [
        ("exception-on-one-rank", swap("broken.py", "cured.py"), {WORDS, ENDS}),
        ("exception-on-one-rank", swap("cured.py", "broken.py"), {WELL, CORRECT}),
        pytest.param(
            "nan-on-one-rank", swap("broken.py", "cured.py"), {WORDS}, marks=full
        ),
        pytest.param(
            "nan-on-one-rank", swap("cured.py", "broken.py"), {CORRECT}, marks=full
        ),
    ],
)
def test_sabotage_turns_its_checks_red(run_script, tmp_path, name, sabotage, red):
    ended, checks = run_case(run_script, tmp_path, name, before=sabotage)
    assert ended.codes == [1] and "FAILED" in ended.stdout, ended.stdout + ended.stderr
    assert {check["name"] for check in checks if not check["ok"]} == red


# The scripts as a reader would start them.


@full
def test_a_cured_script_runs_under_torchrun(tmp_path):
    launch = ["torchrun", "--standalone", "--nproc-per-node=2"]
    script = FAILURES / "set-epoch-forgotten/cured.py"
    cured = run_command([*launch, str(script)], tmp_path, 90)
    assert cured.codes == [0], cured.stderr
    assert cured.stdout.count(CASES["set-epoch-forgotten"].last_line) == 2, cured.stdout


@pytest.mark.parametrize("name", CASES)
def test_a_script_is_short_and_plain_pytorch(name):
    for script in ("broken.py", "cured.py"):
        source = (FAILURES / name / script).read_text()
        lines = [line for line in source.splitlines() if line.strip()]
        assert len(lines) < 45, f"{name}/{script}: {len(lines)} lines"
        assert "dist_common" not in source and ast.get_docstring(ast.parse(source))
        before = source.split("dist.init_process_group(")[0]
        assert "torch.cuda.set_device(" in before or "torch." not in source.replace(
            "torch.distributed", ""
        ).replace("torch.utils", "")


def test_every_folder_is_a_case():
    assert {path.parent.name for path in FAILURES.glob("*/broken.py")} == {*CASES}
    assert len(CASES) == 16


@pytest.mark.parametrize(
    ("environ", "argv", "says"),
    [
        ({}, ("rank-hangs", "--ranks", "1"), "--ranks must be at least 2"),
        (
            None,
            ("rank-hangs",),
            "start it with python; torchrun can start each broken.py",
        ),
        ({}, ("rank-dies",), "invalid choice: 'rank-dies'"),
    ],
)
def test_bad_usage_is_one_line(run_script, environ, argv, says):
    ended = run_script(GALLERY, *argv, environ=environ)
    assert_one_line(ended, says, "failure_gallery.py")


def test_without_a_name_the_cases_are_listed(run_script):
    ended = run_script(GALLERY, environ={})
    assert [line.split()[0] for line in ended.stdout.splitlines()] == [*CASES]


# The page.

ROWS = re.compile(r"(?<=\|---\|---\|---\|\n)(?:\|.*\|\n)+(?=\n<!-- end of the cases)")


def rows():
    """Return the rows of the page's table."""
    lines = []
    for failure in CASES.values():
        seen = f"{failure.symptom}.<br>**NCCL:** {failure.nccl}"
        why = f"{failure.cause}.<br>**Cure:** {failure.cure}"
        lines.append(f"| `{failure.name}` | {seen} | {why} |\n")
    return "".join(lines)


def test_the_page_has_a_row_for_every_case():
    assert ROWS.findall(PAGE.read_text()) == [rows()], (
        f"run python {Path(__file__).name}"
    )


if __name__ == "__main__":
    PAGE.write_text(ROWS.sub(lambda _: rows(), PAGE.read_text()))
    sys.exit()
