"""Module 04: each failure breaks as its case.toml says, is named as it says, and is cured.

`python tests/test_04_failure_gallery.py` writes the rows of all case.toml into failures/README.md.
"""

import ast
import re
import sys
from pathlib import Path

import pytest
from conftest import REPO, assert_one_line, load_script, results_of, run_command
from helpers_04 import first_is_quick, full

from dist_common.ranks import Rank
from nccl_parts import failure_gallery as part

GALLERY = "04-nccl-operations/failure_gallery.py"
FAILURES = REPO / "04-nccl-operations/failures"
PAGE = FAILURES / "README.md"
gallery = load_script(GALLERY)
load, NAMES = gallery.load, gallery.NAMES
# They need no timeout: with all their runs they take a second or two.
QUICK = {"different-order", "exception-on-one-rank", "leaves-early", "set-epoch-forgotten"}
needs_namespaces = pytest.mark.skipif(
    not part.may_enter(), reason="needs root on Linux, for namespaces of its own"
)


def marked(name):
    """Return a parameter with the marks of its failure."""
    marks = [] if name in QUICK else [full]
    marks += [needs_namespaces] * bool({"shm_mib", "host"} & set(load(name).limits))
    return pytest.param(name, marks=marks)


def play(run_script, tmp_path, *argv, before=None):
    folder = tmp_path / "run"
    ended = run_script(GALLERY, *argv, "--output-dir", folder, environ={}, before=before)
    return ended, results_of(folder) if folder.exists() else None


# Each failure on two ranks; where two do not tell who is wrong, on three.


@pytest.mark.parametrize("name", [marked(name) for name in NAMES])
def test_a_failure_breaks_is_found_and_cured(run_script, tmp_path, name):
    ended, results = play(run_script, tmp_path, name)
    assert ended.codes == [0], ended.stdout + ended.stderr
    assert ended.stderr == ""
    assert len(results["checks"]) == (9 if load(name).message else 7)
    if name == "different-order":  # of two ranks that differ none is named
        assert "compare them" in ended.stdout


ODD = [name for name in NAMES if load(name).names == "the odd one"]


@pytest.mark.full
@pytest.mark.parametrize("name", [marked(name) for name in ODD])
def test_of_three_ranks_the_odd_one_is_named(run_script, tmp_path, name):
    """Of two ranks that differ nobody can tell which one is wrong."""
    culprit = 0 if load(name).culprit() else 2
    ended, results = play(run_script, tmp_path, name, "--ranks", 3, "--culprit", culprit)
    assert ended.codes == [0], ended.stdout + ended.stderr
    sure = [c for c in results["checks"] if c["name"] == "found: ranks named rightly"]
    assert sure[0]["expected"] == 1


# Tools are judged on outputs of their own, without a run.


def ranks_that_say(*texts, codes=None):
    codes = codes or [1] * len(texts)
    return [Rank(code, "", text) for code, text in zip(codes, texts, strict=True)]


LOST = "RuntimeError: Connection closed by peer [127.0.0.1]:1234"


@pytest.mark.parametrize(
    ("texts", "codes", "named"),
    [
        ((LOST, "ValueError: bad", LOST), None, {1}),
        ((LOST, "", LOST), (1, -9, 1), {1}),
        ((LOST, "", LOST), (1, -15, 1), {1}),
        ((LOST, "", LOST), (1, 0, 1), {1}),
        ((LOST, LOST), None, set()),
        # Another library's connection, in the words of one that was lost to a rank.
        ((LOST, "ConnectionResetError: [Errno 104] Connection reset by peer", LOST), None, {1}),
        ((LOST, "botocore.exceptions.ReadTimeoutError: timed out waiting for s3", LOST), None, {1}),
        ((LOST, "torch.distributed.DistNetworkError: Connection reset by peer"), None, set()),
        (("ValueError: bad", "ValueError: bad"), None, set()),
        (("2/4 clients joined", "RuntimeError: 2/4 clients joined"), None, {2, 3}),
    ],
)
def test_logs_name_the_rank_that_did_not_only_lose_another_one(texts, codes, named):
    verdict = part.judge_logs(ranks_that_say(*texts, codes=codes))
    assert verdict.named == named, verdict


