"""preflight.py: each fault names its node, and a healthy cluster is quiet."""

import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from conftest import REPO, assert_one_line, free_port, load_script, results_of, run_command
from helpers_04 import first_is_quick
from helpers_dgx import facts_of_dgx, plant_dgx

from cluster_parts import preflight as part
from legacy_common.lab import namespaces

PREFLIGHT = "cluster/preflight.py"
script = load_script(PREFLIGHT)
GIB, MIB = 2**30, 2**20
why_not = namespaces.why_not()
needs_hosts = pytest.mark.skipif(why_not is not None, reason=str(why_not))
HEALTHY = 125e6  # bytes/s: 1 Gbit/s


# On hosts of their own, as network namespaces


def on_nodes(run_script, folder, nodes, *argv, each=1, fault=None, rates=None, environ=None):
    """Run it on ranks of which `each` share a node; fault(node) is called first in each rank."""
    port = free_port()

    def before(_):
        node = int(os.environ["RANK"]) // each
        network.enter(node)
        os.environ["MASTER_PORT"] = str(port)
        name = f"node{node}"
        socket.gethostname = lambda: name
        script.GRACE_S = script.doctor.LEAVE_S = 2.0
        script.SEEN_S = 0.5
        if fault:
            fault(node)

    def launched(rank):
        own = {"RANK": rank, "WORLD_SIZE": nodes * each, "LOCAL_RANK": rank % each,
               "LOCAL_WORLD_SIZE": each, "GROUP_RANK": rank // each}  # fmt: skip
        return own | (environ(rank) if environ else {})

    with namespaces.hosts(rates or [HEALTHY] * nodes) as network:
        return run_script(
            PREFLIGHT, "--output-dir", folder, *argv, world_size=nodes * each,
            before=before, environ=launched, end_job_on_failure=False,
        )  # fmt: skip


def lines_of(ended):
    return [line for line in ended.stdout.splitlines() if line.startswith(("DRAIN", "STOP"))]


@needs_hosts
@pytest.mark.parametrize(("nodes", "each"), first_is_quick([(2, 1), (3, 1), (4, 1), (2, 2)]))
def test_a_healthy_cluster_is_quiet(run_script, tmp_path, nodes, each):
    (tmp_path / "shared").mkdir()
    ended = on_nodes(
        run_script, tmp_path / "run", nodes, "--checkpoint-dir", tmp_path / "shared", each=each
    )
    assert ended.codes == [0] * nodes * each, ended.stdout + ended.stderr
    assert lines_of(ended) == [] and [*(tmp_path / "shared").iterdir()] == []
    metrics = results_of(tmp_path / "run")["metrics"]
    assert metrics["drain"] == metrics["suspects"] == []
    assert len(re.findall(r"^node\d ", ended.stdout, re.M)) == nodes
    assert all(one["wrong_within"] == one["wrong_in_all"] == 0 for one in metrics["measured"])


def everything_is_odd(node):
    """Give node 1 another clock, packet size and limits, and a folder of its own."""
    if node != 1:
        return
    now, disk_usage = time.time, shutil.disk_usage
    time.time = lambda: now() + 3600
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    resource.setrlimit(resource.RLIMIT_NPROC, (4000, 4000))

    def usage(path):
        found = disk_usage(path)
        return found._replace(total=64 * MIB, free=64 * MIB) if path == "/dev/shm" else found

    shutil.disk_usage = usage
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    subprocess.run(
        ["ip", "link", "set", namespaces.CARD, "mtu", "1400"], check=True, env={"PATH": path}
    )
    sys.argv[sys.argv.index("--checkpoint-dir") + 1] += "/elsewhere"


@needs_hosts
def test_each_odd_fact_names_the_node(run_script, tmp_path):
    (tmp_path / "shared").mkdir()
    ended = on_nodes(
        run_script, tmp_path / "run", 3, "--checkpoint-dir", tmp_path / "shared",
        fault=everything_is_odd,
    )  # fmt: skip
    assert ended.codes == [1] * 3, ended.stdout + ended.stderr
    told = lines_of(ended)
    assert all(line.startswith("DRAIN node1: ") for line in told), told
    for what in (
        "clock is 3,600.0 s ahead",
        "open files (ulimit -n): 256", "processes (ulimit -u): 4,000", "/dev/shm: 0.06 GiB",
        "MTU in 10.77.0.0/24 is 1400, others have 1500", "shared: there is no such folder",
    ):  # fmt: skip
        assert any(what in line for line in told), (what, told)
    assert results_of(tmp_path / "run")["metrics"]["drain"] == ["node1"]


def wrong_product(node):
    if node == 2:
        mm = torch.mm
        torch.mm = lambda a, b: mm(a, b).index_fill_(1, torch.tensor([7]), 1.0)


def dies_in_a_product(node):
    if node == 2:
        torch.mm = lambda a, b: os._exit(3)


def wrong_sum(node):
    if node == 2:
        all_reduce = dist.all_reduce
        dist.all_reduce = lambda numbers, **kwargs: all_reduce(numbers.add_(1), **kwargs)


def own_folder(node):
    if node:
        sys.argv[sys.argv.index("--checkpoint-dir") + 1] += f"/{node}"


@needs_hosts
@pytest.mark.parametrize(
    ("fault", "code", "says"),
    first_is_quick([
        (wrong_product, 1, "DRAIN node2: the matrix product of rank 2 differs from that of most"),
        (dies_in_a_product, 1, "DRAIN node2: rank 2 stopped answering while"),
        (wrong_sum, 2, "STOP: the all-reduce of all ranks gives a wrong sum on ranks 0, 1, 2"),
        (own_folder, 2, "STOP: --checkpoint-dir .* is not shared: no other node sees"),
    ]),
)  # fmt: skip
def test_what_all_ranks_measure_together(run_script, tmp_path, monkeypatch, fault, code, says):
    for name in ("shared", "shared/1", "shared/2"):
        (tmp_path / name).mkdir()
    ended = on_nodes(
        run_script, tmp_path / "run", 3, "--timeout", "5", "--checkpoint-dir", tmp_path / "shared",
        fault=fault,
    )  # fmt: skip
    assert ended.codes[:2] == [code] * 2, ended.stdout + ended.stderr
    (line,) = lines_of(ended)
    assert re.match(says, line), line


# Nodes that do not come


def leaves(node):
    if node == 2:
        os._exit(3)


def looks_elsewhere(node):
    if node == 2:
        os.environ["MASTER_ADDR"] = "10.77.0.99"


@needs_hosts
@pytest.mark.parametrize(
    ("fault", "argv", "says"),
    first_is_quick([
        (leaves, ("--expect-nodes", "node[0-2]"), "DRAIN node2: no word after 3 s (rank 2)"),
        (looks_elsewhere, (), "DRAIN the node of rank 2: no word after 3 s (--expect-nodes NAMES"),
    ]),
)  # fmt: skip
def test_a_node_that_does_not_come(run_script, tmp_path, monkeypatch, fault, argv, says):
    ended = on_nodes(run_script, tmp_path / "run", 3, "--wait", "3", *argv, fault=fault)
    assert ended.codes[:2] == [1, 1], ended.stdout + ended.stderr
    (line,) = lines_of(ended)
    assert line.startswith(says), line
    if fault is looks_elsewhere:
        tried = r"MASTER_ADDR=10.77.0.99 \(10.77.0.99\), port \d+ does not answer here"
        assert re.search(tried, ended.stderr), ended.stderr
        assert re.search(r"tried for \d s from interface link0, 10.77.0.3\)$", ended.stderr, re.M)


@pytest.mark.parametrize(
    ("nodes", "silent", "says"),
    [
        (4, [3], "DRAIN node3: rank 3 stopped answering"),
        (4, [2, 3], "DRAIN node2, node3: ranks 2, 3 stopped answering"),
        (4, [1, 2, 3], "DRAIN node0: rank 0 is cut off: ranks 1, 2, 3 stopped answering"),
        (2, [1], "DRAIN node0 or node1: rank 1 stopped answering"),
    ],
)
def test_who_is_cut_off(nodes, silent, says):
    names = {rank: f"node{rank}" for rank in range(nodes)}
    measured = [{"rank": rank} for rank in range(nodes) if rank not in silent]
    found = [*part.lost(dict.fromkeys(names.values(), []), measured, names, 60)]
    assert [finding.line for finding in found] == [says]


@pytest.mark.parametrize(
    ("errors", "says"),
    [
        ({2: "CUDA error: uncorrectable ECC error"}, "DRAIN node2: rank 2 failed while"),
        ({0: "Connection closed by peer [10.0.0.2]:99", 2: "no"}, "DRAIN node2: rank 2 failed"),
        ({0: "Timed out waiting 9 ms for recv from [10.0.0.1]:99", 2: "Broken pipe [10.0.0.1]:7"},
         "DRAIN node1: ranks lost each other while multiplying matrices, within 60 s"),
    ],
)  # fmt: skip
def test_who_failed_and_who_lost_it(errors, says):
    names = {rank: f"node{rank}" for rank in range(3)}
    nodes = {name: [{"interfaces": [{"addresses": [f"10.0.0.{rank}/24"]}]}]
             for rank, name in names.items()}  # fmt: skip
    step = {"step": "multiplying matrices"}
    measured = [{"rank": rank} | ({"error": errors[rank]} | step if rank in errors else {})
                for rank in range(3)]  # fmt: skip
    (finding,) = part.lost(nodes, measured, names, 60)
    assert finding.line.startswith(says)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("4", 4),
        ("node[0-2]", ["node0", "node1", "node2"]),
        ("dgx-[001-003,7]-ib,gpu9", ["dgx-001-ib", "dgx-002-ib", "dgx-003-ib", "dgx-7-ib", "gpu9"]),
        ("r[1-2]n[0-1]", ["r1n0", "r1n1", "r2n0", "r2n1"]),
    ],
)
def test_a_list_of_nodes_is_expanded(given, names):
    assert part.expected_nodes(given) == names


