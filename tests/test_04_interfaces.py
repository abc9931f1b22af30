"""Module 04, interfaces.py: gloo's and NCCL's choice, predicted and held against the kernel."""

import ctypes
import mmap
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from conftest import assert_one_line, fork_ranks, load_script, results_of
from helpers_04 import first_is_quick, full, launched

SCRIPT = "04-nccl-operations/interfaces.py"
script = load_script(SCRIPT)
needs_nccl = pytest.mark.skipif(
    script.nccl_version() is None, reason="this PyTorch comes without NCCL"
)


# The rules, on machines that are made up


def interface(name, *addresses, running=True):
    return script.Interface(name, running, name == "lo", 1500, list(addresses))


MACHINE = [
    interface("lo", "127.0.0.1/8", "::1/128"),
    interface("docker0", "172.17.0.1/16"),
    interface("eth0", "10.0.0.5/24", "fd00::5/64"),
    interface("eth1", "10.1.0.5/24"),
    interface("ib0", "10.2.0.5/24"),
    interface("ib1", "10.3.0.5/24", running=False),
    interface("virbr0", "192.168.122.1/24"),
]


@pytest.mark.parametrize(
    ("names", "settings", "chosen"),
    [
        ("lo docker0 eth0 eth1 ib0 virbr0", {}, ("ib0", "10.2.0.5")),
        ("lo docker0 eth0 eth1 virbr0", {}, ("eth0", "10.0.0.5")),
        ("lo docker0 ib1 virbr0", {}, ("docker0", "172.17.0.1")),
        ("lo virbr0", {}, ("lo", "127.0.0.1")),
        ("virbr0", {}, ("virbr0", "192.168.122.1")),
        ("lo eth0 eth1 ib0", {"NCCL_SOCKET_IFNAME": "eth1"}, ("eth1", "10.1.0.5")),
        ("lo eth0 eth1 ib0", {"NCCL_SOCKET_IFNAME": "eth"}, ("eth0", "10.0.0.5")),
        ("lo eth0 eth1 ib0", {"NCCL_SOCKET_IFNAME": "=eth"}, None),
        ("lo eth0 eth1 ib0", {"NCCL_SOCKET_IFNAME": "^ib,lo,eth0"}, ("eth1", "10.1.0.5")),
        ("lo eth0 eth1", {"NCCL_SOCKET_IFNAME": "^=eth0,lo"}, ("eth1", "10.1.0.5")),
        ("lo eth0 eth1", {"NCCL_SOCKET_IFNAME": "l"}, ("eth0", "10.0.0.5")),  # too short to count
        ("lo eth0 eth1", {"NCCL_SOCKET_FAMILY": "AF_INET6"}, ("eth0", "fd00::5")),
    ],
)
def test_nccls_rule(names, settings, chosen):
    interfaces = [one for one in MACHINE if one.name in names.split()]
    choice = script.nccl_choice(interfaces, settings)
    assert choice.why
    assert ((choice.interface, *choice.addresses) if chosen else None) == chosen
    assert chosen or (choice.interface, choice.addresses) == (None, [])


def test_gloos_rule(monkeypatch):
    choice = script.gloo_choice(MACHINE, {"GLOO_SOCKET_IFNAME": "eth1,eth0"}, "host")
    assert choice.interface == "eth1,eth0" and choice.addresses == ["10.0.0.5", "10.1.0.5"]
    for address, name in (("10.0.0.5", "eth0"), ("127.0.1.1", "lo"), (None, "lo")):
        monkeypatch.setattr(script, "resolve_here", lambda _, address=address: address)
        choice = script.gloo_choice(MACHINE, {}, "host")
        assert (choice.interface, choice.addresses) == (name, [address or "127.0.0.1"])


def test_an_address_of_another_machine_is_passed_over():
    assert script.resolve_here("127.0.0.1") == "127.0.0.1"
    assert script.resolve_here("192.0.2.77") is None
    assert script.resolve_here("no.such.invalid") is None


