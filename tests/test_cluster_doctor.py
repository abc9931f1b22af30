"""doctor.py: what it reads, each rule, variables.toml against the libraries."""

import copy
import dataclasses
import mmap
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from conftest import REPO, assert_one_line, load_script, results_of
from helpers_04 import first_is_quick, launched
from helpers_dgx import GOOD_HCA, facts_of_dgx, plant, plant_dgx

from cluster_parts import compare, host
from cluster_parts import doctor as part
from legacy_common import cli, runtime

DOCTOR = "cluster/doctor.py"
script = load_script(DOCTOR)
GIB = 2**30
NO_NCCL = host.nccl_version() is None
needs_nccl = pytest.mark.skipif(NO_NCCL, reason="this PyTorch comes without NCCL")


# Reading a host: trees of files as Linux would show them


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, None),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "200000 100000"}, 2),
        ({"proc/self/cgroup": "0::/job/step", "sys/fs/cgroup/job/step/cpu.max": "max 100000",
          "sys/fs/cgroup/job/cpu.max": "150000 100000"}, 1.5),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000",
          "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 4),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
          "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, None),
    ],
)  # fmt: skip
def test_a_container_that_grants_fewer_cores(tmp_path, files, limit):
    assert host.read_cpu_limit(plant(tmp_path, files)) == limit


def test_a_port_is_known_by_its_pci_address(tmp_path):
    tree = {"mlx5_0/board_id": "MT_838", "mlx5_0/fw_ver": "28.39.1002",
            "mlx5_0/ports/1/state": "4: ACTIVE", "mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)",
            "mlx5_0/ports/1/link_layer": "InfiniBand", "rxe0/ports/1/state": "1: DOWN"}  # fmt: skip
    plant(tmp_path, {f"sys/class/infiniband/{path}": text for path, text in tree.items()})
    (tmp_path / "sys/devices/0000:18:00.0").mkdir(parents=True)
    link = tmp_path / "sys/class/infiniband/mlx5_0/device"
    link.symlink_to(tmp_path / "sys/devices/0000:18:00.0")
    assert host.read_infiniband(tmp_path) == [
        {"name": "mlx5_0:1", "place": "0000:18:00.0 port 1", "state": "ACTIVE", "gbit_s": 400,
         "link": "InfiniBand", "board": "MT_838", "firmware": "28.39.1002"},
        {"name": "rxe0:1", "place": "rxe0 port 1", "state": "DOWN", "gbit_s": None, "link": "",
         "board": None, "firmware": None},
    ]  # fmt: skip


def test_settings_of_files_yield_to_the_environment(tmp_path):
    root = plant(tmp_path, {
        "etc/nccl.conf": "NCCL_DEBUG=WARN\n# NCCL_ALGO=Ring\nNCCL_IB_HCA==mlx5_0",
        "home/me/.nccl.conf": "NCCL_DEBUG=INFO\nNCCL_BUFFSIZE=1048576",
        "other.conf": "NCCL_PROTO=Simple",
    })  # fmt: skip
    environ = {"HOME": "/home/me", "NCCL_BUFFSIZE": "2097152", "NCCL_VERSION": "2.30", "PATH": "/"}
    assert host.read_settings(environ, {}, root) == {
        "NCCL_BUFFSIZE": ["2097152", "environment"],
        "NCCL_DEBUG": ["INFO", "/home/me/.nccl.conf"],
        "NCCL_IB_HCA": ["=mlx5_0", "/etc/nccl.conf"],
    }
    instead = host.read_settings(environ | {"NCCL_CONF_FILE": "/other.conf"}, {}, root)
    assert instead["NCCL_PROTO"] == ["Simple", "/other.conf"]
    assert instead["NCCL_DEBUG"] == ["WARN", "/etc/nccl.conf"]


# Rules: each mistake has its finding, and a machine without mistakes has none


def is_set(**values):
    return {"settings": {name: [value, "environment"] for name, value in values.items()}}


def interface(name, address, mtu=1500):
    return {"name": name, "running": True, "loopback": name == "lo", "mtu": mtu,
            "addresses": [address]}  # fmt: skip


