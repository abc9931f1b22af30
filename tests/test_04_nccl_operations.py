"""Module 04: each collective does what its definition says; what each one costs is measured."""

import argparse
import functools
import re
import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from conftest import REPO, assert_one_line, free_port, load_script, results_of, run_command

OPS = "04-nccl-operations/collective_ops.py"
full = pytest.mark.full
FOUR = pytest.param(4, marks=full)


@pytest.mark.parametrize("world_size", [2, 3, FOUR])
def test_every_collective_is_as_defined(run_script, tmp_path, world_size):
    ended = run_script(OPS, "--output-dir", tmp_path / "run", world_size=world_size)
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    has_all = hasattr(dist, "all_gather_single")  # torch 2.11: gloo has no all_to_all
    assert ended.stderr == "" and len(results_of(tmp_path / "run")["checks"]) == 24 + has_all


def skip(name):
    """Return a sabotage in which a collective of torch.distributed is not called at all."""

    def sabotage(script):
        setattr(script.dist, name, lambda *args, **kwargs: None)

    return sabotage


def into_another_order(script):
    gathered = script.all_gather_single

    def broken(whole, part):
        gathered(whole, part)
        whole.copy_(whole.roll(len(part)))

    script.all_gather_single = broken


def keep_own_part(script):
    script.reduce_scatter_single = lambda own, mine: own.copy_(mine[script.dist.get_rank()])


def one_group_of_all(script):
    script.dist.new_group = lambda ranks: script.dist.group.WORLD


@pytest.mark.parametrize(
    ("sabotage", "op"),
    [
        (skip("all_reduce"), "all_reduce SUM"),
        (skip("barrier"), "barrier"),
        pytest.param(skip("broadcast"), "broadcast", marks=full),
        pytest.param(skip("reduce"), "reduce", marks=full),
        pytest.param(skip("all_reduce"), "all_reduce BXOR", marks=full),
        pytest.param(into_another_order, "all_gather_into_tensor", marks=full),
        pytest.param(keep_own_part, "reduce_scatter_tensor", marks=full),
        pytest.param(one_group_of_all, "all_reduce_of_a_group", marks=full),
        pytest.param(skip("scatter_object_list"), "scatter_object_list", marks=full),
    ],
)
def test_sabotage_of_a_collective_fails_its_check(run_script, tmp_path, sabotage, op):
    ended = run_script(
        OPS, "--op", op, "--output-dir", tmp_path / "run", world_size=3, before=sabotage
    )
    assert any(ended.codes), ended.stdout + ended.stderr
    failed = [c["name"] for c in results_of(tmp_path / "run")["checks"] if not c["ok"]]
    assert failed == [f"{op}: elements not as defined"]


@pytest.mark.parametrize(
    ("world_size", "argv", "says"),
    [
        (1, (), "one rank has nobody to talk to: start 2 or more"),
        (2, ("--op", "all_reduce PREMUL_SUM"), "gloo has it not; nccl has"),
        (2, ("--op", "allreduce"), "argument --op: invalid choice: 'allreduce'"),
    ],
)
def test_collective_ops_refuses_bad_input(run_script, world_size, argv, says):
    assert_one_line(run_script(OPS, *argv, world_size=world_size), says, "collective_ops.py")


# point_to_point.py

P2P = "04-nccl-operations/point_to_point.py"


@pytest.mark.parametrize("world_size", [2, 3, FOUR, pytest.param(5, marks=full)])
def test_written_out_all_reduces_equal_the_librarys_in_steps_of_the_theory(
    run_script, tmp_path, world_size
):
    ended = run_script(P2P, "--mib", 1, "--output-dir", tmp_path / "run", world_size=world_size)
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    results = results_of(tmp_path / "run")
    assert ended.stderr == "" and len(results["checks"]) == 25
    assert results["metrics"]["alpha_us"] > 0


