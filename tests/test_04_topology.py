"""Module 04: topology.py reads a machine, foresees which interface is used, finds mistakes.

`python tests/test_04_topology.py` prints the table of variables for the page.
"""

import copy
import mmap
import os
import re
from pathlib import Path

import pytest
import torch
from conftest import REPO, assert_one_line, load_script, results_of

TOPOLOGY = "04-nccl-operations/topology.py"
PAGE = REPO / "04-nccl-operations/nccl_debugging.md"
script = load_script(TOPOLOGY)
GIB = 2**30


# Reading a machine: trees of files as Linux would show them.


def plant(root, files):
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f"{content}\n")
    return root


def test_two_sockets_with_numa_nodes(tmp_path):
    cores = {f"sys/devices/system/cpu/cpu{core}/topology/physical_package_id": core // 4
             for core in range(8)}  # fmt: skip
    nodes = {f"sys/devices/system/node/node{node}/{file}": content
             for node, own in enumerate(("0-1,2,3", "4-7"))
             for file, content in (("cpulist", own),
                                   ("meminfo", f"Node {node} MemTotal: {2**22} kB"))}  # fmt: skip
    found = script.read_cores(plant(tmp_path, cores | nodes))
    assert found == {"online": 8, "sockets": 2, "numa": {"0": (4, 4.0), "1": (4, 4.0)}}


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
    assert script.read_cpu_limit(plant(tmp_path, files)) == limit


def test_nics_with_their_kinds_speeds_and_addresses(tmp_path, monkeypatch):
    def nic(name, index, **files):
        given = {"ifindex": index, "mtu": 1500, "flags": "0x1003", "operstate": "up", "type": 1}
        return {f"sys/class/net/{name}/{file}": value for file, value in (given | files).items()}

    tree = nic("lo", 1, flags="0x9", operstate="unknown", type=772, mtu=65536)
    tree |= nic("docker0", 5, operstate="down", speed=-1)
    tree |= nic("ib0", 3, type=32, speed=400000, mtu=4092) | nic("eth0", 2, speed=100000)
    tree |= {"sys/class/net/eth0/device/numa_node": 1, "sys/class/net/ib0/device/numa_node": -1}
    tree |= {"sys/class/net/bonding_masters": "", "proc/net/if_inet6": "\n".join((
        "fe8000000000000000fc00fffe000001 02 40 20 80     eth0",
        "fd000000000000000000000000000002 02 40 00 82     eth0"))}  # fmt: skip
    own = {"lo": "127.0.0.1/8", "eth0": "10.0.0.5/24"}
    monkeypatch.setattr(script, "ipv4", own.get)
    found = script.read_nics(plant(tmp_path, tree))
    assert [nic["name"] for nic in found] == ["lo", "eth0", "ib0", "docker0"]  # as the kernel has
    assert [nic["kind"] for nic in found] == ["loopback", "card", "InfiniBand", "virtual"]
    assert [nic["running"] for nic in found] == [True, True, True, False]
    assert [nic["gbit_s"] for nic in found] == [None, 100, 400, None]
    assert [nic["numa"] for nic in found] == [None, 1, None, None]
    assert found[1]["addresses"] == ["10.0.0.5/24", "fd00::2/64", "fe80::fc:ff:fe00:1/64"]


def test_addresses_are_those_of_this_machine():
    assert script.ipv4("lo") == "127.0.0.1/8" and script.ipv4("nope") is None


def test_infiniband_ports(tmp_path):
    def port(name, **files):
        return {f"sys/class/infiniband/{name}/ports/1/{key}": files[key] for key in files}

    tree = port("mlx5_0", state="4: ACTIVE", rate="400 Gb/sec (4X NDR)", link_layer="InfiniBand")
    tree |= port("mlx5_1", state="1: DOWN", rate="10 Gb/sec (4X SDR)", link_layer="InfiniBand")
    tree |= {"sys/class/infiniband/mlx5_0/device/numa_node": 1,
             "sys/class/infiniband/mlx5_0/device/net/ib0/mtu": 4092}  # fmt: skip
    up, down = script.read_infiniband(plant(tmp_path, tree))
    assert up == {"name": "mlx5_0:1", "layer": "InfiniBand", "state": "ACTIVE", "gbit_s": 400,
                  "numa": 1, "nics": ["ib0"]}  # fmt: skip
    assert down["state"] == "DOWN" and down["nics"] == []


