"""Module 04: sabotage fails a lesson's check; ranks, launches, wrong usage."""

import os
import subprocess

import pytest
from conftest import REPO, assert_one_line, load_script, results_of, run_command

COLLECTIVES = "04-nccl-operations/collective_ops.py"
MESSAGES = "04-nccl-operations/point_to_point.py"
BANDWIDTH = "04-nccl-operations/bandwidth_test.py"
LAUNCH = ["bash", "04-nccl-operations/launch_nccl.sh"]
full = pytest.mark.full


# Sabotage


def skip(name):
    """Return a sabotage that calls one collective not at all."""

    def sabotage(script):
        setattr(script.dist, name, lambda *args, **kwargs: NoWork())

    return sabotage


class NoWork:
    def wait(self):
        pass


def make_one_group_of_all(script):
    script.make_group = lambda divisions: script.dist.group.WORLD


def receive_before_wait(script):
    start = script.dist.all_reduce

    def all_reduce(tensor, **kwargs):
        return start(tensor.add_(1), **kwargs)

    script.dist.all_reduce = all_reduce


def receive_first(script):
    script.both_send_first = lambda peer, group: None


def receive_nothing(script):
    script.isend_irecv = lambda sent, to, received, source: None


def add_nothing(script):
    script.ring_reduce_scatter = lambda parts, move: None


def send_twice(script):
    exchange = script.Link.exchange

    def exchange_twice(link, outgoing, incoming):
        exchange(link, outgoing, incoming)
        exchange(link, outgoing, incoming)

    script.Link.exchange = exchange_twice


def add_nothing_in_one_shot(script):
    script.one_shot_all_reduce = lambda x, exchange: None


def swap_parts(script):
    gather = script.all_gather_single

    def gather_and_roll(received, sent):
        gather(received, sent)
        received.copy_(received.roll(len(sent)))

    script.all_gather_single = gather_and_roll


RING_SUM = "ring: numbers unlike dist.all_reduce"
ONE_SHOT_SUM = "one-shot: numbers unlike dist.all_reduce"
MESSAGE = "messages that did not arrive"
SABOTAGE = [
    (COLLECTIVES, "--topic root", skip("scatter"), "root: wrong elements"),
    (COLLECTIVES, "--topic root", skip("reduce"), "root: wrong elements"),
    (
        COLLECTIVES,
        "--topic unequal",
        skip("all_to_all_single"),
        "unequal: wrong elements",
    ),
    (COLLECTIVES, "--topic groups", make_one_group_of_all, "groups: wrong elements"),
    (
        COLLECTIVES,
        "--topic async",
        receive_before_wait,
        "async: rank 0's own numbers before wait()",
    ),
    (
        COLLECTIVES,
        "--topic async",
        skip("all_reduce"),
        "async: wrong elements after wait()",
    ),
    (
        COLLECTIVES,
        "--topic order",
        skip("all_reduce"),
        "order: elements unlike the mixture",
    ),
    (MESSAGES, "--kib 64", receive_first, "both send first: ranks that hang"),
    (MESSAGES, "--kib 64", receive_nothing, MESSAGE),
    (MESSAGES, "--kib 64", add_nothing, RING_SUM),
    (MESSAGES, "--kib 64", add_nothing, "ring: bytes sent by a rank"),
    (MESSAGES, "--kib 64", send_twice, "one-shot: bytes sent by a rank"),
    (MESSAGES, "--kib 64", add_nothing_in_one_shot, ONE_SHOT_SUM),
    (BANDWIDTH, "--collective all_gather -e 4K -n 2", swap_parts, "wrong elements"),
    (
        BANDWIDTH,
        "--collective all_reduce -e 4K -n 2",
        skip("all_reduce"),
        "wrong elements",
    ),
]


