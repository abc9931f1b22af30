"""Module 04: each case of the gallery breaks as the page says, is found, and is cured."""

import re
import time

import pytest
from conftest import REPO, assert_one_line, load_script, results_of

GALLERY = "04-nccl-operations/failure_gallery.py"
CASES = list(load_script(GALLERY).CASES)
# Their ranks wait for timeouts of seconds, one run after the other.
LONG = {"gather-on-rank-0", "rank-hangs", "timeout-too-short", "wrong-master-addr",
        "firewall-drops", "world-size-mismatch"}  # fmt: skip
CLOCKED = {"rank-slow", "timeout-too-short"}  # what they say is a time


def case_to_run(name):
    marks = [pytest.mark.full] * (name in LONG)
    marks += [pytest.mark.xdist_group("clock")] * (name in CLOCKED)
    return pytest.param(name, marks=marks)


def rows_of_the_page():
    """Return the page's table: for each case the message that its row begins with.

    Or messages, `one` or `other`, where gloo's threads race.
    """
    page = (REPO / "04-nccl-operations/nccl_debugging.md").read_text()
    page = page.split("## The table")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`[^`]+`(?: or `[^`]+`)*).*\| `([\w-]+)` \|$", page, re.M)
    return {name: messages.strip("`").split("` or `") for messages, name in rows}


def test_the_page_has_a_row_for_each_case_and_no_other():
    assert sorted(rows_of_the_page()) == sorted(CASES)


@pytest.mark.parametrize("name", [case_to_run(name) for name in CASES])
def test_a_case_breaks_with_the_message_of_the_page_and_is_found_and_cured(
    run_script, tmp_path, name
):
    ended = run_script(GALLERY, "--case", name, "--output-dir", tmp_path / "run", environ={})
    assert ended.codes == [0], ended.stdout + ended.stderr
    assert ended.stderr == "" and len(results_of(tmp_path / "run")["checks"]) == 6
    broken = ended.stdout.split("\nbroken:")[1].split("\nfound:")[0]
    assert any(message in broken for message in rows_of_the_page()[name]), broken


MESSAGE, FOUND = "broken: the message is there", "found: the rank that the clue names"
ABORTS = "broken: ranks that end by SIGABRT and exit code 1"
STILL, WELL = "cured: the message is there", "cured: ranks that end by exit code 0"
RIGHT = "cured: ranks with the right result"
NORMAL = "broken: ranks that end by exit code 0 and exit code 0"


def play(name, **instead):
    """Return a sabotage that plays one variant of a case in place of another."""

    def sabotage(script):
        case = script.CASES[name]
        job, tool = case.job, case.tool
        if "found" in instead:
            case.tool = "none"
        assert tool
        case.job = lambda rank, how: job(rank, instead.get(how, how))

    return sabotage


def wrong_result(script):
    case = script.CASES["shapes-differ"]
    job = case.job
    case.job = lambda rank, how: job(rank, how) + (rank == 1)


def too_slow(script):
    case = script.CASES["nan-on-one-rank"]
    job = case.job

    def sleeps(rank, how):
        time.sleep(60 if how == "broken" else 0)
        return job(rank, how)

    case.job = sleeps


@pytest.mark.parametrize(
    ("name", "sabotage", "red"),
    [
        ("shapes-differ", play("shapes-differ", broken="cured"), [MESSAGE, ABORTS]),
        ("shapes-differ", play("shapes-differ", found="broken"), [FOUND]),
        ("shapes-differ", play("shapes-differ", cured="broken"), [STILL, WELL, RIGHT]),
        ("shapes-differ", wrong_result, [RIGHT]),
        *(
            pytest.param(*beyond, marks=pytest.mark.full)
            for beyond in [
                ("different-order", play("different-order", broken="cured"), [MESSAGE]),
                ("different-order", play("different-order", found="broken"), [FOUND]),
                ("different-order", play("different-order", cured="broken"), [STILL, RIGHT]),
                ("exception-on-one-rank", play("exception-on-one-rank", found="broken"), [FOUND]),
                ("gather-on-rank-0", play("gather-on-rank-0", found="broken"), [FOUND]),
                ("nan-on-one-rank", too_slow, [MESSAGE, NORMAL]),
            ]
        ),
        pytest.param(
            "rank-slow", play("rank-slow", cured="broken"), [STILL],
            marks=[pytest.mark.full, pytest.mark.xdist_group("clock")],
        ),
    ],
)  # fmt: skip
def test_sabotage_of_a_case_fails_its_check(run_script, tmp_path, name, sabotage, red):
    argv = ("--case", name, "--timeout", 4, "--output-dir", tmp_path / "run")
    ended = run_script(GALLERY, *argv, environ={}, before=sabotage)
    assert ended.codes == [1] and "FAILED" in ended.stdout, ended.stdout + ended.stderr
    assert [c["name"] for c in results_of(tmp_path / "run")["checks"] if not c["ok"]] == red


def quiet(script):
    """Turn off pytest's handler, which would tell of an abort that is meant to happen."""
    script.faulthandler.disable()


def test_under_a_launcher_the_ranks_that_were_started_break(run_script):
    ended = run_script(
        GALLERY, "--case", "shapes-differ", world_size=2, before=quiet, end_job_on_failure=False
    )
    assert ended.codes == [-6, 1], ended.stderr
    assert "Received data size doesn't match expected size" in ended.stderr
    assert "Traceback" in ended.stderr and ended.stdout == ""


def test_under_a_launcher_a_silent_case_ends_well(run_script):
    ended = run_script(GALLERY, "--case", "nan-on-one-rank", world_size=2)
    assert ended.codes == [0, 0], ended.stderr
    assert ended.stdout.count("loss nan\n") == 2


def test_without_a_case_they_are_listed(run_script):
    ended = run_script(GALLERY, environ={})
    assert ended.codes == [0]
    assert [line.split()[0] for line in ended.stdout.splitlines()[2:]] == CASES


@pytest.mark.parametrize(
    ("world_size", "environ", "argv", "says"),
    [
        (1, {}, ("--case", "shapes"), "argument --case: invalid choice: 'shapes'"),
        (1, {}, ("--case", "rank-dies", "--device", "cuda"), "start it with torchrun"),
        (1, None, ("--case", "rank-dies"), "needs 2 ranks, and there are 1"),
        (2, None, ("--case", "port-in-use"), "breaks the launch itself: start it with python"),
    ],
)
def test_the_gallery_refuses_bad_input(run_script, world_size, environ, argv, says):
    ended = run_script(GALLERY, *argv, world_size=world_size, environ=environ)
    assert_one_line(ended, says, "failure_gallery.py")
