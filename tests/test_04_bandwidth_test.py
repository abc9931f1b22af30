"""bandwidth_test.py: what is timed is right, timed alone, and held against a yardstick."""

import argparse
import os
import signal
import types

import pytest
import torch
import torch.distributed as dist
from conftest import assert_one_line, free_port, load_script, results_of
from helpers_04 import first_is_quick, full

from legacy_common import cli
from nccl_parts import bandwidth_test as part
from nccl_parts import clusters, data
from nccl_parts.clusters import NEXT, PAIRS, RING, Group, Links, Yardstick, yardstick

BANDWIDTH = "04-nccl-operations/bandwidth_test.py"
script = load_script(BANDWIDTH)
QUICK = ("-n", 2, "-w", 1, "-f", 32)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=full)])
def test_every_collective_is_timed_and_right(run_script, tmp_path, world_size):
    root = world_size - 1
    ended = run_script(
        BANDWIDTH, "--collective", "all", "-e", "1M", "-r", root, *QUICK, "--output-dir",
        tmp_path / "run", world_size=world_size,
    )  # fmt: skip
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    assert ended.stderr == "" and (tmp_path / "run/bandwidth.png").exists()
    metrics = results_of(tmp_path / "run")["metrics"]
    ring = (world_size - 1) / world_size
    triangle = world_size * (world_size + 1) // 2
    factors = {  # nccl-tests, doc/PERFORMANCE.md; the others are 1
        "all_reduce": 2 * ring, "all_gather": ring, "reduce_scatter": ring, "alltoall": ring,
        "gather": ring, "scatter": ring, "alltoallv": (triangle - 1) / triangle,
    }  # fmt: skip
    assert len(metrics["sweeps"]) == 10 and metrics["interrupted"] is False
    for name, rows in metrics["sweeps"].items():
        for side in filter(None, (side for row in rows for side in row.values())):
            assert side["algbw_gb_s"] == pytest.approx(side["size"] / side["time_us"] / 1e3)
            assert side["busbw_gb_s"] / side["algbw_gb_s"] == pytest.approx(factors.get(name, 1))
    assert metrics["all_reduce sent_x_size"] == pytest.approx(2 * ring, abs=0.03)
    # gloo's reduce-scatter moves an all-reduce's bytes, NCCL's half of them.
    assert metrics["reduce_scatter sent_x_size"] == pytest.approx(2 * ring, abs=0.03)
    assert metrics["all_gather sent_x_size"] == pytest.approx(ring, abs=0.03)
    assert metrics["alltoallv sent_x_size"] == pytest.approx(factors["alltoallv"], abs=0.03)
    columns = [line.split() for line in ended.stdout.splitlines() if " float " in line]
    assert {line[4] for line in columns} == {"-1", str(root)}


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
    metrics = results_of(tmp_path / "run")["metrics"]
    side = metrics["sweeps"]["all_reduce"][0]["in_place"]
    assert side["algbw_gb_s"] == pytest.approx(1024 / side["time_us"] / 1e3)
    assert side["p50_us"] <= side["p95_us"] <= side["p99_us"] <= side["max_us"]
    assert side["iterations"] == 4 and len(side["rank_p50_us"]) == 2
    assert metrics["all_reduce bound_gb_s"] == 0.125
    assert metrics["all_reduce bound_by"] == "link of a rank" in ended.stdout


@full
def test_nccl_tests_other_flags(run_script, tmp_path):
    """-i adds, -c 0 does not check, -z 1 waits."""
    ended = run_script(
        BANDWIDTH, "-b", "1K", "-e", "4K", "-i", "1K", "-c", 0, "-z", 1, "-n", 2, "-w", 0,
        "--output-dir", tmp_path / "run", world_size=2,
    )  # fmt: skip
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    results = results_of(tmp_path / "run")
    rows = results["metrics"]["sweeps"]["all_reduce"]
    assert [row["in_place"]["size"] for row in rows] == [1024, 2048, 3072, 4096]
    assert results["checks"] == [] and rows[0]["in_place"]["wrong"] is None