@pytest.mark.parametrize(
    ("ranks", "name", "steps", "sends", "in_a_step"),  # counted by hand
    [
        (2, "ring", 2, 1, 0.5),
        (2, "recursive doubling", 1, 1, 1),
        (2, "tree", 2, 1, 1),
        (4, "ring", 6, 1.5, 0.25),
        (4, "recursive doubling", 2, 2, 1),
        (5, "recursive doubling", 4, 3, 1),
        (5, "tree", 6, 3, 1),
        (8, "tree", 6, 3, 1),
    ],
)
def test_theory_of_an_all_reduce(ranks, name, steps, sends, in_a_step):
    assert load_script(P2P).theory(name, ranks) == (steps, sends, in_a_step)


def receive_first(script):
    script.both_send_first = lambda peer, group: None


def forget_the_second_half(script):
    whole = script.ALGORITHMS["ring"]

    def half(x, move):
        kept = script.Mover(move.rate, move.latency_s)
        whole(x, kept)
        move.steps, move.bytes, move.largest = kept.steps // 2, kept.bytes // 2, kept.largest

    script.ALGORITHMS["ring"] = half


def skip_an_addition(script):
    plain = script.doubling_all_reduce

    def broken(x, move):
        plain(x, move)
        x[-1] -= 1

    script.ALGORITHMS["recursive doubling"] = broken


def send_twice(script):
    plain = script.tree_all_reduce

    def broken(x, move):
        plain(x.clone(), script.Mover())
        plain(x, move)

    script.ALGORITHMS["tree"] = broken


def whole_buffers_around_the_ring(script):
    script.ALGORITHMS["ring"] = script.doubling_all_reduce


def receive_nothing(script):
    script.isend_irecv = lambda mine, received, to, source: None
    script.isend_irecv.__name__ = "isend_irecv"


@pytest.mark.parametrize(
    ("sabotage", "fails"),
    [
        (receive_first, "both send first: ranks whose send did not end"),
        (receive_nothing, "isend_irecv: ranks with another number than the previous rank's"),
        (forget_the_second_half, "ring, 1,048,576 bytes: steps"),
        (skip_an_addition, "recursive doubling, 1,048,576 bytes: numbers unlike dist.all_reduce's"),
        (whole_buffers_around_the_ring, "ring, 1,048,576 bytes: bytes that one step sends"),
        (send_twice, "tree, 1,048,576 bytes: bytes that the busiest rank sends"),
    ],
)
def test_sabotage_of_point_to_point_fails_its_check(run_script, tmp_path, sabotage, fails):
    def before(script):
        script.WARM_UP, script.ROUNDS = 0, 1
        sabotage(script)

    ended = run_script(
        P2P, "--mib", 1, "--output-dir", tmp_path / "run", world_size=2, before=before
    )
    assert any(ended.codes), ended.stdout + ended.stderr
    assert fails in [c["name"] for c in results_of(tmp_path / "run")["checks"] if not c["ok"]]


def say_instead_of_sleeping(script):
    script.WARM_UP, script.ROUNDS = 0, 1
    script.time = types.SimpleNamespace(
        perf_counter=time.perf_counter, sleep=lambda seconds: print(f"sleep {seconds:.6f}")
    )