@pytest.mark.parametrize(
    ("argv", "environ", "says"),
    first_is_quick([
        (("--expect-nodes", "0"), {}, "argument --expect-nodes: must be a number or names"),
        (("--link", "fast"), {}, "argument --link: must be like 100mbit or 1gbit"),
        ((), {"MASTER_ADDR": "no.such.invalid"}, "=no.such.invalid does not resolve here"),
    ]),
)  # fmt: skip
def test_bad_input_is_one_line(run_script, argv, environ, says):
    here = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    ended = run_script(PREFLIGHT, *argv, environ=here | environ)
    says_where = "MASTER_ADDR" in environ
    if says_where:
        assert ended.codes == [2] and says in ended.stderr, ended
    else:
        assert_one_line(ended, says, "preflight.py")


# On the virtual cluster: nodes with clocks, cards and memory of their own


def virtual_cluster(folder, *argv):
    command = [sys.executable, "cluster/virtual_cluster.py", argv[0], "--at", folder]
    return run_command([*map(str, command), *argv[1:]], REPO, 120)


# The rules, on the facts of large nodes: a DGX H100 has ports for storage and management too


@pytest.fixture(scope="module")
def dgx(tmp_path_factory):
    """Return a function that makes what a rank of a healthy node reads, but for what is given."""
    root = plant_dgx(tmp_path_factory.mktemp("dgx"))

    def node(number, **other):
        own = facts_of_dgx(root, number) | {
            "world_size": 5, "legacy_common": "1.0", "code": "c0de", "room": None,
        }  # fmt: skip
        for key, value in other.items():
            own[key] = own[key] | value if isinstance(value, dict) else value
        return own

    return node