@pytest.mark.parametrize(
    ("name", "ranks", "bus"),  # nccl-tests, doc/PERFORMANCE.md
    [
        ("all_reduce", 8, 1.75),
        ("reduce_scatter", 8, 0.875),
        ("all_gather", 4, 0.75),
        ("alltoall", 2, 0.5),
        ("alltoallv", 2, 2 / 3),  # ours: 1 and 2 units, of which rank 0 keeps 1
        ("broadcast", 8, 1),
        ("reduce", 8, 1),
    ],
)
def test_factors_of_the_bus_bandwidth(name, ranks, bus):
    assert script.COLLECTIVES[name].bus_factor(ranks) == pytest.approx(bus)


def test_counts_of_parts_are_those_of_nccl_tests():

    def lengths(name, size, in_place=False, ranks=3):
        collective, device = script.COLLECTIVES[name], torch.device("cpu")
        made = data.buffers_of(collective, size, torch.float32, 1, ranks, in_place, device)
        sent, received, count = made
        return len(sent), len(received), count

    assert lengths("all_reduce", 1024) == (256, 256, 256)
    assert lengths("all_gather", 1024) == (84, 252, 84)  # 85 rounded down to 16 bytes
    assert lengths("reduce_scatter", 1024, in_place=True) == (252, 84, 84)
    assert lengths("alltoall", 1024) == (252, 252, 84)
    assert lengths("all_gather", 8) == (0, 0, 0)
    assert lengths("alltoallv", 1024) == (240, 240, 80)  # 6 units of 40, three of which per pair


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_uneven_parts_add_up_and_match(ranks):
    """What one rank sends to another is what that one expects; all send as much in sum."""
    mean = 4 * (ranks + 1) // 2
    sent = [data.uneven_lengths(rank, ranks, mean) for rank in range(ranks)]
    assert [sum(lengths) for lengths in sent] == [ranks * mean] * ranks
    assert sent == [list(column) for column in zip(*sent, strict=True)]
    assert len(set(sent[0])) == ranks


# what it makes of times


def test_fit_finds_what_made_the_times():
    sizes = [2**n for n in range(3, 25)]
    alpha, rate, error = script.fit(sizes, [50 + s / 2e3 for s in sizes])
    assert alpha == pytest.approx(50) and rate == pytest.approx(2) and error < 1e-6
    through_zero = script.fit(sizes, [s**1.1 for s in sizes])
    assert through_zero[0] == 0 and through_zero[1] > 0


SIZES = [8, 256, 8192, 262144]


@pytest.mark.parametrize(
    ("sizes", "times"),
    [
        ([8], [50]),
        ([8, 1024], [50, 60]),  # through two points goes every line
        (SIZES, [50, 50, 50, 50]),
        (SIZES, [90, 80, 60, 50]),  # falls
        (SIZES, [50, 90, 40, 55]),  # grows by less than the fit is off
        (SIZES, [50, 70, 70, 70]),
    ],
)
def test_times_that_leave_the_rate_open_get_none(sizes, times):
    """Neither a negative rate nor one without end is printed, but words."""
    assert script.fit(sizes, times) == (None, None, None)
    rows = [{"out_of_place": None, "in_place": {
        "size": size, "wrong": 0, "p50_us": took, "busbw_gb_s": 1.0, "sent_x_size": None,
    }} for size, took in zip(sizes, times, strict=True)]  # fmt: skip
    report = report_that_notes()
    part.summarise(report, [sweep_with(rows)], 6.0, script.fit)
    assert ("all_reduce", *["n/a"] * 5, "0.17x") in report.said
    said = "all_reduce: too few sizes, or the time grows by no more than its noise: no fit"
    assert said in report.said
    assert report.metrics["all_reduce busbw_gb_s"] is None


def sweep_with(rows, ranks=4, bound=None):
    factor = 2 * (ranks - 1) / ranks
    return part.Sweep("all_reduce", Group("", None, ranks, ranks), factor, False, bound, rows)


def report_that_notes():
    said = []
    return types.SimpleNamespace(
        metrics={}, check=lambda *given: None, say=lambda line="": said.append(line), said=said,
        table=lambda rows, heads, names=1: said.extend(rows),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("p50_us", "named"),
    [
        ([900, 100, 910, 905], (1, 805)),
        ([900, 910, 905, 100], (3, 805)),
        ([100, 900], (0, 800)),
        ([900, 890], (None, 0)),
        ([500, 900, 100, 1300], (None, 0)),  # all differ: noise
    ],
)
def test_who_spends_least_time_in_a_collective_came_last(p50_us, named):
    assert part.arrives_last(p50_us) == named


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
    for name in ("buffers_of", "numbers", "noise", "fill", "count_wrong"):
        setattr(data, name, takes(1.0, getattr(data, name)))
    if timed_besides:
        run = script.COLLECTIVES["all_reduce"].run
        script.COLLECTIVES["all_reduce"].run = takes(0.0005, run)
    return measured(script, rank, ranks, 2**20, iters=4, warmup_iters=1)["time_us"]