def test_interfaces_come_in_the_kernels_order_with_ipv4_first(monkeypatch):
    def address(family, text, netmask):
        return SimpleNamespace(family=family, address=text, netmask=netmask)

    link = address(psutil.AF_LINK, "02:fc:00:00:00:01", None)
    wide = "ffff:ffff:ffff:ffff::"
    eth1 = [address(socket.AF_INET, "10.0.0.5", "255.255.255.0"),
            address(socket.AF_INET6, "fd00::2", wide),
            address(socket.AF_INET6, "fe80::1%eth1", wide), link]  # fmt: skip
    lo = [address(socket.AF_INET, "127.0.0.1", "255.0.0.0")]
    index = {"lo": 1, "eth1": 2, "eth1:1": 2, "down0": 3, "bare0": 4}
    state = SimpleNamespace(isup=True, mtu=9000, flags="up,running")
    stats = dict.fromkeys(index, state) | {
        "lo": SimpleNamespace(isup=True, mtu=65536, flags="up,loopback,running"),
        "down0": SimpleNamespace(isup=False, mtu=1500, flags=""),
    }
    found = {"down0": [address(socket.AF_INET, "10.9.0.1", None)], "eth1": eth1, "lo": lo,
             "bare0": [link]}  # fmt: skip
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)
    monkeypatch.setattr(socket, "if_nametoindex", index.get)
    assert script.read_interfaces() == [
        script.Interface("lo", True, True, 65536, ["127.0.0.1/8"]),
        script.Interface("eth1", True, False, 9000, ["10.0.0.5/24", "fd00::2/64", "fe80::1/64"]),
        script.Interface("down0", False, False, 1500, ["10.9.0.1/32"]),
    ]


def test_interfaces_and_listening_are_those_of_this_machine():
    (lo,) = [one for one in script.read_interfaces() if one.loopback]
    assert "127.0.0.1/8" in lo.addresses and lo.running
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        assert script.listens_at(server.listen) == ["127.0.0.1"]


# NCCL itself


@needs_nccl
def test_the_installed_nccl_has_the_lists_of_the_rules():
    """The order is that of socket.cc; a library's strings tell which lists there are."""
    folder = Path(torch.__file__).parents[1] / "nvidia/nccl/lib"
    (library,) = folder.glob("libnccl.so*")
    with library.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as data:
        for rule in ("^docker,lo,virbr", "docker"):
            assert data.find(b"\0" + rule.encode() + b"\0") >= 0, rule
    assert list(script.NCCL_RULES) == ["ib", "^docker,lo,virbr", "docker", "lo", "virbr"]


NEW_USER, NEW_NETWORK = 0x10000000, 0x40000000  # flags of unshare(2)


def enter_a_network_of_its_own():
    """Leave this machine's interfaces behind; say whether the kernel allows that."""
    own = os.getuid(), os.getgid()
    if ctypes.CDLL(None).unshare(NEW_USER | NEW_NETWORK) != 0:
        return False
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {own[0]} 1")
    Path("/proc/self/gid_map").write_text(f"0 {own[1]} 1")
    return True


def add_interfaces(names):
    """Make interfaces, each with a cable to a peer; lo alone is there already, but down."""
    for number, name in enumerate(names):
        steps = [f"link add {name} type veth peer name p{number}",
                 f"link set p{number} addrgenmode none", f"link set p{number} up",
                 f"addr add 10.{number}.0.5/24 dev {name}"]  # fmt: skip
        steps = ([] if name == "lo" else steps) + [f"link set {name} up"]
        for step in steps:
            subprocess.run(["ip", *step.split()], check=True, capture_output=True)
    deadline = time.monotonic() + 10
    while sum(one.running for one in script.read_interfaces()) < len(names):
        assert time.monotonic() < deadline, script.read_interfaces()
        time.sleep(0.05)