def test_the_pcie_link_of_a_gpu(tmp_path):
    folder = "sys/bus/pci/devices/0000:3b:00.0"
    tree = {"numa_node": 0, "current_link_speed": "16.0 GT/s PCIe", "current_link_width": 8,
            "max_link_width": 16}  # fmt: skip
    plant(tmp_path, {f"{folder}/{name}": value for name, value in tree.items()})
    assert script.read_pci("0000:3b:00.0", tmp_path) == {
        "pci": "0000:3b:00.0", "numa": 0, "link": "16.0 GT/s PCIe", "lanes": 8, "most_lanes": 16,
    }  # fmt: skip
    assert script.read_pci("0000:ff:00.0", tmp_path)["lanes"] is None


MATRIX = """\t\x1b[4mGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tPIX\tSYS\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tSYS\tPXB\t48-95\t1\t\tN/A
NIC0\tPIX\tSYS\t X \tSYS\t\t\t\t
NIC1\tSYS\tPXB\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
"""


def test_the_matrix_of_nvidia_smi():
    links = script.parse_topo(MATRIX)
    assert list(links) == ["GPU0", "GPU1", "mlx5_0", "mlx5_1"] == list(links["GPU0"])
    assert links["GPU0"] == {"GPU0": "X", "GPU1": "NV18", "mlx5_0": "PIX", "mlx5_1": "SYS"}
    assert links["mlx5_1"]["GPU1"] == "PXB"
    assert script.parse_topo("") == {}


def test_settings_of_files_yield_to_the_environment(tmp_path):
    root = plant(tmp_path, {
        "etc/nccl.conf": "NCCL_DEBUG=WARN\n# NCCL_ALGO=Ring\nNCCL_IB_HCA==mlx5_0",
        "home/me/.nccl.conf": "NCCL_DEBUG=INFO\nNCCL_BUFFSIZE=1048576",
        "other.conf": "NCCL_PROTO=Simple",
    })  # fmt: skip
    environ = {"HOME": "/home/me", "NCCL_BUFFSIZE": "2097152", "NCCL_VERSION": "2.30", "PATH": "/"}
    assert script.read_settings(environ, root) == {
        "NCCL_BUFFSIZE": ["2097152", "environment"],
        "NCCL_DEBUG": ["INFO", "/home/me/.nccl.conf"],
        "NCCL_IB_HCA": ["=mlx5_0", "/etc/nccl.conf"],
    }
    instead = script.read_settings(environ | {"NCCL_CONF_FILE": "/other.conf"}, root)
    assert instead["NCCL_PROTO"] == ["Simple", "/other.conf"]
    assert instead["NCCL_DEBUG"] == ["WARN", "/etc/nccl.conf"]


# Foreseeing the interface.


def nic(name, *addresses, running=True):
    kind = "loopback" if name == "lo" else "card"
    return {"name": name, "kind": kind, "running": running, "gbit_s": None, "mtu": 1500,
            "numa": None, "addresses": list(addresses)}  # fmt: skip


NICS = [nic("lo", "127.0.0.1/8", "::1/128"), nic("docker0", "172.17.0.1/16"),
        nic("eth0", "10.0.0.5/24", "fd00::5/64"), nic("eth1", "10.1.0.5/24"),
        nic("ib0", "10.2.0.5/24"), nic("ib1", "10.3.0.5/24", running=False)]  # fmt: skip


@pytest.mark.parametrize(
    ("names", "settings", "chosen"),
    [
        ("lo docker0 eth0 eth1 ib0", {}, ("ib0", "10.2.0.5")),
        ("lo docker0 eth0 eth1", {}, ("eth0", "10.0.0.5")),
        ("lo docker0 ib1", {}, ("docker0", "172.17.0.1")),
        ("lo", {}, ("lo", "127.0.0.1")),
        ("lo eth0 eth1 ib0", {"NCCL_SOCKET_IFNAME": "eth1"}, ("eth1", "10.1.0.5")),
        ("lo eth0 eth1 ib0", {"NCCL_SOCKET_IFNAME": "eth"}, ("eth0", "10.0.0.5")),
        ("lo eth0 eth1 ib0", {"NCCL_SOCKET_IFNAME": "=eth"}, (None, None)),
        ("lo eth0 eth1 ib0", {"NCCL_SOCKET_IFNAME": "^ib,lo,eth0"}, ("eth1", "10.1.0.5")),
        ("lo eth0 eth1", {"NCCL_SOCKET_IFNAME": "^=eth0,lo"}, ("eth1", "10.1.0.5")),
        ("lo eth0 eth1", {"NCCL_SOCKET_FAMILY": "AF_INET6"}, ("eth0", "fd00::5")),
    ],
)
def test_nccls_rule(names, settings, chosen):
    nics = [one for one in NICS if one["name"] in names.split()]
    settings = {name: [value, "environment"] for name, value in settings.items()}
    name, address, why = script.nccl_choice(nics, settings)
    assert (name, address) == chosen and why