def measured(script, rank, ranks, size, datatype="float", in_place=True, **flags):
    args = argparse.Namespace(op="sum", datatype=datatype, check=1, blocking=0, **flags)
    call = data.Call(None, rank, ranks, 0, dist.ReduceOp.SUM)
    return script.measure_one("all_reduce", size, in_place, args, call, torch.device("cpu"))


def test_the_script_times_nothing_but_the_collective(on_ranks):
    assert on_ranks(figure_by_a_clock_of_the_test, 2, BANDWIDTH, False) == [pytest.approx(2000)] * 2
    assert on_ranks(figure_by_a_clock_of_the_test, 2, BANDWIDTH, True) == [pytest.approx(2500)] * 2


def what_is_sent(rank, ranks, path, datatypes):
    """Return the least and most of what each all-reduce gets, but for the check's first one."""
    script, seen = load_script(path), []
    all_reduce = dist.all_reduce

    def noted(tensor, *given, **named):
        seen[-1].append((tensor.float().min().item(), tensor.float().max().item()))
        return all_reduce(tensor, *given, **named)

    dist.all_reduce = noted
    for datatype in datatypes:
        for in_place in (False, True):
            seen.append([])
            measured(script, rank, ranks, 2**12, datatype, in_place, iters=6, warmup_iters=2)
    return [calls[1:] for calls in seen]


def test_what_is_timed_is_neither_zero_nor_infinite(on_ranks):
    for calls in sum(on_ranks(what_is_sent, 2, BANDWIDTH, ["float", "half", "int8"]), []):
        assert len(calls) == 8 and all(1 <= low < high <= 16 for low, high in calls)


# Ctrl-C


def interrupt_at_the_third_size(script):
    measure = script.measure_one

    def interrupted(name, size, in_place, *given):
        if size == 4096 and not in_place and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGINT)
        return measure(name, size, in_place, *given)

    script.measure_one = interrupted


def test_ctrl_c_on_one_rank_ends_all_with_what_was_measured(run_script, tmp_path):
    ended = run_script(
        BANDWIDTH, "--collective", "all", "-b", "4", "-e", "1M", *QUICK, "--output-dir",
        tmp_path / "run", world_size=2, before=interrupt_at_the_third_size,
    )  # fmt: skip
    assert ended.codes == [cli.INTERRUPTED] * 2, ended.stdout + ended.stderr
    results = results_of(tmp_path / "run")
    rows = results["metrics"]["sweeps"]["all_reduce"]
    assert [row["in_place"]["size"] for row in rows] == [4, 128, 4096]
    assert [*results["metrics"]["sweeps"]] == ["all_reduce"] and results["metrics"]["interrupted"]
    assert "1 sweep on 2 ranks, interrupted by Ctrl-C" in ended.stdout
    assert (tmp_path / "run/bandwidth.png").exists()


# sabotage


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

    def broken(sent, received, call):
        run(sent, received, call)
        received[-1] += 1

    script.COLLECTIVES["sendrecv"].run = broken


def deliver_even_parts(script):
    script.COLLECTIVES["alltoallv"].run = script.COLLECTIVES["alltoall"].run


def take_root_0(script):
    broadcast = script.dist.broadcast
    script.dist.broadcast = lambda tensor, group, group_src: broadcast(tensor, 0, group)


@pytest.mark.parametrize(
    ("sabotage", "name"),
    first_is_quick([
        (deliver_even_parts, "alltoallv"),
        (skip_one, "all_reduce"),
        (take_root_0, "broadcast"),
        (swap_parts, "all_gather"),
        (add_one_to_the_last, "sendrecv"),
    ]),
)  # fmt: skip
def test_sabotage_of_a_timed_collective_is_counted(run_script, sabotage, name):
    ended = run_script(
        BANDWIDTH, "--collective", name, "-b", "4K", "-e", "4K", "-r", 1, *QUICK,
        world_size=2, before=sabotage,
    )  # fmt: skip
    assert any(ended.codes) and f"FAILED: {name}: wrong elements" in ended.stdout, ended.stdout


