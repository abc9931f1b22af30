"""pairwise_scan.py: everybody meets everybody, and the speeds alone name who is slow."""

import itertools
from collections import Counter
from random import Random

import pytest
from conftest import assert_one_line, free_port, load_script, results_of
from helpers_04 import first_is_quick, full

from cluster_parts import pairwise_scan as part
from cluster_parts.pairwise_scan import ACROSS, BOTH, RECEIVES, SENDS, WITHIN, Scan
from legacy_common.lab import namespaces

SCAN = "cluster/pairwise_scan.py"
script = load_script(SCAN)
find_slow = script.find_slow
PACED = "cluster/cluster_parts/pairwise_scan.py"
QUICK = ("-b", "64K", "-n", 2)
why_not = namespaces.why_not()
# who meets whom


@pytest.mark.parametrize("players", [2, 3, 4, 5, 8, 9])
def test_in_a_tournament_everybody_meets_everybody_once(players):
    rounds = list(load_script(SCAN).tournament(range(players)))
    assert len(rounds) == players - 1 + players % 2
    for pairs in rounds:
        assert len(set(itertools.chain(*pairs))) == 2 * len(pairs) == players - players % 2
    met = Counter(frozenset(pair) for pairs in rounds for pair in pairs)
    assert met == dict.fromkeys(map(frozenset, itertools.combinations(range(players), 2)), 1)


SHAPES = [[2], [4], [5], [2, 2], [1, 1, 1], [2, 2, 2], [3, 3, 3, 3], [4, 4], [2, 3]]


def nodes_with(sizes):
    ranks = iter(range(sum(sizes)))
    return [list(itertools.islice(ranks, size)) for size in sizes]


@pytest.mark.parametrize("sizes", SHAPES)
def test_the_rounds_of_a_cluster(sizes):
    """Each pair once; no round mixes pairs within nodes and across; as few rounds as can be."""
    nodes = nodes_with(sizes)
    rounds = load_script(SCAN).rounds_of(nodes)
    scan = Scan(nodes, rounds)
    met = Counter(frozenset(pair) for pairs in rounds for pair in pairs)
    everybody = itertools.combinations(range(sum(sizes)), 2)
    assert met == dict.fromkeys(map(frozenset, everybody), 1)
    assert len(rounds) == part.rounds_needed(scan)
    for pairs in rounds:
        assert len(set(itertools.chain(*pairs))) == 2 * len(pairs)
        if len(set(sizes)) == 1:
            assert len({scan.kind(pair) for pair in pairs}) == 1
            node_of = {rank: number for number, node in enumerate(nodes) for rank in node}
            meetings = {frozenset(map(node_of.get, pair)) for pair in pairs}
            assert len(set().union(*meetings)) == sum(len(meeting) for meeting in meetings)


# what the speeds say


def speeds_of(sizes, slow, fast=None):
    """Return a scan in which ways are as fast as their kind, but those that `slow` says."""
    nodes = nodes_with(sizes)
    scan = Scan(nodes, [])
    fast = fast or {WITHIN: 400.0, ACROSS: 45.0}
    for number, way in enumerate(itertools.permutations(range(sum(sizes)), 2)):
        wobble = 1 - 0.02 * (number % 7)
        gb_s = fast[scan.kind(way)] * wobble * (0.1 if slow(*way) else 1)
        scan.repeats[way] = [gb_s * (1 - 0.01 * repeat) for repeat in range(5)]
    return scan


def named(scan):
    return [(slow.what, slow.direction, slow.where) for slow in find_slow(scan)[0]]