def test_an_emulated_link_holds_each_message_back(run_script):
    ended = run_script(
        P2P, "--mib", 1, "--link", "100mbit", "--latency-ms", 5, world_size=2,
        before=say_instead_of_sleeping,
    )  # fmt: skip
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    slept = {float(seconds) for seconds in re.findall(r"^sleep (.*)$", ended.stdout, re.M)}
    messages = (256, 256 // 2, 2**20, 2**20 // 2)  # bytes: the ring sends halves
    assert slept == {round(0.005 + size / 12.5e6, 6) for size in messages}


@pytest.mark.parametrize(
    ("world_size", "argv", "says"),
    [
        (1, (), "one rank has nobody to send to: start 2 or more"),
        (1, ("--mib", "0"), "argument --mib: must be a whole number of at least 1, not '0'"),
        (1, ("--link", "fast"), "argument --link: must be like 100mbit or 1gbit, not 'fast'"),
        (2, ("--latency-ms", "-1"), "argument --latency-ms: must be a number above 0, not '-1'"),
    ],
)
def test_point_to_point_refuses_bad_input(run_script, world_size, argv, says):
    assert_one_line(run_script(P2P, *argv, world_size=world_size), says, "point_to_point.py")


# bandwidth_test.py

BANDWIDTH = "04-nccl-operations/bandwidth_test.py"
QUICK = ("-n", 4, "-w", 1, "-f", 16)


@pytest.mark.parametrize("world_size", [2, 3, FOUR])
def test_every_collective_is_timed_and_right(run_script, tmp_path, world_size):
    ended = run_script(
        BANDWIDTH, "--collective", "all", "-e", "1M", *QUICK, "--output-dir", tmp_path / "run",
        world_size=world_size,
    )  # fmt: skip
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    assert ended.stderr == "" and (tmp_path / "run/bandwidth.png").exists()
    metrics = results_of(tmp_path / "run")["metrics"]
    ring = (world_size - 1) / world_size
    factors = {  # nccl-tests, doc/PERFORMANCE.md; the others are 1
        "all_reduce": 2 * ring, "all_gather": ring, "reduce_scatter": ring, "alltoall": ring,
        "gather": ring, "scatter": ring,
    }  # fmt: skip
    for name, rows in metrics["sweeps"].items():
        for side in filter(None, (side for row in rows for side in row.values())):
            assert side["algbw_gb_s"] == pytest.approx(side["size"] / side["time_us"] / 1e3)
            assert side["busbw_gb_s"] / side["algbw_gb_s"] == pytest.approx(factors.get(name, 1))
    assert metrics["all_reduce sent_x_size"] == pytest.approx(2 * ring, abs=0.03)
    # gloo's reduce-scatter moves an all-reduce's bytes, NCCL's half of them.
    assert metrics["reduce_scatter sent_x_size"] == pytest.approx(2 * ring, abs=0.03)
    assert metrics["all_gather sent_x_size"] == pytest.approx(ring, abs=0.03)


def test_columns_are_those_of_nccl_tests(run_script, tmp_path):
    ended = run_script(
        BANDWIDTH, "-b", "1K", "-e", "16K", *QUICK, "-I", "1", "--link", "1gbit", "--output-dir",
        tmp_path / "run", world_size=2,
    )  # fmt: skip
    lines = ended.stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if "redop" in line)
    header = "size count type redop root" + 2 * " time algbw busbw #wrong"
    assert lines[at].split() == ["#", *header.split()]
    row = lines[at + 2].split()
    assert row[:5] == ["1024", "256", "float", "sum", "-1"] and row[8] == row[12] == "0"
    widths = (12, 12, 8, 6, 6, 7, 6, 6, 6, 7, 6, 6, 6)  # of nccl-tests' formats, and 2 between
    assert len(lines[at]) == len(lines[at + 2]) == sum(widths) + 2 * (len(widths) - 1)
    side = results_of(tmp_path / "run")["metrics"]["sweeps"]["all_reduce"][0]["in_place"]
    assert side["algbw_gb_s"] == pytest.approx(1024 / side["time_us"] / 1e3)
    assert side["p50_us"] <= side["p95_us"] <= side["p99_us"] <= side["max_us"]
    assert side["iterations"] == 8 and "of the link" in ended.stdout
    assert "# Out of bounds values : 0 OK" in lines


@pytest.mark.parametrize(
    ("name", "ranks", "bus"),  # nccl-tests, doc/PERFORMANCE.md
    [
        ("all_reduce", 8, 1.75),
        ("reduce_scatter", 8, 0.875),
        ("all_gather", 4, 0.75),
        ("alltoall", 2, 0.5),
        ("broadcast", 8, 1),
        ("reduce", 8, 1),
    ],
)
def test_factors_of_the_bus_bandwidth(name, ranks, bus):
    assert load_script(BANDWIDTH).COLLECTIVES[name].bus(ranks) == bus