# groups of ranks, and the yardstick


@full
def test_groups_within_and_across_nodes(run_script, tmp_path):
    port = free_port()
    ended = run_script(
        BANDWIDTH, "-e", "4K", *QUICK, "--link", "100gbit", "--output-dir", tmp_path / "run",
        world_size=4, environ=lambda rank: {
            "RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": rank % 2, "LOCAL_WORLD_SIZE": 2,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GROUP_RANK": rank // 2,
        },
    )  # fmt: skip
    assert ended.codes == [0] * 4, ended.stdout + ended.stderr
    metrics = results_of(tmp_path / "run")["metrics"]
    assert [*metrics["sweeps"]] == [
        "all_reduce", "all_reduce within a node", "all_reduce across nodes"
    ]  # fmt: skip
    assert metrics["all_reduce bound_gb_s"] == 25 and "2 NICs of a node" in ended.stdout
    assert metrics["all_reduce across nodes bound_gb_s"] == 12.5
    assert "all_reduce within a node bound_gb_s" not in metrics  # no NVLink was told


NODES = {  # of four ranks: the groups of the last rank
    ((0, 1), (2, 3)): {"within a node": [2, 3], "across nodes": [1, 3]},
    ((0, 2), (1, 3)): {"within a node": [1, 3], "across nodes": [2, 3]},  # dealt out in turn
    ((0, 1, 2), (3,)): {},  # not equally many
    ((0, 1, 2, 3),): {},
    ((0,), (1,), (2,), (3,)): {"across nodes": [0, 1, 2, 3]},
}


def groups_of(rank, ranks):
    silent = types.SimpleNamespace(say=lambda line: None)
    found = [clusters.groups_of([list(node) for node in nodes], silent) for nodes in NODES]
    return [{g.name: g.group and dist.get_process_group_ranks(g.group) for g in groups}
            for groups in found]  # fmt: skip


def test_groups_follow_the_nodes(on_ranks):
    groups = on_ranks(groups_of, 4)[-1]
    assert groups == [{"": None} | expected for expected in NODES.values()]


def bytes_that_leave_a_node(schedule, node_of):
    """Return the most bytes that leave a node in a list of (sender, receiver, bytes)."""
    left = {}
    for sender, receiver, size in schedule:
        if node_of[sender] != node_of[receiver]:
            left[node_of[sender]] = left.get(node_of[sender], 0) + size
    return max(left.values())


def most_sent_by_a_rank(schedule):
    sent = {}
    for sender, _, size in schedule:
        sent[sender] = sent.get(sender, 0) + size
    return max(sent.values())


def ring_all_reduce(order, size):
    """List every message of a ring all-reduce: 2(n-1) steps, in which each sends an n-th on."""
    n = len(order)
    step = [(order[i], order[(i + 1) % n], size / n) for i in range(n)]
    return step * (2 * (n - 1))


def rings_all_reduce(nodes, size):
    """Run one ring for each rank of a node, on its part of the bytes, each with another exit."""
    k = len(nodes[0])
    schedule = []
    for exit_at in range(k):
        order = [node[(exit_at + 1 + i) % k] for node in nodes for i in range(k)]
        schedule += ring_all_reduce(order, size / k)
    return schedule


def all_to_all(nodes, size):
    ranks = [rank for node in nodes for rank in node]
    return [(a, b, size / len(ranks)) for a in ranks for b in ranks if a != b]


def to_the_next(nodes, size):
    ranks = [rank for node in nodes for rank in node]
    return [(rank, ranks[(i + 1) % len(ranks)], size) for i, rank in enumerate(ranks)]


def cluster(m, k):
    nodes = [[node * k + place for place in range(k)] for node in range(m)]
    return nodes, {rank: number for number, node in enumerate(nodes) for rank in node}


SHAPES = [(2, 2), (2, 8), (4, 8), (3, 1), (8, 4)]  # nodes, ranks in each