@pytest.mark.parametrize("node", [0, 1, 2])
def test_a_slow_node_is_named_rather_than_its_ranks(node):
    """Its network is slow: not what stays within it."""
    sizes = [2, 2, 2]
    outside = speeds_of(sizes, lambda a, b: (a // 2 != b // 2) and node in (a // 2, b // 2))
    what = f"node {node} (ranks {2 * node}, {2 * node + 1})"
    assert named(outside) == [(what, BOTH, ACROSS)]
    sends = speeds_of(sizes, lambda a, b: a // 2 == node != b // 2)
    assert named(sends) == [(what, SENDS, ACROSS)]


@pytest.mark.parametrize(
    ("sizes", "slow", "found"),
    [
        ([4], lambda a, b: a == 2, [("rank 2", SENDS, WITHIN)]),
        ([4], lambda a, b: b == 2, [("rank 2", RECEIVES, WITHIN)]),
        ([4], lambda a, b: {a, b} == {1, 3}, [("rank 1 <-> rank 3", BOTH, WITHIN)]),
        ([4], lambda a, b: (a, b) == (3, 1), [("rank 3 -> rank 1", SENDS, WITHIN)]),
        ([5], lambda a, b: 1 in (a, b) or 4 in (a, b),
         [("rank 1", BOTH, WITHIN), ("rank 4", BOTH, WITHIN)]),
        # one adapter of a node, as of 8: its NVLink is well
        ([4, 4], lambda a, b: 5 in (a, b) and a // 4 != b // 4, [("rank 5", BOTH, ACROSS)]),
        # two nodes: either may be at fault
        ([2, 2], lambda a, b: a // 2 > b // 2, [("node 1 -> node 0", SENDS, ACROSS)]),
        # a bad path between two of four
        ([2, 2, 2, 2], lambda a, b: {a // 2, b // 2} == {1, 3},
         [("node 1 <-> node 3", BOTH, ACROSS)]),
        ([2], lambda a, b: a == 1, [("rank 1 -> rank 0", SENDS, WITHIN)]),
        ([2], lambda a, b: True, []),  # alike: nothing to compare with
        ([4, 4], lambda a, b: False, []),
    ],
)  # fmt: skip
def test_what_a_matrix_says(sizes, slow, found):
    assert sorted(named(speeds_of(sizes, slow))) == sorted(found)


def test_networks_are_not_compared_with_nvlink():
    assert find_slow(speeds_of([8, 8], lambda a, b: False, {WITHIN: 400.0, ACROSS: 4.0}))[0] == []


def noisy(sizes, seed, node_at=1.0):
    """Return a scan whose first node sends at a part of the others' speed, amid noise.

    As measured on a busy machine: across nodes two ranks share a card in a round, not quite fairly;
    within a node a message takes up to ten times as long as the best.
    """
    random, scan = Random(seed), Scan(nodes_with(sizes), [])
    for way in itertools.permutations(range(sum(sizes)), 2):
        across = scan.kind(way) == ACROSS
        slow = node_at if across and way[0] < sizes[0] else 1
        disturbed = [random.uniform(0.5, 1.0) if across else 1 / (1 + random.expovariate(0.3))
                     for _ in range(5)]  # fmt: skip
        scan.repeats[way] = [10.0 * slow * one for one in disturbed]
    return scan


@pytest.mark.parametrize(("sizes",), first_is_quick([([2] * 4,), ([8],), ([1] * 4,), ([2],)]))
def test_noise_names_nobody(sizes):
    """One percent of healthy scans may: of 20 none."""
    assert [found for seed in range(20) for found in named(noisy(sizes, seed))] == []


@pytest.mark.parametrize(("node_at",), first_is_quick([(0.6,), (0.5,), (0.2,)]))
def test_a_slow_node_is_found_amid_noise_and_nobody_else(node_at):
    for seed in range(5):
        assert named(noisy([2, 2, 2, 2], seed, node_at)) == [("node 0 (ranks 0, 1)", SENDS, ACROSS)]


# the script


def test_everybody_meets_everybody(run_script, tmp_path):
    ended = run_script(SCAN, *QUICK, "--output-dir", tmp_path / "run", world_size=3)
    assert ended.codes == [0] * 3 and ended.stderr == "", ended.stdout + ended.stderr
    results = results_of(tmp_path / "run")
    matrix = results["metrics"]["matrix_gb_s"]
    assert [[speed is None for speed in row] for row in matrix] == [
        [sender == receiver for receiver in range(3)] for sender in range(3)
    ]
    assert len(results["checks"]) == 3


@full
def test_only_nodes_meet(run_script, tmp_path):
    port = free_port()
    ended = run_script(
        SCAN, *QUICK, "--nodes-only", "--output-dir", tmp_path / "run", world_size=4,
        environ=lambda rank: {
            "RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": rank % 2, "LOCAL_WORLD_SIZE": 2,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GROUP_RANK": rank // 2,
        },
    )  # fmt: skip
    assert ended.codes == [0] * 4, ended.stdout + ended.stderr
    results = results_of(tmp_path / "run")
    assert results["checks"][0]["measured"] == 4 and "rounds: 1" in ended.stdout
    assert results["metrics"]["matrix_gb_s"][0][2] and not results["metrics"]["matrix_gb_s"][0][3]


# sabotage and Ctrl-C


def garble(script):
    send = script.send
    script.send = lambda tensor, peer: send(tensor + (tensor.numel() > 1), peer)


def leave_a_round_out(script):
    rounds_of = script.rounds_of
    script.rounds_of = lambda *given: rounds_of(*given)[1:]


def one_pair_at_a_time(script):
    rounds_of = script.rounds_of
    script.rounds_of = lambda *given: [[pair] for pairs in rounds_of(*given) for pair in pairs]


@pytest.mark.parametrize(
    ("sabotage", "fails"),
    first_is_quick([
        (garble, "elements that arrived wrong"),
        (leave_a_round_out, "ways measured"),
        (one_pair_at_a_time, "rounds"),
    ]),
)  # fmt: skip
def test_sabotage_of_the_scan_fails_its_check(run_script, sabotage, fails):
    ended = run_script(SCAN, "-b", "4K", "-n", 1, world_size=4, before=sabotage)
    failed = next(line for line in ended.stdout.splitlines() if line.startswith("FAILED: "))
    assert any(ended.codes) and fails in failed, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("path", "world_size", "argv", "says"),
    first_is_quick([
        (SCAN, 1, (), "one rank has nobody to talk to: start 2 or more"),
        (SCAN, 2, ("--nodes-only",), "--nodes-only: all ranks are on one node"),
        (SCAN, 2, ("-b", "900000G"), "does not fit into a rank's memory"),
        (PACED, 1, ("--slow", "3", SCAN), "argument --slow: must be like 3=20mbit, not '3'"),
        (PACED, 1, ("--link", "1gbit", "none.py"), "there is no none.py"),
    ]),
)  # fmt: skip
def test_bad_input_gets_one_line(run_script, path, world_size, argv, says):
    ended = run_script(path, *argv, world_size=world_size)
    assert_one_line(ended, says, path.rpartition("/")[2])