def judged(ranks):
    nodes = part.nodes_by_name(ranks)
    return [finding.line for finding in [*part.problems(nodes), *part.by_facts(nodes)]]


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_healthy_large_nodes_are_quiet(dgx, number):
    assert judged([dgx(n) for n in range(number)]) == []


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"code": "bad"}, "the code of legacy_common is bad, others have c0de"),
        ({"legacy_common": "0.9"}, "the version of legacy_common is 0.9, others have 1.0"),
        ({"world_size": 4}, "WORLD_SIZE is 4, others have 5"),
        ({"driver": "550.1"}, "NVIDIA's driver is 550.1, others have 570.86.15"),
        ({"versions": {"NCCL": "2.29.1"}}, "NCCL is 2.29.1, others have 2.30.7"),
        ({"installed": 7}, "GPUs: 7, others have 8"),
        ({"infiniband": []}, "active RDMA ports: 0, others have 10: no adapter at 0000:18:00.0"),
        ({"limits": {"locked memory": 64 * 2**10}}, "memory that may be locked: 0.00 GiB, others"),
        ({"limits": {"shared memory left": MIB}}, "left in /dev/shm: 0.00 GiB, others have"),
        ({"temporary": 0}, "free for temporary files: 0.00 GiB, others have 900.00 GiB"),
        ({"processes": 4000}, "processes (ulimit -u): 4,000, others have 4,000,000"),
        ({"listens": {"gloo": ["127.0.1.1"]}}, "gloo listens at 127.0.1.1, out of others' reach"),
    ],
)
def test_one_odd_large_node_is_named(dgx, other, says):
    """Faults of adapters and cards are broken in the doctor's tests: one implementation."""
    (told,) = judged([dgx(n, **(other if n == 3 else {})) for n in range(5)])
    assert told.startswith(f"DRAIN dgx3: {says}"), told


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"network": None}, "no running card in 10.1.0.0/16, where 4 nodes have one"),
        ({"mbit_s": 1000}, "Mbit/s of the card in 10.1.0.0/16: 1,000, others have 10,000"),
    ],
)
def test_one_odd_card_is_named(dgx, change, says):
    ranks = [dgx(n) for n in range(5)]
    next(card for card in ranks[3]["cards"] if card["name"] == "eno3").update(change)
    assert judged(ranks) == [f"DRAIN dgx3: {says}"]


