"""merge_logs.py: times and ranks are read, and the culprit comes before who noticed."""

import json
import os
from collections import Counter
from datetime import datetime

import pytest
from conftest import assert_one_line, load_script, results_of

from cluster_parts import merge_logs as part

MERGE = "cluster/merge_logs.py"
script = load_script(MERGE)
WRITTEN = datetime(2026, 11, 26, 20, 0, 0).timestamp()
NOON = datetime(2026, 11, 26, 12, 0, 1).timestamp()
LOST = """Traceback (most recent call last):
  File "train.py", line 7, in step
    dist.all_reduce(t)
  File "/usr/lib/site-packages/torch/distributed/distributed_c10d.py", line 3913, in all_reduce
    work.wait()
RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:561] Connection closed by peer [10.0.0.2]:9482
"""
BAD_BATCH = """Traceback (most recent call last):
  File "train.py", line 12, in load
    raise KeyError("image")
KeyError: 'image'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "train.py", line 20, in step
    batch = load()
RuntimeError: batch 7 cannot be read
"""
RESET = """Traceback (most recent call last):
  File "train.py", line 12, in load
    socket.recv(4)
ConnectionResetError: [Errno 104] Connection reset by peer
"""


def write(root, files, written=WRITTEN):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        os.utime(path, (written, written))
    return root


def torchrun(node, local_rank, file="stderr.log"):
    return f"{node}/job_x{node[-1]}/attempt_0/{local_rank}/{file}"


def shown(run_script, tmp_path, files, *argv, written=WRITTEN):
    ended = run_script(
        MERGE, write(tmp_path / "logs", files, written), "--output-dir", tmp_path / "run", *argv,
        environ={},
    )  # fmt: skip
    assert ended.codes == [0], ended.stderr
    return ended.stdout.replace(f"{tmp_path}/", ""), results_of(tmp_path / "run")["metrics"]


# Reading


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2026-11-26 12:00:01,500 INFO step 3", NOON + 0.5),
        ("[2026-11-26 12:00:01] host:12:34 [0] NCCL WARN Call to bind failed", NOON),
        ("2026-11-26T12:00:01.25 | INFO | x", NOON + 0.25),
        ("[W1126 12:00:01.250000000 socket.cpp:207] [c10d] The hostname", NOON + 0.25),
        ("E1126 12:00:01.750000 12 torch/distributed/elastic/api.py:1002] failed", NOON + 0.75),
        ("[Thu Nov 26 12:00:01 2026] NVRM: Xid (PCI:0000:3b:00): 79", NOON),
        ("12:00:01.5 step 3", NOON + 0.5),
        ("W1226 12:00:01.0 x", datetime(2025, 12, 26, 12, 0, 1).timestamp()),  # the year before
        ("step 3 | loss 2.3 | 41.2 ms", None),
        ("the job was started on node0 in the night of 2026-11-26 12:00:01", None),
        ("2026-13-45 12:00:01 x", None),
    ],
)
def test_the_time_of_a_line(text, seconds):
    found = part.time_of(text, WRITTEN)
    assert found == (None if seconds is None else pytest.approx(seconds, abs=1e-3))


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("job_ab/attempt_0/1/stderr.log", ("", "local rank 1", None)),
        ("node3/job_ab/attempt_1/0/stdout.log", ("node3", "local rank 0, attempt 1", None)),
        ("two/job_ab/attempt_0/1/stderr.log", ("two/job_ab", "local rank 1", None)),
        ("slurm-4242-7.out", ("", "slurm-4242-7.out", 7)),
        ("slurm-4242-gpu07-3.err", ("gpu07", "slurm-4242-gpu07-3.err", 3)),
        ("slurm-4242.out", ("", "slurm-4242.out", None)),
        ("node1/torchrun.err", ("node1", "torchrun.err", None)),
    ],
)
def test_whose_log_it_is(path, place):
    assert part.place_of(path, Counter({"two": 2})) == place


def test_lines_without_a_time_stay_behind_their_predecessor(tmp_path):
    root = write(tmp_path, {
        "a.log": "before\n12:00:01 one\nof one\n12:00:05 three",
        "b.log": "12:00:01.5 two\nof two\n12:00:06 four",
    })  # fmt: skip
    lines = [script.text_of(line) for line in script.merge(part.read_logs(root)[0])]
    assert lines == ["before", "one", "of one", "two", "of two", "three", "four"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("0: a\n1: b\n0: c\n", {"rank 0": 2, "rank 1": 1}),  # srun --label
        ("[default0]:a\n[default1]: b\n", {"local rank 0": 1, "local rank 1": 1}),  # --tee 3
        ("[default1]:[rank5]: a\n", {"rank 5": 1}),
        ("[rank2]:[W1126 12:00:01.0 x.cpp:1] a\nb\n", {"rank 2": 2}),
    ],
)
def test_lines_of_several_ranks_in_one_file(tmp_path, text, names):
    logs, _ = part.read_logs(write(tmp_path, {"job.out": text}))
    assert {lines[0].source.name: len(lines) for lines in logs} == names


# Who was first