def test_gloos_rule(monkeypatch):
    named = {"GLOO_SOCKET_IFNAME": ["eth1,eth0", "environment"]}
    assert script.gloo_choice(NICS, named, "host")[:2] == ["eth1", "10.1.0.5"]
    for address, name in (("10.0.0.5", "eth0"), ("127.0.1.1", "lo"), (None, "lo")):
        monkeypatch.setattr(script, "bind_first", lambda _, address=address: address)
        found = script.gloo_choice(NICS, {}, "host")
        assert found[:2] == [name, address or "127.0.0.1"]
    assert script.bind_first.__name__ == "<lambda>"


def test_an_address_of_another_machine_is_passed_over():
    assert script.bind_first("127.0.0.1") == "127.0.0.1"
    assert script.bind_first("192.0.2.77") is None and script.bind_first("no.such.invalid") is None


def test_addresses_as_proc_writes_them():
    assert script.address_of("0100007F") == "127.0.0.1"
    assert script.address_of("00000000000000000000000001000000") == "::1"
    assert script.address_of("000000FD000000000000000002000000") == "fd00::2"


# Mistakes: each has its warning, and a machine without mistakes has none.


def machine(**other):
    one = {
        "host": "n1", "rank": 0, "allowed": list(range(8)), "limit": None, "threads": 4,
        "gpus": [], "installed": 0, "nics": NICS[:5], "infiniband": [], "settings": {},
        "limits": {"shared memory": 8 * GIB, "locked memory": None, "open files": 1024},
        "chosen": {"gloo": ["eth0", "10.0.0.5", ""], "nccl": ["ib0", "10.2.0.5", "why"]},
        "versions": {"torch": "2.14", "NCCL": "2.30.7"},
    }  # fmt: skip
    return copy.deepcopy(one | other)


def warnings_of(*here, hosts=1):
    return [*script.wrong_settings(here[0]), *script.wrong_network(here[0], hosts > 1),
            *script.wrong_machine(here, len(here) * hosts)]  # fmt: skip


def is_set(**values):
    return {"settings": {name: [value, "environment"] for name, value in values.items()}}


def port(name, state="ACTIVE", gbit_s=400.0):
    return {"name": name, "state": state, "gbit_s": gbit_s, "layer": "InfiniBand", "numa": 0,
            "nics": []}  # fmt: skip


def gpu(lanes=16):
    return {"name": "H100", "gib": 80, "peers": 1, "pci": "0000:3b:00.0", "numa": 0,
            "link": "32.0 GT/s PCIe", "lanes": lanes, "most_lanes": 16}  # fmt: skip


GPUS = {"gpus": [gpu(), gpu() | {"pci": "0000:5e:00.0"}], "installed": 2}
FABRIC = {"infiniband": [port("mlx5_0:1"), port("mlx5_1:1")]}
LIMITS = {"shared memory": 8 * GIB, "locked memory": None, "open files": 1024}
LOOP = {"gloo": ["lo", "127.0.1.1", ""], "nccl": ["ib0", "10.2.0.5", ""]}