def test_of_two_that_differ_both_are_suspects(dgx):
    told = judged([dgx(0), dgx(1, driver="550.1")])
    assert told == [
        "DRAIN dgx0 or dgx1: NVIDIA's driver differs: dgx0 has 570.86.15, dgx1 has 550.1; "
        "most do not agree"
    ]


def ways_of(nodes, speed):
    """Return what each rank sends to its counterparts: speed(sender, receiver) in GB/s."""
    return [[a, b, speed(a, b)] for one in nodes for other in nodes if one != other
            for a, b in zip(one, other, strict=True)]  # fmt: skip


FOUR = [[8 * node + rank for rank in range(8)] for node in range(4)]


@pytest.mark.parametrize(
    ("nodes", "speed", "slow"),
    [
        (FOUR, lambda a, b: 50, []),
        (FOUR, lambda a, b: 25 if 8 <= a < 16 or 8 <= b < 16 else 50, [*range(8, 16)]),
        (FOUR, lambda a, b: 25 if a == 9 else 50, [9]),  # one adapter of eight
        (FOUR, lambda a, b: 40 if a % 2 else 50, []),
        (FOUR, lambda a, b: 10 if (a, b) == (0, 8) else 50, []),  # a path, not a node
        ([[0], [1], [2]], lambda a, b: 5 if 2 in (a, b) else 50, [2]),
        ([[0], [1]], lambda a, b: 5, []),
    ],
)
def test_a_slow_node_is_named_not_a_pair(nodes, speed, slow):
    assert sorted(part.slow_ranks(ways_of(nodes, speed), nodes, None, 0.7)) == slow


def product(rank, checksum="good", wrong=0, again=None):
    return {"rank": rank, "checksums": [checksum, again or checksum], "wrong_columns": wrong}


@pytest.mark.parametrize(
    ("products", "told"),
    [
        ([product(0), product(1), product(2)], []),
        ([product(0), product(1), product(2, "bad", 1)], ["node2"]),
        ([product(0), product(1, "bad", 1)], ["node1"]),  # the sums of its columns say which
        ([product(0), product(1), product(2, "bad", 1, again="good")], ["node2"]),
    ],
)
def test_a_wrong_product_names_its_rank(products, told):
    names = {n: f"node{n}" for n in range(3)}
    found = [*part.by_products(products, names)]
    assert [name for finding in found for name in finding.nodes] == told