def test_detail_is_told_by_ranks_of_the_job_not_of_a_group():
    def says(own, other):
        prints = "Rank {} is running collective: CollectiveFingerPrint(OpType={}, TensorShape=[1])"
        return f"{prints.format(0, own)}, but {prints.format(1, other)}."

    ranks = ranks_that_say("", "", says("ALLREDUCE", "BROADCAST"), says("BROADCAST", "ALLREDUCE"))
    assert part.calls_in_detail(ranks) == {2: "ALLREDUCE [1]", 3: "BROADCAST [1]"}


# Sabotage: what is broken is not, what finds it does not, what cures it does not.


def swap(script, other):
    """Return a sabotage that plays one script in place of another."""

    def sabotage(module):
        run = module.Job.run

        def swapped(self, name, *args, **kwargs):
            return run(self, other if name == script else name, *args, **kwargs)

        module.Job.run = swapped

    return sabotage


def without(statement):
    """Return a sabotage that leaves a statement out of cured.py."""

    def sabotage(module):
        read_text = Path.read_text
        Path.read_text = lambda *a, **k: read_text(*a, **k).replace(statement, "pass")

    return sabotage


def blind(module):
    """Remove the tool: its verdict says nothing and names nobody."""
    for name, (look, title) in module.TOOLS.items():

        def looks_away(job, look=look):
            return look(job)[0], part.Verdict("nothing to see")

        module.TOOLS[name] = (looks_away, title)


def allow_no_time(module):
    module.CASE_S = 0


def accuse_another(module):
    for name, (look, title) in module.TOOLS.items():

        def wrong(job, look=look):
            ended, verdict = look(job)
            return ended, part.Verdict(verdict.text, frozenset([0]))

        module.TOOLS[name] = (wrong, title)


MESSAGE, ENDS = "broken: the message is there", "broken: ranks that end as described"
SAYS, RIGHTLY = "found: the tool says what it should", "found: ranks named rightly"
WRONGLY = "found: ranks named wrongly"
STILL, WELL = "cured: the message is there", "cured: ranks that end by exit code 0"
RESULT = "cured: ranks with the right result"
IN_TIME = "all jobs end within the deadline of a case"


@pytest.mark.parametrize(
    ("name", "sabotage", "red"),
    [
        ("exception-on-one-rank", swap("broken.py", "cured.py"), {MESSAGE, ENDS, SAYS, RIGHTLY}),
        ("exception-on-one-rank", accuse_another, {RIGHTLY, WRONGLY}),
        ("exception-on-one-rank", swap("cured.py", "broken.py"), {STILL, WELL, RESULT}),
        *(pytest.param(*row, marks=full) for row in [
            ("exception-on-one-rank", blind, {SAYS, RIGHTLY}),
            ("exception-on-one-rank", allow_no_time, {IN_TIME}),
            ("rank-dies", without("checkpoint.write_text(str(step + 1))"), {RESULT}),
                    ]),
    ],
)  # fmt: skip
def test_sabotage_turns_its_checks_red(run_script, tmp_path, name, sabotage, red):
    ended, results = play(run_script, tmp_path, name, before=sabotage)
    assert ended.codes == [1] and "FAILED" in ended.stdout, ended.stdout + ended.stderr
    assert {check["name"] for check in results["checks"] if not check["ok"]} == red


# The scripts as a reader would start them.