@needs_nccl
def test_nccl_chooses_so_on_machines_that_are_made_for_it(tmp_path):
    """Each rank is a machine with interfaces of its own: the kernel's, so NCCL is asked itself."""
    machines = {
        "virbr0": "virbr0", "virbr0 lo": "lo", "virbr0 lo docker0": "docker0",
        "virbr0 lo docker0 eth0": "eth0", "virbr0 lo docker0 eth0 ib0": "ib0", "eth1 eth0": "eth1",
    }  # fmt: skip
    if not shutil.which("ip"):
        pytest.skip("there is no command ip")

    def body(rank):
        names = list(machines)[rank].split()
        if not enter_a_network_of_its_own():
            return "forbidden"
        add_interfaces(names)
        choice = script.nccl_choice(script.read_interfaces(), {})
        return choice.interface, choice.addresses, script.listens_at(torch.cuda.nccl.unique_id)

    ended = fork_ranks(body, len(machines), tmp_path, 100, end_job_on_failure=False)
    if "forbidden" in ended.returned:
        pytest.skip("no network namespaces for this user")
    assert not any(ended.codes), ended.stderr
    assert [name for name, _, _ in ended.returned] == list(machines.values())
    assert all(predicted == found != [] for _, predicted, found in ended.returned), ended.returned


# The script


@pytest.mark.parametrize("world_size", [2, pytest.param(1, marks=full)])
def test_what_is_predicted_is_what_listens(run_script, tmp_path, world_size):
    ended = run_script(SCRIPT, "--output-dir", tmp_path / "run", world_size=world_size)
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    results = results_of(tmp_path / "run")
    assert results["checks"][0]["name"] == "gloo: ranks that listen elsewhere than predicted"
    ranks = results["metrics"]["ranks"]
    assert [one["rank"] for one in ranks] == list(range(world_size))
    for one in ranks:
        assert one["found"]["gloo"] == one["chosen"]["gloo"]["addresses"] != []
    assert results["metrics"]["hosts"] == 1


@pytest.mark.parametrize("named", ["other", pytest.param("lo", marks=full)])
def test_named_interfaces_are_used(run_script, tmp_path, named):
    there = [one.name for one in script.read_interfaces() if one.running]
    name = named if named == "lo" else next((name for name in there if name != "lo"), None)
    if name is None:
        pytest.skip("this machine has no interface but lo")
    ended = run_script(
        SCRIPT, "--output-dir", tmp_path / "run",
        environ=launched(GLOO_SOCKET_IFNAME=name, NCCL_SOCKET_IFNAME=f"={name}"),
    )  # fmt: skip
    assert ended.codes == [0], ended.stdout + ended.stderr
    (one,) = results_of(tmp_path / "run")["metrics"]["ranks"]
    for library, found in one["found"].items():
        assert one["chosen"][library]["interface"] == name
        assert found == one["chosen"][library]["addresses"] != []


@full
def test_each_host_has_its_table(run_script):
    def on_a_host_each(script):
        rank = os.environ["RANK"]
        script.socket.gethostname = lambda: f"n{rank}"

    ended = run_script(SCRIPT, world_size=2, before=on_a_host_each)
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    assert "\nrank 0 on host n0\n" in ended.stdout and "\nrank 1 on host n1\n" in ended.stdout


def test_an_interface_that_nccl_has_not_is_shown(run_script):
    ended = run_script(SCRIPT, environ=launched(NCCL_SOCKET_IFNAME="nope"))
    assert ended.codes == [0] and "no running interface matches nope" in ended.stdout


@pytest.mark.parametrize("library", ["gloo", pytest.param("nccl", marks=needs_nccl)])
def test_a_wrong_rule_turns_its_check_red(run_script, library):
    def sabotage(script):
        wrong = script.Choice("eth9", ["192.0.2.99"], "sabotage")
        setattr(script, f"{library}_choice", lambda *_: wrong)

    ended = run_script(SCRIPT, before=sabotage)
    failed = f"FAILED: {library}: ranks that listen elsewhere than predicted"
    assert ended.codes == [1] and ended.stdout.splitlines()[-1] == failed


@pytest.mark.parametrize(
    ("argv", "environ", "says"),
    first_is_quick([
        ((), {"GLOO_SOCKET_IFNAME": "nope"}, "GLOO_SOCKET_IFNAME: nope has no address"),
        (("--nope",), {}, "unrecognized arguments: --nope"),
    ]),
)  # fmt: skip
def test_bad_input_is_one_line(run_script, argv, environ, says):
    ended = run_script(SCRIPT, *argv, environ=launched(**environ))
    assert_one_line(ended, says, "interfaces.py")