def test_counts_of_parts_are_those_of_nccl_tests():
    script = load_script(BANDWIDTH)

    def lengths(name, size, in_place=False, ranks=3):
        made = script.buffers(
            script.COLLECTIVES[name], size, torch.float32, 1, ranks, in_place, torch.device("cpu")
        )
        return len(made[0]), len(made[1]), made[2]

    assert lengths("all_reduce", 1024) == (256, 256, 256)
    assert lengths("all_gather", 1024) == (84, 252, 84)  # 85 rounded down to 16 bytes
    assert lengths("reduce_scatter", 1024, in_place=True) == (252, 84, 84)
    assert lengths("alltoall", 1024) == (252, 252, 84)
    assert lengths("all_gather", 8) == (0, 0, 0)


def test_fit_finds_what_made_the_times():
    sizes = [2**n for n in range(3, 25)]
    alpha, rate, error = load_script(BANDWIDTH).fit(sizes, [50 + s / 2e3 for s in sizes])
    assert alpha == pytest.approx(50) and rate == pytest.approx(2) and error < 1e-6
    assert load_script(BANDWIDTH).fit(sizes[::-1], [50 + s / 2e3 for s in sizes]) == (None,) * 3
    assert load_script(BANDWIDTH).fit([8], [50]) == (None, None, None)
    through_zero = load_script(BANDWIDTH).fit(sizes, [s**1.1 for s in sizes])
    assert through_zero[0] == 0 and through_zero[1] > 0
    assert load_script(BANDWIDTH).fit(sizes, [50 + 20 * (s > 999) for s in sizes])[2] > 0.1


def skip_one(script):
    script.dist.all_reduce = lambda *args, **kwargs: None


def swap_parts(script):
    plain = script.all_gather_single
    script.all_gather_single = lambda whole, part, group: (
        plain(whole, part, group=group),
        whole.copy_(whole.roll(len(part))),
    )


def add_one_to_the_last(script):
    run = script.COLLECTIVES["sendrecv"].run

    def broken(sent, received, op, group):
        run(sent, received, op, group)
        received[-1] += 1

    script.COLLECTIVES["sendrecv"].run = broken


@pytest.mark.parametrize(
    ("sabotage", "name"),
    [
        (skip_one, "all_reduce"),
        pytest.param(swap_parts, "all_gather", marks=full),
        pytest.param(add_one_to_the_last, "sendrecv", marks=full),
    ],
)
def test_sabotage_of_a_timed_collective_is_counted(run_script, sabotage, name):
    ended = run_script(
        BANDWIDTH, "--collective", name, "-b", "4K", "-e", "4K", *QUICK,
        world_size=2, before=sabotage,
    )  # fmt: skip
    assert any(ended.codes) and f"FAILED: {name}: wrong elements" in ended.stdout, ended.stdout


def figure_by_a_clock_of_the_test(rank, ranks, path, timed_besides):
    """Return the script's figure where an all-reduce takes 2 ms, and all else a second a call."""
    script = load_script(path)
    now = 0.0

    def takes(seconds, function):
        def slowed(*given, **named):
            nonlocal now
            now += seconds
            return function(*given, **named)

        return slowed

    script.time = types.SimpleNamespace(perf_counter=lambda: now)
    dist.all_reduce = takes(0.002, dist.all_reduce)
    dist.barrier = takes(1.0, dist.barrier)
    for name in ("buffers", "numbers", "fill", "count_wrong"):
        setattr(script, name, takes(1.0, getattr(script, name)))
    if timed_besides:
        run = script.COLLECTIVES["all_reduce"].run
        script.COLLECTIVES["all_reduce"].run = takes(0.0005, run)
    args = argparse.Namespace(op="sum", datatype="float", iters=4, warmup_iters=1)
    device = torch.device("cpu")
    return script.measure_one("all_reduce", 2**20, True, args, None, device)["time_us"]