@pytest.mark.parametrize(
    "right",
    [
        {}, GPUS, FABRIC, GPUS | FABRIC, {"chosen": LOOP}, {"limit": 8.0},
        is_set(NCCL_SOCKET_IFNAME="eth0", NCCL_DEBUG="WARN", NCCL_P2P_DISABLE="0"),
        is_set(NCCL_IB_DISABLE="1"), FABRIC | is_set(NCCL_IB_HCA="=mlx5_1:1"),
        FABRIC | is_set(NCCL_IB_HCA="mlx5"), {"threads": 8},
        is_set(NCCL_FASTRAK_IFNAME="eth1", OFI_NCCL_PROTOCOL="RDMA", FI_PROVIDER="efa"),
        {"limits": LIMITS | {"locked memory": 2**20}}, GPUS | is_set(CUDA_VISIBLE_DEVICES="1,0"),
    ],
)  # fmt: skip
def test_a_machine_without_mistakes(right):
    assert warnings_of(machine(**right)) == []


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (is_set(NCCL_TIMEOUT="60"), "NCCL_TIMEOUT: nobody reads it"),
        (is_set(NCCL_ASYNC_ERROR_HANDLING="1"), "use TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        (is_set(NCCL_BLOCKING_WAIT="1"), "use TORCH_NCCL_BLOCKING_WAIT"),
        (is_set(NCCL_MAX_NCHANNELS="2"), "use NCCL_MAX_CTAS"),
        (is_set(NCCL_P2P_DISABLE="1"), "NCCL_P2P_DISABLE=1 is left over"),
        (is_set(NCCL_SHM_DISABLE="1"), "NCCL_SHM_DISABLE=1 is left over"),
        (is_set(NCCL_DEBUG="info"), "NCCL_DEBUG writes pages"),
        (FABRIC | is_set(NCCL_IB_DISABLE="1"), "but mlx5_0:1 is up"),
        (FABRIC | is_set(NCCL_IB_HCA="=mlx5_7"), "this host has mlx5_0:1, mlx5_1:1"),
        (is_set(NCCL_SOCKET_IFNAME="eht0")
         | {"chosen": LOOP | {"nccl": [None, None, "no running interface"]}}, "NCCL cannot start"),
        ({"infiniband": [port("mlx5_0:1"), port("mlx5_1:1", "DOWN", 10.0)]}, "mlx5_1:1 is DOWN"),
        ({"infiniband": [port("mlx5_0:1"), port("mlx5_1:1", gbit_s=100.0)]}, "100 of 400 Gbit/s"),
        (FABRIC | {"limits": LIMITS | {"locked memory": 2**20}}, "ulimit -l unlimited"),
        ({"limit": 2.0, "threads": 2}, "8 cores are seen, the time of 2 is granted"),
        ({"threads": 16}, "1 ranks x 16 threads on 8 cores: set OMP_NUM_THREADS=8"),
        ({"gpus": [gpu()], "installed": 2} | is_set(CUDA_VISIBLE_DEVICES="0"), "hides 1 of 2 GPUs"),
        ({"gpus": [gpu(lanes=8)], "installed": 1}, "8 of 16 PCIe lanes"),
        ({"limits": LIMITS | {"shared memory": 64 * 2**20}}, "/dev/shm has 0.06 GiB"),
        ({"limits": LIMITS | {"open files": 256}}, "at most 256 open files"),
    ],
)  # fmt: skip
def test_each_mistake_has_its_warning(wrong, says):
    (line,) = warnings_of(machine(**wrong))
    assert says in line and "\n" not in line


def test_mistakes_of_several_ranks_and_hosts():
    crowd = [machine(rank=rank, threads=1) for rank in range(9)]
    assert ["9 ranks share 8 cores" in line for line in warnings_of(*crowd)] == [True]
    pair = [machine(rank=rank, threads=8) for rank in range(2)]
    assert "set OMP_NUM_THREADS=4" in warnings_of(*pair)[0]
    few = [machine(rank=rank, gpus=[gpu()], installed=1) for rank in range(2)]
    assert "2 ranks but 1 GPUs" in warnings_of(*few)[0]
    own = [
        machine(rank=rank, gpus=[gpu() | {"pci": f"0000:{rank:02x}:00.0"}], installed=2,
                **is_set(CUDA_VISIBLE_DEVICES=f"{rank}"))
        for rank in range(2)
    ]  # fmt: skip  # as srun binds them
    assert warnings_of(*own) == []
    assert warnings_of(machine(chosen=LOOP), hosts=1) == []
    (line,) = warnings_of(machine(chosen=LOOP), hosts=2)
    assert "gloo meets at 127.0.1.1 (lo), which no other host reaches" in line
    assert "1024 open files for 128 ranks" in warnings_of(machine(), hosts=128)[0]


def test_hosts_that_differ():
    one, two = machine(), machine(host="n2")
    assert list(script.disagreements([[one], [two]])) == []
    two = machine(host="n2", versions={"torch": "2.13", "NCCL": "2.30.7"}, nics=[
        nic("eth0", "10.9.0.7/24"), nic("ib0", "10.2.0.7/24") | {"mtu": 4092},
    ], chosen={"gloo": ["eth0", "10.9.0.7", ""], "nccl": ["ib0", "10.2.0.7", ""]},
        **is_set(NCCL_ALGO="Ring"))  # fmt: skip
    assert sorted(script.disagreements([[one], [two]])) == [
        "MTU of nccl differs: n1 1500, n2 4092",
        "NCCL_ALGO differs: n1 unset, n2 Ring",
        "network of gloo differs: n1 10.0.0.0/24, n2 10.9.0.0/24",
        "version of torch differs: n1 2.14, n2 2.13",
    ]