@full
def test_under_torchrun_a_cured_script_ends_with_the_right_result(tmp_path):
    name = "rank-dies"  # it restarts and writes
    launch = ["torchrun", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    # Else ranks that start again may find the addresses of those before: launchers.md.
    environ = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    cured = run_command([*launch, str(FAILURES / name / "cured.py")], tmp_path, 90, **environ)
    assert cured.codes == [0], cured.stderr
    assert cured.stdout.count(load(name).right.format(n=2, others=1)) == 2, cured.stdout
    assert not any(tmp_path.iterdir())  # where the reader started it


# All of their ranks are broken, or the broken one is never started, or no other one can be broken.
NO_CULPRIT = {"hostname-loopback", "port-in-use", "set-epoch-forgotten", "world-size-mismatch"}
ON_ITS_GPU = """
on_gpu = torch.cuda.is_available()
if on_gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.set_default_device("cuda")
"""


def test_each_script_is_short_plain_takes_its_gpu_and_names_its_broken_rank_once():
    for name in NAMES:
        for script in ("broken.py", "cured.py"):
            source = (FAILURES / name / script).read_text()
            lines = [line for line in source.splitlines() if line.strip()]
            assert len(lines) <= 30, f"{name}/{script}: {len(lines)} lines"
            assert "legacy_common" not in source and ast.get_docstring(ast.parse(source))
            assert ON_ITS_GPU in source.split("dist.init_process_group(")[0], f"{name}/{script}"
        broken = (FAILURES / name / "broken.py").read_text()
        assert len(part.CULPRIT.findall(broken)) == (name not in NO_CULPRIT), name


# Bad input, the list, the page.


def test_without_a_name_they_are_listed(run_script):
    ended = run_script(GALLERY, environ={})
    assert ended.codes == [0]
    assert [line.split()[0] for line in ended.stdout.splitlines()[2:]] == NAMES


@pytest.mark.parametrize(
    ("environ", "argv", "says"),
    first_is_quick([
        ({}, ("rank-dies", "--culprit", "2"), "--culprit must be from 0 to 1"),
        ({}, ("rank-dies", "--device", "cuda"), "start broken.py with torchrun"),
        (None, ("rank-dies",), "start this with python; torchrun can start failures/rank-dies/"),
        ({}, ("rank-dies", "--ranks", "1"), "--ranks must be at least 2, not 1"),
        ({}, ("firewall-drops", "--culprit", "0"), "must be from 1 to 1"),
        ({}, ("port-in-use", "--culprit", "1"), "cannot be moved to another rank"),
    ]),
)  # fmt: skip
def test_the_gallery_refuses_bad_input(run_script, environ, argv, says):
    ended = run_script(GALLERY, *argv, environ=environ)
    assert_one_line(ended, says, "failure_gallery.py")


ROWS = re.compile(r"(?<=\|---\|---\|---\|---\|\n)(?:\|.*\|\n)+")
GROUPS = {
    "calls": "ranks do not call the same thing",
    "one": "one rank fails, or keeps the others waiting",
    "silent": "nothing fails, and the numbers are wrong",
    "start": "the ranks never meet",
}


def rows(group):
    """Return the page's rows of the failures of a group."""
    lines = []
    for name in NAMES:
        failure = load(name)
        if failure.group != group:
            continue
        found = gallery.TOOLS[failure.tool][1]
        more = f". {failure.page[0].upper()}{failure.page[1:]}" if failure.page else ""
        named = {"the odd one": " (from 3 ranks on it names the rank)", "none": " (names no rank)"}
        look = f". From outside: {failure.look}" if failure.look else ""
        found = f"{found}{named.get(failure.names, '')}{look}{more}.<br>**Cure:** {failure.cure}"
        seen = f"{failure.symptom}.<br>**On NCCL:** {failure.nccl}"
        lines.append(f"| {seen} | {failure.cause} | {found} | `{name}` |\n")
    return "".join(lines)


def test_the_page_has_the_rows_of_every_case():
    tables = ROWS.findall(PAGE.read_text())
    assert tables == [rows(group) for group in GROUPS], (
        "run python tests/test_04_failure_gallery.py"
    )
    assert sum(table.count("\n") for table in tables) == len(NAMES)
    sources = set(re.findall(r"^- ([A-Z]): ", PAGE.read_text(), re.M))
    for name in NAMES:
        named = re.search(r"\(([A-Z](?:, [A-Z])*)\)$", load(name).nccl)
        assert named and set(named[1].split(", ")) <= sources, f"{name}: says who of NCCL?"


def main():
    tables = iter(GROUPS)
    PAGE.write_text(ROWS.sub(lambda _: rows(next(tables)), PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