def test_the_script_times_nothing_but_the_collective(on_ranks):
    assert on_ranks(figure_by_a_clock_of_the_test, 2, BANDWIDTH, False) == [pytest.approx(2000)] * 2
    assert on_ranks(figure_by_a_clock_of_the_test, 2, BANDWIDTH, True) == [pytest.approx(2500)] * 2


def test_groups_within_and_across_nodes(run_script, tmp_path):
    port = free_port()
    ended = run_script(
        BANDWIDTH, "-e", "4K", *QUICK, "--output-dir", tmp_path / "run", world_size=4,
        environ=lambda rank: {
            "RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": rank % 2, "LOCAL_WORLD_SIZE": 2,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GROUP_RANK": rank // 2,
        },
    )  # fmt: skip
    assert ended.codes == [0] * 4, ended.stdout + ended.stderr
    assert [*results_of(tmp_path / "run")["metrics"]["sweeps"]] == [
        "all_reduce", "all_reduce within a node", "all_reduce across nodes"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("nodes", "within", "across", "made"),
    [
        ([0, 0, 1, 1], [2, 3], [1, 3], [[0, 1], [2, 3], [0, 2], [1, 3]]),
        ([0, 1, 0, 1], [1, 3], [2, 3], [[0, 2], [1, 3], [0, 1], [2, 3]]),  # dealt out in turn
        ([0, 0, 1], None, None, []),  # not equally many
        ([0, 0, 0], None, None, []),
        ([0, 1, 2], None, [0, 1, 2], [[0, 1, 2]]),
    ],
)
def test_groups_follow_the_nodes(monkeypatch, nodes, within, across, made):
    script = load_script(BANDWIDTH)
    asked = []
    dist_of_the_last_rank = types.SimpleNamespace(
        get_rank=lambda: len(nodes) - 1,
        new_group=lambda members: asked.append(members) or members,
    )
    monkeypatch.setattr(script, "dist", dist_of_the_last_rank)
    monkeypatch.setattr(script.runtime, "gather", lambda own: nodes)
    silent = types.SimpleNamespace(say=lambda line: None)
    groups = {name: group for name, group, _ in script.groups_of(silent)}
    assert groups[""] is None and asked == made
    assert (groups.get("within a node"), groups.get("across nodes")) == (within, across)


drawn_once = functools.cache(load_script(BANDWIDTH).numbers)


@pytest.mark.parametrize("ranks", [2, 5, 128, 1000])
@pytest.mark.parametrize("kind", ["int8", "half", "bfloat16", "f8e4m3", "f8e5m2"])
@pytest.mark.parametrize("op", ["sum", "prod", "max"])
def test_wrong_data_is_counted_on_any_number_of_ranks(monkeypatch, ranks, kind, op):
    script = load_script(BANDWIDTH)
    monkeypatch.setattr(script, "numbers", drawn_once)
    dtype, combine = script.TYPES[kind], script.REDUCTIONS[op][1]
    total = functools.reduce(combine, [script.numbers(r, ranks, op) for r in range(ranks)])
    partial = functools.reduce(combine, [script.numbers(r, ranks, op) for r in range(ranks - 1)])
    assert total.max() <= 16

    def wrong(period):
        received = script.fill(torch.empty(5000, dtype=dtype), period)
        return script.count_wrong(received, script.COLLECTIVES["all_reduce"], 0, ranks, 5000, op)

    assert wrong(total) == 0 and wrong(script.numbers(0, ranks, op)) and wrong(2 * total)
    assert wrong(torch.zeros_like(total))
    if op == "sum":  # one rank left out; of a product only the first ranks take part
        assert wrong(partial)


