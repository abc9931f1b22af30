"""preflight.py: each fault names its node, and healthy nodes are quiet."""

import itertools
import os
import re
import resource
import socket

import pytest
from conftest import load_script
from helpers_nodes import enter, open_nodes, why_no_nodes

from cluster_parts import host
from cluster_parts import preflight as judge

SCRIPT = "cluster/preflight.py"
preflight = load_script(SCRIPT)
GIB, MIB = 2**30, 2**20
why_not = why_no_nodes()
needs_hosts = pytest.mark.skipif(why_not is not None, reason=str(why_not))


# Rules on facts of nodes


def card(name, address, mtu=1500):
    network = re.sub(r"\.\d+$", ".0/24", address)
    one = {"name": name, "address": address, "network": network, "mtu": mtu}
    return one | {"virtual": name == "docker0"}


def facts_of(number):
    """Return what a rank of a healthy node with 8 GPUs reads."""
    eth0, bridge = f"10.0.0.{number + 1}", f"172.17.{number}.1"
    return {
        "rank": number,
        "host": f"node{number}",
        "boot": f"{number}",
        "settings": {"NCCL_IB_HCA": "mlx5"},
        "misspelt": {},
        "problem": "",
        "interfaces": [
            card("lo", "127.0.0.1"),
            card("eth0", eth0),
            card("eth1", f"10.1.0.{number + 1}"),
            card("docker0", bridge),
        ],
        "listens": {"gloo": [eth0], "NCCL": [eth0]},
        "alike": {
            "Python": "3.11.9",
            "torch": "2.14.1",
            "NCCL": "2.30.7",
            "NVIDIA driver": "570.86",
            "GPUs": 8,
            "active RDMA ports": 10,
            "WORLD_SIZE": 4,
        },
        "amounts": {
            "/dev/shm": 900 * GIB + number * MIB,
            "open files": 65_536,
            "processes": None,
            "locked memory": None,
            "free in /dev/shm": 800 * GIB,
            "free in /tmp": 50 * GIB,
            "free in this folder": 9000 * GIB,
        },
    }


def lines_of(ranks):
    findings = judge.compare_nodes(judge.group_by_node(ranks))
    return [finding.line for finding in findings]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_healthy_nodes_are_quiet(count):
    assert lines_of([facts_of(number) for number in range(count)]) == []


def test_racks_may_have_networks_of_their_own():
    ranks = [facts_of(number) for number in range(4)]
    for number, one in enumerate(ranks):
        address = f"10.{number}.0.7"
        one["interfaces"] = [card("eth0", address)]
        one["listens"] = {"gloo": [address], "NCCL": [address]}
    assert lines_of(ranks) == []


@pytest.mark.parametrize(
    ("key", "change", "says"),
    [
        ("alike", {"torch": "2.13.0"}, "torch: 2.13.0, others: 2.14.1"),
        ("alike", {"NCCL": "2.29.1"}, "NCCL: 2.29.1, others: 2.30.7"),
        ("alike", {"NVIDIA driver": "550.1"}, "NVIDIA driver: 550.1, others: 570.86"),
        ("alike", {"GPUs": 7}, "GPUs: 7, others: 8. Run nvidia-smi"),
        ("alike", {"active RDMA ports": 9}, "active RDMA ports: 9, others: 10"),
        ("alike", {"WORLD_SIZE": 3}, "WORLD_SIZE: 3, others: 4"),
        ("settings", {"NCCL_PROTO": "LL"}, "NCCL_PROTO: LL, others: unset"),
        ("settings", {"NCCL_IB_HCA": "mlx4"}, "NCCL_IB_HCA: mlx4, others: mlx5"),
        ("misspelt", {"NCCL_ALGOS": "NCCL_ALGO"}, "NCCL_ALGOS: no library reads this"),
        ("amounts", {"/dev/shm": 64 * MIB}, "/dev/shm: 0.06 GiB, at least 1.00 GiB"),
        ("amounts", {"/dev/shm": 300 * GIB}, "/dev/shm: 300.00 GiB, others: 900.00"),
        ("amounts", {"free in /dev/shm": 0}, "free in /dev/shm: 0.00 GiB, at least"),
        ("amounts", {"free in /tmp": MIB}, "free in /tmp: 0.00 GiB, at least 1.00"),
        ("amounts", {"open files": 256}, "open files: 256, at least 1,024 needed"),
        ("amounts", {"open files": 4096}, "open files: 4,096, others: 65,536"),
        ("amounts", {"processes": 4000}, "processes: 4,000, others: no limit"),
        ("amounts", {"locked memory": MIB}, "locked memory: 0.00 GiB, others: no lim"),
        ("listens", {"gloo": ["127.0.1.1"]}, "gloo listens at 127.0.1.1, where no oth"),
        ("listens", {"gloo": ["172.17.2.1"]}, "network of gloo: 172.17.2.0/24"),
        ("listens", {"NCCL": ["10.1.0.3"]}, "network of NCCL: 10.1.0.0/24 (eth1"),
        ("listens", {"NCCL": []}, "NCCL finds no interface with NCCL_SOCKET_IFNAME"),
    ],
)
def test_one_odd_node_is_named(key, change, says):
    ranks = [facts_of(number) for number in range(4)]
    ranks[2][key] |= change
    (line,) = lines_of(ranks)
    assert line.startswith(f"node2: {says}"), line