def test_the_culprit_comes_before_those_that_noticed(run_script, tmp_path):
    """Ranks 0 and 1 end before rank 3, which raised first, has written its traceback."""
    step = "2026-11-26 12:00:01,0 INFO step 2\n"
    out, metrics = shown(run_script, tmp_path, {
        torchrun("node0", 0): step + LOST.replace("\n", "\n[rank0]: "),
        torchrun("node0", 1): f"{step}[rank1]: " + LOST.replace("9482", "777"),
        torchrun("node1", 0): step,
        torchrun("node1", 1): "[rank3]: " + BAD_BATCH,
    }, written=NOON + 4)  # fmt: skip
    lines = out.splitlines()
    assert lines[2] == "FIRST ERROR: rank 3 (node1), by 12:00:05.000: KeyError: 'image'"
    assert lines[3].split() == ["train.py:12", "in", "load", f"logs/{torchrun('node1', 1)}:1"]
    assert lines[4].startswith("then, only lost another rank: ranks 0, 1, by 12:00:05.000: Runtime")
    assert [error["who"] for error in metrics["errors"]] == [
        ["rank 3 (node1)"], ["rank 0 (node0)", "rank 1 (node0)"]
    ]  # fmt: skip
    assert out.count("traceback: KeyError: 'image' (train.py:12 in load)") == 1
    assert "node1 local rank 0" in out and "raise KeyError" not in out


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (LOST, part.LOST),
        (RESET, part.OWN),  # of a file server: no rank was lost
        (BAD_BATCH, part.OWN),
        ("[2026-11-26 12:00:01] h:1:2 [0] NCCL WARN Accept: closed by remote peer", part.LOST),
        ("train.py: rank 2: ValueError: no (train.py:3 in load)", part.OWN),
        ("E1126 12:00:01.0 9 torch/distributed/elastic/multiprocessing/api.py:9] failed (exitcode:"
         " 1) local_rank: 0 (pid: 12) of binary: python", part.NOTICED),
        ("srun: error: gpu07: task 3: Killed", part.OWN),
        ("srun: error: gpu07: task 3: Exited with exit code 1", part.NOTICED),
    ],
)  # fmt: skip
def test_whose_error_it_is(tmp_path, text, kind):
    ((lines,), _) = part.read_logs(write(tmp_path, {"job.out": text}))
    assert [error.kind for error in part.errors_in(lines, WRITTEN)] == [kind]


def test_a_killed_rank_is_named_by_its_launcher(run_script, tmp_path):
    report = "E1126 12:00:03.0 9 torch/distributed/elastic/multiprocessing/api.py:1002] failed "
    report += "(exitcode: -9) local_rank: 1 (pid: 12) of binary: python\n"
    report += "  rank      : 3 (local_rank: 1)\n"
    files = {torchrun("node0", 0): "[rank0]: " + LOST, torchrun("node1", 1): "12:00:01 step 2\n"}
    out, _ = shown(run_script, tmp_path, files)
    assert "NO RANK HAS AN ERROR OF ITS OWN" in out
    assert "no error from node1 local rank 1; its last line, 12:00:01.000: 12:00:01 step 2" in out
    (tmp_path / "run/results.json").unlink()
    (tmp_path / "run").rmdir()
    out, _ = shown(run_script, tmp_path, files | {"node1/torchrun.err": report})
    assert "FIRST ERROR: rank 3 (node1), 12:00:03.000: killed by SIGKILL (says torchrun)" in out


def test_an_error_file_tells_the_second(run_script, tmp_path):
    """What @record leaves: rank 1 failed before rank 0, whose file was written to later."""

    def left(text, seconds):
        extra = {"py_callstack": text, "timestamp": str(int(seconds))}
        return json.dumps({"message": {"message": "KeyError: 'image'", "extraInfo": extra}})

    out, metrics = shown(run_script, tmp_path, {
        torchrun("node0", 0): "ready\n", torchrun("node0", 1): "ready\n" + BAD_BATCH,
        torchrun("node0", 0, "error.json"): left(BAD_BATCH, NOON + 9),
        torchrun("node0", 1, "error.json"): left(BAD_BATCH, NOON + 2),
    })  # fmt: skip
    assert "FIRST ERROR: node0 local rank 0 and node0 local rank 1, 12:00:03.000: KeyError" in out
    assert metrics["errors"][0]["who"][0] == "node0 local rank 1"


def test_the_lines_around_the_first_error(run_script, tmp_path):
    files = {f"slurm-9-{rank}.out": "".join(f"12:00:{n:02} step {n}\n" for n in range(9))
             for rank in range(3)}  # fmt: skip
    files["slurm-9-1.out"] = files["slurm-9-1.out"].replace("step 4", "ERROR no batch")
    out, _ = shown(run_script, tmp_path, files, "--lines", "2")
    assert out[out.index("\n\n") + 2 :].splitlines() == [
        "12:00:03.000 ranks 0, 1, 2 | step 3",
        "12:00:04.000 rank 0 | step 4",
        "12:00:04.000 rank 1 | ERROR no batch",
        "12:00:04.000 rank 2 | step 4",
        "12:00:05.000 ranks 0, 1, 2 | step 5",
    ]


@pytest.mark.parametrize(
    ("name", "says"), [("none", "there is no "), ("empty", "no line in a *.log, *.out, *.err")]
)
def test_bad_input_is_one_line(run_script, tmp_path, name, says):
    (tmp_path / "empty").mkdir()
    assert_one_line(run_script(MERGE, tmp_path / name, environ={}), says, "merge_logs.py")