def test_large_buffers_are_checked_in_pieces():
    script = load_script(BANDWIDTH)
    period, script.CHUNK = script.numbers(0, 2, "sum"), script.PERIOD * 3
    try:
        received = script.fill(torch.empty(30001), period)
        count = functools.partial(
            script.count_wrong, collective=script.COLLECTIVES["broadcast"], rank=1, ranks=2,
            count=30001, redop="sum",
        )  # fmt: skip
        assert count(received) == 0
        received[[5, 15000, 30000]] += 1
        assert count(received) == 3
    finally:
        script.CHUNK = script.PERIOD * 2**12


def test_the_last_tables_say_what_the_rows_say():
    """alpha 100 us and 2 GB/s, on 4 ranks, of which a copy does 6 GB/s and a link 3."""
    script = load_script(BANDWIDTH)
    sizes = [2**n for n in range(3, 24)]
    times = [100 + size / 2e3 for size in sizes]
    rows = [
        {"out_of_place": None, "in_place": {
            "size": size, "wrong": 0, "p50_us": took, "busbw_gb_s": 1.5 * size / took / 1e3,
            "sent_x_size": 1.5,
        }} for size, took in zip(sizes, times, strict=True)
    ]  # fmt: skip
    report = types.SimpleNamespace(metrics={}, check=lambda *given: None)
    said, counted = script.summarise(
        report, "all_reduce", "all_reduce", 4, rows, argparse.Namespace(link=3e9), 6.0
    )
    best = 1.5 * sizes[-1] / times[-1] / 1e3
    assert said == (
        "all_reduce", "100 us", "2.00 GB/s", "3.00 GB/s", "200.0 KB", "0%",
        f"{best / 6:.2f}x", f"{best / 3:.2f}x",
    )  # fmt: skip
    assert counted == ("all_reduce", "1.50", "1.50")


def test_percentiles_of_known_times(on_ranks):
    (figures, same) = on_ranks(known_times, 2, BANDWIDTH)
    assert figures == same
    assert (figures["p50_us"], figures["p95_us"], figures["p99_us"]) == (101, 191, 199)
    assert (figures["max_us"], figures["iterations"], figures["outliers"]) == (1000, 200, 1)
    assert figures["time_us"] == pytest.approx((200 * 201 / 2 - 200 + 1000) / 200)


def known_times(rank, ranks, path):
    script = load_script(path)
    script.timed = lambda *given: [*range(1 + rank, 201, 2)][: 100 - rank] + [1000] * rank
    args = argparse.Namespace(op="sum", datatype="float", iters=100, warmup_iters=0)
    return script.measure_one("all_reduce", 64, True, args, None, torch.device("cpu"))


@pytest.mark.parametrize(
    ("world_size", "argv", "says"),
    [
        (1, (), "one rank has nobody to talk to: start 2 or more"),
        (
            1,
            ("-b", "8x"),
            "argument -b/--minbytes: must be a size like 8, 4K, 128M or 1G, not '8x'",
        ),
        (1, ("-e", "0"), "argument -e/--maxbytes: must be a size like"),
        (1, ("-b", "1M", "-e", "1K"), "-b 1048576 is above -e 1024, the last size"),
        (1, ("-b", "4", "-d", "double"), "-b 4 is less than a number of -d double: 8"),
        (1, ("-f", "1"), "argument -f/--stepfactor: must be a whole number of at least 2, not '1'"),
        (2, ("-d", "f8e4m3"), "-d f8e4m3: gloo has it not, nccl has"),
        (2, ("-o", "mulsum"), "-o mulsum: gloo has it not, nccl has"),
        (1, ("-o", "avg", "-d", "int32"), "-o avg needs a floating-point -d, not int32"),
        (2, ("-e", "900000G"), "two buffers of it do not fit into a rank's memory; at most -e"),
        (2, ("--collective", "allreduce"), "argument --collective: invalid choice: 'allreduce'"),
        (2, ("--collective", "alltoall", "-e", "16"), "-e 16 leaves each rank of alltoall nothing"),
    ],
)
def test_bandwidth_test_refuses_bad_input(run_script, world_size, argv, says):
    assert_one_line(run_script(BANDWIDTH, *argv, world_size=world_size), says, "bandwidth_test.py")