def test_a_problem_a_missing_card_and_another_mtu_are_named():
    ranks = [facts_of(number) for number in range(4)]
    ranks[0]["problem"] = "Unable to find address for: eth7"
    del ranks[1]["interfaces"][2]
    ranks[2]["interfaces"][1] = card("eth0", "10.0.0.3", mtu=9000)
    lines = lines_of(ranks)
    assert "node0: a rank cannot start: Unable to find address for: eth7." in lines
    assert "node1: no card that is up in 10.1.0.0/24. Run ip address there." in lines
    assert "node2: MTU of gloo's card: 9000, others: 1500. Set one MTU." in lines
    assert len(lines) == 4  # NCCL has the same card


def test_of_two_nodes_that_differ_both_are_suspects():
    ranks = [facts_of(0), facts_of(1)]
    ranks[1]["alike"]["torch"] = "2.13.0"
    (line,) = lines_of(ranks)
    assert line.startswith("node0 or node1: torch: 2.14.1 on node0, 2.13.0 on node1")


def test_nodes_with_one_finding_share_a_line():
    ranks = [facts_of(number) for number in range(4)]
    for one in ranks:
        one["amounts"]["open files"] = 256
    (line,) = lines_of(ranks)
    assert line.startswith("node0, node1, node2, node3: open files: 256")


def test_two_nodes_of_one_name_are_told_apart_by_their_ranks():
    ranks = [facts_of(number) | {"host": "localhost"} for number in range(2)]
    assert list(judge.group_by_node(ranks)) == [
        "localhost (rank 0)",
        "localhost (rank 1)",
    ]


# Ranks that do not come


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        ("", []),
        ("node[0-2]", ["node0", "node1", "node2"]),
        ("dgx-[001-002,7]-ib,gpu9", ["dgx-001-ib", "dgx-002-ib", "dgx-7-ib", "gpu9"]),
        ("r[1-2]n[0-1]", ["r1n0", "r1n1", "r2n0", "r2n1"]),
    ],
)
def test_a_list_of_nodes_is_expanded(listed, names):
    assert judge.expand(listed) == names


@pytest.mark.parametrize(
    ("expected", "came", "says"),
    [
        ([], [0, 1, 2, 3], None),
        ([], [0, 1], "the node of rank 2: no word from ranks 2, 3 in 30 s"),
        (["node0", "node1"], [0, 1], "node1: no word from ranks 2, 3 in 30 s"),
        (["node0", "node9"], [0, 1, 2, 3], "node1: no word"),
    ],
)
def test_who_has_not_come(expected, came, says):
    place = preflight.Place("srun", 0, 0, 4, 2, "node0", 29500)
    ranks = [facts_of(rank) | {"host": f"node{rank // 2}.cluster"} for rank in came]
    findings = judge.find_absent(ranks, place, expected, 30)
    if expected[1:] == ["node9"]:
        says = "node9: no word, and the job has no rank there in 30 s"
    assert [one.line.startswith(says) for one in findings] == ([True] if says else [])


# Results of measurements


NODES = {f"node{n}": [facts_of(n)] for n in range(4)}
NAMES = {rank: f"node{rank}" for rank in range(4)}


@pytest.mark.parametrize(
    ("results", "says"),
    [
        ({rank: {"wrong": 0} for rank in range(4)}, []),
        ({rank: {"step": "a"} for rank in range(3)}, ["node3: rank 3 stopped answ"]),
        (
            {rank: {"wrong": 7} for rank in range(4)},
            ["job: the all-reduce gives a wrong sum on ranks 0, 1, 2, 3"],
        ),
        (
            {
                rank: {"step": "a", "error": f"Timed out [10.0.0.{peer}]:99"}
                for rank, peer in enumerate((3, 3, 1, 3))
            },
            ["node2: a failed within 60 s on ranks 0, 1, 2, 3"],
        ),
        (
            {rank: {"step": "a", "error": "no peer"} for rank in range(4)},
            ["job: a failed within 60 s on ranks 0, 1, 2, 3: no peer"],
        ),
    ],
)
def test_who_failed_in_a_measurement(results, says):
    findings = judge.compare_results(NODES, results, 60)
    assert len(findings) == len(says)
    for one, start in zip(findings, says, strict=True):
        assert one.line.startswith(start), one.line