LISTENS = {"gloo": ["10.0.0.5"], "nccl": ["10.2.0.5"]}
LOOP = {"listens": {"gloo": ["127.0.1.1"], "nccl": ["10.2.0.5"]}}
ALONE = {"interfaces": [interface("lo", "127.0.0.1/8")]}
NOWHERE = {"listens": {"gloo": ["10.0.0.5"], "nccl": []}}
LIMITS = {"shared memory": 8 * GIB, "locked memory": None, "open files": 1024}


def machine(**other):
    one = {
        "host": "n1", "rank": 0, "environ": ["PATH", "HOME"], "cores": list(range(8)),
        "cpu_limit": None, "threads": 4, "gpus": [], "installed": 0, "infiniband": [],
        "settings": {}, "limits": LIMITS, "listens": LISTENS,
        "interfaces": [interface("lo", "127.0.0.1/8"), interface("eth0", "10.0.0.5/24"),
                       interface("ib0", "10.2.0.5/24")],
        "versions": {"torch": "2.14", "NCCL": "2.30.7"},
    }  # fmt: skip
    return copy.deepcopy(one | other)


def known(library, prefix):
    return {"NCCL_SOCKET_IFNAME", "NCCL_MIN_CTAS", "TORCH_NCCL_NAN_CHECK", "TORCH_FR_CPP_STACK"}


def found_in(*here, hosts=1, names_in=known):
    one = here[0]
    return [*part.wrong_names(one, names_in), *part.wrong_values(one),
            *part.wrong_network(one, hosts > 1), *part.wrong_ports(one),
            *part.wrong_limits(one, len(here) * hosts),
            *part.wrong_machine(list(here))]  # fmt: skip


def port(name, state="ACTIVE", gbit_s=400.0, board="MT_838"):
    return {"name": name, "place": name, "state": state, "gbit_s": gbit_s, "board": board,
            "link": "InfiniBand"}  # fmt: skip


def gpu(lanes=16, pci="0000:3b:00.0"):
    return {"pci": pci, "lanes": lanes, "most_lanes": 16}


GPUS = {"gpus": [gpu(), gpu(pci="0000:5e:00.0")], "installed": 2}
FABRIC = {"infiniband": [port("mlx5_0:1"), port("mlx5_1:1")]}


@pytest.mark.parametrize(
    "right",
    [
        {}, GPUS, FABRIC, GPUS | FABRIC, {"cpu_limit": 8.0}, LOOP | ALONE,
        LOOP | is_set(GLOO_SOCKET_IFNAME="lo"), {"infiniband": [port("a:1"), port("b:1", "DOWN")]},
        {"infiniband": [port("a:1"), port("b:1", gbit_s=200.0, board="MT_834")]},
        {"infiniband": [port("a:1"), port("b:1", "DOWN")]} | is_set(NCCL_IB_HCA="^b"),
        is_set(NCCL_SOCKET_IFNAME="eth0", NCCL_DEBUG="WARN", NCCL_P2P_DISABLE="0"),
        is_set(NCCL_IB_DISABLE="1"), FABRIC | is_set(NCCL_IB_HCA="=mlx5_1:1"),
        FABRIC | is_set(NCCL_IB_HCA="mlx5"), {"threads": 8}, is_set(NCCL_MIN_CTAS="1"),
        is_set(NCCL_FASTRAK_IFNAME="eth1", OFI_NCCL_PROTOCOL="RDMA", FI_PROVIDER="efa"),
        {"limits": LIMITS | {"locked memory": 2**20}}, GPUS | is_set(CUDA_VISIBLE_DEVICES="1,0"),
        is_set(NCCL_NET_GDR_LEVEL="PHB", NCCL_IB_TIMEOUT="22", NCCL_PROTO=""),
        is_set(TORCH_NCCL_NAN_CHECK="true"), is_set(NCCL_INSPECTOR_ENABLE="1"),
        {"infiniband": [port("a:1"), port("b:1", gbit_s=200.0)]},  # two of two: which use is it?
    ],
)  # fmt: skip
def test_a_machine_without_mistakes(right):
    assert found_in(machine(**right)) == []