@pytest.mark.parametrize(
    ("script", "flags", "before", "check"),
    [SABOTAGE[0], *(pytest.param(*row, marks=full) for row in SABOTAGE[1:])],
)
def test_sabotage_fails_its_check(run_script, tmp_path, script, flags, before, check):
    words = (*flags.split(), "--output-dir", tmp_path / "run")
    ended = run_script(script, *words, world_size=2, before=before)
    assert ended.codes == [1, 1], ended.stdout + ended.stderr
    failed = [c["name"] for c in results_of(tmp_path / "run")["checks"] if not c["ok"]]
    assert check in failed


# Other ranks and seeds

SMALL = "--collective all -e 8K -f 8 -n 2"
RANKS = [
    *((COLLECTIVES, "", ranks) for ranks in (3, 6)),
    (MESSAGES, "--kib 64", 3),
    (BANDWIDTH, SMALL, 3),
]


@full
@pytest.mark.parametrize(("script", "flags", "ranks"), RANKS)
def test_a_lesson_passes_on_other_ranks_and_seeds(run_script, script, flags, ranks):
    ended = run_script(script, *flags.split(), "--seed", 7, world_size=ranks)
    assert ended.codes == [0] * ranks, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("script", "ranks", "flags", "message"),
    [
        (COLLECTIVES, 1, "--topic broadcast", "argument --topic: invalid choice"),
        (MESSAGES, 1, "", "1 rank has nobody to send to: start 2 or more"),
        (
            MESSAGES,
            1,
            "--kib 0",
            "argument --kib: must be a whole number of at least 1",
        ),
        (BANDWIDTH, 1, "", "1 rank has nobody to send to: start 2 or more"),
        (BANDWIDTH, 2, "-b 1M -e 1K", "-e 1024 leaves each rank of all_reduce nothing"),
        (BANDWIDTH, 1, "-e 1T", "argument -e/--maxbytes: must be like 8, 64K or 1G"),
        (BANDWIDTH, 1, "-f 1", "argument -f/--stepfactor: must be a whole number"),
    ],
)
def test_wrong_usage_is_one_line(run_script, script, ranks, flags, message):
    ended = run_script(script, *flags.split(), world_size=ranks)
    assert_one_line(ended, message, script.split("/")[1])


# The bandwidths that bandwidth_test.py computes from times


@pytest.mark.parametrize(
    ("name", "ranks", "factor"),  # nccl-tests, doc/PERFORMANCE.md
    [
        ("all_reduce", 8, 1.75),
        ("reduce_scatter", 8, 0.875),
        ("all_gather", 4, 0.75),
        ("alltoall", 2, 0.5),
        ("broadcast", 8, 1),
        ("reduce", 8, 1),
    ],
)
def test_factors_of_the_bus_bandwidth(name, ranks, factor):
    assert load_script(BANDWIDTH).COLLECTIVES[name].bus_factor(ranks) == factor


def test_fit_finds_latency_and_rate():
    fit = load_script(BANDWIDTH).fit
    sizes = (0, 1024, 2**24)
    rows = [{"size": s, "p50_us": 50 + s / 2e3, "algbw_gb_s": 1} for s in sizes]
    assert fit(rows) == pytest.approx((50, 2))
    assert fit(rows[:1]) == (50, 1)


# launch_nccl.sh


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (
            "local --nproc-per-node 4 -e 1G",
            f"torchrun --standalone --nproc-per-node=4 {BANDWIDTH} -e 1G",
        ),
        (
            "multi-node collective_ops.py --nnodes 2 --nproc-per-node=8 "
            "--rdzv-endpoint n0:29500 --ifname eth0",
            "NCCL_SOCKET_IFNAME==eth0 GLOO_SOCKET_IFNAME=eth0 torchrun --nnodes=2 "
            "--nproc-per-node=8 --rdzv-id=nccl --rdzv-backend=c10d "
            f"--rdzv-endpoint=n0:29500 {COLLECTIVES}",
        ),
        (
            "slurm --nnodes 2 --nproc-per-node 8 --nccl-debug",
            "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP,NET,ENV "
            "NCCL_DEBUG_FILE=nccl-%h-%p.log srun --nodes=2 --ntasks-per-node=8 "
            f"--gpus-per-node=8 --kill-on-bad-exit=1 python {BANDWIDTH}",
        ),
        (
            "slurm collective_ops.py --nnodes 1 --nproc-per-node 2 --device cpu",
            "srun --nodes=1 --ntasks-per-node=2 --kill-on-bad-exit=1 "
            f"python {COLLECTIVES} --device cpu",
        ),
    ],
)
def test_launch_prints_the_command(argv, line):
    ended = run_command([*LAUNCH, *argv.split(), "--dry-run"], REPO, 60)
    variables = "OMP_NUM_THREADS=1 PYTORCH_ALLOC_CONF=expandable_segments:True"
    assert ended.codes == [0], ended.stderr
    assert ended.stdout == f"{variables} {line}\n"