def rates_of(slow, count=4):
    """Return rates between nodes of one rank; `slow` are pairs or ranks."""
    rates = {rank: {} for rank in range(count)}
    for a, b in itertools.permutations(range(count), 2):
        is_slow = any(one in (a, b, (a, b), (b, a)) for one in slow)
        rates[a][b] = 1e9 if is_slow else 50e9
    return rates


@pytest.mark.parametrize(
    ("slow", "count", "says"),
    [
        ([], 4, []),
        ([2], 4, ["node2: rank 2: 1 GB/s to most nodes, others: 50 GB/s"]),
        ([(0, 3)], 4, ["node0 or node3: 1 GB/s between ranks 0 and 3, to others: 50"]),
        ([1], 3, ["node1: rank 1: 1 GB/s to most nodes"]),
        ([(0, 1)], 2, []),
    ],
)
def test_a_slow_node_or_a_slow_path_is_named(slow, count, says):
    findings = list(judge.find_slow(rates_of(slow, count), NAMES))
    assert len(findings) == len(says)
    for one, start in zip(findings, says, strict=True):
        assert one.line.startswith(start), one.line


@pytest.mark.parametrize("count", [2, 3, 6, 7])
def test_each_node_meets_each_other_node_once(count):
    rounds = list(preflight.rounds_of(count))
    for pairs in rounds:
        met = [node for pair in pairs for node in pair]
        assert len(met) == len(set(met))
    met = sorted(tuple(sorted(pair)) for pairs in rounds for pair in pairs)
    assert met == list(itertools.combinations(range(count), 2))


# Facts that a node reads