MISTAKES = [
    (is_set(NCCL_TIMEOUT="60"), "NCCL_TIMEOUT", "no library reads it", "init_process_group"),
    (is_set(NCCL_MAX_NCHANNELS="2"), "", "deprecated since NCCL 2.17", "use NCCL_MAX_CTAS"),
    (is_set(NCCL_SOCKET_IFNAM="lo"), "NCCL_SOCKET_IFNAM", "nobody", "NCCL_SOCKET_IFNAME?"),
    (is_set(NCCL_QWERTY="1"), "NCCL_QWERTY", "nobody", "unset it, unless it is a plugin's"),
    ({"environ": ["CUDA_VISIBLE_DEVICE"]}, "", "nobody reads it", "CUDA_VISIBLE_DEVICES?"),
    (is_set(NCCL_P2P_DISABLE="true"), "=true", "the number 0", "takes: 0, 1"),
    (is_set(NCCL_NET_GDR_LEVEL="phb"), "=phb", "NCCL ignores it", "LOC, PIX"),
    (is_set(TORCH_NCCL_NAN_CHECK="on"), "=on", "PyTorch stops", "takes: 0, 1"),
    (is_set(NCCL_P2P_DISABLE="1"), "NCCL_P2P_DISABLE=1", "through host memory", "unset"),
    (FABRIC | is_set(NCCL_IB_DISABLE="1"), "", "mlx5_0:1 is up", "unset"),
    (FABRIC | is_set(NCCL_IB_HCA="=mlx5_7"), "", "takes sockets", "mlx5_0:1, mlx5_1:1"),
    (NOWHERE | is_set(NCCL_SOCKET_IFNAME="eht0"), "eht0", "cannot start", "lo, eth0, ib0"),
    (LOOP, "this host's own name, n1, is 127.0.1.1", "gloo listens there", "/etc/hosts"),
    (
        {"infiniband": [port("a:1"), port("b:1", "DOWN", 10.0)]} | is_set(NCCL_IB_HCA="=a,b:1"),
        "b:1 is DOWN",
        "out",
        "cable",
    ),
    (
        {"infiniband": [port("a:1"), port("b:1", gbit_s=100.0)]} | is_set(NCCL_IB_HCA="a,b"),
        "100 of 400",
        "wait",
        "cable",
    ),
    (FABRIC | {"limits": LIMITS | {"locked memory": 2**20}}, "0.00 GiB", "ibv_reg_mr", "ulimit"),
    ({"cpu_limit": 2.0, "threads": 2}, "8 cores are seen, the time of 2", "threads", "ask"),
    ({"threads": 16}, "1 ranks x 16 threads on 8 cores", "wait", "OMP_NUM_THREADS=8"),
    ({"gpus": [gpu()], "installed": 2} | is_set(CUDA_VISIBLE_DEVICES="0"), "1 of 2", "idle", ""),
    ({"gpus": [gpu(lanes=8)], "installed": 1}, "8 of 16 PCIe lanes", "slower", "slot"),
    ({"limits": LIMITS | {"shared memory": 2**26}}, "/dev/shm has 0.06 GiB", "", "shm-size"),
    ({"limits": LIMITS | {"open files": 256}}, "256 open files", "Too many", "ulimit -n"),
]


@pytest.mark.parametrize(("wrong", "what", "costs", "do"), MISTAKES)
def test_each_mistake_has_its_finding(wrong, what, costs, do):
    (finding,) = found_in(machine(**wrong))
    assert what in finding.what and costs in finding.costs and do in finding.do
    assert finding.costs and finding.do and "\n" not in "".join(finding)


def test_mistakes_of_several_ranks_and_hosts():
    crowd = [machine(rank=rank, threads=1) for rank in range(9)]
    assert ["9 ranks share 8 cores" in one.what for one in found_in(*crowd)] == [True]
    pair = [machine(rank=rank, threads=8) for rank in range(2)]
    assert "set OMP_NUM_THREADS=4" in found_in(*pair)[0].do
    few = [machine(rank=rank, gpus=[gpu()], installed=1) for rank in range(2)]
    assert "2 ranks but 1 GPUs" in found_in(*few)[0].what
    for one in few:
        one["settings"]["NCCL_MULTI_RANK_GPU_ENABLE"] = ["1", "environment"]
    assert found_in(*few) == []
    own = [
        machine(rank=rank, gpus=[gpu(pci=f"0000:{rank:02x}:00.0")], installed=2,
                **is_set(CUDA_VISIBLE_DEVICES=f"{rank}"))
        for rank in range(2)
    ]  # fmt: skip  # as srun binds them
    assert found_in(*own) == [] and list(script.differences(own)) == []
    (finding,) = found_in(machine(**LOOP), hosts=2)
    assert "gloo listens at 127.0.1.1" in finding.what and "no other host" in finding.costs
    assert "1024 open files for 128 ranks" in found_in(machine(), hosts=128)[0].what