def test_a_misspelt_name_is_held_against_the_library(run_script):
    """NCCL knows far more names than the table; its own binary says which."""
    environ = launched(NCCL_SOCKET_IFNAM="lo", NCCL_MIN_CTAS="1", NCCL_QWERTY="1")
    ended = run_script(TOPOLOGY, environ=environ)
    if script.nccl_version() is None:
        pytest.skip("this PyTorch comes without NCCL")
    lines = re.findall(r"^warning: .* NCCL_.*$", ended.stdout, re.M)
    assert len(lines) == 2, lines
    assert "NCCL_QWERTY is not one that NCCL knows: misspelt" in lines[0]
    assert (
        "NCCL_SOCKET_IFNAM is not one that NCCL knows: did you mean NCCL_SOCKET_IFNAME?" in lines[1]
    )


# What the page says of the libraries that are installed.


def test_nccls_words_on_the_page_are_nccls():
    section = PAGE.read_text().split("| NCCL's words |")[1].split("\n\n")[0]
    words = re.findall(r"^\| `([^`]+)` \|", section, re.M)
    folder = Path(torch.__file__).parent
    files = [*folder.glob("lib/libtorch_cuda.so"), *folder.parent.glob("nvidia/nccl/lib/libnccl.*")]
    if len(files) < 2:
        pytest.skip("this PyTorch comes without NCCL")
    missing = set(words)
    for file in files:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as data:
            missing -= {word for word in missing if data.find(word.encode()) >= 0}
    assert len(words) == 6 and not missing


# The table of variables.


def libraries_of(name):
    folder = Path(torch.__file__).parent
    if name.startswith("NCCL_"):
        return [*folder.parent.glob("nvidia/nccl/lib/libnccl.so*")]
    header = folder / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
    headers = [header] if name.startswith("TORCH_NCCL_") else []
    return headers or [*folder.glob("lib/libtorch_cpu.so"), *folder.glob("lib/libgomp*")]


@pytest.mark.parametrize("name", script.variables())
def test_every_variable_is_one_that_a_library_reads(name):
    if name == "CUDA_DEVICE_MAX_CONNECTIONS":
        pytest.skip("the driver reads it, which comes with a GPU")
    files = libraries_of(name)
    if not files:
        pytest.skip("this PyTorch comes without NCCL")
    whole = re.compile(rb"(?<![A-Z0-9_])" + name.encode() + rb"(?![A-Z0-9_])")
    for file in files:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as data:
            start = data.find(name.encode())
            while start >= 0:
                if whole.match(data, start):
                    return
                start = data.find(name.encode(), start + 1)
    pytest.fail(f"{name} is in none of {[file.name for file in files]}")


def table():
    """Return the table of the page, as Markdown."""
    lines, group = [], None
    for name, (own, *cells) in script.variables().items():
        if own != group:
            head = "| variable | default | what it does | set it |"
            lines += ["", f"**{own[0].upper()}{own[1:]}**", "", head, "|---|---|---|---|"]
        group = own
        lines.append(
            "| " + " | ".join([f"`{name}`", *(cell.replace("*", "\\*") for cell in cells)]) + " |"
        )
    return "\n".join(lines).strip() + "\n"


def test_the_table_on_the_page_is_that_of_the_script():
    assert table() in PAGE.read_text(), "run python tests/test_04_topology.py"


def test_every_variable_is_listed(run_script):
    ended = run_script(TOPOLOGY, "--variables", world_size=2)
    assert ended.codes == [0, 0] and ended.stderr == ""
    listed = re.findall(r"^  ([A-Z0-9_]+) \(", ended.stdout, re.M)
    assert listed == list(script.variables()) and len(listed) > 40
    assert not set(listed) & set(script.STALE)


# The script itself.