def run_job_file(tmp_path, *argv):
    """Print a job file, run it with an srun that prints its words; return both."""
    printed = run_command([*LAUNCH, "sbatch", *argv], REPO, 60)
    assert printed.codes == [0], printed.stderr
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/bash\nprintf "%s|" "$@"\necho "OMP=$OMP_NUM_THREADS"\n')
    srun.chmod(0o755)
    environ = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": "/shared/a guide",
        "SLURM_CPUS_PER_TASK": "12",
    }
    ended = subprocess.run(
        ["bash"], input=printed.stdout, env=environ, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    (line,) = ended.stdout.splitlines()
    return printed.stdout, line.split("|")


def test_the_job_file_runs_the_script(tmp_path):
    job, words = run_job_file(tmp_path, "--nnodes", "4", "-e", "8G")
    for option in (
        "nodes=4",
        "ntasks-per-node=8",
        "gpus-per-node=8",
        "cpus-per-task=12",
    ):
        assert f"\n#SBATCH --{option}\n" in job
    # SLURM stops reading at the first command.
    assert job.rindex("#SBATCH") < job.index("set -euo pipefail")
    binding = ["--cpus-per-task=12", "--cpu-bind=cores", "--kill-on-bad-exit=1"]
    assert words == [*binding, "python", BANDWIDTH, "-e", "8G", "OMP=1"]


def test_the_job_file_of_a_container(tmp_path):
    argv = ("collective_ops.py", "--container-image", "/images/guide 1.sqsh")
    _, words = run_job_file(tmp_path, *argv, "--topic", "a b")
    assert "--container-image=/images/guide 1.sqsh" in words
    assert "--container-workdir=/shared/a guide" in words
    mounts = [word for word in words if word.startswith("--container-mounts=")]
    expected = "--container-mounts=/shared/a guide:/shared/a guide"
    assert len(mounts) == 1 and mounts[0].startswith(expected)
    assert words[-4:] == [COLLECTIVES, "--topic", "a b", "OMP=1"]


@full
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("local nope.py", "nope.py is none of bandwidth_test.py, collective_ops.py"),
        ("", "the first argument must be local, multi-node, slurm or sbatch, not ''"),
        ("local --nproc-per-node 0", "must be a whole number of at least 1, not '0'"),
        ("local --ifname", "--ifname needs a value"),
        ("local --nnodes 2", "--nnodes and --rdzv-endpoint go with the other modes"),
        ("multi-node --nnodes 2 --rdzv-endpoint n0", "needs --rdzv-endpoint HOST:PORT"),
        ("slurm --nnodes 2", "slurm needs --nproc-per-node"),
        ("slurm --nnodes 2 --nproc-per-node 2 --rdzv-endpoint n0:1", "slurm needs no"),
        ("slurm --nnodes 2 --nproc-per-node 2 --container-image a", "goes with sbatch"),
    ],
)
def test_launch_refuses_wrong_usage(argv, message):
    ended = run_command([*LAUNCH, *argv.split()], REPO, 60)
    assert (ended.codes, ended.stdout) == ([2], "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("launch_nccl.sh: error: ") and message in line