# launch_nccl.sh

LAUNCH = ["bash", "04-nccl-operations/launch_nccl.sh"]


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (
            "local --nproc-per-node 4 -e 1G",
            "torchrun --standalone --nproc-per-node=4 04-nccl-operations/bandwidth_test.py -e 1G",
        ),
        (
            "multi-node topology.py --nnodes 2 --nproc-per-node=8 --rdzv-endpoint n0:29500 "
            "--ifname eth0",
            "NCCL_SOCKET_IFNAME==eth0 GLOO_SOCKET_IFNAME=eth0 torchrun --nnodes=2 "
            "--nproc-per-node=8 --rdzv-id=nccl --rdzv-backend=c10d --rdzv-endpoint=n0:29500 "
            "04-nccl-operations/topology.py",
        ),
        (
            "slurm --nnodes 2 --nproc-per-node 8 --nccl-debug",
            "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP,NET,ENV "
            "NCCL_DEBUG_FILE=nccl-%h-%p.log srun --nodes=2 --ntasks-per-node=8 "
            "--gpus-per-node=8 --kill-on-bad-exit=1 python 04-nccl-operations/bandwidth_test.py",
        ),
        (
            "slurm --nnodes 1 --nproc-per-node 2 --device cpu",
            "srun --nodes=1 --ntasks-per-node=2 --kill-on-bad-exit=1 "
            "python 04-nccl-operations/bandwidth_test.py --device cpu",
        ),
    ],
)
def test_launcher_prints_what_it_would_run(argv, line):
    ended = run_command([*LAUNCH, *argv.split(), "--dry-run"], REPO, 20)
    assert (ended.codes, ended.stdout) == ([0], f"OMP_NUM_THREADS=1 {line}\n"), ended.stderr


@full
def test_launcher_starts_two_nodes_here(tmp_path):
    """The line of two machines, run twice on one: each is a node, with a torchrun of its own."""
    argv = [
        *LAUNCH, "multi-node", "--nnodes", "2", "--nproc-per-node", "2", "--rdzv-endpoint",
        f"localhost:{free_port()}", "--ifname", "lo", "-b", "1K", "-e", "1K", "-n", "2",
        "--output-dir", str(tmp_path / "run"),
    ]  # fmt: skip
    with ThreadPoolExecutor() as pool:
        nodes = [pool.submit(run_command, argv, REPO, 200) for _ in range(2)]
    ended = [node.result() for node in nodes]
    assert [node.codes for node in ended] == [[0], [0]], ended[0].stderr + ended[1].stderr
    results = results_of(tmp_path / "run")
    assert len(results["checks"]) == 3 and results["world_size"] == 4  # all, within, across


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("", "the first argument must be local, multi-node or slurm, not ''"),
        ("local failure_gallery.py", "failure_gallery.py is none of bandwidth_test.py"),
        ("local --nproc-per-node 0", "must be a whole number of at least 1, not '0'"),
        ("local --ifname", "--ifname needs a value"),
        ("local --nnodes 2", "--nnodes and --rdzv-endpoint go with the other modes"),
        ("multi-node --nproc-per-node 2", "multi-node needs --nnodes"),
        ("multi-node --nnodes 2 --rdzv-endpoint n0", "multi-node needs --rdzv-endpoint HOST:PORT"),
        ("slurm --nnodes 2", "slurm needs --nproc-per-node"),
        ("slurm --nnodes 2 --nproc-per-node 2 --rdzv-endpoint n0:1", "slurm needs no"),
    ],
)
def test_launcher_refuses_what_it_cannot_start(argv, says):
    ended = run_command([*LAUNCH, *argv.split()], REPO, 20)
    assert (ended.codes, ended.stdout) == ([2], "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("launch_nccl.sh: error: ") and says in line