def test_settings_come_from_nccl_s_files_too(tmp_path, monkeypatch):
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nccl.conf").write_text("# x\nNCCL_PROTO=LL\nNCCL_ALGO=Ring\n")
    monkeypatch.setattr(host, "ROOT", tmp_path)
    monkeypatch.setenv("NCCL_CONF_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    monkeypatch.setenv("NCCL_VERSION", "2.20")
    settings = host.read_settings()
    assert (settings["NCCL_PROTO"], settings["NCCL_ALGO"]) == ("LL", "Tree")
    assert "NCCL_VERSION" not in settings


def test_devices_are_counted(tmp_path, monkeypatch):
    for path, content in {
        "proc/driver/nvidia/version": "NVRM version: Kernel Module  570.86.15  x",
        "proc/driver/nvidia/gpus/0000:18:00.0/information": "",
        "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
        "sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(content)
    monkeypatch.setattr(host, "ROOT", tmp_path)
    versions = host.read_versions()
    assert versions["NVIDIA driver"] == "570.86.15"
    assert (versions["GPUs"], versions["active RDMA ports"]) == (1, 1)


def test_a_name_that_no_library_reads_is_found():
    if not host.names_in("libnccl", "NCCL_"):
        pytest.skip("this PyTorch has no NCCL")
    names = {
        "NCCL_SOCKET_IFNAM",
        "NCCL_SOCKET_IFNAME",
        "MASTER_PRT",
        "NCCL_XYZ_TUNER_QUUX",
    }
    meant = {"NCCL_SOCKET_IFNAM": "NCCL_SOCKET_IFNAME", "MASTER_PRT": "MASTER_PORT"}
    assert host.find_misspelt(names | {"HOME", "LOCAL_WORLD_SIZE"}) == meant


# Real ranks, each in a network namespace of its own


def on_nodes(run_script, folder, *argv, count=3, fault=None, rates=None, before=None):
    """Run preflight with a rank on each node; fault is {name: value} for node 1."""

    def arrive(script):
        rank = int(os.environ["RANK"])
        enter(cluster, rank)
        socket.gethostname = lambda: f"node{rank}"
        script.GRACE_S, script.MESSAGE_BYTES = 2.0, {"cpu": 2**18}
        if rank == 1:
            os.environ.update(fault or {})
            if before:
                before()

    def launched(rank):
        place = {"RANK": rank, "LOCAL_RANK": 0}
        return place | {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": 1}

    with open_nodes(folder, rates or [125e6] * count) as cluster:
        return run_script(
            SCRIPT,
            "--timeout=10",
            *argv,
            world_size=count,
            before=arrive,
            environ=launched,
            end_job_on_failure=False,
        )


@needs_hosts
def test_healthy_nodes_pass(run_script, tmp_path):
    ended = on_nodes(run_script, tmp_path / "nodes")
    assert ended.codes == [0, 0, 0], ended.stdout + ended.stderr
    assert ended.stdout.endswith("OK: nodes: 3, ranks: 3, compared, all-reduce right\n")
    rows = re.findall(r"^node(\d) .*? (10\.77\.0\.\d) ", ended.stdout, re.M)
    assert rows == [("0", "10.77.0.1"), ("1", "10.77.0.2"), ("2", "10.77.0.3")]


@needs_hosts
def test_pairs_name_a_slow_node(run_script, tmp_path):
    rates = [50e6, 2e6, 50e6, 50e6]  # bytes per second
    ended = on_nodes(
        run_script, tmp_path / "nodes", "--pairs", "--timeout=60", count=4, rates=rates
    )
    assert ended.codes == [1] * 4, ended.stdout + ended.stderr
    assert "pairs of nodes: 6, median" in ended.stdout
    assert re.search(r"^node1: rank 1: \S+ MB/s to most nodes", ended.stdout, re.M)


def few_files():
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))


def dies_in_the_all_reduce():
    preflight.count_wrong_sums = lambda device: os._exit(3)


def adds_wrongly():
    arange = preflight.torch.arange
    preflight.torch.arange = lambda *args, **kwargs: arange(*args, **kwargs) + 1


@needs_hosts
@pytest.mark.parametrize(
    ("fault", "before", "says"),
    [
        ({"GLOO_SOCKET_IFNAME": "lo"}, None, "node1: gloo listens at 127.0.0.1"),
        ({"GLOO_SOCKET_IFNAME": "eth7"}, None, "node1: a rank cannot start: .*eth7"),
        ({"NCCL_PROTO": "LL"}, None, "node1: NCCL_PROTO: LL, others: unset"),
        (None, few_files, "node1: open files: 300, at least 1,024 needed"),
        (None, dies_in_the_all_reduce, "node1: rank 1 stopped answering in the all-"),
        (None, adds_wrongly, "job: the all-reduce gives a wrong sum on ranks 0, 1, 2"),
    ],
)
def test_a_fault_on_one_node_is_named(run_script, tmp_path, fault, before, says):
    ended = on_nodes(run_script, tmp_path / "nodes", fault=fault, before=before)
    died = before is dies_in_the_all_reduce
    assert ended.codes == [1, 3 if died else 1, 1], ended.stdout + ended.stderr
    assert re.search(f"^{says}", ended.stdout, re.M), ended.stdout
    assert ended.stdout.splitlines()[-1].startswith("FAILED: findings: ")


@needs_hosts
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"MASTER_PORT": "29511"}, "MASTER_ADDR=10.77.0.1, MASTER_PORT=29511: .*refus"),
        (
            {"MASTER_ADDR": "localhost"},
            "MASTER_ADDR=localhost is 127.0.0.1, but rank 0",
        ),
    ],
)
def test_a_node_that_cannot_join_says_why(run_script, tmp_path, fault, says):
    ended = on_nodes(run_script, tmp_path / "nodes", "--wait=8", fault=fault)
    assert ended.codes == [1, 1, 1], ended.stdout + ended.stderr
    assert re.search(f"^node1: rank 1: {says}", ended.stdout, re.M), ended.stdout
    assert "the node of rank 1: no word from rank 1 in 8 s" in ended.stdout


@pytest.mark.parametrize(
    ("master", "rank", "says"),
    [
        ("x.invalid", 0, "MASTER_ADDR=x.invalid does not resolve here"),
        ("127.0.1.1", 1, "MASTER_ADDR=127.0.1.1 is 127.0.1.1, but rank 0 is on"),
        ("127.0.0.1", 0, ""),
        ("10.0.0.1", 1, ""),
    ],
)
def test_an_address_that_cannot_be_right(master, rank, says):
    place = preflight.Place("torchrun", rank, 0, 2, 1, master, 29500)
    problem = preflight.problem_with_master(place)
    assert problem.startswith(says) and bool(problem) == bool(says)


@needs_hosts
def test_settings_only_makes_no_process_group(run_script, tmp_path):
    ended = on_nodes(
        run_script, tmp_path / "nodes", "--settings-only", before=dies_in_the_all_reduce
    )
    assert ended.codes == [0, 0, 0], ended.stdout + ended.stderr
    assert ended.stdout.endswith("OK: nodes: 3, ranks: 3, compared\n")


def test_one_rank_needs_no_launcher(run_script):
    ended = run_script(SCRIPT, environ={})
    assert ended.codes == [0], ended.stdout + ended.stderr
    assert "OK: nodes: 1, ranks: 1" in ended.stdout


@pytest.mark.parametrize("argv", [("--wait", "0"), ("--device", "tpu"), ("--bytes",)])
def test_wrong_usage_is_exit_code_2(monkeypatch, argv):
    monkeypatch.setattr("sys.argv", [SCRIPT, *argv])
    with pytest.raises(SystemExit) as ended:
        preflight.parse_args()
    assert ended.value.code == 2