def test_settings_of_ranks_that_differ():
    assert list(script.differences([machine(), machine(rank=1, host="n2")])) == []
    two = machine(rank=1, host="n2", **is_set(NCCL_ALGO="Ring"))
    assert [one.what for one in script.differences([machine(), two])] == [
        "NCCL_ALGO: rank 0 on n1 has unset, rank 1 on n2 has Ring"
    ]
    same_host = [machine(), machine(rank=1, **is_set(NCCL_PROTO="LL"))]
    assert [one.kind for one in script.differences(same_host)] == ["differs"]


# Nodes compared: each is a folder with the files of a DGX H100, one of which is broken


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """Return a function that makes a node's facts, of a healthy folder or of one to break."""
    healthy = plant_dgx(tmp_path_factory.mktemp("dgx"))

    def node(number, break_it=None, **settings):
        root = plant_dgx(tmp_path_factory.mktemp("dgx")) if break_it else healthy
        late = break_it(root) if break_it else None  # a function of what no file says
        one = facts_of_dgx(root, number) | is_set(**settings)
        if late:
            late(one)
        return one

    return node


def examined(ranks):
    return script.examine(script.by_host(ranks), ranks)


@pytest.mark.parametrize("settings", [{}, {"NCCL_IB_HCA": GOOD_HCA}, {"NCCL_IB_HCA": "mlx5"}])
@pytest.mark.parametrize("number", [1, 2, 5])
def test_healthy_dgx_h100_are_quiet(fleet, number, settings):
    """Ports without a cable, slower ports for storage, links with networks of their own."""
    assert examined([fleet(n, **settings) for n in range(number)]) == []


def writes(**files):
    """Return what writes these files, of which one name may stand for many."""

    def write(root):
        for pattern, content in files.items():
            found = [*root.glob(FILES[pattern])]
            assert found
            for path in found:
                path.write_text(f"{content}\n")

    return write


ADAPTER = "sys/class/infiniband/mlx5_"
FILES = {
    "driver": "proc/driver/nvidia/version", "ofed": "sys/module/mlx5_core/version",
    "firmware": f"{ADAPTER}6/fw_ver", "all_firmware": f"{ADAPTER}*/fw_ver",
    "state": f"{ADAPTER}5/ports/1/state", "rate": f"{ADAPTER}5/ports/1/rate",
    "all_rates": f"{ADAPTER}*/ports/1/rate", "mtu": "sys/class/net/ibp79s0/mtu",
    "board_mtu": "sys/class/net/eno3/mtu", "second": "sys/class/net/ens6f0/operstate",
    "bond": f"{ADAPTER}2/ports/1/state", "first": "sys/class/net/eno3/operstate",
}  # fmt: skip


def lose(folder):
    return lambda root: shutil.rmtree(root / folder)


def lose_adapter(root):
    """The adapters after it have other names."""
    adapters = root / "sys/class/infiniband"
    shutil.rmtree(adapters / "mlx5_5")
    for number in range(6, 12):
        (adapters / f"mlx5_{number}").rename(adapters / f"mlx5_{number - 1}")


def has(key, **values):
    """Return what changes facts that are no file's."""

    def late(one):
        one[key] = one[key] | values

    return lambda root: late