def launched(**extra):
    """Return the environment of a launch by hand of one rank, and more."""
    return {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"} | extra


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_foreseen_is_what_listens(run_script, tmp_path, world_size):
    ended = run_script(TOPOLOGY, "--output-dir", tmp_path / "run", world_size=world_size)
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    results = results_of(tmp_path / "run")
    checks = {check["name"] for check in results["checks"]}
    assert checks >= {
        "gloo: ranks that listen elsewhere",
        "ranks that miscount those of their host",
    }
    reports = results["metrics"]["reports"]
    assert [one["rank"] for one in reports] == list(range(world_size))
    assert all(one["found"]["gloo"] == [one["chosen"]["gloo"][1]] for one in reports)
    assert results["metrics"]["hosts"] == 1
    assert f"ranks {' '.join(map(str, range(world_size)))}\n" in ended.stdout


@pytest.mark.parametrize("named", ["lo", "other"])
def test_named_interfaces_are_used(run_script, tmp_path, named):
    there = [nic["name"] for nic in script.read_nics() if nic["running"] and nic["addresses"]]
    name = named if named == "lo" else next((name for name in there if name != "lo"), None)
    if name is None:
        pytest.skip("this machine has no interface but lo")
    ended = run_script(
        TOPOLOGY, "--output-dir", tmp_path / "run",
        environ=launched(GLOO_SOCKET_IFNAME=name, NCCL_SOCKET_IFNAME=f"={name}"),
    )  # fmt: skip
    assert ended.codes == [0], ended.stdout + ended.stderr
    (one,) = results_of(tmp_path / "run")["metrics"]["reports"]
    for library, seen in one["found"].items():
        assert one["chosen"][library][0] == name
        assert seen is None or seen == [one["chosen"][library][1]]
    assert f"GLOO_SOCKET_IFNAME={name} (environment): exact names" in ended.stdout


def test_each_host_has_its_section(run_script):
    def on_a_host_each(script):
        rank = os.environ["RANK"]
        os.environ.update(LOCAL_WORLD_SIZE="1", GLOO_SOCKET_IFNAME="lo", NCCL_ALGO=f"^{rank}")
        script.socket.gethostname = lambda: f"n{rank}"

    ended = run_script(TOPOLOGY, world_size=2, before=on_a_host_each)
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    assert re.findall(r"^host (.*)$", ended.stdout, re.M) == ["n0: ranks 0", "n1: ranks 1"]
    warned = re.findall(r"^warning: (.*)$", ended.stdout, re.M)
    assert warned[0] == "between hosts: NCCL_ALGO differs: n0 ^0, n1 ^1"
    assert sum("which no other host reaches" in line for line in warned) >= 2


def test_an_interface_that_nccl_has_not_is_warned_of(run_script):
    ended = run_script(TOPOLOGY, environ=launched(NCCL_SOCKET_IFNAME="nope"))
    assert ended.codes == [0]
    assert "NCCL cannot start: no running interface has an address: NCCL_SOCKET" in ended.stdout


def foresee_wrongly(library):
    def sabotage(script):
        setattr(script, f"{library}_choice", lambda *_: ["eth9", "192.0.2.99", "sabotage"])

    return sabotage


def count_a_core_twice(script):
    read = script.read_cores
    script.read_cores = lambda: read() | {"online": read()["online"] + 1}


@pytest.mark.parametrize(
    ("before", "failed"),
    [
        (foresee_wrongly("gloo"), "gloo: ranks that listen elsewhere"),
        (foresee_wrongly("nccl"), "nccl: ranks that listen elsewhere"),
        (count_a_core_twice, "cores of all NUMA nodes"),
    ],
)
def test_sabotage_turns_its_check_red(run_script, before, failed):
    if failed.startswith("nccl") and script.nccl_version() is None:
        pytest.skip("this PyTorch comes without NCCL")
    ended = run_script(TOPOLOGY, world_size=1, before=before)
    assert ended.codes == [1] and f"FAILED: {failed}\n" in ended.stdout


def test_a_launcher_that_miscounts_is_found(run_script):
    ended = run_script(TOPOLOGY, environ=launched(LOCAL_WORLD_SIZE="2"))
    assert ended.codes == [1] and "FAILED: ranks that miscount those of their host" in ended.stdout


@pytest.mark.parametrize(
    ("argv", "environ", "says"),
    [
        (("--varables",), {}, "unrecognized arguments: --varables"),
        ((), {"GLOO_SOCKET_IFNAME": "nope"}, "GLOO_SOCKET_IFNAME: nope has no address"),
    ],
)
def test_bad_input_is_one_line(run_script, argv, environ, says):
    ended = run_script(TOPOLOGY, *argv, environ=launched(**environ))
    assert_one_line(ended, says, "topology.py")


if __name__ == "__main__":
    print(table(), end="")
    os._exit(0)