@pytest.mark.parametrize(("m", "k"), SHAPES)
@pytest.mark.parametrize(
    ("schedule", "path", "busbw_of"),  # busbw x time, in sizes, on n ranks
    [
        (rings_all_reduce, RING, lambda n: 2 * (n - 1) / n),
        (all_to_all, PAIRS, lambda n: (n - 1) / n),
        (to_the_next, NEXT, lambda n: 1),
    ],
)
def test_the_yardstick_is_what_the_bytes_over_a_border_allow(m, k, schedule, path, busbw_of):
    """Count bytes, and let the node's NICs send them: that is the bound on busbw."""
    nodes, node_of = cluster(m, k)
    n, size, nic = m * k, 840.0, 50.0
    messages = schedule(nodes, size)
    nics = nic if path == NEXT else k * nic  # of a rank that sends alone
    shortest = bytes_that_leave_a_node(messages, node_of) / nics
    bound = yardstick(path, Group("", None, n, k), Links(nic, k))
    assert bound.gb_s == pytest.approx(busbw_of(n) * size / shortest)
    # busbw is what the busiest rank sends in that time
    assert most_sent_by_a_rank(messages) == pytest.approx(busbw_of(n) * size)


@pytest.mark.parametrize(("m", "k"), SHAPES)
def test_nvlink_carries_the_rest(m, k):
    nodes, node_of = cluster(m, k)
    if k == 1:
        return
    size, nvlink = 840.0, 450.0
    for schedule, path, factor in ((rings_all_reduce, RING, 2), (all_to_all, PAIRS, 1)):
        inside = [message for message in schedule(nodes, size)
                  if node_of[message[0]] == node_of[message[1]]]  # fmt: skip
        shortest = most_sent_by_a_rank(inside) / nvlink
        n = m * k
        bound = yardstick(path, Group("", None, n, k), Links(1e9, k, nvlink))
        assert bound.link == "NVLink of a GPU"
        assert bound.gb_s == pytest.approx(factor * (n - 1) / n * size / shortest)


def test_a_healthy_cluster_is_not_eight_times_too_fast():
    """2 nodes of 8 GPUs with 8 adapters of 400 Gbit/s: rings may reach 400 GB/s, not 50."""
    links = Links(nic=50.0, nics=8, nvlink=450.0)
    everybody = Group("", None, 16, 8)
    assert yardstick(RING, everybody, links) == Yardstick(
        400.0, "8 NICs of a node", pytest.approx(750.0)
    )
    across = yardstick(RING, Group("across nodes", object(), 2, 1, 8), links)
    assert (across.gb_s, across.link) == (50.0, "8 NICs of a node, 8 groups at once")
    within = yardstick(RING, Group("within a node", object(), 8, 8, 2), links)
    assert (within.gb_s, within.link) == (450.0, "NVLink of a GPU")
    assert yardstick(PAIRS, everybody, links).gb_s == pytest.approx(50 * 15 / 8)
    slow_inside = yardstick(RING, everybody, Links(50.0, 8, nvlink=30.0))
    assert slow_inside.link == "NVLink of a GPU"
    assert slow_inside.gb_s == pytest.approx(30 * 8 / 7)
    assert yardstick(None, everybody, links) is None
    assert yardstick(RING, everybody, Links()) is None


@pytest.mark.parametrize(
    ("world_size", "argv", "says"),
    first_is_quick([
        (1, (), "one rank has nobody to talk to: start 2 or more"),
        (1, ("-b", "1M", "-e", "1K"), "-b 1048576 is above -e 1024, the last size"),
        (1, ("-b", "4", "-d", "double"), "-b 4 is less than a number of -d double: 8"),
        (1, ("-g", "8"), "ranks come from the launcher: torchrun --nproc-per-node"),
        (1, ("--nics", "8"), "--nics 8 needs --link, the speed of each"),
        (2, ("-r", "2"), "-r 2 must be below 2, the ranks"),
        (2, ("-d", "f8e4m3"), "-d f8e4m3: gloo has it not, nccl has"),
        (1, ("-o", "avg", "-d", "int32"), "-o avg needs a floating-point -d, not int32"),
        (2, ("-e", "900000G"), "two buffers of it do not fit into a rank's memory; at most -e"),
        (2, ("--collective", "alltoall", "-e", "16"), "-e 16 leaves each rank of alltoall nothing"),
    ]),
)  # fmt: skip
def test_bandwidth_test_refuses_bad_input(run_script, world_size, argv, says):
    assert_one_line(run_script(BANDWIDTH, *argv, world_size=world_size), says, "bandwidth_test.py")