FAULTS = [
    (writes(driver="Kernel Module  550.1"), "NVIDIA's driver is 550.1, others have 570.86.15",
     "install the version"),
    (writes(firmware="28.36.1010"), "firmware of the adapters MT_0000000838 is 28.36.1010 (mlx5_6) "
     "and 28.39.1002 (", "mlxfwmanager"),
    (writes(mtu=2044), "MTU of ibp79s0 is 2044, others have 4092", "ip link set"),
    (writes(first="down"), "no running card in 10.1.0.0/16, where 4 nodes have one: eno3 is down",
     "ip -br link"),
    (writes(state="1: DOWN"), "active RDMA ports: 9, others have 10: mlx5_5:1 is DOWN", "ibstat"),
    (lose_adapter, "RDMA ports: 9, others have 10: no adapter at 0000:5e:00.0 port 1", "lspci"),
    (writes(rate="200 Gb/sec (4X HDR)"), "mlx5_5:1 has 200 of 400 Gbit/s", "cable"),
    (lose("proc/driver/nvidia/gpus/0000:9d:00.0"), "GPUs: 7, others have 8", "power-cycle"),
    (has("listens", gloo=["127.0.1.1"]), "gloo listens at 127.0.1.1", "/etc/hosts"),
    (has("limits", **{"shared memory left": 0}), "/dev/shm has 0.00 of 1000.00 GiB left", "ls -l"),
    (has("versions", torch="2.13"), "torch is 2.13, others have 2.14", "one image"),
]  # fmt: skip


@pytest.mark.parametrize(("break_it", "what", "do"), FAULTS)
def test_each_fault_of_a_node_is_named(fleet, break_it, what, do):
    ranks = [fleet(n, break_it if n == 3 else None) for n in range(5)]
    for settings in ({}, {"NCCL_IB_HCA": GOOD_HCA}):
        ranks = [one | is_set(**settings) for one in ranks]
        found = examined(ranks)
        assert {where for where, _ in found} == {"on host dgx3"}
        told = [one for _, one in found if what in one.what]
        assert len(told) == 1 and do in told[0].do and told[0].costs, found
        # Both models of adapter; of a port that NCCL_IB_HCA names it is said that it is down, too.
        is_named = settings and re.search("ports: 9, .*(mlx5_5|no adapter)", what)
        several = "MT_0000000834" in what or is_named
        assert len(found) == 1 + bool(several), found


def test_of_two_nodes_that_differ_both_are_named(fleet):
    (found,) = examined([fleet(0), fleet(1, writes(driver="550.1"))])
    assert found[0] == "on host dgx0 or dgx1" and "dgx1 has 550.1" in found[1].what


# variables.toml against the libraries that are installed


def libraries_of(library):
    """Return the files of a library that comes with PyTorch."""
    folder = Path(torch.__file__).parent
    names = {"NCCL": ["../nvidia/nccl/lib/libnccl.so*"], "gloo": ["lib/libtorch_cpu.so"],
             "PyTorch": ["lib/libtorch_cuda.so", "lib/libtorch_cpu.so", "lib/libc10.so"],
             "OpenMP": ["lib/libgomp*", "lib/libomp*"]}.get(library, [])  # fmt: skip
    return [path for name in names for path in folder.glob(name)]


@pytest.mark.parametrize("library", ["NCCL", "gloo", "PyTorch", "OpenMP"])
def test_every_variable_is_one_that_its_library_reads(library):
    version = script.version_of(host.nccl_version() or "0")
    names = {row["name"] for row in part.TABLE["variable"] if row["library"] == library
             and not (library == "NCCL" and script.version_of(row["since"]) > version)
             and not (NO_NCCL and re.match("(TORCH_)?NCCL_|TORCH_FR_", row["name"]))}  # fmt: skip
    # C++ names its own variables like that, with more letters after them: mangled names.
    whole = {name: re.compile(rb"(?<![A-Z0-9_])%b(?![A-Z0-9_])" % name.encode()) for name in names}
    for file in libraries_of(library):
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as data:
            for name in list(whole):
                start = data.find(name.encode())
                while start >= 0 and not whole[name].match(data, start):
                    start = data.find(name.encode(), start + 1)
                if start >= 0:
                    del whole[name]
    assert not whole, f"in no file of {library}: {sorted(whole)}"


@needs_nccl
def test_nccls_words_on_the_pages_are_nccls():
    """Each page, and the starts of messages that it quotes."""
    pages = {
        "04-nccl-operations/hardware.md": [
            "Bootstrap: Using", "NET/IB : Using", "NET/Socket : Using", "Using network", "via NET/",
            "via SHM/", "via P2P/IPC", "NCCL_TOPO_FILE set by environment to", "GDRDMA",
        ],
        "cluster/doctor.md": ["Call to ibv_reg_mr failed", "failed to extend"],
    }  # fmt: skip
    words = [(word, page) for page, told in pages.items() for word in told]
    (library,) = libraries_of("NCCL")
    with library.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as data:
        for word, page in words:
            assert word in (REPO / page).read_text(), f"{page}: {word}"
            assert data.find(word.encode()) >= 0, f"NCCL does not say {word}"


def test_every_finding_is_told_by_a_rule():
    rules = "".join(Path(module.__file__).read_text() for module in (part, script))
    told = set(re.findall(r'finding\(\s*"([\w-]+)"', rules))
    comparisons = Path(compare.__file__).read_text()
    keys = r'(?:(?:differing|lacking)\(\s*|key=|"[a-z ]+", )"([a-z]+-[\w-]+)"'
    assert told | set(re.findall(keys, comparisons)) == set(part.FINDINGS)


def test_the_table_is_whole():
    names = [row["name"] for row in part.TABLE["variable"]]
    assert len(names) == len(set(names)) > 60 and not set(names) & set(part.STALE)
    for row in part.TABLE["variable"]:
        assert all(row[key] for key in ("library", "since", "default", "values", "does", "when"))
        assert row["source"] in part.TABLE["sources"]
        re.compile(row.get("pattern", ""))
    missing = """CUMEM_ENABLE MNNVL_ENABLE PXN_DISABLE DMABUF_ENABLE IB_SPLIT_DATA_ON_QPS
        IB_FIFO_TC IB_ADAPTIVE_ROUTING IB_MERGE_NICS IB_ROCE_VERSION_NUM COLLNET_ENABLE TUNER_PLUGIN
        NCHANNELS_PER_NET_PEER GRAPH_DUMP_FILE RAS_ENABLE RAS_ADDR"""
    assert {f"NCCL_{name}" for name in missing.split()} <= set(names)
    assert all(row["name"] in names + ["CUDA_LAUNCH_BLOCKING"] for row in part.TABLE["left_over"])


def test_the_variables_are_listed(run_script):
    ended = run_script(DOCTOR, "--list", world_size=2)
    assert ended.codes == [0, 0] and ended.stderr == ""
    listed = re.findall(r"^\| `(\w+)`", ended.stdout, re.M)
    assert listed == [row["name"] for row in part.TABLE["variable"]]


# The script


def test_ranks_without_mistakes(run_script, tmp_path):
    ended = run_script(DOCTOR, "--output-dir", tmp_path / "run", world_size=2)
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    results = results_of(tmp_path / "run")
    names = [check["name"] for check in results["checks"]]
    assert names[-1] == "ranks with a wrong LOCAL_WORLD_SIZE"
    assert [one["rank"] for one in results["metrics"]["ranks"]] == [0, 1]
    assert "\nhost " in ended.stdout and ": ranks 0 1\n" in ended.stdout


@needs_nccl
def test_what_is_wrong_is_found_and_told(run_script, tmp_path):
    environ = launched(NCCL_SOCKET_IFNAM="lo", NCCL_MIN_CTAS="1", NCCL_P2P_DISABLE="true")
    environ |= {"NCCL_SOCKET_IFNAME": "nope", "TORCH_NCCL_NANCHECK": "1"}
    environ |= {"GLOO_SOCKET_IFNAME": "lo"}  # this host's name may be 127.0.1.1
    ended = run_script(DOCTOR, "--strict", "--output-dir", tmp_path / "run", environ=environ)
    assert ended.codes == [1] and ended.stdout.splitlines()[-1] == "FAILED: findings"
    found = results_of(tmp_path / "run")["metrics"]["findings"]
    told = [(one["kind"], re.findall("[A-Z_0-9]{5,}", one["what"])[0]) for one in found]
    machine = {"limit", "cores"}  # findings about the machine that runs the tests
    assert [one for one in told if one[0] not in machine] == [
        ("misspelt", "NCCL_SOCKET_IFNAM"),
        ("misspelt", "TORCH_NCCL_NANCHECK"),
        ("value", "NCCL_P2P_DISABLE"),
        ("network", "NCCL_SOCKET_IFNAME"),
    ]
    assert "   costs: NCCL cannot start\n   do:    name one of " in ended.stdout
    assert re.search(r"^NCCL_MIN_CTAS=1 +environment +not in variables.toml$", ended.stdout, re.M)


ABSENT = "no word from ranks .1. within 10 s"


def set_in_environ(**values):
    return lambda _: os.environ.update(values)


@pytest.mark.parametrize(
    ("misconfigure", "kind", "what", "code", "says"),
    first_is_quick([
        (set_in_environ(GLOO_SOCKET_IFNAME="nope"), "cannot start", "rank 1: .*nope has no add", 1,
         ""),
        (set_in_environ(MASTER_PORT="9"), "missing", ABSENT, 1, "port 9 does not answer here"),
    ]),
)  # fmt: skip
def test_one_host_that_is_misconfigured_does_not_keep_the_doctor_from_its_result(
    run_script, tmp_path, misconfigure, kind, what, code, says
):
    """The others report what they can, and name the one that cannot."""
    wait_s = 10 if kind == "missing" else 30

    def before(script):
        if os.environ["RANK"] == "1":
            misconfigure(script)

    ended = run_script(
        DOCTOR, "--timeout", wait_s, "--output-dir", tmp_path / "run", world_size=3, before=before,
        end_job_on_failure=bool(says),
    )  # fmt: skip  # where rank 1 has something to say, a launcher ends all at the first failure
    codes = {ended.codes[0], ended.codes[2]}
    assert code in codes and codes <= {code, -signal.SIGTERM}, ended
    found = results_of(tmp_path / "run")["metrics"]["findings"]
    assert any(one["kind"] == kind and re.search(what, one["what"]) for one in found), found
    if says:
        assert re.search(f"rank 1 on host .*{says}", ended.stderr), ended.stderr


def a_wrong_version(script):
    row = next(row for row in part.TABLE["variable"] if row["name"] == "NCCL_MAX_CTAS")
    row["since"] = "99.0"


@needs_nccl
def test_a_wrong_version_in_the_table_turns_its_check_red(run_script):
    ended = run_script(DOCTOR, before=a_wrong_version)
    assert ended.codes == [1]
    assert "variables.toml and the library differ in NCCL_MAX_CTAS\n" in ended.stdout
    assert ended.stdout.endswith("FAILED: variables of NCCL that the library has otherwise\n")


def test_a_launcher_that_miscounts_is_found(run_script):
    ended = run_script(DOCTOR, environ=launched(LOCAL_WORLD_SIZE="2"))
    assert ended.codes == [1] and "FAILED: ranks with a wrong LOCAL_WORLD_SIZE" in ended.stdout
    assert " has LOCAL_WORLD_SIZE=2, ranks there: 1\n" in ended.stdout


@pytest.mark.parametrize(
    ("argv", "environ", "says"),
    first_is_quick([
        ((), {"GLOO_SOCKET_IFNAME": "nope"}, "GLOO_SOCKET_IFNAME: nope has no address"),
        ((), {"MASTER_ADDR": "no.such.invalid"}, "=no.such.invalid does not resolve here"),
    ]),
)  # fmt: skip
def test_bad_input_is_one_line(run_script, argv, environ, says):
    ended = run_script(DOCTOR, *argv, environ=launched(**environ))
    assert_one_line(ended, says, "doctor.py")


def test_a_master_that_is_each_machine_itself_is_refused(monkeypatch):
    """As where every machine has the line `127.0.1.1 n0` in /etc/hosts."""
    addresses = ["127.0.1.1"]
    monkeypatch.setattr(host, "addresses_of", lambda name: addresses)
    second = runtime.World(rank=8, local_rank=0, world_size=16, local_world_size=8, launcher="srun")
    with pytest.raises(cli.UsageError, match="n0 is 127.0.1.1, this machine itself, but rank 0"):
        script.refuse_what_cannot_start(second, "n0")
    first = dataclasses.replace(second, rank=7)
    script.refuse_what_cannot_start(first, "n0")
    addresses.append("10.0.0.5")
    script.refuse_what_cannot_start(second, "n0")
